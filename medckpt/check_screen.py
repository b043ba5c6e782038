"""What a person sees of a check: tables, failures and warnings with what to do (equal kinds together), a forecast."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.markup import escape
from rich.table import Table

from medckpt.console import OUT
from medckpt.errors import listing, size

if TYPE_CHECKING:
    from medckpt.datasets.check.findings import CaseCheck, DatasetCheck, Finding
    from medckpt.datasets.check.fix import Change

MOST_LABELS = 20
"""Label values on the screen; the report has all of them."""

MOST_SINGLE = 3
"""So many findings of one kind have a line each; more are put together on one, with the names of the cases."""

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


def checked(check: DatasetCheck, report: Path) -> None:
    """Prints the one screen of a check."""
    cases = f"{len(check.cases)} case{'' if len(check.cases) == 1 else 's'}"
    OUT.print(f"[bold]{escape(str(check.root))}[/] ({check.layout}), {cases}: {_counts(check)}")
    for rows in (summary_rows(check), label_table(check)):
        if rows:
            OUT.print()
            OUT.print(_table(*rows))
    problems = _problem_table(check)
    if problems is not None:
        OUT.print()
        OUT.print(problems)
    OUT.print(f"\n{escape(forecast_line(check))}\nReport: {escape(str(report))}")
    fixes = Counter(f.fix for f in _all_findings(check) if f.fix)
    for fix in fixes:
        OUT.print(f"Mend:   medckpt check data={escape(str(check.root))} {escape(fix)} output=FOLDER")


def fixed(changes: Sequence[Change], output: Path) -> None:
    """Says what a corrected copy differs in."""
    what = Counter(change.what.partition(";")[0] for change in changes)
    OUT.print(f"[bold]Corrected copy:[/] {escape(str(output))}, {len(changes)} files differ from the source:")
    for text, count in what.most_common(10):
        names = listing([change.file for change in changes if change.what.partition(";")[0] == text], 3)
        OUT.print(f"  {count} x {escape(text)} ({escape(names)})")
    OUT.print(f"Every change: {escape(str(output / 'medckpt_fix.json'))}")


Rows = tuple[list[str], list[list[str]]]


def summary_rows(check: DatasetCheck) -> Rows | None:
    """Returns head and rows of the table of sizes, spacings and intensities: least, median and most over the cases."""
    known = [case for case in check.cases if case.images]
    if not known:
        return None
    first = [case.images[0] for case in known]
    rows = [
        ["size, voxels", *_triples([sorted(image.shape, reverse=True) for image in first], "{:.0f}")],
        ["spacing, mm", *_triples([sorted(image.spacing_mm) for image in first], "{:.4g}")],
    ]
    for number, name in enumerate(check.channel_names):
        images = [case.images[number] for case in known if len(case.images) > number]
        for what, values in (
            ("median", [image.median for image in images]),
            ("0.5 %", [image.low for image in images]),
            ("99.5 %", [image.high for image in images]),
        ):
            rows.append([f"{name}, {what}", *(f"{value:.4g}" for value in _three(values))])
    axes = ", ".join(f"{name} ({count})" for name, count in Counter(image.axes for image in first).most_common())
    rows.append(["axes as stored (cases)", axes, "", ""])
    return ["", "least", "median", "most"], rows


def label_table(check: DatasetCheck, limit: int | None = MOST_LABELS) -> Rows | None:
    """Returns head and rows of the table of label values."""
    if not check.label_rows:
        return None
    total = sum(row.voxels for row in check.label_rows) or 1
    shown = check.label_rows if limit is None else check.label_rows[:limit]
    rows = [
        [
            str(row.value),
            _label_name(row.name, row.value, bool(check.labels)),
            f"{row.voxels}",
            f"{100 * row.voxels / total:.3g} %",
            f"{row.cases}",
        ]
        for row in shown
    ]
    if len(shown) < len(check.label_rows):
        rows.append(["...", f"{len(check.label_rows) - len(shown)} more in the report", "", "", ""])
    return ["label", "name", "voxels", "share", "cases"], rows


def forecast_line(check: DatasetCheck) -> str:
    """Returns what preparing the data takes, as a sentence."""
    foreseen = check.forecast
    if foreseen is None:
        return "No image was read, so that nothing is foreseen of disk and memory."
    spacing = " x ".join(f"{side:g}" for side in foreseen.spacing_mm)
    free = "" if foreseen.available_bytes is None else f" (free: {size(foreseen.available_bytes)})"
    return (
        f"Preparing at {spacing} mm takes {size(foreseen.disk_bytes)} of disk in {foreseen.cache} (free: "
        f"{size(foreseen.free_bytes)}) and up to {size(foreseen.peak_bytes)} of memory on {foreseen.threads} "
        f"threads{free}."
    )


def problems(check: DatasetCheck) -> list[tuple[str, str, str]]:
    """Returns (result, case or cases, what and what to do), failures first; many of one kind in one row."""
    by_kind: dict[tuple[str, str], list[tuple[CaseCheck, Finding]]] = defaultdict(list)
    for case in check.cases:
        for finding in case.findings:
            by_kind[finding.severity, finding.code].append((case, finding))
    rows: list[tuple[str, str, str]] = [(finding.severity, "data set", finding.text) for finding in check.findings]
    for (severity, _), found in by_kind.items():
        if len(found) <= MOST_SINGLE:
            rows += [(severity, case.name, finding.text) for case, finding in found]
            continue
        names = list(dict.fromkeys(case.name for case, _ in found))
        rows.append((severity, f"{len(names)} cases", f"{listing(names, 6)}. The first: {found[0][1].text}"))
    return sorted(rows, key=lambda row: row[0] != "fail")


def _problem_table(check: DatasetCheck) -> Table | None:
    rows = problems(check)
    if not rows:
        return None
    table = Table(box=None, pad_edge=False, header_style="dim", show_lines=False)
    table.add_column("result", no_wrap=True)
    table.add_column("case", overflow="fold", max_width=30)
    table.add_column("what, and what to do", overflow="fold")
    for result, name, text in rows:
        table.add_row(f"[{_COLOURS[result]}]{result}[/]", escape(name), escape(text))
    return table


def _all_findings(check: DatasetCheck) -> list[Finding]:
    return [*check.findings, *(finding for case in check.cases for finding in case.findings)]


def _counts(check: DatasetCheck) -> str:
    words = {"pass": "pass", "warn": "with warnings", "fail": "fail"}
    parts = [
        f"[{_COLOURS[name]}]{check.count(name)} {word}[/]"  # type: ignore[arg-type]
        for name, word in words.items()
        if check.count(name)  # type: ignore[arg-type]
    ]
    return ", ".join(parts) or "nothing to read"


def _label_name(name: str | None, value: int, named: bool) -> str:
    if name is not None:
        return name
    if not named:
        return "background" if value == 0 else ""
    return "not in dataset.json"


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    return float(np.min(values)), float(np.median(values)), float(np.max(values))


def _triples(values: Sequence[Sequence[float]], form: str) -> list[str]:
    array = np.asarray(values, dtype=np.float64)
    return [" x ".join(form.format(v) for v in row) for row in (array.min(0), np.median(array, axis=0), array.max(0))]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    words = {"name", ""}
    for column in head:
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
