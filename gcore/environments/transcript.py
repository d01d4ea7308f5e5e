"""A response of several turns, token by token: what the model made, and between that what it was shown. Pure.

Nothing is tokenized anew: a turn's tokens stand as the engine gave them, an observation's as the tokenizer made them of its words
alone. What was shown has log-probability 0 and is named in `observed`; the version of its tokens is that of the turn before, or of the
one that follows where there is none before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gcore.types import FinishReason, Range, Sample, Version, VersionSpan

TOLD = ("⟦", "⟧")
"""Around what of a response was observed, where people read it."""


def bracketed(text: str, observed: Iterable[Range]) -> str:
    """`text` with marks around what a tool or an environment said."""
    parts, at = [], 0
    for start, end in observed:
        parts += [text[at:start], TOLD[0], text[start:end], TOLD[1]]
        at = end
    return "".join([*parts, text[at:]])


@dataclass
class Transcript:
    """Grows turn by turn."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    turns: int = 0
    _spans: list[VersionSpan] = field(default_factory=list)
    _observed: list[Range] = field(default_factory=list)
    _observed_text: list[Range] = field(default_factory=list)

    @property
    def own_tokens(self) -> int:
        """How many the model made."""
        return len(self.token_ids) - sum(end - start for start, end in self._observed)

    def turn(self, sample: Sample, text: str) -> None:
        """The model said `sample`, which reads `text`. Of at least one token."""
        before = len(self.token_ids)
        if before and not self._spans:  # what was shown before the first turn is of its version
            self._made(sample.spans[0].version, 0, before)
        for span in sample.spans:
            self._made(span.version, span.start + before, span.end + before)
        self.token_ids += sample.token_ids
        self.logprobs += sample.logprobs
        self.text += text
        self.turns += 1

    def observe(self, token_ids: tuple[int, ...], text: str) -> None:
        """The model was shown `text`."""
        if not token_ids:
            return
        before, letters = len(self.token_ids), len(self.text)
        self.token_ids += token_ids
        self.logprobs += (0.0,) * len(token_ids)
        self.text += text
        _extend(self._observed, before, len(self.token_ids))
        if text:
            _extend(self._observed_text, letters, len(self.text))
        if self._spans:
            self._made(self._spans[-1].version, before, len(self.token_ids))

    def sample(self, finish_reason: FinishReason) -> Sample:
        """The whole, as it is trained. At least one turn."""
        return Sample(
            self.token_ids,
            self.logprobs,
            self.text,
            finish_reason,
            tuple(self._spans),
            observed=tuple(self._observed),
            observed_text=tuple(self._observed_text),
        )

    def _made(self, version: Version, start: int, end: int) -> None:
        if start == end:
            return
        if self._spans and self._spans[-1].version == version and self._spans[-1].end == start:
            self._spans[-1] = replace(self._spans[-1], end=end)
        else:
            self._spans.append(VersionSpan(version, start, end))


def _extend(ranges: list[Range], start: int, end: int) -> None:
    """One more range, joined with the one that it touches."""
    if ranges and ranges[-1][1] == start:
        start, _ = ranges.pop()
    ranges.append((start, end))
