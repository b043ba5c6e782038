"""Which scans a prediction is asked for, and whether its answers can be written; both known before any inference."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from medckpt.datasets.dicom_series import is_dicom_file
from medckpt.datasets.layouts import Case
from medckpt.datasets.reading import image_stem, source_files
from medckpt.errors import ConfigError, DataError, listing

_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>[0-9]{4})")


def require_input(path: Path) -> None:
    """Raises DataError if there is nothing at `path`."""
    if not path.exists():
        raise DataError(f"input={path}: there is no such file or folder.")


def find_inputs(path: Path, channels: int) -> tuple[Case, ...]:
    """Returns the scans to segment: one file, one DICOM series folder, or a folder of either.

    With several channels, the files of a scan are CASE_0000, CASE_0001, ... (nnU-Net's names), all of them. With one,
    every file is a scan: CASE_0000 is called CASE, and any other number belongs to the name (scan_2019, scan_2020).
    Names that start with a dot are passed over; suffixes count in upper and lower case.

    Raises:
        DataError: nothing there; scans with missing or surplus channels, or two files of one name, all at once;
            volume files and DICOM in one folder.
    """
    require_input(path)
    if path.name in ("", ".."):  # `input=.`: a case needs the folder's real name
        path = path.resolve()
    if path.is_file():
        return _volume_cases(path.parent, [path], channels) if _stem(path) else (_dicom_case(path, path, channels),)
    entries = _entries(path)
    if not entries:
        raise DataError(f"input={path}: the folder is empty.")
    volumes = [item for item in entries if item.is_file() and _stem(item)]
    if volumes:
        known = {file for volume in volumes for file in source_files(volume)}  # with the voxels of a header
        dicom = [item.name for item in entries if item not in known and _holds_dicom(item)]
        if dicom:
            raise DataError(
                f"input={path}: the folder is mixed: volume files ({listing([item.name for item in volumes], 3)}) and "
                f"DICOM ({listing(dicom, 3)}). Put them into two folders and predict each."
            )
        return _volume_cases(path, volumes, channels)
    if any(item.is_file() for item in entries):
        # Series folders are called `ct` or `1` in every patient's folder: two predictions must not share one name.
        return (_dicom_case(path.with_name(f"{path.parent.name}_{path.name}"), path, channels),)
    return tuple(_dicom_case(folder, _series_folder(folder), channels) for folder in entries)


def check_targets(targets: Sequence[Path], inputs: Iterable[Path]) -> None:
    """Refuses files to write that could not be written, or must not be, before time is spent on their content.

    Args:
        targets: the label maps to come, .nii.gz or .dcm.
        inputs: the files and folders that are read.

    Raises:
        ConfigError: a target is an input or lies among the slices of one, is no .nii.gz or .dcm, or an existing
            folder; or its folder is a file, cannot be made, or cannot be written to.
    """
    read = {path.resolve() for path in inputs}
    folders = {path if path.is_dir() else path.parent for path in read}  # of slices, for a DICOM Segmentation
    for target in targets:
        if target.resolve() in read:
            raise ConfigError(f"output={target}: this is an input; a prediction never replaces a scan.")
        if not target.name.endswith((".nii.gz", ".dcm")):
            raise ConfigError(f"output={target}: label maps are written as .nii.gz or .dcm; give the file that ending.")
        if target.name.endswith(".dcm") and target.resolve().parent in folders:
            raise ConfigError(f"output={target}: this is the folder of the scan's slices; choose another folder.")
        if os.path.isdir(target):
            raise ConfigError(f"output={target}: this is a folder, where a file is to be written; choose another name.")
    for folder in dict.fromkeys(target.parent for target in targets):
        _require_writable(folder)


def _require_writable(folder: Path) -> None:
    absolute = folder.absolute()
    nearest = next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))
    if not os.path.isdir(nearest):
        raise ConfigError(
            f"output={folder}: {nearest} is a file, not a folder; give a folder, or a name that ends in .nii.gz."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"output={folder}: {nearest} cannot be written to (permissions); choose another folder.")


def _volume_cases(folder: Path, files: Sequence[Path], channels: int) -> tuple[Case, ...]:
    """Groups files into scans by name, and refuses every scan that has not exactly its channels."""
    stems = {file: _stem(file) for file in files}
    names = set(stems.values())
    groups: dict[str, list[tuple[int, Path]]] = {}
    for file, stem in stems.items():
        match = _CHANNEL.fullmatch(stem)
        if match is None:
            name, number = stem, 0 if channels == 1 else -1
        else:
            name, number = match["case"], int(match["channel"])
            # CASE_0000 beside CASE_0001 is a scan of several channels, not two scans, whatever the network takes.
            if channels == 1 and number and not {f"{name}_0000", f"{name}_0001"} <= names:
                name, number = stem, 0
        groups.setdefault(name, []).append((number, file))
    problems = [_problem(name, found, channels) for name, found in groups.items()]
    wrong = [problem for problem in problems if problem]
    if wrong:
        raise DataError(f"input={folder}: " + "".join(f"\n  {problem}" for problem in wrong))
    return tuple(
        Case(name=name, patient=name, images=tuple(file for _, file in sorted(found)), label=None)
        for name, found in groups.items()
    )


def _problem(name: str, found: Sequence[tuple[int, Path]], channels: int) -> str | None:
    """Says why the (channel, file) pairs are not one scan; None if they are."""
    numbers = sorted(number for number, _ in found)
    if numbers == list(range(channels)):
        return None
    files = listing([file.name for _, file in found])
    if len(set(numbers)) < len(numbers):
        return f"{name}: {files}: two files have one name; keep one of them."
    last = f" to {name}_{channels - 1:04d}" if channels > 1 else ""
    return f"{name}: the network takes {channels} channel(s), {name}_0000{last}; the input has {len(found)} ({files})."


def _dicom_case(named: Path, series: Path, channels: int) -> Case:
    if channels != 1:
        raise DataError(f"{named.name}: the network takes {channels} channel(s), the input has 1 (a DICOM series).")
    return Case(name=named.name, patient=named.name, images=(series,), label=None)


def _series_folder(folder: Path) -> Path:
    """Returns the folder itself, or its only sub-folder where it holds no files (PATIENT/ct/*.dcm)."""
    entries = _entries(folder)
    inner = [item for item in entries if item.is_dir()]
    return inner[0] if len(inner) == 1 and not any(item.suffix.lower() == ".dcm" for item in entries) else folder


def _holds_dicom(item: Path) -> bool:
    if item.is_dir():
        return any(_holds_dicom(inner) for inner in _entries(item))
    return is_dicom_file(item)


def _entries(folder: Path) -> list[Path]:
    # Without .DS_Store, and the ._CASE.nii.gz that macOS leaves in archives.
    return [item for item in sorted(folder.iterdir()) if not item.name.startswith(".")]


def _stem(file: Path) -> str:
    """Returns the name without its image suffix, "" if it has none."""
    lower = image_stem(file.name.lower())
    return file.name[: len(lower) - len(file.name.lower())] if lower else ""
