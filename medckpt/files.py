"""Files that are either wholly there or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write` on a temporary file beside `path`, then puts it in its place.

    A reader sees the old file or the new one, whatever happens in between; on an error the old one stays and the
    temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text atomically."""
    write_atomic(path, lambda stream: stream.write(text.encode()))


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically, indented, in the order given."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _umask() -> int:
    # The only way to read it is to set it; mkstemp makes files that nobody else may read.
    mask = os.umask(0)
    os.umask(mask)
    return mask
