"""DICOM Segmentations out and in: what is written lies on the source series, voxel for voxel (fault report D32)."""

from __future__ import annotations

import datetime
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import highdicom
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk

from medckpt.datasets.reading import read_volume
from medckpt.datasets.segment_codes import SegmentCode, default_code
from medckpt.errors import DataError, GeometryError
from medckpt.geometry import Grid, resample
from medckpt.inference.dicom_seg import read_dicom_seg, write_dicom_seg
from tests.inference.seg_series import LABELS, PLANES, labels_of, series


@pytest.mark.parametrize("seg_type", ["binary", "labelmap"])
@pytest.mark.parametrize("plane", PLANES)
def test_round_trip_and_places(tmp_path: Path, plane: str, seg_type: Any) -> None:
    scan = series(tmp_path / "ct", plane)
    volume = read_volume(scan)
    expected = labels_of(volume.array)
    file = tmp_path / "new" / "seg.dcm"
    write_dicom_seg(file, expected, volume.grid, scan, LABELS, seg_type=seg_type)
    assert [item.name for item in file.parent.iterdir()] == ["seg.dcm"]

    back = read_dicom_seg(file, onto=volume.grid)
    np.testing.assert_array_equal(back.array, expected)
    assert back.array.dtype == np.uint8
    by_name = read_dicom_seg(file, onto=volume.grid, labels={"background": 0, "liver": 300, "Läsion": 1})
    np.testing.assert_array_equal(by_name.array, np.select([expected == 2, expected == 7], [300, 1]))

    # Without us: each frame lies where the slice lies that it refers to, and holds the threshold of its pixels.
    slices = {ds.SOPInstanceUID: ds for ds in map(pydicom.dcmread, scan.iterdir())}
    seg = highdicom.seg.segread(file)
    seen = set()
    for number, own in enumerate(seg.PerFrameFunctionalGroupsSequence, start=1):
        source = slices[own.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID]
        assert own.PlanePositionSequence[0].ImagePositionPatient == source.ImagePositionPatient
        frame, wanted = seg.get_stored_frame(number), labels_of(source.pixel_array)
        if seg_type == "binary":
            segment = own.SegmentIdentificationSequence[0].ReferencedSegmentNumber
            wanted = wanted == {1: 2, 2: 7}[segment]
            seen.add((source.SOPInstanceUID, segment))
        else:
            seen.add(source.SOPInstanceUID)
        np.testing.assert_array_equal(frame, wanted)
    assert len(seen) == len(seg.PerFrameFunctionalGroupsSequence) == (12 if seg_type == "binary" else 6)
    shared = seg.SharedFunctionalGroupsSequence[0]
    assert shared.PixelMeasuresSequence[0].PixelSpacing == [1.0, 0.5]
    assert shared.PixelMeasuresSequence[0].SpacingBetweenSlices == 2
    np.testing.assert_allclose(shared.PlaneOrientationSequence[0].ImageOrientationPatient, PLANES[plane][0])

    # highdicom's own volume (slices, rows, columns; LPS), put onto the scan by its affine alone.
    whole = seg.get_volume(combine_segments=True)
    ras = np.diag([-1.0, -1, 1, 1]) @ whole.affine
    lattice = Grid(shape=whole.array.shape, affine=ras)
    found = resample(whole.array, lattice, volume.grid, order=0, fill=0)
    np.testing.assert_array_equal(found, np.searchsorted([0, 2, 7], expected) if seg_type == "binary" else expected)


@pytest.mark.parametrize("seg_type", ["binary", "labelmap"])
@pytest.mark.parametrize(("slices", "shape"), [(1, (8, 10)), (1, (2, 3)), (5, (7, 9)), (5, (2, 3)), (3, (1, 1))])
def test_frames_of_any_size(tmp_path: Path, seg_type: Any, slices: int, shape: tuple[int, int]) -> None:
    """One slice, and frames that end within a byte."""
    scan = series(tmp_path / "ct", slices=slices, shape=shape)
    volume = read_volume(scan)
    expected = labels_of(volume.array)
    expected[0, 0, 0] = 7
    write_dicom_seg(tmp_path / "seg.dcm", expected, volume.grid, scan, LABELS, seg_type=seg_type)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid).array, expected)
    if seg_type == "binary":  # bit by bit, as PS3.5 8.1.1 packs them
        ds = pydicom.dcmread(tmp_path / "seg.dcm")
        bits = np.unpackbits(np.frombuffer(ds.PixelData, np.uint8), bitorder="little")
        frames = bits[: ds.NumberOfFrames * ds.Rows * ds.Columns].reshape(-1, *shape)
        assert len(ds.PixelData) % 2 == 0
        assert not bits[frames.size :].any()
        assert frames.sum() == np.count_nonzero(expected)


