"""What a recipe's training step takes on a device, and which patch and batch sizes fit: the verb `plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

import torch

from medckpt.blocks import Triple
from medckpt.config import RunConfig
from medckpt.errors import ConfigError
from medckpt.forecasting import Fits, Forecast, fits_in, forecast_of
from medckpt.memory.batches import extrapolate
from medckpt.memory.graph import StepGraph
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import find_regions
from medckpt.memory.simulate import simulate
from medckpt.memory.step import Precision, Step
from medckpt.memory.trace import trace_step
from medckpt.models.build import build_model
from medckpt.training.losses import DiceCrossEntropy
from medckpt.training.precision import prepare_network, resolve_precision

PATCHES_PER_STEP = (1, 2, 4, 8)
SIDES = (64, 96, 128, 160, 192)
"""Sides of the cubes that a plan's table looks at, beside the recipe's own patch."""
POLICIES: tuple[Literal["none", "all"], ...] = ("none", "all")

_PASSES = 2
"""Passes per step that are traced: the third takes no more memory than the second."""
_TRACED = (2, 3)
"""Batch sizes that are traced; larger ones follow from these two."""
_TRACES_PER_PATCH = len(POLICIES) * (1 + len(_TRACED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the data decide of a network."""

    channels: int
    classes: int
    """Background included."""
    assumed: bool = False
    """Whether nobody said so: there are no data to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of a plan's table: a patch size and a number of patches per step, with or without recompute."""

    patch_size: Triple
    patches_per_step: int
    activation_ckpt: Literal["none", "block", "all"]
    peak_bytes: int
    peak_interval: tuple[int, int]
    reserved_bytes: tuple[int, int]
    fits: Fits
    step_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What `medckpt plan` found."""

    config: RunConfig
    profile: MemoryProfile
    task: Task
    precision: Precision
    chosen: Forecast
    """The recipe as it stands."""
    cells: tuple[Cell, ...]
    command: str
    """What trains this step: the recipe as it was asked for, with every setting."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the facts, fit for JSON."""
        return {
            "recipe": self.config.recipe,
            "command": self.command,
            "patch_size": list(self.config.sampler.patch_size),
            "patches_per_step": self.config.sampler.patches_per_step,
            "activation_ckpt": self.config.activation_ckpt,
            "precision": self.precision,
            "channels": self.task.channels,
            "classes": self.task.classes,
            "chosen": self.chosen.to_dict(),
            "table": [dataclasses.asdict(cell) for cell in self.cells],
        }


def plan(
    config: RunConfig,
    profile: MemoryProfile,
    task: Task,
    *,
    sides: Sequence[int] = SIDES,
    workers: int = 1,
    command: str = "",
    advance: Callable[[], None] = lambda: None,
) -> StepPlan:
    """Returns the forecast of a recipe's step on a device, and a table of other patch and batch sizes.

    Args:
        config: the recipe as it would be trained.
        profile: the device, complete (see `load_profile`).
        task: channels and classes.
        sides: of the cubes that the table looks at; those that the network does not take are left out.
        workers: processes that trace the table; above 1 the caller's main module is imported by each of them.
        command: what trains this step, for the advice.
        advance: called after each traced step, of which there are `traces_of(config, sides)`.

    Raises:
        ConfigError: the device does not train in the precision that is asked for.
    """
    patches = patch_sizes(config, sides)
    # Fresh interpreters: a forked one would share torch's threads, which do not survive a fork.
    pool = ProcessPoolExecutor(min(workers, len(patches)), get_context("spawn")) if workers > 1 and patches else None
    try:
        jobs = [pool.submit(_rows, config, profile, task, patch) for patch in patches] if pool else []
        chosen = forecast_run(config, profile, task)
        advance()
        cells: list[Cell] = []
        for index, patch in enumerate(patches):
            cells += jobs[index].result() if jobs else _rows(config, profile, task, patch)
            for _ in range(_TRACES_PER_PATCH):
                advance()
    finally:
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)
    return StepPlan(
        config=config,
        profile=profile,
        task=task,
        precision=precision_on(config, profile),
        chosen=chosen,
        cells=tuple(cells),
        command=command or f"medckpt train recipe={config.recipe}",
    )


