"""`medckpt plan`, `medckpt profile`, and the forecast that a training prints and checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from medckpt.cli import main
from medckpt.config import compose_here
from medckpt.errors import ConfigError
from tests.conftest import TINY_SWIN, TINY_UNETR


def plan(output: Path, *words: str) -> int:
    return main(["plan", f"output={output}", *words])


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
    words = ["recipe=swin_mr", "memory=t4_16gb", "sides=[64]", "channels=2", "classes=4", *TINY_SWIN]
    assert plan(tmp_path, *words, "--json") == 0
    out, screen = capsys.readouterr()
    found = json.loads(out)
    assert found["precision"] == "32"  # a T4 only emulates bfloat16
    assert (found["channels"], found["classes"]) == (2, 4)
    assert {tuple(row["patch_size"]) for row in found["table"]} == {(64, 32, 32), (64, 64, 64)}
    assert {row["patches_per_step"] for row in found["table"]} == {1, 2, 4, 8}
    chosen = found["chosen"]
    assert sum(chosen["parts"].values()) == chosen["peak_bytes"]
    same = [
        row
        for row in found["table"]
        if row["patch_size"] == [64, 32, 32] and row["patches_per_step"] == 1 and row["activation_ckpt"] == "none"
    ]
    assert same[0]["peak_bytes"] == chosen["peak_bytes"]
    folder = tmp_path / "swin_mr-t4_16gb"
    assert json.loads((folder / "plan.json").read_text()) == found
    assert (folder / "memory_timeline.png").stat().st_size > 10_000
    for text in ("NVIDIA T4", "14.56 GiB", "2 channels, 4 classes", "saved", "on that machine:", "64x64x64"):
        assert text in screen, text


def test_a_step_that_does_not_fit_ends_with_3_and_says_what_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "card.yaml"
    figures = {"name": "card", "device": "cuda", "title": "a small card", "capacity_bytes": 250 * 2**20}
    card.write_text(yaml.safe_dump(figures))
    words = ["recipe=swin_ct", f"memory={card}", "sides=[]", *TINY_SWIN, "sampler.patches_per_step=8"]
    assert plan(tmp_path, *words) == 3
    printed = capsys.readouterr().out
    assert "does not fit in the 250.0 MiB of a small card" in printed
    assert "7 classes" in printed  # the phantom's, which is not made for this
    assert "sampler.patches_per_step=" in printed


def test_data_are_read_for_channels_and_classes(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "recipe=swin_mr", f"data={pairs}", "memory=a10_24gb", "sides=[]", *TINY_SWIN, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["channels"], found["classes"], found["precision"]) == (1, 3, "bf16-mixed")


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
    ],
)
def test_what_is_wrong_is_said_in_one_message(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, *words) == 2
    assert message in capsys.readouterr().err
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