@pytest.mark.parametrize("seg_type", ["binary", "labelmap"])
def test_what_is_empty_is_left_out_and_comes_back(tmp_path: Path, seg_type: Any) -> None:
    """D32: a label on slice 3 alone, and a class that does not occur."""
    scan = series(tmp_path / "ct")
    volume = read_volume(scan)
    expected = np.zeros(volume.array.shape, np.int64)
    expected[2:4, 5, 3] = 2
    write_dicom_seg(tmp_path / "seg.dcm", expected, volume.grid, scan, LABELS, seg_type=seg_type)
    ds = pydicom.dcmread(tmp_path / "seg.dcm")
    assert ds.NumberOfFrames == 1
    assert [item.SegmentLabel for item in ds.SegmentSequence][-2:] == ["liver", "Läsion"]
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid).array, expected)
    alone = read_dicom_seg(tmp_path / "seg.dcm")  # one plane, in its place
    np.testing.assert_array_equal(alone.array[:, :, 0], expected[:, :, 3])
    np.testing.assert_allclose(alone.affine[:3, 3], (volume.affine @ [0, 0, 3, 1])[:3], atol=1e-6)
    assert alone.grid.spacing_mm == pytest.approx(volume.grid.spacing_mm)

    write_dicom_seg(
        tmp_path / "all.dcm", expected, volume.grid, scan, LABELS, seg_type=seg_type, omit_empty_frames=False
    )
    assert pydicom.dcmread(tmp_path / "all.dcm").NumberOfFrames == (12 if seg_type == "binary" else 6)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "all.dcm", onto=volume.grid).array, expected)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "all.dcm").array, expected)


@pytest.mark.parametrize("seg_type", ["binary", "labelmap"])
@pytest.mark.parametrize("plane", ["axial", "oblique"])
def test_an_empty_result_is_written_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plane: str, seg_type: Any
) -> None:
    scan = series(tmp_path / "ct", plane)
    volume = read_volume(scan)
    nothing = np.zeros(volume.array.shape, np.uint8)
    with caplog.at_level(logging.WARNING, "medckpt"):
        write_dicom_seg(tmp_path / "seg.dcm", nothing, volume.grid, scan, LABELS, seg_type=seg_type)
    assert "seg.dcm: no voxel of any class was found; the segmentation is empty" in caplog.text
    seg = highdicom.seg.segread(tmp_path / "seg.dcm")
    assert seg.NumberOfFrames == (2 if seg_type == "binary" else 1)
    assert len(seg.ReferencedSeriesSequence[0].ReferencedInstanceSequence) == 6
    back = read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid)
    np.testing.assert_array_equal(back.array, nothing)


