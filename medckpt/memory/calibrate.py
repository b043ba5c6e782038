"""Measures this machine: what its memory, matrix units, convolutions and kernel launches really do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from medckpt.memory.profile import MemoryProfile

Progress = Callable[[str, int, int], None]
"""Called with what is measured next, how many measurements are done, and how many there are."""

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """One 3D convolution with padding that keeps the size at stride 1."""

    batch: int
    in_channels: int
    out_channels: int
    size: tuple[int, int, int]
    """Of the input, in voxels (D, H, W)."""
    kernel: int = 3
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the measurements are."""

    copy_bytes: int
    matmul: int
    """Rows and columns of the square matrices whose product gives the peak rate."""
    linear: tuple[tuple[int, int, int], ...]
    """(tokens, in, out) of linear layers as 3D transformers have them."""
    convs: tuple[ConvShape, ...]
    launches: int = 500
    repeats: int = 7


def _cube(side: int) -> tuple[int, int, int]:
    return (side, side, side)


def _convs(batch: int, rows: Sequence[tuple[int, int, int]]) -> tuple[ConvShape, ...]:
    return tuple(ConvShape(batch=batch, in_channels=i, out_channels=o, size=_cube(side)) for i, o, side in rows)


# Swin-UNETR with 48 features at 96^3 (its decoder from fine to coarse), nnU-Net's first stage at 128^3, an embedding
# and a head.
GPU_SIZES = Sizes(
    copy_bytes=512 * _MIB,
    matmul=8192,
    linear=((8192, 768, 3072), (27648, 96, 384), (13824, 1024, 1024)),
    convs=(
        *_convs(2, [(1, 48, 96), (48, 48, 96), (96, 48, 96), (96, 96, 48), (192, 192, 24), (384, 384, 12)]),
        *_convs(1, [(32, 32, 128), (64, 32, 128)]),
        ConvShape(batch=2, in_channels=1, out_channels=48, size=_cube(96), kernel=2, stride=2),
        ConvShape(batch=2, in_channels=48, out_channels=14, size=_cube(96), kernel=1),
    ),
    launches=2000,
)
CPU_SIZES = Sizes(
    copy_bytes=64 * _MIB,
    matmul=1024,
    linear=((512, 768, 3072), (4096, 48, 192)),
    convs=_convs(1, [(12, 12, 48), (24, 24, 32), (48, 48, 16)]),
)


def measure_profile(
    device: Literal["cpu", "cuda"],
    *,
    shapes: Sequence[ConvShape] | None = None,
    sizes: Sizes | None = None,
    progress: Progress | None = None,
) -> MemoryProfile:
    """Measures the CPU, or the current GPU, as it is now: with torch's present number of threads.

    Each figure is the median of repeated runs after one that does not count. On a machine that others use, what comes
    out is what is left of it.

    Args:
        device: what to measure.
        shapes: 3D convolutions, instead of usual ones of medical networks.
        sizes: all sizes; `shapes` goes before its convolutions. Smaller ones are for tests.
        progress: called before each measurement.

    Returns:
        A profile with `measured` set. `*_tflops` is the rate of a large matrix product; `matmul_share` and
        `conv_share` what linear layers and 3D convolutions (forward and backward) reach of it; `bandwidth_gb_s` that of
        a copy, read and written bytes both counted; `bandwidth_share` what element-wise operators reach of it. On CUDA
        also the host link, the context, the libraries' and convolutions' scratch memory and the allocator's slack.
    """
    sizes = sizes or (GPU_SIZES if device == "cuda" else CPU_SIZES)
    convs = tuple(shapes) if shapes is not None else sizes.convs
    meter = _Meter(device, sizes, convs)
    found: dict[str, Any] = {}
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("memory bandwidth", meter.bandwidth),
        ("kernel launch", meter.launch),
        ("matrix products", meter.matmul),
        ("3D convolutions", meter.conv),
    ]
    if device == "cuda":
        # Before all others: what the context takes when little has run.
        steps.insert(0, ("context and libraries", meter.library))
        steps += [
            ("host link", meter.host_link),
            ("scratch memory of convolutions", meter.conv_workspace),
            ("allocator", meter.reserve_slack),
        ]
    for number, (what, step) in enumerate(steps):
        if progress is not None:
            progress(what, number, len(steps))
        found |= step()
    if device == "cuda":
        found["context_bytes"] = tuple(sorted((found["context_bytes"][0], _outside_of_allocator())))
    stamp = f"{date.today().isoformat()}, {_device_name(device)}, torch {torch.__version__}"
    if device == "cpu":
        stamp += f", {torch.get_num_threads()} threads"
    sources = dict.fromkeys(found, "measured")
    if device == "cuda":
        sources["context_bytes"] = "measured; what other processes held on the GPU counts too"
        sources["reserve_slack"] = "measured against the allocated bytes: an upper bound"
    figures = {key: _rounded(value) for key, value in found.items()}
    return MemoryProfile(name="measured", device=device, measured=stamp, sources=sources, **figures)


