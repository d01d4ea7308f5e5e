"""Retention: which checkpoints are kept, and which records are deleted from the store.

*Checkpoints.* A job keeps the newest n, every k-th step permanently, the best by evaluation, and the base (the initial
model). Only checkpoints on head's chain count, because no rollback goes to a discarded branch. A chain has one state
per step. The newest checkpoint on the chain is always kept, so a new train world always has a starting point.

*Records.* Besides old log entries (`gcore.ledger.chain.prunable_entries`), these are deleted from the store: keys of
train worlds other than head's, whose ranks can no longer train; parts of evaluations of other weights than head's; and
warnings of absent nodes, except the newest few. Evaluations are deleted after they were copied to the run folder. The
newest few evaluations stay. So do the first and the best on head's chain, as it is now and as it would be after a
rollback to each registered checkpoint. Every deleting transaction compares head and the checkpoints.
`controllers.rules.retention` decides when to delete; `controllers.job.executor` deletes a checkpoint's entry before its
files.
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
    """Why a checkpoint is kept: see `Retention`. FIRST: it is the base, the job's initial model."""

    NEWEST = "newest"
    EVERY = "every"
    BEST = "best"
    FIRST = "first"


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a job are kept, in addition to the base.

    `newest`: this many of the newest. `every`: those of steps that are a multiple of this; None: none. `best`: the one
    of this step, the best by evaluation; None: none.
    """

    newest: int
    every: int | None = None
    best: int | None = None

    @classmethod
    def of(cls, spec: JobSpec, head: Head, evaluations: Iterable[Evaluation]) -> Retention:
        """The retention that `spec` configures, with the best step among `evaluations`."""
        best = best_evaluation(head, evaluations, spec.best_metric)
        return cls(spec.checkpoint.keep, spec.checkpoint.keep_every, best.version.step if best is not None else None)


def keep_reasons(
    head: Head, known: Iterable[Checkpoint], policy: Retention
) -> Mapping[Checkpoint, frozenset[KeepReason]]:
    """Select the checkpoints to keep from `known`, in its order. Returns the reasons by kept checkpoint."""
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
    """Versions of checkpoints in the run folder that may be deleted, because no record names them now or later.

    Such a checkpoint remains if a controller unregistered it and died before it deleted the files, or if the write that
    unregistered it had no response. `kept`: the registered checkpoints. `lying`: the versions in the run folder. A
    checkpoint on head's chain that is newer than all registered ones may still be registered and stays. So does a
    checkpoint of a step that is trained but not committed yet.
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
"""Number of newest evaluations that always stay in the store."""

NEWEST_TROUBLES = 16
"""Number of newest warnings of absent nodes that stay in the store."""

MOST_SWEPT = 100
"""Maximum number of deletions per transaction: the store allows 128 operations."""


@dataclass(frozen=True, slots=True)
class SweptKeys:
    """Which records to delete: all keys of train worlds, evaluation parts ("version/number"), and warnings (topics)."""

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
    """Find records to delete: those of train worlds other than head's, evaluation parts of other weights than head's,
    and warnings of absent nodes except the newest. At most `MOST_SWEPT` in all.

    `worlds`: train worlds that have any key. `nodes`: names of the present nodes.
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
    """Versions whose evaluations may move from the store to the run folder, oldest first.

    `metric`: the metric by which the best checkpoint is chosen; None: the best need not stay.
    """
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
    """Delete the records in `swept`. Raises ValueError if it contains head's world, or more than `MOST_SWEPT` keys."""
    if head.record.world in swept.worlds:
        raise ValueError(f"world {head.record.world} is head's world and cannot be deleted")
    worlds = (Delete(keys.world(world), prefix=True) for world in swept.worlds)
    parts = (Delete(f"{keys.eval_part_prefix}{part}") for part in swept.parts)
    troubles = (Delete(keys.trouble(topic)) for topic in swept.troubles)
    return _pruning(keys, head, known, (*worlds, *parts, *troubles))


def forget_evaluations(
    keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], versions: Sequence[str]
) -> Transaction:
    """Delete the evaluations of `versions` from the store; they must be in the run folder already.

    Raises ValueError for more than `MOST_SWEPT`.
    """
    return _pruning(keys, head, known, tuple(Delete(keys.evaluation(version)) for version in versions))


def _pruning(
    keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], deletes: tuple[Delete, ...]
) -> Transaction:
    if len(deletes) > MOST_SWEPT:
        raise ValueError(f"{len(deletes)} keys exceed the maximum of {MOST_SWEPT} per transaction")
    compares = (Compare(keys.head, head.revision), Compare(keys.checkpoints, known.revision))
    return Transaction(TxnKind.PRUNE, compares, deletes)
