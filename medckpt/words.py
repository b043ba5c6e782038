"""The words after a verb: numbers and lists in them, flags between them, and those that are given twice."""

from __future__ import annotations

from collections.abc import Sequence

from medckpt.errors import ConfigError, suggest

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
