"""What a check finds: each fault as a small data set that is right but for it."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medckpt.datasets.check.dataset import check_dataset
from medckpt.datasets.check.labels import suggest_remap
from medckpt.errors import DataError
from tests.conftest import shared_data
from tests.datasets.check_maker import (
    AFFINE,
    LABELS,
    SHAPE,
    blobs,
    case_of,
    image_of,
    kinds,
    label_of,
    look,
    make_set,
    scan,
    text_of,
    write,
)
from tests.datasets.dicom_maker import make_series


def test_nothing_is_wrong_and_the_facts_are_right(tmp_path: Path) -> None:
    check = look(make_set(tmp_path))
    assert kinds(check) == {}
    assert not check.failed
    assert [case.result for case in check.cases] == ["pass"] * 3
    (image,) = check.cases[0].images
    expected = scan(0).astype(np.float64)
    assert (image.shape, image.spacing_mm, image.axes) == (SHAPE, (1.0, 1.0, 1.5), "LPS")
    assert (image.minimum, image.maximum) == (expected.min(), expected.max())
    assert image.mean == pytest.approx(expected.mean(), rel=1e-12)
    assert image.deviation == pytest.approx(expected.std(), rel=1e-9)
    assert image.median == np.median(expected)
    label = check.cases[0].label
    assert label is not None
    assert label.voxels == {0: SHAPE[0] * SHAPE[1] * SHAPE[2] - 148, 1: 100, 2: 48}
    # Middle of the first box: index (4, 4, 3.5), through the affine.
    assert label.centres_mm[1] == pytest.approx((4.0, 3.0, -3.75))
    rows = [(row.value, row.name, row.voxels, row.cases) for row in check.label_rows]
    assert rows[1:] == [(1, "bright", 300, 3), (2, "dark", 144, 3)]


def test_the_forecast_counts_bytes(tmp_path: Path) -> None:
    foreseen = look(make_set(tmp_path, cases=2)).forecast
    assert foreseen is not None
    assert foreseen.spacing_mm == (1.0, 1.0, 1.5)
    assert foreseen.disk_bytes == 2 * int(np.prod(SHAPE)) * (4 + 1)
    assert foreseen.free_bytes > 0


@pytest.mark.parametrize("move", ["origin", "axis", "spacing", "crop"])
def test_a_label_off_its_images_grid_fails(tmp_path: Path, move: str) -> None:  # N7, N8
    make_set(tmp_path)
    array, affine = blobs(), AFFINE.copy()
    if move == "origin":
        affine[0, 3] += 40
    elif move == "axis":
        affine[:3, 0] *= -1
    elif move == "spacing":
        affine[2, 2] = 1.52
    else:
        array = array[:-1]
    write(label_of(tmp_path, 1), array, affine)
    check = look(tmp_path)
    assert kinds(check) == {"case_1": [("fail", "grid")]}
    (finding,) = case_of(check, "case_1").findings
    # Where same-shaped grids are a voxel or more apart, what is wrong is not known, and fix= would refuse it.
    assert finding.fix == (None if move in ("origin", "axis") else "fix=geometry")
    if move == "origin":
        assert "its corners lie up to 40 mm off (at most 0.1 mm)" in finding.text
        assert "Copy" not in finding.text
    if move == "crop":
        assert f"shape {(15, 14, 12)} at 1 x 1 x 1.5 mm, the image {SHAPE}" in finding.text


def test_a_deviation_of_rounding_passes(tmp_path: Path) -> None:  # N7: nnU-Net v1 refused 2e-8
    make_set(tmp_path)
    affine = AFFINE.copy()
    affine[0, 1] += 1e-5
    affine[0, 3] += 0.05
    write(label_of(tmp_path, 1), blobs(), affine)
    assert kinds(look(tmp_path)) == {}


@pytest.mark.parametrize(
    ("voxel", "words"), [(np.nan, "1 NaN and 0 infinite voxels"), (np.inf, "0 NaN and 1 infinite voxels")]
)
def test_nan_and_infinity_fail(tmp_path: Path, voxel: float, words: str) -> None:  # N21
    make_set(tmp_path)
    image = scan(0).astype(np.float32)
    image[3, 4, 5] = voxel
    write(image_of(tmp_path, 0), image)
    check = look(tmp_path)
    assert kinds(check) == {"case_0": [("fail", "image")]}
    assert words in text_of(check, "case_0")


def test_a_constant_image_fails(tmp_path: Path) -> None:  # N21
    make_set(tmp_path)
    write(image_of(tmp_path, 2), np.full(SHAPE, 7, np.int16))
    check = look(tmp_path)
    assert kinds(check) == {"case_2": [("fail", "constant")]}
    assert "every voxel is 7" in text_of(check, "case_2")


def test_an_empty_label_is_a_warning_and_all_of_them_a_failure(tmp_path: Path) -> None:
    make_set(tmp_path)
    write(label_of(tmp_path, 0), np.zeros(SHAPE, np.uint8))
    check = look(tmp_path)
    assert kinds(check) == {"case_0": [("warn", "empty")]}
    assert not check.failed
    for number in (1, 2):
        write(label_of(tmp_path, number), np.zeros(SHAPE, np.uint8))
    check = look(tmp_path)
    assert kinds(check)[""] == [("fail", "all-empty")]
    assert check.failed


def test_values_that_are_not_listed_fail_with_a_remap(tmp_path: Path) -> None:  # N11: 4 in BraTS, where 3 is meant
    make_set(tmp_path, labels={"background": 0, "necrosis": 1, "oedema": 2, "enhancing": 3})
    array = blobs()
    array[0, 0, :5] = 4
    write(label_of(tmp_path, 1), array)
    check = look(tmp_path)
    assert kinds(check) == {"case_1": [("fail", "unknown-label")], "": [("warn", "absent-label")]}
    (finding,) = case_of(check, "case_1").findings
    assert "does not list: 4 (5 voxels)" in finding.text
    assert finding.fix == "fix=labels remap={4:3}"
    assert "enhancing (3)" in text_of(check)
    assert (check.label_rows[4].value, check.label_rows[4].name, check.label_rows[4].cases) == (4, None, 1)


@pytest.mark.parametrize(
    ("found", "named", "expected"),
    [
        ({0, 1, 2, 4}, {0, 1, 2, 3}, {4: 3}),
        ({0, 2, 3, 4, 5}, set(), {2: 1, 3: 2, 4: 3, 5: 4}),
        ({0, 1, 2, 25}, {0, 1, 2}, {}),  # nothing it could be
        ({0, 10, 20}, {0, 1, 2}, {10: 1, 20: 2}),
        ({0, 1}, {0, 1, 2}, {}),
    ],
)
def test_remaps(found: set[int], named: set[int], expected: dict[int, int]) -> None:
    assert suggest_remap(found, named) == expected


@pytest.mark.parametrize("named", [True, False])
def test_gaps_are_a_warning(tmp_path: Path, named: bool) -> None:  # N11
    make_set(tmp_path, labels={"background": 0, "a": 2, "b": 5})
    for number in range(3):
        write(label_of(tmp_path, number), blobs(2, 5))
    if not named:
        (tmp_path / "dataset.json").unlink()
        for number in range(3):
            image_of(tmp_path, number).rename(tmp_path / "imagesTr" / f"case_{number}.nii.gz")
    check = look(tmp_path)
    assert kinds(check) == {"": [("warn", "label-gap")]}
    assert check.findings[0].fix == "fix=labels remap={2:1,5:2}"


def test_no_remap_onto_a_value_that_is_there_unnamed(tmp_path: Path) -> None:
    make_set(tmp_path, labels={"background": 0, "bright": 2, "dark": 5})
    for number in range(3):
        write(label_of(tmp_path, number), blobs(2, 5))
    label = blobs(2, 5)
    label[0, 0, 0] = 1
    write(label_of(tmp_path, 1), label)
    check = look(tmp_path)
    assert kinds(check) == {"": [("warn", "label-gap")], "case_1": [("fail", "unknown-label")]}
    assert check.findings[0].fix is None  # {2:1,5:2} would merge 2 with the unnamed 1


def test_classes_of_another_data_set_are_not_called_intensities_for_sure(tmp_path: Path) -> None:
    make_set(tmp_path)
    label = blobs()
    label.reshape(-1)[:60] = np.arange(3, 63)
    write(label_of(tmp_path, 1), label)
    check = look(tmp_path)
    assert kinds(check) == {"case_1": [("fail", "intensities")]}
    assert "holds 63 different values, of which dataset.json lists 3. Are intensities" in text_of(check, "case_1")
    assert "classes of another data set?" in text_of(check, "case_1")


def test_intensities_as_labels_are_refused(tmp_path: Path) -> None:  # N11
    make_set(tmp_path)
    shutil.copy(image_of(tmp_path, 0), label_of(tmp_path, 0))
    write(label_of(tmp_path, 1), scan(7).astype(np.uint16))  # another image
    write(label_of(tmp_path, 2), scan(7) - 150)  # CT values
    check = look(tmp_path)
    found = kinds(check)
    assert found["case_0"][0] == ("fail", "intensities")
    assert found["case_1"] == [("fail", "intensities")]
    assert found["case_2"] == [("fail", "label")]
    assert "equals the image case_0_0000.nii.gz voxel for voxel" in text_of(check, "case_0")
    assert "Is this an image?" in text_of(check, "case_2")


def test_an_image_of_more_values_than_classes_can_have(tmp_path: Path) -> None:
    make_set(tmp_path)
    write(label_of(tmp_path, 1), np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE))
    check = look(tmp_path)
    assert kinds(check) == {"case_1": [("fail", "intensities")]}
    label = case_of(check, "case_1").label
    assert label is not None
    assert (label.distinct, len(label.voxels)) == (2688, 1000)


def test_one_scan_under_two_names(tmp_path: Path) -> None:
    make_set(tmp_path, cases=5)
    write(image_of(tmp_path, 3), scan(1).astype(np.float32), AFFINE + np.eye(4) * 0)  # other type, same values
    check = look(tmp_path)
    # split_patients(cases, 0.2, seed 0) keeps one of five for validation; what it separates fails.
    assert set(kinds(check)) == {"case_1", "case_3"}
    (code,) = {code for _, code in kinds(check)["case_1"]}
    assert code == "duplicate"
    assert "case_1 has the same voxels as case_3" in text_of(check, "case_1")
    folds = [{"train": ["case_0", "case_1", "case_2"], "val": ["case_3", "case_4"]}]
    (tmp_path / "splits_final.json").write_text(json.dumps(folds))
    check = look(tmp_path)
    assert kinds(check) == {"case_1": [("fail", "duplicate")], "case_3": [("fail", "duplicate")]}
    assert "splits_final.json, fold 0, puts them on both sides" in text_of(check, "case_3")


def test_a_case_on_both_sides_of_a_split_and_one_that_is_gone(tmp_path: Path) -> None:
    make_set(tmp_path)
    folds = [{"train": ["case_0", "case_1"], "val": ["case_1", "case_9"]}]
    (tmp_path / "splits_final.json").write_text(json.dumps(folds))
    check = look(tmp_path)
    assert kinds(check) == {"": [("fail", "split")] * 2}
    assert "case_1 train and validate" in text_of(check)
    assert "no case case_9" in text_of(check)
    (tmp_path / "splits_final.json").write_text("{")
    assert kinds(look(tmp_path)) == {"": [("fail", "split")]}


def test_one_patient_id_in_two_folders(tmp_path: Path) -> None:
    for number, identity in enumerate(["A", "B", "A"]):
        folder = tmp_path / f"p{number}"
        make_series(
            folder / "ct", PatientID=identity, pixels=lambda k, n=number: np.full((8, 10), k + 10 * n - 50, "i2")
        )
        label = np.zeros((10, 8, 6), np.uint8)
        label[2:5, 2:5, 2:5] = 1
        affine = np.diag([-0.5, -1.0, 2.0, 1.0])
        write(folder / "label.nii.gz", label, affine)
    check = look(tmp_path)
    assert set(kinds(check)) == {"p0", "p2"}
    assert {code for _, code in kinds(check)["p0"]} == {"same-patient"}
    assert "p0 has the same PatientID as p2" in text_of(check, "p0")
    assert (check.layout, check.channel_names) == ("dicom", ("CT",))
    assert check.cases[0].images[0].shape == (10, 8, 6)


def test_a_dicom_series_with_a_hole_fails_and_the_others_are_read(tmp_path: Path) -> None:  # D1
    for number in range(2):
        ks = (0, 1, 3, 4, 5) if number else range(6)
        make_series(
            tmp_path / f"p{number}" / "ct", ks, pixels=lambda k, n=number: np.full((8, 10), 9 * k * (n + 1), "i2")
        )
        label = np.zeros((10, 8, 6), np.uint8)
        label[2:5, 2:5, 2:5] = 1
        write(tmp_path / f"p{number}" / "label.nii.gz", label, np.diag([-0.5, -1.0, 2.0, 1.0]))
    check = look(tmp_path)
    assert [case.result for case in check.cases] == ["warn", "fail"]  # no air: a CT without negative values
    assert "slices are missing" in text_of(check, "p1")
    assert kinds(check)["p0"] == [("warn", "hounsfield")]


def test_cases_that_are_not_in_order_are_rows_and_the_others_are_checked(tmp_path: Path) -> None:
    make_set(tmp_path, cases=4)
    image_of(tmp_path, 0).unlink()
    label_of(tmp_path, 1).unlink()
    label_of(tmp_path, 2).write_bytes(label_of(tmp_path, 2).read_bytes()[:-40])
    check = look(tmp_path)
    assert kinds(check) == {
        "case_0": [("fail", "layout")],
        "case_1": [("fail", "layout")],
        "case_2": [("fail", "label")],
    }
    assert case_of(check, "case_3").result == "pass"
    assert "label without an image" in text_of(check, "case_0")


def test_two_channels_on_two_grids(tmp_path: Path) -> None:
    make_set(tmp_path)
    facts = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps(facts | {"channel_names": {"0": "T1", "1": "T2"}}))
    for number in range(3):
        array = scan(number + 10) if number else scan(10)[:, :-1]
        write(tmp_path / "imagesTr" / f"case_{number}_0001.nii.gz", array)
    check = look(tmp_path)
    assert kinds(check) == {"case_0": [("fail", "channels")]}
    assert "case_0_0000.nii.gz and case_0_0001.nii.gz lie on different grids (shapes" in text_of(check, "case_0")
    assert len(case_of(check, "case_1").images) == 2


def test_what_readers_warn_of_is_a_warning_of_the_case(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:  # N2
    make_set(tmp_path)
    image = nib.Nifti1Image(scan(0), AFFINE)
    image.set_sform(AFFINE, 1)
    other = AFFINE.copy()
    other[:3, 3] += (10, -5, 3)
    image.set_qform(other, 1)
    image.to_filename(image_of(tmp_path, 0))
    check = look(tmp_path)
    assert kinds(check) == {"case_0": [("warn", "reader-warning")]}
    assert "qform and sform differ by 11.6 mm" in text_of(check, "case_0")
    assert capfd.readouterr() == ("", "")


def test_voxels_of_another_size_are_named(tmp_path: Path) -> None:
    make_set(tmp_path, cases=4)
    affine = AFFINE @ np.diag([10, 10, 10, 1])
    for path, array in ((image_of(tmp_path, 0), scan(0)), (label_of(tmp_path, 0), blobs())):
        write(path, array, affine)
    check = look(tmp_path)
    assert kinds(check) == {"case_0": [("warn", "spacing")]}
    assert "voxels of 10 x 10 x 15 mm where 1 x 1 x 1.5 mm is usual" in text_of(check, "case_0")


def test_the_spleen_of_the_decathlon_is_known(tmp_path: Path) -> None:  # N22
    make_set(tmp_path, labels=LABELS)
    facts = json.loads((tmp_path / "dataset.json").read_text())
    facts |= {"name": "Spleen", "labels": {"background": 0, "spleen": 1, "dark": 2}}
    (tmp_path / "dataset.json").write_text(json.dumps(facts))
    check = look(tmp_path)
    assert kinds(check) == {"": [("warn", "known-dataset")]}
    assert "anatomically LPS" in text_of(check)


def test_one_scan_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "scan.nii.gz", scan(0))
    check = look(path)
    assert [(case.name, case.result) for case in check.cases] == [("scan", "pass")]
    assert (check.root, check.cases[0].images[0].path) == (path, "scan.nii.gz")
    check = look(make_series(tmp_path / "series"))
    assert check.cases[0].images[0].spacing_mm == (0.5, 1.0, 2.0)
    assert (check.root, check.cases[0].images[0].path) == (tmp_path / "series", "series")


@pytest.mark.parametrize("closed", [".", "imagesTr"])
def test_a_folder_that_may_not_be_opened_is_named(tmp_path: Path, closed: str) -> None:
    folder = make_set(tmp_path / "set") / closed
    folder.chmod(0)
    try:
        if os.access(folder, os.R_OK):
            pytest.skip("root may open every folder")
        with pytest.raises(DataError, match=re.escape(f"{folder}: it cannot be opened")):
            look(tmp_path / "set")
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_no_data_set(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=name):
        look(tmp_path / name)


def test_processes_give_what_this_process_gives(tmp_path: Path) -> None:
    make_set(tmp_path, cases=4)
    label_of(tmp_path, 2).write_bytes(b"nonsense")
    steps: list[tuple[int, int]] = []
    apart = check_dataset(tmp_path, workers=2, progress=lambda done, total: steps.append((done, total)))
    here = look(tmp_path)
    assert apart.cases == here.cases
    assert (apart.findings, apart.label_rows) == (here.findings, here.label_rows)
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_hippocampus_is_in_order(tmp_path: Path) -> None:
    source = shared_data("hippocampus_msd_task04")
    for number, image in enumerate(sorted((source / "imagesTr").iterdir())[:12]):
        for kind in ("imagesTr", "labelsTr"):
            (tmp_path / kind).mkdir(exist_ok=True)
            shutil.copy(source / kind / image.name, tmp_path / kind / image.name)
        assert number < 12
    facts = {"modality": {"0": "MR"}, "labels": {"0": "background", "1": "Anterior", "2": "Posterior"}}
    names = sorted(path.name for path in (tmp_path / "imagesTr").iterdir())
    facts["training"] = [{"image": f"imagesTr/{name}", "label": f"labelsTr/{name}"} for name in names]  # type: ignore[assignment]
    (tmp_path / "dataset.json").write_text(json.dumps(facts))
    check = look(tmp_path)
    assert kinds(check) == {}
    for case in check.cases:  # what the organ rule leans on: front of back, in millimetres
        assert case.label is not None
        assert case.label.centres_mm[1][1] - case.label.centres_mm[2][1] > 5
