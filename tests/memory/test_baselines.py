"""Policies without a planner, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medckpt.errors import ConfigError
from medckpt.memory.baselines import baseline, with_own_flag
from tests.memory.nets import Plain, Residual, make


def rows(count: int) -> nn.Module:
    return Plain([Residual() for _ in range(count)], [0] * count)


def kept(name: str, count: int = 9) -> list[int]:
    choices = baseline(rows(count), name)
    assert list(choices) == [f"blocks.{i}" for i in range(count)]
    assert set(choices.values()) <= {"keep", "recompute_plain"}
    return [i for i, option in enumerate(choices.values()) if option == "keep"]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("none", list(range(9))),
        ("all", []),
        ("sqrt", [2, 5, 8]),  # every third of nine
        ("log", [0, 1, 3, 7]),
        ("every-2", [1, 3, 5, 7]),
        ("every-3", [2, 5, 8]),
    ],
)
def test_which_blocks_are_kept(name: str, blocks: list[int]) -> None:
    assert kept(name) == blocks


def test_blocks_that_repeat_and_attention_alone() -> None:
    net = make("mini")
    assert baseline(net, "block") == dict.fromkeys(["blocks.0", "blocks.1", "encoder1", "decoder2"], "recompute_plain")
    assert baseline(net, "selective") == dict.fromkeys(["blocks.0.attn", "blocks.1.attn"], "recompute_plain")
    with pytest.raises(ConfigError, match="policy=selective: this network has no attention that is known"):
        baseline(make("unet"), "selective")
    with pytest.raises(ConfigError, match=r"policy: 'sqr' is no baseline. Did you mean 'sqrt'\?"):
        baseline(net, "sqr")


def test_the_networks_own_flag_is_set_on_a_twin() -> None:
    net = make("swin")
    flagged = with_own_flag(net)
    assert flagged is not None
    assert {m.use_checkpoint for m in flagged.modules() if hasattr(m, "use_checkpoint")} == {True}
    assert {m.use_checkpoint for m in net.modules() if hasattr(m, "use_checkpoint")} == {False}
    assert all(a is b for a, b in zip(net.parameters(), flagged.parameters(), strict=True))
    assert with_own_flag(make("mini")) is None
    assert with_own_flag(torch.nn.Linear(1, 1)) is None
