"""DICOM Segmentation objects out: label maps that viewers lay over the series they were made from.

highdicom makes the object. Here the source's headers are brought into the shape that it asks for, the planes are put
in the order of the slices, and the classes get their codes. Reading one back is datasets/dicom_seg.py.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from medckpt.datasets.dicom_seg import VALUE_TEXT, read_dicom_seg
from medckpt.datasets.dicom_series import choose_stack
from medckpt.datasets.segment_codes import Code, SegmentCode, default_code
from medckpt.errors import DataError
from medckpt.files import write_atomic
from medckpt.geometry import LPS_TO_RAS, SPACING_TOLERANCE_MM, Grid

__all__ = ["SegType", "read_dicom_seg", "write_dicom_seg"]

SegType = Literal["binary", "labelmap"]

_EMPTY_IF_ABSENT = (  # type 2: has to be there, may be empty
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyID", "StudyDate", "StudyTime"),
    *("AccessionNumber", "ReferringPhysicianName"),
)
_LONGEST_LABEL = 64  # characters of an LO
_SERIES_NUMBER_OFFSET = 1000

logger = logging.getLogger("medckpt")


def write_dicom_seg(
    path: Path,
    array: np.ndarray,
    grid: Grid,
    series: Path,
    labels: Mapping[str, int],
    *,
    codes: Mapping[str, SegmentCode] | None = None,
    seg_type: SegType = "binary",
    omit_empty_frames: bool = True,
    moment: datetime.datetime | None = None,
) -> None:
    """Writes a label map as a DICOM Segmentation on the series it was made from.

    `binary` (SOP class Segmentation Storage, one bit per voxel and class) is what 3D Slicer, OHIF, dcmqi, pydicom-seg
    and every PACS of today open; it is the default. `labelmap` (Label Map Segmentation Storage, standard of 2024) is
    one frame per slice whatever the number of classes, which many readers do not know yet.

    Every class is described as a segment, whether it occurs or not; frames without a voxel are left out. If nothing
    was found at all, one empty frame per segment says so, and a warning. The same input gives the same file but for
    its UIDs, and for date and time, which `moment` fixes. The file appears whole or not at all.

    Args:
        path: ends in .dcm; its folder is made if need be.
        array: (X, Y, Z) integers of `grid.shape`: X along a row of pixels, Y down the rows, Z along the slices.
        grid: where the voxels lie.
        series: the folder of the source series, or one of its files.
        labels: value by class name, background (0) included or not.
        codes: coded meaning by class name; `default_code` has the others.
        seg_type: as above.
        omit_empty_frames: False keeps a frame for every slice (and class), for readers that expect it.
        moment: when the content was made; now by default.

    Raises:
        DataError: another suffix or shape, values that are no label, a series without the identifiers that a
            reference needs; or the file cannot be written.
        GeometryError: the series cannot be placed; see `choose_stack`.
    """
    if path.suffix.lower() != ".dcm":
        raise DataError(f"{path}: a DICOM Segmentation is written as .dcm; give the file that ending.")
    if array.shape != grid.shape:
        raise DataError(f"{path}: the label map has shape {array.shape} but its grid {grid.shape}.")
    classes = {name: int(value) for name, value in sorted(labels.items(), key=lambda item: item[1]) if value}
    planes, numbers = _planes(array, classes, seg_type, path)
    sources = _source_headers(series, grid)
    if not planes.any():
        logger.warning("%s: no voxel of any class was found; the segmentation is empty.", path)
        # highdicom would keep every frame of every segment: it is given one plane.
        planes, omit_empty_frames = planes[:1] if omit_empty_frames else planes, False
    place = _placement(sources, grid, len(planes))
    described = _descriptions(classes, numbers, codes or {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on what the source's patient and study are called
            made = _segmentation(planes, sources, place, described, seg_type, omit_empty_frames, moment)
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # how highdicom says that a header will not do
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{series}: no DICOM Segmentation can be made on this series ({reason}). Write .nii.gz instead."
        ) from error
    write_atomic(path, lambda stream: made.save_as(stream, enforce_file_format=True))


def _planes(
    array: np.ndarray, classes: Mapping[str, int], seg_type: SegType, path: Path
) -> tuple[np.ndarray, dict[str, int]]:
    """Segment numbers (slices, rows, columns), and the number of each class.

    A binary segmentation counts its segments from 1 without gaps; a label map's numbers are the label values.
    """
    values = list(classes.values())
    if not values:
        raise DataError(f"{path}: there is no class beside the background, so there is no segment to write.")
    if max(values) > 65535 or len(values) > 65535:
        raise DataError(f"{path}: label value {max(values)}: DICOM takes segments up to 65535. Write .nii.gz instead.")
    unknown = sorted(set(np.unique(array).tolist()) - {0, *values})
    if unknown:
        raise DataError(f"{path}: value {unknown[0]} in the label map is none of the labels {dict(classes)}.")
    numbers = {name: rank if seg_type == "binary" else classes[name] for rank, name in enumerate(classes, start=1)}
    table = np.zeros(max(values) + 1, dtype=np.uint8 if max(numbers.values()) < 256 else np.uint16)
    for name, value in classes.items():
        table[value] = numbers[name]
    return np.ascontiguousarray(table[array].transpose(2, 1, 0)), numbers


def _descriptions(
    classes: Mapping[str, int], numbers: Mapping[str, int], codes: Mapping[str, SegmentCode]
) -> list[Any]:
    """One SegmentDescription per class, with our version, a tracking identifier and the label value."""
    import highdicom
    from pydicom.sr.codedict import codes as dicom
    from pydicom.sr.coding import Code as DicomCode
    from pydicom.uid import generate_uid

    def coded(code: Code) -> DicomCode:
        value, scheme, meaning = code
        return DicomCode(value=value, scheme_designator=scheme, meaning=meaning)

    algorithm = highdicom.AlgorithmIdentificationSequence(
        name="medckpt", version=importlib.metadata.version("medckpt"), family=dicom.CID7162.ArtificialIntelligence
    )
    described = []
    for name, value in classes.items():
        code = codes.get(name) or default_code(name)
        label = name.replace("\\", "/")[:_LONGEST_LABEL].strip() or f"class {value}"
        item = highdicom.seg.SegmentDescription(
            segment_number=numbers[name],
            segment_label=label,
            segmented_property_category=coded(code.category) if code.category else dicom.CID7150.AnatomicalStructure,
            segmented_property_type=coded(code.type),
            algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
            tracking_id=label,
            tracking_uid=generate_uid(),
        )
        if code.modifier:
            modifier = highdicom.sr.CodedConcept.from_code(coded(code.modifier))
            item.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence = [modifier]
        item.SegmentDescription = f"{VALUE_TEXT.format(value)}: {name}"
        described.append(item)
    return described


def _source_headers(series: Path, grid: Grid) -> list[Any]:
    """The headers of the series without pixels, in the order of the slices, as highdicom can take them."""
    import pydicom
    from pydicom.uid import generate_uid
    from pydicom.valuerep import format_number_as_ds

    stack = choose_stack(series)
    along = LPS_TO_RAS[:3, :3] @ grid.affine[:3, 2]
    files = [slice_.path for slice_ in sorted(stack, key=lambda slice_: float(slice_.position @ along))]
    headers = [pydicom.dcmread(file, stop_before_pixels=True, force=True) for file in dict.fromkeys(files)]
    made_up: str | None = None
    for file, header in zip(dict.fromkeys(files), headers, strict=True):
        for tag, kept in (("SOPClassUID", "MediaStorageSOPClassUID"), ("SOPInstanceUID", "MediaStorageSOPInstanceUID")):
            if not header.get(tag) and kept in header.file_meta:
                setattr(header, tag, header.file_meta[kept].value)
        absent = [
            tag
            for tag in ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
            if not header.get(tag)
        ]
        if absent:
            raise DataError(
                f"{file}: no {' and '.join(absent)}, so that a DICOM Segmentation cannot refer to it. Write .nii.gz "
                "instead, or export the series again."
            )
        if not header.get("FrameOfReferenceUID"):
            made_up = made_up or generate_uid(entropy_srcs=[str(header.SeriesInstanceUID)])
            header.FrameOfReferenceUID = made_up
        _complete_patient(header)
        if "ImageOrientationPatient" in header:
            # Rounded differently from slice to slice (within ORIENTATION_TOLERANCE), they are one orientation.
            header.ImageOrientationPatient = headers[0].ImageOrientationPatient
            header.SliceThickness = header.get("SliceThickness") or format_number_as_ds(grid.spacing_mm[2])
            header.SpacingBetweenSlices = format_number_as_ds(grid.spacing_mm[2])  # the tag may mean a gap
        elif header.get("PerFrameFunctionalGroupsSequence"):
            # highdicom looks for these in the shared groups, some scanners write them into every frame.
            shared, first = header.SharedFunctionalGroupsSequence[0], header.PerFrameFunctionalGroupsSequence[0]
            for name in ("PixelMeasuresSequence", "PlaneOrientationSequence"):
                if name not in shared and name in first:
                    setattr(shared, name, first[name].value)
    if made_up:
        logger.warning("%s: no FrameOfReferenceUID; the segmentation gets one, the series has none", series)
    return headers


def _complete_patient(header: Any) -> None:
    """Puts in what the standard wants to be there, and takes out what it does not allow."""
    from pydicom.valuerep import DA, TM

    for tag in _EMPTY_IF_ABSENT:
        if tag not in header:
            setattr(header, tag, None)
    for tag, kind in (("PatientBirthDate", DA), ("StudyDate", DA), ("StudyTime", TM)):
        try:
            kind(str(header.get(tag) or ""))
        except (ValueError, TypeError):
            setattr(header, tag, None)
    if header.get("PatientSex") not in ("M", "F", "O"):
        header.PatientSex = None
    if not header.get("Modality"):
        header.Modality = "OT"
    # What is copied is text already and is written as UTF-8, whatever the source's character set is called.
    header.decode()


def _placement(sources: Sequence[Any], grid: Grid, depth: int) -> dict[str, Any]:
    """highdicom's words for where the first `depth` planes lie; none where they are the source's own, one by one."""
    import highdicom

    affine = LPS_TO_RAS @ grid.affine
    positions = affine[:3, 3] + np.arange(depth)[:, None] * affine[:3, 2]
    single = all("ImagePositionPatient" in source for source in sources)
    if single and len(sources) == len(positions) and (sources[0].Columns, sources[0].Rows) == grid.shape[:2]:
        stored = np.array([source.ImagePositionPatient for source in sources], dtype=np.float64)
        if np.linalg.norm(stored - positions, axis=1).max() <= 2 * SPACING_TOLERANCE_MM:
            return {}
    x, y, z = grid.spacing_mm
    return {
        "plane_orientation": highdicom.PlaneOrientationSequence(
            "PATIENT", [*(affine[:3, 0] / x).tolist(), *(affine[:3, 1] / y).tolist()]
        ),
        "pixel_measures": highdicom.PixelMeasuresSequence(
            pixel_spacing=[y, x], slice_thickness=z, spacing_between_slices=z
        ),
        "plane_positions": [highdicom.PlanePositionSequence("PATIENT", position.tolist()) for position in positions],
    }


def _segmentation(
    planes: np.ndarray,
    sources: list[Any],
    place: dict[str, Any],
    descriptions: list[Any],
    seg_type: SegType,
    omit_empty_frames: bool,
    moment: datetime.datetime | None,
) -> Any:
    import highdicom
    from pydicom.uid import generate_uid

    when = moment or datetime.datetime.now()
    first = sources[0]
    number = first.get("SeriesNumber")
    description = str(first.get("SeriesDescription") or "").replace("\\", "/")
    segmentation: Any = highdicom.seg.Segmentation(
        source_images=sources,
        pixel_array=planes,
        segmentation_type=seg_type.upper(),
        segment_descriptions=descriptions,
        series_instance_uid=generate_uid(),
        series_number=_SERIES_NUMBER_OFFSET + max(0, int(number)) if number is not None else _SERIES_NUMBER_OFFSET,
        sop_instance_uid=generate_uid(),
        instance_number=1,
        manufacturer="medckpt",
        manufacturer_model_name="medckpt",
        software_versions=importlib.metadata.version("medckpt"),
        device_serial_number="1",
        content_label="SEGMENTATION",
        content_description="Segmentation by medckpt",
        series_description=f"Segmentation {description}".strip()[:_LONGEST_LABEL],
        content_date=when.date(),
        content_time=when.time(),
        omit_empty_frames=omit_empty_frames,
        specific_character_set="ISO_IR 192",
        **place,
    )
    segmentation.InstanceCreationDate, segmentation.InstanceCreationTime = when.date(), when.time()
    for item in segmentation.get("ContributingEquipmentSequence", [])[-1:]:  # the last is highdicom itself
        item.ContributionDateTime = when
    _pack(segmentation)
    return segmentation


def _pack(segmentation: Any) -> None:
    """Brings PixelData into the length that the standard gives it, padded with 0.

    highdicom 0.28 pads with the letter "0", and gives each binary frame of less than 8 pixels a byte of its own.
    """
    frame = int(segmentation.Rows) * int(segmentation.Columns)
    pixels = bytes(segmentation.PixelData)
    if segmentation.BitsAllocated == 1 and frame < 8:
        bytes_of_frames = np.frombuffer(pixels, np.uint8)[: int(segmentation.NumberOfFrames)]
        bits = np.unpackbits(bytes_of_frames[:, None], axis=1, bitorder="little")[:, :frame]
        pixels = np.packbits(bits.ravel(), bitorder="little").tobytes()
    used = -(-int(segmentation.NumberOfFrames) * frame * int(segmentation.BitsAllocated) // 8)
    segmentation.PixelData = pixels[:used] + bytes(used % 2)
