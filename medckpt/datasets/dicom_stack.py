"""From the images of one stack to the planes of one volume: order, copies, gaps, spacing and tilt.

By default what is no even, rectangular stack is refused by name. `DicomConfig` may ask for a way out instead; what was
done then stands in the notes of the volume.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medckpt.blocks import DicomConfig
from medckpt.datasets.dicom_header import Slice
from medckpt.datasets.dicom_pixels import plane_values
from medckpt.datasets.dicom_series import distances_mm, positions_repeat
from medckpt.errors import GeometryError, listing
from medckpt.geometry import (
    LPS_TO_RAS,
    ORTHONORMALITY_TOLERANCE,
    POSITION_TOLERANCE_MM,
    SPACING_TOLERANCE_FRACTION,
    SPACING_TOLERANCE_MM,
    Grid,
)

MOST_MISSING_SHARE = 0.5
"""At most this many missing slices are interpolated, as a share of those that are there; beyond it nothing helps."""

SAME_PLACE = 1e-3
"""A slice within this share of the spacing of a plane is that plane; it is copied, not interpolated."""

logger = logging.getLogger("medckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One plane of the volume: image `index` of the stack, or `weight` of the way from it to the next one."""

    index: int
    weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """What is read, where it lies, and what is done to it."""

    slices: tuple[Slice, ...]
    """Sorted along the normal, at distinct positions."""
    planes: tuple[Plane, ...]
    """One per plane along the third axis."""
    grid: Grid
    """Where the planes lie; sheared if the stack is tilted."""
    target: Grid
    """The grid of the volume: `grid`, or the rectangular one that a tilted stack is resampled to."""
    notes: tuple[str, ...]


def arrange(chosen: Sequence[Slice], path: Path, options: DicomConfig) -> Stack:
    """Returns how unsorted slices of one orientation make a volume.

    Raises:
        GeometryError: slices missing, repeated, unevenly spaced, tilted or shifted, where `options` do not allow it.
        DataError: repeated slices that do not decode.
    """
    distances = distances_mm(chosen)
    stack = [chosen[i] for i in np.argsort(distances, kind="stable")]
    notes: list[str] = []
    if positions_repeat(stack):
        stack = _without_repeats(stack, path, options, notes)
    if len(stack) == 1:
        step, planes = stack[0].normal * _single_slice_spacing_mm(stack[0], path), [Plane(index=0)]
    else:
        places = _places(stack, path, options, notes)
        step = _slice_step(stack, places, path, options)
        planes = _planes(places)
    grid = _grid(stack[0], step, len(planes))
    target = _rectangular(stack[0], step, grid, notes)
    for note in notes:
        logger.warning("%s: %s", path, note)
    return Stack(slices=tuple(stack), planes=tuple(planes), grid=grid, target=target, notes=tuple(notes))


# Slices at one position


def _without_repeats(stack: list[Slice], path: Path, options: DicomConfig, notes: list[str]) -> list[Slice]:
    """Leaves out slices whose position and pixels another one has; of other repeats the first or last, if allowed."""
    distances = distances_mm(stack)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(distances) > POSITION_TOLERANCE_MM]))
    kept, copies, dropped = [], [], []
    for first, end in zip(starts, [*starts[1:], len(stack)], strict=True):
        here = stack[first:end]
        different = [here[0]]
        for slice_ in here[1:]:
            same = next((other for other in different if _same_image(other, slice_)), None)
            if same is None:
                different.append(slice_)
            else:
                copies.append(f"{slice_.name} is left out, a copy of {same.name}")
        if len(different) > 1:
            if len(starts) == 1:
                raise GeometryError(
                    f"{path}: all {len(stack)} slices lie at one position; this is no volume but repeats in time or "
                    "by setting. Choose a volumetric series."
                )
            _require_repeats_allowed(different, path, options)
            different.sort(key=lambda s: (*s.acquired, s.path.name, s.frame or 0))
            if options.duplicates == "last":
                different.reverse()
            dropped += [slice_.name for slice_ in different[1:]]
        kept.append(different[0])
    if copies:
        logger.warning("%s: %s", path, listing(copies, 3))
    if dropped:
        notes.append(
            f"duplicates={options.duplicates}: of slices at one position the {options.duplicates} acquired is read; "
            f"{len(dropped)} left out: {listing(dropped)}"
        )
    return kept


def _same_image(a: Slice, b: Slice) -> bool:
    return bool(np.abs(a.position - b.position).max() <= POSITION_TOLERANCE_MM) and np.array_equal(
        plane_values(a), plane_values(b)
    )


def _require_repeats_allowed(different: Sequence[Slice], path: Path, options: DicomConfig) -> None:
    a, b = different[:2]
    if any(np.abs(a.position - other.position).max() > POSITION_TOLERANCE_MM for other in different[1:]):
        raise GeometryError(
            f"{path}: {a.name} and {b.name} lie side by side in one plane ({_at(b)}). Are there two stacks? Keep one "
            "per folder and move the other slices away."
        )
    if options.duplicates == "refuse":
        raise GeometryError(
            f"{path}: {a.name} and {b.name} lie at the same position ({_at(b)}) with different pixels, perhaps a "
            "second time point or echo. Keep one volume per folder and move the other slices away, or set "
            "data.dicom.duplicates=first (or last) to read the one acquired first (last) at each position."
        )


