"""Continue responses on another engine after the loss of their engine: keep the reported tokens, make the remaining
request, and join the parts.

When an engine dies, only the tokens that it has not reported are lost. Reported tokens are kept unchanged, with their
log-probabilities and the weight versions that generated them. Another engine continues after them, as if they were a
part of the prompt. Nothing is tokenized again. The continuation is sampled with another seed, derived from the sample's
seed and the number of kept tokens.

If the reported tokens end in the beginning of a stop string or in an incomplete character, that end is dropped and
resampled, because the next engine looks for stop strings in its own tokens only.
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
"""An engine reports its progress after every `FEWEST` tokens, or `PARTS` times in a response of maximum length,
whichever is rarer. Each report repeats all tokens so far, so more frequent ones would cost more than the tokens that
are lost without them."""

CONTEXT = 16
"""Number of tokens before a part of a response that are decoded together with it."""

HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"

HALVES = 3
"""Maximum number of tokens at the end that can be an incomplete character: a character has at most four bytes."""

MOST_BACK = 256
"""Maximum number of tokens at the end that are dropped because a stop string may begin in them. If that does not
suffice, no token is kept."""

Decode = Callable[[Sequence[int]], str]


def progress_interval(params: SamplingParams, wanted: int | None) -> int:
    """Return after how many tokens an engine should report its progress; 0: never. `wanted`: the number in the spec;
    None: choose it by `FEWEST` and `PARTS`."""
    every = max(FEWEST, params.max_new_tokens // PARTS) if wanted is None else wanted
    return every if every < params.max_new_tokens else 0


@dataclass(frozen=True, slots=True)
class RemainingRequest:
    """The next request to an engine, for the unfinished responses: prompt (including kept tokens), parameters and seed
    of each."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    seeds: tuple[int, ...]


class PartialResponses:
    """Collects the responses of one request over several engines. `number`: index of a response in the request;
    `place`: its index in the request to the present engine, which contains only the unfinished ones."""

    def __init__(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, seeds: Sequence[int], decode: Decode
    ) -> None:
        self._prompts = tuple(prompts)
        self._params = params
        self._seeds = tuple(seeds)
        self._decode = decode
        self._kept: dict[int, Sample] = {}
        """By number: the part kept from lost engines."""
        self._finished: dict[int, Sample] = {}
        self._growing: dict[int, Sample] = {}
        """By number: the part that the present engine has reported so far."""
        self._asked: tuple[int, ...] = ()

    def ask(self) -> RemainingRequest:
        """Begin with the next engine: return the request for the unfinished responses."""
        self._growing = {}
        self._asked = tuple(number for number in range(len(self._seeds)) if number not in self._finished)
        return RemainingRequest(
            tuple(self._prompts[number] + self._tokens(number) for number in self._asked),
            tuple(_rest(self._params, len(self._tokens(number))) for number in self._asked),
            tuple(derive_seed(self._seeds[number], len(self._tokens(number))) for number in self._asked),
        )

    def grow(self, place: int, sample: Sample) -> tuple[int, Sample | None]:
        """Record the progress that the present engine has reported of the response at `place`.

        Return the number of the response, and the complete response if it is finished.
        """
        number = self._asked[place]
        self._growing[number] = sample
        return number, None if sample.finish_reason == "abort" else self._ended(number, sample)

    def has_ended(self, place: int) -> bool:
        """Whether the present engine has reported the end of the response at this place."""
        known = self._growing.get(self._asked[place])
        return known is not None and known.finish_reason != "abort"

    def keep(self) -> int:
        """Keep what the present engine has reported, because it is lost. Return the number of newly kept tokens."""
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
        """Return all complete responses. `made`: the results of the last engine."""
        last = {number: self._ended(number, sample) for number, sample in zip(self._asked, made, strict=True)}
        return tuple(self._finished.get(number) or last[number] for number in range(len(self._seeds)))

    @property
    def is_whole(self) -> bool:
        """Whether all responses are finished."""
        return len(self._finished) == len(self._seeds)

    @property
    def kept(self) -> int:
        """Total number of tokens kept from lost engines."""
        parts = {**self._kept, **self._finished}
        return sum(len(sample.token_ids) for sample in parts.values())

    def _ended(self, number: int, sample: Sample) -> Sample:
        """Join the kept part of a response and its last part `sample`."""
        kept = self._kept.get(number)
        if kept is None:
            return sample
        lacking = _lacking(sample, self._in_front(number), self._decode)
        return _joined(kept, replace(sample, output=sample.token_output._replace(text=lacking + sample.text)))

    def _in_front(self, number: int) -> tuple[int, ...]:
        """Return the last `CONTEXT` tokens before the part that the present engine generates."""
        return (self._prompts[number] + self._tokens(number))[-CONTEXT:]

    def _tokens(self, number: int) -> tuple[int, ...]:
        kept = self._kept.get(number)
        return kept.token_ids if kept is not None else ()


