"""The errors a person sees: what went wrong, where, by which rule, and the way out.

Every error raised on purpose is a `MedckptError`. The command line prints its text without a traceback and
leaves with `exit_code`; anything else is our own fault and gets a traceback file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MedckptError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line leaves with."""

    exit_code = 1


class ConfigError(MedckptError):
    """A recipe, key or value is wrong."""

    exit_code = 2


class DataError(MedckptError):
    """A file, folder or case cannot be used as it is."""

    exit_code = 2


class GeometryError(DataError):
    """Voxels cannot be placed in the patient's millimetres without guessing."""


class InfeasibleBudget(MedckptError):  # noqa: N818 (people look for it by this name)
    """No exact plan fits into a budget."""

    exit_code = 3

    def __init__(self, budget_bytes: int, smallest_bytes: int, changes: Sequence[str] = ()) -> None:
        """`changes` are the cheapest ones that would make it fit, each with what it gives."""
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.changes = tuple(changes)
        ways_out = "".join(f"\n  {change}" for change in self.changes) or " Take fewer or smaller patches."
        words = size(budget_bytes), size(smallest_bytes)
        asked, least = words if words[0] != words[1] else (f"{budget_bytes} bytes", f"{smallest_bytes} bytes")
        super().__init__(f"budget {asked}: no exact plan of this step fits; the smallest takes {least}.{ways_out}")


def size(nbytes: int) -> str:
    """Returns bytes as people read them."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.{1 if unit == 'MiB' else 2}f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns the closest known name as a question, then the whole list: `Did you mean 'x'? Known: x, y.`"""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    question = f"Did you mean '{near[0]}'? " if near else ""
    return f"{question}Known: {', '.join(names) or 'none'}."


def listing(items: Sequence[object], limit: int = 10) -> str:
    """Returns `items` joined by commas, cut after `limit` of them with the number left out."""
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
