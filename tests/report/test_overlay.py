"""The overlay's geometry, read back from the pixels of the written PNG."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from scipy import ndimage

from medckpt.errors import ConfigError, DataError, GeometryError
from medckpt.report import overlay
from medckpt.report.curves import class_colour, save_figure
from medckpt.report.overlay import choose_positions, draw_overlay, voxel_outline
from medckpt.training.metrics import dice_per_class
from tests.conftest import shared_data

GREY = 0.5


def block(shape: tuple[int, int, int], corner: tuple[int, int, int], size: tuple[int, int, int]) -> np.ndarray:
    mask = np.zeros(shape, np.uint8)
    mask[tuple(slice(start, start + length) for start, length in zip(corner, size, strict=True))] = 1
    return mask


def panels(path: Path, columns: int) -> list[list[np.ndarray]]:
    """Returns the pictures on the page, row by row: the large areas that are not white paper."""
    page = imread(path)[..., :3]
    labels, _ = ndimage.label(page.min(axis=-1) < 0.98, structure=np.ones((3, 3)))
    boxes = ndimage.find_objects(labels)
    boxes = sorted(boxes, key=lambda box: -(box[0].stop - box[0].start) * (box[1].stop - box[1].start))
    boxes = sorted(boxes[: 3 * columns], key=lambda box: (box[0].start, box[1].start))
    return [[page[box] for box in boxes[row * columns : (row + 1) * columns]] for row in range(3)]


def grey_pixels(panel: np.ndarray) -> np.ndarray:
    """Rows and columns of the largest connected area of the marker's grey; letters have thin grey rims of their own."""
    near = (np.abs(panel - GREY) < 0.03).all(axis=-1)
    labels, count = ndimage.label(near)
    assert count, "the marker is not in the picture"
    return np.argwhere(labels == np.bincount(labels.ravel())[1:].argmax() + 1)


def place(pixels: np.ndarray, panel: np.ndarray) -> tuple[float, float]:
    """Centre of pixels as (from the left, from the top), 0..1."""
    row, column = pixels.mean(axis=0)
    return float(column / panel.shape[1]), float(row / panel.shape[0])


def test_patient_right_anterior_superior_lands_where_a_radiologist_expects(tmp_path: Path) -> None:
    # High X is the patient's right, high Y anterior, high Z superior.
    marker = block((30, 30, 30), (22, 21, 20), (6, 6, 6))
    draw_overlay(GREY * marker, marker, marker, (1, 1, 1), {"marker": 1}, (0.0, 1.0), "case", tmp_path / "o.png")
    rows = panels(tmp_path / "o.png", 3)
    across = {"axial": 1 - 25 / 30, "coronal": 1 - 25 / 30, "sagittal": 1 - 24 / 30}
    down = {"axial": 1 - 24 / 30, "coronal": 1 - 23 / 30, "sagittal": 1 - 23 / 30}
    for plane, row in zip(("axial", "coronal", "sagittal"), rows, strict=True):
        assert place(grey_pixels(row[0]), row[0]) == pytest.approx((across[plane], down[plane]), abs=0.02), plane


def test_labels_lie_on_the_image_and_carry_the_colour_of_their_class(tmp_path: Path) -> None:
    image = np.full((20, 24, 28), 0.0)
    reference = block(image.shape, (3, 4, 5), (6, 7, 8))
    prediction = 2 * block(image.shape, (5, 6, 7), (6, 7, 8))
    classes = {"background": 0, "first": 1, "second": 2}
    draw_overlay(image, reference, prediction, (1, 1, 1), classes, (0.0, 1.0), "case", tmp_path / "o.png")
    for row, (x, y) in zip(panels(tmp_path / "o.png", 3), [(0, 1), (0, 2), (1, 2)], strict=True):
        assert row[0].max(axis=-1).min() == 0
        for panel, start, index in ((row[1], (3, 4, 5), 0), (row[2], (5, 6, 7), 1)):
            fill = np.array(to_rgb(class_colour(index))) * overlay.FILL_ALPHA
            pixels = np.argwhere((np.abs(panel - fill) < 0.02).all(axis=-1))
            widest = max(image.shape[:2])  # the common width of the panels
            inset = (widest - image.shape[x]) / 2
            middle = (start[x] + (6, 7, 8)[x] / 2, start[y] + (6, 7, 8)[y] / 2)
            expected = ((inset + image.shape[x] - middle[0]) / widest, 1 - middle[1] / image.shape[y])
            assert place(pixels, panel) == pytest.approx(expected, abs=0.02)


def test_anisotropic_voxels_keep_their_physical_shape_and_one_scale(tmp_path: Path) -> None:
    spacing = (0.5, 1.0, 4.0)
    cube = block((60, 40, 12), (20, 15, 4), (24, 12, 3))  # 12 mm each way
    draw_overlay(GREY * cube, None, cube, spacing, {"cube": 1}, (0.0, 1.0), "case", tmp_path / "o.png")
    sides = []
    for row in panels(tmp_path / "o.png", 2):
        pixels = grey_pixels(row[0])
        sides += (np.ptp(pixels, axis=0) + 1).tolist()
    # Interpolation dims the outer half voxel of the cube, by up to half of the 4 mm between slices on each side.
    assert max(sides) <= 1.6 * min(sides)
    page = imread(tmp_path / "o.png")
    shapes = [row[0].shape[:2] for row in panels(tmp_path / "o.png", 2)]
    assert [height / width for height, width in shapes] == pytest.approx([40 / 40, 48 / 40, 48 / 40], rel=0.01)
    assert 800 < page.shape[1] < 1600


