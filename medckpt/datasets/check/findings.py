"""What a check finds: facts of every case, findings with what to do, and the whole data set's table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Severity = Literal["fail", "warn"]
Result = Literal["pass", "warn", "fail"]

FIXES = ("geometry", "labels", "orthonormal")
"""What `fix=` takes; see `medckpt.datasets.check.fix`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong (`fail`: training refuses the case or learns nonsense) or odd (`warn`), and the way out.

    `code` is the kind of it, for programs; `fix` the words of `medckpt check` that mend it in a copy, if any do.
    """

    code: str
    severity: Severity
    text: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """One channel of a case: grid and intensities (in real units); `digest` is a hash of its voxel values."""

    path: str
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    axes: str
    """Where the array axes run to, for example LPS."""
    minimum: float
    low: float
    """0.5 percentile, of every n-th voxel."""
    median: float
    high: float
    """99.5 percentile, likewise."""
    maximum: float
    mean: float
    deviation: float
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFacts:
    """A label map: voxels by value (the most frequent ones if there are very many), and its centres in RAS mm."""

    path: str
    shape: tuple[int, int, int]
    distinct: int
    voxels: dict[int, int]
    centres_mm: dict[int, tuple[float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseCheck:
    """What was found in one case; `images` and `label` are missing where they could not be read."""

    name: str
    patient: str
    images: tuple[ImageFacts, ...] = ()
    label: LabelFacts | None = None
    grid_shape: tuple[int, int, int] | None = None
    """Shape of the first channel in R, A, S order; for the forecast."""
    patient_id: str = ""
    """PatientID of a DICOM series."""
    findings: tuple[Finding, ...] = ()

    @property
    def result(self) -> Result:
        """The worst of its findings."""
        severities = {finding.severity for finding in self.findings}
        return "fail" if "fail" in severities else "warn" if severities else "pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRow:
    """One label value over the whole data set; `name` is None for a value that dataset.json does not list."""

    value: int
    name: str | None
    voxels: int
    cases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What preparing the data set for training takes, at the median spacing."""

    spacing_mm: tuple[float, float, float]
    disk_bytes: int
    """Prepared cases on disk; in RAM too, if all of them are to stay in the page cache."""
    free_bytes: int
    cache: str
    peak_bytes: int
    """Host memory while the largest cases are prepared, on `threads` threads."""
    available_bytes: int | None
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCheck:
    """The whole check; `findings` are those of the data set itself, beside the cases' own."""

    root: Path
    layout: str
    channel_names: tuple[str, ...]
    labels: Mapping[str, int]
    """Of dataset.json; empty without one."""
    cases: tuple[CaseCheck, ...]
    label_rows: tuple[LabelRow, ...] = ()
    forecast: Forecast | None = None
    findings: tuple[Finding, ...] = field(default=())

    def count(self, result: Result) -> int:
        """Returns the number of cases with this result."""
        return sum(case.result == result for case in self.cases)

    @property
    def failed(self) -> bool:
        """Whether a case, or the data set itself, fails."""
        return any(case.result == "fail" for case in self.cases) or any(f.severity == "fail" for f in self.findings)
