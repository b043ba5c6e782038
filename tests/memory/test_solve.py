"""The programme against every policy there is, on models made at random; its limits and its ends."""

from __future__ import annotations

import ctypes
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medckpt.memory.additive import AdditiveModel
from medckpt.memory.segments import Cut, Key, Segment, Shared
from medckpt.memory.solve import GAP, _without_words, fastest, leanest

OPTIONS = ("keep", "lean", "recompute")


def random_model(seed: int, count: int) -> AdditiveModel:
    """Returns `count` regions in a row, whose outputs are read by the next one and by one further on."""
    draw = random.Random(seed)
    readers: dict[int, list[int]] = {
        made: sorted({made + 1, draw.randrange(made + 1, count)}) for made in range(count - 1)
    }
    sizes = {made: draw.randrange(1, 400) * 512 for made in readers}
    mates = {segment: 2 * count - 1 - segment for segment in range(2 * count)}

    def cut(option: str) -> Cut:
        segments = [Segment(f"r{i}", "forward", i, i, 1.0) for i in range(count)]
        segments += [Segment(f"r{i}", "backward", 0, 0, 0.0) for i in reversed(range(count))]
        shared = {}
        for made, users in readers.items():
            holders = {mates[user] for user in users if option == "recompute" or draw.random() < 0.6}
            shared[made, 0] = Shared(sizes[made], max(users), None, holders | {mates[made]})
        for i in range(count):
            forward, backward = segments[i], segments[mates[i]]
            own = draw.randrange(1, 2000) * 512
            saved = own if option == "keep" else own // 2 if option == "lean" else 0
            forward.carried = [(saved, mates[i] - 1)] if saved else []
            forward.pieces = [(own + sizes.get(i, 0), frozenset())]
            held: frozenset[Key] = frozenset(key for key, one in shared.items() if mates[i] in one.holders)
            backward.pieces = [(own + draw.randrange(9) * 512, held), (own // 3, frozenset(list(held)[:1]))]
            backward.ms = 2.0 + draw.random() * {"keep": 0.1, "lean": 0.7, "recompute": 2}[option]
            backward.carried = [(draw.randrange(3) * 512, 2 * count)]
        return Cut(segments, shared, [(4096, 2 * count)], mates)

    return AdditiveModel({option: cut(option) for option in OPTIONS}, tuple(f"r{i}" for i in range(count)), 1024)


def everything(model: AdditiveModel) -> list[tuple[int, float, dict[str, str]]]:
    found = []
    for choice in itertools.product(OPTIONS, repeat=len(model.regions)):
        policy = dict(zip(model.regions, choice, strict=True))
        found.append((model.peak_bytes(policy), model.step_ms(policy), policy))
    return found


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_no_policy_within_the_budget_is_faster_and_none_is_leaner(seed: int, count: int) -> None:
    model = random_model(seed, count)
    every = everything(model)
    smallest = min(peak for peak, _, _ in every)
    largest = max(peak for peak, _, _ in every)
    assert model.peak_bytes(leanest(model)) == smallest
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = smallest + int((largest - smallest) * share)
        policy = fastest(model, budget)
        assert policy is not None
        assert model.peak_bytes(policy) <= budget
        best = min(ms for peak, ms, _ in every if peak <= budget)
        assert best <= model.step_ms(policy) <= best * (1 + GAP) + 1e-9
    assert fastest(model, smallest - 1) is None


def test_among_the_leanest_a_fast_one_is_taken() -> None:
    model = random_model(3, 4)
    found = leanest(model)
    peak = model.peak_bytes(found)
    assert model.step_ms(found) <= min(ms for p, ms, _ in everything(model) if p == peak) * (1 + GAP)


def test_a_region_stays_as_it_is_where_its_option_buys_nothing() -> None:
    model = random_model(5, 4)
    for cut in model.cuts.values():
        for segment in cut.segments:
            segment.ms = 1.0
    plain = dict.fromkeys(model.regions, "keep")
    enough = model.peak_bytes(plain)
    assert fastest(model, enough) == plain
    tight = fastest(model, enough - 1)
    assert tight is not None
    assert tight != plain
    for region, option in tight.items():
        assert option == "keep" or model.peak_bytes(tight | {region: "keep"}) >= enough


@pytest.mark.parametrize("budget", [0, 1, 5000])
def test_a_budget_below_what_is_there_anyway_has_no_policy(budget: int) -> None:
    assert fastest(random_model(0, 3), budget) is None


def test_what_the_solver_prints_by_itself_stays_away(capfd: pytest.CaptureFixture[str]) -> None:
    libc = ctypes.CDLL(None)
    print("before", flush=True)
    with _without_words():
        libc.puts(b"HighsMipSolverData::...")
    print("after", flush=True)
    assert capfd.readouterr().out == "before\nafter\n"
