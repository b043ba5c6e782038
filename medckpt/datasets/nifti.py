"""NIfTI files (.nii, .nii.gz, pairs of .hdr and .img) in and out: one sform/qform rule, mm, three dimensions.

The rule is nibabel's: the sform if its code is positive, else the qform, else pixdim alone (with a warning). What is
written carries both, equal and with the same code. The policy in words is docs/dicom.md.
"""

from __future__ import annotations

import gzip
import logging
import math
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError

from medckpt.datasets.honest_size import unzipped_bytes
from medckpt.errors import DataError, GeometryError
from medckpt.files import write_atomic
from medckpt.geometry import (
    ITK_ORTHONORMALITY_TOLERANCE,
    ORTHONORMALITY_TOLERANCE,
    QFORM_SFORM_TOLERANCE_MM,
    Grid,
    grid_difference_mm,
    shear,
)

NIFTI_SUFFIXES = (".nii.gz", ".nii", ".hdr")
"""A pair goes by its header, .hdr; the voxels are in the .img beside it."""

SCANNER_CODE = 1
"""qform_code and sform_code of what is written: 1, scanner anatomical coordinates."""

_MM_PER_UNIT = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}  # xyzt_units & 7: unknown, metre, millimetre, micron
_LIBRARY_ERRORS = (
    ImageFileError,
    HeaderDataError,
    OSError,
    EOFError,
    zlib.error,
    ValueError,
    KeyError,
    MemoryError,
    OverflowError,
)

logger = logging.getLogger("medckpt")


def read_nifti_grid(path: Path) -> Grid:
    """Returns the grid of a NIfTI file from its header alone; raises as `read_nifti`."""
    return _grid(_open(path), path)


def read_nifti(path: Path, floating: bool) -> tuple[np.ndarray, Grid]:
    """Returns the voxels of a 3D NIfTI file, scl_slope and scl_inter applied, and their grid.

    Args:
        path: a .nii, .nii.gz or .hdr file.
        floating: float32 voxels; otherwise they keep the integer type that is stored where no scaling applies, and
            become floating where it does (labels are then rounded by the caller, under control).

    Raises:
        DataError: unreadable or cut short, colour or complex voxels, not three-dimensional, unknown unit of length.
        GeometryError: no usable affine. A sheared one is returned as it is; see `require_rectangular`.
    """
    image = _open(path)
    grid = _grid(image, path)
    try:
        if path.name.lower().endswith(".gz"):
            _require_unzipped(image, path)
            kind: Any = type(image)
            image = kind.from_bytes(_unzipped(image, path))
        array = np.asarray(image.dataobj, dtype=np.float32) if floating else np.asarray(image.dataobj)
    except _LIBRARY_ERRORS as error:
        raise DataError(_unreadable(path, error)) from error
    return array.reshape(grid.shape, order="F"), grid


def write_nifti_label(path: Path, array: np.ndarray, grid: Grid) -> None:
    """Writes a label map as .nii.gz: qform equal to sform with one code, mm, the smallest of uint8, int16, int32.

    The file appears whole or not at all, and equal input gives equal bytes.

    Args:
        path: ends in .nii.gz; its folder is made if need be.
        array: (X, Y, Z) integers or booleans of `grid.shape`.
        grid: where the voxels lie.

    A qform holds no shear. Where a grid within `ORTHONORMALITY_TOLERANCE` would give forms that differ by more than
    `QFORM_SFORM_TOLERANCE_MM`, the sform alone is written (qform_code 0), so that no reader gets the wrong one.

    Raises:
        DataError: another suffix or shape, a floating dtype, or values beyond int32; or the file cannot be written.
        GeometryError: the grid is sheared beyond the tolerance.
    """
    if not path.name.endswith(".nii.gz"):
        raise DataError(f"{path}: label maps are written as .nii.gz; give the file that ending.")
    if array.shape != grid.shape:
        raise DataError(f"{path}: the label map has shape {array.shape} but its grid {grid.shape}.")
    require_rectangular(grid, path)
    image = nib.Nifti1Image(array.astype(_label_dtype(array, path)), grid.affine)
    image.set_sform(grid.affine, code=SCANNER_CODE)
    image.set_qform(grid.affine, code=SCANNER_CODE)
    if grid_difference_mm(grid, Grid(shape=grid.shape, affine=image.get_qform())) > QFORM_SFORM_TOLERANCE_MM:
        image.header["qform_code"] = 0
    image.header.set_xyzt_units("mm")

    def write(stream: BinaryIO) -> None:
        # No name and no time in the gzip header: the same labels are the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as zipped:
            zipped.write(image.to_bytes())

    write_atomic(path, write)


