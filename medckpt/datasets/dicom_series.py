"""Which files of a folder make one DICOM stack: by series, orientation, pixel spacing and size, then by repeats.

Exactly one stack may come out, unless a file names the one that is meant. Everything else is refused with a list of
what is there, because a wrong choice here is a wrong image that looks right.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.uid import UID

from medckpt.errors import DataError, GeometryError, listing
from medckpt.geometry import ORIENTATION_TOLERANCE, ORTHONORMALITY_TOLERANCE, POSITION_TOLERANCE_MM

LOCALIZER_MAX_SLICES = 3
"""Other stacks of the same series, in another orientation and of no more slices than this, are its localizers."""

_GEOMETRY_TAGS = {"ImagePositionPatient": 3, "ImageOrientationPatient": 6, "PixelSpacing": 2}  # number of values
_SPLIT_TAGS = ("EchoTime", "ImageType", "AcquisitionNumber", "TemporalPositionIdentifier")
_TAGS = [
    *("SOPClassUID", "Modality", "SeriesInstanceUID", "SeriesDescription", "Rows", "Columns", "NumberOfFrames"),
    *("SamplesPerPixel", "PhotometricInterpretation", "SliceThickness", "SpacingBetweenSlices"),
    *("ModalityLUTSequence", *_GEOMETRY_TAGS, *_SPLIT_TAGS),
]
# Objects that carry no image of their own (or, with Rows, none of the scanner's): skipped with a count.
_NO_IMAGE_MODALITIES = {"RTSTRUCT", "SEG", "RTDOSE", "RTPLAN", "RTRECORD", "SR", "PR", "KO", "REG", "RWV", "DOC", "FID"}

logger = logging.getLogger("medckpt")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """The header of one image file, as far as it places and sorts the image.

    `problem` says why it cannot be used and `problem_kind` what is wrong: "content", "colour" or "geometry". Then
    `directions` ((2, 3): along a row, down a column; LPS unit vectors), `position` (LPS mm) and `pixel_spacing_mm`
    (between rows, between columns) may be empty.
    """

    path: Path
    series_uid: str
    description: str
    modality: str
    rows: int
    columns: int
    problem: str | None
    problem_kind: str
    directions: np.ndarray
    position: np.ndarray
    pixel_spacing_mm: np.ndarray
    thickness_mm: float
    spacing_between_mm: float
    photometric: str
    acquisition: tuple[str, ...]

    @property
    def normal(self) -> np.ndarray:
        """(3,) LPS unit vector: along a row times down a column."""
        normal = np.cross(self.directions[0], self.directions[1])
        return normal / np.linalg.norm(normal)


def choose_stack(path: Path) -> list[Slice]:
    """Returns the slices of the one usable stack in a folder, unsorted; `path` may be one of its files instead.

    Raises:
        DataError: no image, several stacks, or nothing but images of a kind that is not read.
        GeometryError: the slices lack the tags that place them.
    """
    folder = path if path.is_dir() else path.parent
    slices, skipped = _scan(folder)
    if skipped:
        logger.info("%s: %d files without an image are skipped: %s", folder, len(skipped), listing(skipped))
    if not slices:
        raise DataError(
            f"{folder}: no DICOM image is in this folder ({len(skipped)} other files: {listing(skipped) or 'none'}). "
            "Give the folder that holds the slices themselves."
        )
    stacks = _stacks(slices)
    chosen = _stack_of(path, stacks) if path.is_file() else _only_stack(folder, stacks)
    if chosen[0].problem:
        raise _refusal(path, chosen)
    _account_for_others(path, chosen, [stack for stack in stacks if stack is not chosen])
    return chosen


def distances_mm(stack: Sequence[Slice]) -> np.ndarray:
    """(n,) position of each slice along the first one's normal, in mm."""
    return np.stack([s.position for s in stack]) @ stack[0].normal


