"""The engines of the judges (reward models) that the cluster serves, and the clients that send requests to them.

Every controller sends requests to every judge engine, because the weights of judges never change.

Each judge has one pool (`controllers.inference.pool`). The pool of a judge that is an adapter of the policy's model has
the policy's engines: it sends requests that name the adapter, and leaves weights, sleep and wake to the policy's pool.
A request goes to the least busy engine. If an engine does not
respond, its requests go to another engine. If it is not known whether an engine serves, the controller asks it before
it uses the engine again. The plan says which engines run where and which sleep. Only the controller of an engine's node
puts it to sleep and wakes it; the others poll to find out that it is awake.

Questions to a judge of `kind: classifier` are batched: questions that arrive together are sent as one request, up to
the batch size of the engine. If the engine of a batch is lost, the whole batch is retried. If a batch is refused, each
question is sent alone, because perhaps only one of them is invalid.

The pictures of a question have the size that the judge's own model uses. The blob store of this node makes them, and that of
the engine's node fetches them before the request is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from controllers.changes import ChangeSignal
from controllers.inference.pool import EnginePool
from controllers.inference.rules import HealthLimits
from controllers.workers.job_media import JobMedia, Pictures
from gcore.config.reward import JudgeSpec
from gcore.config.spec import JobSpec
from gcore.data.messages import Messages
from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import TextTooLong, check_length, run_by_size
from gcore.errors import DataError, EngineError, EngineGaveUp, EngineUnreachable, GcoreError
from gcore.media.placeholders import PictureRule, ScorerRule
from gcore.models.layout import FIRST_WEIGHTS
from gcore.observability.metrics import Metrics
from gcore.reward.judges.types import (
    IMAGE_MARK,
    Answer,
    ClassifierAnswer,
    JudgeAway,
    JudgeError,
    Unjudgeable,
    judge_away,
)
from gcore.rollout.api import PicturesUnavailable, RequestPictures
from gcore.rollout.client import EngineReach, SamplingParams, plain_reach
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all
from gcore.types import Medium, Version
from gcore.worker.records import WorkerRecord


@dataclass(frozen=True, slots=True)
class _Question:
    """A question to a classifier, its pictures in the size of the judge's model with their blobs, and the future that
    gets its score."""

    text: str
    pictures: Pictures
    media: tuple[Medium, ...]
    score: asyncio.Future[ClassifierAnswer]


Tokens = tuple[int, ...]

Encoded = tuple[Tokens, Tokens]
"""The tokens of a question: with one image token for each picture, and with all tokens of pictures."""


class ClassifierClient:
    """Sends questions to the engines of a classifier judge, in batches. Implements
    `gcore.reward.judges.types.ScoreCall`."""

    def __init__(
        self,
        judge: JudgeSpec,
        pool: EnginePool,
        encoder: QuestionEncoder,
        limit: int | None,
        new_rid: Callable[[], str],
        media: JobMedia | None,
    ) -> None:
        """`limit`: the judge's context length in tokens; None: no limit. `new_rid`: returns a new request name. `media`:
        provides the pictures of prompts; None: they have none."""
        self._pool = pool
        self._encoder = encoder
        self._media = media
        self._limit = limit
        self._new_rid = new_rid
        self._most = judge.serving.batch_slots
        self._waiting: list[_Question] = []
        """Questions of the next batch."""
        self._requests: set[asyncio.Task[None]] = set()

    async def __call__(self, question: str, pictures: Pictures = ()) -> ClassifierAnswer:
        """Return the score of the question and its number of tokens. Wait until an engine has answered. Raises
        JudgeAway if the engine is lost, JudgeError if the question is invalid."""
        async with pictures_in_use(self._media, pictures, self._encoder.targets) as (targets, media):
            loop = asyncio.get_running_loop()
            put = _Question(question, targets, media, loop.create_future())
            if not self._waiting:
                loop.call_soon(self._send)  # after all questions that are ready now
            self._waiting.append(put)
            return await put.score

    def _send(self) -> None:
        """Send all waiting questions, in batches."""
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
        found = await run_by_size(
            sum(len(question.text) for question in put), lambda: [self._tokens(question) for question in put]
        )
        asked, encoded = list[_Question](), list[Encoded]()
        for question, made in zip(put, found, strict=True):
            if question.score.done():
                continue
            if isinstance(made, JudgeError):
                question.score.set_exception(made)
            else:
                asked.append(question)
                encoded.append(made)
        if asked:
            await self._request_scores(asked, encoded)

    async def _request_scores(self, asked: Sequence[_Question], encoded: Sequence[Encoded]) -> None:
        shown = [self._shown(question, *its) for question, its in zip(asked, encoded, strict=True)]
        try:
            scores = await self._pool.classify(FIRST_WEIGHTS, [short for short, _ in encoded], self._new_rid(), shown)
        except (EngineUnreachable, EngineGaveUp) as error:
            _fail(asked, partial(judge_away, error))
        except EngineError as error:
            if len(asked) == 1:
                away = isinstance(error, PicturesUnavailable)
                _fail(asked, partial(judge_away, error) if away else partial(_refused, error))
                return
            for question in asked:
                if not question.score.done():
                    self._request([question])
        else:
            for question, (_, tokens), score in zip(asked, encoded, scores, strict=True):
                if not question.score.done():
                    question.score.set_result(ClassifierAnswer(score, len(tokens)))

    def _shown(self, question: _Question, short: Tokens, tokens: Tokens) -> RequestPictures | None:
        """The pictures of a question as a request names them; None: it has none."""
        if not question.pictures:
            return None
        assert self._media is not None
        return self._media.name_pictures(question.pictures, question.media, len(short), tokens)

    def _ended(self, asked: Sequence[_Question], task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if task.cancelled():
            for question in asked:
                question.score.cancel()
        elif (error := task.exception()) is not None:  # a defect: report it to the callers
            _fail(asked, lambda: error)

    def _tokens(self, question: _Question) -> Encoded | JudgeError:
        """Return the tokens of a question, or the error. May run in a thread."""
        try:
            short, tokens = self._encoder.encode(question.text, question.pictures, self._limit)
        except DataError as error:
            return _refused(error)
        except TextTooLong as error:
            return self._unheld(str(error))
        if not tokens:  # SGLang's scheduler crashes on an empty question
            return JudgeError("the question has no tokens", fix="Add fixed text to the judge's template")
        if self._limit is not None and len(tokens) >= self._limit:
            return self._unheld(f"{len(tokens)} tokens")
        return short, tokens

    def _unheld(self, has: str) -> JudgeError:
        return JudgeError(
            f"the question has {has}, which do not fit into the judge's context of {self._limit}",
            fix="Shorten the judge's template, or use a judge with a longer context",
        )


def _fail(asked: Sequence[_Question], error: Callable[[], BaseException]) -> None:
    for question in asked:
        if not question.score.done():
            question.score.set_exception(error())


def _given_up(task: asyncio.Task[None], asked: Sequence[_Question]) -> None:
    """Cancel the request of a batch if no caller waits for any of its questions any more."""
    if all(question.score.done() for question in asked):
        task.cancel()  # no effect if it has answered already


def _refused(error: GcoreError) -> JudgeError:
    """Convert the error of a question that a repetition would not change."""
    return JudgeError(error.what, where=error.where, fix=error.fix)


def _same(pictures: Pictures) -> Pictures:
    return pictures


@contextlib.asynccontextmanager
async def pictures_in_use(
    media: JobMedia | None, pictures: Pictures, resized: Callable[[Pictures], Pictures] = _same
) -> AsyncIterator[tuple[Pictures, tuple[Medium, ...]]]:
    """Yield the pictures of a question in the size that `resized` gives them, and their blobs, which stay pinned until the
    block ends. Raises JudgeAway if the store of this node is unreachable, and other JudgeErrors."""
    if not pictures:
        yield (), ()
        return
    assert media is not None
    try:
        targets = resized(pictures)
        async with media.in_use(targets) as made:
            yield targets, made
    except DataError as error:  # every response to the prompt has this picture
        raise Unjudgeable(error.what, where=error.where, fix=error.fix) from error
    except EngineUnreachable as error:
        raise judge_away(error) from error
    except EngineError as error:
        raise _refused(error) from error


class QuestionEncoder:
    """Turns the questions to a judge into tokens. Stateless and thread-safe. `rule`: how the judge's model reads
    pictures; None: it sees none."""

    def __init__(self, renderer: PromptRenderer, rule: PictureRule | ScorerRule | None) -> None:
        self.renderer = renderer
        self._rule = rule

    @property
    def max_length(self) -> int | None:
        """The context length of the judge's model in tokens; None: its files do not say it."""
        return self._rule.max_length if isinstance(self._rule, ScorerRule) else self.renderer.max_length

    def encode(self, question: str, pictures: Pictures, room: int | None) -> Encoded:
        """Return the tokens of a question.

        `pictures`: one for each `IMAGE_MARK`. `room`: number of tokens above which the question does not fit. Raises
        DataError, and TextTooLong for a text that is certainly longer.
        """
        text = self.renderer.render(self._content(question) if pictures else question)
        check_length(text, room, self.renderer.encode)
        short = self.renderer.encode(text)
        if self._rule is None or not pictures:
            return short, short
        try:
            sizes = [(one.height, one.width) for one in pictures]
            return self._rule.request_ids(short, sizes), self._rule.expand(short, sizes)
        except DataError as error:
            raise DataError(
                f"the judge's question: {error.what}", where=error.where, fix="Remove such text, or change the template"
            ) from error

    def _content(self, question: str) -> str | Messages:
        """A question with pictures, as the renderer expects it."""
        assert self._rule is not None
        if not self.renderer.chat:
            return question.replace(IMAGE_MARK, self._rule.picture_text)
        first, *rest = question.split(IMAGE_MARK)
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
        for text in rest:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        kept = [part for part in parts if part["type"] == "image" or part["text"]]
        return [{"role": "user", "content": kept}]

    def targets(self, pictures: Pictures) -> Pictures:
        """Return the pictures in the size that the judge's model uses. Raises DataError."""
        assert self._rule is not None
        sizes = [self._rule.target_size(one.height, one.width) for one in pictures]
        return tuple(
            one._replace(target_height=height, target_width=width)
            for one, (height, width) in zip(pictures, sizes, strict=True)
        )


