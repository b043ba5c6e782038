"""The results of `gpu.py`: its JSON file, and the page that is read."""

from __future__ import annotations

import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

GIB = 2**30
STARTED, MEASURED, OOM, TOO_LARGE = "started", "measured", "out of memory", "skipped: does not fit"
KINDS = {"shipped": "shipped profile", "measured": "measured profile", "scratch": "and measured convolutions"}


class Results:
    """The JSON file: written after every case, so that nothing is measured twice."""

    def __init__(self, path: Path, facts: dict[str, Any], *, fresh: bool = False) -> None:
        self.path, self.facts = path, facts
        self.rows: dict[str, dict[str, Any]] = {}
        if path.is_file() and not fresh:
            stored = json.loads(path.read_text())
            differ = [key for key in ("device", "torch", "monai") if stored["machine"].get(key) != facts.get(key)]
            if differ:
                raise SystemExit(
                    f"{path}: holds results of another {' and '.join(differ)}. Measure anew with --fresh, or write "
                    "elsewhere with --output."
                )
            self.rows = {row.pop("name"): row for row in stored["combinations"]}

    def done(self, name: str) -> bool:
        """Whether the case has ended in any way."""
        return name in self.rows and self.rows[name]["status"] != STARTED

    def put(self, name: str, row: dict[str, Any], pending: list[str] | None = None) -> None:
        """Sets a row and writes the file."""
        self.rows[name] = row
        self.write(pending or [])

    def write(self, pending: list[str]) -> None:
        """Writes the file; `pending` names the cases that are left for the next call."""
        from medckpt.files import write_json

        rows = [{"name": name, **row} for name, row in self.rows.items()]
        head = {"date": date.today().isoformat(), "machine": self.facts, "summary": summary(list(self.rows.values()))}
        write_json(self.path, {**head, "pending": pending, "combinations": rows})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures by which the forecast is judged, per kind of forecast."""
    found: dict[str, Any] = {"statuses": {}}
    for row in rows:
        status = row["status"].partition(":")[0] if row["status"].startswith("failed") else row["status"]
        found["statuses"][status] = found["statuses"].get(status, 0) + 1
    measured = [row for row in rows if row["status"] == MEASURED]
    for kind in KINDS if measured else ():
        errors = [abs(row["error_percent"][kind]) for row in measured]
        times = [
            row["predicted"][kind]["step_ms"] / row["measured"]["step_ms"]
            for row in measured
            if row["predicted"][kind]["step_ms"] and row["measured"]["step_ms"]
        ]
        found[kind] = {
            "median_abs_error_percent": round(statistics.median(errors), 3),
            "worst_abs_error_percent": max(errors),
            "allocated_in_interval": sum(_inside(row, kind, "allocated") for row in measured),
            "reserved_in_interval": sum(_inside(row, kind, "reserved") for row in measured),
            "step_ms_ratio_median": round(statistics.median(times), 3) if times else None,
        }
    budgets = [budget for row in rows for budget in row.get("budgets", [])]
    found["budgets_kept"] = f"{sum(budget['kept'] for budget in budgets)} of {len(budgets)}"
    return found


def _inside(row: dict[str, Any], kind: str, what: str) -> bool:
    low, high = row["predicted"][kind][f"{what}_interval"]
    return bool(low <= row["measured"][f"{what}_bytes"] <= high)


def line(name: str, row: dict[str, Any]) -> str:
    """Returns a case in a line for the terminal."""
    if row["status"] != MEASURED:
        low, high = row["predicted"]["shipped"]["with_context"]
        return f"{name}: {row['status']} (forecast {low / GIB:.2f} to {high / GIB:.2f} GiB)"
    found, best, errors = row["measured"], row["predicted"]["scratch"], row["error_percent"]
    low, high = best["reserved_interval"]
    kept = "".join(f", budget {'kept' if b['kept'] else 'NOT kept'} ({b['status']})" for b in row.get("budgets", []))
    return (
        f"{name}: allocated {found['allocated_bytes'] / GIB:.3f} GiB, forecast {errors['shipped']:+.2f} % (shipped) "
        f"{errors['scratch']:+.2f} % (measured); reserved {found['reserved_bytes'] / GIB:.2f} of {low / GIB:.2f} to "
        f"{high / GIB:.2f}; step {_ms(found['step_ms'])} ms, forecast {_ms(best['step_ms'])}{kept}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def markdown(stored: dict[str, Any]) -> str:
    """Returns the page: how good the forecast is, and every case."""
    facts, total = stored["machine"], stored["summary"]
    lines = [
        f"# Forecast against measurement on {facts['device']}",
        "",
        f"{stored['date']}, torch {facts['torch']}, CUDA {facts['cuda']}, MONAI {facts['monai']}, {facts['cpu']}. "
        "Written by `python benchmarks/gpu.py`; everything in it is measured there. One training step: forward, loss, "
        "backward, clipping, AdamW. Allocated and reserved are torch's own counts, without the CUDA context.",
        "",
        "Cases: " + ", ".join(f"{count} {status}" for status, count in total["statuses"].items()) + ". "
        f"Budgets kept: {total['budgets_kept']}.",
        "",
        "| forecast with | median error (%) | worst (%) | allocated in interval | reserved in interval | step time, "
        "forecast / measured (median) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind, title in KINDS.items():
        if one := total.get(kind):
            lines.append(
                f"| {title} | {one['median_abs_error_percent']:.2f} | {one['worst_abs_error_percent']:.2f} "
                f"| {one['allocated_in_interval']} | {one['reserved_in_interval']} | {one['step_ms_ratio_median']} |"
            )
    lines += [
        "",
        "| case | allocated (GiB) | error shipped / measured / convolutions (%) | reserved (GiB) | its forecast (GiB) "
        "| step (ms) | its forecast (ms) |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [_row(row) for row in stored["combinations"]]
    budgets = [(row["name"], budget) for row in stored["combinations"] for budget in row.get("budgets", [])]
    if budgets:
        lines += ["", "| case | budget (GiB) | must be | was |", "|---|--:|---|---|"]
        lines += [f"| {name} | {b['limit_bytes'] / GIB:.3f} | {b['expected']} | {b['status']} |" for name, b in budgets]
    if stored["pending"]:
        lines += ["", f"Not run, for want of time: {', '.join(stored['pending'])}."]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> str:
    if row["status"] != MEASURED:
        bounds = row.get("predicted", {}).get("shipped", {}).get("with_context")
        forecast = f"{bounds[0] / GIB:.2f} to {bounds[1] / GIB:.2f}" if bounds else "-"
        return f"| {row['name']} | {row['status']} | - | - | {forecast} | - | - |"
    found, best, errors = row["measured"], row["predicted"]["scratch"], row["error_percent"]
    low, high = best["reserved_interval"]
    return (
        f"| {row['name']} | {found['allocated_bytes'] / GIB:.3f} "
        f"| {errors['shipped']:+.2f} / {errors['measured']:+.2f} / {errors['scratch']:+.2f} "
        f"| {found['reserved_bytes'] / GIB:.2f} | {low / GIB:.2f} to {high / GIB:.2f} | {_ms(found['step_ms'])} "
        f"| {_ms(best['step_ms'])} |"
    )
