from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from medckpt.blocks import DataConfig, SamplerConfig
from medckpt.datasets.layouts import open_dataset
from medckpt.datasets.patches import PatchDataset, StepBatches, crop
from medckpt.datasets.prepare import PreparedCase, prepare

PLAIN = SamplerConfig(patch_size=(16, 16, 16), foreground_share=1.0, affine_probability=0.0)


@pytest.fixture(scope="module")
def cases(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedCase, ...]:
    dataset = open_dataset(pairs)
    config = DataConfig(spacing_mm=(1.0, 1.0, 1.5))
    return prepare(dataset.cases, dataset, config, cache=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("start", [(-3, 0, 2), (0, 0, 0), (5, -9, 7), (-20, 3, 3), (30, 30, 30)])
def test_crop_equals_padding_first_and_cutting_then(start: tuple[int, int, int]) -> None:
    array = np.random.default_rng(0).normal(size=(2, 11, 12, 13)).astype(np.float32)
    padded = np.pad(array, [(0, 0), (40, 40), (40, 40), (40, 40)], constant_values=-5)
    x, y, z = (value + 40 for value in start)
    expected = padded[:, x : x + 8, y : y + 9, z : z + 10]
    np.testing.assert_array_equal(crop(array, np.array(start), np.array([8, 9, 10]), -5), expected)


def test_a_patch_is_a_function_of_seed_and_index(cases: tuple[PreparedCase, ...]) -> None:
    config = SamplerConfig(patch_size=(32, 32, 32), affine_probability=0.5, mirror_axes=(0, 1, 2))
    first, second = PatchDataset(cases, config, seed=1), PatchDataset(cases, config, seed=1)
    for _ in range(3):
        second[5]  # what was drawn before must not matter
    for index in (0, 3, 11, 12, 13):
        a, b = first[index], second[index]
        assert a["case"] == b["case"]
        assert torch.equal(a["image"], b["image"])
        assert torch.equal(a["label"], b["label"])
    other = PatchDataset(cases, config, seed=2)
    assert any(not torch.equal(first[index]["image"], other[index]["image"]) for index in range(4))


def test_each_round_visits_every_case_once(cases: tuple[PreparedCase, ...]) -> None:
    patches = PatchDataset(cases, PLAIN, seed=0)
    for turn in range(3):
        names = [patches[index]["case"] for index in range(turn * 4, turn * 4 + 4)]
        assert sorted(names) == sorted(case.name for case in cases)


def test_image_and_label_stay_together_under_rotation(cases: tuple[PreparedCase, ...]) -> None:
    config = SamplerConfig(
        patch_size=(32, 32, 32),
        affine_probability=1.0,
        noise_probability=0,
        intensity_probability=0,
        rotation_degrees=30,
    )
    patches = PatchDataset(cases, config, seed=0)
    for index in range(6):
        patch = patches[index]
        assert patch["image"].shape == (1, 32, 32, 32)
        assert type(patch["image"]) is torch.Tensor
        assert set(patch["label"].unique().tolist()) <= {0, 1, 2}
        bright, dark, rest = (patch["image"][patch["label"] == value].mean() for value in (1, 2, 0))
        assert bright > rest + 0.5 or (patch["label"] == 1).sum() < 50
        assert dark < rest - 0.5 or (patch["label"] == 2).sum() < 50


def test_a_one_voxel_label_is_in_every_patch_but_not_always_in_its_middle(
    cases: tuple[PreparedCase, ...], tmp_path: Path
) -> None:
    case = cases[0]
    label = np.zeros(case.grid.shape, np.uint8)
    label[20, 18, 15] = 1
    np.save(tmp_path / "image.npy", case.image())
    np.save(tmp_path / "label.npy", label)
    np.savez(tmp_path / "voxels.npz", **{"1": np.array([[20, 18, 15]], np.int32)})
    patches = PatchDataset([dataclasses.replace(case, folder=tmp_path)], PLAIN, seed=0, augment=False)
    places = [tuple(torch.nonzero(patches[index]["label"])[0, 1:].tolist()) for index in range(60)]
    assert len(set(places)) > 40
    assert all(4 <= side < 12 for place in places for side in place)


def test_without_foreground_the_patch_is_background(cases: tuple[PreparedCase, ...], tmp_path: Path) -> None:
    case = cases[0]
    np.save(tmp_path / "image.npy", np.zeros((1, *case.grid.shape), np.float32))
    np.save(tmp_path / "label.npy", np.zeros(case.grid.shape, np.uint8))
    np.savez(tmp_path / "voxels.npz")
    patch = PatchDataset([dataclasses.replace(case, folder=tmp_path)], PLAIN, seed=0)[0]
    assert patch["image"].shape == (1, 16, 16, 16)
    assert not patch["label"].any()


def test_a_volume_smaller_than_the_patch_is_padded_with_its_minimum(cases: tuple[PreparedCase, ...]) -> None:
    config = dataclasses.replace(PLAIN, patch_size=(64, 64, 64))
    patches = PatchDataset(cases, config, seed=0, augment=False)
    case = {case.name: case for case in cases}
    for index in range(8):
        patch = patches[index]
        assert patch["image"].shape == (1, 64, 64, 64)
        own = case[patch["case"]]
        assert int((patch["label"] > 0).sum()) == int((own.label() > 0).sum())
        assert float(patch["image"].min()) == float(own.image().min())


def test_batches_go_on_where_they_stopped_and_ranks_share_nothing() -> None:
    whole = list(StepBatches(0, 6, 3))
    assert whole == list(StepBatches(0, 2, 3)) + list(StepBatches(2, 6, 3))
    assert [index for batch in whole for index in batch] == list(range(18))
    ranks = [list(StepBatches(0, 3, 2, rank=rank, world=2)) for rank in (0, 1)]
    seen = [index for batches in ranks for batch in batches for index in batch]
    assert sorted(seen) == list(range(12))
    assert len(StepBatches(5, 3, 2)) == 0
