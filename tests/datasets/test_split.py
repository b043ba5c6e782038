"""The split by patient: fixed by seed and ids alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from medckpt.datasets.layouts import Case
from medckpt.datasets.split import split_patients
from medckpt.errors import ConfigError, DataError


def case(name: str, patient: str | None = None) -> Case:
    return Case(name=name, patient=patient or name, images=(Path(f"{name}.nii.gz"),), label=Path("label.nii.gz"))


CASES = [case(f"p{i:02d}") for i in range(10)]


def names(cases: tuple[Case, ...]) -> list[str]:
    return [c.name for c in cases]


def test_the_choice_is_fixed_for_all_time() -> None:
    """The two lowest of `printf '7:p00' | sha256sum`, ..., computed outside Python."""
    _, validation = split_patients(CASES, 2, seed=7)
    assert names(validation) == ["p01", "p02"]


def test_order_of_the_cases_does_not_matter() -> None:
    expected = split_patients(CASES, 0.3, seed=1)
    for trial in range(5):
        shuffled = random.Random(trial).sample(CASES, len(CASES))
        assert split_patients(shuffled, 0.3, seed=1) == expected
    training, validation = expected
    assert len(validation) == 3
    assert names(training) == sorted(names(training))
    assert set(training) | set(validation) == set(CASES)
    assert len({names(split_patients(CASES, 3, seed=seed)[1])[0] for seed in range(20)}) > 1


def test_both_cases_of_a_patient_go_together() -> None:
    cases = [case(f"{patient}_{visit}", patient) for patient in "abcdef" for visit in (1, 2)]
    training, validation = split_patients(cases, 2, seed=0)
    assert len(validation) == 4
    assert not {c.patient for c in training} & {c.patient for c in validation}


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.25, 2), (0.5, 5), (0.99, 9), (1, 1), (9, 9)])
def test_shares_and_numbers(share: float, count: int) -> None:
    training, validation = split_patients(CASES, share, seed=0)
    assert (len(training), len(validation)) == (10 - count, count)


def test_one_patient_more_moves_few() -> None:
    before = set(names(split_patients(CASES, 3, seed=0)[1]))
    after = set(names(split_patients([*CASES, case("new")], 3, seed=0)[1]))
    assert len(before - after) <= 1


def test_named_patients() -> None:
    training, validation = split_patients(CASES, ["p03", "p01"], seed=5)
    assert names(validation) == ["p01", "p03"]
    assert len(training) == 8
    with pytest.raises(ConfigError, match=r"'p3': Did you mean 'p0?3"):
        split_patients(CASES, ["p3"], seed=0)
    with pytest.raises(ConfigError, match=r"as a list, like \[p03\]"):
        split_patients(CASES, "p03", seed=0)
    for everyone in ([], names(tuple(CASES))):
        with pytest.raises(ConfigError, match="at least one has to be on each side"):
            split_patients(CASES, everyone, seed=0)


@pytest.mark.parametrize("validation", [0, 10, -1, 0.0, 1.0, -0.2, float("nan"), True])
def test_impossible_shares(validation: float) -> None:
    with pytest.raises(ConfigError, match=r"from 1 to 9, or a list of patient ids"):
        split_patients(CASES, validation, seed=0)


def test_too_few_patients() -> None:
    for cases in ([], [case("a_1", "a"), case("a_2", "a")]):
        with pytest.raises(DataError, match="at least 2 patients; here is"):
            split_patients(cases, 0.5, seed=0)
