"""The plan of a recipe's step: its table, the row that is chosen, and what the data and the device decide."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from medckpt.blocks import Triple
from medckpt.config import RunConfig, compose_here
from medckpt.errors import ConfigError
from medckpt.memory.apply import applied, apply_recompute
from medckpt.memory.buckets import LIMITS, bucket_sizes
from medckpt.memory.measure import allocations
from medckpt.memory.regions import find_regions
from medckpt.memory.simulate import simulate
from medckpt.models.build import build_model
from medckpt.planner import (
    PATCHES_PER_STEP,
    Cell,
    StepPlan,
    consistent,
    forecast_run,
    patch_sizes,
    plan,
    traces_of,
)
from medckpt.profiles import load_profile
from medckpt.recipe_step import Policy, Task, make_network, precision_on, trace_run
from medckpt.run_plan import _task
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
    assert ticks == traces_of(found.config, ()) == 6
    assert traces_of(config_of("activation_ckpt=block"), ()) == 7, "its row is not in the table"


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
    assert traces_of(unetr, (16, 32, 40, 48)) == 12


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
    assert _task(config, 1, 3) == Task(channels=1, classes=3)
    with pytest.raises(ConfigError, match=r"^channels=4: the data in .* have 1 \(MR\)\. Leave out channels=, or data="):
        _task(config, 4, None)
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


CARD_OF_10 = load_profile("a100_40gb")


def cell(
    patch: Triple, batch: int, policy: Policy = "none", *, high: int, peak: int = 1, measured: bool = False
) -> Cell:
    return Cell(
        patch_size=patch,
        patches_per_step=batch,
        activation_ckpt=policy,
        peak_bytes=peak,
        peak_interval=(peak, peak),
        reserved_bytes=(1, high),
        fits="unknown",
        step_ms=None,
        scratch="measured" if measured else "estimated",
    )


def test_a_larger_step_never_takes_less() -> None:
    """Over a table of two networks' replays, and one that is made up: highs that fall with the batch and the patch."""
    made_up = [
        cell((32, 32, 32), 1, high=9),
        cell((32, 32, 32), 2, high=7),
        cell((64, 32, 32), 1, high=8),
        cell((64, 32, 32), 2, high=5),
        cell((16, 64, 64), 2, high=3),
        cell((32, 32, 32), 2, "all", high=4),
    ]
    card = dataclasses.replace(CARD_OF_10, capacity_bytes=8)
    found = consistent(made_up, card)
    assert [one.reserved_bytes[1] for one in found] == [9, 9, 9, 9, 3, 4], "other shapes and policies stay"
    assert [one.fits for one in found] == ["unsure"] * 4 + ["yes"] * 2
    config = config_of("memory=t4_16gb")
    table = plan(config, load_profile("t4_16gb"), TASK, sides=(48,)).cells
    pairs = [(one, other) for one in table for other in table if one.within(other)]
    assert len(pairs) == 2 * 3 * 10
    order = {"yes": 0, "unsure": 1, "no": 2}
    for one, other in pairs:
        assert all(a <= b for a, b in zip(one.reserved_bytes, other.reserved_bytes, strict=True))
        assert one.peak_bytes <= other.peak_bytes
        assert order[one.fits] <= order[other.fits]


def test_a_measured_cell_bounds_its_neighbours() -> None:
    cube, large = (32, 32, 32), (64, 64, 64)
    table = [cell(cube, 1, high=1, peak=12), cell(cube, 2, high=1, peak=11), cell(cube, 4, high=1, peak=8),
             cell(large, 2, high=1, peak=30), cell(large, 1, high=1, peak=5)]  # fmt: skip
    found = consistent(table, CARD_OF_10, cell(cube, 2, high=1, peak=10, measured=True))
    assert [one.peak_bytes for one in found] == [10, 10, 10, 30, 5]
    assert [one.scratch for one in found].count("measured") == 1


def test_the_network_needs_no_memory_and_the_step_is_the_same() -> None:
    for recipe, size in (("unetr_ct", TINY_UNETR), ("swin_ct", TINY_SWIN)):
        config, profile = config_of("memory=a100_40gb", recipe=recipe, size=size), load_profile("a100_40gb")
        patch = config.sampler.patch_size
        network = make_network(config, profile, TASK, patch)
        assert {p.device.type for p in network.parameters()} == {"meta"}
        real = build_model(config.model, in_channels=2, out_channels=3, patch=patch)
        made, built = (trace_run(config, profile, TASK, patch, 1, "none", net) for net in (network, real))
        assert made == built


def test_several_devices_have_buckets() -> None:
    profile = load_profile("a100_40gb")
    one, two = (forecast_run(config_of(f"trainer.devices={n}"), profile, TASK) for n in (1, 2))
    network = build_model(config_of().model, in_channels=2, out_channels=3, patch=(32, 32, 32))
    gradients = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
    assert one.parts["buckets"] == 0
    assert "NCCL" not in one.unmodelled
    assert gradients <= two.parts["buckets"] < gradients + 2 * 512  # of two buckets, each rounded up
    assert two.peak_bytes - one.peak_bytes == two.parts["buckets"]
    assert "not foreseen" in two.unmodelled["NCCL"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed part here")
def test_buckets_are_those_of_torch() -> None:
    """Against torch's own assignment, and against the memory that DDP takes when it wraps a network."""
    shapes = [3, 70_000, 300_000, 10, 8_000_000, 1, 1, 900_000, 6_000_000, 40]
    tensors = [torch.empty(n, device="meta") for n in shapes]
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, list(LIMITS))
    expected = [sum(4 * shapes[index] for index in bucket) for bucket in buckets]
    assert bucket_sizes([4 * n for n in shapes]) == expected
    network = torch.nn.Sequential(torch.nn.Linear(1000, 700), torch.nn.Linear(700, 100))
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            wrapped: list[torch.nn.Module] = []
            sizes = allocations(lambda: wrapped.append(torch.nn.parallel.DistributedDataParallel(network)))
        finally:
            torch.distributed.destroy_process_group()
    gradients = sum(p.numel() * p.element_size() for p in network.parameters())
    assert sum(bucket_sizes([gradients])) == gradients
    assert gradients <= sizes.end < 1.01 * gradients