def test_header(tmp_path: Path) -> None:
    scan = series(tmp_path / "ct", SeriesNumber=4, PatientID="p7", StudyDate="20200229")
    volume = read_volume(scan)
    codes = {"Läsion": SegmentCode(type=("52988006", "SCT", "Lesion"), category=("49755003", "SCT", "Abnormal"))}
    moment = datetime.datetime(2024, 2, 29, 13, 5, 9)
    for name in ("a.dcm", "b.dcm"):
        write_dicom_seg(tmp_path / name, labels_of(volume.array), volume.grid, scan, LABELS, codes=codes, moment=moment)
    ds, other = pydicom.dcmread(tmp_path / "a.dcm"), pydicom.dcmread(tmp_path / "b.dcm")
    assert (ds.Modality, ds.SOPClassUID.name) == ("SEG", "Segmentation Storage")
    assert (str(ds.PatientName), ds.PatientID, ds.StudyDate, ds.SeriesNumber) == ("Müller^Jörg", "p7", "20200229", 1004)
    assert (ds.ContentDate, ds.ContentTime) == ("20240229", "130509")
    assert ds.StudyInstanceUID == "1.2.826.0.1.3680043.8.498.2"
    assert ds.FrameOfReferenceUID == "1.2.826.0.1.3680043.8.498.3"
    assert (ds.SegmentationType, ds.BitsAllocated, ds.SegmentsOverlap) == ("BINARY", 1, "NO")
    referenced = {item.ReferencedSOPInstanceUID for item in ds.ReferencedSeriesSequence[0].ReferencedInstanceSequence}
    assert referenced == {pydicom.dcmread(file).SOPInstanceUID for file in scan.iterdir()}
    liver, lesion = ds.SegmentSequence
    assert (liver.SegmentNumber, liver.SegmentLabel, liver.SegmentDescription) == (1, "liver", "label value 2: liver")
    assert liver.SegmentedPropertyTypeCodeSequence[0].CodeValue == "10200004"
    assert liver.SegmentAlgorithmType == "AUTOMATIC"
    algorithm = liver.SegmentationAlgorithmIdentificationSequence[0]
    assert (algorithm.AlgorithmName, ds.Manufacturer) == ("medckpt", "medckpt")
    assert algorithm.AlgorithmVersion == ds.SoftwareVersions
    assert lesion.SegmentedPropertyTypeCodeSequence[0].CodeValue == "52988006"
    assert lesion.SegmentedPropertyCategoryCodeSequence[0].CodeMeaning == "Abnormal"
    assert liver.TrackingUID != lesion.TrackingUID
    # Frames: one segment after the other, each along the normal; the dimension index says the same.
    order = [tuple(own.FrameContentSequence[0].DimensionIndexValues) for own in ds.PerFrameFunctionalGroupsSequence]
    assert order == [(segment, k) for segment in (1, 2) for k in range(1, 7)]
    assert not differences(ds, other) - {"UI"}

    reader = sitk.ImageFileReader()
    reader.SetFileName(str(tmp_path / "a.dcm"))
    reader.ReadImageInformation()
    assert reader.GetSize() == (10, 8, 12)


def differences(a: pydicom.Dataset, b: pydicom.Dataset) -> set[str]:
    """The value representations of the elements in which two data sets differ."""
    assert a.keys() == b.keys()
    found = set()
    for one, two in zip(a, b, strict=True):
        if one.VR == "SQ":
            assert len(one.value) == len(two.value)
            found |= {vr for items in zip(one.value, two.value, strict=True) for vr in differences(*items)}
        elif one.value != two.value:
            found.add(one.VR)
    return found


def test_dciodvfy(tmp_path: Path) -> None:
    if shutil.which("dciodvfy") is None:
        pytest.skip("dciodvfy (dicom3tools) is not installed")
    scan = series(tmp_path / "ct", PatientID="p7")
    volume = read_volume(scan)
    write_dicom_seg(tmp_path / "seg.dcm", labels_of(volume.array), volume.grid, scan, LABELS)
    said = subprocess.run(["dciodvfy", tmp_path / "seg.dcm"], capture_output=True, text=True, check=False).stderr
    assert not [line for line in said.splitlines() if line.startswith("Error")], said


# Series that lack something


@pytest.mark.parametrize(
    ("without", "tags", "bytes_"),
    [
        (["SOPClassUID", "SOPInstanceUID"], {}, None),  # they are in the meta header still
        (["FrameOfReferenceUID"], {}, None),
        (["SliceThickness"], {"SpacingBetweenSlices": 0.3}, None),  # GE's gap between slices
        ([], {"StudyDate": "20201231", "PatientSex": "UNKNOWN"}, (b"20201231", b"20201399")),
        ([], {"InstanceNumber": lambda k: 6 - k, "SpecificCharacterSet": "ISO_IR 192"}, None),
        ([], {"SeriesDescription": "t2\\tra" + "x" * 50}, None),
    ],
)
def test_imperfect_series(
    tmp_path: Path, without: list[str], tags: dict[str, Any], bytes_: tuple[bytes, bytes] | None
) -> None:
    scan = series(tmp_path / "ct", **tags)
    for file in scan.iterdir():
        ds = pydicom.dcmread(file)
        for tag in without:
            delattr(ds, tag)
        ds.save_as(file, enforce_file_format=False)
        if bytes_:
            file.write_bytes(file.read_bytes().replace(*bytes_))
    volume = read_volume(scan)
    expected = labels_of(volume.array)
    write_dicom_seg(tmp_path / "seg.dcm", expected, volume.grid, scan, LABELS)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid).array, expected)
    seg = highdicom.seg.segread(tmp_path / "seg.dcm")
    assert seg.get_volume(combine_segments=True).spacing == (2.0, 1.0, 0.5)
    assert seg.FrameOfReferenceUID


