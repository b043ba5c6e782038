"""The record of a step: where and when each storage is made, what it is, and what cannot be recorded."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from medckpt.errors import ConfigError
from medckpt.memory.apply import applied, apply_recompute
from medckpt.memory.graph import StepGraph, Storage
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step

PLAIN = Step(precision="32", rules="cpu")
BF16 = Step(precision="bf16-mixed", rules="cpu")


class TwoLayers(nn.Module):
    """(B, 8) -> exp after `first` (8 -> 16), then `second` (16 -> 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).exp())


def of(net: nn.Module, inputs: Any, step: Step = PLAIN, loss: Any = None, **more: Any) -> StepGraph:
    return trace_step(net, inputs, step, loss, **more)


def made(graph: StepGraph, phase: str) -> list[tuple[str, str]]:
    """Returns region and operator of everything that allocates in a phase, in order."""
    return [(op.region, op.name) for op in graph.ops if op.phase == phase and op.call is not None]


def held(graph: StepGraph, kind: str) -> list[int]:
    return [storage.nbytes for storage in graph.storages if storage.kind == kind]


def test_regions_and_phases_of_two_layers() -> None:
    graph = of(TwoLayers(), torch.randn(5, 8), loss=lambda output: output.exp().sum())
    assert made(graph, "forward") == [
        ("first.0", "addmm.default"),
        ("first.1", "relu.default"),
        ("", "exp.default"),
        ("second", "addmm.default"),
    ]
    assert made(graph, "loss") == [("loss", "exp.default"), ("loss", "sum.default")]
    # Backward by autograd node: the module whose forward made the node, not the one that runs.
    assert made(graph, "backward") == [
        ("", "ones_like.default"),
        ("loss", "mul.Tensor"),
        ("second", "mm.default"),
        ("second", "mm.default"),
        ("second", "sum.dim_IntList"),
        ("", "mul.Tensor"),
        ("first.1", "threshold_backward.default"),
        ("first.0", "mm.default"),
        ("first.0", "sum.dim_IntList"),
    ]
    assert {op.phase for op in graph.ops} == {"forward", "loss", "backward", "optimizer"}
    assert {op.region for op in graph.ops if op.phase == "optimizer"} == {""}


def test_every_storage_by_hand() -> None:
    """Batch 5, float32. Kept by forward: relu's output (which relu saves), exp's output (saved by exp and linear)."""
    graph = of(TwoLayers(), torch.randn(5, 8), Step(precision="32", rules="cpu", optimizer=None))
    assert sorted(held(graph, "parameters")) == sorted([8 * 16 * 4, 16 * 4, 16 * 4 * 4, 4 * 4])
    assert sorted(held(graph, "gradients")) == sorted(held(graph, "parameters"))
    assert held(graph, "inputs") == [5 * 8 * 4]
    forward = [s for s in graph.storages if s.phase == "forward"]
    assert [(s.region, s.nbytes) for s in forward] == [
        ("first.0", 5 * 16 * 4), ("first.1", 5 * 16 * 4), ("", 5 * 16 * 4), ("second", 5 * 4 * 4),
    ]  # fmt: skip
    assert [graph.saved_for_backward(s) for s in forward] == [False, True, True, True]
    where = {s.region: graph.ops[s.died] for s in forward if s.died is not None}
    assert (where["first.0"].region, where["first.0"].phase) == ("first.1", "forward"), "nobody saves relu's input"
    assert where[""].phase == where["first.1"].phase == "backward"


def test_events_are_births_and_deaths_in_order() -> None:
    graph = of(TwoLayers(), torch.randn(5, 8), BF16)
    indices = [index for index, _, _ in graph.events]
    assert indices == sorted(indices)
    for number, storage in enumerate(graph.storages):
        changes = [(index, change) for index, which, change in graph.events if which == number]
        expected = [(storage.born, 1)] if storage.born >= 0 else []
        assert changes == expected + ([(storage.died, -1)] if storage.died is not None else [])
        if storage.born >= 0:
            assert (storage.region, storage.phase) == (graph.ops[storage.born].region, graph.ops[storage.born].phase)
            assert storage.died is None or storage.died >= storage.born


