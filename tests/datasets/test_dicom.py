"""DICOM series: order, choice, refusals and values. The fault reports row by row are in tests/cases."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence as DicomSequence
from pydicom.uid import MPEG2MPML, JPEGLSLossless

from medckpt.datasets.dicom import read_dicom_grid
from medckpt.datasets.reading import read_grid, read_label, read_volume
from medckpt.errors import DataError, GeometryError
from tests.datasets.dicom_maker import COLUMNS, ROWS, make_series, make_slice, save_slice

# RAS affine of the generator's series, worked out by hand: x = -0.5 i, y = -1 j, z = 2 k.
PLAIN_AFFINE = np.diag([-0.5, -1.0, 2.0, 1.0])


def series_values(volume_array: np.ndarray) -> list[float]:
    return volume_array[0, 0].tolist()


def test_plain_series(tmp_path: Path) -> None:
    pixels = np.arange(ROWS * COLUMNS, dtype=np.int16).reshape(ROWS, COLUMNS)
    volume = read_volume(make_series(tmp_path, pixels=lambda k: pixels + 100 * k))
    assert volume.array.shape == (COLUMNS, ROWS, 6)
    assert volume.array.dtype == np.int16
    assert volume.source == tmp_path
    np.testing.assert_array_equal(volume.affine, PLAIN_AFFINE)
    # Column 3 of row 2 in slice 4, by the generator's own numbering.
    assert volume.array[3, 2, 4] == 2 * COLUMNS + 3 + 400
    assert read_grid(tmp_path) == volume.grid


# D1: missing slices


def test_missing_slice_is_named(tmp_path: Path) -> None:
    make_series(tmp_path, ks=[0, 1, 3, 4, 5])
    with pytest.raises(GeometryError, match=r"slices are missing: 1 between 1\.dcm \(at 2 mm\) and 3\.dcm \(at 6 mm\)"):
        read_volume(tmp_path)


def test_every_hole_is_named(tmp_path: Path) -> None:
    make_series(tmp_path, ks=[0, 1, 3, 4, 5, 6, 10, 11])
    with pytest.raises(GeometryError, match=r"1 between 1\.dcm .* 3 between 6\.dcm \(at 12 mm\) and 10\.dcm"):
        read_dicom_grid(tmp_path)


def test_three_slices_with_a_hole(tmp_path: Path) -> None:
    make_series(tmp_path, ks=[0, 1, 3])
    with pytest.raises(GeometryError, match=r"1 between 1\.dcm .* 4 mm apart where 2 mm is usual"):
        read_volume(tmp_path)


def test_uneven_spacing_is_refused(tmp_path: Path) -> None:
    make_series(tmp_path, position=lambda k: (0, 0, 2 * k + (0.5 if k == 3 else 0)))
    with pytest.raises(GeometryError, match=r"not evenly spaced: 2 mm is usual, but 2\.5 mm after 2\.dcm"):
        read_volume(tmp_path)


def test_a_wide_gap_that_is_no_whole_number_of_slices(tmp_path: Path) -> None:
    make_series(tmp_path, position=lambda k: (0, 0, 2 * k + (3 if k >= 4 else 0)))
    with pytest.raises(GeometryError, match=r"not evenly spaced: 2 mm is usual, but 5 mm after 3\.dcm \(at 6 mm\)"):
        read_volume(tmp_path)


def test_slow_drift_of_the_spacing_is_refused(tmp_path: Path) -> None:
    """No gap is far from the usual one, but the middle slices would be 0.5 mm off."""
    make_series(tmp_path, ks=range(41), position=lambda k: (0, 0, 2 * k + 0.05 * max(0, k - 20)))
    with pytest.raises(GeometryError, match="not evenly spaced"):
        read_volume(tmp_path)


def test_rounded_positions_are_accepted(tmp_path: Path) -> None:
    """0.625 mm slices whose positions are stored with one decimal, as some scanners do."""
    make_series(tmp_path, ks=range(9), position=lambda k: (0, 0, round(0.625 * k + 1e-9, 1)))
    assert read_volume(tmp_path).grid.spacing_mm == pytest.approx((0.5, 1.0, 0.625), abs=0.01)


# D2: repeated positions


def test_equal_copy_is_dropped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path)
    shutil.copy(tmp_path / "3.dcm", tmp_path / "copy.dcm")
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(tmp_path)
    assert series_values(volume.array) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(volume.affine, PLAIN_AFFINE)
    assert "copy.dcm is left out, a copy of 3.dcm" in caplog.text


def test_same_position_other_pixels_is_refused(tmp_path: Path) -> None:
    make_series(tmp_path)
    save_slice(tmp_path / "again.dcm", make_slice(3, pixels=np.full((ROWS, COLUMNS), 9, np.int16)))
    with pytest.raises(GeometryError, match=r"3\.dcm and again\.dcm lie at the same position \(at 6 mm\)"):
        read_volume(tmp_path)


def test_all_slices_at_one_position(tmp_path: Path) -> None:
    make_series(tmp_path, position=lambda k: (0, 0, 7), AcquisitionNumber=lambda k: k % 2)
    with pytest.raises(GeometryError, match="all 6 slices lie at one position"):
        read_volume(tmp_path)


# D3: localizer in the series


def test_localizer_of_the_series_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path)
    save_slice(tmp_path / "scout.dcm", make_slice(0, orientation=(0, 1, 0, 0, 0, -1)))
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(tmp_path)
    np.testing.assert_array_equal(volume.affine, PLAIN_AFFINE)
    assert "set aside" in caplog.text
    assert "first file scout.dcm" in caplog.text


def test_second_orientation_of_many_slices_is_no_localizer(tmp_path: Path) -> None:
    make_series(tmp_path)
    make_series(tmp_path, range(4), "cor", orientation=(1, 0, 0, 0, 0, -1), position=lambda k: (0.0, 2.0 * k, 0.0))
    with pytest.raises(DataError, match="2 image stacks"):
        read_volume(tmp_path)


# D4: several series


def test_two_series_are_listed_and_a_file_chooses(tmp_path: Path) -> None:
    make_series(tmp_path, SeriesDescription="portal")
    make_series(tmp_path, range(5), "b", SeriesInstanceUID="1.2.3", SeriesDescription="late", RescaleIntercept=100)
    with pytest.raises(DataError, match=r"'portal' \(CT\): 6 slices of 10 x 8, .* 1\.2\.3 'late' \(CT\): 5 slices"):
        read_volume(tmp_path)
    assert series_values(read_volume(tmp_path / "b2.dcm").array) == [100, 101, 102, 103, 104]
    assert series_values(read_volume(tmp_path / "2.dcm").array) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("tag", "first", "second"),
    [("EchoTime", 20, 80), ("AcquisitionNumber", 1, 2), ("ImageType", ["DERIVED", "F"], ["DERIVED", "W"])],
)
def test_one_uid_two_volumes(tmp_path: Path, tag: str, first: object, second: object) -> None:
    make_series(tmp_path, **{tag: first})
    make_series(tmp_path, range(6), "b", RescaleIntercept=50, **{tag: second})
    with pytest.raises(DataError, match="2 image stacks"):
        read_volume(tmp_path)
    assert series_values(read_volume(tmp_path / "b0.dcm").array) == [50, 51, 52, 53, 54, 55]


def test_echo_time_alone_does_not_divide(tmp_path: Path) -> None:
    volume = read_volume(make_series(tmp_path, EchoTime=lambda k: 20 + k))
    assert volume.array.shape[2] == 6


# D6: tilt


def test_tilted_stack_is_refused(tmp_path: Path) -> None:
    make_series(tmp_path, position=lambda k: (0, k * 2 * np.tan(np.radians(15)), 2 * k))
    with pytest.raises(GeometryError, match=r"tilted by 15\.0 degrees .* shifted by 0\.536 mm each .* orthogonal grid"):
        read_volume(tmp_path)


def test_tilt_tag_alone_changes_nothing(tmp_path: Path) -> None:
    np.testing.assert_array_equal(read_volume(make_series(tmp_path, GantryDetectorTilt=15)).affine, PLAIN_AFFINE)


def test_one_slice_shifted_in_its_plane(tmp_path: Path) -> None:
    make_series(tmp_path, position=lambda k: (3.0 if k == 2 else 0.0, 0.0, 2.0 * k))
    with pytest.raises(GeometryError, match=r"2\.dcm is shifted by 3 mm within its plane"):
        read_volume(tmp_path)


def test_oblique_stack(tmp_path: Path) -> None:
    """Rows and columns turned by 30 degrees about x, slices along the turned normal: checked point by point."""
    c, s = np.cos(np.pi / 6), np.sin(np.pi / 6)
    normal = np.array([0, -s, c])
    make_series(tmp_path, orientation=(1, 0, 0, 0, c, s), position=lambda k: (10, -20, 30) + 2 * k * normal)
    affine = read_volume(tmp_path).affine
    i, j, k = 7, 5, 3
    lps = np.array([10, -20, 30]) + i * 0.5 * np.array([1, 0, 0]) + j * 1.0 * np.array([0, c, s]) + k * 2 * normal
    np.testing.assert_allclose(affine @ [i, j, k, 1], [-lps[0], -lps[1], lps[2], 1], atol=1e-9)


# D8: multi-frame; mosaic; colour


def test_multi_frame_without_places_is_refused(tmp_path: Path) -> None:
    frames = np.zeros((4 * ROWS, COLUMNS), np.int16)
    save_slice(tmp_path / "mf.dcm", make_slice(0, pixels=frames, NumberOfFrames=4, Rows=ROWS))
    with pytest.raises(DataError, match=r"mf\.dcm.* multi-frame \(4 frames .*convert it to NIfTI"):
        read_volume(tmp_path)


def test_multi_frame_beside_a_series_is_not_passed_over(tmp_path: Path) -> None:
    make_series(tmp_path)
    frames = np.zeros((4 * ROWS, COLUMNS), np.int16)
    save_slice(
        tmp_path / "mf.dcm", make_slice(0, pixels=frames, NumberOfFrames=4, Rows=ROWS, SeriesInstanceUID="1.2.3")
    )
    with pytest.raises(DataError, match=r"mf\.dcm.* multi-frame"):
        read_volume(tmp_path)


def test_colour_is_refused_but_a_colour_sheet_of_another_series_is_set_aside(tmp_path: Path) -> None:
    colour = np.zeros((ROWS, COLUMNS, 3), np.int16)
    tags = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0}
    save_slice(tmp_path / "a" / "c.dcm", make_slice(0, pixels=colour, **tags))
    with pytest.raises(DataError, match=r"colour \(RGB\)"):
        read_volume(tmp_path / "a")
    make_series(tmp_path / "b")
    save_slice(tmp_path / "b" / "dose.dcm", make_slice(0, pixels=colour, SeriesInstanceUID="1.2.3", **tags))
    assert series_values(read_volume(tmp_path / "b").array) == [0, 1, 2, 3, 4, 5]


def test_a_colour_slice_of_the_series_itself_is_not_passed_over(tmp_path: Path) -> None:
    """It may be the last slice of the stack, whose loss leaves no gap; naming a file does not change that."""
    make_series(tmp_path)
    colour = np.zeros((ROWS, COLUMNS, 3), np.int16)
    tags = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0}
    save_slice(tmp_path / "6.dcm", make_slice(6, pixels=colour, **tags))
    for path in (tmp_path, tmp_path / "0.dcm"):
        with pytest.raises(DataError, match=r"1 images \(6\.dcm\) cannot be read: colour"):
            read_volume(path)


def test_mosaic_is_refused(tmp_path: Path) -> None:
    make_series(tmp_path, ImageType=["ORIGINAL", "PRIMARY", "M", "MOSAIC"])
    with pytest.raises(DataError, match="mosaic"):
        read_volume(tmp_path)


# D11, D12: InstanceNumber


@pytest.mark.parametrize("numbers", [[3, 1, 5, 2, 6, 4], [6, 5, 4, 3, 2, 1]])
def test_instance_number_is_ignored(tmp_path: Path, numbers: list[int]) -> None:
    volume = read_volume(make_series(tmp_path, InstanceNumber=lambda k: numbers[k]))
    assert series_values(volume.array) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(volume.affine, PLAIN_AFFINE)


def test_without_instance_number(tmp_path: Path) -> None:
    assert series_values(read_volume(make_series(tmp_path, without=["InstanceNumber"])).array) == [0, 1, 2, 3, 4, 5]


# D15: other files


def test_stray_files_are_skipped_with_a_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path)
    (tmp_path / "notes.txt").write_text("not DICOM")
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "._0.dcm").symlink_to(tmp_path / "gone")
    save_slice(tmp_path / "rt.dcm", make_slice(0, Modality="RTSTRUCT", without=["Rows", "Columns", "PixelData"]))
    with caplog.at_level(logging.INFO, "medckpt"):
        assert read_volume(tmp_path).array.shape[2] == 6
    assert "4 files without an image are skipped" in caplog.text
    assert "rt.dcm (RTSTRUCT)" in caplog.text


def test_no_image_at_all(tmp_path: Path) -> None:
    save_slice(tmp_path / "rt.dcm", make_slice(0, Modality="RTSTRUCT", without=["Rows", "Columns", "PixelData"]))
    with pytest.raises(DataError, match=r"no DICOM image .* rt\.dcm \(RTSTRUCT\)"):
        read_volume(tmp_path)


def test_damaged_header_is_not_skipped(tmp_path: Path) -> None:
    """A slice lost at the end of a stack leaves no gap: its file has to be named."""
    make_series(tmp_path)
    whole = (tmp_path / "5.dcm").read_bytes()
    (tmp_path / "5.dcm").write_bytes(whole[:300])
    with pytest.raises(DataError, match=r"5\.dcm"):
        read_volume(tmp_path)


@pytest.mark.parametrize("fault", ["dangling link", "link to itself", "no permission"])
def test_file_that_cannot_be_opened_is_not_skipped(tmp_path: Path, fault: str) -> None:
    make_series(tmp_path)
    last = tmp_path / "5.dcm"
    if fault == "no permission":
        if os.geteuid() == 0:
            pytest.skip("root may open every file")
        last.chmod(0)
    else:
        last.unlink()
        last.symlink_to(last if fault == "link to itself" else tmp_path / "gone")
    for read in (read_volume, read_grid):
        with pytest.raises(DataError, match=r"5\.dcm: the file cannot be opened .* permissions or its link"):
            read(tmp_path)


def test_empty_file_among_slices_is_not_skipped(tmp_path: Path) -> None:
    make_series(tmp_path)
    (tmp_path / "5.dcm").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 empty files \(0 bytes\) .* slices: 5\.dcm\. Copy or export"):
        read_volume(tmp_path)


def test_pixels_cut_short(tmp_path: Path) -> None:
    make_series(tmp_path)
    whole = (tmp_path / "5.dcm").read_bytes()
    (tmp_path / "5.dcm").write_bytes(whole[:-40])
    with pytest.raises(DataError, match=r"5\.dcm: the pixels .* do not decode"):
        read_volume(tmp_path)


# D16: no decoder


def test_missing_decoder_names_syntax_file_and_package(tmp_path: Path) -> None:
    """In a process of its own, in which the plugins cannot be imported."""
    dataset = make_slice(0, SliceThickness=2)
    dataset.PixelData = encapsulate([b"\xff\xd8\xff\xd9"])
    save_slice(tmp_path / "ls.dcm", dataset, syntax=JPEGLSLossless)
    program = (
        "import pathlib, sys\n"
        "sys.modules.update({name: None for name in ('jpeg_ls', 'pylibjpeg', 'gdcm')})\n"
        "from medckpt.datasets.reading import read_volume\n"
        "from medckpt.errors import DataError\n"
        "try:\n    read_volume(pathlib.Path(sys.argv[1]))\n"
        "except DataError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    expected = r"ls\.dcm: no decoder for JPEG-LS Lossless Image Compression is installed.* pip install pyjpegls"
    assert re.search(expected, run.stdout), run.stdout


def test_video_syntax_is_refused(tmp_path: Path) -> None:
    dataset = make_slice(0, SliceThickness=2)
    dataset.PixelData = encapsulate([b"\x00\x00"])
    save_slice(tmp_path / "video.dcm", dataset, syntax=MPEG2MPML)
    with pytest.raises(DataError, match=r"video\.dcm: MPEG2 .* cannot be decoded here\. Export .* uncompressed"):
        read_volume(tmp_path)


# D19, D20, D22, D23: values


def test_unsigned_with_negative_intercept(tmp_path: Path) -> None:
    pixels = np.full((ROWS, COLUMNS), 24, np.uint16)
    volume = read_volume(make_series(tmp_path, pixels=pixels, RescaleSlope=1, RescaleIntercept=-1024))
    assert np.unique(volume.array).tolist() == [-1000]


def test_extreme_stored_values_do_not_wrap(tmp_path: Path) -> None:
    make_series(tmp_path / "signed", pixels=np.full((ROWS, COLUMNS), -32768, np.int16), RescaleIntercept=-1024)
    make_series(tmp_path / "unsigned", pixels=np.full((ROWS, COLUMNS), 34101, np.uint16))
    assert np.unique(read_volume(tmp_path / "signed").array).tolist() == [-33792]
    assert np.unique(read_volume(tmp_path / "unsigned").array).tolist() == [34101]


def test_slope_of_each_slice(tmp_path: Path) -> None:
    pixels = np.full((ROWS, COLUMNS), 10, np.int16)
    volume = read_volume(make_series(tmp_path, pixels=pixels, RescaleSlope=lambda k: 1 + k, RescaleIntercept=1))
    assert series_values(volume.array) == [11, 21, 31, 41, 51, 61]


@pytest.mark.parametrize("tag", ["RescaleSlope", "RescaleIntercept"])
def test_a_slice_without_the_others_scale_is_refused(tmp_path: Path, tag: str) -> None:
    make_series(tmp_path, RescaleSlope=1, RescaleIntercept=-1024)
    victim = sorted(tmp_path.iterdir())[2]
    for lost in ("deleted", "emptied"):
        dataset = pydicom.dcmread(victim)
        dataset[tag].value = None
        if lost == "deleted":
            del dataset[tag]
        dataset.save_as(victim)
        with pytest.raises(DataError, match=rf"{tag} is missing in 1 of 6 slices \({victim.name}\)"):
            read_volume(tmp_path)
        dataset.RescaleSlope, dataset.RescaleIntercept = 1, -1024
        dataset.save_as(victim)
    dataset[tag].value = "inf"
    dataset.save_as(victim)
    with pytest.raises(DataError, match=rf"{victim.name}.*{tag}.*inf"):
        read_volume(tmp_path)


def test_monochrome1_stays_as_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path, PhotometricInterpretation="MONOCHROME1")
    with caplog.at_level(logging.WARNING, "medckpt"):
        assert series_values(read_volume(tmp_path).array) == [0, 1, 2, 3, 4, 5]
    assert "MONOCHROME1" in caplog.text


def test_slope_zero_and_lookup_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="RescaleSlope is 0"):
        read_volume(make_series(tmp_path / "zero", RescaleSlope=0))
    table = Dataset()
    table.LUTDescriptor, table.LUTData = [2, 0, 16], b"\x00\x00\x01\x00"
    with pytest.raises(DataError, match="Modality LUT"):
        read_volume(make_series(tmp_path / "table", ModalityLUTSequence=DicomSequence([table])))


# D25, D26, D28, D34


def test_non_ascii_names(tmp_path: Path) -> None:
    folder = tmp_path / "Sättiger_肺"
    make_series(folder, prefix="1·")
    assert read_volume(folder).array.shape == (COLUMNS, ROWS, 6)


def test_orientation_and_not_patient_position_decides(tmp_path: Path) -> None:
    """Feet first, prone: x is kept and the stored rows run from posterior to anterior; FFP itself says nothing."""
    make_series(tmp_path, orientation=(1, 0, 0, 0, -1, 0), PatientPosition="FFP")
    # normal = x cross -y = -z: slices are sorted downwards.
    volume = read_volume(tmp_path)
    assert series_values(volume.array) == [5, 4, 3, 2, 1, 0]
    expected = np.diag([-0.5, 1.0, -2.0, 1.0])
    expected[2, 3] = 10
    np.testing.assert_array_equal(volume.affine, expected)


def test_position_in_a_private_sequence_is_ignored(tmp_path: Path) -> None:
    def nested(k: int) -> DicomSequence:
        item = Dataset()
        item.ImagePositionPatient = [99, 99, -99 * k]
        return DicomSequence([item])

    for k in range(6):
        dataset = make_slice(k)
        dataset.private_block(0x2005, "Philips MR Imaging DD 005", create=True).add_new(0x0F, "SQ", nested(k))
        save_slice(tmp_path / f"{k}.dcm", dataset)
    np.testing.assert_array_equal(read_volume(tmp_path).affine, PLAIN_AFFINE)


# Missing tags, single slices, bare files


def test_dicom_mark_without_an_image_header(tmp_path: Path) -> None:
    make_series(tmp_path)
    save_slice(tmp_path / "none.dcm", make_slice(9, without=["Rows"]))
    with pytest.raises(DataError, match=r"none\.dcm: a DICOM header \(CT Image Storage\) without Rows"):
        read_volume(tmp_path)


@pytest.mark.parametrize("tag", ["ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing"])
def test_missing_geometry_is_named(tmp_path: Path, tag: str) -> None:
    with pytest.raises(GeometryError, match=f"no usable {tag}"):
        read_volume(make_series(tmp_path, without=[tag]))


def test_one_slice_without_position_is_not_passed_over(tmp_path: Path) -> None:
    make_series(tmp_path, ks=range(5))
    save_slice(tmp_path / "5.dcm", make_slice(5, without=["ImagePositionPatient"]))
    with pytest.raises(GeometryError, match=r"1 images \(5\.dcm\) .* ImagePositionPatient"):
        read_volume(tmp_path)


@pytest.mark.parametrize("orientation", [(2, 0, 0, 0, 1, 0), (1, 0, 0, 0.5, 0.866025, 0)])
def test_impossible_orientation(tmp_path: Path, orientation: tuple[float, ...]) -> None:
    with pytest.raises(GeometryError, match="ImageOrientationPatient"):
        read_volume(make_series(tmp_path, orientation=orientation))


def test_single_slice_needs_an_extent(tmp_path: Path) -> None:
    make_series(tmp_path / "none", ks=[0])
    with pytest.raises(GeometryError, match=r"one slice \(0\.dcm\) without SliceThickness or SpacingBetweenSlices"):
        read_volume(tmp_path / "none")
    volume = read_volume(make_series(tmp_path / "thick", ks=[0], SliceThickness=5))
    assert volume.array.shape == (COLUMNS, ROWS, 1)
    assert volume.grid.spacing_mm == (0.5, 1.0, 5.0)


def test_thickness_is_not_spacing(tmp_path: Path) -> None:
    assert read_volume(make_series(tmp_path, SliceThickness=5)).grid.spacing_mm == (0.5, 1.0, 2.0)


def test_bare_data_sets_without_meta_header(tmp_path: Path) -> None:
    for k in range(6):
        save_slice(tmp_path / str(k), make_slice(k, without=["SOPClassUID", "SeriesInstanceUID"]), meta=False)
    volume = read_volume(tmp_path)
    assert series_values(volume.array) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(volume.affine, PLAIN_AFFINE)


def test_labels_are_not_read_from_dicom(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"labels are read from NIfTI"):
        read_label(make_series(tmp_path))
