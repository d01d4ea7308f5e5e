"""What is claimed of a node's slots by engines that serve and by ranks. Pure. Places where none does: `controllers.booking_places`.

Engines and ranks tell seconds that they measured themselves; what their idle seconds were for is this controller's to say
(`controllers.booking_causes`), by what it knew of the job while they passed. An engine that the plan puts to sleep is switching from the
moment when it is to go, and claims nothing once it sleeps; one that is to wake is switching until it is awake. So is one that makes
room for the rank on its slot, and so is the rank, until it has its memory. A rank that stages a step's weights is syncing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from controllers.booking_causes import cause_of
from controllers.sleeping import places_of
from controllers.taking_turns import asleep_for_ranks, takes_turns
from controllers.view import JobView, RankView
from gcore.ledger.books_file import Kept
from gcore.ledger.job import EnginePlace
from gcore.rollout.readings import EngineTime
from gcore.worker.records import WorkerRecord
from placement.books import (
    FAILED,
    NOBODY,
    SYNCING,
    Cause,
    Line,
    Pool,
    State,
    Telling,
    busy,
    idle,
    switching,
)

WAITING, LOADING, SAVING = "waiting", "loading", "saving"
MOVING: Mapping[str, State] = {
    "releasing": switching("train", "rollout"),
    "restoring": switching("rollout", "train"),
    LOADING: switching(NOBODY, "train"),
    SAVING: SYNCING,
    "failed": FAILED,
}
"""Phases of a rank that are neither waiting nor work on a step."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a worker's own words mean now: its being idle, and its being asleep. None: it lays no claim to its slot then."""

    idle: State | None
    asleep: State | None = None


def mine(view: JobView) -> dict[str, WorkerRecord]:
    """The job's workers on this node, by instance."""
    uid = view.mirror.keys.uid
    return {i: w for i, w in view.workers.items() if w.node == view.node and w.job_uid == uid}


@dataclass(frozen=True, slots=True)
class _Placed:
    """A worker that serves, its place in the plan, and the role that takes turns with it on its slot."""

    worker: WorkerRecord
    place: EnginePlace | None
    other: str


def meanings(view: JobView, workers: Mapping[str, WorkerRecord], stage: Cause) -> dict[str, Meaning]:
    """By instance: of each of these workers that serves."""
    placed = view.remembered.get("placed", (workers, view.mirror.plan), lambda: dict(_placed(view, workers)))
    turn = asleep_for_ranks(view)
    return {
        instance: _of_rank(view, instance, one.worker, workers, turn, stage)
        if one.worker.role == "train"
        else _of_engine(view, instance, one, turn, stage)
        for instance, one in placed.items()
    }


def _placed(view: JobView, workers: Mapping[str, WorkerRecord]) -> Iterator[tuple[str, _Placed]]:
    plan = view.mirror.plan.record if view.mirror.plan is not None else None
    places = places_of(plan, workers, view.mirror.keys.uid)
    roles: dict[str, set[str]] = {}
    for worker in workers.values():
        for slot in worker.slots:
            roles.setdefault(slot, set()).add(worker.role)
    for instance, worker in workers.items():
        if worker.state == "serving":
            others = {role for slot in worker.slots for role in roles[slot]} - {worker.role}
            if not takes_turns(view.spec, worker.slot):
                others -= {"train"}
            yield instance, _Placed(worker, places.get(instance), min(others, default=NOBODY))


def _of_rank(
    view: JobView,
    instance: str,
    worker: WorkerRecord,
    workers: Mapping[str, WorkerRecord],
    turn: frozenset[str],
    stage: Cause,
) -> Meaning:
    """A rank without its memory claims nothing while an engine is to have it, but for the time from when engines are to make room for it."""
    known = view.ranks.get(worker.rank) if worker.rank is not None else None
    if known is None or not known.released or not _shares(view, worker.slot):
        return Meaning(idle("train", cause_of(view, stage, "train", instance)))
    before = next((workers[name].role for name in turn if name in workers and worker.slot in workers[name].slots), None)
    return Meaning(None if before is None else switching(before, "train"))


def _shares(view: JobView, slot: str) -> bool:
    """Whether the plan has an engine on this node's slot that is awake."""
    plan = view.mirror.plan
    return plan is None or any(
        slot in place.slots and place.node == view.node and not place.asleep for place in plan.record.engines
    )


def _of_engine(view: JobView, instance: str, one: _Placed, turn: frozenset[str], stage: Cause) -> Meaning:
    """One that keeps no sums of its own (SGLang) calls itself idle while it sleeps: who put it to sleep knows."""
    pool, place = one.worker.role, one.place
    known = view.engines.get(instance) or view.judges.get(instance)
    sleeps = known is not None and known.asleep
    if place is None:
        return Meaning(switching(pool, NOBODY))
    if place.asleep or instance in turn:
        return Meaning(None if sleeps else switching(pool, one.other if place.asleep else "train"))
    if sleeps:
        return Meaning(switching(one.other, pool), switching(one.other, pool))
    if f"publish {instance}" in view.under_way:
        return Meaning(SYNCING, switching(one.other, pool))
    return Meaning(idle(pool, cause_of(view, stage, pool, instance)), switching(one.other, pool))


