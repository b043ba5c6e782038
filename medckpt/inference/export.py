"""Where predictions are written and as what: NIfTI on the scan's grid, or a DICOM Segmentation on its series."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from medckpt.datasets.layouts import Case
from medckpt.datasets.reading import image_stem, write_label
from medckpt.datasets.segment_codes import SegmentCode
from medckpt.errors import ConfigError, listing, suggest
from medckpt.geometry import Grid
from medckpt.inference.dicom_seg import SegType, write_dicom_seg

logger = logging.getLogger("medckpt")

Format = Literal["nifti", "seg", "both"]

_ENDINGS = {"nifti": (".nii.gz",), "seg": (".dcm",), "both": (".nii.gz", ".dcm")}


def check_words(written: str | None, seg_type: str) -> None:
    """Raises ConfigError for a `format=` or `seg_type=` that is none."""
    for key, word, known in (("format", written, get_args(Format)), ("seg_type", seg_type, get_args(SegType))):
        if word is not None and word not in known:
            raise ConfigError(f"{key}={word}: not a choice. {suggest(word, known)}")


def find_targets(output: Path, cases: Sequence[Case], written: str | None) -> list[tuple[Path, ...]]:
    """Returns the files to write for each case.

    Args:
        output: a folder; or, for one case, a name that ends in .nii.gz (or .nii) or .dcm.
        cases: the scans.
        written: a `Format`; None takes that of the name, and NIfTI in a folder.

    Raises:
        ConfigError: one name for several scans, a name of another format, a DICOM Segmentation of a scan that is none.
    """
    name = output.name.lower()
    named = "seg" if name.endswith(".dcm") else "nifti" if name.endswith((".nii", ".nii.gz")) else None
    chosen = written or named or "nifti"
    if named and len(cases) > 1:
        raise ConfigError(f"output={output}: there are {len(cases)} scans, so the output must be a folder.")
    if named and chosen not in (named, "both"):
        raise ConfigError(f"output={output}: the name and format={chosen} do not agree; leave one of them out.")
    others = [case.name for case in cases if not _is_dicom(case)]
    if chosen != "nifti" and others:
        raise ConfigError(
            f"output={output}: a DICOM Segmentation lies on a DICOM series, and {listing(others, 3)} is none. Write "
            "these scans as NIfTI (format=nifti)."
        )
    if not named:
        return [tuple(output / f"{case.name}{ending}" for ending in _ENDINGS[chosen]) for case in cases]
    if chosen != "both":
        return [(output,)]
    stem = output.name[: -len(".dcm")] if named == "seg" else image_stem(output.name) or output.name
    return [(output, output.with_name(f"{stem}{'.nii.gz' if named == 'seg' else '.dcm'}"))]


def write_prediction(
    files: Sequence[Path],
    array: np.ndarray,
    grid: Grid,
    series: Path,
    labels: Mapping[str, int],
    codes: Mapping[str, SegmentCode],
    seg_type: SegType,
) -> None:
    """Writes one label map (X, Y, Z) to each of `files`, .nii.gz or .dcm; `series` is the DICOM scan of the latter."""
    for file in files:
        if file.suffix.lower() == ".dcm":
            write_dicom_seg(file, array, grid, series, labels, codes=codes, seg_type=seg_type)
        else:
            if not array.any():
                logger.warning("%s: no voxel of any class was found; the label map is empty.", file)
            write_label(file, array, grid)


def _is_dicom(case: Case) -> bool:
    return all(image.is_dir() or image_stem(image.name) is None for image in case.images)
