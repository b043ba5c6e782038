"""Every DICOM series of the real data: against its reference conversion, or named as what it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medckpt.blocks import DicomConfig
from medckpt.datasets.reading import read_grid, read_label, read_volume
from medckpt.errors import DataError, GeometryError
from medckpt.geometry import same_grid
from tests.conftest import shared_data


def assert_same_scan(folder: Path, reference: Path, atol: float = 0.0) -> None:
    """Voxels and affine of a series against a reference conversion, both in RAS order."""
    volume = read_volume(folder)
    ours = nib.as_closest_canonical(nib.Nifti1Image(volume.array, volume.affine))
    stored = nib.load(reference)
    theirs = nib.as_closest_canonical(nib.squeeze_image(stored) if stored.ndim > 3 else stored)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours.affine, theirs.affine, atol=1e-3)
    np.testing.assert_allclose(ours.get_fdata(), theirs.get_fdata(), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "atol"),
    [
        ("ge/anatomical/001", 0),
        ("siemens/anatomical/001", 0),
        ("hitachi/anatomical/001", 0),
        ("generic/anatomical/001", 0),
        ("generic/anatomical/002_non_isotropic", 2e-5),
        ("generic/compressed_rle/001", 0),
        ("generic/compressed_j2k/001", 0),
        ("failing/slicecount/001", 0),
        ("hyperfine/anatomical/001", 0),
        ("philips_enhanced/anatomical/001", 2e-4),
    ],
)
def test_reference_conversions(name: str, atol: float) -> None:
    folder = shared_data(f"dicom2nifti/{name}")
    assert_same_scan(folder, folder.with_name(f"{folder.name}_ground_truth.nii.gz"), atol)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("failing/gantrytilting/001", GeometryError, r"tilted by 14\.0 degrees"),
        ("failing/notavolume/001", GeometryError, "all 4 slices lie at one position"),
        ("failing/sliceincrement/001", GeometryError, "1 between .* 10 mm apart where 5 mm is usual"),
        ("ge/anatomical/001_single_slice", GeometryError, "one slice"),
        ("ge/fmri/001", GeometryError, "lie at the same position"),
        ("siemens/fmri/001", DataError, "mosaic"),
        ("generic/rgb/001", DataError, "colour"),
        ("philips_enhanced/fmri/001", DataError, "4 image stacks .*They lie in one file"),
    ],
)
def test_real_series_that_are_refused(name: str, error: type[DataError], match: str) -> None:
    with pytest.raises(error, match=match):
        read_volume(shared_data(f"dicom2nifti/{name}"))


@pytest.mark.parametrize(("modality", "atol"), [("CT", 0), ("MR_T1", 0), ("PET", 2e-6)])
def test_sarcoma_series_equal_their_nifti(tmp_path: Path, modality: str, atol: float) -> None:
    source = shared_data("soft_tissue_sarcoma/dicom_flat")
    for path in source.glob(f"STS_002_{modality}_*.dcm"):
        (tmp_path / path.name).symlink_to(path)  # among them the RTSTRUCT, to be skipped
    assert_same_scan(tmp_path, shared_data(f"soft_tissue_sarcoma/nifti/STS_002_{modality}_image.nii.gz"), atol)


def test_sarcoma_folder_of_three_series(tmp_path: Path) -> None:
    folder = shared_data("soft_tissue_sarcoma/dicom_flat")
    with pytest.raises(DataError, match="3 image stacks") as caught:
        read_volume(folder)
    assert all(f"({modality})" in str(caught.value) for modality in ("CT", "MR", "PT"))
    assert read_grid(folder / "STS_002_PET_000000.dcm").shape == (30, 27, 48)


def test_totalsegmentator_jpeg2000_ct() -> None:
    """Files without SOPClassUID and SeriesInstanceUID, against the label map's own affine and SimpleITK's reading."""
    folder = shared_data("totalsegmentator/ct_dicom_j2k")
    volume = read_volume(folder)
    label = read_label(shared_data("totalsegmentator/ct_dicom_seg117.nii.gz"))
    ours = nib.as_closest_canonical(nib.Nifti1Image(volume.array, volume.affine))
    theirs = nib.as_closest_canonical(nib.Nifti1Image(label.array, label.affine))
    np.testing.assert_allclose(ours.affine, theirs.affine, atol=1e-3)
    liver, aorta = (ours.get_fdata()[np.asarray(theirs.dataobj) == value].mean() for value in (5, 52))
    assert (round(liver), round(aorta)) == (89, 177)  # from the data's own notes


@pytest.mark.parametrize(
    "name",
    [
        "hippocampus_dicom_crops/Study1_13_HCropVolume",
        "hippocampus_dicom_crops/Study2_14_HCropVolume",
        "breast_mri_nact/UCSF-BR-06_PE1",
        "pydicom_small/CT5N",
        "dcmqi/23x38x3/image",
    ],
)
def test_series_equal_what_simpleitk_reads(name: str) -> None:
    folder = shared_data(name)
    files = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder))
    image = sitk.ReadImage(files)
    volume = read_volume(folder)
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    np.testing.assert_allclose(volume.affine, np.diag([-1, -1, 1, 1]) @ affine, atol=1e-3)
    np.testing.assert_array_equal(volume.array, sitk.GetArrayFromImage(image).transpose(2, 1, 0))


def test_dicom_objects_without_an_image_of_a_scanner() -> None:
    with pytest.raises(DataError, match=r"no DICOM image .*\(SEG\)"):
        read_volume(shared_data("breast_mri_nact/UCSF-BR-06_SEG"))


def test_header_pass_and_pixel_pass_agree() -> None:
    folder = shared_data("dicom2nifti/hitachi/anatomical/001")
    assert same_grid(read_grid(folder), read_volume(folder).grid, tolerance_mm=0)


def test_missing_slice_of_a_real_series_is_interpolated() -> None:
    """The three gaps are 5, 5 and 10 mm: one plane of five is the mean of its neighbours, the others as stored."""
    folder = shared_data("dicom2nifti/failing/sliceincrement/001")
    volume = read_volume(folder, DicomConfig(gaps="interpolate"))
    assert volume.array.shape == (512, 512, 5)
    files = sorted(folder.iterdir())
    images = [sitk.GetArrayFromImage(sitk.ReadImage(str(file)))[0].T for file in files]
    heights = [sitk.ReadImage(str(file)).GetOrigin()[2] for file in files]
    images = [images[i] for i in np.argsort(heights)]
    hole = int(np.argmax(np.diff(np.sort(heights))))
    images.insert(hole + 1, (images[hole].astype(np.float64) + images[hole + 1]) / 2)
    np.testing.assert_array_equal(volume.array, np.stack(images, axis=-1))
    assert f"at index {hole + 1} (from 0, 5 mm apart)" in volume.notes[0]


def test_tilted_real_series_is_resampled_within_its_slices() -> None:
    """Every voxel against a linear interpolation of its own slice by SimpleITK, from the slice's own geometry."""
    folder = shared_data("dicom2nifti/failing/gantrytilting/001")
    volume = read_volume(folder, DicomConfig(tilt="resample"))
    images = [sitk.ReadImage(str(file), sitk.sitkFloat64) for file in folder.iterdir()]
    direction = np.reshape(images[0].GetDirection(), (3, 3))
    images.sort(key=lambda image: image.GetOrigin() @ direction[:, 2])
    assert volume.array.shape[2] == len(images)
    generator = np.random.default_rng(0)
    seen = 0
    for k, image in enumerate(images):
        for _ in range(50):
            i, j = (int(generator.integers(0, n)) for n in volume.array.shape[:2])
            lps = (volume.affine @ [i, j, k, 1])[:3] * [-1, -1, 1]
            column, row, off = image.TransformPhysicalPointToContinuousIndex(lps.tolist())
            assert abs(off) < 0.02
            if 0 <= column <= 511 and 0 <= row <= 511:
                plane = sitk.GetArrayViewFromImage(image)[0]
                c, r = min(int(column), 510), min(int(row), 510)
                x, y = column - c, row - r
                square = plane[r : r + 2, c : c + 2]
                expected = np.array([1 - y, y]) @ square @ np.array([1 - x, x])
                assert volume.array[i, j, k] == pytest.approx(expected, abs=0.5)
                seen += 1
    assert seen > 100


