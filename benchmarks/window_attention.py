"""Window attention, MONAI's own against the lean one: forward and backward of one module, per stage of a SwinUNETR.

Windows of 7x7x7, float32 or bf16 autocast, plain and shifted. Both sides run in one process with the same malloc
settings (those of a training on a CPU), turn by turn, so that a slow minute of the machine meets both. Prints medians.

    python benchmarks/window_attention.py [--rounds 7] [--sides 64 96] [--features 12 24 48] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "1000000000"}
WINDOW, SHIFT = 7, 3


def stages(side: int, features: int, patches: int) -> list[dict[str, int]]:
    """Returns windows (of all patches), tokens, channels, heads and the padded side of each of the four stages."""
    found = []
    for stage in range(4):
        voxels = side // 2 ** (stage + 1)
        width = min(WINDOW, voxels)
        padded = -(-voxels // width) * width
        windows = patches * (padded // width) ** 3
        channels, heads = features * 2**stage, 3 * 2**stage
        found.append({"windows": windows, "tokens": width**3, "channels": channels, "heads": heads, "side": padded})
    return found


def measure(stage: dict[str, int], *, shifted: bool, bf16: bool, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each round, by side and pass."""
    import torch
    from monai.networks.nets.swin_unetr import WindowAttention, compute_mask

    from medckpt.lean.window_attention import LeanWindowAttention

    torch.manual_seed(0)
    module = WindowAttention(stage["channels"], stage["heads"], (WINDOW,) * 3, qkv_bias=True)
    x = torch.randn(stage["windows"], stage["tokens"], stage["channels"]).requires_grad_()
    grad = torch.randn(x.shape)
    mask = compute_mask([stage["side"]] * 3, (WINDOW,) * 3, (SHIFT,) * 3, "cpu") if shifted else None
    times: dict[str, list[float]] = {f"{who} {what}": [] for who in ("plain", "lean") for what in ("fwd", "bwd")}
    for turn in range(rounds + 1):
        for who in ("plain", "lean"):
            module.__dict__.pop("forward", None)
            if who == "lean":
                module.__dict__["forward"] = LeanWindowAttention(module)
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                out = module(x, mask)
            middle = time.perf_counter()
            out.backward(grad.to(out.dtype))
            ended = time.perf_counter()
            if turn:
                times[f"{who} fwd"].append((middle - began) * 1e3)
                times[f"{who} bwd"].append((ended - middle) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 96], help="of a cubic patch, in voxels")
    parser.add_argument("--features", type=int, nargs="+", default=[12, 24, 48], help="feature_size of the network")
    parser.add_argument("--patches", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--json", type=Path, help="write every time there")
    arguments = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():  # they are read when a process starts
        os.execve(sys.executable, [sys.executable, "-W", "ignore", *sys.argv], os.environ | MALLOC)
    rows: list[dict[str, Any]] = []
    print(
        f"{'network':16} {'stage':5} {'windows':>7} {'plain':>17} {'lean':>17}  lean/plain   (ms, forward + backward)"
    )
    for side in arguments.sides:
        for features in arguments.features:
            for number, stage in enumerate(stages(side, features, arguments.patches), 1):
                for shifted in (False, True)[: 1 + (stage["side"] > WINDOW)]:
                    times = measure(stage, shifted=shifted, bf16=arguments.bf16, rounds=arguments.rounds)
                    row = {"side": side, "features": features, "stage": number, **stage, "shifted": shifted, **times}
                    rows.append(row)
                    medians = {name: statistics.median(values) for name, values in times.items()}
                    plain, lean = (
                        " + ".join(f"{medians[f'{who} {what}']:7.1f}" for what in ("fwd", "bwd"))
                        for who in ("plain", "lean")
                    )
                    total = [sum(v for name, v in medians.items() if name.startswith(who)) for who in ("lean", "plain")]
                    name = f"fs{features} {side}^3"
                    which = f"{number}{' s' if shifted else ''}"
                    print(f"{name:16} {which:5} {stage['windows']:7} {plain:>17} {lean:>17}  {total[0] / total[1]:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
