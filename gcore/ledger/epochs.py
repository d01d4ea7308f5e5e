"""The records with which data epochs begin: what a curriculum may know, fixed once for every peer. Pure.

Shards stand in different epochs and peers look at different moments, so "the statistics so far" is not the same for any
two of them. The first who needs epoch n writes down head's tally as it is then (`EpochRecord`); nothing of the epoch is
issued before. Which record counts follows from head alone (`standing`): one that was written at a version that a rollback
cut off is as if it were not there. A group is accepted only if its versions are ancestors of head, and the record it was
issued under is older than they are, so a group outlives no record: in one lineage a ref never means two prompts.

Epoch 0 has no record: nothing is known. A job without a curriculum has none at all. Nothing here knows what an order is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gcore.ledger.ancestry import is_ancestor, resumable
from gcore.ledger.records import Checkpoint, EpochRecord, Head, LogEntry
from gcore.ledger.tally import since
from gcore.prompts.cursor import Cursors, StreamShape
from gcore.types import PromptRef, Version

MOST_FORGOTTEN = 64
"""Records that go with one that is written; the store takes 128 operations in a transaction."""


def standing(head: Head, records: Iterable[EpochRecord]) -> dict[int, EpochRecord]:
    """The records that count, by epoch."""
    return {record.epoch: record for record in records if is_ancestor(head, record.version)}


def needed(due: Iterable[PromptRef], begun: Mapping[int, EpochRecord]) -> int | None:
    """The oldest epoch of which a prompt is due, and which has not begun; None if there is none."""
    return min((ref.data_epoch for ref in due if ref.data_epoch > 0 and ref.data_epoch not in begun), default=None)


def beginning(head: Head, epoch: int, begun: Mapping[int, EpochRecord]) -> EpochRecord:
    """The record of `epoch`, if it begins at `head`."""
    before = begun.get(epoch - 1)
    now = head.tally.sources
    return EpochRecord(
        epoch=epoch,
        version=head.version,
        so_far=dict(now),
        latest=since(now, before.so_far if before is not None else {}),
    )


def superfluous(
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
    targets = resumable(head, checkpoints)
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
