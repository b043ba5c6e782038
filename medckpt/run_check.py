"""The verb `check`: looks at every case of a data set before a training does; writes a corrected copy where asked."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medckpt import check_screen, console, machine, typed
from medckpt.blocks import DataConfig
from medckpt.datasets.check.dataset import check_cases, find_cases
from medckpt.datasets.check.findings import DatasetCheck
from medckpt.datasets.check.fix import Change, fix_dataset
from medckpt.datasets.layouts import Dataset
from medckpt.datasets.reading import read_otherwise
from medckpt.errors import ConfigError
from medckpt.files import write_json
from medckpt.report.check_page import write_check_page

PICTURES = 4
"""Suspicious cases that get a picture in the report."""

_PICTURED = ("flip", "exchanged", "constant", "grid")

log = logging.getLogger("medckpt")


def check(
    data: Path,
    *,
    report: Path | None = None,
    workers: int | None = None,
    reading: Mapping[str, Any] | None = None,
) -> DatasetCheck:
    """Checks a data set, prints one screen, and leaves report.html and check.json in a folder.

    Args:
        data: a data set in any layout that a training takes, or one scan.
        report: folder for the report; by default checks/NAME-DIGEST, which a second check of the data replaces.
        workers: processes, each with one case in memory; None takes the machine's cores.
        reading: keys of `data` that say what reading does about faults, such as {"dicom": {"tilt": "resample"}}.

    Raises:
        DataError: nothing there, no known layout, a faulty dataset.json.
        ConfigError: `report` is a file, or lies inside of the data set.
    """
    data, config = Path(data), read_otherwise(DataConfig(), reading or {})
    if report is None:
        digest = hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:6]
        report = Path("checks") / f"{data.resolve().name}-{digest}"
    elif report.exists() and not report.is_dir():
        raise ConfigError(f"report={report}: this is a file; give a folder.")
    if data.is_dir() and report.resolve().is_relative_to(data.resolve()):
        raise ConfigError(f"report={report}: the report goes outside of the data set, which a check leaves alone.")
    dataset, faults = find_cases(data)
    workers = machine.cpu_count() if workers is None else workers
    with console.bar("check", len(dataset.cases)) as advance:
        checked = check_cases(dataset, faults, config, workers=workers, progress=lambda done, of: advance())
    page = report / "report.html"
    tables = [
        ("Sizes, spacings, intensities", check_screen.summary_rows(checked)),
        ("Label values", check_screen.label_table(checked, limit=None)),
    ]
    note = check_screen.forecast_line(checked)
    write_check_page(checked, tables, note, _draw(checked, dataset, config, report / "pictures"), page)
    write_json(report / "check.json", to_dict(checked))
    check_screen.checked(checked, page)
    return checked


def fix(
    data: Path, output: Path, fixes: Sequence[str], *, remap: Mapping[int, int] | None = None
) -> tuple[Change, ...]:
    """Writes a corrected copy; see `medckpt.datasets.check.fix.fix_dataset`."""
    with console.bar("correct", None) as advance:
        changes = fix_dataset(data, output, fixes, remap=remap, progress=lambda done, of: advance())
    check_screen.fixed(changes, output)
    return changes


def to_dict(checked: DatasetCheck) -> dict[str, Any]:
    """Returns a check as lists, dicts and scalars, fit for JSON: the facts of the screen and the report."""
    return {
        "data": str(checked.root),
        "layout": checked.layout,
        "passed": checked.count("pass"),
        "warned": checked.count("warn"),
        "failed": checked.count("fail"),
        "findings": typed.to_plain(checked.findings),
        "labels": typed.to_plain(checked.label_rows),
        "channel_names": list(checked.channel_names),
        "forecast": typed.to_plain(checked.forecast),
        "cases": {
            case.name: {"result": case.result}
            | {key: value for key, value in typed.to_plain(case).items() if key not in ("name", "grid_shape")}
            for case in checked.cases
        },
    }


def _draw(checked: DatasetCheck, dataset: Dataset, config: DataConfig, folder: Path) -> list[Path]:
    """Draws the cases whose findings a picture explains; the label is laid over the image, each by its own header."""
    wanted = [case.name for case in checked.cases if case.images and any(f.code in _PICTURED for f in case.findings)][
        :PICTURES
    ]
    if not wanted:
        return []
    from medckpt.datasets.reading import read_label, read_volume
    from medckpt.errors import MedckptError
    from medckpt.geometry import canonical_grid, resample
    from medckpt.report.overlay import draw_overlay

    cases = {case.name: case for case in dataset.cases}
    rows = [row for row in checked.label_rows if row.value][:24]
    classes = {row.name or f"label {row.value}": row.value for row in rows}
    pictures = []
    with console.bar("draw", len(wanted)) as advance:
        for name in wanted:
            case = cases[name]
            if case.label is None:
                continue
            try:
                image = read_volume(case.images[0], config.dicom, shear=config.shear)
                label = read_label(case.label, shear=config.shear)
                upright = canonical_grid(image.grid, None)
                scan = resample(image.array, image.grid, upright, order=0, fill=float(image.array.min()))
                marks = resample(label.array, label.grid, upright, order=0, fill=0)
                picture = folder / f"{name}.png"
                draw_overlay(scan, None, marks, upright.spacing_mm, classes, None, name, picture, heading="label map")
            except MedckptError as error:  # a picture is an extra
                log.info("%s: no picture (%s)", name, error)
            else:
                pictures.append(picture)
            advance()
    return pictures
