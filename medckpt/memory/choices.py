"""What CUDA's composite operators choose by device, as kernels that make the same choice for fake CPU tensors.

Composite operators (dropout, attention, batch norm) look at the device of their input and call one of several
operators that differ in what they save. `medckpt.memory.autocast` registers these kernels above autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from medckpt.errors import MedckptError

Backend = Literal["cudnn", "flash", "efficient", "math"]
Rule = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

aten = torch.ops.aten


def _composite(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls torch's own kernel, which on a CPU tensor makes the CPU's choice; what it calls is seen by autograd."""
    # Not `op.decompose`: that prefers Python versions that are meant for tracing and save something else.
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _filled(op: OpOverload, args: tuple[Any, ...], count: int) -> list[Any]:
    """Returns the first `count` arguments of a call, those left away by their defaults."""
    return [*args, *(argument.default_value for argument in op._schema.arguments[len(args) : count])]


def _dropout(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fused on CUDA, where it saves a mask of bool; on the CPU one of the input's dtype."""
    tensor, p, train = args
    if train and 0 < p < 1 and tensor.numel():
        return aten.native_dropout.default(tensor, p, train)[0]
    return _composite(op, args, kwargs)


def _half_to_float(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CUDA reads float16 and writes float32 in one kernel; bfloat16 is cast before."""
    tensor, dim, dtype = _filled(op, args, 3)
    if tensor.dtype != torch.float16 or dtype != torch.float32:
        return _composite(op, args, kwargs)
    fused = aten._softmax if op is aten.softmax.int else aten._log_softmax
    return fused.default(tensor, dim, True)


def _batch_norm(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch and instance norm of float32 and float16 with weights goes to cuDNN (`_select_batch_norm_backend`)."""
    tensor, weight, bias, mean, var, training, momentum, eps, enabled = args
    cudnn = (
        enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (tensor.dtype, weight.dtype)
        and (tensor.dtype != torch.float16 or weight.dtype == torch.float32)
        and (mean is None) == (var is None)
        and (mean is not None or training)
        and tensor.dim() >= 3
        and tensor.shape[0] <= (880801 if training else 65535)
        and 0 < tensor.numel() < 2**31 - 1
    )
    if not cudnn:
        return _composite(op, args, kwargs)
    layout = torch._prims_common.suggest_memory_format(tensor)
    tensor = tensor.contiguous(memory_format=layout)
    return (*aten.cudnn_batch_norm.default(tensor, weight, bias, mean, var, training, momentum, eps), 1)


def _rms_norm(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, shape, weight, eps = _filled(op, args, 4)
    plain = torch._prims_common.suggest_memory_format(tensor) == torch.contiguous_format
    if plain and not tensor.is_complex() and (weight is None or weight.dtype == tensor.dtype):
        return aten._fused_rms_norm.default(tensor, shape, weight, eps)[0]
    return _composite(op, args, kwargs)


def _recurrent(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise MedckptError(
        f"{op}: what cuDNN's recurrent networks keep for backward is not known without the device. "
        "Measure this model on the GPU instead (saved_bytes with tensors on it)."
    )


def attention_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    grouped: bool = False,
    capability: tuple[int, int] = (8, 0),
) -> Backend:
    """Returns the kernel that CUDA takes for scaled dot product attention of these tensors (`select_sdp_backend`).

    Args:
        query: shape (batch, heads, tokens, head size), any floating dtype; `key` and `value` alike. With another number
            of dimensions only "math" is left.
        mask: additive or boolean, broadcastable to (batch, heads, tokens, tokens of `key`).
        dropout: probability.
        causal: `is_causal` of the call.
        grouped: `enable_gqa` of the call.
        capability: of the device. cuDNN is preferred on 9.x and 10.x, as in wheels of torch 2.11 and later.
    """
    tensors = (query, key, value)
    heads = [tensor.shape[1] for tensor in tensors]
    shared = (
        all(tensor.dim() == 4 for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == len({tensor.shape[0] for tensor in tensors}) == 1
        and (len(set(heads)) == 1 or (grouped and heads[1] == heads[2] and heads[0] % heads[1] == 0))
        and query.shape[2] > 0
        and key.shape[2] > 0
        and (mask is None or mask.stride(-1) == 1)
    )
    if not shared:
        return "math"
    if _cudnn(query, key, value, mask, dropout, capability):
        return "cudnn"
    if (
        mask is None
        and not (causal and query.shape[2] != key.shape[2])
        and _flash(query, key, value, dropout, capability)
    ):
        return "flash"
    return "efficient" if _efficient(query, key, value, capability) else "math"


def _half(tensor: torch.Tensor, capability: tuple[int, int]) -> bool:
    return tensor.dtype == torch.float16 or (tensor.dtype == torch.bfloat16 and capability >= (8, 0))


def _dense(*tensors: torch.Tensor) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    capability: tuple[int, int],
) -> bool:
    sizes = (query.shape[-1], value.shape[-1])
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and capability[0] in (9, 10)
        and _half(query, capability)
        and _dense(query, key, value)
        and _mask_for_cudnn(query, key, mask)
        and (dropout * 16).is_integer()
        and max(sizes) <= 128
        and all(size % 8 == 0 for size in sizes)
        and key.shape[2] != 1
        and not (dropout and query.shape[2] == 1)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, capability: tuple[int, int]
) -> bool:
    size = query.shape[-1]
    consumer = capability in ((8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1))
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and _half(query, capability)
        and (_dense(query, key, value) or size == 1)
        and size == key.shape[-1] == value.shape[-1]
        and size <= 256
        # Its backward pass does not fit into the shared memory of these.
        and not (consumer and _needs_grad(query, key, value) and size > 192 and (dropout > 0 or size <= 224))
    )


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]) -> bool:
    half, recent = _half(query, capability), capability >= (8, 0)
    aligned = 8 if half else 4 if recent else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and (half or query.dtype == torch.float32)
        and _dense(query, key, value)
        and query.shape[-1] == key.shape[-1]
        and all(size % aligned == 0 and size > 0 for size in (query.shape[-1], value.shape[-1]))
        and (not recent or all(tensor.storage_offset() % aligned == 0 for tensor in (query, key, value)))
    )


