"""One way in for every scan: a NIfTI file, an ITK file (.nrrd, .mha, .mhd) or a DICOM series becomes a `Volume`.

ITK files must hold their voxels themselves; a header whose voxels lie in a second file (.raw) is refused.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np

from medckpt.blocks import DicomConfig
from medckpt.datasets.dicom import read_dicom, read_dicom_grid
from medckpt.datasets.dicom_series import is_dicom_file, series_files
from medckpt.datasets.nifti import (
    NIFTI_SUFFIXES,
    read_nifti,
    read_nifti_grid,
    require_rectangular,
    write_nifti_label,
)
from medckpt.errors import DataError
from medckpt.geometry import LPS_TO_RAS, Grid, Volume

ITK_SUFFIXES = (".nrrd", ".mha", ".mhd")
IMAGE_SUFFIXES = NIFTI_SUFFIXES + ITK_SUFFIXES
LABEL_ROUNDING_TOLERANCE = 1e-3
"""A label stored in floating point is rounded if it lies this near to an integer."""

LARGEST_LABEL = 2**31 - 1

_HEADER_BYTES = 65536  # what is searched for the name of the voxels' file
_META_VOXELS = re.compile(rb"^ElementDataFile[ \t]*[=:][ \t]*([^\r\n]*)", re.MULTILINE)
_NRRD_VOXELS = re.compile(rb"^data ?file:[ \t]*([^\r\n]*)", re.MULTILINE | re.IGNORECASE)

_REFUSE = DicomConfig()

logger = logging.getLogger("medckpt")


def read_volume(path: Path, dicom: DicomConfig = _REFUSE) -> Volume:
    """Reads one image in its real units (HU for CT).

    Args:
        path: a .nii, .nii.gz, .nrrd, .mha or .mhd file; a folder that holds one DICOM series; or one DICOM file, which
            stands for the series it belongs to in its folder.
        dicom: how an irregular DICOM series is read.

    Returns:
        (X, Y, Z) in the index order of its RAS mm affine: float32, or int16 for a DICOM series that fits into it.

    Raises:
        DataError: missing, unreadable, or not one 3D image of finite numbers; the message names file and way out.
        GeometryError: the voxels cannot be placed without guessing.
    """
    if _is_dicom(path):
        volume = read_dicom(path, dicom)
    else:
        array, grid = _read_file(path, floating=True)
        volume = Volume(array=array, affine=grid.affine, source=path)
    _require_finite(volume.array, path)
    return volume


def read_label(path: Path) -> Volume:
    """Reads a label map from a NIfTI (or .nrrd, .mha, .mhd) file.

    Values in floating point are rounded where they lie within `LABEL_ROUNDING_TOLERANCE` of an integer.

    Returns:
        (X, Y, Z) of the smallest unsigned integer dtype that holds the values.

    Raises:
        DataError: missing or unreadable; negative, fractional or non-finite values; a DICOM folder or file.
        GeometryError: as for images.
    """
    if _is_dicom(path):
        raise DataError(
            f"{path}: labels are read from NIfTI, not from DICOM. Convert the SEG or RTSTRUCT to a .nii.gz on the "
            "grid of the scan."
        )
    array, grid = _read_file(path, floating=False)
    return Volume(array=_whole_numbers(array, path), affine=grid.affine, source=path)


def read_grid(path: Path, dicom: DicomConfig = _REFUSE) -> Grid:
    """Returns the grid that `read_volume` or `read_label` would give, without decoding voxels where that is possible.

    Raises as `read_volume`.
    """
    if _is_dicom(path):
        return read_dicom_grid(path, dicom)
    if path.name.lower().endswith(NIFTI_SUFFIXES):
        return read_nifti_grid(path)
    return _itk_grid(path)


def source_files(path: Path) -> list[Path]:
    """Returns the files that reading `path` depends on: itself, or all that a DICOM series may be made of."""
    return series_files(path) if path.is_dir() or (image_stem(path.name) is None and is_dicom_file(path)) else [path]


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


def _read_file(path: Path, floating: bool) -> tuple[np.ndarray, Grid]:
    if path.name.lower().endswith(NIFTI_SUFFIXES):
        return read_nifti(path, floating=floating)
    import SimpleITK as sitk

    grid = _itk_grid(path)
    try:
        image = sitk.ReadImage(str(path), sitk.sitkFloat32 if floating else sitk.sitkUnknown)
    except RuntimeError as error:
        raise DataError(_itk_unreadable(path, error)) from error
    return sitk.GetArrayFromImage(image).transpose(2, 1, 0), grid


def _itk_grid(path: Path) -> Grid:
    import SimpleITK as sitk

    _refuse_detached(path)
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise DataError(_itk_unreadable(path, error)) from error
    if reader.GetDimension() != 3 or reader.GetNumberOfComponents() != 1:
        raise DataError(
            f"{path}: {reader.GetDimension()} dimensions with {reader.GetNumberOfComponents()} components per voxel; "
            "one file holds one 3D volume here. Write one file per channel or time point."
        )
    if path.suffix == ".nrrd" and "NRRD_space" not in reader.GetMetaDataKeys():
        logger.warning("%s: no spatial information (no 'space' in the header); ITK's LPS axes are assumed", path)
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(reader.GetDirection(), (3, 3)) * np.asarray(reader.GetSpacing())
    affine[:3, 3] = reader.GetOrigin()
    grid = Grid(shape=tuple(reader.GetSize()), affine=LPS_TO_RAS @ affine)
    require_rectangular(grid, path)
    return grid


def _refuse_detached(path: Path) -> None:
    """Raises if the voxels lie in another file: its changes would not show in this one, nor in what is made of it."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be opened ({error.strerror or error}).") from error
    if path.suffix == ".nrrd":
        found = _NRRD_VOXELS.search(re.split(rb"\r?\n\r?\n", head, maxsplit=1)[0])
    else:
        found = _META_VOXELS.search(head)
    voxels = found.group(1).decode("utf-8", "replace").strip() if found else "LOCAL"
    if voxels.upper() != "LOCAL":
        raise DataError(
            f"{path}: the voxels lie in another file ({voxels}), and one scan is one file here, so that a change of "
            "either is noticed. Convert it to one .mha or .nii.gz, e.g. with SimpleITK: "
            f"sitk.WriteImage(sitk.ReadImage('{path.name}'), '{path.stem}.mha')."
        )


def _itk_unreadable(path: Path, error: RuntimeError) -> str:
    reason = " ".join(str(error).split())[-300:]
    return (
        f"{path}: ITK cannot read the file ({reason}). Is it complete? Copy or convert it again, to .nii.gz if need be."
    )


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
