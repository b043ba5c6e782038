from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medckpt.blocks import DataConfig
from medckpt.datasets.layouts import Case, Dataset, open_dataset
from medckpt.datasets.prepare import median_spacing, normalize, prepare
from medckpt.errors import DataError
from tests.conftest import make_pairs

CONFIG = DataConfig(spacing_mm=(1.0, 1.0, 1.5))


def one_case(pairs: Path) -> tuple[Case, Dataset]:
    dataset = open_dataset(pairs)
    return dataset.cases[0], dataset


def test_a_prepared_case_is_in_ras_and_holds_every_voxel(pairs: Path, tmp_path: Path) -> None:
    case, dataset = one_case(pairs)
    (prepared,) = prepare([case], dataset, CONFIG, cache=tmp_path)
    source = nib.as_closest_canonical(nib.load(case.label))
    np.testing.assert_array_equal(prepared.label(), np.asarray(source.dataobj))
    np.testing.assert_allclose(prepared.grid.affine, source.affine)
    assert prepared.image().dtype == np.float32
    assert prepared.image().shape == (1, 40, 36, 30)
    assert abs(float(prepared.image().mean())) < 1e-3


def test_class_voxels_lie_on_their_class(pairs: Path, tmp_path: Path) -> None:
    case, dataset = one_case(pairs)
    (prepared,) = prepare([case], dataset, CONFIG, cache=tmp_path)
    voxels = prepared.class_voxels()
    assert sorted(voxels) == [1, 2]
    for value, places in voxels.items():
        assert set(prepared.label()[tuple(places.T)].tolist()) == {value}


def test_a_second_time_nothing_is_made_and_a_change_is_noticed(pairs: Path, tmp_path: Path) -> None:
    make_pairs(tmp_path / "data", cases=1)
    case, dataset = one_case(tmp_path / "data")
    (first,) = prepare([case], dataset, CONFIG, cache=tmp_path)
    before = (first.folder / "image.npy").stat().st_mtime_ns
    (again,) = prepare([case], dataset, CONFIG, cache=tmp_path)
    assert (again.folder / "image.npy").stat().st_mtime_ns == before

    image = nib.load(case.images[0])
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj)[::-1].copy(), image.affine), case.images[0])
    (changed,) = prepare([case], dataset, CONFIG, cache=tmp_path)
    assert changed.folder != first.folder
    assert not np.array_equal(changed.image(), first.image())


def test_an_interrupted_preparation_leaves_nothing_that_counts(pairs: Path, tmp_path: Path) -> None:
    case, dataset = one_case(pairs)
    half = tmp_path / "prepared" / ".making-x"
    half.mkdir(parents=True)
    (half / "image.npy").write_bytes(b"half")
    (prepared,) = prepare([case], dataset, CONFIG, cache=tmp_path)
    assert prepared.image().shape == (1, 40, 36, 30)


def test_label_values_become_ranks(pairs: Path, tmp_path: Path) -> None:
    make_pairs(tmp_path / "data", cases=1)
    case, dataset = one_case(tmp_path / "data")
    label = nib.load(case.label)
    array = np.asarray(label.dataobj)
    nib.save(nib.Nifti1Image(np.where(array == 2, 7, array).astype(np.uint8), label.affine), case.label)
    dataset = dataclasses.replace(dataset, labels={"background": 0, "bright": 1, "dark": 7})
    (prepared,) = prepare([case], dataset, CONFIG, cache=tmp_path)
    assert np.unique(prepared.label()).tolist() == [0, 1, 2]


def test_every_unusable_case_is_named_with_its_reason(tmp_path: Path) -> None:
    make_pairs(tmp_path / "data", cases=3)
    dataset = open_dataset(tmp_path / "data")
    shifted, strange, _ = dataset.cases
    assert shifted.label
    assert strange.label
    label = nib.load(shifted.label)
    affine = label.affine.copy()
    affine[0, 3] += 40
    nib.save(nib.Nifti1Image(np.asarray(label.dataobj), affine), shifted.label)
    label = nib.load(strange.label)
    nib.save(nib.Nifti1Image(np.asarray(label.dataobj) * 9, label.affine), strange.label)
    with pytest.raises(DataError) as caught:
        prepare(dataset.cases, dataset, CONFIG, cache=tmp_path)
    text = str(caught.value)
    assert "2 of 3 cases cannot be used" in text
    assert "case_0: its label case_0.nii.gz does not lie on its image's grid (corners up to 40 mm apart)" in text
    assert "case_1: label values 9, 18" in text


def test_channels_on_different_grids_are_refused(tmp_path: Path) -> None:
    make_pairs(tmp_path / "data", cases=2)
    case, dataset = one_case(tmp_path / "data")
    image = nib.load(case.images[0])
    other = tmp_path / "other.nii.gz"
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj)[:-1], image.affine), other)
    with pytest.raises(DataError, match=r"channels case_0.nii.gz and other.nii.gz lie on different grids \(shapes"):
        prepare([dataclasses.replace(case, images=(*case.images, other))], dataset, CONFIG, cache=tmp_path)


def test_a_mistyped_spacing_is_refused_before_memory_is_asked_for(pairs: Path, tmp_path: Path) -> None:
    case, dataset = one_case(pairs)
    with pytest.raises(DataError, match=r"at data.spacing_mm=\[0.01, 0.01, 0.01\] it would have 4000 x 3600 x 4500"):
        prepare([case], dataset, DataConfig(spacing_mm=(0.01, 0.01, 0.01)), cache=tmp_path)


def test_the_ct_window_maps_to_minus_one_and_one() -> None:
    config = DataConfig(intensity="window", window_hu=(-100.0, 300.0))
    values = normalize(np.array([-1000.0, -100.0, 100.0, 300.0, 3000.0], np.float32), config)
    assert values.tolist() == [-1, -1, 0, 1, 1]


def test_zscore_has_mean_zero_and_deviation_one_and_a_constant_is_zero() -> None:
    config = DataConfig(clip_percentiles=(0.0, 100.0))
    values = normalize(np.random.default_rng(0).gamma(2, 1e5, (20, 20, 20)), config)
    assert abs(values.mean()) < 1e-5
    assert abs(values.std() - 1) < 1e-5
    assert not normalize(np.full((4, 4, 4), 7.0), config).any()


def test_zscore_measures_inside_the_nonzero_part_of_a_mostly_empty_case() -> None:
    array = np.zeros((10, 10, 10))
    array[:5] = np.random.default_rng(0).normal(500, 20, (5, 10, 10))
    inside = normalize(array, DataConfig(clip_percentiles=(0.0, 100.0)))[:5]
    assert abs(inside.mean()) < 1e-5
    assert abs(inside.std() - 1) < 1e-5


def test_the_median_spacing_is_in_ras_order(tmp_path: Path) -> None:
    make_pairs(tmp_path, cases=1)
    case, _ = one_case(tmp_path)
    affine = np.array([[0, 0, 2.0, 0], [0.5, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 1]])
    nib.save(nib.Nifti1Image(np.zeros((8, 9, 10), np.int16), affine), case.images[0])
    assert median_spacing([case]) == (2.0, 0.5, 1.0)


def test_a_dataset_json_survives(pairs: Path) -> None:
    assert json.loads((pairs / "dataset.json").read_text())["labels"]["1"] == open_dataset(pairs).classes[0]
