"""Cluster usage of jobs, for accounting: slot-seconds, and tokens used at external judges (paid reward models).

*Slot-seconds* (`NodeUsage`). The daemon of each node sums them by day, job, node and pool from slot accounting
(`gcore.ledger.records.slot_accounting`), step by step. These records outlive the job, its folder and its other records,
so they contain the job's owner. A step counts for the UTC day on which it ended. No transaction of a job compares them.

*External judges* (`NodeSpent`). Each node has one small record per job. It is under no lease, because it must remain
when the controller dies; the node's next controller continues it. A controller keeps the earlier sums in the record
unchanged, and writes its own use so far beside them. Writing this is idempotent, so a write without a response is
repeated. If another controller has replaced the record, or it is gone, only the unwritten difference is added. Token
counts are integers; the cost follows from the prices in the spec. Records of absent nodes are merged into that of a
present node, in a transaction that compares both, so that changing node names do not fill the store.
`controllers.inference.judges` decides when to write.
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
"""Days for which usage is kept: more than a year, so that a month can be compared with the same month of the previous
year.
"""

OTHER = "other"
"""Name under which slot-seconds of a job are summed that belong to no pool: weight transfers, failed workers, and
unaccounted time.
"""

NEWEST_STEPS = 8
"""Number of step keys kept in a record, so that a step is not added twice when a write is repeated after a timeout."""

POOLS = ("rollout", "reward", "train")
DIMENSIONS = ("namespace", "job", "owner", "pool")


class PoolSeconds(RecordPart):
    """Slot-seconds of one pool. `slot_s`: total. `busy_s`: those in which the slots were busy."""

    slot_s: NonNegativeFloat = 0.0
    busy_s: NonNegativeFloat = 0.0

    def plus(self, other: PoolSeconds) -> PoolSeconds:
        """Sum of both."""
        return PoolSeconds(slot_s=self.slot_s + other.slot_s, busy_s=self.busy_s + other.busy_s)


class NodeUsage(Record):
    """`usage/{node}/{day}/{uid}`: usage of one node by one job on one day."""

    called: ClassVar[str] = "usage of a node"

    day: NonNegativeInt
    """Days since the epoch."""
    uid: str
    job: str
    """Name of the job."""
    namespace: str
    owner: str = ""
    pools: dict[str, PoolSeconds] = Field(default_factory=dict)
    steps: tuple[str, ...] = ()
    """Keys of the newest steps that are included."""

    def plus(self, book: StepAccount) -> NodeUsage:
        """Return the record with one more step added; unchanged if the step is already included."""
        name = step_key(book)
        if name in self.steps:
            return self
        pools = dict(self.pools)
        for pool, more in pool_seconds(book).items():
            pools[pool] = pools[pool].plus(more) if pool in pools else more
        return self.model_copy(update={"pools": pools, "steps": (*self.steps, name)[-NEWEST_STEPS:]})


def step_key(book: StepAccount) -> str:
    """Key of an accounted step: its version and start time. A step repeated after a rollback has another key."""
    return f"{book.version}@{book.began:.3f}"


def end_day(book: StepAccount) -> int:
    """Day on which the step ended, in days since the epoch."""
    return max(0, int((book.began + book.seconds) // DAY_S))


def pool_seconds(book: StepAccount) -> dict[str, PoolSeconds]:
    """Slot-seconds that a job used in a step, by pool. Slots without a role in the job's plan do not count."""
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
    """Sums usage records, grouped by some of `DIMENSIONS`. Mutable: records are added as they are read."""

    def __init__(self, by: Iterable[str]) -> None:
        self._dimensions = tuple(dict.fromkeys(by))
        self._sums: dict[tuple[str, ...], tuple[float, float]] = {}

    def add(self, usage: NodeUsage) -> None:
        """Add the slot-seconds of one record to the sums of its groups."""
        for pool, seconds in usage.pools.items():
            named = {"namespace": usage.namespace, "job": usage.job, "owner": usage.owner, "pool": pool}
            key = tuple(named[one] for one in self._dimensions)
            slot_s, busy_s = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = slot_s + seconds.slot_s, busy_s + seconds.busy_s

    def ranked(self) -> list[tuple[Mapping[str, str], PoolSeconds]]:
        """The groups and their sums, by slot-seconds in descending order. A group is a value for each dimension."""
        ranked = sorted(self._sums.items(), key=lambda item: (-item[1][0], item[0]))
        return [
            (dict(zip(self._dimensions, key, strict=True)), PoolSeconds(slot_s=slot_s, busy_s=busy_s))
            for key, (slot_s, busy_s) in ranked
        ]


