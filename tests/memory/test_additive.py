"""The additive model against the exact simulation: equal to the byte, under random policies over all options."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from medckpt.errors import MedckptError
from medckpt.memory.additive import AdditiveModel
from medckpt.memory.fit import Planner
from medckpt.memory.options import OPTIONS
from medckpt.memory.segments import Cut, Segment, Shared
from medckpt.memory.ways import Way
from tests.memory.nets import DICE_CE, SIDES, Plain, Residual, make, planner, trees

# ---------------------------------------------------------------------------------------------- by hand


def by_hand() -> AdditiveModel:
    """Two regions, forward 0 and 1, backward 2 (of b) and 3 (of a); bytes are chosen so that no two sums are alike.

    10 stay. a makes a tensor of 100 that b reads: b saves it if it keeps, and holds it as its input if it recomputes.
    keep: a carries 1000 to its backward pass, b 2000. recompute: nothing, and more in the backward pass.
    """
    key = (0, 0)

    def cut(carried: tuple[int, int], backward: tuple[int, int], ms: float) -> Cut:
        segments = [
            Segment("a", "forward", 0, 0, 1.0, [(1100, frozenset())], [(carried[0], 2)] if carried[0] else []),
            Segment("b", "forward", 1, 1, 1.0, [(2001, frozenset())], [(carried[1], 1)] if carried[1] else []),
            Segment("b", "backward", 2, 2, ms, [(backward[0], frozenset({key}))]),
            Segment("a", "backward", 3, 3, ms, [(backward[1], frozenset())]),
        ]
        return Cut(segments, {key: Shared(100, 1, None, {2})}, [(10, 4)], {0: 3, 3: 0, 1: 2, 2: 1})

    return AdditiveModel(
        {"keep": cut((1000, 2000), (2003, 1005), 2.0), "recompute": cut((0, 0), (2500, 1500), 3.0)}, ("a", "b"), 7
    )


@pytest.mark.parametrize(
    ("policy", "at"),
    [
        ({"a": "keep", "b": "keep"}, [1117, 17 + 1000 + 100 + 2001, 17 + 1000 + 100 + 2003, 17 + 1005]),
        ({"a": "recompute", "b": "keep"}, [1117, 17 + 100 + 2001, 17 + 100 + 2003, 17 + 1500]),
        ({"a": "keep", "b": "recompute"}, [1117, 17 + 1000 + 100 + 2001, 17 + 1000 + 100 + 2500, 17 + 1005]),
    ],
)
def test_sums_by_hand(policy: dict[str, str], at: list[int]) -> None:
    model = by_hand()
    assert [model.at(segment, policy) for segment in range(model.count)] == at
    assert model.peak_bytes(policy) == max(at)
    assert model.step_ms(policy) == 2 + sum(3.0 if option == "recompute" else 2.0 for option in policy.values())


def test_options_that_run_regions_in_another_order_are_refused() -> None:
    model = by_hand()
    model.cuts["recompute"].segments.reverse()
    with pytest.raises(MedckptError, match="different orders: no sum is exact"):
        AdditiveModel(model.cuts, model.regions, 0)


# ---------------------------------------------------------------------------------------------- against the simulation


def differences(found: Planner, way: Way, count: int, seed: int = 0) -> list[int]:
    """Returns the model's peak less the simulated one's, for random policies."""
    draw = random.Random(seed)
    model = found._model(way)
    different = []
    for _ in range(count):
        policy = {region: draw.choice(found.options) for region in found.regions}
        exact = found._simulated(found.trace(policy, way)).peak_bytes
        different.append(model.peak_bytes(found._named(policy)) - exact)
    return different


def of(name: str, **more: Any) -> Planner:
    found = planner(make(name), SIDES[name], **more)
    # Where some of Swin's blocks are recomputed as they are, other things lie between all of them: no such option.
    found.options = found.options if name == "swin" else tuple(OPTIONS)
    return found


CASES = [
    ("mini", Way(tail=True), {"target_loss": DICE_CE}),
    ("skips", Way(micro_batches=2), {"target_loss": DICE_CE}),
]
LARGE = [
    ("unet", Way(), {"target_loss": DICE_CE}),  # its own names begin with "model."
    ("vit", Way(), {}),
    ("mini", Way(), {"target_loss": DICE_CE}),
    ("mini", Way(micro_batches=2), {"target_loss": DICE_CE}),
    ("skips", Way(), {}),
    ("skips", Way(micro_batches=2), {"target_loss": DICE_CE, "precision": "32"}),
    ("swin", Way(), {"target_loss": DICE_CE}),
    ("swin", Way(tail=True), {"target_loss": DICE_CE}),
    ("unetr", Way(tail=True), {"target_loss": DICE_CE}),
    ("mae", Way(), {}),
]


@pytest.mark.parametrize(("name", "way", "more"), CASES)
def test_three_policies_are_exact(name: str, way: Way, more: dict[str, Any]) -> None:
    assert differences(of(name, **more), way, 3) == [0] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way", "more"), CASES + LARGE)
def test_fifty_policies_are_exact(name: str, way: Way, more: dict[str, Any]) -> None:
    assert differences(of(name, **more), way, 50, seed=1) == [0] * 50


@settings(max_examples=4, deadline=None, derandomize=True)
@given(trees())
def test_random_trees_are_exact(net: nn.Module) -> None:
    found = planner(net, (8, 8, 8), lean=False)
    assert differences(found, Way(), 2) == [0] * 2


def test_a_constant_that_a_recompute_makes_again_is_not_there_before() -> None:
    """Swin paints its shift mask with numbers, in each call: each is there for a moment, not from the step's start."""

    class Painting(Residual):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(x.shape[2:], device=x.device)
            for number, part in enumerate((slice(0, 2), slice(2, 4))):
                mask[part] = number
            return super().forward(x) * mask

    found = planner(Plain([Painting(), Painting(), Residual()], [0, 0, 0]), (8, 8, 8), lean=False)
    counts = {}
    for option in found.options:
        graph = found.trace(dict.fromkeys(found.regions, option), Way())
        assert any(op.name == "lift_fresh.default" for op in graph.ops)
        counts[option] = sum(storage.born < 0 for storage in graph.storages)
    assert counts["keep"] == counts["recompute_plain"]
    assert differences(found, Way(), 3) == [0] * 3
