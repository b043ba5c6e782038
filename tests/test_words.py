"""What people type: words, flags, own recipes and sweeps that used to end in a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from medckpt import run as run_module
from medckpt import search_path
from medckpt.cli import main
from medckpt.config import change, compose, expand_sweep, normalize
from medckpt.errors import ConfigError, DataError

CPU = "memory=cpu"


@pytest.mark.parametrize(
    ("word", "output"),
    [
        ("output='ausgabe ö'", "ausgabe ö"),
        ("output=ausgabe ö", "ausgabe ö"),
        ("output=日本/läufe", "日本/läufe"),
        ("output=~/runs", str(Path("~/runs").expanduser())),
    ],
)
def test_an_output_folder_may_have_any_letters_and_a_home(word: str, output: str) -> None:
    assert compose("swin_ct", [CPU, word]).output == output


@pytest.mark.parametrize("path", ["/tmp/a${b}", "/tmp/a\\${b}", "/tmp/${oc.env:HOME}", "/tmp/$x{y}", "/x\\\\${b}'"])
def test_a_path_with_dollar_braces_is_a_path(path: str) -> None:
    assert compose("swin_ct", [CPU, f"data={path}"]).data.path == path
    assert change({"data": {"path": "x"}}, [f"data={path}"]) == {"data": {"path": path}}  # as `resume=` reads it
    assert normalize(normalize([f"data={path}"])) == normalize([f"data={path}"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.max_steps=[1", r"trainer\.max_steps: expected a whole number, got '\[1'"),
        ("ö=3", "'ö=3' is not an override. Write key=value"),
        ("a b=3", "'a b=3' is not an override. Write key=value"),
        ("===", "'===' is not an override. Write key=value"),
        ("=3", "'=3' is not an override. Write key=value"),
        ("~/x", "'~/x' is not an override. Write key=value"),
        ("trainer=3", r"trainer=3: there is no such choice\. Known: default"),
        ("model=null", r"model=null: there is no such choice\. Known: swin_unetr, unetr"),
        ("~data", "~data: a run needs this block; it cannot be deleted"),
        ("~model=unetr", "~model=unetr: a run needs this block"),
    ],
)
def test_a_word_that_cannot_be_read_is_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose("swin_ct", [CPU, word])


def test_a_choice_that_is_also_a_folder_is_ambiguous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose("swin_ct", [CPU, "data=ct"]).data.path == "phantom"
    (tmp_path / "ct").mkdir()
    with pytest.raises(ConfigError, match=r"also a folder here\. For the folder write data=\./ct \(or data\.path="):
        compose("swin_ct", [CPU, "data=ct"])
    assert compose("swin_ct", [CPU, "data=./ct"]).data.path == "./ct"


def test_a_yaml_file_beside_a_folder_does_not_make_it_a_choice(tmp_path: Path) -> None:
    (tmp_path / "scans.yaml").write_text("x: 1\n")
    assert compose("swin_ct", [CPU, f"data={tmp_path / 'scans'}"]).data.path == str(tmp_path / "scans")


@pytest.mark.parametrize("line", ["trainer: {max_steps: [1", "trainer:\n\tmax_steps: 1"])
def test_broken_yaml_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    own = tmp_path / "mine.yaml"
    text = search_path.find_recipe("swin_ct").read_text()
    own.write_text(text + line + "\n")
    with pytest.raises(yaml.YAMLError) as expected:
        yaml.safe_load(own.read_text())
    number = expected.value.problem_mark.line + 1  # type: ignore[attr-defined]
    assert number > len(text.splitlines())
    with pytest.raises(ConfigError, match=rf"mine\.yaml, line {number}: this is not YAML"):
        compose(str(own), [CPU])


@pytest.mark.parametrize("text", ["- a\n- b\n", "\xff\xfe\x00"])
def test_a_recipe_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    own = tmp_path / "mine.yaml"
    own.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        compose(str(own), [CPU])


def test_a_recipe_must_end_in_yaml(tmp_path: Path) -> None:
    own = tmp_path / "my.yml"
    own.write_text(search_path.find_recipe("swin_ct").read_text())
    with pytest.raises(ConfigError, match=r"only \.yaml files are read\. Rename it to my\.yaml"):
        compose(str(own), [CPU])
    assert main(["recipes", "copy", "swin_ct", str(tmp_path / "other.yml")]) == 2


def test_a_sweep_lists_its_values() -> None:
    assert expand_sweep("seed=0,1") == ["seed=0", "seed=1"]
    assert expand_sweep("seed=range(1,4)") == ["seed=1", "seed=2", "seed=3"]
    assert expand_sweep("model=glob(*)") == ["model=swin_unetr", "model=unetr"]
    with pytest.raises(ConfigError, match="a sweep needs values"):
        expand_sweep("optimizer.lr=interval(0,1)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.max_stepz=1,2", "-m"], "trainer.max_stepz: unknown key. Did you mean 'max_steps'?"),
        (["model=unetr,swin_unter", "-m"], "model=swin_unter: there is no such choice. Did you mean 'swin_unetr'?"),
        (["trainer.max_steps=1,2"], "Add -m for a sweep, or quote the value"),
        (["trainer.max_stepz=1,2"], "Add -m for a sweep, or quote the value"),
        (["--cfg=job", "-m"], "--cfg=job shows one run: leave out -m."),
        (["--config-dir", "x"], "--config-dir: recipe= chooses the file."),
        (["--config-dir=x"], "recipe= chooses the file."),
        (["-cd", "x"], "-cd: recipe= chooses the file."),
        (["-cn", "x"], "-cn: recipe= chooses the file."),
        (["-cp", "x"], "-cp: recipe= chooses the file."),
        (["--config-name", "x"], "--config-name: recipe= chooses the file."),
    ],
)
def test_flags_and_sweeps_are_checked_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "recipe=swin_ct", CPU, f"output={tmp_path / 'runs'}", *words]) == 2
    caught = capsys.readouterr()
    assert message in caught.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag", [["--cfg=job"], ["--cfg", "job"], ["-c", "job"]])
def test_the_printed_configuration_is_yaml_fitted_to_the_machine(
    flag: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "recipe=swin_ct", CPU, *flag]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["feature_size"] == 12


def test_a_sweep_fits_every_network_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def record(config: Any, **_: object) -> run_module.Trained:
        seen.append((config.model.name, config.model.feature_size, config.trainer.max_steps, config.data.path))
        return run_module.Trained(folder=tmp_path, metrics={"dice_mean": 0.5}, interrupted=False)

    monkeypatch.setattr(run_module, "train", record)  # the networks are not the matter here
    words = [CPU, "model=unetr,swin_unetr", "trainer.max_steps=1", "data=/a b/${x}", f"output={tmp_path}"]
    assert main(["train", "recipe=swin_ct", "-m", *words]) == 0
    assert seen == [("unetr", 12, 1, "/a b/${x}"), ("swin_unetr", 12, 1, "/a b/${x}")]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("the card fell out"), 1, "this is our own fault, not yours: RuntimeError('the card fell out')"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (None, 130, ""),
    ],
)
def test_a_crash_and_an_interrupt_end_a_sweep(
    error: BaseException | None,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = []

    def stop(config: Any, **_: object) -> run_module.Trained:
        started.append(config.seed)
        if error:
            raise error
        return run_module.Trained(folder=tmp_path, metrics=None, interrupted=True)

    monkeypatch.setattr(run_module, "train", stop)
    assert main(["train", "recipe=swin_ct", CPU, "seed=4,5", "-m", f"output={tmp_path}"]) == code
    caught = capsys.readouterr()
    assert started == [4]
    assert message in caught.err
    assert "HYDRA_FULL_ERROR" not in caught.err
    if code == 1:
        file = Path(caught.err.split("The traceback is in ")[1].strip().rstrip("."))
        assert "the card fell out" in file.read_text()
        file.unlink()


def test_a_bad_job_does_not_take_the_others_of_a_sweep_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def refuse_the_first(config: Any, **_: object) -> run_module.Trained:
        started.append(config.seed)
        if config.seed == 4:
            raise DataError("case_1.nii.gz: it is empty")
        return run_module.Trained(folder=tmp_path, metrics={"dice_mean": 0.5}, interrupted=False)

    monkeypatch.setattr(run_module, "train", refuse_the_first)
    assert main(["train", "recipe=swin_ct", CPU, "seed=4,5", "-m", f"output={tmp_path}"]) == 2
    assert started == [4, 5]
    assert "error case_1.nii.gz: it is empty" in capsys.readouterr().err


def test_another_process_of_a_run_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = run_module.Trained(folder=tmp_path, metrics=None, interrupted=False)
    monkeypatch.setattr(run_module, "train", lambda *_, **__: trained)
    assert main(["train", "recipe=swin_ct", CPU, "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_a_stream_that_lacks_the_letters_of_a_path_does_not_stop_us(tmp_path: Path) -> None:
    own = tmp_path / "日本.yaml"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "medckpt", "recipes", "copy", "swin_ct", str(own)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "??.yaml" in done.stdout
    assert own.is_file()
