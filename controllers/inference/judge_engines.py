"""The engines of a job's judges, and the clients that ask them.

Any controller asks any of them: their weights never change and nothing is published to them.

There is one pool for each judge (`controllers.inference.pool`): the least busy engine gets a request; an engine that does not answer is left, and
its requests go to another; an engine whose version is in doubt is asked for it before it is used again. The plan says which engines run where
and which sleep. The controller of an engine's node frees its memory; the others find out by asking that it has woken.

Requests to a `kind: classifier` judge are batched: those of one moment go as one request, of at most as many as an engine takes through its
model at once. If the engine of a batch is lost, all of it is asked again; if a batch is refused, each question is asked alone, since only one of
them need be at fault.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

from controllers.changes import ChangeSignal
from controllers.inference.pool import EnginePool
from controllers.inference.rules import HealthLimits
from controllers.rules.view import EngineView
from gcore.config.reward import JudgeSpec
from gcore.config.spec import JobSpec
from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import TextTooLong, check_length, run_by_size
from gcore.errors import DataError, EngineError, EngineGaveUp, EngineUnreachable
from gcore.models.layout import FIRST_WEIGHTS
from gcore.observability.metrics import Metrics
from gcore.reward.judges.types import Answer, ClassifierAnswer, JudgeAway, JudgeError, judge_away
from gcore.rollout.client import EngineReach, SamplingParams, plain_reach
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all
from gcore.worker.records import WorkerRecord


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    score: asyncio.Future[ClassifierAnswer]


Tokens = tuple[int, ...]


class ClassifierClient:
    """Puts the questions of one judge to its engines. Implements `gcore.reward.judges.types.ScoreCall`."""

    def __init__(
        self,
        judge: JudgeSpec,
        book: EnginePool,
        renderer: PromptRenderer,
        limit: int | None,
        new_rid: Callable[[], str],
    ) -> None:
        """`limit`: the judge's context, in tokens."""
        self._book = book
        self._renderer = renderer
        self._limit = limit
        self._new_rid = new_rid
        self._most = judge.serving.batch_slots
        self._waiting: list[_Question] = []
        """Put at this moment."""
        self._requests: set[asyncio.Task[None]] = set()

    async def __call__(self, question: str) -> ClassifierAnswer:
        """The number, and how many tokens the question has; waits for an engine. Raises JudgeAway, JudgeError."""
        loop = asyncio.get_running_loop()
        put = _Question(question, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._send)  # when all that can be put now has been
        self._waiting.append(put)
        return await put.score

    def _send(self) -> None:
        put, self._waiting = self._waiting, []
        for first in range(0, len(put), self._most):
            self._request(put[first : first + self._most])

    def _request(self, asked: Sequence[_Question]) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(asked), name=f"classify {len(asked)}")
        self._requests.add(task)
        task.add_done_callback(partial(self._ended, asked))
        for question in asked:
            question.score.add_done_callback(lambda _: _given_up(task, asked))

    async def _ask(self, put: Sequence[_Question]) -> None:
        texts = [question.text for question in put]
        found = await run_by_size(sum(map(len, texts)), lambda: [self._tokens(text) for text in texts])
        asked, tokens = list[_Question](), list[Tokens]()
        for question, made in zip(put, found, strict=True):
            if question.score.done():
                continue
            if isinstance(made, JudgeError):
                question.score.set_exception(made)
            else:
                asked.append(question)
                tokens.append(made)
        if asked:
            await self._request_scores(asked, tokens)

    async def _request_scores(self, asked: Sequence[_Question], tokens: Sequence[Tokens]) -> None:
        try:
            scores = await self._book.classify(FIRST_WEIGHTS, tokens, self._new_rid())
        except (EngineUnreachable, EngineGaveUp) as error:
            _fail(asked, partial(judge_away, error))
        except EngineError as error:
            if len(asked) == 1:
                _fail(asked, partial(JudgeError, error.what, where=error.where, fix=error.fix))
                return
            for question in asked:
                if not question.score.done():
                    self._request([question])
        else:
            for question, its, score in zip(asked, tokens, scores, strict=True):
                if not question.score.done():
                    question.score.set_result(ClassifierAnswer(score, len(its)))

    def _ended(self, asked: Sequence[_Question], task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if task.cancelled():
            for question in asked:
                question.score.cancel()
        elif (error := task.exception()) is not None:  # a defect: whoever asked must hear of it
            _fail(asked, lambda: error)

    def _tokens(self, question: str) -> Tokens | JudgeError:
        """Those of a question, or why it is not asked. May run in a thread."""
        try:
            text = self._renderer.render(question)
            check_length(text, self._limit, self._renderer.encode)
            tokens = self._renderer.encode(text)
        except DataError as error:
            return JudgeError(error.what, where=error.where, fix=error.fix)
        except TextTooLong as error:
            return self._unheld(str(error))
        if not tokens:  # SGLang's scheduler dies of such a question
            return JudgeError("the question has no tokens", fix="Let its template show more than the response")
        if self._limit is not None and len(tokens) >= self._limit:
            return self._unheld(f"{len(tokens)} tokens")
        return tokens

    def _unheld(self, has: str) -> JudgeError:
        return JudgeError(
            f"the question has {has}, which do not fit into the judge's context of {self._limit}",
            fix="Shorten what its template shows, or take a judge with a longer context",
        )


def _fail(asked: Sequence[_Question], error: Callable[[], BaseException]) -> None:
    for question in asked:
        if not question.score.done():
            question.score.set_exception(error())


def _given_up(task: asyncio.Task[None], asked: Sequence[_Question]) -> None:
    """Nobody waits for any of them any more."""
    if all(question.score.done() for question in asked):
        task.cancel()  # which does nothing to one that has answered them


log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Until an engine that did not say what it serves is asked again."""

WOKEN_S = 0.25
"""And one that slept and is to be awake by the plan: its node's controller wakes it."""


class JudgePools:
    """One pool of engines for each judge that the job serves."""

    def __init__(
        self,
        spec: JobSpec,
        uid: str,
        me: str,
        changes: ChangeSignal,
        clock: Clock,
        metrics: Metrics,
        connect: EngineReach = plain_reach,
    ) -> None:
        """`me`: this incarnation, for an engine takes no two requests of the same name, and all controllers ask it."""
        self._uid = uid
        self._me = me
        self._clock = clock
        self._specs = {judge.name: judge for judge in spec.served_judges}
        self._books = {
            name: EnginePool(
                changes,
                judge.timeout_s,
                connect,
                clock=clock,
                patience=HealthLimits(spec.rollout.silent_s, spec.rollout.watchdog_s, judge.timeout_s),
                metrics=metrics,
                pool="reward",
            )
            for name, judge in self._specs.items()
        }
        self._asking: dict[str, asyncio.Task[None]] = {}
        """By instance: what it serves is being found out."""
        self._next: dict[str, float] = {}
        """When it may be asked again."""
        self._requests = itertools.count()
        self._shut: frozenset[str] = frozenset()

    @property
    def views(self) -> dict[str, EngineView]:
        """What is known of all of them."""
        return {instance: view for book in self._books.values() for instance, view in book.views.items()}

    async def aim(self, workers: Mapping[str, WorkerRecord]) -> None:
        """These workers are there now; those that serve a judge of the job are asked from now on."""
        for name, book in self._books.items():
            await book.aim(
                {
                    instance: worker
                    for instance, worker in workers.items()
                    if (worker.role, worker.job_uid, worker.judge, worker.state)
                    == ("reward", self._uid, name, "serving")
                }
            )

    def shut(self, instances: Collection[str]) -> None:
        """The plan says that these sleep, and the others do not."""
        self._shut = frozenset(instances)
        for book in self._books.values():
            book.shut(self._shut)

    async def sleep(self, instance: str) -> None:
        """Have an engine's memory back. Raises EngineError."""
        await self._book_of(instance).sleep(instance)

    async def wake(self, instance: str) -> None:
        """Give it back; it serves what it served. Raises EngineError.

        What SGLang has in its weights' memory then depends on how it was started: they are loaded anew, before it is asked.
        """
        book = self._book_of(instance)
        judge = next(self._specs[name] for name, one in self._books.items() if one is book)
        assert judge.model is not None
        await book.wake(instance, FIRST_WEIGHTS if judge.serving.engine == "torch" else None)
        await book.publish(instance, FIRST_WEIGHTS, Path(judge.model.path))

    async def loads(self, instances: Collection[str]) -> dict[str, tuple[int, int]]:
        """What these run, and what waits there."""
        found: dict[str, tuple[int, int]] = {}
        for book in self._books.values():
            found |= await book.loads(instances)
        return found

    def unseated(self) -> int:
        """Questions of this controller that no engine has yet."""
        return sum(book.unseated() for book in self._books.values())

    @property
    def changed_s(self) -> tuple[float | None, float | None]:
        """What it takes to put one to sleep, and to wake it, of the judge whose take longest."""
        slept = [book.slept_s for book in self._books.values() if book.slept_s is not None]
        woke = [book.woke_s for book in self._books.values() if book.woke_s is not None]
        return max(slept, default=None), max(woke, default=None)

    def _book_of(self, instance: str) -> EnginePool:
        book = next((book for book in self._books.values() if instance in book.views), None)
        if book is None:
            raise EngineUnreachable(f"{instance} is not connected", fix="Look again")
        return book

    def look_after(self, controllers: int) -> None:
        """Look how everybody is; find out what those serve of which nothing is known. Called at each look of the driver.

        `controllers`: that ask them, each of which has its share of what one runs at once.
        """
        now = self._clock.monotonic()
        for name, book in self._books.items():
            book.rows = ceil(self._specs[name].serving.batch_slots / max(controllers, 1))
            book.look_after()
            model = self._specs[name].model
            assert model is not None
            for instance, view in book.views.items():
                if instance in self._shut:
                    continue
                if view.version is None and not view.silent and now >= self._next.get(instance, now):
                    self._ask_what_it_serves(book, instance, Path(model.path))

    def _ask_what_it_serves(self, book: EnginePool, instance: str, folder: Path) -> None:
        if instance in self._asking:
            return
        task = asyncio.get_running_loop().create_task(self._settle(book, instance, folder), name=f"judge {instance}")
        self._asking[instance] = task
        task.add_done_callback(lambda _: self._asking.pop(instance, None))

    async def _settle(self, book: EnginePool, instance: str, folder: Path) -> None:
        try:
            await book.publish(instance, FIRST_WEIGHTS, folder)
            self._next.pop(instance, None)
        except EngineError as error:
            log.debug("%s: %s", instance, error)
            view = book.views.get(instance)
            again = WOKEN_S if view is not None and view.asleep else AGAIN_S
            self._next[instance] = self._clock.monotonic() + again

    async def close(self) -> None:
        """Close all connections."""
        await cancel_all(self._asking.values())
        for book in self._books.values():
            await book.close()

    def asker(self, judge: JudgeSpec, renderer: PromptRenderer, limit: int | None) -> GenerativeJudgeClient:
        """What puts questions to the engines of `judge`, which writes. `limit`: its context, in tokens."""
        return GenerativeJudgeClient(judge, self._books[judge.name], renderer, limit, self._names(judge))

    def valuer(self, judge: JudgeSpec, renderer: PromptRenderer, limit: int | None) -> ClassifierClient:
        """The same of a classifier."""
        return ClassifierClient(judge, self._books[judge.name], renderer, limit, self._names(judge))

    def _names(self, judge: JudgeSpec) -> Callable[[], str]:
        rid = f"{self._uid}/judge/{judge.name}/{self._me}"
        return lambda: f"{rid}/{next(self._requests)}"


class GenerativeJudgeClient:
    """Puts the questions of one judge to its engines. Implements `gcore.reward.judges.judge.Ask`."""

    def __init__(
        self,
        judge: JudgeSpec,
        book: EnginePool,
        renderer: PromptRenderer,
        limit: int | None,
        new_rid: Callable[[], str],
    ) -> None:
        self._name = judge.name
        self._book = book
        self._renderer = renderer
        self._limit = limit
        self._new_rid = new_rid
        self._params = SamplingParams(
            temperature=judge.temperature,
            max_new_tokens=judge.max_new_tokens,
            top_p=judge.top_p,
            stop=judge.stop,
        )

    async def __call__(self, question: str, seeds: Sequence[int]) -> tuple[Answer, ...]:
        """One answer a seed; waits for an engine. Raises JudgeAway, JudgeError."""
        tokens = await run_by_size(len(question), lambda: self._tokens(question))
        decode = self._renderer.tokenizer.decode
        try:
            samples = await self._book.generate(
                FIRST_WEIGHTS, [tokens] * len(seeds), self._params, seeds, self._new_rid(), None, decode
            )
        except EngineUnreachable as error:
            raise judge_away(error) from error
        except EngineError as error:
            raise JudgeError(error.what, where=error.where, fix=error.fix) from error
        if any(sample.finish_reason == "abort" for sample in samples):
            raise JudgeAway("its engine gave up on the question", fix="It is asked again")
        return tuple(
            Answer(
                text=sample.text,
                tokens_in=len(tokens),
                tokens_out=len(sample.token_ids),
                truncated=sample.finish_reason == "length",
            )
            for sample in samples
        )

    def _tokens(self, question: str) -> tuple[int, ...]:
        """May run in a thread. Raises JudgeError."""
        room = None if self._limit is None else self._limit - self._params.max_new_tokens
        try:
            text = self._renderer.render(question)
            check_length(text, room, self._renderer.encode)
            tokens = self._renderer.encode(text)
        except DataError as error:
            raise JudgeError(error.what, where=error.where, fix=error.fix) from error
        except TextTooLong as error:
            raise self._unheld(str(error)) from None
        if room is not None and len(tokens) > room:
            raise self._unheld(f"{len(tokens)} tokens")
        return tokens

    def _unheld(self, has: str) -> JudgeError:
        return JudgeError(
            f"the question has {has}, and with max_new_tokens ({self._params.max_new_tokens}) more than the {self._limit} of the "
            "judge's context",
            fix="Shorten what its template shows, or take a judge with a longer context",
        )
