"""The embedded phantom: right in the patient's millimetres, the same every time, whole after a crash, and not a toy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from filelock import FileLock
from numpy.typing import NDArray

from medckpt.datasets.phantom import PHANTOM_LABELS, draw_patient, make_phantom, phantom_folder
from medckpt.errors import ConfigError, DataError

PATIENTS = 20
FOREGROUND = sorted(set(PHANTOM_LABELS.values()) - {0})


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All patients; made once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with FileLock(base / "phantom.lock"):
        return make_phantom(base / "phantom", PATIENTS)


@pytest.fixture
def small(phantom: Path, tmp_path: Path) -> Path:
    """The first three patients, in a folder to be spoilt."""
    folder = tmp_path / "small"
    folder.mkdir()
    for number in (1, 2, 3):
        shutil.copytree(phantom / f"patient_{number:03d}", folder / f"patient_{number:03d}")
    marker = json.loads((phantom / "dataset.json").read_text())
    files = {name: digest for name, digest in marker["files"].items() if name <= "patient_003"}
    (folder / "dataset.json").write_text(json.dumps({**marker, "patients": 3, "files": files}))
    (folder / ".phantom.json").write_text(json.dumps({"phantom_version": 1, "seed": 0, "patients": 3}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_series(patient: Path) -> sitk.Image:
    reader = sitk.ImageSeriesReader()
    names = reader.GetGDCMSeriesFileNames(str(patient / "ct"))
    assert len(names) == len(list((patient / "ct").glob("*.dcm")))
    reader.SetFileNames(names)
    return reader.Execute()


def ras_affine(image: sitk.Image) -> NDArray[np.float64]:
    affine = np.eye(4)
    affine[:3, :3] = np.array(image.GetDirection()).reshape(3, 3) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine


def read_pair(patient: Path) -> tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.float64]]:
    """HU and labels, both (columns, rows, slices), and the label's affine."""
    label = nib.load(patient / "label.nii.gz")
    return sitk.GetArrayFromImage(read_series(patient)).transpose(2, 1, 0), np.asarray(label.dataobj), label.affine


def centre_of(label: NDArray[np.uint8], affine: NDArray[np.float64], value: int) -> NDArray[np.float64]:
    return nib.affines.apply_affine(affine, np.argwhere(label == value).mean(axis=0))


def test_every_series_lies_where_its_label_lies(phantom: Path) -> None:
    assert len(list(phantom.glob("patient_*"))) == PATIENTS
    for patient in sorted(phantom.glob("patient_*")):
        image, label = read_series(patient), nib.load(patient / "label.nii.gz")
        assert label.shape == image.GetSize()
        assert label.get_data_dtype() == np.uint8
        np.testing.assert_allclose(label.affine, ras_affine(image), atol=1e-4)
        np.testing.assert_allclose(label.get_qform(), label.get_sform(), atol=1e-4)
        assert set(np.unique(np.asarray(label.dataobj))) == set(PHANTOM_LABELS.values()), patient.name


def test_organs_lie_on_their_side_in_the_patient(phantom: Path) -> None:
    """In RAS+ x grows to the patient's right, y to the front, z to the head."""
    for patient in sorted(phantom.glob("patient_*")):
        label = nib.load(patient / "label.nii.gz")
        data = np.asarray(label.dataobj)
        centre = {name: centre_of(data, label.affine, value) for name, value in PHANTOM_LABELS.items()}
        assert centre["liver"][0] > centre["spine"][0] > centre["spleen"][0], patient.name
        assert centre["lungs"][2] > centre["liver"][2] > centre["kidneys"][2], patient.name
        assert centre["liver"][1] > centre["spleen"][1] > centre["spine"][1], patient.name


def test_the_turned_patient_is_turned_in_the_file_and_upright_in_the_patient(phantom: Path) -> None:
    turned = {
        patient.name: pydicom.dcmread(next((patient / "ct").glob("*.dcm"))).ImageOrientationPatient
        == [-1, 0, 0, 0, -1, 0]
        for patient in phantom.glob("patient_*")
    }
    assert [name for name, flag in turned.items() if flag] == ["patient_003"]
    hu, label, affine = read_pair(phantom / "patient_003")
    assert nib.aff2axcodes(affine) == ("R", "A", "S")
    assert centre_of(label, affine, PHANTOM_LABELS["liver"])[0] > centre_of(label, affine, PHANTOM_LABELS["spleen"])[0]
    # The image is turned with the label: the table (bright, outside of the body) lies behind the patient.
    table = np.argwhere((label == 0) & (hu > -50))
    behind = nib.affines.apply_affine(affine, table)[:, 1] < centre_of(label, affine, PHANTOM_LABELS["spine"])[1]
    assert behind.mean() > 0.7