def test_what_outlives_the_step() -> None:
    graph = of(TwoLayers(), torch.randn(5, 8), Step(precision="32", rules="cpu", averages=True))
    alive = {storage.kind for storage in graph.storages if storage.died is None}
    assert alive == {"parameters", "gradients", "optimizer", "averages", "inputs"}


def test_every_phase_of_a_full_step_in_order() -> None:
    step = Step(precision="bf16-mixed", rules="cpu", clip_norm=1.0, averages=True, accumulate=2)
    graph = of(TwoLayers(), torch.randn(5, 8), step, recompute=("first",))
    phases = [op.phase for op in graph.ops]
    once = ["forward", "loss", "backward", "recompute", "backward"]
    assert [p for p, before in zip(phases, [None, *phases], strict=False) if p != before] == [
        *once, *once, "clip", "optimizer", "average",
    ]  # fmt: skip


def test_autocast_casts_weights_once_and_frees_them_after_the_forward_pass() -> None:
    graph = of(TwoLayers(), torch.randn(5, 8), BF16)
    casts = [s for s in graph.storages if s.kind == "weight_casts"]
    weights = [p.numel() * 2 for p in TwoLayers().parameters()]
    assert sorted(s.nbytes for s in casts) == sorted(weights)
    assert {s.region for s in casts} == {"first.0", "second"}
    again = of(Twice(), torch.randn(5, 8), BF16)
    assert len(held(again, "weight_casts")) == 2, "weight and bias, for two uses"
    each = of(Twice(), torch.randn(5, 8), Step(precision="bf16-mixed", rules="cpu", weight_cache=False))
    assert len(held(each, "weight_casts")) == 4


class Twice(nn.Module):
    """One layer, used twice under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu())


class Shared(nn.Module):
    """One layer under two names, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        self.c = nn.Linear(8, 8)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def test_shared_modules_and_weights_count_once_under_their_first_name() -> None:
    graph = of(Shared(), torch.randn(5, 8))
    assert sorted(held(graph, "parameters")) == [32, 32, 256]
    assert sorted(held(graph, "gradients")) == [32, 32, 256]
    assert [region for region, _ in made(graph, "forward")] == ["a", "a", "c"]
    assert sorted(held(of(Twice(), torch.randn(5, 8)), "gradients")) == [32, 256]


