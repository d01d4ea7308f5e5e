"""Tallies of what came of the prompts, source by source; the records with which data epochs begin; why a step is short.

A tally is the sum of the chain's entries, like head's cursors, and goes back with them in a rollback. The statistics of a
curriculum are made of it, and it shows that a whole epoch brought nothing to train. Its size depends on the number of sources only.

Shards are in different epochs and peers look at different moments, so "the statistics so far" is not the same for any two of
them. The first peer that needs epoch n writes down head's tally as it is then (`EpochRecord`); nothing of the epoch is issued
before. Head alone decides which record counts (`valid_epochs`): one written at a version that a rollback cut off does not. A group is
accepted only if its versions are ancestors of head, and the record it was issued under is older than they are, so a group outlives
no record: in one lineage a ref never means two prompts. Epoch 0 has no record, and a job without a curriculum has none at all.
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
"""How much the newest step counts in `issue_ratio`."""

MOST_OBSERVED = 16.0
"""One step counts for no more than that, or a single one that came to its limit would be felt for many."""


def add_to_tally(tally: Tally, groups: Iterable[SealedGroup], outcomes: Collection[EndedRef]) -> Tally:
    """The tally after an entry that trained `groups` and ended `outcomes`."""
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
                # One after the other, as every peer adds them: sums of fractions depend on the order.
                "reward": functools.reduce(lambda so_far, group: so_far + group.reward, trained, old.reward),
            }
        )
    for ended in outcomes:
        if ended.kind == "trained":
            raise ValueError(f"prompt {ended.ref} was trained; its group says how")
        old = sources.get(ended.source, SourceTally())
        counts = {"failed": old.failed + 1} if ended.kind == "failed" else {"filtered": old.filtered + 1}
        sources[ended.source] = old.model_copy(update=counts)
    return tally.model_copy(
        update={"sources": sources, "trained_epoch": newest, "since_step": add_outcomes(tally.since_step, outcomes)}
    )


def add_outcomes(before: SinceStep, outcomes: Iterable[EndedRef]) -> SinceStep:
    """What the step to come has used up, with `outcomes`."""
    counts = before.model_dump()
    for ended in outcomes:
        counts["failed" if ended.kind == "failed" else "filtered"] += 1
        if ended.reward is not None and ended.length is not None:
            counts["scored"] += 1
            counts["reward"] += ended.reward
            counts["length"] += ended.length
    return SinceStep(**counts)


def start_next_step(tally: Tally, groups: int) -> Tally:
    """The tally once the entry that trained `groups` is added: the next step begins to count, and knows what this one took.

    The first step that trained anything is all that is known; later ones move the mean by `NEWEST_SHARE`.
    """
    ratio = tally.issue_ratio
    if groups:
        took = min((tally.since_step.ended + groups) / groups, MOST_OBSERVED)
        is_first = sum(one.kept for one in tally.sources.values()) == groups
        ratio = took if is_first else ratio + NEWEST_SHARE * (took - ratio)
    return tally.model_copy(update={"since_step": SinceStep(), "issue_ratio": ratio})


def tally_difference(now: Mapping[str, SourceTally], then: Mapping[str, SourceTally]) -> dict[str, SourceTally]:
    """What `now` has more than `then`, by source; never below nothing.

    It could be below: outcomes that were accounted for behind the last checkpoint may have been rolled back since `then`.
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
    """The newest data epoch that has ended in every shard if no prompt of it, or of a later one, was trained.

    None while there is hope: a prompt of it that is still in flight or offered has not ended. None too if the tally does
    not know of all that has ended: the job began under a version that kept none.
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
    """What came of the prompts of an epoch that brought nothing, as far as the entries at hand tell."""

    epoch: int
    filtered: int
    failed: int
    reason: str
    """The commonest, or one of those that differ from it in their numbers only."""
    times: int

    def __str__(self) -> str:
        return (
            f"no prompt of data epoch {self.epoch} could be trained ({self.filtered} were filtered, {self.failed} failed); "
            f"the commonest reason, {self.times} times: {self.reason}"
        )


def explain_barren_epoch(epoch: int, log: Iterable[LogEntry]) -> BarrenEpoch:
    """The counts and the commonest reason of `epoch`, from the entries of `log` (those the store still has)."""
    outcomes = [ended for entry in log for ended in entry.delta if ended.ref.data_epoch == epoch]
    kinds = Counter(ended.kind for ended in outcomes)
    reason, times = commonest_reason(outcomes) or ("none is known any more", 0)
    return BarrenEpoch(epoch, kinds["filtered"], kinds["failed"], reason, times)


def commonest_reason(outcomes: Iterable[EndedRef]) -> tuple[str, int] | None:
    """The reason that most of the outcomes give, and how many give it; None if there are no outcomes."""
    reasons: dict[str, list[str]] = {}
    for ended in outcomes:
        # A reason may name its entry: what differs in its numbers only is the same reason.
        reasons.setdefault(re.sub(r"\d+", "0", ended.reason), []).append(ended.reason or "none was given")
    # Of equally common ones the first in the alphabet, so that every controller says the same.
    same = min(reasons.values(), key=lambda those: (-len(those), min(those)), default=None)
    return None if same is None else (min(same), len(same))


MOST_FORGOTTEN = 64
"""Records that go with one that is written; the store takes 128 operations in a transaction."""


def valid_epochs(head: Head, records: Iterable[EpochRecord]) -> dict[int, EpochRecord]:
    """The records that count, by epoch."""
    return {record.epoch: record for record in records if is_ancestor(head, record.version)}


def needed_epoch(due: Iterable[PromptRef], begun: Mapping[int, EpochRecord]) -> int | None:
    """The oldest epoch of which a prompt is due, and which has not begun; None if there is none."""
    return min((ref.data_epoch for ref in due if ref.data_epoch > 0 and ref.data_epoch not in begun), default=None)


def make_epoch_record(head: Head, epoch: int, begun: Mapping[int, EpochRecord]) -> EpochRecord:
    """The record of `epoch`, if it begins at `head`."""
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
    """The epochs whose records nothing will ask for again, oldest first, at most `MOST_FORGOTTEN`; the newest two stay.

    After a rollback to any checkpoint the epoch must either have ended there already, or have begun later (then its record
    does not count any more). That holds for registered checkpoints and for those that may still be registered: of steps that
    are newer, and whose entries are in the store's log and keep cursors. If an entry of a registered one is not known, nothing
    is forgotten.
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
    """Whether the checkpoint of `entry` is written, or will be, and may be registered after that of step `newest`."""
    of = Version(entry.lineage, entry.step)
    return entry.kind == "train" and entry.cursors is not None and entry.step > newest and is_ancestor(head, of)


