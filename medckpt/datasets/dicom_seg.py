"""DICOM Segmentation objects in: their frames put back where they lie on the grid of a scan.

A SEG file leaves out what is empty: frames without a voxel, whole segments. So its frames alone are no volume; each is
placed by its own ImagePositionPatient, on the scan's grid if that is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medckpt.errors import DataError, GeometryError, listing
from medckpt.geometry import (
    LATTICE_TOLERANCE_VOXELS,
    LPS_TO_RAS,
    SPACING_TOLERANCE_MM,
    Grid,
    Volume,
)

SEG_CLASSES = {"1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7"}
"""SOP classes: Segmentation Storage, Label Map Segmentation Storage."""

VALUE_TEXT = "label value {}"
"""How the SegmentDescription of a file that medckpt wrote begins: the label value, as segment numbers have no gaps."""

_CLEARLY_NEAREST = 0.34  # voxels: further off, the next voxel is nearly as near
_VALUE = re.compile(VALUE_TEXT.format(r"(\d+)") + r"\b")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Frame:
    """Frame `index` of a file: its segment (0 in a label map, whose pixels are segment numbers) and RAS mm affine."""

    index: int
    segment: int
    affine: np.ndarray
    """Takes (column, row, 0, 1) to the centre of that pixel."""


def is_dicom_seg(path: Path) -> bool:
    """Says whether a file is a DICOM Segmentation."""
    import pydicom

    try:
        return str(pydicom.dcmread(path, specific_tags=["SOPClassUID"]).get("SOPClassUID")) in SEG_CLASSES
    except Exception:  # no DICOM file, or a damaged one: whoever reads it says why
        return False


def read_dicom_seg(path: Path, onto: Grid | None = None, labels: Mapping[str, int] | None = None) -> Volume:
    """Reads a DICOM Segmentation (BINARY, LABELMAP, or FRACTIONAL that holds nothing between 0 and its maximum).

    Args:
        path: the file.
        onto: the scan's grid; frames and segments that the file leaves out are background. Without it the result is
            the smallest even stack that holds all frames, in the file's own order of rows and columns.
        labels: value by class name. A segment is found by its SegmentLabel. Without it values are those that medckpt
            noted in the file, else the segment numbers.

    Returns:
        (X, Y, Z) of the smallest unsigned dtype that holds the values.

    Raises:
        DataError: unreadable, no segmentation, fractional, overlapping segments, segments of no known name.
        GeometryError: frames that lie beside `onto` or its slices (with voxels in them), or make no even stack.
    """
    dataset = _read(path)
    frames = list(_frames(dataset, path))
    grid = onto or _stack_grid(dataset, frames, path)
    values = _values(dataset, labels, path)
    kinds = np.zeros(max(values, default=0) + 1, dtype=np.min_scalar_type(max(values.values(), default=0)))
    for segment, value in values.items():
        kinds[segment] = value
    voxels = np.zeros(grid.shape, dtype=kinds.dtype)
    for frame in frames:
        pixels = _pixels(dataset, frame, path)
        rows, columns = np.nonzero(pixels)
        found = pixels[rows, columns] if frame.segment == 0 else np.array([frame.segment])
        if len(rows) and (int(found.max()) >= len(kinds) or not np.isin(found, list(values)).all()):
            raise DataError(f"{path}: frame {frame.index + 1} holds a segment that the file does not describe.")
        if len(rows):
            _put(voxels, _places(frame, rows, columns, grid, path), kinds[found], path)
    return Volume(array=voxels, affine=grid.affine, source=path)


def _read(path: Path) -> Any:
    import highdicom

    try:
        return highdicom.seg.segread(path)
    except Exception as error:  # pydicom and highdicom raise whatever the bytes lead to
        if path.is_file() and not is_dicom_seg(path):
            message = f"{path}: this is no DICOM Segmentation. Give the SEG file, or a label as NIfTI."
            raise DataError(message) from error
        raise DataError(f"{path}: the DICOM Segmentation cannot be read ({_reason(error)}). Copy it again.") from error


def _frames(dataset: Any, path: Path) -> Iterator[_Frame]:
    shared = dataset.SharedFunctionalGroupsSequence[0]
    for index, own in enumerate(dataset.PerFrameFunctionalGroupsSequence):
        try:

            def item(name: str, own: Any = own) -> Any:
                return (own if name in own else shared)[name][0]

            position = item("PlanePositionSequence").ImagePositionPatient
            orientation = np.array(item("PlaneOrientationSequence").ImageOrientationPatient, dtype=np.float64)
            between_rows, between_columns = map(float, item("PixelMeasuresSequence").PixelSpacing)
            segment = 0
            if dataset.SegmentationType != "LABELMAP":
                segment = int(item("SegmentIdentificationSequence").ReferencedSegmentNumber)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise GeometryError(
                f"{path}: frame {index + 1} has no place in the patient or no segment ({error}). Export it again, or "
                "convert the segmentation to NIfTI."
            ) from error
        affine = np.eye(4)
        affine[:3, 0] = orientation[:3] * between_columns
        affine[:3, 1] = orientation[3:] * between_rows
        affine[:3, 2] = np.cross(orientation[:3], orientation[3:])
        affine[:3, 3] = [float(number) for number in position]
        if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
            raise GeometryError(f"{path}: the orientation or spacing of frame {index + 1} is none; export it again.")
        yield _Frame(index=index, segment=segment, affine=LPS_TO_RAS @ affine)


def _stack_grid(dataset: Any, frames: list[_Frame], path: Path) -> Grid:
    """The smallest even stack of planes that holds every frame."""
    first = frames[0].affine
    normal = first[:3, 2]
    far = max(float(np.abs(frame.affine[:3, :2] - first[:3, :2]).max()) for frame in frames)
    origins = np.stack([frame.affine[:3, 3] for frame in frames])
    distances = (origins - origins[0]) @ normal
    aside = np.linalg.norm(origins - origins[0] - distances[:, None] * normal, axis=1).max()
    gaps = np.diff(np.unique(np.round(distances, 3)))
    measures = dataset.SharedFunctionalGroupsSequence[0].get("PixelMeasuresSequence")
    said = [float(measures[0].get(tag) or 0) for tag in ("SpacingBetweenSlices", "SliceThickness")] if measures else []
    candidates = [spacing for spacing in (*said, *gaps[gaps.argsort()][:1]) if spacing > 0]  # a tag may mean a gap
    if not candidates:
        raise GeometryError(f"{path}: one plane without SpacingBetweenSlices or SliceThickness; give the scan's grid.")
    tried = []
    for spacing in candidates:
        steps = np.round(distances / spacing)
        rest = distances - steps * spacing
        off = max(far, float(aside), float(np.ptp(rest)) / 2)
        if off <= SPACING_TOLERANCE_MM:
            affine = first.copy()
            affine[:3, 2] = normal * spacing
            affine[:3, 3] += normal * (steps.min() * spacing + (rest.max() + rest.min()) / 2)
            return Grid(shape=(int(dataset.Columns), int(dataset.Rows), int(np.ptp(steps)) + 1), affine=affine)
        tried.append(off)
    raise GeometryError(
        f"{path}: the frames make no even, straight stack of planes (up to {min(tried):.3g} mm off). Read it onto the "
        "grid of its scan."
    )


def _values(dataset: Any, labels: Mapping[str, int] | None, path: Path) -> dict[int, int]:
    """The label value of each segment number."""
    segments = {int(item.SegmentNumber): item for item in dataset.SegmentSequence}
    if dataset.SegmentationType == "LABELMAP":
        segments.pop(int(dataset.get("PixelPaddingValue", 0)), None)
    if labels is not None:
        names = {number: str(item.SegmentLabel) for number, item in segments.items()}
        unknown = [name for name in names.values() if name not in labels]
        if unknown:
            raise DataError(
                f"{path}: segments {listing(unknown)} are not among the data set's labels ({listing(list(labels))}). "
                "Give them these names, or add them to dataset.json."
            )
        return {number: labels[name] for number, name in names.items()}
    noted = {number: _VALUE.match(str(item.get("SegmentDescription", ""))) for number, item in segments.items()}
    if all(noted.values()):
        return {number: int(match[1]) for number, match in noted.items() if match}
    return {number: number for number in segments}


def _pixels(dataset: Any, frame: _Frame, path: Path) -> np.ndarray:
    """(rows, columns): nonzero where the frame's segment is, or the segment numbers of a label map."""
    try:
        pixels = np.asarray(dataset.get_stored_frame(frame.index + 1))
    except Exception as error:  # each decoder raises errors of its own
        raise DataError(
            f"{path}: frame {frame.index + 1} does not decode ({_reason(error)}). Copy it again."
        ) from error
    if dataset.SegmentationType == "FRACTIONAL":
        most = int(dataset.MaximumFractionalValue)
        between = int(((pixels > 0) & (pixels < most)).sum())
        if between:
            raise DataError(
                f"{path}: the segmentation is fractional, {between} pixels of frame {frame.index + 1} lie between 0 "
                f"and {most}. Threshold it first: a label map has whole classes."
            )
    return pixels


