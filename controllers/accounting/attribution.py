"""Attribution of time: in which state the time of each worker, and of each slot without a serving worker, counts; and
why a worker was idle.

Engines and ranks report seconds that they measured. Only this controller knows the cause of idle time, so each report
is combined with what the job was waiting for in that interval. Causes of idleness, exactly one at a time:

    waiting_weights  the engine does not serve the newest weights; for ranks and judges: no engine of this controller
                     does
    barrier          the step's batch is sealed, or complete and about to be sealed: nothing may start before the commit
    back_pressure    prompts are due, but held back: `rollout.concurrency` groups are in flight, a judge has its maximum
                     of requests, or the batch is sealed and prompts of the next one would be too old
                     (`rollout.staleness`)
    tail             all due prompts of this controller were started; other engines have the last responses or verdicts
    no_work          due prompts were not started yet; also before the first step, after the last one, and, for a
                     controller without prompts of its own, while the batch is not sealed

States while workers change:

- An engine that the plan puts to sleep is `switching` until it sleeps, and claims no time afterwards. An engine that is
  to wake is `switching` until it is awake.
- The same holds for an engine that makes room for the train rank on its slot, and for the rank until it has loaded its
  state. A rank that writes weights for weight sync is `syncing`.
- If the worker of a place in the plan does not serve, the slot is `switching` while the worker loads, and `failed`
  after it has failed or disappeared. A worker that the plan no longer includes is `switching` until it has ended.
- A slot without a place in the plan, or on which only sleeping engines are planned, is `unallocated`, even if it serves
  another job.
- If an engine over several slots sleeps because a rank uses one of them, the other slots are idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from controllers.accounting.states import (
    FAILED,
    NOBODY,
    SYNCING,
    UNALLOCATED,
    IdleCause,
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
from gcore.types import Pool
from gcore.worker.records import WorkerRecord

WAITING, LOADING, SAVING = "waiting", "loading", "saving"

MOVING: Mapping[str, State] = {
    "releasing": switching("train", "rollout"),
    "restoring": switching("rollout", "train"),
    LOADING: switching(NOBODY, "train"),
    SAVING: SYNCING,
    "failed": FAILED,
}
"""State for each phase of a rank that is neither waiting nor work on a step."""

WaitCause = Literal["wait_for_weights_s", "tail_s"]

WAIT_CAUSES: Mapping[IdleCause, WaitCause] = {
    "barrier": "wait_for_weights_s",
    "waiting_weights": "wait_for_weights_s",
    "tail": "tail_s",
}
"""Statistic in a step's log entry to which idle time with each cause is added. The other causes do not delay a step by
themselves."""


def find_idle_cause(view: JobView, *, held_back: bool) -> IdleCause:
    """Return why idle workers of this controller are idle now. `held_back`: whether the request limit of a judge delays
    prompts."""
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
    """Whether this controller has started all due prompts of its shards; None: it has no shards."""
    mine = set(view.mirror.assign.record.shards_of(view.me)) if view.mirror.assign is not None else set()
    if not mine:
        return None
    return all(
        ref.shard not in mine or ref in view.in_flight or ref in view.holdings or ref in view.outcomes
        for ref in view.due
    )


def step_phase(view: JobView, cause: IdleCause) -> str:
    """Return the phase that the step is in, for the trace: `collect` (generate), `exchange` (send to ranks), `train` or
    `publish` (weight sync). The names are those of log entries. `cause`: why idle workers are idle."""
    seal = view.seal if view.mirror.head is not None else None
    if seal is None or seal.collects:
        return "publish" if worker_idle_cause(view, cause, "train", "") == "waiting_weights" else "collect"
    return "train" if seal.state is SealState.READY else "exchange"


def worker_idle_cause(view: JobView, cause: IdleCause, pool: Pool, instance: str) -> IdleCause:
    """Return why a worker of `pool` is idle, if it is. `cause`: the general cause (`find_idle_cause`), unless missing
    weights are the cause for this worker."""
    served = view.engines
    if pool == "rollout":
        engine = served.get(instance)
        late = engine is not None and view.mirror.head is not None and engine.version != view.head.version
        return "waiting_weights" if late and not view.is_over else cause
    open_now = cause not in ("barrier", "back_pressure") and view.mirror.head is not None and not view.is_over
    awake = [engine for engine in served.values() if not engine.asleep] if open_now else []
    if awake and all(engine.version != view.head.version for engine in awake):
        return "waiting_weights"
    return "no_work" if pool == "reward" and cause == "back_pressure" else cause


@dataclass(frozen=True, slots=True)
class Attribution:
    """In which state a worker's idle time and its sleeping time count at present. None: the worker does not claim that
    time of its slot."""

    idle: State | None
    asleep: State | None = None


def own_workers(view: JobView) -> dict[str, WorkerRecord]:
    """Return the job's workers on this node, by instance."""
    uid = view.mirror.keys.uid
    return {i: w for i, w in view.workers.items() if w.node == view.node and w.job_uid == uid}


