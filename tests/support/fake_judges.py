"""Judges in memory: they answer with a function, use a given clock, and record their requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gcore.reward.judges.types import Answer, ClassifierAnswer, JudgeError, Why
from gcore.system.clock import Clock
from gcore.types import PictureRef


@dataclass(frozen=True, slots=True)
class RecordedQuestion:
    """A question that a fake judge was asked, and the seeds of its answers."""

    question: str
    seeds: tuple[int, ...]


class _Fake:
    def __init__(
        self, clock: Clock, delay_s: Callable[[str], float] | None, failures: Sequence[JudgeError | None]
    ) -> None:
        self._clock = clock
        self.delay_s = delay_s
        self._failures = list(failures)
        self.asked: list[RecordedQuestion] = []
        self.open = 0
        """Questions under way."""

    async def _begun(self, question: str, seeds: Sequence[int]) -> None:
        self.asked.append(RecordedQuestion(question, tuple(seeds)))
        failure = self._failures.pop(0) if self._failures else None
        self.open += 1
        try:
            await self._clock.sleep(0.0 if self.delay_s is None else self.delay_s(question))
        finally:
            self.open -= 1
        if failure is not None:
            raise failure


class FakeJudge(_Fake):
    """`gcore.reward.judges.types.ChatCall`: answers `answer(question, seed)`. A token is a word.

    It fails and takes its time as it is told to, on the clock that it is given, and remembers what it was asked.
    """

    def __init__(
        self,
        answer: Callable[[str, int], str],
        clock: Clock,
        *,
        delay_s: Callable[[str], float] | None = None,
        failures: Sequence[JudgeError | None] = (),
        longest: int = 1000,
    ) -> None:
        """`failures`: what each of the first questions raises, None where it is answered. `longest`: tokens of an answer."""
        super().__init__(clock, delay_s, failures)
        self.shown: list[tuple[PictureRef, ...]] = []
        """Pictures of each question."""
        self._answer = answer
        self._longest = longest

    async def __call__(
        self, question: str, seeds: Sequence[int], pictures: tuple[PictureRef, ...] = ()
    ) -> tuple[Answer, ...]:
        """As `ChatCall`."""
        self.shown.append(pictures)
        await self._begun(question, seeds)
        return tuple(self._written(question, self._answer(question, seed)) for seed in seeds)

    def _written(self, question: str, text: str) -> Answer:
        words = text.split(" ")
        cut = len(words) > self._longest
        text = " ".join(words[: self._longest]) if cut else text
        return Answer(text, len(question.split()), min(len(words), self._longest), cut)


class FakeClassifier(_Fake):
    """`gcore.reward.judges.types.ScoreCall`: gives `value(question)`."""

    def __init__(
        self,
        value: Callable[[str], float],
        clock: Clock,
        *,
        delay_s: Callable[[str], float] | None = None,
        failures: Sequence[JudgeError | None] = (),
    ) -> None:
        super().__init__(clock, delay_s, failures)
        self.shown: list[tuple[PictureRef, ...]] = []
        """Pictures of each question."""
        self._value = value

    async def __call__(self, question: str, pictures: tuple[PictureRef, ...] = ()) -> ClassifierAnswer:
        """As `ScoreCall`. Tokens are words."""
        self.shown.append(pictures)
        await self._begun(question, ())
        return ClassifierAnswer(self._value(question), len(question.split()))


@dataclass
class RecordingObserver:
    """`gcore.reward.judges.types.JudgeObserver` that records its calls, without the judge's name."""

    asked_of: list[tuple[float, int, int]] = field(default_factory=list)
    failures: list[Why] = field(default_factory=list)
    verdicts: list[float] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    known: int = 0
    shares: list[float] = field(default_factory=list)

    def asked(self, judge: str, seconds: float, tokens_in: int, tokens_out: int) -> None:
        self.asked_of.append((seconds, tokens_in, tokens_out))

    def failed(self, judge: str, why: Why) -> None:
        self.failures.append(why)

    def verdict(self, judge: str, value: float) -> None:
        self.verdicts.append(value)

    def unreadable(self, judge: str, example: str, why: str) -> None:
        self.examples.append(example)

    def remembered(self, judge: str) -> None:
        self.known += 1

    def disagreed(self, judge: str, share: float) -> None:
        self.shares.append(share)
