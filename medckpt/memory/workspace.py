"""Scratch memory: what an operator's kernel allocates for itself while it runs, beside its results.

Fake tensors cannot show it. In 3D networks it is convolutions that have it (layout changes, im2col, partial sums), and
it depends on the library, its version and every size. So it is measured where the device is at hand, one operator
alone, and given as an interval where it is not.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import torch

from medckpt.memory.graph import Op, TensorSpec
from medckpt.memory.measure import allocations
from medckpt.memory.profile import MemoryProfile

_CONVOLUTIONS = ("convolution.default", "convolution_backward.default")

_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward.default"
_NAMESPACES = {"aten", "prims", "_c10d_functional"}
"""Whose operators are torch's own; those of any other have kernels of which nothing is known."""

_CPU_GUESS, _CPU_BOUND = {4: 1.0, 2: 2.0}, {4: 2.0, 2: 4.0}
"""Scratch of a convolution on a CPU as a multiple of its tensors, by bytes per element: expected and highest seen."""

_CPU_OTHERS = {
    "mean.dim": 2.5,
    "mm.default": 1.0,
    "bmm.default": 1.0,
    "addmm.default": 1.0,
    "baddbmm.default": 1.0,
    "_linalg_svd.default": 2.0,
    "_scaled_dot_product_flash_attention_for_cpu.default": 1.0,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": 1.0,
}
"""Other CPU operators whose kernels allocate: the highest seen, as a multiple of their tensors. Most often nothing."""

Interval = tuple[int, int, int]
"""Bytes: lowest, expected, highest."""


def has_scratch(op: Op) -> bool:
    """Whether kernels of the operator, on some device, are known to allocate more than their results."""
    return op.name in _CONVOLUTIONS or op.name == _FLASH_BACKWARD or op.name in _CPU_OTHERS or is_custom(op)


def is_custom(op: Op) -> bool:
    """Whether the operator is not torch's own."""
    return op.call is not None and op.call[0].namespace not in _NAMESPACES


def estimate(op: Op, profile: MemoryProfile) -> Interval:
    """Returns the scratch memory of `op` as the profile knows it; a measured value has no spread."""
    if not has_scratch(op):
        return 0, 0, 0
    measured = profile.workspaces.get(op.signature()) if profile.workspaces else None
    if measured is not None:
        return measured, measured, measured
    if op.name == _FLASH_BACKWARD:  # float32 sums of the query's gradient, and one number per row (its C++ source)
        query, logsumexp = op.specs()[1], op.specs()[5]
        exact = query.nbytes // query.dtype.itemsize * 4 + logsumexp.nbytes
        return exact, exact, exact
    if is_custom(op):
        return 0, 0, op.bytes_moved
    moved = op.bytes_moved
    if op.name in _CPU_OTHERS:
        return 0, 0, int(_CPU_OTHERS[op.name] * moved) if profile.device == "cpu" else 0
    if profile.device == "cpu":
        width = op.dtype.itemsize
        return 0, int(_CPU_GUESS.get(width, 1.0) * moved), int(_CPU_BOUND.get(width, 2.0) * moved) + _columns(op)
    low, expected, high = profile.conv_workspace
    return int(low * moved), int(expected * moved), int(high * moved)


def measure_scratch(op: Op, device: str = "cpu") -> int:
    """Returns the bytes that `op` allocates at its worst beside its results, by running it once on the device.

    Its arguments are made with the layouts of the trace and hold zeros.

    Raises:
        RuntimeError: torch cannot run it here (out of memory, no such kernel).
    """
    if op.call is None:
        return 0
    func, args, kwargs = op.call
    real_args, real_kwargs = _real(args, device), {key: _real(value, device) for key, value in kwargs.items()}
    gc.collect()
    with torch.no_grad():
        if device == "cpu":
            kept: list[Any] = []
            sizes = allocations(lambda: kept.append(func(*real_args, **real_kwargs)))
            return max(0, sizes.peak - sizes.end)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        results = func(*real_args, **real_kwargs)
        torch.cuda.synchronize()
        scratch = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del results
        return scratch


def _columns(op: Op) -> int:
    """Bytes of the unfolded input that torch's own (not oneDNN's) CPU convolution makes, for a batch of one."""
    specs = op.specs()
    backward = op.name == "convolution_backward.default"
    first, weight = specs[0], specs[2 if backward else 1]  # first: the outgoing gradient, or the input
    return first.nbytes // max(first.shape[1], 1) * math.prod(weight.shape[1:])


def _real(value: Any, device: str) -> Any:
    if isinstance(value, TensorSpec):
        tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
        return tensor.zero_() if tensor.numel() else tensor
    if isinstance(value, tuple):
        return [_real(item, device) for item in value]
    return value
