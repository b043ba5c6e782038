"""Where the images and labels of a data set lie: four folder layouts become one `Dataset`.

nnunet  dataset.json, imagesTr/CASE_0000.nii.gz, labelsTr/CASE.nii.gz (or explicit paths under "dataset")
msd     dataset.json with "training": [{"image": ..., "label": ...}] (Medical Segmentation Decathlon, nnU-Net v1)
dicom   PATIENT/<one folder of slices>/ and PATIENT/label.nii.gz; dataset.json names the labels, if it is there
pairs   images/ and labels/ (or imagesTr/ and labelsTr/, ...) with files of the same name

Files are found and matched here, and opened only where no dataset.json says which label values there are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medckpt.datasets.dataset_json import DatasetJson, read_dataset_json
from medckpt.datasets.dicom_series import dicom_modality, is_dicom_file
from medckpt.datasets.reading import image_stem, read_label
from medckpt.errors import DataError, listing

_IMAGE_FOLDERS = ("imagesTr", "images", "image")
_LABEL_FOLDERS = ("labelsTr", "labels", "label", "masks", "mask", "segmentations", "segmentation")
MOST_LABELS = 1000
"""A label map with more different values holds intensities."""

_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")
_NO_LABEL = "image without a label; add the label, or move the image out of the training folder (imagesTs)"
_NO_IMAGE = "label without an image; add the image, or move the label away"

logger = logging.getLogger("medckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One scan: a path per channel (a file, or a folder of DICOM slices) and its label map, None where unknown."""

    name: str
    patient: str
    images: tuple[Path, ...]
    label: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The labelled cases of a data set, sorted by name; `labels` maps class names to values, background first."""

    root: Path
    layout: str
    channel_names: tuple[str, ...]
    labels: dict[str, int]
    cases: tuple[Case, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the foreground classes in the order of their values."""
        return tuple(name for name, _ in sorted(self.labels.items(), key=lambda item: item[1]) if self.labels[name])


class Fault(NamedTuple):
    """A case (or a file) that is not in order, and why."""

    case: str
    text: str


Faults = list[Fault] | None


def open_dataset(root: Path, *, faults: Faults = None, discover: bool = True) -> Dataset:
    """Finds the cases of a data set in one of the four layouts above. Images in imagesTs are not part of it.

    Args:
        root: the folder.
        faults: where a list is given, cases that are not in order are put there and left out, instead of raised.
        discover: whether, without a dataset.json, every label map is read for its values; else `labels` is empty.

    Raises:
        DataError: no such folder, no known layout, no case; a faulty dataset.json; and, all cases at once: missing
            files, labels without image, images without label, wrong channels, two files of one name, paths in
            dataset.json that leave `root`.
    """
    root = Path(root)
    try:
        return _open(root, faults, discover)
    except PermissionError as error:
        raise DataError(
            f"{error.filename or root}: it cannot be opened ({error.strerror}). Correct its permissions."
        ) from error


def _open(root: Path, faults: Faults, discover: bool) -> Dataset:
    if not root.exists():
        raise DataError(f"{root}: there is no such folder.")
    if not root.is_dir():
        raise DataError(f"{root}: this is a file; give the folder that holds the data set.")
    head = read_dataset_json(root)
    if head is not None and head.training is not None:
        return _dataset(root, "msd", head, _listed_cases(root, head, _training_entries(head), faults), faults, discover)
    if head is not None and head.cases is not None:
        return _dataset(root, "nnunet", head, _listed_cases(root, head, _case_entries(head), faults), faults, discover)
    image_folder, label_folder = _folder_of(root, _IMAGE_FOLDERS), _folder_of(root, _LABEL_FOLDERS)
    if image_folder is None:
        return _dataset(root, "dicom", head, _patients(root, head, faults), faults, discover)
    if label_folder is None:
        raise DataError(f"{root}: {image_folder.name}/ has no labels beside it, in one of {', '.join(_LABEL_FOLDERS)}.")
    layout = "nnunet" if head is not None and image_folder.name == "imagesTr" else "pairs"
    images = _files(image_folder, head, folders=layout == "pairs", faults=faults)
    labels = _files(label_folder, head, folders=False, faults=faults)
    cases = _matched_cases(root, head, images, labels, strict=layout == "nnunet", faults=faults)
    return _dataset(root, layout, head, cases, faults, discover)


