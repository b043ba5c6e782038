"""The planner: within its budget, never slower than with less, never slower than a baseline that fits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from medckpt.errors import ConfigError, InfeasibleBudget
from medckpt.memory.baselines import baseline
from medckpt.memory.fit import Planner
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import find_regions
from medckpt.memory.solve import GAP
from medckpt.memory.step import Step
from medckpt.memory.verify import verify_choices
from medckpt.memory.ways import Way
from medckpt.profiles import load_profile
from tests.memory.nets import DICE_CE, SIDES, UNETR, Plain, Residual, make, planner, trees

BASELINES = ("all", "sqrt", "log", "every-2", "none")


def of(name: str, **more: Any) -> Planner:
    return planner(make(name), SIDES[name], target_loss=DICE_CE, **more)


def budgets(found: Planner, count: int) -> list[int]:
    low, high = found.smallest().predicted_peak_bytes, found.plain.peak_bytes
    return [low + (high - low) * step // (count - 1) for step in range(count)]


def never_worse(found: Planner, count: int, names: tuple[str, ...]) -> None:
    """More budget takes no more time, nothing exceeds it, and no baseline that fits is faster."""
    others = [found.baseline(name) for name in names]
    before = math.inf
    for budget in budgets(found, count):
        plan = found.plan(budget)
        assert plan.predicted_peak_bytes <= budget == plan.budget_bytes
        assert plan.predicted_step_ms <= before
        before = plan.predicted_step_ms
        for other in others:
            if other.predicted_peak_bytes <= budget:
                assert plan.predicted_step_ms <= other.predicted_step_ms * (1 + GAP)
    assert before <= found.plain_ms() * (1 + GAP)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(trees())
def test_random_trees(net: nn.Module) -> None:
    never_worse(planner(net, (8, 8, 8), lean=False), 4, BASELINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mini", "swin", "unetr"])
def test_monais_own_networks(name: str) -> None:
    never_worse(of(name), 8, (*BASELINES, "selective"))


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(trees())
def test_random_trees_with_micro_batches(net: nn.Module) -> None:
    never_worse(planner(net, (8, 8, 8), samples=4, target_loss=DICE_CE), 5, BASELINES)


def test_what_was_asked_for_in_any_order_is_the_same_rule() -> None:
    found = planner(make("skips"), (8, 8, 8), lean=False)
    low, high = budgets(found, 2)
    rich, poor = found.plan(high), found.plan(low)
    assert rich.predicted_step_ms <= poor.predicted_step_ms * (1 + GAP)
    assert found.plan(high).predicted_step_ms <= poor.predicted_step_ms


def test_an_infeasible_budget_carries_the_smallest_which_works() -> None:
    found = planner(make("skips"), (8, 8, 8), lean=False)
    with pytest.raises(InfeasibleBudget) as error:
        found.plan(1000)
    assert error.value.budget_bytes == 1000
    smallest = error.value.smallest_bytes
    assert smallest == found.smallest().predicted_peak_bytes
    fresh = planner(make("skips"), (8, 8, 8), lean=False)
    assert fresh.plan(smallest).predicted_peak_bytes <= smallest
    with pytest.raises(InfeasibleBudget):
        fresh.plan(smallest - 1024)


def test_names_that_begin_as_those_of_a_bound_step_do() -> None:
    """MONAI's UNet keeps everything in a module called "model"."""
    found = of("unet")
    plan = found.plan(found.smallest().predicted_peak_bytes)
    assert tuple(plan.choices) == find_regions(make("unet"), "all")
    assert plan.regions[0].name == "model.0"
    assert "recompute_plain" in plan.choices.values()
    assert sum(region.ms for region in plan.regions) > sum(region.plain_ms for region in plan.regions) > 0


