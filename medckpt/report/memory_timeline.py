"""`memory_timeline.png`: memory over one training step, by who holds it, against what the device has."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from medckpt.errors import ConfigError
from medckpt.files import write_atomic
from medckpt.memory.explain import KINDS, REST, Explanation
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import Moment
from medckpt.report.curves import INK, MUTED, class_colour, spread_labels, style

GIB, MIB = 2**30, 2**20
NAMED_PARTS = 8
"""Parts of the model with a colour of their own; what the others hold is one band."""
SMALL = 0.015
"""A kind of memory that never reaches this share of the peak is shown with the others."""
IN_SIGHT = 3.0
"""The device's memory is drawn as a line if it is at most this many times the peak."""
OTHER = "other"

_GREYS = {
    "context": "#6b7280", "parameters": "#8b929d", "optimizer": "#a9afb9", "averages": "#979eaa", "inputs": "#b9bec6",
    "weight casts": "#c6cad1", "gradients": "#9ca3af", "buckets": "#afb4bd",
    "optimizer step": "#b4a7a0", "scratch": "#3f4650",
    OTHER: "#dadde2",
}  # fmt: skip
_BUDGET = "#b42318"
_FORMATS = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}
"""Formats of a picture, and what matplotlib would write into each that is another one elsewhere or tomorrow."""
_PHASES = {
    "forward": "#cfe3f2", "loss": "#8fb8d8", "backward": "#f6dcc3", "clip": "#cbd5d0", "optimizer": "#a9c2b3",
    "average": "#cbd5d0",
}  # fmt: skip
_RECOMPUTED = "#b9a6dc"
_LEFT, _RIGHT, _WIDTH = 0.068, 0.742, 10.0
_STRIP = 0.026
_LABEL = 20
"""Characters of what is recomputed."""
_HALO = [withStroke(linewidth=3, foreground="white")]
_CHARACTER = 0.062
"""Inches that a character of 8 points takes, on average."""


