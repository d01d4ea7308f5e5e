"""Upper bounds for a job's size in the store.

For each kind of key of `gcore.store.keys.JobKeys`: the maximum number of keys and the size of each. They follow from the
spec, from the present number of controllers and ranks, and from the number of rollbacks and world changes (28 bytes each
in head: these numbers tell which evaluation, epoch record or served version belongs to the chain). They do not depend on
the number of steps, except for checkpoints that the spec keeps forever (`checkpoint.keep_every`). Entries that are not yet pruned are
included (`LAG`): the log grows up to it while the run's folder is not writable. Sizes are generous sums of a record's fields
as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gcore.config.spec import JobSpec, eval_sources, training_sources
from gcore.data.order import shard_lengths
from gcore.ledger.archive import EVALUATIONS, index_lines
from gcore.ledger.collectives import MAX_NAMES, MAX_VALUE_BYTES
from gcore.ledger.evaluation import MOST_PARTS
from gcore.ledger.records.job import MOST_MOVE_BYTES, MOST_SAID, MOST_STAY_BYTES, NEWEST_MOVES, NEWEST_STAYS, Evaluation
from gcore.ledger.records.slot_accounting import MAX_ACCOUNT_BYTES, NEWEST_STEPS
from gcore.ledger.retention import MOST_SWEPT, NEWEST_EVALUATIONS, NEWEST_TROUBLES
from gcore.ledger.selection import MOST_BYTES, MOST_OUTCOMES, cursor_bytes, offer_bytes, seal_bytes
from gcore.ledger.transactions import MOST_PRUNED
from gcore.ledger.usage import SPARE_NODES

KEPT_LOG = 64
"""Newest log entries that stay (`controllers.rules.retention.KEEP_LOG`)."""

LAG = 132
"""Log entries that wait to be pruned: those that make a prune worth while, and those of one that is under way."""

MOST_FAULTS = 64
"""Faults of one job, beside one more of each controller (`controllers.telemetry.notices.MOST_OF_JOB`)."""

TOPICS = 16
"""Things of the job that may have trouble, beside trackers."""

NODE_TOPICS = 13
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
    """The numbers that a job's records depend on beside its spec: present instances, and the number of world changes."""

    prompts: int
    controllers: int
    ranks: int
    engines: int
    rollbacks: int = 0
    steps: int = 0
    """Only for a spec that keeps checkpoints forever."""


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


def archived_evaluations(run_dir: Path) -> dict[str, Evaluation]:
    """Every evaluation that left the store, by its version."""
    found = (Evaluation.decode(line, str(place)) for place, line in index_lines(run_dir / EVALUATIONS))
    return {str(one.version): one for one in found}


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
