"""What stays of a job: which checkpoints are kept, which records the store may forget, and how much the store holds at most.

*Checkpoints.* Kept are the newest n, one every k steps for ever, the best, and the first model. Only those on head's chain count:
no rollback goes to a branch that was cut off. A chain has one state for each step, whatever lineage it was written in. The newest
on the chain is always kept, so a new world always has a start.

*Records* that nothing reads any more, beside old log entries (`gcore.ledger.chain.prunable`): worlds other than head's (a rank of
another one is refused by all); parts of evaluations of other weights than head's; warnings of nodes that are gone, but for the
newest few; evaluations but the newest few, the first, and the best on head's chain as it is and as it would be after going back
to each registered checkpoint (the others move to the run's folder first). Every transaction compares head and the checkpoints.
`controllers.rules.retention` decides when, `controllers.job.executor` deletes the entry before the files.

*Bounds.* For each kind of key of `gcore.store.keys.JobKeys` how many there are at most, and how large each is. They follow from the
spec, from how many controllers and ranks there are now, and from how often the job went back or re-formed its world (28 bytes each
time, in head: those numbers tell for ever which evaluation, epoch record or served version is of the chain). They do not depend on
the number of steps, but for checkpoints that the spec keeps for ever (`checkpoint.keep_every`). What is not pruned yet is part of
them (`LAG`): while the run's folder takes nothing, the log grows up to it. Sizes are generous sums of what a record's fields take
as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from gcore.config.spec import JobSpec, eval_sources, training_sources
from gcore.data.order import shard_lengths
from gcore.ledger.collectives import MAX_NAMES, MAX_VALUE_BYTES
from gcore.ledger.evaluation import MOST_PARTS, best_evaluation, metric_value
from gcore.ledger.records.chain import Checkpoint, Checkpoints, Head
from gcore.ledger.records.job import (
    MOST_MOVE_BYTES,
    MOST_SAID,
    MOST_STAY_BYTES,
    NEWEST_MOVES,
    NEWEST_STAYS,
    EvalPart,
    Evaluation,
    Trouble,
)
from gcore.ledger.records.slot_accounting import MAX_ACCOUNT_BYTES, NEWEST_STEPS
from gcore.ledger.selection import (
    MOST_BYTES,
    MOST_OUTCOMES,
    cursor_bytes,
    is_ancestor,
    offer_bytes,
    resumable_checkpoints,
    seal_bytes,
)
from gcore.ledger.transactions import MOST_PRUNED, Transaction, TxnKind, Versioned
from gcore.ledger.usage import SPARE_NODES
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


KEPT_LOG = 64
"""Newest log entries that stay (`controllers.rules.retention.KEEP_LOG`)."""

LAG = 132
"""Log entries that wait to be pruned: those that make a prune worth while, and those of one that is under way."""

MOST_FAULTS = 64
"""Faults of one job, beside one more of each controller (`controllers.telemetry.notices.MOST_OF_JOB`)."""

TOPICS = 16
"""Things of the job that may have trouble, beside trackers."""

NODE_TOPICS = 12
"""Things of a node: waits of its own (`controllers.rules.waits.LOCAL`), its engines, its rewards. And on each slot the start of an
engine and of a rank."""

JUDGE_TOPICS = 4
"""Things of a judge that a node may tell: answers that cannot be read, its key, its counts, and the start of an engine. Beside
those, one tells for all that what it may cost is spent."""

SMALL = 512
"""Bytes of a record's fixed fields, its key included."""

OUTCOME = 512
"""Bytes of an ended ref: with its reason, versions and source."""

TRAINED = 256

USE = 192
"""Bytes of what was asked of one judge, its name included."""

STATS = 16_384
"""Bytes of a step's numbers for people."""


@dataclass(frozen=True, slots=True)
class JobScale:
    """What a job's records depend on beside its spec: how many there are now, and how often its world was formed anew."""

    prompts: int
    controllers: int
    ranks: int
    engines: int
    rollbacks: int = 0
    steps: int = 0
    """Only of a spec that keeps checkpoints for ever."""


@dataclass(frozen=True, slots=True)
class KeyBound:
    """At most so many keys of a kind, and bytes in each, keys included."""

    keys: int
    each: int

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return self.keys * self.each


