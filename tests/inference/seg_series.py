"""Series of noise in any orientation, and a segmentation of them that any reader can make again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.datasets.dicom_maker import make_series

LABELS = {"background": 0, "liver": 2, "Läsion": 7}
TURN = np.array([[0.8, -0.48, 0.36], [0.6, 0.64, -0.48], [0.0, 0.6, 0.8]])  # a rotation in exact decimals

PLANES: dict[str, tuple[Sequence[float], Sequence[float]]] = {  # ImageOrientationPatient, step from slice to slice
    "axial": ((1, 0, 0, 0, 1, 0), (0, 0, 2)),
    "axial, feet first": ((1, 0, 0, 0, 1, 0), (0, 0, -2)),
    "coronal": ((1, 0, 0, 0, 0, -1), (0, 2, 0)),
    "sagittal": ((0, 1, 0, 0, 0, -1), (-2, 0, 0)),
    "oblique": ((*TURN[:, 0], *TURN[:, 1]), 2 * TURN[:, 2]),
    "negative column cosine": ((1, 0, 0, 0, -1, 0), (0, 0, 2)),
    "negative row cosine": ((-1, 0, 0, 0, 1, 0), (0, 0, -2)),
}


def series(folder: Path, plane: str = "axial", slices: int = 6, shape: tuple[int, int] = (8, 10), **tags: Any) -> Path:
    """Writes a series of noise in any orientation, with the identifiers that a reference needs."""
    orientation, step = PLANES[plane]
    generator = np.random.default_rng(3)
    identifiers: dict[str, Any] = {
        "StudyInstanceUID": "1.2.826.0.1.3680043.8.498.2",
        "FrameOfReferenceUID": "1.2.826.0.1.3680043.8.498.3",
        "PatientName": "Müller^Jörg",
        "SpecificCharacterSet": "ISO_IR 100",
        "SliceThickness": 1.5,
    }
    return make_series(
        folder,
        range(slices),
        position=lambda k: np.round((5.5, -20.25, 3) + k * np.asarray(step, dtype=float), 6),
        orientation=orientation,
        pixels=lambda k: generator.integers(0, 100, shape).astype(np.int16),
        **identifiers | tags,
    )


def labels_of(image: np.ndarray) -> np.ndarray:
    """What stands for a segmentation: a threshold of the image, which any reader of the source can apply again."""
    return np.where(image > 90, 7, np.where(image > 70, 2, 0))
