"""What is claimed of a node's slots where no worker serves that could tell. Pure.

A place of the plan whose worker does not serve is `switching` while it loads, and `failed` once it has failed, or was there and is
gone. What has no place any more is switching until it has ended. A slot that has no place in the job's plan is `unallocated`: it is so to
this job, whichever other job it may serve. So is one whose places all sleep: nobody is to have it. Where an engine over several slots sleeps
because it is a rank's turn on one of them, the others are idle: they wait for the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from controllers.sleeping import places_of
from controllers.view import JobView
from gcore.worker.records import WorkerRecord
from placement.books import FAILED, NOBODY, UNALLOCATED, Line, Pool, State, Telling, idle, switching


class Places:
    """What such places are, and since when. Mutable."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Line[State | None]] = {}
        self._served: set[str] = set()
        """Places that had a worker which served."""

    def note(
        self, view: JobView, here: Mapping[str, WorkerRecord], now: float, left: Collection[tuple[str, Pool]] = ()
    ) -> None:
        """It is so from now on. `here`: the job's workers on this node; `left`: as `left_by_ranks` has them."""
        self._served |= {place_of(worker) for worker in here.values() if worker.state == "serving"}
        found = absences(view, here, frozenset(self._served))
        found |= {(slot, f"turn of {pool}"): idle(pool, "barrier") for slot, pool in left}
        for key, state in found.items():
            if key not in self._lines:
                self._lines[key] = Line(state, now)
            self._lines[key].note(state, now)
        for key in self._lines.keys() - found.keys():
            self._lines[key].note(None, now)

    @property
    def slots(self) -> frozenset[str]:
        """Those of which something is known."""
        return frozenset(slot for slot, _ in self._lines)

    def told(self, settled: Mapping[str, float], until: float) -> Iterator[tuple[str, Telling]]:
        """By slot, what was so until then. `settled`: from when on, by slot."""
        for (slot, place), line in list(self._lines.items()):
            begin = settled[slot]
            for state, seconds in line.over(begin, until):
                if state is not None:
                    yield slot, Telling(f"place {place}", begin, begin + seconds, {state: seconds})
                begin += seconds
            line.forget(until)
            if line.now is None and line.since <= until:
                del self._lines[slot, place]


def left_by_ranks(
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


def absences(
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
    places = places_of(plan, workers, view.mirror.keys.uid)
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
        there.setdefault(place_of(worker), []).append(worker)
    for place in plan.engines:
        if place.node == view.node:
            name = _engine(place.judge, place.slot)
            for slot in place.slots:
                yield slot, name, place.pool, there.get(name, [])
    for rank in plan.ranks:
        if rank.node == view.node:
            name = _rank(plan.world, rank.rank, rank.slot)
            yield rank.slot, name, "train", there.get(name, [])


def place_of(worker: WorkerRecord) -> str:
    """What the place is known by for which a worker is there."""
    if worker.role == "train":
        return _rank(worker.world or "", worker.rank or 0, worker.slot)
    return _engine(worker.judge, worker.slot)


def _engine(judge: str, slot: str) -> str:
    return f"engine {judge} {slot}"


def _rank(world: str, rank: int, slot: str) -> str:
    return f"rank {world} {rank} {slot}"