def _needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _mask_for_cudnn(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    if mask is None:
        return True
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])[-mask.dim() :]
    fits = mask.dim() in (2, 4) and all(size in (1, full) for size, full in zip(mask.shape, wanted, strict=True))
    return fits and not mask.requires_grad


def _attention(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, capability: tuple[int, int]
) -> torch.Tensor:
    """Calls the kernel that CUDA takes, with its padding (`scaled_dot_product_attention` in `attention.cpp`)."""
    query, key, value, mask, dropout, causal = _filled(op, args, 6)
    scale, grouped = kwargs.get("scale"), kwargs.get("enable_gqa", False)
    backend = attention_backend(
        query, key, value, mask, dropout=dropout, causal=causal, grouped=grouped, capability=capability
    )
    if backend == "efficient" and query.shape[1] != key.shape[1]:
        raise MedckptError("scaled_dot_product_attention: grouped queries in float32 or with a mask are not modelled.")
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask.logical_not(), float("-inf"), zero)
    if backend == "math":
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=grouped
        )[0]
    if backend == "flash":
        size = query.shape[-1]
        query, key, value = (_pad(tensor, 8) for tensor in (query, key, value))
        scale = size**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention.default(query, key, value, dropout, causal, scale=scale)[0]
        return out if out.shape[-1] == size else out[..., :size]
    keep = _needs_grad(query, key, value)
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, mask, keep, dropout, causal, False, scale=scale
        )[0]
    if mask is not None:
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            tokens = mask.shape[-1]
            mask = torch.nn.functional.pad(mask, (0, 8 - tokens % 8))[..., :tokens]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, mask, keep, dropout, causal, scale=scale
    )[0]


def _pad(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    short = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor


def choices(capability: tuple[int, int]) -> dict[str, Rule]:
    """Returns the kernel per operator of aten that stands in for CUDA's on a device of this compute capability."""
    recurrent = ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_relu.input")
    return {
        "dropout": _dropout,
        "softmax.int": _half_to_float,
        "log_softmax.int": _half_to_float,
        "_batch_norm_impl_index": _batch_norm,
        "rms_norm": _rms_norm,
        "scaled_dot_product_attention": functools.partial(_attention, capability=capability),
        **dict.fromkeys(recurrent, _recurrent),
    }
