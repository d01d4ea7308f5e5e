"""A judge: a model that scores the responses to a prompt. Averages votes, compares pairs, and caches verdicts.

A pointwise judge scores each response alone, a pairwise one compares pairs within a group. A request that fails because
the judge is unavailable is retried with backoff, up to `tries` times. The client that sends a request enforces its
timeout; waiting for an engine that is still loading is not a failure. A response that cannot be judged gets a
`JudgeError` as its result. The same question is not sent again before `forget` is called, because the result would be
the same. Other modules handle `on_error`, the limit on open requests, and the choice of the engine.

*Votes.* A question is answered `votes` times, with different seeds. The verdict is the mean of the readable answers. An
unreadable answer does not count, not even as 0. A truncated answer is read like any other, because a judge may need
only a single word.

*Pairs.* Every pair is compared in both orders, because judges have a position bias. The verdict of (first, second) is 1
if the first is better, 0 if the second is, 0.5 if they are equal. A pair's result is the mean over its orders with a
verdict. A response's value is the mean over its pairs with a result. If all pairs were judged and all responses have
the same number of opponents, the group's mean is 0.5. If one order cannot be judged, the other determines the pair. If
a request failed because the judge is unavailable, both responses are unjudged: values must not depend on which engines
were available.

*Cache.* The same question, with the same pictures, is not sent twice. Concurrent callers wait for the first caller's verdict. If the first
caller is cancelled, one of the waiting callers sends the question. If its request fails, each waiting caller sends the
question. Failures that may be temporary are not cached. The least recently used question is evicted first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeVar, cast

from gcore.config.reward import JudgeSpec
from gcore.reward.judges.parsers import CheckedParser, find_parser
from gcore.reward.judges.template import AskedQuestion, Question, response_pictures
from gcore.reward.judges.types import (
    Answer,
    ChatCall,
    JudgeAway,
    JudgeError,
    JudgeLate,
    JudgeObserver,
    ScoreCall,
    Unjudgeable,
    Unreadable,
)
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import gather_or_cancel
from gcore.types import LARGEST_REWARD, PictureRef, Prompt, PromptRef

LONGEST_EXAMPLE = 200
"""Number of characters of an answer that messages quote."""

Read = Callable[[str], float]
"""Returns the verdict in an answer's text. Raises Unreadable."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Score (`value`) of a response or of a comparison. `example`: beginning of the first unreadable answer, or empty."""

    value: float
    votes: int
    """Number of answers that counted."""
    unreadable: int
    """Number of unreadable answers."""
    example: str = ""


@dataclass(frozen=True, slots=True)
class UnreadAnswer:
    """An answer without a verdict. `example`: its beginning. `why`: what the parser missed."""

    example: str
    why: str
    truncated: bool

    @property
    def reason(self) -> str:
        """Why it has no verdict, without text of the answer, so that equal reasons are counted together."""
        return f"{self.why}{', and it was truncated at max_new_tokens' * self.truncated}"


def read_answers(answers: Sequence[Answer], read: Read) -> tuple[float | UnreadAnswer, ...]:
    """Parse each answer with `read`: a verdict, or why there is none. Raises JudgeError if the parser itself fails."""
    return tuple(_read(answer, read) for answer in answers)


def average_votes(votes: Sequence[float | UnreadAnswer]) -> Judgement:
    """Mean of the readable votes. Raises JudgeError if there is none."""
    values = [vote for vote in votes if not isinstance(vote, UnreadAnswer)]
    lost = [vote for vote in votes if isinstance(vote, UnreadAnswer)]
    if values:
        example = lost[0].example if lost else ""
        return Judgement(bounded_mean(values), len(values), len(lost), example)
    if not lost:
        raise JudgeError("the judge returned no answer")
    first = lost[0]
    many = f"none of {len(lost)} answers" if len(lost) > 1 else "the answer"
    raise JudgeError(
        f"{many} can{'not' if len(lost) == 1 else ''} be read: {first.reason}",
        fix="Change the template or verdict.parser",
    )


def bounded_mean(values: Sequence[float]) -> float:
    """Mean of at least one value, clamped to the values' range because of rounding errors."""
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def _read(answer: Answer, read: Read) -> float | UnreadAnswer:
    try:
        return read(answer.text)
    except Unreadable as error:
        return UnreadAnswer(answer.text.strip()[:LONGEST_EXAMPLE], error.what, answer.truncated)


Pair = tuple[int, int]

Verdicts = Mapping[Pair, float]
"""By the positions (first, second) of two responses in that order: how much better the first is, from 0 (worse) to 1
(better). Orders without a verdict are absent."""


