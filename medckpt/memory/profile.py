"""What a device can hold and how fast it is: the figures that a forecast needs of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from medckpt.errors import ConfigError, suggest

_POSITIVE = ("capacity_bytes", "bandwidth_gb_s", "fp32_tflops", "tf32_tflops", "bf16_tflops", "fp16_tflops")
_SHARES = ("bandwidth_share", "matmul_share", "conv_share")
_INTERVALS = ("context_bytes", "conv_workspace", "reserve_slack")


def _numbers(value: object) -> list[float]:
    values = value if isinstance(value, tuple) else (value,)
    return [one for one in values if isinstance(one, int | float)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """A device. `configs/memory/` has one file per card; `medckpt profile` measures this machine.

    Rates are peaks of the data sheet (or, where `measured`, the best that was measured), the `*_share` fields say how
    much of them a training step reaches. TFLOP/s are dense, a multiply-add counts as two. None means that the device
    has no such arithmetic (then float32's rate is taken) or that the figure is not known.

    Raises:
        ConfigError: a figure that is not above 0, a share outside of 0..1, an interval that falls, a source of no
            field; all of them at once.
    """

    name: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    title: str = ""
    """The device as its maker calls it."""
    device_names: tuple[str, ...] = ()
    """How `torch.cuda.get_device_name()` spells it: a machine with such a device and capacity has this profile."""
    capacity_bytes: int | None = None
    """Memory that the driver reports in all (`torch.cuda.get_device_properties(0).total_memory`), not the nominal."""
    bandwidth_gb_s: float | None = None
    """Device memory, 1e9 bytes per second."""
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    """float32 on matrix units with 10 bits of mantissa; used where the training allows TF32."""
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    host_link_gb_s: float | None = None
    """Device to pinned host memory, one direction, as copies reach it (about 0.8 of the link's own rate)."""
    bandwidth_share: float = 0.8
    matmul_share: float = 0.6
    conv_share: float = 0.25
    launch_us: float = 3.0
    """Least time of one kernel, in microseconds."""
    context_bytes: tuple[int, int] = (0, 0)
    """CUDA context with its kernels: lowest and highest seen. It is outside of the allocator."""
    library_workspace_bytes: int = 0
    """What cuBLAS keeps for itself inside the allocator."""
    conv_workspace: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Scratch memory of one convolution as a multiple of its input and output bytes: low, expected, high."""
    reserve_slack: tuple[float, float] = (0.0, 0.0)
    """Memory that the allocator reserves beyond a replay of its own rules, as a share: low, high."""
    measured: str | None = None
    """When and where `medckpt profile` measured this; None: data sheets and publications, see `sources`."""
    workspaces: dict[str, int] = field(default_factory=dict)
    """Scratch bytes of single operators that were measured, by their signature (`medckpt.memory.workspace`)."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each figure comes from: field name to publication."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}: must be above 0."
            for name in (*_POSITIVE, "host_link_gb_s", "launch_us")
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        problems += [f"{name}: must lie above 0 and up to 1." for name in _SHARES if not 0 < getattr(self, name) <= 1]
        problems += [
            f"{name}: must rise and begin at 0 or above."
            for name in _INTERVALS
            if list(getattr(self, name)) != sorted(getattr(self, name)) or not getattr(self, name)[0] >= 0
        ]
        numbers = [v for item in dataclasses.fields(self) for v in _numbers(getattr(self, item.name))]
        if not all(map(math.isfinite, numbers)):
            problems.append("every figure must be a finite number.")
        if self.library_workspace_bytes < 0 or any(size < 0 for size in self.workspaces.values()):
            problems.append("library_workspace_bytes, workspaces: must be 0 or above.")
        fields = [item.name for item in dataclasses.fields(self)]
        problems += [
            f"sources.{key}: no such field. {suggest(key, fields)}" for key in self.sources if key not in fields
        ]
        if problems:
            raise ConfigError("\n".join(problems))
