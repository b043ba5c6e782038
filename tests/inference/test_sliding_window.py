from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from monai.inferers import sliding_window_inference
from torch import nn

from medckpt import machine
from medckpt.errors import DataError, GeometryError
from medckpt.geometry import Grid, canonical_grid, resample
from medckpt.inference import sliding_window
from medckpt.inference.sliding_window import Part, need, predict_parts, winners
from medckpt.inference.source_grid import to_source_grid
from medckpt.inference.windows import lay_windows

CPU = torch.device("cpu")
Shape = tuple[int, int, int]


def assembled(network: Any, image: torch.Tensor, patch: Shape, **settings: Any) -> torch.Tensor:
    """All parts put together, each voxel exactly once."""
    logits, seen = None, torch.zeros(image.shape[1:], dtype=torch.int)
    for part in predict_parts(network, image, patch, device=CPU, **settings):
        if logits is None:
            logits = torch.full((len(part.logits), *image.shape[1:]), torch.nan)
        logits[:, *part.place] = part.logits
        seen[part.place] += 1
    assert logits is not None
    assert (seen == 1).all()
    return logits


def cut(logits: torch.Tensor, side: int) -> Iterator[Part]:
    """Finished logits in parts of about `side` voxels, in their order."""
    edges = [[*range(0, n, side)] for n in logits.shape[1:]]
    for corner in itertools.product(*edges):
        x, y, z = (slice(low, min(low + side, n)) for low, n in zip(corner, logits.shape[1:], strict=True))
        yield Part(place=(x, y, z), logits=logits[:, x, y, z].clone())


# Windows


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 24)] * 3),
    patch=st.tuples(*[st.integers(5, 13)] * 3),
    overlap=st.sampled_from([0.0, 0.25, 0.5, 0.6, 0.75]),
    channels=st.integers(1, 2),
    classes=st.integers(1, 4),
    windows=st.integers(1, 3),
    axes=st.sets(st.integers(0, 2)),
    sums_bytes=st.sampled_from([0, 3000, 2**29]),
    seed=st.integers(0, 9),
)
@example((20, 3, 17), (8, 8, 8), 0.8, 1, 3, 1, set(), 2000, 0)
@example((9, 3, 4), (1, 2, 1), 0.5, 1, 2, 1, set(), 100, 0)
@example((8, 8, 60), (13, 13, 13), 0.5, 1, 2, 1, {0, 2}, 0, 0)
def test_logits_are_monais_bit_for_bit(
    shape: Shape, patch: Shape, overlap: float, channels: int, classes: int, windows: int, axes: set[int],
    sums_bytes: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv3d(channels, 3, 3, padding=1), nn.GELU(), nn.Conv3d(3, classes, 1))
    image = torch.randn(channels, *shape)
    subsets = [subset for n in range(len(axes) + 1) for subset in itertools.combinations(sorted(axes), n)]

    def mirrored(window: torch.Tensor) -> torch.Tensor:
        flipped = [[axis + 2 for axis in subset] for subset in subsets]
        return sum(torch.flip(net(torch.flip(window, dims)), dims) for dims in flipped) / len(subsets)

    with torch.inference_mode():
        expected = sliding_window_inference(
            image[None], patch, windows, mirrored, overlap, mode="gaussian", sigma_scale=0.125, cval=float(image.min())
        )[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sliding_window, "SUMS_BYTES", sums_bytes)
        found = assembled(net, image, patch, overlap=overlap, windows=windows, mirror_axes=sorted(axes))
        parts = predict_parts(net, image, patch, device=CPU, overlap=overlap, windows=windows, mirror_axes=sorted(axes))
        labels = winners(parts, shape)
    assert torch.equal(found, expected)
    np.testing.assert_array_equal(labels, expected.argmax(0).numpy())


def test_the_first_of_equal_classes_wins_and_nan_as_in_torch() -> None:
    logits = torch.randint(0, 3, (5, 9, 8, 7)).float()
    np.testing.assert_array_equal(winners(cut(logits, 4), (9, 8, 7)), logits.argmax(0).numpy())
    logits[3, 2, 2, 2] = torch.nan
    np.testing.assert_array_equal(winners(cut(logits, 4), (9, 8, 7)), logits.argmax(0).numpy())


def test_the_network_keeps_what_it_answered() -> None:
    table = torch.rand(1, 2, 8, 8, 8)
    before = table.clone()
    assembled(lambda window: table, torch.rand(1, 8, 8, 20), (8, 8, 8), overlap=0.5)
    assert torch.equal(table, before)


