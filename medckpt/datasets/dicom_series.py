"""Which images of a folder make one DICOM stack: by series, orientation, pixel spacing and size, then by repeats.

Exactly one stack may come out, unless a file names the one that is meant. Everything else is refused with a list of
what is there, because a wrong choice here is a wrong image that looks right.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from medckpt.datasets.dicom_directory import check_directories
from medckpt.datasets.dicom_header import SPLIT_TAGS, Slice, is_dicom_file, read_header
from medckpt.errors import DataError, GeometryError, listing
from medckpt.geometry import ORIENTATION_TOLERANCE, ORTHONORMALITY_TOLERANCE, POSITION_TOLERANCE_MM

__all__ = [
    "Slice",
    "choose_stack",
    "dicom_modality",
    "distances_mm",
    "is_dicom_file",
    "positions_repeat",
    "series_files",
]

LOCALIZER_MAX_SLICES = 3
"""Other stacks of the same series, in another orientation and of no more slices than this, are its localizers."""

READERS = 8
"""Threads; reading is limited by the disk and by the decoders, which let go of the interpreter lock."""

logger = logging.getLogger("medckpt")


def choose_stack(path: Path) -> list[Slice]:
    """Returns the slices of the one usable stack below a folder, unsorted; `path` may be one of its files instead.

    Sub-folders are searched too. A DICOMDIR as `path` stands for its folder.

    Raises:
        DataError: no image, several stacks, or nothing but images of a kind that is not read.
        GeometryError: the slices lack the tags that place them.
    """
    if path.name.upper() == "DICOMDIR" and path.is_file():
        path = path.parent
    folder = path if path.is_dir() else path.parent
    files = series_files(path)
    slices, skipped = _scan(folder, files)
    if skipped:
        logger.info("%s: %d files without an image are skipped: %s", folder, len(skipped), listing(skipped))
    if not slices:
        raise DataError(
            f"{folder}: no DICOM image is in this folder ({len(skipped)} other files: {listing(skipped) or 'none'}). "
            "Give the folder that holds the slices themselves."
        )
    stacks = _stacks(slices)
    chosen = _stack_of(path, stacks) if path.is_file() else _only_stack(folder, stacks)
    if chosen[0].problem:
        raise _refusal(path, chosen)
    _account_for_others(path, chosen, [stack for stack in stacks if stack is not chosen])
    check_directories(files, chosen[0].series_uid)
    return chosen


def distances_mm(stack: Sequence[Slice]) -> np.ndarray:
    """(n,) position of each slice along the first one's normal, in mm."""
    return np.stack([s.position for s in stack]) @ stack[0].normal


def positions_repeat(stack: Sequence[Slice]) -> bool:
    """Says whether two slices lie within `POSITION_TOLERANCE_MM` of each other along the normal."""
    return bool((np.diff(np.sort(distances_mm(stack))) <= POSITION_TOLERANCE_MM).any())


def dicom_modality(folder: Path) -> str | None:
    """Returns the Modality (CT, MR, ...) of the first image in a folder, or None if it holds no DICOM image."""
    for path in series_files(folder) if folder.is_dir() else []:
        images = read_header(path)
        if not isinstance(images, str):
            return images[0].modality
    return None


def series_files(path: Path) -> list[Path]:
    """Returns every file that reading `path` may open, sorted: a folder's with those of its sub-folders.

    One file stands for its stack, which lies beside it: then the files of its folder, without sub-folders. Hidden
    sub-folders (a leading dot) are passed over.
    """
    if not path.is_dir():
        return sorted(item for item in path.parent.iterdir() if not item.is_dir())
    return sorted(_walk(path))


def _walk(folder: Path) -> Iterator[Path]:
    seen = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder that it lies in
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place) / name for name in files)


def _scan(folder: Path, files: Sequence[Path]) -> tuple[list[Slice], list[str]]:
    slices: list[Slice] = []
    skipped: list[str] = []
    empty: list[str] = []
    with ThreadPoolExecutor(max_workers=min(READERS, os.cpu_count() or 1)) as pool:
        for path, images in zip(files, pool.map(read_header, files), strict=True):
            if not isinstance(images, str):
                slices += images
                continue
            skipped.append(images)
            if not path.name.startswith(".") and path.stat().st_size == 0:
                empty.append(path.name)
    if slices and empty:
        raise DataError(
            f"{folder}: {len(empty)} empty files (0 bytes) lie among the DICOM slices and may have been slices: "
            f"{listing(empty)}. Copy or export them again, or move them away if they belong to no scan."
        )
    return slices, skipped


def _stacks(slices: Sequence[Slice]) -> list[list[Slice]]:
    groups: list[list[Slice]] = []
    for slice_ in slices:
        group = next((g for g in groups if _belong(g[0], slice_)), None)
        if group is None:
            groups.append([slice_])
        else:
            group.append(slice_)
    return [part for group in groups for part in _split_repeats(group)]


