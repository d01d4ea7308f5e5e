"""What is claimed of a node's slots by engines that serve and by ranks. Pure. Places where none does: `controllers.booking_places`.

Engines and ranks tell seconds that they measured themselves; what their idle seconds were for is this controller's to say
(`controllers.booking_causes`), by what it knew of the job while they passed. An engine that the plan puts to sleep is switching from the
moment when it is to go, and claims nothing once it sleeps; one that is to wake is switching until it is awake. So is one that makes
room for the rank on its slot, and so is the rank, until it has its memory. A rank that stages a step's weights is syncing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from controllers.accounting import states as books
from controllers.accounting.states import (
    FAILED,
    NOBODY,
    SYNCING,
    UNALLOCATED,
    Cause,
    Pool,
    State,
    Timeline,
    TimeReport,
    busy,
    idle,
    switching,
)
from controllers.rules.memory import engine_places, engines_asleep_for_ranks, takes_turns
from controllers.rules.view import JobView, RankView
from gcore.ledger.records.chain import SealState
from gcore.ledger.records.job import EnginePlace
from gcore.ledger.records.slot_accounting import WorkerTotals
from gcore.rollout.engine_time import EngineTime
from gcore.worker.records import WorkerRecord

# -------------------- booking_causes
# Why engines and ranks have nothing to do: each cause by evidence of its own, as this controller sees the job now. Pure.
#
# waiting_weights  an engine does not serve head's version. Of ranks and judges: none of this controller's engines does, so nothing can be
#                  made yet that they could work on
# barrier          the step's batch is closed, or whole and about to be: it is exchanged, trained and committed, and nothing may begin
#                  before that
# back_pressure    prompts are due, and admission holds them: as many groups are in flight as may be (`rollout.concurrency`), a judge has all the
#                  questions that it may have, or the step's batch is closed and what comes after it would be too old (`rollout.staleness`)
# tail             everything that is due here was begun: others have the last responses, or the last verdicts
# no_work          prompts are due that nothing holds, and they are not begun yet; of a controller without prompts of its own: the batch is
#                  open. Before a job's first step and after its last there is no work either
#
# These exclude one another: a look finds one. How long each held is `controllers.booking`'s to sum up.


def find_idle_cause(view: JobView, *, held_back: bool) -> Cause:
    """What keeps those idle that have nothing to do. `held_back`: whether no prompt should be begun because of a judge."""
    mirror = view.mirror
    if mirror.head is None or not mirror.is_running or view.is_over:
        return "no_work"
    if view.seal is not None and not view.seal.collects and not (view.rules.staleness and view.due):
        return "back_pressure" if view.rules.staleness else "barrier"
    sources = (view.due, mirror.assign, view.holdings, view.outcomes, view.in_flight)
    found = view.remembered.get("all begun", sources, lambda: _all_begun(view))
    if found is None:
        return "no_work" if view.due else "barrier"
    if found:
        return "tail" if view.due or view.in_flight else "barrier"
    full = len(view.in_flight) >= view.spec.rollout.concurrency
    return "back_pressure" if full or held_back or view.leaving else "no_work"


def _all_begun(view: JobView) -> bool | None:
    """Whether this controller has begun all that is due of its shards; None: it has no shards."""
    mine = set(view.mirror.assign.record.shards_of(view.me)) if view.mirror.assign is not None else set()
    if not mine:
        return None
    return all(
        ref.shard not in mine or ref in view.in_flight or ref in view.holdings or ref in view.outcomes
        for ref in view.due
    )


def step_phase(view: JobView, stage: Cause) -> str:
    """What the job is at, for the trace: as the log entries call it."""
    seal = view.seal if view.mirror.head is not None else None
    if seal is None or seal.collects:
        return "publish" if worker_idle_cause(view, stage, "train", "") == "waiting_weights" else "collect"
    return "train" if seal.state is SealState.READY else "exchange"


def worker_idle_cause(view: JobView, stage: Cause, pool: Pool, instance: str) -> Cause:
    """Why a worker of `pool` is idle, if it is. `stage`: what keeps everybody."""
    served = view.engines
    if pool == "rollout":
        engine = served.get(instance)
        late = engine is not None and view.mirror.head is not None and engine.version != view.head.version
        return "waiting_weights" if late and not view.is_over else stage
    open_now = stage not in ("barrier", "back_pressure") and view.mirror.head is not None and not view.is_over
    awake = [engine for engine in served.values() if not engine.asleep] if open_now else []
    if awake and all(engine.version != view.head.version for engine in awake):
        return "waiting_weights"
    return "no_work" if pool == "reward" and stage == "back_pressure" else stage


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
class Attribution:
    """What a worker's own words mean now: its being idle, and its being asleep. None: it lays no claim to its slot then."""

    idle: State | None
    asleep: State | None = None


