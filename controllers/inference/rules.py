"""Rules for engines: which engine gets a request, how outstanding work is counted, when requests move to another
engine, and when an engine counts as unhealthy.

Health follows from responses, not from whether the process is alive. Any response is a sign of life, also one to a
probe. An engine with outstanding requests is probed when there was no sign of life for `probe_s`. It is silent if there
was none for `silent_s`: its requests go to other engines, and it is used again once it responds. It is hung if there
was none for `watchdog_s`, and is ended; not earlier, because loading a model again may take minutes. An engine that
responds to probes is hung too if two requests in a row time out without a response in between. An engine without
outstanding requests is not probed.

Outstanding work is counted in responses, or in their expected tokens (`rollout.balance`). It decreases as responses
grow and finish. If an engine reports no progress, a request counts in full until it is answered.

Routing: a request goes to the engine with the least outstanding work, among those that serve the wanted weights or are
loading them. If only serving engines were candidates, the first one to be ready in a step would get all requests. A
request that waits for an engine to load its weights moves to a serving engine as soon as that is no busier.

A request with pictures goes to the least busy engine on nodes whose blob stores have them, if that has room for it: first
the node of the controller, later also the nodes of engines that got other requests of the prompt. If none has room, all
engines are candidates. So a picture is copied to another node only if a request would wait otherwise.

Rebalancing: an engine that wakes, starts or is lent later gets the newest requests of other engines, with their tokens,
which it prefills again. A request is moved if it waits in a queue, or if its engine is so much busier that each token
arrives sooner on the other. It never moves to an engine that would then be as busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from gcore.types import Sample, Version


@dataclass(frozen=True, slots=True)
class LengthExpectation:
    """Predicts the length of the responses to a prompt. `left`: returns their remaining tokens together; arguments: the
    lengths of the finished responses, and the tokens so far of the others. `weighs`: whether engines are chosen by it;
    if not, it is only reported."""

    left: Callable[[Sequence[int], Sequence[int]], float]
    weighs: bool = True


class OutstandingWork:
    """The outstanding work of one request for `count` responses: expected tokens if `expect` weighs, else `usual` per
    response. Mutable."""

    def __init__(self, count: int, expect: LengthExpectation | None, usual: float) -> None:
        self._expect = expect
        self._weighs = expect is not None and expect.weighs
        self._growing = dict.fromkeys(range(count), 0)
        self._finished: list[int] = []
        self.tokens = self._now() if self._weighs else usual * count
        """The present outstanding work."""
        self.each = self.tokens / count if count and self.tokens > 0 else usual
        """The work of one response at the beginning."""

    def hears(self, place: int, sample: Sample) -> float:
        """Record the reported progress of the response at index `place`. Return by how much the outstanding work
        changed."""
        if self._expect is None or place not in self._growing:
            return 0.0
        self._growing[place] = len(sample.token_ids)
        if sample.finish_reason != "abort":
            self._finished.append(self._growing.pop(place))
        if not self._weighs:
            return 0.0
        before, self.tokens = self.tokens, self._now()
        return self.tokens - before

    def foreseen(self) -> tuple[float, int]:
        """Return the predicted remaining tokens of the unfinished responses, and their number; zeros without a
        prediction."""
        return (self._now(), len(self._growing)) if self._expect is not None else (0.0, 0)

    def _now(self) -> float:
        assert self._expect is not None
        return self._expect.left(self._finished, tuple(self._growing.values()))


PROBES = 3
"""Number of probes that are sent before an engine without a sign of life counts as silent."""

SILENT_PROBE_S = 1.0
"""Seconds between two probes of a silent engine."""

LEFT_S = 30.0
"""An engine that is neither awake nor asleep for this long is ended: the controller that was changing it has died."""

WHOLE_TIME = 0.9
"""A request that failed after at least this share of its timeout counts as timed out. If it failed sooner, the engine
refused it or died."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Timeouts by which the health of engines is judged, in seconds."""

    silent_s: float = 30.0
    """Time without a sign of life after which a busy engine is silent."""
    watchdog_s: float = 120.0
    """Time without a sign of life after which an engine is hung."""
    request_s: float = 120.0
    """Maximum wait for the response to one request."""

    @property
    def probe_s(self) -> float:
        """Seconds between two probes of a busy engine, and maximum wait for the response to a probe."""
        return self.silent_s / PROBES


