"""One picture per case: the scan, the reference and the prediction on the three planes through the labelled organs.

Drawn in radiological convention: the patient's right is on the left of axial and coronal pictures, anterior is up in
axial pictures and left in sagittal ones, superior is up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from medckpt.errors import ConfigError, DataError
from medckpt.report.curves import INK, MUTED, class_colour, save_figure
from medckpt.training.metrics import checked_spacing, class_boxes, dice_per_class, label_map

FILL_ALPHA = 0.32
SCALE_BARS_MM = (50.0, 10.0, 5.0, 1.0)
MAX_SIZE_INCHES = (9.6, 13.0)
LEGEND_ENTRIES = 24
MARGIN = 0.12
"""Inches left and right of the panels."""
LEGEND_ROW = 0.22
"""Inches from one legend row to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """How one anatomical plane is cut from an RAS volume and laid on the page."""

    name: str
    axis: int
    """The array axis that the plane is normal to."""
    across: int
    """The array axis that runs along the picture's width, drawn from high index (left) to low (right)."""
    up: int
    """The array axis that runs along the picture's height, high index at the top."""
    marks: tuple[str, str, str, str]
    """Letters at the left, right, top and bottom edge."""


PLANES = (
    Plane(name="axial", axis=2, across=0, up=1, marks=("R", "L", "A", "P")),
    Plane(name="coronal", axis=1, across=0, up=2, marks=("R", "L", "S", "I")),
    Plane(name="sagittal", axis=0, across=1, up=2, marks=("A", "P", "S", "I")),
)


