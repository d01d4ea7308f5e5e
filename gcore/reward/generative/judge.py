"""A judge: from a prompt and its responses to what each is worth.

A pointwise judge is asked about each response for itself, a pairwise one about the pairs of a group. A question that could
not be asked is asked again, later and later, up to `tries` times (how long one try may take is known to whoever puts it: that it waits
for an engine that is still being loaded is nobody's silence); one that cannot be judged is a `JudgeError`, in the place
of the response that it was about, and is not asked again about the same prompt before `forget` is called: its answer would be the same. What becomes of the group then (`on_error`), how many questions are open, and which engine
answers, is not decided here.

Pairwise, an order that cannot be judged leaves its pair to the other order. But one that could not be *asked* makes both its
responses such that could not be judged: what is worth more must not follow from which engines were there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from gcore.clock import Clock
from gcore.config.judges import JudgeSpec
from gcore.config.reward import LARGEST
from gcore.retrying import retry_delay
from gcore.reward.generative.asking import Answer, Ask, Seen, Value
from gcore.reward.generative.errors import JudgeAway, JudgeError, JudgeLate, Unjudgeable
from gcore.reward.generative.pairs import Pair, disagreed, orders, pairs_of, values_of
from gcore.reward.generative.remembered import Remembered, question_key, spec_digest
from gcore.reward.generative.template import Question
from gcore.reward.generative.verdicts import CheckedParser, find_parser
from gcore.reward.generative.votes import Judgement, NotRead, judgement, read_all
from gcore.together import all_or_none
from gcore.types import Prompt, PromptRef

T = TypeVar("T")
MOST_IN_VAIN = 4096
"""Prompts of which it is remembered what cannot be judged."""
_EQUAL = Judgement(0.5, 0, 0)
"""Two responses with the same text, which nobody is asked about."""


def vote_seed(judge: str, question: str, vote: int) -> int:
    """The seed of a vote (63 bits): the same question has the same verdict wherever and however often it is asked."""
    named = json.dumps([judge, question, vote]).encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") >> 1


class Judge:
    """One judge of a job, as one controller asks it. `Judge.of` makes it."""

    def __init__(
        self, spec: JudgeSpec, question: Question, parser: CheckedParser, ask: Ask | Value, seen: Seen, clock: Clock
    ) -> None:
        """`ask`: a `Value` if the judge is a classifier, else an `Ask`."""
        self.spec = spec
        self._question = question
        self._ask = ask
        self._seen = seen
        self._clock = clock
        self._parser = parser
        self._digest = spec_digest(spec)
        self._remembered: Remembered[Judgement | JudgeError] = Remembered(spec.remembered)
        self._in_vain: OrderedDict[PromptRef, set[bytes]] = OrderedDict()
        """By prompt: the questions that were asked and cannot be judged."""
        self._once = self._classified if spec.kind == "classifier" else self._written
        self._open = 0

    @classmethod
    def of(cls, spec: JudgeSpec, ask: Ask | Value, seen: Seen, clock: Clock, *, where: str = "judges") -> Judge:
        """The judge of a section, which messages call `where`. Raises SpecError."""
        parser = find_parser(spec.verdict.parser, f"{where}.verdict.parser")
        return cls(spec, Question.compile(spec, where), parser, ask, seen, clock)

    @property
    def is_full(self) -> bool:
        """Whether as many questions are open as the spec lets one controller have (`queue`)."""
        return self._open >= self.spec.queue

    async def value(self, prompt: Prompt, response: str) -> Judgement:
        """What a response is worth, of a pointwise judge. Raises JudgeError; JudgeAway if another time may help."""
        if self.spec.mode != "pointwise":
            raise RuntimeError(f"judge {self.spec.name!r} is pairwise: it says nothing of one response alone")
        return await self._judged(prompt, self._question.about(prompt, response))

    async def values(self, prompt: Prompt, responses: Sequence[str]) -> tuple[Judgement | JudgeError, ...]:
        """What each response of a group is worth, or why it could not be judged."""
        if self.spec.mode == "pairwise":
            return await self._held_together(prompt, responses)
        return tuple(await all_or_none([caught(self.value(prompt, response)) for response in responses]))

    async def _held_together(self, prompt: Prompt, responses: Sequence[str]) -> tuple[Judgement | JudgeError, ...]:
        n = len(responses)
        pairs = pairs_of(n, self.spec.opponents)
        asked = orders(pairs)
        outcomes = await all_or_none([caught(self._compared(prompt, responses[i], responses[j])) for i, j in asked])
        told = dict(zip(asked, outcomes, strict=True))
        verdicts = {order: one.value for order, one in told.items() if isinstance(one, Judgement)}
        different = [(i, j) for i, j in pairs if responses[i] != responses[j]]
        share = disagreed(different, verdicts)
        if share is not None:
            self._seen.disagreed(self.spec.name, share)
        values = values_of(n, pairs, verdicts)
        return tuple(self._of_response(i, values[i], told) for i in range(n))

    def _of_response(
        self, number: int, value: float | None, told: dict[Pair, Judgement | JudgeError]
    ) -> Judgement | JudgeError:
        """What the outcomes of its pairs come to."""
        outcomes = [outcome for order, outcome in told.items() if number in order]
        errors = [outcome for outcome in outcomes if isinstance(outcome, JudgeError)]
        away = next((error for error in errors if isinstance(error, JudgeAway)), None)
        if away is not None:
            return away
        if value is None:
            if not errors:
                return Unjudgeable(
                    f"judge {self.spec.name!r} compares, and the group has one response",
                    fix="Let flow.samples_per_prompt be at least 2, or the judge pointwise",
                )
            return errors[0]
        judged = [outcome for outcome in outcomes if isinstance(outcome, Judgement)]
        example = next((one.example for one in judged if one.example), "")
        return Judgement(value, sum(one.votes for one in judged), sum(one.unreadable for one in judged), example)

    async def _compared(self, prompt: Prompt, first: str, second: str) -> Judgement:
        if first == second:
            return _EQUAL
        return await self._judged(prompt, self._question.between(prompt, first, second))

    async def _judged(self, prompt: Prompt, question: str) -> Judgement:
        key = question_key(self._digest, question)
        judged = await self._remembered.get(
            key, lambda: self._settled(question), lambda: self._seen.remembered(self.spec.name)
        )
        if isinstance(judged, Judgement):
            return judged
        self._in_vain.setdefault(prompt.ref, set()).add(key)
        if len(self._in_vain) > MOST_IN_VAIN:
            self.forget(next(iter(self._in_vain)))
        raise type(judged)(judged.what, where=judged.where, fix=judged.fix, trace=judged.trace) from judged.__cause__

    async def _settled(self, question: str) -> Judgement | JudgeError:
        """The verdict, or why there can be none. Raises JudgeAway."""
        try:
            return await self._once(question)
        except JudgeAway:
            raise
        except JudgeError as error:
            return error

    def forget(self, ref: PromptRef) -> None:
        """What cannot be judged of this prompt is asked again from now on: by whoever issues it again."""
        for key in self._in_vain.pop(ref, ()):
            self._remembered.forget(key)

    async def _written(self, question: str) -> Judgement:
        ask = cast(Ask, self._ask)
        seeds = [vote_seed(self.spec.name, question, vote) for vote in range(self.spec.votes)]
        began, answers = await self._tried(lambda: self._answers(ask, question, seeds))
        tokens_in, tokens_out = sum(a.tokens_in for a in answers), sum(a.tokens_out for a in answers)
        self._seen.asked(self.spec.name, self._clock.monotonic() - began, tokens_in, tokens_out)
        votes = read_all(answers, lambda answer: self._parser(answer, self.spec.verdict))
        for vote in votes:
            if isinstance(vote, NotRead):
                self._seen.unreadable(self.spec.name, vote.example, vote.reason)
        return self._told(judgement(votes))

    async def _answers(self, ask: Ask, question: str, seeds: Sequence[int]) -> tuple[Answer, ...]:
        answers = await ask(question, seeds)
        if len(answers) != len(seeds):
            raise JudgeError(f"judge {self.spec.name!r} gave {len(answers)} answers where {len(seeds)} were asked for")
        return answers

    async def _classified(self, question: str) -> Judgement:
        value = cast(Value, self._ask)
        began, said = await self._tried(lambda: value(question))
        self._seen.asked(self.spec.name, self._clock.monotonic() - began, said.tokens_in, 0)
        number = said.number
        if not math.isfinite(number) or abs(number) > LARGEST:
            raise JudgeError(f"judge {self.spec.name!r} gave {number}, which is not finite in float32")
        return self._told(Judgement(number, 1, 0))

    def _told(self, judged: Judgement) -> Judgement:
        self._seen.verdict(self.spec.name, judged.value)
        return judged

    async def _tried(self, once: Callable[[], Coroutine[Any, Any, T]]) -> tuple[float, T]:
        """What a question gives, and when the try began that gave it. Raises JudgeError."""
        tries = 0
        self._open += 1  # also between two tries: it waits for the judge
        try:
            while True:
                tries += 1
                began = self._clock.monotonic()
                try:
                    return began, await once()
                except JudgeAway as error:
                    self._seen.failed(self.spec.name, "timeout" if isinstance(error, JudgeLate) else "away")
                    if tries >= self.spec.tries:
                        raise
                except JudgeError:
                    self._seen.failed(self.spec.name, "refused")
                    raise
                await self._clock.sleep(retry_delay(tries))
        finally:
            self._open -= 1


async def caught(judged: Awaitable[Judgement]) -> Judgement | JudgeError:
    """The verdict, or why there is none."""
    try:
        return await judged
    except JudgeError as error:
        return error
