"""Enhanced and legacy-converted multi-frame files, against highdicom's reading of the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.uid import JPEGLSLossless, RLELossless

from medckpt.blocks import DicomConfig
from medckpt.datasets.reading import read_grid, read_volume
from medckpt.errors import DataError, GeometryError
from medckpt.geometry import Volume
from tests.cases.dicom_planes import ORIGIN, assert_placed, every_plane, normal, pattern, stacked
from tests.conftest import shared_data
from tests.datasets.dicom_maker import make_frames, make_series, save_slice


def assert_as_highdicom(volume: Volume, file: Path) -> None:
    """highdicom's volume is indexed (slice, row, column), maybe from the other end, with an LPS affine."""
    import highdicom as hd

    theirs = hd.imread(file).get_volume(apply_real_world_transform=False, rtol=0.05)
    array, affine = theirs.array.transpose(2, 1, 0), theirs.affine[:, [2, 1, 0, 3]]
    if np.linalg.det(affine[:3, :3]) < 0:
        array = array[:, :, ::-1]
        affine = affine @ np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, array.shape[2] - 1], [0, 0, 0, 1.0]])
    np.testing.assert_allclose(volume.affine, np.diag([-1, -1, 1, 1]) @ affine, atol=1e-3)
    np.testing.assert_allclose(volume.array, array, rtol=1e-6, atol=1e-5)


@every_plane
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_frames_in_any_order(tmp_path: Path, plane: str, legacy: bool, shared: bool) -> None:
    file = tmp_path / "mf.dcm"
    make_frames(file, [4, 0, 3, 1, 5, 2], pixels=pattern, legacy=legacy, shared_orientation=shared, **stacked(plane))  # type: ignore[arg-type]
    volume = read_volume(tmp_path)
    assert_placed(volume, plane, range(6))
    assert_as_highdicom(volume, file)
    assert read_grid(tmp_path) == volume.grid


@pytest.mark.parametrize("syntax", [RLELossless, JPEGLSLossless])
def test_compressed_frames(tmp_path: Path, syntax: str) -> None:
    make_frames(tmp_path / "mf.dcm", [2, 0, 3, 1], pixels=pattern, syntax=syntax, **stacked("oblique"))  # type: ignore[arg-type]
    assert_placed(read_volume(tmp_path), "oblique", range(4))


def test_rescale_of_each_frame(tmp_path: Path) -> None:
    file = make_frames(tmp_path / "mf.dcm", [3, 0, 2, 1], rescale=lambda k: (1.5 + k, -10.0 * k))
    volume = read_volume(tmp_path)
    assert volume.array[0, 0].tolist() == [k * (1.5 + k) - 10 * k for k in range(4)]
    assert_as_highdicom(volume, file)


def test_rescale_among_the_unassigned_attributes(tmp_path: Path) -> None:
    file = make_frames(tmp_path / "mf.dcm", range(4), rescale=None, legacy=True)
    dataset = dcmread(file)
    for k, groups in enumerate(dataset.PerFrameFunctionalGroupsSequence):
        item = Dataset()
        item.RescaleSlope, item.RescaleIntercept = 2, k
        groups.UnassignedPerFrameConvertedAttributesSequence = [item]
    dataset.save_as(file)
    assert read_volume(tmp_path).array[0, 0].tolist() == [0, 3, 6, 9]


def test_a_frame_that_is_missing(tmp_path: Path) -> None:
    make_frames(tmp_path / "mf.dcm", [0, 1, 3, 4], pixels=pattern, **stacked("coronal"))  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match=r"missing: 1 between mf\.dcm frame 2 .* and mf\.dcm frame 3"):
        read_volume(tmp_path)
    assert_placed(read_volume(tmp_path, DicomConfig(gaps="interpolate")), "coronal", range(5))


