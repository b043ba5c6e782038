from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medckpt.blocks import LossConfig, OptimizerConfig, TrainerConfig
from medckpt.config import RunConfig, compose
from medckpt.datasets.layouts import open_dataset
from medckpt.datasets.prepare import PreparedCase, prepare
from medckpt.errors import ConfigError, DataError, MedckptError
from medckpt.run import make_network
from medckpt.training import state
from medckpt.training.fit import Fitted, fit
from medckpt.training.losses import DiceCrossEntropy
from medckpt.training.module import SegmentationModule, mean_dice
from medckpt.training.precision import keep_thin_convolutions_exact, resolve_precision
from medckpt.training.schedule import learning_rate, share_done
from tests.conftest import TINY_SWIN, TINY_UNETR

CLASSES = {"bright": 1, "dark": 2}
SHORT = [
    "memory=cpu",
    "precision=32",
    "trainer.max_minutes=null",
    "loss.batch_dice=false",
    "data.spacing_mm=[1,1,1.5]",
    "trainer.tensorboard=false",
    "trainer.log_every=1",
]


@pytest.fixture(scope="module")
def cases(pairs: Path) -> tuple[PreparedCase, ...]:
    dataset = open_dataset(pairs)
    return prepare(dataset.cases, dataset, compose("swin_mr", [f"data={pairs}", *SHORT]).data)


def train(config: RunConfig, pairs: Path, cases: tuple[PreparedCase, ...], folder: Path, report: Any = None) -> Any:
    network = make_network(config, open_dataset(pairs), "cpu")
    fitted = fit(network, config, cases[:3], cases[3:], classes=CLASSES, device="cpu", folder=folder, report=report)
    return network, fitted


def configure(pairs: Path, *words: str) -> RunConfig:
    return compose("swin_mr", [f"data={pairs}", *SHORT, *words])


def test_dice_and_cross_entropy_agree_with_float64_arithmetic() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, 6, generator=generator)
    label = torch.randint(0, 3, (2, 1, 4, 5, 6), generator=generator)
    share = logits.double().softmax(1)
    truth = torch.nn.functional.one_hot(label[:, 0], 3).permute(0, 4, 1, 2, 3).double()
    cross_entropy = -(truth * share.log()).sum(1).mean()
    both = (share * truth).sum((2, 3, 4))
    dice = 1 - (2 * both + 1e-5) / (share.sum((2, 3, 4)) + truth.sum((2, 3, 4)) + 1e-5)
    loss = DiceCrossEntropy(LossConfig(dice_weight=2.0, ce_weight=0.5))(logits.bfloat16().float(), label)
    assert loss.dtype == torch.float32
    exact = DiceCrossEntropy(LossConfig(dice_weight=2.0, ce_weight=0.5))(logits, label)
    assert float(exact) == pytest.approx(float(2 * dice[:, 1:].mean() + 0.5 * cross_entropy), rel=1e-6)


def test_the_learning_rate_rises_then_falls_to_its_share_and_never_is_zero_at_the_start() -> None:
    config = OptimizerConfig(lr=1.0, warmup_share=0.1, final_lr_share=0.05)
    assert learning_rate(0.0, config) > 0
    assert learning_rate(0.05, config) == pytest.approx(0.5)
    assert learning_rate(0.1, config) == pytest.approx(1.0)
    assert learning_rate(0.55, config) == pytest.approx((1 + 0.05) / 2)
    assert learning_rate(1.0, config) == pytest.approx(0.05)


def test_a_run_is_over_by_steps_or_by_the_clock() -> None:
    config = TrainerConfig(max_steps=100, max_minutes=10.0)
    assert share_done(state.Progress(step=50, seconds=60), config) == 0.5
    assert share_done(state.Progress(step=50, seconds=540), config) == pytest.approx(0.9)
    assert share_done(state.Progress(step=101), config) == 1


