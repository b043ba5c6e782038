"""Cases on the training grid: oriented, resampled and normalised once, then read through a memory map.

Each prepared case is a folder in the cache, named by what it was made from (files, sizes, times, settings), so a
changed source or setting makes a new one and a stale one is never used. It appears under its name only when whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medckpt import typed
from medckpt.blocks import DataConfig
from medckpt.datasets.layouts import Case, Dataset
from medckpt.datasets.reading import image_stem, read_grid, read_label, read_volume, source_files
from medckpt.errors import DataError, listing
from medckpt.geometry import Grid, Volume, canonical_grid, grid_difference_mm, resample, same_grid

FORMAT = 3
"""Raised whenever the same source and settings would give other numbers."""

VOXELS_PER_CLASS = 4096
"""Voxels remembered per class for placing patches; more would not change what is drawn."""

NONZERO_SHARE = 0.75
"""Where less than this share of a case is nonzero, `zscore` measures inside the nonzero part (as nnU-Net does)."""

MOST_VOXELS = 1_000_000_000
"""Largest volume on the training grid, 4 GB a channel; beyond it a spacing is mistyped."""

Progress = Callable[[int, int], None]

logger = logging.getLogger("medckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCase:
    """One case on the training grid, on disk."""

    name: str
    folder: Path
    source: Case
    grid: Grid
    notes: tuple[str, ...] = ()
    """What was done to the channels to put them on one even grid; see `Volume.notes`."""

    def image(self) -> np.ndarray:
        """Returns the image, (C, X, Y, Z) float32, as a read-only memory map."""
        return np.load(self.folder / "image.npy", mmap_mode="r")

    def label(self) -> np.ndarray:
        """Returns the classes, (X, Y, Z) of unsigned integers, as a read-only memory map.

        A class is the rank of its value among the data set's label values: 0 is background, and there are no gaps.
        """
        return np.load(self.folder / "label.npy", mmap_mode="r")

    def class_voxels(self) -> dict[int, np.ndarray]:
        """Returns up to `VOXELS_PER_CLASS` voxels (n, 3) of each foreground class (rank) that the case holds."""
        with np.load(self.folder / "voxels.npz") as archive:
            return {int(name): archive[name] for name in archive.files}


def cache_folder() -> Path:
    """Returns where medckpt keeps what it can make again: `$XDG_CACHE_HOME/medckpt` or `~/.cache/medckpt`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medckpt"


def is_prepared(case: Case, dataset: Dataset, config: DataConfig, cache: Path | None = None) -> bool:
    """Says whether `prepare` would find a case prepared, which is to say in order."""
    if config.spacing_mm is None:
        return False
    try:
        return _is_whole((cache or cache_folder()) / "prepared" / _digest(case, dataset.labels, config))
    except OSError:  # a file that is gone or closed to us
        return False


def median_spacing(cases: Sequence[Case], config: DataConfig | None = None) -> tuple[float, float, float]:
    """Returns the median voxel size of the cases' first images along (x, y, z) of RAS, in mm."""
    config = config or DataConfig()
    grids = [read_grid(case.images[0], config.dicom, shear=config.shear) for case in cases]
    spacings = [canonical_grid(grid, None).spacing_mm for grid in grids]
    x, y, z = np.round(np.median(spacings, axis=0), 4)
    return float(x), float(y), float(z)


def prepare(
    cases: Sequence[Case],
    dataset: Dataset,
    config: DataConfig,
    *,
    cache: Path | None = None,
    threads: int = 2,
    progress: Progress | None = None,
    failed: dict[str, str] | None = None,
) -> tuple[PreparedCase, ...]:
    """Prepares labelled cases (or finds them prepared) at `config.spacing_mm`, which must be set.

    With `failed`, cases that cannot be used are put there with their reason, and left out.

    Raises:
        DataError: all cases that cannot be used, each with its reason, in one message.
    """
    root = (cache or cache_folder()) / "prepared"
    problems: dict[str, str] = {}
    prepared: list[PreparedCase | None] = []
    pool = ThreadPoolExecutor(threads)
    try:
        futures = [pool.submit(_prepare_case, case, dataset, config, root) for case in cases]
        for done, (case, future) in enumerate(zip(cases, futures, strict=True), start=1):
            try:
                prepared.append(future.result())
            except DataError as error:
                problems[case.name] = str(error)
            if progress:
                progress(done, len(cases))
    finally:
        pool.shutdown(cancel_futures=True)  # a Ctrl-C waits for the cases under way, not for all of them
    if failed is not None:
        failed |= problems
    elif problems:
        raise DataError(unusable(problems, len(cases)))
    return tuple(case for case in prepared if case)


