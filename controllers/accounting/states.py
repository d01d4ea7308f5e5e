"""Slot states, and the account of one slot.

Workers report how many seconds they spent in each state. A slot may have several workers that share it over time, so
their reports about the same time can conflict. Precedence resolves conflicts:

    busy (train, rollout, reward) > syncing > switching > failed > idle (rollout, reward, train) > unallocated

So while its rank computes, a slot counts as train, whatever engines on it do. If two workers report half of the same
second each, both get their half. A slot is idle only if none of its workers did anything else.

Invariant: booked seconds (assigned to a state) plus unbooked seconds equal elapsed seconds exactly, in any order of
reports. No state is defined as the remainder of the others: time without a report is `unbooked`. If a worker reports
more seconds than have elapsed, the excess is cut off and counted as `overbooked`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, Literal, TypeVar

from gcore.ledger.records.slot_accounting import Span
from gcore.types import Pool

IdleCause = Literal["no_work", "tail", "barrier", "back_pressure", "waiting_weights"]

State = str
"""`busy POOL`, `idle POOL CAUSE`, `switching FROM>TO`, or one of the constants below."""

SYNCING, FAILED, UNALLOCATED = "syncing", "failed", "unallocated"

NOBODY = "none"
"""In `switching`: the slot had, or will have, no role."""

MOST_SPANS = 64
"""Maximum number of intervals of a slot in a step, for the trace. If there are more, pairs of neighbours are joined."""

ALMOST = 1e-9
"""Tolerance for sums of floats, in seconds."""

T = TypeVar("T")

Seconds = Mapping[State, float]

_WORDS = ("busy train", "busy rollout", "busy reward", SYNCING, "switching", FAILED)

_ORDER = (*_WORDS, "idle rollout", "idle reward", "idle train", UNALLOCATED)


def busy(pool: Pool) -> State:
    """Return the name of the state of a slot that works for a pool."""
    return f"busy {pool}"


def idle(pool: Pool, cause: IdleCause) -> State:
    """Return the name of the state of a slot that belongs to a pool and has no work, for this cause."""
    return f"idle {pool} {cause}"


def switching(before: str, after: str) -> State:
    """Return the name of the state of a slot that changes from one role to another. Either may be NOBODY (no role)."""
    return f"switching {before}>{after}"


def precedence(state: State) -> int:
    """Return the position of a state in the order of precedence; 0 wins. Raises ValueError for an unknown state."""
    kind = state.partition(" ")[0] if state.startswith("switching ") else " ".join(state.split(" ")[:2])
    return _ORDER.index(kind)


@dataclass(frozen=True, slots=True)
class TimeReport:
    """What one worker reports about the time between `begin` and `end`: seconds by state. It slept in the rest of the
    time, and does not claim it."""

    worker: str
    begin: float
    end: float
    seconds: Seconds

    def within(self, begin: float, end: float) -> dict[State, float]:
        """Return the seconds by state between two moments, as if each state were spread evenly over the report."""
        share = (min(end, self.end) - max(begin, self.begin)) / (self.end - self.begin)
        return {state: seconds * share for state, seconds in self.seconds.items()} if share > 0 else {}


def settle_claims(length: float, claims: Sequence[Seconds]) -> dict[State, float]:
    """Assign `length` seconds of a slot to states, by precedence, from the claims of its workers (seconds by state).
    The sum is at most `length`.

    Claims of the same precedence are granted in the order of `claims`.
    """
    booked: dict[State, float] = {}
    ranked: list[dict[int, dict[State, float]]] = [{rank: {} for rank in range(len(_ORDER))} for _ in claims]
    ranks: set[int] = set()
    for claim, by_rank in zip(claims, ranked, strict=True):
        for state, claimed in claim.items():
            if claimed > 0:
                rank = precedence(state)
                by_rank[rank][state] = claimed
                ranks.add(rank)
    left = length
    for rank in sorted(ranks):
        for by_rank in ranked:
            wanted = sum(by_rank[rank].values())
            granted = min(wanted, left)
            if granted <= 0:
                continue
            for state, claimed in by_rank[rank].items():
                booked[state] = booked.get(state, 0.0) + claimed * granted / wanted
            left -= granted
    return booked


def join_spans(one: Span, other: Span) -> Span:
    """Join two consecutive intervals of a slot into one."""
    return Span(one.begin, other.end, add_times(one.seconds, other.seconds))


def add_times(one: Seconds, other: Seconds) -> dict[State, float]:
    """Return the sums of the seconds by state."""
    return {state: one.get(state, 0.0) + other.get(state, 0.0) for state in {**one, **other}}


@dataclass(frozen=True, slots=True)
class SlotTimes:
    """A slot's time in one step. `booked`: seconds by state. `spans`: intervals with their states, for the trace.
    `switches`: seconds of each role change that ended in the step, by "FROM>TO"."""

    booked: Seconds = field(default_factory=dict)
    unbooked: float = 0.0
    overbooked: float = 0.0
    spans: tuple[Span, ...] = ()
    switches: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class SlotAccount:
    """Account of one slot's time from `since` on. Reports may arrive late and in any order, until the time they are
    about is settled (assigned to states)."""

    def __init__(self, since: float) -> None:
        self.settled_until = since
        self._reports: list[TimeReport] = []
        self._booked: dict[State, float] = {}
        self._unbooked = self._overbooked = 0.0
        self._spans: list[Span] = []
        self._switching: tuple[State, float] | None = None
        self._switches: dict[str, tuple[float, ...]] = {}

    def add(self, report: TimeReport) -> None:
        """Add a worker's report. The part of it about time that is settled already is dropped."""
        length, claimed = report.end - report.begin, sum(report.seconds.values())
        if length <= 0 or report.end <= self.settled_until:
            return
        if claimed > length + ALMOST:
            self._overbooked += claimed - length
            shrunk = {state: seconds * length / claimed for state, seconds in report.seconds.items()}
            report = TimeReport(report.worker, report.begin, report.end, shrunk)
        self._reports.append(report)

    def settle(self, until: float) -> None:
        """Assign the time up to `until` to states, from the reports so far."""
        if until <= self.settled_until:
            return
        inside = (edge for one in self._reports for edge in (one.begin, one.end) if self.settled_until < edge < until)
        edges = sorted({self.settled_until, until, *inside})
        ordered = sorted(self._reports, key=lambda one: (one.worker, one.begin))
        for begin, end in pairwise(edges):
            claims = [claim for one in ordered if (claim := one.within(begin, end))]
            self._book(Span(begin, end, settle_claims(end - begin, claims)))
        self._reports = [one for one in self._reports if one.end > until]
        self.settled_until = until

    def close(self) -> SlotTimes:
        """Return the time settled since the last call, and begin a new account."""
        times = SlotTimes(self._booked, self._unbooked, self._overbooked, tuple(self._spans), self._switches)
        self._booked, self._unbooked, self._overbooked, self._spans, self._switches = {}, 0.0, 0.0, [], {}
        return times

    def _book(self, span: Span) -> None:
        self._booked = add_times(self._booked, span.seconds)
        self._unbooked += max(span.unbooked, 0.0)
        state = span.longest(precedence)
        self._note_switch(span, state)
        if self._spans and self._spans[-1].longest(precedence) == state:
            self._spans[-1] = join_spans(self._spans[-1], span)
        else:
            self._spans.append(span)
        if len(self._spans) > MOST_SPANS:
            odd = self._spans[-1:] if len(self._spans) % 2 else []
            self._spans = [*map(join_spans, self._spans[::2], self._spans[1::2]), *odd]

    def _note_switch(self, span: Span, state: State) -> None:
        if self._switching is not None and self._switching[0] != state:
            change, took = self._switching[0].removeprefix("switching "), self._switching[1]
            self._switches[change] = (*self._switches.get(change, ()), took)
            self._switching = None
        if state.startswith("switching "):
            took = self._switching[1] if self._switching is not None else 0.0
            self._switching = state, took + span.end - span.begin


class Timeline(Generic[T]):
    """A value that changes over time, and can be read for any past interval. Mutable."""

    def __init__(self, value: T, since: float) -> None:
        self._marks = [(since, value)]

    @property
    def now(self) -> T:
        """The newest value."""
        return self._marks[-1][1]

    @property
    def since(self) -> float:
        """When the newest value was set."""
        return self._marks[-1][0]

    def set(self, value: T, at: float) -> bool:
        """Set the value from the time `at` on. Return whether it changed."""
        if value == self._marks[-1][1]:
            return False
        self._marks.append((max(at, self._marks[-1][0]), value))
        return True

    def between(self, begin: float, end: float) -> Iterator[tuple[T, float]]:
        """Yield the values between two moments, each with its seconds. The first known value also counts for the time
        before it."""
        ends = [since for since, _ in self._marks[1:]] + [float("inf")]
        for number, ((since, value), until) in enumerate(zip(self._marks, ends, strict=True)):
            seconds = min(until, end) - max(since if number else float("-inf"), begin)
            if seconds > 0:
                yield value, seconds

    def forget(self, before: float) -> None:
        """Drop values that were replaced before the time `before`."""
        while len(self._marks) > 1 and self._marks[1][0] <= before:
            del self._marks[0]
