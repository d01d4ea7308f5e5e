"""Responses that outlive their engine: what is kept, what is asked of the next, and what they are in the end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from controllers.continuing import FEWEST, Responses, told_every
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
    assert told_every(params(FEWEST), None) == 0
    assert told_every(params(FEWEST + 1), None) == FEWEST
    assert told_every(params(4096), None) == 512
    assert told_every(params(4096), 10) == 10
    assert told_every(params(4096), 0) == 0


def test_the_next_engine_goes_on_behind_what_was_told() -> None:
    responses = Responses([(1,), (2,)], params(10, least=3), (7, 8), letters)
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


def test_what_had_finished_is_not_asked_again() -> None:
    responses = Responses([(1,), (2,)], params(10), (7, 8), letters)
    responses.ask()
    responses.grow(0, sample([3], "stop"))
    assert responses.keep() == 1
    assert responses.ask().prompts == ((2,),)
    assert [one.token_ids for one in responses.whole([sample([5], "length")])] == [(3,), (5,)]


def test_a_response_that_had_come_to_its_greatest_length_is_over() -> None:
    responses = Responses([(1,)], params(2), (7,), letters)
    responses.ask()
    responses.grow(0, sample([3, 4]))
    assert responses.keep() == 2
    assert responses.is_whole
    assert responses.whole(())[0].finish_reason == "length"


def test_nothing_is_kept_of_an_engine_that_told_nothing() -> None:
    responses = Responses([(1,)], params(10), (7,), letters)
    responses.ask()
    assert responses.keep() == 0
    assert responses.ask().prompts == ((1,),)


def test_no_stop_string_can_have_begun_in_what_is_kept() -> None:
    responses = Responses([(1,)], params(10, stop=("xy",)), (7,), letters)
    responses.ask()
    responses.grow(0, sample([2, 3, 23]))  # "cdx"
    assert responses.keep() == 1
    assert responses.ask().prompts == ((1, 2),)


def test_no_character_is_cut_in_two() -> None:
    def halves(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    cut = "aé".encode()[:2]
    responses = Responses([(1,)], params(10), (7,), halves)
    responses.ask()
    responses.grow(0, Sample(tuple(cut), (0.0, 0.0), "a", "abort", (VersionSpan(OLD, 0, 2),)))
    assert responses.keep() == 1
    assert responses.ask().prompts == ((1, ord("a")),)


def test_the_text_of_what_is_kept_is_as_it_stands_behind_the_tokens_before_it() -> None:
    """Some tokenizers leave out a space at the beginning of what they decode."""
    words = {1: " say", 2: " hello", 3: " world", 4: "!"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    def part(tokens: Sequence[int], text: str, ending: FinishReason = "abort") -> Sample:
        spans = (VersionSpan(OLD, 0, len(tokens)),)
        return Sample(tuple(tokens), (0.0,) * len(tokens), text, ending, spans)

    responses = Responses([(1,)], params(10), (7,), decode)
    for token, text in ((2, " hello"), (3, " world")):
        responses.ask()
        responses.grow(0, part([token], text))
        assert responses.keep() == 1
    responses.ask()
    (whole,) = responses.whole([part([4], "!", "stop")])
    assert whole.text == " hello world!"


@given(
    whole=st.lists(st.integers(0, 99), min_size=1, max_size=40),
    cuts=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([OLD, NEW])), max_size=6),
)
def test_however_often_its_engine_is_lost_a_response_is_what_was_told_of_it(
    whole: list[int], cuts: list[tuple[int, Version]]
) -> None:
    responses = Responses([(1,)], params(100), (7,), letters)
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
