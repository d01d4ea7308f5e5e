"""The time for which nobody kept a node's books: from the last step that the controller's life before had booked until this life began.

A worker that was there then, and serves still, tells itself what it did meanwhile, and is waited for. One that was there and tells nothing
more has failed, for the job had nothing of it: it is gone, was on its way out before it could be asked, is of a train world that is no
more, or is silent. A slot on which nobody was before or is now had nobody: it was `unallocated`, or has failed if the plan has a place
there, which nobody could fill.

What a worker that began later has summed up says when it began; a rank's word of that is waited for, too. Of the time before it began, and of
workers that sum nothing up, nothing is known: it stays unbooked. Who waits, and who reads, is `controllers.booked`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from controllers.view import JobView
from gcore.ledger.books_file import Kept
from gcore.worker.records import WorkerRecord
from placement.books import FAILED, UNALLOCATED, State, Telling


class Gap:
    """From `begin` to `end`; there is none if these are the same. Mutable."""

    def __init__(self, begin: float, end: float, kept: Mapping[str, Kept]) -> None:
        """`kept`: of those that were there, when it began."""
        self._begin = begin
        self._end = end
        self._silent: dict[str, tuple[str, ...]] = {instance: (one.slot,) for instance, one in kept.items()}
        self._fresh: set[str] = set()
        """Ranks that began since."""
        self._is_seen = end <= begin

    @property
    def is_seen(self) -> bool:
        """Whether `look` was told who is there."""
        return self._is_seen

    def look(self, view: JobView, here: Mapping[str, WorkerRecord]) -> Iterator[tuple[str, Telling]]:
        """By slot, what is known as soon as it is seen who is there. `here`: the job's workers on this node."""
        self._is_seen = True
        plan, node = view.mirror.plan, view.nodes.get(view.node)
        planned = set()
        if plan is not None:
            planned = {slot for place in plan.record.engines if place.node == view.node for slot in place.slots}
            planned |= {rank.slot for rank in plan.record.ranks if rank.node == view.node}
        self._silent |= {instance: here[instance].slots for instance in self._silent.keys() & here.keys()}
        serving = {
            instance for instance, worker in here.items() if worker.role == "train" and worker.state == "serving"
        }
        self._fresh = serving - self._silent.keys()
        taken = {slot for worker in here.values() for slot in worker.slots}
        taken |= {slot for slots in self._silent.values() for slot in slots}
        for slot in node.slots if node is not None else ():
            if slot not in taken:
                yield slot, self._told("nobody", FAILED if slot in planned else UNALLOCATED)
        for instance in [name for name in self._silent if name not in here or here[name].state != "serving"]:
            yield from self.lost(instance)

    def waits(self, silent: Collection[str]) -> bool:
        """Whether somebody may still tell. `silent`: those who do not answer."""
        return not self._is_seen or bool((self._silent.keys() | self._fresh) - set(silent))

    def heard(self, instance: str) -> None:
        """It has told what it did."""
        self._silent.pop(instance, None)
        self._fresh.discard(instance)

    def lost(self, instance: str) -> Iterator[tuple[str, Telling]]:
        """It will not tell any more."""
        self._fresh.discard(instance)
        for slot in self._silent.pop(instance, ()):
            yield slot, self._told(instance, FAILED)

    def close(self) -> Iterator[tuple[str, Telling]]:
        """Nobody is waited for any more."""
        for instance in list(self._silent):
            yield from self.lost(instance)

    def _told(self, worker: str, state: State) -> Telling:
        return Telling(worker, self._begin, self._end, {state: self._end - self._begin})
