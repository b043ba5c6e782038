"""The fastest exact plan of a recipe's training step under a budget, and what other budgets would give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medckpt.allowance import Allowance
from medckpt.config import RunConfig
from medckpt.errors import ConfigError, InfeasibleBudget, size
from medckpt.forecasting import Fits, fits_in
from medckpt.memory.fit import Planner
from medckpt.memory.plan import MemoryPlan
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import Simulation
from medckpt.recipe_step import Task, check_size, make_network, precision_on, step_of
from medckpt.report.frontier import draw_frontier
from medckpt.training.losses import DiceCrossEntropy

POINTS = 8
"""Budgets of a frontier, from the smallest peak to that of the plain step."""
BASELINES = ("all", "sqrt", "selective")
"""Policies that a frontier shows beside the plans, apart from the network's own flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A way to run the step: its peak and its time."""

    name: str
    peak_bytes: int
    step_ms: float
    fits: Fits
    """Whether the device holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlan:
    """What `medckpt plan budget=...` found."""

    config: RunConfig
    profile: MemoryProfile
    task: Task
    allowance: Allowance
    chosen: MemoryPlan
    reserved_bytes: tuple[int, int]
    """What the process of the chosen plan takes from the device: lowest, highest."""
    frontier: tuple[MemoryPlan, ...]
    """Plans under rising budgets: peaks rise, times fall."""
    frontier_fits: tuple[Fits, ...]
    """Whether the device holds each of them."""
    others: tuple[Point, ...]
    """The plain step and the baselines."""
    command: str

    @property
    def fits(self) -> Fits:
        """Whether the device holds the chosen plan."""
        return fits_in(self.profile, self.reserved_bytes)

    def draw(self, path: Path) -> None:
        """Writes a picture of peaks and times as PNG."""
        patch = "x".join(map(str, self.config.sampler.patch_size))
        draw_frontier(
            [(plan.predicted_peak_bytes, plan.predicted_step_ms) for plan in self.frontier],
            (self.chosen.predicted_peak_bytes, self.chosen.predicted_step_ms),
            [(point.name, point.peak_bytes, point.step_ms) for point in self.others],
            path,
            title=f"{self.config.recipe}: {self.config.sampler.patches_per_step} x {patch} on "
            f"{self.profile.title or self.profile.name}",
            budget_bytes=self.allowance.peak_bytes or self.allowance.device_bytes,
            budget_words=str(self.allowance),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the facts, fit for JSON."""
        return {
            "recipe": self.config.recipe,
            "command": self.command,
            "patch_size": list(self.config.sampler.patch_size),
            "patches_per_step": self.config.sampler.patches_per_step,
            "memory": self.profile.name,
            "capacity_bytes": self.profile.capacity_bytes,
            "budget": str(self.allowance),
            "fits": self.fits,
            "reserved_bytes": list(self.reserved_bytes),
            "plan": self.chosen.to_dict(),
            "frontier": [
                {
                    "peak_bytes": p.predicted_peak_bytes,
                    "step_ms": self._told(p.predicted_step_ms),
                    "summary": p.summary(),
                    "fits": fits,
                }
                for p, fits in zip(self.frontier, self.frontier_fits, strict=True)
            ],
            "baselines": [
                {"name": p.name, "peak_bytes": p.peak_bytes, "step_ms": self._told(p.step_ms), "fits": p.fits}
                for p in self.others
            ],
        }

    def _told(self, ms: float) -> float | None:
        return None if self.chosen.times == "nominal" else ms


def planner_of(
    config: RunConfig,
    profile: MemoryProfile,
    task: Task,
    network: nn.Module | None = None,
    advance: Callable[[str], None] = lambda done: None,
) -> Planner:
    """Returns the planner of a recipe's step on a device; `network` if it is built already, without recompute.

    Raises:
        ConfigError: the recipe recomputes by itself (`activation_ckpt`), or its step is too large to look at.
    """
    if config.activation_ckpt != "none":
        raise ConfigError(
            f"budget={config.budget}: the plan decides what is recomputed, so activation_ckpt={config.activation_ckpt} "
            "has no place beside it. Leave one of them out."
        )
    check_size(config, task)
    sampler = config.sampler
    shape = (sampler.patches_per_step, task.channels, *sampler.patch_size)
    return Planner(
        make_network(config, profile, task, sampler.patch_size) if network is None else network,
        torch.empty(shape, device="meta"),
        step_of(config, profile),
        profile,
        target_loss=DiceCrossEntropy(config.loss),
        target=torch.empty((shape[0], 1, *shape[2:]), dtype=torch.uint8, device="meta"),
        measure=None,
        offload=config.offload,
        advance=advance,
    )


