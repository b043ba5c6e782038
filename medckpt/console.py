"""What a person sees: progress while it runs, one screen at the end. Programs get `--json` instead."""

from __future__ import annotations

import contextlib
import errno
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
from medckpt.errors import size
from medckpt.training.schedule import share_done

if TYPE_CHECKING:
    from torch import nn

    from medckpt.datasets.layouts import Case, Dataset
    from medckpt.training.module import SegmentationModule
    from medckpt.training.state import Progress as RunProgress

MIB, GIB = 2**20, 2**30
_QUIET_SECONDS = 15
"""Where there is no terminal for a bar, a line says so often how far the work is."""


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to the command line to say that nobody reads any more; rich would end without a word."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads any more")


# Under DDP the first process speaks for all.
OUT = _Screen(highlight=False, soft_wrap=True, quiet=machine.rank() > 0)


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


def dropped(cases: dict[str, str]) -> None:
    """Names the cases that a training leaves out (data.drop_failed)."""
    if cases:
        OUT.print(f"[bold yellow]Left out:[/] {len(cases)} cases that cannot be used (kept in split.json):")
    for name, reason in list(cases.items())[:10]:
        OUT.print(f"  {escape(name)}: {escape(reason.removeprefix(f'{name}: '))}")
    if len(cases) > 10:
        OUT.print(f"  and {len(cases) - 10} more")


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


class Advance:
    """Moves a bar on: called, by one item; `within`, by the share of the item under way that is done."""

    def __init__(self, title: str, total: int | None, progress: Progress) -> None:
        self.title, self.total, self.progress = title, total, progress
        self.done, self.last_line = 0, time.monotonic()
        self.task = progress.add_task(title, total=total, count=self._count())

    def __call__(self) -> None:
        self.done += 1
        self._show(self.done, self._count())

    def within(self, done: int, total: int) -> None:
        """`done` of `total` steps of the present item are done."""
        self._show(self.done + done / total, f"{self._count()} ({done / total:.0%} of the next)")

    def _count(self) -> str:
        return f"{self.done}" if self.total is None else f"{self.done}/{self.total}"

    def _show(self, completed: float, count: str) -> None:
        self.progress.update(self.task, completed=completed, count=count)
        if not OUT.is_terminal and time.monotonic() - self.last_line > _QUIET_SECONDS:  # a log file wants lines
            self.last_line = time.monotonic()
            OUT.print(f"{self.title}: {count.replace('/', ' of ', 1)}")


@contextlib.contextmanager
def bar(title: str, total: int | None) -> Iterator[Advance]:
    """Shows a bar over `total` items while its block runs (after a moment, so that short work stays quiet)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=OUT, transient=True, disable=not OUT.is_terminal) as progress:
        yield Advance(title, total, progress)


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
            if not OUT.is_terminal and time.monotonic() - last_line > 2 * _QUIET_SECONDS:
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
    OUT.print(
        f"\n[bold]mean Dice {_number(metrics['dice_mean'], 3)}[/] on {len(metrics['cases'])} cases that were never "
        f"trained on; {metrics['steps']} steps in {metrics['minutes']:.1f} min. The process "
        f"took {size(memory['process_peak_bytes'])} at most ({memory['process_measure']})."
    )
    if share < 0.99:
        OUT.print(
            f"The time was over (trainer.max_minutes) at {share:.0%} of trainer.max_steps: this machine is slower than "
            "the recipe expects, or was busy. More minutes give a better result."
        )
    folder = escape(str(report.parent))
    OUT.print(f"Report:  {escape(str(report))}\nPredict: medckpt predict run={folder} input=SCAN output=FOLDER")


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
