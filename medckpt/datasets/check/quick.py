"""The fast part of a check, which every training runs first: headers and grids, no voxels of images.

Label values, NaN and what else only voxels show is found by `prepare`, once per case and before the training begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from medckpt.blocks import DataConfig
from medckpt.datasets.check.case import label_grid_findings, warnings_into
from medckpt.datasets.layouts import Case
from medckpt.datasets.prepare import channels_apart
from medckpt.datasets.reading import read_grid
from medckpt.errors import DataError
from medckpt.geometry import same_grid

Progress = Callable[[int, int], None]


def failing_cases(
    cases: Sequence[Case], config: DataConfig, *, threads: int = 2, progress: Progress | None = None
) -> dict[str, str]:
    """Returns the cases whose headers show that they cannot be used, each with the reason.

    `config` says which faults reading mends. What the readers warn of is left to the reading itself, so that it is
    said once.
    """
    failed = {}
    with warnings_into([], Path()), ThreadPoolExecutor(threads) as pool:
        problems = pool.map(partial(_problem, config), cases)
        for done, (case, problem) in enumerate(zip(cases, problems, strict=True), start=1):
            if problem:
                failed[case.name] = problem
            if progress:
                progress(done, len(cases))
    return failed


def _problem(config: DataConfig, case: Case) -> str | None:
    try:
        first, *others = (read_grid(path, config.dicom, shear=config.shear) for path in case.images)
        for path, grid in zip(case.images[1:], others, strict=True):
            if not same_grid(first, grid):
                return channels_apart(first, grid, case.images[0], path)
        if case.label is None:
            return "it has no label map."
        label = read_grid(case.label, shear=config.shear)
        findings = [] if config.label_grid == "resample" else label_grid_findings(label, first, case.label)
    except DataError as error:
        return str(error)
    return findings[0].text if findings else None
