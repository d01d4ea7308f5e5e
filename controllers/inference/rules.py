"""Which engine a request goes to, what it still owes, when requests move to another engine, and whether an engine gets anywhere.

Health is found by answers, not by whether a process lives. Any answer is a sign, also to a probe (`probe_s` after the last). An engine that
owes something and gives no sign for `silent_s` is silent: its requests go to others, and it is used again once it answers. Silent for
`watchdog_s` in all, it is hung, and is ended, not before, since to load a model again may take minutes. An engine that gives signs, but of
which two requests in a row ran out of time without a response in between, is hung too. An engine that owes nothing is not probed.

Outstanding work is counted in responses, or in the tokens expected of them (`rollout.balance`), in units of one request, so that requests of
both kinds can be added up. It falls as responses grow and finish; of an engine that reports no progress, all is owed until it answers.

Routing: to the engine that owes least, of those that serve the wanted weights or are being brought to them. Otherwise the first engine to be
ready in a step would get the whole step. A request on an engine that is still on its way goes to a serving one as soon as that is no busier.

Rebalancing: an engine that wakes, starts or is lent later gets the newest requests of others, with the tokens that they have, which it reads
once more. It is worth it for requests that wait, or where an engine is so much busier that each token comes sooner by
it. No engine gives to one as busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from gcore.types import Sample, Version


@dataclass(frozen=True, slots=True)
class LengthExpectation:
    """What is expected of responses to a prompt. `left`: tokens still to come, of the lengths of those that are finished, and the tokens
    that the others have; `weighs`: whether engines are weighed by it, or it is only told to who asks."""

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
        """Or responses, where each counts 1."""
        self.each = self.tokens / count if count and self.tokens > 0 else usual
        """What one of them counted at first."""

    def hears(self, place: int, sample: Sample) -> float:
        """The engine tells of one of them. By how much what is owed changes."""
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
        """Tokens that are expected to come yet, and of how many responses; of none where nobody expects anything."""
        return (self._now(), len(self._growing)) if self._expect is not None else (0.0, 0)

    def _now(self) -> float:
        assert self._expect is not None
        return self._expect.left(self._finished, tuple(self._growing.values()))


PROBES = 3
"""Questions in the time after which an engine is silent."""

SILENT_PROBE_S = 1.0
"""From one question to a silent engine to the next: it is missed."""

LEFT_S = 30.0
"""After so long between awake and asleep an engine counts as abandoned: its controller died in between."""

WHOLE_TIME = 0.9
"""A request that fails after this part of its time ran out of it; sooner, the engine refused it, or died."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """In seconds."""

    silent_s: float = 30.0
    watchdog_s: float = 120.0
    request_s: float = 120.0
    """The longest wait for the answer to one request."""

    @property
    def probe_s(self) -> float:
        """Between two questions, and the longest wait for the answer to one."""
        return self.silent_s / PROBES


class HealthState(Enum):
    """How an engine is."""

    WELL = "well"
    SILENT = "silent"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What was heard of one engine; monotonic seconds.

    `sign`: its last answer, or when it was given work after it had none. `silent`: from that verdict on until it answers.
    `ran_out`: when a request first ran out of time since its last response. `stuck`: one that was begun after that did too.
    `unknown`: since when it is not known whether the engine has its memory; `lost`: that this lasted for `LEFT_S`.
    """

    sign: float
    silent: bool = False
    ran_out: float | None = None
    stuck: bool = False
    unknown: float | None = None
    lost: bool = False

    def loses_memory(self, now: float) -> EngineHealth:
        """The engine was found between awake and asleep. Another controller may be changing it; after `LEFT_S` it counts as abandoned."""
        since = now if self.unknown is None else self.unknown
        return replace(self, unknown=since, lost=self.lost or now - since >= LEFT_S)

    def begins(self, now: float) -> EngineHealth:
        """It is given work, after it had none. That is no sign of one that is silent."""
        return self if self.silent else replace(self, sign=now)

    def answers(self, now: float) -> EngineHealth:
        """It has answered something that is no response."""
        return replace(self, sign=now, silent=False)

    def responds(self, now: float) -> EngineHealth:
        """It has made responses."""
        return EngineHealth(now)

    def fails(self, patience: HealthLimits, begun: float, now: float) -> EngineHealth:
        """A request for responses that was begun at `begun` came to nothing."""
        if now - begun < WHOLE_TIME * patience.request_s:
            return self
        if self.ran_out is None:
            return replace(self, ran_out=now)
        return replace(self, stuck=self.stuck or begun >= self.ran_out)

    def in_vain(self, asked: float) -> EngineHealth:
        """What it was asked at `asked`, apart from responses, was not answered: until it answers, it owes something."""
        return self if self.silent else replace(self, sign=max(self.sign, asked), silent=True)

    def look(self, patience: HealthLimits, now: float, *, busy: bool) -> EngineHealth:
        """Itself, silent if that is found now. `busy`: whether it has requests for responses."""
        return replace(self, silent=True) if busy and now - self.sign >= patience.silent_s else self

    def wants_probe(self, patience: HealthLimits, now: float, probed: float, *, busy: bool) -> bool:
        """Whether it is time to ask how it is, if nobody is asking. `probed`: when it was last asked."""
        if self.silent:
            return now - probed >= min(SILENT_PROBE_S, patience.probe_s)
        return busy and now - max(self.sign, probed) >= patience.probe_s

    def verdict(self, patience: HealthLimits, now: float) -> HealthState:
        """How it is at `now`."""
        if self.stuck or self.lost or (self.silent and now - self.sign >= patience.watchdog_s):
            return HealthState.HUNG
        return HealthState.SILENT if self.silent else HealthState.WELL

    def why(self, patience: HealthLimits, now: float) -> str:
        """What is wrong with it, for people; nothing yet of one that may just have died, which others will tell."""
        if self.stuck:
            return f"answers, but no request within {patience.request_s:g} s, twice in a row; it is ended, and another started"
        if self.lost:
            return f"was left on its way to sleep or awake for {LEFT_S:g} s; it is ended, and another started"
        if self.verdict(patience, now) is HealthState.HUNG:
            return f"has answered nothing for {patience.watchdog_s:g} s; it is ended, and another started"
        if self.silent and now - self.sign >= patience.silent_s:
            return f"has answered nothing for {patience.silent_s:g} s; its requests go to others, and it is asked on"
        return ""


