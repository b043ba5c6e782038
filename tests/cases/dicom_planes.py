"""The planes that every row of the fault reports is tried in, and what a volume must then say of its voxels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from medckpt.geometry import Volume
from tests.datasets.dicom_maker import COLUMNS, PIXEL_SPACING, ROWS, SLICE_SPACING

_C, _S = np.cos(np.radians(20)), np.sin(np.radians(20))
PLANES: dict[str, tuple[float, ...]] = {
    "axial": (1, 0, 0, 0, 1, 0),
    "axial, rows upwards": (1, 0, 0, 0, -1, 0),
    "coronal": (1, 0, 0, 0, 0, -1),
    "sagittal": (0, 1, 0, 0, 0, -1),
    "negative columns": (-1, 0, 0, 0, 1, 0),
    "oblique": (1, 0, 0, 0, _C, _S),
    "doubly oblique": (_C, _S, 0, -_S * _C, _C * _C, _S),
}
ORIGIN = np.array([11.0, -23.0, 37.0])
every_plane = pytest.mark.parametrize("plane", PLANES)


def normal(plane: str) -> np.ndarray:
    row, column = np.reshape(PLANES[plane], (2, 3))
    return np.cross(row, column)


def stacked(plane: str, distance: Callable[[int], float] = lambda k: SLICE_SPACING * k) -> dict[str, object]:
    """Switches of the generator for slices `distance`(k) mm along the normal of a plane."""
    return {"orientation": PLANES[plane], "position": lambda k: ORIGIN + distance(k) * normal(plane)}


def pattern(k: int) -> np.ndarray:
    """Pixels that show which slice, row and column they are."""
    return (1000 * k + 10 * np.arange(ROWS)[:, None] + np.arange(COLUMNS)).astype(np.int16)


def assert_placed(volume: Volume, plane: str, ks: Sequence[float], step: float = SLICE_SPACING) -> None:
    """Compares every voxel's place and value with DICOM's own formula (PS3.3 C.7.6.2.1.1) and the pattern.

    `ks` are the slices expected, from the first along the normal on; k in between two is their mixture.
    """
    assert volume.array.shape == (COLUMNS, ROWS, len(ks))
    row, column = np.reshape(PLANES[plane], (2, 3))
    for index in np.ndindex(volume.array.shape):
        i, j, k = index
        lps = ORIGIN + i * PIXEL_SPACING[1] * row + j * PIXEL_SPACING[0] * column + (ks[0] + k) * step * normal(plane)
        np.testing.assert_allclose((volume.affine @ [i, j, k, 1])[:3], lps * [-1, -1, 1], atol=1e-6)
        assert volume.array[index] == pytest.approx(1000 * ks[k] + 10 * j + i, abs=1e-3)


@contextmanager
def logged(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(level, "medckpt"):
        yield caplog
