"""DICOMDIR: the list of contents of a medium, which knows of slices that did not come along.

A slice that is lost at the end of a stack leaves no gap. Where a DICOMDIR lies beside the files, its list shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pydicom

from medckpt.errors import DataError, listing

logger = logging.getLogger("medckpt")


def check_directories(files: Sequence[Path], series_uid: str) -> None:
    """Compares every DICOMDIR among `files` with the files it lists.

    Raises:
        DataError: it lists images of the series `series_uid` that are not there.
    """
    for path in files:
        if path.name.upper() != "DICOMDIR":
            continue
        try:
            listed = _images_of(path, series_uid)
        except Exception as error:  # a damaged list harms nothing: the files themselves are read
            logger.warning("%s: the list cannot be read (%s); the files are taken as they are", path, error)
            continue
        missing = [name for name in listed if not (path.parent / name).exists()]
        if missing:
            raise DataError(
                f"{path}: {len(missing)} of the {len(listed)} images that it lists for this series are not there: "
                f"{listing(missing, 3)}. Copy the medium again; if they were left out on purpose, delete the DICOMDIR."
            )


def _images_of(path: Path, series_uid: str) -> list[str]:
    """Paths, relative to the DICOMDIR, of the images that it lists below a series (records follow their parent)."""
    names: list[str] = []
    series = ""
    for record in pydicom.dcmread(path).DirectoryRecordSequence:
        kind = str(record.get("DirectoryRecordType"))
        if kind == "SERIES":
            series = str(record.get("SeriesInstanceUID"))
        elif kind == "IMAGE" and series == series_uid and record.get("RecordInUseFlag", 0xFFFF):
            parts = record.get("ReferencedFileID") or []
            names.append("/".join([parts] if isinstance(parts, str) else [str(part) for part in parts]))
    return names
