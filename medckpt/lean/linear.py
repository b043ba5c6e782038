"""Linear layers, with a LayerNorm before them if wanted, and dropout, that keep less for the backward pass.

Plain autograd keeps a linear layer's input in autocast's dtype, the cast of its weight, and of a LayerNorm its input.
Here the cast of the weight and the normalised input are made again in the backward pass. All calls and dtypes are those
of torch's own backward pass, so that results are equal bit for bit, dropout apart, which draws from a seed of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from medckpt.lean.parts import draw_seed, drawn, drop_, lower_dtype, lowered, no_autocast, seeded


class Norm(NamedTuple):
    """A LayerNorm over the last axis; weight and bias (features,)."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.LayerNorm) -> Norm:
        return cls(module.weight, module.bias, module.eps)


class Normed(NamedTuple):
    """What `Norm` makes of a tensor: the result, and what its own backward pass needs."""

    out: Tensor
    operands: tuple[Tensor, Tensor | None, Tensor | None]
    mean: Tensor
    deviation: Tensor


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Normed:
    """Normalises `x` (..., features) outside of autocast, in the dtype that autocast took for it."""
    if x.dtype != dtype:  # autocast's rule: everything in float32
        x, weight, bias = (None if t is None else t.to(dtype) for t in (x, weight, bias))  # type: ignore[assignment]
    out, mean, deviation = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return Normed(out, (x, weight, bias), mean, deviation)


def operands(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, eps: float | None, lower: torch.dtype | None
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Returns a layer's operand (rows, features), what to keep for it, and the dtype of its LayerNorm.

    Called under the autocast in force, whose rule for LayerNorm (float32 on CUDA, none on a CPU) is torch's own.
    """
    if eps is None:
        rows = lowered(x.reshape(-1, x.shape[-1]), lower)
        return rows, x if rows.dtype == x.dtype else rows, x.dtype
    out = torch.native_layer_norm(x, x.shape[-1:], gain, shift, eps)[0]
    return lowered(out, lower).reshape(-1, x.shape[-1]), x, out.dtype


def norm_backward(
    grad: Tensor, done: Normed, x: Tensor, params: tuple[Tensor | None, Tensor | None], needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias of `normed`, in their own dtypes."""
    if not any(needs):
        return None, None, None
    operand, weight, bias = done.operands
    grad = grad.reshape(operand.shape)
    mask = [needs[0], needs[1] and weight is not None, needs[2] and bias is not None]
    found = torch.ops.aten.native_layer_norm_backward(
        grad, operand, operand.shape[-1:], done.mean, done.deviation, weight, bias, mask
    )
    wanted = (x, *params)
    return tuple(  # type: ignore[return-value]
        None if not m or g is None or t is None else g.to(t.dtype) for m, g, t in zip(mask, found, wanted, strict=True)
    )


def linear_backward(
    grad: Tensor, rows: Tensor | None, weight: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias of a linear layer, by the calls of torch's own backward pass.

    `grad` is (rows, out), `rows` (rows, in) and `weight` (out, in), all of one dtype, which the results have as well.
    """
    return (
        grad.mm(weight) if needs[0] else None,
        grad.t().mm(rows) if needs[1] and rows is not None else None,
        grad.sum(0) if needs[2] else None,
    )


def linear(x: Tensor, layer: nn.Linear, norm: nn.LayerNorm | None = None) -> Tensor:
    """Computes `layer(norm(x))` or `layer(x)`; keeps `x` alone (without a norm: in the layer's dtype).

    Args:
        x: shape (..., in), any floating dtype, any strides.
        layer: maps `in` features to `out`.
        norm: over the last axis.

    Returns:
        Shape (..., out), in the dtype that the layer would have given under the autocast in force.
    """
    weights = (None, None, None) if norm is None else Norm.of(norm)
    return _Linear.apply(x, *weights, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor | None, shift: Tensor | None, eps: float | None, weight: Tensor, bias: Any
    ) -> Tensor:
        lower = lower_dtype(x)
        rows, kept, dtype = operands(x, gain, shift, eps, lower)
        with no_autocast(x):
            out = nn.functional.linear(rows, lowered(weight, lower), None if bias is None else lowered(bias, lower))
        ctx.save_for_backward(kept, gain, shift, weight, bias)
        ctx.eps, ctx.dtype, ctx.lower, ctx.shape, ctx.input_dtype = eps, dtype, lower, x.shape, x.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, gain, shift, weight, bias = ctx.saved_tensors
        need_x, need_gain, need_shift, _, need_weight, need_bias = ctx.needs_input_grad
        with no_autocast(grad):
            grad = grad.reshape(-1, grad.shape[-1])
            done = None if ctx.eps is None else normed(kept, gain, shift, ctx.eps, ctx.dtype)
            operand = (kept if done is None else lowered(done.out, ctx.lower)).reshape(-1, kept.shape[-1])
            inside = need_x or need_gain or need_shift
            grad_rows, grad_weight, grad_bias = linear_backward(
                grad, operand, lowered(weight, ctx.lower), (inside, need_weight, need_bias)
            )
            del operand
            grad_gain = grad_shift = None
            if done is not None and grad_rows is not None:
                grad_rows, grad_gain, grad_shift = norm_backward(
                    grad_rows.to(ctx.dtype), done, kept, (gain, shift), (need_x, need_gain, need_shift)
                )
            grad_x = grad_rows.to(ctx.input_dtype).view(ctx.shape) if need_x and grad_rows is not None else None
        return (
            grad_x,
            grad_gain,
            grad_shift,
            None,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
        )


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of `x` that keeps a seed and no mask; in distribution what `torch.nn.functional.dropout` gives."""
    return _Dropout.apply(x, p, draw_seed(x)) if training and p > 0 else x


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return drop_(x.clone(memory_format=torch.contiguous_format), p, drawn(x, p, seeded(seed, x)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        mask = drawn(grad, ctx.p, seeded(ctx.seed, grad))
        return drop_(grad.clone(memory_format=torch.contiguous_format), ctx.p, mask), None, None
