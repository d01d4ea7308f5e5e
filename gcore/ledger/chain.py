"""The records that each transaction writes, as pure functions of the previous records; digests of log entries.

A job's log entries form a chain: each names its parent. Head is the newest entry and the state after it; the seal is
the list of groups that a step trains on, stored in the slot of that step. `gcore.ledger.transactions` adds the
compares. A commit is a pure function of head and seal, so any controller can write it if the controllers that sealed
the batch are dead.

A digest covers an entry's content, not its bytes: it depends neither on the schema version that wrote the entry, nor on
whether it was read from the store or from the run folder. A field added by a later version must have a default. A
renamed field, or one with a new meaning, must be mapped back here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gcore.config.train import EXECUTION_SETTINGS
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
    SealedGroup,
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
    """BLAKE2b digest of the entry's content, 32 hex digits."""
    return _digest(entry)


def head_digest(head: Head) -> str:
    """BLAKE2b digest of head, 32 hex digits, which the log entry contains.

    Excluded are the digest of that entry, because it depends on this one, and the mark of a deleted job.
    """
    return _digest(head, "digest", "deleted")


def job_digest(job: JobRecord) -> str:
    """BLAKE2b digest of the job: its spec with seed and shards, its data and its models; 32 hex digits.

    Excluded are the run folder, because nodes without a shared folder each have their own, and the settings that may
    change while the job is unfinished (`EXECUTION_SETTINGS`).
    """
    if isinstance(train := job.spec.get("train"), dict):
        bound = {name: value for name, value in train.items() if name not in EXECUTION_SETTINGS}
        job = job.model_copy(update={"spec": {**job.spec, "train": bound}})
    return _digest(job, "run_dir")


def shares_digest(shares: Mapping[int, Mapping[PromptRef, Collection[int]]]) -> str:
    """BLAKE2b digest, 32 hex digits, of which samples each rank trains.

    `shares`: indexes of the samples, by rank and prompt.
    """
    lines = sorted((rank, ref, sorted(samples)) for rank, share in shares.items() for ref, samples in share.items())
    text = json.dumps([[rank, str(ref), samples] for rank, ref, samples in lines], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(record: Record, *without: str) -> str:
    text = _text(record, without)
    if "\\ud" in text:  # a lone surrogate changes when it is stored and read back
        text = _text(type(record).decode(record.encode()), without)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(record: Record, without: Iterable[str]) -> str:
    fields = record.model_dump(mode="json", exclude={"schema_version", *without}, exclude_defaults=True)
    return json.dumps(fields, separators=(",", ":"), sort_keys=True)


def seal_shares(seal: Seal) -> dict[int, dict[PromptRef, list[int]]]:
    """Indexes of the samples that the receipt of each rank of a sealed step lists, by rank and by the group's prompt."""
    layout = balance_samples(seal)
    shares: dict[int, dict[PromptRef, list[int]]] = {rank: {} for rank in range(seal.world_size)}
    for rank, share in shares.items():
        for slot in layout.receipt_of(rank):
            share.setdefault(seal.groups[slot.group].ref, []).append(slot.sample)
    return shares


BINDING_VERSION = max(LogEntry.came_with.values())
"""The first schema version in which entries contain digests of the job's record and of head."""


@dataclass(frozen=True, slots=True)
class Advance:
    """A new head and its log entry."""

    head: Head
    entry: LogEntry


@dataclass(frozen=True, slots=True)
class ChainWriter:
    """The writer of a log entry: the controller's incarnation (one run of its process).

    `nonce`: unique per transaction; after a timeout it shows whether this transaction wrote the entry. `job`:
    `job_digest` of the job; empty while a node runs schema version 2, which cannot read entries with it.
    """

    incarnation: str
    nonce: str
    job: str = ""


@dataclass(frozen=True, slots=True)
class HighWater:
    """The highest lineage and the highest log number found in run folders and reported by workers.

    They exceed head's only if the store was restored from an older backup; then they belong to history that the store
    lost.
    """

    lineage: int = 0
    entry: int = 0


NOTHING_SEEN = HighWater()


def base_entry(shards: int, world: str, writer: ChainWriter) -> Advance:
    """The first log entry of a job and the head after it: no outcomes, step 0, lineage 0.

    `shards`: number of shards of the prompt stream. `world`: ID of the first train world.
    """
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
    sequence_parallel: int = 1,
    attention_equals_at: int = ATTENTION_EQUALS_AT,
    checkpoint: bool = False,
    near: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Seal:
    """The record of the next step after sealing `chosen`: all groups of the step, or one more part of a streamed step.

    `slot`: the step's current record, if any. The attempt number continues from it, so that no two sets of groups share
    a token (lineage, step, attempt). Groups in READY parts are kept unchanged; raises ValueError if `chosen` does not
    begin with them. `sequence_parallel`: number of ranks that compute each sample together. `checkpoint`: whether the
    ranks write a checkpoint in this step. `near`: for each holder, the sequence groups on its node.
    """
    kept = slot.kept if slot else ()
    if chosen.groups[: len(kept)] != kept:
        raise ValueError(f"step {head.step + 1} would lose its READY parts")
    # The layout of READY parts must not change.
    known = dict.fromkeys((group.holder for group in kept if group.media_bytes), ()) | (slot.near if slot else {})
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
        sequence_parallel=sequence_parallel,
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
        near=_near_of(chosen.groups, dict(near) | known),
    )


