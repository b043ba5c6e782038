"""Instance, batch and group norm of a saved tensor, made again and differentiated by torch's own kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

aten = torch.ops.aten


class Norm(NamedTuple):
    """A norm's settings; no tensors, as those are saved by autograd."""

    groups: int | None
    """Groups of channels, None for batch and instance norm."""
    instance: bool
    batch_statistics: bool
    """Whether mean and variance come from the input (training) or are the running ones."""
    eps: float
    dtype: torch.dtype
    """Of the result: autocast runs group norm in float32 on CUDA."""

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> Norm:
        m: Any = module
        if isinstance(module, nn.GroupNorm):
            return cls(m.num_groups, False, True, m.eps, dtype)
        instance = isinstance(module, nn.InstanceNorm2d | nn.InstanceNorm3d)
        return cls(None, instance, instance or m.training or m.running_mean is None, m.eps, dtype)

    def statistics(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Returns running mean and variance where they are used."""
        m: Any = module
        return (None, None) if self.batch_statistics else (m.running_mean, m.running_var)


class Again(NamedTuple):
    """A norm made again: its result, what it was computed from, and what its backward operator asks for."""

    out: Tensor
    operand: Tensor
    weight: Tensor | None
    kept: tuple[Any, ...]

    def without_result(self) -> Again:
        """Lets the result go."""
        return self._replace(out=self.operand)


def norm_again(
    norm: Norm, x: Tensor, gain: Tensor | None, shift: Tensor | None, mean: Tensor | None, var: Tensor | None
) -> Again:
    """Normalises `x` (B, channels, ...) outside of autocast, in the dtype that it was in at first."""
    if x.dtype != norm.dtype:  # autocast's rule: everything in float32
        x, gain, shift = (None if t is None else t.to(norm.dtype) for t in (x, gain, shift))  # type: ignore[assignment]
    if norm.groups is not None:
        x = x.contiguous()
        sizes = (x.shape[0], x.shape[1], x[0, 0].numel(), norm.groups)
        out, *kept = torch.native_group_norm(x, gain, shift, *sizes, norm.eps)
        return Again(out, x, gain, (*kept, sizes))
    shape = x.shape
    if norm.instance:
        # As torch: every channel of every sample is a channel of one sample.
        x = x.contiguous().view(1, -1, *shape[2:])
        gain, shift = (None if t is None else t.repeat(shape[0]) for t in (gain, shift))
    cudnn = torch.backends.cudnn.enabled
    training = norm.batch_statistics
    made: Any = torch._batch_norm_impl_index(x, gain, shift, mean, var, training, 0.0, norm.eps, cudnn)
    return Again(made[0].view(shape), x, gain, (mean, var, *made[1:]))


def norm_backward(
    norm: Norm,
    grad: Tensor,
    done: Again,
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias, in the shapes and dtypes of `inputs`."""
    mask = [need and t is not None for need, t in zip(needs, inputs, strict=True)]
    if not any(mask):
        return None, None, None
    if norm.groups is not None:
        mean, deviation, sizes = done.kept
        found = aten.native_group_norm_backward(
            grad.contiguous(), done.operand, mean, deviation, done.weight, *sizes, mask
        )
    else:
        running_mean, running_var, mean, deviation, reserve, index = done.kept
        found = aten._batch_norm_impl_index_backward(
            index,
            done.operand,
            grad.contiguous().view(done.operand.shape) if norm.instance else grad,
            done.weight,
            running_mean,
            running_var,
            mean,
            deviation,
            norm.batch_statistics,
            norm.eps,
            mask,
            reserve,
        )
    return tuple(  # type: ignore[return-value]
        _as(found[i], inputs[i]) if mask[i] else None for i in range(3)
    )


def _as(grad: Tensor, like: Tensor | None) -> Tensor | None:
    """Brings a gradient into shape and dtype of what it belongs to; of repeated weights it is the sum."""
    assert like is not None
    if grad.numel() != like.numel():
        grad = grad.view(-1, like.numel()).sum(0)
    return grad.view(like.shape).to(like.dtype)
