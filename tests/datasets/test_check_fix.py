"""Corrected copies: right voxels and grids, the source untouched, and what is not certain refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medckpt.datasets.check.fix import fix_dataset, remapped
from medckpt.errors import ConfigError, DataError
from medckpt.geometry import shear
from tests.datasets.check_maker import (
    AFFINE,
    SHAPE,
    blobs,
    image_of,
    kinds,
    label_of,
    look,
    make_set,
    scan,
    text_of,
    write,
)


def digest(folder: Path) -> str:
    """Of all files and their names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(f.relative_to(folder)).encode() + f.read_bytes() for f in files)).hexdigest()


def array_of(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


def test_a_label_that_is_slightly_off_gets_its_images_geometry(tmp_path: Path) -> None:  # N7
    root = make_set(tmp_path / "set")
    affine = AFFINE.copy()
    affine[0, 3] += 0.4
    write(label_of(root, 1), blobs(), affine)
    (root / "notes.txt").write_text("kept")
    before = digest(root)
    (change,) = fix_dataset(root, tmp_path / "copy", ["geometry"])
    assert (change.case, change.file) == ("case_1", "labelsTr/case_1.nii.gz")
    assert "corners were 0.4 mm off" in change.what
    assert digest(root) == before
    copy = tmp_path / "copy"
    assert kinds(look(copy)) == {}
    np.testing.assert_array_equal(array_of(label_of(copy, 1)), blobs())
    np.testing.assert_allclose(nib.load(label_of(copy, 1)).affine, AFFINE)
    for number in range(3):
        assert image_of(copy, number).read_bytes() == image_of(root, number).read_bytes()
    assert label_of(copy, 0).read_bytes() == label_of(root, 0).read_bytes()
    assert (copy / "notes.txt").read_text() == "kept"
    assert json.loads((copy / "medckpt_fix.json").read_text())["changes"][0]["case"] == "case_1"


def test_a_label_of_turned_axes_is_resampled_bit_for_bit(tmp_path: Path) -> None:  # N6
    root = make_set(tmp_path / "set")
    turned = nib.Nifti1Image(blobs(), AFFINE).as_reoriented(np.array([[2, -1], [0, 1], [1, -1]]))
    turned.to_filename(label_of(root, 0))
    check = look(root)
    assert kinds(check) == {"case_0": [("fail", "grid")]}
    assert "its axes are stored as PIR, the image's as LPS" in text_of(check, "case_0")
    assert "a copied header would mirror it" in text_of(check, "case_0")
    fix_dataset(root, tmp_path / "copy", ["geometry"])
    assert kinds(look(tmp_path / "copy")) == {}
    np.testing.assert_array_equal(array_of(label_of(tmp_path / "copy", 0)), blobs())


def test_a_label_on_another_spacing_is_resampled(tmp_path: Path) -> None:  # N8
    root = make_set(tmp_path / "set")
    fine = AFFINE @ np.diag([0.5, 0.5, 0.5, 1])
    fine[:3, 3] += fine[:3, :3] @ np.array([-0.5, -0.5, -0.5])  # corner on corner
    write(label_of(root, 2), np.kron(blobs(), np.ones((2, 2, 2), np.uint8)), fine)
    fix_dataset(root, tmp_path / "copy", ["geometry"])
    np.testing.assert_array_equal(array_of(label_of(tmp_path / "copy", 2)), blobs())
    assert kinds(look(tmp_path / "copy")) == {}


@pytest.mark.parametrize(
    ("shape", "move", "words"),
    [
        (SHAPE, 40.0, "has the image's shape but lies 40 mm off: is its header wrong, or its voxels"),
        ((17, 14, 12), 40.0, "label 1 would have 0 ml instead of 0.15 ml"),
    ],
)
def test_what_is_not_certain_is_refused(tmp_path: Path, shape: tuple[int, int, int], move: float, words: str) -> None:
    root = make_set(tmp_path / "set")
    affine = AFFINE.copy()
    affine[0, 3] += move
    array = np.zeros(shape, np.uint8)
    array[2:7, 2:7, 2:6] = 1
    write(label_of(root, 1), array, affine)
    with pytest.raises(DataError, match=words):
        fix_dataset(root, tmp_path / "copy", ["geometry"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_values_are_remapped_everywhere(tmp_path: Path) -> None:  # N11
    root = make_set(tmp_path / "set", labels={"background": 0, "a": 1, "b": 2, "c": 3})
    write(label_of(root, 1), blobs(1, 4))
    fix_dataset(root, tmp_path / "copy", ["labels"], remap={4: 3})
    copy = tmp_path / "copy"
    np.testing.assert_array_equal(array_of(label_of(copy, 1)), blobs(1, 3))
    assert label_of(copy, 0).read_bytes() == label_of(root, 0).read_bytes()
    assert (copy / "dataset.json").read_text() == (root / "dataset.json").read_text()
    assert kinds(look(copy)) == {}


@pytest.mark.parametrize("inverted", [False, True])
def test_dataset_json_follows_a_remap(tmp_path: Path, inverted: bool) -> None:
    names = {"background": 0, "a": 2, "b": 5}
    root = make_set(tmp_path / "set", labels=names)
    facts = json.loads((root / "dataset.json").read_text())
    if inverted:
        facts["labels"] = {str(value): name for name, value in names.items()}
    (root / "dataset.json").write_text(json.dumps(facts | {"reference": "kept"}))
    for number in range(3):
        write(label_of(root, number), blobs(2, 5))
    fix_dataset(root, tmp_path / "copy", ["labels"], remap={2: 1, 5: 2})
    facts = json.loads((tmp_path / "copy" / "dataset.json").read_text())
    assert facts["labels"] == (
        {"0": "background", "1": "a", "2": "b"} if inverted else {"background": 0, "a": 1, "b": 2}
    )
    assert facts["reference"] == "kept"
    assert kinds(look(tmp_path / "copy")) == {}


def test_values_can_swap_and_a_merger_must_be_meant(tmp_path: Path) -> None:
    swapped = remapped(blobs(), {1: 2, 2: 1})
    assert swapped is not None
    np.testing.assert_array_equal(swapped, blobs(2, 1))
    assert remapped(blobs(), {7: 1}) is None
    root = make_set(tmp_path / "set")
    with pytest.raises(ConfigError, match=r"the value 1 is in use already .*add 1:1 to remap="):
        fix_dataset(root, tmp_path / "copy", ["labels"], remap={2: 1})
    fix_dataset(root, tmp_path / "copy", ["labels"], remap={2: 1, 1: 1})
    assert np.unique(array_of(label_of(tmp_path / "copy", 0))).tolist() == [0, 1]
    assert json.loads((tmp_path / "copy" / "dataset.json").read_text())["labels"] == {"background": 0, "bright": 1}


@pytest.mark.parametrize("cosine", [2e-4, 3e-3])
def test_small_shear_becomes_rectangular(tmp_path: Path, cosine: float) -> None:  # N1
    root = make_set(tmp_path / "set")
    affine = AFFINE.copy()
    affine[1, 0] += cosine
    image = nib.Nifti1Image(scan(0), None)
    image.header.set_sform(affine, code=2)
    image.header["qform_code"] = 0
    image.header.set_slope_inter(2, -1024)
    image.to_filename(image_of(root, 0))
    label = nib.Nifti1Image(blobs(), None)
    label.header.set_sform(affine, code=2)
    label.header["qform_code"] = 0
    label.to_filename(label_of(root, 0))
    with pytest.raises(RuntimeError, match="orthonormal"):
        sitk.ReadImage(str(image_of(root, 0)))
    changes = fix_dataset(root, tmp_path / "copy", ["orthonormal"])
    assert [change.file for change in changes] == ["imagesTr/case_0_0000.nii.gz", "labelsTr/case_0.nii.gz"]
    copied = nib.load(image_of(tmp_path / "copy", 0))
    np.testing.assert_array_equal(np.asarray(copied.dataobj), array_of(image_of(root, 0)))
    assert shear(copied.affine) < 1e-6
    np.testing.assert_allclose(copied.get_qform(), copied.get_sform(), atol=1e-4)
    middle = np.append((np.array(SHAPE) - 1) / 2, 1)
    np.testing.assert_allclose((copied.affine @ middle)[:3], (affine @ middle)[:3], atol=1e-4)
    read = sitk.ReadImage(str(image_of(tmp_path / "copy", 0)))  # ITK opens it now
    np.testing.assert_allclose(read.GetSpacing(), np.linalg.norm(copied.affine[:3, :3], axis=0), atol=1e-5)
    assert kinds(look(tmp_path / "copy")) == {}


def test_large_shear_is_refused(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    affine = AFFINE.copy()
    affine[1, 0] += 0.2
    image = nib.Nifti1Image(scan(0), None)
    image.header.set_sform(affine, code=2)
    image.to_filename(image_of(root, 0))
    assert kinds(look(root))["case_0"][0][0] == "fail"
    with pytest.raises(DataError, match=r"case_0_0000.nii.gz: the axes are sheared .* Resample"):
        fix_dataset(root, tmp_path / "copy", ["orthonormal"])


def test_where_a_copy_may_not_go(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    write(label_of(root, 1), blobs(), AFFINE + np.array([[0, 0, 0, 0.4], *[[0] * 4] * 3]))
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    for output, words in ((full, "there already"), (root / "copy", "outside of the data set"), (root, "there already")):
        with pytest.raises(ConfigError, match=words):
            fix_dataset(root, output, ["geometry"])
    (tmp_path / "empty").mkdir()
    assert len(fix_dataset(root, tmp_path / "empty", ["geometry"])) == 1
    with pytest.raises(DataError, match="finds nothing to correct"):
        fix_dataset(tmp_path / "empty", tmp_path / "again", ["geometry"])
    assert not (tmp_path / "again").exists()


def test_a_label_in_plain_nii_keeps_its_name(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write(root / "images" / "a.nii", scan(0))
    write(root / "labels" / "a.nii", blobs(1, 3))
    fix_dataset(root, tmp_path / "copy", ["labels"], remap={3: 2})
    assert [path.name for path in (tmp_path / "copy" / "labels").iterdir()] == ["a.nii"]
    np.testing.assert_array_equal(array_of(tmp_path / "copy" / "labels" / "a.nii"), blobs())
