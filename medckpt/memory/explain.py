"""Why a peak is where it is: who holds the memory, moment by moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from medckpt.memory.graph import StepGraph, Storage
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import Simulation, storage_sizes

SAMPLES = 600
"""Moments of a step that a picture shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Memory over a step, split by who holds it."""

    ms: tuple[float, ...]
    """The moments: milliseconds since the step began (operator numbers where times are not known), rising."""
    bands: dict[str, tuple[int, ...]]
    """Holder -> bytes at each moment; at each moment their sum is the memory held. Largest at the peak first."""
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
    """Returns who holds the memory of a simulated step: regions of the model for what they made, else the kind."""
    count = len(graph.ops)
    totals = [moment.nbytes for moment in simulation.timeline]
    top = max(range(count), key=totals.__getitem__)
    kept = _sampled(totals, top)
    position = {index: number for number, index in enumerate(kept)}
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * (len(kept) + 1))
    for storage, size in zip(graph.storages, storage_sizes(graph, profile), strict=True):
        first = 0 if storage.born < 0 else _at_or_after(kept, storage.born)
        last = len(kept) if storage.died is None else _at_or_after(kept, storage.died + 1)
        if last > first and size:
            band = changes[holder(storage)]
            band[first] += size
            band[last] -= size
    bands = {name: _running(steps) for name, steps in changes.items()}
    rest = [totals[index] - sum(band[number] for band in bands.values()) for number, index in enumerate(kept)]
    bands["scratch and context"] = tuple(rest)
    at = position[top]
    ordered = dict(sorted(bands.items(), key=lambda item: item[1][at], reverse=True))
    return Explanation(
        ms=tuple(simulation.timeline[index].ms for index in kept),
        bands=ordered,
        phases=tuple(simulation.timeline[index].phase for index in kept),
        peak=at,
        holders=tuple((name, band[at]) for name, band in ordered.items() if band[at] > 0),
        timed=simulation.step_ms is not None,
        simulation=simulation,
    )


def holder(storage: Storage) -> str:
    """Returns whose a storage is: its kind, or for activations the part of the model that made it, two names deep."""
    if storage.kind != "activations":
        return storage.kind.replace("_", " ")
    return ".".join(storage.region.split(".")[:2]) or "the model itself"


def _sampled(totals: list[int], top: int) -> list[int]:
    """Returns rising operator indices: the highest of each stretch, so that no spike is lost, and the peak."""
    stretch = max(1, -(-len(totals) // SAMPLES))
    kept = {
        max(range(a, min(a + stretch, len(totals))), key=totals.__getitem__) for a in range(0, len(totals), stretch)
    }
    return sorted(kept | {top})


def _at_or_after(kept: list[int], index: int) -> int:
    return bisect_left(kept, index)


def _running(steps: list[int]) -> tuple[int, ...]:
    now, sums = 0, []
    for step in steps[:-1]:
        now += step
        sums.append(now)
    return tuple(sums)