Band = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a step, in the units of `Moment.ms`."""

    name: str
    start: float
    end: float


def draw_memory_timeline(explanation: Explanation, profile: MemoryProfile, path: str | Path | None = None) -> Figure:
    """Returns a picture of memory over one training step; writes it, atomically, if `path` is given.

    The suffix of `path` says how: .png, .pdf or .svg.

    Stacked areas are who holds the memory: kinds of memory grey and below, parts of the model in colours in the order
    in which the step first needs them. Above are the phases, and what is recomputed when.

    Raises:
        ConfigError: `path` has another suffix.
        DataError: `path` cannot be written.
    """
    format_ = None if path is None else _format(Path(path))
    timeline = explanation.simulation.timeline
    recomputed = recompute_spans(timeline)
    figure = Figure(figsize=(_WIDTH, 5.6), facecolor="white")
    low = 0.8 if recomputed else 0.83
    axes = figure.add_axes((_LEFT, 0.088, _RIGHT - _LEFT, (0.75 if recomputed else low) - 0.1))
    bands = stacked(explanation)
    colours = _colours(list(bands))
    _draw_areas(axes, explanation, bands, colours)
    _draw_budget(axes, explanation, profile)
    _mark_peak(axes, explanation, profile.capacity_bytes)
    _draw_phases(figure.add_axes((_LEFT, low, _RIGHT - _LEFT, _STRIP), sharex=axes), phase_spans(timeline))
    if recomputed:
        _draw_recomputed(figure.add_axes((_LEFT, low - 0.035, _RIGHT - _LEFT, _STRIP * 0.7), sharex=axes), recomputed)
    _draw_legend(figure, bands, colours, explanation.peak, low + _STRIP)
    _write_titles(figure, explanation, profile)
    if path is not None and format_ is not None:
        # Nothing that changes from one run to the next: equal forecasts give equal files.
        metadata = {_FORMATS[format_]: None}
        write_atomic(Path(path), lambda stream: figure.savefig(stream, format=format_, dpi=150, metadata=metadata))
    return figure


def _format(path: Path) -> str:
    name = path.suffix.lower().removeprefix(".")
    if name not in _FORMATS:
        raise ConfigError(
            f"{path}: a picture's suffix says its format, and '{path.suffix}' is none of them. "
            f"Known: {', '.join(f'.{known}' for known in _FORMATS)}."
        )
    return name


def timeline_png(explanation: Explanation, profile: MemoryProfile) -> bytes:
    """Returns the picture as a PNG 1000 pixels wide, for a notebook."""
    stream = io.BytesIO()
    figure = draw_memory_timeline(explanation, profile)
    figure.savefig(stream, format="png", dpi=100, metadata={"Software": None})
    return stream.getvalue()


def phase_spans(timeline: Sequence[Moment]) -> list[Span]:
    """Returns the phases in order; recomputing belongs to the backward pass."""
    return _runs(timeline, ["backward" if moment.phase == "recompute" else moment.phase for moment in timeline])


def recompute_spans(timeline: Sequence[Moment]) -> list[Span]:
    """Returns what is recomputed when: of each stretch the innermost module that all of it belongs to."""
    spans = []
    start: int | None = None
    for index in range(len(timeline) + 1):
        runs = index < len(timeline) and timeline[index].phase == "recompute"
        if runs and start is None:
            start = index
        elif not runs and start is not None:
            begin = timeline[start - 1].ms if start else 0.0
            name = _shared({moment.region for moment in timeline[start:index]}) or "the model"
            spans.append(Span(name, begin, timeline[index - 1].ms))
            start = None
    return spans


def _shared(regions: Iterable[str]) -> str:
    """Returns the innermost module that all regions are, or are inside of."""
    names = [region.split(".") for region in regions]
    depth = 0
    while all(len(name) > depth and name[depth] == names[0][depth] for name in names):
        depth += 1
    return ".".join(names[0][:depth])


def stacked(explanation: Explanation) -> dict[str, Band]:
    """Returns the bands as they are drawn, lowest first: kinds of memory, the small ones, parts of the model, scratch.

    At each moment they sum to the memory held, as `Explanation.bands` do.
    """
    bands = {name: np.array(band, dtype=np.int64) for name, band in explanation.bands.items()}
    peak = explanation.simulation.peak_bytes
    parts = sorted((name for name in bands if name not in KINDS), key=lambda name: (-bands[name].max(), name))
    small = [name for name in bands if name in KINDS and bands[name].max() < SMALL * peak]
    parts = [name for name in parts if name != REST]
    small += [name for name in [*parts[NAMED_PARTS:], REST] if name in bands]
    kinds = [name for name in KINDS if name in bands and name not in small and name != "scratch"]
    named = sorted((name for name in parts if name not in small), key=lambda name: (_begins(bands[name]), name))
    order = {name: bands[name] for name in kinds}
    if small:
        order[OTHER] = np.sum([bands[name] for name in small], axis=0)
    order |= {name: bands[name] for name in named}
    if "scratch" in bands and "scratch" not in small:
        order["scratch"] = bands["scratch"]
    return order


def _begins(band: Band) -> int:
    """Returns the moment at which a band has grown to something: a tenth of its largest."""
    return int(np.argmax(band > 0.1 * band.max()))


def _draw_areas(axes: Axes, explanation: Explanation, bands: Mapping[str, Band], colours: Mapping[str, str]) -> None:
    unit, word = _unit(explanation.simulation.peak_bytes)
    # An operator holds its memory while it runs, so a moment's value reaches back to the moment before.
    times = np.array([0.0, *explanation.ms])
    base = np.zeros(len(times))
    for name, band in bands.items():
        top = base + np.concatenate([band[:1], band]) / unit
        axes.fill_between(times, base, top, step="pre", color=colours[name], lw=0)
        base = top
    axes.fill_between(times, base, step="pre", facecolor="none", edgecolor=INK, lw=0.7)
    axes.set_xlim(0, times[-1])
    axes.set_xlabel(
        "milliseconds since the step began" if explanation.timed else "operators, in their order",
        fontsize=8.5, color=MUTED,
    )  # fmt: skip
    axes.set_ylabel(word, fontsize=8.5, color=MUTED)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    style(axes)


def _draw_legend(figure: Figure, bands: Mapping[str, Band], colours: Mapping[str, str], at: int, top: float) -> None:
    """Lists the bands as they lie, highest first, with what each holds at the peak."""
    left, right, row = _RIGHT + 0.014, 0.988, 0.0355
    unit, word = _unit(int(sum(band[at] for band in bands.values())))
    figure.text(left, top - 0.018, "held by", fontsize=8.5, color=MUTED)
    figure.text(right, top - 0.018, f"{word} at the peak", fontsize=8.5, color=MUTED, ha="right")
    for number, name in enumerate(reversed(list(bands)), start=1):
        y = top - number * row - 0.018
        figure.add_artist(Rectangle((left, y - 0.005), 0.016, 0.022, facecolor=colours[name], lw=0))
        figure.text(left + 0.022, y, _short(name, 26), fontsize=8.5, color=INK)
        nbytes = int(bands[name][at])
        text = f"{nbytes / unit:.2f}" if unit == GIB else f"{nbytes / unit:.0f}"
        empty = text.strip("0.") == ""
        text = "\N{EN DASH}" if empty else text
        figure.text(right, y, text, fontsize=8.5, color=MUTED if empty else INK, ha="right")


def _draw_budget(axes: Axes, explanation: Explanation, profile: MemoryProfile) -> None:
    """Draws the device's memory as a line where it is in sight, and leaves room above for the labels."""
    peak, capacity = explanation.simulation.peak_bytes, profile.capacity_bytes
    unit, _ = _unit(peak)
    top = 1.16 * peak
    if capacity is not None and capacity <= IN_SIGHT * peak:
        top = max(top, 1.12 * capacity)
        below = _near_peak(peak, capacity)
        axes.axhline(capacity / unit, color=_BUDGET, lw=1.3, ls=(0, (5, 3)), zorder=5)
        axes.annotate(
            f"{_size(capacity)}: {profile.title or profile.name}", (0, capacity / unit), zorder=7,
            xytext=(5, -4 if below else 4), textcoords="offset points", va="top" if below else "bottom", ha="left",
            fontsize=8.5, color=_BUDGET, path_effects=_HALO,
        )  # fmt: skip
    axes.set_ylim(0, top / unit)


