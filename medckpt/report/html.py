"""`report.html`: a run on one page that opens anywhere, without a network and without the run folder beside it."""

from __future__ import annotations

import base64
import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medckpt.errors import DataError
from medckpt.files import write_text
from medckpt.report.curves import class_colour, duration

WIDE_TABLE_CLASSES = 8
"""With more classes than this, the table of cases gives each case's lowest class instead of a column per class."""
LONG_TABLE_CASES = 40

STYLE = """
:root { --ink: #1c2024; --muted: #626a75; --line: #e3e6ea; --soft: #f5f6f8; --page: #ffffff; --bar: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --muted: #9aa3ae; --line: #333940; --soft: #1f2429; --page: #15181c; --bar: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.6rem 0 .7rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 46rem; }
.muted { color: var(--muted); }
.facts { display: flex; flex-wrap: wrap; gap: .9rem 2.4rem; margin: 1.4rem 0 0; padding: 0; }
.facts div { min-width: 5rem; }
.facts dt { font-size: .8rem; color: var(--muted); }
.facts dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.facts .first dd { font-size: 2.2rem; font-weight: 650; line-height: 1.15; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .38rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.name { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
thead th { font-weight: 600; font-size: .8rem; color: var(--muted); vertical-align: bottom; white-space: normal; }
tfoot td { font-weight: 650; border-bottom: 0; }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .5em; }
.bar { display: inline-block; width: 7rem; height: .55rem; background: var(--soft);
  border-radius: 2px; overflow: hidden; margin-right: .7rem; vertical-align: middle; text-align: left; }
.bar i { display: block; height: 100%; background: var(--bar); }
.facts-table td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.facts-table td:first-child { width: 16rem; color: var(--muted); }
figure { margin: 0 0 1.6rem; overflow-x: auto; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 3px; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: 4px; overflow-x: auto; font-size: .84rem;
  line-height: 1.45; margin: .4rem 0 1rem; font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin: .6rem 0; }
summary { cursor: pointer; }
@media (max-width: 40rem) {
  body { padding: 1.2rem .9rem 3rem; }
  .bar { display: none; }
  th, td { padding: .35rem .45rem; }
  img { max-width: none; width: 40rem; }
  .facts-table td:first-child { width: 9rem; }
}
@media print {
  :root { --ink: #000; --muted: #444; --line: #ccc; --soft: #f2f2f2; --page: #fff; --bar: #0072b2; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  pre { white-space: pre-wrap; }
  .bar i, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def write_report(run_folder: Path) -> Path:
    """Writes `report.html` into a run folder and returns its path.

    Everything is optional: config.yaml, metrics.json, environment.json, memory.json, split.json, curves.png and
    overlays/*.png are shown where they exist, and a plain sentence stands where they do not; memory_timeline.png is
    shown where it exists. Pictures are embedded.

    Raises:
        DataError: The folder does not exist, or one of its JSON files cannot be read.
    """
    if not run_folder.is_dir():
        raise DataError(f"{run_folder}: no such folder. A report is written into the folder of a run.")
    metrics = _read_json(run_folder / "metrics.json")
    sections = [
        _headline(run_folder, metrics),
        _section("Classes", _class_table(metrics)),
        _section("Learning curves", _picture(run_folder / "curves.png", "Loss, learning rate and validation Dice")),
        _section("Pictures", _overlays(run_folder / "overlays")),
        _section("Cases", _case_table(metrics)),
        _section("Memory", _memory(run_folder)),
        _section("Use this run", _commands(run_folder, metrics)),
        _section("How it was made", _provenance(run_folder)),
    ]
    title = html.escape(str(metrics.get("recipe") or run_folder.resolve().name))
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title} · medckpt</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )
    out = run_folder / "report.html"
    write_text(out, page)
    return out


def _headline(run_folder: Path, metrics: Mapping[str, Any]) -> str:
    name = run_folder.resolve().name
    recipe = metrics.get("recipe")
    cases = metrics.get("cases") or {}
    facts = [("mean Dice", _number(metrics.get("dice_mean"), 3))] if metrics else []
    if cases:
        facts.append(("validation cases", f"{len(cases)}"))
    if metrics.get("steps") is not None:
        facts.append(("steps", f"{metrics['steps']:,}"))
    if metrics.get("minutes") is not None:
        facts.append(("training time", duration(float(metrics["minutes"]))))
    items = "".join(
        f"<div{' class=first' if index == 0 else ''}><dt>{label}</dt><dd>{value}</dd></div>"
        for index, (label, value) in enumerate(facts)
    )
    subtitle = f'<p class="muted">{html.escape(name)}</p>\n' if recipe and recipe != name else ""
    missing = "" if metrics else "<p>This run has no metrics.json: it has not been evaluated.</p>"
    return (
        f"<header>\n<h1>{html.escape(str(recipe or name))}</h1>\n"
        f'{subtitle}{missing}<dl class="facts">{items}</dl>\n</header>'
    )


def _class_table(metrics: Mapping[str, Any]) -> str:
    dice = metrics.get("dice_per_class") or {}
    if not dice:
        return "<p>No scores per class.</p>"
    columns = [metrics.get(f"{key}_per_class") or {} for key in ("surface_distance_mm", "hausdorff95_mm", "cases")]
    rows = []
    for index, (name, value) in enumerate(dice.items()):
        surface, hausdorff, counted = (column.get(name) for column in columns)
        width = 100 * min(max(value or 0.0, 0.0), 1.0)
        swatch = f'<span class="swatch" style="background:{class_colour(index)}"></span>'
        bar = f'<span class="bar"><i style="width:{width:.1f}%"></i></span>'
        rows.append(
            f'<tr><td class="name">{swatch}{html.escape(str(name))}</td><td>{bar}{_number(value, 3)}</td>'
            f"<td>{_number(surface, 2)}</td><td>{_number(hausdorff, 2)}</td><td>{_number(counted, 0)}</td></tr>"
        )
    head = ["class", "Dice", "mean surface distance, mm", "95&nbsp;% Hausdorff, mm", "cases counted"]
    mean = _number(metrics.get("dice_mean"), 3)
    foot = f"<tr><td>mean of classes</td><td>{mean}</td><td></td><td></td><td></td></tr>"
    rule = f'<p class="muted">{html.escape(str(metrics["rule"]))}</p>' if metrics.get("rule") else ""
    return _table(head, rows, foot) + rule


def _case_table(metrics: Mapping[str, Any]) -> str:
    """One row per case, lowest mean Dice first: those are the ones to look at."""
    cases: Mapping[str, Any] = metrics.get("cases") or {}
    if not cases:
        return "<p>No scores per case.</p>"
    classes = list(metrics.get("dice_per_class") or {})
    scores = {
        name: {key: value for key, value in case["dice"].items() if value is not None} for name, case in cases.items()
    }
    means = {name: sum(dice.values()) / len(dice) if dice else None for name, dice in scores.items()}
    order = sorted(cases, key=lambda name: (means[name] is None, means[name] or 0.0, name))
    wide = len(classes) > WIDE_TABLE_CLASSES
    rows = []
    for name in order:
        cells = [_number(means[name], 3)]
        if wide:
            lowest = min(scores[name], key=lambda key: scores[name][key], default=None)
            cells += [html.escape(lowest or "") or "&ndash;", _number(scores[name].get(lowest or ""), 3)]
        else:
            cells += [_number(scores[name].get(key), 3) for key in classes]
        rows.append(
            f'<tr><td class="name">{html.escape(name)}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        )
    head = ["case", "mean Dice", *(["lowest class", "its Dice"] if wide else map(html.escape, classes))]
    intro = '<p class="muted">Lowest mean Dice first; a dash where the class is in neither label map.</p>'
    table = intro + _table(head, rows)
    return table if len(rows) <= LONG_TABLE_CASES else f"<details><summary>{len(rows)} cases</summary>{table}</details>"


def _overlays(folder: Path) -> str:
    pictures = sorted(folder.glob("*.png")) if folder.is_dir() else []
    if not pictures:
        return "<p>No pictures were drawn.</p>"
    return "".join(_picture(path, f"Overlay of {path.stem}") for path in pictures)


def _picture(path: Path, alt: str) -> str:
    if not path.is_file():
        return f"<p>No {html.escape(path.name)} in the run folder.</p>"
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></figure>'


def _memory(run_folder: Path) -> str:
    """What the run was forecast to take and what it took in one line, the forecast's picture, and all that is known."""
    memory = _read_json(run_folder / "memory.json")
    picture = run_folder / "memory_timeline.png"
    shown = _picture(picture, "Memory over one training step, as forecast") if picture.is_file() else ""
    if not memory:
        return f"<p>No memory.json: memory was not measured.</p>{shown}"
    peaks = []
    for word in ("predicted", "measured"):
        value = memory.get(f"{word}_peak_bytes")
        peaks.append(f"not {word}" if value is None else f"{word} {_bytes(value)}")
    line = f"<p>Peak of a training step: {', '.join(peaks)}.</p>"
    told = ("predicted_peak_bytes", "measured_peak_bytes", "parts", "forecast")
    rest = _flat({key: value for key, value in memory.items() if key not in told})
    return line + shown + (_facts_table(rest) if rest else "") + _forecast(memory)


def _forecast(memory: Mapping[str, Any]) -> str:
    """Tables of what the predicted peak is made of, and (folded) of every other figure of the forecast."""
    forecast = memory.get("forecast")
    figures = dict(forecast) if isinstance(forecast, Mapping) else {}
    parts, holders = memory.get("parts") or figures.pop("parts", None), figures.pop("holders", None)
    text = ""
    if isinstance(parts, Mapping):
        rows = [(f"predicted: {name}", _bytes(value)) for name, value in parts.items() if value]
        text += _facts_table(rows) if rows else ""
    if isinstance(holders, list):
        figures["held at the peak by"] = {f"{holder['region']}_bytes": holder["bytes"] for holder in holders}
    if figures:
        table = _facts_table(_flat(figures))
        text += f"<details><summary>The forecast: place of the peak and who holds it</summary>{table}</details>"
    return text


def _commands(run_folder: Path, metrics: Mapping[str, Any]) -> str:
    folder = shlex.quote(str(run_folder))
    entries = [
        (
            "Segment new scans (NIfTI, or folders of DICOM files):",
            f"medckpt predict run={folder} input=SCANS output=SEGMENTATIONS",
        ),
        ("Train on from where it stopped:", f"medckpt train resume={folder}"),
    ]
    command = metrics.get("command")
    if command:
        text = command if isinstance(command, str) else shlex.join(map(str, command))
        entries.append(("How this run was started:", text))
    return "".join(f"<p>{label}</p><pre>{html.escape(text)}</pre>" for label, text in entries)


def _provenance(run_folder: Path) -> str:
    parts = []
    split = _read_json(run_folder / "split.json")
    if split:
        sides = ", ".join(f"{len(value)} {html.escape(key)}" for key, value in split.items() if isinstance(value, list))
        listed = {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in split.items()}
        table = _facts_table(_flat(listed))
        parts.append(f"<details><summary>Split of the cases: {sides or 'see inside'}</summary>{table}</details>")
    else:
        parts.append("<p>No split.json: which cases trained and which validated is not recorded.</p>")
    config = run_folder / "config.yaml"
    if config.is_file():
        text = html.escape(config.read_text(encoding="utf-8"))
        parts.append(f"<details><summary>Configuration (config.yaml)</summary><pre>{text}</pre></details>")
    else:
        parts.append("<p>No config.yaml in the run folder.</p>")
    environment = _read_json(run_folder / "environment.json")
    if environment:
        table = _facts_table(_flat(environment))
        parts.append(f"<details><summary>Environment: versions and machine</summary>{table}</details>")
    else:
        parts.append("<p>No environment.json: versions and machine are not recorded.</p>")
    return "\n".join(parts)


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>"


def _table(head: Iterable[str], rows: Iterable[str], foot: str = "") -> str:
    """Lays escaped cells out as a table that scrolls sideways on a narrow screen."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    end = f"<tfoot>{foot}</tfoot>" if foot else ""
    return (
        f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody>{end}</table></div>'
    )


def _facts_table(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in rows)
    return f'<table class="facts-table"><tbody>{body}</tbody></table>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Returns nested facts as (dotted key, text); keys ending in `_bytes` are memory, pairs of bytes as intervals."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        elif key.endswith("_bytes") and isinstance(value, (int, float)):
            rows.append((f"{prefix}{key.removesuffix('_bytes')}", _bytes(value)))
        elif key.endswith(("_bytes", "interval")) and isinstance(value, list) and value:
            rows.append((f"{prefix}{key.removesuffix('_bytes')}", " to ".join(map(_bytes, value))))
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return rows


def _read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}). Delete it to write the report without it.") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{path}: holds a {type(value).__name__}, not an object. Delete it to write the report without it."
        )
    return value


def _number(value: float | None, digits: int) -> str:
    return "&ndash;" if value is None else f"{value:.{digits}f}"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
