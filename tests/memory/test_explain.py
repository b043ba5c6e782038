"""Who holds the memory of a step: by hand on a small one, and as properties of traced networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from medckpt.memory.explain import ITSELF, KINDS, LARGE, REST, SAMPLES, Explanation, divide, explain
from medckpt.memory.graph import Kind, Op, Phase, StepGraph, Storage
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import simulate
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step

CPU = MemoryProfile(name="plain", device="cpu")
A100 = MemoryProfile(
    name="card", device="cuda", capacity_bytes=2**35, bandwidth_gb_s=1555.0, fp32_tflops=19.5, bf16_tflops=312.0,
    context_bytes=(2**28, 2**29), library_workspace_bytes=2**24, conv_workspace=(0.0, 0.25, 1.0),
)  # fmt: skip


def small_step() -> StepGraph:
    """Six operators. a.x makes 100 bytes in op 0, a.y 200 in 1, b 50 in 2, the loss 10 in 3; backward frees them."""
    graph = StepGraph(rules="cpu")
    places: list[tuple[str, Phase]] = [
        ("a.x", "forward"), ("a.y", "forward"), ("b", "forward"), ("loss", "loss"), ("a.y", "backward"),
        ("", "optimizer"),
    ]  # fmt: skip
    graph.ops = [
        Op(name="make", region=region, phase=phase, call=None, flops=0, bytes_moved=0) for region, phase in places
    ]
    lives: list[tuple[int, Kind, int, int | None]] = [
        (1000, "parameters", -1, None),
        (100, "activations", 0, 4),
        (200, "activations", 1, 4),
        (50, "activations", 2, 3),
        (10, "activations", 3, 3),
        (300, "gradients", 4, None),
        (70, "activations", 5, 5),
        (7, "inputs", -1, 1),
        (9, "inputs", -1, -1),
    ]
    for index, (nbytes, kind, born, died) in enumerate(lives):
        region, phase = places[born] if born >= 0 else ("", None)
        graph.storages.append(Storage(nbytes, kind, born, region, phase, died))
        if born >= 0:
            graph.events.append((born, index, 1))
        if died is not None:
            graph.events.append((died, index, -1))
    graph.events.sort(key=lambda event: (event[0], -event[2]))
    return graph


def test_bands_of_a_small_step_are_those_counted_by_hand() -> None:
    graph = small_step()
    found = explain(graph, simulate(graph, CPU), CPU)
    assert found.ms == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert not found.timed
    assert found.phases == ("forward", "forward", "forward", "loss", "backward", "optimizer")
    assert found.bands == {
        "parameters": (1000, 1000, 1000, 1000, 1000, 1000),
        "gradients": (0, 0, 0, 0, 300, 300),
        "a": (100, 300, 300, 300, 300, 0),  # 300 of 1600: too little to be split
        "inputs": (7, 7, 0, 0, 0, 0),
        "b": (0, 0, 50, 50, 0, 0),
        "optimizer step": (0, 0, 0, 0, 0, 70),
        REST: (0, 0, 0, 10, 0, 0),  # the loss: under 3 % of the peak
    }
    assert list(found.bands)[:3] == ["parameters", "a", "gradients"]
    assert found.peak == 4
    assert found.holders == (("parameters", 1000), ("a", 300), ("gradients", 300))


def test_a_freed_storage_counts_while_the_operator_that_frees_it_runs_even_if_that_makes_nothing() -> None:
    graph = small_step()
    graph.ops.append(Op(name="add_", region="", phase="optimizer", call=None, flops=0, bytes_moved=0))
    graph.storages[6].died = 6
    graph.events[-1] = (6, 6, -1)
    found = explain(graph, simulate(graph, CPU), CPU)
    assert found.bands["optimizer step"] == (0, 0, 0, 0, 0, 70, 70)
    assert "scratch" not in found.bands


def rows(**peak: int) -> dict[str, np.ndarray]:
    """Regions by `a__b` for a.b, each held at the second of two moments only."""
    return {name.replace("__", "."): np.array([0, nbytes]) for name, nbytes in peak.items()}


def test_a_part_above_the_limit_is_split_once() -> None:
    regions = rows(vit__layers1__0=40, vit__layers2__0=20, vit__norm=2, vit=2, decoder1__conv=20, decoder1__norm=5)
    assert LARGE == 0.25  # which decoder1 reaches and does not exceed
    assert divide(regions, 1, 100) == {
        "vit.layers1.0": "vit.layers1",
        "vit.layers2.0": "vit.layers2",
        "vit.norm": "rest of vit",
        "vit": "rest of vit",
        "decoder1.conv": "decoder1",
        "decoder1.norm": "decoder1",
    }


def test_a_wrapper_is_passed_over_and_alike_blocks_stay_together() -> None:
    blocks = {f"net__blocks__{index}__mlp": 8 for index in range(8)}
    found = divide(rows(**blocks, net__head=30, loss=4) | {"": np.array([0, 5])}, 1, 100)
    assert set(found.values()) == {"net.blocks", "net.head", "loss", ITSELF}
    assert divide(rows(net__conv=30), 1, 100) == {"net.conv": "net.conv"}


def test_what_is_small_at_the_peak_but_not_at_another_moment_keeps_its_name() -> None:
    regions = {"early": np.array([50, 0]), "late": np.array([0, 90]), "tiny": np.array([1, 1])}
    assert divide(regions, 1, 100) == {"early": "early", "late": "late", "tiny": REST}


def test_a_module_named_like_a_kind_of_memory_is_no_kind() -> None:
    assert divide(rows(context__conv=20, inputs=20), 1, 100) == {
        "context.conv": "context (module)",
        "inputs": "inputs (module)",
    }


def test_the_division_does_not_depend_on_the_order_of_modules() -> None:
    regions = rows(a__x=40, a__y=10, b=3, c__x=2, c__y=1)
    assert divide(regions, 1, 100) == divide(dict(reversed(regions.items())), 1, 100)


class Branches(nn.Module):
    """A wide and a narrow branch of two levels each, and a sum outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(self.block(1, 16), self.block(16, 16), self.block(16, 2))
        self.narrow = self.block(1, 2)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs), nn.GELU())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.wide(image) + self.narrow(image)


