"""What malloc settings, bf16 and the attention window do to a training step on a CPU.

Each variant runs in a process of its own, since malloc settings last for a process; rounds are interleaved, so that a
slow minute of the machine meets every variant. Prints the median of each and its ratio to the first.

    python benchmarks/cpu_step.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

VARIANTS = {
    "window 7, malloc as it is": {"window": 7, "malloc": False, "bf16": False},
    "window 7, malloc keeps": {"window": 7, "malloc": True, "bf16": False},
    "window 4, malloc as it is": {"window": 4, "malloc": False, "bf16": False},
    "window 4, malloc keeps": {"window": 4, "malloc": True, "bf16": False},
    "window 4, malloc keeps, bf16": {"window": 4, "malloc": True, "bf16": True},
}


def measure(window: int, malloc: bool, bf16: bool) -> list[float]:
    """Returns seconds of five steps (forward, Dice + cross-entropy, backward, AdamW) on two patches of 32x64x32."""
    import torch
    from monai.networks.nets import SwinUNETR

    from medckpt import machine
    from medckpt.blocks import LossConfig
    from medckpt.training.losses import DiceCrossEntropy
    from medckpt.training.precision import keep_thin_convolutions_exact

    torch.set_num_threads(machine.cpu_count())
    if malloc:
        machine.keep_freed_memory()
    torch.manual_seed(0)
    network = SwinUNETR(in_channels=1, out_channels=3, feature_size=12, window_size=window)
    if bf16:
        keep_thin_convolutions_exact(network)
    image, label = torch.randn(2, 1, 32, 64, 32), torch.randint(0, 3, (2, 1, 32, 64, 32))
    loss, optimizer = DiceCrossEntropy(LossConfig()), torch.optim.AdamW(network.parameters(), 1e-3)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = network(image)
        loss(logits, label).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(**json.loads(arguments.one))))
        return
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.rounds):
        for name, settings in VARIANTS.items():
            command = [sys.executable, "-W", "ignore", __file__, "--one", json.dumps(settings)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            times[name] += json.loads(output.splitlines()[-1])
    first = statistics.median(times["window 7, malloc as it is"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:32} {median:6.3f} s  (min {min(seconds):.3f}, max {max(seconds):.3f})  {first / median:4.2f}x")


if __name__ == "__main__":
    main()
