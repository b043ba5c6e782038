"""Dice plus cross-entropy in bounded memory: it keeps logits, label and two numbers per sample and class.

Plain autograd keeps float32 logits, softmax, log-softmax, a one-hot copy of the label and products of these: above six
times the logits. Here the softmax is made in parts, in the forward pass and again in the backward pass. Both passes are
operators of their own (`medckpt::dice_ce_sums`, `medckpt::dice_ce_backward`): the record of a step has one line for
each, not a dozen for every part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from medckpt.errors import ConfigError
from medckpt.lean import parts
from medckpt.lean.parts import no_autocast

SMOOTH = 1e-5
"""What MONAI's DiceLoss adds to numerator and denominator."""


def dice_cross_entropy(
    logits: Tensor, label: Tensor, *, dice_weight: float, ce_weight: float, include_background: bool, batch_dice: bool
) -> Tensor:
    """Returns `dice_weight` times soft Dice plus `ce_weight` times cross-entropy, as MONAI and torch compute them.

    Equal to `DiceLoss(softmax=True, to_onehot_y=True, include_background=..., batch=...)` of MONAI and
    `torch.nn.functional.cross_entropy` up to the order of sums. Without `batch_dice` it is the mean of the losses of
    the single samples. Autocast has no influence: everything is computed in float32, or float64 for such logits.

    Args:
        logits: shape (B, classes, ...) with 2 classes or more, of any floating dtype.
        label: shape (B, 1, ...), integers from 0 to classes - 1.
        dice_weight: factor of the Dice part; 0 leaves it out.
        ce_weight: factor of the cross-entropy; 0 leaves it out.
        include_background: whether class 0 counts in Dice.
        batch_dice: whether Dice sums over all samples before it divides.

    Returns:
        A scalar in float32, or float64 for such logits.

    Raises:
        ConfigError: the shapes do not fit.
    """
    sums = dice_ce_sums(logits, label, with_dice=dice_weight != 0, with_entropy=ce_weight != 0)
    return of_sums(
        sums, dice_weight=dice_weight, ce_weight=ce_weight, include_background=include_background, batch_dice=batch_dice
    )


@dataclass(frozen=True, slots=True)
class Sums:
    """What the loss needs of some samples; of all samples it is the sum (entropy, voxels) and the rows of each."""

    entropy: Tensor
    """Cross-entropy of all voxels, a scalar."""
    overlap: Tensor
    """Shape (B, classes): probability of each class where the label is the class."""
    predicted: Tensor
    """Shape (B, classes): probability of each class."""
    present: Tensor
    """Shape (B, classes): voxels of each class in the label."""
    voxels: int | Tensor


def dice_ce_sums(logits: Tensor, label: Tensor, *, with_dice: bool = True, with_entropy: bool = True) -> Sums:
    """Returns the sums that Dice and cross-entropy are made of, with their gradient, in bounded memory.

    Raises:
        ConfigError: the shapes do not fit.
    """
    if logits.dim() < 3 or logits.shape[1] < 2:
        raise ConfigError(f"logits: must be (B, classes, ...) with 2 classes or more, not {tuple(logits.shape)}.")
    if label.shape != (logits.shape[0], 1, *logits.shape[2:]):
        wanted = (logits.shape[0], 1, *logits.shape[2:])
        raise ConfigError(f"label: must have shape {wanted} for these logits, not {tuple(label.shape)}.")
    if label.is_floating_point():
        label = label.long()
    entropy, (overlap, predicted, present) = _Sums.apply(logits, label, with_dice, with_entropy)
    return Sums(entropy, overlap, predicted, present, logits[:, 0].numel())


def of_sums(sums: Sums, *, dice_weight: float, ce_weight: float, include_background: bool, batch_dice: bool) -> Tensor:
    """Returns the loss, a scalar; arguments as those of `dice_cross_entropy`."""
    loss = sums.entropy * (ce_weight / sums.voxels)
    if not dice_weight:
        return loss
    first = 0 if include_background else 1
    overlap, predicted, present = (rows[:, first:] for rows in (sums.overlap, sums.predicted, sums.present))
    if batch_dice:
        overlap, predicted, present = (rows.sum(0, keepdim=True) for rows in (overlap, predicted, present))
    dice = (2 * overlap + SMOOTH) / (predicted + present + SMOOTH)
    return loss + dice_weight * (1 - dice).mean()


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, with_dice: bool, with_entropy: bool) -> tuple[Tensor, Tensor]:
        with no_autocast(logits):
            entropy, sums = torch.ops.medckpt.dice_ce_sums(logits, label, with_dice, with_entropy)
        ctx.save_for_backward(logits, label)
        ctx.parts = with_dice, with_entropy
        return entropy, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_entropy: Tensor, by_sums: Tensor) -> Any:
        with_dice, with_entropy = ctx.parts
        with no_autocast(by_sums):
            found = torch.ops.medckpt.dice_ce_backward(
                by_entropy if with_entropy else None, by_sums if with_dice else None, *ctx.saved_tensors
            )
        return found, None, None, None


