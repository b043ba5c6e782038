"""dataset.json of nnU-Net (v2, and v1 with a warning) and of the Medical Segmentation Decathlon, read strictly."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medckpt import typed
from medckpt.datasets.reading import IMAGE_SUFFIXES
from medckpt.datasets.segment_codes import SegmentCode
from medckpt.errors import ConfigError, DataError, suggest

FILE_NAME = "dataset.json"

# Keys that decide what is read: an unknown key near one of these, where that one is absent, is a typing error.
_STRUCTURE_KEYS = ("channel_names", "modality", "labels", "training", "dataset", "file_ending", "regions_class_order")
_LABELS_EXAMPLE = 'for example "labels": {"background": 0, "liver": 1}'

logger = logging.getLogger("medckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetJson:
    """What dataset.json says: names by channel, values by class name (background first), and lists of files if any."""

    path: Path
    channel_names: tuple[str, ...]
    labels: dict[str, int]
    training: tuple[Any, ...] | None
    cases: dict[str, Any] | None
    file_ending: str | None
    codes: dict[str, SegmentCode] = field(default_factory=dict)
    """What classes are in the words of DICOM, from "codes" under "medckpt"."""


def read_dataset_json(root: Path) -> DatasetJson | None:
    """Reads `root`/dataset.json; None where there is none.

    Unknown keys are left alone, except below our own key "medckpt". nnU-Net v1's `modality` and inverted labels
    ({"1": "liver"}) are understood.

    Raises:
        DataError: malformed JSON (with line and column), a missing or mistyped key, labels that are no set of distinct
            whole numbers from 0, region labels or an ignore label (not supported yet), codes of no label or of no code.
    """
    path = root / FILE_NAME
    if not path.exists():
        return None
    content = _parse(path)
    _refuse_typing_errors(path, content)
    names_key = "channel_names" if "channel_names" in content else "modality"
    training, cases, ending = content.get("training"), content.get("dataset"), content.get("file_ending")
    if training is not None and not isinstance(training, list):
        raise DataError(f'{path}: "training" is a list of {{"image": ..., "label": ...}}, not {_kind(training)}.')
    if cases is not None and not isinstance(cases, dict):
        raise DataError(f'{path}: "dataset" maps each case to its "images" and "label", it is not {_kind(cases)}.')
    if ending is not None and ending not in IMAGE_SUFFIXES:
        raise DataError(f'{path}: "file_ending" {ending!r} is not read here. {suggest(str(ending), IMAGE_SUFFIXES)}')
    labels = _labels(path, content)
    head = DatasetJson(
        path=path,
        channel_names=_channel_names(path, content, names_key),
        labels=labels,
        training=None if training is None else tuple(training),
        cases=cases,
        file_ending=ending,
        codes=_codes(path, content, labels),
    )
    if training is None and names_key == "modality":
        logger.warning("%s: 'modality' is nnU-Net v1's key for 'channel_names'; it is read as that", path)
    return head


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: no valid JSON at line {error.lineno}, column {error.colno}: {error.msg}. Correct it there."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: the file holds {_kind(content)} where an object {{...}} is needed.")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice in one object")
    return result


def _refuse_typing_errors(path: Path, content: Mapping[str, Any]) -> None:
    for key in content:
        absent = [known for known in _STRUCTURE_KEYS if known not in content]
        if key not in _STRUCTURE_KEYS and difflib.get_close_matches(key, absent, n=1, cutoff=0.8):
            raise DataError(f"{path}: unknown key {key!r}. {suggest(key, absent)}")


def _channel_names(path: Path, content: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = content.get(key)
    example = 'for example "channel_names": {"0": "CT"}'
    if value is None:
        raise DataError(f'{path}: the key "channel_names" is missing; {example}. {suggest("channel_names", content)}')
    if isinstance(value, list):
        value = {str(i): name for i, name in enumerate(value)}
    if not isinstance(value, dict) or not value or sorted(value) != sorted(str(i) for i in range(len(value))):
        raise DataError(f'{path}: "{key}" names the channels by number, 0, 1, ...; {example}.')
    return tuple(str(value[str(i)]) for i in range(len(value)))


def _labels(path: Path, content: Mapping[str, Any]) -> dict[str, int]:
    value = content.get("labels")
    if value is None:
        raise DataError(f'{path}: the key "labels" is missing; {_LABELS_EXAMPLE}. {suggest("labels", content)}')
    if not isinstance(value, dict) or not value:
        raise DataError(f'{path}: "labels" has to name at least background and one class; {_LABELS_EXAMPLE}.')
    if all(_is_number(key) and isinstance(name, str) and not _is_number(name) for key, name in value.items()):
        if "training" not in content:
            logger.warning("%s: 'labels' maps values to names as nnU-Net v1 did; it is read the other way round", path)
        if len(set(value.values())) < len(value):
            raise DataError(f'{path}: "labels" gives one name to two values.')
        value = {name: int(key) for key, name in value.items()}
    return _checked_labels(path, value)


def _checked_labels(path: Path, value: Mapping[str, Any]) -> dict[str, int]:
    for name, number in value.items():
        if isinstance(number, list):
            raise DataError(
                f"{path}: label {name!r} is a region ({number}); region-based labels are not supported yet. Give every "
                "class one value."
            )
        if name == "ignore":
            raise DataError(
                f"{path}: the label 'ignore' is not supported yet. Relabel those voxels or leave the cases out."
            )
        if isinstance(number, bool) or not _is_number(number):
            raise DataError(f"{path}: label {name!r} has value {number!r}; it is a whole number from 0.")
    labels = {name: int(number) for name, number in sorted(value.items(), key=lambda item: int(item[1]))}
    numbers = list(labels.values())
    if len(set(numbers)) < len(numbers):
        twice = sorted({n for n in numbers if numbers.count(n) > 1})
        raise DataError(f"{path}: two labels have the same value ({', '.join(map(str, twice))}).")
    if numbers[0] != 0:
        raise DataError(f"{path}: no label has the value 0, which is the background; {_LABELS_EXAMPLE}.")
    if len(labels) < 2:
        raise DataError(f'{path}: "labels" names no class beside the background; {_LABELS_EXAMPLE}.')
    return labels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """What stands under "medckpt"."""

    codes: dict[str, SegmentCode] = field(default_factory=dict)


def _codes(path: Path, content: Mapping[str, Any], labels: Mapping[str, int]) -> dict[str, SegmentCode]:
    try:
        codes = typed.read(_Own, content.get("medckpt", {}), f"{path}: medckpt").codes
    except ConfigError as error:
        raise DataError(f'{error}\nA code is written as "liver": {{"type": ["10200004", "SCT", "Liver"]}}.') from error
    unknown = [name for name in codes if name not in labels]
    if unknown:
        raise DataError(f"{path}: medckpt.codes.{unknown[0]}: there is no such label. {suggest(unknown[0], labels)}")
    return codes


def _is_number(value: object) -> bool:
    return (isinstance(value, int) and value >= 0) or (isinstance(value, str) and value.isascii() and value.isdigit())


def _kind(value: object) -> str:
    names = {
        list: "a list",
        dict: "an object",
        str: "a text",
        int: "a number",
        float: "a number",
        bool: "true or false",
    }
    return names.get(type(value), "null")
