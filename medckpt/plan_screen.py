"""What a person sees of memory: forecasts, plans and measured peaks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from medckpt.console import OUT
from medckpt.errors import size
from medckpt.forecasting import milliseconds
from medckpt.memory.options import OPTIONS
from medckpt.profiles import unverified

if TYPE_CHECKING:
    from medckpt.budget import BudgetPlan
    from medckpt.forecasting import Forecast
    from medckpt.memory.plan import MemoryPlan
    from medckpt.memory.profile import MemoryProfile
    from medckpt.memory.verify import Verification
    from medckpt.planner import StepPlan

MIB, GIB = 2**20, 2**30


def foreseen(forecast: Forecast) -> None:
    """Says in one line what a step is going to take."""
    low, high = forecast.peak_interval
    spread = "" if high - low < 0.005 * GIB else f" ({size(low)} to {size(high)})"
    time = "" if forecast.step_ms is None else f", about {milliseconds(forecast.step_ms)} per step"
    capacity = forecast.profile.capacity_bytes
    holds = "" if capacity is None else f" of {capacity / GIB:.1f} GiB: {_FITS[forecast.fits]}"
    OUT.print(f"[bold]Forecast:[/] peak {size(forecast.peak_bytes)}{spread}{holds}{time}; in the {forecast.where}.")


def measured(predicted: int, found: int) -> None:
    """Says in one line what the first full step took."""
    error = round(100 * (predicted / found - 1), 1) + 0.0  # no minus zero
    OUT.print(f"[bold]Measured:[/] peak {size(found)} in the first full step; the forecast is {error:+.1f} % off.")


def planned(plan: StepPlan, folder: Path) -> None:
    """Prints the one screen of a plan: the table, the recipe's own step part by part, what to do next."""
    config, profile = plan.config, plan.profile
    capacity = "" if profile.capacity_bytes is None else f", {size(profile.capacity_bytes)}"
    assumed = " (assumed; data=PATH or channels= and classes= say otherwise)" if plan.task.assumed else ""
    OUT.print(
        f"[bold]{escape(profile.title or profile.name)}[/]{capacity}. Recipe {config.recipe}: {config.model.name}, "
        f"{_count(plan.task.channels, 'channel')}, {plan.task.classes} classes{assumed}, "
        f"{_PRECISIONS[plan.precision]}, {_count(config.trainer.accumulate, 'pass')} per step."
    )
    OUT.print(_plan_table(plan))
    time = " and time per step" if plan.chosen.step_ms is not None else " (no times: `medckpt profile` measures them)"
    OUT.print(
        f"Peak in GiB (M: MiB){time}. [green]No mark: fits[/]; [yellow]? depends on scratch memory[/]; "
        "[red]x does not fit[/]."
    )
    if any(cell.scratch == "measured" for cell in plan.cells):
        OUT.print(f"~ the scratch memory of convolutions is estimated, {_SIDE}; elsewhere it is measured.")
    if unknown := unverified(profile):
        OUT.print(
            f"Estimates, not verified on this device: {', '.join(unknown)}. `medckpt profile` measures them there."
        )
    OUT.print()
    patch = "x".join(map(str, config.sampler.patch_size))
    OUT.print(
        f"[bold]The recipe as it is:[/] {_count(config.sampler.patches_per_step, 'patch')} of {patch}, "
        f"activation_ckpt={config.activation_ckpt}"
    )
    OUT.print(escape(str(plan.chosen)))
    holders = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in plan.chosen.explanation.holders[:6])
    OUT.print(f"held at the peak by: {escape(holders)}")
    written = f"{folder / 'memory_timeline.png'}\n         {folder / 'plan.json'}"
    OUT.print(f"Written: {escape(written)}\n{_advice(plan)}")


def planned_step(plan: MemoryPlan, verification: Verification) -> None:
    """Says what is done so that a run's step fits, what that costs, and that it computes the same."""
    OUT.print(f"[bold]Plan:[/] {escape(plan.summary())}\n      {escape(str(verification))}")


def budgeted(found: BudgetPlan, folder: Path) -> None:
    """Prints the plan under a budget, and what other budgets would give."""
    config, plan, profile = found.config, found.chosen, found.profile
    patch = "x".join(map(str, config.sampler.patch_size))
    capacity = "" if profile.capacity_bytes is None else f" ({size(profile.capacity_bytes)})"
    OUT.print(
        f"[bold]{escape(config.recipe)}[/] on {escape(profile.title or profile.name)}{capacity}: "
        f"{_count(config.sampler.patches_per_step, 'patch')} of {patch} per step, {_PRECISIONS[plan.precision]}"
    )
    low, high = found.reserved_bytes
    colour, _ = _MARKS[found.fits]
    OUT.print(
        f"[bold]Budget:[/] {found.allowance}. The plan's peak is {size(plan.predicted_peak_bytes)}; its process takes "
        f"{size(low)} to {size(high)} of the device (estimates at their lowest and highest): "
        f"[{colour}]{_FITS[found.fits]}[/]"
    )
    OUT.print(_budget_table(found))
    if {"no", "unsure"} & {*found.frontier_fits, *(point.fits for point in found.others)}:
        OUT.print("[yellow]? depends on scratch memory[/] (a budget in bytes takes it); [red]x does not fit[/].")
    OUT.print(escape(plan.table()))
    for option in dict.fromkeys(plan.choices.values()):
        OUT.print(f"  {option}: {OPTIONS[option].meaning}")
    if plan.tail:
        OUT.print("  per-sample tail: the layers at full resolution and the loss run one sample at a time")
    OUT.print(f"{_TIMES[plan.times]} Loss and gradients are the plain step's; `train` shows that before it begins.")
    if unknown := unverified(profile):
        OUT.print(f"Estimates, not verified on this device: {', '.join(unknown)}.")
    files = [folder / "frontier.png", folder / "memory_plan.json", folder / "plan.json"]
    written = "\n         ".join(map(str, files))
    OUT.print(f"Written: {escape(written)}\nNext, on that machine:\n  {escape(found.command)}")


