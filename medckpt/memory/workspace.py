"""Scratch memory: what an operator's kernel allocates for itself while it runs, beside its results.

Fake tensors cannot show it. In 3D networks it is convolutions that have it (layout changes, im2col, partial sums), and
it depends on the library, its version and every size. So it is measured where the device is at hand, one operator
alone, and given as an interval where it is not.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from medckpt.lean import dice_ce
from medckpt.memory.graph import Op, TensorSpec
from medckpt.memory.measure import allocations
from medckpt.memory.profile import MemoryProfile

_CONVOLUTIONS = ("convolution.default", "convolution_backward.default")

_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward.default"
_NAMESPACES = {"aten", "prims", "_c10d_functional", "medckpt_link"}
"""Whose operators are torch's own, or mere copies; those of any other have kernels of which nothing is known."""

_CPU_GUESS, _CPU_BOUND = {4: 1.0, 2: 2.0}, {4: 2.0, 2: 4.0}
"""Scratch of a convolution on a CPU as a multiple of its tensors, by bytes per element: expected and highest seen."""

_SMALL_SAMPLE = 20480
"""Product of the first four sides of an input up to which torch does not ask oneDNN for a single sample."""

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

_LEAN_PARTS = 2**25
"""Bytes above which the parts of a lean operator on a CPU are never, whatever its tensors."""

Interval = tuple[int, int, int]
"""Bytes: lowest, expected, highest."""


def has_scratch(op: Op) -> bool:
    """Whether kernels of the operator, on some device, are known to allocate more than their results."""
    known = op.name in _CONVOLUTIONS or op.name == _FLASH_BACKWARD or op.name in _CPU_OTHERS
    return known or is_custom(op) or _is_lean(op)


def is_custom(op: Op) -> bool:
    """Whether the operator is not torch's own."""
    return op.call is not None and op.call[0].namespace not in _NAMESPACES and not _is_lean(op)


def _is_lean(op: Op) -> bool:
    """Whether it is one of our own operators, which stand any values."""
    return op.call is not None and op.call[0].namespace == "medckpt"


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
    if _is_lean(op):
        return _lean(op)
    moved = op.bytes_moved
    if op.name in _CPU_OTHERS:
        return 0, 0, int(_CPU_OTHERS[op.name] * moved) if profile.device == "cpu" else 0
    if profile.device == "cpu":
        width, columns = op.dtype.itemsize, _columns(op)
        most = int(_CPU_BOUND.get(width, 2.0) * moved) + columns + _blocked(op)
        if _is_unfolded(op):
            return 0, min(_unfolded(op), most), most
        return 0, int(_CPU_GUESS.get(width, 1.0) * moved), most
    low, expected, high = profile.conv_workspace
    return int(low * moved), int(expected * moved), int(high * moved)


def _lean(op: Op) -> Interval:
    """Returns the scratch of one of our own operators: known, or at most as much as its tensors and parts of them."""
    if not op.name.startswith("medckpt.dice_ce"):
        return 0, 0, op.bytes_moved + _LEAN_PARTS
    backward = op.name.startswith("medckpt.dice_ce_backward")
    logits, label = op.specs()[-2:]
    held = dice_ce.scratch_bytes(logits.shape, logits.dtype, label.dtype, backward=backward)
    return held, held, held


_KNOWN: dict[tuple[str, int], int] = {}
"""What has been measured in this process, by signature and number of threads."""


def measured_scratch(op: Op) -> int:
    """Returns `measure_scratch` of an operator on this CPU; equal ones are run once in a process."""
    key = op.signature(), torch.get_num_threads()
    if key not in _KNOWN:
        _KNOWN[key] = measure_scratch(op)
    return _KNOWN[key]


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


def _is_unfolded(op: Op) -> bool:
    """Whether torch computes a convolution on this CPU itself, by unfolding its input, and not by oneDNN.

    In bfloat16 that depends on the CPU. In float32 it does so for one small sample, and for 1x1x1 kernels on one
    thread (`ConvParams::use_mkldnn` in ATen/native/Convolution.cpp).
    """
    conv = _Convolution.of(op)
    if len(conv.image.shape) != len(conv.weight.shape):
        return False  # no call that torch would take
    if op.dtype.itemsize == 2:
        return not fast_bfloat16()
    batch, kernel = conv.image.shape[0], conv.weight.shape[2:]
    usual = {*conv.stride, *conv.dilation} == {1}
    if usual and kernel[-2:] == (1, 1) and batch < 16 and torch.get_num_threads() == 1:
        return True
    small = batch == 1 and math.prod(conv.image.shape[:4]) <= _SMALL_SAMPLE
    return small and conv.groups == 1 and min(kernel[-2:]) <= 3


@cache
def fast_bfloat16() -> bool:
    """Whether oneDNN computes convolutions in bfloat16 on this CPU; where it does not, torch unfolds their input."""
    asks = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asks is None or bool(asks())


def _columns(op: Op) -> int:
    """Bytes of the unfolded input that torch's own (not oneDNN's) CPU convolution makes, as large as a stride of 1."""
    specs = op.specs()
    backward = op.name == "convolution_backward.default"
    first, weight = specs[0], specs[2 if backward else 1]  # first: the outgoing gradient, or the input
    return first.nbytes // max(first.shape[1], 1) * math.prod(weight.shape[1:])


def _blocked(op: Op) -> int:
    """Bytes of a convolution's image and weight as oneDNN may lay them out anew: in blocks of up to 16 channels.

    An image of one channel then takes 8 or 16 times as much.
    """
    conv = _Convolution.of(op)
    found = 0
    for spec, channels in ((conv.image, 1), (conv.weight, 0), (conv.weight, 1)):
        if len(spec.shape) > channels and spec.shape[channels]:
            found += spec.nbytes // spec.shape[channels] * (-(-spec.shape[channels] // 16) * 16)
    return found


def _unfolded(op: Op) -> int:
    """Bytes of the same as torch makes it: for every voxel of the output, nothing for a 1x1x1 kernel in forward.

    A transposed convolution unfolds its output, one sample at a time.
    """
    conv = _Convolution.of(op)
    image, kernel = conv.image, conv.weight.shape[2:]
    if math.prod(kernel) == 1 and op.name == "convolution.default":
        return 0
    if conv.transposed:
        voxels = math.prod(image.shape[2:])
    else:
        sizes = zip(image.shape[2:], kernel, conv.stride, conv.padding, conv.dilation, strict=True)
        voxels = image.shape[0] * math.prod((side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, p, d in sizes)
    return int(voxels * math.prod(conv.weight.shape[1:]) * image.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """The arguments of a convolution, or of its backward."""

    image: TensorSpec
    weight: TensorSpec
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int

    @classmethod
    def of(cls, op: Op) -> _Convolution:
        assert op.call is not None
        args, first = op.call[1], 1 if op.name == "convolution_backward.default" else 0
        image, weight, _, stride, padding, dilation, transposed, _, groups = args[first : first + 9]
        strides, pads, dilations = (_each(value, len(weight.shape) - 2) for value in (stride, padding, dilation))
        return cls(image, weight, strides, pads, dilations, transposed, groups)


def _each(value: Any, count: int) -> tuple[int, ...]:
    return tuple(value) if len(value) == count else tuple(value) * count


def _real(value: Any, device: str) -> Any:
    if isinstance(value, TensorSpec):
        tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
        return tensor.zero_() if tensor.numel() else tensor
    if isinstance(value, tuple):
        return [_real(item, device) for item in value]
    return value
