"""Convolutional blocks that keep the results of their convolutions and nothing else.

Plain autograd keeps a convolution's result for the norm after it, and the activated tensor for the next convolution.
Here the second is made again from the first in the backward pass; no convolution runs twice. Forward calls the block's
own modules, backward torch's own kernels, so that results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from medckpt.lean.forward import LeanForward
from medckpt.lean.norms import Norm, norm_again, norm_backward
from medckpt.lean.parts import is_monai, is_plain, no_autocast

aten = torch.ops.aten

_NORMS = (nn.InstanceNorm2d, nn.InstanceNorm3d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)


class LeanNormAct(LeanForward):
    """MONAI's `UnetResBlock` and `UnetBasicBlock`, in SwinUNETR, UNETR and DynUNet."""

    __slots__ = ()

    operator = "norm_act"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if not is_monai(module, "UnetResBlock", "UnetBasicBlock"):
            return "it is no UnetResBlock or UnetBasicBlock of MONAI"
        act = module.lrelu
        if not is_plain(act, nn.LeakyReLU, nn.ReLU) or getattr(act, "negative_slope", 0.0) < 0:
            return f"its activation is {type(act).__name__}, and only LeakyReLU and ReLU are known"
        names = [name for name in ("norm1", "norm2", "norm3") if hasattr(module, name)]
        for name in names:
            norm = getattr(module, name)
            if not is_plain(norm, *_NORMS):
                return f"its '{name}' is {type(norm).__name__}, and only instance, batch and group norm are known"
            if is_plain(norm, nn.InstanceNorm2d, nn.InstanceNorm3d) and norm.track_running_stats:
                return f"its '{name}' keeps running statistics per instance"
        second: Any = module.conv2
        if set(dict(second.named_children())) != {"conv"}:
            return "its second convolution has dropout"
        conv = second.conv
        if not is_plain(conv, nn.Conv2d, nn.Conv3d) or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            return "its second convolution is not torch's own, padded with zeros"
        return _watched(module, ("lrelu", "conv2", *names))

    def lean(self, inp: Tensor) -> Tensor:
        block: Any = self.module
        out = norm_act_conv(block.conv1(inp), block.norm1, block.lrelu, block.conv2)
        if type(block).__name__ == "UnetBasicBlock":
            return norm_act(out, block.norm2, block.lrelu)
        residual = block.conv3(inp) if hasattr(block, "conv3") else inp
        return norm_act(out, block.norm2, block.lrelu, residual, getattr(block, "norm3", None))


def _watched(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Returns why children cannot be called without their own backward pass, or None."""
    for name in names:
        for child in getattr(module, name).modules():
            forward = child.__dict__.get("forward")
            # What keeps thin convolutions in float32 (medckpt.training.precision) computes a convolution as well.
            if forward is not None and type(forward).__name__ != "_Float32WhereThin":
                return f"'{name}' inside of it has a forward of its own (recompute, or a patch)"
            if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
                return f"'{name}' inside of it has hooks, which may change what it computes"
    return None


# The compiler cannot follow autograd's nodes, nor the switch of autocast's cache.
@torch._disable_dynamo
def norm_act_conv(x: Tensor, norm: nn.Module, act: nn.Module, layer: nn.Module) -> Tensor:
    """Computes `layer(act(norm(x)))` and keeps `x` alone.

    Args:
        x: shape (B, channels, ...), the result of a convolution.
        norm: instance, batch or group norm.
        act: LeakyReLU or ReLU, in place or not.
        layer: MONAI's `Convolution` without more in it than its child `conv`.
    """
    conv: Any = layer.conv
    return _NormActConv.apply(x, norm.weight, norm.bias, conv.weight, conv.bias, norm, act, layer)


class _NormActConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor | None,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: nn.Module,
        act: nn.Module,
        layer: nn.Module,
    ) -> Tensor:
        normed = norm(x)
        with _no_weight_cache():
            out = layer(act(normed))
        ctx.norm, ctx.slope = Norm.of(norm, normed.dtype), _slope(act)
        ctx.conv, ctx.dtype, ctx.bias_dtype = _arguments(layer.conv), out.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(x, gain, shift, *ctx.norm.statistics(norm), weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gain, shift, mean, var, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        inside = any(needs[:3])
        found: tuple[Tensor | None, ...] = (None, None, None)
        with no_autocast(grad):
            done = norm_again(ctx.norm, x, gain, shift, mean, var)
            # In place: the sign of the result is that of what went in.
            active = nn.functional.leaky_relu_(done.out, ctx.slope)
            bias_sizes = None if ctx.bias_dtype is None else [weight.shape[0]]
            mask = [inside, needs[3], needs[4]]
            grad_active, grad_weight, grad_bias = aten.convolution_backward(
                grad, active.to(ctx.dtype), weight.to(ctx.dtype), bias_sizes, *ctx.conv, mask
            )
            if inside:
                grad_active = _act_backward(grad_active.to(active.dtype), active, ctx.slope)
                del active
                done = done.without_result()
                found = norm_backward(ctx.norm, grad_active, done, (x, gain, shift), needs[:3])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return *found, grad_weight, None if grad_bias is None else grad_bias.to(ctx.bias_dtype), None, None, None


@torch._disable_dynamo
def norm_act(
    x: Tensor, norm: nn.Module, act: nn.Module, residual: Tensor | None = None, residual_norm: nn.Module | None = None
) -> Tensor:
    """Computes `act(norm(x))`, or `act(norm(x) + residual_norm(residual))`, and keeps `x` and `residual`.

    Args:
        x: shape (B, channels, ...), the result of a convolution.
        norm: instance, batch or group norm.
        act: LeakyReLU or ReLU, in place or not.
        residual: of the shape of `x`.
        residual_norm: as `norm`; None adds `residual` as it is.
    """
    parts, norms = [_Part.apply(x, norm.weight, norm.bias, norm)], [norm, residual_norm]
    if residual is not None:
        weights = (None, None) if residual_norm is None else (residual_norm.weight, residual_norm.bias)
        parts.append(_Part.apply(residual, *weights, residual_norm))
    nodes = [part.grad_fn if part.requires_grad else None for part in parts]
    return _Sum.apply(norms[: len(parts)], act, nodes, *parts)


class _Part(torch.autograd.Function):
    """One of the summands before its norm: keeps what `_Sum` needs in backward, and computes the gradients of the norm.

    It is a node of its own, and saves before `_Sum` computes, for three reasons. A recompute ends where the last tensor
    is saved, so it runs neither norm. The gradient that comes into the block is freed before the norms' gradients are
    made. And each summand is freed as soon as its own gradient is there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, shift: Tensor | None, norm: nn.Module | None) -> Tensor:
        # `_Sum` hands its gradient over by itself: autograd would cast it to the dtype of `x`.
        ctx.set_materialize_grads(False)
        ctx.found = None
        ctx.save_for_backward(x, gain, shift, *_statistics(norm, x))
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> Any:
        grad, norm, done, inputs = ctx.found
        ctx.found = None
        if norm is None:
            return grad.to(inputs[0].dtype), None, None, None
        with no_autocast(grad):
            return *norm_backward(norm, grad.to(norm.dtype), done, inputs, ctx.needs_input_grad[:3]), None


