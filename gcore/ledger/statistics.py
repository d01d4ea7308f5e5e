"""Tallies of prompt outcomes by source; records of data epochs; why a step is short.

A tally is a sum over the chain's entries, like head's cursors, and a rollback restores both. The statistics of a
curriculum come from it, and it shows when a whole epoch trained nothing. Its size depends only on the number of
sources.

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
"""Weight of the newest step in `issue_ratio`."""

MOST_OBSERVED = 16.0
"""Maximum ratio of one step, so that a single step that reached its limit does not affect many later steps."""


def add_to_tally(tally: Tally, groups: Iterable[SealedGroup], outcomes: Collection[EndedRef]) -> Tally:
    """The tally after an entry that trained `groups` and ended `outcomes`. Raises ValueError for a trained outcome."""
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
    """Counts since the newest step, with `outcomes` added."""
    counts = before.model_dump()
    for ended in outcomes:
        counts["failed" if ended.kind == "failed" else "filtered"] += 1
        if ended.reward is not None and ended.length is not None:
            counts["scored"] += 1
            counts["reward"] += ended.reward
            counts["length"] += ended.length
    return SinceStep(**counts)


def start_next_step(tally: Tally, groups: int) -> Tally:
    """The tally after the entry that trained `groups`: starts the next step's count, and updates the issue ratio.

    The first step with groups sets the ratio; later steps move the mean by `NEWEST_SHARE`.
    """
    ratio = tally.issue_ratio
    if groups:
        took = min((tally.since_step.ended + groups) / groups, MOST_OBSERVED)
        is_first = sum(one.kept for one in tally.sources.values()) == groups
        ratio = took if is_first else ratio + NEWEST_SHARE * (took - ratio)
    return tally.model_copy(update={"since_step": SinceStep(), "issue_ratio": ratio})


def tally_difference(now: Mapping[str, SourceTally], then: Mapping[str, SourceTally]) -> dict[str, SourceTally]:
    """`now` minus `then` by source, with counts of at least 0.

    A count could be negative: outcomes recorded after the last checkpoint may have been rolled back since `then`.
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
    """The newest data epoch that has ended in every shard, if no prompt of it or of a later one was trained.

    None if a prompt of it is still in flight or offered. None also if the tally does not cover all outcomes, because
    the job began under a version without tallies.
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
    """Outcomes of an epoch that trained nothing, from the entries still in the store."""

    epoch: int
    filtered: int
    failed: int
    reason: str
    """The most common reason, or one that differs from it only in numbers."""
    times: int

    def __str__(self) -> str:
        return (
            f"no prompt of data epoch {self.epoch} could be trained ({self.filtered} were filtered, {self.failed} failed); "
            f"most common reason ({self.times} times): {self.reason}"
        )


def explain_barren_epoch(epoch: int, log: Iterable[LogEntry]) -> BarrenEpoch:
    """Counts and the most common reason of `epoch`, from the entries of `log` (those still in the store)."""
    outcomes = [ended for entry in log for ended in entry.delta if ended.ref.data_epoch == epoch]
    kinds = Counter(ended.kind for ended in outcomes)
    reason, times = commonest_reason(outcomes) or ("no longer known", 0)
    return BarrenEpoch(epoch, kinds["filtered"], kinds["failed"], reason, times)


def commonest_reason(outcomes: Iterable[EndedRef]) -> tuple[str, int] | None:
    """The most common reason and its count; None if there are no outcomes."""
    reasons: dict[str, list[str]] = {}
    for ended in outcomes:
        # A reason may contain an entry number: reasons that differ only in numbers are the same.
        reasons.setdefault(re.sub(r"\d+", "0", ended.reason), []).append(ended.reason or "no reason given")
    # Ties go to the alphabetically first, so that every controller reports the same reason.
    same = min(reasons.values(), key=lambda those: (-len(those), min(those)), default=None)
    return None if same is None else (min(same), len(same))


MOST_FORGOTTEN = 64
"""Maximum number of records deleted with one that is written; the store allows 128 operations per transaction."""


def valid_epochs(head: Head, records: Iterable[EpochRecord]) -> dict[int, EpochRecord]:
    """The valid records, by epoch."""
    return {record.epoch: record for record in records if is_ancestor(head, record.version)}


def needed_epoch(due: Iterable[PromptRef], begun: Mapping[int, EpochRecord]) -> int | None:
    """The oldest epoch with a due prompt that has not begun, or None."""
    return min((ref.data_epoch for ref in due if ref.data_epoch > 0 and ref.data_epoch not in begun), default=None)


def make_epoch_record(head: Head, epoch: int, begun: Mapping[int, EpochRecord]) -> EpochRecord:
    """The record of `epoch`, begun at `head`."""
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
    """Epochs whose records are no longer needed, oldest first, at most `MOST_FORGOTTEN`; the newest two stay.

    After a rollback to any checkpoint, the epoch must have ended already, or begin later (then its record is not valid
    there). This must hold for registered checkpoints and for those that may still be registered: of newer steps whose
    entries are in the store's log and have cursors. If the entry of a registered checkpoint is unknown, nothing is
    deleted.
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
    """Whether the checkpoint of `entry` exists or is being written, and may be registered after that of step `newest`."""
    of = Version(entry.lineage, entry.step)
    return entry.kind == "train" and entry.cursors is not None and entry.step > newest and is_ancestor(head, of)


def _has_ended(shape: StreamShape, cursors: Cursors, epoch: int) -> bool:
    """Whether every ref of `epoch` has an outcome."""
    return all(
        cursor.low_water >= (epoch + 1) * length for cursor, length in zip(cursors.shards, shape.lengths, strict=True)
    )


def shortage_reason(rules: StreamRules, head: Head, short: DataExhausted, log: Iterable[LogEntry]) -> str:
    """Why a step is short, and what to change.

    `log`: entries still in the store; those since the newest step give the reasons.
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
    """Outcomes in the account entries after the newest step."""
    newest_first = sorted(log, key=lambda entry: -entry.seq)
    accounts = takewhile(lambda entry: entry.kind == "account", newest_first)
    return [ended for entry in accounts for ended in entry.delta]