@dataclass(frozen=True, slots=True)
class _Placed:
    """A serving worker, its place in the plan (None: a rank, or not in the plan), and the role of another worker that
    shares its slot over time (`none` if there is no other)."""

    worker: WorkerRecord
    place: EnginePlace | None
    other: str


def make_attributions(view: JobView, workers: Mapping[str, WorkerRecord], cause: IdleCause) -> dict[str, Attribution]:
    """Return how idle and sleeping time counts for each serving worker, by instance. `cause`: general cause of
    idleness."""
    placed = view.remembered.get("placed", (workers, view.mirror.plan), lambda: dict(_placed(view, workers)))
    turn = engines_asleep_for_ranks(view)
    return {
        instance: _of_rank(view, instance, one.worker, workers, turn, cause)
        if one.worker.role == "train"
        else _of_engine(view, instance, one, turn, cause)
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
    cause: IdleCause,
) -> Attribution:
    """Return the attribution of a train rank. While its state is not in device memory and an engine uses the slot, it
    claims nothing. When the engine has to make room, the slot is `switching`. `turn`: engines that must sleep for
    ranks."""
    known = view.ranks.get(worker.rank) if worker.rank is not None else None
    if known is None or not known.released or not _shares(view, worker.slot):
        return Attribution(idle("train", worker_idle_cause(view, cause, "train", instance)))
    before = next((workers[name].role for name in turn if name in workers and worker.slot in workers[name].slots), None)
    return Attribution(None if before is None else switching(before, "train"))


def _shares(view: JobView, slot: str) -> bool:
    """Whether the plan has an awake engine on this slot of the node."""
    plan = view.mirror.plan
    return plan is None or any(
        slot in place.slots and place.node == view.node and not place.asleep for place in plan.record.engines
    )


def _of_engine(view: JobView, instance: str, one: _Placed, turn: frozenset[str], cause: IdleCause) -> Attribution:
    """Return the attribution of an engine. `turn`: engines that must sleep for ranks. SGLang reports idle time while it
    sleeps, so whether an engine sleeps is taken from the view."""
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
    return Attribution(idle(pool, worker_idle_cause(view, cause, pool, instance)), switching(one.other, pool))


def engine_reports(instance: str, pool: Pool, passed: EngineTime, over: Timeline[Attribution]) -> Iterator[TimeReport]:
    """Yield the time of an engine between two readings of its totals, as one report for each interval with the same
    attribution. `passed`: its measured seconds. `over`: its attribution over time.

    When one engine falls asleep and another wakes on the slot, each claims only its part of the time. They are read at
    different times, so a single report over the whole interval would claim too much of one part and too little of the
    other.
    """
    length = passed.end - passed.begin
    for meaning, begin, end in _stretches(over, passed.begin, passed.end):
        share = (end - begin) / length
        seconds: dict[State, float] = {busy(pool): passed.busy_s * share, SYNCING: passed.paused_s * share}
        for state, duration in ((meaning.idle, passed.idle_s), (meaning.asleep, passed.asleep_s)):
            if state is not None:
                seconds[state] = seconds.get(state, 0.0) + duration * share
        yield TimeReport(instance, begin, end, seconds)


def _stretches(over: Timeline[Attribution], begin: float, end: float) -> Iterator[tuple[Attribution, float, float]]:
    """Yield the attributions between `begin` and `end`, each with the begin and end of its interval."""
    at = begin
    for meaning, held in over.between(begin, end):
        until = min(at + held, end)
        if until > at:
            yield meaning, at, until
        at = until


