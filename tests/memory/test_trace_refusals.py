"""What a step's record leaves alone, and what it refuses: losses with tensors of their own, values, odd operators."""

from __future__ import annotations

import functools
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


class Reader:
    """A hook as an object, which reads a value."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        float(output.sum())


def reads(*values: Any) -> None:
    [value.numpy() for value in values if isinstance(value, Tensor)]


def reads_gradient(module: nn.Module, gradients: Any, more: Any) -> None:
    more[0].max().item()


def with_hook(attach: Callable[[nn.Module], Any]) -> nn.Module:
    net = TwoLayers()
    attach(net.first[0])
    return net


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (
            lambda m: m.register_forward_hook(Reader()),
            r"forward hook 'Reader' on module 'first\.0' \(Linear\) reads val",
        ),
        (
            lambda m: m.register_forward_pre_hook(functools.partial(lambda weight, m, args: reads(*args), 1)),
            r"forward pre-hook '.*lambda>' on module 'first\.0' \(Linear\) cannot be traced \(\.numpy\(\)",
        ),
        (
            lambda m: m.register_forward_hook(lambda m, args, kwargs, out: out.nothing, with_kwargs=True),
            r"forward hook '.*lambda>' on .* fails with AttributeError: 'FakeTensor' object has no attribute",
        ),
        (
            lambda m: m.register_full_backward_hook(reads_gradient),
            r"backward hook 'reads_gradient' on module 'first\.0' \(Linear\) reads values in",
        ),
    ],
    ids=["object", "partial", "kwargs", "backward"],
)
def test_a_hook_that_reads_a_value_is_named(attach: Any, message: str, rules: Any) -> None:
    net = with_hook(attach)
    with pytest.raises(ConfigError, match=rf"forecast: the {message}.*Hooks run in a forecast.*handle\.remove\(\)"):
        of(net, X, Step(rules=rules))
    net.zero_grad()
    hooks = [*net.first[0]._forward_hooks.values(), *net.first[0]._forward_pre_hooks.values()]
    assert all("watched" not in getattr(hook, "__qualname__", "") for hook in hooks), "the user's own are as they were"


def test_hooks_that_read_no_values_run_and_count_once() -> None:
    """What a hook returns takes the place of the output, as in training."""
    seen: list[Any] = []
    net = with_hook(lambda m: m.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)) or out.cos()))
    graph = of(net, X)
    assert seen == [(5, 16)]
    assert ("first.0", "cos.default") in [(op.region, op.name) for op in graph.ops]


class WrongSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x) + x


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("net", "inputs", "loss", "message"),
    [
        (
            WrongSum(), torch.empty(2, 3, 8, 8, 8), None,
            r"module 'stem\.0' \(Conv3d\) fails with RuntimeError: .*to have 1 channels, but got 3 channels"
            r".*tensors of shape \(2, 3, 8, 8, 8\)",
        ),
        (WrongSum(), torch.empty(2, 1, 8, 8, 8), None, "the model's own forward fails with RuntimeError: "),
        (WrongSum(), "text", None, r"module 'stem\.0' \(Conv3d\) fails with TypeError: .*with no tensor"),
        (TwoLayers(), (X, X), None, "the model's own forward fails with TypeError: "),
        (TwoLayers(), {"y": X}, None, "the model's own forward fails with TypeError: .*'y'"),
        (TwoLayers(), X, lambda output: output.mean() + torch.ones(3) @ output[0], "the loss fails with RuntimeError"),
        (TwoLayers(), X, lambda output: output["logits"].mean(), "the loss fails with .*Error"),
        (TwoLayers(), X, lambda output: output.mean() * 1j, "the backward fails with RuntimeError: grad can be"),
    ],
    ids=["channels", "sum", "text", "two", "keyword", "loss", "key", "complex"],
)  # fmt: skip
def test_what_does_not_go_together_is_said_with_the_place_and_torchs_line(
    net: nn.Module, inputs: Any, loss: Any, message: str, rules: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"forecast: {message}") as caught:
        of(net, inputs, Step(rules=rules), loss)
    assert "as loss(model(inputs))" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_fault_of_ours_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error from a line of the trace itself is no matter of model or inputs."""
    monkeypatch.delattr("medckpt.memory.trace.spec_of")
    with pytest.raises(NameError, match="spec_of"):
        of(TwoLayers(), X)


def test_inputs_that_say_nothing_or_too_much() -> None:
    with pytest.raises(ConfigError, match="inputs: None says nothing"):
        of(TwoLayers(), None)
    for shape in ((1, 8, 8), [1, 8, 8], torch.Size([1, 8, 8])):
        with pytest.raises(ConfigError, match=r"inputs: these are numbers.*torch.empty\(1, 8, 8, device='meta'\)"):
            of(TwoLayers(), shape)
    with pytest.raises(ConfigError, match=r"inputs: a NumPy array is no tensor"):
        of(TwoLayers(), (X.numpy(),))
    with pytest.raises(
        ConfigError, match=r"inputs: a step with tensors of shape \(10+, 8\) would take more than an exb"
    ):
        of(TwoLayers(), torch.empty(10**16, 8, device="meta"))


def test_a_model_of_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        net = TwoLayers()
    with pytest.raises(ConfigError, match=r"'first\.0\.weight' was made under torch\.inference_mode"):
        of(net, X)


def test_labels_of_the_meta_device_are_taken_for_real_ones() -> None:
    label = torch.zeros(5, dtype=torch.long, device="meta")
    graph = of(nn.Linear(8, 8), X, PLAIN, lambda output: nn.functional.cross_entropy(output, label))
    assert sorted(held(graph, "inputs")) == [40, 160]
