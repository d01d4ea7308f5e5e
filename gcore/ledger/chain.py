"""The records that each transaction writes, as pure functions of what was there before; names of log entries by content.

`gcore.ledger.transactions` adds the compares. A commit is a pure function of head and seal, so that any controller can make it
when the owners are dead.

A digest is of what an entry says, not of its bytes: it does not depend on the schema version that wrote it down, or on whether
it was read from the store or from the run's folder. A field that a later version adds must have a default; one that is renamed
or means something else must be mapped back here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gcore.data.order import Cursors, StreamShape
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import (
    Checkpoint,
    EndedRef,
    Head,
    Lineage,
    LogEntry,
    RaisedGoal,
    Seal,
    SealState,
    WorldState,
)
from gcore.ledger.records.cluster import ATTENTION_EQUALS_AT
from gcore.ledger.records.job import JobRecord
from gcore.ledger.selection import SealPart, SealStep
from gcore.ledger.statistics import NOTHING, add_to_tally, start_next_step
from gcore.schema import Record
from gcore.types import PromptRef


def entry_digest(entry: LogEntry) -> str:
    """BLAKE2b of the entry's content; 32 hex digits."""
    return _digest(entry)


def head_digest(head: Head) -> str:
    """BLAKE2b of what head says but for its entry's digest, which names this one, and the mark that its job is being deleted."""
    return _digest(head, "digest", "deleted")


def job_digest(job: JobRecord) -> str:
    """BLAKE2b of what the job is: its spec with seed and shards, its data and its models; 32 hex digits.

    The run's folder does not count: where nodes share none, each has its own, and its controller's view of the record names that one.
    """
    return _digest(job, "run_dir")


