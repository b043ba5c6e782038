"""How far the memory forecast of a training step is from the truth, on this machine's CPU.

Every combination of network, patch, batch, precision, policy and loss is forecast (fake tensors, `medckpt.forecast`)
and then trained for one real step (forward, loss, backward, clipping, AdamW), whose peak is read from the events of
torch's allocator as its profiler reports them, plus the bytes that were there before. Results go to
results/forecast_cpu.json (.md, .png); a run that is broken off goes on where it stopped.

    python benchmarks/forecast.py [--only PATTERN] [--quick] [--output FOLDER] [--fresh]
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
# This folder, and a checkout without an installation; after what is there, so that an installed medckpt goes first.
sys.path += [folder for folder in (str(HERE), str(HERE.parent)) if folder not in sys.path]

from forecast_page import draw, markdown, summary  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, nn

Triple = tuple[int, int, int]
CLASSES = 3
CLIP_NORM = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One training step. `batch` is patches per step; `loss` is Dice + cross-entropy, or the mean of squares."""

    net: str
    patch: Triple
    batch: int
    precision: str
    policy: str | None
    loss: str

    @property
    def name(self) -> str:
        patch = "x".join(map(str, self.patch))
        return f"{self.net} {patch} b{self.batch} {self.precision} {self.policy or 'plain'} {self.loss}"


def _cube(side: int) -> Triple:
    return (side, side, side)


def _swin(features: int) -> Callable[[Triple], nn.Module]:
    from monai.networks import nets

    return lambda patch: nets.SwinUNETR(in_channels=1, out_channels=CLASSES, feature_size=features)


def build(name: str, patch: Triple) -> nn.Module:
    """Returns a network of MONAI, in training mode, by its name in `GRID`."""
    from monai.networks import nets

    builders: dict[str, Callable[[], nn.Module]] = {
        "swin_unetr-12": lambda: _swin(12)(patch),
        "swin_unetr-24": lambda: _swin(24)(patch),
        "swin_unetr-48": lambda: _swin(48)(patch),
        "unetr": lambda: nets.UNETR(in_channels=1, out_channels=CLASSES, img_size=patch, feature_size=16),
        "vit-b16": lambda: nets.ViT(in_channels=1, img_size=patch, patch_size=_cube(16)),
        "vit-b8": lambda: nets.ViT(in_channels=1, img_size=patch, patch_size=_cube(8)),
        "mae-b16": lambda: nets.MaskedAutoEncoderViT(in_channels=1, img_size=patch, patch_size=_cube(16)),
        "segresnet": lambda: nets.SegResNet(init_filters=16, out_channels=CLASSES),
        "unet": lambda: nets.UNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=CLASSES,
            channels=(16, 32, 64, 128),
            strides=(2, 2, 2),
            num_res_units=2,
        ),
        "dynunet": lambda: nets.DynUNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=CLASSES,
            kernel_size=[3] * 4,
            strides=[1, 2, 2, 2],
            upsample_kernel_size=[2] * 3,
        ),
    }
    return builders[name]().train()


ALL_FOUR = (("32", None), ("32", "all"), ("bf16-mixed", None), ("bf16-mixed", "all"))
TWO = (("32", "all"), ("bf16-mixed", None))
"""Precision and policy: all combinations, or two for those that take long."""

