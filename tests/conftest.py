"""What every test may lean on: the real data beside the checkout, and a fixed number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(relative: str) -> Path:
    """Returns a file or folder of the real data laid beside the checkout; skips the test where it is not."""
    path = SHARED_DATA / relative
    if not path.exists():
        pytest.skip(f"real data is not here: {path}")
    return path
