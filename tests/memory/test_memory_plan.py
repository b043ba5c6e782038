"""Plans: text, files, keys; every broken file is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medckpt.errors import ConfigError
from medckpt.memory.plan import MemoryPlan, RegionPlan, model_key, shapes_of

PLAN = MemoryPlan(
    regions=(
        RegionPlan(name="layers.0.blocks.1", option="lean", ms=1.25, plain_ms=1.0),
        RegionPlan(name="layers.1.blocks.0", option="lean", ms=2.0, plain_ms=2.5),
        RegionPlan(name="out", option="keep", ms=0.5, plain_ms=0.5),
    ),
    tail=True,
    micro_batches=1,
    predicted_peak_bytes=3 * 2**30,
    predicted_step_ms=30.0,
    plain_peak_bytes=6 * 2**30,
    plain_step_ms=24.0,
    budget_bytes=4 * 2**30,
    memory="a100_80gb",
    samples=2,
    inputs="float32[2, 1, 96, 96, 96]",
    precision="bf16-mixed",
    times="profile",
    key="0123456789abcdef",
)


def test_a_file_gives_the_plan_back(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert MemoryPlan.load(tmp_path / "plan.json") == PLAN
    assert MemoryPlan.load(str(tmp_path / "plan.json")).choices == {
        "layers.0.blocks.1": "lean", "layers.1.blocks.0": "lean", "out": "keep",
    }  # fmt: skip


def test_a_time_that_is_not_known_stays_so(tmp_path: Path) -> None:
    region = dataclasses.replace(PLAN.regions[0], ms=math.nan, plain_ms=math.nan)
    dataclasses.replace(PLAN, regions=(region,), predicted_step_ms=math.nan).save(tmp_path / "plan.json")
    assert "NaN" not in (tmp_path / "plan.json").read_text()
    read = MemoryPlan.load(tmp_path / "plan.json")
    assert math.isnan(read.predicted_step_ms)
    assert math.isnan(read.regions[0].ms)


def test_the_text_says_what_it_gives() -> None:
    assert PLAN.summary() == (
        "peak 3.00 GiB (plain 6.00 GiB), step 30.0 ms (1.25x plain): 2 x lean, 1 x keep, per-sample tail"
    )
    lines = PLAN.table().splitlines()
    assert lines[0] == PLAN.summary()
    assert lines[2].split() == ["layers.*.blocks.*", "2", "lean", "3.25", "3.50"]
    assert lines[3].split() == ["out", "1", "keep", "0.50", "0.50"]
    assert "3 micro-batches" in dataclasses.replace(PLAN, tail=False, micro_batches=3).summary()


REGION = {"name": "a", "option": "keep", "ms": 1.0, "plain_ms": 1.0}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, r"no memory plan of version 1 \(version: 2\). Plan again"),
        ({"version": None}, r"no memory plan of version 1"),
        ({"tial": True}, "'tial' is no part of a memory plan. Did you mean 'tail'"),
        *[({name: ...}, f"'{name}' is missing") for name in (f.name for f in dataclasses.fields(MemoryPlan))],
        ({"tail": 1}, "'tail' must be of type bool, not 1"),
        ({"tail": "true"}, "'tail' must be of type bool"),
        ({"micro_batches": 1.0}, "'micro_batches' must be of type int, not 1.0"),
        ({"micro_batches": True}, "'micro_batches' must be of type int, not True"),
        ({"micro_batches": 0}, "'micro_batches' must be a number from 1 on, not 0"),
        ({"samples": -1}, "'samples' must be a number from 1 on"),
        ({"predicted_peak_bytes": -5}, "'predicted_peak_bytes' must be a number from 0 on, not -5"),
        ({"predicted_peak_bytes": None}, "'predicted_peak_bytes' must be of type int, not None"),
        ({"predicted_step_ms": "fast"}, "'predicted_step_ms' must be of type float, not 'fast'"),
        ({"predicted_step_ms": float("nan")}, "NaN is no number"),
        ({"plain_step_ms": float("inf")}, "Infinity is no number"),
        ({"key": 7}, "'key' must be of type str, not 7"),
        ({"memory": None}, "'memory' must be of type str"),
        ({"memory": ""}, "'memory' must not be empty"),
        ({"samples": 77, "micro_batches": 2}, r"'micro_batches' \(2\) does not divide 'samples' \(77\)"),
        ({"regions": {"a": "keep"}}, "'regions' must be a list"),
        ({"regions": ["a"]}, r"regions\[0\]: must have name, option, ms, plain_ms and nothing else, not 'a'"),
        ({"regions": [REGION, {"name": "b", "option": "keep"}]}, r"regions\[1\]: must have name"),
        ({"regions": [REGION | {"more": 1}]}, r"regions\[0\]: must have name"),
        ({"regions": [REGION | {"name": 3}]}, r"regions\[0\].name must be of type str, not 3"),
        ({"regions": [REGION | {"ms": "1"}]}, r"regions\[0\].ms must be of type float"),
        ({"regions": [REGION | {"ms": -1.0}]}, r"regions\[0\].ms must be a number from 0 on"),
        ({"regions": [REGION | {"option": "lena"}]}, r"regions\[0\].option: 'lena' is no option. Did you mean 'lean'"),
        ({"regions": [REGION, REGION]}, "'regions' names 'a' twice"),
    ],
)
def test_a_broken_file_is_refused_by_name(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    found = {name: value for name, value in (PLAN.to_dict() | change).items() if value is not ...}
    (tmp_path / "broken.json").write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=match) as error:
        MemoryPlan.load(tmp_path / "broken.json")
    assert str(error.value).startswith(f"{tmp_path / 'broken.json'}: ")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"plan"', "null", "\x00", '{"version": 1e999}'])
def test_what_is_no_plan_at_all(text: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read as a memory plan|is no memory plan of version 1"):
        MemoryPlan.load(tmp_path / "broken.json")


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "nothing.json", tmp_path, tmp_path / "binary"):
        with pytest.raises(ConfigError, match="cannot be read as a memory plan"):
            MemoryPlan.load(path)


def test_the_key_is_that_of_the_structure_not_of_the_values() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))

    key = model_key(net())
    assert key == model_key(net())
    others: list[nn.Module] = [nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 2)), net().double()]
    others.append(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)))
    frozen = net()
    frozen[0].requires_grad_(False)
    keys = {model_key(other) for other in [*others, frozen]}
    assert len(keys | {key}) == 5


def test_inputs_as_text() -> None:
    given = {"image": torch.empty(2, 1, 4), "more": [torch.empty(3, dtype=torch.int64), 5]}
    assert shapes_of(given) == "float32[2, 1, 4], int64[3]"
