"""Times of regions in real steps: a region that waits is charged for it, and what is charged adds up to the step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medckpt.memory.options import lay_on
from medckpt.memory.segments import Cut, Segment
from medckpt.memory.step import Step, StepRunner
from medckpt.memory.timing import RegionTimes, measure_times, recomputed, take_times, timed_step
from tests.memory.nets import Plain, Residual

CPU = Step(precision="32", rules="cpu")


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Slow(Residual):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(super().forward(x), *self.seconds)


def runner(net: nn.Module) -> StepRunner:
    return StepRunner(net, torch.randn(1, 1, 4, 4, 4), None, CPU)


def test_each_region_is_charged_for_its_own_time() -> None:
    net = Plain([Slow(0.06, 0.0), Slow(0.0, 0.09)], [0, 0])
    began = time.perf_counter()
    times = timed_step(runner(net), ["blocks.0", "blocks.1"])
    whole = (time.perf_counter() - began) * 1e3
    assert times["blocks.0", "forward"] >= 60
    assert times["blocks.1", "backward"] >= 90
    assert times["blocks.0", "forward"] + times["blocks.1", "backward"] <= sum(times.values()) <= whole
    assert set(times) == {(name, way) for name in ("", "blocks.0", "blocks.1") for way in ("forward", "backward")}
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_recompute_is_charged_to_its_regions_backward_pass() -> None:
    net = lay_on(Plain([Slow(0.06, 0.0), Residual()], [0, 0]), {"blocks.0": "recompute_plain"})
    # The recompute ends early: with what the last saved tensor needs, before the wait.
    net.blocks[0].seconds = (0.0, 0.0)
    net.blocks[0].conv.register_forward_hook(lambda *_: time.sleep(0.05))
    times = timed_step(runner(net), ["blocks.0", "blocks.1"])
    assert times["blocks.0", "forward"] >= 50
    assert times["blocks.0", "backward"] >= 50


def test_options_take_turns_and_the_first_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from medckpt.memory import timing

    told: list[str] = []
    given = {"keep": iter([900.0, 1.0, 3.0, 2.0]), "lean": iter([900.0, 30.0, 10.0, 20.0])}
    runners = {option: runner(Plain([Residual(), Residual()], [0, 0])) for option in given}
    names = {id(one): option for option, one in runners.items()}
    monkeypatch.setattr(timing, "timed_step", lambda one, regions: {("a", "forward"): next(given[names[id(one)]])})
    found = measure_times(runners, ["a"], advance=told.append)
    assert found == {"keep": {("a", "forward"): 2.0}, "lean": {("a", "forward"): 20.0}}
    assert told == ["keep", "lean"] * 4


def test_what_runs_again_takes_one_more_forward_pass() -> None:
    times: RegionTimes = {("", "forward"): 5.0, ("a", "forward"): 2.0, ("a", "backward"): 3.0, ("", "backward"): 7.0}
    assert recomputed(times) == times | {("a", "backward"): 5.0}


def three_regions(estimates: dict[str, list[float]]) -> dict[str, Cut]:
    """A step of regions a, b and c, with what lies between them; `estimates` are the forward times of each option."""
    found = {}
    for option, (a, b, c) in estimates.items():
        segments = [Segment("(between)", "forward", 0, 0, 9.0)]
        segments += [Segment(name, "forward", 0, 0, ms) for name, ms in zip("abc", (a, b, c), strict=True)]
        segments += [Segment(name, "backward", 0, 0, 1.0) for name in "cba"]
        found[option] = Cut(segments, {}, [], {})
    return found


def measured(forward: list[float], backward: list[float], between: float = 10.0) -> RegionTimes:
    found: RegionTimes = {("", "forward"): between}
    found |= {(name, "forward"): ms for name, ms in zip("abc", forward, strict=True)}
    return found | {(name, "backward"): ms for name, ms in zip("abc", backward, strict=True)}


def test_equal_regions_share_their_measured_times_and_noise_is_no_gain() -> None:
    cuts = three_regions({"keep": [1.0, 1.0, 2.0], "lean": [3.0, 3.0, 4.0]})
    times = {"keep": measured([10, 20, 30], [40, 60, 80]), "lean": measured([15, 13, 30], [50, 36, 79], between=99.0)}
    take_times(cuts, times)
    found = {option: {(s.region, s.direction): s.ms for s in cut.segments} for option, cut in cuts.items()}
    keep = {("a", "forward"): 15, ("b", "forward"): 15, ("c", "forward"): 30} | {
        ("a", "backward"): 50, ("b", "backward"): 50, ("c", "backward"): 80, ("(between)", "forward"): 10,
    }  # fmt: skip
    assert found["keep"] == keep
    # A gain of 1 % (c) is noise; one of 12 % (a, b: 57 against 65) is not.
    assert found["lean"] == keep | {("a", "forward"): 14, ("b", "forward"): 14} | {
        ("a", "backward"): 43, ("b", "backward"): 43,
    }  # fmt: skip


def test_an_option_that_is_slower_counts_as_slower_however_little() -> None:
    cuts = three_regions({"keep": [1.0, 2.0, 3.0], "lean": [1.0, 2.0, 3.0]})
    take_times(cuts, {"keep": measured([10] * 3, [10] * 3), "lean": measured([10] * 3, [10.1] * 3)})
    assert [s.ms for s in cuts["lean"].segments if s.direction == "backward"] == [10.1] * 3
