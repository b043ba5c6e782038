"""Which files a prediction becomes, and the words for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medckpt.datasets.dataset_json import read_dataset_json
from medckpt.datasets.layouts import Case
from medckpt.datasets.segment_codes import SegmentCode
from medckpt.errors import ConfigError, DataError
from medckpt.inference.export import check_words, find_targets
from medckpt.inference.inputs import check_targets
from tests.datasets.dicom_maker import make_series


def case(name: str, image: Path) -> Case:
    return Case(name=name, patient=name, images=(image,), label=None)


@pytest.fixture
def dicom(tmp_path: Path) -> Case:
    return case("p1", make_series(tmp_path / "p1", range(2)))


@pytest.mark.parametrize(
    ("output", "written", "expected"),
    [
        ("out", None, ["out/p1.nii.gz"]),
        ("out", "seg", ["out/p1.dcm"]),
        ("out", "both", ["out/p1.nii.gz", "out/p1.dcm"]),
        ("a.dcm", None, ["a.dcm"]),
        ("a.dcm", "seg", ["a.dcm"]),
        ("a.dcm", "both", ["a.dcm", "a.nii.gz"]),
        ("a.nii.gz", None, ["a.nii.gz"]),
        ("a.nii.gz", "both", ["a.nii.gz", "a.dcm"]),
    ],
)
def test_targets(dicom: Case, output: str, written: str | None, expected: list[str]) -> None:
    assert find_targets(Path(output), [dicom], written) == [tuple(map(Path, expected))]


@pytest.mark.parametrize(
    ("output", "written", "match"),
    [
        ("a.dcm", "nifti", "a.dcm: the name and format=nifti do not agree"),
        ("a.nii.gz", "seg", "the name and format=seg do not agree"),
    ],
)
def test_names_of_another_format(dicom: Case, output: str, written: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        find_targets(Path(output), [dicom], written)


@pytest.mark.parametrize(("output", "written"), [("out", "seg"), ("out", "both"), ("a.dcm", None)])
def test_scans_that_are_no_dicom_have_no_series_to_lie_on(dicom: Case, output: str, written: str | None) -> None:
    scans = [case("n1", Path("n1.nii.gz"))] if output == "a.dcm" else [dicom, case("n1", Path("n1.nii.gz"))]
    with pytest.raises(ConfigError, match="lies on a DICOM series, and n1 is none"):
        find_targets(Path(output), scans, written)
    assert len(find_targets(Path("out"), scans, "nifti")) == len(scans)


def test_one_name_for_two_scans(dicom: Case) -> None:
    with pytest.raises(ConfigError, match=r"output=a\.dcm: there are 2 scans"):
        find_targets(Path("a.dcm"), [dicom, dicom], None)


def test_words() -> None:
    check_words(None, "binary")
    check_words("both", "labelmap")
    with pytest.raises(ConfigError, match=r"format=sge: not a choice. Did you mean 'seg'"):
        check_words("sge", "binary")
    with pytest.raises(ConfigError, match=r"seg_type=fractional: not a choice"):
        check_words(None, "fractional")


def test_a_segmentation_is_not_laid_among_the_slices(dicom: Case) -> None:
    """It would be read as one of them, or skipped, the next time."""
    (series,) = dicom.images
    with pytest.raises(ConfigError, match="the folder of the scan's slices"):
        check_targets([series / "seg.dcm"], [series])
    with pytest.raises(ConfigError, match="the folder of the scan's slices"):
        check_targets([series / "seg.dcm"], [series / "0.dcm"])
    check_targets([series.parent / "seg.dcm"], [series])


# Codes in dataset.json


def write_json(root: Path, own: object) -> Path:
    content = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "liver": 1}, "medckpt": own}
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def test_codes_in_dataset_json(tmp_path: Path) -> None:
    head = read_dataset_json(write_json(tmp_path, {"codes": {"liver": {"type": ["10200004", "SCT", "Liver"]}}}))
    assert head is not None
    assert head.codes == {"liver": SegmentCode(type=("10200004", "SCT", "Liver"))}
    head = read_dataset_json(write_json(tmp_path, {}))
    assert head is not None
    assert head.codes == {}


@pytest.mark.parametrize(
    ("own", "match"),
    [
        ({"codes": {"lievr": {"type": ["1", "SCT", "Liver"]}}}, "codes.lievr: there is no such label. Did you mean"),
        ({"codes": {"liver": {"typ": ["1", "SCT", "Liver"]}}}, r"medckpt\.codes\.liver\.typ: unknown key"),
        ({"codes": {"liver": {"type": ["1", "SCT"]}}}, r"codes\.liver\.type: expected 3 values"),
        ({"codes": {"liver": {"type": ["1" * 17, "SCT", "Liver"]}}}, "at most 16, 16, 64 letters"),
        ({"code": {}}, r"medckpt\.code: unknown key. Did you mean 'codes'"),
        ([], "medckpt: expected keys and values"),
    ],
)  # fmt: skip
def test_codes_that_are_none(tmp_path: Path, own: object, match: str) -> None:
    with pytest.raises(DataError, match=match):
        read_dataset_json(write_json(tmp_path, own))