class RankReports:
    """Turns the messages of a train rank (total seconds by phase) into time reports. Mutable.

    A rank sends a message at each change of its phase, so between two messages it is assumed to be in the last reported
    phase. Time that was reported on this assumption is subtracted when the next message arrives.
    """

    def __init__(self, instance: str, kept: WorkerTotals | None = None, since: float | None = None) -> None:
        """`kept`: the rank's totals when an earlier run of the controller ended, so that its time since then is
        reported. `since`: when that run ended; all time of a rank that started later is reported."""
        self.instance = instance
        self._kept = kept
        self._since = since
        self._at: float | None = None
        self._phases: Mapping[str, float] = {}
        self._phase = WAITING
        self._claimed = 0.0
        """Time up to which the rank's time is reported."""
        self._ahead: dict[str, float] = {}
        """Seconds by phase that were reported by assumption since its last message."""

    @property
    def totals(self) -> tuple[float, Mapping[str, float]] | None:
        """The rank's newest message: time, and total seconds by phase; None: there was none."""
        return None if self._at is None else (self._at, self._phases)

    def receive(self, rank: RankView, over: Timeline[Attribution]) -> tuple[TimeReport, ...]:
        """Process the rank's newest message. Return reports of its time since the previous message, except for what was
        already reported by assumption. `over`: its attribution over time."""
        if rank.clock is None or (self._at is not None and rank.clock <= self._at):
            return ()
        reports: tuple[TimeReport, ...] = ()
        if self._kept is not None and self._kept.at < rank.clock:
            self._at, self._phases, self._claimed = self._kept.at, self._kept.sums, self._kept.at
        elif self._since is not None and (began := rank.clock - sum(rank.phases.values())) >= self._since:
            self._at, self._claimed = began, began
        self._kept = self._since = None
        if self._at is not None:
            grown = {phase: rank.phases[phase] - self._phases.get(phase, 0.0) for phase in rank.phases}
            new = {phase: max(seconds - self._ahead.get(phase, 0.0), 0.0) for phase, seconds in grown.items()}
            reports = tuple(self._reports(rank.clock, new, over))
        self._claimed = max(self._claimed, rank.clock)
        self._at, self._phases, self._phase, self._ahead = rank.clock, rank.phases, rank.phase, {}
        return reports

    def extend(self, until: float, over: Timeline[Attribution]) -> tuple[TimeReport, ...]:
        """Report by assumption that the rank has been in the phase of its last message until `until`."""
        if self._at is None or until <= self._claimed:
            return ()
        passed = until - self._claimed
        reports = tuple(self._reports(until, {self._phase: passed}, over))
        self._ahead[self._phase] = self._ahead.get(self._phase, 0.0) + passed
        self._claimed = until
        return reports

    def _reports(self, until: float, phases: Mapping[str, float], over: Timeline[Attribution]) -> Iterator[TimeReport]:
        """Yield one report for each interval with the same attribution, as `engine_reports` does."""
        length, total = until - self._claimed, sum(phases.values())
        if length <= 0 or total <= 0:
            return
        shrink = min(length / total, 1.0)
        for meaning, begin, end in _stretches(over, self._claimed, until):
            share = shrink * (end - begin) / length
            seconds: dict[State, float] = {}
            for phase, duration in phases.items():
                state = meaning.idle if phase == WAITING else MOVING.get(phase, busy("train"))
                if state is not None and duration > 0:
                    seconds[state] = seconds.get(state, 0.0) + duration * share
            yield TimeReport(self.instance, begin, end, seconds)


