"""What of a growing text may be told."""

from hypothesis import given
from hypothesis import strategies as st

from gcore.engines.detokenizer import stable_text

TEXTS = st.text("ab\ufffd", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert stable_text("hello wor", ["world"]) == "hello "
    assert stable_text("hello", ["xyz"]) == "hello"
    assert stable_text("a\ufffd", []) == "a"


@given(TEXTS, TEXTS, STOPS)
def test_what_is_told_stays_whatever_comes(text: str, more: str, stop: list[str]) -> None:
    told = stable_text(text, stop)
    assert text.startswith(told)
    if any(one in text for one in stop):
        return  # it has ended then
    final = text.rstrip("\ufffd") + more
    cuts = [final.find(one) for one in stop if one in final]
    assert final[: min(cuts, default=len(final))].startswith(told)