def test_planes_go_through_the_widest_part_of_most_classes() -> None:
    labels = np.zeros((30, 30, 30), np.int16)
    labels[2:6, 10:20, 10:20] = 1
    labels[20:26, 10:20, 12:15] = 2
    labels[20:26, 2:6, 28] = 3
    x, y, z = choose_positions(labels, {"a": 1, "b": 2, "c": 3}) or (-1, -1, -1)
    assert x in (22, 23)
    assert y in (14, 15)
    assert z == 13
    assert choose_positions(labels, {"other": 9}) is None


def test_outline_of_a_mask_has_its_perimeter() -> None:
    mask = np.zeros((6, 7), bool)
    mask[1:4, 2:6] = True
    mask[2, 3] = False
    xs, ys = voxel_outline(mask)
    steps = np.hypot(np.diff(xs), np.diff(ys))
    assert np.nansum(steps) == 2 * (3 + 4) + 4
    assert (np.nanmin(xs), np.nanmax(xs), np.nanmin(ys), np.nanmax(ys)) == (2, 6, 1, 4)


@pytest.mark.parametrize("shape", [(40, 40, 1), (8, 120, 90)])
def test_odd_shapes_give_a_page_of_sensible_size(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    image = rng.standard_normal(shape)
    image[0, 0, 0] = np.nan
    nothing = np.zeros(shape, np.uint8)
    draw_overlay(image, None, nothing, (1, 1, 3), {"a": 1}, None, "$odd_{name", tmp_path / "o.png")
    height, width = imread(tmp_path / "o.png").shape[:2]
    assert 400 < width < 1700
    assert 300 < height < 2600


def test_a_constant_image_and_hundreds_of_classes_are_drawn(tmp_path: Path) -> None:
    labels = np.arange(8 * 9 * 10, dtype=np.int32).reshape(8, 9, 10) % 200
    classes = {f"a_structure_with_a_long_name_{value}": value for value in range(200)}
    draw_overlay(np.zeros(labels.shape), labels, labels, (1, 1, 1), classes, None, "case", tmp_path / "o.png")
    assert imread(tmp_path / "o.png").shape[1] > 800


def test_the_window_and_dice_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts: list[str] = []

    def keep_texts(figure: overlay.Figure, out: Path) -> None:
        texts.extend(text.get_text() for text in figure.texts)
        texts.extend(text.get_text() for axes in figure.axes for text in axes.texts)

        save_figure(figure, out)

    monkeypatch.setattr(overlay, "save_figure", keep_texts)
    reference, prediction = (
        block((50, 50, 50), (10, 10, 10), (20, 20, 20)),
        block((50, 50, 50), (12, 10, 10), (20,) * 3),
    )
    image = np.linspace(0, 100, 50**3).reshape(50, 50, 50)
    classes = {"liver": 1}
    draw_overlay(image, reference, prediction, (3, 3, 3), classes, (-300, 300), "case_7", tmp_path / "o.png")
    dice = dice_per_class(prediction, reference, classes)["liver"]
    assert {"case_7", f"mean Dice {dice:.3f}   W 600 L 0 HU", f"liver {dice:.2f}", "5 cm"} <= set(texts)
    texts.clear()
    draw_overlay(image, None, prediction, (0.8, 0.8, 0.8), classes, None, "case_8", tmp_path / "o.png")
    assert {"grey scale: 0.5 to 99.5 percentile (0.5 to 99.5)", "liver", "1 cm"} <= set(texts)


def test_real_ct_has_the_liver_on_the_left_of_the_axial_picture(tmp_path: Path) -> None:
    import nibabel

    folder = shared_data("totalsegmentator")
    image = nibabel.as_closest_canonical(nibabel.load(folder / "ct_abdomen_pelvis_3mm.nii.gz"))
    labels = nibabel.as_closest_canonical(nibabel.load(folder / "ct_abdomen_pelvis_3mm_seg117.nii.gz"))
    liver = (np.asarray(labels.dataobj) == 5).astype(np.uint8)
    spacing = [float(step) for step in image.header.get_zooms()[:3]]
    draw_overlay(np.asarray(image.dataobj), None, liver, spacing, {"liver": 1}, (-160, 240), "ct", tmp_path / "o.png")
    axial = panels(tmp_path / "o.png", 2)[0][1]
    tinted = np.argwhere(axial[..., 0] - axial[..., 2] > 0.15)
    assert place(tinted, axial)[0] < 0.5


def test_wrong_input_is_refused_by_name(tmp_path: Path) -> None:
    image, labels = np.zeros((4, 4, 4)), np.zeros((4, 4, 4), np.uint8)
    out = tmp_path / "o.png"
    with pytest.raises(DataError, match=r"case: prediction has shape \(4, 4, 3\), the image \(4, 4, 4\)"):
        draw_overlay(image, labels, labels[..., :3], (1, 1, 1), {"a": 1}, None, "case", out)
    with pytest.raises(DataError, match=r"case: the image has shape \(4, 4\)"):
        draw_overlay(image[0], None, labels, (1, 1, 1), {"a": 1}, None, "case", out)
    with pytest.raises(DataError, match="case: prediction: holds float64 values"):
        draw_overlay(image, None, image, (1, 1, 1), {"a": 1}, None, "case", out)
    with pytest.raises(ConfigError, match=r"case: window \(400, 40\)"):
        draw_overlay(image, None, labels, (1, 1, 1), {"a": 1}, (400, 40), "case", out)
    with pytest.raises(GeometryError, match="case: spacing"):
        draw_overlay(image, None, labels, (1, -1, 1), {"a": 1}, None, "case", out)
    assert not out.exists()
