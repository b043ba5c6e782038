"""What a recipe's training step takes on a device, and which patch and batch sizes fit: the verb `plan`."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

from torch import nn

from medckpt.blocks import Triple
from medckpt.config import RunConfig
from medckpt.errors import ConfigError
from medckpt.forecasting import Fits, Forecast, fits_in, forecast_of
from medckpt.memory.batches import extrapolate
from medckpt.memory.graph import StepGraph
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import Simulation, simulate
from medckpt.memory.step import Precision
from medckpt.recipe_step import Policy, Task, check_size, make_network, precision_on, trace_run

PATCHES_PER_STEP = (1, 2, 4, 8)
SIDES = (64, 96, 128, 160, 192)
"""Sides of the cubes that a plan's table looks at, beside the recipe's own patch."""
POLICIES: tuple[Policy, ...] = ("none", "all")
_FAR = 1000
"""Voxels within which a legal cube is looked for."""
_TRACED = (2, 3)
"""Batch sizes that are traced; larger ones follow from these two."""
_Job = tuple[Triple, Policy]
"""A row of the table."""
_TRACES_PER_ROW = 1 + len(_TRACED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a plan's table: a patch size and a number of patches per step, with or without recompute."""

    patch_size: Triple
    patches_per_step: int
    activation_ckpt: Policy
    peak_bytes: int
    peak_interval: tuple[int, int]
    reserved_bytes: tuple[int, int]
    """Never below that of a smaller step, see `consistent`; `fits` follows from it."""
    fits: Fits
    step_ms: float | None
    scratch: Literal["measured", "estimated"]
    """Where the scratch memory of convolutions comes from."""

    def within(self, other: Cell) -> bool:
        """Whether the other's step is this one or a larger one: no side of its patch is smaller, no fewer patches."""
        return (
            self.activation_ckpt == other.activation_ckpt
            and self.patches_per_step <= other.patches_per_step
            and all(mine <= its for mine, its in zip(self.patch_size, other.patch_size, strict=True))
        )


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
    words: tuple[str, ...] = ()
    """What was asked, word by word."""
    folder: str | None = None
    """Where picture and plan.json are."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the facts, fit for JSON."""
        return {
            "recipe": self.config.recipe,
            "command": self.command,
            "words": list(self.words),
            "folder": self.folder,
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
        sides: of cubes in the table beside the recipe's own patch; those that the network does not take are left out.
        workers: processes that trace, this one included; above 1 the caller's main module is imported by each other.
        command: what trains this step, for the advice.
        advance: called after each traced step, of which there are `traces_of(config, sides)`.

    Raises:
        ConfigError: the device does not train in the precision that is asked for; a step of more than `MOST_NUMBERS`.
    """
    check_size(config, task, sides)
    own, policy = config.sampler.patch_size, config.activation_ckpt
    jobs = [(patch, level) for patch in patch_sizes(config, sides) for level in POLICIES]
    # This process begins with the recipe's own patch and goes on from the end: torch remembers what its fake operators
    # gave, so that the second row of a patch takes two thirds of the time in the process that made the first.
    others = sorted((job for job in jobs if job != (own, policy)), key=lambda job: job[0] == own)
    # Fresh interpreters: a forked one would share torch's threads, which do not survive a fork.
    pool = ProcessPoolExecutor(min(workers - 1, len(others)), get_context("spawn")) if workers > 1 else None
    rows: dict[_Job, list[Cell]] = {}
    try:
        row = functools.partial(_row, config, profile, task)
        rest = _Rows(others, lambda job: row(*job), (lambda job: pool.submit(row, *job)) if pool else None, workers - 1)
        if policy in POLICIES:
            graphs = _graphs(config, profile, task, own, policy, {*PATCHES_PER_STEP, config.sampler.patches_per_step})
            rows[own, policy] = [_cell(graphs[batch], profile, own, batch, policy) for batch in PATCHES_PER_STEP]
            chosen = forecast_of(graphs[config.sampler.patches_per_step], profile)
        else:
            chosen = forecast_run(config, profile, task)
        _repeat(advance, _TRACES_PER_ROW if policy in POLICIES else 1)
        for job, made in rest:
            rows[job] = made
            _repeat(advance, _TRACES_PER_ROW)
    finally:
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)
    known = _cell_of(chosen.simulation, profile, own, config.sampler.patches_per_step, policy)
    cells = consistent([cell for job in jobs for cell in rows[job]], profile, known)
    return StepPlan(
        config=config,
        profile=profile,
        task=task,
        precision=precision_on(config, profile),
        chosen=_as_in_table(chosen, cells, known),
        cells=cells,
        command=command or f"medckpt train recipe={config.recipe}",
    )


class _Rows:
    """The rows of a table, made here and by other processes.

    Each other process has one job at a time: what a pool keeps waiting in its queue could not be taken back, and would
    be made there while this process has nothing left.
    """

    def __init__(
        self,
        jobs: Sequence[_Job],
        make: Callable[[_Job], list[Cell]],
        submit: Callable[[_Job], Future[list[Cell]]] | None,
        others: int,
    ) -> None:
        """`submit` hands a job to one of the `others` processes, which begin at once."""
        self._waiting = deque(jobs)
        self._make, self._submit = make, submit
        self._begun: list[tuple[_Job, Future[list[Cell]]]] = []
        self._lock = threading.Lock()
        for _ in range(others if submit else 0):
            self._hand_over()

    def __iter__(self) -> Iterator[tuple[_Job, list[Cell]]]:
        """Yields each row: made here, from the end on, what no other process has begun; then what others made."""
        while True:
            with self._lock:
                if not self._waiting:
                    break
                job = self._waiting.pop()
            yield job, self._make(job)
        for job, future in self._begun:
            yield job, future.result()

    def _hand_over(self, _: object = None) -> None:
        with self._lock:
            if not self._waiting or self._submit is None:
                return
            job = self._waiting.popleft()
            future = self._submit(job)
            self._begun.append((job, future))
        future.add_done_callback(self._hand_over)


def consistent(cells: Sequence[Cell], profile: MemoryProfile, known: Cell | None = None) -> tuple[Cell, ...]:
    """Returns a table whose cells do not contradict each other: a larger step never takes less.

    The replay of the allocator does not keep to that by itself, as little can decide whether a block is used again. So
    what is reserved is the largest of all steps that a cell's own includes (those not larger in any way), and `fits`
    follows from it. Where `known`, the recipe's own step, has been measured, it stands in place of its cell; smaller
    steps whose scratch memory is estimated are then held at or below it, larger ones at or above.
    """
    table = list(cells)
    if known is not None and known.scratch == "measured":
        table = [_beside(cell, known) for cell in table]
    found = []
    for cell in table:
        inside = [other.reserved_bytes for other in table if other.within(cell)]
        reserved = (max(low for low, _ in inside), max(high for _, high in inside))
        found.append(dataclasses.replace(cell, reserved_bytes=reserved, fits=fits_in(profile, reserved)))
    return tuple(found)


def _beside(cell: Cell, known: Cell) -> Cell:
    """Returns `cell` as it can be beside a measured one."""
    if cell.within(known) and known.within(cell):
        return dataclasses.replace(known, step_ms=cell.step_ms)
    if cell.scratch == "measured" or not (cell.within(known) or known.within(cell)):
        return cell
    bound = min if cell.within(known) else max
    (low, high), (least, most) = cell.peak_interval, cell.reserved_bytes
    return dataclasses.replace(
        cell,
        peak_bytes=bound(cell.peak_bytes, known.peak_bytes),
        peak_interval=(bound(low, known.peak_interval[0]), bound(high, known.peak_interval[1])),
        reserved_bytes=(bound(least, known.reserved_bytes[0]), bound(most, known.reserved_bytes[1])),
    )


def _as_in_table(chosen: Forecast, cells: Sequence[Cell], known: Cell) -> Forecast:
    """Returns the recipe's forecast with what its cell says of the reserved memory, if the table has such a cell."""
    for cell in cells:
        if cell.within(known) and known.within(cell) and cell.reserved_bytes != known.reserved_bytes:
            simulation = dataclasses.replace(chosen.simulation, reserved_bytes=cell.reserved_bytes)
            explanation = dataclasses.replace(chosen.explanation, simulation=simulation)
            return dataclasses.replace(chosen, simulation=simulation, explanation=explanation)
    return chosen


def _repeat(advance: Callable[[], None], times: int) -> None:
    for _ in range(times):
        advance()


def _row(config: RunConfig, profile: MemoryProfile, task: Task, patch_size: Triple, policy: Policy) -> list[Cell]:
    """Returns one row of the table."""
    graphs = _graphs(config, profile, task, patch_size, policy, PATCHES_PER_STEP)
    return [_cell(graph, profile, patch_size, batch, policy) for batch, graph in graphs.items()]


def _graphs(
    config: RunConfig,
    profile: MemoryProfile,
    task: Task,
    patch_size: Triple,
    policy: Policy,
    batches: Collection[int],
) -> dict[int, StepGraph]:
    """Returns the step of each of `batches`: a batch of one and `_TRACED` from traces, the others from those."""
    network = make_network(config, profile, task, patch_size)
    traced = {batch: trace_run(config, profile, task, patch_size, batch, policy, network) for batch in (1, *_TRACED)}
    found = {}
    for batch in batches:
        graph = traced.get(batch) or extrapolate((traced[2], traced[3]), _TRACED, batch)
        # A network that does other things at other batch sizes has to be traced at each.
        found[batch] = graph or trace_run(config, profile, task, patch_size, batch, policy, network)
    return found


def traces_of(config: RunConfig, sides: Sequence[int] = SIDES) -> int:
    """Returns how many steps a plan traces."""
    own = 0 if config.activation_ckpt in POLICIES else 1
    return own + len(patch_sizes(config, sides)) * len(POLICIES) * _TRACES_PER_ROW


def patch_sizes(config: RunConfig, sides: Sequence[int] = SIDES) -> list[Triple]:
    """Returns the patches of a plan's table, smallest first: the recipe's own and the cubes that the network takes."""
    found = {config.sampler.patch_size}
    found |= {(side, side, side) for side in sides if not config.model.patch_problems((side, side, side))}
    return sorted(found, key=lambda patch: (patch[0] * patch[1] * patch[2], patch))


def check_sides(config: RunConfig, sides: Sequence[int]) -> None:
    """Refuses cubes that were asked for and that the network does not take.

    Raises:
        ConfigError: it names each of them, with the nearest that the network takes.
    """

    def legal(side: int) -> bool:
        return not config.model.patch_problems((side, side, side))

    problems = []
    for side in sides:
        if legal(side):
            continue
        below = next((str(near) for near in range(side, 0, -1) if legal(near)), None)
        above = next((str(near) for near in range(side, side + _FAR) if legal(near)), None)
        listed = " or ".join(filter(None, (below, above)))
        problems.append(f"sides: {config.model.name} takes no cube of {side}; the nearest is {listed}.")
    if problems:
        raise ConfigError("\n".join(problems))


def forecast_run(config: RunConfig, profile: MemoryProfile, task: Task, network: nn.Module | None = None) -> Forecast:
    """Returns the forecast of a training step exactly as a run trains it.

    `network`, if it is built already, has recompute applied as `activation_ckpt` says; it is left untouched.
    """
    sampler, policy = config.sampler, config.activation_ckpt
    if network is None:
        network = make_network(config, profile, task, sampler.patch_size)
    else:
        policy = "none"  # it has been applied
    graph = trace_run(config, profile, task, sampler.patch_size, sampler.patches_per_step, policy, network)
    return forecast_of(graph, profile)


def _cell(graph: StepGraph, profile: MemoryProfile, patch_size: Triple, patches: int, policy: Policy) -> Cell:
    return _cell_of(simulate(graph, profile), profile, patch_size, patches, policy)


def _cell_of(found: Simulation, profile: MemoryProfile, patch_size: Triple, patches: int, policy: Policy) -> Cell:
    return Cell(
        patch_size=patch_size,
        patches_per_step=patches,
        activation_ckpt=policy,
        peak_bytes=found.peak_bytes,
        peak_interval=found.peak_interval,
        reserved_bytes=found.reserved_bytes,
        fits=fits_in(profile, found.reserved_bytes),
        step_ms=found.step_ms,
        scratch="estimated" if "convolution" in found.unmodelled else "measured",
    )
