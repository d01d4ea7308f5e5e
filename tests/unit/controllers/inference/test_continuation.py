"""Responses that outlive their engine: kept tokens, the request to the next engine, and the final response."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.inference.continuation import FEWEST, HALVES, PartialResponses, progress_interval
from gcore.rollout.client import SamplingParams
from gcore.types import FinishReason, Sample, Version, VersionSpan

OLD, NEW = Version(0, 1), Version(0, 2)


def params(most: int, *, least: int = 0, stop: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_new_tokens=most, min_new_tokens=least, stop=stop)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def sample(tokens: Sequence[int], ending: FinishReason = "abort", version: Version = OLD) -> Sample:
    logprobs = tuple(-float(token) for token in tokens)
    return Sample(tuple(tokens), logprobs, letters(tokens), ending, (VersionSpan(version, 0, len(tokens)),))


def test_long_responses_are_told_of_a_few_times_and_short_ones_never() -> None:
    assert progress_interval(params(FEWEST), None) == 0
    assert progress_interval(params(FEWEST + 1), None) == FEWEST
    assert progress_interval(params(4096), None) == 512
    assert progress_interval(params(4096), 10) == 10
    assert progress_interval(params(4096), 0) == 0


def test_the_next_engine_goes_on_behind_what_was_told() -> None:
    responses = PartialResponses([(1,), (2,)], params(10, least=3), (7, 8), letters)
    first = responses.ask()
    assert first.prompts == ((1,), (2,))
    assert first.seeds == (7, 8)
    responses.grow(1, sample([3, 4, 5]))
    assert responses.keep() == 3
    ask = responses.ask()
    assert ask.prompts == ((1,), (2, 3, 4, 5))
    assert [(one.max_new_tokens, one.min_new_tokens) for one in ask.params] == [(10, 3), (7, 0)]
    assert ask.seeds[0] == 7
    assert ask.seeds[1] not in (7, 8)
    assert 0 <= ask.seeds[1] < 2**63
    one, other = responses.whole([sample([9], "stop"), sample([6], "stop", NEW)])
    assert one == sample([9], "stop")
    assert other.token_ids == (3, 4, 5, 6)
    assert other.logprobs == (-3.0, -4.0, -5.0, -6.0)
    assert other.text == "defg"
    assert other.spans == (VersionSpan(OLD, 0, 3), VersionSpan(NEW, 3, 4))
    assert other.finish_reason == "stop"


def test_finished_samples_are_not_requested_again() -> None:
    responses = PartialResponses([(1,), (2,)], params(10), (7, 8), letters)
    responses.ask()
    responses.grow(0, sample([3], "stop"))
    assert responses.keep() == 1
    assert responses.ask().prompts == ((2,),)
    assert [one.token_ids for one in responses.whole([sample([5], "length")])] == [(3,), (5,)]


def test_a_response_that_had_come_to_its_greatest_length_is_over() -> None:
    responses = PartialResponses([(1,)], params(2), (7,), letters)
    responses.ask()
    responses.grow(0, sample([3, 4]))
    assert responses.keep() == 2
    assert responses.is_whole
    assert responses.whole(())[0].finish_reason == "length"


def test_nothing_is_kept_of_an_engine_that_told_nothing() -> None:
    responses = PartialResponses([(1,)], params(10), (7,), letters)
    responses.ask()
    assert responses.keep() == 0
    assert responses.ask().prompts == ((1,),)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        pytest.param("cdx", "cd", id="at the end of what was told"),
        pytest.param("cccxcc", "cccxcc", id="and came to nothing"),
        pytest.param("cdxcx", "cdxc", id="twice"),
        pytest.param("cxxxx", "c", id="again and again"),
        pytest.param("cdxyz", "cd", id="and is whole: its engine passed over it"),
    ],
)
def test_kept_tokens_do_not_end_in_part_of_a_stop_string(told: str, kept: str) -> None:
    """The next engine resamples the rest, and looks for stop strings in its own tokens only."""
    responses = PartialResponses([(1,)], params(10, stop=("xy", "z")), (7,), letters)
    responses.ask()
    responses.grow(0, sample([ord(letter) - ord("a") for letter in told]))
    assert responses.keep() == len(kept)
    assert letters(responses.ask().prompts[0][1:]) == kept


def test_nothing_is_kept_where_a_stop_string_could_have_begun_all_over() -> None:
    responses = PartialResponses([(1,)], params(10, stop=("xy",)), (7,), letters)
    responses.ask()
    responses.grow(0, sample([23] * 5))
    assert responses.keep() == 0


@given(
    told=st.lists(st.integers(0, 2), max_size=30),
    follows=st.lists(st.integers(0, 2), max_size=6),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_stop_string_stands_across_the_join_of_two_engines(
    told: list[int], follows: list[int], stop: list[str]
) -> None:
    responses = PartialResponses([(1,)], params(100, stop=tuple(stop)), (7,), letters)
    responses.ask()
    responses.grow(0, sample(told))
    responses.keep()
    kept = letters(responses.ask().prompts[0][1:])
    assert letters(told).startswith(kept)
    whole = kept + letters(follows)
    for one in stop:
        found = whole.find(one)
        assert found < 0 or found >= len(kept), "the next engine sees all of it"


def test_no_character_is_cut_in_two() -> None:
    def halves(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    cut = "aé".encode()[:2]
    responses = PartialResponses([(1,)], params(10), (7,), halves)
    responses.ask()
    responses.grow(0, Sample(tuple(cut), (0.0, 0.0), "a", "abort", (VersionSpan(OLD, 0, 2),)))
    assert responses.keep() == 1
    assert responses.ask().prompts == ((1, ord("a")),)


@pytest.mark.parametrize("token", [0x80, 0xFFFD])
@pytest.mark.parametrize("stop", [(), ("xy",)])
def test_characters_that_never_become_whole_are_characters_and_are_not_decoded_over_and_over(
    token: int, stop: tuple[str, ...]
) -> None:
    """A model may draw U+FFFD itself, or bytes that are no character; this is done on the event loop."""
    decoded = 0

    def noted(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return b"".join(chr(one).encode() if one > 0xFF else bytes([one]) for one in tokens).decode(errors="replace")

    count = 4000
    responses = PartialResponses([(65,)], params(2 * count, stop=stop), (7,), noted)
    responses.ask()
    responses.grow(0, Sample((token,) * count, (0.0,) * count, "", "abort", (VersionSpan(OLD, 0, count),)))
    assert responses.keep() == count - HALVES
    assert decoded < 10 * count


def test_a_stop_string_that_could_have_begun_anywhere_is_not_sought_for_ever() -> None:
    decoded = 0

    def noted(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return letters(tokens)

    count = 4000
    responses = PartialResponses([(1,)], params(2 * count, stop=("xy",)), (7,), noted)
    responses.ask()
    responses.grow(0, sample([2, *[23] * count]))
    assert responses.keep() == 0
    assert decoded < 40 * count


def test_the_text_of_what_is_kept_is_as_it_stands_behind_the_tokens_before_it() -> None:
    """Some tokenizers leave out a space at the beginning of what they decode."""
    words = {1: " say", 2: " hello", 3: " world", 4: "!"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    def part(tokens: Sequence[int], text: str, ending: FinishReason = "abort") -> Sample:
        spans = (VersionSpan(OLD, 0, len(tokens)),)
        return Sample(tuple(tokens), (0.0,) * len(tokens), text, ending, spans)

    responses = PartialResponses([(1,)], params(10), (7,), decode)
    for token, text in ((2, " hello"), (3, " world")):
        responses.ask()
        responses.grow(0, part([token], text))
        assert responses.keep() == 1
    responses.ask()
    (whole,) = responses.whole([part([4], "!", "stop")])
    assert whole.text == " hello world!"


@pytest.mark.parametrize("how", ["alone", "behind", "alone, cut at a stop string", "behind, cut at a stop string"])
@pytest.mark.parametrize("when", ["at last", "in a word of an engine that is gone"])
def test_the_space_at_the_join_is_there_once_whether_or_not_the_engine_told_it(how: str, when: str) -> None:
    """The torch engine decodes a response alone, SGLang behind the tokens in front of it."""
    words = {1: " say", 2: " hello", 3: " big", 4: " world", 5: "!"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    def part(tokens: Sequence[int], text: str, ending: FinishReason = "abort") -> Sample:
        return Sample(tuple(tokens), (0.0,) * len(tokens), text, ending, (VersionSpan(OLD, 0, len(tokens)),))

    responses = PartialResponses([(1,)], params(10, stop=("!",)), (7,), decode)
    responses.ask()
    responses.grow(0, part([2, 3], "hello big"))
    assert responses.keep() == 2
    responses.ask()
    said = decode([4, 5]) if how.startswith("alone") else " world!"
    last = part([4, 5], said.removesuffix("!") if "cut" in how else said, "stop")
    if when == "at last":
        (whole,) = responses.whole([last])
    else:
        responses.grow(0, last)
        responses.keep()
        (whole,) = responses.whole(())
    assert whole.text == (" hello big world" if "cut" in how else " hello big world!")


def test_a_response_that_ended_at_once_on_its_next_engine_says_no_more_than_before() -> None:
    responses = PartialResponses([(1,)], params(10), (7,), lambda tokens: " ".join(map(str, tokens)))
    responses.ask()
    responses.grow(0, sample([3]))
    responses.keep()
    before = responses.ask().prompts
    assert before == ((1, 3),)
    (whole,) = responses.whole([Sample((4,), (0.0,), "", "stop", (VersionSpan(OLD, 0, 1),))])
    assert whole.text == " 3"
    assert whole.token_ids == (3, 4)


@given(
    whole=st.lists(st.integers(0, 99), min_size=1, max_size=40),
    cuts=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([OLD, NEW])), max_size=6),
)
def test_response_equals_its_streamed_tokens_however_often_its_engine_is_lost(
    whole: list[int], cuts: list[tuple[int, Version]]
) -> None:
    responses = PartialResponses([(1,)], params(100), (7,), letters)
    made = 0
    versions: list[Version] = []
    for told, version in cuts:
        ask = responses.ask()
        assert ask.prompts == ((1, *whole[:made]),)
        assert ask.params[0].max_new_tokens == 100 - made
        tokens = whole[made : made + told]
        responses.grow(0, sample(tokens[: len(tokens) // 2], version=version))
        responses.grow(0, sample(tokens, version=version))
        assert responses.keep() == len(tokens)
        made += len(tokens)
        versions += [version] * len(tokens)
    responses.ask()
    (found,) = responses.whole([sample(whole[made:], "stop", NEW)])
    versions += [NEW] * (len(whole) - made)
    assert found.token_ids == tuple(whole)
    assert found.logprobs == tuple(-float(token) for token in whole)
    assert found.text == letters(whole)
    assert [span.version for span in found.spans for _ in range(span.start, span.end)] == versions
    assert [span.start for span in found.spans] == [0, *(span.end for span in found.spans[:-1])][: len(found.spans)]
