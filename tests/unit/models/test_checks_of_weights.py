"""Weights that are not all there are told before anything starts, by names and sizes alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gcore.models.checks import check_whole
from gcore.models.hubs import ModelError

TENSORS = {"a": np.arange(64, dtype=np.float32), "b": np.ones((3, 5), dtype=np.float16)}


def write(path: Path, size: int | None = None) -> Path:
    save_file(TENSORS, path, metadata={"format": "pt"})
    if size is not None:
        path.write_bytes(path.read_bytes()[:size])
    return path


def test_whole_weights_pass_in_one_file_and_in_several(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    check_whole(tmp_path)
    several = tmp_path / "several"
    several.mkdir()
    for name in ("one.safetensors", "two.safetensors"):
        write(several / name)
    (several / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    check_whole(several)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 60, -1, -100])
def test_a_file_cut_off_anywhere_is_told_with_its_size(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with pytest.raises(ModelError, match=rf"cut off: it has {len(whole[:cut])} ") as caught:
        check_whole(tmp_path)
    assert str(path) in str(caught.value)
    assert "Copy or download it again" in str(caught.value)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    ("another content", lambda f: (f / "model.safetensors").write_text("x" * 99), "no safetensors file"),
    ("more than there should be", lambda f: (f / "model.safetensors").open("ab").write(b"x"), "no safetensors file"),
    (
        "a broken header",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b"{1234567"),
        "header of the safetensors file cannot be read",
    ),
    (
        "a header that is a list",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 14) + b'{"a": [1, 2] }'),
        "header of the safetensors file cannot be read",
    ),
    ("a broken index", lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index of the weights"),
    (
        "an index of a file that is not there",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
        "1 of 1 files of weights are missing, x.safetensors",
    ),
    (
        "an index of a file of another folder",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}'),
        "names a file of another folder",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_what_is_wrong_with_weights_is_one_sentence(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / "model.safetensors")
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        check_whole(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.fix
