from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medckpt.errors import ConfigError, DataError
from medckpt.inference.inputs import check_targets, find_inputs
from tests.conftest import shared_data


def folder_of(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names_of(path: Path, channels: int) -> list[tuple[str, list[str]]]:
    return [(case.name, [image.name for image in case.images]) for case in find_inputs(path, channels)]


def test_inputs_are_found_by_what_they_are(tmp_path: Path) -> None:
    two = folder_of(tmp_path / "two", "a_0000.nii.gz", "a_0001.nii.gz", "b_0000.nii.gz", "b_0001.nii.gz", "notes.txt")
    assert names_of(two, 2) == [
        ("a", ["a_0000.nii.gz", "a_0001.nii.gz"]),
        ("b", ["b_0000.nii.gz", "b_0001.nii.gz"]),
    ]
    with pytest.raises(DataError, match=r"a: the network takes 1 channel\(s\), a_0000; the input has 2"):
        find_inputs(two, channels=1)
    with pytest.raises(DataError, match="no such file or folder"):
        find_inputs(tmp_path / "nothing", channels=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder is empty"):
        find_inputs(tmp_path / "empty", channels=1)
    patients = folder_of(tmp_path / "patients", "p1/ct/1", "p1/.DS_Store", "p2/1.dcm", ".DS_Store", ".cache/x")
    found = find_inputs(patients, channels=1)
    assert [(case.name, case.images[0].name) for case in found] == [("p1", "ct"), ("p2", "p2")]
    with pytest.raises(DataError, match=r"p1: the network takes 2 channel\(s\), the input has 1"):
        find_inputs(patients, channels=2)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["c_0001.nii.gz", "c_0003.nii.gz"], r"c: .* c_0000 to c_0001; .*c_0001\.nii\.gz, c_0003\.nii\.gz"),
        (["c_0000.nii.gz"], r"c: .*the input has 1 \(c_0000\.nii\.gz\)"),
        (["c_0000.nii.gz", "c_0001.nii.gz", "c_0002.nii.gz"], r"c: .*the input has 3"),
        (["a.nii", "a.nii.gz"], r"a: a\.nii, a\.nii\.gz: two files have one name"),
        (["a.nii.gz", "a_0000.nii.gz"], r"a: .*\(a\.nii\.gz, a_0000\.nii\.gz\)"),
        (["a_0000.nii", "a_0000.nii.gz"], r"a: a_0000\.nii, a_0000\.nii\.gz: two files have one name"),
    ],
)
def test_two_channels_are_0000_and_0001_and_nothing_else(tmp_path: Path, files: list[str], message: str) -> None:
    folder_of(tmp_path, "whole_0000.nii.gz", "whole_0001.nii.gz", *files)
    with pytest.raises(DataError, match=message) as caught:
        find_inputs(tmp_path, channels=2)
    assert "whole" not in str(caught.value)


def test_all_faulty_scans_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)a: .*b: "):
        find_inputs(folder_of(tmp_path, "a_0000.nii.gz", "b_0001.nii.gz"), channels=2)


def test_a_year_is_no_channel(tmp_path: Path) -> None:
    folder_of(tmp_path, "scan_2019.nii.gz", "scan_2020.nii.gz", "x_0000.nii.gz", "y_0001.nii.gz")
    assert [case.name for case in find_inputs(tmp_path, 1)] == ["scan_2019", "scan_2020", "x", "y_0001"]
    assert [case.name for case in find_inputs(tmp_path / "x_0000.nii.gz", 1)] == ["x"]


@pytest.mark.parametrize("files", [("a.nii", "a.nii.gz"), ("a.nii.gz", "a_0000.nii.gz"), ("a.NII", "a.nrrd")])
def test_two_files_that_would_get_one_answer_are_refused(tmp_path: Path, files: tuple[str, str]) -> None:
    with pytest.raises(DataError, match=f"a: {files[0]}, {files[1]}: two files have one name"):
        find_inputs(folder_of(tmp_path, *files), channels=1)


def test_upper_case_suffixes_count_and_dot_files_do_not(tmp_path: Path) -> None:
    folder_of(tmp_path, "a.nii.gz", "B.NII.GZ", ".DS_Store", "._a.nii.gz", ".a.nii.gz.part/x.dcm")
    assert names_of(tmp_path, 1) == [("B", ["B.NII.GZ"]), ("a", ["a.nii.gz"])]


def test_a_folder_of_only_dot_files_is_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder is empty"):
        find_inputs(folder_of(tmp_path, ".DS_Store", "._a.nii.gz"), channels=1)


@pytest.mark.parametrize("place", ["p1/ct", ""])
def test_volumes_beside_dicom_are_refused(tmp_path: Path, place: str) -> None:
    slices = sorted(shared_data("totalsegmentator/ct_dicom_j2k").iterdir())
    folder_of(tmp_path, "a.nii.gz", "notes/read.txt")
    assert names_of(tmp_path, 1) == [("a", ["a.nii.gz"])]  # a folder without DICOM is not in the way
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    shutil.copy(slices[0], tmp_path / place / "slice")
    with pytest.raises(DataError, match=rf"mixed: volume files \(a\.nii\.gz\) and DICOM \({place[:2] or 'slice'}\)"):
        find_inputs(tmp_path, channels=1)


def test_the_folder_one_stands_in_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_of(tmp_path / "patient7", "1.dcm", "inner/1.dcm"))
    assert [case.name for case in find_inputs(Path("."), 1)] == [f"{tmp_path.name}_patient7"]
    monkeypatch.chdir("inner")
    assert [case.name for case in find_inputs(Path(".."), 1)] == [f"{tmp_path.name}_patient7"]


# Targets


def test_targets_that_can_be_written_pass_and_nothing_is_made(tmp_path: Path) -> None:
    folder_of(tmp_path, "old.nii.gz", "scan.nii.gz")
    check_targets([tmp_path / "old.nii.gz", tmp_path / "new" / "deep" / "a.nii.gz"], [tmp_path / "scan.nii.gz"])
    assert sorted(item.name for item in tmp_path.iterdir()) == ["old.nii.gz", "scan.nii.gz"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("folder.nii.gz", "this is a folder"),
        ("file/a.nii.gz", "file is a file, not a folder"),
        ("file/deep/a.nii.gz", "file is a file, not a folder"),
        ("a.nii", r"written as \.nii\.gz"),
        ("scan.nii.gz", "a prediction never replaces a scan"),
        ("link.nii.gz", "a prediction never replaces a scan"),
    ],
)
def test_targets_that_cannot_be_written_are_refused(tmp_path: Path, target: str, message: str) -> None:
    folder_of(tmp_path, "folder.nii.gz/x", "file", "scan.nii.gz")
    (tmp_path / "link.nii.gz").symlink_to(tmp_path / "scan.nii.gz")
    with pytest.raises(ConfigError, match=message) as caught:
        check_targets([tmp_path / "fine.nii.gz", tmp_path / target], [tmp_path / "scan.nii.gz"])
    assert caught.value.exit_code == 2


def test_a_place_without_permission_is_refused() -> None:
    with as_nobody(), pytest.raises(ConfigError, match=r"output=/medckpt-none/deep: / cannot be written to"):
        check_targets([Path("/medckpt-none/deep/a.nii.gz")], [])


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write anywhere: the test takes off its rights for a moment."""
    if os.getuid():
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
