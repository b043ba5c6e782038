"""The learning curves: what is read, what is smoothed, and that every state of a run gives a picture."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from medckpt.errors import DataError
from medckpt.report.curves import class_colour, draw_curves, duration, read_metrics_csv, smooth, spread_labels

HEADER = "step,minutes,lr,loss,val_loss,dice_mean,dice_liver,dice_left, kidney".replace(", ", " ")


def write_run(path: Path, steps: int, classes: int = 2, validate: bool = True) -> Path:
    rng = np.random.default_rng(0)
    lines = ["step,minutes,lr,loss,val_loss,dice_mean" + "".join(f",dice_class{k}" for k in range(classes))]
    for step in range(1, steps + 1):
        lines.append(f"{step},{step * 0.1},{1e-4 * (1 - step / (steps + 1))},{1 + rng.random()},,{',' * classes}")
        if validate and step % 10 == 0:
            dice = rng.random(classes)
            lines.append(f"{step},{step * 0.1},,,{1.2},{dice.mean()}," + ",".join(map(str, dice)))
    path.write_text("\n".join(lines) + "\n")
    return path


def drawn(csv: Path) -> np.ndarray:
    out = csv.with_suffix(".png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(csv, out)
    assert out.read_bytes().startswith(b"\x89PNG\r\n")
    assert [path.name for path in csv.parent.iterdir() if path.suffix not in {".csv", ".png"}] == []
    return imread(out)


def has_colour(picture: np.ndarray, colour: str) -> bool:
    wanted = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)])
    return bool((np.abs(picture[..., :3] * 255 - wanted).max(axis=-1) < 3).any())


def test_a_run_shows_loss_and_every_class(tmp_path: Path) -> None:
    picture = drawn(write_run(tmp_path / "metrics.csv", steps=60))
    height, width = picture.shape[:2]
    assert (width, height) == (1740, 780)
    left, right = picture[:, : width // 2], picture[:, width // 2 :]
    assert has_colour(left, "#0072B2")
    assert has_colour(left, "#D55E00")
    for index in range(2):
        assert has_colour(right, class_colour(index))
        assert not has_colour(left, class_colour(index))


@pytest.mark.parametrize(
    "rows",
    [
        "",
        "1,0.1,1e-4,1.5,,,,\n",
        "1,0.1,1e-4,,1.5,0.5,0.4,0.6\n",
        "1,0.1,0,nan,nan,nan,nan,nan\n2,,,inf,,,,\n",
        "1,0.1,1e-4,-0.5,,,,\n2,0.2,1e-4,-0.6,,,,\n2,0.2,,,-0.4,0.1,,0.1\n",
        "10,5,1e-4,2,,,,\n20,9,1e-4,1,,,,\n15,7,1e-4,1.5,,,,\n",
        "1,0.1,1e-4,1000,,,,\n2,0.2,1e-4,0.1,,,,\n",
    ],
    ids=["no rows", "one row", "only validation", "not finite", "negative loss", "resumed", "log scale"],
)
def test_every_state_of_a_run_gives_a_picture_without_a_warning(tmp_path: Path, rows: str) -> None:
    csv = tmp_path / "metrics.csv"
    csv.write_text(f"{HEADER}\n{rows}")
    picture = drawn(csv)
    assert picture.shape[:2] == (780, 1740)
    assert picture[..., :3].min() < 0.5  # something is written on the page


def test_many_classes_turn_grey_but_the_lowest(tmp_path: Path) -> None:
    picture = drawn(write_run(tmp_path / "metrics.csv", steps=40, classes=40))
    assert has_colour(picture, "#c4c9d0")


def test_blank_cells_are_nan_and_unknown_columns_are_kept(tmp_path: Path) -> None:
    csv = tmp_path / "metrics.csv"
    csv.write_text("step,loss,dice_mean,extra\n1,0.5,,x\n2,,0.25,7\n,9,9,9\n")
    columns = read_metrics_csv(csv)
    np.testing.assert_array_equal(columns["step"], [1, 2])
    np.testing.assert_array_equal(columns["loss"], [0.5, np.nan])
    np.testing.assert_array_equal(columns["dice_mean"], [np.nan, 0.25])
    np.testing.assert_array_equal(columns["extra"], [np.nan, 7])


def test_a_resumed_run_is_drawn_once_per_step(tmp_path: Path) -> None:
    rows = [f"{step},{step},1e-4,{1 / step},,,," for step in range(1, 31)]
    (tmp_path / "straight.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    lost = [f"{step},{step},1e-4,5,,,," for step in range(21, 26)]  # overwritten by the steps run again
    (tmp_path / "resumed.csv").write_text("\n".join([HEADER, *rows[:20], *lost, *rows[20:]]) + "\n")
    np.testing.assert_array_equal(drawn(tmp_path / "resumed.csv"), drawn(tmp_path / "straight.csv"))


def test_missing_file_and_missing_step_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.csv: no such file"):
        draw_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    (tmp_path / "metrics.csv").write_text("epoch,loss\n1,2\n")
    with pytest.raises(DataError, match="has the columns epoch, loss, but no `step`"):
        draw_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")


def test_smoothing_keeps_constants_and_straight_lines_and_lowers_noise() -> None:
    constant, _ = smooth(np.full(100, 3.0))
    np.testing.assert_allclose(constant, 3.0, rtol=1e-12)
    line, sigma = smooth(np.arange(600, dtype=np.float64))
    np.testing.assert_allclose(line[60:-60], np.arange(600)[60:-60], rtol=1e-9)
    assert sigma == 10.0
    noise = np.random.default_rng(0).standard_normal(600)
    assert smooth(noise)[0].std() < 0.25 * noise.std()


def test_labels_move_apart_symmetrically_and_only_where_they_must() -> None:
    assert spread_labels([0.2, 0.5, 0.9], gap=0.05, low=0, high=1) == pytest.approx([0.2, 0.5, 0.9])
    assert spread_labels([0.5, 0.5], gap=0.1, low=0, high=1) == pytest.approx([0.45, 0.55])
    assert spread_labels([0.9, 0.2, 0.2, 0.2], gap=0.1, low=0, high=1) == pytest.approx([0.9, 0.1, 0.2, 0.3])
    assert spread_labels([1.0, 1.0, 1.0], gap=0.1, low=0, high=1) == pytest.approx([0.8, 0.9, 1.0])
    assert spread_labels([0.0, 0.0], gap=0.1, low=0, high=1) == pytest.approx([0.0, 0.1])
    assert spread_labels([0.5] * 21, gap=0.1, low=0, high=1) == pytest.approx(np.linspace(0, 1, 21))
    assert spread_labels([], gap=0.1, low=0, high=1) == []


def test_class_colours_are_stable_and_distinct() -> None:
    colours = [class_colour(index) for index in range(36)]
    assert colours[:3] == ["#e69f00", "#56b4e9", "#009e73"]
    assert len(set(colours)) == 36
    assert class_colour(36) == colours[0]


@pytest.mark.parametrize(
    ("minutes", "text"), [(0.5, "30 s"), (7.5, "7.5 min"), (8.0, "8 min"), (59.7, "1 h 00 min"), (185, "3 h 05 min")]
)
def test_durations_read_like_a_person_says_them(minutes: float, text: str) -> None:
    assert duration(minutes) == text