def test_an_answer_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"windows of \(8, 8, 8\) were answered with a tensor of \(1, 1, 4, 4, 4\)"):
        assembled(nn.MaxPool3d(2), torch.rand(1, 8, 8, 20), (8, 8, 8), overlap=0.5)


def test_progress_counts_windows() -> None:
    told: list[tuple[int, int]] = []
    image = torch.rand(1, 8, 12, 20)
    assembled(nn.Identity(), image, (8, 8, 8), overlap=0.5, windows=3, progress=lambda *counts: told.append(counts))
    assert told == [(3, 8), (6, 8), (8, 8)]


def test_a_log_file_hears_how_far_a_scan_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from medckpt import console

    monkeypatch.setattr(console, "_QUIET_SECONDS", -1)
    with console.bar("predict", 2) as advance:
        advance.within(3, 4)
        advance()
    assert capsys.readouterr().out.splitlines() == ["predict: 0 of 2 (75% of the next)", "predict: 1 of 2"]


# Memory


@pytest.mark.parametrize("shape", [(24, 19, 17), (5, 17, 31), (5, 6, 90), (8, 8, 8)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.75])
def test_no_more_is_held_than_was_said(shape: Shape, overlap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from medckpt.inference.sums import Sums

    held: list[int] = []
    add = Sums.add

    def noting(self: Sums, *arguments: Any) -> None:
        add(self, *arguments)
        held.append(sum(tensor.nbytes for tensor in self._held.values()))

    monkeypatch.setattr(Sums, "add", noting)
    assembled(nn.Conv3d(1, 7, 1), torch.rand(1, *shape), (8, 8, 8), overlap=overlap)
    layout = lay_windows(shape, (8, 8, 8), overlap)
    said = 4 * 7 * layout.waiting_voxels()
    assert (0.4 * said if overlap else 0) <= max(held) <= said
    held.clear()
    monkeypatch.setattr(sliding_window, "SUMS_BYTES", 10_000)
    assembled(nn.Conv3d(1, 7, 1), torch.rand(1, *shape), (8, 8, 8), overlap=overlap)
    assert max(held) <= max(10_000, 4 * 7 * layout.largest_part())


@given(actions=st.lists(st.integers(0, 5000) | st.none(), max_size=60), seed=st.integers(0, 99))
def test_tensors_of_the_arena_never_overlap_and_their_room_comes_back(actions: list[int | None], seed: int) -> None:
    from medckpt.inference.sums import _Arena

    chance, arena = random.Random(seed), _Arena(40_000)
    live: dict[int, torch.Tensor] = {}
    for number, count in enumerate(actions):
        if count is None and live:
            del live[chance.choice([*live])]
        elif count and (room := arena.room((count,))) is not None:
            live[number] = room.fill_(number)[count // 2 :]  # a view alone keeps it
        assert all((tensor == number).all() for number, tensor in live.items())
    live.clear()
    room = None
    room = arena.room((10_000,))
    assert room is not None
    assert arena.room((1,)) is None


def test_parts_that_are_kept_stay_what_they_were() -> None:
    net, image = nn.Conv3d(1, 5, 3, padding=1), torch.randn(1, 21, 20, 19)
    whole = assembled(net, image, (8, 8, 8), overlap=0.5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sliding_window, "SUMS_BYTES", 20_000)
        parts = list(predict_parts(net, image, (8, 8, 8), device=CPU, overlap=0.5))
    assert all(torch.equal(part.logits, whole[:, *part.place]) for part in parts)


def test_the_need_grows_with_the_slab_not_with_the_volume() -> None:
    short, long = (need((n, 512, 512), 100, (96, 96, 96), overlap=0.5) for n in (500, 1000))
    assert long.ram_bytes < 1.02 * short.ram_bytes  # one weight a voxel of the slab
    assert long.ram_bytes < 2.5 * 2**30  # the logits of the longer volume are 98 GiB
    assert long.file_bytes < 20 * 2**30


BOUNDED = """
import re, resource, sys, torch
from monai.data.utils import compute_importance_map
from medckpt.errors import DataError
from medckpt.inference.sliding_window import predict_parts, winners
torch.set_num_threads(1)

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def run(shape, classes, patch, allowed):
    net = torch.nn.Conv3d(1, classes, 1)
    parts = predict_parts(net, torch.rand(1, *shape), patch, overlap=0.5, device=torch.device("cpu"))
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + allowed, -1))
    try:
        return winners(parts, shape)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

run((8, 8, 40), 2, (16, 16, 16), 2**30)
print(run((64, 64, 64), 100, (16, 16, 16), 50 * 2**20).shape)
print(run((8, 8, 2000), 200, (32, 32, 32), 160 * 2**20).shape)
try:
    run((64, 64, 64), 100, (48, 48, 48), 50 * 2**20)
except DataError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_many_classes_and_long_volumes_fit_into_a_small_process_or_are_refused() -> None:
    # The logits of the two volumes are 105 MB and, padded to the patch, 1.6 GB.
    command = [sys.executable, "-W", "ignore", "-c", BOUNDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *shapes, refusal = done.stdout.splitlines()
    assert shapes == ["(64, 64, 64)", "(8, 8, 2000)"]
    assert refusal.startswith("a prediction of 64 x 64 x 64 voxels in 100 classes takes")
    assert "memory" in refusal


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal:       16000 kB\nMemAvailable:    9000 kB",
        "/sys/fs/cgroup/memory.max": "5000000",
        "/sys/fs/cgroup/memory.current": "4500000",
        "/sys/fs/cgroup/memory.stat": "anon 3000000\ninactive_file 1000000",
    }
    monkeypatch.setattr(machine, "_text", lambda file: files.get(str(file), ""))
    assert machine.available_bytes() == 1_500_000
    files["/sys/fs/cgroup/memory.max"] = "max"
    assert machine.available_bytes() == 9000 * 1024
    files.clear()
    assert machine.available_bytes() is None


def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding_window, "SUMS_BYTES", 0)
    monkeypatch.setattr(sliding_window.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"takes up to .* of the temporary folder .* TMPDIR=FOLDER"):
        assembled(nn.Conv3d(1, 7, 1), torch.rand(1, 20, 20, 20), (8, 8, 8), overlap=0.5)


# The scan's own grid


def whole_volume(logits: torch.Tensor, grid: Grid, source: Grid) -> np.ndarray:
    """The same by resampling each class over the whole volume at once."""
    affine = grid.affine @ np.array([[1, 0, 0, -1], [0, 1, 0, -1], [0, 0, 1, -1], [0, 0, 0, 1]], dtype=float)
    x, y, z = (side + 2 for side in grid.shape)
    bordered = Grid(shape=(x, y, z), affine=affine)
    channels = [np.pad(channel, 1, mode="edge") for channel in logits.numpy()]
    return np.stack([resample(c, bordered, source, order=1, fill=-np.inf) for c in channels]).argmax(0)


def oblique(degrees: float) -> np.ndarray:
    turn = np.radians(degrees)
    return np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 16)] * 3),
    spacing=st.tuples(*[st.sampled_from([0.5, 0.7, 1.0, 1.3, 2.4])] * 3),
    wanted=st.sampled_from([None, (1.0, 1.0, 1.0), (0.6, 1.7, 1.0), (3.1, 2.2, 0.9), (1.00001, 1.0, 1.0)]),
    order=st.permutations([0, 1, 2]),
    signs=st.tuples(*[st.sampled_from([-1, 1])] * 3),
    degrees=st.sampled_from([0.0, 11.0, 37.0]),
    side=st.integers(4, 9),
    seed=st.integers(0, 99),
)
@example((5, 4, 6), (1.3, 0.7, 2.4), (1.0, 1.0, 1.0), [2, 0, 1], (-1, 1, -1), 11.0, 1, 0)
@example((40, 7, 6), (1.0, 1.0, 1.0), (1.00001, 1.0, 1.0), [0, 1, 2], (1, 1, 1), 0.0, 8, 0)
def test_parts_return_to_the_scan_as_the_whole_volume_would(
    shape: Shape, spacing: tuple[float, float, float], wanted: tuple[float, float, float] | None,
    order: list[int], signs: Shape, degrees: float, side: int, seed: int,
) -> None:  # fmt: skip
    affine = np.eye(4)
    affine[:3, :3] = (oblique(degrees) @ np.diag(signs))[:, order] * spacing
    affine[:3, 3] = [3, -7, 11]
    source = Grid(shape=shape, affine=affine)
    grid = canonical_grid(source, wanted)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, *grid.shape)).astype(np.float32))
    found = to_source_grid(cut(logits, side), grid, source)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, whole_volume(logits, grid, source))


def test_a_rotated_grid_is_refused() -> None:
    source = Grid(shape=(8, 8, 8), affine=np.eye(4))
    turned = np.eye(4)
    turned[:3, :3] = oblique(11)
    with pytest.raises(GeometryError, match="axes run along"):
        to_source_grid(cut(torch.rand(2, 8, 8, 8), 4), Grid(shape=(8, 8, 8), affine=turned), source)
