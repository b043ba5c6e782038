"""Our plans beside every baseline: measured peak and measured step time of the same nets in one run, on a CPU.

A step is forward, loss and backward. Peaks are the allocator's own events (torch.profiler) over weights and inputs;
times are medians of interleaved steps. Both sides run with the malloc settings of a training on a CPU. Each net has a
process of its own. What a peer cannot do is said, with its own words.

    python benchmarks/policies.py [--nets swin12 swin24 unetr vit mae] [--rounds 5] [--peers] [--output results]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from peers import add_peers

MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "1000000000"}
GIB = 2**30
BASELINES = ("all", "sqrt", "log", "every-2", "selective")
SHARES = tuple(step / 7 for step in range(8))
"""Budgets from the smallest plan's peak (0) to the plain step's (1): in eight steps."""

Step = Callable[[], Any]


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns the nets: each makes model, input, target, loss, precision and extra budgets in GiB."""
    import torch
    from monai.networks.nets import UNETR, MaskedAutoEncoderViT, SwinUNETR, ViT

    from medckpt.blocks import LossConfig
    from medckpt.memory.workspace import fast_bfloat16
    from medckpt.training.losses import DiceCrossEntropy
    from medckpt.training.precision import keep_thin_convolutions_exact

    def segments(model: Any, shape: tuple[int, ...], classes: int, **more: Any) -> dict[str, Any]:
        target = torch.randint(0, classes, (shape[0], 1, *shape[2:]), dtype=torch.uint8)
        loss = DiceCrossEntropy(LossConfig())
        return {"model": model, "input": torch.randn(shape), "target": target, "loss": loss, "precision": "32"} | more

    def swin12() -> dict[str, Any]:
        model = SwinUNETR(in_channels=1, out_channels=14, feature_size=12)
        return segments(model, (2, 1, 64, 64, 64), 14, budgets=[0.51, 0.34])

    def swin24() -> dict[str, Any]:
        model = SwinUNETR(in_channels=1, out_channels=14, feature_size=24)
        if not fast_bfloat16():  # a step would take minutes
            return segments(model, (2, 1, 64, 96, 64), 14)
        keep_thin_convolutions_exact(model)
        return segments(model, (2, 1, 64, 96, 64), 14, precision="bf16-mixed")

    def unetr() -> dict[str, Any]:
        model = UNETR(in_channels=1, out_channels=14, img_size=(96, 96, 96))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("cross_attn" not in name)
        return segments(model, (2, 1, 96, 96, 96), 14)

    def first(output: Any, target: Any) -> Any:
        return (output[0] - target).square().mean()

    def vit() -> dict[str, Any]:
        model = ViT(in_channels=1, img_size=(64, 64, 64), patch_size=(8, 8, 8), hidden_size=768, mlp_dim=3072)
        image = torch.randn(2, 1, 64, 64, 64)
        return {"model": model, "input": image, "target": torch.randn(2, 512, 768), "loss": first, "precision": "32"}

    def mae() -> dict[str, Any]:
        model = MaskedAutoEncoderViT(in_channels=1, img_size=(96, 96, 96), patch_size=(16, 16, 16))
        image = torch.randn(32, 1, 96, 96, 96)  # below that, weights and gradients are the peak under every policy
        return {"model": model, "input": image, "target": torch.zeros(32, 1, 1), "loss": first, "precision": "32"}

    return {"swin12": swin12, "swin24": swin24, "unetr": unetr, "vit": vit, "mae": mae}


def measure(name: str, rounds: int, peers: bool) -> dict[str, Any]:
    """Returns peak and times of every entry of one net, in this process."""
    import torch

    torch.manual_seed(0)
    case = cases()[name]()
    entries, notes, budgets = _entries(case, peers)
    times: dict[str, list[float]] = {label: [] for label in entries}
    for turn in range(rounds + 1):
        for label, (_, step) in entries.items():
            seconds = _timed(step)
            if turn:
                times[label].append(seconds)
    rows = []
    for label, (net, step) in entries.items():
        rows.append({"label": label, "peak_bytes": _peak(net, case, step), "seconds": times[label]})
        print(f"  {name}: {label}", file=sys.stderr, flush=True)
    return {"net": name, "rows": rows, "notes": notes, "budgets": budgets, "facts": _facts(case)}


