"""One patient under two names: equal voxels, or an equal PatientID, on both sides of a split."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from medckpt.blocks import DataConfig
from medckpt.datasets.check.findings import CaseCheck, Finding
from medckpt.datasets.layouts import Dataset
from medckpt.datasets.split import split_patients
from medckpt.errors import MedckptError, listing

SPLITS = "splits_final.json"

_ONE_SIDE = "If it is one person, keep all on one side: data.validation=[PATIENT, ...] names those that validate."

Found = tuple[dict[str, list[Finding]], list[Finding]]


def duplicate_findings(dataset: Dataset, cases: Sequence[CaseCheck]) -> Found:
    """Returns findings on cases that are one scan or one patient, and on nnU-Net's splits_final.json if it is there.

    It fails where a split is known to put them on both sides: that file's, or the one a training makes by default.
    """
    folds, whole = _folds(dataset)
    folds = {**folds, **_default_split(dataset)}
    by_case: dict[str, list[Finding]] = defaultdict(list)
    for names in _groups({case.name: tuple(image.digest for image in case.images) for case in cases}):
        patients = {case.patient for case in cases if case.name in names}
        if len(patients) > 1:
            _tell(by_case, names, folds, "has the same voxels as", "duplicate", "Keep one of them.")
    identities = {case.name: (case.patient_id,) for case in cases if case.patient_id}
    for names in _groups(identities):
        patients = {case.patient for case in cases if case.name in names}
        if len(patients) > 1 and len(names) < len(identities):  # one id for all is what anonymisation leaves
            _tell(by_case, names, folds, "has the same PatientID as", "same-patient", _ONE_SIDE)
    return by_case, whole


def _groups(keys: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, key in keys.items():
        if key:
            groups[key].append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def _tell(
    by_case: dict[str, list[Finding]],
    names: list[str],
    folds: Mapping[str, dict[str, str]],
    how: str,
    code: str,
    way_out: str,
) -> None:
    split = next((fold for fold, side in folds.items() if len({side[n] for n in names if n in side}) > 1), None)
    for name in names:
        others = listing([other for other in names if other != name])
        where = "a split by patient may put one of them on each side"
        if split is not None:
            where = f"{split} puts them on both sides, so that the validation is scored on what was trained on"
        text = f"{how} {others}; {where}. {way_out}"
        by_case[name].append(Finding(code=code, severity="fail" if split else "warn", text=f"{name} {text}"))


def _default_split(dataset: Dataset) -> dict[str, dict[str, str]]:
    try:
        training, validation = split_patients(dataset.cases, DataConfig().validation, 0)
    except MedckptError:  # a single patient
        return {}
    sides = {case.name: "train" for case in training} | {case.name: "val" for case in validation}
    return {"a training's own split (data.validation=0.2 seed=0)": sides}


def _folds(dataset: Dataset) -> tuple[dict[str, dict[str, str]], list[Finding]]:
    """The sides of every case in nnU-Net's splits file, and what is wrong with that file."""
    path: Path = dataset.root / SPLITS
    if not path.is_file():
        return {}, []
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        pairs = [([str(n) for n in fold["train"]], [str(n) for n in fold["val"]]) for fold in content]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{SPLITS}: it cannot be read as a list of train and val names ({error}). Correct or delete it."
        return {}, [Finding(code="split", severity="fail", text=text)]
    folds, findings = {}, []
    there = {case.name for case in dataset.cases}
    for number, (train, val) in enumerate(pairs):
        both, gone = sorted(set(train) & set(val)), sorted({*train, *val} - there)
        if both:
            text = f"{SPLITS}, fold {number}: {listing(both)} train and validate. Take them off one side."
            findings.append(Finding(code="split", severity="fail", text=text))
        if gone:
            text = f"{SPLITS}, fold {number}: there is no case {listing(gone)}. Correct the name, or take it out."
            findings.append(Finding(code="split", severity="fail", text=text))
        folds[f"{SPLITS}, fold {number},"] = dict.fromkeys(train, "train") | dict.fromkeys(val, "val")
    return folds, findings
