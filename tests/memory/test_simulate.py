"""Peak memory: of a step worked out by hand, as properties of traced steps, and against what a real step takes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medckpt.memory.allocator import MIB
from medckpt.memory.apply import apply_recompute
from medckpt.memory.graph import Kind, Op, Phase, StepGraph, Storage, TensorSpec
from medckpt.memory.measure import allocations, held_bytes
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import find_regions
from medckpt.memory.simulate import PARTS, Simulation, replay, simulate, step_times
from medckpt.memory.step import Step, StepRunner
from medckpt.memory.trace import trace_step

aten = torch.ops.aten
CPU = MemoryProfile(name="cpu", device="cpu")
CARD = MemoryProfile(
    name="card", device="cuda", capacity_bytes=2**35, bandwidth_gb_s=1000.0, fp32_tflops=20.0, bf16_tflops=200.0,
    bandwidth_share=0.5, matmul_share=0.5, conv_share=0.25, launch_us=4.0,
    context_bytes=(400 * MIB, 500 * MIB), library_workspace_bytes=16 * MIB, conv_workspace=(0.0, 0.25, 1.0),
    reserve_slack=(0.0, 0.1),
)  # fmt: skip


def by_hand() -> StepGraph:
    """Five operators; sizes in bytes, (kind, size, born, died):

    parameters 1000 stay, inputs 30 are freed after op 1. Op 0 makes 600 (saved until 3) and 40 (freed after it), op 1
    makes 200 (freed after 2), op 2 nothing, op 3 makes a gradient of 1000, op 4 a temporary of 100.
    Held while they run: 1670, 1830, 1800, 2600, 2100.
    """
    places: list[tuple[str, Phase]] = [
        ("a", "forward"), ("b", "forward"), ("loss", "loss"), ("a", "backward"), ("", "optimizer"),
    ]  # fmt: skip
    spec = TensorSpec((10, 10), (10, 1), torch.float32)
    lives: list[tuple[Kind, int, int, int | None]] = [
        ("parameters", 1000, -1, None),
        ("inputs", 30, -1, 1),
        ("activations", 600, 0, 3),
        ("activations", 40, 0, 0),
        ("activations", 200, 1, 2),
        ("gradients", 1000, 3, None),
        ("activations", 100, 4, 4),
    ]
    graph = StepGraph(rules="cpu")
    for index, (region, phase) in enumerate(places):
        call = None if index == 2 else (aten.mul.Tensor, (spec, spec), {})
        graph.ops.append(Op(f"op{index}", region, phase, call, flops=0, bytes_moved=1200 if call else 0))
    for index, (kind, nbytes, born, died) in enumerate(lives):
        region, at = places[born] if born >= 0 else ("", None)
        graph.storages.append(Storage(nbytes, kind, born, region, at, died))
        graph.events += [(born, index, 1)] if born >= 0 else []
        graph.events += [(died, index, -1)] if died is not None else []
    graph.events.sort(key=lambda event: (event[0], -event[2]))
    return graph


def consistent(found: Simulation) -> None:
    assert tuple(found.parts) == PARTS
    assert all(nbytes >= 0 for nbytes in found.parts.values())
    assert sum(found.parts.values()) == found.peak_bytes
    assert max(moment.nbytes for moment in found.timeline) == found.peak_bytes
    assert found.peak_interval[0] <= found.peak_bytes <= found.peak_interval[1]
    assert found.reserved_bytes[0] <= found.reserved_bytes[1]
    # More where a rest of a block is too small to be split off.
    assert found.peak_bytes - found.parts["context"] <= found.allocated_bytes <= found.reserved_bytes[1]
    ends = [moment.ms for moment in found.timeline]
    assert ends == sorted(ends)


def test_a_cpu_holds_exactly_these_bytes() -> None:
    found = simulate(by_hand(), CPU)
    consistent(found)
    assert [moment.nbytes for moment in found.timeline] == [1670, 1830, 1800, 2600, 2100]
    assert found.peak_bytes == 2600
    assert found.peak_interval == (2600, 2600)
    assert found.reserved_bytes == (2600, 2600)
    assert found.where == type(found.where)("a", "op3", "backward")
    assert str(found.where) == "backward of a (op3)"
    held = {name: nbytes for name, nbytes in found.parts.items() if nbytes}
    assert held == {"parameters": 1000, "gradients": 1000, "saved": 600}
    assert [(moment.region, moment.phase) for moment in found.timeline][3:] == [("a", "backward"), ("", "optimizer")]
    assert found.step_ms is None
    assert [moment.ms for moment in found.timeline] == [1, 2, 3, 4, 5], "operator numbers where there are no rates"
    assert found.unmodelled == {}


def test_a_card_counts_in_blocks_with_its_library_and_context() -> None:
    """Rounded to 512: parameters and gradient 1024, 600 -> 1024, everything else 512."""
    found = simulate(by_hand(), CARD)
    consistent(found)
    fixed = 16 * MIB + 450 * MIB
    assert [moment.nbytes - fixed for moment in found.timeline] == [3072, 3072, 2560, 3072, 2560]
    assert found.peak_bytes == 3072 + fixed
    assert found.where.op == "op0", "the first of equal peaks"
    held = {"parameters": 1024, "inputs": 512, "saved": 1024, "transient": 512}
    assert {name: nbytes for name, nbytes in found.parts.items() if nbytes} == held | {
        "workspace": 16 * MIB,
        "context": 450 * MIB,
    }
    assert found.allocated_bytes == 3072 + 16 * MIB
    assert found.peak_interval == (3072 + 416 * MIB, 3072 + 516 * MIB)
    # Lowest: 16 MiB and a bit in blocks of 2 MiB. Highest: the replay (16 and 2 MiB) and 10 %.
    assert replay(by_hand(), [0] * 5, 16 * MIB).reserved == 18 * MIB
    assert found.reserved_bytes == (18 * MIB + 400 * MIB, int(18 * MIB * 1.1) + 500 * MIB)


def test_step_time_is_the_slowest_of_arithmetic_traffic_and_launch() -> None:
    spec = TensorSpec((10,), (1,), torch.float32)
    half = TensorSpec((10,), (1,), torch.bfloat16)

    def op(name: str, first: TensorSpec, flops: int, moved: int, call: bool = True) -> Op:
        return Op(name, "", "forward", (aten.mul.Tensor, (first, first), {}) if call else None, flops, moved)

    ops = [
        op("mul.Tensor", spec, 0, 100),  # launch: 4 us
        op("mul.Tensor", spec, 0, 5_000_000),  # 500 GB/s: 10 us
        op("mm.default", spec, 10**9, 100),  # 10 TFLOP/s: 100 us
        op("mm.default", half, 10**9, 100),  # 100 TFLOP/s: 10 us
        op("convolution.default", spec, 10**9, 100),  # 5 TFLOP/s: 200 us
        op("view.default", spec, 0, 0, call=False),  # nothing runs
    ]
    times = step_times(ops, CARD)
    assert times == pytest.approx([0.004, 0.010, 0.100, 0.010, 0.200, 0.0])
    tf32 = dataclasses.replace(CARD, tf32_tflops=40.0)
    assert step_times(ops[2:3], tf32) == pytest.approx([0.050])
    no_bf16 = dataclasses.replace(CARD, bf16_tflops=None)
    assert step_times(ops[3:4], no_bf16) == pytest.approx([0.100]), "float32's rate where there is no other"
    assert step_times(ops, dataclasses.replace(CARD, bandwidth_gb_s=None)) is None
    graph = by_hand()
    assert simulate(graph, CARD).step_ms == pytest.approx(sum(step_times(graph.ops, CARD) or []))


# Small networks, one of a kind.


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(channels, channels, 3, padding=1), nn.InstanceNorm3d(channels), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def convolutional(**_: Any) -> nn.Module:
    blocks = [Residual(6) for _ in range(3)]
    return nn.Sequential(nn.Conv3d(1, 6, 1), nn.Sequential(*blocks), nn.Dropout(0.1), nn.Conv3d(6, 2, 1))


def unet(**_: Any) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(6, 12, 24), strides=(2, 2), num_res_units=2,
        dropout=0.1,
    )  # fmt: skip


def swin(**_: Any) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, drop_rate=0.1)


def vit(side: int = 32) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.ViT(1, (side,) * 3, (8,) * 3, hidden_size=48, mlp_dim=96, num_layers=3, num_heads=4, dropout_rate=0.1)


def transformer(**_: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.Linear(32, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


NETS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "convolutional": (convolutional, (1, 16, 16, 16)),
    "unet": (unet, (1, 16, 16, 16)),
    "swin": (swin, (1, 64, 32, 32)),
    "vit": (vit, (1, 32, 32, 32)),
    "transformer": (transformer, (24, 8, 4)),
}
Settings = tuple[tuple[str, Any], ...]


@functools.cache
def net_of(name: str, side: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name][0](**({} if side is None else {"side": side})).train()


@functools.cache
def traced(name: str, batch: int, shape: tuple[int, ...], recompute: bool, settings: Settings = ()) -> StepGraph:
    net = net_of(name, shape[1] if name == "vit" else None)
    regions = find_regions(net, "all") if recompute else ()
    step = Step(**{"rules": "cuda", "precision": "bf16-mixed", **dict(settings)})
    return trace_step(net, torch.empty(batch, *shape, device="meta"), step, recompute=regions)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("convolutional", False), ("convolutional", True), ("vit", True), ("transformer", False)],
)
def test_peak_never_falls_as_the_batch_grows(name: str, recompute: bool) -> None:
    shape = NETS[name][1]
    found = [simulate(traced(name, batch, shape, recompute), CARD) for batch in (1, 2, 3, 4, 8)]
    for one in found:
        consistent(one)
    peaks = [one.peak_bytes for one in found]
    assert peaks == sorted(peaks)
    assert peaks[-1] > peaks[0]
    for index in (0, 1):
        assert [one.peak_interval[index] for one in found] == sorted(one.peak_interval[index] for one in found)


@pytest.mark.parametrize(("name", "recompute"), [("convolutional", False), ("convolutional", True), ("vit", False)])
def test_peak_never_falls_as_the_patch_grows(name: str, recompute: bool) -> None:
    peaks = [simulate(traced(name, 2, (1,) + (side,) * 3, recompute), CARD).peak_bytes for side in (16, 32, 48)]
    assert peaks[0] < peaks[1] < peaks[2]


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
@pytest.mark.parametrize("name", ["convolutional", "vit", "transformer"])
def test_recompute_saves(name: str, precision: str) -> None:
    settings = (("precision", precision),)
    saved = []
    for recompute in (False, True):
        graph = traced(name, 2, NETS[name][1], recompute, settings)
        found = [s.nbytes for s in graph.storages if s.kind == "activations" and graph.saved_for_backward(s)]
        saved.append(sum(found))
    assert saved[1] < saved[0]


def test_recompute_does_the_forward_twice() -> None:
    plain, again = (traced("convolutional", 2, NETS["convolutional"][1], recompute) for recompute in (False, True))

    def count(graph: StepGraph, phase: str) -> int:
        return sum(op.name == "convolution.default" for op in graph.ops if op.phase == phase)

    assert [count(plain, phase) for phase in ("forward", "recompute", "backward")] == [5, 0, 0]
    assert [count(again, phase) for phase in ("forward", "recompute", "backward")] == [5, 3, 0]
    times = [simulate(graph, CARD).step_ms for graph in (plain, again)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1] > times[0]


@pytest.mark.parametrize(
    ("settings", "part", "copies"),
    [
        ((), "gradients", 1),
        ((), "optimizer", 2),
        ((("optimizer", "sgd"),), "optimizer", 1),
        ((("optimizer", None),), "optimizer", 0),
        ((("averages", True),), "averages", 1),
    ],
)
def test_weights_are_there_this_many_times(settings: Settings, part: str, copies: int) -> None:
    """At the end of the step, on a CPU, all but AdamW's counters of 4 bytes per parameter."""
    graph = traced("transformer", 2, NETS["transformer"][1], False, (*settings, ("rules", "cpu"), ("precision", "32")))
    weights = list(net_of("transformer").parameters())
    nbytes = sum(s.nbytes for s in graph.storages if s.kind == part)
    counters = 4 * len(weights) if part == "optimizer" and copies == 2 else 0
    assert nbytes == copies * sum(4 * weight.numel() for weight in weights) + counters


