"""What a person sees: progress while it runs, one screen at the end. Programs get `--json` instead."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from medckpt import machine
from medckpt.config import RunConfig
from medckpt.forecasting import milliseconds, size
from medckpt.training.schedule import share_done

if TYPE_CHECKING:
    from torch import nn

    from medckpt.datasets.layouts import Case, Dataset
    from medckpt.forecasting import Forecast
    from medckpt.memory.profile import MemoryProfile
    from medckpt.planner import StepPlan
    from medckpt.training.module import SegmentationModule
    from medckpt.training.state import Progress as RunProgress

GIB = 2**30

# Under DDP the first process speaks for all.
OUT = Console(highlight=False, soft_wrap=True, quiet=machine.rank() > 0)


def speak_on(*, stderr: bool) -> None:
    """Chooses where people are told things; standard error leaves standard output to `--json`."""
    OUT.stderr = stderr


def scaled(recipe: str, changes: dict[str, tuple[Any, Any]]) -> None:
    """Says what a recipe changed to finish in minutes without a GPU."""
    if changes:
        listed = ", ".join(
            f"{key.rpartition('.')[2]} {_short(here)} (GPU: {_short(gpu)})" for key, (gpu, here) in changes.items()
        )
        OUT.print(f"[bold]No GPU:[/] recipe {recipe} runs in its CPU size: {escape(listed)}.")


def data(dataset: Dataset, config: RunConfig, training: Sequence[Case], validation: Sequence[Case]) -> None:
    """Says which data a run uses."""
    spacing = " x ".join(f"{side:g}" for side in config.data.spacing_mm or ())
    OUT.print(
        f"[bold]Data:[/] {escape(str(dataset.root))} ({dataset.layout}), {len(training)} training and "
        f"{len(validation)} validation cases, classes {escape(', '.join(dataset.classes))}; trained at {spacing} mm."
    )


def start(folder: Path, config: RunConfig, device: str, network: nn.Module) -> None:
    """Says what is about to be trained, and where it goes."""
    parameters = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    trainer, sampler = config.trainer, config.sampler
    patches = sampler.patches_per_step * trainer.accumulate * trainer.devices
    patch = "x".join(map(str, sampler.patch_size))
    limit = f", at most {trainer.max_minutes:g} min" if trainer.max_minutes else ""
    OUT.print(
        f"[bold]Network:[/] {config.model.name}, {parameters:.1f} M parameters, {patches} patches of {patch} per step, "
        f"{trainer.max_steps} steps{limit} on {device}, activation_ckpt={config.activation_ckpt}."
    )
    OUT.print(f"[bold]Run folder:[/] {escape(str(folder))}")


@contextlib.contextmanager
def bar(title: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Shows a bar over `total` items while its block runs (after a moment, so that short work stays quiet)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=OUT, transient=True, disable=not OUT.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextlib.contextmanager
def training(config: RunConfig) -> Iterator[Callable[[SegmentationModule, float | None], None]]:
    """Shows how far the training is; gives the function that is called after each step and each validation."""
    columns = (
        TextColumn("train"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[text]}"),
    )
    began = time.monotonic()
    last_line = began
    with Progress(*columns, console=OUT, transient=True, disable=not OUT.is_terminal) as progress:
        task = progress.add_task("train", total=1.0, text="first step")
        smooth: float | None = None

        def report(module: SegmentationModule, loss: float | None) -> None:
            nonlocal smooth, last_line
            done, run = share_done(module.progress, config.trainer), module.progress
            dice = f", best Dice {run.best_dice:.3f}" if run.best_dice is not None else ""
            if loss is None:
                OUT.print(f"step {run.step}: {_validation_line(module)}")
                return
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            left = run.seconds * (1 - done) / done if done else 0.0
            text = f"step {run.step}, loss {smooth:.3f}{dice}, {_minutes(left)} left"
            progress.update(task, completed=done, text=text)
            if not OUT.is_terminal and time.monotonic() - last_line > 30:  # a log file wants lines, not a bar
                last_line = time.monotonic()
                OUT.print(f"{done:4.0%}  {text}")

        yield report


def _validation_line(module: SegmentationModule) -> str:
    from medckpt.training.module import mean_dice

    dice = mean_dice(module.case_dice, module.classes)
    mean = dice.pop("dice_mean")
    listed = ", ".join(f"{name} {value:.3f}" for name, value in dice.items() if value is not None)
    return f"validation Dice {mean:.3f} ({escape(listed)})" if mean is not None else "validation: no class to score"


def interrupted(folder: Path, progress: RunProgress) -> None:
    """Says where an interrupted run stands and how to go on."""
    OUT.print(
        f"Stopped after step {progress.step}; nothing is lost. Go on with:\n"
        f"  medckpt train resume={escape(str(folder))}"
    )


def scores(metrics: dict[str, Any]) -> None:
    """Prints Dice and surface distance per class."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, side in (
        ("class", "left"),
        ("Dice", "right"),
        ("surface mm", "right"),
        ("HD95 mm", "right"),
        ("cases", "right"),
    ):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for name, dice in metrics["dice_per_class"].items():
        distance, hausdorff = (metrics[f"{key}_per_class"][name] for key in ("surface_distance_mm", "hausdorff95_mm"))
        numbers = [_number(dice, 3), _number(distance, 2), _number(hausdorff, 1)]
        table.add_row(escape(name), *numbers, str(metrics["cases_per_class"][name]))
    table.add_row("[bold]mean[/]", f"[bold]{_number(metrics['dice_mean'], 3)}[/]", "", "", str(len(metrics["cases"])))
    OUT.print(table)