def engine_tellings(instance: str, pool: Pool, passed: EngineTime, line: Line[Meaning]) -> Iterator[Telling]:
    """What an engine's time between two readings was, one telling for each stretch in which its words meant the same.

    An engine that is to sleep lays no claim to the time from then on, and the one that wakes in its place none to the time before. They
    are read at moments of their own: were what they claim spread over the time between two readings of each, it would be too much of one
    part of it and too little of another."""
    length = passed.end - passed.begin
    for meaning, begin, end in _stretches(line, passed.begin, passed.end):
        share = (end - begin) / length
        seconds: dict[State, float] = {busy(pool): passed.busy_s * share, SYNCING: passed.paused_s * share}
        for state, told in ((meaning.idle, passed.idle_s), (meaning.asleep, passed.asleep_s)):
            if state is not None:
                seconds[state] = seconds.get(state, 0.0) + told * share
        yield Telling(instance, begin, end, seconds)


def _stretches(line: Line[Meaning], begin: float, end: float) -> Iterator[tuple[Meaning, float, float]]:
    """What was so between two moments, from when to when."""
    at = begin
    for meaning, held in line.over(begin, end):
        until = min(at + held, end)
        if until > at:
            yield meaning, at, until
        at = until


class RankClaims:
    """What one rank's time was, from the seconds by phase that it tells. Mutable.

    It tells each change of its phase at once, so until it tells again it is in the phase that it told; what that was taken for beyond
    its word is taken off its next one.
    """

    def __init__(self, instance: str, kept: Kept | None = None, since: float | None = None) -> None:
        """`kept`: what it had said to another life of this controller's, which ended at `since`; None: there was none. Of one that began
        after that, its first word says all that it did."""
        self.instance = instance
        self._kept = kept
        self._since = since
        self._at: float | None = None
        self._phases: Mapping[str, float] = {}
        self._phase = WAITING
        self._claimed = 0.0
        """Until when its time was told of."""
        self._ahead: dict[str, float] = {}
        """Seconds by phase that were told beyond its word."""

    @property
    def said(self) -> tuple[float, Mapping[str, float]] | None:
        """Its newest word: when, and its seconds by phase."""
        return None if self._at is None else (self._at, self._phases)

    def hear(self, rank: RankView, line: Line[Meaning]) -> tuple[Telling, ...]:
        """Its newest word; what its time was since the one before, as far as that is not told already."""
        if rank.clock is None or (self._at is not None and rank.clock <= self._at):
            return ()
        told: tuple[Telling, ...] = ()
        if self._kept is not None and self._kept.at < rank.clock:
            self._at, self._phases, self._claimed = self._kept.at, self._kept.sums, self._kept.at
        elif self._since is not None and (began := rank.clock - sum(rank.phases.values())) >= self._since:
            self._at, self._claimed = began, began
        self._kept = self._since = None
        if self._at is not None:
            grown = {phase: rank.phases[phase] - self._phases.get(phase, 0.0) for phase in rank.phases}
            new = {phase: max(seconds - self._ahead.get(phase, 0.0), 0.0) for phase, seconds in grown.items()}
            told = tuple(self._tellings(rank.clock, new, line))
        self._claimed = max(self._claimed, rank.clock)
        self._at, self._phases, self._phase, self._ahead = rank.clock, rank.phases, rank.phase, {}
        return told

    def extend(self, until: float, line: Line[Meaning]) -> tuple[Telling, ...]:
        """Until then it was in the phase that it told last."""
        if self._at is None or until <= self._claimed:
            return ()
        passed = until - self._claimed
        told = tuple(self._tellings(until, {self._phase: passed}, line))
        self._ahead[self._phase] = self._ahead.get(self._phase, 0.0) + passed
        self._claimed = until
        return told

    def _tellings(self, until: float, phases: Mapping[str, float], line: Line[Meaning]) -> Iterator[Telling]:
        """As an engine's: one for each stretch in which its waiting meant the same."""
        length, total = until - self._claimed, sum(phases.values())
        if length <= 0 or total <= 0:
            return
        shrink = min(length / total, 1.0)
        for meaning, begin, end in _stretches(line, self._claimed, until):
            share = shrink * (end - begin) / length
            seconds: dict[State, float] = {}
            for phase, told in phases.items():
                state = meaning.idle if phase == WAITING else MOVING.get(phase, busy("train"))
                if state is not None and told > 0:
                    seconds[state] = seconds.get(state, 0.0) + told * share
            yield Telling(self.instance, begin, end, seconds)
