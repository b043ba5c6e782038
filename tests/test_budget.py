"""`budget=`: read, planned under, shown as a frontier, trained with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medckpt import budget
from medckpt.cli import main
from medckpt.config import RunConfig, compose, compose_here
from medckpt.errors import ConfigError
from medckpt.memory.apply import applied
from medckpt.memory.plan import MemoryPlan
from medckpt.memory.profile import MemoryProfile
from medckpt.profiles import load_profile
from medckpt.recipe_step import Task
from medckpt.step_memory import PLAN_FILE, note_plan, plan_step, smallest_patch
from tests.conftest import TINY_UNETR
from tests.memory.nets import Merge, Plain, Residual, Unread

MIB, GIB = 2**20, 2**30
CARD = "memory=a100_80gb"
TASK = Task(channels=1, classes=3)
TINY = [*TINY_UNETR, "sampler.patches_per_step=2", "loss.batch_dice=false"]
SWIN = [
    "model.feature_size=12", "model.window_size=4", "model.depths=[1,1,1,1]", "sampler.patch_size=[64,32,32]",
    "sampler.patches_per_step=2", "loss.batch_dice=false",
]  # fmt: skip


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three small blocks in the place of the recipe's network, and three budgets: a twentieth of the time."""

    def build(config: RunConfig, profile: MemoryProfile, task: Task, patch: Any) -> nn.Module:
        with torch.device("meta"):
            return Plain([Residual(), Unread(), Merge()], [0, 0, 0])

    monkeypatch.setattr(budget, "make_network", build)
    monkeypatch.setattr(budget, "POINTS", 3)


def config_of(*words: str, recipe: str = "unetr_ct") -> RunConfig:
    return compose_here(recipe, [*TINY, CARD, *words], elsewhere=True).config


# ---------------------------------------------------------------------------------------------- words


def test_a_recipe_with_recompute_of_its_own_has_no_budget() -> None:
    with pytest.raises(ConfigError, match="budget=min: the plan decides what is recomputed; leave activation_ckpt=all"):
        config_of("budget=min", "activation_ckpt=all")
    config = config_of("activation_ckpt=block")
    with pytest.raises(ConfigError, match="activation_ckpt=block has no place beside it"):
        budget.planner_of(config, load_profile("a100_80gb"), TASK)
    assert config_of().budget is None
    assert config_of("budget=8GiB").budget == "8GiB"
    assert config_of("budget=8589934592").budget == 2**33


@pytest.mark.parametrize(
    "words",
    [
        ["budget=lots"],
        ["budget=0GiB"],
        ["budget=6"],
        ["budget=90GiB"],
        ["budget=8GiB", "sides=[64]"],
        ["budget=8GiB", "budget="],
    ],
)
def test_wrong_words_end_in_one_line_and_exit_code_2(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "recipe=unetr_ct", CARD, f"output={tmp_path}", *TINY, *words]) == 2
    assert words[-1].partition("=")[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_training_with_wrong_words_makes_no_run_folder(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "recipe=unetr_ct", f"data={pairs}", f"output={tmp_path}", "memory=cpu", *TINY, "budget=lots"]
    assert main(words) == 2
    assert "budget=lots: is no number of bytes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- plans of recipes


def test_dice_over_the_batch_has_the_levers_by_samples_too() -> None:
    card = load_profile("a100_80gb")
    for words in ((), ("loss.batch_dice=true",)):
        found = budget.planner_of(config_of(*words), card, TASK)
        assert [way.tail for way in found.ways] == [False, True]
        assert found.step.weight_cache is False


@pytest.mark.slow
@pytest.mark.usefixtures("mini")
def test_the_changes_that_would_make_it_fit() -> None:
    words = ("loss.batch_dice=true", "precision=32")
    card = load_profile("a100_80gb")
    changes = budget.cheapest_changes(config_of(*words), card, TASK, 400 * MIB)
    heads = {re.split(": from", change)[0] for change in changes}
    assert heads == {"sampler.patches_per_step=1", "sampler.patch_size=[16,32,32]", "precision=bf16-mixed"}
    assert all(re.search(r": from \d+\.\d MiB on, does not fit yet$", change) for change in changes)
    peaks = [float(re.findall(r"from ([\d.]+) MiB", change)[0]) for change in changes]
    assert peaks == sorted(peaks)


@pytest.mark.usefixtures("mini")
def test_plan_answers_programs_and_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "recipe=unetr_ct", CARD, "budget=min", "classes=3", f"output={tmp_path}", *TINY]
    assert main([*words, "--json"]) == 0
    out, screen = capsys.readouterr()
    answer = json.loads(out)
    assert "this plan" in screen
    assert "sqrt" in screen
    names = {path.name: path for path in tmp_path.rglob("*") if path.is_file()}
    assert set(names) == {"frontier.png", "memory_plan.json", "plan.json"}
    assert names["frontier.png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    plan = MemoryPlan.load(names["memory_plan.json"])
    assert plan.to_dict() == answer["plan"]
    assert json.loads(names["plan.json"].read_text()) == answer
    assert plan.predicted_peak_bytes == answer["frontier"][0]["peak_bytes"]
    assert answer["command"].startswith("medckpt train recipe=unetr_ct")
    assert "budget=min" in answer["command"]
    assert "memory=" not in answer["command"]
    assert (answer["memory"], answer["patches_per_step"], answer["patch_size"]) == ("a100_80gb", 2, [32, 32, 32])
    peaks = [point["peak_bytes"] for point in answer["frontier"]]
    times = [point["step_ms"] for point in answer["frontier"]]
    assert peaks == sorted(set(peaks))
    assert times == sorted(times, reverse=True)
    plain = answer["baselines"][0]
    assert (plain["name"], plain["peak_bytes"]) == ("plain", plan.plain_peak_bytes)
    assert times[-1] <= plain["step_ms"]
    assert [point["name"] for point in answer["baselines"]] == ["plain", "all", "sqrt"], "no attention, no flag"


@pytest.mark.slow
def test_a_budget_that_nothing_fits_leaves_with_3_and_says_what_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "recipe=swin_ct", CARD, f"output={tmp_path}", *SWIN]
    assert main([*words, "budget=100MiB"]) == 3
    printed = capsys.readouterr().err
    assert "budget 100.0 MiB: no exact plan of this step fits; the smallest takes" in printed
    assert "sampler.patches_per_step=1: from" in printed
    assert "sampler.patch_size=[32,32,32]: from" in printed
    assert not list(tmp_path.iterdir())
    assert main([*words, "budget=560MiB"]) == 0
    assert "use_checkpoint" in capsys.readouterr().out


