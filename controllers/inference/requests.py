"""Responses and scores from engines: wait for an engine that serves the right weights, send the request, and repeat it at another engine when
that one is lost, or when the request waits there while another has room. Requests are counted by result, with their latency and tokens.

`controllers.inference.pool` says which engines there are, and what they serve.
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
    """What `request` brings. Raises what it raises. `samples_of`: the responses in it; a classifier's scores are none.

    What judges write is no sample; their tokens are counted by the judge.
    """
    metrics.engine_open.labels(pool).inc()
    begun, result = clock.monotonic(), "aborted"  # also of one that whoever asked gives up
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
    """A request for `count` responses that the engine has. `owing`: what it owes of it; `ended`: the places of those that it has told the
    end of; `taken_back`: when it was told to give it back, so that another can go on with it."""

    count: int
    owing: OutstandingWork
    ended: set[int] = field(default_factory=set)
    taken_back: float | None = None

    @property
    def left(self) -> int:
        """Responses that are still to come."""
        return self.count - len(self.ended)


@dataclass
class EngineConnection:
    """A connection to one engine, and what is known of the engine."""

    client: Engine
    view: EngineView
    in_flight: int = 0
    """Samples (or scores) asked for and not answered, with those that wait for its weights."""
    owed: float = 0.0
    """The same as what it is taken for: responses, or tokens that are expected."""
    coming: Version | None = None
    """What it is being brought to."""
    health: EngineHealth = field(default_factory=lambda: EngineHealth(0.0))
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    """For responses or scores, under way."""
    asked: dict[str, InFlightRequest] = field(default_factory=dict)
    """Those for responses, by name, the oldest first."""
    probe: asyncio.Task[None] | None = None
    """The last question how it is."""
    probed: float = 0.0
    """When it was put."""
    shut: float | None = None
    """Since when nothing new goes there, because the plan says that it sleeps."""
    woken: bool = False
    """Whether it has its memory again and has not been brought its weights yet."""
    waking: float = 0.0
    """Since when it is being woken."""

    def take(self, samples: int, owed: float) -> None:
        """A request more; or, with negative numbers, one less."""
        self.in_flight += samples
        # Of tokens that were expected, sums and differences need not come back to nothing.
        self.owed = max(self.owed + owed, 0.0) if self.in_flight else 0.0

    @property
    def busy(self) -> int:
        """Responses (or scores) that it has still to bring."""
        return self.in_flight - sum(len(one.ended) for one in self.asked.values())

    def leave(self) -> None:
        """Whoever waits for its responses goes to another."""
        for request in self.requests:
            request.cancel()

    def distrust(self) -> None:
        """Nothing is known of the engine any more; it is asked, and brought up to date, before it is used again."""
        self.view = replace(self.view, version=None)


log = logging.getLogger(__name__)

MOST_FRUITLESS = 8
"""Engines in a row that are lost before they tell anything; then what others had told is given up. A node has so many: the
last of them to die is not the one that told. More would let a prompt that kills engines kill more of them."""

GIVES_BACK_S = 5.0
"""An engine that was told to give a request back, and has not, is taken to go on with it."""


class RequestReturned(EngineUnreachable):
    """The engine has given back what it had, for it is put to sleep, or another is to go on."""


class Requests:
    """Over the connections that a pool keeps, by instance id."""

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
        """What a response is taken for of which nothing is expected: as much as one of the last request."""
        self._requests = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        self._unseated = 0

    def unseated(self) -> int:
        """The number of responses, or scores, that no engine has yet."""
        return self._unseated

    def foreseen(self) -> tuple[float, int]:
        """Tokens that are expected to come yet from engines, and of how many responses."""
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
        """A sample for each prompt and its seed, on an engine that serves `version` (`controllers.inference.rules`); waits for one.

        With `follow` it is whichever version is wanted when there is a seat, and tokens of newer ones may come after.
        Raises EngineError. An engine that does not answer is distrusted. With `decode`, the tokenizer's, another goes on with
        what that one has told (`controllers.inference.continuation`), and with what was kept before, when that one has told nothing: the
        engines of a node die together. If nothing is kept at all, the request is for the caller to repeat.
        `ended` is told of each sample that is finished before the others, by its number, unless they are short anyway.
        With an `expect` that weighs, engines are weighed by the tokens that they are expected to make, in place of samples. `seat`: the engine of
        the turn before goes first, and whichever it is then is written there.
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
                log.info("%s; %d tokens are kept", error, responses.keep())
                if responses.is_whole:
                    return self._outlived(responses, ())
            except EngineUnreachable as error:
                kept = responses.keep()
                fruitless = 0 if kept else fruitless + 1
                if not responses.kept or fruitless >= MOST_FRUITLESS:
                    raise
                log.warning("%s; %d tokens that it had told are kept, %d in all", error, kept, responses.kept)
                if responses.is_whole:
                    return self._outlived(responses, ())
                if fruitless:
                    await self._clock.sleep(retry_delay(fruitless))
            else:
                return self._outlived(responses, made)

    def _outlived(self, responses: PartialResponses, made: Sequence[Sample]) -> tuple[Sample, ...]:
        """All of them. What was kept counts now that somebody gets it, and once."""
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
        """By one engine. Raises EngineError."""
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
        # No two requests are called the same: an abort of one that was given up must not end the one that repeats it.
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
            why = "is put to sleep" if connection.shut is not None else "had it waiting"
            raise RequestReturned(f"{instance} {why}", fix="The request goes on elsewhere")
        if others := _others(samples, version, newer=follow is not None):
            # A peer that also believed it to be its own has published to it.
            self.distrust(instance)
            made_by = ", ".join(map(str, sorted(others)))
            raise EngineError(f"{instance} answered with weights {made_by}, not {version}", fix="It is asked again")
        return samples

    async def classify(self, version: Version, questions: Sequence[tuple[int, ...]], rid: str) -> tuple[float, ...]:
        """What a classifier that serves `version` gives for each of `questions`, by one request; waits for an engine.

        Raises EngineError. An engine that does not answer is distrusted, and the request is for the caller to repeat.
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
        """What a seated `request` for `count` responses or scores brings; then its seat is free. Raises EngineError."""
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
        """Tells `growing` of samples that `version` makes. Whoever tells lives, whatever it tells."""

        def tell(place: int, sample: Sample) -> None:
            connection.health = connection.health.answers(self._clock.monotonic())
            connection.take(0, owing.hears(place, sample))
            if sample.finish_reason != "abort":
                asked.ended.add(place)
            if not _others((sample,), version, newer=newer):
                growing.tell(place, sample)

        return tell

    async def _await_answer(self, instance: str, connection: EngineConnection, request: Coroutine[Any, Any, T]) -> T:
        """What `request` brings. Raises EngineUnreachable when the engine is left meanwhile."""
        task = asyncio.create_task(request, name=f"ask {instance}")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # heard, if nobody waits any more
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
            raise EngineUnreachable(f"{instance} is left, for it answers nothing", fix="The request goes to another")
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
        """An engine that serves what is wanted; a request of `size` is counted there, for the caller to take away."""
        held: tuple[str, EngineConnection] | None = None
        self._unseated += size
        try:
            while True:
                version = wanted()
                known = self._connections.get(held[0]) if held is not None else None
                if held is not None and known is not held[1]:
                    held = None  # it has gone, or another has its name
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
        """Take requests back that wait while another engine has room (`controllers.inference.rules`). `rows`: responses that one runs at
        once. While any is on its way nothing more is taken."""
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
        """The caller gave up: let the engine give up too. In the background, and as far as it goes."""

        async def abort() -> None:
            try:
                await connection.client.abort(rid, count)
            except EngineError as error:
                log.debug("abort %s: %s", rid, error)

        task = asyncio.get_running_loop().create_task(abort(), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def distrust(self, instance: str) -> None:
        """Nothing is known of the engine any more; it is asked, and brought up to date, before it is used again."""
        if instance in self._connections:
            self._connections[instance].distrust()
            self._changes.notify()


def _queue(instance: str, connection: EngineConnection) -> EngineQueue:
    there = tuple((rid, one.left) for rid, one in connection.asked.items() if one.taken_back is None and one.left)
    return EngineQueue(instance, connection.busy, there)


def _grown(
    responses: PartialResponses, ended: Callable[[int, Sample], None] | None, place: int, sample: Sample
) -> None:
    """An engine tells of the response in that place of what it was asked; after its end, nothing more."""
    if responses.has_ended(place):
        return
    number, whole = responses.grow(place, sample)
    if ended is not None and whole is not None:
        ended(number, whole)


def _others(samples: Sequence[Sample], version: Version, *, newer: bool) -> set[Version]:
    """What made tokens of `samples` though `version` was asked for; `newer`: what is newer may have made some."""
    made = {span.version for sample in samples for span in sample.spans}
    return {one for one in made if one < version or (one != version and not newer)}
