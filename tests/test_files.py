from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from medckpt.files import write_atomic, write_json, write_text


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
