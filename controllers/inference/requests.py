"""Responses and scores from engines: wait for an engine with the right weights, send the request, and retry at another
engine if that one is lost, or if the request waits there while another engine has capacity. Requests are counted by
result, with latency and tokens.

`controllers.inference.pool` manages the engines and their versions.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
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
from gcore.rollout.api import Engine, ProgressCallback, SamplingParams
from gcore.system.clock import Clock, retry_delay
from gcore.types import Sample, ServingPool, Version

T = TypeVar("T")


async def count_request(
    request: Awaitable[T],
    metrics: Metrics,
    clock: Clock,
    pool: ServingPool,
    samples_of: Callable[[T], Sequence[Sample]],
) -> T:
    """Await `request` and count it. Raises what it raises. `samples_of`: returns its responses; empty for a
    classifier's scores.

    Answers of judges are not counted as samples; the judge counts their tokens.
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
            metrics.generated_tokens.inc(sum(len(sample.token_ids) for sample in samples))
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
    """A request for `count` responses that an engine has. `owing`: its outstanding work. `ended`: places of responses
    whose end was reported. `taken_back`: when the engine was asked to return it, so that another can continue it."""

    count: int
    owing: OutstandingWork
    ended: set[int] = field(default_factory=set)
    taken_back: float | None = None

    @property
    def left(self) -> int:
        """Number of outstanding responses."""
        return self.count - len(self.ended)


@dataclass
class EngineConnection:
    """A connection to one engine, and the known state of the engine."""

    client: Engine
    view: EngineView
    in_flight: int = 0
    """Number of outstanding samples or scores, including requests that wait for the engine's weights."""
    owed: float = 0.0
    """The same weighted by expectation: responses, or expected tokens."""
    coming: Version | None = None
    """Version of the weight sync in progress."""
    health: EngineHealth = field(default_factory=lambda: EngineHealth(0.0))
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    """Running requests for responses or scores."""
    asked: dict[str, InFlightRequest] = field(default_factory=dict)
    """Running requests for responses by name, oldest first."""
    probe: asyncio.Task[None] | None = None
    """The last health probe."""
    probed: float = 0.0
    """When it was sent."""
    shut: float | None = None
    """Since when no new requests are routed there, because the plan says that it sleeps."""
    woken: bool = False
    """Whether it has restored its memory and not received its weights yet."""
    waking: float = 0.0
    """Since when it is waking."""

    def take(self, samples: int, owed: float) -> None:
        """Add a request; with negative numbers, remove one."""
        self.in_flight += samples
        # Sums and differences of expected tokens may not cancel exactly.
        self.owed = max(self.owed + owed, 0.0) if self.in_flight else 0.0

    @property
    def busy(self) -> int:
        """Number of outstanding responses or scores."""
        return self.in_flight - sum(len(one.ended) for one in self.asked.values())

    def leave(self) -> None:
        """Make all callers that wait for its responses go to another engine."""
        for request in self.requests:
            request.cancel()

    def distrust(self) -> None:
        """Forget the known state of the engine. It is queried and updated before it is used again."""
        self.view = replace(self.view, version=None)


log = logging.getLogger(__name__)

MOST_FRUITLESS = 8
"""Maximum number of engines in a row that are lost before they report progress; then the kept progress is dropped. A
node has about this many engines, so the last one to die is not the one that reported. A higher limit would let a prompt
that kills engines kill more of them."""

GIVES_BACK_S = 5.0
"""Seconds after which an engine that was asked to return a request, and has not, is assumed to continue it."""


class RequestReturned(EngineUnreachable):
    """The engine has returned a request, because it is put to sleep or another engine continues it."""