def _sums(logits: Tensor, label: Tensor, with_dice: bool, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Returns the sum of all voxels' cross-entropies, and of each sample and class the sums that Dice needs.

    The latter have shape (3, B, classes): probability where the label is the class, probability, number of voxels.
    """
    entropy, sums = _no_sums(logits, label, with_dice, with_entropy)
    entropy.zero_()
    sums.zero_()
    for sample, _, scores, classes in _parts(logits, label):
        logarithm = scores.log_softmax(0)
        if with_entropy:
            entropy -= logarithm.gather(0, classes[None]).sum()
        if with_dice:
            elsewhere = classes != torch.arange(len(scores), device=scores.device)[:, None]
            probability = logarithm.exp_()
            sums[1, sample] += probability.sum(1)
            # In place, and of one dtype: mixed ones, and a sum of bool, are cast to a copy first.
            sums[0, sample] += probability.masked_fill_(elsewhere, 0).sum(1)
            sums[2, sample] += len(classes) - probability.copy_(elsewhere).sum(1)
            del elsewhere, probability
        del logarithm, scores, classes  # what is held when the next part begins would count twice
    return entropy, sums


def _backward(by_entropy: Tensor | None, by_sums: Tensor | None, logits: Tensor, label: Tensor) -> Tensor:
    """Returns the gradient of the logits, from those of the two results of `_sums`."""
    found = _no_gradient(by_entropy, by_sums, logits, label)
    for sample, part, scores, classes in _parts(logits, label):
        here = classes == torch.arange(len(scores), device=scores.device)[:, None]
        probability = scores.softmax(0)
        del scores, classes
        total = None
        if by_sums is not None:  # by a class's probability: one number at every voxel, more where the label is it
            overlap, predicted = by_sums[0, sample][:, None], by_sums[1, sample][:, None]
            slope = torch.where(here, predicted + overlap, predicted)
            total = torch.ops.aten._softmax_backward_data(slope, probability, 0, slope.dtype)
            del slope
        if by_entropy is not None:
            entropy = probability.sub_(here.to(probability.dtype)).mul_(by_entropy)
            total = entropy if total is None else total.add_(entropy)
            del entropy
        found[sample].flatten(1)[:, part] = probability.zero_() if total is None else total
        del here, probability, total
    return found


def _parts(logits: Tensor, label: Tensor) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yields sample, voxels, scores (classes, voxels) in the dtype of the loss, and classes (voxels), part by part."""
    dtype = _dtype(logits.dtype)
    voxels = logits[0, 0].numel()
    size = _voxels_of_a_part(logits.shape, dtype)
    for sample in range(len(logits)):
        for start in range(0, voxels, size):
            part = slice(start, min(start + size, voxels))
            # Nothing is held here while a part is worked on.
            yield sample, part, logits[sample].flatten(1)[:, part].to(dtype), label[sample].flatten()[part].long()


def _dtype(of_logits: torch.dtype) -> torch.dtype:
    return torch.promote_types(of_logits, torch.float32)


def _voxels_of_a_part(logits: Sequence[int], dtype: torch.dtype) -> int:
    return max(1, parts.LIMIT_BYTES // 4 // (logits[1] * dtype.itemsize))  # of a part there are up to four


def _no_sums(logits: Tensor, label: Tensor, with_dice: bool, with_entropy: bool) -> tuple[Tensor, Tensor]:
    dtype = _dtype(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty((3, *logits.shape[:2]), dtype=dtype)


def _no_gradient(by_entropy: Tensor | None, by_sums: Tensor | None, logits: Tensor, label: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_LIBRARY = torch.library.Library("medckpt", "FRAGMENT")
_LIBRARY.define("dice_ce_sums(Tensor logits, Tensor label, bool with_dice, bool with_entropy) -> (Tensor, Tensor)")
_LIBRARY.define("dice_ce_backward(Tensor? by_entropy, Tensor? by_sums, Tensor logits, Tensor label) -> Tensor")
_LIBRARY.impl("dice_ce_sums", _sums, "CompositeExplicitAutograd")
_LIBRARY.impl("dice_ce_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("medckpt::dice_ce_sums", _no_sums, lib=_LIBRARY)
torch.library.register_fake("medckpt::dice_ce_backward", _no_gradient, lib=_LIBRARY)


def scratch_bytes(logits: Sequence[int], dtype: torch.dtype, label: torch.dtype, *, backward: bool) -> int:
    """Returns what one of the two operators holds at its worst beside its results, on a device.

    A part's scores, classes, softmax and the label's one-hot form; in backward also two more of the softmax's size.

    Args:
        logits: their shape.
        dtype: of the logits.
        label: dtype of the label.
        backward: of which operator.
    """
    wide, classes = _dtype(dtype), logits[1]
    voxels = min(_voxels_of_a_part(logits, wide), math.prod(logits[2:]))
    softmax = voxels * classes * wide.itemsize
    scores = 0 if wide == dtype else softmax
    numbers = 0 if label == torch.int64 else 8 * voxels
    here = voxels * classes
    if not backward:
        return scores + numbers + softmax + here
    return here + max(scores + numbers + softmax, 3 * softmax)


def moved_bytes(logits: Sequence[int], dtype: torch.dtype, *, backward: bool) -> int:
    """Returns the bytes that one of the two operators reads and writes, every kernel's operands counted."""
    wide = _dtype(dtype).itemsize
    cast = 0 if wide == dtype.itemsize else dtype.itemsize + wide
    each = cast + (16 * wide + 4 + dtype.itemsize if backward else 8 * wide + 4)
    return math.prod(logits) * each
