"""Responses that outlive their engine: what engines have told of each as it grew, what is still to be asked, and the whole.

An engine that dies takes with it only what it has not told. The tokens that it has told stay as they are, with their
log-probabilities and the versions that made them; another engine goes on behind them, as if they were a part of the prompt. Nothing is
tokenized anew. What was drawn depends on a sample's seed, so what follows has another, made of that and of how much there is.

Of what was told the end is cut off where it could hide something: a stop string that begins in it, or half a character. What follows
is drawn anew, and the next engine looks for stop strings in its own tokens only, so nothing that is kept may end in the beginning of one.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from gcore.rollout.client import SamplingParams
from gcore.types import Sample, VersionSpan

FEWEST, PARTS = 64, 8
"""An engine tells what it has after this many tokens, or so many times in a response of the greatest length: each telling
repeats all that there is, so that to tell more often costs more than is lost."""

CONTEXT = 16
"""Tokens in front of a response that are decoded with it."""

HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"

HALVES = 3
"""Tokens at the end that can be the beginning of one character, which has four bytes at most."""

MOST_BACK = 256
"""Tokens that are cut off at most because a stop string could have begun in them; where that is not enough, nothing is kept."""

Decode = Callable[[Sequence[int]], str]


def progress_interval(params: SamplingParams, wanted: int | None) -> int:
    """After how many tokens an engine tells what it has; 0: it does not. `wanted`: the spec's, None: as `PARTS` says."""
    every = max(FEWEST, params.max_new_tokens // PARTS) if wanted is None else wanted
    return every if every < params.max_new_tokens else 0


@dataclass(frozen=True, slots=True)
class RemainingRequest:
    """What an engine is asked: one entry a response."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    seeds: tuple[int, ...]


class PartialResponses:
    """The responses of one request. Mutable."""

    def __init__(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, seeds: Sequence[int], decode: Decode
    ) -> None:
        self._prompts = tuple(prompts)
        self._params = params
        self._seeds = tuple(seeds)
        self._decode = decode
        self._kept: dict[int, Sample] = {}
        """By number: what engines that are gone have told of it."""
        self._finished: dict[int, Sample] = {}
        self._growing: dict[int, Sample] = {}
        """What the engine that is asked now has told."""
        self._asked: tuple[int, ...] = ()

    def ask(self) -> RemainingRequest:
        """What is still to be made, by the next engine."""
        self._growing = {}
        self._asked = tuple(number for number in range(len(self._seeds)) if number not in self._finished)
        return RemainingRequest(
            tuple(self._prompts[number] + self._tokens(number) for number in self._asked),
            tuple(_rest(self._params, len(self._tokens(number))) for number in self._asked),
            tuple(derive_seed(self._seeds[number], len(self._tokens(number))) for number in self._asked),
        )

    def grow(self, place: int, sample: Sample) -> tuple[int, Sample | None]:
        """The engine that is asked now tells of the response in that place of what it was asked.

        Its number, and the whole of it if it is finished.
        """
        number = self._asked[place]
        self._growing[number] = sample
        return number, None if sample.finish_reason == "abort" else self._ended(number, sample)

    def has_ended(self, place: int) -> bool:
        """Whether the engine that is asked now has told the end of the response in that place."""
        known = self._growing.get(self._asked[place])
        return known is not None and known.finish_reason != "abort"

    def keep(self) -> int:
        """It is gone. How many tokens are kept that were not before."""
        before = self.kept
        for number, sample in self._growing.items():
            if sample.finish_reason != "abort":
                self._finished[number] = self._ended(number, sample)
                continue
            safe = _safe(sample, self._in_front(number), self._params.stop, self._decode)
            if safe is not None:
                self._kept[number] = _joined(self._kept.get(number), safe)
        for number, sample in list(self._kept.items()):
            if len(sample.token_ids) >= self._params.max_new_tokens:
                self._finished[number] = replace(sample, finish_reason="length")
        self._growing, self._asked = {}, ()
        return self.kept - before

    def whole(self, made: Sequence[Sample]) -> tuple[Sample, ...]:
        """All responses, with what the engine that was asked last has made."""
        last = {number: self._ended(number, sample) for number, sample in zip(self._asked, made, strict=True)}
        return tuple(self._finished.get(number) or last[number] for number in range(len(self._seeds)))

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to ask."""
        return len(self._finished) == len(self._seeds)

    @property
    def kept(self) -> int:
        """Tokens that engines that are gone have told, in all."""
        parts = {**self._kept, **self._finished}
        return sum(len(sample.token_ids) for sample in parts.values())

    def _ended(self, number: int, sample: Sample) -> Sample:
        """The whole of one whose last part is `sample`."""
        kept = self._kept.get(number)
        if kept is None:
            return sample
        lacking = _lacking(sample, self._in_front(number), self._decode)
        return _joined(kept, replace(sample, output=sample.output._replace(text=lacking + sample.text)))

    def _in_front(self, number: int) -> tuple[int, ...]:
        """The newest tokens that the engine that is asked now goes on behind."""
        return (self._prompts[number] + self._tokens(number))[-CONTEXT:]

    def _tokens(self, number: int) -> tuple[int, ...]:
        kept = self._kept.get(number)
        return kept.token_ids if kept is not None else ()


def _joined(before: Sample | None, after: Sample) -> Sample:
    """One response of two parts."""
    if before is None:
        return after
    count = len(before.token_ids)
    spans = list(before.spans)
    for span in after.spans:
        moved = VersionSpan(span.version, span.start + count, span.end + count)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            spans[-1] = VersionSpan(moved.version, spans[-1].start, moved.end)
        else:
            spans.append(moved)
    output = after.output._replace(
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        text=before.text + after.text,
        spans=tuple(span for span in spans if span.start < span.end),
    )
    return replace(after, output=output)


def _safe(sample: Sample, before: tuple[int, ...], stop: Sequence[str], decode: Decode) -> Sample | None:
    """So much of an unfinished response that it ends neither in the beginning of a stop string nor in half a character.

    `before`: the tokens in front of it; some tokenizers leave out a space at the beginning of what they decode. The whole is
    decoded a few times only, however it ends: this is done on the event loop, of all that an engine had under way.
    """
    tokens = sample.token_ids

    @cache  # mostly it is the same count all along
    def said(count: int) -> str:
        return _text(tokens[:count], before, decode)

    def holds(count: int) -> bool:
        text = said(count)
        return any(one in text for one in stop)

    count = len(tokens)
    if holds(count):  # the engines that are known look before they tell; this one did not
        count = bisect_left(range(count), True, key=holds) - 1
    least = max(count - HALVES, 0)
    # What does not become a character by then never does: the model has drawn U+FFFD, or bytes that are none.
    count = next((n for n in range(count, least, -1) if not said(n).endswith(HALF_A_CHARACTER)), least)
    count = _unbegun(tokens[:count], said(count), before, stop, decode)
    text = said(count)
    if count == 0 or _begins(text, stop):
        return None
    spans = tuple(replace(s, end=min(s.end, count)) for s in sample.spans if s.start < count)
    output = sample.output._replace(token_ids=tokens[:count], logprobs=sample.logprobs[:count], text=text, spans=spans)
    return replace(sample, output=output)


def _unbegun(tokens: tuple[int, ...], text: str, before: tuple[int, ...], stop: Sequence[str], decode: Decode) -> int:
    """How many of `tokens`, which say `text`, can be left so that no stop string has begun at their end; 0: none are found."""
    count, all_tokens = len(tokens), before + tokens
    for left in range(count, max(count - MOST_BACK, 0), -1):
        at = len(before) + left
        # Only the few tokens that are cut off are decoded, and where they end in the middle of a character, they say something else.
        cut_off = _text(all_tokens[at:], all_tokens[max(at - CONTEXT, 0) : at], decode)
        if text.endswith(cut_off) and not _begins(text.removesuffix(cut_off), stop):
            return left
    return 0


def _begins(text: str, stop: Sequence[str]) -> bool:
    """Whether `text` ends in the beginning of a stop string."""
    return any(text.endswith(one[:length]) for one in stop for length in range(1, len(one)))


def _lacking(sample: Sample, before: tuple[int, ...], decode: Decode) -> str:
    """What the text of `sample` lacks in front: the space that some tokenizers leave out, where its engine decoded it alone.

    An engine that decodes it behind `before` tells the space itself; of one that tells no text nothing is known.
    """
    alone, behind = decode(sample.token_ids), _text(sample.token_ids, before, decode)
    if sample.text and alone.startswith(sample.text) and behind.endswith(alone):
        return behind.removesuffix(alone)
    return ""


def _text(tokens: tuple[int, ...], before: tuple[int, ...], decode: Decode) -> str:
    """What `tokens` say behind `before`."""
    begin, whole = decode(before), decode(before + tokens)
    return whole.removeprefix(begin) if whole.startswith(begin) else decode(tokens)


def _rest(params: SamplingParams, made: int) -> SamplingParams:
    if not made:
        return params
    return replace(
        params, max_new_tokens=params.max_new_tokens - made, min_new_tokens=max(params.min_new_tokens - made, 0)
    )


def derive_seed(seed: int, made: int) -> int:
    """63 bits, as the first one."""
    if not made:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}|{made}".encode(), digest_size=8).digest(), "big") >> 1
