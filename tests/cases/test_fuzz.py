"""Mutated files through the check: no traceback, no hang, no memory out of proportion, read right or named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.fuzz import complaint, run_fuzz


@pytest.mark.parametrize(("count", "seed"), [(64, 1), pytest.param(2000, 2, marks=pytest.mark.slow)])
def test_damaged_scans_are_named_or_read_right(tmp_path: Path, count: int, seed: int) -> None:
    found = run_fuzz(tmp_path, count, seed, workers=1 if count < 100 else 2)
    assert len(found) >= count
    complaints = [text for name, outcome in found.items() if (text := complaint(name, outcome, tmp_path))]
    assert not complaints, "\n".join(complaints)
