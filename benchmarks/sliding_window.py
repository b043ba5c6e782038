"""Prediction of a whole volume in bounded memory beside MONAI's: peak of the process and seconds, equal labels.

The network is one 1x1x1 convolution to all classes, so that nearly all that is measured is the window framework. Each
run has a process of its own (the imports of torch and MONAI count in its memory, not in its seconds), both sides have
one malloc setting, and rounds are interleaved. Seconds run from the volume to its label map; the peak is the largest
resident set of the process.

    python benchmarks/sliding_window.py [--rounds 3] [--shape 256 256 200] [--output results]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from policies import MALLOC

GIB = 2**30
SETTINGS: dict[str, dict[str, str]] = {
    "malloc as it comes": {},
    "torch's huge pages (THP_MEM_ALLOC_ENABLE=1)": {"THP_MEM_ALLOC_ENABLE": "1"},
    "freed memory kept, as in a training": MALLOC,
}
SIDES = {"ours": "medckpt, parts handed on", "monai": "MONAI's sliding_window_inference, argmax"}
WINDOW, OVERLAP, CLASSES = 96, 0.5, 100


def measure(side: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Returns seconds, peak bytes and a digest of the labels of one prediction in this process."""
    import monai.data.utils
    import monai.inferers  # noqa: F401
    import torch

    from medckpt import machine

    torch.set_num_threads(machine.cpu_count())
    torch.manual_seed(0)
    image = torch.randn(1, *shape)
    network = torch.nn.Conv3d(1, CLASSES, 1)
    imported = _peak()
    began = time.perf_counter()
    labels = _ours(network, image) if side == "ours" else _monai(network, image)
    seconds = time.perf_counter() - began
    digest = hashlib.sha256(labels.tobytes()).hexdigest()
    return {"seconds": seconds, "peak_bytes": _peak(), "start_bytes": imported, "labels": digest} | _facts(labels)


def _ours(network: Any, image: Any) -> Any:
    import torch

    from medckpt.inference.sliding_window import predict_parts, winners

    parts = predict_parts(network, image, (WINDOW,) * 3, overlap=OVERLAP, device=torch.device("cpu"))
    return winners(parts, tuple(image.shape[1:]))


def _monai(network: Any, image: Any) -> Any:
    import torch
    from monai.inferers import sliding_window_inference

    with torch.inference_mode():
        logits = sliding_window_inference(
            image[None], (WINDOW,) * 3, 1, network, OVERLAP, mode="gaussian", sigma_scale=0.125,
            cval=float(image.min()),
        )  # fmt: skip
    return logits[0].argmax(0).to(torch.uint8).numpy()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _facts(labels: Any) -> dict[str, Any]:
    import monai
    import torch

    return {
        "shape": list(labels.shape),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "monai": monai.__version__,
        "machine": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Returns medians as Markdown; the ratio of seconds is the median of paired rounds."""
    every = [run for sides in runs.values() for side in sides.values() for run in side]
    facts = every[0]
    lines = [
        f"### {'x'.join(map(str, facts['shape']))}, window {WINDOW}^3, overlap {OVERLAP}, Gaussian, {CLASSES} classes, "
        "one 1x1x1 convolution",
        "",
        "| malloc | | peak GiB | seconds | of MONAI |",
        "|---|---|---:|---:|---:|",
    ]
    for setting, sides in runs.items():
        for side, name in SIDES.items():
            peak = statistics.median(run["peak_bytes"] for run in sides[side]) / GIB
            seconds = [run["seconds"] for run in sides[side]]
            ratio = statistics.median(a / b["seconds"] for a, b in zip(seconds, sides["monai"], strict=True))
            lines.append(f"| {setting} | {name} | {peak:.2f} | {statistics.median(seconds):.1f} | {ratio:.2f} |")
    equal = len({run["labels"] for run in every}) == 1
    lines += [
        "",
        f"* labels of all runs are {'equal' if equal else 'NOT EQUAL'}",
        f"* {len(next(iter(runs.values()))['ours'])} rounds, {facts['threads']} threads, torch {facts['torch']}, MONAI "
        f"{facts['monai']}, {facts['date']}; the process holds {facts['start_bytes'] / GIB:.2f} GiB before it predicts",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", type=int, nargs=3, default=[256, 256, 200])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, tuple(arguments.shape))))
        return
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {setting: {side: [] for side in SIDES} for setting in SETTINGS}
    for _, (setting, words), side in itertools.product(range(arguments.rounds), SETTINGS.items(), SIDES):
        command = [sys.executable, "-W", "ignore", __file__, "--one", side, "--shape", *map(str, arguments.shape)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | words)
        last = json.loads(done.stdout.splitlines()[-1])
        runs[setting][side].append(last)
        text = f"  {setting}, {side}: {last['peak_bytes'] / GIB:.2f} GiB, {last['seconds']:.1f} s"
        print(text, file=sys.stderr, flush=True)
    print(table(runs))
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "sliding_window.json").write_text(json.dumps(runs, indent=1) + "\n")
    (arguments.output / "sliding_window.md").write_text(table(runs) + "\n")
    if "NOT EQUAL" in table(runs):
        sys.exit("the labels differ")


if __name__ == "__main__":
    main()