class HealthState(Enum):
    """Health of an engine: responding; not responding, and avoided; to be ended."""

    WELL = "well"
    SILENT = "silent"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What was observed of one engine. Immutable: each method returns the new observations. Times in monotonic seconds.

    `sign`: time of its last response, or of the start of its present work. `silent`: whether it counts as silent.
    `ran_out`: time of the first timeout of a request since its last response. `stuck`: a request that started after
    that timed out too. `unknown`: since when it is unknown whether the engine has its memory. `lost`: this lasted for
    `LEFT_S`.
    """

    sign: float
    silent: bool = False
    ran_out: float | None = None
    stuck: bool = False
    unknown: float | None = None
    lost: bool = False

    def loses_memory(self, now: float) -> EngineHealth:
        """Record that the engine was found neither awake nor asleep. Another controller may be changing it; after
        `LEFT_S` it counts as abandoned."""
        since = now if self.unknown is None else self.unknown
        return replace(self, unknown=since, lost=self.lost or now - since >= LEFT_S)

    def begins(self, now: float) -> EngineHealth:
        """Record that the engine gets work after it had none. The time without work does not count as silence."""
        return self if self.silent else replace(self, sign=now)

    def answers(self, now: float) -> EngineHealth:
        """Record a sign of life other than the answer to a request for responses."""
        return replace(self, sign=now, silent=False)

    def responds(self, now: float) -> EngineHealth:
        """Record that the engine has answered a request for responses or scores; this clears all earlier
        observations."""
        return EngineHealth(now)

    def fails(self, patience: HealthLimits, begun: float, now: float) -> EngineHealth:
        """Record that a request for responses, started at `begun`, has failed. It matters only if it timed out."""
        if now - begun < WHOLE_TIME * patience.request_s:
            return self
        if self.ran_out is None:
            return replace(self, ran_out=now)
        return replace(self, stuck=self.stuck or begun >= self.ran_out)

    def in_vain(self, asked: float) -> EngineHealth:
        """Record that another request (such as a weight sync), sent at `asked`, was not answered: the engine is silent
        until it responds."""
        return self if self.silent else replace(self, sign=max(self.sign, asked), silent=True)

    def look(self, patience: HealthLimits, now: float, *, busy: bool) -> EngineHealth:
        """Check for silence at the time `now`. `busy`: whether the engine has requests for responses."""
        return replace(self, silent=True) if busy and now - self.sign >= patience.silent_s else self

    def wants_probe(self, patience: HealthLimits, now: float, probed: float, *, busy: bool) -> bool:
        """Whether a probe should be sent now. `probed`: time of the last one. `busy`: whether the engine has
        requests."""
        if self.silent:
            return now - probed >= min(SILENT_PROBE_S, patience.probe_s)
        return busy and now - max(self.sign, probed) >= patience.probe_s

    def verdict(self, patience: HealthLimits, now: float) -> HealthState:
        """Return the engine's health at the time `now`."""
        if self.stuck or self.lost or (self.silent and now - self.sign >= patience.watchdog_s):
            return HealthState.HUNG
        return HealthState.SILENT if self.silent else HealthState.WELL

    def why(self, patience: HealthLimits, now: float) -> str:
        """Return what is wrong with the engine, as the end of a sentence; empty if nothing is, or if it may just have
        died, which is reported elsewhere."""
        if self.stuck:
            return f"responds, but two requests in a row timed out after {patience.request_s:g} s; the node ends it and starts another"
        if self.lost:
            return f"was between asleep and awake for {LEFT_S:g} s; the node ends it and starts another"
        if self.verdict(patience, now) is HealthState.HUNG:
            return f"has not responded for {patience.watchdog_s:g} s; the node ends it and starts another"
        if self.silent and now - self.sign >= patience.silent_s:
            return f"has not responded for {patience.silent_s:g} s; its requests go to other engines, and it is probed"
        return ""