# SwinUNETR halves five times and normalises what is left over its voxels, so that one side must be 64 at least.
FLAT = (64, 32, 32)
DICE, SQUARES = "dice_ce", "squares"
Row = tuple[Triple, int, str, tuple[tuple[str, str | None], ...]]
GRID: dict[str, list[Row]] = {
    "swin_unetr-12": [
        (FLAT, 1, DICE, ALL_FOUR),
        (FLAT, 4, SQUARES, ALL_FOUR),
        (_cube(64), 1, DICE, ALL_FOUR),
        (_cube(96), 1, DICE, TWO),
    ],
    "swin_unetr-24": [(FLAT, 1, SQUARES, ALL_FOUR), (FLAT, 3, DICE, ALL_FOUR), (_cube(64), 1, DICE, TWO)],
    "swin_unetr-48": [(FLAT, 1, DICE, ALL_FOUR), (FLAT, 2, SQUARES, TWO), (_cube(64), 1, DICE, TWO)],
    "unetr": [
        (_cube(32), 1, SQUARES, ALL_FOUR),
        (_cube(32), 4, DICE, ALL_FOUR),
        (_cube(64), 2, DICE, ALL_FOUR),
        (_cube(96), 1, DICE, TWO),
    ],
    "vit-b16": [(_cube(32), 4, SQUARES, ALL_FOUR), (_cube(64), 2, SQUARES, TWO), (_cube(96), 1, SQUARES, ALL_FOUR)],
    "vit-b8": [(_cube(32), 2, SQUARES, ALL_FOUR), (_cube(64), 1, SQUARES, ALL_FOUR), (_cube(64), 2, SQUARES, TWO)],
    "mae-b16": [
        (_cube(32), 4, SQUARES, ALL_FOUR),
        (_cube(64), 2, SQUARES, ALL_FOUR),
        (_cube(96), 1, SQUARES, ALL_FOUR),
        (_cube(96), 4, SQUARES, ALL_FOUR),
    ],
    "segresnet": [
        (_cube(32), 4, SQUARES, ALL_FOUR),
        (_cube(64), 1, DICE, ALL_FOUR),
        (_cube(64), 3, SQUARES, TWO),
        (_cube(96), 1, DICE, TWO),
    ],
    "unet": [
        (_cube(32), 1, SQUARES, ALL_FOUR),
        (_cube(64), 4, DICE, ALL_FOUR),
        (_cube(96), 1, SQUARES, ALL_FOUR),
        (_cube(96), 2, DICE, TWO),
    ],
    "dynunet": [
        (_cube(32), 4, DICE, ALL_FOUR),
        (_cube(64), 1, DICE, ALL_FOUR),
        (_cube(64), 2, SQUARES, TWO),
        (_cube(96), 1, DICE, TWO),
    ],
}
# MONAI's masked autoencoder assigns bf16 values to float32 places under autocast and fails, without medckpt too.
FP32_ONLY = ("mae-b16",)
QUICK = (
    "unet 32x32x32 b1 32 plain squares",
    "unet 32x32x32 b1 32 all squares",
    "unet 32x32x32 b1 bf16-mixed all squares",
)


def combinations() -> list[Combination]:
    """Returns all combinations, small networks and patches before large ones within each network."""
    return [
        Combination(net=net, patch=patch, batch=batch, precision=precision, policy=policy, loss=loss)
        for net, rows in GRID.items()
        for patch, batch, loss, variants in rows
        for precision, policy in variants
        if precision == "32" or net not in FP32_ONLY
    ]


def dice_cross_entropy(label: Tensor) -> nn.Module:
    """Returns medckpt's segmentation loss as a module that holds its label (B, 1, D, H, W) and takes logits."""
    from torch import nn

    from medckpt.blocks import LossConfig
    from medckpt.training.losses import DiceCrossEntropy

    class Labelled(nn.Module):
        label: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.loss = DiceCrossEntropy(LossConfig())
            self.register_buffer("label", label)

        def forward(self, logits: Tensor) -> Tensor:
            value: Tensor = self.loss(logits, self.label)
            return value

    return Labelled()


def measure_peak(net: nn.Module, inputs: Tensor, loss: nn.Module | None, combination: Combination) -> int:
    """Returns the bytes that a real step holds at its worst; `net` is changed by it."""
    from medckpt.memory.apply import apply_recompute
    from medckpt.memory.measure import allocations
    from medckpt.memory.regions import find_regions
    from medckpt.memory.step import Step, StepRunner

    if combination.policy is not None:
        apply_recompute(net, find_regions(net, combination.policy))  # type: ignore[arg-type]
        net(inputs)  # the first forward of a region copies large constants to see which of them change
    step = Step(precision=combination.precision, clip_norm=CLIP_NORM, rules="cpu")  # type: ignore[arg-type]
    runner = StepRunner(net, inputs, loss, step)
    gc.collect()
    storages = [tensor.untyped_storage() for tensors in runner.held().values() for tensor in tensors]
    before = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return before + allocations(runner.run).peak


