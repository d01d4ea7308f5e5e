"""Rules for engines: routing of requests, outstanding work, moving requests to another engine, and health.

Health is determined by responses, not by whether a process lives. Any response is a sign of life, also one to a probe
(`probe_s` after the last one). An engine that owes responses and gives no sign for `silent_s` is silent: its requests
go to other engines, and it is used again once it responds. An engine that was silent for `watchdog_s` in total is hung
and is ended; not earlier, because loading a model again may take minutes. An engine that gives signs, but of which two
requests in a row timed out without a response in between, is hung too. An engine that owes nothing is not probed.

Outstanding work is counted in responses, or in the tokens expected of them (`rollout.balance`), in units of one
request, so that both kinds can be added. It decreases as responses grow and finish. If an engine reports no progress,
all of a request is outstanding until it responds.

Routing: to the engine with the least outstanding work, among those that serve the wanted weights or are being updated
to them. Otherwise the first engine to be ready in a step would get the whole step. A request at an engine that is still
being updated moves to a serving engine as soon as that is no busier.

Rebalancing: an engine that wakes, starts or is lent later gets the newest requests of other engines, with their tokens,
which it prefills again. This is worth it for waiting requests, or if an engine is so much busier that each token
arrives sooner elsewhere. No engine gives requests to one that is as busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from gcore.types import Sample, Version


@dataclass(frozen=True, slots=True)
class LengthExpectation:
    """Expectation for responses to a prompt. `left`: remaining tokens, from the lengths of finished responses and the
    tokens of the others. `weighs`: whether engines are weighed by it, or it is only reported."""

    left: Callable[[Sequence[int], Sequence[int]], float]
    weighs: bool = True


class OutstandingWork:
    """The outstanding work of one request of `count` responses. Mutable."""

    def __init__(self, count: int, expect: LengthExpectation | None, usual: float) -> None:
        self._expect = expect
        self._weighs = expect is not None and expect.weighs
        self._growing = dict.fromkeys(range(count), 0)
        self._finished: list[int] = []
        self.tokens = self._now() if self._weighs else usual * count
        """Expected tokens; or responses, each counting 1."""
        self.each = self.tokens / count if count and self.tokens > 0 else usual
        """Initial work of one response."""

    def hears(self, place: int, sample: Sample) -> float:
        """Record reported progress of one response. Return the change of the outstanding work."""
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
        """Expected remaining tokens, and the number of responses with an expectation."""
        return (self._now(), len(self._growing)) if self._expect is not None else (0.0, 0)

    def _now(self) -> float:
        assert self._expect is not None
        return self._expect.left(self._finished, tuple(self._growing.values()))


PROBES = 3
"""Number of probes within the time after which an engine is silent."""

SILENT_PROBE_S = 1.0
"""Seconds between two probes of a silent engine."""

LEFT_S = 30.0
"""Seconds after which an engine between awake and asleep counts as abandoned: its controller died during the change."""

WHOLE_TIME = 0.9
"""Share of the timeout from which a failed request counts as timed out. If it failed sooner, the engine refused it or
died."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Timeouts in seconds."""

    silent_s: float = 30.0
    watchdog_s: float = 120.0
    request_s: float = 120.0
    """Maximum wait for the response to one request."""

    @property
    def probe_s(self) -> float:
        """Seconds between two probes, and maximum wait for the response to one."""
        return self.silent_s / PROBES


