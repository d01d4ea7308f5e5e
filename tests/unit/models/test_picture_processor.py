"""The cache of pictures as tensors, which several threads use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gcore.models.vision import PictureProcessor
from gcore.testing.vision_models import make_picture, make_tiny_vision_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision"))


def test_a_picture_that_two_threads_read_at_once_takes_room_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, whole = threading.Barrier(2, timeout=30), PictureProcessor._processed
    pictures = {name: make_picture(32, 32, seed=seed) for seed, name in enumerate("abc")}
    size = PictureProcessor(folder).read("a", pictures["a"]).size
    processor = PictureProcessor(folder, cache_bytes=2 * size)

    def together(*given: Any) -> Any:
        both.wait()
        return whole(*given)

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as threads:
        patched.setattr(PictureProcessor, "_processed", together)
        one, other = threads.map(lambda _: processor.read("a", pictures["a"]), range(2))
    assert one is other
    processor.read("b", pictures["b"])
    assert processor.read("a", pictures["a"]) is one, "both have room"
    processor.read("c", pictures["c"])
    assert processor.decoded == 4
    processor.read("b", pictures["b"])
    assert processor.decoded == 5, "b was used least recently"