def own_workers(view: JobView) -> dict[str, WorkerRecord]:
    """The job's workers on this node, by instance."""
    uid = view.mirror.keys.uid
    return {i: w for i, w in view.workers.items() if w.node == view.node and w.job_uid == uid}


@dataclass(frozen=True, slots=True)
class _Placed:
    """A worker that serves, its place in the plan, and the role that takes turns with it on its slot."""

    worker: WorkerRecord
    place: EnginePlace | None
    other: str


def make_attributions(view: JobView, workers: Mapping[str, WorkerRecord], stage: Cause) -> dict[str, Attribution]:
    """By instance: of each of these workers that serves."""
    placed = view.remembered.get("placed", (workers, view.mirror.plan), lambda: dict(_placed(view, workers)))
    turn = engines_asleep_for_ranks(view)
    return {
        instance: _of_rank(view, instance, one.worker, workers, turn, stage)
        if one.worker.role == "train"
        else _of_engine(view, instance, one, turn, stage)
        for instance, one in placed.items()
    }


def _placed(view: JobView, workers: Mapping[str, WorkerRecord]) -> Iterator[tuple[str, _Placed]]:
    plan = view.mirror.plan.record if view.mirror.plan is not None else None
    places = engine_places(plan, workers, view.mirror.keys.uid)
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
) -> Attribution:
    """A rank without its memory claims nothing while an engine is to have it, but for the time from when engines are to make room for it."""
    known = view.ranks.get(worker.rank) if worker.rank is not None else None
    if known is None or not known.released or not _shares(view, worker.slot):
        return Attribution(idle("train", worker_idle_cause(view, stage, "train", instance)))
    before = next((workers[name].role for name in turn if name in workers and worker.slot in workers[name].slots), None)
    return Attribution(None if before is None else switching(before, "train"))


def _shares(view: JobView, slot: str) -> bool:
    """Whether the plan has an engine on this node's slot that is awake."""
    plan = view.mirror.plan
    return plan is None or any(
        slot in place.slots and place.node == view.node and not place.asleep for place in plan.record.engines
    )


def _of_engine(view: JobView, instance: str, one: _Placed, turn: frozenset[str], stage: Cause) -> Attribution:
    """One that keeps no sums of its own (SGLang) calls itself idle while it sleeps: who put it to sleep knows."""
    pool, place = one.worker.role, one.place
    known = view.engines.get(instance) or view.judges.get(instance)
    sleeps = known is not None and known.asleep
    if place is None:
        return Attribution(switching(pool, NOBODY))
    if place.asleep or instance in turn:
        return Attribution(None if sleeps else switching(pool, one.other if place.asleep else "train"))
    if sleeps:
        return Attribution(switching(one.other, pool), switching(one.other, pool))
    if f"publish {instance}" in view.under_way:
        return Attribution(SYNCING, switching(one.other, pool))
    return Attribution(idle(pool, worker_idle_cause(view, stage, pool, instance)), switching(one.other, pool))


def engine_reports(instance: str, pool: Pool, passed: EngineTime, line: Timeline[Attribution]) -> Iterator[TimeReport]:
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
        yield TimeReport(instance, begin, end, seconds)


def _stretches(line: Timeline[Attribution], begin: float, end: float) -> Iterator[tuple[Attribution, float, float]]:
    """What was so between two moments, from when to when."""
    at = begin
    for meaning, held in line.over(begin, end):
        until = min(at + held, end)
        if until > at:
            yield meaning, at, until
        at = until


class RankReports:
    """What one rank's time was, from the seconds by phase that it tells. Mutable.

    It tells each change of its phase at once, so until it tells again it is in the phase that it told; what that was taken for beyond
    its word is taken off its next one.
    """

    def __init__(self, instance: str, kept: WorkerTotals | None = None, since: float | None = None) -> None:
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

    def hear(self, rank: RankView, line: Timeline[Attribution]) -> tuple[TimeReport, ...]:
        """Its newest word; what its time was since the one before, as far as that is not told already."""
        if rank.clock is None or (self._at is not None and rank.clock <= self._at):
            return ()
        told: tuple[TimeReport, ...] = ()
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

    def extend(self, until: float, line: Timeline[Attribution]) -> tuple[TimeReport, ...]:
        """Until then it was in the phase that it told last."""
        if self._at is None or until <= self._claimed:
            return ()
        passed = until - self._claimed
        told = tuple(self._tellings(until, {self._phase: passed}, line))
        self._ahead[self._phase] = self._ahead.get(self._phase, 0.0) + passed
        self._claimed = until
        return told

    def _tellings(self, until: float, phases: Mapping[str, float], line: Timeline[Attribution]) -> Iterator[TimeReport]:
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
            yield TimeReport(self.instance, begin, end, seconds)


