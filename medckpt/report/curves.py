"""`curves.png`: how a run learned, drawn from its `metrics.csv`. Also the class colours and the way figures are saved.

Figures are `matplotlib.figure.Figure` objects saved through the Agg canvas: no pyplot, no global state, no display.
"""

from __future__ import annotations

import colorsys
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from medckpt.errors import DataError
from medckpt.files import write_atomic

INK = "#1c2024"
MUTED = "#6b7280"
GRID = "#e5e7eb"
LOSS_COLOUR = "#0072B2"
VALIDATION_COLOUR = "#D55E00"
NAMED_CURVES = 12
"""With more classes than this, curves turn grey and only the lowest ones are named."""

# Okabe and Ito 2008 (colour-blind safe) without black and with a darker yellow, so that the same colour reads on a
# white page and on a grey scan; five more hues follow, then lighter and darker shades of all of them.
_HUES = (
    "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#2F7FD1", "#C8B400", "#8B6BD9", "#6FBF3A", "#B0703C",
    "#00B5BF", "#E0389A",
)  # fmt: skip

Columns = dict[str, npt.NDArray[np.float64]]


def class_colour(index: int) -> str:
    """Returns the colour of the class at position `index` (from 0) of the run's class list, as `#rrggbb`.

    The same position has the same colour in every picture of a run. Hues repeat after 12 classes in a lighter, then a
    darker shade; whole colours repeat after 36.
    """
    red, green, blue = to_rgb(_HUES[index % len(_HUES)])
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    lightness = (lightness, 0.5 + 0.62 * lightness, 0.58 * lightness)[index // len(_HUES) % 3]
    shade = colorsys.hls_to_rgb(hue, min(lightness, 0.88), saturation)
    return to_hex(shade)


def save_figure(figure: Figure, out: Path, dpi: int = 150) -> None:
    """Saves a figure as PNG, atomically."""
    write_atomic(out, lambda stream: figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None}))


def read_metrics_csv(path: Path) -> Columns:
    """Returns the columns of a run's `metrics.csv` as float64 arrays of one length; blank or unreadable cells are NaN.

    Raises:
        DataError: The file does not exist or has no `step` column.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file. A run writes metrics.csv with its first logged step.")
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        names = [name for name in reader.fieldnames or [] if name]
        if "step" not in names:
            raise DataError(
                f"{path}: has the columns {', '.join(names) or 'none'}, but no `step`. The header must be "
                "step,minutes,lr,loss,val_loss,dice_mean,dice_<class>..."
            )
        rows = list(reader)
    columns = {name: np.array([_number(row.get(name)) for row in rows], dtype=np.float64) for name in names}
    known = np.isfinite(columns["step"])
    return {name: values[known] for name, values in columns.items()}


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draws loss, learning rate and validation Dice of a run into one PNG.

    Args:
        metrics_csv: Header `step,minutes,lr,loss,val_loss,dice_mean,dice_<class>...`; blank where not measured.
        out: The PNG to write.

    Raises:
        DataError: `metrics_csv` does not exist or has no `step` column.
    """
    columns = read_metrics_csv(metrics_csv)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(11.6, 5.2), facecolor="white", layout=layout)
    grid = figure.add_gridspec(2, 2, height_ratios=[5, 1], width_ratios=[1, 1.12])
    loss = figure.add_subplot(grid[0, 0])
    rate = figure.add_subplot(grid[1, 0], sharex=loss)
    dice = figure.add_subplot(grid[:, 1])
    for axes in (loss, rate, dice):
        style(axes)
    _draw_loss(loss, columns)
    _draw_rate(rate, columns)
    _draw_dice(dice, columns)
    _step_axis((rate, dice), columns)
    loss.tick_params(labelbottom=False)
    save_figure(figure, out)


