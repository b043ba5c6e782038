"""Training and validation by patient: the same patients for the same seed, on any machine and in any order of files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from medckpt.datasets.layouts import Case
from medckpt.errors import ConfigError, DataError, suggest


def split_patients(
    cases: Sequence[Case], validation: float | int | Sequence[str], seed: int
) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Divides cases so that no patient is on both sides.

    Patients are ranked by SHA-256 of seed and patient id, and the first ones validate: the choice depends on neither
    the order of `cases` nor Python's hash, and a patient more or less moves few others.

    Args:
        cases: at least two patients.
        validation: a share between 0 and 1 (rounded, at least one patient on each side), a number of patients, or the
            ids of exactly the patients that validate.
        seed: another seed, another choice; not used with ids.

    Returns:
        (training, validation), each sorted by case name.

    Raises:
        DataError: fewer than two patients.
        ConfigError: no share, number or ids that leave patients on both sides.
    """
    patients = sorted({case.patient for case in cases})
    if len(patients) < 2:
        there = ", ".join(patients) or "no case"
        raise DataError(
            f"a split by patient needs at least 2 patients; here is {len(patients)} ({there}). Add patients, or bring "
            "a separate data set to validate on."
        )
    chosen = _named(validation, patients) if _is_names(validation) else _ranked(validation, patients, seed)
    ordered = sorted(cases, key=lambda case: (case.name, case.patient))
    return (
        tuple(case for case in ordered if case.patient not in chosen),
        tuple(case for case in ordered if case.patient in chosen),
    )


def _is_names(validation: object) -> bool:
    return isinstance(validation, Sequence)


def _named(validation: object, patients: Sequence[str]) -> set[str]:
    assert isinstance(validation, Sequence)
    if isinstance(validation, str):
        raise ConfigError(f"validation={validation!r}: patients are given as a list, like [{validation}].")
    unknown = [str(name) for name in validation if name not in patients]
    if unknown:
        raise ConfigError(
            "validation names patients that are not in the data set: "
            + " ".join(f"'{name}': {suggest(name, patients)}" for name in unknown[:3])
        )
    chosen = set(validation)
    if not 0 < len(chosen) < len(patients):
        raise ConfigError(
            f"validation names {len(chosen)} of {len(patients)} patients; at least one has to be on each side."
        )
    return chosen


def _ranked(validation: object, patients: Sequence[str], seed: int) -> set[str]:
    count = 0
    if isinstance(validation, int) and not isinstance(validation, bool):
        count = validation if 0 < validation < len(patients) else 0
    elif isinstance(validation, float) and 0 < validation < 1:
        count = min(max(1, round(validation * len(patients))), len(patients) - 1)
    if not count:
        raise ConfigError(
            f"validation={validation!r}: give a share between 0 and 1 (0.2), a number of patients from 1 to "
            f"{len(patients) - 1}, or a list of patient ids; there are {len(patients)} patients."
        )
    return set(sorted(patients, key=lambda patient: (_rank(seed, patient), patient))[:count])


def _rank(seed: int, patient: str) -> str:
    return hashlib.sha256(f"{seed}:{patient}".encode()).hexdigest()