def _near_peak(peak: int, capacity: int) -> bool:
    """Whether a label above the line of the budget would meet the one of the peak."""
    return 0.88 * peak < capacity < 1.16 * peak


def _mark_peak(axes: Axes, explanation: Explanation, capacity: int | None) -> None:
    simulation = explanation.simulation
    peak = simulation.peak_bytes
    unit, _ = _unit(peak)
    x, y = explanation.ms[explanation.peak], peak / unit
    axes.plot([x], [y], marker="o", ms=5, color=INK, mec="white", mew=1.2, clip_on=False, zorder=6)
    text = f"peak {_size(peak)}: {simulation.where.phase} of {_short(simulation.where.region or 'the model', 48)}"
    half = 0.5 * 1.25 * _CHARACTER * len(text) / ((_RIGHT - _LEFT) * _WIDTH)
    place = min(max(x / max(explanation.ms[-1], 1e-9), half), 1 - half)
    over = capacity / unit if capacity is not None and peak < capacity < 1.16 * peak else y
    axes.annotate(
        text, (place, over), xycoords=axes.get_yaxis_transform(), xytext=(0, 8), textcoords="offset points",
        ha="center", va="bottom", fontsize=8.5, fontweight="bold", color=INK, zorder=7, path_effects=_HALO,
    )  # fmt: skip


def _draw_phases(axes: Axes, spans: Sequence[Span]) -> None:
    """Draws the phases side by side; names that do not fit inside stand above."""
    axes.set_ylim(0, 1)
    axes.axis("off")
    outside: dict[str, float] = {}
    for span in spans:
        axes.axvspan(span.start, span.end, color=_PHASES[span.name], lw=0)
        middle = (span.start + span.end) / 2
        if (span.end - span.start) * _inches(axes) > _CHARACTER * len(span.name) + 0.06:
            axes.text(middle, 0.45, span.name, ha="center", va="center", fontsize=8, color=INK)
        else:
            outside.setdefault(span.name, middle)
    total = axes.get_xlim()[1]
    gap = (_CHARACTER * max(map(len, outside), default=0) + 0.08) / _inches(axes)
    places = spread_labels(list(outside.values()), gap, 0.0, total - gap / 2)
    for (name, middle), place in zip(outside.items(), places, strict=True):
        axes.annotate(
            name, (middle, 1), xytext=(place, 2.2), ha="center", va="center", fontsize=8,
            color=INK, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "lw": 0.6, "color": MUTED, "shrinkA": 1, "shrinkB": 0},
        )  # fmt: skip