def _joined(before: Sample | None, after: Sample) -> Sample:
    """Join two consecutive parts of a response: tokens, log-probabilities, text, and spans of weight versions."""
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
    output = after.token_output._replace(
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        text=before.text + after.text,
        spans=tuple(span for span in spans if span.start < span.end),
    )
    return replace(after, output=output)


def _safe(sample: Sample, before: tuple[int, ...], stop: Sequence[str], decode: Decode) -> Sample | None:
    """Return the longest prefix of an unfinished response that ends neither in the beginning of a stop string nor in an
    incomplete character; None if it is empty.

    `before`: the preceding tokens, which are decoded too, because some tokenizers drop a space at the beginning of a
    text. The whole text is decoded only a few times, because this runs on the event loop, for all responses that an
    engine had in progress.
    """
    tokens = sample.token_ids

    @cache  # the count is usually the same
    def said(count: int) -> str:
        return _text(tokens[:count], before, decode)

    def holds(count: int) -> bool:
        text = said(count)
        return any(one in text for one in stop)

    count = len(tokens)
    if holds(count):  # known engines check for stop strings before they report; this one did not
        count = bisect_left(range(count), True, key=holds) - 1
    least = max(count - HALVES, 0)
    # What is not a complete character by then never becomes one: the model has sampled U+FFFD, or invalid bytes.
    count = next((n for n in range(count, least, -1) if not said(n).endswith(HALF_A_CHARACTER)), least)
    count = _unbegun(tokens[:count], said(count), before, stop, decode)
    text = said(count)
    if count == 0 or _begins(text, stop):
        return None
    spans = tuple(replace(s, end=min(s.end, count)) for s in sample.spans if s.start < count)
    output = sample.token_output._replace(
        token_ids=tokens[:count], logprobs=sample.logprobs[:count], text=text, spans=spans
    )
    return replace(sample, output=output)


def _unbegun(tokens: tuple[int, ...], text: str, before: tuple[int, ...], stop: Sequence[str], decode: Decode) -> int:
    """Return how many of `tokens`, which decode to `text`, can be kept so that they do not end in the beginning of a
    stop string; 0 if none."""
    count, all_tokens = len(tokens), before + tokens
    for left in range(count, max(count - MOST_BACK, 0), -1):
        at = len(before) + left
        # Decode only the few dropped tokens. If the cut is in the middle of a character, their text differs and the cut
        # is rejected.
        cut_off = _text(all_tokens[at:], all_tokens[max(at - CONTEXT, 0) : at], decode)
        if text.endswith(cut_off) and not _begins(text.removesuffix(cut_off), stop):
            return left
    return 0


def _begins(text: str, stop: Sequence[str]) -> bool:
    """Whether `text` ends in the beginning of a stop string."""
    return any(text.endswith(one[:length]) for one in stop for length in range(1, len(one)))


def _lacking(sample: Sample, before: tuple[int, ...], decode: Decode) -> str:
    """Return the text that is missing at the beginning of the text of `sample`: a space that some tokenizers drop if an
    engine decodes the sample without the tokens `before` it. Empty if nothing is missing or the engine reports no text.
    """
    alone, behind = decode(sample.token_ids), _text(sample.token_ids, before, decode)
    if sample.text and alone.startswith(sample.text) and behind.endswith(alone):
        return behind.removesuffix(alone)
    return ""


def _text(tokens: tuple[int, ...], before: tuple[int, ...], decode: Decode) -> str:
    """Return the text of `tokens` when they follow the tokens `before`."""
    begin, whole = decode(before), decode(before + tokens)
    return whole.removeprefix(begin) if whole.startswith(begin) else decode(tokens)


def _rest(params: SamplingParams, made: int) -> SamplingParams:
    """Return the parameters for the rest of a response of which `made` tokens are kept."""
    if not made:
        return params
    return replace(
        params, max_new_tokens=params.max_new_tokens - made, min_new_tokens=max(params.min_new_tokens - made, 0)
    )


def derive_seed(seed: int, made: int) -> int:
    """Return the seed, of 63 bits, for the rest of a response of which `made` tokens exist. 0 tokens: `seed` itself."""
    if not made:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}|{made}".encode(), digest_size=8).digest(), "big") >> 1
