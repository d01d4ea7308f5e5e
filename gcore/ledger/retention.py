"""What stays of a job: which checkpoints are kept, and which records the store may forget.

*Checkpoints.* Kept are the newest n, one every k steps for ever, the best, and the first model. Only those on head's chain count:
no rollback goes to a branch that was cut off. A chain has one state for each step, whatever lineage it was written in. The newest
on the chain is always kept, so a new world always has a start.

*Records* that nothing reads any more, beside old log entries (`gcore.ledger.chain.prunable_entries`): worlds other than head's (a rank of
another one is refused by all); parts of evaluations of other weights than head's; warnings of nodes that are gone, but for the
newest few; evaluations but the newest few, the first, and the best on head's chain as it is and as it would be after going back
to each registered checkpoint (the others move to the run's folder first). Every transaction compares head and the checkpoints.
`controllers.rules.retention` decides when, `controllers.job.executor` deletes the entry before the files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from gcore.config.spec import JobSpec
from gcore.ledger.evaluation import best_evaluation, metric_value, resolve_metric
from gcore.ledger.records.chain import Checkpoint, Checkpoints, Head
from gcore.ledger.records.job import (
    EvalPart,
    Evaluation,
    Trouble,
)
from gcore.ledger.selection import (
    is_ancestor,
    resumable_checkpoints,
)
from gcore.ledger.transactions import Transaction, TxnKind, Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete
from gcore.types import Version


class KeepReason(StrEnum):
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
        best = best_evaluation(head, evaluations, spec.best_metric)
        return cls(spec.checkpoint.keep, spec.checkpoint.keep_every, best.version.step if best is not None else None)


def keep_reasons(
    head: Head, known: Iterable[Checkpoint], policy: Retention
) -> Mapping[Checkpoint, frozenset[KeepReason]]:
    """What is kept of `known`, in its order, and for which reasons."""
    entries = tuple(known)
    on_chain = resumable_checkpoints(head, (c for c in entries if c.file))
    newest = on_chain[: policy.newest]
    found: dict[Checkpoint, frozenset[KeepReason]] = {}
    for one in entries:
        reasons = set()
        if not one.file:
            reasons.add(KeepReason.FIRST)
        elif one in on_chain:
            if one in newest:
                reasons.add(KeepReason.NEWEST)
            if policy.every is not None and one.step % policy.every == 0:
                reasons.add(KeepReason.EVERY)
            if one.step == policy.best:
                reasons.add(KeepReason.BEST)
        if reasons:
            found[one] = frozenset(reasons)
    return found


def orphaned_checkpoints(head: Head, kept: Iterable[Checkpoint], lying: Iterable[Version]) -> frozenset[Version]:
    """The checkpoints among those that lie in the run's folder which no record names, and none ever will.

    Whoever forgot them died before it deleted them, or never heard that it had. One that head's chain still may register is
    newer than all that are registered there, so it stays; also one of a step that is trained and not committed yet.
    """
    entries = tuple(kept)
    named = {(checkpoint.lineage, checkpoint.step) for checkpoint in entries}
    newest = max((checkpoint.step for checkpoint in resumable_checkpoints(head, entries)), default=0)
    return frozenset(
        version
        for version in lying
        if version not in named
        and (version.step <= newest or not is_ancestor(head, version))
        and not (version.lineage == head.lineage and version.step > head.step)
    )


NEWEST_EVALUATIONS = 8
"""Evaluations that stay in any case."""

NEWEST_TROUBLES = 16
"""Troubles of nodes that are gone which stay."""

MOST_SWEPT = 100
"""Keys, or worlds, of one transaction: the store takes 128 operations."""


@dataclass(frozen=True, slots=True)
class SweptKeys:
    """Worlds whose keys go, parts of evaluations, by "version/number" as the key spells it, and troubles by topic."""

    worlds: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.worlds or self.parts or self.troubles)


def superfluous_keys(
    head: Head,
    worlds: Iterable[str],
    parts: Mapping[str, Versioned[EvalPart]],
    troubles: Mapping[str, Versioned[Trouble]] = MappingProxyType({}),
    nodes: Collection[str] = (),
) -> SweptKeys:
    """What belongs to other worlds than head's, to evaluations of other weights, and to nodes that are gone.

    `worlds`: of which there are any keys; `nodes`: those that are there.
    """
    past = sorted({world for world in worlds if world != head.world})[:MOST_SWEPT]
    cut_off = sorted(name for name, part in parts.items() if part.record.version != head.version)
    cut_off = cut_off[: MOST_SWEPT - len(past)]
    left = [topic for topic, one in troubles.items() if one.record.is_of_a_node and one.record.node not in nodes]
    left.sort(key=lambda topic: troubles[topic].revision, reverse=True)
    return SweptKeys(
        tuple(past), tuple(cut_off), tuple(left[NEWEST_TROUBLES:][: MOST_SWEPT - len(past) - len(cut_off)])
    )


def superfluous_evaluations(
    head: Head, checkpoints: Iterable[Checkpoint], evaluations: Mapping[str, Versioned[Evaluation]], metric: str | None
) -> tuple[str, ...]:
    """The versions whose evaluations may move to the run's folder, oldest first."""
    by_age = sorted(evaluations, key=lambda name: evaluations[name].revision)
    kept = set(by_age[-NEWEST_EVALUATIONS:])
    on_chain = [evaluations[name].record for name in by_age if is_ancestor(head, evaluations[name].record.version)]
    first = min(on_chain, key=lambda one: one.version.step, default=None)
    kept |= {str(first.version)} if first is not None else set()
    if metric is not None:
        metric = resolve_metric(metric, on_chain)
        for step in {head.step, *(target.step for target in resumable_checkpoints(head, checkpoints))}:
            reached = [one for one in on_chain if one.version.step <= step and metric_value(one, metric) is not None]
            best = best_evaluation(head, reached, metric)
            kept |= {str(best.version)} if best is not None else set()
    return tuple(name for name in by_age if name not in kept)


def sweep(keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], swept: SweptKeys) -> Transaction:
    """Take it away."""
    if head.record.world in swept.worlds:
        raise ValueError(f"world {head.record.world} is head's")
    worlds = (Delete(keys.world(world), prefix=True) for world in swept.worlds)
    parts = (Delete(f"{keys.eval_part_prefix}{part}") for part in swept.parts)
    troubles = (Delete(keys.trouble(topic)) for topic in swept.troubles)
    return _pruning(keys, head, known, (*worlds, *parts, *troubles))


def forget_evaluations(
    keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], versions: Sequence[str]
) -> Transaction:
    """Take evaluations out of the store that stand in the run's folder by now."""
    return _pruning(keys, head, known, tuple(Delete(keys.evaluation(version)) for version in versions))


def _pruning(
    keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], deletes: tuple[Delete, ...]
) -> Transaction:
    if len(deletes) > MOST_SWEPT:
        raise ValueError(f"{len(deletes)} keys are more than the {MOST_SWEPT} of one transaction")
    compares = (Compare(keys.head, head.revision), Compare(keys.checkpoints, known.revision))
    return Transaction(TxnKind.PRUNE, compares, deletes)