# Places along the normal


def _single_slice_spacing_mm(slice_: Slice, path: Path) -> float:
    spacing = slice_.spacing_between_mm or slice_.thickness_mm
    if spacing <= 0:
        raise GeometryError(
            f"{path}: one slice ({slice_.name}) without SliceThickness or SpacingBetweenSlices has no extent "
            "along its normal. Add the other slices of the series, or the tag."
        )
    return spacing


def _places(stack: Sequence[Slice], path: Path, options: DicomConfig, notes: list[str]) -> np.ndarray:
    """(n,) where each slice lies along the normal, in planes of the volume: 0, 1, 2 ... for an even stack."""
    distances = distances_mm(stack)
    gaps = np.diff(distances)
    usual = float(np.sort(gaps)[(len(gaps) - 1) // 2])  # the lower median: of two gaps, the larger is the hole
    tolerance = min(SPACING_TOLERANCE_MM, SPACING_TOLERANCE_FRACTION * usual)
    even = np.arange(len(stack), dtype=np.float64)
    if _off_mm(distances, even) <= tolerance:
        return even
    multiples = np.round(gaps / usual)
    whole = np.abs(gaps - multiples * usual) <= np.maximum(tolerance, SPACING_TOLERANCE_FRACTION * usual)
    holes = np.flatnonzero(gaps >= 2 * usual - tolerance)
    if len(holes) and whole.all():
        _require_gaps_allowed(stack, gaps, usual, holes, path, options)
        places = np.concatenate([[0.0], np.cumsum(multiples)])
        if _off_mm(distances, places) <= tolerance:
            _note_interpolated(places, usual, path, notes)
            return places
    _require_spacing_allowed(stack, gaps, usual, tolerance, path, options)
    if len(holes):
        _require_gaps_allowed(stack, gaps, usual, holes, path, options)
    extent = float(distances[-1] - distances[0])
    count = max(1, round(extent / usual))
    places = (distances - distances[0]) * (count / extent)
    if len(holes):
        _require_enough(len(stack), count + 1 - len(stack), path)
    notes.append(
        f"spacing=resample: {len(stack)} slices {gaps.min():.4g} to {gaps.max():.4g} mm apart are interpolated "
        f"linearly to {count + 1} planes {extent / count:.4g} mm apart"
    )
    return places


def _off_mm(distances: np.ndarray, places: np.ndarray) -> float:
    """How far the worst slice lies from its place on an even ladder from the first slice to the last."""
    step = (distances[-1] - distances[0]) / places[-1]
    return float(np.abs(distances - distances[0] - places * step).max())


def _require_gaps_allowed(
    stack: Sequence[Slice], gaps: np.ndarray, usual: float, holes: np.ndarray, path: Path, options: DicomConfig
) -> None:
    if options.gaps == "interpolate":
        return
    named = [
        f"{max(1, round(gaps[k] / usual) - 1)} between {stack[k].name} ({_at(stack[k])}) and {stack[k + 1].name} "
        f"({_at(stack[k + 1])}), {gaps[k]:.4g} mm apart where {usual:.4g} mm is usual"
        for k in map(int, holes)
    ]
    raise GeometryError(
        f"{path}: slices are missing: {listing(named)}. Fetch the complete series again, move the slices on one side "
        "of the gap to a folder of their own, or set data.dicom.gaps=interpolate to fill in between their neighbours."
    )


def _note_interpolated(places: np.ndarray, usual: float, path: Path, notes: list[str]) -> None:
    missing = sorted(set(range(round(places[-1]) + 1)) - {round(place) for place in places})
    _require_enough(len(places), len(missing), path)
    notes.append(
        f"gaps=interpolate: {len(missing)} of {round(places[-1]) + 1} slices are missing and interpolated linearly "
        f"between their neighbours, at index {', '.join(map(str, missing))} (from 0, {usual:.4g} mm apart)"
    )


def _require_enough(there: int, missing: int, path: Path) -> None:
    if missing > MOST_MISSING_SHARE * there:
        raise GeometryError(
            f"{path}: {missing} slices are missing beside the {there} that are there; so many are not interpolated "
            f"(at most {MOST_MISSING_SHARE:g} of those there). Two stacks, or a stray slice? Keep one stack per folder."
        )


def _require_spacing_allowed(
    stack: Sequence[Slice], gaps: np.ndarray, usual: float, tolerance: float, path: Path, options: DicomConfig
) -> None:
    if options.spacing == "resample":
        return
    odd = [k for k in range(len(gaps)) if abs(gaps[k] - usual) > tolerance] or [int(np.abs(gaps - usual).argmax())]
    named = [f"{gaps[k]:.4g} mm after {stack[k].name} ({_at(stack[k])})" for k in odd]
    raise GeometryError(
        f"{path}: the slices are not evenly spaced: {usual:.4g} mm is usual, but {listing(named, 3)} (a slice may lie "
        f"{tolerance:.2g} mm off). Use an evenly spaced reconstruction, or set data.dicom.spacing=resample to "
        "interpolate the series to even spacing."
    )


def _planes(places: np.ndarray) -> list[Plane]:
    """The planes 0, 1, 2 ... between slices at `places`: each a slice, or between two of them."""
    planes = []
    for plane in range(round(places[-1]) + 1):
        nearest = int(np.abs(places - plane).argmin())
        below = min(int(np.searchsorted(places, plane, side="right")) - 1, len(places) - 2)
        if abs(places[nearest] - plane) <= SAME_PLACE:
            planes.append(Plane(index=nearest))
        else:
            weight = (plane - places[below]) / (places[below + 1] - places[below])
            planes.append(Plane(index=below, weight=float(weight)))
    return planes


# The grid


def _slice_step(stack: Sequence[Slice], places: np.ndarray, path: Path, options: DicomConfig) -> np.ndarray:
    """The LPS vector in mm from one plane to the next; refuses a wandering stack, and a tilted one if it must."""
    normal, first, last = stack[0].normal, stack[0].position, stack[-1].position
    step = (last - first) / places[-1]
    across = step - normal * (step @ normal)
    slope = float(np.linalg.norm(across) / (step @ normal))
    drift_mm = float(np.linalg.norm(across)) * places[-1]
    tilted = slope > ORTHONORMALITY_TOLERANCE and drift_mm > SPACING_TOLERANCE_MM
    if slope > ORTHONORMALITY_TOLERANCE and not tilted:
        step = normal * (step @ normal)  # a few thin slices with rounded positions: less than the tolerance in all
    along = (np.stack([s.position for s in stack]) - first) @ normal / (step @ normal)
    aside = np.stack([s.position for s in stack]) - first - along[:, None] * step
    aside_mm = np.linalg.norm(aside - (aside @ normal)[:, None] * normal, axis=1)
    if tilted and options.tilt == "refuse" and aside_mm.max() <= SPACING_TOLERANCE_MM:
        raise GeometryError(
            f"{path}: the stack is tilted by {np.degrees(np.arctan(slope)):.1f} degrees (gantry tilt): its slices are "
            f"shifted by {np.linalg.norm(across):.3g} mm each within their plane. Set data.dicom.tilt=resample to "
            "resample it to an orthogonal grid, or do so first (dcm2niix does for CT) and use the NIfTI file."
        )
    if aside_mm.max() > SPACING_TOLERANCE_MM:
        worst = stack[int(aside_mm.argmax())]
        raise GeometryError(
            f"{path}: {worst.name} is shifted by {aside_mm.max():.3g} mm within its plane against the other "
            f"slices (at most {SPACING_TOLERANCE_MM:g} mm). Is it of another series? Move it away."
        )
    return step


def _grid(first: Slice, step: np.ndarray, depth: int) -> Grid:
    affine = np.eye(4)
    # PixelSpacing is (between rows, between columns); the first direction runs along a row, from column to column.
    affine[:3, 0] = first.directions[0] * first.pixel_spacing_mm[1]
    affine[:3, 1] = first.directions[1] * first.pixel_spacing_mm[0]
    affine[:3, 2] = step
    affine[:3, 3] = first.position
    return Grid(shape=(first.columns, first.rows, depth), affine=LPS_TO_RAS @ affine)


def _rectangular(first: Slice, step: np.ndarray, grid: Grid, notes: list[str]) -> Grid:
    """The grid itself if its third axis runs along the normal, else the smallest rectangular one that holds it.

    Its planes are the slices' own, so that a tilted stack is interpolated within each slice and never between two.
    """
    upright = first.normal * (step @ first.normal)
    across = step - upright
    slope = float(np.linalg.norm(across) / np.linalg.norm(upright))
    if slope <= ORTHONORMALITY_TOLERANCE:
        return grid
    spacing = np.array([first.pixel_spacing_mm[1], first.pixel_spacing_mm[0]])
    shift = (first.directions @ across) / spacing * (grid.shape[2] - 1)  # pixels, from the first slice to the last
    before, after = np.ceil(np.maximum(-shift, 0) - 1e-6), np.ceil(np.maximum(shift, 0) - 1e-6)
    columns, rows = (int(n) for n in np.array(grid.shape[:2]) + before + after)
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = first.directions[0] * spacing[0], first.directions[1] * spacing[1]
    affine[:3, 2] = upright
    affine[:3, 3] = first.position - affine[:3, :2] @ before
    target = Grid(shape=(columns, rows, grid.shape[2]), affine=LPS_TO_RAS @ affine)
    sizes = [" x ".join(map(str, shape)) for shape in (grid.shape, target.shape)]
    notes.append(
        f"tilt=resample: tilted by {np.degrees(np.arctan(slope)):.1f} degrees; resampled linearly from {sizes[0]} to "
        f"an orthogonal grid of {sizes[1]}, filled up with the smallest value"
    )
    return target


def _at(slice_: Slice) -> str:
    return f"at {slice_.position @ slice_.normal:.4g} mm"
