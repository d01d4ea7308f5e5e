"""Decides which engines and train ranks sleep and wake, which of them uses the memory of a shared slot, and which
controller manages an engine.

Slots that several engines share: an engine that will sleep gets no new requests, hands its running requests with their
tokens to other engines, and releases its memory. An engine that wakes allocates its memory, then gets the current
weights by weight sync, then requests. No engine of a slot wakes before those that must sleep there do.

Slots that engines and a train rank share over time (`placement.memory`; staleness 0): when a batch is READY, the
engines sleep, and the rank loads its state into device memory and trains. After the commit the rank releases all of it
(the committed state is in the run's folder), and only then the engines wake. The controller of the rank's node restores
the rank and sends Apply (the request to train); if it is away, others do so a little later. Every wait is bounded: a
rank that gets Apply loads its state itself, and after `PATIENCE_S` it gets Apply even if engines are awake; if a rank
cannot release its memory, the engines wake anyway. A rank on a slot of its own keeps its memory.

Management (sleep, wake, weight sync): an engine is managed by the controller of its node, or, while that is away, by
the member that a hash selects. All engines of a slot, and of all slots that one of them spans, have the same manager.
While a node's controller is registered but has not joined the job yet, its engines have no manager: otherwise the first
member of a large job would briefly manage all of them. Two managers at once do no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from controllers.rules.actions import Intent, ReleaseRank, RestoreRank, SleepEngine, WakeEngine
from controllers.rules.view import EngineView, JobView, RankView, turn_of
from gcore.config.spec import JobSpec
from gcore.ledger.records.chain import Member, SealState
from gcore.ledger.records.job import EnginePlace, Plan, RankPlace
from gcore.system.slots import is_cuda
from gcore.train.rank.launch import PARTS
from gcore.types import ServingPool
from gcore.worker.records import WorkerRecord

PATIENCE_S = 60.0
"""After this time a READY batch is trained even if engines have not released their memory."""

AWAY_S = 5.0
"""Delay before another peer acts for an absent controller: has the ranks of its node release their memory, or tells
them to train."""


def takes_turns(spec: JobSpec, slot: str) -> bool:
    """Whether engines and train ranks of the job that share `slot` use its memory one after the other, so that one of
    them sleeps."""
    if spec.placement.memory is not None:
        return spec.placement.memory == "in_turns"
    apart = spec.placement.policy == "static" or spec.rollout.staleness > 0 or spec.train.stream
    return is_cuda(slot) and not apart


def ranks_taking_turns(view: JobView) -> Mapping[int, RankPlace]:
    """The places of train ranks that share the memory of their slot with engines over time, by rank. A rank whose slot
    has no engine, neither in the plan nor left over from an earlier plan, keeps its memory."""
    plan = view.mirror.plan
    if plan is None:
        return {}
    return view.remembered.get("turns", (view.spec, plan, view.workers), lambda: dict(_find_turns(view, plan.record)))


def _find_turns(view: JobView, plan: Plan) -> Iterator[tuple[int, RankPlace]]:
    ranks = [place for place in plan.ranks if takes_turns(view.spec, place.slot)]
    if ranks:
        engines = [one for one in view.workers.values() if one.role != "train" and one.job_uid == view.mirror.keys.uid]
        shared = {(one.node, slot) for one in plan.engines for slot in one.slots}
        shared |= {(one.node, slot) for one in engines for slot in one.slots}
        yield from ((place.rank, place) for place in ranks if (place.node, place.slot) in shared)


def engines_asleep_for_ranks(view: JobView) -> frozenset[str]:
    """The engines (by instance) that must sleep now, because a train rank uses the memory of their slot."""
    places = ranks_taking_turns(view)
    if not places or view.mirror.head is None:
        return frozenset()
    mirror = view.mirror
    sources = (mirror.plan, mirror.head, mirror.seals, mirror.claims, view.workers, view.ranks)
    turns = view.remembered.get("ranks' turns", sources, lambda: {r: _its_turn(view, r) for r in places})
    known = {**view.engines, **view.judges}
    found = set()
    for rank, its_turn in turns.items():
        for instance in _engines_on(view, places[rank]):
            engine = known.get(instance)
            # While a rank has not reported, it is unknown whether it has its memory, so nothing changes.
            if its_turn or (its_turn is None and engine is not None and engine.asleep):
                found.add(instance)
    return frozenset(found)


def _its_turn(view: JobView, rank: int) -> bool | None:
    """Whether the memory of the rank's slot is the rank's now: a batch is READY, or the rank is loading, or it has not
    released its memory yet. None: the rank has not reported."""
    if _is_ready(view) or not _serves(view, rank):
        return True
    known = view.ranks.get(rank)
    return None if known is None else not (known.released >= PARTS or known.unrested)


def take_turns(view: JobView) -> Iterator[Intent]:
    """Have train ranks release their memory after a commit, and load their state again when a batch is READY and the
    engines sleep."""
    for rank, place in ranks_taking_turns(view).items():
        known = view.ranks.get(rank)
        if known is None or not _serves(view, rank):
            continue
        if _is_ready(view):
            seal = view.seal
            assert seal is not None
            if known.released and known.applied != seal.token and _all_sleep(view, place):
                yield Intent(RestoreRank(rank), f"restore {rank} {seal.token}", after=_patience(view, place))
        elif not known.released >= PARTS and not known.unrested and _is_at_head(view, known):
            topic = f"release {rank} {view.head.world} {view.head.step}"
            yield Intent(ReleaseRank(rank, view.head.step), topic, after=_patience(view, place))


def train_delay_s(view: JobView, rank: int) -> float:
    """Seconds that this controller waits before it tells a rank to train a READY batch, so that the engines on the slot
    can release their memory and the rank can load its state. 0 if the rank has its memory and the engines sleep, or if
    it shares no slot. A controller of another node waits longer."""
    known, place = view.ranks.get(rank), ranks_taking_turns(view).get(rank)
    if known is None or place is None:
        return 0.0
    if known.released:
        return PATIENCE_S
    if place.node != view.node:
        return AWAY_S
    return 0.0 if _all_sleep(view, place) else PATIENCE_S


def blocking_nodes(view: JobView) -> tuple[str, ...]:
    """The nodes whose ranks cannot train the READY batch yet, because engines there have not released memory or the
    ranks have not loaded their state, as far as this controller knows."""
    if not _is_ready(view):
        return ()
    resting = {rank for rank, known in view.ranks.items() if known.released}
    return tuple(sorted({place.node for rank, place in ranks_taking_turns(view).items() if rank in resting}))


def _is_ready(view: JobView) -> bool:
    seal = view.seal
    return seal is not None and seal.state is SealState.READY


def _is_at_head(view: JobView, known: RankView) -> bool:
    """Whether a rank's state is the committed one. A rank that has trained nothing has just loaded that state."""
    return known.applied is None or (known.applied.lineage, known.applied.step) == (view.head.lineage, view.head.step)


