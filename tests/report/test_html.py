"""The report: complete, self-contained, escaped, and readable when parts of the run are missing."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from medckpt.errors import DataError
from medckpt.report.curves import draw_curves
from medckpt.report.html import write_report
from medckpt.training.metrics import CaseScore, score_case, summarize

EVIL = '<script src="http://evil.example/x.js">&"\''
VOID = {"meta", "img", "link", "br"}


class Page(HTMLParser):
    """Collects tags and text, and fails on a tag that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split()).replace("\N{EN DASH}", "--")


def case_score(case: str, **dice: float | None) -> CaseScore:
    distance = {name: None if value is None else 10 * (1 - value) for name, value in dice.items()}
    voxels = dict.fromkeys(dice, 1)
    return CaseScore(
        case=case,
        dice=dict(dice),
        surface_distance_mm=distance,
        hausdorff95_mm=distance,
        reference_voxels=voxels,
        predicted_voxels=voxels,
    )


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with every file, and names that try to break out of the page."""
    folder = tmp_path / "swin ct"
    (folder / "overlays").mkdir(parents=True)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (6, 6, 6))
    scores = [
        score_case(case, rng.integers(0, 3, (6, 6, 6)), labels, (1, 1, 2), {"liver": 1, EVIL: 2, "absent": 7})
        for case in ("case_1", EVIL)
    ]
    metrics = {**summarize(scores), "minutes": 94.2, "steps": 12500, "recipe": EVIL, "command": f"medckpt train {EVIL}"}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "metrics.csv").write_text("step,minutes,lr,loss,val_loss,dice_mean\n1,0.1,1e-4,1.0,,\n")
    draw_curves(folder / "metrics.csv", folder / "curves.png")
    (folder / "overlays" / "a&b.png").write_bytes((folder / "curves.png").read_bytes())
    (folder / "config.yaml").write_text(f"recipe: {EVIL}\nurl: http://example.org\n")
    (folder / "environment.json").write_text(json.dumps({"packages": {"torch": "2.13", EVIL: EVIL}, "threads": 2}))
    memory = {"predicted_peak_bytes": 5 * 2**30, "measured_peak_bytes": 300 * 2**20, "parts": {EVIL: 2**20}}
    (folder / "memory.json").write_text(json.dumps(memory))
    (folder / "split.json").write_text(json.dumps({"training": ["p1", "p2", EVIL], "validation": ["p3"], "seed": 0}))
    return folder


def test_the_report_needs_nothing_from_outside(run_folder: Path) -> None:
    page = Page(write_report(run_folder).read_text())
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "a"}
    sources = [attrs["src"] or "" for _, attrs in page.tags if "src" in attrs]
    assert len(sources) == 2
    for source in sources:
        head, data = source.split(",", 1)
        assert head == "data:image/png;base64"
        assert base64.b64decode(data) == (run_folder / "curves.png").read_bytes()
    style = (run_folder / "report.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_names_are_escaped_wherever_they_come_from(run_folder: Path) -> None:
    text = write_report(run_folder).read_text()
    assert "<script" not in text
    assert text.count("&lt;script src=&quot;http://evil.example") >= 8  # recipe, class, case, config, ...
    assert EVIL in Page(text).text


def test_the_report_gives_scores_memory_and_commands(run_folder: Path) -> None:
    text = Page(write_report(run_folder).read_text()).text
    metrics = json.loads((run_folder / "metrics.json").read_text())
    for number in (
        metrics["dice_mean"],
        metrics["dice_per_class"]["liver"],
        metrics["cases"]["case_1"]["dice"]["liver"],
    ):
        assert f"{number:.3f}" in text
    assert f"{metrics['surface_distance_mm_per_class']['liver']:.2f}" in text
    assert f"{metrics['hausdorff95_mm_per_class']['liver']:.2f}" in text
    for fact in ("12,500", "1 h 34 min", "5.00 GiB", "300 MiB", "packages.torch 2.13", "3 training, 1 validation"):
        assert fact in text
    assert metrics["rule"] in text
    assert f"medckpt predict run='{run_folder}' input=SCANS output=SEGMENTATIONS" in text
    assert f"medckpt train resume='{run_folder}'" in text


def test_memory_is_one_line_a_picture_and_what_the_forecast_says(run_folder: Path) -> None:
    gib = 2**30
    forecast = {
        "peak_interval": [4 * gib, 6 * gib],
        "parts": {"parameters": gib, "averages": 0, "saved": 4 * gib},
        "where": {"region": EVIL, "phase": "backward"},
        "holders": [{"region": EVIL, "bytes": 3 * gib}, {"region": "inputs", "bytes": 2**20}],
    }
    memory = {
        "predicted_peak_bytes": 5 * gib, "forecast": forecast, "measured_peak_bytes": 4.5 * gib, "measure": "tensors",
    }  # fmt: skip
    (run_folder / "memory.json").write_text(json.dumps(memory))
    picture = (run_folder / "curves.png").read_bytes() + b"memory"
    (run_folder / "memory_timeline.png").write_bytes(picture)
    page = Page(write_report(run_folder).read_text())
    assert "Peak of a training step: predicted 5.00 GiB, measured 4.50 GiB." in page.text
    assert "measure tensors predicted: parameters 1.00 GiB predicted: saved 4.00 GiB" in page.text
    assert "peak_interval 4.00 GiB to 6.00 GiB" in page.text
    assert f"held at the peak by.{EVIL} 3.00 GiB held at the peak by.inputs 1 MiB" in page.text
    sources = {attrs["alt"]: attrs["src"] or "" for _, attrs in page.tags if "src" in attrs}
    assert base64.b64decode(sources["Memory over one training step, as forecast"].split(",")[1]) == picture


@pytest.mark.parametrize(
    ("memory", "line"),
    [
        ({"measured_peak_bytes": 2**30, "measure": "x"}, "step: not predicted, measured 1.00 GiB."),
        ({"predicted_peak_bytes": 2**30, "forecast": {}}, "step: predicted 1.00 GiB, not measured."),
        ({"process_peak_bytes": 3 * 2**30, "measured_peak_bytes": None}, "not measured. process_peak 3.00 GiB"),
    ],
)
def test_memory_that_is_half_known_says_so(tmp_path: Path, memory: dict[str, object], line: str) -> None:
    (tmp_path / "memory.json").write_text(json.dumps(memory))
    page = Page(write_report(tmp_path).read_text())
    assert line in page.text
    assert not any(tag == "img" for tag, _ in page.tags)


def test_a_forecast_without_a_measurement_is_still_shown(tmp_path: Path) -> None:
    (tmp_path / "memory_timeline.png").write_bytes(b"picture")
    page = Page(write_report(tmp_path).read_text())
    assert "No memory.json" in page.text
    assert [attrs["alt"] for tag, attrs in page.tags if tag == "img"] == ["Memory over one training step, as forecast"]


def test_cases_are_listed_lowest_dice_first_and_dashed_where_not_counted(tmp_path: Path) -> None:
    scores = [case_score("good", liver=0.9, cyst=None), case_score("bad", liver=0.3, cyst=0.1), case_score("none")]
    (tmp_path / "metrics.json").write_text(json.dumps(summarize(scores)))
    text = Page(write_report(tmp_path).read_text()).text
    rows = text[text.index("mean Dice liver cyst") :]
    assert re.search(r"bad 0\.200 0\.300 0\.100 good 0\.900 0\.900 -- none -- -- --", rows)


def test_many_classes_give_each_case_its_lowest_class(tmp_path: Path) -> None:
    dice = {f"class_{index}": 0.5 + index / 100 for index in range(20)}
    (tmp_path / "metrics.json").write_text(json.dumps(summarize([case_score("one", **dice)])))
    text = Page(write_report(tmp_path).read_text()).text
    assert "case mean Dice lowest class its Dice one 0.595 class_0 0.500" in text


def test_an_empty_run_folder_says_in_sentences_what_is_missing(tmp_path: Path) -> None:
    out = write_report(tmp_path)
    assert out == tmp_path / "report.html"
    text = Page(out.read_text()).text
    for missing in ("metrics.json", "curves.png", "memory.json", "split.json", "config.yaml", "environment.json"):
        assert f"o {missing}" in text  # "no ..." or "No ..."
    assert "No pictures were drawn." in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_missing_folder_and_broken_json_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "memory.json").write_text("{")
    with pytest.raises(DataError, match=r"memory\.json: not valid JSON"):
        write_report(tmp_path)
    (tmp_path / "memory.json").write_text("[]")
    with pytest.raises(DataError, match=r"memory\.json: holds a list, not an object"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
