"""The books: every second of every slot is booked to exactly one state. Pure; the caller says what time it is.

Workers on a slot tell what stretches of their time were (`Telling`), as they measured it themselves. Of a slot with several workers,
which take turns, the time is still in one state at a time. Where they tell of the same time, this is the order in which they are believed:
busy (train, then rollout, then reward), syncing, switching, failed, idle (rollout, then reward, then train), unallocated. So a slot whose
rank computes is train's, whatever engines beside it do; two that tell a half each of the same second are taken to have had their
turns in it; and a slot is idle only as far as nobody on it was at anything.

No state is the rest of the others. What nobody told is `unbooked`, and what one worker told beyond the time that it told of is
`overbooked`, cut off and counted. Both are told with the books: they are the books' error. So booked and unbooked seconds add up to the
time that passed, times the slots, exactly and in whatever order tellings come.

Why something is idle is decided by whoever tells (`controllers.booking_causes`); nothing here waits, asks, or knows a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, Literal, TypeVar

Pool = Literal["rollout", "reward", "train"]


Cause = Literal["no_work", "tail", "barrier", "back_pressure", "waiting_weights"]


State = str
"""`busy POOL`, `idle POOL CAUSE`, `switching FROM>TO`, or one of those below."""


SYNCING, FAILED, UNALLOCATED = "syncing", "failed", "unallocated"


NOBODY = "none"
"""A slot's role while it has none, in `switching`."""


CAUSES: tuple[Cause, ...] = ("no_work", "tail", "barrier", "back_pressure", "waiting_weights")


MOST_SPANS = 64
"""Of a slot in a step, for the trace. More are told as half as many, each of them longer."""


ALMOST = 1e-9
"""Seconds by which sums of floats may miss one another."""


T = TypeVar("T")


Seconds = Mapping[State, float]


def busy(pool: Pool) -> State:
    """At work."""
    return f"busy {pool}"


def idle(pool: Pool, cause: Cause) -> State:
    """Nothing to do, and why."""
    return f"idle {pool} {cause}"


def switching(before: str, after: str) -> State:
    """On the way from one role to another; either may be NOBODY."""
    return f"switching {before}>{after}"


_WORDS = ("busy train", "busy rollout", "busy reward", SYNCING, "switching", FAILED)


_ORDER = (*_WORDS, "idle rollout", "idle reward", "idle train", UNALLOCATED)


def precedence(state: State) -> int:
    """Its place in the order in which tellings are believed. Raises ValueError for what is no state."""
    kind = state.partition(" ")[0] if state.startswith("switching ") else " ".join(state.split(" ")[:2])
    return _ORDER.index(kind)


@dataclass(frozen=True, slots=True)
class TimeReport:
    """What one worker's time from `begin` to `end` was, in seconds by state. What is missing it lays no claim to: it slept."""

    worker: str
    begin: float
    end: float
    seconds: Seconds

    def within(self, begin: float, end: float) -> dict[State, float]:
        """The part of it between two moments, as if it had been even throughout."""
        share = (min(end, self.end) - max(begin, self.begin)) / (self.end - self.begin)
        return {state: told * share for state, told in self.seconds.items()} if share > 0 else {}


def settle_claims(length: float, claims: Sequence[Seconds]) -> dict[State, float]:
    """The seconds by state of a slot's time, from what its workers claim of it; together no more than `length`.

    Claims of the same rank are granted in the order in which they stand here.
    """
    booked: dict[State, float] = {}
    ranked: list[dict[int, dict[State, float]]] = [{rank: {} for rank in range(len(_ORDER))} for _ in claims]
    ranks: set[int] = set()
    for claim, by_rank in zip(claims, ranked, strict=True):
        for state, told in claim.items():
            if told > 0:
                rank = precedence(state)
                by_rank[rank][state] = told
                ranks.add(rank)
    left = length
    for rank in sorted(ranks):
        for by_rank in ranked:
            wanted = sum(by_rank[rank].values())
            granted = min(wanted, left)
            if granted <= 0:
                continue
            for state, told in by_rank[rank].items():
                booked[state] = booked.get(state, 0.0) + told * granted / wanted
            left -= granted
    return booked


@dataclass(frozen=True, slots=True)
class Span:
    """Of a slot: what its time from `begin` to `end` was."""

    begin: float
    end: float
    seconds: Seconds

    @property
    def state(self) -> State:
        """That which it was most of the time; of two the first in the order in which they are believed. Empty: nobody told."""
        unbooked = self.end - self.begin - sum(self.seconds.values())
        most = max(self.seconds, key=lambda state: (self.seconds[state], -precedence(state)), default="")
        return most if most and self.seconds[most] >= unbooked else ""

    def plus(self, other: Span) -> Span:
        """With the one that follows."""
        return Span(self.begin, other.end, add_times(self.seconds, other.seconds))


