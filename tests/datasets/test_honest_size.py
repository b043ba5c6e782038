"""A header that promises more than the file holds is refused before memory is taken."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medckpt.datasets.honest_size import unzipped_bytes
from medckpt.datasets.reading import read_volume
from medckpt.errors import DataError


def test_bytes_are_counted(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20
    zipped, members = (tmp_path / name for name in ("b.nii.gz", "c.nii.gz"))
    zipped.write_bytes(gzip.compress(content))
    members.write_bytes(gzip.compress(content[:5000]) + gzip.compress(content[5000:]))  # the trailer says 120
    for path in (zipped, members):
        assert unzipped_bytes(path, len(content)) == len(content)
    zipped.write_bytes(gzip.compress(content)[:-9])
    assert unzipped_bytes(zipped, 10**12) <= len(content)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_promise_costs_no_memory(tmp_path: Path, suffix: str) -> None:
    raw = bytearray(nib.Nifti1Image(np.zeros((8, 8, 8), np.int16), np.eye(4)).to_bytes())
    struct.pack_into("<hhh", raw, 42, 4096, 4096, 64)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix == ".nii.gz" else raw)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"2147484000 bytes.* 1376\b"):
            read_volume(path)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
