"""Which workers of a job this node is to run: what is started and stopped. `controllers.workers.launcher` carries it out.

Workers outlive their controller, so what runs is read from the store: a restarted controller adopts the registered workers of its node by
instance. Only starts that have not registered yet, and the number of tries, are remembered (`Launches`). A train rank that died is not
started again; a rollback makes a new world.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from controllers.rules.memory import ranks_taking_turns, takes_turns
from controllers.rules.replication import may_start
from controllers.rules.view import JobView
from gcore.ledger.records.job import EnginePlace, RankPlace
from gcore.system.process import ProcessId
from gcore.system.slots import is_cuda
from gcore.train.rank.launch import PARTS
from gcore.worker.records import WorkerRecord

MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Run an engine on the slots of a place, for the policy or for a judge."""

    place: EnginePlace


@dataclass(frozen=True, slots=True)
class StartRank:
    """Run a train rank of head's world."""

    place: RankPlace
    world: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker that is no longer wanted."""

    instance: str
    reason: str
    at_once: bool = False
    """Whether it is not worth to wait until it has drained: it hangs."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A supervisor that this controller started."""

    instance: str
    process: ProcessId
    at: float
    starter_log: Path | None = None
    """What its supervisor says, or whoever is the process of many."""
    log: Path | None = None
    """What the worker itself says, in the run's folder."""


@dataclass(frozen=True)
class Launches:
    """What was started, by what it is for ("rollout cpu:0", "judge NAME cpu:0", "train WORLD 1")."""

    pending: Mapping[str, Launch] = field(default_factory=dict)
    """Started, and the process lives; it may have registered meanwhile."""
    tries: Mapping[str, int] = field(default_factory=dict)
    """Starts in a row without one that lasted. A rank has a second in its world only if none has registered."""
    last: Mapping[str, float] = field(default_factory=dict)
    """When it was last started."""


def schedule_workers(view: JobView, launches: Launches, now: float) -> Iterator[StartEngine | StartRank | StopWorker]:
    """The workers to start and to stop on this node for one running job."""
    if view.mirror.plan is None or view.mirror.head is None:
        return
    plan, head = view.mirror.plan, view.mirror.head.record
    wanted: set[str] = set()
    hung = {instance: engine.why for instance, engine in {**view.engines, **view.judges}.items() if engine.hung}
    mine = {i: w for i, w in sorted(view.workers.items()) if w.node == view.node and w.job_uid == view.mirror.keys.uid}
    for place in plan.record.engines:
        if place.node != view.node or view.has_lost(place.node, place.slots):
            continue
        key = engine_key(place)
        # One that hangs keeps its place, and its slot's memory, until it has ended.
        running = [i for i, w in mine.items() if _is_of(w, place) and (is_usable(w) or i in hung)]
        wanted.update(running[:1])
        ripe = now >= launches.last.get(key, 0.0) + launch_backoff_s(launches, key)
        if _is_taken(view, place.slots):
            continue
        has_memory = _has_memory(view, place, mine) and not _is_rank_awake(view, place, mine, launches)
        if not running and key not in launches.pending and ripe and has_memory:
            yield StartEngine(place)
    for rank in plan.record.ranks:
        if rank.node != view.node or plan.record.world != head.world:
            continue  # one whose slot is no more there is lost (`controllers.rules.world`)
        claim = view.mirror.claim(head.world, rank.rank)
        # A registration may be heard of before the claim that was written with it.
        there = {i for i, w in mine.items() if (w.world, w.rank) == (head.world, rank.rank) and is_usable(w)}
        wanted |= {claim.instance} if claim else there
        key = rank_key(rank, head.world)
        ripe = now >= launches.last.get(key, 0.0) + launch_backoff_s(launches, key)
        has_slot = not view.has_lost(rank.node, (rank.slot,)) and not _is_taken(view, (rank.slot,))
        has_slot = has_slot and not _engines_load_first(view, rank, mine, launches)
        if claim is None and not there and key not in launches.pending and ripe and has_slot and may_start(view):
            yield StartRank(rank, head.world)
    for instance, worker in mine.items():
        if instance in hung and worker.state != "failed":
            yield StopWorker(instance, f"it {hung[instance]}", at_once=True)
        elif instance not in wanted and worker.state in ("starting", "serving"):
            yield StopWorker(instance, "the plan has no place for it")


