"""Memory of a run's own step: planned under a budget, foreseen before the training, measured in its first steps."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from medckpt import budget, console, machine, plan_screen, planner, run_folder
from medckpt.allowance import read_budget
from medckpt.config import RunConfig
from medckpt.errors import MedckptError
from medckpt.forecasting import Forecast, forecast_of
from medckpt.memory.options import lay_on
from medckpt.memory.plan import MemoryPlan
from medckpt.memory.verify import Verification, verify_choices
from medckpt.memory.ways import Way
from medckpt.profiles import load_profile
from medckpt.recipe_step import Task
from medckpt.training.first_step import CPU_MEASURE, CUDA_MEASURE
from medckpt.training.losses import DiceCrossEntropy
from medckpt.training.precision import Device

log = logging.getLogger("medckpt")

PLAN_FILE = "memory_plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A run's plan, what it will take, and how far it is from the plain step."""

    plan: MemoryPlan
    forecast: Forecast
    verification: Verification


def plan_step(config: RunConfig, task: Task, network: nn.Module) -> PlannedStep | None:
    """Plans a run's step under its budget, lays the plan on `network`, and shows that no gradient changed.

    None if the run has no budget.

    Raises:
        InfeasibleBudget: no exact plan fits.
        MedckptError: the planned step does not compute what the plain one does.
    """
    if config.budget is None:
        return None
    profile = load_profile(config.memory)
    allowance = read_budget(str(config.budget), profile)
    with console.bar("plan: steps traced", None) as advance:
        planner_ = budget.planner_of(config, profile, task, network, lambda what: advance())
        plan = planner_.within(allowance.peak_bytes, allowance.device_bytes)
        forecast = forecast_of(planner_.trace(plan.choices, Way(plan.tail, plan.micro_batches)), profile)
        verification = verify_small(config, task, network, plan)
    if not verification.passed:
        raise MedckptError(f"budget={config.budget}: the planned step is not the plain one. {verification}")
    lay_on(network, plan.choices)
    return PlannedStep(plan=plan, forecast=forecast, verification=verification)


def note_plan(planned: PlannedStep | None, folder: Path) -> None:
    """Prints a plan, and writes it to memory_plan.json in the run folder."""
    if planned is not None and machine.rank() == 0:
        planned.plan.save(folder / PLAN_FILE)
        plan_screen.planned_step(planned.plan, planned.verification)


def verify_small(config: RunConfig, task: Task, network: nn.Module, plan: MemoryPlan) -> Verification:
    """Runs the plain and the planned step on the CPU, on random patches of the smallest size that the network takes."""
    patch = smallest_patch(config)
    generator = torch.Generator().manual_seed(config.seed)
    samples = max(2, plan.micro_batches)
    image = torch.randn((samples, task.channels, *patch), generator=generator)
    label = torch.randint(task.classes, (samples, 1, *patch), generator=generator, dtype=torch.uint8)
    return verify_choices(
        copy.deepcopy(network).cpu(),
        image,
        plan.choices,
        loss=DiceCrossEntropy(config.loss),
        target=label,
        tail=plan.tail,
        micro_batches=plan.micro_batches,
    )


def smallest_patch(config: RunConfig) -> tuple[int, int, int]:
    """Returns the smallest cube within the recipe's patch that its network takes, else the patch itself.

    A side of 64 voxels is the least: below it a Swin-UNETR's deepest norm has too few voxels to be compared.
    """
    own = config.sampler.patch_size
    for side in range(64, min(own), 32):
        if not config.model.patch_problems((side, side, side)) and config.model.ANY_SIZE:
            return (side, side, side)
    return own


def foresee(
    config: RunConfig, task: Task, network: nn.Module, folder: Path, device: Device, forecast: Forecast | None = None
) -> Callable[[int], None] | None:
    """Prints and notes the forecast of a step; returns what prints and notes the measured peak beside it.

    `forecast` if there is one already.
    """
    if machine.rank() > 0:
        return None
    predicted: int | None = None
    try:
        if forecast is None:
            forecast = planner.forecast_run(config, load_profile(config.memory), task, network)
    except Exception as error:  # the trace leans on torch's inner parts, and a training must not fall with it
        log.warning("No forecast of this step's memory: %s", error)
    else:
        plan_screen.foreseen(forecast)
        forecast.plot(folder / "memory_timeline.png")
        predicted = forecast.allocated_bytes
        run_folder.note_memory(folder, {"predicted_peak_bytes": predicted, "forecast": forecast.to_dict()})

    def note_peak(found: int) -> None:
        if predicted is not None:
            plan_screen.measured(predicted, found)
        measure = CUDA_MEASURE if device == "cuda" else CPU_MEASURE
        run_folder.note_memory(folder, {"measured_peak_bytes": found, "measure": measure})

    return note_peak
