"""Scores against closed forms, a float64 brute force, MONAI's own functions, and the rule for absent classes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import ndimage
from scipy.spatial import cKDTree

from medckpt.errors import ConfigError, DataError, GeometryError
from medckpt.training.metrics import CaseScore, dice_per_class, score_case, summarize
from tests.conftest import shared_data

SPACING_MM = (0.7, 1.3, 3.0)


def cube(corner: tuple[int, int, int], side: int = 10, shape: tuple[int, int, int] = (40, 40, 40)) -> np.ndarray:
    mask = np.zeros(shape, np.uint8)
    mask[tuple(slice(start, start + side) for start in corner)] = 1
    return mask


def ball(centre: float, radius: float, size: int = 64) -> np.ndarray:
    x, y, z = np.ogrid[:size, :size, :size]
    return ((x - centre) ** 2 + (y - 32) ** 2 + (z - 32) ** 2 <= radius**2).astype(np.uint8)


def blobs(rng: np.random.Generator, shape: tuple[int, int, int] = (24, 20, 16)) -> np.ndarray:
    """Smooth random regions of three labels, some of them touching the border."""
    fields = np.stack([ndimage.gaussian_filter(rng.standard_normal(shape), 2.5) for _ in range(4)])
    return fields.argmax(axis=0).astype(np.int16)


def surface_points_mm(mask: np.ndarray, spacing: tuple[float, float, float]) -> np.ndarray:
    """Centres of voxels that have a face neighbour outside the mask or outside the array; written without erosion."""
    padded = np.pad(mask, 1)
    inside = np.ones_like(mask, bool)
    for axis in range(3):
        for step in (-1, 1):
            inside &= np.roll(padded, step, axis)[1:-1, 1:-1, 1:-1].astype(bool)
    return np.argwhere(mask.astype(bool) & ~inside).astype(np.float64) * np.asarray(spacing)


def brute_force(a: np.ndarray, b: np.ndarray, spacing: tuple[float, float, float]) -> tuple[float, float]:
    first, second = surface_points_mm(a, spacing), surface_points_mm(b, spacing)
    there, back = cKDTree(second).query(first)[0], cKDTree(first).query(second)[0]
    return float(np.concatenate([there, back]).mean()), max(
        float(np.percentile(there, 95)), float(np.percentile(back, 95))
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_shifted_cube_has_the_dice_and_hausdorff_distance_of_the_closed_form(axis: int, shift: int) -> None:
    side, corner = 10, [12, 12, 12]
    moved = corner.copy()
    moved[axis] += shift
    score = score_case("cube", cube(tuple(moved)), cube(tuple(corner)), SPACING_MM, {"organ": 1})
    assert score.dice["organ"] == pytest.approx((side - shift) / side, abs=1e-12)
    assert score.reference_voxels == score.predicted_voxels == {"organ": side**3}
    # No surface voxel is farther than the shift, and the leading face (100 of 488 surface voxels) is exactly that far:
    # the 95th percentile lies on it.
    assert score.hausdorff95_mm["organ"] == pytest.approx(shift * SPACING_MM[axis], abs=1e-6)


def test_one_voxel_each_gives_the_distance_between_their_centres() -> None:
    prediction, reference = np.zeros((2, 9, 9, 9), np.int64)
    prediction[1, 2, 3] = reference[4, 6, 3] = 1
    score = score_case("points", prediction, reference, SPACING_MM, {"dot": 1})
    expected = float(np.hypot(3 * SPACING_MM[0], 4 * SPACING_MM[1]))
    assert score.dice["dot"] == 0.0
    assert score.surface_distance_mm["dot"] == pytest.approx(expected, abs=1e-6)
    assert score.hausdorff95_mm["dot"] == pytest.approx(expected, abs=1e-6)


def test_shifted_plate_has_the_mean_distance_of_the_closed_form() -> None:
    # One voxel thick: every voxel is surface. Shifted along its normal, each is exactly the shift away.
    prediction, reference = np.zeros((2, 20, 20, 20), np.uint8)
    reference[3:15, 3:15, 5] = 1
    prediction[3:15, 3:15, 8] = 1
    score = score_case("plate", prediction, reference, SPACING_MM, {"plate": 1})
    assert score.surface_distance_mm["plate"] == pytest.approx(3 * SPACING_MM[2], abs=1e-6)


def test_concentric_balls_are_their_difference_in_radius_apart() -> None:
    score = score_case("balls", ball(32, 22), ball(32, 16), (1.0, 1.0, 1.0), {"ball": 1})
    assert score.dice["ball"] == pytest.approx(2 * 16**3 / (16**3 + 22**3), rel=0.01)
    assert score.surface_distance_mm["ball"] == pytest.approx(6.0, abs=0.25)  # voxels are not a smooth ball
    assert score.hausdorff95_mm["ball"] == pytest.approx(6.0, abs=0.7)


@pytest.mark.parametrize("seed", range(6))
def test_random_blobs_agree_with_a_float64_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prediction, reference = blobs(rng), blobs(rng)
    classes = {"a": 1, "b": 2, "c": 3}
    score = score_case("blobs", prediction, reference, SPACING_MM, classes)
    for name, value in classes.items():
        ours, theirs = prediction == value, reference == value
        mean, hausdorff = brute_force(ours, theirs, SPACING_MM)
        assert score.dice[name] == pytest.approx(2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()), abs=1e-12)
        assert score.surface_distance_mm[name] == pytest.approx(mean, rel=1e-6)
        assert score.hausdorff95_mm[name] == pytest.approx(hausdorff, rel=1e-6)
    assert dice_per_class(prediction, reference, classes) == score.dice


def test_real_label_map_agrees_with_the_public_functions_of_monai() -> None:
    import nibabel
    import torch
    from monai.metrics import compute_average_surface_distance, compute_hausdorff_distance

    path = shared_data("hippocampus_msd_task04/labelsTr/hippocampus_001.nii.gz")
    reference = np.asarray(nibabel.load(path).dataobj).astype(np.uint8)
    prediction = np.roll(reference, 2, axis=1)
    score = score_case("hippocampus_001", prediction, reference, SPACING_MM, {"anterior": 1, "posterior": 2})
    one_hot = [torch.stack([torch.from_numpy(m == k) for k in (1, 2)])[None] for m in (prediction, reference)]
    mean = compute_average_surface_distance(*one_hot, include_background=True, symmetric=True, spacing=SPACING_MM)
    far = compute_hausdorff_distance(*one_hot, include_background=True, percentile=95, spacing=SPACING_MM)
    assert list(score.surface_distance_mm.values()) == pytest.approx(mean[0].tolist(), rel=1e-5)
    assert list(score.hausdorff95_mm.values()) == pytest.approx(far[0].tolist(), rel=1e-5)


def test_absent_classes_follow_the_stated_rule() -> None:
    reference, prediction = np.zeros((2, 8, 8, 8), np.int32)
    reference[:2], prediction[:2] = 1, 1  # in both
    reference[3] = 2  # missed
    prediction[5] = 3  # invented
    classes = {"background": 0, "both": 1, "missed": 2, "invented": 3, "neither": 4}
    score = score_case("case", prediction, reference, (1, 1, 1), classes)
    assert score.dice == {"both": 1.0, "missed": 0.0, "invented": 0.0, "neither": None}
    assert score.surface_distance_mm == {"both": 0.0, "missed": None, "invented": None, "neither": None}
    assert score.hausdorff95_mm == {"both": 0.0, "missed": None, "invented": None, "neither": None}
    assert score.reference_voxels == {"both": 128, "missed": 64, "invented": 0, "neither": 0}
    assert score.predicted_voxels == {"both": 128, "missed": 0, "invented": 64, "neither": 0}


def test_identical_masks_that_fill_the_array_are_zero_apart() -> None:
    full = np.ones((5, 6, 7), bool)
    score = score_case("full", full, full, SPACING_MM, {"all": 1})
    assert (score.dice["all"], score.surface_distance_mm["all"], score.hausdorff95_mm["all"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", ["<i2", ">i2", "u1", "i8", "u4"])
def test_any_integer_type_and_memory_order_gives_the_same_score(dtype: str) -> None:
    rng = np.random.default_rng(3)
    prediction, reference = blobs(rng), blobs(rng)
    plain = score_case("case", prediction, reference, SPACING_MM, {"a": 1, "b": 2})
    other = score_case("case", np.asfortranarray(prediction.astype(dtype)), reference, SPACING_MM, {"a": 1, "b": 2})
    assert other == plain


def scored(case: str, **dice: float | None) -> CaseScore:
    distance = {name: None if value is None or value == 0 else 10 * (1 - value) for name, value in dice.items()}
    voxels = dict.fromkeys(dice, 1)
    return CaseScore(
        case=case,
        dice=dict(dice),
        surface_distance_mm=distance,
        hausdorff95_mm=distance,
        reference_voxels=voxels,
        predicted_voxels=voxels,
    )


def test_summary_averages_over_counted_cases_then_over_classes() -> None:
    summary = summarize([scored("a", liver=0.9, cyst=None, rib=None), scored("b", liver=0.5, cyst=0.0, rib=None)])
    assert summary["dice_per_class"] == {"liver": pytest.approx(0.7), "cyst": 0.0, "rib": None}
    assert summary["dice_mean"] == pytest.approx(0.35)  # of the two class means, not of the three counted values
    assert summary["cases_per_class"] == {"liver": 2, "cyst": 1, "rib": 0}
    assert summary["surface_distance_mm_per_class"] == {"liver": pytest.approx(3.0), "cyst": None, "rib": None}
    assert summary["cases"]["b"]["dice"] == {"liver": 0.5, "cyst": 0.0, "rib": None}
    assert "not counted" in summary["rule"]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_summary_of_nothing_has_no_mean() -> None:
    assert summarize([])["dice_mean"] is None
    assert summarize([scored("a", liver=None)])["dice_mean"] is None


def test_summary_of_real_scores_is_plain_json() -> None:
    rng = np.random.default_rng(0)
    score = score_case("case", blobs(rng), blobs(rng), SPACING_MM, {"a": 1, "b": 2, "never": 9})
    summary = summarize([score])
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_wrong_input_is_refused_by_name() -> None:
    ones = np.ones((4, 4, 4), np.uint8)
    with pytest.raises(DataError, match=r"case p7: reference and prediction: shapes \(4, 4, 4\) and \(4, 4, 3\)"):
        score_case("p7", ones[:, :, :3], ones, SPACING_MM, {"a": 1})
    with pytest.raises(DataError, match=r"case p7: prediction: holds float32 values.*argmax"):
        score_case("p7", ones.astype(np.float32), ones, SPACING_MM, {"a": 1})
    with pytest.raises(DataError, match=r"case p7: reference: has shape \(1, 4, 4, 4\)"):
        score_case("p7", ones, ones[None], SPACING_MM, {"a": 1})
    with pytest.raises(GeometryError, match=r"case p7: spacing \(1.0, 0.0, 1.0\) mm"):
        score_case("p7", ones, ones, (1, 0, 1), {"a": 1})
    with pytest.raises(ConfigError, match="class 'a': label value -1"):
        score_case("p7", ones, ones, SPACING_MM, {"a": -1})
    with pytest.raises(DataError, match="case a: scored more than once"):
        summarize([scored("a", liver=1.0), scored("a", liver=0.5)])