def test_levers_that_are_not_exact_are_not_tried() -> None:
    assert of("mini").ways == (Way(), Way(tail=True))
    assert of("skips", samples=4).ways == (Way(), Way(micro_batches=2), Way(micro_batches=4))
    assert of("skips", samples=1).ways == (Way(),)
    assert planner(make("skips"), (8, 8, 8)).ways == (Way(),), "no loss of output and target"
    assert of("unet").ways == (Way(),), "batch statistics"
    dropout = planner(Plain([Residual(dropout=0.1)] * 2, [0, 0]), (8, 8, 8), target_loss=DICE_CE)
    assert dropout.ways == (Way(),)
    batch = UNETR()
    batch.encoder1.layer.norm1 = nn.BatchNorm3d(4)
    assert planner(batch, (8, 8, 8), target_loss=DICE_CE).ways == (Way(),)
    assert of("mini", tail=False).ways == (Way(), Way(micro_batches=2))
    assert of("mini", micro_batches=2).ways == (Way(micro_batches=2),)
    assert of("mini", micro_batches=1).ways == (Way(), Way(tail=True))
    assert of("mini", tail=True).ways == (Way(tail=True),)


class Masked(Residual):
    """Hides a random share of every sample, as masked autoencoders do: no module says that it draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (torch.rand(x.shape[0], 1, 1, 1, 1) > 0.5))


class Mixed(Residual):
    """Takes from every sample what the samples have in common."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


def test_a_network_that_draws_or_mixes_samples_without_a_word_is_not_split() -> None:
    masked = planner(Plain([Residual(), Masked()], [0, 0]), (8, 8, 8), target_loss=DICE_CE)
    assert masked.ways == (Way(),)
    forced = planner(Plain([Residual(), Masked()], [0, 0]), (8, 8, 8), target_loss=DICE_CE, micro_batches=2)
    with pytest.raises(
        ConfigError, match=r"'blocks.1' draws at random \(aten::rand|'.*blocks.1' draws at random \(rand"
    ):
        _ = forced.ways
    # Values decide, which a forecast does not read; where times are measured there are some.
    mixed = Plain([Residual(), Mixed()], [0, 0])
    assert planner(mixed, (8, 8, 8), target_loss=DICE_CE, measure=True).ways == (Way(),)
    assert planner(Plain([Residual()] * 2, [0, 0]), (8, 8, 8), target_loss=DICE_CE, measure=True).ways[1:]
    assert all(p.grad is None for p in mixed.parameters())


