"""One volume, one answer: the same voxels and millimetres from every format, byte order, type and unit."""

from __future__ import annotations

import gzip
import logging
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medckpt.datasets.reading import read_grid, read_label, read_volume, source_files
from medckpt.errors import DataError, GeometryError
from medckpt.inference.inputs import find_inputs
from tests.cases.volumes import AXES, affine_of, numbers, save_any, save_itk, save_nifti

SUFFIXES = [".nii", ".nii.gz", ".hdr", ".nrrd", ".mha", ".mhd"]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_one_answer(tmp_path: Path, suffix: str, axes: str) -> None:
    array, affine = numbers(), affine_of(AXES[axes])
    path = save_any(tmp_path / f"a{suffix}", array, affine)
    volume = read_volume(path)
    assert volume.array.dtype == np.float32
    np.testing.assert_array_equal(volume.array, array)
    np.testing.assert_allclose(volume.affine, affine, atol=2e-6)
    np.testing.assert_array_equal(read_label(path).array, array)
    np.testing.assert_allclose(read_grid(path).affine, volume.affine)
    # ITK's own reading of the same file, voxel by voxel and in LPS.
    image = sitk.ReadImage(str(path.with_suffix(".img") if suffix == ".hdr" else path))
    for index in ((0, 0, 0), (3, 4, 5), (1, 4, 2)):
        assert image[index] == array[index]
        point = np.array([-1, -1, 1]) * image.TransformIndexToPhysicalPoint(index)
        np.testing.assert_allclose((volume.affine @ [*index, 1])[:3], point, atol=1e-4)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "u4", "f4", "f8", "i8", "u8"])
@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("suffix", [".nii", ".hdr"])
def test_types_and_byte_orders(tmp_path: Path, dtype: str, big_endian: bool, suffix: str) -> None:
    array = numbers(dtype=dtype)
    path = save_nifti(tmp_path / f"a{suffix}", array, affine_of(np.eye(3)), big_endian=big_endian)
    assert nib.load(path).header.endianness == (">" if big_endian else "<")
    np.testing.assert_array_equal(read_volume(path).array, array)
    label = read_label(path)
    np.testing.assert_array_equal(label.array, array)
    assert label.array.dtype == np.uint8


@pytest.mark.parametrize("scaling", [(0.5, -100.0), (-1.0, 7.0), (1.0, 0.0), (0.0, 5.0), (np.nan, np.nan)])
def test_scaling(tmp_path: Path, scaling: tuple[float, float]) -> None:
    """The rule of NIfTI: value = slope * stored + intercept, unless the slope is 0 (or nothing at all)."""
    path = save_nifti(tmp_path / "a.nii", numbers(), affine_of(np.eye(3)))
    raw = bytearray(path.read_bytes())
    raw[112:120] = np.array(scaling, "<f4").tobytes()
    path.write_bytes(raw)
    slope, intercept = scaling if np.isfinite(scaling[0]) and scaling[0] else (1.0, 0.0)
    np.testing.assert_allclose(read_volume(path).array, numbers() * slope + intercept)


def test_a_scaled_label_is_read_as_what_it_means(tmp_path: Path) -> None:
    """int32 with a slope of 2.3e-10 and 0.5: the stored 1 reads 0.99999997, and truncation would empty the mask."""
    stored = np.where(numbers() % 3 == 0, 2**31 - 1, -(2**31) + 1).astype(np.int32)
    path = save_nifti(tmp_path / "a.nii", stored, affine_of(np.eye(3)))
    raw = bytearray(path.read_bytes())
    raw[112:120] = np.array((2.3283064e-10, 0.5), "<f4").tobytes()
    path.write_bytes(raw)
    np.testing.assert_array_equal(read_label(path).array, numbers() % 3 == 0)


@pytest.mark.parametrize("value", [0.99999997, 1.0009, 0.9991])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_almost_whole_labels(tmp_path: Path, suffix: str, value: float) -> None:
    array = np.where(numbers() > 60, value, 0.0)
    label = read_label(save_any(tmp_path / f"a{suffix}", array, affine_of(np.eye(3))))
    np.testing.assert_array_equal(label.array, numbers() > 60)
    with pytest.raises(DataError, match="59 of 120 voxels are no whole numbers"):
        read_label(save_any(tmp_path / f"b{suffix}", np.where(numbers() > 60, 0.99, 0.0), affine_of(np.eye(3))))


# Units of length


