"""Dice plus cross-entropy: against MONAI's DiceLoss and torch's cross-entropy."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from medckpt.blocks import LossConfig
from medckpt.errors import ConfigError
from medckpt.lean import dice_ce, parts
from medckpt.lean.dice_ce import dice_cross_entropy
from medckpt.memory.measure import allocations

from .steps import volume

DiceLoss = pytest.importorskip("monai.losses").DiceLoss


def label(*shape: int, classes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def monai(logits, target, *, dice_weight, ce_weight, include_background, batch_dice):
    dice = DiceLoss(softmax=True, to_onehot_y=True, include_background=include_background, batch=batch_dice)
    entropy = torch.nn.functional.cross_entropy(logits, target[:, 0].long())
    return dice_weight * dice(logits, target) + ce_weight * entropy


@pytest.mark.parametrize("limit", [parts.LIMIT_BYTES, 1000])
@pytest.mark.parametrize("batch_dice", [False, True])
@pytest.mark.parametrize("include_background", [False, True])
@pytest.mark.parametrize(("dice_weight", "ce_weight"), [(1.0, 1.0), (0.7, 0.3), (1.0, 0.0), (0.0, 1.0)])
def test_against_monai_in_float64(monkeypatch, limit, batch_dice, include_background, dice_weight, ce_weight):
    monkeypatch.setattr(parts, "LIMIT_BYTES", limit)
    settings = {
        "dice_weight": dice_weight,
        "ce_weight": ce_weight,
        "include_background": include_background,
        "batch_dice": batch_dice,
    }
    logits = volume(3, 5, 4, 6, 7, dtype=torch.float64).requires_grad_()
    target = label(3, 1, 4, 6, 7, classes=4)  # class 4 is nowhere
    mine, theirs = dice_cross_entropy(logits, target, **settings), monai(logits, target, **settings)
    assert abs(float((mine - theirs).detach())) < 1e-12
    (gradient,), (expected,) = torch.autograd.grad(mine, logits), torch.autograd.grad(theirs, logits)
    assert float((gradient - expected).abs().max()) < 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_lower_precision_it_is_as_near_to_float64_as_monai_in_float32(dtype):
    settings = LossConfig()
    logits = (4 * volume(2, 14, 8, 8, 8)).to(dtype).requires_grad_()
    target = label(2, 1, 8, 8, 8, classes=14, dtype=torch.int64)
    exact = logits.detach().double().requires_grad_()
    named = {
        "dice_weight": settings.dice_weight,
        "ce_weight": settings.ce_weight,
        "include_background": settings.include_background,
        "batch_dice": settings.batch_dice,
    }
    truth = monai(exact, target, **named)
    truth.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # has no influence
        losses = [dice_cross_entropy(logits, target, **named)]
        with torch.autocast("cpu", enabled=False):
            losses.append(monai(logits.float(), target, **named))
    found = [torch.autograd.grad(loss, logits)[0] for loss in losses]
    assert losses[0].dtype == losses[1].dtype == torch.float32
    assert found[0].dtype == dtype
    assert abs(float(losses[0].detach()) - float(truth.detach())) < 1e-6
    errors = [float((gradient.double() - exact.grad).abs().max()) for gradient in found]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("batch_dice", [False, True])
def test_gradcheck(batch_dice):
    target = label(2, 1, 3, 2, 2, classes=3)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return dice_cross_entropy(
            logits, target, dice_weight=0.6, ce_weight=0.8, include_background=False, batch_dice=batch_dice
        )

    assert torch.autograd.gradcheck(loss, volume(2, 3, 3, 2, 2, dtype=torch.float64).requires_grad_())


ONES = {"dice_weight": 1.0, "ce_weight": 1.0, "include_background": False}


def test_it_is_the_mean_over_samples():
    logits, target = volume(3, 4, 5, 5, 5, dtype=torch.float64), label(3, 1, 5, 5, 5, classes=4)
    whole = dice_cross_entropy(logits, target, **ONES, batch_dice=False)
    each = [dice_cross_entropy(logits[i : i + 1], target[i : i + 1], **ONES, batch_dice=False) for i in range(3)]
    assert abs(float(whole - torch.stack(each).mean())) < 1e-15


def test_it_keeps_logits_and_label_and_makes_little():
    logits, target = volume(1, 8, 32, 32, 32).requires_grad_(), label(1, 1, 32, 32, 32, classes=8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dice_cross_entropy(logits, target, **ONES, batch_dice=False)
    assert {t.untyped_storage().data_ptr() for t in saved if t.numel() > 8} == {logits.data_ptr(), target.data_ptr()}
    one = logits.untyped_storage().nbytes()

    def step(loss):
        return lambda: torch.autograd.grad(loss(logits, target), logits)

    plain = allocations(step(lambda x, y: monai(x, y, **ONES, batch_dice=False)))
    parts_only = pytest.MonkeyPatch()
    parts_only.setattr(parts, "LIMIT_BYTES", one // 4)
    chunked = allocations(step(lambda x, y: dice_cross_entropy(x, y, **ONES, batch_dice=False)))
    parts_only.undo()
    assert chunked.peak < 1.5 * one, "the gradient, and little beside it"
    assert 2 * chunked.peak < plain.peak


@pytest.mark.parametrize("numbers", [torch.uint8, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", [False, True])
def test_what_it_holds_meanwhile_is_known(dtype, numbers, backward):
    """By the profiler's allocator events, over several parts and over less than one."""
    for shape in ((2, 5, 64, 64, 64), (3, 14, 48, 48, 48)):
        logits = torch.zeros(shape, dtype=dtype)
        target = torch.zeros((shape[0], 1, *shape[2:]), dtype=numbers)
        entropy, sums = torch.ops.medckpt.dice_ce_sums(logits, target, True, True)
        kept = []
        found = allocations(
            lambda logits=logits, target=target, entropy=entropy, sums=sums, kept=kept: kept.append(
                torch.ops.medckpt.dice_ce_backward(entropy, sums, logits, target)
                if backward
                else torch.ops.medckpt.dice_ce_sums(logits, target, True, True)
            )
        )
        foreseen = dice_ce.scratch_bytes(shape, dtype, numbers, backward=backward)
        assert 0 <= found.peak - found.end - foreseen <= 4096


def test_any_strides_recompute_and_a_second_backward_pass():
    target = label(2, 1, 4, 4, 4, classes=3)
    logits = volume(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d).requires_grad_()
    loss = dice_cross_entropy(logits, target, **ONES, batch_dice=False)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, logits)[0], first)
    dense = logits.detach().contiguous().requires_grad_()
    assert torch.equal(
        torch.autograd.grad(dice_cross_entropy(dense, target, **ONES, batch_dice=False), dense)[0], first
    )
    again = checkpoint(dice_cross_entropy, logits, target, **ONES, batch_dice=False, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, logits)[0], first)


def test_what_does_not_fit_is_refused():
    logits, target = volume(2, 3, 4, 4, 4), label(2, 1, 4, 4, 4, classes=3)
    with pytest.raises(ConfigError, match="2 classes or more"):
        dice_cross_entropy(logits[:, :1], target, **ONES, batch_dice=False)
    with pytest.raises(ConfigError, match=r"must have shape \(2, 1, 4, 4, 4\)"):
        dice_cross_entropy(logits, target[:, 0], **ONES, batch_dice=False)
