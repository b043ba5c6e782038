"""Files that are either wholly there or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from medckpt.errors import DataError


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write` on a temporary file beside `path`, then puts it in its place.

    A reader sees the old file or the new one, whatever happens in between; on an error the old one stays and the
    temporary file is removed.

    Raises:
        DataError: the file cannot be written: no space, no permission, `path` is a folder, its parent a file.
    """
    try:
        _write(path, write)
    except OSError as error:
        raise _refusal(path, error) from error
    except RuntimeError as error:
        # torch.save answers a failed write with a RuntimeError about positions; the reason is what it arose from.
        failed = _failed_write(error)
        if failed is None:
            raise
        raise _refusal(path, failed) from error


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
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


def _refusal(path: Path, error: OSError) -> DataError:
    reason = error.strerror or str(error) or type(error).__name__
    return DataError(
        f"{path}: the file cannot be written ({reason}); nothing was changed. Make room, or choose another place."
    )


def _failed_write(error: BaseException) -> OSError | None:
    """Returns the operating system's error that `error` arose from, None if there is none."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link


def _umask() -> int:
    # The only way to read it is to set it; mkstemp makes files that nobody else may read.
    mask = os.umask(0)
    os.umask(mask)
    return mask
