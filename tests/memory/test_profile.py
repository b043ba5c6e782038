"""A device's figures: what the dataclass refuses, and what every shipped file has to hold."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from medckpt import typed
from medckpt.errors import ConfigError
from medckpt.memory.profile import MemoryProfile
from medckpt.profiles import load_profile

FILES = {path.stem: path for path in (Path(__file__).resolve().parents[2] / "configs" / "memory").glob("*.yaml")}
CARDS = sorted(set(FILES) - {"auto", "cpu"})
DESCRIPTIONS = {"name", "device", "title", "device_names", "measured", "sources"}


def card(name: str) -> MemoryProfile:
    return typed.read(MemoryProfile, yaml.safe_load(FILES[name].read_text()))


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_file_reads_strictly_and_carries_its_own_name(name: str) -> None:
    profile = card(name)
    assert profile.name == name
    assert profile.title
    assert FILES[name].read_text().startswith("# ")


def test_the_cards_of_the_plan_are_there() -> None:
    assert CARDS == [
        "a100_40gb",
        "a100_80gb",
        "a10_24gb",
        "h100_80gb",
        "h200_141gb",
        "l40s_48gb",
        "rtx3090_24gb",
        "rtx4090_24gb",
        "t4_16gb",
        "v100_16gb",
        "v100_32gb",
    ]


@pytest.mark.parametrize("name", CARDS)
def test_every_figure_of_a_card_has_a_source_that_can_be_followed_or_says_that_it_is_not_verified(name: str) -> None:
    plain = yaml.safe_load(FILES[name].read_text())
    assert set(plain) - DESCRIPTIONS == set(plain["sources"])
    for key, source in plain["sources"].items():
        assert "https://" in source or "not verified" in source or re.match(r"as \w+_tflops", source), key


@pytest.mark.parametrize("name", CARDS)
def test_a_driver_reports_less_than_the_nominal_memory_and_more_than_nine_tenths(name: str) -> None:
    nominal = int(re.search(r"_(\d+)gb$", name).group(1)) * 2**30  # type: ignore[union-attr]
    capacity = card(name).capacity_bytes
    assert capacity is not None
    assert 0.9 * nominal < capacity < nominal


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_a_gpu_with_all_that_a_forecast_asks_for(name: str) -> None:
    profile = card(name)
    assert profile.device == "cuda"
    assert profile.device_names
    assert None not in (profile.bandwidth_gb_s, profile.fp32_tflops, profile.fp16_tflops, profile.host_link_gb_s)
    assert 0 < profile.context_bytes[0] < profile.context_bytes[1] < 2**30
    assert profile.library_workspace_bytes > 0
    assert profile.conv_workspace[2] > profile.conv_workspace[1]
    assert profile.measured is None


def test_volta_and_turing_have_neither_bf16_nor_tf32_and_the_others_have_both() -> None:
    old = {name for name in CARDS if card(name).bf16_tflops is None}
    assert old == {"v100_16gb", "v100_32gb", "t4_16gb"}
    assert old == {name for name in CARDS if card(name).tf32_tflops is None}


def test_figures_are_ordered_as_the_cards_are() -> None:
    def figures(key: str, *names: str) -> list[Any]:
        return [getattr(card(name), key) for name in names]

    by_bandwidth = figures(
        "bandwidth_gb_s", "t4_16gb", "a10_24gb", "l40s_48gb", "v100_32gb", "a100_40gb", "a100_80gb", "h100_80gb"
    )
    by_bandwidth += figures("bandwidth_gb_s", "h200_141gb")
    assert by_bandwidth == sorted(set(by_bandwidth))
    by_bf16 = figures("bf16_tflops", "rtx3090_24gb", "a10_24gb", "rtx4090_24gb", "a100_40gb", "l40s_48gb", "h100_80gb")
    assert by_bf16 == sorted(set(by_bf16))
    by_fp16 = figures("fp16_tflops", "t4_16gb", "v100_16gb", "a100_80gb", "h200_141gb")
    assert by_fp16 == sorted(set(by_fp16))
    by_link = figures("host_link_gb_s", "v100_16gb", "a100_40gb", "h100_80gb")
    assert by_link == sorted(set(by_link))


def test_dense_rates_only() -> None:
    # With sparsity every matrix rate would be twice the dense one: the makers' tables name that one first.
    for name, dense in {"a100_40gb": 312.0, "h100_80gb": 989.4, "l40s_48gb": 362.05, "a10_24gb": 125.0}.items():
        assert card(name).bf16_tflops == dense


def test_no_device_name_belongs_to_two_cards() -> None:
    spellings = [spelling for name in CARDS for spelling in card(name).device_names]
    assert len(spellings) == len(set(spellings))


def test_rules_are_all_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryProfile(capacity_bytes=0, bandwidth_share=1.5, conv_share=0.0, context_bytes=(5, 1), sources={"fp3": "x"})
    assert str(caught.value).splitlines()[:4] == [
        "capacity_bytes: must be above 0.",
        "bandwidth_share: must lie above 0 and up to 1.",
        "conv_share: must lie above 0 and up to 1.",
        "context_bytes: must rise and begin at 0 or above.",
    ]
    assert str(caught.value).splitlines()[4].startswith("sources.fp3: no such field. Known: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp32_tflops": -1.0}, "fp32_tflops: must be above 0"),
        ({"launch_us": 0.0}, "launch_us: must be above 0"),
        ({"host_link_gb_s": float("nan")}, "host_link_gb_s: must be above 0"),
        ({"conv_workspace": (0.5, 0.2, 1.0)}, "conv_workspace: must rise"),
        ({"reserve_slack": (-0.1, 0.2)}, "reserve_slack: must rise and begin at 0"),
        ({"library_workspace_bytes": -1}, "library_workspace_bytes, workspaces: must be 0 or above"),
        ({"workspaces": {"conv": -1}}, "library_workspace_bytes, workspaces: must be 0 or above"),
        ({"sources": {"capacity": "x"}}, "sources.capacity: no such field. Did you mean 'capacity_bytes'?"),
        ({"capacity_bytes": -1}, "capacity_bytes: must be above 0"),
        ({"capacity_bytes": "40 GB"}, "capacity_bytes: must be a whole number, not '40 GB' (str)"),
        ({"capacity_bytes": 4e10}, "capacity_bytes: must be a whole number, not 40000000000.0 (float)"),
        ({"bandwidth_gb_s": "fast"}, "bandwidth_gb_s: must be a number, not 'fast' (str)"),
        ({"bandwidth_share": None}, "bandwidth_share: must be a number, not None"),
        ({"context_bytes": 5}, "context_bytes: must be a tuple of 2 numbers, not 5 (int)"),
        ({"conv_workspace": (0.0, 1.0)}, "conv_workspace: must be a tuple of 3 numbers, not (0.0, 1.0)"),
        ({"device": "gpu"}, "device: must be one of auto, cpu, cuda, not 'gpu'"),
        ({"name": 3}, "name: must be text, not 3 (int)"),
        ({"device_names": "A100"}, "device_names: must be a tuple of texts, not 'A100' (str)"),
        ({"workspaces": {"conv": "x"}}, "workspaces: must be a dict"),
        ({"sources": ["x"]}, "sources: must be a dict of texts, not ['x'] (list)"),
    ],
)
def test_a_broken_figure_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        MemoryProfile(**change)


def test_figures_of_numpy_are_numbers() -> None:
    assert MemoryProfile(capacity_bytes=np.int64(5), bandwidth_gb_s=np.float32(2.0)).capacity_bytes == 5


def test_a_key_that_is_there_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndevice: cuda\ncapacity_bytes: 5\nsources:\n  title: x\ncapacity_bytes: 6\n")
    with pytest.raises(ConfigError, match=r"mine.yaml, line 6: the key 'capacity_bytes' is there already, in line 3"):
        load_profile(path)
    path.write_text("name: mine\ncapacity_bytes: 5\nsources:\n  title: x\n  title: y\n")
    with pytest.raises(ConfigError, match="line 5: the key 'title' is there already, in line 4"):
        load_profile(path)


def test_an_unknown_key_and_a_wrong_type_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        typed.read(MemoryProfile, {"capcity_bytes": 5, "fp32_tflops": "fast"}, "memory")
    assert "memory.capcity_bytes: unknown key. Did you mean 'capacity_bytes'?" in str(caught.value)
    assert "memory.fp32_tflops: expected a number, got 'fast'" in str(caught.value)


def test_a_profile_survives_plain_values() -> None:
    profile = dataclasses.replace(card("a100_40gb"), workspaces={"conv3d 48 96": 12})
    assert typed.read(MemoryProfile, typed.to_plain(profile)) == profile
