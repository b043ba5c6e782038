"""One way in for every scan: a NIfTI file, an ITK file (.nrrd, .mha, .mhd) or a DICOM series becomes a `Volume`.

Whichever library reads it, the same volume gives the same array, affine and refusal. The policy is docs/dicom.md.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from medckpt import typed
from medckpt.blocks import DataConfig, DicomConfig
from medckpt.datasets.dicom import read_dicom, read_dicom_grid
from medckpt.datasets.dicom_seg import is_dicom_seg, read_dicom_seg
from medckpt.datasets.dicom_series import is_dicom_file, series_files
from medckpt.datasets.itk import ITK_SUFFIXES, read_itk, read_itk_grid, voxel_file
from medckpt.datasets.nifti import (
    NIFTI_SUFFIXES,
    is_rectangular,
    read_nifti,
    read_nifti_grid,
    require_rectangular,
    write_nifti_label,
)
from medckpt.errors import DataError
from medckpt.geometry import Grid, Volume, orthogonal_grid, resample
from medckpt.geometry import shear as measure_shear

Shear = Literal["refuse", "resample"]

IMAGE_SUFFIXES = NIFTI_SUFFIXES + ITK_SUFFIXES
LABEL_ROUNDING_TOLERANCE = 1e-3
"""A label stored in floating point is rounded if it lies this near to an integer."""

LARGEST_LABEL = 2**31 - 1

_REFUSE = DicomConfig()

logger = logging.getLogger("medckpt")


def read_volume(path: Path, dicom: DicomConfig = _REFUSE, *, shear: Shear = "refuse") -> Volume:
    """Reads one image in its real units (HU for CT).

    Args:
        path: a .nii, .nii.gz, .hdr (or .img), .nrrd, .mha or .mhd file; a folder that holds one DICOM series; or one
            DICOM file, which stands for the series it belongs to in its folder.
        dicom: how an irregular DICOM series is read.
        shear: what is done with a file whose axes are sheared: `resample` interpolates it to `orthogonal_grid`.

    Returns:
        (X, Y, Z) in the index order of its RAS mm affine: float32, or int16 for a DICOM series that fits into it.

    Raises:
        DataError: missing, unreadable, or not one 3D image of finite numbers; the message names file and way out.
        GeometryError: the voxels cannot be placed without guessing.
    """
    path = _header_of(path)
    if _is_dicom(path):
        volume = read_dicom(path, dicom)
    else:
        array, grid = _read_file(path, floating=True, shear=shear)
        volume = Volume(array=array, affine=grid.affine, source=path)
    _require_finite(volume.array, path)
    return volume


def read_label(
    path: Path, *, onto: Grid | None = None, labels: Mapping[str, int] | None = None, shear: Shear = "refuse"
) -> Volume:
    """Reads a label map from a NIfTI (or .nrrd, .mha, .mhd) file, or from a DICOM Segmentation.

    Values in floating point are rounded where they lie within `LABEL_ROUNDING_TOLERANCE` of an integer.

    Args:
        path: the file.
        onto: the grid of the scan, on which a DICOM Segmentation is laid; other files keep their own.
        labels: value by class name, by which the segments of a DICOM Segmentation are told apart.
        shear: as for images, with nearest neighbours.

    Returns:
        (X, Y, Z) of the smallest unsigned integer dtype that holds the values.

    Raises:
        DataError: missing or unreadable; negative, fractional or non-finite values; a DICOM folder or another object.
        GeometryError: as for images.
    """
    path = _header_of(path)
    if _is_dicom(path):
        if path.is_file() and is_dicom_seg(path):
            return read_dicom_seg(path, onto=onto, labels=labels)
        raise DataError(
            f"{path}: labels are read from NIfTI or a DICOM Segmentation (SEG), not from other DICOM. Convert an "
            "RTSTRUCT to a .nii.gz on the grid of the scan."
        )
    array, grid = _read_file(path, floating=False, shear=shear)
    return Volume(array=_whole_numbers(array, path), affine=grid.affine, source=path)


def read_grid(path: Path, dicom: DicomConfig = _REFUSE, *, shear: Shear = "refuse") -> Grid:
    """Returns the grid that `read_volume` or `read_label` would give, without decoding voxels where that is possible.

    Raises as `read_volume`.
    """
    path = _header_of(path)
    if _is_dicom(path):
        return read_dicom_seg(path).grid if path.is_file() and is_dicom_seg(path) else read_dicom_grid(path, dicom)
    grid = read_nifti_grid(path) if path.name.lower().endswith(NIFTI_SUFFIXES) else read_itk_grid(path)
    return _accepted(grid, path, shear)


def source_files(path: Path) -> list[Path]:
    """Returns the files that reading `path` depends on: those of a DICOM series, or a header and its voxels."""
    if path.is_dir() or (image_stem(path.name) is None and is_dicom_file(path)):
        return series_files(path)
    path = _header_of(path)
    suffix = path.suffix.lower()
    if suffix in ITK_SUFFIXES:
        voxels = voxel_file(path)
    else:
        voxels = path.with_suffix(".img" if path.suffix == ".hdr" else ".IMG") if suffix == ".hdr" else None
    return [path] if voxels is None or not voxels.exists() else [path, voxels]


def write_label(path: Path, array: np.ndarray, grid: Grid) -> None:
    """Writes a label map as .nii.gz; see `nifti.write_nifti_label`."""
    write_nifti_label(path, array, grid)


def image_stem(name: str) -> str | None:
    """Returns a file name without its image suffix, or None if it has none of `IMAGE_SUFFIXES`."""
    for suffix in IMAGE_SUFFIXES:
        if name.lower().endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)]
    return None


def _is_dicom(path: Path) -> bool:
    if path.is_dir():
        return True
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder.")
    if image_stem(path.name) is not None:
        return False
    if is_dicom_file(path):
        return True
    raise DataError(f"{path}: not a format that is read here. Known: {', '.join(IMAGE_SUFFIXES)} and DICOM.")


def _read_file(path: Path, floating: bool, shear: Shear) -> tuple[np.ndarray, Grid]:
    if path.name.lower().endswith(NIFTI_SUFFIXES):
        array, grid = read_nifti(path, floating=floating)
    else:
        array, grid = read_itk(path, floating=floating)
    accepted = _accepted(grid, path, shear)
    if accepted is not grid:
        array = resample(array, grid, accepted, order=1 if floating else 0, fill=float(array.min()) if floating else 0)
    return array, accepted


def _accepted(grid: Grid, path: Path, shear: Shear) -> Grid:
    """The grid itself, or the orthogonal one that replaces a sheared grid on request."""
    if shear == "refuse" or is_rectangular(grid):
        require_rectangular(grid, path)
        return grid
    orthogonal = orthogonal_grid(grid)
    logger.warning(
        "%s: the axes are sheared (cosine %.2g); resampled to an orthogonal grid of %s voxels of %s mm (data.shear)",
        path,
        measure_shear(grid.affine),
        " x ".join(map(str, orthogonal.shape)),
        " x ".join(f"{side:.4g}" for side in orthogonal.spacing_mm),
    )
    return orthogonal


def _header_of(path: Path) -> Path:
    """The .hdr of a NIfTI pair whose .img is given; any other path as it is."""
    if path.suffix.lower() == ".img":
        header = path.with_suffix(".hdr" if path.suffix == ".img" else ".HDR")
        if header.exists():
            return header
    return path


def _require_finite(array: np.ndarray, path: Path) -> None:
    if array.dtype.kind != "f":
        return
    # A sum is finite unless something in it is not (or it overflows): one cheap pass over the usual, clean volume.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum(dtype=np.float64)):
            return
    nan, infinite = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    if nan or infinite:
        raise DataError(
            f"{path}: {nan} NaN and {infinite} infinite voxels of {array.size}; training on them gives NaN. "
            "Replace them by the background value, if that is what they mean, and save the file again."
        )


def _whole_numbers(array: np.ndarray, path: Path) -> np.ndarray:
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {int((~np.isfinite(array)).sum())} NaN or infinite voxels in a label map.")
        whole = np.rint(array)
        off = np.abs(array - whole) > LABEL_ROUNDING_TOLERANCE
        if off.any():
            raise DataError(
                f"{path}: {int(off.sum())} of {array.size} voxels are no whole numbers (one is {array[off][0]:g}); a "
                "label map holds class numbers. Is this an image or a probability map? Threshold or round it first."
            )
        array = whole
    low, high = array.min(), array.max()
    if low < 0 or high > LARGEST_LABEL:
        raise DataError(
            f"{path}: label values run from {low:g} to {high:g}; they are 0 for background and 1.. for classes, at "
            f"most {LARGEST_LABEL}. Is this an image? If negative means 'unknown', make it a class or 0."
        )
    return array.astype(np.min_scalar_type(int(high)))


def read_otherwise(config: DataConfig, given: Mapping[str, Any]) -> DataConfig:
    """Returns `config` with what is given of `shear`, `label_grid` and, below `dicom`, of `DicomConfig`.

    Raises:
        ConfigError: unknown keys or values, all in one message.
    """
    if not given:
        return config
    plain = {key: typed.to_plain(getattr(config, key)) for key in ("shear", "label_grid", "dicom")}
    plain |= {key: plain[key] | value if key == "dicom" else value for key, value in given.items()}
    read = typed.read(DataConfig, plain, "data")
    return dataclasses.replace(config, **{key: getattr(read, key) for key in plain})
