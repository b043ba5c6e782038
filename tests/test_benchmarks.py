"""The benchmark scripts, run as their users do, at sizes of seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec.loader.exec_module(module)
    return module


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "gpu.py"), *arguments]
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=without, check=False)


def test_a_forecast_is_within_one_percent_of_the_measured_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = load("forecast", monkeypatch)
    assert forecast.main(["--quick", "--output", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "forecast_cpu.json").read_text())
    assert [row["name"] for row in stored["combinations"]] == list(forecast.QUICK)
    for row in stored["combinations"]:
        assert abs(row["error_percent"]) <= 1, row
        assert row["measured_bytes"] > 4 * row["parameters"] * 4  # weights, gradients and both moments at least
    plain, all_regions = stored["combinations"][:2]
    assert all_regions["measured_bytes"] < plain["measured_bytes"]
    assert f"worst {stored['summary']['worst_abs_error_percent']:.2f} %" in (tmp_path / "forecast_cpu.md").read_text()
    assert (tmp_path / "forecast_cpu.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(forecast, "run_one", lambda combination: pytest.fail("measured again"))
    assert forecast.main(["--quick", "--output", str(tmp_path)]) == 0


def test_results_of_another_machine_are_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = load("forecast", monkeypatch)
    (tmp_path / "forecast_cpu.json").write_text(json.dumps({"machine": {"cpu": "another"}, "combinations": []}))
    with pytest.raises(SystemExit, match=r"another machine or torch.*--fresh"):
        forecast.main(["--quick", "--output", str(tmp_path)])


def test_the_table_has_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [one.name for one in load("forecast", monkeypatch).combinations()]
    assert len(names) == len(set(names)) >= 60
    assert set(load("forecast", monkeypatch).QUICK) <= set(names)


def test_gpu_without_one_says_so(tmp_path: Path) -> None:
    result = gpu("--output", str(tmp_path))
    assert result.returncode == 2
    assert "needs an NVIDIA GPU, and there is none" in result.stderr
    assert not list(tmp_path.iterdir())


def test_gpu_dry_run_goes_all_the_way(tmp_path: Path) -> None:
    result = gpu("--dry-run", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    stored = json.loads((tmp_path / "gpu_dry_run_on_a_cpu.json").read_text())
    plain, recomputed, large = stored["combinations"]
    assert stored["pending"] == []
    assert [row["status"] for row in (plain, recomputed, large)] == ["measured", "measured", "skipped: does not fit"]
    for row in (plain, recomputed):
        assert abs(row["error_percent"]["scratch"]) <= 1
        assert row["measured"]["step_ms"] > 0
    assert [budget["status"] for budget in plain["budgets"]] == ["measured", "out of memory"]
    assert plain["name"] in (tmp_path / "gpu_dry_run_on_a_cpu.md").read_text()


def test_gpu_cases_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("gpu_cases", monkeypatch)
    names = [case.name for case in module.cases()]
    assert len(names) == len(set(names)) >= 50


def test_policies_compare_ours_with_the_best_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = load("policies", monkeypatch)
    gib = 2**30

    def row(label: str, peak: float, *seconds: float) -> dict[str, Any]:
        return {"label": label, "peak_bytes": int(peak * gib), "seconds": list(seconds)}

    result = {
        "net": "tiny",
        "facts": {"input": [2, 1, 8, 8, 8], "precision": "32", "threads": 2, "torch": "2", "date": "2026-11-30"},
        "rows": [
            row("plain", 4, 1.0, 2.0, 1.0),
            row("all", 2, 1.5, 3.0, 1.4),
            row("sqrt", 3, 1.2, 2.4, 1.3),
            row("ours 0%", 1, 1.3, 2.6, 1.1),
            row("ours 50%", 2.4, 1.1, 2.2, 1.2),
        ],
        "notes": {"ours 100%": "the same plan as ours 50%"},
        "budgets": [
            {"budget_bytes": gib, "label": "ours 0%"},
            {"budget_bytes": int(2.5 * gib), "label": "ours 50%"},
            {"budget_bytes": 4 * gib, "label": "ours 50%"},
        ],
    }
    text = policies.table(result)
    assert "| 1.000 | 1.000 | +30% | none |  |" in text
    assert "| 2.500 | 2.400 | +10% | all | +50% |" in text, "medians of paired ratios: 1.5, 1.5, 1.4"
    assert "| 4.000 | 2.400 | +10% | plain | +0% |" in text
    assert "* ours 100%: the same plan as ours 50%" in text
    assert text.index("ours 0%") < text.index("| all |") < text.index("| plain |"), "rising peaks"
    policies.picture([result], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_both_sides_of_the_sliding_window_give_the_same_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sliding_window", monkeypatch)
    runs = {side: [module.measure(side, (20, 30, 110))] for side in module.SIDES}
    assert runs["ours"][0]["labels"] == runs["monai"][0]["labels"]
    assert "* labels of all runs are equal" in module.table({"malloc": runs})
    runs["monai"][0]["labels"] = ""
    assert "* labels of all runs are NOT EQUAL" in module.table({"malloc": runs})


def test_a_series_is_read_the_same_by_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = load("read_series", monkeypatch)
    monkeypatch.setattr(series, "KINDS", {"12 bits, -1024 HU": (12, False, -1024)})
    assert series.main(["--rounds", "1", "--size", "16", "12", "5", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "read_series.json").read_text())["rows"]  # it ends if their sums differ
    assert [row["reader"] for row in rows] == ["medckpt", "simpleitk", "simpleitk, array"]
    assert all(row["peak_mib"] > row["added_mib"] >= 0 for row in rows)
    assert "| medckpt | int16 |" in (tmp_path / "read_series.md").read_text()
