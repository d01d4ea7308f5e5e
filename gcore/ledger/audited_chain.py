"""The audit of the log's shape: numbers, parents, lineages, worlds and digests, of cut-off entries too. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gcore.ledger.digests import digest_of
from gcore.ledger.findings import Found
from gcore.ledger.records import Head, Lineage, LogEntry


@dataclass(frozen=True, slots=True)
class ChainFacts:
    """`chain`: the numbers of the final lineage's entries that are there, ascending. `lineages`: as the rollbacks in the log
    began them, or head's where entries are missing. `since_step`: the account entries after the newest step."""

    chain: tuple[int, ...]
    lineages: tuple[Lineage, ...]
    since_step: tuple[int, ...]


def check_chain(head: Head, log: Mapping[int, LogEntry], found: Found) -> ChainFacts:
    """Every entry up to head's, whatever lineage it is of, then the walk from head."""
    before: LogEntry | None = None
    whole = True
    cut_off = _cut_off(head, log)
    lineage, world = 0, None
    begun = [Lineage(number=0, base_step=0)]
    last = max(log, default=-1)
    gap: int | None = None
    for seq in range(min(head.seq, last) + 1):  # whatever a damaged head says
        if any(seq in numbers for numbers in cut_off):  # whatever lies there is of a future that was cut off
            if gap is not None:
                _tell_missing(gap, seq - 1, found)
                gap = None
            continue
        entry = log.get(seq)
        if entry is None:
            gap = seq if gap is None else gap
            before, whole = None, False
            continue
        if gap is not None:
            _tell_missing(gap, seq - 1, found)
            gap = None
        if entry.kind == "rollback":
            # Greater by more than one where a store was put back: no number of what was lost with it is given out again.
            lineage, world = max(lineage + 1, entry.lineage), entry.world
            skipped = None if entry.follows is None else seq
            begun.append(Lineage(number=entry.lineage, base_step=entry.step, entry=skipped))
        _check_place(seq, entry, lineage, world, found)
        _check_parent(entry, before, log, found)
        lineage, world, before = entry.lineage, entry.world, entry
    if head.seq > last and gap is None:
        gap, whole = last + 1, False
    if gap is not None:
        _tell_missing(gap, head.seq, found)
    for seq in sorted(seq for seq in log if seq > head.seq):
        refs = [one.ref for one in log[seq].delta]
        found.add("chain", f"log entry {seq} is beyond head, which is entry {head.seq}", refs)
    lineages = tuple(begun)
    if not whole:
        lineages = head.lineages
    elif lineages != head.lineages:
        told = " ".join(f"{one.number} from step {one.base_step}" for one in lineages)
        found.add("chain", f"head's lineages are not those that its rollbacks began ({told})")
    _check_head(head, log.get(head.seq), found)
    return _walk(head, log, lineages, found)


def _cut_off(head: Head, log: Mapping[int, LogEntry]) -> tuple[range, ...]:
    """The numbers that were left out where the store had been put back. Head says which entries tell of that, and only what these
    tell counts: their digests are kept, and a head that was damaged cannot excuse what is missing."""
    telling = (log.get(one.entry) for one in head.lineages if one.entry is not None)
    rollbacks = (entry for entry in telling if entry is not None and entry.kind == "rollback")
    return tuple(range(one.follows + 1, one.seq) for one in rollbacks if one.follows is not None)


def _tell_missing(first: int, last: int, found: Found) -> None:
    what = f"log entry {first} is missing" if first == last else f"log entries {first} to {last} are missing"
    found.add("chain", what)


def _check_place(seq: int, entry: LogEntry, lineage: int, world: str | None, found: Found) -> None:
    """What an entry says of itself, given the entries before it."""
    if entry.seq != seq or (entry.parent is not None and entry.parent >= seq):
        found.add("chain", f"log entry {seq} says it is entry {entry.seq} after {entry.parent}")
    elif (entry.kind == "base") != (seq == 0) or (entry.parent is None) != (seq == 0):
        found.add("chain", f"log entry {seq} says it is a {entry.kind} entry after {entry.parent}")
    elif entry.kind in ("train", "account") and entry.parent != seq - 1:
        found.add("chain", f"log entry {seq} ({entry.kind}) says it follows {entry.parent}, expected {seq - 1}")
    if entry.lineage != lineage:
        found.add("chain", f"log entry {seq} ({entry.kind}) is of lineage {entry.lineage}, expected {lineage}")
    if world is not None and entry.world != world:
        found.add("chain", f"log entry {seq} ({entry.kind}) is of world {entry.world}, expected {world}")


def _check_parent(entry: LogEntry, before: LogEntry | None, log: Mapping[int, LogEntry], found: Found) -> None:
    """The parent is the entry that was there when this one was written."""
    if not entry.parent_digest or entry.parent is None:
        return
    parent = before if before is not None and before.seq == entry.parent else log.get(entry.parent)
    if parent is not None and digest_of(parent) != entry.parent_digest:
        found.add("chain", f"log entry {entry.parent} is not what it was when entry {entry.seq} was written after it")


def _check_head(head: Head, entry: LogEntry | None, found: Found) -> None:
    """Head says of itself what its entry does."""
    if entry is None:
        return
    if entry.nonce != head.nonce:
        found.add("chain", f"log entry {head.seq} and head were written by different transactions")
    elif head.digest and digest_of(entry) != head.digest:
        found.add("chain", f"log entry {head.seq} is not what it was when head was written with it")
    for name in ("parent", "lineage", "step", "world"):
        of_head, of_entry = getattr(head, name), getattr(entry, name)
        if of_head != of_entry:
            found.add("chain", f"head is at {name} {of_head}, its log entry {head.seq} at {of_entry}")


def _walk(head: Head, log: Mapping[int, LogEntry], lineages: tuple[Lineage, ...], found: Found) -> ChainFacts:
    chain: list[int] = []
    since: list[int] = []
    stepless = True
    seq: int | None = head.seq
    while seq is not None:
        entry = log.get(seq)
        if entry is None or entry.seq != seq or (entry.parent is not None and entry.parent >= seq):
            found.add("chain", f"the chain from head ends at log entry {seq} instead of its base")
            break
        chain.append(seq)
        stepless = stepless and entry.kind == "account"
        if stepless:
            since.append(seq)
        seq = entry.parent
    return ChainFacts(tuple(chain[::-1]), lineages, tuple(since[::-1]))