def _dataset(
    root: Path, layout: str, head: DatasetJson | None, cases: Sequence[Case], faults: Faults, discover: bool
) -> Dataset:
    if not cases and not faults:
        raise DataError(
            f"{root}: no case is in this folder. Known layouts: nnU-Net (dataset.json, imagesTr/, labelsTr/), Medical "
            "Segmentation Decathlon (dataset.json), PATIENT/ folders with DICOM slices and label.nii.gz, images/ and "
            "labels/ with files of the same name."
        )
    if head is not None:
        names, labels = head.channel_names, head.labels
    else:
        channels = len(cases[0].images) if cases else 1
        names = ("image",) if channels == 1 else tuple(f"image_{i}" for i in range(channels))
        if layout == "dicom":
            names = (_modality(cases, faults) or "image",)
        labels = _discover_labels(root, cases, faults) if discover else {}
    ordered = tuple(sorted(cases, key=lambda case: case.name))
    return Dataset(root=root, layout=layout, channel_names=names, labels=labels, cases=ordered)


def _modality(cases: Sequence[Case], faults: Faults) -> str | None:
    for case in cases:
        try:
            return dicom_modality(case.images[0])
        except DataError:
            if faults is None:
                raise
    return None


def _discover_labels(root: Path, cases: Sequence[Case], faults: Faults) -> dict[str, int]:
    """Reads every label map for the values that occur; classes are then called label_1, ..."""
    paths = [case.label for case in cases if case.label is not None]

    def values_of(path: Path) -> list[int]:
        try:
            values = np.unique(read_label(path).array).tolist()
            if len(values) > MOST_LABELS:
                raise DataError(f"{path}: {len(values)} different values: intensities, not labels. Is this an image?")
            return values
        except DataError:
            if faults is None:
                raise
            return []  # who reads the case finds the same, and says it of that case

    with ThreadPoolExecutor() as pool:
        found = pool.map(values_of, paths)
        values = sorted({int(value) for per_case in found for value in per_case} - {0})
    if not values:
        raise DataError(f"{root}: every label map is empty (0 everywhere); there is nothing to learn from.")
    return {"background": 0} | {f"label_{value}": value for value in values}


def _settle(where: Path, problems: Sequence[Fault], faults: Faults) -> None:
    """Raises all problems at once, or leaves them with a caller who collects them."""
    if faults is not None:
        faults += problems
    elif problems:
        lines = [f"{case}: {text}" for case, text in problems]
        raise DataError(f"{where}: not in order ({len(problems)}): {_lines(lines)}")


def _lines(problems: Sequence[str], limit: int = 20) -> str:
    shown = "".join(f"\n  {problem}" for problem in problems[:limit])
    return shown if len(problems) <= limit else f"{shown}\n  and {len(problems) - limit} more"


# Folders of files


def _folder_of(root: Path, names: Iterable[str]) -> Path | None:
    # By name as listed: a file system that ignores case would find images/ for Images/ and another would not.
    there = {item.name for item in root.iterdir() if item.is_dir()}
    found = [name for name in names if name in there]
    if len(found) > 1:
        raise DataError(f"{root}: {' and '.join(found)} are both there; keep one, or say which files in dataset.json.")
    return root / found[0] if found else None


def _files(folder: Path, head: DatasetJson | None, folders: bool, faults: Faults) -> dict[str, Path]:
    """Image files (and folders of DICOM slices, if `folders`) by their name without suffix."""
    result: dict[str, Path] = {}
    twice = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):  # .DS_Store, and the ._CASE.nii.gz that macOS leaves in archives
            continue
        if path.is_dir():
            stem = path.name if folders and _holds_dicom(path) else None
        elif head is not None and head.file_ending is not None:
            stem = path.name.removesuffix(head.file_ending) if path.name.endswith(head.file_ending) else None
        else:
            stem = image_stem(path.name)
        if not stem:
            continue
        if stem in result:
            both = f"{result[stem].name} and {path.name}"
            twice.append(Fault(stem, f"{both} in {folder.name}/ have one name; keep one of them"))
        result[stem] = path
    _settle(folder, twice, faults)
    return result


