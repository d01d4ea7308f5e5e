"""Engines and train ranks that share a slot, and take turns in its memory: rules of `controllers.decide`. Pure, like all rules.

At staleness 0 they never compute at the same time, so only one of them need have its memory at a time. When a batch is READY the
engines on the ranks' slots go to sleep (`controllers.sleeping` does it: nothing new, what is under way given back, then cache and
weights), then the ranks there take their memory again, and train. After the commit they give all of it back, and only then do the
engines wake, are brought the new weights, and are asked again. Nothing of a rank is needed for that: what was committed lies in the
run's folder. While a rank loads it is its turn too.

That a rank has its memory and the engines beside it sleep is the word to train. Only who sees that has the rank restored and says
Apply, which is their node's controller; while it is away, others say it a little later. Nobody waits for another without end: a rank that is told to train takes its
memory by itself, and is told so after `PATIENCE_S` whoever sleeps; one that cannot give its memory back keeps it, and the engines
wake beside it.

`placement.memory` says which jobs do so. Which engines run where is the plan's to say, how memory is released each worker's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from controllers.actions import Intent, ReleaseRank, RestoreRank
from controllers.view import JobView, RankView
from gcore.config import JobSpec
from gcore.ledger.job import SLEEP_CAME, RankPlace
from gcore.ledger.records import SealState
from gcore.schema import spoken
from gcore.slots import is_cuda
from gcore.train.rest_rules import PARTS
from gcore.worker.records import WorkerRecord

PATIENCE_S = 60.0
"""After so long a READY batch is trained even if engines have not made room."""
AWAY_S = 5.0
"""And so long is a node's controller waited for before another tells its ranks to give memory back, or to train."""


def takes_turns(spec: JobSpec, slot: str) -> bool:
    """Whether an engine and a rank of the job that share `slot` have its memory one after the other."""
    if spec.placement.memory is not None:
        return spec.placement.memory == "in_turns"
    apart = spec.placement.policy == "static" or spec.rollout.staleness > 0 or spec.train.stream
    return is_cuda(slot) and not apart


def shared(view: JobView) -> Mapping[int, RankPlace]:
    """The ranks of head's world that take turns, by rank."""
    plan = view.mirror.plan
    if plan is None or spoken() < SLEEP_CAME:  # an older node would ask an engine that sleeps, and wait for it
        return {}
    return view.remembered.get(
        "turns",
        (view.spec, plan),
        lambda: {place.rank: place for place in plan.record.ranks if takes_turns(view.spec, place.slot)},
    )


def asleep_for_ranks(view: JobView) -> frozenset[str]:
    """The engines of the job that sleep because it is a rank's turn."""
    places = shared(view)
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
            # Of a rank that nobody has heard yet it is not known whether it has its memory: all stays as it is.
            if its_turn or (its_turn is None and engine is not None and engine.asleep):
                found.add(instance)
    return frozenset(found)


def _its_turn(view: JobView, rank: int) -> bool | None:
    """Whether the slot's memory is the rank's; None: not known yet."""
    if _is_ready(view) or not _serves(view, rank):
        return True
    known = view.ranks.get(rank)
    return None if known is None else not (known.released >= PARTS or known.unrested)


def turning(view: JobView) -> Iterator[Intent]:
    """Ranks give their memory back behind a commit, and take it again before they train."""
    for rank, place in shared(view).items():
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


def held_back_s(view: JobView, rank: int) -> float:
    """Seconds that a rank of a READY batch is given before it is told to train: to take its memory, and for the engines beside it to give
    theirs back. A rank that has just loaded has its memory before anybody slept. Who does not see its engines leaves it to who does."""
    known, place = view.ranks.get(rank), shared(view).get(rank)
    if known is None or place is None:
        return 0.0
    if known.released:
        return PATIENCE_S
    if place.node != view.node:
        return AWAY_S
    return 0.0 if _all_sleep(view, place) else PATIENCE_S


def in_the_way(view: JobView) -> tuple[str, ...]:
    """The nodes whose engines have not made room for the ranks of a READY batch, as far as this controller sees it, or whose ranks have
    not taken it."""
    if not _is_ready(view):
        return ()
    resting = {rank for rank, known in view.ranks.items() if known.released}
    return tuple(sorted({place.node for rank, place in shared(view).items() if rank in resting}))


def _is_ready(view: JobView) -> bool:
    seal = view.seal
    return seal is not None and seal.state is SealState.READY


def _is_at_head(view: JobView, known: RankView) -> bool:
    """Whether a rank has done no more, and no less, than what is committed; one that has trained nothing has just loaded that."""
    return known.applied is None or (known.applied.lineage, known.applied.step) == (view.head.lineage, view.head.step)


def _serves(view: JobView, rank: int) -> bool:
    """Whether a rank of head's world is loaded."""
    assert view.mirror.plan is not None
    if view.mirror.plan.record.world != view.head.world:
        return False
    claim = view.mirror.claim(view.head.world, rank)
    worker = view.workers.get(claim.instance) if claim is not None else None
    return worker is not None and worker.state == "serving"


def _engines_on(view: JobView, place: RankPlace) -> Iterator[str]:
    """The engines that serve the job on a rank's slot, its judges' too."""
    by_slot = view.remembered.get(
        "engines by slot", (view.workers,), lambda: _by_slot(view.workers, view.mirror.keys.uid)
    )
    yield from by_slot.get((place.node, place.slot), ())


def _by_slot(workers: Mapping[str, WorkerRecord], job_uid: str) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for instance, worker in sorted(workers.items()):
        if worker.role != "train" and worker.job_uid == job_uid and worker.state == "serving":
            for slot in worker.slots:
                found.setdefault((worker.node, slot), []).append(instance)
    return found


def _all_sleep(view: JobView, place: RankPlace) -> bool:
    """Whether this controller sees every engine on a rank's slot asleep."""
    known = {**view.engines, **view.judges}
    return all(name in known and known[name].asleep for name in _engines_on(view, place))


def _patience(view: JobView, place: RankPlace) -> float:
    """Who is nearer sees to a rank."""
    return 0.0 if place.node == view.node else AWAY_S
