"""`frontier.png`: what a step takes against how long it lasts, over all budgets, with the chosen plan and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from medckpt.report.curves import INK, LOSS_COLOUR, MUTED, VALIDATION_COLOUR, save_figure, spread_labels, style

GIB = 2**30
Pair = tuple[float, float]
_HALO = [withStroke(linewidth=3, foreground="white")]


def draw_frontier(
    plans: Sequence[Pair],
    chosen: Pair,
    others: Sequence[tuple[str, float, float]],
    path: Path,
    *,
    title: str,
    budget_bytes: int | None = None,
    budget_words: str = "",
) -> Figure:
    """Returns the picture and writes it as PNG.

    Args:
        plans: (peak bytes, milliseconds per step) of plans under rising budgets.
        chosen: the same of the plan that is taken.
        others: name, peak bytes and milliseconds of what the plans are compared with.
        path: the file.
        title: of the picture.
        budget_bytes: drawn as a line, with `budget_words` beside it.
    """
    figure = Figure(figsize=(8.0, 4.6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    style(axes)
    points = sorted(plans)
    axes.plot([p / GIB for p, _ in points], [ms for _, ms in points], color=LOSS_COLOUR, lw=1.6, marker="o", ms=4.5)
    first = min(points, key=lambda point: (point == chosen, point[0]))  # not where the chosen one has its own words
    axes.annotate(
        "medckpt, any budget", (first[0] / GIB, first[1]), (6, 8), textcoords="offset points", fontsize=8.5,
        color=LOSS_COLOUR, path_effects=_HALO,
    )  # fmt: skip
    top = 1.12 * max([ms for _, ms in points] + [ms for _, _, ms in others])
    # Names keep apart from one another, beside their marks.
    heights = spread_labels([ms for _, _, ms in others], 0.05 * top, 0.02 * top, 0.98 * top)
    for (name, peak, ms), height in zip(others, heights, strict=True):
        axes.plot(peak / GIB, ms, marker="s", ms=5, color=MUTED)
        axes.annotate(
            name, (peak / GIB, height), (8, 0), textcoords="offset points", va="center", fontsize=8.5, color=MUTED,
            path_effects=_HALO,
        )  # fmt: skip
    peak, ms = chosen
    axes.plot(peak / GIB, ms, marker="o", ms=10, mfc="none", mec=VALIDATION_COLOUR, mew=2)
    above = 10 if chosen == points[0] else -15  # off the line, which falls to the right
    axes.annotate(
        f"this plan: {peak / GIB:.2f} GiB, {ms:.0f} ms", (peak / GIB, ms), (9, above), textcoords="offset points",
        fontsize=9, fontweight="bold", color=VALIDATION_COLOUR, path_effects=_HALO,
    )  # fmt: skip
    highest = max([p for p, _ in points] + [p for _, p, _ in others])
    if budget_bytes is not None and budget_bytes <= 1.3 * highest:
        axes.axvline(budget_bytes / GIB, color=VALIDATION_COLOUR, lw=1, ls="--")
        axes.annotate(
            f"budget: {budget_words}", (budget_bytes / GIB, top), (4, -10), textcoords="offset points",
            fontsize=8.5, color=VALIDATION_COLOUR,
        )  # fmt: skip
    axes.set_xlim(0, 1.12 * highest / GIB)
    axes.set_ylim(0, top)
    axes.set_xlabel("peak memory (GiB)", fontsize=9, color=MUTED)
    axes.set_ylabel("milliseconds per step", fontsize=9, color=MUTED)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    save_figure(figure, path)
    return figure
