"""Does a .gz hold as many bytes as its header promises? Asked before memory is taken for them.

nibabel and zlib take the promised size at once: one wrong digit in a header then costs gigabytes.
"""

from __future__ import annotations

import contextlib
import gzip
import zlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def unzipped_bytes(path: Path, needed: int) -> int:
    """Returns how many bytes of content a .gz has; counted up to `needed`.

    A damaged stream counts as far as it can be read. Of a sound one only the trailer is looked at: it is unpacked, in
    bounded memory, where that says less than `needed` (several members, or 4 GiB and more).
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4))
        stated = int.from_bytes(file.read(4), "little")
    if stated >= needed:
        return stated
    count = 0
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as stream:
        while count < needed and (chunk := stream.read(_CHUNK_BYTES)):
            count += len(chunk)
    return count
