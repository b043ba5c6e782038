"""DICOM Segmentations in: ours, those of others, and real ones, laid onto the grid of their scan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import highdicom
import numpy as np
import pydicom
import pytest
from pydicom.sr.codedict import codes
from pydicom.uid import generate_uid

from medckpt.datasets.dicom_seg import read_dicom_seg
from medckpt.datasets.layouts import open_dataset
from medckpt.datasets.prepare import read_case_label
from medckpt.datasets.reading import read_label, read_volume
from medckpt.errors import DataError, GeometryError
from medckpt.geometry import resample
from medckpt.inference.dicom_seg import write_dicom_seg
from tests.conftest import shared_data
from tests.inference.seg_series import LABELS, labels_of, series

# Reading what others wrote


def change(file: Path, how: Callable[[pydicom.Dataset], None]) -> Path:
    ds = pydicom.dcmread(file)
    how(ds)
    ds.save_as(file)
    return file


def test_what_is_not_read(tmp_path: Path) -> None:
    scan = series(tmp_path / "ct")
    volume = read_volume(scan)
    expected = labels_of(volume.array)

    def written(labels: dict[str, int] = LABELS) -> Path:
        write_dicom_seg(tmp_path / "seg.dcm", expected, volume.grid, scan, labels)
        return tmp_path / "seg.dcm"

    def move(mm: float) -> Callable[[pydicom.Dataset], None]:
        def shift(ds: pydicom.Dataset) -> None:
            for own in ds.PerFrameFunctionalGroupsSequence:
                own.PlanePositionSequence[0].ImagePositionPatient[0] += mm

        return shift

    def overlap(ds: pydicom.Dataset) -> None:
        ds.PixelData = b"\xff" * len(ds.PixelData)

    with pytest.raises(DataError, match=r"no DICOM Segmentation"):
        read_dicom_seg(scan / "0.dcm")
    with pytest.raises(DataError, match=r"segments Läsion are not among .* \(background, liver\)"):
        read_dicom_seg(written(), onto=volume.grid, labels={"background": 0, "liver": 1})
    with pytest.raises(GeometryError, match=r"does not lie on the voxels of the scan \(up to 0\.2 mm"):
        read_dicom_seg(change(written(), move(0.2)), onto=volume.grid)
    with pytest.raises(GeometryError, match="voxels outside of the scan"):
        read_dicom_seg(change(written(), move(2.0)), onto=volume.grid)
    with pytest.raises(DataError, match="segments overlap: 80 voxels belong to both 2 and 7"):
        read_dicom_seg(change(written(), overlap), onto=volume.grid)
    file = written()
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"seg\.dcm.*(cannot be read|does not decode).*Copy it again"):
        read_dicom_seg(file, onto=volume.grid)


def test_a_segmentation_by_highdicom_alone(tmp_path: Path) -> None:
    """No note of ours in it: segment numbers are values; frames in any order, none of an empty slice."""
    scan = series(tmp_path / "ct", "coronal")
    volume = read_volume(scan)
    expected = labels_of(volume.array)
    expected = np.searchsorted([0, 2, 7], expected)
    expected[:, :, 2] = 0
    slices = [pydicom.dcmread(scan / f"{k}.dcm") for k in (3, 1, 5, 0, 4, 2)]
    masks = np.stack([np.searchsorted([0, 2, 7], labels_of(ds.pixel_array)) for ds in slices]).astype(np.uint8)
    masks[-1] = 0
    for ds in slices:
        for tag in ("PatientID", "PatientBirthDate", "PatientSex", "StudyID", "StudyDate", "StudyTime"):
            setattr(ds, tag, "")
        ds.AccessionNumber = ""
    code = codes.SCT.Tissue
    highdicom.seg.Segmentation(
        slices, masks, "FRACTIONAL",
        [highdicom.seg.SegmentDescription(n, f"s{n}", code, code, "MANUAL") for n in (1, 2)],
        generate_uid(), 1, generate_uid(), 1, "maker", "model", "1", "1",
    ).save_as(tmp_path / "seg.dcm")  # fmt: skip
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid).array, expected)
    named = read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid, labels={"s1": 5, "s2": 1})
    np.testing.assert_array_equal(named.array, np.select([expected == 1, expected == 2], [5, 1]))

    def soften(ds: pydicom.Dataset) -> None:
        ds.PixelData = bytes([100]) + ds.PixelData[1:]

    with pytest.raises(DataError, match="fractional, 1 pixels of frame 1 lie between 0 and 255"):
        read_dicom_seg(change(tmp_path / "seg.dcm", soften), onto=volume.grid)


def test_a_segmentation_is_the_label_of_a_case(tmp_path: Path) -> None:
    """Listed in dataset.json; its segments are told apart by the data set's own names."""
    scan = series(tmp_path / "ct")
    volume = read_volume(scan)
    expected = labels_of(volume.array)
    expected[:, :, 4] = 0
    write_dicom_seg(tmp_path / "seg.dcm", expected, volume.grid, scan, LABELS)
    labels = {"background": 0, "Läsion": 1, "liver": 2}
    listed = {"p1": {"images": ["ct"], "label": "seg.dcm"}}
    (tmp_path / "dataset.json").write_text(
        json.dumps({"channel_names": {"0": "CT"}, "labels": labels, "dataset": listed})
    )
    dataset = open_dataset(tmp_path)
    label = read_case_label(dataset.cases[0], dataset, volume.grid)
    np.testing.assert_array_equal(label.array, np.select([expected == 7, expected == 2], [1, 2]))


