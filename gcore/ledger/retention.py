"""Retention: which checkpoints are kept, and which records the store may delete.

*Checkpoints.* Kept are the newest n, one every k steps permanently, the best, and the base. Only those on head's chain
count, because no rollback goes to a discarded branch. A chain has one state per step, in whichever lineage it was
written. The newest on the chain is always kept, so a new world always has a starting point.

*Records.* Deleted are, in addition to old log entries (`gcore.ledger.chain.prunable_entries`): keys of worlds other
than head's, whose ranks are refused; parts of evaluations of weights other than head's; warnings of absent nodes,
except the newest few; and evaluations, which move to the run folder first. Kept are the newest few evaluations, the
first, and the best, both on head's chain now and after a rollback to each registered checkpoint. Every transaction
compares head and the checkpoints. `controllers.rules.retention` decides when; `controllers.job.executor` deletes the
entry before the files.
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
    """`newest`: number of newest checkpoints.

    `every`: keep steps at a multiple of this; None: none. `best`: step of the best evaluated state; None: none.
    """

    newest: int
    every: int | None = None
    best: int | None = None

    @classmethod
    def of(cls, spec: JobSpec, head: Head, evaluations: Iterable[Evaluation]) -> Retention:
        """The policy of `spec` with the current evaluations."""
        best = best_evaluation(head, evaluations, spec.best_metric)
        return cls(spec.checkpoint.keep, spec.checkpoint.keep_every, best.version.step if best is not None else None)


def keep_reasons(
    head: Head, known: Iterable[Checkpoint], policy: Retention
) -> Mapping[Checkpoint, frozenset[KeepReason]]:
    """The kept checkpoints of `known`, in its order, with their reasons."""
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
    """Checkpoints in the run folder that no record names now or later.

    A controller unregistered them and died before it deleted them, or did not learn that its write succeeded. A
    checkpoint that head's chain may still register is newer than all registered ones and stays, and so does one of a
    trained but uncommitted step.
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
"""Number of newest evaluations that always stay."""

NEWEST_TROUBLES = 16
"""Number of newest warnings of absent nodes that stay."""

MOST_SWEPT = 100
"""Maximum number of keys or worlds per transaction: the store allows 128 operations."""


@dataclass(frozen=True, slots=True)
class SweptKeys:
    """Keys to delete: worlds; evaluation parts by "version/number" as in the key; warnings by topic."""

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
    """Keys of worlds other than head's, evaluation parts of other weights, and warnings of absent nodes.

    `worlds`: those with any key. `nodes`: the present nodes.
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
    """Versions whose evaluations may move to the run folder, oldest first."""
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
    """Delete these keys. Raises ValueError for head's world or too many keys."""
    if head.record.world in swept.worlds:
        raise ValueError(f"world {head.record.world} is head's world and cannot be deleted")
    worlds = (Delete(keys.world(world), prefix=True) for world in swept.worlds)
    parts = (Delete(f"{keys.eval_part_prefix}{part}") for part in swept.parts)
    troubles = (Delete(keys.trouble(topic)) for topic in swept.troubles)
    return _pruning(keys, head, known, (*worlds, *parts, *troubles))


def forget_evaluations(
    keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], versions: Sequence[str]
) -> Transaction:
    """Delete evaluations that are in the run folder. Raises ValueError for too many."""
    return _pruning(keys, head, known, tuple(Delete(keys.evaluation(version)) for version in versions))


def _pruning(
    keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], deletes: tuple[Delete, ...]
) -> Transaction:
    if len(deletes) > MOST_SWEPT:
        raise ValueError(f"{len(deletes)} keys exceed the maximum of {MOST_SWEPT} per transaction")
    compares = (Compare(keys.head, head.revision), Compare(keys.checkpoints, known.revision))
    return Transaction(TxnKind.PRUNE, compares, deletes)
