"""Small data sets in nnU-Net's layout for the check, right until one thing is changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np

from medckpt.datasets.check.dataset import check_dataset
from medckpt.datasets.check.findings import CaseCheck, DatasetCheck

SHAPE = (16, 14, 12)
AFFINE = np.array([[-1.0, 0, 0, 8], [0, -1.0, 0, 7], [0, 0, 1.5, -9], [0, 0, 0, 1]])
LABELS = {"background": 0, "bright": 1, "dark": 2}


def scan(seed: int) -> np.ndarray:
    """Noise around 100, int16: every case another one."""
    return np.random.default_rng(seed).normal(100, 10, SHAPE).astype(np.int16)


def blobs(first: int = 1, second: int = 2) -> np.ndarray:
    """Two boxes of 100 and 48 voxels."""
    label = np.zeros(SHAPE, np.uint8)
    label[2:7, 2:7, 2:6] = first
    label[9:13, 8:11, 5:9] = second
    return label


def write(path: Path, array: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.Nifti1Image(array, affine).to_filename(path)
    return path


def make_set(root: Path, cases: int = 3, labels: Mapping[str, int] | None = None, channel: str = "MR") -> Path:
    """case_0, case_1, ...: images, labels and dataset.json, with nothing wrong."""
    for number in range(cases):
        write(image_of(root, number), scan(number))
        write(label_of(root, number), blobs())
    facts = {"channel_names": {"0": channel}, "labels": dict(labels or LABELS), "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps(facts | {"numTraining": cases}))
    return root


def image_of(root: Path, number: int) -> Path:
    return root / "imagesTr" / f"case_{number}_0000.nii.gz"


def label_of(root: Path, number: int) -> Path:
    return root / "labelsTr" / f"case_{number}.nii.gz"


def look(root: Path) -> DatasetCheck:
    """The check in this process."""
    return check_dataset(root, workers=0)


def case_of(check: DatasetCheck, name: str) -> CaseCheck:
    return next(case for case in check.cases if case.name == name)


def kinds(check: DatasetCheck) -> dict[str, list[tuple[str, str]]]:
    """(severity, code) of every case that has findings, and of the data set under ""."""
    found = {case.name: [(f.severity, f.code) for f in case.findings] for case in check.cases if case.findings}
    if check.findings:
        found[""] = [(f.severity, f.code) for f in check.findings]
    return found


def text_of(check: DatasetCheck, name: str = "") -> str:
    findings = case_of(check, name).findings if name else check.findings
    return "\n".join(finding.text for finding in findings)