def test_first_volume_of_a_real_time_series() -> None:
    """Two time points at each of four positions: the first one is the reference's first volume."""
    folder = shared_data("dicom2nifti/ge/fmri/001")
    volume = read_volume(folder, DicomConfig(duplicates="first"))
    stored = nib.load(folder.with_name("001_ground_truth.nii.gz"))
    first = nib.as_closest_canonical(stored.slicer[..., 0])
    ours = nib.as_closest_canonical(nib.Nifti1Image(volume.array, volume.affine))
    np.testing.assert_allclose(ours.affine, first.affine, atol=1e-3)
    np.testing.assert_array_equal(ours.get_fdata(), first.get_fdata())


@pytest.mark.parametrize("name", ["emri_small.dcm", "emri_small_RLE.dcm"])
def test_enhanced_files_without_functional_groups_are_named(tmp_path: Path, name: str) -> None:
    shutil.copy(shared_data(f"pydicom_small/{name}"), tmp_path)
    with pytest.raises(DataError, match=r"multi-frame \(10 frames .*functional groups for none"):
        read_volume(tmp_path)


@pytest.mark.parametrize(
    ("name", "what"),
    [("rtstruct.dcm", "no DICOM image"), ("no_meta.dcm", "no DICOM image"), ("MR_truncated.dcm", "do not decode")],
)
def test_files_that_are_no_image_are_named(tmp_path: Path, name: str, what: str) -> None:
    shutil.copy(shared_data(f"pydicom_small/{name}"), tmp_path)
    with pytest.raises(DataError, match=what):
        read_volume(tmp_path)


@pytest.mark.parametrize(
    "name", ["MR_small.dcm", "MR_small_RLE.dcm", "MR_small_implicit.dcm", "MR_small_jp2klossless.dcm"]
)
def test_one_image_in_four_transfer_syntaxes(tmp_path: Path, name: str) -> None:
    shutil.copy(shared_data(f"pydicom_small/{name}"), tmp_path)
    image = sitk.ReadImage(str(shared_data("pydicom_small/MR_small.dcm")))
    volume = read_volume(tmp_path)
    np.testing.assert_array_equal(volume.array, sitk.GetArrayFromImage(image).transpose(2, 1, 0))
    np.testing.assert_allclose(volume.grid.spacing_mm[:2], image.GetSpacing()[:2], atol=1e-6)