def _serves(view: JobView, rank: int) -> bool:
    """Whether the process of this rank is loaded and serves requests."""
    if view.plan.world != view.head.world:
        return False
    claim = view.mirror.claim(view.head.world, rank)
    worker = view.workers.get(claim.instance) if claim is not None else None
    return worker is not None and worker.state == "serving"


def _engines_on(view: JobView, place: RankPlace) -> Iterator[str]:
    """The job's engines on a rank's slot (by instance), including engines of judges."""
    by_slot = view.remembered.get(
        "engines by slot", (view.workers,), lambda: _by_slot(view.workers, view.mirror.keys.uid)
    )
    yield from by_slot.get((place.node, place.slot), ())


def _by_slot(workers: Mapping[str, WorkerRecord], job_uid: str) -> dict[tuple[str, str], list[str]]:
    """The serving engines of a job by node and slot."""
    found: dict[tuple[str, str], list[str]] = {}
    for instance, worker in sorted(workers.items()):
        if worker.role != "train" and worker.job_uid == job_uid and worker.state == "serving":
            for slot in worker.slots:
                found.setdefault((worker.node, slot), []).append(instance)
    return found


def _all_sleep(view: JobView, place: RankPlace) -> bool:
    """Whether every engine on a rank's slot is asleep, as far as this controller knows."""
    known = {**view.engines, **view.judges}
    return all(name in known and known[name].asleep for name in _engines_on(view, place))


def _patience(view: JobView, place: RankPlace) -> float:
    """Seconds that this controller waits before it acts on a rank: 0 on its own node, else `AWAY_S`."""
    return 0.0 if place.node == view.node else AWAY_S