def test_frames_of_several_times(tmp_path: Path) -> None:
    times = iter([1, 1, 1, 1, 2, 2, 2, 2])
    make_frames(tmp_path / "mf.dcm", [0, 1, 2, 3] * 2, frame_content=lambda k: {"TemporalPositionIndex": next(times)})
    for path in (tmp_path, tmp_path / "mf.dcm"):
        with pytest.raises(DataError, match=r"2 image stacks .*They lie in one file.*dcm2niix"):
            read_volume(path)


def test_repeated_frames(tmp_path: Path) -> None:
    values = iter([0, 1, 2, 3, 100, 101, 102, 103])
    make_frames(tmp_path / "mf.dcm", [0, 1, 2, 3] * 2, pixels=lambda k: np.full((8, 10), next(values), np.int16))
    with pytest.raises(GeometryError, match=r"mf\.dcm frame 1 and mf\.dcm frame 5 lie at the same position"):
        read_volume(tmp_path)
    assert read_volume(tmp_path, DicomConfig(duplicates="first")).array[0, 0].tolist() == [0, 1, 2, 3]
    assert read_volume(tmp_path, DicomConfig(duplicates="last")).array[0, 0].tolist() == [100, 101, 102, 103]


def test_tilted_frames(tmp_path: Path) -> None:
    step = 2 * normal("axial") + np.array([0, 0.5, 0])
    make_frames(tmp_path / "mf.dcm", range(4), position=lambda k: ORIGIN + k * step)
    with pytest.raises(GeometryError, match=r"tilted by 14\.0 degrees"):
        read_volume(tmp_path)
    assert read_volume(tmp_path, DicomConfig(tilt="resample")).array.shape == (10, 8 + 2, 4)


@pytest.mark.parametrize("fault", ["no groups", "fewer groups", "no position"])
def test_frames_without_a_place(tmp_path: Path, fault: str) -> None:
    file = make_frames(tmp_path / "mf.dcm", range(4))
    dataset = dcmread(file)
    groups = dataset.PerFrameFunctionalGroupsSequence
    if fault == "no groups":
        del dataset.PerFrameFunctionalGroupsSequence
    elif fault == "fewer groups":
        del groups[3]
    else:
        del groups[3].PlanePositionSequence
    dataset.save_as(file)
    with pytest.raises(DataError, match=r"functional groups for (none|3) of its frames|no usable ImagePositionPatient"):
        read_volume(tmp_path)


def test_frames_beside_a_series(tmp_path: Path) -> None:
    make_series(tmp_path)
    make_frames(tmp_path / "mf.dcm", range(4), SeriesInstanceUID="1.2.3")
    with pytest.raises(DataError, match="2 image stacks"):
        read_volume(tmp_path)
    assert read_volume(tmp_path / "mf.dcm").array.shape[2] == 4
    assert read_volume(tmp_path / "0.dcm").array.shape[2] == 6


def test_frames_cut_short(tmp_path: Path) -> None:
    file = make_frames(tmp_path / "mf.dcm", range(4))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"mf\.dcm: the pixels .* do not decode"):
        read_volume(tmp_path)


def test_the_fields_of_a_single_frame_file_are_not_taken_for_a_frame(tmp_path: Path) -> None:
    """A top-level position in an enhanced file is none: only functional groups place its frames."""
    file = make_frames(tmp_path / "mf.dcm", range(4), pixels=pattern, **stacked("axial"))  # type: ignore[arg-type]
    dataset = dcmread(file)
    dataset.ImagePositionPatient, dataset.PixelSpacing = [9, 9, 9], [7, 7]
    save_slice(file, dataset)
    assert_placed(read_volume(tmp_path), "axial", range(4))


def test_a_real_legacy_converted_file_and_the_series_it_was_made_of() -> None:
    folder = shared_data("dcmqi/23x38x3/multiframe")
    volume = read_volume(folder)
    assert_as_highdicom(volume, next(folder.iterdir()))
    series = read_volume(shared_data("dcmqi/23x38x3/image"))
    np.testing.assert_allclose(volume.affine, series.affine, atol=1e-6)
    np.testing.assert_array_equal(volume.array, series.array)
