"""What one evaluation response is worth, and what of it a record has room for.

A response that its reward cannot score is not correct, and says why. Asks no engine and writes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controllers.material import Practice
from gcore.environments.transcript import bracketed
from gcore.errors import EngineError, EngineUnreachable
from gcore.ledger.job import EvalSample
from gcore.reward.judged import Unjudged
from gcore.reward.registry import RewardError
from gcore.types import Prompt, Sample, Version

SHOWN_CHARACTERS = 1000
SHOWN_BYTES = 7200
"""Of a text in an evaluation's record, as JSON: fifty answers, the most there are, then fit into one write to the store."""


Answered = Sample | RewardError
"""A response; or why there is none, for its environment failed."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a response to prompt `index` of a set is worth."""

    index: int
    shown: EvalSample
    parts: Mapping[str, float]
    """What each part of the reward says of it; nothing where it has none, or it could not be scored."""


async def marked(
    practice: Practice, threshold: float, prompt: Prompt, answered: Sequence[Answered], version: Version
) -> list[Mark]:
    """The evaluation responses to one prompt, scored; one whose environment failed cannot be. Raises EngineError if other weights
    had a part in one, or a judge could not be asked."""
    samples = [one for one in answered if isinstance(one, Sample)]
    for sample in samples:
        if sample.oldest != version or sample.finish_reason == "abort":
            made_by = f"an evaluation answer was made by {sample.oldest}, not {version}"
            raise EngineError(made_by, fix="It is made again")
    marks = []
    labels = {part.shown_as for part in practice.source.reward.parts}
    scored = iter(await practice.each_scored(prompt, samples))
    for one in answered:
        text, result = (bracketed(one.text, one.observed_text), next(scored)) if isinstance(one, Sample) else ("", one)
        if isinstance(result, Unjudged) and result.away:  # which says nothing of the answer
            raise EngineUnreachable(result.what, fix="It is made again")
        why = str(result) if isinstance(result, RewardError) else ""
        reward = 0.0 if isinstance(result, RewardError) else result.value
        shown = EvalSample(
            prompt=recordable(prompt.text),
            response=recordable(text),
            answer=recordable(str(prompt.fields.get(practice.source.reward.answer, ""))),
            reward=reward,
            source=practice.source.name,
            correct=not why and reaches(reward, threshold),
            unscored=recordable(why),
        )
        parts = {} if isinstance(result, RewardError) else {k: v for k, v in result.parts if k in labels}
        marks.append(Mark(prompt.ref.seq, shown, parts))
    return marks


def total_of(label: str, marks: Sequence[Mark]) -> float:
    """What a part of the reward gives to all responses that were scored. Those that it says nothing of, for a judge that is only
    shown could not judge them, count as what the others have on the average."""
    having = [one.parts[label] for one in marks if label in one.parts]
    scored = sum(1 for one in marks if not one.shown.unscored)
    return math.fsum(having) * (scored / len(having)) if having else 0.0


def reaches(reward: float, threshold: float) -> bool:
    """Whether a response of that reward is correct. A sum of parts such as 0.7 + 0.2 + 0.1, which floats make a little less
    than 1, is."""
    return reward >= threshold or math.isclose(reward, threshold, rel_tol=1e-6, abs_tol=1e-9)


def recordable(text: str) -> str:
    """What a record has room for."""
    short = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
    while len(json.dumps(short)) > SHOWN_BYTES:  # JSON spells out what is not ASCII, in up to twelve bytes
        short = f"{short[: len(short) // 2]}…"
    return short