CROWDED, TIMES = 0.25, 2
"""An engine gives running requests away if it has at least `CROWDED` of its capacity, and afterwards still has at least
`TIMES` as many as the other."""

FILLED = 2
"""An engine with capacity gets requests until it has this many times its capacity, if others have even more, because
rebalancing runs only now and then."""


@dataclass(frozen=True, slots=True)
class EngineQueue:
    """Requests of an engine. `busy`: unfinished responses. `requests`: those that may be moved, as (name, number of
    unfinished responses), oldest first."""

    instance: str
    busy: int
    requests: tuple[tuple[str, int], ...]


def requests_to_move(queues: Sequence[EngineQueue], rows: int) -> list[tuple[str, str]]:
    """Choose the requests that engines with the same weights should return, so that less busy engines continue them.
    Return (engine, request) pairs. `rows`: concurrent responses per engine."""
    busy = {queue.instance: queue.busy for queue in queues}
    left = {queue.instance: list(queue.requests) for queue in queues}
    found: list[tuple[str, str]] = []
    hungry = [name for name in busy if busy[name] < rows]
    while hungry:
        least = min(hungry, key=lambda name: (busy[name], name))
        giver = _giver(busy, left, least, rows)
        if busy[least] >= FILLED * rows or giver is None:
            break
        name, count = left[giver].pop()
        busy[giver] -= count
        busy[least] += count
        found.append((giver, name))
    return found


def _giver(busy: dict[str, int], left: dict[str, list[tuple[str, int]]], taker: str, rows: int) -> str | None:
    """Return the busiest engine whose newest request should move to `taker`; None if there is none."""
    for name in sorted(left, key=lambda name: (-busy[name], name)):
        if not left[name]:
            continue
        count = left[name][-1][1]
        keeps, gets = busy[name] - count, busy[taker] + count
        waits = keeps >= max(rows, gets)
        crowds = busy[name] >= CROWDED * rows and keeps >= TIMES * gets
        if waits or crowds:
            return name
    return None


@dataclass(frozen=True, slots=True)
class VersionFollower:
    """Rule by which a request continues across weight syncs. `wanted`: returns the version that an engine must serve to
    start the request. `began`: called with the version that starts it."""

    wanted: Callable[[], Version]
    began: Callable[[Version], None]


@dataclass(slots=True)
class Affinity:
    """The engine of the last turn of a multi-turn response (mutable). The next turn goes there if that engine serves,
    because it has the preceding tokens in its KV cache."""

    instance: str | None = None


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """An engine that could get a request. `owed`: its outstanding work, including waiting requests."""

    instance: str
    owed: float
    serving: bool
    """Whether it serves the wanted weights; if not, it is loading them."""
    near: bool = True
    """Whether the blob store of its node has the request's pictures; true for a request without pictures."""
    room: bool = False
    """Whether it has room for the request beside its other ones."""


def choose_engine(
    loads: Sequence[RouteCandidate], size: float, held: str | None = None, last: str | None = None
) -> str | None:
    """Choose the engine for a request with `size` outstanding work; None if there is none.

    `held`: the engine for which the request already waits, and whose work includes it. `last`: the engine of the
    previous turn, which is preferred however busy it is.
    """
    by_name = {load.instance: load for load in loads}
    if last is not None and last in by_name and by_name[last].serving:
        return last
    own = by_name.get(held) if held is not None else None
    if own is not None:
        if own.serving:
            return own.instance
        others = [load for load in loads if load.serving and load.owed + size <= own.owed]
        return min(_preferred(others), key=_busy).instance if others else own.instance
    return min(_preferred(loads), key=_busy).instance if loads else None


def _preferred(loads: Sequence[RouteCandidate]) -> Sequence[RouteCandidate]:
    """The engines among which the least busy one gets a request: those near its pictures that have room for it, if others
    are not near; all engines if there are none of these."""
    if all(load.near for load in loads):
        return loads
    return [load for load in loads if load.near and load.room] or loads


def _busy(load: RouteCandidate) -> tuple[float, bool, str]:
    return (load.owed, not load.serving, load.instance)
