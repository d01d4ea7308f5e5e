"""Requests to engines, for responses or classifier scores: wait for an engine with the right weights, send the request,
and retry it on another engine if that one is lost, or if the request waits there while another engine has capacity.
Metrics count requests by result, latency and tokens.

`controllers.inference.pool` manages the engines and their weights.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from controllers.changes import ChangeSignal
from controllers.inference.continuation import FEWEST, Decode, PartialResponses, progress_interval
from controllers.inference.rules import (
    Affinity,
    EngineHealth,
    EngineQueue,
    HealthLimits,
    LengthExpectation,
    OutstandingWork,
    RouteCandidate,
    VersionFollower,
    choose_engine,
    requests_to_move,
)
from controllers.rules.view import EngineView
from gcore.errors import EngineError, EngineGaveUp, EngineUnreachable
from gcore.observability.metrics import Metrics
from gcore.rollout.api import Engine, ProgressCallback, RequestPictures, SamplingParams
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import gather_or_cancel
from gcore.types import Sample, ServingPool, Version

T = TypeVar("T")


async def count_request(
    request: Awaitable[T],
    metrics: Metrics,
    clock: Clock,
    pool: ServingPool,
    samples_of: Callable[[T], Sequence[Sample]],
) -> T:
    """Await `request`, count it in the metrics, and return its result. Raises its exception. `samples_of`: returns the
    responses in its result; none for classifier scores.

    Only responses of rollout count as samples; answers of judges are counted elsewhere.
    """
    metrics.engine_open.labels(pool).inc()
    begun, result = clock.monotonic(), "aborted"  # also if the caller cancels it
    try:
        brought = await request
        samples = samples_of(brought)
        if not any(sample.finish_reason == "abort" for sample in samples):
            result = "ok"
        if pool == "rollout":
            metrics.samples.inc(len(samples))
            metrics.generated_tokens.inc(sum(sample.length for sample in samples))
    except EngineGaveUp:
        raise
    except EngineUnreachable:
        result = "unreachable"
        raise
    except EngineError:
        result = "refused"
        raise
    else:
        return brought
    finally:
        metrics.engine_open.labels(pool).dec()
        metrics.engine_requests.labels(pool, result).inc()
        metrics.engine_seconds.labels(pool).observe(max(clock.monotonic() - begun, 0.0))


@dataclass
class InFlightRequest:
    """A request for `count` responses that was sent to an engine. `owing`: its outstanding work. `ended`: indices of
    the responses whose end was reported. `taken_back`: when the engine was asked to return the request, so that another
    engine can continue it; None: it was not."""

    count: int
    owing: OutstandingWork
    ended: set[int] = field(default_factory=set)
    taken_back: float | None = None

    @property
    def left(self) -> int:
        """Number of responses that are not finished."""
        return self.count - len(self.ended)


@dataclass
class EngineConnection:
    """The connection to one engine, what is known about its state, and the requests that it has."""

    client: Engine
    view: EngineView
    node: str
    in_flight: int = 0
    """Number of responses or scores that were requested and not returned, including requests that wait until the engine
    has the right weights."""
    owed: float = 0.0
    """Outstanding work of these requests: their number, or their expected tokens."""
    coming: Version | None = None
    """Version of the weight sync in progress."""
    health: EngineHealth = field(default_factory=lambda: EngineHealth(0.0))
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks of the running requests for responses or scores."""
    asked: dict[str, InFlightRequest] = field(default_factory=dict)
    """Running requests for responses by request name, oldest first."""
    probe: asyncio.Task[None] | None = None
    """Task of the last health probe."""
    probed: float = 0.0
    """When the last health probe was sent."""
    shut: float | None = None
    """Since when it gets no new requests because it is about to sleep; None: it gets requests."""
    woken: bool = False
    """Whether it was woken and has not got its weights yet."""
    waking: float = 0.0
    """When its last wake began."""

    def take(self, samples: int, owed: float) -> None:
        """Count a request of `samples` responses with `owed` outstanding work; with negative numbers, remove one."""
        self.in_flight += samples
        # Sums and differences of expected tokens may not cancel exactly.
        self.owed = max(self.owed + owed, 0.0) if self.in_flight else 0.0

    @property
    def busy(self) -> int:
        """Number of requested responses or scores that are not finished."""
        return self.in_flight - sum(len(one.ended) for one in self.asked.values())

    def leave(self) -> None:
        """Cancel all requests to this engine; their callers retry them on another engine."""
        for request in self.requests:
            request.cancel()

    def distrust(self) -> None:
        """Forget which weights the engine has. It is asked, and updated if necessary, before it is used again."""
        self.view = replace(self.view, version=None)


