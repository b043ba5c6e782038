from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from medckpt import typed
from medckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: Literal["inner"] = "inner"
    size: int = 1
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ConfigError("size: must be 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Other:
    name: Literal["other"] = "other"
    depth: int = 2


@dataclass(frozen=True, kw_only=True)
class Outer:
    title: str
    inner: Inner | Other = field(default_factory=Inner)
    triple: tuple[int, int, int] | None = None
    names: tuple[str, ...] | int = ()
    mode: Literal["auto", "32"] = "auto"
    switch: bool = False
    table: dict[str, int] = field(default_factory=dict)


def test_a_round_trip_gives_the_same_value() -> None:
    value = Outer(title="a", inner=Other(depth=5), triple=(1, 2, 3), names=("x",), mode="32", table={"k": 1})
    assert typed.read(Outer, typed.to_plain(value)) == value


def test_every_problem_is_named_at_once() -> None:
    data = {"titel": "a", "inner": {"name": "inner", "size": "big"}, "triple": [1, 2], "switch": 1}
    with pytest.raises(ConfigError) as caught:
        typed.read(Outer, data)
    assert str(caught.value).splitlines() == [
        "titel: unknown key. Did you mean 'title'? Known: inner, mode, names, switch, table, title, triple.",
        "title: missing, and it has no default.",
        "inner.size: expected a whole number, got 'big' (str).",
        "triple: expected 3 values, got 2: [1, 2] (list).",
        "switch: expected true or false, got 1 (int).",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {"size": -1}}, "inner.size: must be 0 or more."),
        ({"inner": {"name": "othr"}}, "inner.name: 'othr' (str) is not a choice. Did you mean 'other'?"),
        ({"inner": {"name": "other", "size": 1}}, "inner.size: unknown key."),
        ({"inner": 3}, "inner: expected Inner or Other, got 3 (int)."),
        ({"mode": "16"}, "mode: '16' (str) is not a choice. Known: 32, auto."),
        ({"mode": True}, "mode: True (bool) is not a choice."),
        ({"names": 1.5}, "names: expected a list or a whole number, got 1.5 (float)."),
        ({"triple": [1, True, 3]}, "triple[1]: expected a whole number, got True (bool)."),
        ({"table": {"a": "b"}}, "table.a: expected a whole number, got 'b' (str)."),
        ({"table": [1]}, "table: expected keys and values"),
    ],
)
def test_messages(data: dict[str, object], message: str) -> None:
    data = {"title": "t", **data}
    if isinstance(data.get("inner"), dict):
        data["inner"] = {"name": "inner", **data["inner"]}  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as caught:
        typed.read(Outer, data)
    assert message in str(caught.value)


def test_a_number_spells_a_choice_and_an_int_is_a_float() -> None:
    value = typed.read(Outer, {"title": "t", "mode": 32, "inner": {"name": "inner", "share": 1}})
    assert value.mode == "32"
    assert isinstance(value.inner, Inner)
    assert isinstance(value.inner.share, float)
