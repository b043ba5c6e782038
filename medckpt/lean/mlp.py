"""The MLP of a transformer block: keeps its input and the pre-activation, and makes the activation again.

Plain autograd keeps the pre-activation, the activation, dropout's masks and the casts of both weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from medckpt.lean import parts
from medckpt.lean.forward import LeanForward
from medckpt.lean.linear import Norm, dropout, linear_backward, norm_backward, normed, operands
from medckpt.lean.parts import (
    bypassed,
    draw_seed,
    drawn,
    drop_,
    is_monai,
    is_plain,
    lower_dtype,
    lowered,
    no_autocast,
    seeded,
)

aten = torch.ops.aten


class LeanMLP(LeanForward):
    """MONAI's `MLPBlock` with GELU, in ViT, UNETR, MAE and Swin: input and pre-activation are all that it keeps.

    Without dropout the results are those of the block bit for bit while its activation has at most
    `parts.LIMIT_BYTES`. Above, it is made for a part of the tokens at a time: up to the order of sums, and the parts of
    a weight's gradient are added in float32. Dropout has the block's probabilities and draws of its own.
    """

    __slots__ = ()

    operator = "mlp"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if not is_monai(module, "MLPBlock"):
            return "it is no MLPBlock of MONAI"
        if not is_plain(module.fn, nn.GELU):
            return f"its activation is {type(module.fn).__name__}, and only GELU is known"
        if not all(is_plain(layer, nn.Linear) for layer in (module.linear1, module.linear2)):
            return "its layers are not torch's own nn.Linear"
        if not all(is_plain(drop, nn.Dropout, nn.Identity) for drop in (module.drop1, module.drop2)):
            return "its dropout is not torch's own nn.Dropout"
        return bypassed(module)

    def lean(self, x: Tensor) -> Tensor:
        return mlp(x, self.module)


def mlp(x: Tensor, block: nn.Module, norm: nn.LayerNorm | None = None) -> Tensor:
    """Computes `block(norm(x))`, or `block(x)`, of a MONAI `MLPBlock`.

    Args:
        x: shape (..., features), any floating dtype, any strides.
        block: accepted by `LeanMLP.refusal`.
        norm: over the last axis; its result is made again as well, and `x` is kept as it is.

    Returns:
        Shape (..., features), in the dtype that the block gives under the autocast in force.
    """
    b: Any = block
    first, second = b.linear1, b.linear2
    p, training = _probability(b.drop1)
    seed = draw_seed(x) if training and p > 0 else None
    weights = (None, None, None) if norm is None else Norm.of(norm)
    pre = _Pre.apply(x, *weights, first.weight, first.bias, second.weight.detach())
    node = pre.grad_fn if pre.requires_grad else None
    out = _Output.apply(pre, second.weight, second.bias, node, lower_dtype(x), b.fn.approximate, p, seed)
    return dropout(out.view(*x.shape[:-1], -1), *_probability(b.drop2))


def _probability(drop: Any) -> tuple[float, bool]:
    return (drop.p, drop.training) if isinstance(drop, nn.Dropout) else (0.0, False)


class _Pre(torch.autograd.Function):
    """The first layer: keeps all that both need, before the second computes. A recompute ends where the last tensor is
    saved, so it does not run the second layer. The gradients are `_Output`'s work."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor | None,
        shift: Tensor | None,
        eps: float | None,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
    ) -> Tensor:
        lower = lower_dtype(x)
        rows, kept, dtype = operands(x, gain, shift, eps, lower)
        with no_autocast(x):
            pre = nn.functional.linear(rows, lowered(weight1, lower), None if bias1 is None else lowered(bias1, lower))
        ctx.save_for_backward(kept, pre, gain, shift, weight1, bias1, weight2)
        ctx.eps, ctx.dtype, ctx.input = eps, dtype, (x.shape, x.dtype)
        ctx.found = None
        ctx.set_materialize_grads(False)
        return pre

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> Any:
        (grad_x, grad_gain, grad_shift, grad1, grad_bias1), ctx.found = ctx.found, None
        return grad_x, grad_gain, grad_shift, None, grad1, grad_bias1, None


