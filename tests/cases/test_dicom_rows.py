"""Public fault reports D1 to D16: which slices make a volume, and where it lies. One test or more per row."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydicom.encaps import encapsulate
from pydicom.uid import (
    JPEG2000,
    MPEG2MPML,
    HTJ2KLossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
    UltrasoundMultiFrameImageStorage,
)

from medckpt.blocks import DicomConfig
from medckpt.datasets.reading import read_grid, read_volume
from medckpt.errors import DataError, GeometryError
from tests.cases.dicom_planes import ORIGIN, PLANES, assert_placed, every_plane, logged, normal, pattern, stacked
from tests.datasets.dicom_maker import COLUMNS, ROWS, make_frames, make_series, make_slice, save_slice


@every_plane
def test_d01_missing_slice(tmp_path: Path, plane: str) -> None:
    make_series(tmp_path, ks=[0, 1, 3, 4, 5], pixels=pattern, **stacked(plane))
    for read in (read_volume, read_grid):
        with pytest.raises(GeometryError, match=r"missing: 1 between 1\.dcm .*4 mm apart where 2 mm.*gaps=interpolate"):
            read(tmp_path)
    volume = read_volume(tmp_path, DicomConfig(gaps="interpolate"))
    assert_placed(volume, plane, [0, 1, 2, 3, 4, 5])  # the pattern is linear in k: the mixture is the slice itself
    assert volume.notes == (
        "gaps=interpolate: 1 of 6 slices are missing and interpolated linearly between their neighbours, at index 2 "
        "(from 0, 2 mm apart)",
    )
    assert read_grid(tmp_path, DicomConfig(gaps="interpolate")) == volume.grid


def test_d01_a_stray_slice_far_away_is_not_bridged(tmp_path: Path) -> None:
    make_series(tmp_path, ks=[0, 1, 2, 3, 100])
    with pytest.raises(GeometryError, match="96 slices are missing beside the 5 that are there"):
        read_volume(tmp_path, DicomConfig(gaps="interpolate"))


@every_plane
def test_d01_uneven_spacing(tmp_path: Path, plane: str) -> None:
    """Slices at 0, 2, 4, 6.5, 9, 10 mm: five steps of 2 mm in all, so the planes are those of an even stack."""
    places = [0, 2, 4, 6.5, 9, 10]
    pixels = [pattern(0) + np.int16(500 * place) for place in places]
    make_series(tmp_path, pixels=lambda k: pixels[k], **stacked(plane, lambda k: places[k]))
    with pytest.raises(GeometryError, match=r"not evenly spaced: 2 mm is usual, but 2\.5 mm .*spacing=resample"):
        read_volume(tmp_path)
    volume = read_volume(tmp_path, DicomConfig(spacing="resample"))
    assert_placed(volume, plane, [0, 1, 2, 3, 4, 5])
    assert volume.notes[0].startswith("spacing=resample: 6 slices 1 to 2.5 mm apart are interpolated linearly to 6")


@every_plane
def test_d02_copy_of_a_slice_is_dropped(tmp_path: Path, plane: str, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path, pixels=pattern, **stacked(plane))
    shutil.copy(tmp_path / "3.dcm", tmp_path / "copy.dcm")
    with logged(caplog):
        assert_placed(read_volume(tmp_path), plane, range(6))
    assert "copy.dcm is left out, a copy of 3.dcm" in caplog.text


@every_plane
@pytest.mark.parametrize("kept", ["first", "last"])
def test_d02_same_position_other_pixels(tmp_path: Path, plane: str, kept: str) -> None:
    make_series(tmp_path, pixels=pattern, AcquisitionTime="101500", **stacked(plane))
    again = make_slice(3, pixels=pattern(3) + np.int16(7), AcquisitionTime="101501", **stacked(plane))  # type: ignore[arg-type]
    save_slice(tmp_path / "0again.dcm", again)  # sorts before the others by name
    with pytest.raises(GeometryError, match=r"3\.dcm lie at the same position .* different pixels.*duplicates=first"):
        read_volume(tmp_path)
    volume = read_volume(tmp_path, DicomConfig(duplicates=kept))  # type: ignore[arg-type]
    expected = pattern(3) + (0 if kept == "first" else 7)
    np.testing.assert_array_equal(volume.array[:, :, 3], expected.T)
    left_out = "0again.dcm" if kept == "first" else "3.dcm"
    assert volume.notes[0].endswith(f"1 left out: {left_out}")


def test_d02_side_by_side_is_no_repeat(tmp_path: Path) -> None:
    make_series(tmp_path)
    save_slice(tmp_path / "beside.dcm", make_slice(3, position=lambda k: (100, 0, 2 * k)))
    with pytest.raises(GeometryError, match="lie side by side in one plane"):
        read_volume(tmp_path, DicomConfig(duplicates="first"))


@every_plane
def test_d03_localizer_in_the_series(tmp_path: Path, plane: str, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path, pixels=pattern, **stacked(plane))
    row, column = np.reshape(PLANES[plane], (2, 3))
    across = (*column, *np.cross(row, column))
    save_slice(tmp_path / "scout.dcm", make_slice(0, orientation=across, PixelSpacing=[2, 2]))
    with logged(caplog):
        assert_placed(read_volume(tmp_path), plane, range(6))
    assert "set aside" in caplog.text
    assert "scout.dcm" in caplog.text


def test_d03_two_large_stacks_are_both_listed(tmp_path: Path) -> None:
    make_series(tmp_path, **stacked("axial"))
    make_series(tmp_path, range(5), "sagittal", **stacked("sagittal"))
    with pytest.raises(DataError, match=r"2 image stacks .*6 slices of .*5 slices of"):
        read_volume(tmp_path)


def test_d04_two_series_in_a_folder(tmp_path: Path) -> None:
    make_series(tmp_path, pixels=pattern, SeriesDescription="portal", **stacked("coronal"))
    make_series(tmp_path, range(6), "b", SeriesInstanceUID="1.2.3", SeriesDescription="late", **stacked("coronal"))
    with pytest.raises(DataError, match=r"'portal' \(CT\): 6 slices .*1\.2\.3 'late' \(CT\): 6 slices"):
        read_volume(tmp_path)
    assert_placed(read_volume(tmp_path / "4.dcm"), "coronal", range(6))
    assert read_volume(tmp_path / "b4.dcm").array[0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_d04_series_in_sub_folders(tmp_path: Path) -> None:
    make_series(tmp_path / "study" / "ct", pixels=pattern, **stacked("sagittal"))
    assert_placed(read_volume(tmp_path), "sagittal", range(6))  # exactly one: no choice to make
    make_series(tmp_path / "study" / "late", SeriesInstanceUID="1.2.3")
    with pytest.raises(DataError, match=r"2 image stacks"):
        read_volume(tmp_path)
    assert_placed(read_volume(tmp_path / "study" / "ct"), "sagittal", range(6))


@pytest.mark.parametrize(
    ("tag", "first", "second"),
    [
        ("EchoTime", 20, 80),
        ("ImageType", ["DERIVED", "PRIMARY", "F"], ["DERIVED", "PRIMARY", "W"]),
        ("AcquisitionNumber", 1, 2),
        ("TemporalPositionIdentifier", 1, 2),
        ("DiffusionBValue", 0.0, 800.0),
    ],
)
def test_d04_one_uid_two_volumes(tmp_path: Path, tag: str, first: object, second: object) -> None:
    make_series(tmp_path, **{tag: first})
    make_series(tmp_path, range(6), "b", RescaleIntercept=50, **{tag: second})
    with pytest.raises(DataError, match="2 image stacks"):
        read_volume(tmp_path)
    assert read_volume(tmp_path / "b0.dcm").array[0, 0].tolist() == [50, 51, 52, 53, 54, 55]


@every_plane
@pytest.mark.parametrize("across", [(0, 1), (0, -1), (1, 0), (-1, 0.5)])
def test_d06_gantry_tilt(tmp_path: Path, plane: str, across: tuple[float, float]) -> None:
    """An image linear in the patient's millimetres, on a tilted stack: linear interpolation gives it back exactly."""
    row, column = np.reshape(PLANES[plane], (2, 3))
    shift = across[0] * row + across[1] * column
    tilt = 2 * np.tan(np.radians(15)) * shift / np.linalg.norm(shift)

    def value(lps: np.ndarray) -> np.ndarray:
        return 100 + lps @ [3.0, -2.0, 1.5]

    def position(k: int) -> np.ndarray:
        return ORIGIN + k * (2 * normal(plane) + tilt)

    def pixels(k: int) -> np.ndarray:
        places = position(k) + 0.5 * np.arange(COLUMNS)[None, :, None] * row + np.arange(ROWS)[:, None, None] * column
        return np.round(value(places) * 100).astype(np.int16)

    make_series(tmp_path, orientation=PLANES[plane], position=position, pixels=pixels, RescaleSlope=0.01)
    for read in (read_volume, read_grid):
        with pytest.raises(GeometryError, match=r"tilted by 15\.0 degrees .*tilt=resample"):
            read(tmp_path)
    volume = read_volume(tmp_path, DicomConfig(tilt="resample"))
    assert volume.notes[0].startswith("tilt=resample: tilted by 15.0 degrees")
    directions = volume.grid.directions
    np.testing.assert_allclose(directions.T @ directions, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(volume.grid.spacing_mm, (0.5, 1, 2), atol=1e-9)
    assert read_grid(tmp_path, DicomConfig(tilt="resample")) == volume.grid
    _compare_tilted(volume.array, volume.affine, plane, tilt, value)


def _compare_tilted(array: np.ndarray, affine: np.ndarray, plane: str, tilt: np.ndarray, value: object) -> None:
    row, column = np.reshape(PLANES[plane], (2, 3))
    indices = np.stack(np.meshgrid(*map(np.arange, array.shape), indexing="ij"), axis=-1)
    lps = (indices @ affine[:3, :3].T + affine[:3, 3]) * [-1, -1, 1]
    along = (lps - ORIGIN) @ normal(plane) / 2
    np.testing.assert_allclose(along, indices[..., 2], atol=1e-9)  # the planes are the slices' own
    inside = lps - ORIGIN - along[..., None] * tilt
    x, y = inside @ row / 0.5, inside @ column
    covered = (x >= 0) & (x <= COLUMNS - 1) & (y >= 0) & (y <= ROWS - 1)
    assert covered.sum() >= 0.7 * 6 * ROWS * COLUMNS
    outside = (x < -0.51) | (x > COLUMNS - 0.49) | (y < -0.51) | (y > ROWS - 0.49)
    assert outside.any()
    np.testing.assert_allclose(array[covered], value(lps)[covered], atol=0.02)  # type: ignore[operator]
    assert np.unique(array[outside]).size == 1


def test_d06_the_tilt_tag_means_nothing(tmp_path: Path) -> None:
    make_series(tmp_path, pixels=pattern, GantryDetectorTilt=15, **stacked("axial"))
    assert_placed(read_volume(tmp_path), "axial", range(6))


@every_plane
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_d08_enhanced_multi_frame(tmp_path: Path, plane: str, order: list[int]) -> None:
    make_frames(tmp_path / "mf.dcm", order, pixels=pattern, **stacked(plane))  # type: ignore[arg-type]
    assert_placed(read_volume(tmp_path), plane, range(4))
    assert read_grid(tmp_path) == read_volume(tmp_path / "mf.dcm").grid


@pytest.mark.parametrize("tags", [{"SOPClassUID": UltrasoundMultiFrameImageStorage, "Modality": "US"}, {}])
def test_d10_cine_is_no_volume(tmp_path: Path, tags: dict[str, str]) -> None:
    frames = np.zeros((4 * ROWS, COLUMNS), np.int16)
    save_slice(tmp_path / "cine.dcm", make_slice(0, pixels=frames, NumberOfFrames=4, Rows=ROWS, **tags))
    with pytest.raises(DataError, match=r"cine\.dcm.*(ultrasound|no places in the patient \(a cine)"):
        read_volume(tmp_path)


@every_plane
def test_d10_the_corners_are_where_the_positions_say(tmp_path: Path, plane: str) -> None:
    """One bright voxel in a multi-frame file: the affine takes its index to its place."""
    row, column = np.reshape(PLANES[plane], (2, 3))
    for i, j, k in np.ndindex(2, 2, 2):
        corner = (i * (COLUMNS - 1), j * (ROWS - 1), k * 3)

        def pixels(frame: int, corner: tuple[int, int, int] = corner) -> np.ndarray:
            image = np.zeros((ROWS, COLUMNS), np.int16)
            image[corner[1], corner[0]] = 9 * (frame == corner[2])
            return image

        make_frames(tmp_path / "mf.dcm", range(4), pixels=pixels, **stacked(plane))  # type: ignore[arg-type]
        volume = read_volume(tmp_path)
        bright = np.argwhere(volume.array == 9)
        assert bright.tolist() == [list(corner)]
        lps = ORIGIN + corner[0] * 0.5 * row + corner[1] * column + corner[2] * 2 * normal(plane)
        np.testing.assert_allclose((volume.affine @ [*corner, 1])[:3], lps * [-1, -1, 1], atol=1e-6)


@every_plane
@pytest.mark.parametrize("numbers", [[3, 1, 5, 2, 6, 4], [6, 5, 4, 3, 2, 1], [1, 1, 1, 1, 1, 1]])
def test_d11_instance_number_is_ignored(tmp_path: Path, plane: str, numbers: list[int]) -> None:
    make_series(tmp_path, pixels=pattern, InstanceNumber=lambda k: numbers[k], **stacked(plane))
    assert_placed(read_volume(tmp_path), plane, range(6))


@every_plane
def test_d12_without_instance_number(tmp_path: Path, plane: str) -> None:
    make_series(tmp_path, pixels=pattern, without=["InstanceNumber"], **stacked(plane))
    assert_placed(read_volume(tmp_path), plane, range(6))


def test_d15_stray_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path, pixels=pattern, **stacked("axial"))
    (tmp_path / "notes.txt").write_text("not DICOM")
    (tmp_path / "Thumbs.db").write_bytes(bytes(400))
    save_slice(tmp_path / "report.dcm", make_slice(0, Modality="SR", without=["Rows", "Columns", "PixelData"]))
    with logged(caplog):
        assert_placed(read_volume(tmp_path), "axial", range(6))
    assert "3 files without an image are skipped" in caplog.text


