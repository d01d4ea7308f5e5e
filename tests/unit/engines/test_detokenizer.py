"""The part of a growing text that may be streamed.

The tokenizer's side of the engine.
"""

from __future__ import annotations

import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gcore.engines.detokenizer import Detokenizer, stable_text
from gcore.testing.models import make_tiny_model

TEXTS = st.text("ab\ufffd", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert stable_text("hello wor", ["world"]) == "hello "
    assert stable_text("hello", ["xyz"]) == "hello"
    assert stable_text("a\ufffd", []) == "a"


@given(TEXTS, TEXTS, STOPS)
def test_streamed_text_is_a_prefix_of_the_final_text(text: str, more: str, stop: list[str]) -> None:
    told = stable_text(text, stop)
    assert text.startswith(told)
    if any(one in text for one in stop):
        return  # it has ended then
    final = text.rstrip("\ufffd") + more
    cuts = [final.find(one) for one in stop if one in final]
    assert final[: min(cuts, default=len(final))].startswith(told)


def test_a_long_text_is_encoded_beside_other_threads(tmp_path: Path) -> None:
    """There is one event loop: while it is blocked, the engine answers no request."""
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
