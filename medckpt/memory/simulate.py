"""Reads a StepGraph with a device's figures: peak memory part by part, where it is, and how long the step takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from medckpt.memory.allocator import MIB, CachingAllocator, rounded
from medckpt.memory.graph import HOST_COPIES, Op, Phase, StepGraph
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.workspace import Interval, estimate, is_custom, measured_scratch

PARTS = (
    "parameters",
    "gradients",
    "buckets",
    "optimizer",
    "averages",
    "inputs",
    "weight_casts",
    "saved",
    "transient",
    "workspace",
    "context",
)
"""What a peak is made of. buckets: the second copy of the gradients that DDP has on several devices; saved: made in
forward for the backward pass; transient: all other tensors of the step; workspace: scratch memory of kernels and
libraries; context: what the device's runtime takes for itself."""


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a step."""

    region: str
    op: str
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase} of {self.region or 'the model'} ({self.op})"


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory held while one operator runs."""

    ms: float
    """Milliseconds since the step began, at the operator's end; its number in the step where times are not known."""
    nbytes: int
    region: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a step takes on a device."""

    peak_bytes: int
    """All that the device holds at the worst instant, the runtime's context included."""
    allocated_bytes: int
    """The peak as the allocator counts it (`torch.cuda.max_memory_allocated`): without the runtime's context, and with
    the rests of blocks that are too small to be split off."""
    peak_interval: tuple[int, int]
    """The same with every scratch memory and context at its lowest and at its highest; equal if all is measured."""
    reserved_bytes: tuple[int, int]
    """What the process takes from the device: lowest and highest."""
    parts: dict[str, int]
    """Their sum is the peak."""
    step_ms: float | None
    where: Where
    timeline: tuple[Moment, ...]
    unmodelled: dict[str, str]
    """What is not certain, and why."""


def simulate(graph: StepGraph, profile: MemoryProfile, *, measure: bool = False) -> Simulation:
    """Returns what the step takes on the device of `profile`.

    Args:
        graph: from `trace_step`, with the rules of the profile's device.
        profile: the device.
        measure: run those convolutions alone, on this machine's CPU, whose scratch memory could set the peak; for
            a profile of a CPU only. Otherwise it is estimated, and the interval says how far that may be off.
    """
    unmodelled = graph.notes | {
        op.name: "not an operator of torch: what its kernels allocate for themselves is not known"
        for op in graph.ops
        if is_custom(op)
    }
    live = _live(graph, profile)
    scratch = [estimate(op, profile) for op in graph.ops]
    if measure and profile.device == "cpu":
        scratch = _measured(graph, live, scratch, unmodelled, profile.capacity_bytes)
    elif any(high > low and op.name.startswith("conv") for op, (low, _, high) in zip(graph.ops, scratch, strict=True)):
        unmodelled["convolution"] = "the scratch memory of its kernels is estimated; `medckpt profile` measures it"
    peaks = [[now + one[which] for now, one in zip(live, scratch, strict=True)] for which in range(3)]
    at = max(range(len(live)), key=peaks[1].__getitem__)
    library, (low_context, high_context) = profile.library_workspace_bytes, profile.context_bytes
    context = (low_context + high_context) // 2
    times = step_times(graph.ops, profile)
    total = _cumulative(times) if times else [float(index + 1) for index in range(len(live))]
    fixed = library + context
    op = graph.ops[at]
    peak = peaks[1][at] + fixed
    replayed = None if profile.device == "cpu" else replay(graph, [one[1] for one in scratch], library)
    return Simulation(
        peak_bytes=peak,
        allocated_bytes=peak if replayed is None else replayed.peak_allocated,
        peak_interval=(max(peaks[0]) + library + low_context, max(peaks[2]) + library + high_context),
        reserved_bytes=_reserved(graph, profile, scratch, max(peaks[0])),
        parts=_parts(graph, profile, at) | {"workspace": scratch[at][1] + library, "context": context},
        step_ms=total[-1] * graph.repeats if times else None,
        where=Where(op.region, op.name, op.phase),
        timeline=tuple(
            Moment(ms, nbytes + fixed, op.region, op.phase)
            for ms, nbytes, op in zip(total, peaks[1], graph.ops, strict=True)
        ),
        unmodelled=unmodelled,
    )


def step_times(ops: Sequence[Op], profile: MemoryProfile) -> list[float] | None:
    """Returns milliseconds per operator by a roofline: the slowest of arithmetic, memory traffic and launch.

    None if the profile has no bandwidth, no rate, or no host link where one is used. float32 takes TF32 where the
    device has it, as medckpt trains. Copies to host memory and back are charged in full, at the link's rate in one
    direction and one after the other, as if nothing else could run meanwhile: overlap can only make a step faster.
    """
    if profile.bandwidth_gb_s is None or profile.fp32_tflops is None:
        return None
    fp32 = profile.tf32_tflops or profile.fp32_tflops
    rates = {torch.float16: profile.fp16_tflops or fp32, torch.bfloat16: profile.bf16_tflops or fp32}
    bytes_per_ms = profile.bandwidth_gb_s * 1e6 * profile.bandwidth_share
    launch_ms = profile.launch_us / 1e3
    times = []
    for op in ops:
        if op.call is None:
            times.append(0.0)
            continue
        if op.name in HOST_COPIES:
            if profile.host_link_gb_s is None:
                return None
            times.append(max(op.bytes_moved / (profile.host_link_gb_s * 1e6), launch_ms))
            continue
        compute = 0.0
        if op.flops:
            share = profile.conv_share if op.name.startswith("convolution") else profile.matmul_share
            compute = op.flops / (rates.get(op.dtype, fp32) * 1e9 * share)
        times.append(max(compute, op.bytes_moved / bytes_per_ms, launch_ms))
    return times