@pytest.mark.parametrize(
    ("syntax", "name", "package"),
    [
        (JPEGLSLossless, "JPEG-LS Lossless", "pyjpegls"),
        (JPEG2000, "JPEG 2000 Image Compression", "pylibjpeg pylibjpeg-openjpeg"),
        (HTJ2KLossless, "High-Throughput JPEG 2000", "pylibjpeg pylibjpeg-openjpeg"),
        (JPEGLosslessSV1, "JPEG Lossless", "pylibjpeg pylibjpeg-libjpeg"),
        (JPEGBaseline8Bit, "JPEG Baseline", "pylibjpeg pylibjpeg-libjpeg"),
        (MPEG2MPML, "MPEG2", "Export the series uncompressed"),
    ],
)
def test_d16_no_decoder(tmp_path: Path, syntax: str, name: str, package: str) -> None:
    """In a process in which no plugin can be imported: headers alone say so, before anything is read."""
    dataset = make_slice(0, SliceThickness=2)
    dataset.PixelData = encapsulate([b"\xff\xd8\xff\xd9"])
    save_slice(tmp_path / "squeezed.dcm", dataset, syntax=syntax)
    program = (
        "import pathlib, sys\n"
        "sys.modules.update({name: None for name in ('jpeg_ls', 'pylibjpeg', 'gdcm', 'PIL')})\n"
        "from medckpt.datasets.reading import read_grid, read_volume\n"
        "from medckpt.errors import DataError\n"
        "for read in (read_grid, read_volume):\n"
        "    try:\n        read(pathlib.Path(sys.argv[1]))\n"
        "    except DataError as error:\n        print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "squeezed.dcm: " in line
        assert name in line
        assert package in line


@pytest.mark.parametrize("syntax", [RLELossless, JPEGLSLossless])
def test_d16_compressed_series_read_the_same(tmp_path: Path, syntax: str) -> None:
    for k in range(6):
        dataset = make_slice(k, pixels=pattern(k), **stacked("coronal"))  # type: ignore[arg-type]
        save_slice(tmp_path / f"{k}.dcm", dataset)
        dataset.compress(syntax)
        dataset.save_as(tmp_path / f"{k}.dcm")
    assert_placed(read_volume(tmp_path), "coronal", range(6))
