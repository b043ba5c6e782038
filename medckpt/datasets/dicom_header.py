"""One DICOM file's header: the images in it, where each lies in the patient, and how its pixels are stored.

A single-frame file holds one image, placed by its top-level tags. An enhanced or legacy-converted multi-frame file
holds many, placed by its functional groups (those of the frame before the shared ones). What cannot be placed or read
without guessing keeps a `problem` that says why.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pydicom
from pydicom.datadict import tag_for_keyword
from pydicom.uid import UID, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from medckpt.datasets.dicom_frames import FRAME_TAGS, frame_tags, frames_problem
from medckpt.errors import DataError
from medckpt.geometry import ORTHONORMALITY_TOLERANCE

GEOMETRY_TAGS = {"ImagePositionPatient": 3, "ImageOrientationPatient": 6, "PixelSpacing": 2}  # number of values
SPLIT_TAGS = ("EchoTime", "ImageType", "AcquisitionNumber", "TemporalPositionIdentifier", "DiffusionBValue")
"""What tells volumes at the same positions apart, tried in this order."""

_ORDER_TAGS = ("AcquisitionDate", "AcquisitionTime", "InstanceNumber")
_NAMES = [
    *("SOPClassUID", "Modality", "SeriesInstanceUID", "SeriesDescription", "Rows", "Columns", "NumberOfFrames"),
    *("SamplesPerPixel", "PhotometricInterpretation", "SliceThickness", "SpacingBetweenSlices", "PatientPosition"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope", "RescaleIntercept"),
    *("ModalityLUTSequence", *GEOMETRY_TAGS, *SPLIT_TAGS, *_ORDER_TAGS, *FRAME_TAGS),
]
_TAGS: list[Any] = [tag_for_keyword(name) for name in _NAMES]
# Objects that carry no image of their own (or, with Rows, none of the scanner's): skipped with a count.
_NO_IMAGE_MODALITIES = {"RTSTRUCT", "SEG", "RTDOSE", "RTPLAN", "RTRECORD", "SR", "PR", "KO", "REG", "RWV", "DOC", "FID"}
_NATIVE = (ExplicitVRLittleEndian, ImplicitVRLittleEndian)
_PIXEL_DATA = (0x7FE0, 0x0010)
_Tags = pydicom.Dataset | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How the pixels of one image are stored, and what makes them real values.

    `offset` is where the image's first byte lies in its file, None where a decoder of pydicom has to find it
    (compressed, big-endian, deflated, or not as long as the header says).
    """

    syntax: str
    offset: int | None
    bits_allocated: int
    bits_stored: int
    signed: bool
    slope: float
    intercept: float
    rescale_tags: tuple[str, ...] = ()
    """Which of RescaleSlope and RescaleIntercept the header has; without them values are as stored."""

    @property
    def exact_int16(self) -> bool:
        """Whether every value that the bits allow, rescaled, is a whole number that int16 holds."""
        if not (self.slope.is_integer() and self.intercept.is_integer()):
            return False
        low = -(2 ** (self.bits_stored - 1)) if self.signed else 0
        span = 2**self.bits_stored - 1
        ends = [self.slope * value + self.intercept for value in (low, low + span)]
        return min(ends) >= -(2**15) and max(ends) < 2**15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """The header of one image (a file, or one frame of it), as far as it places, sorts and decodes the image.

    `problem` says why it cannot be used and `problem_kind` what is wrong: "content", "colour" or "geometry". Then
    `directions` ((2, 3): along a row, down a column; LPS unit vectors), `position` (LPS mm) and `pixel_spacing_mm`
    (between rows, between columns) may be empty.
    """

    path: Path
    frame: int | None
    """Number of the frame from 0 in a multi-frame file; None for a file with one image."""
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
    patient_position: str
    acquisition: tuple[str, ...]
    """The values of `SPLIT_TAGS`."""
    acquired: tuple[str, str, int]
    """Date, time and InstanceNumber: which of two images at one place came first."""
    stored: Stored

    @property
    def name(self) -> str:
        """File name, and the number of the frame from 1 if there are several."""
        return self.path.name if self.frame is None else f"{self.path.name} frame {self.frame + 1}"

    @property
    def normal(self) -> np.ndarray:
        """(3,) LPS unit vector: along a row times down a column."""
        normal = np.cross(self.directions[0], self.directions[1])
        return normal / np.linalg.norm(normal)