class _Output(torch.autograd.Function):
    """Activation, dropout and the second layer; in backward the whole MLP, a part of the tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        pre: Tensor,
        weight2: Tensor,
        bias2: Tensor | None,
        node: Any,
        lower: torch.dtype | None,
        approximate: str,
        p: float,
        seed: int | None,
    ) -> Tensor:
        ctx.node, ctx.bias_dtype = node, None if bias2 is None else bias2.dtype
        ctx.lower, ctx.approximate, ctx.p, ctx.seed = lower, approximate, p, seed
        if node is None:
            ctx.save_for_backward(pre, weight2)
        with no_autocast(pre):
            return _second_layer(ctx, pre, weight2, bias2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        sum2 = None
        with no_autocast(grad):
            if ctx.node is None:
                pre, weight2 = ctx.saved_tensors
                sum2 = _Sum(weight2)
                for _ in _inner_gradients(ctx, grad, pre, lowered(weight2, ctx.lower), ctx.needs_input_grad[1], sum2):
                    pass
            else:
                ctx.node.found, sum2 = _backward(ctx, ctx.node, grad)
            grad_bias2 = grad.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return None, sum2.total(), grad_bias2, None, None, None, None, None


def _second_layer(ctx: Any, pre: Tensor, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    weight = lowered(weight2, ctx.lower)
    bias = None if bias2 is None else lowered(bias2, ctx.lower)
    made = [nn.functional.linear(act, weight, bias) for _, act in _activations(ctx, pre)]
    return made[0] if len(made) == 1 else torch.cat(made)


def _activations(ctx: Any, pre: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields the activation after dropout, part by part; the same parts and draws in forward and backward."""
    generator = None if ctx.seed is None else seeded(ctx.seed, pre)
    for part in _parts(pre):
        act = nn.functional.gelu(pre[part], approximate=ctx.approximate)
        yield part, act if generator is None else drop_(act, ctx.p, drawn(act, ctx.p, generator))


def _parts(rows: Tensor) -> list[slice]:
    """Returns equal shares of the rows, each below the limit."""
    total = rows.shape[0]
    count = max(1, -(-rows.numel() * rows.element_size() // parts.LIMIT_BYTES))
    size = max(1, -(-total // count))
    return [slice(start, min(start + size, total)) for start in range(0, total, size)] or [slice(0, 0)]


def _backward(ctx: Any, node: Any, grad: Tensor) -> tuple[tuple[Tensor | None, ...], _Sum]:
    """Returns the gradients of input, LayerNorm and first layer, and the sum for the second layer's weight."""
    kept, pre, gain, shift, weight1, bias1, weight2 = node.saved_tensors
    need_x, need_gain, need_shift, _, need1, need_bias1, _ = node.needs_input_grad
    inside = need_x or need_gain or need_shift
    done = operand = None
    if node.eps is not None:
        done = normed(kept, gain, shift, node.eps, node.dtype)
    if need1:
        operand = (kept if done is None else lowered(done.out, ctx.lower)).reshape(-1, kept.shape[-1])
    cast1, cast2 = lowered(weight1, ctx.lower), lowered(weight2, ctx.lower)
    sums = [_Sum(weight1), _Sum(bias1), _Sum(weight2)]
    grad_rows = []
    for part, grad_pre in _inner_gradients(ctx, grad, pre, cast2, ctx.needs_input_grad[1], sums[2]):
        piece = None if operand is None else operand[part]
        found, grad1, grad_bias1 = linear_backward(grad_pre, piece, cast1, (inside, need1, need_bias1))
        sums[0].add(grad1)
        sums[1].add(grad_bias1)
        if found is not None:
            grad_rows.append(found)
    del operand
    grad_x = grad_gain = grad_shift = None
    if inside:
        grad_x = grad_rows[0] if len(grad_rows) == 1 else torch.cat(grad_rows)
        grad_rows.clear()
    if done is not None and grad_x is not None:
        needs = (need_x, need_gain, need_shift)
        grad_x, grad_gain, grad_shift = norm_backward(grad_x.to(node.dtype), done, kept, (gain, shift), needs)
    shape, dtype = node.input
    grad_x = grad_x.to(dtype).view(shape) if need_x and grad_x is not None else None
    return (grad_x, grad_gain, grad_shift, sums[0].total(), sums[1].total()), sums[2]


def _inner_gradients(
    ctx: Any, grad: Tensor, pre: Tensor, cast2: Tensor, need2: bool, weight_sum: _Sum
) -> Iterator[tuple[slice, Tensor]]:
    """Yields the gradient of the pre-activation part by part, and sums that of the second layer's weight."""
    generator = None if ctx.seed is None else seeded(ctx.seed, pre)
    for part in _parts(pre):
        mask = None if generator is None else drawn(pre[part], ctx.p, generator)
        if need2:
            act = nn.functional.gelu(pre[part], approximate=ctx.approximate)
            if mask is not None:
                drop_(act, ctx.p, mask)
            weight_sum.add(grad[part].t().mm(act))
            del act
        grad_act = grad[part].mm(cast2)
        if mask is not None:
            drop_(grad_act, ctx.p, mask)
        # In place: it is an elementwise kernel, and the gradient of the activation is not needed any more.
        yield part, aten.gelu_backward.grad_input(grad_act, pre[part], approximate=ctx.approximate, grad_input=grad_act)


class _Sum:
    """A parameter's gradient as a sum over parts, in float32 at least if there are several."""

    def __init__(self, parameter: Tensor | None) -> None:
        self._parameter = parameter
        self._sum: Tensor | None = None

    def add(self, piece: Tensor | None) -> None:
        if piece is not None:
            wide = torch.promote_types(piece.dtype, torch.float32)
            self._sum = piece if self._sum is None else self._sum.to(wide).add_(piece)

    def total(self) -> Tensor | None:
        return None if self._sum is None or self._parameter is None else self._sum.to(self._parameter.dtype)
