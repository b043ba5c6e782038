"""A loss that is a mean over samples for some targets only is refused before its gradients would be wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import medckpt
from medckpt.errors import ConfigError
from medckpt.memory.bind import bind
from medckpt.memory.loss_trial import LossTrial

CLASSES = 4


class Voxels(nn.Module):
    """(B, 1, X, Y, Z) -> scores (B, classes, X, Y, Z)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.GELU(), nn.Conv3d(6, 6, 1))
        self.head = nn.Conv3d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Whole(nn.Sequential):
    """(B, 8) -> scores (B, classes)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))


class Tokens(nn.Module):
    """(B, tokens, 8) -> scores (B, tokens, classes): the classes are the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def of_tokens(loss: nn.Module) -> Any:
    return lambda output, target: loss(output.transpose(1, 2), target)


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def volume(batch: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 1, 6, 6, 6), torch.randint(0, CLASSES, (batch, 6, 6, 6))


def with_ignored(target: Tensor, value: int = -100) -> Tensor:
    changed = target.clone()
    changed[len(target) // 2 :, 1:] = value
    return changed


@pytest.mark.parametrize("value", [-100, 255])
def test_ignored_voxels_that_first_come_in_a_later_step_are_refused_then(value: int):
    net, (x, y) = Voxels(), volume()
    loss = lambda output, target: nn.functional.cross_entropy(output, target, ignore_index=value)  # noqa: E731
    step = bind(net, loss, micro_batches=2)
    twin = copy.deepcopy(net)
    step(x, y).backward()
    loss(twin(x), y).backward()
    for ours, plain in zip(gradients(net), gradients(twin), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        step(x, with_ignored(y, value))


def test_what_a_loss_says_that_it_ignores_is_tried_before_a_target_has_it():
    x, y = volume()
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        bind(Voxels(), nn.CrossEntropyLoss(ignore_index=255), micro_batches=2)(x, y)


@pytest.mark.parametrize("rare", range(CLASSES))
def test_weights_of_classes_are_found_where_a_sample_has_one_class(rare: int):
    weights = torch.ones(CLASSES)
    weights[rare] = 9
    step = bind(Whole(), nn.CrossEntropyLoss(weight=weights), micro_batches=2)
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        step(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("at_once", [True, False])
def test_ignored_samples_are_found_where_a_sample_has_one_class(at_once: bool):
    step = bind(Whole(), nn.CrossEntropyLoss(), micro_batches=2)
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    if not at_once:
        step(x, y)
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        step(x, torch.tensor([0, 1, 2, -100]))


def test_scores_may_be_the_last_axis():
    x, y = torch.randn(4, 200, 8), torch.randint(0, CLASSES, (4, 200))
    bind(Tokens(), of_tokens(nn.CrossEntropyLoss()), micro_batches=2)(x, y)
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        bind(Tokens(), of_tokens(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9, 1, 1]))), micro_batches=2)(x, y)


def test_a_loss_is_tried_again_for_other_values_only():
    calls = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return (output.mean((1, 2, 3, 4)) - target.float().mean((1, 2, 3))).square().mean()

    (_, y), trial = volume(), LossTrial(loss)
    output = torch.randn(4, CLASSES, 6, 6, 6)
    trial(output, y)
    once = len(calls)
    for target in (y, y.flip(0)):
        trial.renew(target)
        trial(output, target)
    assert len(calls) == once > 0
    trial.renew(with_ignored(y))
    trial(output, with_ignored(y))
    assert len(calls) > once


def test_a_loss_that_cannot_be_computed_on_one_sample_leaves_the_whole_batch():
    def hardest(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none").topk(3).values.mean()

    x, y = torch.randn(8, 8), torch.randint(0, CLASSES, (8,))
    for measure in (True, False):
        plan = medckpt.plan(Whole(), x, budget="min", memory="cpu", loss=hardest, target=y, measure=measure)
        assert plan.micro_batches == 1
    with pytest.raises(ConfigError, match="on one or two samples it raises RuntimeError"):
        bind(Whole(), hardest, micro_batches=2)(x, y)


@pytest.mark.parametrize("reduce", ["sum", "weighted"])
def test_a_plan_without_steps_refuses_what_the_first_step_would(reduce: str):
    x, y = volume()
    weights = torch.tensor([1.0, 9, 1, 1]) if reduce == "weighted" else None
    loss = nn.CrossEntropyLoss(weights, reduction="sum" if reduce == "sum" else "mean")
    asked = {"memory": "a100_80gb", "loss": loss, "target": y, "measure": False}
    assert medckpt.plan(Voxels(), x, budget="min", **asked).micro_batches == 1
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        medckpt.plan(Voxels(), x, budget="min", micro_batches=2, **asked)


def test_an_input_without_samples_leaves_the_whole_batch():
    class Conditioned(Whole):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + shift)

    inputs, y = (torch.randn(4, 8), torch.randn(1, 8)), torch.randint(0, CLASSES, (4,))
    loss = nn.CrossEntropyLoss()
    plan = medckpt.plan(Conditioned(), inputs, budget="min", memory="a100_80gb", loss=loss, target=y, measure=False)
    assert plan.micro_batches == 1
    with pytest.raises(ConfigError, match="first dimension"):
        medckpt.plan(
            Conditioned(), inputs, budget="min", memory="a100_80gb", loss=loss, target=y, measure=False, micro_batches=2
        )


def test_the_smallest_budget_is_a_budget_in_bytes():
    x, y = torch.randn(4, 8), torch.randint(0, CLASSES, (4,))
    loss = nn.CrossEntropyLoss()
    with pytest.raises(medckpt.InfeasibleBudget) as caught:
        medckpt.plan(Whole(), x, budget="1KiB", memory="cpu", loss=loss, target=y, measure=False)
    smallest = caught.value.smallest_bytes
    assert smallest < 2**20
    plan = medckpt.plan(Whole(), x, budget=smallest, memory="cpu", loss=loss, target=y, measure=False)
    assert plan.predicted_peak_bytes <= smallest
