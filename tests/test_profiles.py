"""Profiles by name, by path and from this machine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from medckpt import profiles
from medckpt.config import compose_plain, from_plain
from medckpt.errors import ConfigError, DataError
from medckpt.memory.profile import MemoryProfile
from medckpt.profiles import load_profile, profile_machine, profile_names, save_profile, this_machine, unverified

GPU = torch.cuda.is_available()


def test_a_name_a_path_and_an_object_give_the_same_profile() -> None:
    by_name = load_profile("a100_40gb")
    path = Path(__file__).resolve().parents[1] / "configs" / "memory" / "a100_40gb.yaml"
    assert by_name == load_profile(path) == load_profile(str(path)) == load_profile(by_name)
    assert by_name.capacity_bytes == 42298834944  # as deviceQuery prints it


def test_hydra_reads_the_same_profile() -> None:
    # Without `compose`, which asks for the device that the run needs.
    for name in profile_names():
        config = from_plain(compose_plain("swin_ct", [f"memory={name}"]))
        assert load_profile(config.memory) == load_profile(name)


def test_an_unknown_name_gets_the_closest_one_and_the_list() -> None:
    expected = (
        r"memory=a100_40g: there is no such memory profile. Did you mean 'a100_40gb'\? Known: a100_40gb, a100_80gb"
    )
    with pytest.raises(ConfigError, match=expected):
        load_profile("a100_40g")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml: the memory profile cannot be read \(No such file"):
        load_profile(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: mine\ncapcity_bytes: 5\n", r"mine\.yaml: capcity_bytes: unknown key. Did you mean 'capacity_bytes'"),
        ("name: mine\ncapacity_bytes: 40 GB\n", r"mine\.yaml: capacity_bytes: expected a whole number, got '40 GB'"),
        ("name: mine\nmatmul_share: 60\n", r"mine\.yaml: matmul_share: must lie above 0 and up to 1"),
        ("- mine\n", r"mine\.yaml: configuration: expected keys and values"),
        ("", r"mine\.yaml: configuration: expected keys and values"),
        ("name: mine\n\tdevice: cpu\n", r"mine\.yaml, line 2: this is not YAML"),
    ],
)
def test_a_broken_file_is_refused_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profile(path)


def test_cpu_is_this_machine_with_the_memory_it_has() -> None:
    profile = load_profile("cpu")
    kernel = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert kernel is not None
    assert (profile.name, profile.device) == ("cpu", "cpu")
    assert profile.capacity_bytes is not None
    assert 2**28 < profile.capacity_bytes <= int(kernel.group(1)) * 1024
    assert profile == this_machine("cpu") == load_profile(MemoryProfile(name="cpu", device="cpu"))


@pytest.mark.skipif(GPU, reason="this machine has a GPU")
def test_auto_without_a_gpu_is_the_cpu_and_cuda_is_refused() -> None:
    assert load_profile("auto") == this_machine() == this_machine("cpu")
    with pytest.raises(ConfigError, match="leaves capacity_bytes open and torch sees no CUDA GPU"):
        load_profile(MemoryProfile(name="mine", device="cuda"))


@pytest.mark.skipif(not GPU, reason="this machine has no GPU")
def test_auto_with_a_gpu_is_that_gpu() -> None:
    profile = load_profile("auto")
    assert profile.device == "cuda"
    assert profile.capacity_bytes == torch.cuda.get_device_properties(0).total_memory


def test_own_figures_stay_where_this_machine_fills_in_the_rest() -> None:
    own = MemoryProfile(name="mine", device="cpu", bandwidth_gb_s=9.0, sources={"bandwidth_gb_s": "a guess"})
    profile = load_profile(own)
    assert (profile.name, profile.bandwidth_gb_s) == ("mine", 9.0)
    assert profile.capacity_bytes == this_machine("cpu").capacity_bytes
    assert sorted(profile.sources) == ["bandwidth_gb_s", "capacity_bytes"]
    assert load_profile(MemoryProfile(capacity_bytes=2**33)).capacity_bytes == 2**33


@pytest.mark.parametrize(
    ("name", "mib", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB", 40514, "a100_40gb"),  # another driver's capacity
        ("Tesla T4", 15102, "t4_16gb"),
        ("nvidia geforce rtx 4090", 24563, "rtx4090_24gb"),  # Windows reports it all
        ("Tesla V100-SXM2-32GB", 32510, "v100_32gb"),
    ],
)
def test_a_gpu_is_known_by_its_name_and_keeps_its_own_capacity(name: str, mib: int, profile: str) -> None:
    here, shipped = profiles._of_gpu(name, mib * 2**20), load_profile(profile)
    assert here.capacity_bytes == mib * 2**20
    assert here.sources["capacity_bytes"] == "torch.cuda.get_device_properties on this machine"
    unchanged = dataclasses.replace(here, capacity_bytes=shipped.capacity_bytes, sources=shipped.sources)
    assert unchanged == shipped


def test_a_card_with_the_figures_of_another_says_so() -> None:
    here = profiles._of_gpu("Tesla V100-PCIE-32GB", 32510 * 2**20)
    assert here.name == "v100_32gb"
    assert here.title == "Tesla V100-PCIE-32GB (with the figures of NVIDIA V100 SXM2 32GB)"


def test_what_a_profile_does_not_verify_is_known_by_its_sources() -> None:
    assert unverified(load_profile("v100_16gb")) == (
        "context_bytes", "library_workspace_bytes", "conv_workspace", "reserve_slack",
    )  # fmt: skip
    assert unverified(load_profile("cpu")) == ()
    text = (Path(__file__).resolve().parents[1] / "configs" / "memory" / "v100_16gb.yaml").read_text()
    assert "14.13 TFLOP/s in fp32, 10 %" in text


@pytest.mark.parametrize(
    ("name", "mib"),
    [("NVIDIA A100-SXM4-40GB", 4864), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864), ("NVIDIA H100 PCIe", 81008)],
)
def test_a_slice_or_a_card_without_a_profile_is_not_taken_for_another(name: str, mib: int) -> None:
    here = profiles._of_gpu(name, mib * 2**20)
    assert (here.name, here.capacity_bytes, here.bandwidth_gb_s) == ("cuda", mib * 2**20, None)
    assert f"{name} (no profile of this card" in here.title
    assert 0 < here.context_bytes[0] < here.context_bytes[1]


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    for name in ("h100_80gb", "t4_16gb", "cpu"):
        profile = dataclasses.replace(
            load_profile(name), measured="2026-01-02, \u00b5: test", workspaces={"conv3d [2, 48]": 7}
        )
        path = tmp_path / f"{name}.yaml"
        save_profile(profile, path)
        assert load_profile(path) == profile
        assert path.read_text().startswith("# Measured by `medckpt profile`: 2026-01-02")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.yaml", "h100_80gb.yaml", "t4_16gb.yaml"]


def test_a_profile_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the file cannot be written"):
        save_profile(load_profile("cpu"), tmp_path / "file" / "mine.yaml")


def test_profile_never_replaces_a_file_and_says_so_before_it_measures(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    calls: list[str] = []
    with pytest.raises(ConfigError, match=r"mine\.yaml: this file exists, and it is not replaced"):
        profile_machine(path, lambda what, done, total: calls.append(what))
    assert (path.read_text(), calls) == ("mine", [])
    with pytest.raises(ConfigError, match=r"a memory profile is a \.yaml file. Name it mine\.yaml"):
        profile_machine(tmp_path / "mine.json")


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), ("8589934592\n", 2**33)])
def test_a_container_limit_is_read(tmp_path: Path, text: str, limit: int | None) -> None:
    (tmp_path / "memory.max").write_text(text)
    assert profiles._read_limit(tmp_path / "memory.max") == limit
    assert profiles._read_limit(tmp_path / "absent") is None
