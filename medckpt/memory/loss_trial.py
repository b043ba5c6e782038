"""Whether a loss is a mean over samples, or of their sums: tried on random outputs, before a step relies on it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from medckpt.errors import ConfigError
from medckpt.memory.refusals import first_line
from medckpt.memory.target_loss import TargetLoss, as_summed, device_of, sliced, two_unlike

_TOLERANCE = 1e-4
_USUAL_IGNORED = -100
"""What torch's losses ignore if nothing else is said; tried when a target has it, not before."""
_MOST_CLASSES = 256
"""A target of one class per sample is tried with each class up to here."""


class LossTrial:
    """Tries a loss once for each kind of target that it meets.

    A loss may be a mean over samples for some targets only: where a value is ignored, or classes have weights, samples
    with more voxels that count weigh more. So it is tried with all classes of the output, and with values that are none
    of them: those that the target at hand has, and what the loss says that it ignores. A later target with another such
    value is tried when it comes.
    """

    def __init__(self, loss: TargetLoss) -> None:
        self._loss = loss
        # A loss that says of itself what it is (`SummedLoss`) says so for every target.
        self._declared = hasattr(loss, "over_batch")
        self._classes: int | None = None
        self._tried: set[int] = set()
        self._done = False

    def renew(self, target: Any) -> None:
        """Asks for another trial if a target has a value that has not been tried."""
        if self._done and not self._declared and set(_odd_values(target, self._classes)) - self._tried:
            self._done = False

    def __call__(self, output: Any, target: Any) -> None:
        """Refuses the loss unless it is a mean over samples, or a function of sums over them.

        Args:
            output: of some samples; shapes and dtypes are read.
            target: of all samples of the step.

        Raises:
            ConfigError: it is neither, gives no single number, or cannot be computed on two samples.
        """
        if self._done or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((output, target))):
            return  # a forecast reads no values
        self._classes = _classes(output, target)
        at_hand = set(_odd_values(target, self._classes))
        output, target = tree_map_only(Tensor, _small, (output, target))
        for odd in (None, *sorted(at_hand)):
            _refuse_unlike(self._loss, output, _targets(target, output, odd))
        for odd in sorted(_ignored(self._loss) - at_hand - self._tried):
            self._try_if_taken(odd, output, target)
        self._tried |= at_hand
        self._done = True

    def _try_if_taken(self, odd: int, output: Any, target: Any) -> None:
        """Tries a value that a part of the loss may not take: on the CPU, as a GPU does not survive a wrong index."""
        if not all(_holds(leaf, odd) for leaf in tree_leaves(target) if isinstance(leaf, Tensor)):
            return
        output, target = tree_map_only(Tensor, lambda tensor: tensor.cpu(), (output, target))
        loss = copy.deepcopy(self._loss).cpu() if isinstance(self._loss, nn.Module) else self._loss
        try:
            _refuse_unlike(loss, output, _targets(target, output, odd))
        except LossRaisedError:
            return  # then no target has this value
        self._tried.add(odd)


class LossRaisedError(ConfigError):
    """The loss raised something on the targets of a trial."""


