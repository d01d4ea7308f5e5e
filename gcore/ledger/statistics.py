"""Tallies of prompt outcomes by source, records of data epochs, and reasons why a step is short.

A tally counts trained, filtered and failed prompts by source (dataset). Like head's cursors it is a sum over the
entries of the chain, and a rollback restores both. The statistics of a curriculum come from it, and it shows when a
complete epoch trained nothing. Its size depends only on the number of sources.

Shards are in different epochs and controllers read at different moments, so "the statistics so far" differ between any
two of them. The first controller that needs epoch n writes head's tally at that moment (`EpochRecord`); no prompt of
the epoch is sampled before. Head alone decides which record is valid (`valid_epochs`): a record of a version that a
rollback discarded is not. A group is accepted only if its versions are ancestors of head, and its epoch record is older
than these versions. A group is therefore valid only with its record: within one lineage a ref always means one prompt.
Epoch 0 has no record, and neither has a job without a curriculum.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from gcore.data.order import Cursors, StreamShape
from gcore.ledger.records.chain import (
    Checkpoint,
    EndedRef,
    EpochRecord,
    Head,
    LogEntry,
    SealedGroup,
    SinceStep,
    SourceTally,
    Tally,
)
from gcore.ledger.selection import DataExhausted, StreamRules, is_ancestor, resumable_checkpoints
from gcore.types import PromptRef, Version

NOTHING = Tally()

NEWEST_SHARE = 0.3
"""Weight of the newest step in the moving average `Tally.issue_ratio`."""

MOST_OBSERVED = 16.0
"""Maximum prompts per trained group that one step contributes to `Tally.issue_ratio`, so that a single step that used
very many prompts does not affect many later steps.
"""


def add_to_tally(tally: Tally, groups: Iterable[SealedGroup], outcomes: Collection[EndedRef]) -> Tally:
    """Return the tally after a log entry that trained `groups` and recorded `outcomes` (filtered and failed prompts).

    Raises ValueError if `outcomes` contains a trained prompt.
    """
    sources = dict(tally.sources)
    newest = tally.trained_epoch
    by_source: dict[str, list[SealedGroup]] = {}
    for group in groups:
        by_source.setdefault(group.source, []).append(group)
        newest = group.ref.data_epoch if newest is None else max(newest, group.ref.data_epoch)
    for name, trained in by_source.items():
        old = sources.get(name, SourceTally())
        sources[name] = old.model_copy(
            update={
                "kept": old.kept + len(trained),
                "samples": old.samples + sum(len(group.response_tokens) for group in trained),
                "truncated": old.truncated + sum(group.truncated for group in trained),
                "tokens": old.tokens + sum(sum(group.own_tokens) for group in trained),
                # Added in a fixed order, so that every controller gets the same floating-point sum.
                "reward": functools.reduce(lambda so_far, group: so_far + group.reward, trained, old.reward),
            }
        )
    for ended in outcomes:
        if ended.kind == "trained":
            raise ValueError(f"prompt {ended.ref} was trained; pass its group instead")
        old = sources.get(ended.source, SourceTally())
        counts = {"failed": old.failed + 1} if ended.kind == "failed" else {"filtered": old.filtered + 1}
        sources[ended.source] = old.model_copy(update=counts)
    return tally.model_copy(
        update={"sources": sources, "trained_epoch": newest, "since_step": add_outcomes(tally.since_step, outcomes)}
    )


def add_outcomes(before: SinceStep, outcomes: Iterable[EndedRef]) -> SinceStep:
    """Return the counts of filtered and failed prompts since the newest step, with `outcomes` added."""
    counts = before.model_dump()
    for ended in outcomes:
        counts["failed" if ended.kind == "failed" else "filtered"] += 1
        if ended.reward is not None and ended.length is not None:
            counts["scored"] += 1
            counts["reward"] += ended.reward
            counts["length"] += ended.length
    return SinceStep(**counts)


def start_next_step(tally: Tally, groups: int) -> Tally:
    """Return the tally after a step that trained `groups` groups: resets the counts since the newest step, and updates
    the mean number of prompts per trained group (`issue_ratio`).

    The first step with groups sets the mean; each later step has weight `NEWEST_SHARE`.
    """
    ratio = tally.issue_ratio
    if groups:
        took = min((tally.since_step.ended + groups) / groups, MOST_OBSERVED)
        is_first = sum(one.kept for one in tally.sources.values()) == groups
        ratio = took if is_first else ratio + NEWEST_SHARE * (took - ratio)
    return tally.model_copy(update={"since_step": SinceStep(), "issue_ratio": ratio})


def tally_difference(now: Mapping[str, SourceTally], then: Mapping[str, SourceTally]) -> dict[str, SourceTally]:
    """Return `now` minus `then` by source. Negative counts become 0.

    A count could be negative because a rollback may have undone outcomes that `then` includes.
    """
    none = SourceTally()
    return {
        source: SourceTally(
            kept=max(one.kept - before.kept, 0),
            filtered=max(one.filtered - before.filtered, 0),
            failed=max(one.failed - before.failed, 0),
            samples=max(one.samples - before.samples, 0),
            truncated=max(one.truncated - before.truncated, 0),
            tokens=max(one.tokens - before.tokens, 0),
            reward=one.reward - before.reward,
        )
        for source, one in now.items()
        for before in [then.get(source, none)]
    }


def barren_epoch(shape: StreamShape, head: Head) -> int | None:
    """The newest data epoch that has ended in every shard, if no prompt of it or of a later epoch was trained.

    Otherwise None. Also None if the tally does not cover all outcomes, because the job began under a gcore version
    without tallies.
    """
    cursors = head.cursors.shards
    over = min(cursor.low_water // length for cursor, length in zip(cursors, shape.lengths, strict=True))
    trained = head.tally.trained_epoch
    counted = sum(one.kept + one.filtered + one.failed for one in head.tally.sources.values())
    if counted < over * sum(shape.lengths):
        return None
    return over - 1 if over > (0 if trained is None else trained + 1) else None


@dataclass(frozen=True, slots=True)
class BarrenEpoch:
    """A data epoch of which no prompt was trained, with counts of its outcomes in the log entries still in the store."""

    epoch: int
    filtered: int
    failed: int
    reason: str
    """The most common reason of its outcomes. Reasons that differ only in numbers count as one."""
    times: int
    """How often this reason occurred."""

    def __str__(self) -> str:
        return (
            f"no prompt of data epoch {self.epoch} could be trained ({self.filtered} were filtered, {self.failed} failed); "
            f"most common reason ({self.times} times): {self.reason}"
        )


def explain_barren_epoch(epoch: int, log: Iterable[LogEntry]) -> BarrenEpoch:
    """Count the outcomes of `epoch` and find their most common reason. `log`: the entries still in the store."""
    outcomes = [ended for entry in log for ended in entry.delta if ended.ref.data_epoch == epoch]
    kinds = Counter(ended.kind for ended in outcomes)
    reason, times = commonest_reason(outcomes) or ("no longer known", 0)
    return BarrenEpoch(epoch, kinds["filtered"], kinds["failed"], reason, times)


def commonest_reason(outcomes: Iterable[EndedRef]) -> tuple[str, int] | None:
    """The most common reason of filtered and failed prompts, and how often it occurs; None if there are no outcomes.

    Reasons that differ only in numbers count as one.
    """
    reasons: dict[str, list[str]] = {}
    for ended in outcomes:
        # A reason may contain an entry number: reasons that differ only in numbers are the same.
        reasons.setdefault(re.sub(r"\d+", "0", ended.reason), []).append(ended.reason or "no reason given")
    # Ties go to the alphabetically first, so that every controller reports the same reason.
    same = min(reasons.values(), key=lambda those: (-len(those), min(those)), default=None)
    return None if same is None else (min(same), len(same))


MOST_FORGOTTEN = 64
"""Maximum number of epoch records that one transaction deletes; the store allows 128 operations per transaction."""


def valid_epochs(head: Head, records: Iterable[EpochRecord]) -> dict[int, EpochRecord]:
    """The epoch records that were written at a version on head's chain, by epoch."""
    return {record.epoch: record for record in records if is_ancestor(head, record.version)}