class Requests:
    """Sends requests over the connections of a pool, by instance id."""

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
        self._usual = 1.0
        """Assumed work of a response without an expectation: the mean of the last request."""
        self._requests = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        self._unseated = 0

    def unseated(self) -> int:
        """Number of responses or scores that no engine has yet."""
        return self._unseated

    def foreseen(self) -> tuple[float, int]:
        """Expected remaining tokens from engines, and the number of responses with an expectation."""
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
        """Return a sample for each prompt and seed, from an engine that serves `version`
        (`controllers.inference.rules`). Waits for an engine.

        With `follow`, the version is the one wanted when an engine is chosen, and newer versions may generate later
        tokens. Raises EngineError. An engine that does not respond is distrusted. With `decode`, the tokenizer's,
        another engine continues after the reported tokens (`controllers.inference.continuation`), and after the tokens
        kept earlier if the lost engine has reported none: the engines of a node die together. If no token is kept, the
        caller retries the request. `ended` is called with each sample that finishes before the others, by its number,
        unless the responses are short. With an `expect` that weighs, engines are weighed by expected tokens instead of
        samples. `seat`: the engine of the previous turn is preferred, and the chosen engine is stored there.
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
        """Return all responses. Kept tokens are counted now, once, because they reach the caller."""
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
        """Generate with one engine. Raises EngineError."""
        owing = OutstandingWork(len(seeds), expect, self._usual)
        self._usual = owing.each
        seat = Affinity() if seat is None else seat
        wanted = follow.wanted if follow is not None else lambda: version
        instance, connection = await self._seat(wanted, len(seeds), owing.tokens, seat.instance)
        seat.instance = instance
        if follow is not None:
            assert connection.view.version is not None
            version = connection.view.version
            follow.began(version)
        # Request names are unique: an abort of a cancelled request must not end its retry.
        rid = f"{rid}/{next(self._requests)}"
        asked = connection.asked[rid] = InFlightRequest(len(seeds), owing)
        heard = growing
        if growing is not None:
            heard = ProgressCallback(
                growing.every, self._note_tokens(connection, asked, owing, growing, version, newer=follow is not None)
            )
        request = connection.client.generate_each(prompts, params, seeds=seeds, rid=rid, growing=heard)
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

    async def classify(self, version: Version, questions: Sequence[tuple[int, ...]], rid: str) -> tuple[float, ...]:
        """Return the scores of a classifier that serves `version` for `questions`, with one request. Waits for an
        engine.

        Raises EngineError. An engine that does not respond is distrusted, and the caller retries the request.
        """
        owing = OutstandingWork(len(questions), None, self._usual)
        instance, connection = await self._seat(lambda: version, len(questions), owing.tokens, None)
        rid = f"{rid}/{next(self._requests)}"
        request = connection.client.classify(questions, rid=rid)
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
        """Await a `request` for `count` responses or scores that was assigned to an engine, then release its place.
        Raises EngineError."""
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
        """Return a callback that forwards progress of samples of `version` to `growing`. Any progress shows that the
        engine is alive."""

        def tell(place: int, sample: Sample) -> None:
            connection.health = connection.health.answers(self._clock.monotonic())
            connection.take(0, owing.hears(place, sample))
            if sample.finish_reason != "abort":
                asked.ended.add(place)
            if not _others((sample,), version, newer=newer):
                growing.tell(place, sample)

        return tell

    async def _await_answer(self, instance: str, connection: EngineConnection, request: Coroutine[Any, Any, T]) -> T:
        """Await `request`. Raises EngineUnreachable if the engine is left meanwhile."""
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
        self, wanted: Callable[[], Version], size: int, owed: float, last: str | None
    ) -> tuple[str, EngineConnection]:
        """Choose an engine that serves the wanted version, and count a request of `size` there. The caller removes
        it."""
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
                instance = choose_engine(self._loads(version), owed, held[0] if held is not None else None, last)
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
        """Return requests that wait while another engine has capacity (`controllers.inference.rules`). `rows`:
        concurrent responses per engine. While a request is being moved, no other is taken."""
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

    def _loads(self, version: Version) -> list[RouteCandidate]:
        return [
            RouteCandidate(instance, connection.owed, connection.view.version == version)
            for instance, connection in self._connections.items()
            if version in (connection.view.version, connection.coming) and connection.shut is None
        ]

    def _abandon(self, connection: EngineConnection, rid: str, count: int) -> None:
        """The caller has cancelled: abort the request at the engine, in the background and best-effort."""

        async def abort() -> None:
            try:
                await connection.client.abort(rid, count)
            except EngineError as error:
                log.debug("abort %s: %s", rid, error)

        task = asyncio.get_running_loop().create_task(abort(), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def distrust(self, instance: str) -> None:
        """Forget the known state of the engine. It is queried and updated before it is used again."""
        if instance in self._connections:
            self._connections[instance].distrust()
            self._changes.notify()


def _queue(instance: str, connection: EngineConnection) -> EngineQueue:
    there = tuple((rid, one.left) for rid, one in connection.asked.items() if one.taken_back is None and one.left)
    return EngineQueue(instance, connection.busy, there)


def _grown(
    responses: PartialResponses, ended: Callable[[int, Sample], None] | None, place: int, sample: Sample
) -> None:
    """Record progress of the response at this place of the request; ignore reports after its end."""
    if responses.has_ended(place):
        return
    number, whole = responses.grow(place, sample)
    if ended is not None and whole is not None:
        ended(number, whole)


def _others(samples: Sequence[Sample], version: Version, *, newer: bool) -> set[Version]:
    """Return the other versions that generated tokens of `samples`. `newer`: newer versions are allowed."""
    made = {span.version for sample in samples for span in sample.spans}
    return {one for one in made if one < version or (one != version and not newer)}
