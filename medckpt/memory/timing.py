"""How long each region of a model takes under each option, measured by real steps on the device at hand."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from medckpt.memory.segments import Cut
from medckpt.memory.step import StepRunner

Direction = Literal["forward", "backward"]
RegionTimes = dict[tuple[str, Direction], float]
"""(region, direction) -> milliseconds per step; region "" is what lies outside of every region."""

_NOISE = 0.02
"""Share of its time by which an option must be faster than what a model does by itself to count as faster."""


def measure_times(
    steps: Mapping[str, StepRunner],
    regions: Sequence[str],
    *,
    repeats: int = 3,
    advance: Callable[[str], None] = lambda done: None,
) -> dict[str, RegionTimes]:
    """Returns the median times of each option's step, after one step to warm up.

    The steps of all options take turns, so that a change of the machine's speed hits them alike.

    Args:
        steps: runner per option, on real tensors; parameters are changed by the optimizer as in training.
        regions: fully qualified names of the modules to time.
        repeats: timed steps per option.
        advance: told the option after each step.
    """
    seen: dict[str, list[RegionTimes]] = defaultdict(list)
    for turn in range(repeats + 1):
        for option, runner in steps.items():
            times = timed_step(runner, regions)
            if turn:
                seen[option].append(times)
            advance(option)
    return {option: _medians(found) for option, found in seen.items()}


def timed_step(runner: StepRunner, regions: Sequence[str]) -> RegionTimes:
    """Runs one step and returns what it took, region by region.

    In backward a region's time begins when the gradient of its output is there and ends where the next one's begins,
    so what lies between two regions counts with the one before it. It is the same under every option.
    """
    clock = _Clock(runner.device)
    with clock.watching(runner.net, regions):
        clock.start()
        runner.run(lambda phase: clock.enter("", "backward") if phase == "backward" else None)
        clock.enter("", "backward")
    runner.net.zero_grad(set_to_none=True)
    return clock.times


def recomputed(times: RegionTimes) -> RegionTimes:
    """Returns what a step takes that runs each region's forward pass again in backward."""
    found = dict(times)
    for (region, way), ms in times.items():
        if region and way == "forward":
            found[region, "backward"] = times.get((region, "backward"), 0.0) + ms
    return found


def take_times(cuts: Mapping[str, Cut], times: Mapping[str, RegionTimes]) -> None:
    """Puts measured times of each option in the place of estimated ones, in place.

    Regions of the same work, as the estimates show it, share the mean of their times: more is known of it than of each.
    A region called several times has its sum at the first call. What lies between regions is the same under every
    option, and so is its time: that of the first.
    """
    options = list(cuts)
    known = _known(times, options, _alike(cuts))
    outside = times[options[0]]
    for option, cut in cuts.items():
        left = dict(known[option])
        between = {direction: outside.get(("", direction), 0.0) for direction in ("forward", "backward")}
        for segment in cut.segments:
            key: Any = (segment.region, segment.direction)
            segment.ms = left.pop(key, 0.0) if not segment.region.startswith("(") else between.pop(key[1], 0.0)


def _alike(cuts: Mapping[str, Cut]) -> list[list[str]]:
    """Returns the regions in groups whose estimated times are equal under every option."""
    work: dict[str, list[float]] = defaultdict(list)
    for cut in cuts.values():
        for segment in cut.segments:
            work[segment.region].append(segment.ms)
    groups: dict[tuple[float, ...], list[str]] = defaultdict(list)
    for region, estimates in work.items():
        groups[tuple(estimates)].append(region)
    return list(groups.values())


def _known(
    times: Mapping[str, RegionTimes], options: Sequence[str], groups: Sequence[Sequence[str]]
) -> dict[str, RegionTimes]:
    """Returns what the measured times say of each region: the mean of its group, and no gain within the noise."""
    found: dict[str, RegionTimes] = {option: {} for option in options}
    for group in groups:
        for option in options:
            ways: tuple[Direction, ...] = ("forward", "backward")
            means = {way: statistics.mean(times[option].get((region, way), 0.0) for region in group) for way in ways}
            plain = {way: found[options[0]].get((group[0], way), means[way]) for way in ways}
            if (1 - _NOISE) * sum(plain.values()) <= sum(means.values()) <= sum(plain.values()):
                means = plain
            found[option] |= {(region, way): means[way] for region in group for way in ways}
    return found


def _medians(found: Sequence[RegionTimes]) -> RegionTimes:
    return {key: statistics.median(times.get(key, 0.0) for times in found) for key in found[0]}


class _Clock:
    """Charges the time since the last event to what was running until then."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.times: RegionTimes = defaultdict(float)
        self.running: tuple[str, Direction] = ("", "forward")
        self.stack: list[tuple[str, Direction]] = []
        self.since = 0.0

    def start(self) -> None:
        self.since = self._now()

    def enter(self, region: str, direction: Direction) -> None:
        now = self._now()
        self.times[self.running] += (now - self.since) * 1e3
        self.running, self.since = (region, direction), now

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def watching(self, net: nn.Module, regions: Sequence[str]) -> Iterator[None]:
        modules = dict(net.named_modules())
        with ExitStack() as hooks:
            for region in regions:
                module = modules[region]
                hooks.callback(module.register_forward_pre_hook(self._begins(region)).remove)
                hooks.callback(module.register_forward_hook(self._ends(region)).remove)
            yield

    def _begins(self, region: str) -> Callable[..., None]:
        def begins(module: nn.Module, args: Any) -> None:
            self.stack.append(self.running)
            self.enter(region, "forward")

        return begins

    def _ends(self, region: str) -> Callable[..., None]:
        def begins_backward(gradient: Tensor) -> None:
            self.enter(region, "backward")

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(begins_backward)
            region_before, direction = self.stack.pop()
            self.enter(region_before, direction)

        return ends