def needed_epoch(due: Iterable[PromptRef], begun: Mapping[int, EpochRecord]) -> int | None:
    """The oldest data epoch that has a due prompt but no record yet, or None.

    `due`: refs to sample next. `begun`: the valid records, by epoch. Epoch 0 needs no record.
    """
    return min((ref.data_epoch for ref in due if ref.data_epoch > 0 and ref.data_epoch not in begun), default=None)


def make_epoch_record(head: Head, epoch: int, begun: Mapping[int, EpochRecord]) -> EpochRecord:
    """The record with which `epoch` begins at `head`: the tally so far, and since the previous epoch began.

    `begun`: the valid records of earlier epochs.
    """
    before = begun.get(epoch - 1)
    now = head.tally.sources
    return EpochRecord(
        epoch=epoch,
        version=head.version,
        so_far=dict(now),
        latest=tally_difference(now, before.so_far if before is not None else {}),
    )


def superfluous_epochs(
    shape: StreamShape,
    head: Head,
    checkpoints: Iterable[Checkpoint],
    log: Mapping[int, LogEntry],
    begun: Mapping[int, EpochRecord],
) -> tuple[int, ...]:
    """Epochs whose records may be deleted, oldest first, at most `MOST_FORGOTTEN`; the newest two always stay.

    A record is not needed if its epoch has ended at head and, after a rollback to any checkpoint, would also have
    ended, or would begin again later (then the record is not valid there). Checkpoints are the registered ones, and
    those that may still be registered: of newer steps whose entries are in `log` and have cursors. If `log` lacks the
    entry of a registered checkpoint, nothing is deleted. `begun`: the valid records, by epoch.
    """
    targets = resumable_checkpoints(head, checkpoints)
    reached = {target.step: log[target.seq].cursors if target.seq in log else None for target in targets}
    if None in reached.values():
        return ()
    newest = max(reached, default=0)
    reached |= {entry.step: entry.cursors for entry in log.values() if _may_be_registered(head, entry, newest)}
    return tuple(
        epoch
        for epoch in sorted(begun)[:-2]
        if _has_ended(shape, head.cursors, epoch)
        and all(
            step < begun[epoch].version.step or (cursors is not None and _has_ended(shape, cursors, epoch))
            for step, cursors in reached.items()
        )
    )[:MOST_FORGOTTEN]