def positions_repeat(stack: Sequence[Slice]) -> bool:
    """Says whether two slices lie within `POSITION_TOLERANCE_MM` of each other along the normal."""
    return bool((np.diff(np.sort(distances_mm(stack))) <= POSITION_TOLERANCE_MM).any())


def is_dicom_file(path: Path) -> bool:
    """Says whether a file is DICOM: by the mark after the preamble, or (old files) by starting with group 2 or 8.

    Raises:
        DataError: the file cannot be opened, so that it may be a slice; hidden files (a leading dot) are none.
    """
    try:
        with path.open("rb") as file:
            head = file.read(132)
    except OSError as error:
        if path.name.startswith("."):
            return False
        # A slice lost at the end of a stack leaves no gap: what may have been one is not skipped.
        raise DataError(
            f"{path}: the file cannot be opened ({error.strerror or error}), and it may be a slice. Correct its "
            "permissions or its link, or move it away if it belongs to no scan."
        ) from error
    if head[128:132] == b"DICM":
        return True
    return len(head) >= 8 and struct.unpack("<HH", head[:4])[0] in (2, 8) and struct.unpack("<HH", head[:4])[1] < 0x100


def dicom_modality(folder: Path) -> str | None:
    """Returns the Modality (CT, MR, ...) of the first image in a folder, or None if it holds no DICOM image."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_file() and is_dicom_file(path):
            slice_ = _read_header(path)
            if isinstance(slice_, Slice):
                return slice_.modality
    return None


def _scan(folder: Path) -> tuple[list[Slice], list[str]]:
    slices, skipped, empty = [], [], []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            continue
        header = _read_header(path) if is_dicom_file(path) else path.name
        if isinstance(header, Slice):
            slices.append(header)
            continue
        skipped.append(header)
        if not path.name.startswith(".") and path.stat().st_size == 0:
            empty.append(path.name)
    if slices and empty:
        raise DataError(
            f"{folder}: {len(empty)} empty files (0 bytes) lie among the DICOM slices and may have been slices: "
            f"{listing(empty)}. Copy or export them again, or move them away if they belong to no scan."
        )
    return slices, skipped


def _read_header(path: Path) -> Slice | str:
    """The slice in a DICOM file, or the name under which a file without an image is skipped."""
    try:
        dataset = pydicom.dcmread(path, stop_before_pixels=True, force=True, specific_tags=_TAGS)
        sop_class = UID(dataset.get("SOPClassUID") or dataset.file_meta.get("MediaStorageSOPClassUID") or "").name
        modality = str(dataset.get("Modality") or "")
        if modality in _NO_IMAGE_MODALITIES or sop_class == "Media Storage Directory Storage":
            return f"{path.name} ({modality or 'DICOMDIR'})"
        if dataset.get("Rows") and dataset.get("Columns"):
            return _slice(path, dataset, sop_class)
        if sop_class and "Image Storage" not in sop_class:
            return f"{path.name} ({modality or sop_class})"
        # A slice lost at the end of a stack leaves no gap: what may have been one is not skipped.
        raise DataError(
            f"{path}: a DICOM header ({sop_class or 'of no class'}) without Rows and Columns. Is the file complete? "
            "Copy or export it again, or move it away if it holds no image."
        )
    except DataError:
        raise
    except Exception as error:  # pydicom raises whatever the damaged bytes lead to
        raise DataError(f"{path}: the DICOM header cannot be read ({error}). Copy or export the file again.") from error


def _slice(path: Path, dataset: pydicom.Dataset, sop_class: str) -> Slice:
    placement = tuple(_numbers(dataset, tag, count) for tag, count in _GEOMETRY_TAGS.items())
    position, orientation, spacing = placement
    kind, problem = _content_problem(dataset, sop_class)
    if problem is None:
        kind, problem = _geometry_problem(placement)
    directions = orientation.reshape(-1, 3)
    if problem is None:
        directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    return Slice(
        path=path,
        series_uid=str(dataset.get("SeriesInstanceUID") or ""),
        description=str(dataset.get("SeriesDescription") or ""),
        modality=str(dataset.get("Modality") or ""),
        rows=int(dataset.Rows),
        columns=int(dataset.Columns),
        problem=problem,
        problem_kind=kind,
        directions=directions,
        position=position,
        pixel_spacing_mm=spacing,
        thickness_mm=float(dataset.get("SliceThickness") or 0),
        spacing_between_mm=abs(float(dataset.get("SpacingBetweenSlices") or 0)),
        photometric=str(dataset.get("PhotometricInterpretation") or ""),
        acquisition=tuple(str(dataset.get(tag) or "") for tag in _SPLIT_TAGS),
    )


def _content_problem(dataset: pydicom.Dataset, sop_class: str) -> tuple[str, str | None]:
    frames = int(dataset.get("NumberOfFrames") or 1)
    photometric = str(dataset.get("PhotometricInterpretation") or "MONOCHROME2")
    if frames > 1 or "Enhanced" in sop_class or "Multi-frame" in sop_class:
        return "content", (
            f"multi-frame ({frames} frames in one file, {sop_class or 'no SOP class'}), whose places are not read yet; "
            "convert it to NIfTI (dcm2niix) or to single frames"
        )
    image_type = dataset.get("ImageType") or []
    if "MOSAIC" in ([image_type] if isinstance(image_type, str) else [str(value) for value in image_type]):
        return "content", "a mosaic (many slices tiled in one image); convert it to NIfTI with dcm2niix"
    if int(dataset.get("SamplesPerPixel") or 1) != 1 or photometric not in ("MONOCHROME1", "MONOCHROME2"):
        return "colour", f"colour ({photometric}), no measurement; use the grey-scale series it was made from"
    if dataset.get("ModalityLUTSequence"):
        return "content", "values behind a Modality LUT, which is not read; export them with RescaleSlope and Intercept"
    return "", None


def _geometry_problem(placement: Sequence[np.ndarray]) -> tuple[str, str | None]:
    absent = [tag for tag, value in zip(_GEOMETRY_TAGS, placement, strict=True) if not value.size]
    if absent:
        return "geometry", (
            f"no usable {' and '.join(absent)}, so that the slices cannot be placed in the patient; export them again "
            "from the archive with these tags"
        )
    _, orientation, spacing = placement
    along, down = orientation[:3], orientation[3:]
    if max(abs(np.linalg.norm(along) - 1), abs(np.linalg.norm(down) - 1)) > ORTHONORMALITY_TOLERANCE:
        return "geometry", f"ImageOrientationPatient {orientation.tolist()} holds no unit vectors; correct the tag"
    if abs(along @ down) > ORTHONORMALITY_TOLERANCE:
        return "geometry", f"ImageOrientationPatient {orientation.tolist()} is not at right angles; correct the tag"
    if spacing.min() <= 0:
        return "geometry", f"PixelSpacing {spacing.tolist()} is not positive; correct the tag"
    return "", None


def _numbers(dataset: pydicom.Dataset, tag: str, count: int) -> np.ndarray:
    """The values of a top-level tag as float64, empty unless there are `count` finite ones."""
    value: Any = dataset.get(tag)
    numbers = np.array([float(v) for v in value] if isinstance(value, Sequence | pydicom.multival.MultiValue) else [])
    return numbers if numbers.size == count and np.isfinite(numbers).all() else np.zeros(0)


def _stacks(slices: Sequence[Slice]) -> list[list[Slice]]:
    groups: list[list[Slice]] = []
    for slice_ in slices:
        group = next((g for g in groups if _belong(g[0], slice_)), None)
        if group is None:
            groups.append([slice_])
        else:
            group.append(slice_)
    return [part for group in groups for part in _split_repeats(group)]


def _belong(a: Slice, b: Slice) -> bool:
    if (a.series_uid, a.rows, a.columns, a.problem) != (b.series_uid, b.rows, b.columns, b.problem):
        return False
    if a.problem:
        return True
    return bool(
        np.abs(a.directions - b.directions).max() <= ORIENTATION_TOLERANCE
        and np.abs(a.pixel_spacing_mm / b.pixel_spacing_mm - 1).max() <= ORIENTATION_TOLERANCE
    )


def _split_repeats(group: list[Slice]) -> list[list[Slice]]:
    """Parts a stack with repeated positions by echo, image type, acquisition or time point, if that explains them."""
    if group[0].problem or not positions_repeat(group) or np.ptp(distances_mm(group)) <= POSITION_TOLERANCE_MM:
        return [group]
    for i in range(len(_SPLIT_TAGS)):
        parts: dict[str, list[Slice]] = {}
        for slice_ in group:
            parts.setdefault(slice_.acquisition[i], []).append(slice_)
        if len(parts) > 1 and min(len(part) for part in parts.values()) > 1:
            return [piece for part in parts.values() for piece in _split_repeats(part)]
    return [group]


def _stack_of(path: Path, stacks: Sequence[list[Slice]]) -> list[Slice]:
    for stack in stacks:
        if any(slice_.path.name == path.name for slice_ in stack):
            return stack
    raise DataError(f"{path}: this DICOM file holds no image (RTSTRUCT, SEG or a report?). Give a slice of the series.")


def _only_stack(folder: Path, stacks: Sequence[list[Slice]]) -> list[Slice]:
    usable = [stack for stack in stacks if not stack[0].problem]
    if not usable:
        raise _refusal(folder, max(stacks, key=len))
    largest = max(usable, key=len)
    if all(stack is largest or _is_localizer_of(stack, largest) for stack in usable):
        return largest
    raise DataError(
        f"{folder}: {len(usable)} image stacks lie in this folder, and which one is meant is not guessed: "
        f"{'; '.join(_describe(stack) for stack in usable)}. Keep one stack per folder, or give one of its files as "
        "the path instead of the folder."
    )


def _is_localizer_of(stack: Sequence[Slice], largest: Sequence[Slice]) -> bool:
    return (
        stack[0].series_uid == largest[0].series_uid
        and len(stack) <= LOCALIZER_MAX_SLICES < len(largest)
        and bool(np.abs(stack[0].directions - largest[0].directions).max() > ORTHONORMALITY_TOLERANCE)
    )


def _account_for_others(path: Path, chosen: Sequence[Slice], others: Sequence[list[Slice]]) -> None:
    """Names what is set aside, and refuses if images that cannot be read may belong to, or be, what is meant.

    Colour images of another series (dose sheets, screenshots) never are.
    """
    for other in others:
        same_series = other[0].series_uid == chosen[0].series_uid
        named = path.is_file()
        if other[0].problem and (same_series or (other[0].problem_kind != "colour" and not named)):
            raise _refusal(path, other)
    if others:
        logger.warning(
            "%s: reading %s; set aside: %s", path, _describe(chosen), "; ".join(_describe(other) for other in others)
        )


def _refusal(path: Path, stack: Sequence[Slice]) -> DataError:
    kind = GeometryError if stack[0].problem_kind == "geometry" else DataError
    names = listing([slice_.path.name for slice_ in stack], 3)
    return kind(f"{path}: {len(stack)} images ({names}) cannot be read: {stack[0].problem}.")


def _describe(stack: Sequence[Slice]) -> str:
    slice_ = stack[0]
    spacing = " x ".join(f"{s:.4g}" for s in slice_.pixel_spacing_mm) or "unknown"
    echoes = Counter(s.acquisition[0] for s in stack)
    echo = f", echo time {next(iter(echoes))} ms" if len(echoes) == 1 and slice_.acquisition[0] else ""
    return (
        f"series {slice_.series_uid or 'without UID'} '{slice_.description}' ({slice_.modality or 'no modality'}): "
        f"{len(stack)} slices of {slice_.columns} x {slice_.rows}, pixel spacing {spacing} mm{echo}, "
        f"first file {slice_.path.name}{', unusable: ' + slice_.problem if slice_.problem else ''}"
    )
