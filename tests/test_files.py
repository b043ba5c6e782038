from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from medckpt.datasets.nifti import write_nifti_label
from medckpt.errors import DataError
from medckpt.files import write_atomic, write_json, write_text
from medckpt.geometry import Grid


def test_an_error_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail(stream: object) -> None:
        stream.write(b"half")  # type: ignore[attr-defined]
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"]


def test_files_are_readable_like_any_other(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("x")
    write_json(tmp_path / "new" / "a.json", {"ä": 1})
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == {"ä": 1}
    assert os.stat(tmp_path / "new" / "a.json").st_mode == plain.stat().st_mode


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to let a file grow beyond `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_noise(path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 200, (64, 64, 64))
    write_nifti_label(path, array, Grid(shape=(64, 64, 64), affine=np.eye(4)))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_text(path, "x" * 5000),
        lambda path: write_atomic(path, lambda stream: torch.save({"a": torch.ones(100_000)}, stream)),
        write_noise,
    ],
    ids=["text", "torch", "nifti"],
)
def test_a_full_disk_is_told_by_name_and_leaves_the_old_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "a.nii.gz"
    path.write_text("old")
    with files_of_at_most(2000), pytest.raises(DataError) as caught:
        write(path)
    assert str(caught.value).startswith(f"{path}: the file cannot be written (File too large); nothing was changed")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.nii.gz"]
    write(path)  # and with room it is written
    assert path.stat().st_size > 2000


def test_a_folder_or_a_file_in_the_way_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"folder: the file cannot be written \(Is a directory\); nothing was changed"):
        write_text(tmp_path / "folder", "x")
    with pytest.raises(DataError, match=r"file/a: the file cannot be written \((File exists|Not a directory)\)"):
        write_text(tmp_path / "file" / "a", "x")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "folder"]


def test_an_error_of_the_writer_itself_keeps_its_kind(tmp_path: Path) -> None:
    def fail(stream: BinaryIO) -> None:
        raise DataError("not this case")

    with pytest.raises(DataError, match=r"^not this case$"):
        write_atomic(tmp_path / "a", fail)
