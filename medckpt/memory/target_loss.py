"""Losses of a step that runs sample by sample, and a trial of whether one may be taken so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from medckpt.errors import ConfigError

TargetLoss = Callable[[Any, Any], Tensor]
"""(output, target) -> scalar; for the levers here a mean over samples, or a `SummedLoss`."""


class SummedLoss(Protocol):
    """A loss over a whole batch that is a function of sums over its samples."""

    @property
    def over_batch(self) -> bool:
        """Whether it is one; if not it is a mean over samples."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss of a batch: `of_statistics(statistics(output, target))`."""

    def statistics(self, output: Any, target: Any) -> Tensor:
        """What is summed, a vector; differentiable."""

    def of_statistics(self, statistics: Tensor) -> Tensor:
        """The loss, from the sum over all samples."""


_TOLERANCE = 1e-4


def refuse_other_losses(loss: TargetLoss, summed: SummedLoss | None, output: Any, target: Any) -> None:
    """Refuses a loss that is neither a mean over samples nor of their sums, tried on random outputs of two samples.

    They have targets of the kind at hand. Of classes the one has hardly any but 0, the other all that the output has:
    of samples that are much alike (or are background alone, as a patch may be) the mean is the same whatever the loss.
    """
    if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((output, target))):
        return  # a forecast reads no values
    generator = torch.Generator().manual_seed(0)

    def two(tensor: Tensor) -> Tensor:
        one = _small(tensor[:1])
        other = one.flip(tuple(range(2, one.dim()))) if one.dim() > 2 else one
        few = (torch.rand(one.shape, generator=generator, device="cpu") < 0.1).to(one.device)
        if not _is_whole(tensor):
            return torch.cat([one, torch.where(few, other, 0)])
        classes = _random_classes(one, output, generator)
        odd = _odd_value(tensor, output)
        if odd is not None:
            classes = torch.where(few, odd, classes)
        return torch.cat([torch.where(few, one.clamp(min=0) if odd is None else one, 0), classes])

    def random(tensor: Tensor) -> Tensor:
        return two_unlike(_small(tensor), generator).to(tensor.device)

    with torch.no_grad(), torch.autocast(device_of(output), enabled=False):
        outputs, targets = tree_map_only(Tensor, random, output), tree_map_only(Tensor, two, target)
        whole = loss(outputs, targets)
        _refuse_other_values(whole)
        parts = [(sliced(outputs, one), sliced(targets, one)) for one in (slice(0, 1), slice(1, 2))]
        if summed is None:
            mean = (loss(*parts[0]) + loss(*parts[1])) / 2
        else:
            mean = summed.of_statistics(summed.statistics(*parts[0]) + summed.statistics(*parts[1]))
    if not torch.allclose(whole.float(), mean.float(), rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ConfigError(
            f"loss: it is no mean over samples (two random samples together give {whole.item():.6g}, one by one "
            f"{mean.item():.6g}), so it cannot be taken sample by sample. Plan without the per-sample tail and without "
            "micro-batches, or use a loss per sample (for Dice: batch=False; no class weights in cross-entropy)."
        )


def two_unlike(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns two random samples of the shape of one of `tensor`, float32 on the CPU, far from alike.

    Of two samples that are much alike the mean would be nearly the same whatever is done with them.
    """
    made = torch.randn((1, *tensor.shape[1:]), generator=generator, device="cpu")
    again = 3 * torch.randn(made.shape, generator=generator, device="cpu") + _slope(made)
    return torch.cat([made, again])


def _refuse_other_values(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"loss: must give one number for (output, target), as a tensor; it gives {what}.")


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool((tensor == tensor.round()).all())


def _odd_value(tensor: Tensor, output: Any) -> int | None:
    """Returns a value of a label map that is no class of the output: what a loss may be told to ignore."""
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() < 2 or first.shape[1] < 2 or tensor.dim() < 2:
        return None
    for extreme in (tensor.max(), tensor.min()):
        if not 0 <= int(extreme) < first.shape[1]:
            return int(extreme)
    return None


def _random_classes(like: Tensor, output: Any, generator: torch.Generator) -> Tensor:
    """Returns random classes, low ones more often; 0 and 1 for an output of one channel, or of the target's number."""
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), like)
    channels = first.shape[1] if first.dim() > 1 else 1
    ones = channels == 1 or (like.dim() == first.dim() and like.shape[1] == channels)
    return (torch.rand(like.shape, generator=generator, device="cpu") ** 3 * (2 if ones else channels)).floor().to(like)


def _slope(tensor: Tensor) -> Tensor:
    """Returns what is added to each channel (B, C, ...): nothing to the first, 2 to the last."""
    if tensor.dim() < 2:
        return torch.zeros((), device="cpu")
    return torch.linspace(0, 2, tensor.shape[1], device="cpu").reshape(1, -1, *[1] * (tensor.dim() - 2))


def _small(tensor: Tensor) -> Tensor:
    for dim in range(2, tensor.dim()):
        tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], 16))
    return tensor


def device_of(tree: Any) -> str:
    """Returns the type of device that the tensors are on."""
    return next((leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), "cpu")


def sliced(tree: Any, piece: slice) -> Any:
    """Returns a part of a batch: of every tensor its samples."""
    return tree_map_only(Tensor, lambda tensor: tensor[piece], tree)