@pytest.mark.parametrize(("units", "mm"), [("mm", 1.0), ("micron", 1e-3), ("meter", 1e3), ("unknown", 1.0)])
@pytest.mark.parametrize("axes", ["LPS", "oblique"])
def test_units_of_nifti(tmp_path: Path, units: str, mm: float, axes: str, caplog: pytest.LogCaptureFixture) -> None:
    affine = affine_of(AXES[axes])
    with caplog.at_level(logging.WARNING, "medckpt"):
        volume = read_volume(save_nifti(tmp_path / "a.nii", numbers(), affine, units=units))
    np.testing.assert_allclose(volume.affine[:3], affine[:3] * mm, rtol=1e-5)
    assert ("converted to mm" in caplog.text) is (mm != 1.0)


@pytest.mark.parametrize(("unit", "mm"), [("mm", 1.0), ("um", 1e-3), ("cm", 10.0), ("", 1.0)])
def test_units_of_nrrd_and_metaimage(tmp_path: Path, unit: str, mm: float) -> None:
    """ITK passes them over: what it reads as 1 is 0.001 mm."""
    affine = affine_of(AXES["oblique"])
    nrrd = save_itk(tmp_path / "a.nrrd", numbers(), affine)
    nrrd.write_bytes(
        nrrd.read_bytes().replace(b"\nkinds:", f'\nspace units: "{unit}" "{unit}" "{unit}"\nkinds:'.encode())
    )
    meta = save_itk(tmp_path / "a.mha", numbers(), affine)
    meta.write_bytes(
        meta.read_bytes().replace(b"\nElementType", f"\nDistanceUnits = {unit or 'mm'}\nElementType".encode())
    )
    for path in (nrrd, meta):
        np.testing.assert_allclose(read_volume(path).affine[:3], affine[:3] * mm, rtol=1e-5)
    nrrd.write_bytes(nrrd.read_bytes().replace(f'units: "{unit}" "{unit}"'.encode(), b'units: "inch" "inch"'))
    with pytest.raises(GeometryError, match=r"a\.nrrd: unit of length .*inch.* is not known"):
        read_grid(nrrd)


@pytest.mark.parametrize(
    ("space", "signs"),
    [("right-anterior-superior", (1, 1, 1)), ("left-posterior-superior", (-1, -1, 1)), ("LAS", (-1, 1, 1))],
)
def test_spaces_of_nrrd(tmp_path: Path, space: str, signs: tuple[int, int, int]) -> None:
    path = save_itk(tmp_path / "a.nrrd", numbers(), np.diag([-1.0, -2, 3, 1]))
    path.write_bytes(path.read_bytes().replace(b"left-posterior-superior", space.encode()))
    np.testing.assert_allclose(read_volume(path).affine, np.diag([*(np.array(signs) * (1, 2, 3)), 1.0]), atol=1e-9)


def test_spaces_that_are_not_the_patients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_itk(tmp_path / "a.nrrd", numbers(), np.diag([-1.0, -2, 3, 1]))
    written = path.read_bytes()
    path.write_bytes(written.replace(b"left-posterior-superior", b"scanner-xyz"))
    with pytest.raises(GeometryError, match=r"a\.nrrd: space 'scanner-xyz' .* left-posterior-superior"):
        read_volume(path)
    path.write_bytes(written.replace(b"space: left-posterior-superior", b"space dimension: 3"))
    with caplog.at_level(logging.WARNING, "medckpt"):
        read_volume(path)
    assert "no spatial information" in caplog.text


# Pairs of files, and names


def test_a_pair_goes_by_its_header_and_its_voxels(tmp_path: Path) -> None:
    header = save_nifti(tmp_path / "a.hdr", numbers(), affine_of(AXES["LPS"]))
    voxels = tmp_path / "a.img"
    assert source_files(header) == source_files(voxels) == [header, voxels]
    for read in (read_volume, read_label):
        np.testing.assert_array_equal(read(voxels).array, numbers())
    (case,) = find_inputs(tmp_path, channels=1)
    assert (case.name, case.images) == ("a", (header,))
    voxels.unlink()
    for read in (read_volume, read_grid):
        with pytest.raises(DataError, match=r"a\.hdr: the voxels are not there; put a\.img"):
            read(header)


def test_voxels_beside_a_header_are_no_dicom(tmp_path: Path) -> None:
    """Raw voxels may begin like an old DICOM file (group 8, element 5)."""
    array = numbers()
    array[:2, 0, 0] = 8, 5
    save_itk(tmp_path / "a.mhd", array, affine_of(AXES["LPS"]))
    (case,) = find_inputs(tmp_path, channels=1)
    assert case.name == "a"


