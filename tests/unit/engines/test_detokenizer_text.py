"""The tokenizer's side of the engine."""

import threading
from pathlib import Path

from gcore.engines.detokenizer import Detokenizer
from gcore.testing.models import make_tiny_model


def test_a_long_text_is_encoded_beside_other_threads(tmp_path: Path) -> None:
    """The event loop is one: while it may not run, the engine answers nobody."""
    text = Detokenizer.load(make_tiny_model(tmp_path))
    assert text is not None
    found: list[tuple[int, ...]] = []
    encoding = threading.Thread(target=lambda: found.append(text.encode("1+2 " * 100_000)))
    turns = 0
    encoding.start()
    while encoding.is_alive():
        turns += 1
    assert turns > 100
    assert len(found[0]) == 400_000