def test_averaged_weights_follow_their_definition() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    average = state.AveragedWeights(layer, 0.5)
    expected = 1.0
    for step, value in enumerate((3.0, 5.0, 4.0), start=1):
        with torch.no_grad():
            layer.weight.fill_(value)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    average.swap()
    assert layer.weight.item() == pytest.approx(expected)
    average.swap()
    assert layer.weight.item() == 4.0


def test_mean_dice_counts_only_what_is_there() -> None:
    scores = {"a": {"bright": 1.0, "dark": None}, "b": {"bright": 0.5, "dark": None}}
    assert mean_dice(scores, CLASSES) == {"dice_mean": 0.75, "bright": 0.75, "dark": None}
    assert mean_dice({}, CLASSES)["dice_mean"] is None


def test_a_training_step_lowers_the_loss_and_writes_its_log(
    pairs: Path, cases: tuple[PreparedCase, ...], tmp_path: Path
) -> None:
    config = configure(
        pairs,
        *TINY_UNETR,
        "trainer.max_steps=12",
        "trainer.validate_every=6",
        "optimizer.lr=3e-3",
        "trainer.ema_decay=0.9",
    )
    _, fitted = train(config, pairs, cases, tmp_path)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert len(losses) == 12
    assert sum(losses[-3:]) < sum(losses[:3])
    assert [row["step"] for row in rows if row["dice_mean"]] == ["6", "12"]
    assert fitted == Fitted(progress=fitted.progress, interrupted=False)
    assert fitted.progress.step == 12
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"last.ckpt", "best.ckpt"}


@pytest.mark.parametrize("words", [TINY_SWIN, [*TINY_UNETR, "trainer.accumulate=2", "trainer.ema_decay=0.9"]])
def test_a_run_that_was_stopped_ends_like_one_that_was_not(
    pairs: Path, cases: tuple[PreparedCase, ...], tmp_path: Path, words: list[str]
) -> None:
    config = configure(pairs, *words, "trainer.max_steps=5", "trainer.validate_every=null")
    whole, _ = train(config, pairs, cases, tmp_path / "whole")

    asked: list[int] = []

    def stop_in_step_3(module: SegmentationModule, loss: float | None) -> None:
        if module.progress.step == 2 and not asked:
            asked.append(2)
            os.kill(os.getpid(), signal.SIGINT)

    _, fitted = train(config, pairs, cases, tmp_path / "parts", stop_in_step_3)
    assert fitted.interrupted
    assert fitted.progress.step == 3
    resumed, fitted = train(config, pairs, cases, tmp_path / "parts")
    assert not fitted.interrupted
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    read = [list(csv.DictReader((tmp_path / run / "metrics.csv").open())) for run in ("whole", "parts")]
    keep = ("step", "lr", "loss")
    assert [[row[key] for key in keep] for row in read[0]] == [[row[key] for key in keep] for row in read[1]]