def _may_be_registered(head: Head, entry: LogEntry, newest: int) -> bool:
    """Whether `entry` is a step on head's chain with a checkpoint that is newer than step `newest`.

    That checkpoint exists or is being written, and may be registered later.
    """
    of = Version(entry.lineage, entry.step)
    return entry.kind == "train" and entry.cursors is not None and entry.step > newest and is_ancestor(head, of)


def _has_ended(shape: StreamShape, cursors: Cursors, epoch: int) -> bool:
    """Whether every prompt of `epoch` has an outcome according to `cursors`."""
    return all(
        cursor.low_water >= (epoch + 1) * length for cursor, length in zip(cursors.shards, shape.lengths, strict=True)
    )


def shortage_reason(rules: StreamRules, head: Head, short: DataExhausted, log: Iterable[LogEntry]) -> str:
    """Error message for a step that cannot reach its quota: what happened to its prompts, and what to change.

    `log`: entries still in the store. The account entries since the newest step contain the reasons.
    """
    used = add_outcomes(head.tally.since_step, short.outcomes)
    common = commonest_reason((*_since_step(log), *short.outcomes))
    reason = f"; most common reason ({common[1]} times): {common[0]}" if common is not None else ""
    over = "its {} prompts (flow.max_prompts_per_step)"
    if short.exhausted:
        over = "the prompts in the shards' windows (data.window), {} in all,"
        fix = "raise data.window or data.shards, or set flow.on_limit: train_smaller to train fewer groups"
    elif short.groups:
        fix = "raise flow.max_prompts_per_step, or set flow.on_limit: train_smaller to train fewer groups"
    else:
        shown = " (gcore samples)" * (head.step > 0)  # samples exist only for steps
        fix = f"there is nothing to train on: check the rewards and the filter results of the responses{shown}"
    return (
        f"step {head.step + 1} has used up {over.format(used.ended + short.groups)} with "
        f"{short.groups} of {rules.quota} groups kept ({used.filtered} were filtered, {used.failed} failed){reason}; {fix}"
    )


def _since_step(log: Iterable[LogEntry]) -> list[EndedRef]:
    """Outcomes that account entries recorded after the newest step."""
    newest_first = sorted(log, key=lambda entry: -entry.seq)
    accounts = takewhile(lambda entry: entry.kind == "account", newest_first)
    return [ended for entry in accounts for ended in entry.delta]