def _entries(
    case: dict[str, Any], peers: bool
) -> tuple[dict[str, tuple[Any, Step]], dict[str, str], list[dict[str, Any]]]:
    """Returns label -> (network, step), why others are missing, and which of ours answers each budget."""
    from medckpt.errors import MedckptError
    from medckpt.memory.baselines import baseline, with_own_flag
    from medckpt.memory.options import lay_on

    model = case["model"]
    found: dict[str, tuple[Any, Step]] = {"plain": _entry(case, copy.deepcopy(model))}
    notes: dict[str, str] = {}
    flagged = with_own_flag(copy.deepcopy(model))
    if flagged is None:
        notes["use_checkpoint"] = "this network has no recompute of its own"
    else:
        found["use_checkpoint"] = _entry(case, flagged)
    for label in BASELINES:
        try:
            found[label] = _entry(case, lay_on(copy.deepcopy(model), baseline(model, label)))
        except MedckptError as error:
            notes[label] = str(error)
    monai = _peak(*found["use_checkpoint"][:1], case, found["use_checkpoint"][1]) if flagged is not None else None
    budgets = _add_plans(case, found, notes, monai)
    if peers:
        add_peers(case, _entry, found, notes)
    return found, notes, budgets


def _entry(case: dict[str, Any], net: Any, step: Any = None) -> tuple[Any, Step]:
    from medckpt.memory.step import autocast

    def run() -> Any:
        with autocast(case["precision"], device="cpu"):
            loss = step(case["input"], case["target"]) if step else case["loss"](net(case["input"]), case["target"])
        loss.backward()
        net.zero_grad(set_to_none=True)
        return loss.detach()

    return net, run


def _add_plans(
    case: dict[str, Any], found: dict[str, Any], notes: dict[str, str], monai: int | None
) -> list[dict[str, Any]]:
    import medckpt
    from medckpt.errors import InfeasibleBudget
    from medckpt.memory.fit import Planner
    from medckpt.memory.options import lay_on
    from medckpt.memory.step import Step as StepSettings
    from medckpt.profiles import load_profile

    began = time.perf_counter()
    planner = Planner(
        case["model"], case["input"], StepSettings(precision=case["precision"], optimizer=None, rules="cpu"),
        load_profile("cpu"), target_loss=case["loss"], target=case["target"], measure=True,
    )  # fmt: skip
    smallest, plain = planner.smallest().predicted_peak_bytes, planner.plain.peak_bytes
    budgets = {f"ours {share:.0%} of the way": smallest + int((plain - smallest) * share) for share in SHARES}
    budgets |= {f"ours {gib} GiB": int(gib * GIB) for gib in case.get("budgets", [])}
    if monai is not None:
        budgets["ours at use_checkpoint's peak"] = monai
    known: dict[str, str] = {}
    answers = []
    for label, budget in budgets.items():
        try:
            plan = planner.plan(budget)
        except InfeasibleBudget as error:
            notes[label] = str(error)
            continue
        same = known.setdefault(repr((plan.choices, plan.tail, plan.micro_batches)), label)
        answers.append({"budget_bytes": budget, "label": same})
        if same != label:
            notes[label] = f"the same plan as {same}"
            continue
        net = lay_on(copy.deepcopy(case["model"]), plan.choices)
        step = medckpt.bind(net, case["loss"], plan)
        notes[label] = f"predicted {plan.predicted_peak_bytes / GIB:.3f} GiB: {plan.summary()}"
        found[label] = _entry(case, net, step)
    notes["planning"] = f"{time.perf_counter() - began:.0f} s for all budgets, measured steps included"
    return answers


