"""The words after a verb: numbers and lists in them, flags between them, and those that are given twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from medckpt.blocks import DicomConfig
from medckpt.datasets.check.findings import FIXES
from medckpt.errors import ConfigError, suggest

READING_KEYS = ("data.shear", "data.label_grid", *(f"data.dicom.{field.name}" for field in fields(DicomConfig)))
"""What is to be done with faults of files, for verbs that take no recipe."""

LARGEST = 10**9
"""No count in a word is larger."""


def once(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words with the last of each key alone, and a line for each key that was there more than once.

    `data=NAME data=PATH` are two settings (a choice and a folder), and so are `x=1` and `+x=1`.
    """
    from medckpt import search_path

    def key_of(word: str) -> str | None:
        key, equals, value = word.partition("=")
        if not equals or word.startswith("-"):
            return None
        return "data.path" if key == "data" and value not in search_path.choices("data") else key

    last: dict[str, int] = {}
    often: dict[str, None] = {}
    for index, word in enumerate(words):
        key = key_of(word)
        if key is not None:
            if key in last:
                often[key] = None
            last[key] = index
    kept = [word for index, word in enumerate(words) if (key := key_of(word)) is None or last[key] == index]
    return kept, [f"{key}= is given more than once; the last counts: {_short(words[last[key]])}" for key in often]


def whole(keys: dict[str, str], key: str) -> int | None:
    """Returns the number that `key` has, None if it is not there."""
    if key not in keys:
        return None
    number = _number(keys[key])
    if number is None:
        raise ConfigError(f"{key}={_short(keys[key])}: must be a whole number, 1 or more, up to {LARGEST}.")
    return number


def sides(text: str | None) -> tuple[int, ...] | None:
    """Returns the numbers of a list such as `[64,96]`, None if there is none."""
    if text is None:
        return None
    inside = text.replace(" ", "").removeprefix("[").removesuffix("]")
    numbers = [_number(word) for word in inside.split(",")] if inside else []
    if not text.strip() or None in numbers:
        raise ConfigError(
            f"sides={_short(text)}: must be whole numbers from 1 to {LARGEST}, for example sides=[64,96,128]."
        )
    return tuple(number for number in numbers if number is not None)


def _number(text: str) -> int | None:
    """Returns a whole number from 1 to `LARGEST`, None for any other text."""
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        return None
    return int(text) if 1 <= int(text) <= LARGEST else None


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


def read_keys(verb: str, words: Sequence[str], *, required: Sequence[str], optional: Sequence[str]) -> dict[str, str]:
    """Returns the words of a verb that takes a few keys of its own; all that is wrong comes at once."""
    problems, keys = [], {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            problems.append(f"'{word}' is not key=value.")
        elif key not in (*required, *optional):
            problems.append(f"{key}: unknown key. {suggest(key, (*required, *optional))}")
        else:
            keys[key] = value
    problems += [f"{key}=... is missing." for key in required if key not in keys]
    if problems:
        raise ConfigError("\n".join(problems) + f"\nSee medckpt {verb} --help.")
    return keys


def reading(keys: dict[str, str]) -> dict[str, Any]:
    """Returns those of `READING_KEYS` that are there, nested as in `DataConfig`."""
    given = {key.removeprefix("data."): keys[key] for key in READING_KEYS if key in keys}
    dicom = {key.removeprefix("dicom."): value for key, value in given.items() if key.startswith("dicom.")}
    return {key: value for key, value in given.items() if "." not in key} | ({"dicom": dicom} if dicom else {})


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates Hydra's flags (with the word that follows --cfg and its like) from key=value words."""
    flags: list[str] = []
    overrides: list[str] = []
    takes_value = {"--cfg", "-c", "--package", "-p"}
    may_take_value = {"--info", "-i"}
    for word in words:
        if word.startswith(("--config", "-cd", "-cn", "-cp")):
            raise ConfigError(f"{word}: recipe= chooses the file. Give your own as recipe=./FILE.yaml instead.")
        if word.startswith("--experimental-rerun"):
            raise ConfigError(f"{word}: not supported. A run goes on with resume=RUN.")
        last = flags[-1] if flags else ""
        if word.startswith("-") or last in takes_value or (last in may_take_value and "=" not in word):
            flags.append(word)
        else:
            overrides.append(word)
    shows = [flag for flag in flags if flag.partition("=")[0] in ("--cfg", "-c", "--info", "-i")]
    if shows and not {"-m", "--multirun"}.isdisjoint(flags):
        raise ConfigError(f"{shows[0]} shows one run: leave out -m.")
    return flags, overrides


def take_flag(words: list[str], flag: str) -> bool:
    """Takes a flag out of `words`; returns whether it was there."""
    found = flag in words
    while flag in words:
        words.remove(flag)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckWords:
    """The words of `medckpt check`; without `fixes`, `output` and `remap` have no meaning."""

    data: Path
    report: Path | None
    fixes: tuple[str, ...]
    output: Path
    remap: dict[int, int]
    reading: dict[str, Any]


def read_check(words: Sequence[str]) -> CheckWords:
    """Reads the words of `medckpt check`.

    Raises:
        ConfigError: unknown or missing words, fixes that are not known, words that do not go together.
    """
    keys = read_keys("check", words, required=("data",), optional=("report", "fix", "output", "remap", *READING_KEYS))
    fixes = tuple(word.strip() for word in keys.get("fix", "").strip("[]").split(",")) if "fix" in keys else ()
    problems = [f"fix={word}: there is no such fix. {suggest(word, FIXES)}" for word in fixes if word not in FIXES]
    if fixes and "output" not in keys:
        problems.append("output=FOLDER is missing: fix= writes a corrected copy there, never in place.")
    if fixes and (given := [key for key in READING_KEYS if key in keys]):
        problems.append(f"{given[0]}= goes with a check; a corrected copy is made from files as they are.")
    if fixes and "report" in keys:
        problems.append("report= goes with a check; check the copy afterwards.")
    if "output" in keys and not fixes:
        problems.append("output= is where fix= writes its copy; the folder of the report is report=.")
    if ("remap" in keys) != ("labels" in fixes):
        problems.append("fix=labels and remap= go together, for example fix=labels remap={4:3}.")
    remap: dict[int, int] = {}
    if "remap" in keys:
        try:
            remap = _pairs(keys["remap"])
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems) + "\nSee medckpt check --help.")
    return CheckWords(
        data=Path(keys["data"]).expanduser(),
        report=Path(keys["report"]).expanduser() if "report" in keys else None,
        fixes=fixes,
        output=Path(keys.get("output", "")).expanduser(),
        remap=remap,
        reading=reading(keys),
    )


def _pairs(text: str) -> dict[int, int]:
    """Returns what `{4:3,5:4}` says."""
    inside = text.replace(" ", "").removeprefix("{").removesuffix("}")
    matches = [re.fullmatch(r"(\d{1,9}):(\d{1,9})", word) for word in inside.split(",")]
    pairs = [(int(match[1]), int(match[2])) for match in matches if match]
    if len(pairs) < len(matches) or len({a for a, _ in pairs}) < len(pairs):
        raise ConfigError(f"remap={_short(text)}: must be pairs of label values, each once, for example remap={{4:3}}.")
    return dict(pairs)