log = logging.getLogger(__name__)

MOST_FRUITLESS = 8
"""If this many engines in a row are lost before they report progress of a request, its kept tokens are dropped and the
request fails. The limit is about the number of engines of a node, which die together; with a higher one a prompt that
kills engines would kill more of them."""

GIVES_BACK_S = 5.0
"""An engine that was asked to return a request, and has not done so within these seconds, is assumed to keep it."""


class RequestReturned(EngineUnreachable):
    """Raised when an engine has returned a request unfinished, because it goes to sleep or another engine has capacity.
    The request continues on another engine."""


class Requests:
    """Sends requests to the engines of a pool. `told_every`: tokens between two progress reports of an engine; None:
    chosen by `progress_interval`."""

    def __init__(
        self,
        changes: ChangeSignal,
        clock: Clock,
        patience: HealthLimits,
        metrics: Metrics,
        told_every: int | None,
        pool: ServingPool = "rollout",
    ) -> None:
        self._connections: dict[str, EngineConnection] = {}
        self._changes = changes
        self._clock = clock
        self._patience = patience
        self._metrics = metrics
        self._told_every = told_every
        self.pool = pool
        self.rows: int | None = None
        """Concurrent responses per engine; None: not known."""
        self._usual = 1.0
        """Assumed work of a response whose length is not predicted: that of a response of the last request."""
        self._requests = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        self._unseated = 0

    def unseated(self) -> int:
        """Number of requested responses or scores that no engine has yet."""
        return self._unseated

    def foreseen(self) -> tuple[float, int]:
        """Return the predicted remaining tokens of all responses in progress whose length is predicted, and the number
        of these responses."""
        found = [one.owing.foreseen() for connection in self._connections.values() for one in connection.asked.values()]
        return sum(tokens for tokens, _ in found), sum(count for _, count in found)

    async def generate(
        self,
        version: Version,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        seeds: Sequence[int],
        rid: str,
        follow: VersionFollower | None = None,
        decode: Decode | None = None,
        ended: Callable[[int, Sample], None] | None = None,
        expect: LengthExpectation | None = None,
        seat: Affinity | None = None,
    ) -> tuple[Sample, ...]:
        """Generate one response for each pair of prompt and seed, on one engine that serves the weights `version`. Wait
        for such an engine. Raises EngineError if the request must be retried by the caller.

        `rid`: prefix of the request name. `follow`: determines the version when an engine is chosen, and newer weights
        may generate later tokens. `decode`: of the tokenizer; with it, another engine continues a response after the
        reported tokens if its engine is lost (`controllers.inference.continuation`); without it, or if no token was
        reported, EngineUnreachable is raised. `ended`: called with number and sample of each response that is finished
        before the others, unless the responses are short. `expect`: predicts the lengths of the responses, by which
        engines are chosen. `seat`: engine of the previous turn, which is preferred; the chosen engine is stored there.
        """
        every = progress_interval(params, self._told_every) if decode is not None else 0
        if ended is not None and params.max_new_tokens > FEWEST:
            every = every or params.max_new_tokens
        if decode is None or not every:
            while True:
                try:
                    return await self._generate(version, prompts, params, seeds, rid, follow, None, expect, seat)
                except RequestReturned as error:
                    log.info("%s", error)
        responses = PartialResponses(prompts, params, seeds, decode)
        fruitless = 0
        while True:
            ask = responses.ask()
            growing = ProgressCallback(every, partial(_grown, responses, ended))
            try:
                asked = ask.prompts, ask.params, ask.seeds
                made = await self._generate(version, *asked, rid, follow, growing, expect, seat)
            except RequestReturned as error:
                log.info("%s; kept %d tokens", error, responses.keep())
                if responses.is_whole:
                    return self._outlived(responses, ())
            except EngineUnreachable as error:
                kept = responses.keep()
                fruitless = 0 if kept else fruitless + 1
                if not responses.kept or fruitless >= MOST_FRUITLESS:
                    raise
                log.warning("%s; kept %d tokens that it had reported, %d in total", error, kept, responses.kept)
                if responses.is_whole:
                    return self._outlived(responses, ())
                if fruitless:
                    await self._clock.sleep(retry_delay(fruitless))
            else:
                return self._outlived(responses, made)

    def _outlived(self, responses: PartialResponses, made: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return all complete responses (`made`: those of the last engine). Count the kept tokens in the metrics, once,
        because they reach the caller only now."""
        self._metrics.kept_tokens.inc(responses.kept)
        return responses.whole(made)

    async def _generate(
        self,
        version: Version,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams | Sequence[SamplingParams],
        seeds: Sequence[int],
        rid: str,
        follow: VersionFollower | None,
        growing: ProgressCallback | None,
        expect: LengthExpectation | None,
        seat: Affinity | None,
    ) -> tuple[Sample, ...]:
        """Generate with one engine; parameters as in `generate`. `growing`: called with the reported progress. Raises
        EngineError; RequestReturned if the engine gives the request back."""
        owing = OutstandingWork(len(seeds), expect, self._usual)
        self._usual = owing.each
        seat = Affinity() if seat is None else seat
        wanted = follow.wanted if follow is not None else lambda: version
        each = [params] if isinstance(params, SamplingParams) else params
        near = _nodes_with(one.pictures for one in each)
        instance, connection = await self._seat(wanted, len(seeds), owing.tokens, seat.instance, near)
        seat.instance = instance
        if follow is not None:
            assert connection.view.version is not None
            version = connection.view.version
            follow.began(version)
        # Request names are unique: an abort of a cancelled request must not end its retry.
        rid = f"{rid}/{next(self._requests)}"
        asked = connection.asked[rid] = InFlightRequest(len(seeds), owing)
        callback = growing
        if growing is not None:
            callback = ProgressCallback(
                growing.every, self._note_tokens(connection, asked, owing, growing, version, newer=follow is not None)
            )
        request = _send(connection, prompts, params, seeds, rid, callback)
        samples = await self._finish_request(
            instance, connection, rid, len(seeds), owing, request, lambda samples: samples
        )
        wanted_back = connection.shut is not None or asked.taken_back is not None
        if wanted_back and any(sample.finish_reason == "abort" for sample in samples):
            if growing is not None and not _others(samples, version, newer=follow is not None):
                for place, sample in enumerate(samples):
                    growing.tell(place, sample)
            why = "is put to sleep" if connection.shut is not None else "let the request wait"
            raise RequestReturned(f"{instance} {why}", fix="The request continues at another engine")
        if others := _others(samples, version, newer=follow is not None):
            # Another controller that also believed to own it has updated its weights.
            self.distrust(instance)
            made_by = ", ".join(map(str, sorted(others)))
            raise EngineError(
                f"{instance} answered with weights {made_by}, not {version}", fix="The request is retried"
            )
        return samples

    async def classify(
        self,
        version: Version,
        questions: Sequence[tuple[int, ...]],
        rid: str,
        pictures: Sequence[RequestPictures | None] = (),
    ) -> tuple[float, ...]:
        """Return the score of each question (token IDs) from an engine of a classifier with the weights `version`.
        Sends one request; waits for an engine. Raises EngineError; the caller retries the request. `pictures`: those of
        each question; empty: no question has any.
        """
        owing = OutstandingWork(len(questions), None, self._usual)
        instance, connection = await self._seat(
            lambda: version, len(questions), owing.tokens, None, _nodes_with(pictures)
        )
        rid = f"{rid}/{next(self._requests)}"
        request = _send_questions(connection, questions, rid, pictures)
        return await self._finish_request(instance, connection, rid, len(questions), owing, request, lambda _: ())

    async def _finish_request(
        self,
        instance: str,
        connection: EngineConnection,
        rid: str,
        count: int,
        owing: OutstandingWork,
        request: Coroutine[Any, Any, T],
        samples_of: Callable[[T], Sequence[Sample]],
    ) -> T:
        """Await a request for `count` responses or scores that counts as work of this engine, then remove it from the
        engine's work. Abort it at the engine if the caller is cancelled. Raises EngineError."""
        finished = False
        try:
            asked = self._await_answer(instance, connection, request)
            brought = await count_request(asked, self._metrics, self._clock, self.pool, samples_of)
            finished = True
            return brought
        except EngineUnreachable:
            finished = True
            self.distrust(instance)
            raise
        finally:
            connection.asked.pop(rid, None)
            connection.take(-count, -owing.tokens)
            self._changes.notify()
            if not finished:
                self._abandon(connection, rid, count)

    def _note_tokens(
        self,
        connection: EngineConnection,
        asked: InFlightRequest,
        owing: OutstandingWork,
        growing: ProgressCallback,
        version: Version,
        *,
        newer: bool,
    ) -> Callable[[int, Sample], None]:
        """Return the callback for progress reports of a request: it records a sign of life and the remaining work, and
        forwards samples that only `version` (with `newer`: or newer weights) generated to `growing`."""

        def tell(place: int, sample: Sample) -> None:
            connection.health = connection.health.answers(self._clock.monotonic())
            connection.take(0, owing.hears(place, sample))
            if sample.finish_reason != "abort":
                asked.ended.add(place)
            if not _others((sample,), version, newer=newer):
                growing.tell(place, sample)

        return tell

    async def _await_answer(self, instance: str, connection: EngineConnection, request: Coroutine[Any, Any, T]) -> T:
        """Await `request`, and record what its result says about the engine's health. Raises EngineUnreachable if the
        engine stops responding meanwhile."""
        task = asyncio.create_task(request, name=f"ask {instance}")
        task.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # retrieve the exception if no caller is left
        begun = self._clock.monotonic()
        if not connection.requests:
            connection.health = connection.health.begins(begun)
        connection.requests.add(task)
        try:
            await asyncio.wait({task})
        finally:
            connection.requests.discard(task)
            task.cancel()
        if task.cancelled():
            raise EngineUnreachable(f"{instance} does not respond", fix="The request goes to another engine")
        try:
            brought = task.result()
        except EngineUnreachable:
            connection.health = connection.health.fails(self._patience, begun, self._clock.monotonic())
            raise
        connection.health = connection.health.responds(self._clock.monotonic())
        return brought

    async def _seat(
        self,
        wanted: Callable[[], Version],
        size: int,
        owed: float,
        last: str | None,
        near: Callable[[], Collection[str]] | None = None,
    ) -> tuple[str, EngineConnection]:
        """Wait for an engine with the `wanted` weights, and count a request of `size` responses with `owed` work there;
        the caller removes it. `last`: the engine that is preferred. `near`: returns the nodes whose blob stores have the
        request's pictures; None: it has none. While the chosen engine is still loading the
        weights, the request may move to another one."""
        held: tuple[str, EngineConnection] | None = None
        self._unseated += size
        try:
            while True:
                version = wanted()
                known = self._connections.get(held[0]) if held is not None else None
                if held is not None and known is not held[1]:
                    held = None  # it is gone, or another engine has its name
                elif held is not None and held[1].shut is not None:
                    held[1].take(-size, -owed)
                    held = None
                nodes = None if near is None else near()
                loads = self._loads(version, size, nodes)
                instance = choose_engine(loads, owed, held[0] if held is not None else None, last)
                if instance is not None and (held is None or instance != held[0]):
                    if held is not None:
                        held[1].take(-size, -owed)
                    held = instance, self._connections[instance]
                    held[1].take(size, owed)
                if held is not None and held[1].view.version == version:
                    return held
                await self._changes.wait()
        except BaseException:
            if held is not None:
                held[1].take(-size, -owed)
            raise
        finally:
            self._unseated -= size

    def rebalance(self, rows: int) -> None:
        """Ask engines to return requests that wait there while another engine has capacity
        (`controllers.inference.rules`). `rows`: concurrent responses per engine. Does nothing while an engine has not
        returned an earlier one."""
        now = self._clock.monotonic()
        serving = {
            name: connection
            for name, connection in self._connections.items()
            if connection.view.version is not None
            and not connection.view.silent
            and connection.shut is None
            and connection.coming is None
        }
        asked = [one for connection in serving.values() for one in connection.asked.values()]
        if any(one.taken_back is not None and now < one.taken_back + GIVES_BACK_S for one in asked):
            return
        for version in {connection.view.version for connection in serving.values()}:
            queues = [
                _queue(name, connection) for name, connection in serving.items() if connection.view.version == version
            ]
            for name, rid in requests_to_move(queues, rows):
                request = serving[name].asked[rid]
                request.taken_back = now
                self._abandon(serving[name], rid, request.count)

    def _loads(self, version: Version, size: int, near: Collection[str] | None) -> list[RouteCandidate]:
        """The engines that serve the weights `version` or are loading them, as candidates for a request of `size`
        responses. `near`: the nodes whose blob stores have its pictures; None: it has none."""
        return [
            RouteCandidate(
                instance,
                connection.owed,
                connection.view.version == version,
                near is None or connection.node in near,
                self.rows is not None and connection.busy + size <= self.rows,
            )
            for instance, connection in self._connections.items()
            if version in (connection.view.version, connection.coming) and connection.shut is None
        ]

    def _abandon(self, connection: EngineConnection, rid: str, count: int) -> None:
        """Abort a request at the engine, in the background; errors are ignored."""

        async def abort() -> None:
            try:
                await connection.client.abort(rid, count)
            except EngineError as error:
                log.debug("abort %s: %s", rid, error)

        task = asyncio.get_running_loop().create_task(abort(), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def distrust(self, instance: str) -> None:
        """Forget which weights an engine has. It is asked, and updated if necessary, before it is used again."""
        if instance in self._connections:
            self._connections[instance].distrust()
            self._changes.notify()


async def _send(
    connection: EngineConnection,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams | Sequence[SamplingParams],
    seeds: Sequence[int],
    rid: str,
    growing: ProgressCallback | None,
) -> tuple[Sample, ...]:
    """Send a request to an engine, once the blob store of its node has the request's pictures. Raises EngineError."""
    each = [params] * len(seeds) if isinstance(params, SamplingParams) else params
    if any(one.pictures is not None for one in each):
        there = await _bring_pictures([one.pictures for one in each], connection.node)
        params = [replace(one, pictures=its) for one, its in zip(each, there, strict=True)]
    return await connection.client.generate_each(prompts, params, seeds=seeds, rid=rid, growing=growing)


async def _send_questions(
    connection: EngineConnection,
    questions: Sequence[tuple[int, ...]],
    rid: str,
    pictures: Sequence[RequestPictures | None],
) -> tuple[float, ...]:
    """Send questions to a classifier's engine, once the blob store of its node has their pictures. Raises EngineError."""
    there = await _bring_pictures(pictures, connection.node)
    return await connection.client.classify(questions, rid=rid, pictures=there)


async def _bring_pictures(pictures: Sequence[RequestPictures | None], node: str) -> list[RequestPictures | None]:
    """Let the blob store of an engine's node fetch the pictures of a request, equal ones once; return them with their
    folder there. Raises EngineError."""
    first = {one.media: one for one in pictures if one is not None}
    there = await gather_or_cancel([one.at_node(node) for one in first.values()])
    folders = {one.media: one.folder for one in there}
    return [None if one is None else replace(one, folder=folders[one.media]) for one in pictures]


def _nodes_with(pictures: Iterable[RequestPictures | None]) -> Callable[[], Collection[str]] | None:
    """Return what returns the nodes whose blob stores have all pictures of a request; None if it has none."""
    shown = [one for one in pictures if one is not None]
    return (lambda: frozenset.intersection(*(frozenset(one.nodes()) for one in shown))) if shown else None


def _queue(instance: str, connection: EngineConnection) -> EngineQueue:
    there = tuple((rid, one.left) for rid, one in connection.asked.items() if one.taken_back is None and one.left)
    return EngineQueue(instance, connection.busy, there)


def _grown(
    responses: PartialResponses, ended: Callable[[int, Sample], None] | None, place: int, sample: Sample
) -> None:
    """Record a progress report of the response at `place` of the present request, and call `ended` if it is finished.
    Reports after its end are ignored."""
    if responses.has_ended(place):
        return
    number, whole = responses.grow(place, sample)
    if ended is not None and whole is not None:
        ended(number, whole)


def _others(samples: Sequence[Sample], version: Version, *, newer: bool) -> set[Version]:
    """Return the weight versions other than `version` that generated tokens of `samples`. `newer`: newer ones are
    allowed and not returned."""
    made = {span.version for sample in samples for span in sample.spans}
    return {one for one in made if one < version or (one != version and not newer)}
