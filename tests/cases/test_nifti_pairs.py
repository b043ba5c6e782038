"""Fault reports N6, N7, N8, N11 and N22: an image with its label, and the same volume in other orientations."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medckpt.blocks import DataConfig
from medckpt.datasets.layouts import open_dataset
from medckpt.datasets.prepare import prepare, read_case_label, read_images
from medckpt.errors import DataError
from medckpt.geometry import Grid, resample
from tests.cases.volumes import AXES, TURN, affine_of, make_case, numbers, save_nifti

CONFIG = DataConfig(spacing_mm=(1.0, 1.0, 1.0), intensity="window", window_hu=(0, 1000))
RESAMPLE = DataConfig(spacing_mm=(1.0, 1.0, 1.0), intensity="window", window_hu=(0, 1000), label_grid="resample")


def prepared(root: Path, cache: Path, config: DataConfig = CONFIG) -> tuple[np.ndarray, np.ndarray, Grid]:
    """Image (X, Y, Z), label (X, Y, Z) and grid of the one case of a data set, on the training grid."""
    dataset = open_dataset(root)
    (case,) = prepare(dataset.cases, dataset, config, cache=cache, threads=1)
    return case.image()[0], case.label(), case.grid


# N6: orientation


@pytest.mark.parametrize("codes", ["".join(pick) for axes in itertools.permutations(("RL", "AP", "SI"))
                                   for pick in itertools.product(*axes)][::5])  # fmt: skip
def test_n6_any_order_and_direction_of_axes_trains_the_same(tmp_path: Path, codes: str) -> None:
    """The prepared case is that of the RAS file, bit for bit, whatever order the voxels are stored in."""
    array = numbers((8, 7, 6))
    image = nib.Nifti1Image(array, affine_of(np.eye(3), (1.0, 1.0, 1.0)))
    ornt = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(image.affine), nib.orientations.axcodes2ornt(codes)
    )
    turned = image.as_reoriented(ornt)
    assert "".join(nib.aff2axcodes(turned.affine)) == codes
    stored = np.asarray(turned.dataobj), turned.affine
    found, label, grid = prepared(
        make_case(tmp_path / "a", stored, ((stored[0] > 200).astype(np.uint8), stored[1])), tmp_path / "cache"
    )
    np.testing.assert_array_equal(found, (array * np.float32(2 / 1000) - 1).astype(np.float32))
    np.testing.assert_array_equal(label, array > 200)
    np.testing.assert_allclose(grid.affine, image.affine, atol=1e-5)


# N7: the label's place against the image's


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    ("shift_mm", "accepted"), [(0.0, True), (0.05, True), (-0.05, True), (0.2, False), (40.0, False)]
)
def test_n7_an_origin_that_differs(tmp_path: Path, axes: str, shift_mm: float, accepted: bool) -> None:
    affine = affine_of(AXES[axes], (1.0, 1.0, 1.0))
    moved = affine.copy()
    moved[:3, 3] += np.array([0.6, 0.0, 0.8]) * shift_mm
    root = make_case(tmp_path / "a", (numbers(), affine), ((numbers() > 60).astype(np.uint8), moved))
    if accepted:
        assert prepared(root, tmp_path / "cache")[1].sum() == 59
        return
    with pytest.raises(DataError, match=rf"case: its label case\.nii\.gz .* {shift_mm:.3g} mm apart.*data\.label_grid"):
        prepared(root, tmp_path / "cache")


@pytest.mark.parametrize(("amount", "accepted"), [(1e-8, True), (1e-3, True), (0.05, False)])
def test_n7_a_direction_that_differs(tmp_path: Path, amount: float, accepted: bool) -> None:
    """v1 of nnU-Net refused 2e-8."""
    affine = affine_of(np.eye(3), (1.0, 1.0, 1.0))
    turn = np.array([[1, -amount, 0], [amount, 1, 0], [0, 0, 1]]) / np.array([np.hypot(1, amount)] * 2 + [1.0])
    other = affine.copy()
    other[:3, :3] = turn
    root = make_case(tmp_path / "a", (numbers(), affine), ((numbers() > 60).astype(np.uint8), other))
    if accepted:
        prepared(root, tmp_path / "cache")
    else:
        with pytest.raises(DataError, match="does not lie on its image's grid"):
            prepared(root, tmp_path / "cache")


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_n7_a_flipped_axis(tmp_path: Path, axis: int) -> None:
    """Same box in the patient, voxels in the other direction: refused, and put right exactly on request."""
    affine = affine_of(TURN, (1.0, 1.0, 1.0))
    flip = np.eye(4)
    flip[axis, axis], flip[axis, 3] = -1, numbers().shape[axis] - 1
    mask = (numbers() % 7 == 0).astype(np.uint8)
    root = make_case(tmp_path / "a", (numbers(), affine), (np.flip(mask, axis), affine @ flip))
    with pytest.raises(DataError, match="does not lie on its image's grid"):
        prepared(root, tmp_path / "cache")
    dataset = open_dataset(root)
    (image,) = read_images(dataset.cases[0])
    label = read_case_label(dataset.cases[0], dataset, image.grid, RESAMPLE)
    np.testing.assert_array_equal(label.array, mask)


# N8: a label on another grid


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 3.02), (0.5, 0.5, 1.5), (2.0, 2.0, 3.0), (1.0, 1.0, 3.0)])
@pytest.mark.parametrize("axes", ["LPS", "oblique, left-handed"])
def test_n8_a_label_is_laid_onto_the_images_grid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spacing: tuple[float, float, float], axes: str
) -> None:
    """326 against 342 voxels after resampling, 90 against 91: here the label gets the image's own shape."""
    grid = Grid(shape=(20, 18, 13), affine=affine_of(AXES[axes], (1.0, 1.0, 3.0)))
    shape = tuple(int(np.ceil(n * s / t)) for n, s, t in zip(grid.shape, (1.0, 1.0, 3.0), spacing, strict=True))
    other = Grid(shape=shape, affine=affine_of(AXES[axes], spacing))
    centre = (grid.affine @ [9, 8, 6, 1])[:3]

    def ball(where: Grid, radius: float = 6.3) -> np.ndarray:
        voxels = np.stack(np.meshgrid(*map(np.arange, where.shape), indexing="ij"), -1)
        return np.linalg.norm(voxels @ where.affine[:3, :3].T + where.affine[:3, 3] - centre, axis=-1) < radius

    image = numbers(grid.shape).astype(np.float32)
    root = make_case(tmp_path / "a", (image, grid.affine), (ball(other).astype(np.uint8) * 3, other.affine))
    dataset = open_dataset(root)
    (scan,) = read_images(dataset.cases[0])
    if spacing != (1.0, 1.0, 3.0):
        with pytest.raises(DataError, match=r"case: its label .*data\.label_grid=resample"):
            read_case_label(dataset.cases[0], dataset, scan.grid)
    with caplog.at_level(logging.WARNING, "medckpt"):
        label = read_case_label(dataset.cases[0], dataset, scan.grid, RESAMPLE)
    assert label.array.shape == grid.shape
    assert label.grid == scan.grid
    assert set(np.unique(label.array)) == {0, 3}
    # Beyond half a voxel of either grid from the surface there is no doubt.
    doubt = np.linalg.norm(np.maximum(spacing, (1.0, 1.0, 3.0))) / 2
    inside, outside = ball(grid, 6.3 - doubt), ~ball(grid, 6.3 + doubt)
    assert (label.array[inside] == 3).all()
    assert not label.array[outside].any()
    assert ("is resampled onto the image's grid" in caplog.text) is (spacing != (1.0, 1.0, 3.0))
    prepared(root, tmp_path / "cache", RESAMPLE)


