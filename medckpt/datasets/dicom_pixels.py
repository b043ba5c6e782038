"""Pixels of DICOM images as real values: stored value times slope plus intercept, of each image's own.

Plain little-endian pixels are read from their place in the file straight into the volume; everything else goes through
pydicom and its decoder plugins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import numpy as np
import pydicom
from pydicom.encaps import generate_frames
from pydicom.pixels import get_decoder
from pydicom.pixels.utils import iter_pixels
from pydicom.uid import UID, ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from medckpt.datasets.codestream import require_size
from medckpt.datasets.dicom_header import Slice, Stored
from medckpt.errors import DataError

_DECODER_PACKAGES = {  # first match in the name of the transfer syntax
    "JPEG-LS": "pyjpegls",
    "JPEG 2000": "pylibjpeg pylibjpeg-openjpeg",
    "High-Throughput": "pylibjpeg pylibjpeg-openjpeg",
    "JPEG": "pylibjpeg pylibjpeg-libjpeg",
}


def values_dtype(slices: Sequence[Slice]) -> np.dtype:
    """Returns int16 where it holds every value that these images can have (most CT and MR), else float32."""
    return np.dtype(np.int16 if all(s.stored.exact_int16 for s in slices) else np.float32)


def require_decoders(slices: Sequence[Slice]) -> None:
    """Raises DataError, with the package to install, if the pixels of some image have no decoder here."""
    seen: dict[str, Slice] = {}
    for slice_ in slices:
        if slice_.stored.syntax and slice_.stored.offset is None:
            seen.setdefault(slice_.stored.syntax, slice_)
    for syntax, slice_ in seen.items():
        missing = _missing_decoder(slice_.path, UID(syntax))
        if missing:
            raise DataError(missing)


def fill_planes(slices: Sequence[Slice], planes: Sequence[np.ndarray]) -> int:
    """Decodes images of one file, each into its (rows, columns) plane of int16 (see `values_dtype`) or float32.

    Returns:
        How many pixels had something in the bits above BitsStored, which is cut off as DICOM says.

    Raises:
        DataError: the pixels do not decode, or not to the size in the header.
    """
    cut = 0
    for slice_, plane, (stored, surplus) in zip(slices, planes, _stored_pixels(slices, planes), strict=True):
        cut += surplus
        if stored is not plane:
            _rescale(stored, slice_.stored, plane)
    return cut


def plane_values(slice_: Slice) -> np.ndarray:
    """Returns one image, (rows, columns) float32, in real values; raises as `fill_planes`."""
    plane = np.empty((slice_.rows, slice_.columns), np.float32)
    fill_planes([slice_], [plane])
    return plane


def _stored_pixels(slices: Sequence[Slice], planes: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, int]]:
    if all(s.stored.offset is not None for s in slices) and sys.byteorder == "little":
        with slices[0].path.open("rb", buffering=0) as file:
            for slice_, plane in zip(slices, planes, strict=True):
                yield _read_plain(file, slice_, plane)
        return
    decoded = iter(_decode(slices[0].path, [s.frame or 0 for s in slices]))
    for slice_ in slices:
        try:
            stored = next(decoded)
        except Exception as error:  # each decoder plugin raises errors of its own
            raise DataError(_undecodable(slice_, error)) from error
        if stored.shape != (slice_.rows, slice_.columns):
            raise DataError(
                f"{slice_.path}: the pixels decode to {stored.shape}, not to the {slice_.rows} rows of "
                f"{slice_.columns} in the header. Copy or export the file again."
            )
        yield stored, 0


def _read_plain(file: FileIO, slice_: Slice, plane: np.ndarray) -> tuple[np.ndarray, int]:
    """Reads the stored numbers, into `plane` itself if it has their size; `plane` is returned if that is all."""
    kind = slice_.stored
    dtype = np.dtype(f"<{'i' if kind.signed else 'u'}{kind.bits_allocated // 8}")
    in_place = plane.dtype == np.int16 and dtype.itemsize == 2 and plane.flags.c_contiguous
    stored = plane.view(dtype) if in_place else np.empty(plane.shape, dtype)
    assert kind.offset is not None
    file.seek(kind.offset)
    room = stored.data.cast("B")
    while len(room):
        count = file.readinto(room)
        if not count:
            raise DataError(f"{slice_.path}: the pixels end too early. Is the file complete? Copy or export it again.")
        room = room[count:]
    surplus = _cut_surplus(stored, kind)
    if not in_place or kind.slope != 1:
        return stored, surplus
    if kind.intercept:
        # Sixteen bits wrap and wrap back: the sum fits, whatever the unsigned numbers looked like on the way.
        plane += np.int16(kind.intercept)
    return plane, surplus


def _cut_surplus(stored: np.ndarray, kind: Stored) -> int:
    """Makes numbers of BitsStored bits of whole words, in place (PS3.5 8.1.1: the other bits may hold anything)."""
    shift = kind.bits_allocated - kind.bits_stored
    if not shift:
        return 0
    kept = (stored << shift) >> shift
    surplus = int(np.count_nonzero(kept != stored))
    if surplus:
        stored[...] = kept
    return surplus


def _rescale(stored: np.ndarray, kind: Stored, plane: np.ndarray) -> None:
    if plane.dtype == np.int16:
        plane[...] = stored.astype(np.int64) * int(kind.slope) + int(kind.intercept)
    elif kind.slope == 1 and kind.intercept == 0:
        plane[...] = stored
    else:  # in float64: a large intercept would take the small digits away
        plane[...] = stored * np.float64(kind.slope) + np.float64(kind.intercept)


def _decode(path: Path, frames: Sequence[int]) -> Iterator[np.ndarray]:
    dataset = pydicom.dcmread(path, force=True)
    if "TransferSyntaxUID" not in dataset.file_meta:
        # A file without a meta header: what pydicom found to parse it is how its pixels are stored.
        implicit, little = dataset.original_encoding
        explicit = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else explicit
    encapsulated = dataset.file_meta.TransferSyntaxUID.is_encapsulated
    if dataset["PixelData"].is_undefined_length and not encapsulated:
        raise DataError(
            f"{path}: the pixels are compressed, and no TransferSyntaxUID says how. Copy or export the file again."
        )
    number = int(dataset.get("NumberOfFrames") or 1)
    if encapsulated:
        wanted = set(frames)
        for index, stream in enumerate(generate_frames(dataset.PixelData, number_of_frames=number)):
            if index in wanted:
                require_size(stream, dataset.Rows, dataset.Columns, dataset.SamplesPerPixel)
    every = list(frames) == list(range(number))
    yield from iter_pixels(dataset, indices=None if every else frames)


def _undecodable(slice_: Slice, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    syntax = UID(slice_.stored.syntax)
    missing = _missing_decoder(slice_.path, syntax) if slice_.stored.syntax else None
    return missing or (
        f"{slice_.path}: the pixels ({syntax.name or 'no transfer syntax'}) do not decode: {reason}. Is the file "
        "complete? Copy or export it again."
    )


def _missing_decoder(path: Path, syntax: UID) -> str | None:
    package = next((pip for word, pip in _DECODER_PACKAGES.items() if word in syntax.name), None)
    try:
        if get_decoder(syntax).is_available:
            return None
    except NotImplementedError:
        package = None
    if package:
        return f"{path}: no decoder for {syntax.name} is installed. Install it: pip install {package}"
    return f"{path}: {syntax.name} cannot be decoded here. Export the series uncompressed (Explicit VR Little Endian)."
