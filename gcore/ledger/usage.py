"""What jobs have used of the cluster, for whoever pays for it: slot-seconds by day, job, node and pool, under `usage/`.

They are summed up from the books (`gcore.ledger.books`), step by step, by the daemon of the node whose slots they are. They outlive
the job, its folder and its other records, and say by themselves whose job it was. A step's time belongs to the UTC day on which it
ended. Told, never decided by: no transaction of a job compares it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from gcore.ledger.books import StepBook
from gcore.schema import Part, Record

DAY_S = 86_400
KEPT_DAYS = 400
"""So long they stay: a year can be compared with the month before it."""
OTHER = "other"
"""The pool of slots that were a job's and no pool's: weights on their way, a worker that failed, time that nobody can explain."""
NEWEST_STEPS = 8
"""Steps of which a record remembers that it has them: a write whose answer never came is not made twice."""
POOLS = ("rollout", "reward", "train")
DIMENSIONS = ("namespace", "job", "owner", "pool")


class PoolSeconds(Part):
    """Of one pool: seconds that slots were the job's, and of these, those at work."""

    slot_s: NonNegativeFloat = 0.0
    busy_s: NonNegativeFloat = 0.0

    def plus(self, other: PoolSeconds) -> PoolSeconds:
        """Both together."""
        return PoolSeconds(slot_s=self.slot_s + other.slot_s, busy_s=self.busy_s + other.busy_s)


class NodeUsage(Record):
    """`usage/{node}/{day}/{uid}`: what one job used of one node on one day."""

    called: ClassVar[str] = "usage of a node"

    day: NonNegativeInt
    """Since the epoch."""
    uid: str
    job: str
    """Its name."""
    namespace: str
    owner: str = ""
    pools: dict[str, PoolSeconds] = Field(default_factory=dict)
    steps: tuple[str, ...] = ()
    """The newest that are in it."""

    def plus(self, book: StepBook) -> NodeUsage:
        """With a step more; the same if it is in it."""
        name = step_name(book)
        if name in self.steps:
            return self
        pools = dict(self.pools)
        for pool, more in pools_of(book).items():
            pools[pool] = pools[pool].plus(more) if pool in pools else more
        return self.model_copy(update={"pools": pools, "steps": (*self.steps, name)[-NEWEST_STEPS:]})


def step_name(book: StepBook) -> str:
    """What a booked stretch of time is told apart by: a step that is made again is another one."""
    return f"{book.version}@{book.began:.3f}"


def day_of(book: StepBook) -> int:
    """The day on which it ended."""
    return max(0, int((book.began + book.seconds) // DAY_S))


def pools_of(book: StepBook) -> dict[str, PoolSeconds]:
    """What of a step's time was the job's. Slots where the plan has no place are not the job's."""
    pools: dict[str, PoolSeconds] = {}
    for state, seconds in [*book.booked.items(), ("unbooked", book.unbooked)]:
        kind, _, rest = state.partition(" ")
        if kind == "unallocated" or not seconds:
            continue
        name = rest.partition(">")[2] if kind == "switching" else rest.partition(" ")[0]
        pool = name if name in POOLS else OTHER
        more = PoolSeconds(slot_s=seconds, busy_s=seconds if kind == "busy" else 0.0)
        pools[pool] = pools[pool].plus(more) if pool in pools else more
    return pools


class UsageSums:
    """What was used, by some of `DIMENSIONS`. Mutable: records are added as they are read."""

    def __init__(self, by: Iterable[str]) -> None:
        self._dimensions = tuple(dict.fromkeys(by))
        self._sums: dict[tuple[str, ...], tuple[float, float]] = {}

    def add(self, usage: NodeUsage) -> None:
        """One record more."""
        for pool, seconds in usage.pools.items():
            named = {"namespace": usage.namespace, "job": usage.job, "owner": usage.owner, "pool": pool}
            key = tuple(named[one] for one in self._dimensions)
            slot_s, busy_s = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = slot_s + seconds.slot_s, busy_s + seconds.busy_s

    def ranked(self) -> list[tuple[Mapping[str, str], PoolSeconds]]:
        """The most first."""
        ranked = sorted(self._sums.items(), key=lambda item: (-item[1][0], item[0]))
        return [
            (dict(zip(self._dimensions, key, strict=True)), PoolSeconds(slot_s=slot_s, busy_s=busy_s))
            for key, (slot_s, busy_s) in ranked
        ]
