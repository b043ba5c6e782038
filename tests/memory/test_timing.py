"""Times of regions in real steps: a region that waits is charged for it, and what is charged adds up to the step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medckpt.memory.options import lay_on
from medckpt.memory.step import Step, StepRunner
from medckpt.memory.timing import measure_times, timed_step
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