@pytest.mark.parametrize(
    ("make_planner", "match"),
    [
        (lambda: of("skips", micro_batches=3), "micro_batches=3: does not divide the 2 samples"),
        (lambda: of("skips", micro_batches=0), "micro_batches=0: must be a whole number from 1 on"),
        (lambda: of("skips", micro_batches=True), "micro_batches=True: must be a whole number"),
        (lambda: planner(make("skips"), (8, 8, 8), micro_batches=2), "micro_batches: a step by samples needs a loss"),
        (lambda: of("skips", tail=True), "per-sample tail: Plain has no full-resolution end"),
        (lambda: of("unet", micro_batches=2).ways, "takes statistics over the batch"),
        (
            lambda: Planner(nn.Linear(1, 1), torch.empty(2, 1), Step(), MemoryProfile(), target_loss=DICE_CE),
            "target: with a loss of \\(output, target\\) the target is needed",
        ),
    ],
)
def test_what_is_asked_for_and_not_possible_is_refused(make_planner: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_planner()


def test_fixed_micro_batches_are_kept() -> None:
    found = of("skips", samples=4, micro_batches=2)
    assert found.plan(2**40).micro_batches == 2
    assert found.smallest().micro_batches == 2


def test_facts_of_a_plan() -> None:
    told: list[str] = []
    found = of("mini", advance=told.append, tail=False, micro_batches=1)
    plan = found.plan(2**40)
    assert told[:5] == ["keep", "lean_attention", "lean", "recompute", "recompute_lean"]
    assert (plan.memory, plan.samples, plan.precision, plan.times) == ("a100_80gb", 2, "bf16-mixed", "profile")
    assert plan.inputs == "float32[2, 1, 8, 8, 8]"
    assert plan.plain_peak_bytes == found.plain.peak_bytes
    assert plan.predicted_peak_bytes == found._simulated(found.trace(plan.choices, Way(plan.tail))).peak_bytes
    assert all(m.__dict__.get("forward") is None for m in found.model.modules())


@pytest.mark.slow
def test_the_plan_of_a_baseline_is_what_its_simulation_gives() -> None:
    found = planner(make("mini"), SIDES["mini"], lean=False)
    plan = found.baseline("selective")
    exact = found._simulated(found.trace(baseline(found.model, "selective"), Way()))
    assert (plan.predicted_peak_bytes, plan.predicted_step_ms) == (exact.peak_bytes, exact.step_ms)
    assert found.own_flag() is None


def test_times_of_real_steps() -> None:
    net = Plain([Residual(), Residual()], [0, 0])
    inputs, target = torch.empty(2, 1, 8, 8, 8, device="meta"), torch.zeros(2, 1, 8, 8, 8, dtype=torch.uint8)
    found = Planner(
        net, inputs, Step(precision="32", rules="cpu"), MemoryProfile(name="cpu", device="cpu", capacity_bytes=2**34),
        target_loss=DICE_CE, target=target, lean=False, micro_batches=1, measure=True,
    )  # fmt: skip
    plan = found.plan(2**40)
    assert plan.times == "measured"
    assert 0 < plan.predicted_step_ms <= plan.plain_step_ms * (1 + GAP)
    assert sum(region.ms for region in plan.regions) <= plan.predicted_step_ms
    assert all(p.grad is None for p in net.parameters())


def test_without_rates_times_are_nominal_and_peaks_the_same() -> None:
    bare = MemoryProfile(name="cpu", device="cpu", capacity_bytes=2**34)
    rated = dataclasses.replace(bare, bandwidth_gb_s=50.0, fp32_tflops=1.0)
    step = Step(precision="32", rules="cpu")
    plans = [
        Planner(make("skips"), torch.empty(2, 1, 8, 8, 8, device="meta"), step, profile, lean=False).smallest()
        for profile in (bare, rated)
    ]
    assert plans[0].predicted_peak_bytes == plans[1].predicted_peak_bytes
    assert plans[0].predicted_step_ms > 0
    assert plans[0].times == "nominal"


def test_a_device_has_room_for_what_its_allocator_wastes() -> None:
    found = planner(make("skips"), (8, 8, 8), lean=False)
    smallest = found.smallest()
    low, high = found.simulation(smallest).reserved_bytes
    for device_bytes in range(high, 3 * high, high // 2):
        plan = found.plan_on(device_bytes)
        assert found.simulation(plan).reserved_bytes[1] <= device_bytes == plan.budget_bytes
        assert plan.choices == found.within(None, device_bytes).choices
    assert found.plan_on(3 * high).predicted_step_ms <= smallest.predicted_step_ms
    assert found.plan_on((low + high) // 2).choices == smallest.choices, "nothing surely fits, this may"
    with pytest.raises(InfeasibleBudget) as error:
        found.plan_on(low - 1)
    assert (error.value.budget_bytes, error.value.smallest_bytes) == (low - 1, low)
    assert found.within(None, None).choices == smallest.choices


def test_offload_is_one_of_the_options_where_it_is_asked_for() -> None:
    card = load_profile("a100_80gb")
    fast = dataclasses.replace(card, host_link_gb_s=100_000.0, launch_us=0.01)  # a copy costs nothing
    net, pixels = make("skips"), torch.empty(2, 1, 96, 96, 96, device="meta")  # tensors of several MiB
    found = Planner(net, pixels, Step(), fast, lean=False, offload=True)
    assert found.options == ("keep", "recompute_plain", "offload_plain")
    keep, again, away = (found.uniform(option) for option in found.options)
    assert again.predicted_peak_bytes < away.predicted_peak_bytes < keep.predicted_peak_bytes
    assert keep.predicted_step_ms < away.predicted_step_ms < again.predicted_step_ms
    plan = found.plan(away.predicted_peak_bytes)
    assert plan.predicted_peak_bytes <= away.predicted_peak_bytes
    assert plan.predicted_step_ms <= away.predicted_step_ms * (1 + GAP)
    slow = dataclasses.replace(found.profile, host_link_gb_s=1.0)
    assert Planner(net, pixels, Step(), slow, lean=False, offload=True).uniform("offload_plain").predicted_step_ms > 10
    assert verify_choices(net, torch.randn(2, 1, 48, 48, 48), away.choices).bit_identical


def test_offload_has_nowhere_to_go_on_a_cpu() -> None:
    cpu = MemoryProfile(name="cpu", device="cpu", capacity_bytes=2**34)
    with pytest.raises(ConfigError, match="offload: a CPU has no memory beside its own"):
        Planner(make("skips"), torch.empty(2, 1, 8, 8, 8, device="meta"), Step(rules="cpu"), cpu, offload=True)