def test_analyze_is_refused(tmp_path: Path) -> None:
    nib.AnalyzeImage(numbers(), np.eye(4)).to_filename(tmp_path / "a.hdr")
    for path in (tmp_path / "a.hdr", tmp_path / "a.img"):
        with pytest.raises(DataError, match=r"a\.hdr: this is .*nalyze.* says nothing of left and right"):
            read_volume(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_upper_case_names(tmp_path: Path, suffix: str) -> None:
    path = save_any(tmp_path / f"a{suffix}", numbers(), affine_of(AXES["oblique"]))
    upper = tmp_path / f"A{suffix.upper()}"
    shutil.move(path, upper)
    if suffix == ".hdr":
        shutil.move(tmp_path / "a.img", tmp_path / "A.IMG")
    np.testing.assert_array_equal(read_volume(upper).array, numbers())


def test_nifti_2(tmp_path: Path) -> None:
    image = nib.Nifti2Image(numbers(), affine_of(AXES["oblique"]))
    image.to_filename(tmp_path / "a.nii.gz")
    volume = read_volume(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(volume.array, numbers())
    np.testing.assert_allclose(volume.affine, affine_of(AXES["oblique"]))


# Files that are cut short


def test_every_format_is_refused_when_it_is_cut_short(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 9999, (12, 11, 10)).astype(np.int16)
    for suffix in SUFFIXES:
        path = save_any(tmp_path / f"a{suffix}", array, affine_of(AXES["LPS"]))
        file = source_files(path)[-1]
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.raises(DataError, match=rf"a\{suffix}.*"):
            read_volume(path)


@pytest.mark.parametrize(
    ("what", "instead", "match"),
    [
        (b"NDims = 3", b"NDimz = 3", "a damaged header"),
        (b"NDims = 3", b"NDims = 9", "a damaged header"),
        (b"DimSize = 4 5 6", b"DimSize = 4 5", "a damaged header"),
        (b"ElementSpacing = ", b"ElementSpacing = 1 ", "a damaged header"),
        (b"NDims = 3\n", b"TransformMatrix = 1 0 0 0 1 0 0 0 1\nNDims = 3\n", "TransformMatrix is in the header twice"),
    ],
)
def test_headers_on_which_itk_ends_the_process(tmp_path: Path, what: bytes, instead: bytes, match: str) -> None:
    """Lists before NDims, or of another length, are written past the end of memory (found by mutated files)."""
    path = save_itk(tmp_path / "a.mha", numbers(), np.diag([-1.0, -1, 1, 1]))
    assert path.read_bytes().count(what) == 1
    path.write_bytes(path.read_bytes().replace(what, instead))
    for read in (read_volume, read_label, read_grid):
        with pytest.raises(DataError, match=rf"a\.mha: .*{match}"):
            read(path)


@pytest.mark.parametrize("offset", [-1.0, -3e38, 3e38, np.inf, np.nan, 1e12])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".hdr"])
def test_an_offset_that_points_nowhere(tmp_path: Path, suffix: str, offset: float) -> None:
    """vox_offset is a float at byte 108."""
    path = save_nifti(tmp_path / f"a{suffix}", numbers(), affine_of(AXES["LPS"]))
    raw = bytearray(gzip.decompress(path.read_bytes()) if suffix == ".nii.gz" else path.read_bytes())
    raw[108:112] = np.array(offset, "<f4").tobytes()
    path.write_bytes(gzip.compress(bytes(raw)) if suffix == ".nii.gz" else raw)
    for read in (read_volume, read_label):
        with pytest.raises(DataError, match=rf"a\{suffix}: the file cannot be read as NIfTI"):
            read(path)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".hdr"])
def test_sizes_that_are_not_there(tmp_path: Path, suffix: str) -> None:
    """dim is six int16 from byte 40 on: 32767 cubed would be 64 TiB, of which nothing is taken."""
    path = save_nifti(tmp_path / f"a{suffix}", numbers(), affine_of(AXES["LPS"]))
    raw = bytearray(gzip.decompress(path.read_bytes()) if suffix == ".nii.gz" else path.read_bytes())
    raw[42:48] = np.array([32767] * 3, "<i2").tobytes()
    path.write_bytes(gzip.compress(bytes(raw)) if suffix == ".nii.gz" else raw)
    with pytest.raises(DataError, match=rf"a\{suffix}: the file cannot be read as NIfTI"):
        read_volume(path)


def test_a_damaged_gzip_stream(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "a.nii.gz", numbers((20, 20, 20)), affine_of(AXES["LPS"]))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.nii\.gz: the file cannot be read as NIfTI"):
        read_volume(path)
    plain: Any = gzip.compress(b"no volume at all")
    path.write_bytes(plain)
    with pytest.raises(DataError, match=r"a\.nii\.gz"):
        read_volume(path)
