"""Which checkpoints are kept, and why: the newest n, one every k steps for ever, the best, and the first model. Pure.

Only what lies on head's chain counts: where a rollback cut the chain off, nobody will ever go back to. A chain has one state
for each step, whatever lineage it was written in. The newest on the chain is always kept, so what is forgotten never takes
away where a new world would start; and what stands at a multiple of k stays kept however many come after it.

Deletes nothing (`controllers.housekeeping` decides, `controllers.apply` deletes the entry before the files).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gcore.config import JobSpec
from gcore.ledger.ancestry import is_ancestor, resumable
from gcore.ledger.evaluation import best_of
from gcore.ledger.job import Evaluation
from gcore.ledger.records import Checkpoint, Head
from gcore.types import Version


class Why(StrEnum):
    """A reason to keep a checkpoint."""

    NEWEST = "newest"
    EVERY = "every"
    BEST = "best"
    FIRST = "first"


@dataclass(frozen=True, slots=True)
class Retention:
    """`newest`: how many of the newest; `every`: those at a multiple of so many steps, None: of none; `best`: the step of the
    best evaluated state, None: there is none."""

    newest: int
    every: int | None = None
    best: int | None = None

    @classmethod
    def of(cls, spec: JobSpec, head: Head, evaluations: Iterable[Evaluation]) -> Retention:
        """What `spec` says, as the evaluations stand."""
        best = best_of(head, evaluations, spec.best_metric)
        return cls(spec.checkpoint.keep, spec.checkpoint.keep_every, best.version.step if best is not None else None)


def why_kept(head: Head, known: Iterable[Checkpoint], policy: Retention) -> Mapping[Checkpoint, frozenset[Why]]:
    """What is kept of `known`, in its order, and for which reasons."""
    entries = tuple(known)
    on_chain = resumable(head, (c for c in entries if c.file))
    newest = on_chain[: policy.newest]
    found: dict[Checkpoint, frozenset[Why]] = {}
    for one in entries:
        reasons = set()
        if not one.file:
            reasons.add(Why.FIRST)
        elif one in on_chain:
            if one in newest:
                reasons.add(Why.NEWEST)
            if policy.every is not None and one.step % policy.every == 0:
                reasons.add(Why.EVERY)
            if one.step == policy.best:
                reasons.add(Why.BEST)
        if reasons:
            found[one] = frozenset(reasons)
    return found


def orphaned(head: Head, kept: Iterable[Checkpoint], lying: Iterable[Version]) -> frozenset[Version]:
    """The checkpoints among those that lie in the run's folder which no record names, and none ever will.

    Whoever forgot them died before it deleted them, or never heard that it had. One that head's chain still may register is
    newer than all that are registered there, so it stays; also one of a step that is trained and not committed yet.
    """
    entries = tuple(kept)
    named = {(checkpoint.lineage, checkpoint.step) for checkpoint in entries}
    newest = max((checkpoint.step for checkpoint in resumable(head, entries)), default=0)
    return frozenset(
        version
        for version in lying
        if version not in named
        and (version.step <= newest or not is_ancestor(head, version))
        and not (version.lineage == head.lineage and version.step > head.step)
    )
