"""The step itself, on real tensors: what it is made of, in which order, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medckpt.errors import ConfigError
from medckpt.memory.graph import Phase
from medckpt.memory.step import Step, StepRunner, mean_of_squares


def run(net: nn.Module, inputs: Any, loss: Any = None, **settings: Any) -> tuple[StepRunner, list[Phase]]:
    runner = StepRunner(net, inputs, loss, Step(rules="cpu", **{"precision": "32", **settings}))
    phases: list[Phase] = []
    runner.run(phases.append)
    return runner, phases


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8"}, r"precision: 'fp8' is not known\. .*Known: 16-mixed, 32, bf16-mixed"),
        ({"precision": "bf16"}, r"precision: 'bf16' is not known"),
        ({"optimizer": "adam"}, r"optimizer: 'adam' is not known\. Did you mean 'adamw'\? Known: adamw, sgd"),
        ({"precision": "16-mixed", "rules": "cpu"}, r"precision=16-mixed: .* GPU.*Use 32 or bf16-mixed"),
        ({"accumulate": 0}, r"accumulate: must be at least 1, not 0"),
        ({"accumulate": 2.0}, r"accumulate: must be a whole number of passes, not 2.0 \(float\)"),
        ({"accumulate": True}, r"accumulate: must be a whole number of passes, not True \(bool\)"),
        ({"clip_norm": "x"}, r"clip_norm: must be a number above 0, or None; not 'x' \(str\)"),
        ({"clip_norm": float("nan")}, r"clip_norm: must be above 0, or None; not nan"),
        (
            {"optimizer": torch.optim.SGD([torch.ones(1)])},
            r"optimizer: must be a name or None, not a value of type SGD",
        ),
        ({"averages": "yes"}, r"averages: must be True or False, not 'yes' \(str\)"),
        ({"weight_cache": None}, r"weight_cache: must be True or False, not None"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Step(**settings)


def test_phases_come_in_the_order_of_training() -> None:
    x = torch.ones(2, 4)
    assert run(linear(), x)[1] == ["forward", "loss", "backward", "optimizer"]
    everything = {"accumulate": 2, "clip_norm": 1.0, "averages": True}
    once = ["forward", "loss", "backward"]
    assert run(linear(), x, **everything)[1] == [*once, *once, "clip", "optimizer", "average"]
    assert run(linear(), x, optimizer=None)[1] == once
    frozen = linear().requires_grad_(False)
    assert run(frozen, x, clip_norm=1.0)[1] == once, "nothing to clip or to update"


def test_one_step_is_that_of_plain_torch() -> None:
    x, net, twin = torch.randn(5, 4), linear(), linear()
    run(net, x, clip_norm=0.01)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-6)
    for parameter in twin.parameters():  # states as the step has them from the start
        zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.ones(()), **zeros}
    twin(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    optimizer.step()
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)
    assert not torch.equal(net.weight, linear().weight), "it was updated"


def test_micro_batches_add_up_to_the_gradient_of_one() -> None:
    x = torch.randn(5, 4)
    (once, _), (four, _) = run(linear(), x, optimizer=None), run(linear(), x, optimizer=None, accumulate=4)
    for one, other in zip(once.gradients(), four.gradients(), strict=True):
        torch.testing.assert_close(one, other)


def test_averages_follow_the_weights() -> None:
    net = linear()
    start = net.weight.detach().clone()
    runner, _ = run(net, torch.randn(5, 4), averages=True)
    torch.testing.assert_close(runner.averages[0], start.lerp(net.weight.detach(), 0.01), rtol=0, atol=0)
    assert [average.shape for average in runner.averages] == [parameter.shape for parameter in runner.trained]


@pytest.mark.parametrize(
    ("optimizer", "rules", "per_parameter"),
    [("adamw", "cpu", 3), ("adamw", "cuda", 2), ("sgd", "cpu", 1), ("sgd", "cuda", 1), (None, "cuda", 0)],
)
def test_what_is_held_between_steps(optimizer: Any, rules: Any, per_parameter: int) -> None:
    """On a card AdamW's step counters are on the CPU."""
    net = nn.Sequential(linear(), nn.BatchNorm1d(3), nn.Linear(3, 2).requires_grad_(False))
    runner = StepRunner(net, torch.ones(2, 4), None, Step(optimizer=optimizer, rules=rules, averages=True))
    held = {kind: len(tensors) for kind, tensors in runner.held().items()}
    assert held == {"parameters": 6 + 3, "optimizer": 4 * per_parameter, "averages": 4, "inputs": 1}
    assert runner.gradients() == []