def test_the_image_agrees_with_the_label(phantom: Path) -> None:
    """Medians inside a label against the table of tissues (patient_002 is arterial)."""
    hu, label, _ = read_pair(phantom / "patient_002")
    median = {name: np.median(hu[label == value]) for name, value in PHANTOM_LABELS.items()}
    assert hu[:, :8].mean() == pytest.approx(-1000, abs=3)  # air in front of the patient
    assert median["lungs"] == pytest.approx(-820, abs=80)
    assert median["liver"] == pytest.approx(75, abs=12)
    assert median["spleen"] == pytest.approx(110, abs=12)
    assert median["kidneys"] == pytest.approx(150, abs=20)
    assert hu.min() >= -1024
    assert hu.max() < 1200


def test_series_differ_as_scans_do(phantom: Path) -> None:
    first = [pydicom.dcmread(next((patient / "ct").glob("*.dcm"))) for patient in sorted(phantom.glob("patient_*"))]
    spacing = [float(header.PixelSpacing[0]) for header in first]
    assert min(spacing) >= 2.8
    assert max(spacing) <= 3.8
    assert len(set(spacing)) > 15
    assert len({float(header.SliceThickness) for header in first}) >= 4
    assert any(header.Rows != header.Columns for header in first)
    assert all(96 <= side <= 120 for header in first for side in (header.Rows, header.Columns))
    assert all(34 <= len(list((patient / "ct").iterdir())) <= 60 for patient in phantom.glob("patient_*"))
    assert {header.SeriesDescription for header in first} == {
        f"CT trunk, {n}" for n in ("native", "arterial", "portal venous")
    }
    for keyword in ("PatientID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID"):
        assert len({str(header[keyword].value) for header in first}) == PATIENTS


@pytest.mark.parametrize(
    ("name", "order"), [("patient_001", "down"), ("patient_002", "up"), ("patient_004", "shuffled")]
)
def test_slice_numbers_need_not_follow_the_position(phantom: Path, name: str, order: str) -> None:
    headers = [pydicom.dcmread(path) for path in sorted((phantom / name / "ct").glob("*.dcm"))]
    assert [header.InstanceNumber for header in headers] == list(range(1, len(headers) + 1))
    steps = np.sign(np.diff([float(header.ImagePositionPatient[2]) for header in headers]))
    assert set(steps) == {"down": {-1}, "up": {1}, "shuffled": {-1, 1}}[order]
    assert len({header.SOPInstanceUID for header in headers}) == len(headers)


def best_interval_dice(inside: NDArray[np.int64], everything: NDArray[np.int64]) -> float:
    """The best Dice that any [lo, hi] of bins reaches: an oracle that has seen the labels."""
    hit, chosen = (np.concatenate([[0], np.cumsum(counts)]) for counts in (inside, everything))
    dice = 2 * (hit[None] - hit[:, None]) / np.maximum(chosen[None] - chosen[:, None] + inside.sum(), 1)
    return float(np.triu(dice).max())


def test_no_window_of_intensities_finds_the_labels(phantom: Path) -> None:
    edges = np.arange(-1024, 3097, 20)
    histograms = []  # (patients, labels, bins)
    for patient in sorted(phantom.glob("patient_*")):
        hu, label, _ = read_pair(patient)
        histograms.append([np.histogram(hu[label == value], edges)[0] for value in PHANTOM_LABELS.values()])
    counts = np.array(histograms)
    assert counts.sum() == sum(np.prod(read_series(patient).GetSize()) for patient in phantom.glob("patient_*"))
    pooled = np.mean([best_interval_dice(counts[:, c].sum(axis=0), counts.sum(axis=(0, 1))) for c in FOREGROUND])
    own = np.mean([[best_interval_dice(one[c], one.sum(axis=0)) for c in FOREGROUND] for one in counts], axis=1)
    assert 0.2 < pooled < 0.5
    assert own.mean() < 0.55
    assert own.max() < 0.65


def test_the_oracle_finds_what_a_window_can_find() -> None:
    everything = np.array([50, 10, 7, 3, 40])
    assert best_interval_dice(np.array([0, 10, 7, 3, 0]), everything) == 1.0
    assert best_interval_dice(np.array([0, 10, 0, 3, 0]), everything) == pytest.approx(2 * 10 / (10 + 13))


def test_a_patient_depends_on_seed_and_number_alone(phantom: Path, tmp_path: Path) -> None:
    again = make_phantom(tmp_path / "again", patients=1)
    assert contents(again / "patient_001") == contents(phantom / "patient_001")
    other, _, _, _ = draw_patient(0, seed=1)
    first, _, _, _ = draw_patient(0, seed=0)
    assert other.shape != first.shape or not np.array_equal(other, first)


