"""`medckpt plan`, `medckpt profile`, and the forecast that a training prints and checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from medckpt import machine
from medckpt.cli import main
from medckpt.config import compose_here
from medckpt.errors import ConfigError
from medckpt.profiles import load_profile
from medckpt.recipe_step import Task
from medckpt.run_plan import _plan_folder
from tests.conftest import TINY_SWIN, TINY_UNETR

CARD = "memory=a100_40gb"


def plan(output: Path, *words: str) -> int:
    return main(["plan", f"output={output}", *words])


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second process for the table: its start takes longer than the traces."""
    monkeypatch.setattr(machine, "cpu_count", lambda: 1)


@pytest.mark.parametrize(
    "words",
    [
        ["precision=32"],
        ["precision=bf16-mixed", "activation_ckpt=all", "trainer.accumulate=2"],
        ["precision=32", "trainer.ema_decay=null", "optimizer.clip_norm=null", *TINY_SWIN, "model=swin_unetr"],
    ],
)
def test_a_training_says_what_it_will_take_and_then_what_it_took(
    words: list[str], pairs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size = [] if "model=swin_unetr" in words else TINY_UNETR
    short = ["memory=cpu", "trainer.max_steps=3", "trainer.max_minutes=null", "trainer.tensorboard=false"]
    command = ["train", "recipe=swin_mr", f"data={pairs}", f"output={tmp_path}", *size, *short, *words]
    assert main(command) == 0
    printed = capfd.readouterr()
    assert "Forecast: peak" in printed.out
    assert "in the first full step; the forecast is" in printed.out
    assert "USDT" not in printed.err
    assert "unknown size" not in printed.err
    (run,) = tmp_path.iterdir()
    memory = json.loads((run / "memory.json").read_text())
    # The loader's batches (the next, this one, the last) are not the step's; beside so small a network they count.
    batch_bytes = 64 * 32 * 32 * (4 + 1)
    more = memory["measured_peak_bytes"] - memory["predicted_peak_bytes"]
    assert -0.01 * memory["measured_peak_bytes"] < more < 0.01 * memory["measured_peak_bytes"] + 3 * batch_bytes
    assert sum(memory["forecast"]["parts"].values()) == memory["predicted_peak_bytes"]
    assert memory["measure"] == "allocator events of the first full step"
    assert memory["process_peak_bytes"] > memory["measured_peak_bytes"]
    assert (run / "memory_timeline.png").stat().st_size > 10_000
    assert "data:image/png;base64," in (run / "report.html").read_text()


def test_plan_prints_its_table_leaves_a_picture_and_answers_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=swin_mr", "memory=t4_16gb", "sides=[48]", "channels=2", "classes=4", *TINY_UNETR]
    assert plan(tmp_path, *words, "--json") == 0
    out, screen = capsys.readouterr()
    found = json.loads(out)
    assert found["precision"] == "32"  # a T4 only emulates bfloat16
    assert (found["channels"], found["classes"]) == (2, 4)
    assert {tuple(row["patch_size"]) for row in found["table"]} == {(32, 32, 32), (48, 48, 48)}
    assert {row["patches_per_step"] for row in found["table"]} == {1, 2, 4, 8}
    chosen = found["chosen"]
    assert sum(chosen["parts"].values()) == chosen["peak_bytes"]
    same = [
        row
        for row in found["table"]
        if row["patch_size"] == [32, 32, 32] and row["patches_per_step"] == 1 and row["activation_ckpt"] == "none"
    ]
    assert same[0]["peak_bytes"] == chosen["peak_bytes"]
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("swin_mr-t4_16gb-")
    assert json.loads((folder / "plan.json").read_text()) == found
    assert (folder / "memory_timeline.png").stat().st_size > 10_000
    assert found["folder"] == str(folder)
    assert found["words"] == ["recipe=swin_mr", "memory=t4_16gb", *TINY_UNETR]
    for text in ("NVIDIA T4", "14.56 GiB", "2 channels, 4 classes", "saved", "on that machine:", "48x48x48"):
        assert text in screen, text
    assert "1 patch of 32x32x32" in screen
    assert str(folder / "plan.json") in screen
    assert "Estimates, not verified on this device: library_workspace_bytes, conv_workspace, reserve_slack." in screen


def test_other_words_have_another_folder_and_the_same_words_the_same(tmp_path: Path) -> None:
    def folder(*words: str, memory: str = "t4_16gb", classes: int = 3, sides: tuple[int, ...] = ()) -> Path:
        config = compose_here("unetr_ct", [f"memory={memory}", *TINY_UNETR, *words], elsewhere=True).config
        task = Task(channels=1, classes=classes)
        return _plan_folder(tmp_path, config, (config, load_profile(memory), task), list(sides))

    base = folder()
    assert base == folder()
    assert base.parent == tmp_path
    assert base.name.startswith("unetr_ct-t4_16gb-")
    others = {folder("precision=16-mixed"), folder(classes=5), folder(sides=(64,)), folder(memory="a10_24gb")}
    assert len({base, *others}) == 5


@pytest.mark.usefixtures("one_process")
def test_on_this_cpu_the_recipes_own_cell_is_measured_and_small_peaks_are_in_mib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=unetr_ct", "memory=cpu", "precision=32", "sides=[]", *TINY_UNETR, "sampler.patches_per_step=2"]
    assert plan(tmp_path, *words, "--json") == 0
    out, screen = capsys.readouterr()
    found = json.loads(out)
    (own,) = [cell for cell in found["table"] if cell["scratch"] == "measured"]
    assert (own["activation_ckpt"], own["patches_per_step"]) == ("none", 2)
    for key in ("peak_bytes", "peak_interval", "reserved_bytes", "fits"):
        assert own[key] == found["chosen"][key], key
    assert f" {own['peak_bytes'] / 2**20:.0f}M " in screen
    assert screen.count("~") == len(found["table"]), "every other cell, and the line that explains it"
    assert "note sampler.patches_per_step= is given more than once; the last counts" in screen


@pytest.mark.usefixtures("one_process")
def test_a_step_that_does_not_fit_ends_with_3_and_says_what_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "card.yaml"
    figures = {"name": "card", "device": "cuda", "title": "a small card", "capacity_bytes": 40 * 2**20}
    card.write_text(yaml.safe_dump(figures))
    words = ["recipe=swin_ct", f"memory={card}", "sides=[]", *TINY_UNETR, "sampler.patches_per_step=8"]
    assert plan(tmp_path, *words) == 3
    printed = capsys.readouterr().out
    assert "does not fit in the 40.0 MiB of a small card" in printed
    assert "7 classes" in printed  # the phantom's, which is not made for this
    assert "sampler.patches_per_step=" in printed or "Nothing of this patch surely fits" in printed
    assert "budget=auto" in printed


@pytest.mark.usefixtures("one_process")
def test_data_are_read_for_channels_and_classes(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "recipe=swin_mr", f"data={pairs}", "memory=a10_24gb", "sides=[]", *TINY_UNETR, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["channels"], found["classes"], found["precision"]) == (1, 3, "bf16-mixed")
    assert plan(tmp_path, "recipe=swin_mr", f"data={pairs}", "classes=4", "channels=2", "memory=a10_24gb") == 2
    said = capsys.readouterr().err
    assert "channels=2: the data in" in said
    assert "have 3 (background, bright, dark). Leave out classes=, or data=." in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory=a100_40gb"], "say which recipe: medckpt plan recipe=NAME"),
        (["recipe=swin_ct", "memory=a100"], "Did you mean 'a100_80gb'"),
        (["recipe=swin_ct", "memory=./none.yaml"], "none.yaml: the memory profile cannot be read"),
        (["recipe=swin_ct", "memory=v100_16gb", "precision=bf16-mixed"], "has no bfloat16 arithmetic"),
        (["recipe=swin_ct", "memory=cpu", "precision=16-mixed"], "float16 needs a GPU"),
        (["recipe=swin_ct", "sides=big"], "sides=big: must be whole numbers"),
        (["recipe=swin_ct", "classes=0"], "classes=0: must be a whole number, 1 or more"),
        (["recipe=swin_ct", "memory=cpu", "sampler.patch_size=[30,30,30]"], "needs every side to be a multiple of 32"),
        (["recipe=swin_ct", "-m"], "-m: not understood"),
        (["recipe=swin_ct", "channels=1.5"], "channels=1.5: must be a whole number, 1 or more, up to 1000000000"),
        (["recipe=swin_ct", "channels=" + "9" * 5000], "must be a whole number"),
        (["recipe=swin_ct", "classes="], "classes=: a value is missing"),
        (["recipe=swin_ct", "sides=[64,,96]"], "sides=[64,,96]: must be whole numbers from 1"),
        (["recipe=swin_ct", "output=/dev/null"], "output=/dev/null: this is a file"),
        (["recipe=swin_ct", CARD, "sides=[999999968]"], "a patch of 999999968x999999968x999999968"),
        (["recipe=swin_ct", CARD, "sides=[50,64]"], "sides: swin_unetr takes no cube of 50; the nearest is 64"),
        (["recipe=swin_ct", CARD, "sampler.patches_per_step=1000000000"], "up to 2^40 (1.1e+12)"),
        (["recipe=swin_ct", CARD, "sampler.patch_size=[999999999,999999999,999999999]"], "multiple of 32"),
        (["recipe=swin_ct", CARD, "sampler.patch_size=[64000000,64000000,64000000]"], "up to 2^40"),
        (["recipe=swin_ct", CARD, "classes=1000000000"], "classes=1000000000: that is a tensor of"),
        (["recipe=swin_ct", CARD, "channels=1000000000"], "channels=1000000000: that is a tensor of"),
        (["recipe=swin_ct", CARD, "model.feature_size=1200000000000"], "larger than a computer can count"),
        (["recipe=swin_ct", CARD, "activation_ckpt=3"], "activation_ckpt: 3 (int) is not a choice"),
        (["recipe=swin_ct", CARD, "trainer.devices=two"], "trainer.devices: expected a whole number"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *([] if "output=/dev/null" in words else [f"output={tmp_path}"]), *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_training_for_a_card_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory=a100_40gb: this is a CUDA device and torch sees none here"):
        compose_here("swin_ct", ["memory=a100_40gb"])
    assert compose_here("swin_ct", ["memory=a100_40gb"], elsewhere=True).scaled == {}


def test_a_profile_file_goes_wherever_a_name_does(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ndevice: cpu\ncapacity_bytes: 8000000000\nconv_workspace: [0, 1, 2]\n")
    config = compose_here("swin_ct", [f"memory={file}"]).config
    assert config.memory.name == "mine"
    assert config.memory.capacity_bytes == 8_000_000_000
    assert config.memory.conv_workspace == (0.0, 1.0, 2.0)
    assert config.model.feature_size == 12  # it is a CPU: the recipe takes its CPU size


def test_the_help_of_plan_and_profile_loads_no_torch() -> None:
    code = (
        "import sys; from medckpt.cli import main; main(['plan', '--help']); main(['profile', '--help']); "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")
    assert "a100_40gb" in result.stdout


def test_profile_measures_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    assert main(["profile", f"output={file}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bandwidth_gb_s"] > 0
    assert found["measured"]
    assert yaml.safe_load(file.read_text())["fp32_tflops"] == found["fp32_tflops"]
    assert main(["profile", f"output={file}"]) == 2
    assert "this file exists" in capsys.readouterr().err