def test_optimizer_states_exist_from_the_start_as_in_a_second_step() -> None:
    runner, _ = run(linear(), torch.randn(2, 4))
    torch_own = torch.optim.AdamW(linear().parameters(), lr=1e-6)
    net = torch_own.param_groups[0]["params"]
    for parameter in net:
        parameter.grad = torch.ones_like(parameter)
    torch_own.step()
    assert runner.optimizer is not None
    ours = [{name: value.shape for name, value in state.items()} for state in runner.optimizer.state.values()]
    theirs = [{name: value.shape for name, value in state.items()} for state in torch_own.state.values()]
    assert ours == theirs


class Echo(nn.Module):
    """Takes anything, and returns what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.called = args, kwargs
        return [next(iter(args), None), kwargs]


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        ((1, 2), (1, 2), {}),
        ({"a": 1, "b": [2]}, (), {"a": 1, "b": [2]}),
        ([1, 2], ([1, 2],), {}),
        (5, (5,), {}),
        (({"a": 1},), ({"a": 1},), {}),
        ((), (), {}),
    ],
)
def test_how_inputs_are_passed(inputs: Any, args: Any, kwargs: Any) -> None:
    net = Echo()
    run(net, inputs, lambda output: torch.ones(()))
    assert net.called == (args, kwargs)


def test_every_tensor_of_nested_inputs_and_of_a_loss_module_is_held() -> None:
    inputs = {"a": [torch.ones(2), {"deep": torch.ones(3)}], "b": 7}
    loss = nn.CrossEntropyLoss(weight=torch.ones(4))
    runner = StepRunner(Echo(), inputs, loss, Step(optimizer=None))
    assert sorted(tensor.numel() for tensor in runner.held()["inputs"]) == [2, 3, 4]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(2, 3), r"a tensor of shape \(2, 3\)"),
        (1.0, "float"),
        (None, "NoneType"),
        ([torch.ones(())], "list"),
        (torch.ones(0), r"a tensor of shape \(0,\)"),
    ],
)
def test_a_loss_must_be_one_number(value: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=f"loss: must return one number to minimise, not {what}"):
        run(linear(), torch.ones(2, 4), lambda output: value)


@pytest.mark.parametrize("loss", [lambda output: output.mean().detach(), lambda output: torch.ones(())])
def test_a_loss_that_trains_nothing_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigError, match=r"loss: what it returns has no gradient.*detach"):
        run(linear(), torch.ones(2, 4), loss)


def test_a_loss_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss: must be a callable .*not 'dice' \(str\)"):
        run(linear(), torch.ones(2, 4), "dice")


def test_a_loss_of_one_element_is_a_number() -> None:
    runner, _ = run(linear(), torch.ones(2, 4), lambda output: output.mean().reshape(1, 1), optimizer=None)
    assert len(runner.gradients()) == 2


def test_mean_of_squares_takes_every_floating_tensor() -> None:
    output = {
        "a": torch.full((2, 2), 3.0),
        "b": (torch.tensor([4], dtype=torch.bfloat16), None, 7),
        "c": torch.ones(3).long(),
    }
    assert mean_of_squares(output).item() == 9.0 + 16.0
    assert mean_of_squares(torch.full((3,), 2.0, dtype=torch.float64)).item() == 4.0


@pytest.mark.parametrize("output", [None, torch.ones(3, dtype=torch.long), [], {"a": "text"}])
def test_mean_of_squares_of_nothing_says_so(output: Any) -> None:
    with pytest.raises(ConfigError, match="loss"):
        mean_of_squares(output)


def test_autocast_casts_and_the_loss_is_inside_of_it() -> None:
    seen: list[torch.dtype] = []

    def loss(output: Tensor) -> Tensor:
        seen.extend((output.dtype, (output @ output.T).dtype))
        return output.float().mean()

    run(linear(), torch.ones(2, 4), loss, precision="bf16-mixed")
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_the_output_is_released_after_the_loss() -> None:
    import weakref

    alive: list[Any] = []

    def loss(output: Tensor) -> Tensor:
        alive.append(weakref.ref(output))
        return (output * 2).mean()

    runner = StepRunner(linear(), torch.ones(2, 4), loss, Step(precision="32", rules="cpu"))
    runner.run(lambda phase: alive.append(alive[0]() is None) if phase == "backward" else None)
    assert alive[1] is True