def _belong(a: Slice, b: Slice) -> bool:
    if (a.series_uid, a.rows, a.columns, a.problem) != (b.series_uid, b.rows, b.columns, b.problem):
        return False
    if a.problem:
        return True
    return bool(
        np.abs(a.directions - b.directions).max() <= ORIENTATION_TOLERANCE
        and np.abs(a.pixel_spacing_mm / b.pixel_spacing_mm - 1).max() <= ORIENTATION_TOLERANCE
    )


def _split_repeats(group: list[Slice]) -> list[list[Slice]]:
    """Parts a stack with repeated positions by echo, image type, acquisition or time point, if that explains them."""
    if group[0].problem or not positions_repeat(group) or np.ptp(distances_mm(group)) <= POSITION_TOLERANCE_MM:
        return [group]
    for i in range(len(SPLIT_TAGS)):
        parts: dict[str, list[Slice]] = {}
        for slice_ in group:
            parts.setdefault(slice_.acquisition[i], []).append(slice_)
        if len(parts) > 1 and min(len(part) for part in parts.values()) > 1:
            return [piece for part in parts.values() for piece in _split_repeats(part)]
    return [group]


def _stack_of(path: Path, stacks: Sequence[list[Slice]]) -> list[Slice]:
    named = [stack for stack in stacks if any(slice_.path == path for slice_ in stack)]
    if not named:
        raise DataError(
            f"{path}: this DICOM file holds no image (RTSTRUCT, SEG or a report?). Give a slice of the series."
        )
    if len(named) > 1:
        raise _several(path, named)
    return named[0]


def _several(path: Path, stacks: Sequence[list[Slice]]) -> DataError:
    files = {slice_.path for stack in stacks for slice_ in stack}
    if len(files) == 1:
        way_out = "They lie in one file: write one of them to a file of its own (dcm2niix makes one NIfTI file of each)"
    else:
        way_out = "Keep one stack per folder, or give one of its files as the path instead of the folder"
    return DataError(
        f"{path}: {len(stacks)} image stacks lie here, and which one is meant is not guessed: "
        f"{'; '.join(_describe(stack) for stack in stacks)}. {way_out}."
    )


def _only_stack(folder: Path, stacks: Sequence[list[Slice]]) -> list[Slice]:
    usable = [stack for stack in stacks if not stack[0].problem]
    if not usable:
        raise _refusal(folder, max(stacks, key=len))
    largest = max(usable, key=len)
    if all(stack is largest or _is_localizer_of(stack, largest) for stack in usable):
        return largest
    raise _several(folder, usable)


def _is_localizer_of(stack: Sequence[Slice], largest: Sequence[Slice]) -> bool:
    return (
        stack[0].series_uid == largest[0].series_uid
        and len(stack) <= LOCALIZER_MAX_SLICES < len(largest)
        and bool(np.abs(stack[0].directions - largest[0].directions).max() > ORTHONORMALITY_TOLERANCE)
    )


def _account_for_others(path: Path, chosen: Sequence[Slice], others: Sequence[list[Slice]]) -> None:
    """Names what is set aside, and refuses if images that cannot be read may belong to, or be, what is meant.

    Colour images of another series (dose sheets, screenshots) never are.
    """
    for other in others:
        same_series = other[0].series_uid == chosen[0].series_uid
        named = path.is_file()
        if other[0].problem and (same_series or (other[0].problem_kind != "colour" and not named)):
            raise _refusal(path, other)
    if others:
        logger.warning(
            "%s: reading %s; set aside: %s", path, _describe(chosen), "; ".join(_describe(other) for other in others)
        )


def _refusal(path: Path, stack: Sequence[Slice]) -> DataError:
    kind = GeometryError if stack[0].problem_kind == "geometry" else DataError
    names = listing([slice_.name for slice_ in stack], 3)
    return kind(f"{path}: {len(stack)} images ({names}) cannot be read: {stack[0].problem}.")


def _describe(stack: Sequence[Slice]) -> str:
    slice_ = stack[0]
    spacing = " x ".join(f"{s:.4g}" for s in slice_.pixel_spacing_mm) or "unknown"
    echoes = Counter(s.acquisition[0] for s in stack)
    echo = f", echo time {next(iter(echoes))} ms" if len(echoes) == 1 and slice_.acquisition[0] else ""
    return (
        f"series {slice_.series_uid or 'without UID'} '{slice_.description}' ({slice_.modality or 'no modality'}): "
        f"{len(stack)} slices of {slice_.columns} x {slice_.rows}, pixel spacing {spacing} mm{echo}, "
        f"first file {slice_.name}{', unusable: ' + slice_.problem if slice_.problem else ''}"
    )