def _matched_cases(
    root: Path,
    head: DatasetJson | None,
    images: Mapping[str, Path],
    labels: Mapping[str, Path],
    strict: bool,
    faults: Faults,
) -> list[Case]:
    """Pairs images and labels by name; CASE_0000, CASE_0001 are the channels of CASE (always, if `strict`)."""
    by_case: dict[str, dict[int, Path]] = {}
    problems = []
    for stem, path in images.items():
        channel = _CHANNEL.fullmatch(stem)
        if not strict and (stem in labels or channel is None):
            name, number = stem, 0
        elif channel is None:
            problems.append(Fault(path.name, f"nnU-Net's names end in the channel number, like {stem}_0000"))
            continue
        else:
            name, number = channel["case"], int(channel["channel"])
        if number in by_case.setdefault(name, {}):
            problems.append(Fault(name, f"{by_case[name][number].name} and {path.name} are both its channel {number}"))
        by_case[name][number] = path
    expected = len(head.channel_names) if head is not None else max(map(len, by_case.values()), default=1)
    for name in sorted(by_case.keys() | labels.keys()):
        if name not in labels:
            problems.append(Fault(name, _NO_LABEL))
        elif name not in by_case:
            problems.append(Fault(name, _NO_IMAGE))
        elif sorted(by_case[name]) != list(range(expected)):
            there = ", ".join(f"{number:04d}" for number in sorted(by_case[name]))
            problems.append(Fault(name, f"channels {there}, but {expected} from 0000 on are expected"))
    _settle(root, problems, faults)
    bad = {problem.case for problem in problems}
    return [
        Case(name=name, patient=name, images=tuple(by_case[name][i] for i in range(expected)), label=labels[name])
        for name in by_case
        if name not in bad
    ]


# Lists of files in dataset.json


def _training_entries(head: DatasetJson) -> list[tuple[str, Any]]:
    """The entries of "training", named after their image."""
    entries = []
    for i, entry in enumerate(head.training or ()):
        image = entry.get("image") if isinstance(entry, dict) else None
        first = image[0] if isinstance(image, list) and image else image
        if not isinstance(first, str) or not isinstance(entry.get("label"), str):
            raise DataError(f'{head.path}: "training" entry {i} needs "image" and "label" paths; it is {entry!r:.200}.')
        stem = image_stem(Path(first).name)
        if stem is None:
            raise DataError(f'{head.path}: "training" entry {i}: {first} is not of a format that is read here.')
        channel = _CHANNEL.fullmatch(stem) if isinstance(image, list) and len(image) > 1 else None
        entries.append((channel["case"] if channel else stem, {"images": image, "label": entry["label"]}))
    return entries


def _case_entries(head: DatasetJson) -> list[tuple[str, Any]]:
    """The entries of "dataset", nnU-Net v2's explicit paths."""
    for name, entry in (head.cases or {}).items():
        if not isinstance(entry, dict) or "images" not in entry or not isinstance(entry.get("label"), str):
            raise DataError(f'{head.path}: "dataset" entry {name!r} needs "images" and "label"; it is {entry!r:.200}.')
    return list((head.cases or {}).items())


def _listed_cases(root: Path, head: DatasetJson, entries: Sequence[tuple[str, Any]], faults: Faults) -> list[Case]:
    problems: list[Fault] = []
    cases: dict[str, Case] = {}
    for name, entry in entries:
        listed = entry["images"] if isinstance(entry["images"], list) else [entry["images"]]
        listed = _listed_channels(root, [str(text) for text in listed], len(head.channel_names))
        paths = [_inside(root, name, text, problems) for text in [*listed, entry["label"]]]
        if any(path is None for path in paths):
            continue
        *images, label = [path for path in paths if path is not None]
        if name in cases:
            problems.append(Fault(name, "listed twice"))
        if Path(name).name != name or "\\" in name:
            problems.append(Fault(name, "the name of a case becomes a file name; it holds no slash"))
        if len(images) != len(head.channel_names):
            count = f"{len(images)} image files for {len(head.channel_names)} channels"
            names = ", ".join(head.channel_names)
            problems.append(Fault(name, f"{count} ({names}); one 3D file per channel is needed, as a list"))
        problems += [Fault(name, f"{path} is missing") for path in [*images, label] if not path.exists()]
        cases[name] = Case(name=name, patient=name, images=tuple(images), label=label)
    _settle(head.path, problems, faults)
    bad = {problem.case for problem in problems}
    return [case for case in cases.values() if case.name not in bad]