def unusable(problems: Mapping[str, str], total: int) -> str:
    """Returns the message that names the cases that a training refuses."""
    lines = [text if text.startswith(f"{name}: ") else f"{name}: {text}" for name, text in problems.items()]
    more = f"\nand {len(lines) - 20} more" if len(lines) > 20 else ""
    return (
        f"{len(problems)} of {total} cases cannot be used:\n"
        + "\n".join(lines[:20])
        + f"{more}\n`medckpt check` says more; data.drop_failed=true trains without them."
    )


def _prepare_case(case: Case, dataset: Dataset, config: DataConfig, root: Path) -> PreparedCase:
    folder = root / _digest(case, dataset.labels, config)
    if not _is_whole(folder):
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
        try:
            _write_case(case, dataset, config, temporary)
            _move_into_place(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    facts = json.loads((folder / "grid.json").read_text())
    grid = Grid(shape=tuple(facts["shape"]), affine=np.array(facts["affine"]))
    return PreparedCase(name=case.name, folder=folder, source=case, grid=grid, notes=tuple(facts["notes"]))


def _move_into_place(temporary: Path, folder: Path) -> None:
    if folder.exists() and not _is_whole(folder):  # somebody has taken a file out of it
        shutil.rmtree(folder, ignore_errors=True)
    try:
        os.replace(temporary, folder)
    except OSError:  # another process has made the same case meanwhile
        if not _is_whole(folder):
            raise


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("image.npy", "label.npy", "voxels.npz", "grid.json"))


def _write_case(case: Case, dataset: Dataset, config: DataConfig, folder: Path) -> None:
    volumes = read_images(case, config)
    label = read_case_label(case, dataset, volumes[0].grid, config)
    image, grid = to_training_grid(volumes, config)
    # The network counts classes from 0 without gaps; a label value becomes its rank.
    values = np.array(sorted(dataset.labels.values()))
    ranks = np.searchsorted(values, label.array).astype(np.min_scalar_type(len(values)))
    on_grid = resample(ranks, label.grid, grid, order=0, fill=0)
    np.save(folder / "image.npy", image)
    np.save(folder / "label.npy", on_grid)
    generator = np.random.default_rng(0)
    voxels: dict[str, Any] = {}
    for value in np.unique(on_grid[on_grid > 0]):
        places = np.flatnonzero(on_grid.reshape(-1) == value)
        if len(places) > VOXELS_PER_CLASS:
            places = np.sort(generator.choice(places, VOXELS_PER_CLASS, replace=False))
        voxels[str(value)] = np.stack(np.unravel_index(places, on_grid.shape), axis=1).astype(np.int32)
    np.savez(folder / "voxels.npz", **voxels)
    notes = [note for volume in volumes for note in volume.notes]
    facts = {"case": case.name, "shape": list(grid.shape), "affine": grid.affine.tolist(), "notes": notes}
    (folder / "grid.json").write_text(json.dumps(facts))


def read_images(case: Case, config: DataConfig | None = None) -> list[Volume]:
    """Reads a case's channels, which must lie on one grid; `config` says what is done with faults (else refused)."""
    config = config or DataConfig()
    volumes = [read_volume(path, config.dicom, shear=config.shear) for path in case.images]
    for path, volume in zip(case.images[1:], volumes[1:], strict=True):
        if not same_grid(volumes[0].grid, volume.grid):
            raise DataError(f"{case.name}: {channels_apart(volumes[0].grid, volume.grid, case.images[0], path)}")
    return volumes


def channels_apart(first: Grid, other: Grid, first_path: Path, other_path: Path) -> str:
    """Says that two channels of a case lie on different grids, and the way out."""
    return (
        f"its channels {first_path.name} and {other_path.name} lie on different grids ({_difference(first, other)}). "
        "Resample them to one grid first."
    )


