"""Measuring this machine: small sizes, real runs."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path

import pytest
import torch

from medckpt.memory.calibrate import ConvShape, Sizes, measure_profile
from medckpt.memory.profile import MemoryProfile

CONV = ConvShape(batch=1, in_channels=4, out_channels=4, size=(8, 8, 8))
TINY = Sizes(copy_bytes=2**20, matmul=128, linear=((64, 32, 32),), convs=(CONV,), launches=20, repeats=3)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


@pytest.fixture(scope="module")
def measured() -> MemoryProfile:
    return measure_profile("cpu", sizes=TINY)


def test_cpu_figures_are_positive_and_plausible(measured: MemoryProfile) -> None:
    assert measured.device == "cpu"
    assert measured.bandwidth_gb_s is not None
    assert 0.05 < measured.bandwidth_gb_s < 5000
    for rate in (measured.fp32_tflops, measured.bf16_tflops):
        assert rate is not None
        assert 1e-6 < rate < 100
    for share in (measured.bandwidth_share, measured.matmul_share, measured.conv_share):
        assert 0 < share <= 1
    assert 0.05 < measured.launch_us < 5000


def test_what_a_cpu_does_not_have_stays_open(measured: MemoryProfile) -> None:
    assert (measured.tf32_tflops, measured.fp16_tflops, measured.host_link_gb_s) == (None, None, None)
    assert measured.context_bytes == (0, 0)
    assert measured.conv_workspace == (0.0, 0.0, 0.0)


def test_it_says_when_and_with_what_it_was_measured(measured: MemoryProfile) -> None:
    assert measured.measured is not None
    assert measured.measured.startswith(date.today().isoformat())
    assert f"torch {torch.__version__}, {torch.get_num_threads()} threads" in measured.measured
    assert set(measured.sources) == {
        "bandwidth_gb_s",
        "bandwidth_share",
        "launch_us",
        "fp32_tflops",
        "bf16_tflops",
        "matmul_share",
        "conv_share",
    }


def test_progress_is_told_step_by_step_and_shapes_go_before_sizes() -> None:
    calls: list[tuple[str, int, int]] = []
    two = ConvShape(batch=1, in_channels=2, out_channels=3, size=(4, 6, 8), kernel=2, stride=2)
    profile = measure_profile(
        "cpu", shapes=[two], sizes=TINY, progress=lambda what, done, total: calls.append((what, done, total))
    )
    assert 0 < profile.conv_share <= 1
    assert [done for _, done, _ in calls] == [0, 1, 2, 3]
    assert {total for _, _, total in calls} == {4}
    assert calls[-1][0] == "3D convolutions"


def test_no_shapes_leave_the_share_at_its_default() -> None:
    assert measure_profile("cpu", shapes=[], sizes=TINY).conv_share == MemoryProfile().conv_share


def test_global_settings_are_as_before() -> None:
    before = torch.get_float32_matmul_precision()
    measure_profile("cpu", sizes=TINY)
    assert torch.get_float32_matmul_precision() == before


def test_a_machine_is_profiled_into_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medckpt import machine, profiles
    from medckpt.memory import calibrate

    if torch.cuda.is_available():
        pytest.skip("the sizes made small here are the CPU's")
    # Sizes only, and the process keeps its threads and allocator: the rest runs as it is.
    monkeypatch.setattr(calibrate, "CPU_SIZES", TINY)
    monkeypatch.setattr(machine, "prepare_machine", lambda device: {})
    profile, path = profiles.profile_machine(tmp_path)
    assert path.parent == tmp_path
    assert path.suffix == ".yaml"
    assert profile.name == path.stem
    assert profile.capacity_bytes == profiles.ram_bytes()
    assert profiles.load_profile(path) == profile
    named, second = profiles.profile_machine(tmp_path / "mine.yaml")
    assert (named.name, second.name) == ("mine", "mine.yaml")


@GPU
def test_gpu_figures_are_positive() -> None:
    profile = measure_profile("cuda", sizes=TINY)
    assert profile.context_bytes[0] > 0
    assert profile.host_link_gb_s is not None
    assert profile.host_link_gb_s > 0
    assert math.isfinite(profile.conv_workspace[2])
    assert profile.fp16_tflops is not None
    assert profile.fp16_tflops > 0