def _inside(root: Path, name: str, text: str, problems: list[Fault]) -> Path | None:
    """A path of dataset.json below `root`; one that leaves it (absolute, .., a link) is a problem."""
    path = root / text
    if Path(text).is_absolute() or ".." in Path(text).parts or not path.resolve().is_relative_to(root.resolve()):
        way_out = "paths are relative to dataset.json and stay below it"
        problems.append(Fault(name, f"{text} leads out of the data set; {way_out}"))
        return None
    return path


def _listed_channels(root: Path, listed: list[str], channels: int) -> list[str]:
    """nnU-Net v1 lists CASE.nii.gz for the files CASE_0000.nii.gz, ...; otherwise the paths as they are."""
    stem = image_stem(listed[0]) if len(listed) == 1 else None
    if stem is None or (root / listed[0]).exists():
        return listed
    files = [f"{stem}_{i:04d}{listed[0].removeprefix(stem)}" for i in range(channels)]
    return files if (root / files[0]).exists() else listed


# Patients in DICOM


def _patients(root: Path, head: DatasetJson | None, faults: Faults) -> list[Case]:
    problems: list[Fault] = []
    cases: dict[str, Case] = {}
    if head is not None and len(head.channel_names) != 1:
        raise DataError(
            f"{head.path}: {len(head.channel_names)} channels are named, but patient folders of DICOM hold one series "
            "each here. For several channels, convert to NIfTI in nnU-Net's layout."
        )
    for patient in sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith(".")):
        folders = [patient] if _labels_in(patient) else [f for f in _subfolders(patient) if _labels_in(f)]
        for folder in folders or [patient]:
            name = patient.name if len(folders) <= 1 else f"{patient.name}_{folder.name}"
            try:
                case = _patient_case(name, patient.name, folder, problems)
            except DataError as error:  # a file that cannot be opened, and may be a slice
                problems.append(Fault(name, str(error)))
                continue
            if name in cases:
                problems.append(Fault(name, "two cases have this name"))
            if case is not None:
                cases[name] = case
    _settle(root, problems, faults)
    bad = {problem.case for problem in problems}
    return [case for case in cases.values() if case.name not in bad]


def _patient_case(name: str, patient: str, folder: Path, problems: list[Fault]) -> Case | None:
    series = [item for item in [folder, *sorted(folder.rglob("*"))] if item.is_dir() and _holds_dicom(item)]
    labels = _labels_in(folder)
    if not series and not labels:
        logger.warning("%s: neither DICOM slices nor a label map are in this folder; it is passed over", folder)
        return None
    if not series:
        problems.append(Fault(name, _NO_IMAGE))
    elif len(series) > 1:
        named = listing([str(item.relative_to(folder)) for item in series])
        text = f"{len(series)} folders with DICOM files ({named}); keep the one series of the label"
        problems.append(Fault(name, text))
    if not labels:
        problems.append(Fault(name, _NO_LABEL))
    elif len(labels) > 1:
        named = listing([label.name for label in labels])
        problems.append(Fault(name, f"{len(labels)} NIfTI files ({named}); call the label map label.nii.gz"))
    if len(series) != 1 or len(labels) != 1:
        return None
    return Case(name=name, patient=patient, images=(series[0],), label=labels[0])


def _labels_in(folder: Path) -> list[Path]:
    """label.nii.gz if it is there, else every NIfTI file of the folder itself."""
    files = [f for f in sorted(folder.iterdir()) if f.is_file() and not f.name.startswith(".") and image_stem(f.name)]
    return [f for f in files if f.name in ("label.nii.gz", "label.nii")] or files


def _subfolders(folder: Path) -> list[Path]:
    return [item for item in sorted(folder.iterdir()) if item.is_dir()]


def _holds_dicom(folder: Path) -> bool:
    return any(item.is_file() and is_dicom_file(item) for item in sorted(folder.iterdir()))