def smooth(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
    """Returns `values` (no NaN) after a Gaussian, and its sigma in rows: 1/60 of the curve, at least 1, at most 50.

    At the ends the weights are those of the rows that exist, so the curve neither lags nor bends to a made-up value.
    """
    from scipy.ndimage import gaussian_filter1d

    sigma = float(np.clip(values.size / 60, 1.0, 50.0))
    weights = gaussian_filter1d(np.ones(values.size), sigma, mode="constant")
    return gaussian_filter1d(values, sigma, mode="constant") / weights, sigma


def spread_labels(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns `heights` moved as little as possible (least squares) to be `gap` apart within low..high, in their order.

    Where they cannot all fit, the gap shrinks to what does. The method is isotonic regression by pooling neighbours
    (Barlow et al. 1972) of the heights less the gaps below them.
    """
    order = sorted(range(len(heights)), key=lambda k: heights[k])
    gap = min(gap, (high - low) / max(len(heights) - 1, 1))
    pools: list[tuple[float, int]] = []
    for rank, k in enumerate(order):
        mean, size = heights[k] - rank * gap, 1
        while pools and pools[-1][0] > mean:
            below, count = pools.pop()
            mean, size = (mean * size + below * count) / (size + count), size + count
        pools.append((mean, size))
    ceiling = high - gap * max(len(heights) - 1, 0)
    bases = [min(max(mean, low), ceiling) for mean, size in pools for _ in range(size)]
    places = {k: base + rank * gap for rank, (k, base) in enumerate(zip(order, bases, strict=True))}
    return [places[k] for k in range(len(heights))]


def _draw_loss(axes: Axes, columns: Columns) -> None:
    axes.set_title("Loss", loc="left", fontsize=11, fontweight="bold", color=INK)
    steps, values = _measured(columns, "loss")
    val_steps, val_values = _measured(columns, "val_loss")
    if not values.size and not val_values.size:
        _note(axes, "No loss logged yet")
        return
    few = values.size < 8
    axes.plot(
        steps, values, color=LOSS_COLOUR, lw=1.2 if few else 0.7, alpha=1 if few else 0.28,
        marker="o" if few else None, ms=4, label="training" if few else "_raw",
    )  # fmt: skip
    if not few:
        curve, sigma = smooth(values)
        axes.plot(
            steps, curve, color=LOSS_COLOUR, lw=1.8, label=f"training, smoothed (Gaussian, sigma {sigma:.0f} rows)"
        )
    if val_values.size:
        axes.plot(val_steps, val_values, color=VALIDATION_COLOUR, lw=1.4, marker="o", ms=3.5, label="validation")
    every = np.concatenate([values, val_values])
    if every.min() > 0 and every.max() > 30 * every.min():
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper right")


def _draw_rate(axes: Axes, columns: Columns) -> None:
    steps, values = _measured(columns, "lr")
    axes.set_ylabel("learning\nrate", fontsize=8.5, color=MUTED, rotation=0, ha="right", va="center")
    axes.plot(steps, values, color=INK, lw=1.2, marker="o" if steps.size == 1 else None, ms=4)
    if values.size:
        top = float(values.max())
        axes.set_ylim(0, 1.15 * top if top > 0 else 1)
        axes.set_yticks([0, top] if top > 0 else [0], ["0", f"{top:.1e}".replace("e-0", "e-")] if top > 0 else ["0"])
    else:
        axes.set_yticks([])


def _draw_dice(axes: Axes, columns: Columns) -> None:
    axes.set_title("Validation Dice", loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    names = [name.removeprefix("dice_") for name in columns if name.startswith("dice_") and name != "dice_mean"]
    curves = {name: _measured(columns, f"dice_{name}") for name in names}
    curves = {name: curve for name, curve in curves.items() if curve[0].size}
    mean = _measured(columns, "dice_mean")
    if not curves and not mean[0].size:
        _note(axes, "No validation yet")
        return
    last = {name: float(curve[1][-1]) for name, curve in curves.items()}
    crowded = len(curves) > NAMED_CURVES
    lowest = set(sorted(last, key=lambda name: last[name])[:5])
    labels: list[tuple[float, float, str, str]] = []
    for index, name in enumerate(names):
        if name not in curves:
            continue
        grey = crowded and name not in lowest
        colour = "#c4c9d0" if grey else _at_most(class_colour(index), 0.62)
        _line(axes, curves[name], colour, width=0.8 if grey else 1.6)
        if not grey:
            labels.append((float(curves[name][0][-1]), last[name], f"{name} {last[name]:.2f}", colour))
    if mean[0].size:
        _line(axes, mean, INK, width=2.4)
        labels.append((float(mean[0][-1]), float(mean[1][-1]), f"mean {mean[1][-1]:.3f}", INK))
    _label_ends(axes, labels)
    if crowded:
        note = f"{len(curves)} classes; the {len(lowest)} lowest are named"
        axes.text(1, 1.02, note, transform=axes.transAxes, fontsize=8.5, color=MUTED, ha="right")


def _label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes each label beside the end of its curve, moved up or down where two would overlap."""
    places = spread_labels([label[1] for label in labels], gap=0.045, low=0.012, high=0.988)
    leader = {"arrowstyle": "-", "lw": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
    for (step, height, text, colour), place in zip(labels, places, strict=True):
        axes.annotate(
            text if len(text) <= 34 else f"{text[:24]}… {text.rsplit(' ', 1)[1]}",
            xy=(step, height), xytext=(1.025, place), textcoords="axes fraction",
            va="center", ha="left", fontsize=8.5, color=_at_most(colour, 0.36),
            fontweight="bold" if colour == INK else "normal", annotation_clip=False,
            arrowprops={**leader, "color": colour},
        )  # fmt: skip


def _line(
    axes: Axes, curve: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]], colour: str, width: float
) -> None:
    marker = "o" if (curve[0].size <= 20 and width > 1) or curve[0].size == 1 else None
    axes.plot(*curve, color=colour, lw=width, marker=marker, ms=1.6 + width, solid_capstyle="round", clip_on=False)


def _step_axis(axes: Sequence[Axes], columns: Columns) -> None:
    """Ticks at round steps, the time since the start under each where it is known."""
    steps = columns["step"]
    first, last = (float(steps.min()), float(steps.max())) if steps.size else (0.0, 1.0)
    pad = 0.015 * (last - first) if last > first else 1.0
    timed, minutes = _measured(columns, "minutes")

    def label(step: float, _position: int | None = None) -> str:
        if not timed.size or not timed[0] <= step <= timed[-1]:
            return f"{step:,.0f}"
        return f"{step:,.0f}\n{duration(float(np.interp(step, timed, minutes)))}"

    for each in axes:
        each.set_xlim(first - pad, last + pad)
        each.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
        each.xaxis.set_major_formatter(FuncFormatter(label))
        each.set_xlabel("step, and time since the start" if timed.size else "step", fontsize=8.5, color=MUTED)


def duration(minutes: float) -> str:
    """Returns minutes as a person reads them: `40 s`, `7.5 min`, `3 h 05 min`."""
    if minutes < 1:
        return f"{60 * minutes:.0f} s"
    if minutes < 9.95:
        return f"{minutes:.1f} min".replace(".0 ", " ")
    hours, rest = divmod(round(minutes), 60)
    return f"{hours} h {rest:02d} min" if hours else f"{rest} min"


def _measured(columns: Columns, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns steps and finite values of one column in the order of steps; both empty if there is no such column.

    A resumed run repeats the steps after its last saved weights: of equal steps the row written last counts.
    """
    values = columns.get(name, np.full(columns["step"].shape, np.nan))
    latest = {
        step: value for step, value in zip(columns["step"].tolist(), values.tolist(), strict=True) if np.isfinite(value)
    }
    steps = sorted(latest)
    return np.array(steps), np.array([latest[step] for step in steps])


def style(axes: Axes) -> None:
    """Gives axes the look of every plot in a report: a faint grid and no frame."""
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")
    axes.tick_params(colors=MUTED, labelsize=8.5, length=3)
    axes.tick_params(axis="y", length=0)


def _note(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=10, color=MUTED)
    axes.set_yticks([])


def _at_most(colour: str, lightness: float) -> str:
    """Returns a colour no lighter than `lightness` (0..1, HLS), to stand out on white."""
    hue, own, saturation = colorsys.rgb_to_hls(*to_rgb(colour))
    return to_hex(colorsys.hls_to_rgb(hue, min(own, lightness), saturation))


def _number(cell: str | None) -> float:
    try:
        return float(cell) if cell else float("nan")
    except ValueError:
        return float("nan")
