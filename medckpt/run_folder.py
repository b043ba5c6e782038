"""A run folder: made once, read back strictly, and changed on resume only where that changes nothing it stands for."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from medckpt import machine, typed
from medckpt.config import RunConfig, from_plain
from medckpt.datasets.dataset_json import read_dataset_json
from medckpt.datasets.layouts import Case, Dataset
from medckpt.datasets.prepare import PreparedCase
from medckpt.datasets.segment_codes import SegmentCode
from medckpt.errors import ConfigError, DataError, listing
from medckpt.files import write_json, write_text

FOLDER_VARIABLE = "MEDCKPT_RUN_FOLDER"
"""Through which the first process of a DDP run tells the others where the run folder is."""

Cases = tuple[Case, ...]


def make(
    config: RunConfig,
    dataset: Dataset,
    training: Cases,
    validation: Cases,
    facts: dict[str, Any],
    dropped: Mapping[str, str] | None = None,
) -> Path:
    """Makes OUTPUT/<recipe>-<date>-<hash> with all that the run needs to be understood and resumed.

    `dropped` are the cases that were left out (data.drop_failed), each with its reason; split.json keeps them.
    """
    if machine.rank() > 0:
        return Path(os.environ[FOLDER_VARIABLE])
    digest = hashlib.sha256(json.dumps([typed.to_plain(config), os.getpid()]).encode()).hexdigest()[:6]
    moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path(config.output).expanduser() / f"{config.recipe}-{moment}-{digest}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"output={config.output}: the run folder cannot be made ({error}).") from error
    os.environ[FOLDER_VARIABLE] = str(folder.resolve())
    save_config(folder, config)
    head = read_dataset_json(dataset.root)
    known = DatasetFacts(labels=dataset.labels, channel_names=dataset.channel_names, codes=head.codes if head else {})
    write_json(folder / "dataset.json", typed.to_plain(known))
    names = {"train": [case.name for case in training], "val": [case.name for case in validation]}
    write_json(folder / "split.json", names | ({"dropped": dict(dropped)} if dropped else {}))
    write_json(folder / "environment.json", machine.environment(facts) | {"command": " ".join(sys.argv)})
    return folder


def note_memory(run: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Puts `facts` into memory.json and returns all of it; the higher process peak of a resumed run stays."""
    file = run / "memory.json"
    memory: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if memory.get("process_peak_bytes", 0) > facts.get("process_peak_bytes", math.inf):
        facts = {key: value for key, value in facts.items() if not key.startswith("process_")}
    memory |= facts
    if machine.rank() == 0:
        write_json(file, memory)
    return memory


def note_reading(run: Path, cases: Sequence[PreparedCase]) -> None:
    """Writes reading.json: per case, what `data.dicom` had done to it; no file where every scan is as stored."""
    notes = {case.name: list(case.notes) for case in cases if case.notes}
    if notes and machine.rank() == 0:
        write_json(run / "reading.json", notes)


def save_config(run: Path, config: RunConfig) -> None:
    """Writes config.yaml; the data path becomes absolute, so that the run can be read from anywhere."""
    path = config.data.path
    absolute = path if path == "phantom" else str(Path(path).expanduser().resolve())
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=absolute))
    write_text(run / "config.yaml", yaml.safe_dump(typed.to_plain(config), sort_keys=False, allow_unicode=True))


def load_config(run: Path) -> RunConfig:
    """Reads the configuration of a run folder."""
    path = run / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"run={run}: there is no config.yaml in it, so it is not a run folder.")
    try:
        plain = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: it cannot be read ({' '.join(str(error).split())}).") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: it holds no settings.")
    return from_plain(plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """What a network's outputs and inputs mean: the run's dataset.json."""

    labels: dict[str, int]
    channel_names: tuple[str, ...]
    codes: dict[str, SegmentCode] = dataclasses.field(default_factory=dict)
    """What classes are in the words of DICOM, where the data set's own dataset.json says so."""


def load_facts(run: Path) -> DatasetFacts:
    """Reads labels and channels of the data that a run was trained on."""
    return typed.read(DatasetFacts, _load_json(run / "dataset.json"), f"{run / 'dataset.json'}: ")


def require_same_data(run: Path, dataset: Dataset) -> None:
    """Refuses a data set whose labels or channels are not those of the run."""
    facts = load_facts(run)
    if dataset.labels != facts.labels or len(dataset.channel_names) != len(facts.channel_names):
        raise DataError(
            f"{dataset.root}: labels {dict(dataset.labels)} and {len(dataset.channel_names)} channel(s) are not the "
            f"run's {facts.labels} and {len(facts.channel_names)}. A value must mean the same "
            "class in both: change the label maps, or score data that were labelled in the run's way."
        )


def load_split(run: Path, dataset: Dataset) -> tuple[Cases, Cases]:
    """Returns a run's training and validation cases."""
    names = _load_json(run / "split.json")
    by_name = {case.name: case for case in dataset.cases}
    missing = sorted({*names["train"], *names["val"]} - set(by_name))
    if missing:
        raise DataError(f"{run / 'split.json'}: {dataset.root} has no case {listing(missing)} any more.")
    return tuple(by_name[name] for name in names["train"]), tuple(by_name[name] for name in names["val"])


def prepare_resume(run: Path, config: RunConfig, dataset: Dataset) -> None:
    """Checks that `config` continues the run, and writes it back.

    Raises:
        ConfigError: it changes what the weights so far were trained for: the network or the look of its input.
        DataError: other labels or channels, or a run that had begun and has lost its weights.
    """
    old = load_config(run)
    here = dataclasses.replace(config.data, path=old.data.path)  # the same data may have moved
    fixed: dict[str, tuple[object, object]] = {
        "model": (old.model, config.model),
        "data": (old.data, here),
        "sampler.patch_size": (old.sampler.patch_size, config.sampler.patch_size),
    }
    changed = [key for key, (before, now) in fixed.items() if before != now]
    if changed:
        raise ConfigError(
            f"resume={run}: {', '.join(changed)} cannot change in a run that has begun; its weights were trained with "
            "what config.yaml says. Start a new run for other settings."
        )
    require_same_data(run, dataset)
    begun = (run / "metrics.json").is_file() or _rows(run / "metrics.csv") > 0
    if begun and not (run / "weights" / "last.ckpt").is_file():
        raise DataError(f"{run}: the run had begun, but weights/last.ckpt is gone. Put it back, or start a new run.")
    if machine.rank() == 0:
        save_config(run, config)


def _rows(path: Path) -> int:
    return max(0, len(path.read_text().splitlines()) - 1) if path.is_file() else 0


def _load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path}: it is missing, so this is no whole run folder.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: it cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected keys and values.")
    return value
