"""The plan of a recipe's step: its table, the row that is chosen, and what the data and the device decide."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from medckpt.config import RunConfig, compose_here
from medckpt.errors import ConfigError
from medckpt.memory.apply import applied, apply_recompute
from medckpt.memory.regions import find_regions
from medckpt.memory.simulate import simulate
from medckpt.models.build import build_model
from medckpt.planner import (
    PATCHES_PER_STEP,
    Cell,
    StepPlan,
    Task,
    forecast_run,
    patch_sizes,
    plan,
    precision_on,
    trace_run,
    traces_of,
)
from medckpt.profiles import load_profile
from medckpt.run import _task
from tests.conftest import TINY_SWIN, TINY_UNETR

TASK = Task(channels=2, classes=3)


def config_of(*words: str, recipe: str = "unetr_ct", size: list[str] | None = None) -> RunConfig:
    return compose_here(recipe, [*(TINY_UNETR if size is None else size), *words], elsewhere=True).config


@functools.cache
def tiny_plan() -> tuple[StepPlan, int]:
    ticks: list[None] = []
    config = config_of(
        "memory=a100_40gb", "sampler.patches_per_step=2", "activation_ckpt=all", "trainer.ema_decay=0.98"
    )
    found = plan(config, load_profile("a100_40gb"), TASK, sides=(), advance=lambda: ticks.append(None))
    return found, len(ticks)


def cells(found: StepPlan, **wanted: object) -> list[Cell]:
    return [cell for cell in found.cells if all(getattr(cell, key) == value for key, value in wanted.items())]


def test_the_table_has_every_combination_once() -> None:
    found, _ = tiny_plan()
    keys = [(cell.patch_size, cell.activation_ckpt, cell.patches_per_step) for cell in found.cells]
    assert keys == [
        (patch, policy, batch) for patch in ((32, 32, 32),) for policy in ("none", "all") for batch in PATCHES_PER_STEP
    ]


def test_progress_is_told_for_every_trace_that_was_announced() -> None:
    found, ticks = tiny_plan()
    assert ticks == traces_of(found.config, ()) == 7


def test_the_row_of_the_recipe_is_its_forecast() -> None:
    found, _ = tiny_plan()
    (row,) = cells(found, patch_size=(32, 32, 32), patches_per_step=2, activation_ckpt="all")
    assert row.peak_bytes == found.chosen.peak_bytes
    assert row.peak_interval == found.chosen.peak_interval
    assert row.reserved_bytes == found.chosen.reserved_bytes
    assert row.step_ms == pytest.approx(found.chosen.step_ms)
    assert row.fits == found.chosen.fits == "yes"


def test_extrapolated_rows_are_what_a_trace_gives() -> None:
    found, _ = tiny_plan()
    network = build_model(found.config.model, in_channels=2, out_channels=3, patch=(32, 32, 32))
    graph = trace_run(found.config, found.profile, TASK, (32, 32, 32), 8, "all", network)
    (row,) = cells(found, patches_per_step=8, activation_ckpt="all")
    assert row.peak_bytes == simulate(graph, found.profile).peak_bytes
    assert row.reserved_bytes == simulate(graph, found.profile).reserved_bytes


def test_rows_rise_with_the_batch_and_fall_with_recompute() -> None:
    found, _ = tiny_plan()
    for policy in ("none", "all"):
        rows = cells(found, activation_ckpt=policy)
        peaks, times = [row.peak_bytes for row in rows], [row.step_ms or 0 for row in rows]
        assert peaks == sorted(peaks)
        assert times == sorted(times)
    for batch in PATCHES_PER_STEP:
        none, every = cells(found, patches_per_step=batch)
        assert every.peak_bytes <= none.peak_bytes
        assert (every.step_ms or 0) > (none.step_ms or 0)


def test_it_goes_through_json() -> None:
    found, _ = tiny_plan()
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["recipe"] == "unetr_ct"
    assert plain["patch_size"] == [32, 32, 32]
    assert (plain["patches_per_step"], plain["activation_ckpt"], plain["precision"]) == (2, "all", "bf16-mixed")
    assert (plain["channels"], plain["classes"]) == (2, 3)
    assert len(plain["table"]) == len(found.cells)
    assert plain["table"][0]["peak_bytes"] == found.cells[0].peak_bytes
    assert plain["chosen"]["peak_bytes"] == found.chosen.peak_bytes


def test_patches_that_the_network_does_not_take_are_left_out() -> None:
    swin = config_of(recipe="swin_ct", size=TINY_SWIN)
    assert patch_sizes(swin, (32, 48, 64, 100, 128)) == [(64, 32, 32), (64, 64, 64), (128, 128, 128)]
    unetr = config_of()
    assert patch_sizes(unetr, (16, 32, 40, 48)) == [(32, 32, 32), (48, 48, 48)]
    assert patch_sizes(unetr, ()) == [(32, 32, 32)]
    assert traces_of(unetr, (16, 32, 40, 48)) == 13


def test_smallest_patch_first_by_voxels() -> None:
    flat = config_of("sampler.patch_size=[128,32,32]", recipe="swin_ct", size=TINY_SWIN[:2])
    assert patch_sizes(flat, (64, 96)) == [(128, 32, 32), (64, 64, 64), (96, 96, 96)]


@pytest.mark.parametrize(
    ("memory", "asked", "trained"),
    [
        ("a100_40gb", "auto", "bf16-mixed"),
        ("a100_40gb", "32", "32"),
        ("a100_40gb", "16-mixed", "16-mixed"),
        ("v100_16gb", "auto", "32"),
        ("v100_16gb", "16-mixed", "16-mixed"),
        ("t4_16gb", "auto", "32"),
    ],
)
def test_precision_on_a_card(memory: str, asked: str, trained: str) -> None:
    config = config_of(f"memory={memory}", f"precision={asked}")
    assert precision_on(config, load_profile(memory)) == trained


def test_bf16_on_a_card_without_it_is_refused() -> None:
    config = config_of("memory=v100_16gb", "precision=bf16-mixed")
    with pytest.raises(ConfigError, match=r"precision=bf16-mixed: .*V100.* has no bfloat16.*Use 16-mixed or 32"):
        precision_on(config, load_profile("v100_16gb"))


def test_precision_on_this_cpu() -> None:
    config = config_of("memory=cpu", "precision=32")
    assert precision_on(config, load_profile("cpu")) == "32"
    assert precision_on(config_of("memory=cpu", "precision=bf16-mixed"), load_profile("cpu")) == "bf16-mixed"


def test_data_say_channels_and_classes(pairs: Path) -> None:
    config = compose_here("swin_mr", [f"data={pairs}", *TINY_SWIN], elsewhere=True).config
    assert _task(config, None, None) == Task(channels=1, classes=3)
    assert _task(config, 4, None) == Task(channels=4, classes=3), "what is asked for goes first"
    open_data = config_of(recipe="swin_mr", size=TINY_SWIN)
    assert _task(open_data, None, None) == Task(channels=1, classes=14, assumed=True)
    assert _task(open_data, 2, 5) == Task(channels=2, classes=5)
    assert _task(open_data, 2, None).assumed


def test_a_run_is_forecast_with_the_network_it_has() -> None:
    """As training does: with its own network, recompute applied, which is left as it was."""
    found, _ = tiny_plan()
    network = build_model(found.config.model, in_channels=2, out_channels=3, patch=(32, 32, 32))
    apply_recompute(network, find_regions(network, "all"))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert forecast_run(found.config, found.profile, TASK, network).simulation == found.chosen.simulation
    assert applied(network).regions == find_regions(network, "all")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_settings_of_the_trainer_count() -> None:
    config = config_of("memory=a100_40gb", "trainer.ema_decay=null", "optimizer.clip_norm=null")
    found = forecast_run(config, load_profile("a100_40gb"), TASK)
    assert {moment.phase for moment in found.timeline} == {"forward", "loss", "backward", "optimizer"}
    assert found.parts["averages"] == 0
    every, _ = tiny_plan()  # the recipe's own: clipping and averaged weights
    assert {"clip", "average", "recompute"} <= {moment.phase for moment in every.chosen.timeline}
    assert every.chosen.parts["averages"] > 0


def test_passes_that_are_not_traced_take_their_time() -> None:
    """Eight passes are traced as two: the same peak, four times as long, in the recipe's own row and in the table."""
    profile = load_profile("a100_40gb")
    two, eight = (forecast_run(config_of(f"trainer.accumulate={n}"), profile, TASK) for n in (2, 8))
    assert eight.peak_bytes == two.peak_bytes
    assert two.step_ms is not None
    assert eight.step_ms == pytest.approx(4 * two.step_ms)