def is_dicom_file(path: Path) -> bool:
    """Says whether a file is DICOM: by the mark after the preamble, or (old files) by starting with group 2 or 8.

    Raises:
        DataError: the file cannot be opened, so that it may be a slice; hidden files (a leading dot) are none.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for without end
            return False
        with path.open("rb") as file:
            return _is_dicom(file.read(132))
    except OSError as error:
        if path.name.startswith("."):
            return False
        raise _unopenable(path, error) from error


def read_header(path: Path) -> list[Slice] | str:
    """Returns the images of a file, or the name under which a file without one is skipped.

    Raises:
        DataError: a file that cannot be opened, or a DICOM header that cannot be read: either may be a slice.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return path.name
        with path.open("rb") as file:
            if not _is_dicom(file.read(132)):
                return path.name
            file.seek(0)
            return _images(path, file)
    except DataError:
        raise
    except OSError as error:
        if path.name.startswith("."):
            return path.name
        raise _unopenable(path, error) from error
    except Exception as error:  # pydicom raises whatever the damaged bytes lead to
        raise DataError(f"{path}: the DICOM header cannot be read ({error}). Copy or export the file again.") from error


def _unopenable(path: Path, error: OSError) -> DataError:
    # A slice lost at the end of a stack leaves no gap: what may have been one is not skipped.
    return DataError(
        f"{path}: the file cannot be opened ({error.strerror or error}), and it may be a slice. Correct its "
        "permissions or its link, or move it away if it belongs to no scan."
    )


def _is_dicom(head: bytes) -> bool:
    if head[128:132] == b"DICM":
        return True
    return len(head) >= 8 and struct.unpack("<HH", head[:4])[0] in (2, 8) and struct.unpack("<HH", head[:4])[1] < 0x100


def _images(path: Path, file: BinaryIO) -> list[Slice] | str:
    dataset = pydicom.dcmread(file, stop_before_pixels=True, force=True, specific_tags=_TAGS)
    sop_class = UID(dataset.get("SOPClassUID") or dataset.file_meta.get("MediaStorageSOPClassUID") or "").name
    modality = str(dataset.get("Modality") or "")
    if modality in _NO_IMAGE_MODALITIES or sop_class == "Media Storage Directory Storage":
        return f"{path.name} ({modality or 'DICOMDIR'})"
    if not (dataset.get("Rows") and dataset.get("Columns")):
        if sop_class and "Image Storage" not in sop_class:
            return f"{path.name} ({modality or sop_class})"
        # A slice lost at the end of a stack leaves no gap: what may have been one is not skipped.
        raise DataError(
            f"{path}: a DICOM header ({sop_class or 'of no class'}) without Rows and Columns. Is the file complete? "
            "Copy or export it again, or move it away if it holds no image."
        )
    frames = int(dataset.get("NumberOfFrames") or 1)
    several = frames > 1 or "Enhanced" in sop_class or "Multi-frame" in sop_class
    problem = frames_problem(dataset, frames, sop_class, modality, several)
    start, syntax = _pixel_start(dataset, file, frames), str(dataset.file_meta.get("TransferSyntaxUID") or "")
    if not several or problem:
        return [_slice(path, dataset, None, problem, start, syntax)]
    size = int(dataset.Rows) * int(dataset.Columns) * int(dataset.get("BitsAllocated") or 16) // 8
    starts: Iterator[int | None] = (None if start is None else start + number * size for number in range(frames))
    placed = zip(frame_tags(dataset), starts, strict=True)
    return [_slice(path, tags, number, None, at, syntax) for number, (tags, at) in enumerate(placed)]


def _pixel_start(dataset: pydicom.Dataset, file: BinaryIO, frames: int) -> int | None:
    """Where the first pixel lies, if the pixels are plain little-endian numbers and all there; else None.

    pydicom leaves the file at the element it stopped before.
    """
    syntax = dataset.file_meta.get("TransferSyntaxUID")
    bits = int(dataset.get("BitsAllocated") or 0)
    stored, high = int(dataset.get("BitsStored") or 0), dataset.get("HighBit")
    if syntax not in _NATIVE or bits not in (8, 16, 32) or not 0 < stored <= bits or high not in (None, stored - 1):
        return None
    place = file.tell()
    head = file.read(12)
    explicit = syntax == ExplicitVRLittleEndian
    if (
        len(head) < 12
        or struct.unpack("<HH", head[:4]) != _PIXEL_DATA
        or (explicit and head[4:6] not in (b"OW", b"OB"))
    ):
        return None
    length = struct.unpack("<I", head[8:12] if explicit else head[4:8])[0]
    start = place + (12 if explicit else 8)
    expected = int(dataset.Rows) * int(dataset.Columns) * bits // 8 * frames
    whole = length == expected + expected % 2 and file.seek(0, 2) >= start + expected
    return start if whole else None