CASES = {
    "fp32": (Step(precision="32", clip_norm=1.0), A100, ()),
    "sgd": (Step(precision="bf16-mixed", optimizer="sgd", averages=True, accumulate=2), A100, ()),
    "recompute": (Step(clip_norm=1.0), A100, ("wide.0", "wide.1")),
    "forward and backward": (Step(optimizer=None), A100, ()),
    "cpu": (Step(rules="cpu"), CPU, ("wide",)),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[StepGraph, MemoryProfile, Explanation]:
    step, profile, recompute = CASES[request.param]
    graph = trace_step(Branches(), torch.empty(2, 1, 12, 12, 12), step, recompute=recompute)
    return graph, profile, explain(graph, simulate(graph, profile), profile)


def test_bands_sum_to_the_memory_held_at_every_moment(case: tuple[StepGraph, MemoryProfile, Explanation]) -> None:
    graph, _, found = case
    assert all(len(band) == len(found.ms) == len(found.phases) for band in found.bands.values())
    sums = np.sum(list(found.bands.values()), axis=0)
    held = np.array([found.simulation.timeline[op].nbytes for op in found.ops])
    makes = {index for index, _, change in graph.events if change > 0}
    allocates = np.array([op in makes for op in found.ops])
    assert (sums[allocates] == held[allocates]).all()
    # One that makes nothing is counted by the simulation after what it frees, here while it runs.
    assert (sums >= held).all()
    assert sums.max() == sums[found.peak] == found.simulation.peak_bytes
    assert min(min(band) for band in found.bands.values()) >= 0
    assert len(found.ms) <= 2 * SAMPLES
    assert found.ms == tuple(found.simulation.timeline[op].ms for op in found.ops)
    assert list(found.ops) == sorted(set(found.ops))


def test_at_the_peak_the_bands_are_the_parts(case: tuple[StepGraph, MemoryProfile, Explanation]) -> None:
    _, profile, found = case
    parts, at = found.simulation.parts, dict(found.holders)
    for kind in ("parameters", "gradients", "optimizer", "averages", "inputs", "context"):
        assert at.get(kind, 0) == parts[kind]
    assert at.get("weight casts", 0) == parts["weight_casts"]
    assert at.get("scratch", 0) == parts["workspace"]
    made = sum(nbytes for name, nbytes in found.holders if name not in KINDS or name == "optimizer step")
    assert made == parts["saved"] + parts["transient"]
    assert found.timed == (profile is A100)
    assert [nbytes for _, nbytes in found.holders] == sorted((n for _, n in found.holders), reverse=True)


def test_a_network_is_explained_by_its_parts_and_always_alike(
    case: tuple[StepGraph, MemoryProfile, Explanation],
) -> None:
    graph, profile, found = case
    parts = {name for name in found.bands if name not in KINDS}
    assert any(name.startswith("wide") for name in parts)
    assert parts <= {"wide", "rest of wide", "wide.0", "wide.1", "wide.2", "narrow", "loss", ITSELF, REST}
    assert explain(graph, found.simulation, profile) == found


def test_a_long_step_is_sampled_without_losing_its_peak_or_a_phase() -> None:
    graph = StepGraph(rules="cpu")
    for index in range(5000):
        phase: Phase = "loss" if index == 2001 else "forward" if index < 2500 else "backward"
        graph.ops.append(Op(name="make", region="a", phase=phase, call=None, flops=0, bytes_moved=0))
        graph.storages.append(Storage(10**6 if index == 3333 else index % 7, "activations", index, "a", phase, index))
        graph.events += [(index, index, 1), (index, index, -1)]
    found = explain(graph, simulate(graph, CPU), CPU)
    assert SAMPLES <= len(found.ms) <= SAMPLES + 5
    assert found.ms[found.peak] == 3334
    assert found.bands["a"][found.peak] == 10**6
    assert "loss" in found.phases
    assert all(value == 6 for value in sorted(found.bands["a"])[10:-10])  # of seven in a row the highest
