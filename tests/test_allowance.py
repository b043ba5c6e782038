"""`budget=` in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from medckpt.allowance import Allowance, read_budget
from medckpt.errors import ConfigError
from medckpt.memory.profile import MemoryProfile
from medckpt.profiles import load_profile

MIB, GIB = 2**20, 2**30
CAPACITY = 16 * GIB
CARD = MemoryProfile(name="card", device="cuda", title="A card", capacity_bytes=CAPACITY)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * GIB), ("8gib", 8 * GIB), (" 8 GiB ", 8 * GIB), ("0.5GiB", GIB // 2), (".5GiB", GIB // 2),
        ("750MiB", 750 * MIB), ("750 MB", 750_000_000), ("1.5GB", 1_500_000_000), ("3KiB", 3072), ("3kb", 3000),
        ("123456B", 123456), ("0.01TiB", int(0.01 * 2**40)), ("0.01 tb", 10**10),
        (6442450944, 6442450944), ("6442450944", 6442450944), ("16GiB", CAPACITY),
    ],
)  # fmt: skip
def test_bytes(text: str | int, nbytes: int) -> None:
    assert read_budget(text, CARD) == Allowance(peak_bytes=nbytes)


def test_devices_and_as_little_as_can_be() -> None:
    assert read_budget("min", CARD) == Allowance()
    assert read_budget("auto", CARD) == Allowance(device_bytes=CAPACITY)
    card = load_profile("t4_16gb")
    assert card.capacity_bytes is not None
    assert read_budget("t4_16gb", CARD) == Allowance(device_bytes=card.capacity_bytes)
    assert str(read_budget("auto", CARD)) == "a device of 16.00 GiB"
    assert str(read_budget("min", CARD)) == "as little as can be"
    assert str(read_budget("6GiB", CARD)) == "6.00 GiB"


def test_a_device_whose_capacity_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"budget=auto: how much open holds is not known. Give bytes"):
        read_budget("auto", dataclasses.replace(CARD, name="open", capacity_bytes=None))


@pytest.mark.parametrize("budget", [8, 1000, "8", "1000", "0.5", str(MIB - 1)])
def test_a_number_without_a_unit(budget: str | int) -> None:
    with pytest.raises(ConfigError, match=rf"^budget={budget}: of what\? Give the unit: budget={budget}GiB\.$"):
        read_budget(budget, CARD)


def test_a_small_number_in_python_is_one_of_bytes() -> None:
    assert read_budget(664800, CARD) == Allowance(peak_bytes=664800)


@pytest.mark.parametrize("budget", ["17GiB", 17 * GIB, "1TiB", "a100_80gb"])
def test_more_than_the_device_has(budget: str | int) -> None:
    with pytest.raises(ConfigError, match=rf"^budget={budget}: A card holds 16\.00 GiB\. Give less, auto"):
        read_budget(budget, CARD)


WRONG: list[Any] = [
    "", "GiB", "8GiBs", "8 Gi", "-8GiB", "+8GiB", "0GiB", "0.0MiB", "1e3GiB", "1.2.3GiB", "8,5GiB", "8PiB",
    "inf", "infGiB", "nan", "Min", "a100", "1_000MiB", "٨GiB", 0, -1, 1.5, True, None, ["8GiB"],
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=repr)
def test_what_is_no_budget(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no number of bytes. Give 8GiB or 750MiB, a memory profile"):
        read_budget(text, CARD)
