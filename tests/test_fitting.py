"""The public planner: plan, apply, remove, bind, verify."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import medckpt
from medckpt.errors import ConfigError, InfeasibleBudget
from medckpt.memory.plan import MemoryPlan
from medckpt.profiles import load_profile
from tests.memory.nets import DICE_CE, Plain, Residual, image, label, make

INPUTS = image("mini", device="meta")
TARGET = label("mini", device="meta")


@pytest.fixture(scope="module")
def smallest() -> MemoryPlan:
    return medckpt.plan(make("mini"), INPUTS, budget="min", loss=DICE_CE, target=TARGET)


def untouched(net: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in net.modules())


def test_the_smallest_plan_is_smaller_and_a_large_budget_is_not_slower(smallest: MemoryPlan) -> None:
    fast = medckpt.plan(make("mini"), INPUTS, budget="a100_80gb", loss=DICE_CE, target=TARGET)
    assert smallest.predicted_peak_bytes < fast.plain_peak_bytes
    assert fast.predicted_step_ms <= fast.plain_step_ms <= smallest.plain_step_ms
    assert fast.predicted_step_ms <= smallest.predicted_step_ms
    card = load_profile("a100_80gb")
    assert card.capacity_bytes is not None
    assert fast.budget_bytes == card.capacity_bytes


def test_a_budget_in_words_and_in_bytes() -> None:
    def plan(budget: str | int) -> MemoryPlan:
        return medckpt.plan(make("skips"), image("skips", device="meta"), budget=budget, lean=False)

    with pytest.raises(
        InfeasibleBudget, match=r"budget 10.0 MiB: no exact plan of this step fits; the smallest"
    ) as error:
        plan("10MiB")
    assert error.value.smallest_bytes == plan("min").predicted_peak_bytes
    assert plan(error.value.smallest_bytes).predicted_peak_bytes <= error.value.smallest_bytes
    with pytest.raises(ConfigError, match="budget=much: is no number of bytes"):
        plan("much")


def test_planning_leaves_the_model_as_it_is() -> None:
    net = make("unet")
    before = copy.deepcopy(net.state_dict())
    medckpt.plan(net, image("unet", device="meta"), budget="min")
    assert untouched(net)
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_apply_and_remove_change_nothing_else(smallest: MemoryPlan) -> None:
    net = make("mini")
    hook = net.blocks[0].register_forward_hook(lambda *_: None)
    keys, parameters = list(net.state_dict()), list(net.parameters())
    assert medckpt.apply(net, smallest) is net
    assert not untouched(net)
    assert list(net.state_dict()) == keys
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert len(net.blocks[0]._forward_hooks) == 1
    with pytest.raises(ConfigError, match="already"):
        medckpt.apply(net, smallest)
    hook.remove()
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal(again(image("mini")), net(image("mini")))
    other = make("mini")
    other.load_state_dict(net.state_dict())
    assert medckpt.remove(net) is net
    assert untouched(net)
    assert untouched(medckpt.remove(net))
    medckpt.apply(net, smallest)


def test_apply_is_all_or_nothing(smallest: MemoryPlan) -> None:
    wrong = dataclasses.replace(smallest.regions[-1], name="nowhere")
    net = make("mini")
    with pytest.raises(ConfigError, match="the model has no module 'nowhere'"):
        medckpt.apply(net, dataclasses.replace(smallest, regions=(*smallest.regions[:-1], wrong)))
    assert untouched(net)


def test_a_stale_plan_is_refused(smallest: MemoryPlan, tmp_path: Path) -> None:
    smallest.save(tmp_path / "plan.json")
    plan = MemoryPlan.load(tmp_path / "plan.json")
    medckpt.apply(make("mini"), plan)
    frozen, deeper = make("mini"), make("mini")
    frozen.out.requires_grad_(False)
    deeper.blocks.append(copy.deepcopy(deeper.blocks[0]))
    for other in (frozen, deeper, make("mini").double(), make("skips")):
        for use in (medckpt.apply, lambda net, plan: medckpt.bind(net, DICE_CE, plan)):
            with pytest.raises(ConfigError, match=r"plan: it was made for another model.*Plan again"):
                use(other, plan)
        assert untouched(other)
    # On another device, or treated already, it is the same model.
    medckpt.bind(medckpt.apply(make("mini"), plan), DICE_CE, plan)


def test_the_whole_way(smallest: MemoryPlan) -> None:
    net, treated = make("mini"), medckpt.apply(make("mini"), smallest)
    step = medckpt.bind(treated, DICE_CE, smallest)
    losses = [step(image("mini"), label("mini")), DICE_CE(net(image("mini")), label("mini"))]
    for loss in losses:
        loss.backward()
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-6)
    largest = max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)
    for (name, plain), planned in zip(net.named_parameters(), treated.parameters(), strict=True):
        assert (plain.grad is None) == (planned.grad is None), name
        if plain.grad is not None and planned.grad is not None:
            assert float((plain.grad - planned.grad).abs().max()) <= 1e-4 * largest, name


def test_verify(smallest: MemoryPlan) -> None:
    found = medckpt.verify(make("mini"), smallest, image("mini"), loss=DICE_CE, target=label("mini"))
    assert found.passed, str(found)
    assert medckpt.verify(
        make("mini"), dataclasses.replace(smallest, tail=False, micro_batches=1), image("mini")
    ).passed
    split = dataclasses.replace(smallest, tail=True)
    with pytest.raises(ConfigError, match="verify: this plan runs the loss sample by sample"):
        medckpt.verify(make("mini"), split, image("mini"))


def test_without_lean_operators_a_plan_is_equal_bit_for_bit() -> None:
    plan = medckpt.plan(make("unet"), image("unet", device="meta"), budget="min", lean=False)
    assert set(plan.choices.values()) <= {"keep", "recompute_plain"}
    found = medckpt.verify(make("unet"), plan, image("unet"))
    assert found.exact
    assert found.bit_identical


def test_inputs_as_tuples_and_mappings_and_losses_of_the_output() -> None:
    class Two(Plain):
        def forward(self, one: Any, two: Any) -> Any:  # type: ignore[override]
            return {"logits": super().forward(one + two)}

    pixels = image("skips", device="meta")
    found = [
        medckpt.plan(
            Two([Residual(), Residual()], [0, 0]),
            given,
            budget="min",
            lean=False,
            output_loss=lambda output: output["logits"].float().square().mean(),
        ).predicted_peak_bytes
        for given in ((pixels, pixels), {"two": pixels, "one": pixels})
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"micro_batches": 3, "loss": DICE_CE, "target": TARGET}, "micro_batches=3: does not divide the 2 samples"),
        ({"micro_batches": 2}, "micro_batches: a step by samples needs a loss"),
        ({"loss": DICE_CE}, "target: with a loss of"),
        ({"precision": "bf16"}, "precision: 'bf16' is not known"),
        ({"optimizer": "adam"}, "optimizer: 'adam' is not known"),
        ({"memory": "a100"}, "memory=a100: there is no such memory profile"),
        ({"regions": ["blocks.7"]}, "the model has no module 'blocks.7'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        medckpt.plan(make("mini"), INPUTS, **({"budget": "min"} | settings))


def test_regions_of_ones_own() -> None:
    pixels = image("skips", device="meta")
    plan = medckpt.plan(make("skips"), pixels, budget="min", regions=["blocks.3.mix", "blocks.0"], lean=False)
    assert tuple(plan.choices) == ("blocks.3.mix", "blocks.0")


def test_progress_is_told() -> None:
    told: list[str] = []
    medckpt.plan(make("skips"), image("skips", device="meta"), budget="min", lean=False, advance=told.append)
    assert told[:2] == ["keep", "recompute_plain"]
    assert "plain" in told


def test_a_compiled_model_is_planned_before_it_is_compiled(smallest: MemoryPlan) -> None:
    compiled = torch.compile(make("mini"), backend="eager")
    with pytest.raises(ConfigError, match=r"plan: (it was made for another model|this is a OptimizedModule around)"):
        medckpt.apply(compiled, smallest)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, with a smaller network and patch; then the step that its comments speak of."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "medckpt.plan(" in block]
    code = code.replace("feature_size=48", "feature_size=12").replace("96, 96, 96", "64, 32, 32")
    code = code.replace('budget="8GiB"', 'budget="min"')
    names: dict[str, Any] = {}
    exec(code, names)
    assert "swinViT" in capsys.readouterr().out
    pixels, target = torch.randn(4, 1, 64, 32, 32), torch.randint(14, (4, 1, 64, 32, 32)).float()
    found = medckpt.verify(names["network"], names["plan"], pixels, loss=names["loss"], target=target)
    assert found.passed, str(found)
    names["step"](pixels, target).backward()
    assert all(p.grad is not None for p in names["network"].parameters() if p.requires_grad)
    medckpt.remove(names["network"])
