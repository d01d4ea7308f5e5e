"""Tallies: what came of the prompts so far, source by source, as head carries it. Pure.

A tally is the sum of the chain's entries, like head's cursors, and goes back with them in a rollback. It is what the
statistics of a curriculum are made of and what tells that a whole epoch of the data brought nothing to train. Its size
depends on the number of sources only.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gcore.ledger.records import EndedRef, Head, LogEntry, SealedGroup, SinceStep, SourceTally, Tally
from gcore.prompts.cursor import StreamShape

NOTHING = Tally()
NEWEST_SHARE = 0.3
"""How much the newest step counts in `issue_ratio`."""
MOST_OBSERVED = 16.0
"""One step counts for no more than that, or a single one that came to its limit would be felt for many."""


def added(tally: Tally, groups: Iterable[SealedGroup], outcomes: Collection[EndedRef]) -> Tally:
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
        update={"sources": sources, "trained_epoch": newest, "since_step": gathered(tally.since_step, outcomes)}
    )


def gathered(before: SinceStep, outcomes: Iterable[EndedRef]) -> SinceStep:
    """What the step to come has used up, with `outcomes`."""
    counts = before.model_dump()
    for ended in outcomes:
        counts["failed" if ended.kind == "failed" else "filtered"] += 1
        if ended.reward is not None and ended.length is not None:
            counts["scored"] += 1
            counts["reward"] += ended.reward
            counts["length"] += ended.length
    return SinceStep(**counts)


def after_step(tally: Tally, groups: int) -> Tally:
    """The tally once the entry that trained `groups` is added: the next step begins to count, and knows what this one took.

    The first step that trained anything is all that is known; later ones move the mean by `NEWEST_SHARE`.
    """
    ratio = tally.issue_ratio
    if groups:
        took = min((tally.since_step.ended + groups) / groups, MOST_OBSERVED)
        is_first = sum(one.kept for one in tally.sources.values()) == groups
        ratio = took if is_first else ratio + NEWEST_SHARE * (took - ratio)
    return tally.model_copy(update={"since_step": SinceStep(), "issue_ratio": ratio})


def since(now: Mapping[str, SourceTally], then: Mapping[str, SourceTally]) -> dict[str, SourceTally]:
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
class Barrenness:
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


def why_barren(epoch: int, log: Iterable[LogEntry]) -> Barrenness:
    """The counts and the commonest reason of `epoch`, from the entries of `log` (those the store still has)."""
    outcomes = [ended for entry in log for ended in entry.delta if ended.ref.data_epoch == epoch]
    kinds = Counter(ended.kind for ended in outcomes)
    reason, times = commonest_reason(outcomes) or ("none is known any more", 0)
    return Barrenness(epoch, kinds["filtered"], kinds["failed"], reason, times)


def commonest_reason(outcomes: Iterable[EndedRef]) -> tuple[str, int] | None:
    """The reason that most of the outcomes give, and how many give it; None if there are no outcomes."""
    reasons: dict[str, list[str]] = {}
    for ended in outcomes:
        # A reason may name its entry: what differs in its numbers only is the same reason.
        reasons.setdefault(re.sub(r"\d+", "0", ended.reason), []).append(ended.reason or "none was given")
    # Of equally common ones the first in the alphabet, so that every controller says the same.
    same = min(reasons.values(), key=lambda those: (-len(those), min(those)), default=None)
    return None if same is None else (min(same), len(same))
