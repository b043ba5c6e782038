"""A compressed image whose stream gives another size than DICOM's header is refused before it is decoded."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.data import get_testdata_file
from pydicom.encaps import encapsulate, generate_frames
from pydicom.uid import JPEG2000Lossless, JPEGLSLossless, RLELossless

from medckpt.datasets.codestream import StreamSize, require_size, stream_size
from medckpt.datasets.reading import read_volume
from medckpt.errors import DataError
from tests.datasets.dicom_maker import make_slice, save_slice

ROWS, COLUMNS = 40, 36


def compressed(path: Path, syntax: str) -> bytes:
    """Writes a noisy slice with this syntax; returns its stream."""
    pixels = np.random.default_rng(0).integers(-1000, 1000, (ROWS, COLUMNS)).astype(np.int16)
    save_slice(path, make_slice(0, pixels=pixels, SliceThickness=2))
    dataset = dcmread(path)
    dataset.compress(syntax)
    dataset.save_as(path)
    return next(generate_frames(dataset.PixelData, number_of_frames=1))


def put_stream(path: Path, stream: bytes) -> None:
    dataset = dcmread(path)
    dataset.PixelData = encapsulate([stream])
    dataset.save_as(path)


@pytest.mark.parametrize("syntax", [JPEG2000Lossless, JPEGLSLossless])
def test_a_falsified_size_is_refused_with_both_sizes(tmp_path: Path, syntax: str) -> None:
    path = tmp_path / "a.dcm"
    stream = compressed(path, syntax)
    assert stream_size(stream) == StreamSize(rows=ROWS, columns=COLUMNS, components=1)
    read_volume(path.parent)
    wrong = bytearray(stream)
    if syntax == JPEG2000Lossless:
        struct.pack_into(">I", wrong, wrong.index(b"\xff\x51") + 6, 9000)  # Xsiz
    else:
        struct.pack_into(">H", wrong, wrong.index(b"\xff\xf7") + 7, 9000)
    put_stream(path, bytes(wrong))
    with pytest.raises(DataError, match=r"a\.dcm: .* says 40 rows of 9000 with 1 .* the header 40 of 36 with 1\."):
        read_volume(path.parent)


def test_falsified_tiles_and_components_are_refused(tmp_path: Path) -> None:
    stream = compressed(tmp_path / "a.dcm", JPEG2000Lossless)
    siz = stream.index(b"\xff\x51") + 2
    for offset, kind, values, message in (
        (20, ">II", (1, 1), "says that it has 1440 tiles"),
        (20, ">II", (0, 1), "tiles without a size"),
        (36, ">H", (9999,), "with 9999 values a pixel"),
        (39, ">BB", (0, 1), "without a size"),
    ):
        wrong = bytearray(stream)
        struct.pack_into(kind, wrong, siz + offset, *values)
        put_stream(tmp_path / "a.dcm", bytes(wrong))
        with pytest.raises(DataError, match=message):
            read_volume(tmp_path)


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless, JPEGLSLossless])
def test_compressed_pixels_without_a_transfer_syntax_are_refused(tmp_path: Path, syntax: str) -> None:
    """RLE bytes were read as plain pixels."""
    path = tmp_path / "a.dcm"
    compressed(path, syntax)
    dataset = dcmread(path)
    del dataset.file_meta.TransferSyntaxUID
    dataset.save_as(path, implicit_vr=False, little_endian=True, enforce_file_format=False)
    with pytest.raises(DataError, match=r"a\.dcm: the pixels are compressed, and no TransferSyntaxUID says how"):
        read_volume(tmp_path)


@pytest.mark.parametrize("name", ["JPEG-lossy.dcm", "JPEG2000.dcm", "SC_rgb_jpeg_gdcm.dcm"])
def test_the_size_of_other_encoders_streams(name: str) -> None:
    """Files that come with pydicom: JPEG extended, JPEG 2000, JPEG lossless in colour."""
    found = get_testdata_file(name, download=False)
    if found is None:
        pytest.skip(f"this pydicom comes without {name}")
    dataset = dcmread(found)
    (stream,) = generate_frames(dataset.PixelData, number_of_frames=1)
    require_size(stream, dataset.Rows, dataset.Columns, dataset.SamplesPerPixel)
    with pytest.raises(ValueError, match="says"):
        require_size(stream, dataset.Rows + 1, dataset.Columns, dataset.SamplesPerPixel)


def test_a_stream_that_ends_or_is_none_of_these() -> None:
    assert stream_size(bytes(64)) is None
    assert stream_size(b"\xff\xd8\x00\x00\x00\x00") is None
    with pytest.raises(struct.error):
        stream_size(b"\xff\xd8\xff\xc0\x00")
    with pytest.raises(struct.error):
        stream_size(b"\xff\x4f\xff\x51\x00\x29")