class HealthState(Enum):
    """Health of an engine."""

    WELL = "well"
    SILENT = "silent"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Observations of one engine; monotonic seconds.

    `sign`: its last response, or the start of its present work. `silent`: since when it counts as silent. `ran_out`:
    first timeout of a request since its last response. `stuck`: a request that started later timed out too. `unknown`:
    since when it is unknown whether the engine has its memory. `lost`: this lasted for `LEFT_S`.
    """

    sign: float
    silent: bool = False
    ran_out: float | None = None
    stuck: bool = False
    unknown: float | None = None
    lost: bool = False

    def loses_memory(self, now: float) -> EngineHealth:
        """The engine was found between awake and asleep. Another controller may be changing it; after `LEFT_S` it
        counts as abandoned."""
        since = now if self.unknown is None else self.unknown
        return replace(self, unknown=since, lost=self.lost or now - since >= LEFT_S)

    def begins(self, now: float) -> EngineHealth:
        """It gets work after it had none. For a silent engine this is not a sign of life."""
        return self if self.silent else replace(self, sign=now)

    def answers(self, now: float) -> EngineHealth:
        """It has responded, but not with generated tokens."""
        return replace(self, sign=now, silent=False)

    def responds(self, now: float) -> EngineHealth:
        """It has generated responses."""
        return EngineHealth(now)

    def fails(self, patience: HealthLimits, begun: float, now: float) -> EngineHealth:
        """A request for responses that started at `begun` has failed."""
        if now - begun < WHOLE_TIME * patience.request_s:
            return self
        if self.ran_out is None:
            return replace(self, ran_out=now)
        return replace(self, stuck=self.stuck or begun >= self.ran_out)

    def in_vain(self, asked: float) -> EngineHealth:
        """A request at `asked` that was not for responses was not answered: until the engine responds, it owes
        something."""
        return self if self.silent else replace(self, sign=max(self.sign, asked), silent=True)

    def look(self, patience: HealthLimits, now: float, *, busy: bool) -> EngineHealth:
        """Return the updated health: silent if that is detected now. `busy`: whether it has requests for responses."""
        return replace(self, silent=True) if busy and now - self.sign >= patience.silent_s else self

    def wants_probe(self, patience: HealthLimits, now: float, probed: float, *, busy: bool) -> bool:
        """Whether a probe is due. `probed`: time of the last one."""
        if self.silent:
            return now - probed >= min(SILENT_PROBE_S, patience.probe_s)
        return busy and now - max(self.sign, probed) >= patience.probe_s

    def verdict(self, patience: HealthLimits, now: float) -> HealthState:
        """Return its health at `now`."""
        if self.stuck or self.lost or (self.silent and now - self.sign >= patience.watchdog_s):
            return HealthState.HUNG
        return HealthState.SILENT if self.silent else HealthState.WELL

    def why(self, patience: HealthLimits, now: float) -> str:
        """Explain what is wrong with it. Empty for an engine that may just have died, which other observers report."""
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
"""An engine that runs at least this share of its capacity gives running requests away, while it keeps this many times
the requests of the other."""

FILLED = 2
"""An engine with capacity gets up to this many times what it runs at once, if others have that much more, because
rebalancing runs only now and then."""


@dataclass(frozen=True, slots=True)
class EngineQueue:
    """Queue of an engine. `busy`: outstanding responses. `requests`: those that may be taken back, by name and
    responses, oldest first."""

    instance: str
    busy: int
    requests: tuple[tuple[str, int], ...]


def requests_to_move(queues: Sequence[EngineQueue], rows: int) -> list[tuple[str, str]]:
    """Choose requests to move between engines that serve the same version: (engine, request), in order. `rows`:
    concurrent responses per engine."""
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
    """Return the busiest engine whose newest request is worth moving."""
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
    """How a request survives weight updates: it starts with the version `wanted` at that time, and calls `began` with
    it."""

    wanted: Callable[[], Version]
    began: Callable[[Version], None]


@dataclass(slots=True)
class Affinity:
    """Engine of a multi-turn response. The next turn goes to the engine of the last one, which has the preceding tokens
    in its cache, as long as that engine serves."""

    instance: str | None = None


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """An engine as seen by a request. `owed`: its outstanding work, including waiting requests."""

    instance: str
    owed: float
    serving: bool
    """Whether it serves the version; otherwise it is being updated to it."""


def choose_engine(
    loads: Sequence[RouteCandidate], size: float, held: str | None = None, last: str | None = None
) -> str | None:
    """Choose the engine for a request of `size`; None if there is none.

    `held`: the engine where the request already waits and is counted. `last`: the engine of the previous turn,
    preferred however busy it is.
    """
    by_name = {load.instance: load for load in loads}
    if last is not None and last in by_name and by_name[last].serving:
        return last
    own = by_name.get(held) if held is not None else None
    if own is not None:
        if own.serving:
            return own.instance
        others = [load for load in loads if load.serving and load.owed + size <= own.owed]
        return min(others, key=_busy).instance if others else own.instance
    return min(loads, key=_busy).instance if loads else None


def _busy(load: RouteCandidate) -> tuple[float, bool, str]:
    return (load.owed, not load.serving, load.instance)