def _is_taken(view: JobView, slots: Collection[str]) -> bool:
    """Whether a worker of another job, which has ended or gave the slot back, is still there."""
    if view.share is None:
        return False
    uid, here = view.mirror.keys.uid, set(slots)
    return any(w.node == view.node and w.job_uid != uid and not here.isdisjoint(w.slots) for w in view.workers.values())


def _has_memory(view: JobView, place: EnginePlace, mine: Mapping[str, WorkerRecord]) -> bool:
    """Whether an engine that is started would find its memory: on a GPU where engines take turns, only once all others there sleep.
    Those that are to sleep load first, so that each has the GPU to itself for that."""
    slots = set(place.slots)
    here = [p for p in view.plan.engines if p.node == place.node and not slots.isdisjoint(p.slots)]
    if not is_cuda(place.slot) or not any(p.asleep for p in here):
        return True
    known = {**view.engines, **view.judges}
    engines = {i: w for i, w in mine.items() if is_usable(w) and w.role != "train"}
    asleep = {(w.slots, w.judge) for i, w in engines.items() if i in known and known[i].asleep}
    loaded = {(w.slots, w.judge) for w in engines.values() if not slots.isdisjoint(w.slots)}
    first = {(p.slots, p.judge) for p in here if p.asleep and p != place} if not place.asleep else set()
    return loaded | first <= asleep


def _is_rank_awake(view: JobView, place: EnginePlace, mine: Mapping[str, WorkerRecord], launches: Launches) -> bool:
    """Whether a train rank has the memory of a GPU that it takes in turns with an engine, or loads there. Its turn ends with a commit; an
    engine that is started meanwhile takes what the rank needs."""
    ranks = {
        rank.slot: rank for rank in ranks_taking_turns(view).values() if rank.node == place.node and is_cuda(rank.slot)
    }
    for slot in ranks.keys() & set(place.slots):
        known, world = view.ranks.get(ranks[slot].rank), view.head.world
        rests = known is not None and (known.released >= PARTS or known.unrested)
        there = {w.world for w in mine.values() if w.role == "train" and w.slot == slot and is_usable(w)}
        if there - {world} or ((there or rank_key(ranks[slot], world) in launches.pending) and not rests):
            return True
    return False


def _engines_load_first(view: JobView, rank: RankPlace, mine: Mapping[str, WorkerRecord], launches: Launches) -> bool:
    """Whether an engine with which a rank takes turns on a GPU has still to load and to sleep: it sizes its cache by what is free.

    An engine that did not start, or that cannot be put to sleep, is not waited for.
    """
    if not is_cuda(rank.slot) or not takes_turns(view.spec, rank.slot):
        return False
    known = {**view.engines, **view.judges}
    for place in view.plan.engines:
        if place.node != rank.node or rank.slot not in place.slots or view.has_lost(place.node, place.slots):
            continue
        key, running = engine_key(place), [i for i, w in mine.items() if _is_of(w, place) and is_usable(w)]
        if any(i not in known or not (known[i].asleep or known[i].trouble) for i in running):
            return True
        if not running and (key in launches.pending or not launches.tries.get(key)):
            return True
    return False


def _is_of(worker: WorkerRecord, place: EnginePlace) -> bool:
    return worker.role != "train" and (worker.slots, worker.judge) == (place.slots, place.judge)


def is_usable(worker: WorkerRecord) -> bool:
    """Whether it serves, or will."""
    return worker.state in ("starting", "serving")


def engine_key(place: EnginePlace) -> str:
    """The key of an engine's launch."""
    return f"judge {place.judge} {place.slot}" if place.judge else f"rollout {place.slot}"


def rank_key(place: RankPlace, world: str) -> str:
    """The key of a rank's launch."""
    return f"train {world} {place.rank}"


def launch_key(action: StartEngine | StartRank) -> str:
    """The key of a start."""
    return engine_key(action.place) if isinstance(action, StartEngine) else rank_key(action.place, action.world)


def launch_backoff_s(launches: Launches, key: str) -> float:
    """Seconds from the last start to the next."""
    tries = launches.tries.get(key, 0)
    return min(2.0 ** (tries - 1), MAX_BACKOFF_S) if tries else 0.0
