"""Tokenization of long texts: off the event loop, and not to the end of texts that exceed the limit anyway."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gcore.data.tokenizer import AT_ONCE, PER_TOKEN, ModelTokenizer, TextTooLong, check_length, run_by_size


def pieces() -> ModelTokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["what is 12 + 34 = 46, " + "a" * 64 + "and so on"] * 9, trainer)
    return ModelTokenizer(made, special_tokens={}, settings={}, max_length=None)


def words() -> ModelTokenizer:
    made = Tokenizer(models.WordLevel({"what": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return ModelTokenizer(made, special_tokens={}, settings={}, max_length=None)


TOKENIZERS = {"pieces": pieces(), "words": words()}


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    part=st.text(min_size=1, max_size=40),
    more=st.text(max_size=40),
    times=st.integers(1, 2000),
    room=st.integers(0, 600),
)
def test_only_what_is_too_long_is_refused_by_its_beginning(
    name: str, part: str, more: str, times: int, room: int
) -> None:
    text = part * times + more * times
    lengths = []

    def encode(shown: str) -> tuple[int, ...]:
        lengths.append(len(shown))
        return TOKENIZERS[name].encode(shown, add_special_tokens=False)

    least = -1
    try:
        check_length(text, room, encode)
    except TextTooLong as error:
        least = error.tokens
    assert all(length <= max(AT_ONCE, PER_TOKEN * room) for length in lengths)
    assert least < 0 or len(encode(text)) > least >= room


def test_a_text_of_any_length_passes_where_there_is_no_limit() -> None:
    check_length("1" * 1_000_000, None, lambda text: pytest.fail("tokenized"))
    check_length("1" * AT_ONCE, 0, lambda text: pytest.fail("tokenized"))


async def test_much_work_is_done_in_a_thread_and_little_at_once() -> None:
    here = threading.get_ident()
    assert await run_by_size(AT_ONCE, threading.get_ident) == here
    assert await run_by_size(AT_ONCE + 1, threading.get_ident) != here
    with pytest.raises(TextTooLong, match="more than 3 tokens"):
        await run_by_size(AT_ONCE + 1, lambda: check_length("1" * 9000, 3, lambda text: "1" * 7))