def choose_pairs(n: int, opponents: int | None = None) -> tuple[Pair, ...]:
    """Choose the pairs (i, j), i < j, of n responses that the judge compares; deterministic.

    All pairs, or each response against `opponents` others: its neighbors in a ring. If n and `opponents` are both odd,
    one response has one opponent more.
    """
    if opponents is None or opponents >= n - 1:
        return tuple((i, j) for i in range(n) for j in range(i + 1, n))
    near = {_ordered(i, (i + distance) % n) for i in range(n) for distance in range(1, opponents // 2 + 1)}
    if opponents % 2 == 1:  # and the one on the opposite side of the ring
        near |= {_ordered(i, i + n // 2) for i in range(n // 2)}
        if n % 2 == 1:
            near.add(_ordered(n - 1, (n - 1 + n // 2) % n))
    return tuple(sorted(near))


def both_orders(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return each pair (i, j) as (i, j) and (j, i)."""
    return tuple(order for i, j in pairs for order in ((i, j), (j, i)))


def pair_values(n: int, pairs: Sequence[Pair], verdicts: Verdicts) -> tuple[float | None, ...]:
    """Score each of n responses from 0 to 1: the mean over its pairs; None if none of its pairs has a verdict."""
    won: list[list[float]] = [[] for _ in range(n)]
    for i, j in pairs:
        result = pair_result((i, j), verdicts)
        if result is not None:
            won[i].append(result)
            won[j].append(1.0 - result)
    return tuple(bounded_mean(results) if results else None for results in won)


def pair_result(pair: Pair, verdicts: Verdicts) -> float | None:
    """How much better the pair's first response is, from 0 to 1, averaged over both orders; None without a verdict."""
    i, j = pair
    told = [verdicts[i, j]] if (i, j) in verdicts else []
    told += [1.0 - verdicts[j, i]] if (j, i) in verdicts else []
    return bounded_mean(told) if told else None


def disagreement(pairs: Sequence[Pair], verdicts: Verdicts) -> float | None:
    """Share of pairs whose two orders contradict each other, among pairs with both verdicts; None without such pairs.

    They contradict each other if both prefer the first position, or both the second.
    """
    both = [(verdicts[i, j], verdicts[j, i]) for i, j in pairs if (i, j) in verdicts and (j, i) in verdicts]
    if not both:
        return None
    return sum(1 for one, other in both if (one > 0.5 and other > 0.5) or (one < 0.5 and other < 0.5)) / len(both)


def _ordered(i: int, j: int) -> Pair:
    return (i, j) if i < j else (j, i)


T = TypeVar("T")


def spec_digest(spec: JudgeSpec) -> bytes:
    """Hash of all settings of a judge (16 bytes)."""
    return hashlib.blake2b(spec.model_dump_json().encode(), digest_size=16).digest()


def question_key(digest: bytes, question: str, pictures: Sequence[PictureRef] = ()) -> bytes:
    """Cache key of a question to the judge whose `spec_digest` is `digest`. `pictures`: those that the question shows."""
    files = b"".join(bytes.fromhex(one.sha256) for one in pictures)  # their number is that of the marks in the question
    return hashlib.blake2b(digest + files + question.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _End(Enum):
    CANCELLED = auto()
    FAILED = auto()


@dataclass(eq=False, slots=True)
class _Asking(Generic[T]):
    """A question that was sent. `over` is set when its request ends. `end` then is a list of the verdict, or why there is
    none.
    """

    over: asyncio.Event = field(default_factory=asyncio.Event)
    end: list[T] | _End = _End.FAILED


class VerdictCache(Generic[T]):
    """LRU cache of at most `most` verdicts, by question. Belongs to one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._under_way: dict[bytes, _Asking[T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self, key: bytes) -> None:
        """Remove `key`, so that the question is sent again."""
        self._kept.pop(key, None)

    async def get(self, key: bytes, ask: Callable[[], Awaitable[T]], known: Callable[[], None]) -> T:
        """Return the verdict of the question `key`: from the cache, from another caller's request, or from `ask`.

        Calls `known` if this caller needed no request of its own. Raises what `ask` raises.
        """
        while True:
            if key in self._kept:
                self._kept.move_to_end(key)
                known()
                return self._kept[key]
            other = self._under_way.get(key)
            if other is None:
                return await self._asked(key, ask)
            await other.over.wait()
            if isinstance(other.end, list):
                known()
                return other.end[0]
            if other.end is _End.FAILED:
                return await self._asked(key, ask)

    async def _asked(self, key: bytes, ask: Callable[[], Awaitable[T]]) -> T:
        mine: _Asking[T] = _Asking()
        # After a failure several callers may send the question; later callers wait for the first of them.
        self._under_way.setdefault(key, mine)
        try:
            value = await ask()
            mine.end = [value]
            self._keep(key, value)
            return value
        except asyncio.CancelledError:
            mine.end = _End.CANCELLED
            raise
        finally:
            if self._under_way.get(key) is mine:
                del self._under_way[key]
            mine.over.set()

    def _keep(self, key: bytes, value: T) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


MOST_IN_VAIN = 4096
"""Maximum number of prompts whose failures are cached."""

_EQUAL = Judgement(0.5, 0, 0)
"""Result for two responses that look the same to the judge, which are not sent to it."""


def vote_seed(judge: str, question: str, vote: int, pictures: Sequence[PictureRef] = ()) -> int:
    """Sampling seed of vote number `vote` (63 bits): the same question always gets the same verdict."""
    named = json.dumps([judge, question, vote, *(one.sha256 for one in pictures)]).encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") >> 1


class Judge:
    """One judge of a job on one controller. Create it with `Judge.of`."""

    def __init__(
        self,
        spec: JudgeSpec,
        question: Question,
        parser: CheckedParser,
        ask: ChatCall | ScoreCall,
        seen: JudgeObserver,
        clock: Clock,
    ) -> None:
        """`ask` sends a question: a `ScoreCall` for a classifier, otherwise a `ChatCall`. `seen`: the metrics."""
        self.spec = spec
        self._question = question
        self._ask = ask
        self._seen = seen
        self._clock = clock
        self._parser = parser
        self._digest = spec_digest(spec)
        self._remembered: VerdictCache[Judgement | JudgeError] = VerdictCache(spec.remembered)
        self._in_vain: OrderedDict[PromptRef, set[bytes]] = OrderedDict()
        """Cache keys of the questions that could not be judged, by prompt."""
        self._open = 0

    @classmethod
    def of(
        cls,
        spec: JudgeSpec,
        ask: ChatCall | ScoreCall,
        seen: JudgeObserver,
        clock: Clock,
        *,
        where: str = "judges",
        picture_text: str = "",
        generates: bool = False,
    ) -> Judge:
        """Create the judge from its section of the spec; `where` is the section's key in messages. `picture_text`,
        `generates`: as of `Question.compile`. Raises SpecError."""
        parser = find_parser(spec.verdict.parser, f"{where}.verdict.parser")
        question = Question.compile(spec, where, picture_text, generates=generates)
        return cls(spec, question, parser, ask, seen, clock)

    @property
    def is_full(self) -> bool:
        """Whether the number of open questions has reached the limit per controller (`queue`)."""
        return self._open >= self.spec.queue

    async def value(self, prompt: Prompt, response: str) -> Judgement:
        """Score a response with a pointwise judge. Raises JudgeError; JudgeAway if a retry may help."""
        if self.spec.mode != "pointwise":
            raise RuntimeError(f"judge {self.spec.name!r} is pairwise; it cannot score a single response")
        return await self._judged(prompt, self._question.about(prompt, response))

    async def values(self, prompt: Prompt, responses: Sequence[str]) -> tuple[Judgement | JudgeError, ...]:
        """Score each response of a group, in order; a response that cannot be judged gets its error instead."""
        if self.spec.mode == "pairwise":
            return await self._held_together(prompt, responses)
        return tuple(await gather_or_cancel([return_error(self.value(prompt, response)) for response in responses]))

    async def _held_together(self, prompt: Prompt, responses: Sequence[str]) -> tuple[Judgement | JudgeError, ...]:
        n = len(responses)
        pairs = choose_pairs(n, self.spec.opponents)
        asked = both_orders(pairs)
        outcomes = await gather_or_cancel(
            [return_error(self._compared(prompt, responses[i], responses[j])) for i, j in asked]
        )
        told = dict(zip(asked, outcomes, strict=True))
        verdicts = {order: one.value for order, one in told.items() if isinstance(one, Judgement)}
        different = [(i, j) for i, j in pairs if not self._is_equal(responses[i], responses[j])]
        share = disagreement(different, verdicts)
        if share is not None:
            self._seen.disagreed(self.spec.name, share)
        values = pair_values(n, pairs, verdicts)
        return tuple(self._of_response(i, values[i], told) for i in range(n))

    def _of_response(
        self, number: int, value: float | None, told: dict[Pair, Judgement | JudgeError]
    ) -> Judgement | JudgeError:
        """Return the score of response `number`, or its error.

        `value`: its mean over its pairs. `told`: the result of each comparison of the group, by order.
        """
        outcomes = [outcome for order, outcome in told.items() if number in order]
        errors = [outcome for outcome in outcomes if isinstance(outcome, JudgeError)]
        away = next((error for error in errors if isinstance(error, JudgeAway)), None)
        if away is not None:
            return away
        if value is None:
            if not errors:
                return Unjudgeable(
                    f"judge {self.spec.name!r} compares responses, but the group has one response",
                    fix="Set flow.samples_per_prompt to at least 2, or mode: pointwise for the judge",
                )
            return errors[0]
        judged = [outcome for outcome in outcomes if isinstance(outcome, Judgement)]
        example = next((one.example for one in judged if one.example), "")
        return Judgement(value, sum(one.votes for one in judged), sum(one.unreadable for one in judged), example)

    async def _compared(self, prompt: Prompt, first: str, second: str) -> Judgement:
        if self._is_equal(first, second):
            return _EQUAL
        return await self._judged(prompt, self._question.between(prompt, first, second))

    def _is_equal(self, first: str, second: str) -> bool:
        """Whether two responses look the same to the judge."""
        seen = [[one.sha256 for one in response_pictures(response)] for response in (first, second)]
        return first == second and (seen[0] == seen[1] or not self.spec.images)

    async def _judged(self, prompt: Prompt, asked: AskedQuestion) -> Judgement:
        question, pictures = asked
        key = question_key(self._digest, question, pictures)
        judged = await self._remembered.get(
            key, lambda: self._settled(question, pictures), lambda: self._seen.remembered(self.spec.name)
        )
        if isinstance(judged, Judgement):
            return judged
        self._in_vain.setdefault(prompt.ref, set()).add(key)
        if len(self._in_vain) > MOST_IN_VAIN:
            self.forget(next(iter(self._in_vain)))
        raise type(judged)(judged.what, where=judged.where, fix=judged.fix, trace=judged.trace) from judged.__cause__

    async def _settled(self, question: str, pictures: tuple[PictureRef, ...]) -> Judgement | JudgeError:
        """Send the question; return its verdict, or an error that a retry would not change. Raises JudgeAway."""
        try:
            if self.spec.kind == "classifier":
                return await self._classified(question, pictures)
            return await self._written(question, pictures)
        except JudgeAway:
            raise
        except JudgeError as error:
            return error

    def forget(self, ref: PromptRef) -> None:
        """Forget the questions about this prompt that no judge could answer, so that they are sent again when the prompt is
        sampled again."""
        for key in self._in_vain.pop(ref, ()):
            self._remembered.forget(key)

    async def _written(self, question: str, pictures: tuple[PictureRef, ...]) -> Judgement:
        ask = cast(ChatCall, self._ask)
        seeds = [vote_seed(self.spec.name, question, vote, pictures) for vote in range(self.spec.votes)]
        began, answers = await self._tried(lambda: self._answers(ask, question, seeds, pictures))
        tokens_in, tokens_out = sum(a.tokens_in for a in answers), sum(a.tokens_out for a in answers)
        self._seen.asked(self.spec.name, self._clock.monotonic() - began, tokens_in, tokens_out)
        votes = read_answers(answers, lambda answer: self._parser(answer, self.spec.verdict))
        for vote in votes:
            if isinstance(vote, UnreadAnswer):
                self._seen.unreadable(self.spec.name, vote.example, vote.reason)
        return self._told(average_votes(votes))

    async def _answers(
        self, ask: ChatCall, question: str, seeds: Sequence[int], pictures: tuple[PictureRef, ...]
    ) -> tuple[Answer, ...]:
        answers = await ask(question, seeds, pictures)
        if len(answers) != len(seeds):
            raise JudgeError(f"judge {self.spec.name!r} returned {len(answers)} answers; {len(seeds)} were requested")
        return answers

    async def _classified(self, question: str, pictures: tuple[PictureRef, ...]) -> Judgement:
        value = cast(ScoreCall, self._ask)
        began, said = await self._tried(lambda: value(question, pictures))
        self._seen.asked(self.spec.name, self._clock.monotonic() - began, said.tokens_in, 0)
        number = said.number
        if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
            raise JudgeError(f"judge {self.spec.name!r} returned {number}, which is not finite in float32")
        return self._told(Judgement(number, 1, 0))

    def _told(self, judged: Judgement) -> Judgement:
        self._seen.verdict(self.spec.name, judged.value)
        return judged

    async def _tried(self, once: Callable[[], Coroutine[Any, Any, T]]) -> tuple[float, T]:
        """Run `once`, which sends a question, with retries.

        Returns the start of the successful try in monotonic seconds, and its result. Raises JudgeError.
        """
        tries = 0
        self._open += 1  # the question stays open between two tries, while it waits for the judge
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


async def return_error(judged: Awaitable[Judgement]) -> Judgement | JudgeError:
    """Await the verdict; return a JudgeError instead of raising it."""
    try:
        return await judged
    except JudgeError as error:
        return error