def test_n8_a_label_of_another_place_is_refused_even_then(tmp_path: Path) -> None:
    affine = affine_of(np.eye(3))
    away = affine.copy()
    away[0, 3] += 40
    root = make_case(tmp_path / "a", (numbers(), affine), ((numbers() > 60).astype(np.uint8), away))
    with pytest.raises(DataError, match=r"case: its label .* has 59 voxels, none of them inside the image"):
        prepared(root, tmp_path / "cache", RESAMPLE)


def test_n8_settings_that_change_a_case_make_another_one(tmp_path: Path) -> None:
    """A cache that knew nothing of them would give the refusal's case for the resampled one."""
    affine, near = affine_of(np.eye(3)), affine_of(np.eye(3))
    near[0, 3] -= 1
    root = make_case(tmp_path / "a", (numbers(), affine), ((numbers() > 60).astype(np.uint8), near))
    first = prepared(root, tmp_path / "cache", RESAMPLE)[1].copy()
    with pytest.raises(DataError, match="does not lie on"):
        prepared(root, tmp_path / "cache")
    voxels = root / "labels" / "case.nii.gz"
    save_nifti(voxels, (numbers() > 100).astype(np.uint8), near)
    assert prepared(root, tmp_path / "cache", RESAMPLE)[1].sum() < first.sum()