def is_rectangular(grid: Grid) -> bool:
    """Says whether the axes are at right angles within `ORTHONORMALITY_TOLERANCE`."""
    # A hair of room: NIfTI stores float32, and 1e-3 itself is meant to pass.
    return shear(grid.affine) <= ORTHONORMALITY_TOLERANCE * (1 + 1e-5)


def require_rectangular(grid: Grid, path: Path) -> None:
    """Refuses a sheared grid, and warns of one that ITK will not read.

    Raises:
        GeometryError: |cosine| between two axes above `ORTHONORMALITY_TOLERANCE`.
    """
    deviation = shear(grid.affine)
    if not is_rectangular(grid):
        raise GeometryError(
            f"{path}: the axes are sheared, the cosine between two of them is {deviation:.2g} "
            f"(up to {ORTHONORMALITY_TOLERANCE:g} is accepted). Set data.shear=resample, which brings image and label "
            "to an orthogonal grid, or resample the file yourself, e.g. with nibabel.processing.resample_to_output."
        )
    if deviation > ITK_ORTHONORMALITY_TOLERANCE:
        logger.warning(
            "%s: the axes are slightly sheared (cosine %.2g); the affine is used as it is, but ITK refuses this file",
            path,
            deviation,
        )


def _open(path: Path) -> nib.Nifti1Pair:
    try:
        image = nib.load(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file.") from error
    except _LIBRARY_ERRORS as error:
        raise DataError(_unreadable(path, error)) from error
    if not isinstance(image, nib.Nifti1Pair):
        known = "Analyze 7.5, which says nothing of left and right" if path.suffix.lower() == ".hdr" else "not NIfTI"
        raise DataError(f"{path}: this is {type(image).__name__}, {known}; convert the original scan to .nii.gz.")
    _require_whole(image, path)
    dtype = image.header.get_data_dtype()
    if dtype.names is not None or dtype.kind not in "iuf":
        kind = "colour" if dtype.names is not None else str(dtype)
        raise DataError(
            f"{path}: the voxels are {kind} ({dtype}); one real number per voxel is needed. "
            "Save the channel that holds the measurement, or the original scan, as a 3D file."
        )
    return image


def _end_of_voxels(image: nib.Nifti1Pair) -> int:
    """Where in its (unzipped) file the last voxel ends, as the header says."""
    voxels: Any = image.dataobj
    return int(voxels.offset) + math.prod(map(int, voxels.shape)) * voxels.dtype.itemsize


def _require_whole(image: nib.Nifti1Pair, path: Path) -> None:
    """Refuses a file shorter than its header says, before memory is taken for the voxels that are not there."""
    file = Path(str(image.file_map["image"].filename))
    if not file.exists():
        raise DataError(f"{path}: the voxels are not there; put {file.name} beside it.")
    voxels: Any = image.dataobj
    if int(voxels.offset) < 0:
        raise DataError(_unreadable(path, ValueError(f"voxels from byte {voxels.offset} on")))
    held = file.stat().st_size
    if not file.name.lower().endswith(".gz") and held < _end_of_voxels(image):
        raise DataError(_unreadable(path, _too_short(image, held)))


def _require_unzipped(image: nib.Nifti1Pair, path: Path) -> None:
    """The same of a .gz, of which as much is unpacked as it takes to know."""
    needed = _end_of_voxels(image)
    held = unzipped_bytes(path, needed)
    if held < needed:
        raise DataError(_unreadable(path, _too_short(image, held)))


def _too_short(image: nib.Nifti1Pair, held: int) -> EOFError:
    size = " x ".join(map(str, image.shape))
    return EOFError(f"the header promises {size} voxels in {_end_of_voxels(image)} bytes, the file holds {held}")


def _unzipped(image: nib.Nifti1Pair, path: Path) -> bytes:
    """The file as far as its voxels reach; read to its end all the same, where gzip keeps the checksum."""
    with gzip.open(path) as stream:
        content = stream.read(_end_of_voxels(image))
        while stream.read(2**20):
            pass
    return content


def _grid(image: nib.Nifti1Pair, path: Path) -> Grid:
    shape = tuple(int(n) for n in image.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 3:
        raise DataError(f"{path}: shape {image.shape} is {_shape_advice(len(shape))}")
    header = image.header
    try:
        sform, qform = header.get_sform(coded=True)[0], header.get_qform(coded=True)[0]
        affine = header.get_best_affine()
    except _LIBRARY_ERRORS as error:
        raise GeometryError(f"{path}: the orientation in the header cannot be read ({error}).") from error
    scale = np.diag([_mm_per_unit(header, path)] * 3 + [1.0])
    try:
        grid = Grid(shape=shape, affine=scale @ affine)
    except GeometryError as error:
        raise GeometryError(f"{path}: {error}. Write the file again with a valid sform or qform.") from error
    if sform is None and qform is None:
        logger.warning(
            "%s: no spatial information (sform_code and qform_code are 0); voxel sizes alone place the volume, "
            "with the first axis towards the patient's left as nibabel has it",
            path,
        )
    elif sform is not None and qform is not None:
        _compare_forms(grid, scale @ qform, path)
    return grid


def _compare_forms(grid: Grid, qform: np.ndarray, path: Path) -> None:
    try:
        difference = grid_difference_mm(grid, Grid(shape=grid.shape, affine=qform))
    except GeometryError:  # a qform with a pixdim of 0: nothing to compare with
        difference = float("inf")
    if difference > QFORM_SFORM_TOLERANCE_MM:
        logger.warning(
            "%s: qform and sform differ by %.3g mm at a corner; the sform is used, other tools may use the qform",
            path,
            difference,
        )


def _mm_per_unit(header: nib.Nifti1Header, path: Path) -> float:
    code = int(header["xyzt_units"]) & 7
    if code not in _MM_PER_UNIT:
        raise DataError(f"{path}: unit of length {code} in xyzt_units is none of NIfTI's; write the file again in mm.")
    scale = _MM_PER_UNIT[code]
    if scale != 1.0:
        logger.warning("%s: lengths are in %s and are converted to mm", path, "metres" if code == 1 else "microns")
    return scale


def _shape_advice(dimensions: int) -> str:
    if dimensions < 3:
        return "a flat image, not a volume. Stack the slices into one 3D file, with their spacing."
    return (
        f"{dimensions}-dimensional: channels or time points? One file holds one 3D volume here. Write one file per "
        "channel (case_0000.nii.gz, case_0001.nii.gz), or choose one time point."
    )


def _label_dtype(array: np.ndarray, path: Path) -> np.dtype:
    if array.dtype.kind not in "biu":
        raise DataError(f"{path}: a label map holds integers, not {array.dtype}; round it first.")
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for dtype in (np.uint8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise DataError(f"{path}: label values {low}..{high} do not fit into int32.")


def _unreadable(path: Path, error: BaseException) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{path}: the file cannot be read as NIfTI ({reason}). Is it complete? Copy or convert it again."