@pytest.mark.usefixtures("mini")
def test_nothing_fits_ends_with_3_and_carries_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "recipe=unetr_ct", CARD, f"output={tmp_path}", "classes=3", *TINY, "sampler.patches_per_step=1"]
    assert main([*words, "budget=1MiB"]) == 3
    printed = " ".join(capsys.readouterr().err.split())
    found = re.search(
        r"budget 1.0 MiB: no exact plan of this step fits; the smallest takes \d+\.\d MiB\. "
        r"sampler.patch_size=\[16,32,32\]: from \d+\.\d MiB on, does not fit yet$", printed
    )  # fmt: skip
    assert found, printed
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- trainings


def test_a_step_is_planned_verified_and_laid_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("memory=cpu", "precision=32", "sampler.patches_per_step=1")
    torch.manual_seed(0)
    network = Plain([Residual(), Unread(), Merge()], [0, 0, 0])
    assert plan_step(config_of(*small), TASK, network) is None
    planned = plan_step(config_of(*small, "budget=min"), TASK, network)
    assert planned is not None
    assert planned.verification.passed
    assert planned.forecast.peak_bytes == planned.plan.predicted_peak_bytes
    assert planned.plan.predicted_step_ms > 0
    assert set(applied(network).regions) == {r for r, option in planned.plan.choices.items() if "recompute" in option}
    note_plan(planned, tmp_path)
    note_plan(None, tmp_path)
    assert MemoryPlan.load(tmp_path / PLAN_FILE) == planned.plan
    assert "verified: loss" in capsys.readouterr().out


@pytest.mark.slow
def test_a_training_plans_verifies_and_measures(pairs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    short = ["memory=cpu", "precision=32", "trainer.max_steps=2", "trainer.max_minutes=null", "budget=min"]
    command = ["train", "recipe=unetr_ct", f"data={pairs}", f"output={tmp_path}", *TINY, *short]
    assert main([*command, "trainer.tensorboard=false"]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    (run,) = tmp_path.iterdir()
    plan = MemoryPlan.load(run / "memory_plan.json")
    assert f"Plan: {plan.summary()}" in printed
    assert re.search(r"Plan: .* verified: loss ", printed)
    assert plan.predicted_peak_bytes < plan.plain_peak_bytes
    memory = json.loads((run / "memory.json").read_text())
    assert memory["predicted_peak_bytes"] == plan.predicted_peak_bytes
    batch_bytes = 2 * 32 * 32 * 32 * (4 + 1)  # the loader's, beside the step's own
    more = memory["measured_peak_bytes"] - memory["predicted_peak_bytes"]
    assert -0.03 * memory["measured_peak_bytes"] <= more <= 0.03 * memory["measured_peak_bytes"] + 3 * batch_bytes
    assert json.loads((run / "metrics.json").read_text())["steps"] == 2


def test_the_small_step_that_verifies_is_of_the_networks_least_size() -> None:
    config = compose("swin_ct", ["data=/x", "memory=cpu", "sampler.patch_size=[96,96,96]"])
    assert smallest_patch(config) == (64, 64, 64)
    assert smallest_patch(config_of()) == (32, 32, 32), "a UNETR has one size"
