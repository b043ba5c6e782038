"""Scratch memory of convolutions: measured on this CPU, estimated for a card, and given by a profile."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from medckpt.memory.graph import Op, StepGraph, TensorSpec
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import simulate
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step
from medckpt.memory.workspace import estimate, fast_bfloat16, has_scratch, measure_scratch

CPU = MemoryProfile(name="cpu", device="cpu")
CARD = MemoryProfile(name="card", device="cuda", conv_workspace=(0.1, 0.25, 1.0))


def step_of(precision: str = "32", rules: str = "cpu") -> StepGraph:
    net = nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1))
    step = Step(precision=precision, rules=rules)  # type: ignore[arg-type]
    return trace_step(net, torch.empty(2, 4, 12, 12, 12, device="meta"), step)


def convolutions(graph: StepGraph) -> list[Op]:
    found = [op for op in graph.ops if op.name.startswith("convolution")]
    assert [op.phase for op in found] == ["forward", "forward", "backward", "backward"]
    return found


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_measured_on_this_cpu(precision: str) -> None:
    for op in convolutions(step_of(precision)):
        first = measure_scratch(op)
        assert first >= 0
        low, expected, high = estimate(op, CPU)
        assert low <= expected <= high
        assert low <= first <= high, op.signature()
    assert measure_scratch(op) == first, "the same every time"


def test_an_operator_that_only_makes_its_result_has_none() -> None:
    spec = TensorSpec((64, 64), (64, 1), torch.float32)
    add = Op("add.Tensor", "", "forward", (torch.ops.aten.add.Tensor, (spec, spec), {}), 0, 3 * spec.nbytes)
    assert measure_scratch(add) == 0
    assert not has_scratch(add)
    assert estimate(add, CPU) == estimate(add, CARD) == (0, 0, 0)
    view = Op("view.default", "", "forward", None, 0, 0)
    assert measure_scratch(view) == 0


def test_an_operator_that_makes_more_than_its_result_is_seen() -> None:
    """Not an operator, but a function: the float64 copy and its double are there at once, 8 bytes per element each."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return (x.double() * 2).sum()

    spec = TensorSpec((1000,), (1,), torch.float32)
    op = Op("doubled", "", "forward", (doubled, (spec,), {}), 0, 4000)  # type: ignore[arg-type]
    assert measure_scratch(op) == pytest.approx(16000, abs=64)


def test_a_card_has_the_shares_of_its_profile() -> None:
    for op in convolutions(step_of("bf16-mixed", "cuda")):
        moved = op.bytes_moved
        assert estimate(op, CARD) == (int(0.1 * moved), int(0.25 * moved), moved)


def test_a_measured_operator_of_the_profile_has_no_spread() -> None:
    graph = step_of("bf16-mixed", "cuda")
    known = dataclasses.replace(CARD, workspaces={op.signature(): 7 * 2**20 for op in convolutions(graph)})
    for op in convolutions(graph):
        assert estimate(op, known) == (7 * 2**20,) * 3
    found = simulate(graph, known)
    assert found.unmodelled == {}
    assert found.parts["workspace"] == 7 * 2**20
    assert found.peak_interval == (found.peak_bytes, found.peak_bytes)
    assert "convolution" in simulate(graph, CARD).unmodelled


def test_only_what_could_set_the_peak_is_measured() -> None:
    """Measured and estimated, the peak lies in the estimate's interval, and measuring leaves none."""
    graph = step_of()
    measured, estimated = simulate(graph, CPU, measure=True), simulate(graph, CPU)
    assert estimated.peak_interval[0] <= measured.peak_bytes <= estimated.peak_interval[1]
    assert measured.peak_interval == (measured.peak_bytes, measured.peak_bytes)
    assert measured.unmodelled == {}
    assert "convolution" in estimated.unmodelled


def test_what_cannot_be_measured_is_named() -> None:
    graph = step_of()
    for op in convolutions(graph):
        func, args, kwargs = op.call or ()
        op.call = (func, (TensorSpec((1, 99), (99, 1), torch.float32), *args[1:]), kwargs)
    found = simulate(graph, CPU, measure=True)
    assert "convolution_backward.default" in found.unmodelled
    assert "could not be measured" in found.unmodelled["convolution_backward.default"]
    assert found.peak_interval[0] < found.peak_interval[1]


@torch.library.custom_op("medckpt_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda context, gradient: twice(gradient))


class WithCustom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(self.linear(x))


@pytest.mark.parametrize(("profile", "rules"), [(CPU, "cpu"), (CARD, "cuda")])
def test_a_custom_operator_is_named_and_widens_the_interval(profile: MemoryProfile, rules: str) -> None:
    step = Step(precision="32", rules=rules, optimizer=None)  # type: ignore[arg-type]
    inputs = torch.empty(4096, 4, device="meta")
    graph = trace_step(WithCustom(), inputs, step, lambda output: output.sum())
    found = simulate(graph, profile)
    assert list(found.unmodelled) == ["medckpt_tests.twice.default"]
    assert "not known" in found.unmodelled["medckpt_tests.twice.default"]
    low, high = found.peak_interval
    assert high >= low + 4096 * 1024 * 4
    assert found.reserved_bytes[1] >= high
    assert sum(found.parts.values()) == found.peak_bytes


@pytest.mark.skipif(fast_bfloat16(), reason="oneDNN computes bfloat16 on this CPU")
def test_unfolding_is_known_without_measuring() -> None:
    """Where torch computes convolutions itself, its copy of the input is the scratch memory, to the byte."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Conv3d(2, 5, 3, padding=1), nn.Conv3d(5, 6, 4, stride=4), nn.Conv3d(6, 3, 1)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    step = Step(precision="bf16-mixed", rules="cpu", optimizer=None)
    graph = trace_step(Three(), torch.empty(2, 2, 16, 16, 16), step)
    found = [op for op in graph.ops if op.name == "convolution.default"]
    assert len(found) == 3
    for op in found:
        low, expected, high = estimate(op, CPU)
        assert low <= expected <= high
        assert expected == measure_scratch(op)
    assert estimate(found[0], CPU)[1] == 2 * 16**3 * 2 * 27 * 2