class OnlyParameter(nn.Module):
    """A parameter whose gradient needs no operator of its own module: added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterDict({"shift": torch.zeros(5, 8)})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner["shift"]


def test_a_gradient_that_is_only_accumulated_belongs_to_the_parameters_module() -> None:
    graph = of(OnlyParameter(), torch.randn(5, 8), Step(precision="32", rules="cpu", optimizer=None))
    assert held(graph, "gradients") == [5 * 8 * 4]
    last = [op for op in graph.ops if op.phase == "backward"][-1]
    assert last.region == "inner"
    twice = of(OnlyParameter(), torch.randn(5, 8), Step(precision="32", rules="cpu", optimizer=None, accumulate=2))
    sums = [op for op in twice.ops if op.phase == "backward" and op.name.startswith("add")]
    assert [op.region for op in sums] == ["inner"], "the second gradient is added to the first"


class Reentrant(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_of_a_recomputed_module_is_its_own(reentrant: bool) -> None:
    graph = of(Reentrant(reentrant), torch.randn(5, 8, requires_grad=True))
    assert {region for region, _ in made(graph, "recompute")} == {"body.0", "body.1"}
    found = [region for region, name in made(graph, "backward") if name == "threshold_backward.default"]
    assert found == ["body.1"]
    products = [region for region, name in made(graph, "backward") if name == "mm.default"]
    assert products == ["head", "head", "body.0", "body.0"]


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
def test_two_records_are_equal(rules: Any) -> None:
    net, step = nn.Sequential(TwoLayers(), nn.Dropout(0.5)), Step(rules=rules, clip_norm=1.0)
    first, second = (of(net, torch.randn(5, 8), step) for _ in range(2))
    assert first == second


def buffers_change() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
def test_the_model_is_left_as_it_was(rules: Any) -> None:
    net = buffers_change()
    net[3].eval()
    net[0].bias.requires_grad_(False)
    hooks: list[str] = []
    handle = net[0].register_forward_hook(lambda *_: hooks.append("called"))
    inputs = torch.randn(5, 8, requires_grad=True)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    pointers = {name: value.data_ptr() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    of(net, inputs, Step(rules=rules, averages=True, clip_norm=1.0), recompute=("1",))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert {name: value.data_ptr() for name, value in net.state_dict().items()} == pointers
    assert all(parameter.grad is None for parameter in net.parameters())
    assert inputs.grad is None
    assert [module.training for module in net.modules()] == [True, True, True, True, False]
    assert [parameter.requires_grad for parameter in net.parameters()] == [True, False, True, True, True, True]
    assert all("forward" not in vars(module) for module in net.modules())
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert gc.isenabled()
    assert not any(isinstance(value, FakeTensor) for value in net.state_dict().values())
    net(inputs).sum().backward()


def test_the_collector_stays_off_if_it_was_off() -> None:
    gc.disable()
    try:
        of(TwoLayers(), torch.randn(5, 8))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("of the user")

    net = nn.Sequential(nn.Linear(8, 8), Fails())
    with pytest.raises(ConfigError, match=r"module '1' \(Fails\) fails with KeyError: 'of the user'"):
        of(net, torch.randn(5, 8))
    assert gc.isenabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert len(of(TwoLayers(), torch.randn(5, 8)).ops) > 0, "the next one runs"


def test_recompute_that_is_applied_counts_and_stays() -> None:
    net = apply_recompute(TwoLayers(), ["first"])
    graph = of(net, torch.randn(5, 8))
    assert {op.region for op in graph.ops if op.phase == "recompute"} == {"first.0", "first.1"}
    assert applied(net).regions == ("first",)
    assert [op.signature() for op in graph.ops] == [
        op.signature() for op in of(TwoLayers(), torch.randn(5, 8), recompute=["first"]).ops
    ]


# What can be given.


class Call(nn.Module):
    """A layer, and whatever is to be done with it."""

    def __init__(self, forward: Callable[..., Any], **more: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.do = forward
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.do(self, *args, **kwargs)


X = torch.ones(5, 8)


@pytest.mark.parametrize("step", [PLAIN, BF16, Step(rules="cuda", optimizer=None)], ids=["32", "bf16", "cuda"])
@pytest.mark.parametrize(
    ("forward", "inputs", "nbytes"),
    [
        (lambda net, x: net.layer(x), X, [160]),
        (lambda net, x: net.layer(x), (X,), [160]),
        (lambda net, x: net.layer(x), {"x": X}, [160]),
        (lambda net, x, y: net.layer(x) + y["a"][0], (X, {"a": [torch.ones(8)]}), [160, 32]),
        (lambda net, x, factor: net.layer(x) * factor, {"x": X, "factor": 3}, [160]),
        (lambda net, xs: net.layer(xs[0]) + net.layer(xs[1]), [X, X.clone()], [160, 160]),
        (lambda net, x, y: net.layer(x) + y, (X, X), [160]),  # one tensor, given twice
        (lambda net, i: net.layer(nn.functional.one_hot(i, 8).float()), torch.ones(5, dtype=torch.long), [40]),
        (lambda net, x: {"a": [net.layer(x), None], "b": (net.layer(x).relu(), "text")}, X, [160]),
        (lambda net, x: net.layer(x), X.to("meta"), [160]),
        (lambda net, x: net.layer(x), torch.ones(1, 8).expand(5, 8), [32]),  # what it holds, not what it shows
        (lambda net, x: net.layer(x), torch.ones(0, 8), [0]),
    ],
    ids=[
        "tensor", "tuple", "mapping", "nested", "number", "list", "twice", "integers", "tree", "meta", "expanded",
        "empty",
    ],
)  # fmt: skip
def test_inputs_and_outputs_of_every_form(step: Step, forward: Any, inputs: Any, nbytes: list[int]) -> None:
    graph = of(Call(forward), inputs, step)
    assert held(graph, "inputs") == nbytes
    assert sum(held(graph, "gradients")) == 4 * (64 + 8)


def test_fake_inputs_and_a_fake_model_are_taken_as_they_are() -> None:
    with FakeTensorMode():
        x = torch.empty(5, 8)
    assert of(TwoLayers(), x) == of(TwoLayers(), torch.randn(5, 8))


def test_models_on_other_devices_are_forecast_where_they_would_run() -> None:
    on_meta = of(TwoLayers().to("meta"), torch.empty(5, 8, device="meta"))
    assert on_meta == of(TwoLayers(), torch.randn(5, 8))


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    net = TwoLayers()
    net.first.requires_grad_(False)
    graph = of(net, X, Step(precision="32", rules="cpu", averages=True, clip_norm=1.0))
    trained = sorted([16 * 4 * 4, 4 * 4])
    assert sorted(held(graph, "gradients")) == trained
    assert sorted(held(graph, "averages")) == trained
    assert len(held(graph, "parameters")) == 4
    assert not [op for op in graph.ops if op.phase == "backward" and op.region.startswith("first")]


def test_without_parameters_there_is_a_forward_pass_only() -> None:
    graph = of(nn.ReLU(), X, Step(precision="32", rules="cpu", clip_norm=1.0))
    assert {op.phase for op in graph.ops} == {"forward", "loss"}
    inner = of(nn.ReLU(), X.clone().requires_grad_(), PLAIN)
    assert {op.phase for op in inner.ops} == {"forward", "loss", "backward"}
    assert held(inner, "gradients") == [], "the input's gradient is none of a parameter"


def test_float64_and_half_models() -> None:
    assert sum(held(of(TwoLayers().double(), X.double()), "gradients")) == 2 * sum(
        held(of(TwoLayers(), X), "gradients")
    )
    half = of(TwoLayers().bfloat16(), X.bfloat16())
    assert sum(held(half, "parameters")) * 2 == sum(held(of(TwoLayers(), X), "parameters"))


def test_evaluation_mode_has_no_dropout() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    names = [name for _, name in made(of(net.eval(), X), "forward")]
    assert names == ["addmm.default"]
    assert len(made(of(net.train(), X), "forward")) > 1


def test_tensors_that_a_model_holds_outside_of_its_buffers_are_inputs() -> None:
    graph = of(Call(lambda net, x: net.layer(x) * net.scale, scale=torch.ones(8)), X)
    assert sorted(held(graph, "inputs")) == [32, 160]
    listed = of(Call(lambda net, x: net.layer(x) * net.scales[1], scales=[torch.ones(1), torch.ones(8)]), X)
    assert sorted(held(listed, "inputs")) == [32, 160]


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, torch.compile, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm]
)
def test_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    graph = of(wrap(nn.Linear(8, 8)), X)
    assert sum(held(graph, "gradients")) >= 4 * 72


def test_storages_count_once_however_many_views() -> None:
    def views(net: Call, x: Tensor) -> Tensor:
        y = net.layer(x)
        return y.view(-1)[:20] * y.T.reshape(-1)[20:].detach() + y[0, 0]

    graph = of(Call(views), X, Step(precision="32", rules="cpu", optimizer=None))
    layer = [s for s in graph.storages if s.region == "layer" and s.phase == "forward"]
    assert [s.nbytes for s in layer] == [160]
    assert isinstance(layer[0], Storage)


def test_of_many_micro_batches_two_are_recorded() -> None:
    two, many = (of(TwoLayers(), torch.randn(5, 8), Step(rules="cpu", accumulate=n)) for n in (2, 10**9))
    assert (two.repeats, many.repeats) == (1.0, 5e8)
    assert two == dataclasses.replace(many, repeats=1.0)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_counters_of_adamw_are_not_on_a_card(accumulate: int) -> None:
    """torch.optim.Adam keeps `step` on the CPU unless it is fused or capturable, and adds a number made there."""
    step = Step(precision="32", rules="cuda", accumulate=accumulate)
    graph = of(TwoLayers(), torch.randn(5, 8), step)
    parameters = held(graph, "parameters")
    assert sorted(held(graph, "optimizer")) == sorted(2 * parameters)
    assert held(graph, "inputs") == [160]
    assert all(4 not in (s.nbytes,) for s in graph.storages if s.phase == "optimizer")
    assert not [op.name for op in graph.ops if op.phase == "optimizer" and "lift_fresh" in op.name]
    on_cpu = of(TwoLayers(), torch.randn(5, 8), Step(precision="32", rules="cpu"))
    assert sorted(held(on_cpu, "optimizer")) == sorted([*2 * parameters, *[4] * len(parameters)])