def plan_budget(
    config: RunConfig,
    profile: MemoryProfile,
    task: Task,
    allowance: Allowance,
    *,
    command: str = "",
    advance: Callable[[str], None] = lambda done: None,
) -> BudgetPlan:
    """Returns the fastest plan within an allowance, and the frontier around it.

    Raises:
        InfeasibleBudget: nothing fits; the error carries the smallest peak and what would make it fit.
    """
    planner = planner_of(config, profile, task, advance=advance)
    smallest = planner.smallest()
    try:
        chosen = planner.within(allowance.peak_bytes, allowance.device_bytes)
    except InfeasibleBudget as error:
        changes = cheapest_changes(config, profile, task, error.budget_bytes, advance)
        raise InfeasibleBudget(error.budget_bytes, error.smallest_bytes, changes) from None
    low, high = smallest.predicted_peak_bytes, planner.plain.peak_bytes
    budgets = [low + (high - low) * step // (POINTS - 1) for step in range(POINTS)]
    plans = [smallest, *(planner.plan(budget) for budget in budgets[1:])]
    unique = {plan.predicted_peak_bytes: plan for plan in (*plans, chosen)}
    frontier = tuple(unique[peak] for peak in sorted(unique))
    return BudgetPlan(
        config=config,
        profile=profile,
        task=task,
        allowance=allowance,
        chosen=chosen,
        reserved_bytes=planner.simulation(chosen).reserved_bytes,
        frontier=frontier,
        frontier_fits=tuple(fits_in(profile, planner.simulation(plan).reserved_bytes) for plan in frontier),
        others=_others(planner),
        command=command,
    )


def cheapest_changes(
    config: RunConfig,
    profile: MemoryProfile,
    task: Task,
    budget_bytes: int,
    advance: Callable[[str], None] = lambda done: None,
) -> tuple[str, ...]:
    """Returns the changes that would make a step fit, each with the smallest peak that it gives."""
    sampler = config.sampler
    tried: dict[str, RunConfig] = {}
    if sampler.patches_per_step > 1:
        fewer = sampler.patches_per_step // 2
        tried[f"sampler.patches_per_step={fewer}"] = _with_sampler(config, patches_per_step=fewer)
    smaller = _smaller_patch(config)
    if smaller is not None:
        words = ",".join(map(str, smaller))
        tried[f"sampler.patch_size=[{words}]"] = _with_sampler(config, patch_size=smaller)
    if precision_on(config, profile) == "32" and profile.bf16_tflops:
        tried["precision=bf16-mixed"] = dataclasses.replace(config, precision="bf16-mixed")
    found = []
    for words, changed in tried.items():
        peak = planner_of(changed, profile, task, advance=advance).smallest().predicted_peak_bytes
        verdict = "fits" if peak <= budget_bytes else "does not fit yet"
        found.append((peak > budget_bytes, peak, f"{words}: from {size(peak)} on, {verdict}"))
    return tuple(text for _, _, text in sorted(found))


def _with_sampler(config: RunConfig, **changes: Any) -> RunConfig:
    return dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, **changes))


def _smaller_patch(config: RunConfig) -> tuple[int, int, int] | None:
    """Returns the largest patch with one side shorter that the network takes: its longest, by the least."""
    patch = config.sampler.patch_size
    longest = max(range(3), key=lambda axis: patch[axis])
    for side in range(patch[longest] - 1, 0, -1):
        tried = (*patch[:longest], side, *patch[longest + 1 :])
        if not config.model.patch_problems(tried):  # type: ignore[arg-type]
            return tried  # type: ignore[return-value]
    return None


def _others(planner: Planner) -> tuple[Point, ...]:
    def point(name: str, found: Simulation, step_ms: float) -> Point:
        fits = fits_in(planner.profile, found.reserved_bytes)
        return Point(name=name, peak_bytes=found.peak_bytes, step_ms=step_ms, fits=fits)

    found = [point("plain", planner.plain, planner.plain_ms())]
    for name in BASELINES:
        try:
            plan = planner.baseline(name)
        except ConfigError:
            continue  # this network has nothing that the baseline is about
        found.append(point(name, planner.simulation(plan), plan.predicted_step_ms))
    flagged = planner.own_flag()
    if flagged is not None and flagged.step_ms is not None:
        found.append(point("use_checkpoint", flagged, flagged.step_ms))
    return tuple(found)