# -------------------- booking_places
# What is claimed of a node's slots where no worker serves that could tell. Pure.
#
# A place of the plan whose worker does not serve is `switching` while it loads, and `failed` once it has failed, or was there and is
# gone. What has no place any more is switching until it has ended. A slot that has no place in the job's plan is `unallocated`: it is so to
# this job, whichever other job it may serve. So is one whose places all sleep: nobody is to have it. Where an engine over several slots sleeps
# because it is a rank's turn on one of them, the others are idle: they wait for the step.


class VacantPlaces:
    """What such places are, and since when. Mutable."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Timeline[State | None]] = {}
        self._served: set[str] = set()
        """Places that had a worker which served."""

    def note(
        self, view: JobView, here: Mapping[str, WorkerRecord], now: float, left: Collection[tuple[str, Pool]] = ()
    ) -> None:
        """It is so from now on. `here`: the job's workers on this node; `left`: as `slots_left_by_ranks` has them."""
        self._served |= {worker_place(worker) for worker in here.values() if worker.state == "serving"}
        found = vacant_states(view, here, frozenset(self._served))
        found |= {(slot, f"turn of {pool}"): idle(pool, "barrier") for slot, pool in left}
        for key, state in found.items():
            if key not in self._lines:
                self._lines[key] = Timeline(state, now)
            self._lines[key].note(state, now)
        for key in self._lines.keys() - found.keys():
            self._lines[key].note(None, now)

    @property
    def slots(self) -> frozenset[str]:
        """Those of which something is known."""
        return frozenset(slot for slot, _ in self._lines)

    def told(self, settled: Mapping[str, float], until: float) -> Iterator[tuple[str, TimeReport]]:
        """By slot, what was so until then. `settled`: from when on, by slot."""
        for (slot, place), line in list(self._lines.items()):
            begin = settled[slot]
            for state, seconds in line.over(begin, until):
                if state is not None:
                    yield slot, TimeReport(f"place {place}", begin, begin + seconds, {state: seconds})
                begin += seconds
            line.forget(until)
            if line.now is None and line.since <= until:
                del self._lines[slot, place]


def slots_left_by_ranks(
    view: JobView, here: Mapping[str, WorkerRecord], turn: Collection[str]
) -> frozenset[tuple[str, Pool]]:
    """The slots without a rank, each with its pool, of engines that sleep because it is a rank's turn on another slot of theirs. `turn`:
    engines that are to sleep for ranks."""
    wide = [here[name] for name in turn if name in here and here[name].further]
    if not wide or view.mirror.plan is None:
        return frozenset()
    known = {**view.engines, **view.judges}
    training = {rank.slot for rank in view.mirror.plan.record.ranks if rank.node == view.node}
    asleep = [worker for worker in wide if worker.instance in known and known[worker.instance].asleep]
    return frozenset((slot, worker.role) for worker in asleep for slot in worker.slots if slot not in training)


def vacant_states(
    view: JobView, workers: Mapping[str, WorkerRecord], served: frozenset[str]
) -> dict[tuple[str, str], State]:
    """By slot and place: what the slot is as far as no worker that serves says so. `served`: the places that had one before.

    Of slots without a place in the plan too, and of those whose places all sleep, under the place "".
    """
    plan = view.mirror.plan.record if view.mirror.plan is not None else None
    found: dict[tuple[str, str], State] = {}
    taken = set()
    for slot, place, pool, there in _places(view, workers):
        taken.add(slot)
        states = {worker.state for worker in there}
        if "serving" in states:
            continue
        if "starting" in states:
            found[slot, place] = switching(NOBODY, pool)
        else:
            found[slot, place] = FAILED if "failed" in states or place in served else switching(NOBODY, pool)
    places = engine_places(plan, workers, view.mirror.keys.uid)
    for instance, worker in workers.items():
        leaving = worker.state == "stopping" or (worker.role != "train" and instance not in places)
        if leaving and worker.state in ("starting", "serving", "stopping"):
            for slot in worker.slots:
                taken.add(slot)
                found.setdefault((slot, instance), switching(worker.role, NOBODY))
    node = view.nodes.get(view.node)
    ours = [place for place in plan.engines if place.node == view.node] if plan is not None else []
    awake = {slot for place in ours if not place.asleep for slot in place.slots}
    awake |= {rank.slot for rank in plan.ranks if rank.node == view.node} if plan is not None else set()
    asleep = {slot for place in ours for slot in place.slots} - awake
    for slot in node.slots if node is not None else ():
        if slot not in taken or slot in asleep:
            found[slot, ""] = UNALLOCATED
    return found