def _timed(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _peak(net: Any, case: dict[str, Any], step: Step) -> int:
    from medckpt.memory.measure import allocations, held_bytes

    held = held_bytes([*net.parameters(), *net.buffers(), case["input"], case["target"]])
    return held + allocations(step).peak


def _facts(case: dict[str, Any]) -> dict[str, Any]:
    import platform

    import torch

    return {
        "input": list(case["input"].shape),
        "precision": case["precision"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(result: dict[str, Any]) -> str:
    """Returns one net's table as Markdown: peaks and times beside plain's, rising peaks."""
    rows = result["rows"]
    plain = next(row for row in rows if row["label"] == "plain")
    base = statistics.median(plain["seconds"])
    facts = result["facts"]
    lines = [
        f"### {result['net']}: {'x'.join(map(str, facts['input']))}, {facts['precision']}",
        "",
        "| policy | peak GiB | of plain | step s | of plain | |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["peak_bytes"]):
        ratios = [mine / its for mine, its in zip(row["seconds"], plain["seconds"], strict=True)]
        note = result["notes"].get(row["label"], "")
        lines.append(
            f"| {row['label']} | {row['peak_bytes'] / GIB:.3f} | {row['peak_bytes'] / plain['peak_bytes']:.2f} "
            f"| {statistics.median(row['seconds']):.2f} | {statistics.median(ratios):.2f} | {note} |"
        )
    lines += ["", *_against_baselines(result)]
    shown = {row["label"] for row in rows}
    lines += ["", *(f"* {label}: {note}" for label, note in result["notes"].items() if label not in shown)]
    lines.append(f"* plain step: {base:.2f} s, {facts['threads']} threads, torch {facts['torch']}, {facts['date']}")
    return "\n".join(lines)


def _against_baselines(result: dict[str, Any]) -> list[str]:
    """Returns lines that compare, under each budget, the overhead of our plan with that of the best that fits."""
    rows = {row["label"]: row for row in result["rows"]}
    plain = rows["plain"]["seconds"]
    overhead = {
        label: statistics.median([mine / its for mine, its in zip(row["seconds"], plain, strict=True)]) - 1
        for label, row in rows.items()
    }
    lines = ["| budget GiB | our peak | our overhead | best other that fits | its overhead |", "|---|---|---|---|---|"]
    for answer in sorted(result.get("budgets", []), key=lambda answer: answer["budget_bytes"]):
        budget, label = answer["budget_bytes"], answer["label"]
        fitting = [
            name for name, row in rows.items() if not name.startswith("ours") and row["peak_bytes"] <= 1.001 * budget
        ]
        best = min(fitting, key=overhead.__getitem__, default=None)
        beside = "none | " if best is None else f"{best} | {overhead[best]:+.0%}"
        peak = rows[label]["peak_bytes"] / GIB
        lines.append(f"| {budget / GIB:.3f} | {peak:.3f} | {overhead[label]:+.0%} | {beside} |")
    return lines


_MARKERS = {
    "plain": "*", "use_checkpoint": "P", "all": "s", "sqrt": "D", "log": "v", "every-2": "^", "selective": "X",
}  # fmt: skip


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """Draws time against peak, one panel per net, both relative to plain."""
    from matplotlib.figure import Figure

    columns = min(3, len(results))
    figure = Figure(figsize=(4 * columns, 3.6 * -(-len(results) // columns)), layout="constrained")
    grid = figure.subplots(-(-len(results) // columns), columns, squeeze=False).ravel()
    shown: dict[str, Any] = {}
    for axes, result in zip(grid, results, strict=False):
        plain = next(row for row in result["rows"] if row["label"] == "plain")
        ours = []
        for row in result["rows"]:
            ratios = [mine / its for mine, its in zip(row["seconds"], plain["seconds"], strict=True)]
            point = (row["peak_bytes"] / plain["peak_bytes"], statistics.median(ratios))
            if row["label"].startswith("ours"):
                ours.append(point)
                continue
            marker = _MARKERS.get(row["label"], "o")
            shown[row["label"]] = axes.scatter(*point, marker=marker, s=44, color="#6b7280", label=row["label"])
        shown["ours, under eight budgets"] = axes.plot(*zip(*sorted(ours), strict=True), "o-", color="#0072B2", ms=5)[0]
        axes.set_xlim(0, 1.1)
        axes.set_title(result["net"], loc="left", fontsize=10)
        axes.set_xlabel("peak, of plain", fontsize=8)
        axes.set_ylabel("step time, of plain", fontsize=8)
        axes.grid(color="#e5e7eb")
        axes.set_axisbelow(True)
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["swin12", "swin24", "unetr", "vit", "mae"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="torch.compile takes minutes a net")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.rounds, arguments.peers)))
        return
    file = arguments.output / "policies_cpu.json"
    known = {r["net"]: r for r in json.loads(file.read_text())} if file.exists() else {}
    for net in arguments.nets:
        command = [sys.executable, "-W", "ignore", __file__, "--one", net, "--rounds", str(arguments.rounds)]
        command += ["--peers"] if arguments.peers else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | MALLOC)
        known[net] = json.loads(done.stdout.splitlines()[-1])
        print(table(known[net]), flush=True)
        arguments.output.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    (arguments.output / "policies_cpu.md").write_text("\n\n".join(map(table, known.values())) + "\n")
    picture(list(known.values()), arguments.output / "policies_cpu.png")


if __name__ == "__main__":
    main()