def _refuse_unlike(loss: TargetLoss, output: Any, targets: Iterator[Any]) -> None:
    """Compares two random samples together with the same two apart, for each of `targets` (of two samples)."""
    summed = as_summed(loss)
    generator = torch.Generator().manual_seed(0)
    outputs = tree_map_only(Tensor, lambda tensor: two_unlike(tensor, generator).to(tensor.device), output)
    with torch.no_grad(), torch.autocast(device_of(output), enabled=False):
        for two in targets:
            parts = [(sliced(outputs, one), sliced(two, one)) for one in (slice(0, 1), slice(1, 2))]
            try:
                whole = loss(outputs, two)
                _refuse_other_values(whole)
                if summed is None:
                    mean = (loss(*parts[0]) + loss(*parts[1])) / 2
                else:
                    mean = summed.of_statistics(summed.statistics(*parts[0]) + summed.statistics(*parts[1]))
            except ConfigError:
                raise
            except Exception as error:  # whatever a loss may raise
                raise LossRaisedError(
                    f"loss: on one or two samples it raises {type(error).__name__}: {first_line(error)} So it cannot "
                    "be taken sample by sample. Plan without the per-sample tail and without micro-batches."
                ) from error
            if not torch.allclose(whole.float(), mean.float(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                raise ConfigError(
                    f"loss: it is no mean over samples (two random samples together give {whole.item():.6g}, one by "
                    f"one {mean.item():.6g}), so it cannot be taken sample by sample. Plan without the per-sample "
                    "tail and without micro-batches, or use a loss per sample (for Dice: batch=False; no class "
                    "weights and no ignored values in cross-entropy)."
                )


def _targets(target: Any, output: Any, odd: int | None) -> Iterator[Any]:
    """Yields targets of two samples, of the kind at hand.

    Of classes the one sample has hardly any but 0, the other all that the output has: of samples that are much alike
    (or are background alone, as a patch may be) the mean is the same whatever the loss. `odd` is mixed into the other.
    Where a sample has one class, each class comes up beside 0.
    """
    generator = torch.Generator().manual_seed(1)
    classes = _classes(output, target)

    def two(tensor: Tensor) -> Tensor:
        one = tensor[:1]
        few = (torch.rand(one.shape, generator=generator, device="cpu") < 0.1).to(one.device)
        if not _is_whole(tensor):
            other = one.flip(tuple(range(2, one.dim()))) if one.dim() > 2 else one
            return torch.cat([one, torch.where(few, other, 0)])
        made = _random_classes(one, classes, generator)
        if odd is None:
            return torch.cat(
                [torch.where(few, one.clamp(min=0, max=None if classes is None else classes - 1), 0), made]
            )
        return torch.cat([torch.zeros_like(one), torch.where(few, odd, made) if one.numel() > 1 else made * 0 + odd])

    yield tree_map_only(Tensor, two, target)
    leaves = [leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor)]
    if odd is None and classes and all(leaf[:1].numel() == 1 and _is_whole(leaf) for leaf in leaves):
        for value in range(1, min(classes, _MOST_CLASSES)):
            yield tree_map_only(Tensor, partial(_zero_and, value), target)


def _zero_and(value: int, tensor: Tensor) -> Tensor:
    """Returns a target of two samples, of class 0 and of class `value`."""
    zero = torch.zeros_like(tensor[:1])
    return torch.cat([zero, zero + value])


def _refuse_other_values(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"loss: must give one number for (output, target), as a tensor; it gives {what}.")


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool((tensor == tensor.round()).all())


def _holds(tensor: Tensor, value: int) -> bool:
    """Whether a target of this dtype can have a value."""
    if tensor.dtype == torch.bool or not _is_whole(tensor):
        return False
    return tensor.is_floating_point() or torch.iinfo(tensor.dtype).min <= value <= torch.iinfo(tensor.dtype).max


def _classes(output: Any, target: Any) -> int | None:
    """Returns how many classes an output has scores for, given the target's shape; None if it has no such axis."""
    scores = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    label = next((leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor)), None)
    if scores is None or label is None or scores.dim() < 2:
        return None
    shape = tuple(scores.shape[1:])
    if tuple(label.shape[1:]) in (shape[1:], (1, *shape[1:])):
        return shape[0]
    if tuple(label.shape[1:]) == shape[:-1]:  # channels last
        return shape[-1]
    return None


def _odd_values(target: Any, classes: int | None) -> Iterator[int]:
    """Yields values of label maps that are no class: what a loss may be told to ignore."""
    if classes is None or classes < 2:
        return
    for tensor in tree_leaves(target):
        if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and tensor.numel():
            for extreme in (tensor.max(), tensor.min()):
                if not 0 <= int(extreme) < classes:
                    yield int(extreme)


def _ignored(loss: TargetLoss) -> set[int]:
    """Returns what a loss, or a part of it, says that it ignores."""
    parts = list(loss.modules()) if isinstance(loss, nn.Module) else [loss]
    found = {getattr(part, "ignore_index", None) for part in parts}
    return {value for value in found if isinstance(value, int) and value != _USUAL_IGNORED}


def _random_classes(like: Tensor, classes: int | None, generator: torch.Generator) -> Tensor:
    """Returns random classes, low ones more often; 0 and 1 where the output has no scores of classes."""
    classes = max(classes or 2, 2)
    return (torch.rand(like.shape, generator=generator, device="cpu") ** 3 * classes).floor().to(like)


def _small(tensor: Tensor) -> Tensor:
    for dim in range(2, tensor.dim()):
        tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], 16))
    return tensor