def read_case_label(case: Case, dataset: Dataset, grid: Grid, config: DataConfig | None = None) -> Volume:
    """Reads a case's label map, which must lie on the image's grid and hold the data set's values only.

    With `config.label_grid` = "resample" a label that lies elsewhere is brought onto the image's grid (copied where
    both share a lattice, else nearest neighbour).
    """
    if case.label is None:
        raise DataError(f"{case.name}: it has no label map.")
    config = config or DataConfig()
    label = read_label(case.label, onto=grid, labels=dataset.labels, shear=config.shear)
    if not same_grid(label.grid, grid):
        if config.label_grid == "refuse":
            raise DataError(
                f"{case.name}: its label {case.label.name} does not lie on its image's grid "
                f"({_difference(label.grid, grid)}). Set data.label_grid=resample if the label's own place is right, "
                "or resample it onto the image's grid."
            )
        label = _onto(label, grid, case)
    unknown = sorted(set(np.unique(label.array).tolist()) - set(dataset.labels.values()))
    if unknown:
        raise DataError(
            f"{case.name}: label values {listing(unknown)} in {case.label.name} are not among the data set's labels "
            f"{dict(dataset.labels)}. Add them to dataset.json, or correct the label map."
        )
    return label


def _onto(label: Volume, grid: Grid, case: Case) -> Volume:
    moved = resample(label.array, label.grid, grid, order=0, fill=0)
    before, after = np.count_nonzero(label.array), np.count_nonzero(moved)
    if before and not after:
        raise DataError(
            f"{case.name}: its label {label.source.name} has {before} voxels, none of them inside the image. The two "
            "lie at different places in the patient: is it the label of another scan?"
        )
    volume_mm3 = [abs(float(np.linalg.det(each.affine[:3, :3]))) for each in (label.grid, grid)]
    logger.warning(
        "%s: its label %s is resampled onto the image's grid (%s); %.4g ml of it become %.4g ml",
        case.name,
        label.source.name,
        _difference(label.grid, grid),
        before * volume_mm3[0] / 1000,
        after * volume_mm3[1] / 1000,
    )
    return Volume(array=moved, affine=grid.affine, source=label.source)


def to_training_grid(volumes: Sequence[Volume], config: DataConfig) -> tuple[np.ndarray, Grid]:
    """Returns a case's channels as the network sees them, (C, X, Y, Z) float32, and the grid they lie on."""
    grid = canonical_grid(volumes[0].grid, config.spacing_mm)
    if math.prod(grid.shape) > MOST_VOXELS:
        raise DataError(
            f"{volumes[0].source}: at data.spacing_mm={list(config.spacing_mm or ())} it would have "
            f"{' x '.join(map(str, grid.shape))} voxels, more than {MOST_VOXELS:.0e}. Choose a larger spacing."
        )
    channels = []
    for volume in volumes:
        on_grid = resample(volume.array, volume.grid, grid, order=1, fill=float(volume.array.min()))
        channels.append(normalize(on_grid, config))
    return np.stack(channels), grid


def normalize(array: np.ndarray, config: DataConfig) -> np.ndarray:
    """Returns intensities as the network sees them, float32: the CT window on -1..1, or the case's z-score."""
    if config.intensity == "window":
        low, high = config.window_hu
        return ((np.clip(array, low, high) - low) * (2 / (high - low)) - 1).astype(np.float32)
    nonzero = array != 0
    inside = array[nonzero] if 0 < nonzero.mean() < NONZERO_SHARE else array
    low, high = np.percentile(inside, config.clip_percentiles)
    clipped = np.clip(inside, low, high)
    mean, deviation = float(clipped.mean()), float(clipped.std())
    # A constant image has no contrast to normalise: it becomes zero, not 0/0.
    return ((np.clip(array, low, high) - mean) / (deviation if deviation > 1e-8 else 1.0)).astype(np.float32)


def _difference(a: Grid, b: Grid) -> str:
    if a.shape != b.shape:
        return f"shapes {a.shape} and {b.shape}"
    return f"corners up to {grid_difference_mm(a, b):.3g} mm apart"


def _digest(case: Case, labels: Mapping[str, int], config: DataConfig) -> str:
    parts: list[object] = [FORMAT, config.spacing_mm, config.intensity, sorted(labels.values())]
    parts += [config.window_hu if config.intensity == "window" else config.clip_percentiles]
    parts += [config.shear, config.label_grid]
    if any(path.is_dir() or image_stem(path.name) is None for path in case.images):
        parts.append(typed.to_plain(config.dicom))
    for path in (*case.images, case.label):
        for file in source_files(path) if path else []:
            status = file.lstat() if file.is_symlink() and not file.exists() else file.stat()
            parts += [str(file.resolve()), status.st_size, status.st_mtime_ns]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