def test_a_pairs_voxels_changed_make_another_case(tmp_path: Path) -> None:
    """Only the .img changes; the header is the same, to the nanosecond."""
    affine = affine_of(np.eye(3), (1.0, 1.0, 1.0))
    mask = (numbers() > 60).astype(np.uint8)
    root = make_case(tmp_path / "a", (numbers(), affine), (mask, affine), suffix=".hdr")
    before = prepared(root, tmp_path / "cache")[0].copy()
    (root / "images" / "case.img").write_bytes((numbers() + 1).astype(np.int16).tobytes(order="F"))
    after = prepared(root, tmp_path / "cache")[0]
    np.testing.assert_allclose(after, before + np.float32(2 / 1000), atol=1e-6)


# N11: label values


@pytest.mark.parametrize(
    ("values", "labels", "match"),
    [
        ([0, 1, 2, 4], {"background": 0, "a": 1, "b": 2, "c": 3}, r"label values 4 in case\.nii\.gz"),
        ([0, 1, 25], {"background": 0, "a": 1}, r"label values 25 in"),
        ([0, 2, 3, 4, 5], {"background": 0, "a": 1, "b": 2}, r"label values 3, 4, 5 in"),
    ],
)
def test_n11_values_that_are_no_labels(tmp_path: Path, values: list[int], labels: dict[str, int], match: str) -> None:
    affine = affine_of(np.eye(3))
    mask = np.array(values)[numbers() % len(values)].astype(np.uint8)
    root = make_case(tmp_path / "a", (numbers(), affine), (mask, affine))
    (root / "dataset.json").write_text(json.dumps({"channel_names": {"0": "CT"}, "labels": labels}))
    with pytest.raises(DataError, match=rf"case: {match}.*Add them to dataset\.json, or correct"):
        prepared(root, tmp_path / "cache")


def test_n11_labels_with_gaps_are_classes_without(tmp_path: Path) -> None:
    affine = affine_of(np.eye(3), (1.0, 1.0, 1.0))
    values = np.array([0, 2, 3, 5])
    mask = values[numbers() % 4].astype(np.uint8)
    root = make_case(tmp_path / "a", (numbers(), affine), (mask, affine))
    assert open_dataset(root).labels == {"background": 0, "label_2": 2, "label_3": 3, "label_5": 5}
    np.testing.assert_array_equal(prepared(root, tmp_path / "cache")[1], numbers() % 4)


@pytest.mark.parametrize("kind", ["CT", "MR"])
def test_n11_an_image_as_label_is_refused(tmp_path: Path, kind: str) -> None:
    """Hounsfield units below 0 are no label; a positive image has values that dataset.json does not name."""
    affine = affine_of(np.eye(3))
    image = numbers(dtype=np.int16) * 7 - (1000 if kind == "CT" else 0)
    root = make_case(tmp_path / "a", (image, affine), (image, affine))
    (root / "dataset.json").write_text(
        json.dumps({"channel_names": {"0": kind}, "labels": {"background": 0, "liver": 1}})
    )
    match = "from -1000 to -167.*Is this an image" if kind == "CT" else "label values 7, 14, 21, .* and 109 more"
    with pytest.raises(DataError, match=match):
        prepared(root, tmp_path / "cache")


# N22: anatomy against the affine


def test_n22_the_affine_is_taken_at_its_word(tmp_path: Path) -> None:
    """A volume stored mirrored under the same affine is mirrored in the patient; nothing here turns it back.

    Whether the heart then lies on the right is for `medckpt check` to say, as a suspicion.
    """
    array, affine = numbers((8, 7, 6)), affine_of(np.eye(3), (1.0, 1.0, 1.0))
    mask = (array > 200).astype(np.uint8)
    plain = prepared(make_case(tmp_path / "a", (array, affine), (mask, affine)), tmp_path / "cache")
    mirrored = prepared(make_case(tmp_path / "b", (array[::-1], affine), (mask[::-1], affine)), tmp_path / "cache")
    np.testing.assert_array_equal(mirrored[0], plain[0][::-1])
    np.testing.assert_array_equal(mirrored[1], plain[1][::-1])
    whole = Grid(shape=array.shape, affine=affine)
    np.testing.assert_array_equal(resample(array, whole, mirrored[2], order=0, fill=0), array)