def test_orientations_that_are_rounded_from_slice_to_slice(tmp_path: Path) -> None:
    scan = series(tmp_path / "ct")
    for number, file in enumerate(sorted(scan.iterdir())):
        ds = pydicom.dcmread(file)
        ds.ImageOrientationPatient = [1, 1e-5 * (number % 2), 0, -1e-5 * (number % 2), 1, 0]
        ds.save_as(file)
    volume = read_volume(scan)
    expected = labels_of(volume.array)
    write_dicom_seg(tmp_path / "seg.dcm", expected, volume.grid, scan, LABELS)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid).array, expected)


def test_slices_a_little_off_their_places(tmp_path: Path) -> None:
    """Each frame keeps the position of its own slice; the grid is the even stack."""
    scan = series(tmp_path / "ct")
    for number, file in enumerate(sorted(scan.iterdir())):
        ds = pydicom.dcmread(file)
        ds.ImagePositionPatient[2] += [0, 0.06, -0.07, 0.05, 0, 0][number]
        ds.save_as(file)
    volume = read_volume(scan)
    expected = labels_of(volume.array)
    write_dicom_seg(tmp_path / "seg.dcm", expected, volume.grid, scan, LABELS)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid).array, expected)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm").array, expected)


def test_a_label_on_another_grid_than_the_slices(tmp_path: Path) -> None:
    """A series that was resampled on reading: planes with places of their own, on the same frame of reference."""
    scan = series(tmp_path / "ct", "oblique")
    volume = read_volume(scan)
    affine = volume.affine @ np.diag([2.0, 1, 0.5, 1])
    grid = Grid(shape=(5, 8, 11), affine=affine)
    expected = labels_of(np.random.default_rng(0).integers(0, 100, grid.shape))
    write_dicom_seg(tmp_path / "seg.dcm", expected, grid, scan, LABELS)
    np.testing.assert_array_equal(read_dicom_seg(tmp_path / "seg.dcm", onto=grid).array, expected)
    with pytest.raises(GeometryError, match="does not lie on the voxels of the scan"):
        read_dicom_seg(tmp_path / "seg.dcm", onto=volume.grid)


def test_what_is_not_written(tmp_path: Path) -> None:
    scan = series(tmp_path / "ct")
    grid = read_volume(scan).grid
    zero = np.zeros(grid.shape, np.uint8)
    for name, array, labels, match in [
        ("a.nii.gz", zero, LABELS, r"\.dcm"),
        ("a.dcm", zero[1:], LABELS, "shape"),
        ("a.dcm", zero + np.uint8(5), LABELS, "value 5 in the label map is none of the labels"),
        ("a.dcm", zero, {"background": 0}, "no class beside the background"),
        ("a.dcm", zero, {"background": 0, "x": 70000}, "up to 65535"),
    ]:
        with pytest.raises(DataError, match=match):
            write_dicom_seg(tmp_path / name, array, grid, scan, labels)
    nameless = series(tmp_path / "no", StudyInstanceUID="")
    with pytest.raises(DataError, match=r"no StudyInstanceUID, .* Write \.nii\.gz instead"):
        write_dicom_seg(tmp_path / "a.dcm", zero, grid, nameless, LABELS)
    assert {item.name for item in tmp_path.iterdir()} == {"ct", "no"}


# Codes


@pytest.mark.parametrize(
    ("name", "value", "category", "side"),
    [
        ("liver", "10200004", "91723000", None),
        ("kidney_left", "64033007", "91723000", "7771000"),
        ("Right Kidney", "64033007", "91723000", "24028007"),
        ("vertebrae_L1", "66794005", "91723000", None),
        ("spinal_cord", "2748008", "91723000", None),
        ("urinary_bladder", "89837001", "91723000", None),
        ("tumour", "108369006", "49755003", None),
        ("edema", "79654002", "49755003", None),
        ("adipose tissue", "55603005", "85756007", None),
        ("label_3", "85756007", "85756007", None),
        ("left", "85756007", "85756007", None),
    ],
)
def test_codes_by_name(name: str, value: str, category: str, side: str | None) -> None:
    """Values as in PS3.16: CID 7192, 7194, 7191, 7150 and 244."""
    code = default_code(name)
    assert code.category is not None
    assert (code.type[0], code.category[0], code.modifier and code.modifier[0]) == (value, category, side)
