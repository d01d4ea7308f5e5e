"""Decides which worker processes of a job (engines, train ranks) this node starts and stops.
`controllers.workers.launcher` executes the decisions.

Workers outlive their controller: they register in the store, and a restarted controller adopts those of its node. Only
started workers that have not registered yet, and the number of attempts, are kept in memory (`Launches`). A dead train
rank is not restarted; a rollback forms a new world.
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
    """Decision to start an engine, of the policy or of a judge, on the slots that the plan sets."""

    place: EnginePlace


@dataclass(frozen=True, slots=True)
class StartRank:
    """Decision to start a train rank of the train world `world`."""

    place: RankPlace
    world: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Decision to stop a worker that is no longer needed or that hangs."""

    instance: str
    reason: str
    at_once: bool = False
    """Whether to kill it without draining its requests, because it hangs."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A worker that this controller has started. `process`: its supervisor. `at`: time of the start."""

    instance: str
    process: ProcessId
    at: float
    starter_log: Path | None = None
    """File with the output of its supervisor, or of the process that supervises many workers."""
    log: Path | None = None
    """The worker's own log, in the run's folder."""


@dataclass(frozen=True)
class Launches:
    """Workers that this controller has started, by launch key ("rollout cpu:0", "judge NAME cpu:0", "train WORLD
    1")."""

    pending: Mapping[str, Launch] = field(default_factory=dict)
    """Started workers whose process is alive; they may have registered by now."""
    tries: Mapping[str, int] = field(default_factory=dict)
    """Number of consecutive starts after which the worker soon ended. A rank is started again in its world only if no
    attempt has registered."""
    last: Mapping[str, float] = field(default_factory=dict)
    """Time of the last start."""


def schedule_workers(view: JobView, launches: Launches, now: float) -> Iterator[StartEngine | StartRank | StopWorker]:
    """The workers of a running job that this node should start and stop now. `launches`: earlier starts, for backoff.
    `now`: seconds."""
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
        # A hung worker keeps its place and its slot's memory until it has ended.
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
            continue  # a rank whose slot has disappeared is lost (`controllers.rules.world`)
        claim = view.mirror.claim(head.world, rank.rank)
        # A registration may arrive before the claim of the same transaction.
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
            yield StopWorker(instance, "the placement plan no longer includes it")


def _is_taken(view: JobView, slots: Collection[str]) -> bool:
    """Whether a worker of another job (which has ended or gave the slot back) still runs on one of these slots of this
    node."""
    if view.share is None:
        return False
    uid, here = view.mirror.keys.uid, set(slots)
    return any(w.node == view.node and w.job_uid != uid and not here.isdisjoint(w.slots) for w in view.workers.values())


def _has_memory(view: JobView, place: EnginePlace, mine: Mapping[str, WorkerRecord]) -> bool:
    """Whether an engine may be started now. On a GPU that several engines share, one of them awake at a time, all
    others must be asleep. Engines that will sleep load first, so that each has the GPU to itself while it loads.
    `mine`: the job's workers on this node."""
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
    """Whether a train rank that shares a GPU with the engine over time uses its memory now, or is loading. An engine
    that was started before the rank has released its memory would take memory that the rank needs."""
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
    """Whether a train rank must wait until the engines that share its GPU over time have loaded and gone to sleep,
    because an engine chooses the size of its KV cache by the free memory.

    The rank does not wait for an engine that failed to start or cannot sleep.
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
    """Whether the worker is the engine that the plan has at this place."""
    return worker.role != "train" and (worker.slots, worker.judge) == (place.slots, place.judge)


def is_usable(worker: WorkerRecord) -> bool:
    """Whether the worker serves or is starting."""
    return worker.state in ("starting", "serving")


def engine_key(place: EnginePlace) -> str:
    """The launch key of an engine, e.g. `rollout cpu:0`."""
    return f"judge {place.judge} {place.slot}" if place.judge else f"rollout {place.slot}"


def rank_key(place: RankPlace, world: str) -> str:
    """The launch key of a train rank, e.g. `train WORLD 1`."""
    return f"train {world} {place.rank}"


def launch_key(action: StartEngine | StartRank) -> str:
    """The launch key of the worker that the action starts."""
    return engine_key(action.place) if isinstance(action, StartEngine) else rank_key(action.place, action.world)


def launch_backoff_s(launches: Launches, key: str) -> float:
    """Seconds that must pass after the last start of this worker before the next: 0 after a successful one, then
    exponential."""
    tries = launches.tries.get(key, 0)
    return min(2.0 ** (tries - 1), MAX_BACKOFF_S) if tries else 0.0