def _has_ended(shape: StreamShape, cursors: Cursors, epoch: int) -> bool:
    """Whether every ref of `epoch` is terminal."""
    return all(
        cursor.low_water >= (epoch + 1) * length for cursor, length in zip(cursors.shards, shape.lengths, strict=True)
    )


def shortage_reason(rules: StreamRules, head: Head, short: DataExhausted, log: Iterable[LogEntry]) -> str:
    """The sentence. `log`: entries that the store still has; those since the newest step tell the reasons."""
    used = add_outcomes(head.tally.since_step, short.outcomes)
    common = commonest_reason((*_since_step(log), *short.outcomes))
    reason = f"; the commonest reason, {common[1]} times: {common[0]}" if common is not None else ""
    over = "its {} prompts (flow.max_prompts_per_step)"
    if short.exhausted:
        over = "the prompts in the shards' windows (data.window), {} in all,"
        fix = "raise data.window or data.shards, or set flow.on_limit: train_smaller to go on with fewer groups"
    elif short.groups:
        fix = "raise flow.max_prompts_per_step, or set flow.on_limit: train_smaller to go on with fewer groups"
    else:
        shown = " (gcore samples)" * (head.step > 0)  # which are kept of steps
        fix = f"there is nothing to train on: see what the reward and the filter say of the responses{shown}"
    return (
        f"step {head.step + 1} has used up {over.format(used.ended + short.groups)} with "
        f"{short.groups} of {rules.quota} groups kept ({used.filtered} were filtered, {used.failed} failed){reason}; {fix}"
    )


def _since_step(log: Iterable[LogEntry]) -> list[EndedRef]:
    """What the account entries after the newest step ended."""
    newest_first = sorted(log, key=lambda entry: -entry.seq)
    accounts = takewhile(lambda entry: entry.kind == "account", newest_first)
    return [ended for entry in accounts for ended in entry.delta]
