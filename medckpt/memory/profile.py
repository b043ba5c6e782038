"""What a device can hold and how fast it is: the figures that a forecast needs of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from medckpt.errors import ConfigError, suggest

_POSITIVE = ("capacity_bytes", "bandwidth_gb_s", "fp32_tflops", "tf32_tflops", "bf16_tflops", "fp16_tflops")
_SHARES = ("bandwidth_share", "matmul_share", "conv_share")
_INTERVALS = {"context_bytes": 2, "conv_workspace": 3, "reserve_slack": 2}
_WHOLE = ("capacity_bytes", "library_workspace_bytes")
_TEXTS = ("name", "title", "measured")
_MAY_BE_NONE = ("measured", *_POSITIVE, "host_link_gb_s")


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, tuple) else (value,)
    return [one for one in values if isinstance(one, int | float)]


def _wrong_types(profile: MemoryProfile) -> list[str]:
    """Returns what is wrong with the types of a profile's values, one line each."""
    values: dict[str, Any] = {item.name: getattr(profile, item.name) for item in dataclasses.fields(profile)}
    numbers = [*_POSITIVE, "host_link_gb_s", "launch_us", *_SHARES, *_WHOLE]
    devices = ("auto", "cpu", "cuda")
    rules: dict[str, tuple[bool, str]] = {
        **{name: (_is_number(values[name], whole=name in _WHOLE), "a number") for name in numbers},
        **{name: (isinstance(values[name], str), "text") for name in _TEXTS},
        **{
            name: (
                isinstance(values[name], tuple)
                and len(values[name]) == count
                and all(_is_number(one, whole=name == "context_bytes") for one in values[name]),
                f"a tuple of {count} numbers",
            )
            for name, count in _INTERVALS.items()
        },
        "device": (values["device"] in devices, f"one of {', '.join(devices)}"),
        "device_names": (_all_are(values["device_names"], tuple, str), "a tuple of texts"),
        "workspaces": (
            _all_are(values["workspaces"], dict, str) and all(_is_number(v) for v in values["workspaces"].values()),
            "a dict of texts and whole numbers",
        ),
        "sources": (
            _all_are(values["sources"], dict, str) and _all_are([*values["sources"].values()], list, str),
            "a dict of texts",
        ),
    }
    return [
        f"{name}: must be {'a whole number' if name in _WHOLE else kind}, not {values[name]!r:.60} "
        f"({type(values[name]).__name__})."
        for name, (right, kind) in rules.items()
        if not right and not (values[name] is None and name in _MAY_BE_NONE)
    ]


def _is_number(value: object, *, whole: bool = False) -> bool:
    return isinstance(value, Integral if whole else Real) and not isinstance(value, bool)


def _all_are(values: Any, container: type[Any], kind: type) -> bool:
    return isinstance(values, container) and all(isinstance(value, kind) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """A device. `configs/memory/` has one file per card; `medckpt profile` measures this machine.

    Rates are peaks of the data sheet (or, where `measured`, the best that was measured), the `*_share` fields say how
    much of them a training step reaches. TFLOP/s are dense, a multiply-add counts as two. None means that the device
    has no such arithmetic (then float32's rate is taken) or that the figure is not known.

    Raises:
        ConfigError: a value of another type than its field's; or a figure that is not above 0, a share outside of 0..1,
            an interval that falls, a source of no field; all of them at once.
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

    @property
    def has_rates(self) -> bool:
        """Whether times follow from the figures (`medckpt.memory.simulate.step_times`)."""
        return self.bandwidth_gb_s is not None and self.fp32_tflops is not None

    def __post_init__(self) -> None:
        problems = _wrong_types(self)
        if problems:
            raise ConfigError("\n".join(problems))
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