class _Sum(torch.autograd.Function):
    """The sum of normalised `_Part`s, activated. It saves nothing that a part has saved."""

    @staticmethod
    def forward(ctx: Any, norms: list[Any], act: nn.Module, nodes: list[Any], *parts: Tensor) -> Tensor:
        out: Any = None
        ctx.norms, ctx.nodes, ctx.slope = [], nodes, _slope(act)
        kept: list[Tensor | None] = []
        for norm, node, part in zip(norms, nodes, parts, strict=True):
            added = part if norm is None else norm(part)
            ctx.norms.append(None if norm is None else Norm.of(norm, added.dtype))
            if out is None:
                out = added
            else:
                out += added
            if node is None:
                weights = (None, None) if norm is None else (norm.weight, norm.bias)
                kept += [part, *weights, *_statistics(norm, part)]
        ctx.save_for_backward(*kept)
        return act(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept = list(ctx.saved_tensors)
        total: Any = None
        found = []
        with no_autocast(grad):
            for norm, node in zip(ctx.norms, ctx.nodes, strict=True):
                inputs = [kept.pop(0) for _ in range(5)] if node is None else node.saved_tensors
                if norm is None:
                    done, value = None, inputs[0]
                else:
                    again = norm_again(norm, *inputs)
                    done, value = again.without_result(), again.out
                    del again
                total = value if total is None else total.add_(value)
                found.append((norm, done, tuple(inputs[:3])))
                del value
            grad = _act_backward(grad, total, ctx.slope)
        for node, rest in zip(ctx.nodes, found, strict=True):
            if node is not None:
                node.found = (grad, *rest)
        return (None,) * (3 + len(found))


def _statistics(norm: nn.Module | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns running mean and variance where the norm reads them."""
    return (None, None) if norm is None else Norm.of(norm, x.dtype).statistics(norm)


def _slope(act: nn.Module) -> float:
    return float(getattr(act, "negative_slope", 0.0))


def _act_backward(grad: Tensor, value: Tensor, slope: float) -> Tensor:
    """Returns `grad`, times `slope` where `value` (the activation or its input) is not above 0; in place of `value`."""
    return aten.leaky_relu_backward.grad_input(grad, value, slope, False, grad_input=value)


def _arguments(conv: Any) -> tuple[Any, ...]:
    """Returns a convolution's settings in the order of torch's backward operator."""
    return conv.stride, conv.padding, conv.dilation, False, [0] * len(conv.stride), conv.groups


@contextmanager
def _no_weight_cache() -> Iterator[None]:
    """Keeps casts made here, without gradients, out of autocast's cache: a later use would get no gradient."""
    was_on = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_on)
