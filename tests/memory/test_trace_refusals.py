"""What a step's record leaves alone, and what it refuses: losses with tensors of their own, values, odd operators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from medckpt.errors import ConfigError
from medckpt.memory.step import Step
from tests.memory.test_trace import PLAIN, Call, TwoLayers, X, held, of


class WeightedLoss(nn.Module):
    """Holds a buffer of 8 numbers that it uses, a large one that it does not, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(8))
        self.register_buffer("unused", torch.ones(100_000))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, output: Tensor) -> Tensor:
        return (output * self.weight * self.scale).square().mean()


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
def test_tensors_of_a_loss_module_are_held_once_and_left_alone(rules: Any) -> None:
    loss = WeightedLoss()
    graph = of(nn.Linear(8, 8), X, Step(precision="32", rules=rules, optimizer=None), loss)
    assert sorted(held(graph, "inputs")) == [32, 32, 160, 400_000]
    assert all(storage.died is None for storage in graph.storages if storage.kind == "inputs")
    assert loss.scale.grad is None
    assert not isinstance(loss.weight, FakeTensor)


def test_labels_that_a_function_holds_are_inputs() -> None:
    label = torch.randint(0, 8, (5,))
    graph = of(nn.Linear(8, 8), X, PLAIN, lambda output: nn.functional.cross_entropy(output, label))
    assert sorted(held(graph, "inputs")) == [40, 160]


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
def test_a_loss_that_holds_the_model_is_refused_and_leaves_it_alone(rules: Any) -> None:
    net = nn.Linear(8, 8)
    with pytest.raises(Exception, match="real tensor of shape"):
        of(net, X, Step(rules=rules), lambda output: output.mean() + net.weight.norm())
    assert net.weight.grad is None


class Inside(nn.Module):
    """A module within a module, so that its name says something."""

    def __init__(self, forward: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.part = nn.ModuleDict({"inner": Call(lambda net, x: forward(net.layer(x)))})

    def forward(self, x: Tensor) -> Any:
        return self.part["inner"](self.stem(x))


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("forward", "operator"),
    [
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[x[:, 0].nonzero()[:, 0]], "nonzero"),
        (lambda x: x[x > 0], "nonzero"),
        (lambda x: x.unique(), "unique"),
        (lambda x: x * x.tolist()[0][0], "_local_scalar_dense"),
        (lambda x: torch.from_numpy(x.detach().numpy()), "numpy"),
    ],
    ids=["branch", "item", "nonzero", "mask", "unique", "tolist", "numpy"],
)
def test_decisions_by_value_are_refused_with_module_and_operator(forward: Any, operator: str, rules: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)forecast: module 'part\.inner'.*{operator}"):
        of(Inside(forward), X, Step(rules=rules))


def test_decisions_by_value_in_the_loss_and_in_the_model_itself() -> None:
    with pytest.raises(ConfigError, match=r"forecast: the loss reads values in `aten\._local_scalar_dense"):
        of(TwoLayers(), X, PLAIN, lambda output: output.mean() * output.max().item())
    with pytest.raises(ConfigError, match="forecast: the model's own forward reads values"):
        of(Call(lambda net, x: net.layer(x) * x.sum().item()), X)


@torch.library.custom_op("medckpt_tests::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x * 2


def test_an_operator_without_a_fake_kernel_is_named_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"(?s)module 'part\.inner'.*shapeless.*register_fake"):
        of(Inside(shapeless), X)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (X.to_sparse(), r"inputs: a sparse_coo tensor of shape \(5, 8\)"),
        (X.to_sparse_csr(), "inputs: a sparse_csr tensor"),
        (torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), "inputs: a quantized tensor"),
    ],
)
def test_inputs_that_are_not_dense_are_refused(inputs: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of(Call(lambda net, x: torch.sparse.mm(x, net.layer.weight)), inputs)


def test_sparse_gradients_are_refused() -> None:
    net = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(ConfigError, match=r"[Ss]parse"):
        of(net, torch.ones(5, dtype=torch.long))


def locked() -> nn.Module:
    return Call(lambda net, x: net.layer(x), lock=threading.Lock())


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: torch.jit.script(nn.Linear(8, 8)), "TorchScript"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), r"'0' \(LazyLinear\) has no shapes yet"),
        (locked, "Call cannot be copied"),
        (lambda: nn.Linear, "must be an nn.Module"),
        (lambda: lambda x: x, "must be an nn.Module, not function"),
    ],
    ids=["jit", "lazy", "lock", "class", "function"],
)
def test_models_that_cannot_be_traced_are_refused(net: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of(net(), X)


def test_recurrent_networks_on_a_cpu_are_refused_with_the_reason() -> None:
    """oneDNN's LSTM keeps a workspace that its fake kernel does not return; a GRU is made of plain operators."""
    with pytest.raises(ConfigError, match="mkldnn_rnn_layer"):
        of(Call(lambda net, x: net.lstm(x)[0], lstm=nn.LSTM(8, 8)), X)
    assert of(Call(lambda net, x: net.gru(x)[0], gru=nn.GRU(8, 8)), X).ops


def test_an_unknown_region_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has no module 'frist'"):
        of(TwoLayers(), X, recompute=["frist"])