def measured(net: nn.Module, inputs: Any, loss: Any, step: Step, recompute: bool) -> int:
    """Returns the bytes that a real step holds at its worst, from the events of torch's own allocator."""
    net = copy.deepcopy(net)
    if recompute:
        apply_recompute(net, find_regions(net, "all"))
        net(inputs)  # a region's first forward copies constants, once
    runner = StepRunner(net, inputs, loss, step)
    gc.collect()
    held = held_bytes(tensor for tensors in runner.held().values() for tensor in tensors)
    return held + allocations(runner.run).peak


class Labelled(nn.Module):
    """A segmentation loss that holds its labels."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("labels", torch.randint(0, 2, shape))
        self.register_buffer("weight", torch.tensor([0.3, 0.7]))

    def forward(self, logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, self.labels, self.weight)


REAL: list[tuple[str, int, bool, dict[str, Any]]] = [
    ("convolutional", 3, False, {"precision": "32"}),
    ("convolutional", 3, False, {"precision": "bf16-mixed"}),
    ("unet", 2, False, {"precision": "32", "clip_norm": 1.0}),
    ("unet", 2, True, {"precision": "bf16-mixed"}),
    ("convolutional", 2, False, {"precision": "32", "optimizer": "sgd", "accumulate": 2}),
    ("convolutional", 2, False, {"precision": "bf16-mixed", "optimizer": None}),
    ("swin", 1, True, {"precision": "bf16-mixed"}),
    ("vit", 4, False, {"precision": "32"}),
    ("vit", 4, True, {"precision": "32", "clip_norm": 1.0, "averages": True}),
    ("vit", 4, False, {"precision": "bf16-mixed", "weight_cache": False}),
    ("transformer", 16, False, {"precision": "32", "averages": True, "accumulate": 2}),
    ("transformer", 16, False, {"precision": "bf16-mixed", "clip_norm": 1.0}),
]


@pytest.mark.parametrize(
    ("name", "batch", "recompute", "settings"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one[0] == "swin" else []) for one in REAL],
    ids=[f"{name}-{'all' if again else 'none'}-{'-'.join(map(str, s.values()))}" for name, _, again, s in REAL],
)
def test_a_real_step_on_this_cpu_takes_what_is_foreseen(
    name: str, batch: int, recompute: bool, settings: dict[str, Any]
) -> None:
    """Within 1 %. What is missed is the state of torch's random numbers, which every recomputed region keeps."""
    net, inputs = net_of(name), torch.randn(batch, *NETS[name][1])
    loss = Labelled((batch, *NETS[name][1][1:])) if name in ("unet", "convolutional") else None
    step = Step(rules="cpu", **settings)
    regions = find_regions(net, "all") if recompute else ()
    foreseen = simulate(trace_step(net, inputs, step, loss, recompute=regions), CPU, measure=True)
    consistent(foreseen)
    true = measured(net, inputs, loss, step, recompute)
    states = torch.get_rng_state().nbytes * len(regions)
    assert true - states - 0.01 * true <= foreseen.peak_bytes <= 1.01 * true