def test_accumulated_patches_weigh_like_one_larger_step(
    pairs: Path, cases: tuple[PreparedCase, ...], tmp_path: Path
) -> None:
    words = [*TINY_UNETR, "trainer.max_steps=2", "trainer.validate_every=null"]
    two = configure(pairs, *words, "trainer.accumulate=2")
    one = configure(pairs, *words, "sampler.patches_per_step=2")
    (a, _), (b, _) = (train(config, pairs, cases, tmp_path / str(i)) for i, config in enumerate((two, one)))
    logged = [next(csv.DictReader((tmp_path / str(i) / "metrics.csv").open()))["loss"] for i in (0, 1)]
    assert float(logged[0]) == pytest.approx(float(logged[1]), rel=1e-5)
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_two_processes_train_one_run(pairs: Path, tmp_path: Path) -> None:
    words = [*TINY_UNETR, *SHORT, f"data={pairs}", f"output={tmp_path}", "trainer.max_steps=2", "trainer.devices=2"]
    words += ["activation_ckpt=block", "trainer.ema_decay=0.9", "trainer.save_every=1"]
    command = [sys.executable, "-m", "medckpt", "train", "recipe=swin_mr", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (run,) = tmp_path.iterdir()
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert "mean Dice" in result.stdout


def test_a_nan_stops_the_run_and_names_the_cases(pairs: Path, cases: tuple[PreparedCase, ...], tmp_path: Path) -> None:
    config = configure(pairs, *TINY_UNETR, "trainer.max_steps=3", "optimizer.lr=1e30", "optimizer.clip_norm=null")
    with pytest.raises(MedckptError, match=r"step [23]: the loss is (nan|inf)\. Cases of this step: case_\d"):
        train(config, pairs, cases, tmp_path)


def test_the_clock_ends_a_run(pairs: Path, cases: tuple[PreparedCase, ...], tmp_path: Path) -> None:
    config = configure(pairs, *TINY_UNETR, "trainer.max_steps=100000", "trainer.max_minutes=0.02")
    _, fitted = train(config, pairs, cases, tmp_path)
    # It ends at the first step after 1.2 seconds; how long that one step takes is the machine's matter.
    assert 1 <= fitted.progress.step < 1000
    assert fitted.progress.seconds >= 1.2


def test_every_parameter_that_asks_for_a_gradient_gets_one(pairs: Path) -> None:
    for words in (TINY_SWIN, TINY_UNETR):
        config = configure(pairs, *words)
        network = make_network(config, open_dataset(pairs), "cpu")
        network(torch.randn(2, 1, *config.sampler.patch_size)).square().mean().backward()
        missing = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
        assert missing == []


def test_precision_is_resolved_or_refused() -> None:
    assert resolve_precision("32", "cpu") == "32-true"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    has_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    assert resolve_precision("auto", "cpu") == ("bf16-mixed" if has_bf16 else "32-true")
    assert resolve_precision("bf16-mixed", "cpu") == "bf16-mixed"
    with pytest.raises(ConfigError, match="float16 needs a GPU"):
        resolve_precision("16-mixed", "cpu")


@pytest.mark.parametrize("size", [(2, 1, 1), (2, 2, 2), (2, 4, 8), (1, 1, 1), (4, 4, 4)])
def test_bf16_gradients_of_thin_convolutions_are_right_on_a_cpu(size: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(24, 24, 3, padding=1, bias=False))
    image, weight = torch.randn(2, 24, *size), torch.randn(2, 24, *size)
    (exact,) = torch.autograd.grad((network(image) * weight).sum(), list(network.parameters()))
    assert keep_thin_convolutions_exact(network) == 1
    with torch.autocast("cpu", torch.bfloat16):
        output = network(image)
    (found,) = torch.autograd.grad((output.float() * weight).sum(), list(network.parameters()))
    assert float((found - exact).norm() / exact.norm()) < 0.01


def test_weights_files_hold_no_code_and_name_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with pytest.raises(DataError, match="there is no such weights file"):
        state.load(path)
    path.write_bytes(b"torn")
    with pytest.raises(MedckptError, match="cannot be read as weights"):
        state.load(path)
    torch.save({"network": random.Random}, path)
    with pytest.raises(MedckptError, match="cannot be read as weights"):
        state.load(path)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(MedckptError, match="not a weights file of this version"):
        state.load(path)


WRITER = """
import sys, torch
from pathlib import Path
from medckpt.training import state
path = Path(sys.argv[1])
step = state.load(path)[1].step if path.is_file() else 0
print("ready", flush=True)
while True:
    step += 1
    state.save(path, {"network": {"w": torch.full((1_000_000,), float(step))}}, state.Progress(step=step))
"""


def test_a_kill_while_weights_are_written_leaves_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    chance = random.Random(0)
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout
        writer.stdout.readline()
        time.sleep(0.05 + chance.random() * 0.3)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        if path.is_file():  # the very first save may not have ended
            content, progress = state.load(path)
            assert torch.equal(content["network"]["w"], torch.full((1_000_000,), float(progress.step)))
    assert path.is_file()
