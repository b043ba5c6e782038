"""Why a peak is where it is: who holds the memory, moment by moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from medckpt.memory.graph import StepGraph, Storage
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import Moment, Simulation, storage_sizes

SAMPLES = 600
"""Moments of a step that a picture shows, at most twice as many."""

KINDS = (
    "context", "parameters", "optimizer", "averages", "inputs", "weight casts", "gradients", "buckets",
    "optimizer step", "scratch",
)  # fmt: skip
"""Holders that are no part of the model; `optimizer step` is what clipping, optimizer and averages make in passing.
Every other holder is a part of the model, by its module's name, or the loss."""

ITSELF = "the model itself"
"""Holder of what the model makes outside of its submodules."""
OUTSIDE = ("", "loss")
"""Regions that are no submodule."""
REST = "small parts"
"""Holder of what parts of the model make that never reach `NAMED`."""
LARGE = 0.25
"""A part of the model that holds a larger share of the tensors at the peak than this is split into its own parts."""
NAMED = 0.03
"""A part has a name of its own if at some moment it holds this share of that; one from a split, at the peak."""
MOST = 6
"""No split makes more named parts than this: then they are alike (the blocks of a transformer), or too many to read."""
Row = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Memory over a step, split by who holds it."""

    ops: tuple[int, ...]
    """The moments: indices of operators of the step, rising."""
    ms: tuple[float, ...]
    """Milliseconds since the step began at the end of each (operator numbers where times are not known)."""
    bands: dict[str, tuple[int, ...]]
    """Holder -> bytes at each moment, never below 0; at each moment their sum is the memory held while that operator
    runs. Largest at the peak first. The holders are those of `KINDS` and parts of the model."""
    phases: tuple[str, ...]
    """What runs at each moment."""
    peak: int
    """Index of the moment of the peak."""
    holders: tuple[tuple[str, int], ...]
    """Holder and bytes at the peak, largest first."""
    timed: bool
    """Whether `ms` are milliseconds."""
    simulation: Simulation


def explain(graph: StepGraph, simulation: Simulation, profile: MemoryProfile) -> Explanation:
    """Returns who holds the memory of a simulated step.

    Activations are held by the part of the model that made them (in the backward pass: whose gradient they serve), all
    else by its kind. How finely the model is divided is up to the peak, see `divide`. A storage counts from the
    operator that makes it to the one after which it is freed, both included.
    """
    totals = [moment.nbytes for moment in simulation.timeline]
    top = max(range(len(totals)), key=totals.__getitem__)
    kept = _sampled(simulation.timeline, top)
    at = bisect_left(kept, top)
    kinds, regions = _rows(graph, storage_sizes(graph, profile), kept)
    parts = simulation.parts
    holder_of = divide(regions, at, simulation.peak_bytes - parts["context"] - parts["workspace"])
    bands: dict[str, Row] = defaultdict(lambda: np.zeros(len(kept), np.int64)) | kinds
    for region, row in regions.items():
        bands[holder_of[region]] = bands[holder_of[region]] + row
    bands["context"] = np.full(len(kept), parts["context"], np.int64)
    # The simulation counts an operator that makes nothing after what it frees: there the difference can be negative.
    held = np.array([totals[index] for index in kept], np.int64)
    bands["scratch"] = np.maximum(held - sum(bands.values()), 0)
    ordered = sorted((name for name, row in bands.items() if row.any()), key=lambda name: (-bands[name][at], name))
    return Explanation(
        ops=tuple(kept),
        ms=tuple(simulation.timeline[index].ms for index in kept),
        bands={name: tuple(bands[name].tolist()) for name in ordered},
        phases=tuple(simulation.timeline[index].phase for index in kept),
        peak=at,
        holders=tuple((name, int(bands[name][at])) for name in ordered if bands[name][at]),
        timed=simulation.step_ms is not None,
        simulation=simulation,
    )


def divide(regions: Mapping[str, Row], at: int, peak_bytes: int) -> dict[str, str]:
    """Returns the holder that each module's memory is shown under.

    The model is divided into its submodules; a module that all of them share (a wrapper's `net.`) is passed over. One
    that holds more than `LARGE` of the peak is divided once more, if that makes at most `MOST` parts of at least
    `NAMED`; what they leave of it is called "rest of" it. Parts that are below `NAMED` all through the step are
    together `REST`. Nothing depends on the order of `regions`.

    Args:
        regions: qualified name of a module ("" for the model) -> bytes of what it made, without its submodules, at each
            moment.
        at: index of the peak's moment.
        peak_bytes: what all tensors together hold at the peak, which shares refer to.
    """
    inside = {region: row for region, row in regions.items() if region not in OUTSIDE}
    holder_of = {region: region for region in regions if region in OUTSIDE}
    for part, members in _children(inside).items():
        holder_of |= _split(members, part, at, peak_bytes) or dict.fromkeys(members, part)
    for holder in sorted(set(holder_of.values())):
        under = [region for region in regions if holder_of[region] == holder]
        if np.sum([regions[region] for region in under], axis=0).max() < NAMED * peak_bytes:
            holder_of |= dict.fromkeys(under, REST)
    return {region: _shown(holder) for region, holder in holder_of.items()}


def _split(members: Mapping[str, Row], part: str, at: int, peak_bytes: int) -> dict[str, str]:
    """Returns region -> holder for a part that is large enough to be split; empty if it stays one."""
    if _at(members, at) <= LARGE * peak_bytes:
        return {}
    children = _children(members)
    named = [name for name, rows in children.items() if name != part and _at(rows, at) >= NAMED * peak_bytes]
    if not named or len(named) > MOST:
        return {}
    found = {region: name for name in named for region in children[name]}
    return {region: found.get(region, f"rest of {part}") for region in members}


def _children(regions: Mapping[str, Row]) -> dict[str, dict[str, Row]]:
    """Returns the modules one name below the innermost module that all regions share, with the regions inside each.

    That module is a child of its own if it made something itself.
    """
    names = [region.split(".") for region in sorted(regions)]
    depth = 0
    while names and all(len(name) > depth and name[depth] == names[0][depth] for name in names):
        depth += 1
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for name in names:
        region = ".".join(name)
        found[".".join(name[: depth + 1])][region] = regions[region]
    return found


def _rows(graph: StepGraph, sizes: list[int], kept: list[int]) -> tuple[dict[str, Row], dict[str, Row]]:
    """Returns bytes at the kept moments by kind, and those of activations by region."""
    kinds: dict[str, Row] = defaultdict(lambda: np.zeros(len(kept) + 1, np.int64))
    regions: dict[str, Row] = defaultdict(lambda: np.zeros(len(kept) + 1, np.int64))
    for storage, size in zip(graph.storages, sizes, strict=True):
        first, last = _span(storage, kept)
        if first < last:
            row = regions[storage.region] if (kind := _kind(storage)) is None else kinds[kind]
            row[first] += size
            row[last] -= size
    kinds, regions = ({name: row.cumsum()[:-1] for name, row in rows.items()} for rows in (kinds, regions))
    return kinds, regions


def _kind(storage: Storage) -> str | None:
    """Returns which of `KINDS` holds it; None if it is a region."""
    if storage.kind != "activations":
        return storage.kind.replace("_", " ")
    return "optimizer step" if storage.phase in ("clip", "optimizer", "average") else None


def _span(storage: Storage, kept: list[int]) -> tuple[int, int]:
    """Returns the first kept moment at which it is held, and the first after that at which it is not."""
    last = len(kept) if storage.died is None else bisect_left(kept, storage.died + 1)
    return bisect_left(kept, storage.born), last


def _sampled(timeline: tuple[Moment, ...], top: int) -> list[int]:
    """Returns rising operator indices: the highest of each stretch of time, so that no spike is lost, and the peak.

    A stretch ends where a phase does, so that short phases are there.
    """
    column = max(timeline[-1].ms, 1e-9) / SAMPLES
    highest: dict[tuple[int, str], int] = {}
    for index, moment in enumerate(timeline):
        key = (min(int(moment.ms / column), SAMPLES - 1), moment.phase)
        if key not in highest or moment.nbytes > timeline[highest[key]].nbytes:
            highest[key] = index
    return sorted({*highest.values(), top, len(timeline) - 1})


def _at(rows: Mapping[str, Row], at: int) -> int:
    return int(sum(row[at] for row in rows.values()))


def _shown(holder: str) -> str:
    if not holder:
        return ITSELF
    return f"{holder} (module)" if holder in KINDS else holder