def _places(view: JobView, workers: Mapping[str, WorkerRecord]) -> Iterator[tuple[str, str, Pool, list[WorkerRecord]]]:
    """The plan's places on this node, for each of its slots: slot, name, pool, and the workers that are there for it."""
    if view.mirror.plan is None or view.mirror.head is None:
        return
    plan = view.mirror.plan.record
    there: dict[str, list[WorkerRecord]] = {}
    for worker in workers.values():
        there.setdefault(worker_place(worker), []).append(worker)
    for place in plan.engines:
        if place.node == view.node:
            name = _engine(place.judge, place.slot)
            for slot in place.slots:
                yield slot, name, place.pool, there.get(name, [])
    for rank in plan.ranks:
        if rank.node == view.node:
            name = _rank(plan.world, rank.rank, rank.slot)
            yield rank.slot, name, "train", there.get(name, [])


def worker_place(worker: WorkerRecord) -> str:
    """What the place is known by for which a worker is there."""
    if worker.role == "train":
        return _rank(worker.world or "", worker.rank or 0, worker.slot)
    return _engine(worker.judge, worker.slot)


def _engine(judge: str, slot: str) -> str:
    return f"engine {judge} {slot}"


def _rank(world: str, rank: int, slot: str) -> str:
    return f"rank {world} {rank} {slot}"


# -------------------- engine_waits
# How long engines had nothing to do in the step until now, and why, for the step's log entry: the books (`controllers.booking`) are
# closed after it is written. For people; nothing is decided by it. Pure.
#
# wait_for_weights_s   nothing may begin: the batch is closed and the weights that it makes are not there yet (`barrier`), or an engine
#                      does not serve head's weights (`waiting_weights`). What holds the step up is training, exchange or publication
# tail_s               everything that is due was begun, an engine serves, and there is nothing for it: others have the last responses
#
# The causes are those of the books (`controllers.booking_causes`). An engine counts while it owes nothing at all. Each is the mean over
# the engines of this controller, in seconds. What a rank waits for is `controllers.stopwatch`'s.

WaitCause = Literal["wait_for_weights_s", "tail_s"]


TOLD: Mapping[books.Cause, WaitCause] = {
    "barrier": "wait_for_weights_s",
    "waiting_weights": "wait_for_weights_s",
    "tail": "tail_s",
}
"""Under which number a cause of the books counts; others hold no step up by themselves."""


@dataclass(frozen=True, slots=True)
class IdleEngines:
    """What engines have nothing to do, and why: by instance, None where one is at work."""

    causes: Mapping[str, WaitCause | None]

    @classmethod
    def of(cls, view: JobView, busy: Collection[str], stage: books.Cause) -> IdleEngines:
        """As it is now. `busy`: the engines that owe something; `stage`: what keeps those idle that have nothing to do."""
        awake = (name for name, engine in view.engines.items() if not engine.asleep)
        return cls(
            {
                name: None if name in busy else TOLD.get(worker_idle_cause(view, stage, "rollout", name))
                for name in awake
            }
        )


class StepWaits:
    """Seconds by cause, since it was begun. Mutable."""

    def __init__(self) -> None:
        self._seconds: dict[WaitCause, float] = {}
        self._last: tuple[float, IdleEngines] | None = None

    def begin(self, now: float) -> None:
        """A step begins; engines are as they were."""
        self._seconds = {}
        self._last = (now, self._last[1]) if self._last is not None else None

    def note(self, idle: IdleEngines, now: float) -> None:
        """As it is from now on."""
        self._add(now)
        self._last = (now, idle)

    def stats(self, now: float) -> dict[str, float]:
        """The numbers until now; nothing if no engine is known."""
        self._add(now)
        if self._last is None or not self._last[1].causes:
            return {}
        return {"wait_for_weights_s": 0.0, "tail_s": 0.0} | {cause: self._seconds[cause] for cause in self._seconds}

    def _add(self, now: float) -> None:
        if self._last is None:
            return
        since, idle = self._last
        for cause in idle.causes.values():
            if cause is not None:
                share = max(now - since, 0.0) / len(idle.causes)
                self._seconds[cause] = self._seconds.get(cause, 0.0) + share
        self._last = (now, idle)
