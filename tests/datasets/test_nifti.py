"""NIfTI and ITK files: fault reports N1 to N21 that touch reading and writing, and real oddities."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medckpt.datasets.reading import read_grid, read_label, read_volume, source_files, write_label
from medckpt.errors import DataError, GeometryError
from medckpt.geometry import Grid, grid_difference_mm, same_grid, shear
from tests.conftest import shared_data

AFFINE = np.array([[-1.0, 0, 0, 10], [0, 2.0, 0, -5], [0, 0, 3.0, 3], [0, 0, 0, 1]])


def save(
    path: Path,
    array: np.ndarray | None = None,
    *,
    affine: np.ndarray = AFFINE,
    qform: np.ndarray | None = None,
    codes: tuple[int, int] = (1, 1),
    units: str = "mm",
) -> Path:
    """Writes a NIfTI file with qform and sform (both `affine` unless given) and their codes."""
    array = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6) if array is None else array
    image = nib.Nifti1Image(array, affine, dtype=array.dtype)
    image.header.set_qform(affine if qform is None else qform, code=codes[0])
    image.header.set_sform(affine, code=codes[1])
    image.header.set_xyzt_units(units)
    nib.Nifti1Image(array, None, image.header).to_filename(path)
    return path


def test_plain_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.nii.gz")
    volume = read_volume(path)
    assert volume.array.dtype == np.float32
    assert volume.source == path
    np.testing.assert_array_equal(volume.array, np.arange(120).reshape(4, 5, 6))
    np.testing.assert_allclose(volume.affine, AFFINE)
    assert read_grid(path) == volume.grid


# N1: axes that are not quite at right angles


@pytest.mark.parametrize(("off", "warned"), [(1e-5, False), (9e-5, False), (1e-3, True)])
def test_small_shear_is_loaded_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, off: float, warned: bool
) -> None:
    affine = np.eye(4)
    affine[0, 1] = off
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(save(tmp_path / "a.nii.gz", affine=affine, codes=(0, 2)))
    np.testing.assert_allclose(volume.affine, affine, atol=1e-9)
    assert ("slightly sheared" in caplog.text) is warned


def test_large_shear_is_refused(tmp_path: Path) -> None:
    affine = np.eye(4)
    affine[0, 1] = 0.1
    path = save(tmp_path / "a.nii.gz", affine=affine, codes=(0, 2))
    for read in (read_volume, read_label, read_grid):
        with pytest.raises(GeometryError, match=r"a\.nii\.gz: the axes are sheared, .* 0\.1 .*orthogonal grid"):
            read(path)


# N2, N4: qform and sform


@pytest.mark.parametrize(
    ("codes", "origin", "warned"),
    [
        ((1, 1), [10, -5, 3], True),
        ((1, 2), [10, -5, 3], True),
        ((1, 0), [0, 0, 0], False),
        ((0, 1), [10, -5, 3], False),
    ],
)
def test_sform_before_qform(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codes: tuple[int, int], origin: list[float], warned: bool
) -> None:
    qform = AFFINE.copy()
    qform[:3, 3] = 0
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(save(tmp_path / "a.nii.gz", qform=qform, codes=codes))
    np.testing.assert_allclose(volume.affine[:3, 3], origin)
    assert ("a.nii.gz: qform and sform differ by 11.6 mm" in caplog.text) is warned  # |(10, -5, 3)|


def test_no_spatial_information(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(save(tmp_path / "a.nii.gz", affine=np.diag([1.0, 1, 2, 1]), codes=(0, 0)))
    assert "no spatial information" in caplog.text
    assert volume.grid.spacing_mm == (1, 1, 2)
    np.testing.assert_array_equal(volume.affine, nib.load(tmp_path / "a.nii.gz").affine)


@pytest.mark.parametrize(("units", "factor"), [("mm", 1), ("unknown", 1), ("micron", 1e-3), ("meter", 1e3)])
def test_lengths_become_millimetres(tmp_path: Path, units: str, factor: float) -> None:
    volume = read_volume(save(tmp_path / "a.nii.gz", units=units))
    np.testing.assert_allclose(volume.affine[:3], AFFINE[:3] * factor)


# N14: what is written


@pytest.mark.parametrize(
    ("values", "dtype"), [([0, 255], "uint8"), ([0, 256], "int16"), ([-1, 3], "int16"), ([0, 40000], "int32")]
)
def test_written_labels(tmp_path: Path, values: list[int], dtype: str) -> None:
    grid = Grid(shape=(3, 4, 5), affine=AFFINE)
    array = np.zeros((3, 4, 5), np.int64)
    array[0, 0, 0], array[1, 2, 3] = values
    path = tmp_path / "new" / "label.nii.gz"
    write_label(path, array, grid)
    image = nib.load(path)
    assert image.get_data_dtype() == np.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(image.dataobj), array)
    assert (int(image.header["qform_code"]), int(image.header["sform_code"])) == (1, 1)
    np.testing.assert_allclose(image.get_qform(), AFFINE, atol=1e-6)
    np.testing.assert_allclose(image.get_sform(), AFFINE, atol=1e-6)
    assert image.header.get_xyzt_units()[0] == "mm"
    by_itk = sitk.ReadImage(str(path))
    assert by_itk.GetOrigin() == pytest.approx((-10, 5, 3))  # the same place in LPS
    assert by_itk[1, 2, 3] == values[1]
    assert os.listdir(path.parent) == ["label.nii.gz"]
    first = path.read_bytes()
    assert first[4:8] == bytes(4)  # no time in the gzip header
    write_label(path, array, grid)
    assert path.read_bytes() == first


def test_label_round_trip_on_an_oblique_grid(tmp_path: Path) -> None:
    source = shared_data("nifti_oddities/dipy/aniso_vox.nii.gz")
    grid = read_grid(source)
    array = np.random.default_rng(0).integers(0, 4, grid.shape)
    write_label(tmp_path / "a.nii.gz", array, grid)
    label = read_label(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(label.array, array)
    assert grid_difference_mm(label.grid, grid) < 1e-3


def test_what_is_not_written(tmp_path: Path) -> None:
    grid = Grid(shape=(2, 2, 2), affine=np.eye(4))
    sheared = np.eye(4)
    sheared[0, 1] = 0.2
    for path, array, where, match in [
        (tmp_path / "a.nii", np.zeros((2, 2, 2), int), grid, r"\.nii\.gz"),
        (tmp_path / "a.nii.gz", np.zeros((2, 2, 3), int), grid, "shape"),
        (tmp_path / "a.nii.gz", np.zeros((2, 2, 2)), grid, "integers, not float64"),
        (tmp_path / "a.nii.gz", np.full((2, 2, 2), 2**31), grid, "int32"),
        (tmp_path / "a.nii.gz", np.zeros((2, 2, 2), int), Grid(shape=(2, 2, 2), affine=sheared), "sheared"),
    ]:
        with pytest.raises(DataError, match=match):
            write_label(path, array, where)
    assert list(tmp_path.iterdir()) == []


# N16: dimensions


@pytest.mark.parametrize("shape", [(9, 8, 7, 1), (9, 8, 7, 1, 1)])
def test_trailing_axes_of_one_are_dropped(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.arange(504, dtype=np.int16).reshape(shape)
    path = save(tmp_path / "a.nii.gz", array)
    np.testing.assert_array_equal(read_volume(path).array, array.reshape(9, 8, 7))
    np.testing.assert_array_equal(read_label(path).array, array.reshape(9, 8, 7))


@pytest.mark.parametrize(
    ("shape", "match"), [((9, 9, 9, 6), "channels or time points"), ((9, 9), "flat image"), ((9, 9, 9, 1, 3), "5-dim")]
)
def test_other_dimensions_are_refused(tmp_path: Path, shape: tuple[int, ...], match: str) -> None:
    path = save(tmp_path / "a.nii.gz", np.zeros(shape, np.int16))
    for read in (read_volume, read_label, read_grid):
        with pytest.raises(DataError, match=rf"a\.nii\.gz.*{match}"):
            read(path)


def test_colour_and_complex_are_refused(tmp_path: Path) -> None:
    rgb = np.zeros((3, 3, 3), np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")]))
    with pytest.raises(DataError, match="colour"):
        read_volume(save(tmp_path / "rgb.nii.gz", rgb))
    with pytest.raises(DataError, match="complex64"):
        read_volume(save(tmp_path / "complex.nii.gz", np.zeros((3, 3, 3), np.complex64)))


# N21: NaN


def test_nan_and_infinity_are_counted(tmp_path: Path) -> None:
    array = np.zeros((4, 5, 6), np.float32)
    array[0, 0, 0] = np.nan
    array[1, 1, :2] = [np.inf, -np.inf]
    with pytest.raises(DataError, match=r"a\.nii\.gz: 1 NaN and 2 infinite voxels of 120"):
        read_volume(save(tmp_path / "a.nii.gz", array))


def test_huge_but_finite_values_are_read(tmp_path: Path) -> None:
    array = np.full((4, 5, 6), 3e38, np.float32)
    assert read_volume(save(tmp_path / "a.nii.gz", array)).array.max() == np.float32(3e38)


# Labels


@pytest.mark.parametrize(
    ("dtype", "high", "expected"), [("int64", 2, "uint8"), ("int16", 300, "uint16"), ("float64", 70000, "uint32")]
)
def test_label_dtype(tmp_path: Path, dtype: str, high: int, expected: str) -> None:
    array = np.zeros((3, 3, 3), dtype)
    array[1, 1, 1] = high
    label = read_label(save(tmp_path / "a.nii.gz", array))
    assert label.array.dtype == np.dtype(expected)
    np.testing.assert_array_equal(label.array, array)


def test_almost_whole_labels_are_rounded(tmp_path: Path) -> None:
    array = np.array([0.99999997, 2.0005, 1e-9], np.float64).reshape(3, 1, 1)
    assert read_label(save(tmp_path / "a.nii.gz", array)).array.ravel().tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("values", "match"),
    [([0, 0.5, 1], r"1 of 3 voxels are no whole numbers \(one is 0\.5\)"), ([0, -1, 2], "from -1 to 2"),
     ([0, np.nan, 1], "1 NaN or infinite"), ([0, 1e30, 1], "at most 2147483647")],
)  # fmt: skip
def test_what_is_no_label_map(tmp_path: Path, values: list[float], match: str) -> None:
    with pytest.raises(DataError, match=rf"a\.nii\.gz.*{match}"):
        read_label(save(tmp_path / "a.nii.gz", np.array(values, np.float64).reshape(3, 1, 1)))


# Files that cannot be read


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    for name, match in [("none.nii.gz", "no such file"), ("a.png", r"not a format .* Known: \.nii\.gz")]:
        for read in (read_volume, read_label, read_grid):
            with pytest.raises(DataError, match=match):
                read(tmp_path / name)


def test_an_offset_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a.nii")
    content = bytearray(path.read_bytes())
    content[108:112] = np.float32(np.inf).tobytes()  # vox_offset
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.nii"):
        read_volume(path)


@pytest.mark.parametrize("keep", [0, 100, 500])
@pytest.mark.parametrize("suffix", [".nii.gz", ".nii"])
def test_truncated_files_are_named(tmp_path: Path, suffix: str, keep: int) -> None:
    array = np.random.default_rng(0).integers(0, 999, (8, 9, 10)).astype(np.int16)
    path = save(tmp_path / f"a{suffix}", array)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.nii.*cannot be read as NIfTI.*complete"):
        read_volume(path)


def test_zero_sform_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.nii")
    raw = bytearray(path.read_bytes())
    raw[280:328] = bytes(48)  # srow_x, srow_y, srow_z
    path.write_bytes(raw)
    with pytest.raises(GeometryError, match=r"a\.nii: the affine flattens"):
        read_volume(path)


# ITK's formats


@pytest.mark.parametrize("suffix", [".nrrd", ".mha", ".mhd"])
def test_itk_formats_agree_with_nifti(tmp_path: Path, suffix: str) -> None:
    nifti = save(tmp_path / "a.nii.gz", codes=(1, 1))
    if suffix == ".mhd":  # SimpleITK puts the voxels of an .mhd into a second file: this one holds them itself
        sitk.WriteImage(sitk.ReadImage(str(nifti)), str(tmp_path / "a.mha"))
        (tmp_path / "a.mha").rename(tmp_path / "a.mhd")
    else:
        sitk.WriteImage(sitk.ReadImage(str(nifti)), str(tmp_path / f"a{suffix}"))
    by_nifti, by_itk = read_volume(nifti), read_volume(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(by_itk.array, by_nifti.array)
    assert by_itk.array.dtype == np.float32
    np.testing.assert_allclose(by_itk.affine, AFFINE, atol=1e-6)
    np.testing.assert_array_equal(read_label(tmp_path / f"a{suffix}").array, by_nifti.array)


@pytest.mark.parametrize("compressed", [False, True])
def test_voxels_in_a_file_beside_the_header(tmp_path: Path, compressed: bool) -> None:
    array = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    sitk.WriteImage(sitk.GetImageFromArray(array), str(tmp_path / "a.mhd"), compressed)
    shutil.copy(tmp_path / "a.mhd", tmp_path / "b.mha")
    (tmp_path / "c.nrrd").write_text(
        "NRRD0004\ntype: short\ndimension: 3\nsizes: 5 4 3\nencoding: raw\nendian: little\n"
        "space: left-posterior-superior\nspace directions: (1,0,0) (0,1,0) (0,0,1)\ndata file: a.raw\n"
    )
    voxels = tmp_path / ("a.zraw" if compressed else "a.raw")
    for name in ("a.mhd", "b.mha") if compressed else ("a.mhd", "b.mha", "c.nrrd"):
        np.testing.assert_array_equal(read_volume(tmp_path / name).array, array.transpose(2, 1, 0))
        assert source_files(tmp_path / name) == [tmp_path / name, voxels]
    voxels.write_bytes(voxels.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"a\.mhd"):
        read_volume(tmp_path / "a.mhd")
    voxels.unlink()
    for read in (read_volume, read_label, read_grid):
        with pytest.raises(DataError, match=rf"a\.mhd: the voxels are not there; put {voxels.name} beside it"):
            read(tmp_path / "a.mhd")


@pytest.mark.parametrize("named", ["/etc/passwd", "../a.raw", "LIST", "slice%03d.raw 1 3 1"])
def test_voxels_elsewhere_are_refused(tmp_path: Path, named: str) -> None:
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((3, 4, 5), np.int16)), str(tmp_path / "a.mhd"))
    path = tmp_path / "a.mhd"
    path.write_text(path.read_text().replace("a.raw", named))
    with pytest.raises(DataError, match=r"a\.mhd: the voxels lie elsewhere \(.*\).*a\.mha"):
        read_volume(path)
    assert source_files(path) == [path]


def test_itk_files_that_are_refused(tmp_path: Path) -> None:
    sitk.WriteImage(sitk.Image([3, 3, 3], sitk.sitkVectorUInt8, 3), str(tmp_path / "rgb.mha"))
    (tmp_path / "bad.nrrd").write_text("NRRD0004\nrubbish")
    with pytest.raises(DataError, match=r"rgb\.mha: 3 dimensions with 3 components"):
        read_volume(tmp_path / "rgb.mha")
    with pytest.raises(DataError, match=r"bad\.nrrd: ITK cannot read"):
        read_volume(tmp_path / "bad.nrrd")


# Real files


@pytest.mark.parametrize(
    "name",
    [
        "nifti_oddities/nibabel/anatomical.nii",  # big-endian
        "nifti_oddities/derived/sct_t2_scl_slope.nii.gz",
        "nifti_oddities/derived/sct_t2_plain_uncompressed.nii",
        "nifti_oddities/niivue/CT_pitch.nii.gz",
        "soft_tissue_sarcoma/nifti/STS_002_CT_image.nii.gz",  # sform_code 0
        "totalsegmentator/ct_abdomen_sm.nii.gz",
    ],
)
def test_real_images_equal_nibabel_and_simpleitk(name: str) -> None:
    path = shared_data(name)
    volume = read_volume(path)
    reference = nib.load(path)
    np.testing.assert_allclose(volume.array, reference.get_fdata(), rtol=1e-6)
    np.testing.assert_allclose(volume.affine, reference.affine)
    image = sitk.ReadImage(str(path), sitk.sitkFloat32)
    np.testing.assert_allclose(volume.array, sitk.GetArrayFromImage(image).transpose(2, 1, 0), rtol=1e-5)
    far = [n - 1 for n in volume.array.shape]
    point = np.array([-1, -1, 1]) * image.TransformIndexToPhysicalPoint(far)
    np.testing.assert_allclose(volume.affine[:3] @ [*far, 1], point, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nifti_oddities/nibabel/example4d.nii.gz", "channels or time points"),
        ("spinal_cord_sct/dmri.nii.gz", "channels or time points"),
        ("spinal_cord_sct/fmri_tsnr.nii.gz", "408 NaN and 0 infinite"),
        ("totalsegmentator/rgb24_spine_report.nii.gz", "colour"),
        ("nifti_oddities/dipy/S0_10slices.nii.gz", "sheared"),
    ],
)
def test_real_files_that_are_refused(name: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        read_volume(shared_data(name))


@pytest.mark.parametrize("stored", ["float64", "int64"])
def test_real_labels_in_odd_types(stored: str) -> None:
    label = read_label(shared_data(f"nifti_oddities/derived/sct_t2_seg_{stored}.nii.gz"))
    assert label.array.dtype == np.uint8
    assert np.bincount(label.array.ravel()).tolist() == [167325, 4275]


def test_real_scaled_label() -> None:
    """int32 with scl_slope 2.3e-10 and scl_inter 0.5: the stored values come back as 0 and 0.99999997."""
    label = read_label(shared_data("brats2015_deepmedic_NC/brats_2013_pat0006_1/brainmask.nii.gz"))
    assert np.bincount(label.array.ravel()).tolist() == [7843905, 1084095]


def test_real_qform_sform_mismatch_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "medckpt"):
        read_grid(shared_data("nifti_oddities/derived/sct_t2_qform_sform_mismatch.nii.gz"))
    assert "qform and sform differ" in caplog.text


def test_real_pairs_share_a_grid() -> None:
    for image, label in [
        ("spine_tptbox/ct/sub-ct_label-22_ct.nii.gz", "spine_tptbox/ct/sub-ct_seg-vert_label-22_msk.nii.gz"),
        ("spinal_cord_sct/t2.nii.gz", "spinal_cord_sct/t2_seg-manual.nii.gz"),
        ("totalsegmentator/ct_abdomen_sm.nii.gz", "totalsegmentator/ct_abdomen_sm_seg117.nii.gz"),
    ]:
        assert same_grid(read_grid(shared_data(image)), read_grid(shared_data(label)))
    ct, mr = (read_grid(shared_data(f"soft_tissue_sarcoma/nifti/STS_002_{m}_image.nii.gz")) for m in ("CT", "MR_T1"))
    assert not same_grid(ct, mr)
    assert max(shear(ct.affine), shear(mr.affine)) < 1e-6


def test_non_ascii_path(tmp_path: Path) -> None:
    folder = tmp_path / "Sättiger_肺"
    folder.mkdir()
    shutil.copy(save(tmp_path / "a.nii.gz"), folder / "1·0.nii.gz")
    assert read_volume(folder / "1·0.nii.gz").array.shape == (4, 5, 6)
