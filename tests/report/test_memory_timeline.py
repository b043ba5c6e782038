"""The picture of memory over a step: what is stacked, which spans are named, what is written, what is in sight."""

from __future__ import annotations

import dataclasses
import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from torch import nn

from medckpt.errors import DataError
from medckpt.memory.explain import KINDS, REST, Explanation, explain
from medckpt.memory.graph import Phase
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import Moment, Simulation, Where, simulate
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step
from medckpt.report.memory_timeline import (
    NAMED_PARTS,
    OTHER,
    Span,
    draw_memory_timeline,
    phase_spans,
    recompute_spans,
    stacked,
    timeline_png,
)

GIB = 2**30
CARD = MemoryProfile(name="card", title="Some Card 8GB", device="cuda", capacity_bytes=8 * GIB)


def made_by_hand(bands: dict[str, tuple[int, ...]], step: list[tuple[str, Phase]] | None = None) -> Explanation:
    """An explanation with one moment per operator."""
    totals = [sum(values) for values in zip(*bands.values(), strict=True)]
    peak = totals.index(max(totals))
    step = step or [("net", "forward")] * len(totals)
    timeline = tuple(
        Moment(10.0 * (k + 1), total, *place) for k, (total, place) in enumerate(zip(totals, step, strict=True))
    )
    simulation = Simulation(
        peak_bytes=max(totals),
        allocated_bytes=max(totals),
        peak_interval=(max(totals), max(totals)),
        reserved_bytes=(max(totals), 2 * max(totals)),
        parts={},
        step_ms=timeline[-1].ms,
        where=Where(step[peak][0], "conv", step[peak][1]),
        timeline=timeline,
        unmodelled={},
    )
    return Explanation(
        ops=tuple(range(len(totals))),
        ms=tuple(moment.ms for moment in timeline),
        bands=bands,
        phases=tuple(moment.phase for moment in timeline),
        peak=peak,
        holders=tuple((name, band[peak]) for name, band in bands.items()),
        timed=True,
        simulation=simulation,
    )


def words(figure: Figure) -> list[str]:
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return [text.get_text() for text in texts]


STEP: list[tuple[str, Phase]] = [
    ("enc.a", "forward"),
    ("dec", "forward"),
    ("loss", "loss"),
    ("dec", "backward"),
    ("enc.a.x", "recompute"),
    ("enc.a.y", "recompute"),
    ("enc.a", "backward"),
    ("enc.b", "recompute"),
    ("", "optimizer"),
]
BANDS = {
    "dec": (0, 3 * GIB, 3 * GIB, 4 * GIB, 0, 0, 0, 0, 0),
    "enc": (GIB, GIB, GIB, GIB, GIB, GIB, GIB, GIB, 0),
    "parameters": (GIB,) * 9,
    "inputs": (2**20,) * 9,
    REST: (2**20,) * 9,
    "scratch": (0, 0, 0, 0, 0, GIB, 0, 0, 0),
}


def test_kinds_lie_below_small_ones_together_and_parts_in_the_order_of_their_need() -> None:
    bands = stacked(made_by_hand(BANDS, STEP))
    assert list(bands) == ["parameters", OTHER, "enc", "dec", "scratch"]
    assert bands[OTHER].tolist() == [2 * 2**20] * 9
    assert bands["dec"].tolist() == list(BANDS["dec"])


def test_only_the_largest_parts_are_named_and_nothing_is_lost() -> None:
    bands = {f"part{k:02d}": (k * GIB, 2 * k * GIB) for k in range(1, 31)} | {"context": (GIB, GIB)}
    found = stacked(made_by_hand(bands))
    named = [name for name in found if name not in (*KINDS, OTHER)]
    assert sorted(named) == [f"part{k}" for k in range(31 - NAMED_PARTS, 31)]
    assert np.sum(list(found.values()), axis=0).tolist() == [466 * GIB, 931 * GIB]


def test_phases_are_spans_and_recomputing_is_backward() -> None:
    timeline = made_by_hand(BANDS, STEP).simulation.timeline
    assert phase_spans(timeline) == [
        Span("forward", 0.0, 20.0),
        Span("loss", 20.0, 30.0),
        Span("backward", 30.0, 80.0),
        Span("optimizer", 80.0, 90.0),
    ]
    assert recompute_spans(timeline) == [Span("enc.a", 40.0, 60.0), Span("enc.b", 70.0, 80.0)]
    assert recompute_spans(timeline[:4]) == []


def test_what_is_recomputed_is_named_and_only_if_something_is() -> None:
    text = words(draw_memory_timeline(made_by_hand(BANDS, STEP), CARD))
    assert {"recomputed", "enc.a", "enc.b", "forward", "loss", "backward", "optimizer"} <= set(text)
    bands = {name: band[:4] for name, band in BANDS.items()}
    assert "recomputed" not in words(draw_memory_timeline(made_by_hand(bands, STEP[:4]), CARD))


