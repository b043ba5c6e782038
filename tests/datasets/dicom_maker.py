"""Writes the small DICOM series of the fault reports: six slices of 8 x 10 int16, pixel value k, and every switch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    CTImageStorage,
    EnhancedCTImageStorage,
    ExplicitVRLittleEndian,
    LegacyConvertedEnhancedCTImageStorage,
    generate_uid,
)

ROWS, COLUMNS = 8, 10
PIXEL_SPACING = (1.0, 0.5)  # between rows, between columns
SLICE_SPACING = 2.0
AXIAL = (1, 0, 0, 0, 1, 0)
SERIES_UID = "1.2.826.0.1.3680043.8.498.1"


def straight(k: int) -> tuple[float, float, float]:
    return (0.0, 0.0, SLICE_SPACING * k)


def make_slice(
    k: int,
    *,
    position: Callable[[int], Sequence[float]] = straight,
    orientation: Sequence[float] = AXIAL,
    pixels: np.ndarray | None = None,
    without: Sequence[str] = (),
    **tags: Any,
) -> Dataset:
    """One slice; `tags` set or replace elements, `without` removes them, `pixels` is (rows, columns) of 16 bits."""
    stored = np.full((ROWS, COLUMNS), k, dtype=np.int16) if pixels is None else pixels
    dataset = Dataset()
    dataset.SOPClassUID = CTImageStorage
    dataset.SOPInstanceUID = generate_uid()
    dataset.SeriesInstanceUID = SERIES_UID
    dataset.SeriesDescription = "test series"
    dataset.Modality = "CT"
    dataset.InstanceNumber = k + 1
    dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.Rows, dataset.Columns = stored.shape[:2]
    dataset.PixelSpacing = list(PIXEL_SPACING)
    dataset.ImagePositionPatient = [float(p) for p in position(k)]
    dataset.ImageOrientationPatient = [float(d) for d in orientation]
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 16, 15
    dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    dataset.PixelData = stored.astype(stored.dtype.newbyteorder("<")).tobytes()
    for name, value in tags.items():
        setattr(dataset, name, value)
    for name in without:
        delattr(dataset, name)
    return dataset


def save_slice(path: Path, dataset: Dataset, syntax: str = ExplicitVRLittleEndian, meta: bool = True) -> Path:
    """Writes a slice as a DICOM file, or as a bare data set without preamble and meta header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not meta:
        dataset.save_as(path, implicit_vr=True, little_endian=True, enforce_file_format=False)
        return path
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = CTImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.get("SOPInstanceUID", generate_uid())
    dataset.save_as(path, enforce_file_format=True)
    return path


def make_series(folder: Path, ks: Sequence[int] = range(6), prefix: str = "", **switches: Any) -> Path:
    """Writes slices `ks` as {prefix}{k}.dcm; a switch that is a function of k is called for every slice."""
    for k in ks:
        values = {
            name: value(k) if callable(value) and name != "position" else value for name, value in switches.items()
        }
        save_slice(folder / f"{prefix}{k}.dcm", make_slice(k, **values))
    return folder


def make_frames(
    path: Path,
    ks: Sequence[int] = range(6),
    *,
    position: Callable[[int], Sequence[float]] = straight,
    orientation: Sequence[float] = AXIAL,
    pixels: Callable[[int], np.ndarray] | None = None,
    rescale: Callable[[int], tuple[float, float]] | None = lambda k: (1.0, 0.0),
    frame_content: Callable[[int], dict[str, Any]] = lambda k: {},
    shared_orientation: bool = True,
    legacy: bool = False,
    syntax: str = ExplicitVRLittleEndian,
    **tags: Any,
) -> Path:
    """Writes slices `ks`, in that order, as one Enhanced CT (or its legacy-converted kin) with functional groups."""
    sop_class = LegacyConvertedEnhancedCTImageStorage if legacy else EnhancedCTImageStorage
    stored = [np.full((ROWS, COLUMNS), k, np.int16) if pixels is None else pixels(k) for k in ks]
    dataset = make_slice(0, pixels=stored[0], **{"SOPClassUID": sop_class, "NumberOfFrames": len(stored)} | tags)
    for name in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "InstanceNumber"):
        delattr(dataset, name)
    dataset.StudyInstanceUID, dataset.FrameOfReferenceUID = "1.2.826.0.1.3680043.8.498.2", "1.2.826.0.1.3680043.8.498.3"
    shared = Dataset()
    shared.PixelMeasuresSequence = [_item(PixelSpacing=list(PIXEL_SPACING), SliceThickness=2.0)]
    plane_orientation = [_item(ImageOrientationPatient=[float(d) for d in orientation])]
    if shared_orientation:
        shared.PlaneOrientationSequence = plane_orientation
    dataset.SharedFunctionalGroupsSequence = [shared]
    dataset.PerFrameFunctionalGroupsSequence = []
    for k in ks:
        groups = Dataset()
        groups.PlanePositionSequence = [_item(ImagePositionPatient=[float(p) for p in position(k)])]
        groups.FrameContentSequence = [_item(**frame_content(k))]
        if not shared_orientation:
            groups.PlaneOrientationSequence = plane_orientation
        if rescale is not None:
            slope, intercept = rescale(k)
            values = _item(RescaleSlope=slope, RescaleIntercept=intercept, RescaleType="HU")
            groups.PixelValueTransformationSequence = [values]
        dataset.PerFrameFunctionalGroupsSequence.append(groups)
    dataset.PixelData = b"".join(frame.astype(frame.dtype.newbyteorder("<")).tobytes() for frame in stored)
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.MediaStorageSOPClassUID = sop_class
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    if syntax != ExplicitVRLittleEndian:
        dataset.compress(syntax)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def _item(**tags: Any) -> Dataset:
    item = Dataset()
    for name, value in tags.items():
        setattr(item, name, value)
    return item
