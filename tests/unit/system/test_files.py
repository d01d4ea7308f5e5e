"""A file is there whole, as it was before, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gcore.system.files import replace_file


def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "cursor.json"
    for data in (b"one", b"the second, longer"):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert [file.name for file in tmp_path.iterdir()] == ["cursor.json"]


def test_a_secret_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    replace_file(tmp_path / "launch.json", b"key", mode=0o600)
    assert (tmp_path / "launch.json").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cursor.json"
    replace_file(path, b"one")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"two")
    assert (path.read_bytes(), [file.name for file in tmp_path.iterdir()]) == (b"one", ["cursor.json"])
