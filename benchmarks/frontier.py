"""What the planner makes of large steps on an A100 (80 GB), simulated: peaks and times under rising budgets.

No GPU is needed. Peaks are without optimizer states, kernels' workspaces and the device's context, which are the same
under every plan and listed apart; times are a roofline, stated against the step with SDPA attention on and nothing
recomputed (`lean_attention`), and against MONAI's plain step.

    python benchmarks/frontier.py [--nets swin96 swin128 swin128_1 vit16 vit8 unetr] [--output results]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

GIB = 2**30


def cases() -> dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...], list[float]]]:
    """Returns title, model, input shape and budgets in GiB of each net."""
    from monai.networks.nets import UNETR, SwinUNETR, ViT

    def swin() -> nn.Module:
        return SwinUNETR(in_channels=1, out_channels=14, feature_size=48)

    def vit(side: int, patch: int) -> nn.Module:
        return ViT(1, (side,) * 3, (patch,) * 3, hidden_size=1024, mlp_dim=4096, num_layers=24, num_heads=16)

    def unetr() -> nn.Module:
        model = UNETR(in_channels=1, out_channels=14, img_size=(96, 96, 96))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("cross_attn" not in name)
        return model

    return {
        "swin96": ("SwinUNETR-48, 96^3, 4 patches", swin, (4, 1, 96, 96, 96), [4.7, 4.0, 3.0, 2.1, 1.6]),
        "swin128": ("SwinUNETR-48, 128^3, 2 patches", swin, (2, 1, 128, 128, 128), [7.1, 4.8, 2.9]),
        "swin128_1": ("SwinUNETR-48, 128^3, 1 patch", swin, (1, 1, 128, 128, 128), [4.0, 2.7]),
        "vit16": ("ViT-L/16, 192^3, 4 volumes", lambda: vit(192, 16), (4, 1, 192, 192, 192), [5.4, 5.0, 4.3, 2.8]),
        "vit8": ("ViT-L/8, 96^3, 2 volumes", lambda: vit(96, 8), (2, 1, 96, 96, 96), [3.2, 2.6]),
        "unetr": ("UNETR-16, 96^3, 4 patches", unetr, (4, 1, 96, 96, 96), [2.9, 2.1, 1.5]),
    }


def measure(name: str) -> dict[str, Any]:
    """Returns the rows of one net."""
    from medckpt.blocks import LossConfig
    from medckpt.memory.fit import Planner
    from medckpt.memory.step import Step
    from medckpt.profiles import load_profile
    from medckpt.training.losses import DiceCrossEntropy

    title, build, shape, budgets = cases()[name]
    profile = load_profile("a100_80gb")
    bare = dataclasses.replace(
        profile, context_bytes=(0, 0), library_workspace_bytes=0, conv_workspace=(0.0, 0.0, 0.0), workspaces={}
    )
    segments = not name.startswith("vit")
    loss: Any = (
        DiceCrossEntropy(LossConfig()) if segments else lambda output, target: (output[0] - target).square().mean()
    )
    with torch.device("meta"):
        image = torch.empty(shape)
        label = torch.empty((shape[0], 1, *shape[2:]), dtype=torch.uint8) if segments else torch.empty(shape[0], 1, 1)
    began = time.perf_counter()
    planner = Planner(build(), image, Step(optimizer=None), bare, target_loss=loss, target=label)
    plain, sdpa = planner.plain, planner.uniform("lean_attention")
    rows = [
        {"label": "plain", "peak": plain.peak_bytes, "ms": plain.step_ms},
        {"label": "SDPA on", "peak": sdpa.predicted_peak_bytes, "ms": sdpa.predicted_step_ms},
    ]
    flagged = planner.own_flag()
    if flagged is not None:
        rows.append({"label": "use_checkpoint", "peak": flagged.peak_bytes, "ms": flagged.step_ms})
    for label in ("all", "sqrt", "selective"):
        plan = planner.baseline(label)
        rows.append({"label": label, "peak": plan.predicted_peak_bytes, "ms": plan.predicted_step_ms})
    for budget in budgets:
        started = time.perf_counter()
        try:
            plan = planner.plan(int(budget * GIB))
        except Exception as error:
            rows.append({"label": f"<= {budget} GiB", "note": str(error)})
            continue
        rows.append(
            {
                "label": f"<= {budget} GiB", "peak": plan.predicted_peak_bytes, "ms": plan.predicted_step_ms,
                "note": plan.summary(), "seconds": round(time.perf_counter() - started, 1),
            }
        )  # fmt: skip
    smallest = planner.smallest()
    rows.append(
        {"label": "smallest", "peak": smallest.predicted_peak_bytes, "ms": smallest.predicted_step_ms,
         "note": smallest.summary()}
    )  # fmt: skip
    return {"net": name, "title": title, "rows": rows, "seconds": round(time.perf_counter() - began, 1)}


def table(result: dict[str, Any]) -> str:
    """Returns one net's rows as Markdown."""
    ms = {row["label"]: row["ms"] for row in result["rows"] if "ms" in row}
    head = ["| policy | peak GiB | step ms | of SDPA on | of plain | |", "|---|---|---|---|---|---|"]
    lines = [f"### {result['title']}", "", *head]
    for row in result["rows"]:
        if "ms" not in row:
            lines.append(f"| {row['label']} | | | | | {row['note']} |")
            continue
        lines.append(
            f"| {row['label']} | {row['peak'] / GIB:.2f} | {row['ms']:.1f} | {row['ms'] / ms['SDPA on']:.3f} "
            f"| {row['ms'] / ms['plain']:.2f} | {row.get('note', '')} |"
        )
    return "\n".join([*lines, "", f"{result['seconds']} s in all, traces included."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(cases()))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    file = arguments.output / "frontier_a100_80gb.json"
    known = {r["net"]: r for r in json.loads(file.read_text())} if file.exists() else {}
    for net in arguments.nets:
        known[net] = measure(net)
        print(table(known[net]), flush=True)
        file.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    (arguments.output / "frontier_a100_80gb.md").write_text("\n\n".join(map(table, known.values())) + "\n")


if __name__ == "__main__":
    main()