def test_the_peak_says_how_much_and_where() -> None:
    text = words(draw_memory_timeline(made_by_hand(BANDS, STEP), CARD))
    assert "peak 6.00 GiB: backward of dec" in text
    assert "One training step takes 6.00 GiB; Some Card 8GB has 8.00 GiB" in text
    assert "taken from the device: 6.00 GiB to 12.00 GiB; about 90 ms per step" in text


@pytest.mark.parametrize("capacity", [2, 5.5, 6.2, 8, 18])
def test_the_budget_is_a_line_within_the_picture(capacity: float) -> None:
    profile = dataclasses.replace(CARD, capacity_bytes=int(capacity * GIB))
    figure = draw_memory_timeline(made_by_hand(BANDS, STEP), profile)
    axes = figure.axes[0]
    assert any(line.get_ydata()[0] == pytest.approx(capacity) and line.is_dashed() for line in axes.lines)
    assert axes.get_ylim()[1] > max(capacity, 6)
    assert f"{capacity:.2f} GiB: Some Card 8GB" in words(figure)
    figure.draw_without_rendering()
    labels = [text.get_window_extent() for text in axes.texts]
    assert len(labels) == 2
    assert not labels[0].overlaps(labels[1])


def test_a_budget_far_above_is_told_in_the_title_alone() -> None:
    profile = dataclasses.replace(CARD, capacity_bytes=80 * GIB)
    figure = draw_memory_timeline(made_by_hand(BANDS, STEP), profile)
    assert figure.axes[0].get_ylim()[1] < 8
    assert not any(line.is_dashed() for line in figure.axes[0].lines)
    assert "One training step takes 6.00 GiB; Some Card 8GB has 80.00 GiB" in words(figure)


def test_an_unknown_capacity_and_unknown_times_are_no_obstacle() -> None:
    bands = {"net": (2**20, 3 * 2**20), "parameters": (2**20, 2**20)}
    explanation = made_by_hand(bands)
    explanation = dataclasses.replace(
        explanation, timed=False, simulation=dataclasses.replace(explanation.simulation, step_ms=None)
    )
    figure = draw_memory_timeline(explanation, MemoryProfile(name="plain", device="cpu"))
    assert "One training step takes 4 MiB on plain" in words(figure)
    assert "taken from the device: 4 MiB to 8 MiB" in words(figure)
    assert figure.axes[0].get_xlabel() == "operators, in their order"
    assert figure.axes[0].get_ylabel() == "MiB"


def test_narrow_phases_and_long_names_stay_inside_and_apart() -> None:
    step: list[tuple[str, Phase]] = [
        ("net", "forward"), ("loss", "loss"), ("net", "backward"), ("", "clip"), ("", "optimizer"), ("", "average"),
    ]  # fmt: skip
    long = "backbone.stages.3.blocks.17.attention.projection.of.the.queries.and.keys"
    explanation = made_by_hand({long: (1, 1, 5, 1, 1, 1), "parameters": (1,) * 6}, step)
    ends = (500.0, 501.0, 990.0, 991.0, 995.0, 996.0)
    moments = tuple(
        dataclasses.replace(moment, ms=end) for moment, end in zip(explanation.simulation.timeline, ends, strict=True)
    )
    simulation = dataclasses.replace(
        explanation.simulation, timeline=moments, where=Where(long, "mm", "backward"), step_ms=996.0
    )
    figure = draw_memory_timeline(dataclasses.replace(explanation, ms=ends, simulation=simulation), CARD)
    figure.draw_without_rendering()
    phases = {text.get_text(): Text.get_window_extent(text) for text in figure.axes[1].texts}  # without the leaders
    assert set(phases) == {"forward", "loss", "backward", "clip", "optimizer", "average"}
    boxes = [*phases.values(), *(text.get_window_extent() for text in figure.texts)]
    assert all(not a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    peak = figure.axes[0].texts[-1].get_window_extent()
    assert peak.x0 >= figure.axes[0].bbox.x0 - 1
    assert peak.x1 <= figure.axes[0].bbox.x1 + 1


def test_the_picture_of_a_traced_network_is_written_as_png(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv3d(1, 8, 3), nn.Sequential(nn.Conv3d(8, 8, 3), nn.GELU()), nn.Conv3d(8, 2, 1))
    graph = trace_step(net, torch.empty(1, 1, 12, 12, 12), Step(rules="cpu", clip_norm=1.0), recompute=("1",))
    profile = MemoryProfile(name="plain", device="cpu", capacity_bytes=16 * GIB)
    explanation = explain(graph, simulate(graph, profile), profile)
    out = tmp_path / "pictures" / "memory_timeline.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw_memory_timeline(explanation, profile, out)
    assert isinstance(figure, Figure)
    assert [path.name for path in out.parent.iterdir()] == ["memory_timeline.png"]
    picture = imread(out)
    assert picture.shape[:2] == (840, 1500)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 100
    data = timeline_png(explanation, profile)
    assert imread(io.BytesIO(data)).shape[:2] == (560, 1000)
    assert data == timeline_png(explanation, profile)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "occupied.png").mkdir()
    with pytest.raises(DataError, match="occupied"):
        draw_memory_timeline(made_by_hand(BANDS, STEP), CARD, tmp_path / "occupied.png")