def owned_engines(
    job_uid: str,
    workers: Mapping[str, WorkerRecord],
    members: Mapping[str, Member],
    me: str,
    joining: Collection[str] = (),
    role: ServingPool = "rollout",
) -> dict[str, WorkerRecord]:
    """The serving engines of a job that the controller `me` manages, by instance: those of its node, and by hash those
    of nodes without a member.

    `joining`: nodes whose controller has not joined the job yet; their engines are left out. `role`: engines of the
    policy ("rollout") or of judges ("reward"). Any peer may send requests to a judge's engine, but only its manager
    puts it to sleep and wakes it.
    """
    here = {m.node: incarnation for incarnation, m in sorted(members.items())}
    begins = _begins(worker for worker in workers.values() if worker.role != "train" and worker.job_uid == job_uid)
    mine = {}
    for instance, worker in sorted(workers.items()):
        if worker.role != role or worker.job_uid != job_uid or worker.state != "serving":
            continue
        owner = here.get(worker.node)
        if owner is None and worker.node in joining:
            continue
        begin = begins.get((worker.node, worker.slot), worker.slot)
        if owner == me or (
            owner is None and me in members and turn_of(members, me, f"engines of {worker.node} {begin}") == 0
        ):
            mine[instance] = worker
    return mine


def _begins(engines: Iterable[WorkerRecord]) -> dict[tuple[str, str], str]:
    """For each slot (node, name) that an engine with several slots uses: the first slot of the widest such engine. All
    slots with the same result get the same manager."""
    wide = sorted((one for one in engines if one.further), key=lambda one: len(one.slots))
    return {(one.node, slot): one.slot for one in wide for slot in one.slots}


SLEEP_RETRY_S = 0.5
"""Delay before another attempt to put an engine to sleep or to wake it."""


def engine_places(plan: Plan | None, workers: Mapping[str, WorkerRecord], job_uid: str) -> dict[str, EnginePlace]:
    """The plan's entry for each running engine of the job, by instance. Engines that the plan does not include are left
    out."""
    places = {(place.node, place.slots, place.judge): place for place in plan.engines} if plan is not None else {}
    engines = {i: w for i, w in workers.items() if w.job_uid == job_uid and w.role != "train"}
    found = {instance: places.get((w.node, w.slots, w.judge)) for instance, w in engines.items()}
    return {instance: place for instance, place in found.items() if place is not None}


def planned_sleepers(plan: Plan | None, workers: Mapping[str, WorkerRecord], job_uid: str) -> frozenset[str]:
    """The running engines (by instance) that should sleep according to the plan."""
    if plan is None or not any(place.asleep for place in plan.engines):
        return frozenset()
    return frozenset(name for name, place in engine_places(plan, workers, job_uid).items() if place.asleep)


def sleeping_engines(view: JobView) -> frozenset[str]:
    """The engines (by instance) that must sleep now: according to the plan, or because a train rank uses the memory of
    their slot."""
    plan, uid = view.mirror.plan, view.mirror.keys.uid
    planned = view.remembered.get(
        "sleepers",
        (plan, view.workers),
        lambda: planned_sleepers(plan.record if plan is not None else None, view.workers, uid),
    )
    return planned | engines_asleep_for_ranks(view)


def apply_sleep_plan(view: JobView) -> Iterator[Intent]:
    """Put the engines to sleep that must sleep, and wake the others when no engine on their slots has to fall asleep
    first."""
    asleep = sleeping_engines(view)
    engines = managed_engines(view)
    if not asleep and not any(engine.asleep for engine in engines.values()):
        return
    moving = {name.split()[1] for name in view.under_way if name.startswith(("publish ", "sleep ", "wake "))}
    still_awake = {slot for name in asleep & engines.keys() if not engines[name].asleep for slot in _slots(view, name)}
    for name, engine in sorted(engines.items()):
        if name in moving or engine.silent:
            continue
        judge = view.workers[name].judge
        if name in asleep and not engine.asleep:
            yield Intent(SleepEngine(name, judge), f"sleep {name}", after=SLEEP_RETRY_S if engine.trouble else 0.0)
        elif name not in asleep and engine.asleep and still_awake.isdisjoint(_slots(view, name)):
            yield Intent(WakeEngine(name, judge), f"wake {name}", after=SLEEP_RETRY_S if engine.trouble else 0.0)


def managed_engines(view: JobView) -> dict[str, EngineView]:
    """The engines of policy and judges that this controller puts to sleep and wakes, by instance."""
    members = {name: stored.record for name, stored in view.mirror.members.items() if not stored.record.leaving}
    own = dict(view.engines)
    if view.judges:
        uid, sources = view.mirror.keys.uid, (view.workers, view.mirror.members)
        judges = view.remembered.get(
            "my judges", sources, lambda: owned_engines(uid, view.workers, members, view.me, role="reward")
        )
        own |= {name: engine for name, engine in view.judges.items() if name in judges}
    return {name: engine for name, engine in own.items() if name in view.workers}


def _slots(view: JobView, instance: str) -> set[tuple[str, str]]:
    worker = view.workers[instance]
    return {(worker.node, slot) for slot in worker.slots}