class VacantPlaces:
    """Keeps the states over time of slots that have no serving worker which could report them. Mutable."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Timeline[State | None]] = {}
        self._served: set[str] = set()
        """Names of places of the plan that have had a serving worker."""

    def update(
        self, view: JobView, here: Mapping[str, WorkerRecord], now: float, left: Collection[tuple[str, Pool]] = ()
    ) -> None:
        """Set the states from `now` on. `here`: the job's workers on this node. `left`: idle slots of engines that
        sleep for a rank (`slots_left_by_ranks`)."""
        self._served |= {worker_place(worker) for worker in here.values() if worker.state == "serving"}
        found = vacant_states(view, here, frozenset(self._served))
        found |= {(slot, f"turn of {pool}"): idle(pool, "barrier") for slot, pool in left}
        for key, state in found.items():
            if key not in self._lines:
                self._lines[key] = Timeline(state, now)
            self._lines[key].set(state, now)
        for key in self._lines.keys() - found.keys():
            self._lines[key].set(None, now)

    @property
    def slots(self) -> frozenset[str]:
        """Slots with a known state at some time."""
        return frozenset(slot for slot, _ in self._lines)

    def reports(self, settled: Mapping[str, float], until: float) -> Iterator[tuple[str, TimeReport]]:
        """Yield (slot, report) for the states up to `until`. `settled`: for each slot, the time up to which it is
        accounted for already."""
        for (slot, place), line in list(self._lines.items()):
            begin = settled[slot]
            for state, seconds in line.between(begin, until):
                if state is not None:
                    yield slot, TimeReport(f"place {place}", begin, begin + seconds, {state: seconds})
                begin += seconds
            line.forget(until)
            if line.now is None and line.since <= until:
                del self._lines[slot, place]


def slots_left_by_ranks(
    view: JobView, here: Mapping[str, WorkerRecord], turn: Collection[str]
) -> frozenset[tuple[str, Pool]]:
    """Return (slot, pool) of the idle slots of engines that span several slots and sleep because a train rank uses
    another one of them. `turn`: engines that must sleep for ranks."""
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
    """Return the states of slots that no serving worker reports, by slot and name of the place in the plan. `served`:
    places that have had a serving worker.

    Slots without a place in the plan, and those on which only sleeping engines are planned, have the place name "".
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
    """Yield for each place of the plan on this node, and each of its slots: the slot, the name of the place, its pool,
    and the workers that are present for it."""
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
    """Return the name of the place in the plan that a worker belongs to."""
    if worker.role == "train":
        return _rank(worker.world or "", worker.rank or 0, worker.slot)
    return _engine(worker.judge, worker.slot)


def _engine(judge: str, slot: str) -> str:
    return f"engine {judge} {slot}"


def _rank(world: str, rank: int, slot: str) -> str:
    return f"rank {world} {rank} {slot}"


@dataclass(frozen=True, slots=True)
class IdleEngines:
    """Why each awake engine is idle, by instance; None: it works, or the cause does not delay the step."""

    causes: Mapping[str, WaitCause | None]

    @classmethod
    def of(cls, view: JobView, busy: Collection[str], cause: IdleCause) -> IdleEngines:
        """Return the present state of this controller's engines. `busy`: those with outstanding requests. `cause`:
        general cause of idleness."""
        awake = (name for name, engine in view.engines.items() if not engine.asleep)
        return cls(
            {
                name: None if name in busy else WAIT_CAUSES.get(worker_idle_cause(view, cause, "rollout", name))
                for name in awake
            }
        )


class StepWaits:
    """Measures how long engines have waited in the present step, on average, for the statistics in the step's log
    entry, which is written before the step's account is closed. Mutable.

    `wait_for_weights_s`: seconds in which nothing might start (`barrier`) or the engine did not have the newest weights
    (`waiting_weights`): training, transfer or weight sync delay the step. `tail_s`: seconds in which all due prompts
    were started, and other engines had the last responses. An engine waits while it has no request at all. The waits of
    ranks are in `controllers.telemetry.step_stats`.
    """

    def __init__(self) -> None:
        self._seconds: dict[WaitCause, float] = {}
        self._last: tuple[float, IdleEngines] | None = None

    def begin(self, now: float) -> None:
        """Begin a new step at `now`, with the engines in their present state."""
        self._seconds = {}
        self._last = (now, self._last[1]) if self._last is not None else None

    def note(self, idle: IdleEngines, now: float) -> None:
        """Set what engines wait for from `now` on."""
        self._add(now)
        self._last = (now, idle)

    def stats(self, now: float) -> dict[str, float]:
        """Return the mean waiting seconds of an engine in the step so far, by statistic; empty if no engine is
        known."""
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
