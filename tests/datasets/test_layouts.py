"""Folder layouts: what is found, and that everything out of order is named at once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from medckpt.datasets.layouts import Dataset, open_dataset
from medckpt.errors import DataError
from tests.conftest import shared_data
from tests.datasets.dicom_maker import make_series

LABELS = {"background": 0, "liver": 1, "tumour": 2}
HEAD = {"channel_names": {"0": "CT"}, "labels": LABELS, "numTraining": 2, "file_ending": ".nii.gz"}


def touch(root: Path, *names: str) -> None:
    """Files for layouts that are never opened."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def label_map(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.Nifti1Image(np.array(values, np.uint8).reshape(-1, 1, 1), np.eye(4)).to_filename(path)


def head(root: Path, content: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "dataset.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def found(dataset: Dataset) -> dict[str, tuple[list[str], str]]:
    def relative(path: Path | None) -> str:
        assert path is not None
        return path.relative_to(dataset.root).as_posix()

    return {case.name: ([relative(image) for image in case.images], relative(case.label)) for case in dataset.cases}


# nnU-Net


def test_nnunet(tmp_path: Path) -> None:
    head(tmp_path, HEAD | {"licence": "anything else is left alone"})
    touch(tmp_path, "imagesTr/b_0000.nii.gz", "imagesTr/a_1_0000.nii.gz", "labelsTr/a_1.nii.gz", "labelsTr/b.nii.gz")
    touch(tmp_path, "imagesTs/c_0000.nii.gz", "imagesTr/._a_1_0000.nii.gz", "imagesTr/a_1.json")
    dataset = open_dataset(tmp_path)
    assert (dataset.layout, dataset.channel_names, dataset.labels) == ("nnunet", ("CT",), LABELS)
    assert dataset.classes == ("liver", "tumour")
    assert [(case.name, case.patient) for case in dataset.cases] == [("a_1", "a_1"), ("b", "b")]
    assert found(dataset)["a_1"] == (["imagesTr/a_1_0000.nii.gz"], "labelsTr/a_1.nii.gz")


def test_nnunet_channels(tmp_path: Path) -> None:
    head(tmp_path, HEAD | {"channel_names": {str(i): f"c{i}" for i in range(2)}})
    touch(tmp_path, "imagesTr/a_0001.nii.gz", "imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz")
    dataset = open_dataset(tmp_path)
    assert dataset.channel_names == ("c0", "c1")
    assert found(dataset)["a"][0] == ["imagesTr/a_0000.nii.gz", "imagesTr/a_0001.nii.gz"]


def test_nnunet_names_everything_out_of_order_at_once(tmp_path: Path) -> None:
    head(tmp_path, HEAD | {"channel_names": {"0": "CT", "1": "PET"}})
    touch(tmp_path, "imagesTr/half_0000.nii.gz", "labelsTr/half.nii.gz", "imagesTr/three_0000.nii.gz")
    touch(tmp_path, "imagesTr/lonely_0000.nii.gz", "imagesTr/lonely_0001.nii.gz", "labelsTr/orphan.nii.gz")
    touch(tmp_path, "imagesTr/plain.nii.gz", "imagesTr/three_0002.nii.gz", "labelsTr/three.nii.gz")
    with pytest.raises(DataError) as caught:
        open_dataset(tmp_path)
    for line in [
        "half: channels 0000, but 2 from 0000 on are expected",
        "three: channels 0000, 0002, but 2",
        "lonely: image without a label; add the label, or move the image out",
        "orphan: label without an image",
        "plain.nii.gz: nnU-Net's names end in the channel number, like plain_0000",
    ]:
        assert f"\n  {line}" in str(caught.value)


def test_nnunet_explicit_paths(tmp_path: Path) -> None:
    cases = {"x": {"images": ["scans/x.nii.gz"], "label": "truth/x.nii.gz"}}
    head(tmp_path, HEAD | {"dataset": cases})
    touch(tmp_path, "scans/x.nii.gz", "truth/x.nii.gz")
    assert found(open_dataset(tmp_path)) == {"x": (["scans/x.nii.gz"], "truth/x.nii.gz")}


def test_nnunet_v1_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head(tmp_path, {"modality": {"0": "MRI"}, "labels": {"0": "background", "1": "liver", "2": "tumour"}})
    touch(tmp_path, "imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz")
    with caplog.at_level(logging.WARNING, "medckpt"):
        dataset = open_dataset(tmp_path)
    assert (dataset.channel_names, dataset.labels) == (("MRI",), LABELS)
    assert "'modality' is nnU-Net v1's key" in caplog.text
    assert "the other way round" in caplog.text


def test_labels_need_not_follow_each_other(tmp_path: Path) -> None:
    head(tmp_path, HEAD | {"labels": {"tumour": 7, "background": 0, "liver": 3}})
    touch(tmp_path, "imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz")
    dataset = open_dataset(tmp_path)
    assert list(dataset.labels.items()) == [("background", 0), ("liver", 3), ("tumour", 7)]
    assert dataset.classes == ("liver", "tumour")


# Medical Segmentation Decathlon


def test_msd(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = [{"image": f"./imagesTr/{n}.nii.gz", "label": f"./labelsTr/{n}.nii.gz"} for n in ("b", "a")]
    head(tmp_path, {"modality": {"0": "CT"}, "labels": {"0": "background", "1": "liver"}, "training": training})
    touch(tmp_path, *(entry[key] for entry in training for key in entry))
    with caplog.at_level(logging.WARNING, "medckpt"):
        dataset = open_dataset(tmp_path)
    assert (dataset.layout, dataset.labels) == ("msd", {"background": 0, "liver": 1})
    assert list(found(dataset)) == ["a", "b"]
    assert caplog.text == ""  # these keys are this layout's own


def test_msd_with_channel_files_and_nnunet_v1_names(tmp_path: Path) -> None:
    content = HEAD | {"channel_names": ["T1", "T2"]}
    listed = {"image": ["im/a_0000.nii.gz", "im/a_0001.nii.gz"], "label": "la/a.nii.gz"}
    head(tmp_path, content | {"training": [listed, {"image": "im/v1.nii.gz", "label": "la/v1.nii.gz"}]})
    touch(tmp_path, *listed["image"], "la/a.nii.gz", "im/v1_0000.nii.gz", "im/v1_0001.nii.gz", "la/v1.nii.gz")
    cases = found(open_dataset(tmp_path))
    assert cases["a"][0] == listed["image"]
    assert cases["v1"][0] == ["im/v1_0000.nii.gz", "im/v1_0001.nii.gz"]


def test_msd_names_everything_out_of_order_at_once(tmp_path: Path) -> None:
    root, outside = tmp_path / "set", tmp_path / "outside.nii.gz"
    outside.touch()
    touch(root, "im/here.nii.gz", "la/here.nii.gz", "la/link.nii.gz")
    (root / "im" / "link.nii.gz").symlink_to(outside)
    names = ["im/here.nii.gz", "im/gone.nii.gz", "../outside.nii.gz", str(outside), "im/link.nii.gz"]
    training = [{"image": name, "label": f"la/{Path(name).name}"} for name in [*names, "im/here.nii.gz"]]
    training.append({"image": ["im/here.nii.gz", "im/here.nii.gz"], "label": "la/here.nii.gz"})
    head(root, HEAD | {"training": training})
    with pytest.raises(DataError) as caught:
        open_dataset(root)
    text = str(caught.value)
    assert "gone.nii.gz is missing" in text
    assert text.count("leads out of the data set") == 3
    assert "here: listed twice" in text
    assert "2 image files for 1 channels" in text
    assert text.count("la/gone.nii.gz is missing") == 1


@pytest.mark.parametrize("entry", ["a.nii.gz", {"image": "a.nii.gz"}, {"image": [], "label": "b"}, {"label": "b"}])
def test_msd_faulty_entries(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(DataError, match=r'"training" entry 0 needs "image" and "label"'):
        open_dataset(head(tmp_path, HEAD | {"training": [entry]}))


def test_case_names_stay_below_the_output_folder(tmp_path: Path) -> None:
    head(tmp_path, HEAD | {"dataset": {"../x": {"images": ["x.nii.gz"], "label": "y.nii.gz"}}})
    touch(tmp_path, "x.nii.gz", "y.nii.gz")
    with pytest.raises(DataError, match="holds no slash"):
        open_dataset(tmp_path)


# dataset.json itself


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{\n  "labels": {"a": 1,}\n}', r"line 2, column 2\d"),
        ("[]", "holds a list where an object"),
        ('{"labels": {}, "labels": {}}', "'labels' occurs twice"),
        ({"channel_names": {"0": "CT"}}, r'"labels" is missing; for example'),
        ({"channel_names": {"0": "CT"}, "lables": LABELS}, r"unknown key 'lables'\. Did you mean 'labels'"),
        ({"chanel_names": {"0": "CT"}, "labels": LABELS}, "Did you mean 'channel_names'"),
        (HEAD | {"trainning": []}, "Did you mean 'training'"),
        ({"labels": LABELS}, '"channel_names" is missing'),
        (HEAD | {"channel_names": {"1": "CT"}}, "by number, 0, 1"),
        (HEAD | {"labels": {}}, r'at least background and one class; for example "labels"'),
        (HEAD | {"labels": {"background": 0}}, "no class beside the background"),
        (HEAD | {"labels": {"liver": 1}}, "no label has the value 0"),
        (HEAD | {"labels": {"background": 0, "a": 1, "b": 1}}, r"same value \(1\)"),
        (HEAD | {"labels": {"background": 0, "whole": [1, 2]}}, "'whole' is a region"),
        (HEAD | {"labels": {"background": 0, "a": 1, "ignore": 2}}, "'ignore' is not supported yet"),
        (HEAD | {"labels": {"background": 0, "a": -1}}, "'a' has value -1"),
        (HEAD | {"labels": {"background": 0, "a": True}}, "'a' has value True"),
        (HEAD | {"labels": {"0": "background", "1": "a", "2": "a"}}, "one name to two values"),
        (HEAD | {"file_ending": ".png"}, r"'\.png' is not read here"),
        (HEAD | {"training": {}}, '"training" is a list'),
        (HEAD | {"dataset": []}, '"dataset" maps each case'),
    ],
)
def test_faulty_dataset_json(tmp_path: Path, content: Any, match: str) -> None:
    with pytest.raises(DataError, match=rf"dataset\.json: .*{match}"):
        open_dataset(head(tmp_path, content))


# DICOM


def test_dicom(tmp_path: Path) -> None:
    head(tmp_path, HEAD)
    for patient, sub in [("p2", "ct"), ("p1", "study/series")]:
        make_series(tmp_path / patient / sub)
        touch(tmp_path, f"{patient}/label.nii.gz", f"{patient}/notes.txt")
    touch(tmp_path, "p1/other.nii.gz", "README.md", "docs/page.md")
    dataset = open_dataset(tmp_path)
    assert dataset.layout == "dicom"
    assert found(dataset) == {"p1": (["p1/study/series"], "p1/label.nii.gz"), "p2": (["p2/ct"], "p2/label.nii.gz")}


def test_dicom_without_dataset_json(tmp_path: Path) -> None:
    for patient, values in [("p1", (0, 1)), ("p2", (0, 5, 1))]:
        make_series(tmp_path / patient / "ct", Modality="MR")
        label_map(tmp_path / patient / "segmentation.nii.gz", *values)
    dataset = open_dataset(tmp_path)
    assert dataset.channel_names == ("MR",)
    assert dataset.labels == {"background": 0, "label_1": 1, "label_5": 5}


def test_dicom_two_visits_share_the_patient(tmp_path: Path) -> None:
    head(tmp_path, HEAD)
    for visit in ("v1", "v2"):
        make_series(tmp_path / "p" / visit / "ct")
        touch(tmp_path, f"p/{visit}/label.nii.gz")
    assert [(case.name, case.patient) for case in open_dataset(tmp_path).cases] == [("p_v1", "p"), ("p_v2", "p")]


def test_dicom_names_everything_out_of_order_at_once(tmp_path: Path) -> None:
    head(tmp_path, HEAD)
    make_series(tmp_path / "two" / "ct")
    make_series(tmp_path / "two" / "mr")
    make_series(tmp_path / "unlabelled" / "ct")
    make_series(tmp_path / "labels" / "ct")
    touch(tmp_path, "two/label.nii.gz", "labels/a.nii.gz", "labels/b.nii.gz", "imageless/label.nii.gz")
    with pytest.raises(DataError) as caught:
        open_dataset(tmp_path)
    for line in [
        "two: 2 folders with DICOM files (ct, mr)",
        "unlabelled: image without a label",
        "labels: 2 NIfTI files (a.nii.gz, b.nii.gz); call the label map label.nii.gz",
        "imageless: label without an image",
    ]:
        assert f"\n  {line}" in str(caught.value)


def test_dicom_takes_one_channel(tmp_path: Path) -> None:
    head(tmp_path, HEAD | {"channel_names": ["CT", "PET"]})
    make_series(tmp_path / "p" / "ct")
    with pytest.raises(DataError, match="2 channels are named"):
        open_dataset(tmp_path)


# Plain pairs


@pytest.mark.parametrize(("images", "labels"), [("images", "labels"), ("imagesTr", "labelsTr"), ("image", "masks")])
def test_pairs(tmp_path: Path, images: str, labels: str) -> None:
    touch(tmp_path, f"{images}/a.nii.gz", f"{images}/scan_2021.nrrd")
    label_map(tmp_path / labels / "a.nii.gz", 0, 2)
    label_map(tmp_path / labels / "scan_2021.nii", 0, 1)
    dataset = open_dataset(tmp_path)
    assert (dataset.layout, dataset.channel_names) == ("pairs", ("image",))
    assert dataset.labels == {"background": 0, "label_1": 1, "label_2": 2}
    assert found(dataset)["scan_2021"] == ([f"{images}/scan_2021.nrrd"], f"{labels}/scan_2021.nii")


def test_pairs_with_channels(tmp_path: Path) -> None:
    touch(tmp_path, "images/a_0000.nii.gz", "images/a_0001.nii.gz")
    label_map(tmp_path / "labels" / "a.nii.gz", 0, 1)
    dataset = open_dataset(tmp_path)
    assert dataset.channel_names == ("image_0", "image_1")
    assert found(dataset)["a"][0] == ["images/a_0000.nii.gz", "images/a_0001.nii.gz"]


def test_pairs_with_dicom_images_and_names_from_dataset_json(tmp_path: Path) -> None:
    head(tmp_path, HEAD)
    make_series(tmp_path / "images" / "a")
    touch(tmp_path, "labels/a.nii.gz")
    dataset = open_dataset(tmp_path)
    assert (dataset.layout, dataset.classes) == ("pairs", ("liver", "tumour"))
    assert found(dataset)["a"] == (["images/a"], "labels/a.nii.gz")


def test_pairs_out_of_order(tmp_path: Path) -> None:
    touch(tmp_path, "images/a.nii.gz", "labels/b.nii.gz")
    with pytest.raises(DataError, match=r"a: image without a label.*\n.*b: label without an image"):
        open_dataset(tmp_path)
    touch(tmp_path, "images/a.nii")
    with pytest.raises(DataError, match=r"a\.nii and a\.nii\.gz in images/ have one name"):
        open_dataset(tmp_path)
    touch(tmp_path, "imagesTr/a.nii.gz")
    with pytest.raises(DataError, match="imagesTr and images are both there"):
        open_dataset(tmp_path)


def test_pairs_with_nothing_to_learn(tmp_path: Path) -> None:
    touch(tmp_path, "images/a.nii.gz")
    label_map(tmp_path / "labels" / "a.nii.gz", 0, 0)
    with pytest.raises(DataError, match="every label map is empty"):
        open_dataset(tmp_path)


# Roots


def test_impossible_roots(tmp_path: Path) -> None:
    touch(tmp_path, "file", "images_only/images/a.nii.gz", "empty/imagesTr/.keep", "empty/labelsTr/.keep")
    (tmp_path / "nothing").mkdir()
    for name, match in [
        ("none", "no such folder"),
        ("file", "this is a file"),
        ("nothing", r"no case is in this folder\. Known layouts"),
        ("empty", "no case is in this folder"),
        ("images_only", "images/ has no labels beside it"),
    ]:
        with pytest.raises(DataError, match=match):
            open_dataset(tmp_path / name)


def test_hippocampus() -> None:
    """182 real pairs without dataset.json, beside a folder that is no part of them."""
    dataset = open_dataset(shared_data("hippocampus_msd_task04"))
    assert dataset.layout == "pairs"
    assert dataset.labels == {"background": 0, "label_1": 1, "label_2": 2}
    assert len(dataset.cases) == 182
    assert dataset.cases[0].name == "hippocampus_001"
    assert "hippocampus_118" not in {case.name for case in dataset.cases}
