"""Fault reports N1 to N22 on single files: where voxels lie, how many dimensions there are, what is written."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medckpt.blocks import DataConfig
from medckpt.datasets.prepare import normalize
from medckpt.datasets.reading import read_grid, read_label, read_volume, write_label
from medckpt.errors import DataError, GeometryError
from medckpt.geometry import Grid, grid_difference_mm, orthogonal_grid, resample, shear
from tests.cases.volumes import AXES, TURN, affine_of, numbers, save_itk, save_nifti

OFF_DIAGONAL = [(row, column) for row in range(3) for column in range(3) if row != column]


def sheared(amount: float, at: tuple[int, int], turn: bool) -> np.ndarray:
    """An affine whose axis `at[1]` leans towards `at[0]`, straight or turned in the patient."""
    lean = np.eye(3)
    lean[at] = amount
    return affine_of(TURN @ lean if turn else lean, (1.0, 1.0, 1.0))


# N1: axes that are not at right angles


@pytest.mark.parametrize("at", OFF_DIAGONAL)
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize(("amount", "named"), [(1e-5, False), (9e-5, False), (9e-4, True)])
def test_n1_small_shear_is_used_as_it_is_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: tuple[int, int], turn: bool, amount: float, named: bool
) -> None:
    affine = sheared(amount, at, turn)
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(save_nifti(tmp_path / "a.nii", numbers(), affine, codes=(0, 2)))
    np.testing.assert_allclose(volume.affine, affine, atol=5e-6)
    assert ("slightly sheared" in caplog.text) is named


@pytest.mark.parametrize("at", OFF_DIAGONAL)
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("amount", [2e-3, 0.1, -1.0])
def test_n1_large_shear_is_refused_or_resampled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: tuple[int, int], turn: bool, amount: float
) -> None:
    """What is linear in millimetres is linear after resampling: every inner voxel keeps its place in the patient."""
    grid = Grid(shape=(9, 10, 11), affine=sheared(amount, at, turn))
    places = np.stack(np.meshgrid(*map(np.arange, grid.shape), indexing="ij"), -1) @ grid.affine[:3, :3].T
    ramp = (places + grid.affine[:3, 3]) @ [1.0, -2.0, 0.5]
    path = save_nifti(tmp_path / "a.nii", ramp.astype(np.float32), grid.affine, codes=(0, 2))
    for read in (read_volume, read_label, read_grid):
        with pytest.raises(GeometryError, match=r"a\.nii: the axes are sheared.*data\.shear=resample"):
            read(path)
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(path, shear="resample")
    assert "a.nii: the axes are sheared" in caplog.text
    assert "resampled to an orthogonal grid" in caplog.text
    assert shear(volume.affine) < 1e-9
    np.testing.assert_allclose(read_grid(path, shear="resample").affine, volume.affine)
    places = np.stack(np.meshgrid(*map(np.arange, volume.array.shape), indexing="ij"), -1) @ volume.affine[:3, :3].T
    expected = (places + volume.affine[:3, 3]) @ [1.0, -2.0, 0.5]
    inside = resample(np.ones(grid.shape, np.float32), grid, volume.grid, order=1, fill=0) == 1
    inner = inside & (resample(np.pad(np.zeros(tuple(n - 2 for n in grid.shape), np.uint8) + 1, 1), grid, volume.grid,
                               order=0, fill=0) == 1)  # fmt: skip
    assert inner.sum() > 300
    np.testing.assert_allclose(volume.array[inner], expected[inner], atol=2e-4)
    # The whole volume is in it.
    corners = [grid.affine @ [*(n * (size - 1) for n, size in zip(corner, grid.shape, strict=True)), 1]
               for corner in itertools.product((0, 1), repeat=3)]  # fmt: skip
    indices = np.array([np.linalg.inv(volume.affine) @ corner for corner in corners])[:, :3]
    assert indices.min() > -0.5
    assert (indices.max(axis=0) < np.array(volume.array.shape) - 0.5).all()


def test_n1_slices_shifted_against_each_other_stay_slices() -> None:
    """A gantry tilt of 15 degrees: planes, pixels and their distance stay; only places within the plane move."""
    affine = np.diag([0.5, 0.5, 2.0, 1.0])
    affine[1, 2] = 2 * np.tan(np.radians(15))
    straight = orthogonal_grid(Grid(shape=(20, 30, 6), affine=affine))
    np.testing.assert_allclose(straight.affine[:3, :3], np.diag([0.5, 0.5, 2.0]), atol=1e-12)
    assert straight.shape == (20, 30 + int(np.ceil(5 * 2 * np.tan(np.radians(15)) / 0.5)), 6)
    np.testing.assert_allclose(straight.affine[:3, 3], 0, atol=1e-12)


def test_n1_a_label_goes_with_its_sheared_image(tmp_path: Path) -> None:
    affine = sheared(0.2, (0, 2), turn=True)
    image = save_nifti(tmp_path / "i.nii", numbers((9, 9, 9)), affine, codes=(0, 1))
    label = save_nifti(tmp_path / "l.nii", (numbers((9, 9, 9)) > 300).astype(np.int64), affine, codes=(0, 1))
    volume, mask = read_volume(image, shear="resample"), read_label(label, shear="resample")
    assert grid_difference_mm(volume.grid, mask.grid) < 1e-4
    agree = (volume.array > 300) == (mask.array == 1)
    assert agree.mean() > 0.97  # all but voxels on the edge


@pytest.mark.parametrize(
    ("suffix", "plain", "leaning"),
    [(".nrrd", b"(0,1,0)", b"(0.1,1,0)"), (".mha", b"TransformMatrix = 1 0 0 0 1", b"TransformMatrix = 1 0 0 0.1 1")],
)
def test_n1_itks_own_formats_follow_the_same_rule(tmp_path: Path, suffix: str, plain: bytes, leaning: bytes) -> None:
    path = save_itk(tmp_path / f"a{suffix}", numbers(), np.diag([-1.0, -1, 1, 1]))
    assert path.read_bytes().count(plain) == 1
    path.write_bytes(path.read_bytes().replace(plain, leaning))
    with pytest.raises(GeometryError, match=rf"a\{suffix}: the axes are sheared.*data\.shear=resample"):
        read_volume(path)
    affine = np.diag([-1.0, -1, 1, 1])
    affine[0, 1] = -0.1
    twin = read_volume(save_nifti(tmp_path / "a.nii", numbers(), affine, codes=(0, 1)), shear="resample")
    volume = read_volume(path, shear="resample")
    np.testing.assert_allclose(volume.affine, twin.affine, atol=1e-6)
    np.testing.assert_allclose(volume.array, twin.array, atol=1e-3)


# N2, N4: qform and sform


@pytest.mark.parametrize("codes", [(1, 1), (1, 2), (2, 1), (4, 3), (1, 0), (0, 1), (0, 4), (0, 0)])
@pytest.mark.parametrize("axes", AXES)
def test_n2_n4_the_sform_then_the_qform_then_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codes: tuple[int, int], axes: str
) -> None:
    sform, qform = affine_of(AXES[axes]), affine_of(AXES["LPS"])
    sform[:3, 3], qform[:3, 3] = (10, -5, 3), 0
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(save_nifti(tmp_path / "a.nii", numbers(), sform, qform=qform, codes=codes))
    if codes[1]:
        np.testing.assert_allclose(volume.affine, sform, atol=1e-5)
    elif codes[0]:
        np.testing.assert_allclose(volume.affine, qform, atol=1e-5)
    else:  # voxel sizes, first axis to the left, the middle of the volume at 0: nibabel's result
        expected = np.diag([-1.0, 0.75, 2.5, 1.0])
        expected[:3, 3] = [1.5, -1.5, -6.25]
        np.testing.assert_allclose(volume.affine, expected)
    assert ("qform and sform differ" in caplog.text) is (min(codes) > 0)
    assert ("no spatial information" in caplog.text) is (codes == (0, 0))


@pytest.mark.parametrize(("mm", "named"), [(0.09, False), (0.11, True)])
def test_n2_forms_may_differ_by_a_tenth_of_a_millimetre(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mm: float, named: bool
) -> None:
    sform = affine_of(TURN)
    qform = sform.copy()
    qform[:3, 3] += TURN[:, 1] * mm
    with caplog.at_level(logging.WARNING, "medckpt"):
        read_grid(save_nifti(tmp_path / "a.nii", numbers(), sform, qform=qform))
    assert ("qform and sform differ" in caplog.text) is named


# N10: no channel axis, no affine


def test_n10_an_array_without_its_grid_is_not_resampled() -> None:
    grid = Grid(shape=(4, 5, 6), affine=np.eye(4))
    for array in (np.zeros((1, 4, 5, 6)), np.zeros((5, 4, 6)), np.zeros((4, 5))):
        with pytest.raises(GeometryError, match="the array has shape"):
            resample(array, grid, grid, order=1, fill=0)
    for affine in (np.eye(3), np.full((4, 4), np.nan), np.zeros((4, 4)), np.diag([1.0, 1, 1, 2])):
        with pytest.raises(GeometryError, match="affine"):
            Grid(shape=(4, 5, 6), affine=affine)
    with pytest.raises(GeometryError, match="three axes"):
        Grid(shape=(1, 4, 5, 6), affine=np.eye(4))  # type: ignore[arg-type]


# N14, N18: what is written


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(0, 1, "u1"), (0, 255, "u1"), (0, 256, "i2"), (0, 32767, "i2"), (0, 32768, "i4"), (-1, 1, "i2"),
     (0, 2**31 - 1, "i4")],
)  # fmt: skip
@pytest.mark.parametrize("given", ["i8", "u8", "i4"])
def test_n14_the_smallest_type_that_every_tool_reads(
    tmp_path: Path, low: int, high: int, dtype: str, given: str
) -> None:
    if given == "u8" and low < 0:
        pytest.skip("an unsigned array has no negative value")
    array = np.zeros((3, 4, 5), given)
    array[0, 0, 0], array[2, 3, 4] = low, high
    write_label(tmp_path / "a.nii.gz", array, Grid(shape=array.shape, affine=affine_of(TURN)))
    assert nib.load(tmp_path / "a.nii.gz").get_data_dtype() == np.dtype(dtype)
    image = sitk.ReadImage(str(tmp_path / "a.nii.gz"))
    assert (image[0, 0, 0], image[2, 3, 4]) == (low, high)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("codes", [(1, 1), (0, 2), (2, 0), (4, 1), (0, 0)])
def test_n18_a_mask_lies_on_its_image_in_every_viewer(tmp_path: Path, axes: str, codes: tuple[int, int]) -> None:
    scan = read_volume(save_nifti(tmp_path / "scan.nii", numbers(), affine_of(AXES[axes]), codes=codes))
    write_label(tmp_path / "mask.nii.gz", (scan.array > 60).astype(np.uint8), scan.grid)
    mask = nib.load(tmp_path / "mask.nii.gz")
    (qform, q_code), (sform, s_code) = mask.get_qform(coded=True), mask.get_sform(coded=True)
    assert q_code == s_code == 1
    np.testing.assert_allclose(sform, scan.affine, atol=1e-5)
    np.testing.assert_allclose(qform, scan.affine, atol=1e-5)
    np.testing.assert_allclose(mask.affine, scan.affine, atol=1e-5)
    assert mask.header.get_xyzt_units()[0] == "mm"
    point = np.array([-1, -1, 1]) * sitk.ReadImage(str(tmp_path / "mask.nii.gz")).TransformIndexToPhysicalPoint(
        (3, 4, 5)
    )
    np.testing.assert_allclose((scan.affine @ [3, 4, 5, 1])[:3], point, atol=1e-4)
    np.testing.assert_array_equal(read_label(tmp_path / "mask.nii.gz").array, numbers() > 60)


def test_n18_where_no_qform_can_equal_the_sform_there_is_none(tmp_path: Path) -> None:
    """A shear of 9e-4 over 500 mm is 0.2 mm between the forms: a reader of the qform would be misled."""
    for shape, code in (((4, 5, 6), 1), ((4, 500, 6), 0)):
        grid = Grid(shape=shape, affine=sheared(9e-4, (0, 1), turn=False))
        write_label(tmp_path / "a.nii.gz", np.zeros(shape, np.uint8), grid)
        image = nib.load(tmp_path / "a.nii.gz")
        assert int(image.header["qform_code"]) == code
        np.testing.assert_allclose(image.affine, grid.affine, atol=1e-6)


# N16: dimensions


@pytest.mark.parametrize("shape", [(9, 8, 7, 1), (9, 8, 7, 1, 1), (9, 8, 7, 1, 1, 1, 1), (9, 8, 1, 1), (1, 8, 7, 1)])
@pytest.mark.parametrize("suffix", [".nii.gz", ".hdr"])
def test_n16_trailing_axes_of_one_are_dropped(tmp_path: Path, shape: tuple[int, ...], suffix: str) -> None:
    path = save_nifti(tmp_path / f"a{suffix}", numbers(shape), affine_of(TURN))
    for read in (read_volume, read_label):
        np.testing.assert_array_equal(read(path).array, numbers(shape).reshape(shape[:3]))
    assert read_grid(path).shape == shape[:3]


@pytest.mark.parametrize(
    ("shape", "match"),
    [((9, 9, 9, 6), "channels or time points"), ((9, 9, 1, 6), "channels or time points"), ((9, 9), "flat image"),
     ((9,), "flat image"), ((9, 9, 9, 1, 3), "5-dimensional"), ((9, 9, 9, 2, 1), "channels or time points")],
)  # fmt: skip
def test_n16_other_dimensions_are_refused_by_name(tmp_path: Path, shape: tuple[int, ...], match: str) -> None:
    path = save_nifti(tmp_path / "a.nii.gz", numbers(shape), affine_of(np.eye(3)))
    for read in (read_volume, read_label, read_grid):
        with pytest.raises(DataError, match=rf"a\.nii\.gz: shape .*{match}"):
            read(path)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_n16_itk_files_follow_the_same_rule(tmp_path: Path, suffix: str) -> None:
    def save(shape: tuple[int, ...]) -> Path:
        image = sitk.GetImageFromArray(numbers(shape[::-1]), isVector=False)
        image.SetSpacing([2.0, 3.0, 4.0, 5.0][: len(shape)])
        sitk.WriteImage(image, str(tmp_path / f"a{suffix}"))
        return tmp_path / f"a{suffix}"

    path = save((4, 5, 6, 1))
    np.testing.assert_array_equal(read_volume(path).array, numbers((6, 5, 4)).transpose(2, 1, 0))
    np.testing.assert_array_equal(read_label(path).array, numbers((6, 5, 4)).transpose(2, 1, 0))
    assert read_grid(path).spacing_mm == (2, 3, 4)
    for shape in ((4, 5, 6, 2), (4, 5)):
        with pytest.raises(DataError, match=rf"a\{suffix}: {len(shape)} dimensions .* one 3D volume"):
            read_volume(save(shape))


# N21: NaN and constant volumes


@pytest.mark.parametrize("suffix", [".nii.gz", ".nrrd", ".mha"])
@pytest.mark.parametrize("values", [(np.nan, 1, 0), (np.inf, 0, 1), (-np.inf, 0, 1)])
def test_n21_nan_and_infinity_are_counted(tmp_path: Path, suffix: str, values: tuple[float, int, int]) -> None:
    value, nan, infinite = values
    array = numbers(dtype=np.float32)
    array[1, 2, 3] = value
    path = tmp_path / f"a{suffix}"
    save_nifti(path, array, affine_of(TURN)) if suffix == ".nii.gz" else save_itk(path, array, affine_of(TURN))
    with pytest.raises(DataError, match=rf"a\{suffix}: {nan} NaN and {infinite} infinite voxels of 120"):
        read_volume(path)
    with pytest.raises(DataError, match=rf"a\{suffix}: 1 NaN or infinite voxels in a label map"):
        read_label(path)


@pytest.mark.parametrize("intensity", ["zscore", "window"])
@pytest.mark.parametrize("value", [0.0, 7.0, -3e30])
def test_n21_a_constant_volume_is_no_division_by_zero(intensity: str, value: float) -> None:
    result = normalize(np.full((4, 5, 6), value, np.float32), DataConfig(intensity=intensity))  # type: ignore[arg-type]
    assert np.isfinite(result).all()
    assert np.ptp(result) == 0
    if intensity == "zscore":
        assert not result.any()