def key_bounds(spec: JobSpec, scale: JobScale) -> Mapping[str, KeyBound]:
    """By the kind of key: what comes after the job's prefix, up to the first slash; of the placement, up to the second."""
    sources, sets = len(training_sources(spec)), len(eval_sources(spec))
    names = max((len(source.name) for source in (*training_sources(spec), *eval_sources(spec))), default=0)
    tally = sources * (220 + names)
    cursors = cursor_bytes(spec)
    checkpoints, coming = max_checkpoints(spec, scale), 1 + (KEPT_LOG + LAG) // spec.checkpoint.every
    groups = spec.flow.groups_per_step * (TRAINED + 24 * (spec.rollout.staleness + 1))
    outcomes = MOST_OUTCOMES * OUTCOME
    entry = SMALL + STATS + groups + outcomes + cursors + tally
    here = scale.controllers
    return {
        "job": KeyBound(1, SMALL + 2 * len(spec.model_dump_json())),
        "state": KeyBound(1, SMALL + 2 * MOST_SAID),
        "head": KeyBound(1, SMALL + cursors + tally + 28 * (scale.rollbacks + 2)),
        "assign": KeyBound(1, SMALL + 96 * here + 8 * spec.data.shards),
        "ckpts": KeyBound(1, SMALL + 256 * checkpoints),
        "plan": KeyBound(1, SMALL + 144 * (scale.ranks + scale.engines)),
        "log": KeyBound(KEPT_LOG + LAG + checkpoints + 2, entry),
        "seal": KeyBound(1, SMALL + seal_bytes(spec) + outcomes),
        "member": KeyBound(here, SMALL),
        "offer": KeyBound(here, SMALL + 2 * offer_bytes(spec) + outcomes),
        "fetch": KeyBound(here, SMALL),
        "storage": KeyBound(here, SMALL),
        "copies": KeyBound(here, SMALL + 256 * scale.ranks * (checkpoints + 2)),
        "folder": KeyBound(here, SMALL + 128 * (checkpoints + 2) + 16 * MOST_PRUNED + 64 * MOST_SWEPT),
        "part": KeyBound(here, SMALL + MAX_NAMES * (MAX_VALUE_BYTES + 80)),
        "agreed": KeyBound(3 * MAX_NAMES, SMALL + here * (MAX_VALUE_BYTES + 80)),
        "world": KeyBound(2 * (scale.ranks + 1), SMALL),
        "eval": KeyBound(2 * NEWEST_EVALUATIONS + checkpoints + 3, MOST_BYTES),
        "evalask": KeyBound(1, SMALL),
        "evalpart": KeyBound(2 * (MOST_PARTS + sets), MOST_BYTES // 8),
        "epoch": KeyBound(2 + max_window_epochs(spec, scale) * (checkpoints + coming + 1), SMALL + 2 * tally),
        "spent": KeyBound(here + SPARE_NODES + 1, SMALL + 2 * USE * len(spec.judges)),
        "placement/books": KeyBound(here, SMALL + NEWEST_STEPS * MAX_ACCOUNT_BYTES),
        "placement/leader": KeyBound(1, SMALL),
        "placement/pin": KeyBound(1, SMALL),
        "placement/moves": KeyBound(1, SMALL + NEWEST_MOVES * MOST_MOVE_BYTES + NEWEST_STAYS * MOST_STAY_BYTES),
        "trouble": KeyBound(
            TOPICS
            + len(spec.tracking)
            + len(spec.judges)
            + (NODE_TOPICS + JUDGE_TOPICS * len(spec.judges)) * here
            + 2 * scale.engines
            + NEWEST_TROUBLES,
            SMALL + 2 * MOST_SAID,
        ),
        "fault": KeyBound(MOST_FAULTS + here, SMALL + 4 * MOST_SAID),
    }


def max_checkpoints(spec: JobSpec, scale: JobScale) -> int:
    """Registered at once: the kept ones, the best, the base, one that is new and one that is to be forgotten."""
    every = spec.checkpoint.keep_every
    return spec.checkpoint.keep + 4 + (scale.steps // every if every else 0)


def max_window_epochs(spec: JobSpec, scale: JobScale) -> int:
    """Data epochs that a window may reach into, of all shards; 0 without a curriculum."""
    if spec.data.curriculum is None:
        return 0
    shortest = min(shard_lengths(scale.prompts, spec.data.shards).lengths)
    return math.ceil(2 * spec.data.window / shortest) + 2