def _near_of(groups: Iterable[SealedGroup], near: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The entries of `near` for holders of groups with blobs."""
    holders = {group.holder for group in groups if group.media_bytes}
    return {holder: near[holder] for holder in sorted(holders) if near.get(holder)}


def reseal_slot(slot: Seal, sealer: str) -> Seal:
    """The step's record after its groups were given up: only READY parts remain, and the attempt number increases.

    Raises ValueError unless the slot is SEALED or PARTIAL.
    """
    if slot.state not in (SealState.SEALED, SealState.PARTIAL):
        raise ValueError(f"the slot is {slot.state}; only a SEALED or PARTIAL slot can be resealed")
    return slot.model_copy(
        update={
            "attempt": slot.attempt + 1,
            "state": SealState.OPEN,
            "groups": slot.kept,
            "near": _near_of(slot.kept, slot.near),
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
    """The step's record once every rank holds its share of what was sealed.

    A SEALED step becomes READY and ends by commit or rollback. A PARTIAL step becomes OPEN, and more parts follow.
    Raises ValueError for any other state.
    """
    ready_parts = len(slot.parts)
    match slot.state:
        case SealState.SEALED:
            return slot.model_copy(update={"state": SealState.READY, "ready_parts": ready_parts})
        case SealState.PARTIAL:
            return slot.model_copy(update={"state": SealState.OPEN, "ready_parts": ready_parts})
        case state:
            raise ValueError(f"the slot is {state}; only a SEALED or PARTIAL slot can become READY")


def ended_refs(seal: Seal) -> tuple[EndedRef, ...]:
    """Outcomes that the commit of a step records: each group as trained, then the filtered and failed prompts."""
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
    """Head and log entry of a commit: head moves to the step of the READY `seal`, and its outcomes are recorded.

    `keep_cursors`: the step has a checkpoint, so the entry stores the cursors (which prompts are done) and the tally,
    for a later rollback. `stats`: training metrics of the step, stored in the entry. Raises ValueError unless `seal` is
    READY and of the step after head.
    """
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
    """Head and log entry that record filtered and failed prompts without a training step; head's step stays."""
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
    """Head and log entry of a rollback to the checkpoint of `target`, in a new lineage with a new train world.

    `seen`: no lineage or log number up to it is reused. `raised`: the new goal, if an ended job continues; `writer`
    then has the digest of the new job record. Raises ValueError if `target` has no cursors or no tally.
    """
    if target.cursors is None or target.tally is None:
        raise ValueError(f"log entry {target.seq} has no cursors or no tally, which a rollback needs")
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
    """Head and log entry of a new lineage and train world at head's own step. No commit is undone.

    The new ranks start from in-memory replicas instead of a checkpoint. `state`: describes the train state that they
    load, that of head (`WorldState`). `seen`: as in `rollback_entry`.
    """
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
    """The head that follows `head` in a new lineage at `step`, with lineage and log number above those of `seen`."""
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
    """Number of the last entry before a gap in the log numbers (`LogEntry.follows`); None if there is no gap."""
    return head.seq if after.seq > head.seq + 1 else None


AWAITED = 2
"""Number of steps whose checkpoint may not be on disk yet: one is being written, and the next waits for it."""


def prunable_entries(
    head: Head, checkpoints: Iterable[Checkpoint], log: Mapping[int, LogEntry], *, keep: int
) -> tuple[int, ...]:
    """Numbers of the log entries that the store no longer needs, ascending. They may move to the run folder.

    The store keeps: the newest `keep` entries; the first entry; entries of registered checkpoints, from which a
    rollback takes its cursors; entries of the newest steps whose checkpoint may not be on disk yet; and the rollback
    that began head's lineage, which a rank that starts late reads to find its starting point.
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
    """Create the log entry for `head` with further `fields`, and add the entry's digest to `head`."""
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
