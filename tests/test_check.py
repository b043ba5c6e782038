"""The verb `check`, from its words to screen, files and exit code; and what a training does with its fast part."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medckpt.cli import main
from tests.conftest import TINY_UNETR, make_pairs
from tests.datasets.check_maker import AFFINE, SHAPE, blobs, image_of, label_of, make_set, write
from tests.datasets.dicom_maker import make_series

QUICK = [*TINY_UNETR, "memory=cpu", "trainer.max_steps=1", "trainer.tensorboard=false", "data.validation=1"]


def shift_label(path: Path, x_mm: float) -> None:
    label = nib.load(path)
    affine = label.affine.copy()
    affine[0, 3] += x_mm
    nib.save(nib.Nifti1Image(np.asarray(label.dataobj), affine), path)


def test_a_clean_set_leaves_with_0_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_set(tmp_path / "set")
    assert main(["check", f"data={root}", f"report={tmp_path / 'out'}"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert f"{root} (nnunet), 3 cases: 3 pass" in screen
    assert re.search(r"1 +bright +300 +3\.72 % +3", screen)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Nothing is wrong." in page
    assert "case_2" in page
    facts = json.loads((tmp_path / "out" / "check.json").read_text())
    assert (facts["passed"], facts["warned"], facts["failed"]) == (3, 0, 0)
    assert facts["cases"]["case_0"]["label"]["voxels"] == {"0": 2540, "1": 100, "2": 48}


def test_a_failing_set_leaves_with_1_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_set(tmp_path / "set", cases=6)
    shift_label(label_of(root, 1), 0.4)
    write(label_of(root, 2), np.zeros(SHAPE, np.uint8))
    write(image_of(root, 3), np.full(SHAPE, 7, np.int16))
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert main(["check", f"data={root}", f"report={tmp_path / 'out'}"]) == 1
    screen = " ".join(capsys.readouterr().out.split())
    assert "6 cases: 3 pass, 1 with warnings, 2 fail" in screen
    assert re.search(r"fail +case_1 .*does not lie on its image's grid", screen)
    assert re.search(r"warn +case_2 .*the label map is empty", screen)
    assert screen.index("case_3") < screen.index("case_2")  # failures first
    assert f"medckpt check data={root} fix=geometry output=FOLDER" in screen
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<figure>") == 2  # of the shifted and the constant case
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert main(["check", f"data={root}", f"report={tmp_path / 'out'}", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads((tmp_path / "out" / "check.json").read_text())
    assert facts["cases"]["case_3"]["findings"][0]["code"] == "constant"


def test_many_findings_of_one_kind_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_set(tmp_path / "set", cases=5)
    for number in range(5):
        shift_label(label_of(root, number), 0.4)
    assert main(["check", f"data={root}", f"report={tmp_path / 'out'}"]) == 1
    screen = " ".join(capsys.readouterr().out.split())
    assert screen.count("does not lie") == 1
    assert "5 cases" in screen
    assert "case_0, case_1, case_2, case_3, case_4. The first:" in screen


def test_a_copy_is_corrected_by_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_set(tmp_path / "set", labels={"background": 0, "a": 1, "b": 2, "c": 3})
    write(label_of(root, 1), blobs(1, 4), AFFINE)
    shift_label(label_of(root, 0), 0.4)
    copy = tmp_path / "copy"
    words = ["check", f"data={root}", "fix=geometry,labels", "remap={4:3}", f"output={copy}"]
    assert main([*words, "--json"]) == 0
    assert [change["case"] for change in json.loads(capsys.readouterr().out)] == ["case_0", "case_1"]
    assert main(["check", f"data={copy}", f"report={tmp_path / 'out'}"]) == 0
    assert main(words) == 2  # it is there already
    assert "nothing is overwritten" in capsys.readouterr().err


def test_a_check_reads_as_a_training_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = f"report={tmp_path / 'out'}"
    tilted = make_series(tmp_path / "tilted", position=lambda k: (0, 0.7 * k, 2 * k))
    sheared = np.array([[1.0, 0.3, 0, 0], [0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]])
    file = write(tmp_path / "sheared.nii", np.arange(512, dtype=np.int16).reshape(8, 8, 8), sheared)
    for data, advised in ((tilted, "data.dicom.tilt=resample"), (file, "data.shear=resample")):
        assert main(["check", f"data={data}", report]) == 1
        assert advised in capsys.readouterr().out
        assert main(["check", f"data={data}", report, advised]) == 0
    root = make_set(tmp_path / "set")
    shift_label(label_of(root, 1), 0.4)
    capsys.readouterr()
    assert main(["check", f"data={root}", report, "data.label_grid=resample", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cases"]["case_1"]["result"] == "warn"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "data=... is missing."),
        (["data=x", "fixx=geometry"], "fixx: unknown key. Did you mean 'fix'?"),
        (["data=x", "fix=geometri", "output=y"], "fix=geometri: there is no such fix. Did you mean 'geometry'?"),
        (["data=x", "fix=geometry"], "output=FOLDER is missing"),
        (["data=x", "output=y"], "output= is where fix= writes its copy"),
        (["data=x", "fix=labels", "output=y"], "fix=labels and remap= go together"),
        (["data=x", "fix=labels", "output=y", "remap={4}"], "remap={4}: must be pairs of label values"),
        (["data=x", "fix=labels", "output=y", "remap={4:3,4:2}"], "remap={4:3,4:2}: must be pairs"),
        (["data=.", "data.dicom.tilt=bend"], "data.dicom.tilt: 'bend' (str) is not a choice. Known: refuse, resample"),
        (["data=.", "data.dicom.tlit=resample"], "data.dicom.tlit: unknown key. Did you mean 'data.dicom.tilt'?"),
        (["data=x", "fix=geometry", "output=y", "data.shear=resample"], "data.shear= goes with a check"),
        (["data=nothing-here"], "nothing-here: there is no such file or folder"),
    ],
)
def test_wrong_words_are_said_at_once(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_report_does_not_go_into_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_set(tmp_path / "set")
    assert main(["check", f"data={root}", f"report={root / 'out'}"]) == 2
    assert "outside of the data set" in capsys.readouterr().err


def test_a_check_loads_no_torch(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", cases=1)
    words = ["check", f"data={root}", f"report={tmp_path / 'out'}"]
    script = tmp_path / "script.py"
    guarded = f"if __name__ == '__main__':\n main({words!r}); print('torch' in sys.modules)"
    script.write_text(f"import sys; from medckpt.cli import main\n{guarded}")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")
    assert result.stderr == ""


def test_a_closed_output_loses_the_screen_only(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", cases=1)
    command = [sys.executable, "-m", "medckpt", "check", f"data={root}", f"report={tmp_path / 'out'}"]
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=True
    )
    assert result.stderr == ""
    assert json.loads((tmp_path / "out" / "check.json").read_text())["passed"] == 1


def test_a_training_refuses_failed_cases_by_name_or_leaves_them_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_pairs(tmp_path / "set", cases=6)
    shift_label(root / "labelsTr" / "case_1.nii.gz", 40)  # its header shows it
    label = nib.load(root / "labelsTr" / "case_2.nii.gz")
    nib.save(nib.Nifti1Image(np.asarray(label.dataobj) * 9, label.affine), root / "labelsTr" / "case_2.nii.gz")
    (root / "imagesTr" / "case_3.nii.gz").unlink()
    image = nib.load(root / "imagesTr" / "case_4.nii.gz")
    turned = image.affine.copy()
    turned[0, 3] += 5
    image.set_qform(turned, code=1)  # read, and warned of
    nib.save(image, root / "imagesTr" / "case_4.nii.gz")
    words = ["train", "recipe=swin_mr", *QUICK, f"data={root}", f"output={tmp_path / 'runs'}"]
    assert main(words) == 2
    assert "case_3" in capsys.readouterr().err  # not in order: nothing else is looked at
    facts = json.loads((root / "dataset.json").read_text())
    complete = facts | {"training": [entry for entry in facts["training"] if "case_3" not in entry["image"]]}
    (root / "dataset.json").write_text(json.dumps(complete))
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "1 of 5 cases cannot be used:\ncase_1: case_1.nii.gz: the label does not lie on its image's grid" in told
    assert "data.drop_failed=true trains without them" in told
    assert not (tmp_path / "runs").exists()

    (root / "dataset.json").write_text(json.dumps(facts))
    assert main([*words, "data.drop_failed=true"]) == 0
    told = capsys.readouterr()
    assert "Left out: 3 cases" in told.out
    assert told.err.count("case_4.nii.gz: qform and sform differ by 5 mm") == 1
    (run,) = (tmp_path / "runs").iterdir()
    split = json.loads((run / "split.json").read_text())
    assert sorted(split["train"] + split["val"]) == ["case_0", "case_4", "case_5"]
    assert set(split["dropped"]) == {"case_1", "case_2", "case_3"}
    assert "label values 9, 18" in split["dropped"]["case_2"]
    assert "case_3" in (run / "report.html").read_text()
    assert main(["evaluate", f"run={run}", f"output={tmp_path / 'scores'}"]) == 0  # the run can be read again


@pytest.mark.parametrize("drop", ["true", "false"])
def test_where_every_case_fails_nothing_is_trained(
    tmp_path: Path, drop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_pairs(tmp_path / "set", cases=2)
    for number in range(2):
        shift_label(root / "labelsTr" / f"case_{number}.nii.gz", 40)
    words = ["train", "recipe=swin_mr", *QUICK, f"data={root}", f"output={tmp_path / 'runs'}"]
    assert main([*words, f"data.drop_failed={drop}"]) == 2
    assert "2 of 2 cases cannot be used" in capsys.readouterr().err