def shares_digest(shares: Mapping[int, Mapping[PromptRef, Collection[int]]]) -> str:
    """BLAKE2b of which rank trains which samples, by rank and group; 32 hex digits."""
    lines = sorted((rank, ref, sorted(samples)) for rank, share in shares.items() for ref, samples in share.items())
    text = json.dumps([[rank, str(ref), samples] for rank, ref, samples in lines], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(record: Record, *without: str) -> str:
    text = _text(record, without)
    if "\\ud" in text:  # half a surrogate pair is stored in other characters than it was written with
        text = _text(type(record).decode(record.encode()), without)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(record: Record, without: Iterable[str]) -> str:
    fields = record.model_dump(mode="json", exclude={"schema_version", *without}, exclude_defaults=True)
    return json.dumps(fields, separators=(",", ":"), sort_keys=True)


def seal_shares(seal: Seal) -> dict[int, dict[PromptRef, list[int]]]:
    """By rank and group: the samples of a sealed step that each rank trains."""
    layout = balance_samples(seal)
    shares: dict[int, dict[PromptRef, list[int]]] = {rank: {} for rank in range(seal.world_size)}
    for rank, share in shares.items():
        for slot in layout.of_rank(rank):
            share.setdefault(seal.groups[slot.group].ref, []).append(slot.sample)
    return shares


BINDING_VERSION = max(LogEntry.came_with.values())
"""The schema version from which on entries name what the job is, and what head says."""


@dataclass(frozen=True, slots=True)
class Advance:
    """A new head and the log entry that leads to it."""

    head: Head
    entry: LogEntry


@dataclass(frozen=True, slots=True)
class ChainWriter:
    """The writer of an entry, and a number used once, by which an answer that never came is recognised later.

    `job`: `job_digest` of the job; empty while nodes of schema version 2 are there, which read no entry that names it.
    """

    incarnation: str
    nonce: str
    job: str = ""


@dataclass(frozen=True, slots=True)
class HighWater:
    """The highest lineage, and the highest number of the log, of which there is anything anywhere. They are head's, or less, unless the
    store was put back to an older state: what is named by them is of a future that was cut off."""

    lineage: int = 0
    entry: int = 0


NOTHING_SEEN = HighWater()


def base_entry(shards: int, world: str, writer: ChainWriter) -> Advance:
    """The chain's first entry: nothing terminal, step 0, lineage 0."""
    cursors = Cursors.start(shards)
    head = Head(
        seq=0,
        parent=None,
        lineage=0,
        step=0,
        cursors=cursors,
        lineages=(Lineage(number=0, base_step=0),),
        world=world,
        nonce=writer.nonce,
    )
    return _advance(head, "base", writer, cursors=cursors, tally=NOTHING)


def seal_slot(
    slot: Seal | None,
    head: Head,
    chosen: SealStep | SealPart,
    *,
    world_size: int,
    mini_batches: int,
    sealer: str,
    attention_equals_at: int = ATTENTION_EQUALS_AT,
    checkpoint: bool = False,
) -> Seal:
    """The slot after a seal, of the whole or of one more part: the attempt goes on from where it was, or two sets of groups
    would share a token. What is in READY parts stays where it is."""
    kept = slot.kept if slot else ()
    if chosen.groups[: len(kept)] != kept:
        raise ValueError(f"step {head.step + 1} has READY parts that would be lost")
    parts = slot.parts if slot else ()
    whole = isinstance(chosen, SealStep)
    if parts or not whole:
        parts = (*parts, len(chosen.groups) - len(kept))
    return Seal(
        lineage=head.lineage,
        step=head.step + 1,
        attempt=(slot.attempt if slot else 0) + 1,
        state=SealState.SEALED if whole else SealState.PARTIAL,
        world=head.world,
        world_size=world_size,
        mini_batches=max(1, min(mini_batches, len(chosen.groups))),
        groups=chosen.groups,
        outcomes=chosen.outcomes,
        sealer=sealer,
        attention_equals_at=attention_equals_at,
        padding=chosen.padding,
        last=chosen.last,
        planned_steps=chosen.planned,
        parts=parts,
        ready_parts=slot.ready_parts if slot else 0,
        checkpoint=checkpoint,
    )


def reseal_slot(slot: Seal, sealer: str) -> Seal:
    """The slot after its groups were given up: empty but for its READY parts, and the attempt survives."""
    if slot.state not in (SealState.SEALED, SealState.PARTIAL):
        raise ValueError(f"only a SEALED or PARTIAL slot can be resealed, this one is {slot.state}")
    return slot.model_copy(
        update={
            "attempt": slot.attempt + 1,
            "state": SealState.OPEN,
            "groups": slot.kept,
            "parts": slot.parts[: slot.ready_parts],
            "outcomes": (),
            "padding": 0,
            "last": False,
            "planned_steps": None,
            "checkpoint": False,
            "sealer": sealer,
        }
    )


def ready_slot(slot: Seal) -> Seal:
    """The slot once every rank holds its share. From here there is only commit or rollback; or, after a part, more of them."""
    ready_parts = len(slot.parts)
    match slot.state:
        case SealState.SEALED:
            return slot.model_copy(update={"state": SealState.READY, "ready_parts": ready_parts})
        case SealState.PARTIAL:
            return slot.model_copy(update={"state": SealState.OPEN, "ready_parts": ready_parts})
        case state:
            raise ValueError(f"only a SEALED or PARTIAL slot can become READY, this one is {state}")


def ended_refs(seal: Seal) -> tuple[EndedRef, ...]:
    """What the seal's commit ends: its groups as trained, its outcomes as they are."""
    trained = tuple(
        EndedRef(
            ref=g.ref,
            kind="trained",
            holder=g.holder,
            versions=g.versions,
            digest=g.digest,
            samples=len(g.response_tokens),
        )
        for g in seal.groups
    )
    return trained + seal.outcomes


def commit_entry(
    head: Head,
    seal: Seal,
    shape: StreamShape,
    writer: ChainWriter,
    *,
    keep_cursors: bool,
    stats: Mapping[str, float] = {},
) -> Advance:
    """Head one step further. `keep_cursors`: the entry belongs to a checkpoint, so it keeps its own, and its tally."""
    if seal.state is not SealState.READY or (seal.lineage, seal.step) != (head.lineage, head.step + 1):
        raise ValueError(f"seal {seal.token} ({seal.state}) does not follow head {head.version}")
    ended = ended_refs(seal)
    cursors = head.cursors.union(shape, (e.ref for e in ended))
    after = head.model_copy(
        update={
            "seq": head.seq + 1,
            "parent": head.seq,
            "step": seal.step,
            "cursors": cursors,
            "tally": start_next_step(add_to_tally(head.tally, seal.groups, seal.outcomes), len(seal.groups)),
            "nonce": writer.nonce,
        }
    )
    return _advance(
        after,
        "train",
        writer,
        parent_digest=head.digest,
        token=seal.token,
        ranks=seal.world_size,
        shares=shares_digest(seal_shares(seal)) if writer.job else "",
        delta=ended,
        cursors=cursors if keep_cursors else None,
        tally=after.tally if keep_cursors else None,
        stats=dict(stats),
    )


def account_entry(head: Head, outcomes: tuple[EndedRef, ...], shape: StreamShape, writer: ChainWriter) -> Advance:
    """Head at the same step, with outcomes written down."""
    cursors = head.cursors.union(shape, (e.ref for e in outcomes))
    after = head.model_copy(
        update={
            "seq": head.seq + 1,
            "parent": head.seq,
            "cursors": cursors,
            "tally": add_to_tally(head.tally, (), outcomes),
            "nonce": writer.nonce,
        }
    )
    return _advance(after, "account", writer, parent_digest=head.digest, delta=outcomes)


def rollback_entry(
    head: Head,
    target: LogEntry,
    world: str,
    writer: ChainWriter,
    reason: str,
    *,
    seen: HighWater = NOTHING_SEEN,
    raised: RaisedGoal | None = None,
) -> Advance:
    """Head at the step of a checkpoint, whose entry is `target`, in a new lineage and a new world. `raised`: of a job that goes on after
    its end, whose digest `writer` has as the job will be.

    No number that was `seen` is given out twice. Raises ValueError for an entry that keeps no cursors or no tally.
    """
    if target.cursors is None or target.tally is None:
        raise ValueError(f"log entry {target.seq} does not keep what a rollback needs")
    kept = {"cursors": target.cursors, "tally": target.tally}
    after = _in_new_lineage(head, target.step, world, writer, seen).model_copy(update={"parent": target.seq, **kept})
    return _advance(
        after,
        "rollback",
        writer,
        parent_digest=entry_digest(target),
        **kept,
        reason=reason,
        follows=_left_out(head, after),
        undoes=head.digest if writer.job else "",
        raised=raised,
    )


def reform_entry(
    head: Head, state: WorldState, world: str, writer: ChainWriter, reason: str, *, seen: HighWater = NOTHING_SEEN
) -> Advance:
    """Head at its own step, with its own cursors and tally, in a new lineage and a new world, which starts from copies of
    `state`: of head's own (`gcore.ledger.records.chain`). Nothing that was committed is undone. `seen`: as in `rollback_entry`."""
    after = _in_new_lineage(head, head.step, world, writer, seen)
    return _advance(
        after,
        "rollback",
        writer,
        follows=_left_out(head, after),
        undoes=head.digest if writer.job else "",
        parent_digest=head.digest,
        cursors=head.cursors,
        tally=head.tally,
        reason=reason,
        state=state,
    )


def _in_new_lineage(head: Head, step: int, world: str, writer: ChainWriter, seen: HighWater) -> Head:
    """Head, with itself as parent, at `step` of a lineage and under a number above all that was seen."""
    seq, number = max(head.seq, seen.entry) + 1, max(head.lineage, seen.lineage) + 1
    lineage = Lineage(number=number, base_step=step, entry=seq if seq > head.seq + 1 else None)
    return head.model_copy(
        update={
            "seq": seq,
            "parent": head.seq,
            "lineage": number,
            "step": step,
            "lineages": (*head.lineages, lineage),
            "world": world,
            "nonce": writer.nonce,
        }
    )


def _left_out(head: Head, after: Head) -> int | None:
    """What an entry says of numbers that were left out before it."""
    return head.seq if after.seq > head.seq + 1 else None


AWAITED = 2
"""Steps whose checkpoint may not be on the disk yet: one is being written, and the next that is due waits for it."""


def prunable_entries(
    head: Head, checkpoints: Iterable[Checkpoint], log: Mapping[int, LogEntry], *, keep: int
) -> tuple[int, ...]:
    """The entries that nothing in the store needs any more, ascending: they may move to the run's folder.

    Kept are the newest `keep`, the base, those of registered checkpoints (a rollback takes its cursors from them), those of
    the newest steps whose checkpoint may still come to the disk, and the rollback that began head's lineage (a rank that
    starts late asks it where to start from).
    """
    named = {checkpoint.seq for checkpoint in checkpoints} | {0}
    newest = max(named)
    awaited = [seq for seq, one in log.items() if one.kind == "train" and one.cursors is not None and seq > newest]
    named |= set(sorted(awaited)[-AWAITED:])
    return tuple(
        seq
        for seq, entry in sorted(log.items())
        if seq <= head.seq - keep
        and seq not in named
        and not (entry.kind == "rollback" and entry.lineage == head.lineage)
    )


def _advance(head: Head, kind: str, writer: ChainWriter, **fields: object) -> Advance:
    """The entry that leads to `head`, and `head` with its digest."""
    entry = LogEntry.model_validate(
        {
            "seq": head.seq,
            "parent": head.parent,
            "kind": kind,
            "lineage": head.lineage,
            "step": head.step,
            "world": head.world,
            "nonce": head.nonce,
            "writer": writer.incarnation,
            "job": writer.job,
            "head": head_digest(head) if writer.job else "",
            **fields,
        }
    )
    return Advance(head.model_copy(update={"digest": entry_digest(entry)}), entry)