log = logging.getLogger(__name__)

JUDGE_RETRY_S = 1.0
"""Seconds after which an engine that did not confirm its weights is asked again."""

WOKEN_S = 0.25
"""The same for a sleeping engine that the controller of its node is about to wake."""


class JudgePool(EnginePool):
    """The engines of one judge that the cluster serves. `asker` and `valuer` return clients for it."""

    def __init__(
        self,
        spec: JobSpec,
        judge: JudgeSpec,
        uid: str,
        me: str,
        changes: ChangeSignal,
        clock: Clock,
        metrics: Metrics,
        connect: EngineReach = plain_reach,
        media: JobMedia | None = None,
    ) -> None:
        """`uid`: the job. `me`: this run of the controller, which makes request names unique, because all controllers
        send requests to these engines. `media`: provides the pictures of prompts; None: they have none."""
        patience = HealthLimits(spec.rollout.silent_s, spec.rollout.watchdog_s, judge.timeout_s)
        super().__init__(
            changes,
            judge.timeout_s,
            connect,
            clock=clock,
            patience=patience,
            metrics=metrics,
            pool="reward",
        )
        self.beside_policy = judge.adapter is not None
        self._media = media
        self._uid = uid
        self._judge = judge
        self._folder = Path(spec.judge_model(judge).path)
        self._batch_slots = spec.rollout.batch_slots if self.beside_policy else judge.serving.batch_slots
        self._asking: dict[str, asyncio.Task[None]] = {}
        """By instance: tasks that ask an engine for its weights."""
        self._next: dict[str, float] = {}
        """By instance: earliest time to ask again."""
        self._rids = (f"{uid}/judge/{judge.name}/{me}/{number}" for number in itertools.count())

    async def aim(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Set the present workers of the cluster. Those that serve this judge receive requests from now on."""
        role, engine = ("rollout", "") if self.beside_policy else ("reward", self._judge.name)
        wanted = (role, self._uid, engine, "serving")
        mine = {name: one for name, one in workers.items() if (one.role, one.job_uid, one.judge, one.state) == wanted}
        await super().aim(mine)

    async def wake(self, instance: str, version: Version | None = None) -> None:
        """Wake an engine, so that it has its memory and its weights again. Raises EngineError.

        Whether SGLang's weights survive depends on how it was started, so the weights are loaded again before the
        engine is used.
        """
        await super().wake(instance, version if self._judge.serving.engine == "sglang" else FIRST_WEIGHTS)
        await self.publish(instance, FIRST_WEIGHTS, self._folder)

    def look_after(self, controllers: int = 1) -> None:
        """Check the health of each engine, and ask engines whose weights are not known. The reconciler calls this in
        each cycle.

        `controllers`: number of controllers that use the engines; each may use an equal part of an engine's capacity.
        """
        now = self._clock.monotonic()
        self.rows = ceil(self._batch_slots / max(controllers, 1))
        super().look_after()
        if self.beside_policy:
            # The policy's pool decides whether its engines hang. Here, questions may only have waited behind rollouts.
            self.reset_hung()
        for instance, view in self.views.items():
            if instance in self._shut:
                continue
            if view.version is None and not view.silent and now >= self._next.get(instance, now):
                self._ask_what_it_serves(instance)

    def _ask_what_it_serves(self, instance: str) -> None:
        if instance in self._asking:
            return
        task = asyncio.get_running_loop().create_task(self._settle(instance), name=f"judge {instance}")
        self._asking[instance] = task
        task.add_done_callback(lambda _: self._asking.pop(instance, None))

    async def _settle(self, instance: str) -> None:
        """Make sure that an engine has its weights, so that requests can be sent to it; on failure set the next try."""
        try:
            if self.beside_policy:
                await self._find_awake(instance)
            else:
                await self.publish(instance, FIRST_WEIGHTS, self._folder)
            self._next.pop(instance, None)
        except EngineError as error:
            log.debug("%s: %s", instance, error)
            view = self.views.get(instance)
            again = WOKEN_S if view is not None and view.asleep else JUDGE_RETRY_S
            self._next[instance] = self._clock.monotonic() + again

    async def _find_awake(self, instance: str) -> None:
        """Make sure that an engine of the policy is awake, whatever weights of the policy it serves: a judge's adapter
        never changes. Raises EngineError."""
        connection = self._connection_of(instance)
        with self._note_trouble(connection):
            if await connection.client.served() is None:
                raise EngineError(f"engine {instance} has no weights yet", fix="The question waits, or goes elsewhere")
        connection.view = replace(connection.view, version=FIRST_WEIGHTS, asleep=False)
        self._changes.notify()

    async def close(self) -> None:
        """Close all connections."""
        await cancel_all(self._asking.values())
        await super().close()

    def asker(self, encoder: QuestionEncoder, limit: int | None) -> GenerativeJudgeClient:
        """Return the client of a generative judge. `limit`: its context length in tokens."""
        return GenerativeJudgeClient(self._judge, self, encoder, limit, partial(next, self._rids), self._media)

    def valuer(self, encoder: QuestionEncoder, limit: int | None) -> ClassifierClient:
        """Return the client of a classifier. `limit`: its context length in tokens."""
        return ClassifierClient(self._judge, self, encoder, limit, partial(next, self._rids), self._media)


class GenerativeJudgeClient:
    """Sends questions to the engines of a generative judge. Implements `gcore.reward.judges.types.ChatCall`."""

    def __init__(
        self,
        judge: JudgeSpec,
        pool: JudgePool,
        encoder: QuestionEncoder,
        limit: int | None,
        new_rid: Callable[[], str],
        media: JobMedia | None,
    ) -> None:
        self._name = judge.name
        self._pool = pool
        self._encoder = encoder
        self._media = media
        self._limit = limit
        self._new_rid = new_rid
        self._params = SamplingParams(
            temperature=judge.temperature,
            max_new_tokens=judge.max_new_tokens,
            top_p=judge.top_p,
            stop=judge.stop,
            adapter=None if judge.adapter is None else judge.name,
        )

    async def __call__(self, question: str, seeds: Sequence[int], pictures: Pictures = ()) -> tuple[Answer, ...]:
        """Return one sampled answer per seed. Wait until an engine has answered. Raises JudgeAway if the engine is
        lost, JudgeError if the question is invalid."""
        short, tokens = await run_by_size(len(question), lambda: self._tokens(question, pictures))
        async with pictures_in_use(self._media, pictures, self._encoder.targets) as (targets, media):
            params = self._params
            if self._media is not None and targets:
                params = replace(params, pictures=self._media.name_pictures(targets, media, len(short), tokens))
            return await self._answers(short, tokens, params, seeds)

    async def _answers(
        self, short: Tokens, tokens: Tokens, params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Answer, ...]:
        """`short`: the tokens of the question with one image token for each picture; `tokens`: with all."""
        try:
            samples = await self._pool.generate(
                FIRST_WEIGHTS,
                [short] * len(seeds),
                params,
                seeds,
                self._new_rid(),
                decode=self._encoder.renderer.tokenizer.decode,
            )
        except (EngineUnreachable, PicturesUnavailable) as error:
            raise judge_away(error) from error
        except EngineError as error:
            raise _refused(error) from error
        if any(sample.finish_reason == "abort" for sample in samples):
            raise JudgeAway("the engine aborted the request", fix="The question is retried")
        return tuple(
            Answer(
                text=sample.text,
                tokens_in=len(tokens),
                tokens_out=len(sample.token_ids),
                truncated=sample.finish_reason == "length",
            )
            for sample in samples
        )

    def _tokens(self, question: str, pictures: Pictures) -> Encoded:
        """Return the tokens of a question. May run in a thread. Raises JudgeError."""
        room = None if self._limit is None else self._limit - self._params.max_new_tokens
        try:
            short, tokens = self._encoder.encode(question, pictures, room)
        except DataError as error:
            raise _refused(error) from error
        except TextTooLong as error:
            raise self._unheld(str(error)) from None
        if room is not None and len(tokens) > room:
            raise self._unheld(f"{len(tokens)} tokens")
        return short, tokens

    def _unheld(self, has: str) -> JudgeError:
        return JudgeError(
            f"the question has {has}, and with max_new_tokens ({self._params.max_new_tokens}) more than the {self._limit} of the "
            "judge's context",
            fix="Shorten the judge's template, or use a judge with a longer context",
        )
