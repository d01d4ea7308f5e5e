"""What jobs have used of the cluster, for invoices: slot-seconds under `usage/`, and what judges outside of it cost.

Slot-seconds by day, job, node and pool are summed up from slot accounting (`gcore.ledger.records.slot_accounting`), step by step,
by the daemon of the node whose slots they are. They outlive the job, its folder and its other records, and name the job's owner
themselves. A step's time belongs to the UTC day on which it ended. No transaction of a job compares them.

What a job has spent on judges is one small record for each node. Money is spent once, whichever process dies, so a node's record is
under no lease, and its next controller goes on from it: it leaves what was there as it is, and beside that writes what its own life
has spent so far. Writing that again changes nothing, so a write without an answer is simply repeated. Where a node's record is
another's by now, or gone, only what that life had not written yet is added. Tokens are counted in whole numbers; their cost follows
from the prices of the spec. Records of nodes that are gone are added to a present one, in a transaction that compares both, so that
changing node names do not fill the store. `controllers.inference.judges` decides when it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt

from gcore.config.reward import ExternalJudge
from gcore.ledger.records.slot_accounting import StepAccount
from gcore.ledger.transactions import Revisioned, Transaction, TxnKind, Versioned
from gcore.schema import Record, RecordPart
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put

DAY_S = 86_400

KEPT_DAYS = 400
"""So long they stay: a year can be compared with the month before it."""

OTHER = "other"
"""The pool of slots that were a job's and no pool's: weights on their way, a worker that failed, time that nobody can explain."""

NEWEST_STEPS = 8
"""Steps of which a record remembers that it has them: a write whose answer never came is not made twice."""

POOLS = ("rollout", "reward", "train")
DIMENSIONS = ("namespace", "job", "owner", "pool")


class PoolSeconds(RecordPart):
    """Slot-seconds of one pool: seconds that slots were the job's, and of these, those at work."""

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

    def plus(self, book: StepAccount) -> NodeUsage:
        """With a step more; the same if it is in it."""
        name = step_key(book)
        if name in self.steps:
            return self
        pools = dict(self.pools)
        for pool, more in pool_seconds(book).items():
            pools[pool] = pools[pool].plus(more) if pool in pools else more
        return self.model_copy(update={"pools": pools, "steps": (*self.steps, name)[-NEWEST_STEPS:]})


def step_key(book: StepAccount) -> str:
    """What a booked stretch of time is told apart by: a step that is made again is another one."""
    return f"{book.version}@{book.began:.3f}"


def end_day(book: StepAccount) -> int:
    """The day on which it ended."""
    return max(0, int((book.began + book.seconds) // DAY_S))


def pool_seconds(book: StepAccount) -> dict[str, PoolSeconds]:
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


SPARE_NODES = 16
"""Records of nodes that are gone which stay as they are; more are added up."""

MOST_ADDED_UP = 50
"""Of one transaction: the store takes 128 operations."""

MOST_COUNTED = 1 << 62
"""What there is more of is counted as so many: it is a server's nonsense, and as a `float` it must not overflow."""


def _counted(count: object) -> object:
    """`count`, as far as anybody counts; what is no number is refused where it is validated."""
    return min(count, MOST_COUNTED) if isinstance(count, int) else count


UseCount = Annotated[NonNegativeInt, BeforeValidator(_counted)]


class JudgeUse(RecordPart):
    """What was asked of one judge, and answered."""

    requests: UseCount = 0
    tokens_in: UseCount = 0
    tokens_out: UseCount = 0

    def plus(self, other: JudgeUse) -> JudgeUse:
        """Both together."""
        return JudgeUse(
            requests=self.requests + other.requests,
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
        )

    def minus(self, other: JudgeUse) -> JudgeUse:
        """What there is more than in `other`."""
        return JudgeUse(
            requests=max(0, self.requests - other.requests),
            tokens_in=max(0, self.tokens_in - other.tokens_in),
            tokens_out=max(0, self.tokens_out - other.tokens_out),
        )


Uses = Mapping[str, JudgeUse]
"""By judge."""

NOTHING = JudgeUse()


class NodeSpent(Record):
    """`spent/{node}`."""

    node: str
    by: str
    """The life that wrote it: an incarnation, and a number for each time that it took the job up."""
    before: dict[str, JudgeUse] = Field(default_factory=dict)
    """By judge: what the node had asked before that life, and nodes that are gone."""
    life: dict[str, JudgeUse] = Field(default_factory=dict)
    """What that life has asked, as far as it stands in no other record."""

    @property
    def uses(self) -> dict[str, JudgeUse]:
        """All of it."""
        return add_uses((self.before, self.life))


def add_uses(uses: Iterable[Uses]) -> dict[str, JudgeUse]:
    """All of them together."""
    total: dict[str, JudgeUse] = {}
    for one in uses:
        for judge, use in one.items():
            total[judge] = total.get(judge, NOTHING).plus(use)
    return total


def subtract_uses(uses: Uses, others: Uses) -> dict[str, JudgeUse]:
    """What there is more in `uses` than in `others`."""
    rest = {judge: use.minus(others.get(judge, NOTHING)) for judge, use in uses.items()}
    return {judge: use for judge, use in rest.items() if use != NOTHING}


def use_cost(use: JudgeUse, judge: ExternalJudge) -> float:
    """In the unit of the judge's prices."""
    return (use.tokens_in * judge.price_in + use.tokens_out * judge.price_out) / 1e6


def records_to_merge(
    spent: Mapping[str, Versioned[NodeSpent]], me: str, nodes: Collection[str]
) -> Mapping[str, Versioned[NodeSpent]]:
    """The records that `me` is to add to its own: the oldest of nodes that are not there, if there are too many of them."""
    gone = sorted((name for name in spent if name != me and name not in nodes), key=lambda name: spent[name].revision)
    return {name: spent[name] for name in gone[: max(0, len(gone) - SPARE_NODES)][:MOST_ADDED_UP]}


def spend(
    keys: JobKeys, old: Revisioned | None, new: NodeSpent, gone: Mapping[str, Versioned[NodeSpent]] | None = None
) -> Transaction:
    """Write what a node has spent, under no lease. With `gone`, nodes whose records are added to it, and are deleted.

    Compares its own record, and those: none of them may have grown meanwhile, nor been added up by another.
    """
    gone = gone or {}
    if new.node in gone:
        raise ValueError(f"{new.node} cannot be added to itself")
    before = add_uses((new.before, *(stored.record.uses for stored in gone.values())))
    written = new.model_copy(update={"before": before})
    key = keys.spent(new.node)
    compares = (
        Compare(key, old.revision if old else 0),
        *(Compare(keys.spent(n), s.revision) for n, s in gone.items()),
    )
    return Transaction(
        TxnKind.SPEND, compares, (Put(key, written.encode()), *(Delete(keys.spent(name)) for name in gone))
    )
