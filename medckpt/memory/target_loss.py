"""Losses of a step that runs sample by sample, and what the trials of `loss_trial.py` and `samples.py` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

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


def as_summed(loss: TargetLoss) -> SummedLoss | None:
    """Returns the loss if it is a function of sums over samples, None if it is a mean over them."""
    return loss if getattr(loss, "over_batch", False) else None  # type: ignore[return-value]


def two_unlike(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns two random samples of the shape of one of `tensor`, float32 on the CPU, far from alike.

    Of two samples that are much alike the mean would be nearly the same whatever is done with them.
    """
    made = torch.randn((1, *tensor.shape[1:]), generator=generator, device="cpu")
    again = 3 * torch.randn(made.shape, generator=generator, device="cpu") + _slope(made)
    return torch.cat([made, again])


def _slope(tensor: Tensor) -> Tensor:
    """Returns what is added to each channel (B, C, ...): nothing to the first, 2 to the last."""
    if tensor.dim() < 2:
        return torch.zeros((), device="cpu")
    return torch.linspace(0, 2, tensor.shape[1], device="cpu").reshape(1, -1, *[1] * (tensor.dim() - 2))


def device_of(tree: Any) -> str:
    """Returns the type of device that the tensors are on."""
    return next((leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), "cpu")


def sliced(tree: Any, piece: slice) -> Any:
    """Returns a part of a batch: of every tensor its samples."""
    return tree_map_only(Tensor, lambda tensor: tensor[piece], tree)
