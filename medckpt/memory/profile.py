"""What a device can hold and how fast it is: the figures that a forecast needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """A device. `configs/memory/` has one file per card; `medckpt profile` measures this machine.

    Rates are peaks of the data sheet, the `*_share` fields say how much of them a training step reaches. None means
    that the device has no such arithmetic (then float32's rate is taken) or that the figure is not known.
    """

    name: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    title: str = ""
    """The device as its maker calls it."""
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
    """Device to pinned host memory, one direction."""
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
