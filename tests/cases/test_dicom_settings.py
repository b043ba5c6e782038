"""data.dicom.* from the recipe to the prepared case, the run folder and the prediction."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from medckpt import run_folder
from medckpt.blocks import DataConfig, DicomConfig
from medckpt.config import RunConfig, compose, from_plain
from medckpt.datasets.layouts import Case, Dataset, open_dataset
from medckpt.datasets.prepare import median_spacing, prepare
from medckpt.datasets.reading import read_grid, source_files
from medckpt.errors import ConfigError, DataError
from medckpt.inference.predict import Predictor
from tests.cases.dicom_planes import pattern, stacked
from tests.conftest import TINY_UNETR
from tests.datasets.dicom_maker import COLUMNS, ROWS, make_series
from tests.inference.test_predict import Threshold

REFUSE = DataConfig(spacing_mm=(0.5, 1.0, 2.0))
FILL = dataclasses.replace(REFUSE, dicom=DicomConfig(gaps="interpolate"))


@pytest.fixture
def gappy(tmp_path: Path) -> Dataset:
    """One patient whose slice 2 is missing, with a label on all six planes; one who is complete."""
    for patient, ks in (("a", [0, 1, 3, 4, 5]), ("b", range(6))):
        make_series(tmp_path / patient / "ct", ks, pixels=pattern, **stacked("axial"))
        grid = read_grid(tmp_path / patient / "ct", FILL.dicom)
        label = np.zeros(grid.shape, np.uint8)
        label[2:5, 2:5, 1:4] = 1
        nib.save(nib.Nifti1Image(label, grid.affine), tmp_path / patient / "label.nii.gz")
    return open_dataset(tmp_path)


def test_preparation_refuses_or_fills_and_says_so(gappy: Dataset, tmp_path: Path) -> None:
    cache = tmp_path.parent / f"{tmp_path.name}-cache"
    with pytest.raises(DataError, match=r"1 of 2 cases cannot be used:\n.*slices are missing"):
        prepare(gappy.cases, gappy, REFUSE, cache=cache)
    a, b = prepare(gappy.cases, gappy, FILL, cache=cache)
    assert a.grid.shape == b.grid.shape == (COLUMNS, ROWS, 6)
    np.testing.assert_array_equal(a.image(), b.image())  # the pattern is linear from slice to slice
    assert b.notes == ()
    assert "at index 2 (from 0, 2 mm apart)" in a.notes[0]
    again = prepare(gappy.cases, gappy, FILL, cache=cache)[0]
    assert (again.folder, again.notes) == (a.folder, a.notes)
    run_folder.note_reading(tmp_path, [a, b])
    assert json.loads((tmp_path / "reading.json").read_text()) == {"a": list(a.notes)}


def test_another_setting_is_another_prepared_case(gappy: Dataset, tmp_path: Path) -> None:
    cache = tmp_path.parent / f"{tmp_path.name}-cache"
    whole = gappy.cases[1]
    (filled,) = prepare([whole], gappy, FILL, cache=cache)
    (refused,) = prepare([whole], gappy, REFUSE, cache=cache)
    assert filled.folder != refused.folder
    assert median_spacing(gappy.cases, FILL) == (0.5, 1.0, 2.0)
    with pytest.raises(DataError, match="slices are missing"):
        median_spacing(gappy.cases)


def test_a_slice_in_a_sub_folder_is_noticed(gappy: Dataset, tmp_path: Path) -> None:
    cache = tmp_path.parent / f"{tmp_path.name}-cache"
    (before,) = prepare(gappy.cases[1:], gappy, FILL, cache=cache)
    folder = gappy.cases[1].images[0]
    (folder / "more").mkdir()
    (folder / "5.dcm").rename(folder / "more" / "5.dcm")
    assert folder / "more" / "5.dcm" in source_files(folder)
    (after,) = prepare(gappy.cases[1:], gappy, FILL, cache=cache)
    assert before.folder != after.folder
    np.testing.assert_array_equal(before.image(), after.image())


@pytest.mark.parametrize(
    ("setting", "series"),
    [
        (DicomConfig(gaps="interpolate"), {"ks": [0, 1, 3, 4, 5]}),
        (DicomConfig(tilt="resample"), {"position": lambda k: (0, 0.7 * k, 2 * k)}),
        (DicomConfig(spacing="resample"), {"position": lambda k: (0, 0, 2 * k + (k == 3))}),
    ],
)
def test_a_prediction_lies_on_the_grid_that_was_read(
    tmp_path: Path, setting: DicomConfig, series: dict[str, object]
) -> None:
    folder = make_series(tmp_path / "ct", pixels=lambda k: pattern(0) * np.int16(k % 2), **series)
    config = compose("swin_mr", [*TINY_UNETR, "data=none", "data.spacing_mm=[0.5,1,2]"])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dicom=setting))
    labels = {"background": 0, "thing": 5}
    predictor = Predictor(network=Threshold(), config=config, labels=labels, channels=1, device=torch.device("cpu"))
    found, volumes = predictor.predict(Case(name="ct", patient="ct", images=(folder,), label=None))
    assert found.shape == volumes[0].grid.shape
    assert volumes[0].grid == read_grid(folder, setting)
    assert set(np.unique(found)) == {0, 5}
    assert volumes[0].notes


def test_settings_are_typed(tmp_path: Path) -> None:
    config = compose("swin_ct", ["data.dicom.tilt=resample"])
    assert config.data.dicom == DicomConfig(tilt="resample")
    run_folder.save_config(tmp_path, config)
    assert run_folder.load_config(tmp_path) == config
    with pytest.raises(ConfigError, match=r"data\.dicom\.tilt: 'bend' .* is not a choice\. Known: refuse, resample"):
        compose("swin_ct", ["data.dicom.tilt=bend"])
    with pytest.raises(ConfigError, match=r"data\.dicom\.gap: unknown key\. Did you mean 'gaps'"):
        compose("swin_ct", ["data.dicom.gap=interpolate"])


def test_a_run_of_before_these_settings_is_read(tmp_path: Path) -> None:
    from medckpt import typed

    plain = typed.to_plain(compose("swin_ct", []))
    del plain["data"]["dicom"]
    config: RunConfig = from_plain(plain)
    assert config.data.dicom == DicomConfig()
