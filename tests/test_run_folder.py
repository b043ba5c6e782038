"""A run folder that is resumed, moved, robbed of a file or given other settings."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from medckpt.cli import main
from medckpt.training import state
from tests.conftest import TINY_UNETR, make_pairs

QUICK = [*TINY_UNETR, "memory=cpu", "trainer.max_steps=2", "trainer.log_every=1", "trainer.tensorboard=false"]


@pytest.fixture(scope="module")
def finished(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    words = [*QUICK, f"data={pairs}", f"output={output}", "trainer.ema_decay=0.9"]
    assert main(["train", "recipe=swin_mr", *words]) == 0
    (folder,) = output.iterdir()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy, at another place, of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "moved run"))


def steps(run: Path) -> int:
    return int(json.loads((run / "metrics.json").read_text())["steps"])


def test_a_longer_resume_is_remembered(run: Path) -> None:
    assert main(["train", f"resume={run}", "trainer.max_steps=3", "optimizer.weight_decay=0.5"]) == 0
    assert steps(run) == 3
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["trainer"]["max_steps"] == 3
    content, _ = state.load(run / "weights" / "last.ckpt")
    assert content["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    "word",
    ["model.feature_size=8", "data.intensity=window", "data.spacing_mm=[2,2,2]", "sampler.patch_size=[32,32,64]"],
)
def test_what_the_weights_stand_for_cannot_change(run: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "config.yaml").read_text()
    assert main(["train", f"resume={run}", word, "trainer.max_steps=3"]) == 2
    assert "cannot change in a run that has begun" in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == before


def test_other_labels_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_pairs(tmp_path / "other")
    facts = json.loads((other / "dataset.json").read_text())
    facts["labels"] = {"0": "background", "1": "dark", "2": "bright"}
    (other / "dataset.json").write_text(json.dumps(facts))
    assert main(["train", f"resume={run}", f"data={other}", "trainer.max_steps=3"]) == 2
    assert "are not the run's" in capsys.readouterr().err


LOST = [
    ("weights/last.ckpt", ["train", "resume={run}"], "weights/last.ckpt is gone"),
    ("weights/best.ckpt", ["predict", "run={run}", "input={scan}", "output={out}"], "no such weights file"),
    ("dataset.json", ["predict", "run={run}", "input={scan}", "output={out}"], "dataset.json: it is missing"),
    ("split.json", ["evaluate", "run={run}"], "split.json: it is missing"),
    ("config.yaml", ["evaluate", "run={run}"], "it is not a run folder"),
]


@pytest.mark.parametrize(("lost", "words", "message"), LOST, ids=[lost for lost, _, _ in LOST])
def test_a_lost_file_is_named(
    run: Path,
    pairs: Path,
    tmp_path: Path,
    lost: str,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (run / lost).unlink()
    scan, out = pairs / "imagesTr" / "case_0.nii.gz", tmp_path / "out"
    assert main([word.format(run=run, scan=scan, out=out) for word in words]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "model: {name: swin_unetr}"])
def test_a_broken_config_is_named(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text(text)
    assert main(["evaluate", f"run={run}"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_last_weights_are_the_averaged_ones(run: Path) -> None:
    from medckpt.run import load_predictor

    last, best = (load_predictor(run, name).network.state_dict() for name in ("last", "best"))
    for name, value in last.items():
        assert torch.equal(value, best[name]), name


def test_the_log_goes_on_without_a_gap(run: Path) -> None:
    assert main(["train", f"resume={run}", "trainer.max_steps=4"]) == 0
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