def test_the_marker_says_what_is_there(phantom: Path) -> None:
    marker = json.loads((phantom / "dataset.json").read_text())
    assert marker["labels"] == PHANTOM_LABELS
    assert marker["channel_names"] == {"0": "CT"}
    assert (marker["phantom_version"], marker["seed"], marker["patients"]) == (1, 0, PATIENTS)
    for name, digest in marker["files"].items():
        files = contents(phantom / name)
        assert digest["files"] == len(files)
        assert digest["bytes"] == sum(map(len, files.values()))
    assert not list(phantom.glob(".*.tmp"))


def test_what_is_whole_is_found_and_not_made_again(small: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    seen: list[tuple[int, int]] = []
    assert make_phantom(small, 3, progress=lambda done, total: seen.append((done, total))) == small
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*")} == before
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_damage_is_repaired_with_the_same_bytes_and_the_rest_left_alone(small: Path) -> None:
    before, untouched = contents(small), (small / "patient_002").stat().st_mtime_ns
    next((small / "patient_001" / "ct").glob("*.dcm")).unlink()
    label = small / "patient_003" / "label.nii.gz"
    label.write_bytes(label.read_bytes()[:-40])
    make_phantom(small, 3)
    assert contents(small) == before
    assert (small / "patient_002").stat().st_mtime_ns == untouched


def test_one_changed_byte_is_seen(small: Path) -> None:
    before = contents(small)
    path = small / "patient_002" / "ct" / "IM0007.dcm"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    make_phantom(small, 3)
    assert contents(small) == before


@pytest.mark.parametrize("marker", [None, '{"name": "phantom CT", "phan'])
def test_without_a_whole_marker_nothing_is_trusted(small: Path, marker: str | None) -> None:
    before = contents(small)
    (small / "dataset.json").unlink()
    if marker is not None:
        (small / "dataset.json").write_text(marker)
    shutil.rmtree(small / "patient_002")
    next((small / "patient_003" / "ct").glob("*.dcm")).write_bytes(b"torn")
    kept = (small / "patient_001").stat().st_ino
    make_phantom(small, 3)
    assert json.loads(contents(small)["dataset.json"]) == json.loads(before["dataset.json"])
    assert {**contents(small), "dataset.json": b""} == {**before, "dataset.json": b""}
    assert (small / "patient_001").stat().st_ino == kept  # equal content keeps its place


def test_a_killed_run_is_taken_up_again(phantom: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    code = (
        "import os, sys; from pathlib import Path; from medckpt.datasets.phantom import make_phantom\n"
        f"make_phantom(Path({str(folder)!r}), 2, progress=lambda done, total: os._exit(9))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert not (folder / "dataset.json").exists()
    make_phantom(folder, 2)
    for name in ("patient_001", "patient_002"):
        assert contents(folder / name) == contents(phantom / name)
    for scratch in folder.glob(".patient_*.tmp"):  # too young to be swept: it might belong to a run under way
        os.utime(scratch, (time.time() - 7200,) * 2)
    make_phantom(folder, 2)
    assert not list(folder.glob(".patient_*.tmp"))


def test_two_processes_at_once(phantom: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    code = f"from medckpt.datasets.phantom import make_phantom; make_phantom({str(folder)!r}, 2)"
    runs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    for name in ("patient_001", "patient_002"):
        assert contents(folder / name) == contents(phantom / name)
    assert not list(folder.glob(".*.tmp"))


def test_more_patients_may_be_added_but_none_taken_away(small: Path) -> None:
    make_phantom(small, 4)
    assert len(list(small.glob("patient_*"))) == 4
    before = contents(small)
    with pytest.raises(
        DataError, match=r"holds version 1, seed 0, 4 patients, not version 1, seed 0, 3 patients.*another folder"
    ):
        make_phantom(small, 3)
    with pytest.raises(DataError, match=r"not version 1, seed 5, 4 patients"):
        make_phantom(small, 4, seed=5)
    assert contents(small) == before


@pytest.mark.parametrize("name", ["dataset.json", "patient_001/label.nii.gz"])
def test_the_data_of_others_is_never_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"name": "mine"}')
    with pytest.raises(DataError, match=r"holds other files .*Give an empty or a new folder"):
        make_phantom(tmp_path, 1)
    assert contents(tmp_path) == {name: b'{"name": "mine"}'}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*file/phantom .*Give a folder of your own"):
        make_phantom(tmp_path / "file" / "phantom", 1)


@pytest.mark.parametrize(
    ("patients", "seed", "message"), [(0, 0, "from 1 to 999"), (1000, 0, "1000"), (1, -1, "negative")]
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, patients: int, seed: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_phantom(tmp_path / "new", patients, seed)
    assert not (tmp_path / "new").exists()


def test_the_cache_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert phantom_folder() == tmp_path / "medckpt" / "phantom-v1"
    assert phantom_folder(6, 0).parent == phantom_folder().parent
    assert len({phantom_folder(), phantom_folder(6), phantom_folder(20, 1)}) == 3
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/place"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert phantom_folder() == tmp_path / "home" / ".cache" / "medckpt" / "phantom-v1"
