"""`report.html` of a check: every finding, every case, every label value, and pictures of what looks suspicious."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medckpt.files import write_text
from medckpt.report.html import STYLE

if TYPE_CHECKING:
    from medckpt.datasets.check.findings import CaseCheck, DatasetCheck

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]

_STYLE = """
td { white-space: normal; vertical-align: top; } td.text { text-align: left; overflow-wrap: anywhere; }
.fail { color: #c8102e; font-weight: 650; } .warn { color: #a66a00; font-weight: 650; } .pass { color: #00794c; }
@media (prefers-color-scheme: dark) { .fail { color: #ff7a85; } .warn { color: #f0b429; } .pass { color: #4cc38a; } }
"""


def write_check_page(
    check: DatasetCheck, tables: Sequence[tuple[str, Rows | None]], note: str, pictures: Sequence[Path], out: Path
) -> None:
    """Writes the page of a check.

    Args:
        check: what was found.
        tables: (title, (head, rows)) of plain text, in order; None is left out.
        note: the forecast, as a sentence.
        pictures: PNG files to embed, named after their case.
        out: the HTML file.
    """
    counts = {name: check.count(name) for name in ("pass", "warn", "fail")}
    facts = "".join(
        f'<div class="first"><dt>{name}</dt><dd class="{name}">{count}</dd></div>' for name, count in counts.items()
    )
    shown = [_section(title, _plain_table(*rows)) for title, rows in tables if rows]
    sections = [
        f"<header><h1>Check of {_escape(check.root.name)}</h1>"
        f'<p class="muted">{_escape(check.root)}, {_escape(check.layout)}, channels '
        f'{_escape(", ".join(check.channel_names))}</p><dl class="facts">{facts}</dl></header>',
        _section("Findings", _findings(check)),
        *([_section("Pictures of suspicious cases", "".join(map(_picture, pictures)))] if pictures else []),
        *shown,
        _section("Disk and memory", f"<p>{_escape(note)}</p>"),
        _section("Cases", _cases(check.cases)),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>check of {_escape(check.root.name)} · medckpt</title>\n<style>{STYLE}{_STYLE}</style>\n"
        "</head>\n<body>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )
    write_text(out, page)


def _findings(check: DatasetCheck) -> str:
    rows = [(finding, "data set") for finding in check.findings]
    rows += [(finding, case.name) for case in check.cases for finding in case.findings]
    if not rows:
        return "<p>Nothing is wrong.</p>"
    body = "".join(
        f'<tr><td class="name">{_escape(name)}</td><td class="{finding.severity}">{finding.severity}</td>'
        f'<td class="text">{_escape(finding.text)}{_fix(check, finding.fix)}</td></tr>'
        for finding, name in sorted(rows, key=lambda row: row[0].severity != "fail")
    )
    return _wrap(["case", "result", "what, and what to do"], body)


def _fix(check: DatasetCheck, fix: str | None) -> str:
    if fix is None:
        return ""
    return f"<br><code>medckpt check data={_escape(check.root)} {_escape(fix)} output=FOLDER</code>"


def _cases(cases: Sequence[CaseCheck]) -> str:
    rows = []
    for case in cases:
        first = case.images[0] if case.images else None
        values = listing_of_values(case)
        cells = ["&ndash;"] * 4
        if first is not None:
            cells = [
                " x ".join(map(str, first.shape)),
                " x ".join(f"{side:.4g}" for side in first.spacing_mm),
                first.axes,
                f"{first.minimum:.4g} .. {first.maximum:.4g}",
            ]
        rows.append(
            f'<tr><td class="name">{_escape(case.name)}</td><td class="{case.result}">{case.result}</td>'
            f'{"".join(f"<td>{cell}</td>" for cell in cells)}<td class="text">{_escape(values)}</td></tr>'
        )
    head = ["case", "result", "size", "spacing, mm", "axes", "intensities", "label: voxels"]
    return _wrap(head, "".join(rows))


def listing_of_values(case: CaseCheck, limit: int = 12) -> str:
    """Returns a case's label values with their voxels, as text."""
    if case.label is None:
        return ""
    items = [f"{value}: {count}" for value, count in case.label.voxels.items()]
    return ", ".join(items[:limit]) + (f" and {case.label.distinct - limit} more" if len(items) > limit else "")


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=name' if i == 0 else ''}>{_escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return _wrap(head, body)


def _wrap(head: Sequence[str], body: str) -> str:
    cells = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in head)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{_escape(title)}</h2>\n{body}\n</section>"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img alt="{_escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'


def _escape(value: object) -> str:
    return html.escape(str(value))
