"""Steps of other batch sizes: equal to a real trace, or refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from medckpt.memory.batches import extrapolate
from medckpt.memory.graph import StepGraph
from medckpt.memory.regions import find_regions
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ReLU()),
        nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Dropout(0.1)),
        nn.Conv3d(4, 2, 1),
    )


def vit() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.ViT(1, (16,) * 3, (8,) * 3, hidden_size=24, mlp_dim=48, num_layers=2, num_heads=2)


def unet() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2))


BUILD = {"convolutional": convolutional, "vit": vit, "unet": unet}


@functools.cache
def net_of(name: str) -> nn.Module:
    return BUILD[name]().train()


@functools.cache
def traced(name: str, batch: int, recompute: bool, precision: str, rules: str) -> StepGraph:
    net = net_of(name)
    step = Step(precision=precision, rules=rules, clip_norm=1.0)  # type: ignore[arg-type]
    regions = find_regions(net, "all") if recompute else ()
    return trace_step(net, torch.empty(batch, 1, 16, 16, 16, device="meta"), step, recompute=regions)


def same(first: StepGraph, second: StepGraph) -> None:
    assert [op.signature() for op in first.ops] == [op.signature() for op in second.ops]
    assert first.ops == second.ops
    assert first.storages == second.storages
    assert first.events == second.events
    assert first.rules == second.rules


@pytest.mark.parametrize(
    ("name", "recompute", "precision", "rules"),
    [
        ("convolutional", False, "bf16-mixed", "cuda"),
        ("convolutional", True, "32", "cpu"),
        ("vit", False, "bf16-mixed", "cuda"),
        ("vit", True, "32", "cuda"),
        ("unet", False, "bf16-mixed", "cpu"),
    ],
)
def test_equals_a_trace_to_the_byte(name: str, recompute: bool, precision: str, rules: str) -> None:
    two, three = (traced(name, batch, recompute, precision, rules) for batch in (2, 3))
    for batch in (4, 8):
        foreseen = extrapolate((two, three), (2, 3), batch)
        assert foreseen is not None
        same(foreseen, traced(name, batch, recompute, precision, rules))
    given = extrapolate((two, three), (2, 3), 3)
    assert given is not None
    same(given, three)


def graph_of(net: nn.Module, batch: int, loss: object = None) -> StepGraph:
    return trace_step(net, torch.empty(batch, 6), Step(precision="32", rules="cpu"), loss)  # type: ignore[arg-type]


class OneByOne(nn.Module):
    """Does as many operators as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(sample) for sample in x])


class OtherKernel(nn.Module):
    """Does something else from three samples on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        return made.sin() if len(x) > 2 else made.cos()


@pytest.mark.parametrize("build", [OneByOne, OtherKernel])
def test_none_if_the_two_do_not_do_the_same(build: type[nn.Module]) -> None:
    net = build()
    assert extrapolate((graph_of(net, 2), graph_of(net, 3)), (2, 3), 4) is None


def contrastive(output: Tensor) -> Tensor:
    """Compares every sample with every other one: a matrix of batch x batch."""
    similar = output @ output.T
    return nn.functional.cross_entropy(similar.softmax(1), torch.arange(len(output)))


def test_what_grows_with_the_square_of_the_batch_is_not_extrapolated_wrongly() -> None:
    net = nn.Linear(6, 6)
    two, three = (graph_of(net, batch, contrastive) for batch in (2, 3))
    foreseen = extrapolate((two, three), (2, 3), 8)
    if foreseen is not None:
        same(foreseen, graph_of(net, 8, contrastive))


def test_a_constant_step_stays_as_it_is() -> None:
    graph = graph_of(nn.Linear(6, 6), 2)
    again = extrapolate((graph, graph), (2, 3), 8)
    assert again is not None
    same(again, graph)
