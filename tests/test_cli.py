from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medckpt.cli import main
from medckpt.datasets.reading import read_label
from medckpt.words import once
from tests.conftest import TINY_UNETR, make_pairs
from tests.datasets.dicom_maker import make_series

QUICK = [*TINY_UNETR, "memory=cpu", "trainer.max_steps=2", "trainer.log_every=1", "trainer.tensorboard=false"]


def train(*words: str) -> int:
    return main(["train", "recipe=swin_mr", *QUICK, *words])


@pytest.fixture(scope="module")
def run(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of two steps."""
    output = tmp_path_factory.mktemp("runs")
    assert train(f"data={pairs}", f"output={output}", "trainer.tensorboard=true") == 0
    (folder,) = output.iterdir()
    return folder


def test_a_run_folder_holds_what_the_design_says(run: Path) -> None:
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    expected = {"config.yaml", "environment.json", "metrics.csv", "metrics.json", "memory.json", "report.html"}
    expected |= {"curves.png", "weights/last.ckpt", "weights/best.ckpt", "split.json", "dataset.json"}
    assert expected <= names
    metrics = json.loads((run / "metrics.json").read_text())
    assert set(metrics["dice_per_class"]) == {"bright", "dark"}
    (case,) = metrics["cases"]
    assert {f"overlays/{case}.png", f"predictions/{case}.nii.gz"} <= names
    assert any(name.startswith("tensorboard/events") for name in names)
    split = json.loads((run / "split.json").read_text())
    assert split["val"] == [case]
    assert len(split["train"]) == 3
    assert json.loads((run / "memory.json").read_text())["measured_peak_bytes"] > 1e6


def test_predictions_lie_on_the_scans(
    run: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scans = pairs / "imagesTr"
    assert main(["predict", f"run={run}", f"input={scans}", f"output={tmp_path}", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert sorted(Path(name).name for name in written) == [f"case_{n}.nii.gz" for n in range(4)]
    for name in written:
        label, scan = nib.load(name), nib.load(scans / Path(name).name)
        assert label.shape == scan.shape
        np.testing.assert_allclose(label.affine, scan.affine)
        assert set(np.unique(label.dataobj)) <= {0, 1, 2}


def test_a_dicom_scan_is_answered_by_a_segmentation_on_its_series(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = "1.2.826.0.1.3680043.8.498.2"
    scan = make_series(tmp_path / "p7", StudyInstanceUID=study, FrameOfReferenceUID=f"{study}.1")
    words = ["predict", f"run={run}", f"input={scan}", f"output={tmp_path / 'a.dcm'}"]
    assert main([*words, "format=both", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [str(tmp_path / "a.dcm"), str(tmp_path / "a.nii.gz")]
    nifti = read_label(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(read_label(tmp_path / "a.dcm", onto=nifti.grid).array, nifti.array)
    for seg_type, other in (("labelmap", 0), ("fractional", 2)):
        assert main([*words, f"seg_type={seg_type}"]) == other
    np.testing.assert_array_equal(read_label(tmp_path / "a.dcm", onto=nifti.grid).array, nifti.array)
    assert main([*words, "format=nifti"]) == 2


def test_evaluate_scores_the_runs_own_cases_and_another_data_set(
    run: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", f"run={run}", f"output={tmp_path / 'own'}", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    metrics = json.loads((run / "metrics.json").read_text())
    assert own["dice_per_class"] == metrics["dice_per_class"]
    assert main(["evaluate", f"run={run}", f"data={pairs}", f"output={tmp_path / 'all'}"]) == 0
    assert len(json.loads((tmp_path / "all" / "evaluation.json").read_text())["cases"]) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "'trian' is not a verb. Did you mean 'train'?"),
        (["train"], "say which recipe"),
        (["train", "recipe=swinct"], "recipe=swinct: there is no such recipe. Did you mean 'swin_ct'?"),
        (["train", "recipe=swin_mr", "data=/no/where"], "/no/where"),
        (["train", "recipe=swin_mr", "data=/tmp", "sampler.patch_size=[30,64,64]"], "swin_unetr needs every side"),
        (["train", "recipe=swin_mr", "resume=x"], "exclude each other"),
        (["train", "resume=/no/run"], "it is not a run folder"),
        (["predict", "run=x", "inptu=y"], "inptu: unknown key. Did you mean 'input'?"),
        (["predict", "run=/no/run", "input=y", "output=z"], "run=/no/run: there is no config.yaml"),
        (["evaluate"], "run=... is missing."),
        (["recipes", "shwo"], "not understood"),
    ],
)
def test_bad_words_give_one_message_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    caught = capsys.readouterr()
    assert message in caught.err
    assert "Traceback" not in caught.err


@pytest.mark.parametrize("words", [["predict", "run=/no/run", "input=y", "output=z"], ["evaluate", "run=/no/run"]])
def test_a_wrong_path_is_said_before_torch_is_loaded(words: list[str]) -> None:
    code = f"import sys; from medckpt.cli import main; print(main({words!r}), 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["2", "False"]
    assert "run=/no/run: there is no config.yaml in it" in found.stderr


def break_empty(data: Path) -> str:
    shutil.rmtree(data)
    data.mkdir()
    return "no case is in this folder"


def break_file(data: Path) -> str:
    (data / "imagesTr" / "case_1.nii.gz").write_bytes(b"not a volume")
    return "case_1.nii.gz"


def break_label(data: Path) -> str:
    (data / "imagesTr" / "case_2.nii.gz").unlink()
    return "case_2.nii.gz"


def break_channels(data: Path) -> str:
    facts = json.loads((data / "dataset.json").read_text())
    facts["training"][0]["image"] = ["./imagesTr/case_0.nii.gz", "./imagesTr/case_1.nii.gz"]
    (data / "dataset.json").write_text(json.dumps(facts))
    return "channel"


@pytest.mark.parametrize("breaks", [break_empty, break_file, break_label, break_channels])
def test_bad_data_gives_one_message_exit_code_2_and_no_run_folder(
    tmp_path: Path, breaks: object, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_pairs(tmp_path / "data")
    message = breaks(data)  # type: ignore[operator]
    assert train(f"data={data}", f"output={tmp_path / 'runs'}") == 2
    caught = capsys.readouterr()
    assert message in caught.err
    assert caught.err.startswith("error ")
    assert "Traceback" not in caught.err
    assert not (tmp_path / "runs").exists()


def test_a_scan_with_the_wrong_number_of_channels_is_refused(run: Path, tmp_path: Path) -> None:
    for channel in range(2):
        nib.save(nib.Nifti1Image(np.zeros((8, 8, 8), np.float32), np.eye(4)), tmp_path / f"x_000{channel}.nii.gz")
    assert main(["predict", f"run={run}", f"input={tmp_path}", f"output={tmp_path / 'out'}"]) == 2
    assert not (tmp_path / "out").exists()


def test_a_prediction_never_replaces_a_scan(run: Path, pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scans = pairs / "imagesTr"
    assert main(["predict", f"run={run}", f"input={scans}", f"output={scans}"]) == 2
    assert "a prediction never replaces a scan" in capsys.readouterr().err


def test_hydra_flags_and_sweeps(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(f"data={pairs}", "--cfg", "job") == 0
    assert "feature_size: 4" in capsys.readouterr().out
    assert train(f"data={pairs}", f"output={tmp_path}", "seed=0,1", "-m") == 0
    assert len(list(tmp_path.glob("swin_mr-*"))) == 2
    assert not list(Path.cwd().glob("multirun*"))


@pytest.mark.parametrize("words", [["recipes", "--json"], ["plan", "--help"], ["--version"]])
def test_an_output_that_takes_nothing_is_said_in_one_line(words: list[str]) -> None:
    for target in ("/dev/full", None):
        read, write = os.pipe()
        os.close(read)
        with open(target or os.devnull, "wb") as full:
            command = [sys.executable, "-m", "medckpt", *words]
            stdout = full if target else write
            result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
        os.close(write)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("error standard output cannot be written (")


def test_so_is_one_that_takes_no_more_of_a_screen() -> None:
    code = (
        "import sys; from medckpt import cli, console; "
        "cli._recipes = lambda words: [console.OUT.print('x' * 100_000) for _ in range(9)] and 0; "
        "sys.exit(cli.main(['recipes']))"
    )
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert "error standard output cannot be written (Broken pipe)" in result.stderr


@pytest.mark.parametrize(
    ("words", "kept", "repeated"),
    [
        (["a=1", "b=2", "a=3"], ["b=2", "a=3"], ["a= is given more than once; the last counts: a=3"]),
        (["a=1", "a=1", "a=1"], ["a=1"], ["a= is given more than once; the last counts: a=1"]),
        (["data=ct", "data=/x"], ["data=ct", "data=/x"], []),
        (["data=/y", "data.path=/x"], ["data.path=/x"], ["data.path= is given more than once; the last counts"]),
        (["--cfg", "job", "--cfg", "job", "+a=1", "a=1"], ["--cfg", "job", "--cfg", "job", "+a=1", "a=1"], []),
    ],
)
def test_of_a_word_that_is_given_twice_the_last_counts(words: list[str], kept: list[str], repeated: list[str]) -> None:
    found, lines = once(words)
    assert found == kept
    assert len(lines) == len(repeated)
    assert all(line.startswith(start) for line, start in zip(lines, repeated, strict=True))


def test_a_repeated_word_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe=swin_cx", "recipe=swin_cy"]) == 2
    said = capsys.readouterr().err
    assert "note recipe= is given more than once; the last counts: recipe=swin_cy\n" in said
    assert "error recipe=swin_cy: there is no such recipe" in said


def test_recipes_are_listed_shown_and_copied_but_never_over_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "--json"]) == 0
    assert {"swin_ct", "swin_mr", "unetr_ct"} <= set(json.loads(capsys.readouterr().out))
    target = tmp_path / "mine.yaml"
    assert main(["recipes", "copy", "swin_ct", str(target)]) == 0
    capsys.readouterr()
    assert main(["recipes", "show", str(target)]) == 0
    assert capsys.readouterr().out == target.read_text()
    assert main(["recipes", "copy", "swin_ct", str(target)]) == 2


def test_ctrl_c_leaves_a_run_folder_that_resumes(pairs: Path, tmp_path: Path) -> None:
    words = [*QUICK, f"data={pairs}", f"output={tmp_path}", "trainer.max_steps=100000", "trainer.save_every=100000"]
    command = [sys.executable, "-m", "medckpt", "train", "recipe=swin_mr", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    log = None
    for _ in range(1200):
        log = next(tmp_path.glob("*/metrics.csv"), None)
        if log and len(log.read_text().splitlines()) > 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "nothing is lost" in output
    assert log
    run = log.parent
    steps = [int(line.split(",")[0]) for line in log.read_text().splitlines()[1:]]
    assert steps == list(range(1, len(steps) + 1))
    assert main(["train", f"resume={run}", f"trainer.max_steps={steps[-1] + 2}"]) == 0
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["steps"] == steps[-1] + 2
    rows = [int(line.split(",")[0]) for line in log.read_text().splitlines()[1:]]
    assert sorted(set(rows)) == list(range(1, steps[-1] + 3))
    assert list(tmp_path.iterdir()) == [run]
