"""A request within the client's limits is accepted by the store; and the ranges of prefixes."""

from hypothesis import given
from hypothesis import strategies as st

from gcore.store.client import build_transaction, range_begin, range_end
from gcore.store.types import Compare, Delete, Put, request_bytes

TEXTS = st.text(min_size=1, max_size=20)
NUMBERS = st.integers(0, 2**63 - 1)
WRITES = st.one_of(
    st.builds(Put, TEXTS, st.binary(max_size=300), NUMBERS), st.builds(Delete, TEXTS, prefix=st.booleans())
)


@given(
    compares=st.lists(st.builds(Compare, TEXTS, NUMBERS), max_size=128),
    writes=st.lists(WRITES, max_size=128),
)
def test_a_request_is_never_larger_than_was_estimated(compares: list[Compare], writes: list[Put | Delete]) -> None:
    assert build_transaction(compares, writes).ByteSize() <= request_bytes(compares, writes)


@given(prefix=st.text(max_size=5), key=st.text(min_size=1, max_size=8))
def test_a_range_holds_just_the_keys_with_its_prefix(prefix: str, key: str) -> None:
    end = range_end(prefix)
    inside = range_begin(prefix) <= key.encode() and (end == b"\0" or key.encode() < end)
    assert inside is key.startswith(prefix)


@given(prefix=st.text(max_size=5), rest=st.text(min_size=1, max_size=5))
def test_a_range_holds_every_key_that_goes_on_from_its_prefix(prefix: str, rest: str) -> None:
    end = range_end(prefix)
    key = (prefix + rest).encode()
    assert range_begin(prefix) <= key
    assert end == b"\0" or key < end