class _Meter:
    """The measurements, each a dictionary of the profile's fields."""

    def __init__(self, device: Literal["cpu", "cuda"], sizes: Sizes, convs: tuple[ConvShape, ...]) -> None:
        self.device, self.sizes, self.convs = device, sizes, convs
        self.rates: dict[torch.dtype, float] = {}
        # Tensor cores of Ampere and later have bf16 and TF32; torch would emulate bf16 on older ones.
        modern = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        self.half = torch.float32 if device == "cpu" else torch.bfloat16 if modern else torch.float16
        """The type that training computes convolutions in."""
        kinds = [("fp32_tflops", torch.float32, "highest")]
        if modern:
            kinds.append(("tf32_tflops", torch.float32, "high"))
        if modern or device == "cpu":
            kinds.append(("bf16_tflops", torch.bfloat16, "highest"))
        if device == "cuda":
            kinds.append(("fp16_tflops", torch.float16, "highest"))
        self.kinds = kinds

    def seconds(self, run: Callable[[], object], loops: int = 1) -> float:
        """Returns the median seconds of one of `loops` calls of `run`."""
        return _median_seconds(run, self.device, self.sizes.repeats, loops)

    def bandwidth(self) -> dict[str, Any]:
        number = self.sizes.copy_bytes // 256 * 64  # float32, whole rows
        source, target = (torch.ones(number, device=self.device) for _ in range(2))
        # Operators between the matrix products of a network: how many times each reads or writes the whole array.
        rows = source.view(-1, 64)
        operators: list[tuple[int, Callable[[], object]]] = [
            (3, lambda: torch.add(source, target)),
            (2, lambda: functional.leaky_relu(source)),
            (2, lambda: functional.gelu(source)),
            (2, lambda: functional.layer_norm(rows, (64,))),
            (2, lambda: rows.softmax(-1)),
        ]
        copy = 2 * self.sizes.copy_bytes / self.seconds(lambda: target.copy_(source))
        others = [times * self.sizes.copy_bytes / self.seconds(run) for times, run in operators]
        return {"bandwidth_gb_s": copy / 1e9, "bandwidth_share": _share(statistics.median(others) / copy)}

    def launch(self) -> dict[str, Any]:
        one = torch.ones(1, device=self.device)
        return {"launch_us": 1e6 * self.seconds(lambda: one.add_(1), self.sizes.launches)}

    def matmul(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        side = self.sizes.matmul
        for field, dtype, precision in self.kinds:
            with _float32_precision(precision):
                best = self._product(side, side, side, dtype)
                found[field] = best / 1e12
                if precision == "highest":
                    self.rates[dtype] = best
        shares = [self._product(*linear, self.half) / self.rates[self.half] for linear in self.sizes.linear]
        return {**found, "matmul_share": _share(statistics.median(shares))}

    def _product(self, rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
        left = torch.randn(rows, inner, device=self.device).to(dtype)
        right = torch.randn(inner, columns, device=self.device).to(dtype)
        return 2 * rows * inner * columns / self.seconds(lambda: left @ right)

    def conv(self) -> dict[str, Any]:
        rates = []
        for shape in self.convs:
            with _skips_what_does_not_fit():
                operands = _operands(shape, self.device, self.half)
                out = _forward(shape, *operands)
                flops = 2 * out.numel() * shape.in_channels * shape.kernel**3
                grad = torch.ones_like(out)
                del out
                # The backward pass has two products of the forward's size: by the input, by the weight.
                rates.append(3 * flops / self.seconds(_step(shape, operands, grad)))
        return {"conv_share": _share(statistics.median(rates) / self.rates[self.half])} if rates else {}

    def host_link(self) -> dict[str, Any]:
        host = torch.empty(256 * _MIB, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=self.device)
        slower = max(
            self.seconds(lambda: there.copy_(host, non_blocking=True)),
            self.seconds(lambda: host.copy_(there, non_blocking=True)),
        )
        return {"host_link_gb_s": host.numel() / slower / 1e9}

    def library(self) -> dict[str, Any]:
        """What cuBLAS keeps once a forward and a backward pass (a thread of its own) have used it."""
        before = torch.cuda.memory_allocated()
        left = torch.randn(1024, 1024, device=self.device, dtype=self.half, requires_grad=True)
        (left @ left).backward(torch.ones_like(left))
        torch.cuda.synchronize()
        context = _outside_of_allocator()
        del left
        kept = max(0, torch.cuda.memory_allocated() - before)
        return {"context_bytes": (context, context), "library_workspace_bytes": kept}

    def conv_workspace(self) -> dict[str, Any]:
        multiples = []
        for shape in self.convs:
            for dtype in dict.fromkeys((torch.float32, self.half)):
                with _skips_what_does_not_fit():
                    multiples.append(_workspace_multiple(shape, self.device, dtype))
        if not multiples:
            return {}
        return {"conv_workspace": (min(multiples), statistics.median(multiples), max(multiples))}

    def reserve_slack(self) -> dict[str, Any]:
        """An upper bound: all that is reserved beyond the peak of what is allocated, in steps of these convolutions."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            for shape in self.convs:
                with _skips_what_does_not_fit():
                    operands = _operands(shape, self.device, self.half)
                    grad = torch.ones_like(_forward(shape, *operands))
                    _step(shape, operands, grad)()
                    del operands, grad
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        return {"reserve_slack": (0.0, max(0.0, reserved / allocated - 1))} if allocated else {}


def _median_seconds(run: Callable[[], object], device: str, repeats: int, loops: int) -> float:
    run()
    taken = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        for _ in range(loops):
            run()
        _wait(device)
        taken.append((time.perf_counter() - start) / loops)
    return statistics.median(taken)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _rounded(value: Any) -> Any:
    """Returns a figure with the four digits that are worth keeping; whole numbers as they are."""
    if isinstance(value, tuple):
        return tuple(_rounded(item) for item in value)
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _share(value: float) -> float:
    # A small product may run faster than the large one that gave the peak; a share ends at 1.
    return min(1.0, max(value, 1e-3))


def _operands(shape: ConvShape, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns input (B, C, D, H, W) and weight of a convolution, both with gradients."""
    values = torch.randn(shape.batch, shape.in_channels, *shape.size, device=device, dtype=dtype)
    weight = torch.randn(shape.out_channels, shape.in_channels, *_cube(shape.kernel), device=device, dtype=dtype)
    return values.requires_grad_(), weight.requires_grad_()


def _forward(shape: ConvShape, values: Tensor, weight: Tensor) -> Tensor:
    padding = shape.kernel // 2 if shape.stride == 1 else 0
    return functional.conv3d(values, weight, stride=shape.stride, padding=padding)


def _step(shape: ConvShape, operands: tuple[Tensor, Tensor], grad: Tensor) -> Callable[[], object]:
    # autograd.grad leaves nothing behind in .grad, so that every run allocates the same.
    return lambda: torch.autograd.grad(_forward(shape, *operands), operands, grad)


def _workspace_multiple(shape: ConvShape, device: str, dtype: torch.dtype) -> float:
    """Returns the most scratch memory of forward or backward, as a multiple of the input's and output's bytes."""
    values, weight = _operands(shape, device, dtype)
    _wait(device)
    before = _reset_peak()
    out = _forward(shape, values, weight)
    _wait(device)
    forward = torch.cuda.max_memory_allocated() - before - out.nbytes
    grad = torch.ones_like(out)
    before = _reset_peak()
    grads = torch.autograd.grad(out, (values, weight), grad)
    _wait(device)
    backward = torch.cuda.max_memory_allocated() - before - sum(item.nbytes for item in grads)
    return max(0.0, forward, backward) / (values.nbytes + out.nbytes)


def _reset_peak() -> int:
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _outside_of_allocator() -> int:
    """Returns the bytes in use on the GPU beside torch's reserve: the context, and what other processes have there."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


@contextmanager
def _skips_what_does_not_fit() -> Iterator[None]:
    # A small GPU, or one that others use, measures the shapes that it can hold.
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()


@contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return torch.backends.cpu.get_cpu_capability() + " CPU"
