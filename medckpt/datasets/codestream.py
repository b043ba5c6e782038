"""What a compressed image says of its own size, read before a decoder takes memory for it.

A decoder believes its stream, not DICOM's header: one wrong digit in it costs gigabytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_JPEG_2000 = b"\xff\x4f\xff\x51"  # SOC and SIZ, which must follow at once (ISO/IEC 15444-1, A.4)
_JPEG = b"\xff\xd8"
_SEARCHED = 4096
"""Bytes in which a JPEG 2000 stream begins: at once in DICOM, after a few boxes in a JP2 file."""

_TILE_PIXELS = 1024
"""Tiles of JPEG 2000 are larger than this (32 x 32); the decoder keeps some 6 kB for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSize:
    """The size in a stream's own header."""

    rows: int
    columns: int
    components: int
    tiles: int = 1


def require_size(stream: bytes, rows: int, columns: int, components: int = 1) -> None:
    """Refuses a stream whose own size is not the one in DICOM's header; other codecs have none and pass.

    Raises:
        ValueError: with both sizes.
        struct.error: the stream ends inside of its header.
    """
    size = stream_size(stream)
    if size is None:
        return
    if (size.rows, size.columns, size.components) != (rows, columns, components):
        raise ValueError(
            f"the compressed image says {size.rows} rows of {size.columns} with {size.components} values a pixel, the "
            f"header {rows} of {columns} with {components}"
        )
    if size.tiles > max(16, rows * columns // _TILE_PIXELS):
        raise ValueError(f"the compressed image says that it has {size.tiles} tiles")


def stream_size(stream: bytes) -> StreamSize | None:
    """Returns what a JPEG 2000, JPEG or JPEG-LS stream says; None for any other."""
    start = stream.find(_JPEG_2000, 0, _SEARCHED)
    if start >= 0:
        return _jpeg_2000_size(stream, start + 4)
    return _jpeg_size(stream) if stream.startswith(_JPEG) else None


def _jpeg_2000_size(stream: bytes, start: int) -> StreamSize:
    """From the SIZ segment (A.5.1), which begins with its length at `start`."""
    numbers = struct.unpack_from(">HH8IH", stream, start)
    right, bottom, left, top, tile_width, tile_height, tiles_left, tiles_top = numbers[2:10]
    step_x, step_y = struct.unpack_from(">xBB", stream, start + 38)
    if not (step_x and step_y and tile_width and tile_height):
        raise ValueError("the compressed image has pixels or tiles without a size")
    return StreamSize(
        rows=_up(bottom, step_y) - _up(top, step_y),
        columns=_up(right, step_x) - _up(left, step_x),
        components=numbers[10],
        tiles=_up(right - tiles_left, tile_width) * _up(bottom - tiles_top, tile_height),
    )


def _jpeg_size(stream: bytes) -> StreamSize | None:
    """From the first frame header, SOF0 to SOF15 or JPEG-LS's SOF55 (ISO/IEC 10918-1, B.2.2; 14495-1, C.2.2)."""
    start = 2
    while start < len(stream):
        mark, code = struct.unpack_from(">BB", stream, start)
        if mark != 0xFF:
            return None  # no marker where one must be: the decoder says so
        if code == 0xFF:  # a fill byte
            start += 1
            continue
        if code == 0xF7 or (0xC0 <= code <= 0xCF and code not in (0xC4, 0xC8, 0xCC)):
            rows, columns, components = struct.unpack_from(">HHB", stream, start + 5)
            return StreamSize(rows=rows, columns=columns, components=components)
        start += 2 + struct.unpack_from(">H", stream, start + 2)[0]
    return None


def _up(value: int, step: int) -> int:
    return -(-value // step)