def _places(
    frame: _Frame, rows: np.ndarray, columns: np.ndarray, grid: Grid, path: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The indices in `grid` of some pixels of a frame, which must be voxels of it."""
    index_map = np.linalg.inv(grid.affine) @ frame.affine
    pixels = np.stack([columns, rows, np.zeros_like(rows), np.ones_like(rows)]).astype(np.float64)
    exact = (index_map @ pixels)[:3]
    places = np.rint(exact).astype(np.int64)
    off_mm = np.linalg.norm(grid.affine[:3, :3] @ (exact - places), axis=0).max()
    steps = np.abs(index_map[:3, :2])
    aligned = np.abs(steps - np.round(steps)).max() <= LATTICE_TOLERANCE_VOXELS and (np.round(steps).sum(0) == 1).all()
    # A slice of the scan itself may lie SPACING_TOLERANCE_MM off its place in the even stack.
    if off_mm > SPACING_TOLERANCE_MM or np.abs(exact - places).max() > _CLEARLY_NEAREST or not aligned:
        raise GeometryError(
            f"{path}: frame {frame.index + 1} does not lie on the voxels of the scan (up to {off_mm:.3g} mm beside "
            "them). Was it made on another series, or resampled? Give the series that it refers to."
        )
    if (places < 0).any() or (places >= np.array(grid.shape)[:, None]).any():
        raise GeometryError(
            f"{path}: frame {frame.index + 1} has voxels outside of the scan. Was it made on another, larger series? "
            "Give the series that it refers to."
        )
    return places[0], places[1], places[2]


def _put(voxels: np.ndarray, places: tuple[np.ndarray, np.ndarray, np.ndarray], values: np.ndarray, path: Path) -> None:
    there = voxels[places]
    clash = (there != 0) & (there != values)
    if clash.any():
        raise DataError(
            f"{path}: segments overlap: {int(clash.sum())} voxels belong to both {int(there[clash][0])} and "
            f"{int(np.broadcast_to(values, there.shape)[clash][0])}. A label map gives each voxel one class."
        )
    voxels[places] = values


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