def add_times(one: Seconds, other: Seconds) -> dict[State, float]:
    """Both together."""
    return {state: one.get(state, 0.0) + other.get(state, 0.0) for state in {**one, **other}}


@dataclass(frozen=True, slots=True)
class SlotTimes:
    """A slot's time between two cuts. `switches`: how long each change of its role took that ended in it, by "from>to"."""

    booked: Seconds = field(default_factory=dict)
    unbooked: float = 0.0
    overbooked: float = 0.0
    spans: tuple[Span, ...] = ()
    switches: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class SlotAccount:
    """Of one slot, from `since` on. Mutable."""

    def __init__(self, since: float) -> None:
        self.settled = since
        """Until when its time is booked."""
        self._tellings: list[TimeReport] = []
        self._booked: dict[State, float] = {}
        self._unbooked = self._overbooked = 0.0
        self._spans: list[Span] = []
        self._switching: tuple[State, float] | None = None
        self._switches: dict[str, tuple[float, ...]] = {}

    def tell(self, telling: TimeReport) -> None:
        """A worker tells. What is of a time that is settled already comes too late, and is forgotten."""
        length, told = telling.end - telling.begin, sum(telling.seconds.values())
        if length <= 0 or telling.end <= self.settled:
            return
        if told > length + ALMOST:
            self._overbooked += told - length
            shrunk = {state: seconds * length / told for state, seconds in telling.seconds.items()}
            telling = TimeReport(telling.worker, telling.begin, telling.end, shrunk)
        self._tellings.append(telling)

    def settle(self, until: float) -> None:
        """Book the time until then, by what was told of it."""
        if until <= self.settled:
            return
        inside = (edge for one in self._tellings for edge in (one.begin, one.end) if self.settled < edge < until)
        edges = sorted({self.settled, until, *inside})
        ordered = sorted(self._tellings, key=lambda one: (one.worker, one.begin))
        for begin, end in pairwise(edges):
            claims = [claim for one in ordered if (claim := one.within(begin, end))]
            self._book(Span(begin, end, settle_claims(end - begin, claims)))
        self._tellings = [one for one in self._tellings if one.end > until]
        self.settled = until

    def cut(self) -> SlotTimes:
        """What was booked since the last cut."""
        times = SlotTimes(self._booked, self._unbooked, self._overbooked, tuple(self._spans), self._switches)
        self._booked, self._unbooked, self._overbooked, self._spans, self._switches = {}, 0.0, 0.0, [], {}
        return times

    def _book(self, span: Span) -> None:
        self._booked = add_times(self._booked, span.seconds)
        self._unbooked += max(span.end - span.begin - sum(span.seconds.values()), 0.0)
        self._note_switch(span)
        if self._spans and self._spans[-1].state == span.state:
            self._spans[-1] = self._spans[-1].plus(span)
        else:
            self._spans.append(span)
        if len(self._spans) > MOST_SPANS:
            self._spans = [one.plus(other) for one, other in zip(self._spans[::2], self._spans[1::2], strict=False)] + (
                self._spans[-1:] if len(self._spans) % 2 else []
            )

    def _note_switch(self, span: Span) -> None:
        if self._switching is not None and self._switching[0] != span.state:
            change, took = self._switching[0].removeprefix("switching "), self._switching[1]
            self._switches[change] = (*self._switches.get(change, ()), took)
            self._switching = None
        if span.state.startswith("switching "):
            took = self._switching[1] if self._switching is not None else 0.0
            self._switching = span.state, took + span.end - span.begin


class Timeline(Generic[T]):
    """Something that is so until it is otherwise: what was so when. Mutable."""

    def __init__(self, value: T, since: float) -> None:
        self._marks = [(since, value)]

    @property
    def now(self) -> T:
        """As it is."""
        return self._marks[-1][1]

    @property
    def since(self) -> float:
        """From when on it is so."""
        return self._marks[-1][0]

    def note(self, value: T, at: float) -> bool:
        """It is so from then on; whether that is something new."""
        if value == self._marks[-1][1]:
            return False
        self._marks.append((max(at, self._marks[-1][0]), value))
        return True

    def over(self, begin: float, end: float) -> Iterator[tuple[T, float]]:
        """What was so between two moments, and for how many seconds; before it began it was as at its beginning."""
        ends = [since for since, _ in self._marks[1:]] + [float("inf")]
        for number, ((since, value), until) in enumerate(zip(self._marks, ends, strict=True)):
            seconds = min(until, end) - max(since if number else float("-inf"), begin)
            if seconds > 0:
                yield value, seconds

    def forget(self, before: float) -> None:
        """Nobody asks for what was before."""
        while len(self._marks) > 1 and self._marks[1][0] <= before:
            del self._marks[0]