def draw_overlay(
    image: npt.ArrayLike,
    reference: npt.ArrayLike | None,
    prediction: npt.ArrayLike,
    spacing_mm: Sequence[float],
    classes: Mapping[str, int],
    window: tuple[float, float] | None,
    title: str,
    out: Path,
    *,
    heading: str = "prediction",
) -> None:
    """Draws scan, reference (if there is one) and prediction side by side into one PNG.

    Args:
        image: Scan (X, Y, Z) in RAS order: index along X grows towards the patient's right, Y anterior, Z superior.
        reference: Integer label map on the same grid, or None; with it the legend gives Dice per class.
        prediction: Integer label map on the same grid.
        spacing_mm: Distance between voxel centres along X, Y, Z in mm.
        classes: Label value by class name; a class's place in this order decides its colour. Value 0 is left out.
        window: Lower and upper end of the grey scale in HU, or None for the 0.5 and 99.5 percentiles of the scan.
        title: Headline, usually the case name.
        out: The PNG to write.
        heading: What stands above the prediction.

    Raises:
        DataError: The arrays differ in shape, are not of three axes, or a label map does not hold whole numbers.
        GeometryError: The spacing is not three positive numbers.
        ConfigError: The window's lower end is not below its upper end, or a class has a negative label value.
    """
    scan, labels = _checked(image, reference, prediction, title)
    spacing = checked_spacing(spacing_mm, title)
    grey_scale = _grey_scale(scan, window, title)
    found = [choose_positions(array, classes) for array in labels.values()]
    positions = next((each for each in found if each), tuple(size // 2 for size in scan.shape))
    foreground = [name for name, value in classes.items() if value != 0]
    colours = {classes[name]: class_colour(index) for index, name in enumerate(foreground)}
    dice = dice_per_class(prediction, reference, classes) if reference is not None else None
    shown = [name for name, box in class_boxes(list(labels.values()), classes).items() if box is not None]
    legend = _legend(shown, classes, colours, dice)

    figure, panels = _lay_out(scan.shape, spacing, len(labels) + 1, legend)
    for plane, row in zip(PLANES, panels, strict=True):
        grey = cut(scan, plane, positions)
        for axes, name in zip(row, ["image", *labels], strict=True):
            _draw_grey(axes, grey, plane, spacing, grey_scale)
            if name in labels:
                _draw_labels(axes, cut(labels[name], plane, positions), plane, spacing, colours)
            _draw_marks(axes, plane)
            if plane is PLANES[0]:
                axes.set_title(heading if name == "prediction" else name, fontsize=9.5, color=INK, pad=5)
        _draw_corner(row[0], f"{plane.name} {positions[plane.axis] + 1}/{scan.shape[plane.axis]}")
        _draw_scale_bar(row[0], scan.shape, spacing)
    _draw_headline(figure, title, grey_scale, dice)
    _draw_legend(figure, legend)
    save_figure(figure, out)


def cut(volume: npt.NDArray[Any], plane: Plane, positions: Sequence[int]) -> npt.NDArray[Any]:
    """Returns the slice of `plane` as a picture (rows from the top, columns from the left) of an RAS volume."""
    slab = volume.take(positions[plane.axis], axis=plane.axis)
    # Of the two axes left, `across` always comes first: rows must be `up`, and both run from high index to low.
    return slab.T[::-1, ::-1]


def choose_positions(labels: npt.NDArray[Any], classes: Mapping[str, int]) -> tuple[int, int, int] | None:
    """Returns for each axis the index of the slice that shows most of the classes; None where no class is present.

    A class counts by the square root of its area in the slice over its largest area in any (its width, so to say): a
    slice that cuts every organ near its middle wins over one that grazes more of them.
    """
    shown = [np.zeros(size) for size in labels.shape]
    found = False
    for name, box in class_boxes([labels], classes).items():
        if box is None:
            continue
        found = True
        mask = labels[box] == classes[name]
        for axis in range(3):
            area = mask.sum(axis=tuple(k for k in range(3) if k != axis))
            shown[axis][box[axis]] += np.sqrt(area / area.max())
    if not found:
        return None
    first, second, third = (_middle_of_best(score) for score in shown)
    return first, second, third


def _middle_of_best(score: npt.NDArray[np.float64]) -> int:
    """Returns the index of the highest score; of equal ones, as in an organ with straight walls, the middle one."""
    best = np.flatnonzero(score > score.max() - 1e-9)
    return int(best[best.size // 2])


def _checked(
    image: npt.ArrayLike, reference: npt.ArrayLike | None, prediction: npt.ArrayLike, title: str
) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
    """Returns the scan and the label maps to draw beside it, all of one shape (X, Y, Z)."""
    scan = np.asarray(image)
    if scan.ndim != 3:
        raise DataError(f"{title}: the image has shape {scan.shape}. It needs three axes (X, Y, Z).")
    given = {"reference": reference, "prediction": prediction}
    labels = {name: label_map(array, f"{title}: {name}") for name, array in given.items() if array is not None}
    for name, array in labels.items():
        if scan.shape != array.shape:
            raise DataError(f"{title}: {name} has shape {array.shape}, the image {scan.shape}. Both need one grid.")
    return scan, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class _GreyScale:
    low: float
    high: float
    text: str


def _grey_scale(scan: npt.NDArray[Any], window: tuple[float, float] | None, title: str) -> _GreyScale:
    """Returns the values drawn black and white, and how the picture says so."""
    if window is not None:
        low, high = float(window[0]), float(window[1])
        if not low < high:
            raise ConfigError(
                f"{title}: window ({low:g}, {high:g}). It is (lower, upper) end in HU, the lower below the upper."
            )
        return _GreyScale(low=low, high=high, text=f"W {high - low:g} L {(low + high) / 2:g} HU")
    step = max(1, scan.size // 4_000_000)  # percentiles of a regular sample: sorting 10^8 voxels takes seconds
    sample = scan.reshape(-1)[::step].astype(np.float64)
    sample = sample[np.isfinite(sample)]
    low, high = (float(value) for value in np.percentile(sample, [0.5, 99.5])) if sample.size else (0.0, 1.0)
    text = f"grey scale: 0.5 to 99.5 percentile ({low:.4g} to {high:.4g})"
    return _GreyScale(low=low, high=high if high > low else low + 1.0, text=text)


def _lay_out(
    shape: Sequence[int], spacing: Sequence[float], columns: int, legend: _Legend
) -> tuple[Figure, list[list[Axes]]]:
    """Returns a figure with one panel per plane and column, all at one scale in mm per inch.

    Panels are as wide as the widest plane, and no thinner than the marks need.
    """
    size = [count * step for count, step in zip(shape, spacing, strict=True)]
    width_mm = max(size[plane.across] for plane in PLANES)
    heights_mm = [size[plane.up] for plane in PLANES]
    inches = min(MAX_SIZE_INCHES[0] / (columns * width_mm), MAX_SIZE_INCHES[1] / sum(heights_mm), 3.6 / width_mm)
    panel_width = max(width_mm * inches, 1.5)
    panel_heights = [max(height * inches, 0.9) for height in heights_mm]
    gap, head = 0.06, 0.82
    width = 2 * MARGIN + columns * panel_width + (columns - 1) * gap
    height = head + sum(panel_heights) + 2 * gap + legend.height(width)
    figure = Figure(figsize=(width, height), facecolor="white")
    panels: list[list[Axes]] = []
    top = height - head
    for panel_height in panel_heights:
        top -= panel_height
        row = []
        for column in range(columns):
            left = MARGIN + column * (panel_width + gap)
            axes = figure.add_axes((left / width, top / height, panel_width / width, panel_height / height))
            # Pictures are centred at the origin, in mm; limits wider than a picture leave black around it.
            axes.set(xlim=_around_zero(panel_width / inches), ylim=_around_zero(panel_height / inches))
            axes.set(facecolor="black", xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            row.append(axes)
        panels.append(row)
        top -= gap
    return figure, panels


def _around_zero(length: float) -> tuple[float, float]:
    return -length / 2, length / 2


def _extent(picture: npt.NDArray[Any], plane: Plane, spacing: Sequence[float]) -> tuple[float, float, float, float]:
    """Returns left, right, bottom, top of a picture centred at the origin, in mm."""
    rows, columns = picture.shape
    return (*_around_zero(columns * spacing[plane.across]), *_around_zero(rows * spacing[plane.up]))


def _draw_grey(axes: Axes, grey: npt.NDArray[Any], plane: Plane, spacing: Sequence[float], scale: _GreyScale) -> None:
    axes.imshow(
        np.nan_to_num(grey.astype(np.float32), nan=scale.low), cmap="gray", vmin=scale.low, vmax=scale.high,
        extent=_extent(grey, plane, spacing), interpolation="bilinear", aspect="auto",
    )  # fmt: skip


def _draw_labels(
    axes: Axes, labels: npt.NDArray[Any], plane: Plane, spacing: Sequence[float], colours: Mapping[int, str]
) -> None:
    left, right, bottom, top = _extent(labels, plane, spacing)
    fill = np.zeros((*labels.shape, 4), np.float32)
    present = [int(value) for value in np.unique(labels) if int(value) in colours]
    for value in present:
        fill[labels == value] = to_rgba(colours[value], FILL_ALPHA)
    axes.imshow(fill, extent=(left, right, bottom, top), interpolation="nearest", aspect="auto")
    for value in present:
        # Boundaries follow the voxel edges, so that what is drawn is what was labelled.
        xs, ys = voxel_outline(labels == value)
        axes.plot(
            left + (right - left) * xs / labels.shape[1], top - (top - bottom) * ys / labels.shape[0],
            color=colours[value], lw=1.1, solid_capstyle="projecting", scalex=False, scaley=False,
        )  # fmt: skip


def voxel_outline(mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns the voxel edges around a 2D mask as one line broken by NaN: x (columns) and y (rows), in voxels."""
    padded = np.pad(mask, 1).astype(np.int8)
    rows, columns = np.nonzero(np.diff(padded[:, 1:-1], axis=0))
    level_x, level_y = np.stack([columns, columns + 1], axis=1), np.stack([rows, rows], axis=1)
    rows, columns = np.nonzero(np.diff(padded[1:-1, :], axis=1))
    upright_x, upright_y = np.stack([columns, columns], axis=1), np.stack([rows, rows + 1], axis=1)
    xs, ys = np.concatenate([level_x, upright_x]), np.concatenate([level_y, upright_y])
    gap = np.full((len(xs), 1), np.nan)
    return np.hstack([xs, gap]).ravel(), np.hstack([ys, gap]).ravel()


def _draw_marks(axes: Axes, plane: Plane) -> None:
    left, right, top, bottom = plane.marks
    _write(axes, 0.015, 0.5, left, ha="left", va="center")
    _write(axes, 0.985, 0.5, right, ha="right", va="center")
    _write(axes, 0.5, 0.985, top, ha="center", va="top")
    _write(axes, 0.5, 0.015, bottom, ha="center", va="bottom")


def _draw_corner(axes: Axes, text: str) -> None:
    _write(axes, 0.015, 0.985, text, ha="left", va="top", fontsize=7.5)


def _write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Writes white on a dark halo, to be read on air and on bone."""
    halo = [withStroke(linewidth=2, foreground="#000000b0")]
    style = {"fontsize": 8.5, "color": "white", **style}
    axes.text(x, y, text, transform=axes.transAxes, path_effects=halo, **style)


def _draw_scale_bar(axes: Axes, shape: Sequence[int], spacing: Sequence[float]) -> None:
    """Draws the longest of 5 cm, 1 cm, 5 mm, 1 mm that takes less than 0.45 of the narrowest picture."""
    narrowest = min(shape[plane.across] * spacing[plane.across] for plane in PLANES)
    length = next((bar for bar in SCALE_BARS_MM if bar <= 0.45 * narrowest), SCALE_BARS_MM[-1])
    (left, right), inches = axes.get_xlim(), axes.get_window_extent().height / axes.figure.dpi
    start, end = 0.03, 0.03 + length / (right - left)
    height = 0.13 / inches
    halo = [withStroke(linewidth=3.5, foreground="#000000b0")]
    bar = Line2D(
        [start, end], [height, height], color="white", lw=2, solid_capstyle="butt", transform=axes.transAxes,
        path_effects=halo,
    )  # fmt: skip
    axes.add_artist(bar)
    text = f"{length / 10:g} cm" if length >= 10 else f"{length:g} mm"
    _write(axes, start, height + 0.05 / inches, text, ha="left", va="bottom", fontsize=7.5)


def _draw_headline(figure: Figure, title: str, scale: _GreyScale, dice: Mapping[str, float | None] | None) -> None:
    width, height = figure.get_size_inches()
    counted = [value for value in (dice or {}).values() if value is not None]
    second = f"mean Dice {np.mean(counted):.3f}   {scale.text}" if counted else scale.text
    x = MARGIN / width
    figure.text(x, 1 - 0.1 / height, title, fontsize=12, fontweight="bold", color=INK, va="top", parse_math=False)
    figure.text(x, 1 - 0.36 / height, second, fontsize=8.5, color=MUTED, va="top")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Legend:
    entries: tuple[tuple[str, str], ...]
    """Text and colour of each entry."""
    note: str

    def per_row(self, width: float) -> int:
        """Returns how many entries fit side by side on a figure `width` inches wide."""
        longest = max((len(text) for text, _ in self.entries), default=1)
        return max(1, int((width - 2 * MARGIN) / (0.35 + 0.068 * longest)))

    def height(self, width: float) -> float:
        """Returns the inches that the legend takes below the panels."""
        rows = -(-len(self.entries) // self.per_row(width))
        return 0.16 + LEGEND_ROW * (rows + bool(self.note))


def _legend(
    names: Sequence[str],
    classes: Mapping[str, int],
    colours: Mapping[int, str],
    dice: Mapping[str, float | None] | None,
) -> _Legend:
    """Lists the classes that are in the picture's volume, with their Dice; the lowest ones where there are too many."""
    listed, note = list(names), "" if names else "no labelled voxels"
    if len(names) > LEGEND_ENTRIES:
        listed = sorted(names, key=lambda name: (dice or {}).get(name) or 0.0)[:LEGEND_ENTRIES]
        note = f"{LEGEND_ENTRIES} of {len(names)} classes listed" + (", lowest Dice first" if dice else "")
    entries = []
    for name in listed:
        short = name if len(name) <= 34 else f"{name[:16]}…{name[-16:]}"
        score = dice.get(name) if dice else None
        entries.append((short if score is None else f"{short} {score:.2f}", colours[classes[name]]))
    return _Legend(entries=tuple(entries), note=note)


def _draw_legend(figure: Figure, legend: _Legend) -> None:
    width, height = figure.get_size_inches()
    per_row = legend.per_row(width)
    cell = (width - 2 * MARGIN) / per_row
    top = legend.height(width) - 0.28
    for index, (text, colour) in enumerate(legend.entries):
        x, y = MARGIN + cell * (index % per_row), top - LEGEND_ROW * (index // per_row)
        swatch = Rectangle(
            (x / width, y / height), 0.13 / width, 0.13 / height, transform=figure.transFigure,
            facecolor=to_rgba(colour, 0.6), edgecolor=colour, lw=1.1,
        )  # fmt: skip
        figure.add_artist(swatch)
        place = (x + 0.19) / width, (y + 0.065) / height
        figure.text(*place, text, fontsize=8, color=INK, va="center_baseline", parse_math=False)
    figure.text(MARGIN / width, 0.1 / height, legend.note, fontsize=8, color=MUTED, va="bottom")