def _draw_recomputed(axes: Axes, spans: Sequence[Span]) -> None:
    """Draws what is recomputed when; the longest are named, as many as there is room for."""
    axes.set_ylim(0, 1)
    axes.axis("off")
    for span in spans:
        axes.axvspan(span.start, span.end, color=_RECOMPUTED, lw=0)
    axes.annotate(
        "recomputed", (spans[0].start, 0.5), xytext=(-5, 0), textcoords="offset points", ha="right", va="center",
        fontsize=8, color=MUTED, annotation_clip=False,
    )  # fmt: skip
    taken: list[tuple[float, float]] = []
    total = axes.get_xlim()[1]
    for name, _, middle in sorted(_labels(spans), key=lambda label: -label[1]):
        half = (_CHARACTER * len(name) / 2 + 0.05) / _inches(axes)
        place = min(middle, total - half)
        if not any(place + half > low and place - half < high for low, high in taken):
            taken.append((place - half, place + half))
            axes.text(place, -0.35, name, ha="center", va="top", fontsize=8, color=INK, clip_on=False)


def _labels(spans: Sequence[Span]) -> list[tuple[str, float, float]]:
    """Returns a short name of each stretch, how long that lasts and its middle; neighbours of one name are one."""
    found: list[tuple[str, list[Span]]] = []
    for span in spans:
        words = span.name.split(".")
        fitting = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        name = max([text for text in fitting if len(text) <= _LABEL], key=len, default=_short(words[0], _LABEL))
        if found and f"{name}.".startswith(f"{found[-1][0]}."):
            found[-1][1].append(span)
        else:
            found.append((name, [span]))
    return [
        (name, sum(span.end - span.start for span in group), (group[0].start + group[-1].end) / 2)
        for name, group in found
    ]


def _inches(axes: Axes) -> float:
    """Returns inches of the picture per unit of time."""
    return (_RIGHT - _LEFT) * _WIDTH / max(axes.get_xlim()[1], 1e-9)


def _runs(timeline: Sequence[Moment], names: Sequence[str]) -> list[Span]:
    spans: list[Span] = []
    for moment, name in zip(timeline, names, strict=True):
        start = spans[-1].end if spans else 0.0
        if spans and spans[-1].name == name:
            start = spans.pop().start
        spans.append(Span(name, start, moment.ms))
    return spans


def _write_titles(figure: Figure, explanation: Explanation, profile: MemoryProfile) -> None:
    simulation = explanation.simulation
    device, capacity = profile.title or profile.name, profile.capacity_bytes
    title = f"One training step takes {_size(simulation.peak_bytes)}"
    title += f" on {device}" if capacity is None else f"; {device} has {_size(capacity)}"
    figure.text(_LEFT, 0.975, title, fontsize=11, fontweight="bold", color=INK, va="top")
    low, high = simulation.reserved_bytes
    facts = [f"taken from the device: {_size(low)}" + (f" to {_size(high)}" if high > low else "")]
    if simulation.step_ms is not None:
        facts.append(f"about {simulation.step_ms:,.0f} ms per step")
    figure.text(_LEFT, 0.93, "; ".join(facts), fontsize=8.5, color=MUTED, va="top")


def _colours(names: Sequence[str]) -> dict[str, str]:
    parts = [name for name in names if name not in _GREYS]
    return {name: _GREYS.get(name) or class_colour(parts.index(name)) for name in names}


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length // 2 - 1]}…{name[-(length - length // 2) :]}"


def _unit(peak_bytes: int) -> tuple[int, str]:
    return (GIB, "GiB") if peak_bytes >= GIB else (MIB, "MiB")


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
