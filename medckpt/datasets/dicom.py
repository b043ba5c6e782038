"""DICOM series in: single-frame slices or enhanced multi-frame files, sorted by position, in real units.

InstanceNumber, SliceThickness of a stack, PatientPosition and the gantry tilt tag place nothing: only
ImagePositionPatient, ImageOrientationPatient and PixelSpacing do, of the top level or of a frame's functional groups.
What cannot be placed without guessing is refused by name, or handled as `DicomConfig` says. How a folder is sorted into
stacks is in dicom_series.py, what makes a stack a volume in dicom_stack.py; the policy is docs/dicom.md.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from medckpt.blocks import DicomConfig
from medckpt.datasets.dicom_header import Slice
from medckpt.datasets.dicom_pixels import fill_planes, plane_values, require_decoders, values_dtype
from medckpt.datasets.dicom_series import READERS, choose_stack
from medckpt.datasets.dicom_stack import Plane, Stack, arrange
from medckpt.errors import DataError, listing, size
from medckpt.geometry import Grid, Volume, resample
from medckpt.machine import available_bytes

_REFUSE = DicomConfig()
_MOST_SQUEEZED = 2000  # bytes out of a byte in; a blank JPEG 2000 slice of 512 x 512 has 500

logger = logging.getLogger("medckpt")


def read_dicom(path: Path, options: DicomConfig = _REFUSE) -> Volume:
    """Reads one DICOM series.

    Args:
        path: a folder with one image series in it or below it (other files are skipped with a count), or one file of
            it, which stands for the stack it belongs to among the files of its folder.
        options: what to do with tilt, gaps, repeated positions and uneven spacing.

    Returns:
        (X, Y, Z): X along a row of pixels, Y down the rows, Z along the normal; stored value times RescaleSlope plus
        RescaleIntercept of its own slice (HU for CT). int16 where every value that the series could have is a whole
        number that int16 holds and nothing is interpolated, float32 otherwise. `notes` say what `options` changed, and
        name MONOCHROME1.

    Raises:
        DataError: no or several series, or slices that are no plain grey-scale image, or pixels that do not decode,
            or more voxels than memory.
        GeometryError: slices missing, repeated, unevenly spaced, tilted, or without position, orientation or spacing.
    """
    stack = _resolve(path, options)
    array = _read_planes(stack, path)
    if stack.target is not stack.grid:
        array = resample(array, stack.grid, stack.target, order=1, fill=float(array.min()))
    return Volume(array=array, affine=stack.target.affine, source=path, notes=stack.notes)


def read_dicom_grid(path: Path, options: DicomConfig = _REFUSE) -> Grid:
    """Returns the grid of a DICOM series from its headers (pixels are decoded only to compare repeated slices).

    Raises as `read_dicom`, except for what only the pixels show.
    """
    return _resolve(path, options).target


def _resolve(path: Path, options: DicomConfig) -> Stack:
    """What to read, in order, and where it lies."""
    chosen = choose_stack(path)
    require_decoders(chosen)
    stack = arrange(chosen, path, options)
    _require_one_scale(stack.slices, path)
    inverted = sum(s.photometric == "MONOCHROME1" for s in stack.slices)
    if inverted:
        note = f"MONOCHROME1 in {inverted} slices; values stay as stored, not inverted"
        logger.warning("%s: %s", path, note)
        stack = replace(stack, notes=(*stack.notes, note))
    lying = Counter(s.patient_position for s in stack.slices if s.patient_position not in ("", "HFS"))
    if lying:
        logger.warning(
            "%s: PatientPosition is %s, not HFS; voxels are placed by ImageOrientationPatient alone. Check left and "
            "right, and front and back, once",
            path,
            " and ".join(sorted(lying)),
        )
    return stack


def _require_one_scale(slices: Sequence[Slice], path: Path) -> None:
    """Refuses a series of which some slices lost their rescale tags: those would be off, by 1024 HU in many a CT."""
    for tag in ("RescaleSlope", "RescaleIntercept"):
        lacking = [slice_.path.name for slice_ in slices if tag not in slice_.stored.rescale_tags]
        if 0 < len(lacking) < len(slices):
            raise DataError(
                f"{path}: {tag} is missing in {len(lacking)} of {len(slices)} slices ({listing(lacking, 3)}), so that "
                "their values are not on the others' scale. Export the series again, or correct the tag."
            )


def _read_planes(stack: Stack, path: Path) -> np.ndarray:
    """(X, Y, Z) on `stack.grid`, filled in place in parallel: the study is never held twice."""
    columns, rows, depth = stack.grid.shape
    between = [(k, plane) for k, plane in enumerate(stack.planes) if plane.weight]
    dtype = np.dtype(np.float32) if between or stack.target is not stack.grid else values_dtype(stack.slices)
    _require_memory(stack, dtype, path)
    try:
        voxels = np.empty((depth, rows, columns), dtype=dtype)
    except MemoryError as error:
        raise _too_large(stack, dtype, path) from error
    stored = [(k, stack.slices[plane.index]) for k, plane in enumerate(stack.planes) if not plane.weight]
    by_file = sorted(stored, key=lambda pair: (str(pair[1].path), pair[1].frame or 0))
    files = [list(group) for _, group in groupby(by_file, key=lambda pair: pair[1].path)]

    def fill(group: Sequence[tuple[int, Slice]]) -> int:
        return fill_planes([slice_ for _, slice_ in group], [voxels[k] for k, _ in group])

    def fill_between(pair: tuple[int, Plane]) -> None:
        k, plane = pair
        below, above = (plane_values(stack.slices[i]) for i in (plane.index, plane.index + 1))
        voxels[k] = below + np.float32(plane.weight) * (above - below)

    with ThreadPoolExecutor(max_workers=min(READERS, os.cpu_count() or 1)) as pool:
        surplus = sum(pool.map(fill, files))
        for _ in pool.map(fill_between, between):
            pass
    if surplus:
        logger.warning(
            "%s: %d pixels had something in the bits above BitsStored; it is cut off, as DICOM says (an overlay, or a "
            "padding value that does not fit)",
            path,
            surplus,
        )
    return voxels.transpose(2, 1, 0)


def _require_memory(stack: Stack, dtype: np.dtype, path: Path) -> None:
    needed, free = _bytes(stack, dtype), available_bytes()
    if free is not None and needed > free:
        raise _too_large(stack, dtype, path)
    on_disk = sum(file.stat().st_size for file in {slice_.path for slice_ in stack.slices})
    if needed > _MOST_SQUEEZED * on_disk:
        raise DataError(
            f"{path}: the headers promise {size(needed)} of voxels, the files have {size(on_disk)}. Are Rows and "
            "Columns right? Export the series again."
        )


def _bytes(stack: Stack, dtype: np.dtype) -> int:
    volumes = 1 if stack.target is stack.grid else 3  # the source, and what ITK holds of both while it resamples
    return math.prod(stack.target.shape) * dtype.itemsize * volumes


def _too_large(stack: Stack, dtype: np.dtype, path: Path) -> DataError:
    free = available_bytes()
    there = f"{size(free)} are free" if free is not None else "that is more than there is"
    return DataError(
        f"{path}: {' x '.join(map(str, stack.target.shape))} voxels take {size(_bytes(stack, dtype))} of memory, and "
        f"{there}. Close other programs, prepare fewer cases at once, or crop the series."
    )
