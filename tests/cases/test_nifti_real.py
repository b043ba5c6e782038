"""Every real NIfTI and NRRD volume laid beside the checkout, against the list that came with it, nibabel and ITK."""

from __future__ import annotations

import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medckpt.datasets.reading import read_grid, read_label, read_volume
from medckpt.errors import DataError
from medckpt.geometry import same_grid, shear
from tests.conftest import SHARED_DATA, shared_data

REFUSED = {
    "nifti_oddities/dipy/S0_10slices.nii.gz": "axes are sheared",
    "nifti_oddities/nibabel/example4d.nii.gz": "channels or time points",
    "nifti_oddities/nibabel/functional.nii": "channels or time points",
    "dicom2nifti/ge/fmri/001_ground_truth.nii.gz": "channels or time points",
    "dicom2nifti/generic/rgb/001_ground_truth.nii.gz": "colour",
    "dicom2nifti/philips_enhanced/fmri/001_ground_truth.nii.gz": "channels or time points",
    "dicom2nifti/siemens/fmri/001_ground_truth.nii.gz": "channels or time points",
    "spinal_cord_sct/dmri.nii.gz": "channels or time points",
    "spinal_cord_sct/fmri_tsnr.nii.gz": "408 NaN and 0 infinite",
    "totalsegmentator/rgb24_spine_report.nii.gz": "colour",
}
_SIZE = re.compile(r"(?P<shape>[\dx]+), (?P<spacing>[\d.x]+) mm, (?P<dtype>[\w -]+), (?P<axes>[RLAPSI]{3})")
_ROW = re.compile(r"^\| (?P<path>\S+\.(nii\.gz|nii|hdr)) \| (?P<said>[^|]*) \|", re.MULTILINE)


def rows() -> list[tuple[str, str]]:
    """(path, what the list says of it), for each file with a row of its own."""
    manifest = SHARED_DATA / "MANIFEST.md"
    return [(m["path"], m["said"]) for m in _ROW.finditer(manifest.read_text())] if manifest.is_file() else []


@pytest.mark.parametrize(("name", "said"), rows() or [("MANIFEST.md of the real data", "")])
def test_a_real_file_is_what_the_list_says(name: str, said: str) -> None:
    path = shared_data(name)
    if name in REFUSED:
        with pytest.raises(DataError, match=REFUSED[name]):
            read_volume(path)
        return
    size = _SIZE.search(said)
    assert size is not None, said
    volume = read_volume(path)
    shape = tuple(int(n) for n in size["shape"].split("x"))
    assert volume.array.shape == shape[:3]
    np.testing.assert_allclose(volume.grid.spacing_mm, [float(s) for s in size["spacing"].split("x")][:3], rtol=1e-3)
    assert "".join(nib.aff2axcodes(volume.affine)) == size["axes"]
    np.testing.assert_array_equal(volume.affine, nib.load(path).affine)
    np.testing.assert_array_equal(read_grid(path).affine, volume.affine)
    span = re.search(r"; values (\S+)\.\.(\S+?)(,|;|$)", said)
    if span:
        np.testing.assert_allclose(
            [volume.array.min(), volume.array.max()], [float(span[1]), float(span[2])], rtol=1e-4
        )
    counts = {int(value): int(count) for value, count in re.findall(r"(\d+):(\d+)", said.partition("labels ")[2])}
    if counts:
        values, found = np.unique(read_label(path).array, return_counts=True)
        assert dict(zip(values.tolist(), found.tolist(), strict=True)) == counts


@pytest.mark.parametrize(
    "name", [name for name, _ in rows() if "derived" in name and "form" not in name] or ["derived"]
)
def test_the_same_volume_stored_otherwise(name: str) -> None:
    """Made from spinal_cord_sct/t2 (or its label): other header, other storage, same voxels and places."""
    path = shared_data("nifti_oddities" if name == "derived" else name)
    label = "seg" in name
    source = shared_data(f"spinal_cord_sct/t2{'_seg-manual' if label else ''}.nii.gz")
    read = read_label if label else read_volume
    np.testing.assert_allclose(read(path).array, read(source).array, atol=0.25)  # half of scl_slope
    assert same_grid(read(path).grid, read(source).grid)


@pytest.mark.parametrize(("codes", "name"), [((0, 0), "noform"), ((1, 4), "qform_sform_mismatch")])
def test_where_the_libraries_disagree_the_rule_decides(codes: tuple[int, int], name: str) -> None:
    """N2, N4: nibabel's answer, which is the documented one; ITK gives another."""
    path = shared_data(f"nifti_oddities/derived/sct_t2_{name}.nii.gz")
    image, header = sitk.ReadImage(str(path)), nib.load(path).header
    assert (int(header["qform_code"]), int(header["sform_code"])) == codes
    ours = read_volume(path)
    np.testing.assert_array_equal(ours.affine, nib.load(path).affine)
    by_itk = np.array([-1, -1, 1]) * image.TransformIndexToPhysicalPoint((0, 0, 0))
    assert np.linalg.norm(by_itk - ours.affine[:3, 3]) > 1


def test_a_real_sheared_volume_is_resampled_on_request() -> None:
    path = shared_data("nifti_oddities/dipy/S0_10slices.nii.gz")
    volume, stored = read_volume(path, shear="resample"), np.asarray(nib.load(path).dataobj, np.float32)[..., 0]
    assert shear(nib.load(path).affine) > 0.1
    assert shear(volume.affine) < 1e-9
    mm3 = abs(np.linalg.det(volume.affine[:3, :3]))
    mm3_stored = abs(np.linalg.det(nib.load(path).affine[:3, :3]))
    # What was there is there still: the integral over the patient, but for the fill around it.
    extra = volume.array.size * mm3 - stored.size * mm3_stored
    total = volume.array.sum(dtype=float) * mm3 - stored.min() * extra
    np.testing.assert_allclose(total, stored.sum(dtype=float) * mm3_stored, rtol=0.05)


def test_the_real_training_set_is_read_whole() -> None:
    """182 images and labels: equal grids, labels 0 to 2, nothing warned about; voxels as nibabel gives them."""
    images = sorted(shared_data("hippocampus_msd_task04/imagesTr").iterdir())
    assert len(images) == 182
    for image in images:
        label = read_label(image.parents[1] / "labelsTr" / image.name)
        assert set(np.unique(label.array)) == {0, 1, 2}
        assert same_grid(read_grid(image), label.grid)
    for image in images[::20]:
        np.testing.assert_allclose(read_volume(image).array, nib.load(image).get_fdata(), rtol=1e-6)


def test_every_real_file_has_a_row() -> None:
    there = {str(path.relative_to(shared_data(""))) for end in ("nii", "nii.gz", "hdr") for path in _files(end)}
    assert there == {name for name, _ in rows() if not name.startswith("hippocampus_msd_task04")}


def _files(ending: str) -> list[Path]:
    return [path for path in SHARED_DATA.rglob(f"*.{ending}") if "hippocampus_msd_task04" not in path.parts]
