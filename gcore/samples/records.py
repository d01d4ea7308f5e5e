"""What is kept of a group for people: one JSON object a line, by its holder; and its advantages, by the ranks that knew them.

    samples/LINEAGE-STEP/INCARNATION.jsonl           KeptGroup
    samples/LINEAGE-STEP/advantages-RANK.jsonl       KeptAdvantage

Both name the group by its digest. Texts longer than the spec allows are cut; `more` says by how many characters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from gcore.schema import Part, Record
from gcore.types import FinishReason, Group, PromptRef, Range


class KeptText(Part):
    """A text, cut to a bounded length. `more`: the characters that were left out at its end."""

    text: str
    more: int = 0

    @classmethod
    def of(cls, text: str, characters: int) -> KeptText:
        """At most `characters` of `text`. Half a surrogate pair, which no file takes, is spelt out."""
        kept = text[:characters].encode("utf-8", errors="backslashreplace").decode("utf-8")
        return cls(text=kept, more=max(0, len(text) - characters))


class KeptSample(Part):
    """One response. `parts`: what its reward is made of; `tokens`: its length; `versions`: which weights made it.

    `observed`: the characters [start, end) of it that the policy did not make, `observed_tokens` so many of its tokens.
    """

    came_with: ClassVar[Mapping[str, int]] = {"observed": 2, "observed_tokens": 2}

    response: KeptText
    tokens: int
    reward: float
    parts: tuple[tuple[str, float], ...] = ()
    finish_reason: FinishReason
    masked: bool = False
    versions: tuple[str, ...] = ()
    observed: tuple[Range, ...] = ()
    observed_tokens: int = 0


class KeptGroup(Record):
    """A group as its holder had it. `answer`: what the prompt's entry says is right, where it says so."""

    ref: PromptRef
    digest: str
    source: str
    prompt: KeptText
    prompt_tokens: int
    answer: str = ""
    temperature: float = 1.0
    holder: str
    samples: tuple[KeptSample, ...]

    @property
    def mean_reward(self) -> float:
        """Of its samples."""
        return math.fsum(sample.reward for sample in self.samples) / max(len(self.samples), 1)


class KeptAdvantage(Record):
    """Of one sample: the mean over its tokens; the least and the most where they differ."""

    digest: str
    sample: int
    mean: float
    least: float | None = None
    most: float | None = None


def kept_group(group: Group, digest: str, prompt: str, answer: str, holder: str, characters: int) -> KeptGroup:
    """What is kept of `group`, whose prompt's text is `prompt`."""
    samples = tuple(
        KeptSample(
            response=KeptText.of(sample.text, characters),
            tokens=len(sample.token_ids),
            reward=sample.reward,
            parts=sample.reward_parts,
            finish_reason=sample.finish_reason,
            masked=sample.masked,
            versions=tuple(sorted({str(span.version) for span in sample.spans})),
            observed=tuple((start, min(end, characters)) for start, end in sample.observed_text if start < characters),
            observed_tokens=len(sample.token_ids) - sample.own_tokens,
        )
        for sample in group.samples
    )
    return KeptGroup(
        ref=group.ref,
        digest=digest,
        source=group.source,
        prompt=KeptText.of(prompt, characters),
        prompt_tokens=len(group.prompt_ids),
        answer=answer[:characters],
        temperature=group.temperature,
        holder=holder,
        samples=samples,
    )