def _budget_table(found: BudgetPlan) -> Table:
    """Returns peaks and times of plans under other budgets and of what they are compared with, smallest peak first."""
    plan = found.chosen
    timed = plan.times != "nominal"
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "peak", *(("step", "per sample", "of plain") if timed else ())):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    rows = [
        ("[bold]this plan[/]" if p is plan else "other budgets", p.predicted_peak_bytes, p.predicted_step_ms, fits)
        for p, fits in zip(found.frontier, found.frontier_fits, strict=True)
    ]
    rows += [
        (_COMPARED.get(point.name, point.name), point.peak_bytes, point.step_ms, point.fits) for point in found.others
    ]
    for name, peak, ms, fits in sorted(rows, key=lambda row: row[1]):
        colour, mark = _MARKS[fits]
        times = [milliseconds(ms), milliseconds(ms / plan.samples), f"{ms / plan.plain_step_ms:.2f}x"] if timed else []
        table.add_row(name, f"[{colour}]{size(peak)}{mark}[/]", *times)
    return table


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


_COMPARED = {
    "plain": "plain: nothing recomputed",
    "all": "all: every block recomputed",
    "sqrt": "sqrt: square root of blocks kept",
    "selective": "selective: attention recomputed",
    "use_checkpoint": "MONAI's use_checkpoint",
}
_TIMES = {
    "measured": "Times were measured on this machine.",
    "profile": "Times follow from the profile's rates.",
    "nominal": "This device's rates are not known, so there are no times (`medckpt profile` measures them).",
}
_PRECISIONS = {"32": "float32", "bf16-mixed": "bf16-mixed", "16-mixed": "16-mixed"}
_SIDE = "most often a few percent too high"
_FITS = {"yes": "fits", "no": "does not fit", "unsure": "may not fit", "unknown": ""}
_MARKS = {"yes": ("green", " "), "no": ("red", "x"), "unsure": ("yellow", "?"), "unknown": ("default", " ")}


def _plan_table(plan: StepPlan) -> Table:
    batches = sorted({cell.patches_per_step for cell in plan.cells})
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("patch", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    for batch in batches:
        table.add_column(f"{batch} per step", justify="right", no_wrap=True)
    mixed = any(cell.scratch == "measured" for cell in plan.cells)
    rows: dict[tuple[Any, str], list[str]] = {}
    for cell in plan.cells:
        colour, mark = _MARKS[cell.fits]
        time = "" if cell.step_ms is None else f" {milliseconds(cell.step_ms)}"
        row = rows.setdefault((cell.patch_size, cell.activation_ckpt), [])
        guessed = "~" if mixed and cell.scratch == "estimated" else ""
        row.append(f"[{colour}]{guessed}{_short_size(cell.peak_bytes)}{mark}{time}[/]")
    for (patch, policy), words in rows.items():
        table.add_row("x".join(map(str, patch)), policy, *words)
    return table


def _short_size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}" if nbytes >= GIB else f"{nbytes / MIB:.0f}M"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith(('s', 'ch')) else 's'}"


def _advice(plan: StepPlan) -> str:
    """Says what to type next: the recipe if it fits; else the same step in less memory, and the largest that fits."""
    if plan.chosen.fits in ("yes", "unknown"):
        return f"Next, on that machine:\n  {escape(plan.command)}"
    recipe = plan.config.sampler
    fitting = [cell for cell in plan.cells if cell.patch_size == recipe.patch_size and cell.fits == "yes"]
    same = [cell for cell in fitting if cell.patches_per_step == recipe.patches_per_step]
    lines = []
    if same:
        command = _changed(plan.command, activation_ckpt=same[0].activation_ckpt)
        lines.append(f"The same step fits if blocks are recomputed; next, on that machine:\n  {command}")
    elif fitting:
        best = max(fitting, key=lambda cell: (cell.patches_per_step, cell.activation_ckpt == "none"))
        changes = {"activation_ckpt": best.activation_ckpt, "sampler.patches_per_step": best.patches_per_step}
        command = _changed(plan.command, **changes)
        lines.append(f"The largest step of this patch that surely fits in this way:\n  {command}")
    else:
        lines.append(f"Nothing of this patch surely fits in {escape(plan.profile.name)} in this way.")
    if plan.words:
        words = shlex.join([word for word in plan.words if not word.startswith("activation_ckpt=")])
        lines.append(f"The fastest way to fit it as it is:\n  {escape(f'medckpt plan {words} budget=auto')}")
    return "\n".join(lines)


def _changed(command: str, **changes: object) -> str:
    """Returns a command with other values of some keys, fit for the screen."""
    words = [word for word in shlex.split(command) if word.partition("=")[0] not in changes]
    return escape(shlex.join([*words, *(f"{key}={value}" for key, value in changes.items())]))