# Real files


def test_real_ct_with_26_organs(tmp_path: Path) -> None:
    """Its files lack all identifiers but their own; with those of study and series put in, it is like any other."""
    stripped = shared_data("totalsegmentator/ct_dicom_j2k")
    scan = tmp_path / "ct"
    scan.mkdir()
    for file in stripped.iterdir():
        ds = pydicom.dcmread(file)
        ds.StudyInstanceUID, ds.SeriesInstanceUID = "1.2.826.0.1.3680043.8.498.4", "1.2.826.0.1.3680043.8.498.5"
        ds.save_as(scan / file.name)
    reference = read_label(shared_data("totalsegmentator/ct_dicom_seg117.nii.gz"))
    grid = read_volume(scan).grid
    expected = resample(reference.array, reference.grid, grid, order=0, fill=0)
    assert np.array_equal(np.bincount(expected.ravel()), np.bincount(reference.array.ravel()))  # copied, not resampled
    labels = {"background": 0} | {f"organ {value}": value for value in np.unique(expected).tolist()[1:]}
    with pytest.raises(DataError, match="no StudyInstanceUID and SeriesInstanceUID"):
        write_dicom_seg(tmp_path / "seg.dcm", expected, grid, stripped, labels)
    write_dicom_seg(tmp_path / "seg.dcm", expected, grid, scan, labels)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm", onto=grid).array, expected)


def test_real_seg_of_dcmqi_equals_its_nrrd() -> None:
    grid = read_volume(shared_data("dcmqi/23x38x3/image")).grid
    (file,) = shared_data("dcmqi/23x38x3/seg").iterdir()
    label = read_dicom_seg(file, onto=grid)
    reference = read_label(shared_data("dcmqi/23x38x3/nrrd/label.nrrd"))
    assert label.array.sum() == reference.array.sum() == 322
    expected = resample(reference.array, reference.grid, grid, order=0, fill=0)
    np.testing.assert_array_equal(label.array, expected)
    alone = read_dicom_seg(file)
    np.testing.assert_array_equal(resample(alone.array, alone.grid, grid, order=0, fill=0), expected)


def test_real_fractional_seg_on_42_of_60_slices() -> None:
    grid = read_volume(shared_data("breast_mri_nact/UCSF-BR-06_PE1")).grid
    (file,) = shared_data("breast_mri_nact/UCSF-BR-06_SEG").iterdir()
    label = read_dicom_seg(file, onto=grid, labels={"background": 0, "Breast": 1})
    assert label.array.shape == grid.shape
    ds = pydicom.dcmread(file)
    assert int(label.array.sum()) == int((ds.pixel_array > 0).sum())
    # Without our reader of series: the sagittal slices whose header says the same place (LPS), and no others.
    heads = [pydicom.dcmread(item) for item in shared_data("breast_mri_nact/UCSF-BR-06_PE1").iterdir()]
    slices = np.sort([float(head.ImagePositionPatient[0]) for head in heads])
    places = [own.PlanePositionSequence[0].ImagePositionPatient for own in ds.PerFrameFunctionalGroupsSequence]
    filled = [float(place[0]) for place, frame in zip(places, ds.pixel_array, strict=True) if frame.any()]
    assert np.abs(np.array(filled)[:, None] - slices).min(axis=1).max() < 0.01
    inside = np.unique(np.nonzero(label.array)[2])
    found = [-(grid.affine @ [0, 0, k, 1])[0] for k in inside]
    np.testing.assert_allclose(np.sort(found), np.sort(filled), atol=0.01)