SPARE_NODES = 16
"""Number of absent nodes whose records of judge use are kept; those of further ones are merged."""

MOST_ADDED_UP = 50
"""Maximum number of merged records per transaction: the store allows 128 operations."""

MOST_COUNTED = 1 << 62
"""Maximum of a stored count. A larger count is an error of the judge's server, and would overflow a `float`."""


def _counted(count: object) -> object:
    """Limit an integer to `MOST_COUNTED`. Other values are returned unchanged; pydantic then rejects them."""
    return min(count, MOST_COUNTED) if isinstance(count, int) else count


UseCount = Annotated[NonNegativeInt, BeforeValidator(_counted)]


class JudgeUse(RecordPart):
    """Use of one external judge: number of requests, and tokens in requests and responses."""

    requests: UseCount = 0
    tokens_in: UseCount = 0
    tokens_out: UseCount = 0

    def plus(self, other: JudgeUse) -> JudgeUse:
        """Sum of both."""
        return JudgeUse(
            requests=self.requests + other.requests,
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
        )

    def minus(self, other: JudgeUse) -> JudgeUse:
        """Difference of each count, at least 0."""
        return JudgeUse(
            requests=max(0, self.requests - other.requests),
            tokens_in=max(0, self.tokens_in - other.tokens_in),
            tokens_out=max(0, self.tokens_out - other.tokens_out),
        )


Uses = Mapping[str, JudgeUse]
"""Use of external judges, by judge name."""

NOTHING = JudgeUse()


class NodeSpent(Record):
    """Record `spent/{node}`: use of external judges by one node for a job."""

    node: str
    by: str
    """The writer: the controller's incarnation, and a number that increases each time it starts working on the job."""
    before: dict[str, JudgeUse] = Field(default_factory=dict)
    """By judge: use by earlier writers on the node, and by absent nodes whose records were merged into this one."""
    life: dict[str, JudgeUse] = Field(default_factory=dict)
    """By judge: use by this writer that no other record contains."""

    @property
    def uses(self) -> dict[str, JudgeUse]:
        """Total use by judge: earlier writers and this one."""
        return add_uses((self.before, self.life))


def add_uses(uses: Iterable[Uses]) -> dict[str, JudgeUse]:
    """Add up several mappings from judge to use."""
    total: dict[str, JudgeUse] = {}
    for one in uses:
        for judge, use in one.items():
            total[judge] = total.get(judge, NOTHING).plus(use)
    return total


def subtract_uses(uses: Uses, others: Uses) -> dict[str, JudgeUse]:
    """`uses` minus `others` by judge, without judges whose difference is 0."""
    rest = {judge: use.minus(others.get(judge, NOTHING)) for judge, use in uses.items()}
    return {judge: use for judge, use in rest.items() if use != NOTHING}


def use_cost(use: JudgeUse, judge: ExternalJudge) -> float:
    """Cost of `use`, in the currency of the judge's prices, which are per million tokens."""
    return (use.tokens_in * judge.price_in + use.tokens_out * judge.price_out) / 1e6


def records_to_merge(
    spent: Mapping[str, Versioned[NodeSpent]], me: str, nodes: Collection[str]
) -> Mapping[str, Versioned[NodeSpent]]:
    """Records of absent nodes that node `me` must merge into its own: the oldest beyond `SPARE_NODES`, by node.

    `spent`: all records, by node. `nodes`: the present nodes. At most `MOST_ADDED_UP`.
    """
    gone = sorted((name for name in spent if name != me and name not in nodes), key=lambda name: spent[name].revision)
    return {name: spent[name] for name in gone[: max(0, len(gone) - SPARE_NODES)][:MOST_ADDED_UP]}


def spend(
    keys: JobKeys, old: Revisioned | None, new: NodeSpent, gone: Mapping[str, Versioned[NodeSpent]] | None = None
) -> Transaction:
    """Write a node's use of external judges, under no lease.

    `gone`: records of absent nodes, which are added to `new` and deleted. Compares all of these records, so that none
    has changed or been merged by another node. Raises ValueError if `gone` contains the node itself.
    """
    gone = gone or {}
    if new.node in gone:
        raise ValueError(f"node {new.node} cannot be merged into itself")
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
