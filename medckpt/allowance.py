"""What a step may take: bytes, a device, or as little as can be; from the words of `budget=`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from medckpt.errors import ConfigError, size
from medckpt.memory.profile import MemoryProfile
from medckpt.profiles import load_profile, profile_names

_UNITS = {
    "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9,
    "tb": 10**12,
}  # fmt: skip
_LEAST, _LEAST_INT = 2**20, 2**10
"""A number without a unit, as words and in Python, is one of bytes from here on: nobody means 8 bytes."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """A budget. With neither number: as little as can be."""

    peak_bytes: int | None = None
    """For the peak as `Forecast.peak_bytes` counts it."""
    device_bytes: int | None = None
    """For all that the process takes from the device, what its allocator wastes included."""

    def __str__(self) -> str:
        if self.peak_bytes is not None:
            return size(self.peak_bytes)
        return "as little as can be" if self.device_bytes is None else f"a device of {size(self.device_bytes)}"


def read_budget(budget: str | int, profile: MemoryProfile) -> Allowance:
    """Returns what a step may take on a device.

    Args:
        budget: bytes as a number, "8GiB", "750 MB"; a profile's name or "auto" (`profile`): a device of that capacity;
            or "min".
        profile: the device.

    Raises:
        ConfigError: it is none of these, the device's capacity is not known, or the budget is above it.
    """
    if budget == "min":
        return Allowance()
    if isinstance(budget, str) and (budget == "auto" or budget in profile_names()):
        device = profile if budget == "auto" else load_profile(budget)
        if device.capacity_bytes is None:
            raise ConfigError(f"budget={budget}: how much {device.name} holds is not known. Give bytes, such as 8GiB.")
        _refuse_more(budget, device.capacity_bytes, profile)
        return Allowance(device_bytes=device.capacity_bytes)
    nbytes = _bytes(budget)
    _refuse_more(budget, nbytes, profile)
    return Allowance(peak_bytes=nbytes)


def _bytes(budget: object) -> int:
    text = str(budget) if isinstance(budget, str | int) and not isinstance(budget, bool) else ""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]i?b|b)?\s*", text, re.IGNORECASE | re.ASCII)
    number = float(found[1]) if found else 0.0
    if not found or not number:
        raise ConfigError(
            f"budget={budget}: is no number of bytes. Give 8GiB or 750MiB, a memory profile "
            f"({', '.join(profile_names())}), auto (what the device has) or min (as little as can be)."
        )
    if found[2]:
        return int(number * _UNITS[found[2].lower()])
    if number < (_LEAST_INT if isinstance(budget, int) else _LEAST) or number != int(number):
        raise ConfigError(f"budget={budget}: of what? Give the unit: budget={found[1]}GiB.")
    return int(found[1].rstrip("."))


def _refuse_more(budget: object, nbytes: int, profile: MemoryProfile) -> None:
    if profile.capacity_bytes is not None and nbytes > profile.capacity_bytes:
        raise ConfigError(
            f"budget={budget}: {profile.title or profile.name} holds {size(profile.capacity_bytes)}. Give less, auto "
            "(what it has), or another memory=."
        )
