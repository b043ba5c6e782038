"""A planned step against the plain one, on real tensors: equal bit for bit, or within the stated tolerance, or told."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from medckpt.errors import MedckptError
from medckpt.memory.bind import bind
from medckpt.memory.options import lay_on
from medckpt.memory.regions import find_regions
from medckpt.memory.verify import GRADIENT_TOLERANCE, LOSS_TOLERANCE, verify_choices
from tests.memory.nets import DICE_CE, Plain, Residual, Unread, image, label, make, trees

DENSE = ("mini", "unet", "skips", "swin", "unetr")
"""Networks whose output has a label per voxel."""


def check(name: str, option: str, **more: Any) -> Any:
    net, samples = make(name), 1 if name in ("swin", "unetr") else 2
    if name in DENSE:
        more = {"loss": DICE_CE, "target": label(name, samples)} | more
    return verify_choices(net, image(name, samples), dict.fromkeys(find_regions(net, "all"), option), **more)


def everywhere() -> nn.Module:
    """Dropout in and between all blocks."""
    torch.manual_seed(0)
    return Plain([Residual(dropout=0.3), Residual(dropout=0.3), Unread(), Residual(dropout=0.3)], [0, 0, 1, 0]).train()


def shared() -> nn.Module:
    """One block under two names, called twice, and one whose weight is another's."""
    torch.manual_seed(0)
    block, other = Residual(), Residual()
    other.conv.weight = block.conv.weight
    return Plain([block, other, block], [0, 0, 0]).train()


class Noisy(nn.Module):
    """Draws from Python's and NumPy's generators too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x)) * (1 + random.random() + float(np.random.rand()))


class Counting(Noisy):
    """Counts its calls, and computes with the count: no recompute can know that."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.act(self.conv(x) + self.calls) ** 2


# ---------------------------------------------------------------------------------------------- bit-identical


NETS = [(name, "32") for name in ("mini", "vit", "mae", "unet", "skips", "unetr", "swin")]
NETS += [(name, "bf16-mixed") for name in ("mini", "vit", "unet", "skips")]  # MONAI's MAE cannot run in it


@pytest.mark.parametrize(
    ("name", "precision"),
    [*NETS, *[pytest.param(name, "bf16-mixed", marks=pytest.mark.slow) for name in ("swin", "unetr")]],
)
def test_recompute_is_equal_bit_for_bit(name: str, precision: Any) -> None:
    """The U-Net has batch statistics, `skips` in-place activations, the ViT dropout, the MAE a random mask."""
    found = check(name, "recompute_plain", precision=precision)
    assert found.exact
    assert found.bit_identical, str(found)
    assert found.passed
    assert str(found).startswith("verified: loss and ")


@pytest.mark.parametrize("make_net", [everywhere, shared, lambda: Plain([Noisy(), Noisy(), Residual()], [0, 0, 0])])
def test_random_numbers_and_shared_weights(make_net: Any) -> None:
    net = make_net()
    blocks = find_regions(net, "all")
    assert len(blocks) >= 2
    found = verify_choices(net, image("skips"), dict.fromkeys(blocks, "recompute_plain"))
    assert found.bit_identical, str(found)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(trees())
def test_random_trees_are_equal_bit_for_bit(net: nn.Module) -> None:
    choices = {region: ("recompute_plain", "keep")[i % 2] for i, region in enumerate(find_regions(net, "all"))}
    assert verify_choices(net, image("skips"), choices).bit_identical


# ---------------------------------------------------------------------------------------------- tolerances


@pytest.mark.parametrize("option", ["lean_attention", "lean", "recompute", "recompute_lean"])
@pytest.mark.parametrize("name", ["mini", "mae", "skips", pytest.param("unetr", marks=pytest.mark.slow)])
def test_lean_operators_are_within_their_tolerance(name: str, option: str) -> None:
    found = check(name, option)
    assert not found.exact
    assert found.passed, str(found)
    assert found.tolerance == (LOSS_TOLERANCE[torch.float32], GRADIENT_TOLERANCE[torch.float32]) == (1e-6, 1e-4)


