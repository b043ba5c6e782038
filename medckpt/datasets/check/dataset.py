"""The whole check of a data set: every case in a process, then what only shows between cases."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from medckpt.blocks import DataConfig
from medckpt.datasets.check.case import Task, check_case
from medckpt.datasets.check.duplicates import duplicate_findings
from medckpt.datasets.check.findings import CaseCheck, DatasetCheck, Finding
from medckpt.datasets.check.forecast import forecast, forecast_findings
from medckpt.datasets.check.labels import label_findings, label_rows
from medckpt.datasets.check.pool import Lost, run_each
from medckpt.datasets.dataset_json import FILE_NAME
from medckpt.datasets.dicom_series import is_dicom_file
from medckpt.datasets.layouts import MOST_LABELS, Case, Dataset, Fault, open_dataset
from medckpt.datasets.reading import image_stem
from medckpt.errors import DataError

CASE_SECONDS = 600.0
"""A case that is not read after this long counts as one that hangs."""

SPACING_RATIO = 3.0
"""A case whose voxels are this many times larger or smaller along an axis than the median's is named."""

Progress = Callable[[int, int], None]


def check_dataset(
    root: Path,
    config: DataConfig | None = None,
    *,
    workers: int = 2,
    limit_seconds: float = CASE_SECONDS,
    progress: Progress | None = None,
) -> DatasetCheck:
    """Checks a data set in any layout of `layouts`, or one scan alone (a file, or a folder of DICOM slices).

    Args:
        root: the folder or file.
        config: what reading does about faults of files (`shear`, `label_grid`, `dicom`); by default it refuses them.
        workers: processes, one case in memory in each; 0 works in this process. A script needs the
            `if __name__ == "__main__"` guard for more than 0.
        limit_seconds: after this long a case counts as one that hangs, and is named.
        progress: called with (cases done, cases in all).

    Raises:
        DataError: there is no such folder, no known layout in it, or its dataset.json is faulty. What is wrong with a
            case is never raised.
    """
    return check_cases(*find_cases(root), config, workers=workers, limit_seconds=limit_seconds, progress=progress)


def check_cases(
    dataset: Dataset,
    faults: Sequence[Fault] = (),
    config: DataConfig | None = None,
    *,
    workers: int = 2,
    limit_seconds: float = CASE_SECONDS,
    progress: Progress | None = None,
) -> DatasetCheck:
    """Checks what `find_cases` found; the arguments are those of `check_dataset`."""
    names, labels = dataset.channel_names, dataset.labels
    config = config or DataConfig()
    tasks = [
        Task(case=case, root=dataset.root, channel_names=names, labels=labels, config=config) for case in dataset.cases
    ]
    checked: dict[str, CaseCheck] = {}
    for done, (index, result) in enumerate(_results(tasks, workers, limit_seconds), start=1):
        case = dataset.cases[index]
        checked[case.name] = _lost(case, result) if isinstance(result, Lost) else result
        if progress:
            progress(done, len(tasks))
    for name, text in faults:
        before = checked.get(name, CaseCheck(name=name, patient=name))
        finding = Finding(code="layout", severity="fail", text=text)
        checked[name] = dataclasses.replace(before, findings=(finding, *before.findings))
    return _together(dataset, [checked[name] for name in sorted(checked)])


def find_cases(root: Path) -> tuple[Dataset, list[Fault]]:
    """Returns the cases that are in order, and the faults of the others; a scan alone is a case without a label."""
    root = Path(root)
    if not root.exists():
        raise DataError(f"data={root}: there is no such file or folder.")
    try:
        alone = root.is_file() or any(item.is_file() and is_dicom_file(item) for item in sorted(root.iterdir()))
    except PermissionError as error:
        raise DataError(
            f"{error.filename or root}: it cannot be opened ({error.strerror}). Correct its permissions."
        ) from error
    if alone:
        path = root.resolve()
        case = Case(name=image_stem(path.name) or path.name, patient=path.name, images=(path,), label=None)
        return Dataset(root=path, layout="one scan", channel_names=("image",), labels={}, cases=(case,)), []
    faults: list[Fault] = []
    return open_dataset(root, faults=faults, discover=False), faults


def _results(tasks: Sequence[Task], workers: int, limit_seconds: float) -> Iterator[tuple[int, CaseCheck | Lost]]:
    if workers < 1:
        yield from ((index, check_case(task)) for index, task in enumerate(tasks))
    else:
        yield from run_each(check_case, tasks, workers=workers, limit_seconds=limit_seconds)


def _lost(case: Case, lost: Lost) -> CaseCheck:
    text = (
        f"the case cannot be read: {lost.why}. Is a file damaged, or too large for this machine's memory? Copy or "
        "convert it again."
    )
    finding = Finding(code="lost", severity="fail", text=text)
    return CaseCheck(name=case.name, patient=case.patient, findings=(finding,))


def _together(dataset: Dataset, cases: list[CaseCheck]) -> DatasetCheck:
    """Adds what only shows between cases."""
    more: dict[str, list[Finding]] = defaultdict(list)
    whole: list[Finding] = []
    for by_case, of_all in (
        label_findings(cases, dataset.labels, MOST_LABELS),
        duplicate_findings(dataset, cases),
        _spacing_findings(cases),
    ):
        whole += of_all
        for name, findings in by_case.items():
            more[name] += findings
    whole += _known_dataset(dataset.root)
    foreseen = forecast(cases)
    if foreseen:
        whole += forecast_findings(foreseen)
    return DatasetCheck(
        root=dataset.root,
        layout=dataset.layout,
        channel_names=dataset.channel_names,
        labels=dataset.labels,
        cases=tuple(dataclasses.replace(case, findings=(*case.findings, *more[case.name])) for case in cases),
        label_rows=label_rows(cases, dataset.labels),
        forecast=foreseen,
        findings=tuple(whole),
    )


def _spacing_findings(cases: Sequence[CaseCheck]) -> tuple[dict[str, list[Finding]], list[Finding]]:
    """Cases whose finest or coarsest voxel side is far from the others': often a unit, or a header, that is wrong."""
    import numpy as np

    sides = {case.name: sorted(case.images[0].spacing_mm) for case in cases if case.images}
    if len(sides) < 3:
        return {}, []
    median = np.median(list(sides.values()), axis=0)
    found = {}
    for name, own in sides.items():
        ratio = np.asarray(own) / median
        if ratio.max() > SPACING_RATIO or ratio.min() < 1 / SPACING_RATIO:
            shown, usual = (" x ".join(f"{side:.4g}" for side in triple) for triple in (own, median))
            text = f"voxels of {shown} mm where {usual} mm is usual here (sides sorted). Is the unit or header right?"
            found[name] = [Finding(code="spacing", severity="warn", text=text)]
    return found, []


def _known_dataset(root: Path) -> list[Finding]:
    """What is publicly known to be wrong with a public data set."""
    file = root / FILE_NAME
    if not file.is_file():
        return []
    facts = json.loads(file.read_text(encoding="utf-8-sig"))
    names = {str(name).lower() for pair in (facts.get("labels") or {}).items() for name in pair}
    if str(facts.get("name", "")).lower() in ("spleen", "task09_spleen") and "spleen" in names:
        text = (
            "this looks like Spleen of the Medical Segmentation Decathlon, whose images are stored as RAS but are "
            "anatomically LPS (github.com/Project-MONAI/model-zoo/issues/766): a network trained on them is mirrored "
            "on other data. Turn the first two axes of images and labels before you mix it with others."
        )
        return [Finding(code="known-dataset", severity="warn", text=text)]
    return []
