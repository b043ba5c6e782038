"""How a segmentation is scored: Dice per class, and surface distances in millimetres.

Surfaces are the voxels that a 6-connected erosion removes; a distance runs between voxel centres, from each surface
voxel of one mask to the nearest one of the other. The surface distance is the mean over both surfaces (symmetric
average surface distance), the 95 % Hausdorff distance the larger of the two directed 95th percentiles: the
definitions of MONAI's `compute_average_surface_distance(symmetric=True)` and `compute_hausdorff_distance`, whose
building blocks are used here so that both come out of one search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from medckpt.errors import ConfigError, DataError, GeometryError

ABSENT_CLASS_RULE = (
    "A class absent from both reference and prediction is not counted for that case; absent from one of the two it "
    "counts as Dice 0, and has no surface distance."
)

Box = tuple[slice, slice, slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseScore:
    """The scores of one case, by class name; None where the class is not counted or a distance does not exist."""

    case: str
    dice: dict[str, float | None]
    surface_distance_mm: dict[str, float | None]
    hausdorff95_mm: dict[str, float | None]
    reference_voxels: dict[str, int]
    predicted_voxels: dict[str, int]


def dice_score(predicted_voxels: int, reference_voxels: int, shared_voxels: int) -> float | None:
    """Returns 2 |P and R| / (|P| + |R|), 0..1; None if both masks are empty."""
    both = predicted_voxels + reference_voxels
    return 2.0 * shared_voxels / both if both else None


def dice_per_class(
    prediction: npt.ArrayLike, reference: npt.ArrayLike, classes: Mapping[str, int]
) -> dict[str, float | None]:
    """Returns Dice by class name (None where the class is in neither), without the surface distances.

    Arguments and errors as in `score_case`.
    """
    predicted, expected = label_map(prediction, "prediction"), label_map(reference, "reference")
    _same_shape("reference and prediction", predicted, expected)
    boxes = class_boxes([predicted, expected], classes)
    return {name: _overlap(predicted, expected, classes[name], box)[0] for name, box in boxes.items()}


def score_case(
    case: str,
    prediction: npt.ArrayLike,
    reference: npt.ArrayLike,
    spacing_mm: Sequence[float],
    classes: Mapping[str, int],
) -> CaseScore:
    """Scores one predicted label map against its reference.

    Args:
        case: Name of the case, used in messages.
        prediction: Label map (X, Y, Z), any integer type or bool.
        reference: Label map on the same grid.
        spacing_mm: Distance between voxel centres along X, Y, Z in mm.
        classes: Label value by class name. Value 0 is background and not scored; voxels of other values are ignored.

    Raises:
        DataError: The arrays are not integer label maps of three axes, or their shapes differ.
        GeometryError: The spacing is not three positive numbers.
        ConfigError: A class has a negative label value.
    """
    predicted = label_map(prediction, f"case {case}: prediction")
    expected = label_map(reference, f"case {case}: reference")
    _same_shape(f"case {case}: reference and prediction", predicted, expected)
    spacing = checked_spacing(spacing_mm, f"case {case}")
    dice: dict[str, float | None] = {}
    mean: dict[str, float | None] = {}
    hausdorff: dict[str, float | None] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for name, box in class_boxes([predicted, expected], classes).items():
        dice[name], ours, theirs = _overlap(predicted, expected, classes[name], box)
        sizes[name] = ours, theirs
        mean[name] = hausdorff[name] = None
        if box is not None and ours and theirs:
            masks = predicted[box] == classes[name], expected[box] == classes[name]
            mean[name], hausdorff[name] = surface_distances(*masks, spacing)
    return CaseScore(
        case=case,
        dice=dice,
        surface_distance_mm=mean,
        hausdorff95_mm=hausdorff,
        predicted_voxels={name: size[0] for name, size in sizes.items()},
        reference_voxels={name: size[1] for name, size in sizes.items()},
    )


def surface_distances(
    prediction: npt.NDArray[np.bool_], reference: npt.NDArray[np.bool_], spacing_mm: Sequence[float]
) -> tuple[float, float]:
    """Returns the symmetric average surface distance and the 95 % Hausdorff distance, both in mm.

    `prediction` and `reference` are bool masks (X, Y, Z), neither of them empty. A voxel at the border of the array
    is a surface voxel, as if background lay beyond it.
    """
    from monai.metrics.utils import get_mask_edges, get_surface_distance

    # The caller has cropped already, and erosion takes what lies outside the array as background: no margin needed.
    edges = get_mask_edges(prediction, reference, crop=False)
    there = np.asarray(get_surface_distance(edges[0], edges[1], spacing=spacing_mm), dtype=np.float64)
    back = np.asarray(get_surface_distance(edges[1], edges[0], spacing=spacing_mm), dtype=np.float64)
    mean = (there.sum() + back.sum()) / (there.size + back.size)
    return float(mean), float(max(np.percentile(there, 95), np.percentile(back, 95)))


def summarize(scores: Sequence[CaseScore]) -> dict[str, Any]:
    """Returns the scores of a set of cases as plain JSON values, the body of a run's `metrics.json`.

    `dice_per_class` is the mean over the cases in which the class is counted, `dice_mean` the mean of those class
    means (classes without a counted case left out); distances are means over the cases that have one. None stands
    where there is nothing to average.

    Raises:
        DataError: Two scores carry the same case name.
    """
    names = [score.case for score in scores]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise DataError(f"case {twice[0]}: scored more than once. Case names must be unique within one evaluation.")
    classes = list(dict.fromkeys(name for score in scores for name in score.dice))
    dice = {name: [score.dice.get(name) for score in scores] for name in classes}
    per_class = {name: _mean(values) for name, values in dice.items()}
    return {
        "dice_mean": _mean(per_class.values()),
        "dice_per_class": per_class,
        "cases_per_class": {name: sum(value is not None for value in values) for name, values in dice.items()},
        "surface_distance_mm_per_class": {
            name: _mean(score.surface_distance_mm.get(name) for score in scores) for name in classes
        },
        "hausdorff95_mm_per_class": {
            name: _mean(score.hausdorff95_mm.get(name) for score in scores) for name in classes
        },
        "cases": {
            score.case: {
                "dice": dict(score.dice),
                "surface_distance_mm": dict(score.surface_distance_mm),
                "hausdorff95_mm": dict(score.hausdorff95_mm),
                "reference_voxels": dict(score.reference_voxels),
                "predicted_voxels": dict(score.predicted_voxels),
            }
            for score in scores
        },
        "rule": ABSENT_CLASS_RULE,
    }


def label_map(values: npt.ArrayLike, what: str) -> npt.NDArray[Any]:
    """Returns `values` as an integer array (X, Y, Z); `what` names it in the message of the DataError otherwise."""
    array = np.asarray(values)
    if array.ndim != 3:
        raise DataError(f"{what}: has shape {array.shape}. A label map has three axes (X, Y, Z).")
    if array.dtype == np.bool_:
        return array.view(np.uint8)
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"{what}: holds {array.dtype} values. A label map holds whole numbers: round probabilities or take their "
            "argmax first."
        )
    return array


def checked_spacing(spacing_mm: Sequence[float], what: str) -> tuple[float, float, float]:
    """Returns the spacing as three floats in mm; `what` names the place in the GeometryError otherwise."""
    spacing = tuple(float(value) for value in spacing_mm)
    if len(spacing) != 3 or not all(np.isfinite(value) and value > 0 for value in spacing):
        raise GeometryError(f"{what}: spacing {spacing} mm. It must be three positive numbers, along X, Y and Z.")
    return spacing


def class_boxes(maps: Sequence[npt.NDArray[Any]], classes: Mapping[str, int]) -> dict[str, Box | None]:
    """Returns by class name the smallest box that holds the class in every map; None where no map has it.

    Background (value 0) is left out. One pass over each map serves all classes.
    """
    from scipy import ndimage

    negative = [name for name, value in classes.items() if value < 0]
    if negative:
        raise ConfigError(f"class {negative[0]!r}: label value {classes[negative[0]]}. Label values start at 0.")
    wanted = {name: int(value) for name, value in classes.items() if value != 0}
    if not wanted:
        return {}
    found = [ndimage.find_objects(array, max_label=max(wanted.values())) for array in maps]
    return {
        name: _union([boxes[value - 1] for boxes in found if boxes[value - 1] is not None])
        for name, value in wanted.items()
    }


def _union(boxes: Sequence[Box]) -> Box | None:
    if not boxes:
        return None
    first, second, third = (
        slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in zip(*boxes, strict=True)
    )
    return first, second, third


def _overlap(
    predicted: npt.NDArray[Any], expected: npt.NDArray[Any], value: int, box: Box | None
) -> tuple[float | None, int, int]:
    """Returns Dice and the voxel counts of prediction and reference for one label value."""
    if box is None:
        return None, 0, 0
    ours, theirs = predicted[box] == value, expected[box] == value
    sizes = int(np.count_nonzero(ours)), int(np.count_nonzero(theirs))
    return dice_score(*sizes, int(np.count_nonzero(ours & theirs))), *sizes


def _same_shape(what: str, predicted: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    if predicted.shape != expected.shape:
        raise DataError(
            f"{what}: shapes {expected.shape} and {predicted.shape} differ. Both must lie on the same grid; resample "
            "the prediction to the reference first."
        )


def _mean(values: Iterable[float | None]) -> float | None:
    counted = [value for value in values if value is not None]
    return float(np.mean(counted)) if counted else None
