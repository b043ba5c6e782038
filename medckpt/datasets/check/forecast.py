"""What preparing the data set will take of disk and memory, from the grids alone."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence

import numpy as np

from medckpt import machine
from medckpt.datasets.check.findings import CaseCheck, Finding, Forecast
from medckpt.datasets.prepare import cache_folder
from medckpt.errors import size

VOXEL_BYTES = 4
"""Images are prepared in float32 ..."""

LABEL_BYTES = 1
"""... and labels of up to 255 classes in one byte."""


def forecast(cases: Sequence[CaseCheck]) -> Forecast | None:
    """Returns disk and peak memory of `prepare` at the median spacing; None where no image could be read."""
    known = [case for case in cases if case.images and case.grid_shape]
    if not known:
        return None
    ordered = {case.name: _ras_spacing(case) for case in known}
    target = np.median(list(ordered.values()), axis=0)
    disk, peaks = 0, []
    for case in known:
        assert case.grid_shape is not None
        shape = np.maximum(1, np.round(np.array(case.grid_shape) * ordered[case.name] / target))
        prepared, stored = int(shape.prod()), math.prod(case.grid_shape)
        channels = len(case.images)
        disk += prepared * (channels * VOXEL_BYTES + LABEL_BYTES)
        # All channels as read and as resampled, stacked at the end; twice a resampled one while it is normalised.
        peaks.append((channels * stored + (2 * channels + 2) * prepared) * VOXEL_BYTES + stored + prepared)
    threads = machine.cpu_count()
    cache = cache_folder()
    return Forecast(
        spacing_mm=tuple(round(float(side), 4) for side in target),  # type: ignore[arg-type]
        disk_bytes=disk,
        free_bytes=shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.exists())).free,
        cache=str(cache),
        peak_bytes=sum(sorted(peaks)[-threads:]),
        available_bytes=machine.available_bytes(),
        threads=threads,
    )


def forecast_findings(foreseen: Forecast) -> list[Finding]:
    """Returns warnings where disk or memory will not do."""
    findings = []
    if foreseen.disk_bytes > foreseen.free_bytes:
        text = (
            f"the prepared cases take {size(foreseen.disk_bytes)}, {foreseen.cache} has {size(foreseen.free_bytes)} "
            "left. Point XDG_CACHE_HOME to a larger disk, or train at a coarser data.spacing_mm."
        )
        findings.append(Finding(code="disk", severity="warn", text=text))
    if foreseen.available_bytes is not None and foreseen.peak_bytes > foreseen.available_bytes:
        text = (
            f"preparing the largest cases takes {size(foreseen.peak_bytes)} of memory on {foreseen.threads} threads, "
            f"{size(foreseen.available_bytes)} are free. Use a larger machine, or crop the scans."
        )
        findings.append(Finding(code="memory", severity="warn", text=text))
    return findings


def _ras_spacing(case: CaseCheck) -> np.ndarray:
    """Spacing of the first channel along R, A, S."""
    image = case.images[0]
    by_axis = {"R": 0, "L": 0, "A": 1, "P": 1, "S": 2, "I": 2}
    spacing = np.empty(3)
    for letter, side in zip(image.axes, image.spacing_mm, strict=True):
        spacing[by_axis[letter]] = side
    return spacing