def summary(metrics: dict[str, Any], memory: dict[str, Any], report: Path, *, share: float) -> None:
    """Prints the one screen at the end of a training: what came out, what it cost, what to do next.

    `share` is how much of trainer.max_steps was done before trainer.max_minutes were over.
    """
    OUT.print()
    scores(metrics)
    gib = memory["process_peak_bytes"] / GIB
    OUT.print(
        f"\n[bold]mean Dice {_number(metrics['dice_mean'], 3)}[/] on {len(metrics['cases'])} cases that were never "
        f"trained on; {metrics['steps']} steps in {metrics['minutes']:.1f} min, peak {gib:.1f} GiB "
        f"({memory['process_measure']})."
    )
    if share < 0.99:
        OUT.print(
            f"The time was over (trainer.max_minutes) at {share:.0%} of trainer.max_steps: this machine is slower than "
            "the recipe expects, or was busy. More minutes give a better result."
        )
    folder = escape(str(report.parent))
    OUT.print(f"Report:  {escape(str(report))}\nPredict: medckpt predict run={folder} input=SCAN output=FOLDER")


def foreseen(forecast: Forecast) -> None:
    """Says in one line what a step is going to take."""
    low, high = forecast.peak_interval
    spread = "" if high - low < 0.005 * GIB else f" ({size(low)} to {size(high)})"
    time = "" if forecast.step_ms is None else f", about {milliseconds(forecast.step_ms)} per step"
    capacity = forecast.profile.capacity_bytes
    holds = "" if capacity is None else f" of {capacity / GIB:.1f} GiB: {_FITS[forecast.fits]}"
    OUT.print(
        f"[bold]Forecast:[/] peak {forecast.peak_bytes / GIB:.2f} GiB{spread}{holds}{time}; in the {forecast.where}."
    )


def measured(predicted: int, found: int) -> None:
    """Says in one line what the first full step took."""
    error = 100 * (predicted / found - 1)
    OUT.print(
        f"[bold]Measured:[/] peak {found / GIB:.2f} GiB in the first full step; the forecast is {error:+.1f} % off."
    )


def planned(plan: StepPlan, picture: Path) -> None:
    """Prints the one screen of a plan: the table, the recipe's own step part by part, what to do next."""
    config, profile = plan.config, plan.profile
    capacity = "" if profile.capacity_bytes is None else f", {profile.capacity_bytes / GIB:.2f} GiB"
    assumed = " (assumed; data=PATH or channels= and classes= say otherwise)" if plan.task.assumed else ""
    OUT.print(
        f"[bold]{escape(profile.title or profile.name)}[/]{capacity}. Recipe {config.recipe}: {config.model.name}, "
        f"{_count(plan.task.channels, 'channel')}, {plan.task.classes} classes{assumed}, {plan.precision}, "
        f"{_count(config.trainer.accumulate, 'pass')} per step."
    )
    OUT.print(_plan_table(plan))
    time = " and time per step" if plan.chosen.step_ms is not None else " (no times: `medckpt profile` measures them)"
    OUT.print(f"Peak GiB{time}. [green]Fits[/]; [yellow]? depends on scratch memory[/]; [red]x does not fit[/].\n")
    patch = "x".join(map(str, config.sampler.patch_size))
    OUT.print(
        f"[bold]The recipe as it is:[/] {config.sampler.patches_per_step} patches of {patch}, "
        f"activation_ckpt={config.activation_ckpt}"
    )
    OUT.print(escape(str(plan.chosen)))
    holders = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in plan.chosen.explanation.holders[:6])
    OUT.print(f"held at the peak by: {escape(holders)}")
    OUT.print(f"Picture: {escape(str(picture))}\n{_advice(plan)}")


