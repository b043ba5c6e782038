"""DICOM series in: single-frame slices of one folder, sorted by position along their normal, in real units.

InstanceNumber, SliceThickness of a stack, PatientPosition and the gantry tilt tag place nothing: only
ImagePositionPatient, ImageOrientationPatient and PixelSpacing of the top level do. What cannot be placed without
guessing is refused by name. How a folder is sorted into stacks is in dicom_series.py; the policy is docs/dicom.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pydicom
from pydicom.pixels import get_decoder
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from medckpt.datasets.dicom_series import Slice, choose_stack, distances_mm, positions_repeat
from medckpt.errors import DataError, GeometryError, listing
from medckpt.geometry import (
    LPS_TO_RAS,
    ORTHONORMALITY_TOLERANCE,
    POSITION_TOLERANCE_MM,
    SPACING_TOLERANCE_FRACTION,
    SPACING_TOLERANCE_MM,
    Grid,
    Volume,
)

_READERS = 8  # threads; reading is limited by the disk and by the decoders, which let go of the interpreter lock
_DECODER_PACKAGES = {  # first match in the name of the transfer syntax
    "JPEG-LS": "pyjpegls",
    "JPEG 2000": "pylibjpeg pylibjpeg-openjpeg",
    "High-Throughput": "pylibjpeg pylibjpeg-openjpeg",
    "JPEG": "pylibjpeg pylibjpeg-libjpeg",
}

_RESCALE_TAGS = ("RescaleSlope", "RescaleIntercept")

logger = logging.getLogger("medckpt")


def read_dicom(path: Path) -> Volume:
    """Reads one DICOM series.

    Args:
        path: a folder with one image series in it (other files are skipped with a count), or one file of it, which
            stands for the stack it belongs to.

    Returns:
        float32 (X, Y, Z): X along a row of pixels, Y down the rows, Z along the normal; stored value times
        RescaleSlope plus RescaleIntercept of its own slice (HU for CT).

    Raises:
        DataError: no or several series, or slices that are no plain grey-scale image, or pixels that do not decode.
        GeometryError: slices missing, repeated, unevenly spaced, tilted, or without position, orientation or spacing.
    """
    stack, grid = _resolve(path)
    columns, rows, depth = grid.shape
    # Filled in place, in the order of the files: the study is never held twice.
    voxels = np.empty((depth, rows, columns), dtype=np.float32)

    def fill(k: int) -> Rescale:
        voxels[k], rescale = _real_values(stack[k])
        return rescale

    with ThreadPoolExecutor(max_workers=min(_READERS, os.cpu_count() or 1)) as pool:
        _require_one_scale(stack, list(pool.map(fill, range(depth))), path)
    return Volume(array=voxels.transpose(2, 1, 0), affine=grid.affine, source=path)


def read_dicom_grid(path: Path) -> Grid:
    """Returns the grid of a DICOM series from its headers (pixels are decoded only to compare repeated slices).

    Raises as `read_dicom`, except for what only the pixels show.
    """
    return _resolve(path)[1]


def _resolve(path: Path) -> tuple[list[Slice], Grid]:
    """The slices to read, in order, and their grid."""
    chosen = choose_stack(path)
    distances = distances_mm(chosen)
    stack = [chosen[i] for i in np.argsort(distances, kind="stable")]
    if positions_repeat(stack):
        stack = _drop_copies(stack, path)
    grid = _stack_grid(stack, path)
    inverted = [s.path.name for s in stack if s.photometric == "MONOCHROME1"]
    if inverted:
        logger.warning("%s: MONOCHROME1 in %d slices; values stay as stored, not inverted", path, len(inverted))
    return stack, grid


def _drop_copies(stack: list[Slice], path: Path) -> list[Slice]:
    """Leaves out slices whose position and pixels another one has already; other repeats are refused."""
    distances = distances_mm(stack)
    kept = [stack[0]]
    for before, slice_, gap in zip(stack, stack[1:], np.diff(distances), strict=False):
        if gap > POSITION_TOLERANCE_MM:
            kept.append(slice_)
            continue
        same_place = np.abs(kept[-1].position - slice_.position).max() <= POSITION_TOLERANCE_MM
        if not same_place or not np.array_equal(_real_values(kept[-1])[0], _real_values(slice_)[0]):
            if distances[-1] - distances[0] <= POSITION_TOLERANCE_MM:
                raise GeometryError(
                    f"{path}: all {len(stack)} slices lie at one position; this is no volume but repeats in time or "
                    "by setting. Choose a volumetric series."
                )
            raise GeometryError(
                f"{path}: {before.path.name} and {slice_.path.name} lie at the same position "
                f"({_at(slice_)}) with different pixels, perhaps a second time point or echo. Keep one volume per "
                "folder and move the other slices away."
            )
        logger.warning("%s: %s is left out, a copy of %s", path, slice_.path.name, kept[-1].path.name)
    return kept


def _stack_grid(stack: Sequence[Slice], path: Path) -> Grid:
    """The RAS grid of sorted slices at distinct positions; raises GeometryError for what is not an even stack."""
    first = stack[0]
    if len(stack) == 1:
        step = first.normal * _single_slice_spacing_mm(first, path)
    else:
        _require_even_spacing(stack, path)
        step = _slice_step(stack, path)
    affine = np.eye(4)
    # PixelSpacing is (between rows, between columns); the first direction runs along a row, from column to column.
    affine[:3, 0] = first.directions[0] * first.pixel_spacing_mm[1]
    affine[:3, 1] = first.directions[1] * first.pixel_spacing_mm[0]
    affine[:3, 2] = step
    affine[:3, 3] = first.position
    return Grid(shape=(first.columns, first.rows, len(stack)), affine=LPS_TO_RAS @ affine)


def _single_slice_spacing_mm(slice_: Slice, path: Path) -> float:
    spacing = slice_.spacing_between_mm or slice_.thickness_mm
    if spacing <= 0:
        raise GeometryError(
            f"{path}: one slice ({slice_.path.name}) without SliceThickness or SpacingBetweenSlices has no extent "
            "along its normal. Add the other slices of the series, or the tag."
        )
    return spacing


def _require_even_spacing(stack: Sequence[Slice], path: Path) -> None:
    distances = distances_mm(stack)
    gaps = np.diff(distances)
    usual = float(np.sort(gaps)[(len(gaps) - 1) // 2])  # the lower median: of two gaps, the larger is the hole
    even = np.linspace(distances[0], distances[-1], len(stack))
    tolerance = min(SPACING_TOLERANCE_MM, SPACING_TOLERANCE_FRACTION * usual)
    if np.abs(distances - even).max() <= tolerance:
        return
    multiples = np.round(gaps / usual)
    whole = np.abs(gaps - multiples * usual) <= np.maximum(tolerance, SPACING_TOLERANCE_FRACTION * usual)
    holes = np.flatnonzero(multiples >= 2)
    if len(holes) and whole.all():
        named = [
            f"{int(multiples[k]) - 1} between {stack[k].path.name} ({_at(stack[k])}) and {stack[k + 1].path.name} "
            f"({_at(stack[k + 1])}), {gaps[k]:.4g} mm apart where {usual:.4g} mm is usual"
            for k in map(int, holes)
        ]
        raise GeometryError(
            f"{path}: slices are missing: {listing(named)}. Fetch the complete series again, or move the slices on "
            "one side of the gap to a folder of their own."
        )
    odd = [k for k in range(len(gaps)) if abs(gaps[k] - usual) > tolerance] or [int(np.abs(gaps - usual).argmax())]
    named = [f"{gaps[k]:.4g} mm after {stack[k].path.name} ({_at(stack[k])})" for k in odd]
    raise GeometryError(
        f"{path}: the slices are not evenly spaced: {usual:.4g} mm is usual, but {listing(named, 3)} (a slice may lie "
        f"{tolerance:.2g} mm off). Use an evenly spaced reconstruction, or resample the series to one."
    )


def _slice_step(stack: Sequence[Slice], path: Path) -> np.ndarray:
    """The LPS vector in mm from one slice to the next; refuses a tilted or wandering stack."""
    normal, first, last = stack[0].normal, stack[0].position, stack[-1].position
    step = (last - first) / (len(stack) - 1)
    across = step - normal * (step @ normal)
    slope = float(np.linalg.norm(across) / (step @ normal))
    drift_mm = float(np.linalg.norm(across)) * (len(stack) - 1)
    if slope > ORTHONORMALITY_TOLERANCE and drift_mm > SPACING_TOLERANCE_MM:
        raise GeometryError(
            f"{path}: the stack is tilted by {np.degrees(np.arctan(slope)):.1f} degrees (gantry tilt): its slices are "
            f"shifted by {np.linalg.norm(across):.3g} mm each within their plane. Resample it to an orthogonal grid "
            "first (dcm2niix does so for CT) and use the NIfTI file."
        )
    if slope > ORTHONORMALITY_TOLERANCE:  # a few thin slices with rounded positions: less than the tolerance in all
        step = normal * (step @ normal)
    line = first + np.arange(len(stack))[:, None] * step
    aside = np.stack([s.position for s in stack]) - line
    aside_mm = np.linalg.norm(aside - (aside @ normal)[:, None] * normal, axis=1)
    if aside_mm.max() > SPACING_TOLERANCE_MM:
        worst = stack[int(aside_mm.argmax())]
        raise GeometryError(
            f"{path}: {worst.path.name} is shifted by {aside_mm.max():.3g} mm within its plane against the other "
            f"slices (at most {SPACING_TOLERANCE_MM:g} mm). Is it of another series? Move it away."
        )
    return step


def _at(slice_: Slice) -> str:
    return f"at {slice_.position @ slice_.normal:.4g} mm"


Rescale = tuple[float | None, float | None]
"""RescaleSlope and RescaleIntercept of a slice; None for one that is missing or empty."""


def _require_one_scale(stack: Sequence[Slice], rescales: Sequence[Rescale], path: Path) -> None:
    """Refuses a series of which some slices lost their rescale tags: those would be off, by 1024 HU in many a CT."""
    for number, tag in enumerate(_RESCALE_TAGS):
        lacking = [slice_.path.name for slice_, rescale in zip(stack, rescales, strict=True) if rescale[number] is None]
        if lacking and len(lacking) < len(stack):
            raise DataError(
                f"{path}: {tag} is missing in {len(lacking)} of {len(stack)} slices ({listing(lacking)}), so that "
                "their values are not on the others' scale. Export the series again, or correct the tag."
            )


def _rescale(dataset: pydicom.Dataset, path: Path) -> Rescale:
    found: list[float | None] = []
    for tag in _RESCALE_TAGS:
        try:
            value = dataset.get(tag)
            found.append(None if value is None or value == "" else float(value))
        except Exception as error:  # pydicom raises whatever the damaged bytes lead to
            raise DataError(f"{path}: {tag} cannot be read ({error}). Copy or export the file again.") from error
        if found[-1] is not None and not np.isfinite(found[-1]):
            raise DataError(f"{path}: {tag} is {found[-1]}. Correct the tag, or export the file again.")
    return found[0], found[1]


def _real_values(slice_: Slice) -> tuple[np.ndarray, Rescale]:
    """(rows, columns) float32: the stored values with the slice's own slope and intercept, and these two."""
    dataset = pydicom.dcmread(slice_.path, force=True)
    if "TransferSyntaxUID" not in dataset.file_meta:
        # A file without a meta header: what pydicom found to parse it is how its pixels are stored.
        implicit, little = dataset.original_encoding
        explicit = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else explicit
    try:
        stored = dataset.pixel_array
    except Exception as error:  # each decoder plugin raises errors of its own
        raise DataError(_undecodable(slice_.path, dataset.file_meta.TransferSyntaxUID, error)) from error
    if stored.shape != (slice_.rows, slice_.columns):
        raise DataError(
            f"{slice_.path}: the pixels decode to {stored.shape}, not to the {slice_.rows} rows of {slice_.columns} in "
            "the header. Copy or export the file again."
        )
    slope, intercept = _rescale(dataset, slice_.path)
    values = stored.astype(np.float32)
    if slope == 0:
        raise DataError(f"{slice_.path}: RescaleSlope is 0, which erases the image. Correct the tag or leave it out.")
    if slope is not None and slope != 1:
        values *= np.float32(slope)
    if intercept is not None and intercept != 0:
        values += np.float32(intercept)
    return values, (slope, intercept)


def _undecodable(path: Path, syntax: pydicom.uid.UID, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    package = next((pip for word, pip in _DECODER_PACKAGES.items() if word in syntax.name), None)
    try:
        missing = not get_decoder(syntax).is_available
    except NotImplementedError:
        missing, package = True, None
    if missing and package:
        return f"{path}: no decoder for {syntax.name} is installed. Install it: pip install {package}"
    if missing:
        return (
            f"{path}: {syntax.name} cannot be decoded here. Export the series uncompressed (Explicit VR Little Endian)."
        )
    return f"{path}: the pixels ({syntax.name}) do not decode: {reason}. Is the file complete? Copy or export it again."