CROWDED, TIMES = 0.25, 2
"""An engine that runs at least such a share of what it can gives of what it runs, while it keeps so many times what the other has."""

FILLED = 2
"""An engine that has room is given so many times what it runs at once, if others have that much more: who looks, looks now and then."""


@dataclass(frozen=True, slots=True)
class EngineQueue:
    """An engine. `busy`: responses that it owes; `requests`: those that may be taken back, by name and responses, the oldest first."""

    instance: str
    busy: int
    requests: tuple[tuple[str, int], ...]


def requests_to_move(queues: Sequence[EngineQueue], rows: int) -> list[tuple[str, str]]:
    """Of engines that serve the same: from which one which request, in this order. `rows`: responses that one runs at once."""
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
    """The busiest whose newest request is worth taking."""
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
    """How a request lives through changes of weights: it begins with the version `wanted` now, of which `began` is told."""

    wanted: Callable[[], Version]
    began: Callable[[Version], None]


@dataclass(slots=True)
class Affinity:
    """Where a response of several turns is made: its next turn goes to the engine that made the last one, which has all that is
    before it in its cache, for as long as that serves."""

    instance: str | None = None


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """An engine as a request of `version` sees it. `owed`: what it has to answer, with what waits for it."""

    instance: str
    owed: float
    serving: bool
    """Whether it serves the version; if not, it is on its way there."""


def choose_engine(
    loads: Sequence[RouteCandidate], size: float, held: str | None = None, last: str | None = None
) -> str | None:
    """Where a request goes that is as much as `size`; None while there is nobody.

    `held`: where it waits already, counted there. `last`: the engine of the turn before, however busy it is.
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