def test_in_float64_they_are_within_1e_10() -> None:
    net = make("mini").double()
    choices = dict.fromkeys(find_regions(net, "all"), "recompute_lean")
    for levers in ({}, {"tail": True}, {"micro_batches": 2}):
        found = verify_choices(
            net, image("mini").double(), choices, loss=DICE_CE, target=label("mini"), **levers
        )  # fmt: skip
        assert not found.exact
        assert found.passed, str(found)
        assert found.tolerance == (1e-12, 1e-10)


def test_under_autocast_the_tolerance_is_that_of_its_rounding() -> None:
    found = check("mini", "lean", precision="bf16-mixed", tail=True)
    assert found.passed, str(found)
    assert found.tolerance == (0.05, 0.05)


# ---------------------------------------------------------------------------------------------- what it finds


def test_a_recompute_that_is_not_exact_is_told() -> None:
    torch.manual_seed(0)
    net = Plain([Counting(), Counting(), Residual()], [0, 0, 0])
    found = verify_choices(net, image("skips"), {"blocks.0": "recompute_plain"})
    assert not found.passed
    assert not found.bit_identical
    assert str(found).startswith("NOT equal: loss differs by 0.0e+00, gradients by at most ")
    assert found.worst[0] in dict(net.named_parameters())


def test_a_step_that_another_random_state_follows_is_told() -> None:
    class Drawing(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            state["calls"] += 1
            if state["calls"] == 2:
                random.random()
            return output.square().mean()

    state = {"calls": 0}
    found = verify_choices(make("skips"), image("skips"), {}, loss=Drawing())
    assert not found.random_states_equal
    assert not found.passed
    assert not found.worst[1]


def test_a_gradient_in_one_step_only_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from medckpt.memory import verify

    def forgets(model: nn.Module, choices: Any) -> nn.Module:
        model.head.weight.requires_grad_(False)
        return lay_on(model, choices)

    monkeypatch.setattr(verify, "lay_on", forgets)
    with pytest.raises(MedckptError, match=r"head.weight have a gradient in one of the steps only"):
        verify_choices(make("skips"), image("skips"), {"blocks.0": "keep"})


def test_model_and_generators_are_left_as_they_were() -> None:
    net = lay_on(make("unet"), {"model.0": "recompute_plain"})
    before = copy.deepcopy(net.state_dict())
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    verify_choices(net, image("unet"), {"model.2.0": "recompute_plain"}, loss=DICE_CE, target=label("unet"))
    with pytest.raises(RuntimeError):
        verify_choices(net, torch.zeros(2, 5, 3), {})
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), repr(np.random.get_state()))
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert "forward" in net.get_submodule("model.0").__dict__


# ---------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("option", [pytest.param("recompute_plain", marks=pytest.mark.slow), "recompute_lean"])
def test_a_treated_model_can_be_compiled(option: str) -> None:
    """By the compiler's front end; its back end makes kernels of its own."""
    net = make("mini")
    treated = lay_on(copy.deepcopy(net), dict.fromkeys(find_regions(net, "all"), option))
    compiled = torch.compile(treated, backend="aot_eager")
    gradients = []
    for model in (net, compiled):
        bind(model, DICE_CE)(image("mini"), label("mini")).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    largest = max(float(g.abs().max()) for g in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * largest


def test_where_float32_rounds_too_much_float64_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRADIENT_TOLERANCE, torch.float32, 0.0)
    net, choices = make("mini"), {"encoder1": "lean", "blocks.0": "lean"}
    found = verify_choices(net, image("mini"), choices, loss=DICE_CE, target=label("mini"))
    assert found.passed
    assert found.tolerance[1] == GRADIENT_TOLERANCE[torch.float64]
    assert re.search(r"in float64; float32's rounding makes \d\.\de-0\d of it$", str(found))
    assert all(p.dtype == torch.float32 for p in net.parameters())
