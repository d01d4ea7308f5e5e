"""Responses that outlive their engine: what engines have told of each as it grew, what is still to be asked, and the whole.

An engine that dies takes with it only what it has not told. The tokens that it has told stay as they are, with their
log-probabilities and the versions that made them; another engine goes on behind them, as if they were a part of the prompt. Nothing is
tokenized anew. What was drawn depends on a sample's seed, so what follows has another, made of that and of how much there is.

Of what was told the end is cut off where it could hide something: a stop string that begins in it, or half a character.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gcore.rollout.client import SamplingParams
from gcore.types import Sample, VersionSpan

FEWEST, PARTS = 64, 8
"""An engine tells what it has after this many tokens, or so many times in a response of the greatest length: each telling
repeats all that there is, so that to tell more often costs more than is lost."""
CONTEXT = 16
"""Tokens in front of a response that are decoded with it."""
HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


def told_every(params: SamplingParams, wanted: int | None) -> int:
    """After how many tokens an engine tells what it has; 0: it does not. `wanted`: the spec's, None: as `PARTS` says."""
    every = max(FEWEST, params.max_new_tokens // PARTS) if wanted is None else wanted
    return every if every < params.max_new_tokens else 0


@dataclass(frozen=True, slots=True)
class Ask:
    """What an engine is asked: one entry a response."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    seeds: tuple[int, ...]


class Responses:
    """Those of one request. Mutable."""

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

    def ask(self) -> Ask:
        """What is still to be made, by the next engine."""
        self._growing = {}
        self._asked = tuple(number for number in range(len(self._seeds)) if number not in self._finished)
        return Ask(
            tuple(self._prompts[number] + self._tokens(number) for number in self._asked),
            tuple(_rest(self._params, len(self._tokens(number))) for number in self._asked),
            tuple(_seed(self._seeds[number], len(self._tokens(number))) for number in self._asked),
        )

    def grow(self, place: int, sample: Sample) -> None:
        """The engine that is asked now tells of the response in that place of what it was asked."""
        self._growing[self._asked[place]] = sample

    def keep(self) -> int:
        """It is gone. How many tokens are kept that were not before."""
        before = self._count()
        for number, sample in self._growing.items():
            if sample.finish_reason != "abort":
                self._finished[number] = _joined(self._kept.get(number), sample)
                continue
            in_front = (self._prompts[number] + self._tokens(number))[-CONTEXT:]
            safe = _safe(sample, in_front, self._params.stop, self._decode)
            if safe is not None:
                self._kept[number] = _joined(self._kept.get(number), safe)
        for number, sample in list(self._kept.items()):
            if len(sample.token_ids) >= self._params.max_new_tokens:
                self._finished[number] = replace(sample, finish_reason="length")
        self._growing, self._asked = {}, ()
        return self._count() - before

    def whole(self, made: Sequence[Sample]) -> tuple[Sample, ...]:
        """All responses, with what the engine that was asked last has made."""
        last = {
            number: _joined(self._kept.get(number), sample) for number, sample in zip(self._asked, made, strict=True)
        }
        return tuple(self._finished.get(number) or last[number] for number in range(len(self._seeds)))

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to ask."""
        return len(self._finished) == len(self._seeds)

    def _tokens(self, number: int) -> tuple[int, ...]:
        kept = self._kept.get(number)
        return kept.token_ids if kept is not None else ()

    def _count(self) -> int:
        parts = {**self._kept, **self._finished}
        return sum(len(sample.token_ids) for sample in parts.values())


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
    return replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        text=before.text + after.text,
        spans=tuple(span for span in spans if span.start < span.end),
    )


def _safe(sample: Sample, before: tuple[int, ...], stop: Sequence[str], decode: Decode) -> Sample | None:
    """So much of an unfinished response that no stop string can have begun in it and no character is cut in two.

    `before`: the tokens in front of it; some tokenizers leave out a space at the beginning of what they decode.
    """
    # A token is a byte at least, so a stop string that would end behind the cut begins behind what is left.
    count = len(sample.token_ids) - max((len(text.encode()) for text in stop), default=0)
    while count > 0 and (text := _text(sample.token_ids[:count], before, decode)).endswith(HALF_A_CHARACTER):
        count -= 1
    if count <= 0:
        return None
    return replace(
        sample,
        token_ids=sample.token_ids[:count],
        logprobs=sample.logprobs[:count],
        text=text,
        spans=tuple(replace(s, end=min(s.end, count)) for s in sample.spans if s.start < count),
    )


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


def _seed(seed: int, made: int) -> int:
    """63 bits, as the first one."""
    if not made:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}|{made}".encode(), digest_size=8).digest(), "big") >> 1