def _live(graph: StepGraph, profile: MemoryProfile) -> list[int]:
    """Returns the bytes held while each operator runs, its results included."""
    sizes = storage_sizes(graph, profile)
    now = sum(size for size, storage in zip(sizes, graph.storages, strict=True) if storage.born < 0)
    live = [0] * len(graph.ops)
    done = 0
    for index, storage, change in graph.events:
        # An operator that makes nothing runs in what is there, and what it frees is there while it runs.
        while done < index:
            live[done] = max(live[done], now)
            done += 1
        live[index] = max(live[index], now if change < 0 else now + sizes[storage])
        now += change * sizes[storage]
    while done < len(live):
        live[done] = max(live[done], now)
        done += 1
    return live


def storage_sizes(graph: StepGraph, profile: MemoryProfile) -> list[int]:
    """Returns bytes per storage as the device's allocator counts them."""
    return [s.nbytes if profile.device == "cpu" else rounded(s.nbytes) for s in graph.storages]


_MEASURED_SHARE = 0.5
"""An operator that could take more of the machine's memory than this is not run in order to be measured."""


def _measured(
    graph: StepGraph, live: list[int], scratch: list[Interval], unmodelled: dict[str, str], capacity: int | None
) -> list[Interval]:
    """Measures scratch memory, the most likely peak first, until no other operator could reach what is found."""
    unknown: set[int] = set()
    found = list(scratch)
    highest = max(live)
    order = sorted(range(len(live)), key=lambda index: live[index] + scratch[index][2], reverse=True)
    for index in order:
        if live[index] + scratch[index][2] <= highest:
            break
        op = graph.ops[index]
        if scratch[index][0] == scratch[index][2]:
            continue
        if is_custom(op):  # its kernels may not stand the zeros that a measurement would give them
            unknown.add(index)
            continue
        if op.bytes_moved + scratch[index][2] > (capacity or math.inf) * _MEASURED_SHARE:
            unmodelled[op.name] = "too large to be run on this machine: its scratch memory is estimated"
            unknown.add(index)
            continue
        try:
            taken = measured_scratch(op)
        except Exception as error:  # a kernel may raise anything
            line = next(iter(str(error).splitlines()), type(error).__name__)
            unmodelled[op.name] = f"its scratch memory could not be measured: {line}"
            unknown.add(index)
            continue
        found[index] = (taken,) * 3
        highest = max(highest, live[index] + taken)
    # What was left out cannot set the peak: its guess must not either. What could not be measured keeps its interval.
    return [
        (low, min(expected, max(0, highest - now)), min(high, max(0, highest - now)))
        if low < high and index not in unknown
        else (low, expected, high)
        for index, (now, (low, expected, high)) in enumerate(zip(live, found, strict=True))
    ]


def _parts(graph: StepGraph, profile: MemoryProfile, at: int) -> dict[str, int]:
    """Returns the bytes per part that are held while operator `at` runs."""
    parts = dict.fromkeys(PARTS, 0)
    for storage, size in zip(graph.storages, storage_sizes(graph, profile), strict=True):
        if storage.born > at or (storage.died is not None and storage.died < at):
            continue
        if storage.kind != "activations":
            parts[storage.kind] += size
        else:
            parts["saved" if graph.saved_for_backward(storage) else "transient"] += size
    return parts


def _cumulative(times: Sequence[float]) -> list[float]:
    total, now = [], 0.0
    for time in times:
        now += time
        total.append(now)
    return total


def _reserved(graph: StepGraph, profile: MemoryProfile, scratch: Sequence[Interval], lowest: int) -> tuple[int, int]:
    """Returns what the process takes from the device, lowest and highest.

    Lowest: the peak without scratch memory, in whole blocks of 2 MiB. Highest: a replay of the allocator over two
    steps with every scratch memory at its highest, and the profile's slack on top.
    """
    if profile.device == "cpu":
        return lowest, lowest + max((high for _, _, high in scratch), default=0)
    library, (low_context, high_context) = profile.library_workspace_bytes, profile.context_bytes
    low = -(-(lowest + library) // (2 * MIB)) * 2 * MIB
    high = replay(graph, [one[2] for one in scratch], library).reserved
    slack = 1 + profile.reserve_slack[1]
    return low + low_context, int(high * slack) + high_context


def replay(graph: StepGraph, scratch: Sequence[int], library_bytes: int = 0) -> CachingAllocator:
    """Returns CUDA's caching allocator as two steps in a row leave it; its peak is the second step's."""
    allocator = CachingAllocator()
    allocator.allocate(library_bytes)
    before = [index for index, storage in enumerate(graph.storages) if storage.born < 0]
    held: dict[int, int | None] = {}
    by_op: dict[int, list[tuple[int, int]]] = {}
    for index, storage_index, change in graph.events:
        by_op.setdefault(index, []).append((storage_index, change))
    for _ in range(2):
        for storage_index in before:  # an input that a step frees comes anew
            if storage_index not in held:
                held[storage_index] = allocator.allocate(graph.storages[storage_index].nbytes)
        allocator.peak_allocated = allocator.allocated
        for index in range(len(graph.ops)):
            changes = by_op.get(index, [])
            for storage_index, change in changes:
                if change > 0:
                    held[storage_index] = allocator.allocate(graph.storages[storage_index].nbytes)
            if scratch[index]:
                allocator.free(allocator.allocate(scratch[index]))
            for storage_index, change in changes:
                if change < 0 and storage_index in held:
                    allocator.free(held.pop(storage_index))
        for storage_index in [index for index in held if graph.storages[index].born >= 0]:
            allocator.free(held.pop(storage_index))  # gradients, until the next step begins
    return allocator