def _rows(config: RunConfig, profile: MemoryProfile, task: Task, patch_size: Triple) -> list[Cell]:
    """Returns the table's rows of one patch size."""
    network = _network(config, profile, task, patch_size)
    cells = []
    for policy in POLICIES:
        graphs = {
            batch: trace_run(config, profile, task, patch_size, batch, policy, network) for batch in (1, *_TRACED)
        }
        for batch in PATCHES_PER_STEP:
            graph = graphs.get(batch) or extrapolate((graphs[2], graphs[3]), _TRACED, batch)
            # A network that does other things at other batch sizes has to be traced at each.
            graph = graph or trace_run(config, profile, task, patch_size, batch, policy, network)
            cells.append(_cell(graph, profile, patch_size, batch, policy))
    return cells


def traces_of(config: RunConfig, sides: Sequence[int] = SIDES) -> int:
    """Returns how many steps a plan traces."""
    return 1 + len(patch_sizes(config, sides)) * _TRACES_PER_PATCH


def patch_sizes(config: RunConfig, sides: Sequence[int] = SIDES) -> list[Triple]:
    """Returns the patches of a plan's table, smallest first: the recipe's own and the cubes that the network takes."""
    found = {config.sampler.patch_size}
    found |= {(side, side, side) for side in sides if not config.model.patch_problems((side, side, side))}
    return sorted(found, key=lambda patch: (patch[0] * patch[1] * patch[2], patch))


def forecast_run(
    config: RunConfig, profile: MemoryProfile, task: Task, network: torch.nn.Module | None = None
) -> Forecast:
    """Returns the forecast of a training step exactly as a run trains it.

    `network`, if it is built already, has recompute applied as `activation_ckpt` says; it is left untouched.
    """
    sampler, policy = config.sampler, config.activation_ckpt
    if network is None:
        network = _network(config, profile, task, sampler.patch_size)
    else:
        policy = "none"  # it has been applied
    graph = trace_run(config, profile, task, sampler.patch_size, sampler.patches_per_step, policy, network)
    return forecast_of(graph, profile)


def trace_run(
    config: RunConfig,
    profile: MemoryProfile,
    task: Task,
    patch_size: Triple,
    patches: int,
    policy: Literal["none", "block", "all"],
    network: torch.nn.Module,
) -> StepGraph:
    """Returns the record of one optimizer step of `config` with `patches` of `patch_size`."""
    precision = precision_on(config, profile)
    step = Step(
        precision=precision,
        clip_norm=config.optimizer.clip_norm,
        accumulate=min(config.trainer.accumulate, _PASSES),
        averages=config.trainer.ema_decay is not None,
        weight_cache=False,  # as Lightning trains
        rules="cpu" if profile.device == "cpu" else "cuda",
    )
    criterion = DiceCrossEntropy(config.loss)
    image = torch.empty((patches, task.channels, *patch_size), device="meta")
    label = torch.empty((patches, 1, *patch_size), dtype=torch.uint8)  # never written to: takes no memory
    graph = trace_step(
        network, image, step, lambda logits: criterion(logits, label), recompute=find_regions(network, policy)
    )
    # Clipping and optimizer, which run once, are a small share of a step of several passes.
    graph.repeats = config.trainer.accumulate / step.accumulate
    return graph


def precision_on(config: RunConfig, profile: MemoryProfile) -> Precision:
    """Returns the precision that a run would train in on the device."""
    if profile.device == "cpu":
        resolved = resolve_precision(config.precision, "cpu")
        return "bf16-mixed" if resolved == "bf16-mixed" else "32"
    if config.precision == "auto":
        return "bf16-mixed" if profile.bf16_tflops else "32"
    if config.precision == "bf16-mixed" and profile.bf16_tflops is None and profile.fp32_tflops is not None:
        raise ConfigError(
            f"precision=bf16-mixed: {profile.title or profile.name} has no bfloat16 arithmetic. Use 16-mixed or 32."
        )
    return config.precision


def _network(config: RunConfig, profile: MemoryProfile, task: Task, patch_size: Triple) -> torch.nn.Module:
    network = build_model(config.model, in_channels=task.channels, out_channels=task.classes, patch=patch_size)
    prepare_network(network, config.precision, "cpu" if profile.device == "cpu" else "cuda")
    return network


def _cell(
    graph: StepGraph,
    profile: MemoryProfile,
    patch_size: Triple,
    patches: int,
    policy: Literal["none", "all"],
) -> Cell:
    found = simulate(graph, profile)
    return Cell(
        patch_size=patch_size,
        patches_per_step=patches,
        activation_ckpt=policy,
        peak_bytes=found.peak_bytes,
        peak_interval=found.peak_interval,
        reserved_bytes=found.reserved_bytes,
        fits=fits_in(profile, found.reserved_bytes),
        step_ms=found.step_ms,
    )