def run_one(combination: Combination) -> dict[str, Any]:
    """Forecasts and measures one combination; returns its row."""
    import torch

    from medckpt import forecast

    torch.manual_seed(0)
    net = build(combination.net, combination.patch)
    inputs = torch.randn(combination.batch, 1, *combination.patch)
    labels = torch.randint(0, CLASSES, (combination.batch, 1, *combination.patch))
    loss = dice_cross_entropy(labels) if combination.loss == DICE else None
    began = time.perf_counter()
    predicted = forecast(
        net,
        inputs,
        loss=loss,
        precision=combination.precision,  # type: ignore[arg-type]
        memory="cpu",
        policy=combination.policy,
        clip_norm=CLIP_NORM,
    )
    took = time.perf_counter() - began
    began = time.perf_counter()
    measured = measure_peak(net, inputs, loss, combination)
    return {
        "name": combination.name,
        **dataclasses.asdict(combination),
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured,
        "error_percent": round(100 * (predicted.peak_bytes / measured - 1), 4),
        "where": str(predicted.where),
        "workspace_bytes": predicted.parts["workspace"],
        "unmodelled": predicted.unmodelled,
        "forecast_seconds": round(took, 2),
        "measure_seconds": round(time.perf_counter() - began, 2),
    }


def machine_facts() -> dict[str, Any]:
    """Returns what a result depends on, beside the code."""
    import monai
    import torch

    from medckpt import machine, profiles

    return {
        "cpu": profiles.cpu_name(),
        "cores": machine.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "monai": monai.__version__,
    }


class Results:
    """The JSON file: written after every combination, so that nothing is measured twice."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.facts = machine_facts()
        self.rows: dict[str, dict[str, Any]] = {}
        if path.is_file() and not fresh:
            stored = json.loads(path.read_text())
            if stored["machine"] != self.facts:
                raise SystemExit(
                    f"{path}: holds results of another machine or torch ({stored['machine']}). Measure anew with "
                    "--fresh, or write elsewhere with --output."
                )
            self.rows = {row["name"]: row for row in stored["combinations"]}

    def add(self, row: dict[str, Any]) -> None:
        from medckpt.files import write_json

        self.rows[row["name"]] = row
        rows = list(self.rows.values())
        plain = {"date": date.today().isoformat(), "machine": self.facts, "summary": summary(rows)}
        write_json(self.path, {**plain, "combinations": rows})


def chosen(only: str | None, quick: bool) -> Iterator[Combination]:
    """Yields the combinations to run: those whose name contains, or matches, `only`."""
    for combination in combinations():
        if quick and combination.name not in QUICK:
            continue
        if only is None or only in combination.name or fnmatch.fnmatch(combination.name, only):
            yield combination


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="text in the name, or a pattern: 'vit-b8*all*'")
    parser.add_argument("--quick", action="store_true", help="three tiny combinations, seconds")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder")
    parser.add_argument("--fresh", action="store_true", help="forget stored results")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    todo = list(chosen(options.only, options.quick))
    if options.list or not todo:
        print("\n".join(one.name for one in todo) or f"no combination is named like '{options.only}'")
        return 0 if todo else 2

    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(options.output / "forecast_cpu.json", fresh=options.fresh)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("forecast", total=len(todo))
        for one in todo:
            progress.update(task, description=one.name)
            if one.name not in results.rows:
                row = run_one(one)
                results.add(row)
                progress.print(
                    f"{one.name}: predicted {row['predicted_bytes'] / 2**20:.1f} MiB, measured "
                    f"{row['measured_bytes'] / 2**20:.1f} MiB, {row['error_percent']:+.3f} % "
                    f"({row['forecast_seconds']} + {row['measure_seconds']} s)",
                    highlight=False,
                )
            progress.advance(task)
    order = {one.name: number for number, one in enumerate(combinations())}
    rows = sorted(results.rows.values(), key=lambda row: order.get(row["name"], len(order)))
    (options.output / "forecast_cpu.md").write_text(markdown(results.facts, rows))
    draw(rows, options.output / "forecast_cpu.png")
    total = summary(rows)
    print(
        f"{total['combinations']} combinations: median |error| {total['median_abs_error_percent']:.3f} %, worst "
        f"{total['worst_abs_error_percent']:.3f} % ({total['worst']}). {options.output / 'forecast_cpu.md'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
