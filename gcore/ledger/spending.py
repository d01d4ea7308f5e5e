"""What a job has spent on judges that others serve: one small record for each node, which adds what its controllers have asked.

Money is spent once, whoever dies, so a node's record is under no lease, and its next controller goes on from it: what came
before its own life it leaves as it is, and beside that it says what its own life has spent so far. Saying that again changes
nothing, so a write whose answer never came is simply made again. Where a node's record turns out to be another's by now, or
gone, only what that life had not written yet is added to what is there.

Tokens are counted, in whole numbers; what they cost follows from the prices of the spec. Records of nodes that are gone are
added to one that is there, in a transaction that compares both, so that nodes which come and go under ever new names do not
fill the store. Pure; when it is written is `controllers.spending`'s business, what is asked after is `ExternalJudge`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, NonNegativeInt

from gcore.config.judges import ExternalJudge
from gcore.ledger.guarded import Stored, Transaction, TxnKind, Written
from gcore.schema import Part, Record
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put

SPARE_NODES = 16
"""Records of nodes that are gone which stay as they are; more are added up."""
MOST_ADDED_UP = 50
"""Of one transaction: the store takes 128 operations."""
MOST_COUNTED = 1 << 62
"""What there is more of is counted as so many: it is a server's nonsense, and as a `float` it must not overflow."""


def _counted(count: object) -> object:
    """`count`, as far as anybody counts; what is no number is refused where it is validated."""
    return min(count, MOST_COUNTED) if isinstance(count, int) else count


Count = Annotated[NonNegativeInt, BeforeValidator(_counted)]


class JudgeUse(Part):
    """What was asked of one judge, and answered."""

    requests: Count = 0
    tokens_in: Count = 0
    tokens_out: Count = 0

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
        return added((self.before, self.life))


def added(uses: Iterable[Uses]) -> dict[str, JudgeUse]:
    """All of them together."""
    total: dict[str, JudgeUse] = {}
    for one in uses:
        for judge, use in one.items():
            total[judge] = total.get(judge, NOTHING).plus(use)
    return total


def taken_off(uses: Uses, others: Uses) -> dict[str, JudgeUse]:
    """What there is more in `uses` than in `others`."""
    rest = {judge: use.minus(others.get(judge, NOTHING)) for judge, use in uses.items()}
    return {judge: use for judge, use in rest.items() if use != NOTHING}


def cost_of(use: JudgeUse, judge: ExternalJudge) -> float:
    """In the unit of the judge's prices."""
    return (use.tokens_in * judge.price_in + use.tokens_out * judge.price_out) / 1e6


def to_add_up(
    spent: Mapping[str, Stored[NodeSpent]], me: str, nodes: Collection[str]
) -> Mapping[str, Stored[NodeSpent]]:
    """The records that `me` is to add to its own: the oldest of nodes that are not there, if there are too many of them."""
    gone = sorted((name for name in spent if name != me and name not in nodes), key=lambda name: spent[name].revision)
    return {name: spent[name] for name in gone[: max(0, len(gone) - SPARE_NODES)][:MOST_ADDED_UP]}


def spend(
    keys: JobKeys, old: Written | None, new: NodeSpent, gone: Mapping[str, Stored[NodeSpent]] | None = None
) -> Transaction:
    """Write what a node has spent, under no lease. With `gone`, nodes whose records are added to it, and are deleted.

    Compares its own record, and those: none of them may have grown meanwhile, nor been added up by another.
    """
    gone = gone or {}
    if new.node in gone:
        raise ValueError(f"{new.node} cannot be added to itself")
    before = added((new.before, *(stored.record.uses for stored in gone.values())))
    written = new.model_copy(update={"before": before})
    key = keys.spent(new.node)
    compares = (
        Compare(key, old.revision if old else 0),
        *(Compare(keys.spent(n), s.revision) for n, s in gone.items()),
    )
    return Transaction(
        TxnKind.SPEND, compares, (Put(key, written.encode()), *(Delete(keys.spent(name)) for name in gone))
    )