def profiled(profile: MemoryProfile, path: Path) -> None:
    """Says what was measured of this machine, and how to use it."""
    rates = {
        "memory": (profile.bandwidth_gb_s, "GB/s"),
        "float32": (profile.fp32_tflops, "TFLOP/s"),
        "TF32": (profile.tf32_tflops, "TFLOP/s"),
        "bf16": (profile.bf16_tflops, "TFLOP/s"),
        "fp16": (profile.fp16_tflops, "TFLOP/s"),
        "host link": (profile.host_link_gb_s, "GB/s"),
    }
    listed = ", ".join(f"{name} {value:.3g} {unit}" for name, (value, unit) in rates.items() if value is not None)
    OUT.print(
        f"[bold]{escape(profile.title)}[/]: {listed}; convolutions reach {profile.conv_share:.0%}, linear layers "
        f"{profile.matmul_share:.0%} of the matrix rate.\n{escape(str(path))}\n"
        f"Use it: medckpt plan recipe=swin_ct memory={escape(str(path if path.is_absolute() else f'./{path}'))}"
    )


_FITS = {"yes": "fits", "no": "does not fit", "unsure": "may not fit", "unknown": ""}
_MARKS = {"yes": ("green", " "), "no": ("red", "x"), "unsure": ("yellow", "?"), "unknown": ("default", " ")}


def _plan_table(plan: StepPlan) -> Table:
    batches = sorted({cell.patches_per_step for cell in plan.cells})
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("patch", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    for batch in batches:
        table.add_column(f"{batch} per step", justify="right", no_wrap=True)
    rows: dict[tuple[Any, str], list[str]] = {}
    for cell in plan.cells:
        colour, mark = _MARKS[cell.fits]
        time = "" if cell.step_ms is None else f" {milliseconds(cell.step_ms)}"
        row = rows.setdefault((cell.patch_size, cell.activation_ckpt), [])
        row.append(f"[{colour}]{cell.peak_bytes / GIB:.1f}{mark}{time}[/]")
    for (patch, policy), words in rows.items():
        table.add_row("x".join(map(str, patch)), policy, *words)
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"


def _advice(plan: StepPlan) -> str:
    """Says what to type next: the recipe if it fits, else the largest step of the same patch that does."""
    if plan.chosen.fits in ("yes", "unknown"):
        return f"Next, on that machine:\n  {escape(plan.command)}"
    patch = plan.config.sampler.patch_size
    same = [cell for cell in plan.cells if cell.patch_size == patch and cell.fits == "yes"]
    if not same:
        return f"Nothing of this patch surely fits in {escape(plan.profile.name)}: take a smaller sampler.patch_size."
    best = max(same, key=lambda cell: (cell.patches_per_step, cell.activation_ckpt == "none"))
    changed = {"sampler.patches_per_step": str(best.patches_per_step), "activation_ckpt": best.activation_ckpt}
    words = [word for word in shlex.split(plan.command) if word.partition("=")[0] not in changed]
    command = shlex.join([*words, *(f"{key}={value}" for key, value in changed.items())])
    return f"The largest step of this patch that surely fits; next, on that machine:\n  {escape(command)}"


def predicted(files: Sequence[Path], labels: dict[str, int]) -> None:
    """Says which label maps were written and what their values mean."""
    values = ", ".join(f"{value} {name}" for name, value in sorted(labels.items(), key=lambda item: item[1]))
    shown = "\n".join(escape(str(file)) for file in files[:10]) + (
        "" if len(files) <= 10 else f"\n... {len(files)} in all"
    )
    OUT.print(f"{shown}\nLabel values: {escape(values)}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _short(value: Any) -> str:
    if value is None:
        return "unset"
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