def _slice(path: Path, tags: _Tags, frame: int | None, problem: str | None, start: int | None, syntax: str) -> Slice:
    placement = tuple(_numbers(tags, tag, count) for tag, count in GEOMETRY_TAGS.items())
    position, orientation, spacing = placement
    kind = "content" if problem else ""
    if problem is None:
        kind, problem = _content_problem(tags)
    if problem is None:
        kind, problem = _geometry_problem(placement)
    directions = orientation.reshape(-1, 3)
    if problem is None:
        directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    return Slice(
        path=path,
        frame=frame,
        series_uid=str(tags.get("SeriesInstanceUID") or ""),
        description=str(tags.get("SeriesDescription") or ""),
        modality=str(tags.get("Modality") or ""),
        rows=int(tags.get("Rows") or 0),
        columns=int(tags.get("Columns") or 0),
        problem=problem,
        problem_kind=kind,
        directions=directions,
        position=position,
        pixel_spacing_mm=spacing,
        thickness_mm=float(tags.get("SliceThickness") or 0),
        spacing_between_mm=abs(float(tags.get("SpacingBetweenSlices") or 0)),
        photometric=str(tags.get("PhotometricInterpretation") or ""),
        patient_position=str(tags.get("PatientPosition") or ""),
        acquisition=tuple(str(tags.get(tag) or "") for tag in SPLIT_TAGS),
        acquired=(str(tags.get("AcquisitionDate") or ""), str(tags.get("AcquisitionTime") or ""), _instance(tags)),
        stored=_stored(tags, start, syntax),
    )


def _instance(tags: _Tags) -> int:
    try:
        return int(tags.get("InstanceNumber") or 0)
    except (TypeError, ValueError):  # it places nothing, so that nonsense in it harms nothing
        return 0


def _stored(tags: _Tags, start: int | None, syntax: str) -> Stored:
    bits = int(tags.get("BitsAllocated") or 16)
    slope, intercept = tags.get("RescaleSlope"), tags.get("RescaleIntercept")
    return Stored(
        syntax=syntax,
        offset=start,
        bits_allocated=bits,
        bits_stored=int(tags.get("BitsStored") or bits),
        signed=bool(tags.get("PixelRepresentation")),
        slope=1.0 if slope is None else float(slope),
        intercept=0.0 if intercept is None else float(intercept),
        rescale_tags=tuple(tag for tag in ("RescaleSlope", "RescaleIntercept") if tags.get(tag) is not None),
    )


def _content_problem(tags: _Tags) -> tuple[str, str | None]:
    image_type = tags.get("ImageType") or []
    if "MOSAIC" in ([image_type] if isinstance(image_type, str) else [str(value) for value in image_type]):
        return "content", "a mosaic (many slices tiled in one image); convert it to NIfTI with dcm2niix"
    photometric = str(tags.get("PhotometricInterpretation") or "MONOCHROME2")
    if int(tags.get("SamplesPerPixel") or 1) != 1 or photometric not in ("MONOCHROME1", "MONOCHROME2"):
        return "colour", f"colour ({photometric}), no measurement; use the grey-scale series it was made from"
    if tags.get("ModalityLUTSequence"):
        return "content", "values behind a Modality LUT, which is not read; export them with RescaleSlope and Intercept"
    slope, intercept = tags.get("RescaleSlope"), tags.get("RescaleIntercept")
    if slope is not None and float(slope) == 0:
        return "content", "RescaleSlope is 0, which erases the image; correct the tag or leave it out"
    if not np.isfinite([float(value) for value in (slope, intercept) if value is not None]).all():
        return "content", f"RescaleSlope {slope} and RescaleIntercept {intercept} are no numbers; correct the tags"
    absent = [tag for tag in ("BitsAllocated", "BitsStored") if not tags.get(tag)]
    if tags.get("PixelRepresentation") not in (0, 1):
        absent.append("PixelRepresentation")
    if absent:  # a guess would be off by 65536, or by what the bits above BitsStored hold
        return "content", f"no usable {' and '.join(absent)}, so that its numbers cannot be told; export them again"
    stored, high = tags.get("BitsStored"), tags.get("HighBit")
    if stored is not None and high is not None and int(high) != int(stored) - 1:
        return "content", f"HighBit {high} beside BitsStored {stored}, which DICOM no longer allows; export them again"
    return "", None


def _geometry_problem(placement: Sequence[np.ndarray]) -> tuple[str, str | None]:
    absent = [tag for tag, value in zip(GEOMETRY_TAGS, placement, strict=True) if not value.size]
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


def _numbers(tags: _Tags, tag: str, count: int) -> np.ndarray:
    """The values of a tag as float64, empty unless there are `count` finite ones."""
    value: Any = tags.get(tag)
    numbers = np.array([float(v) for v in value] if isinstance(value, Sequence | pydicom.multival.MultiValue) else [])
    return numbers if numbers.size == count and np.isfinite(numbers).all() else np.zeros(0)
