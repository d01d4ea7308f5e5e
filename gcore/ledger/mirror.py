"""A job's records as last read from the store (etcd): an immutable cache, updated by a pure fold over watch batches.

The cache may be outdated, but that is safe: each record has its store revision, and every transaction compares the
revisions of the records that it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from gcore.ledger.collectives import Agreed, Part
from gcore.ledger.records.chain import (
    Assignment,
    Checkpoints,
    EpochRecord,
    Head,
    LogEntry,
    Member,
    NodeCopies,
    NodeFolder,
    Offer,
    Seal,
)
from gcore.ledger.records.job import (
    EvalAsked,
    EvalPart,
    Evaluation,
    JobPhase,
    JobRecord,
    JobStatus,
    Leader,
    ModelFetch,
    Moves,
    Pin,
    Plan,
    RankClaim,
    Trouble,
)
from gcore.ledger.records.slot_accounting import NodeAccounts
from gcore.ledger.transactions import OpenSlots, Revisioned, Versioned
from gcore.ledger.usage import NodeSpent
from gcore.schema import Record, UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import WatchBatch, WatchEvent
from gcore.types import Version

R = TypeVar("R", bound=Record)
DAMAGED = "Another version of gcore wrote it, or it is damaged"

MOST_DIGITS = 18
"""Maximum number of digits of a number in a key."""


@dataclass(frozen=True, slots=True)
class UnreadableHint:
    """An unreadable record of a kind in `HINTS`: the error, and the store revision of its last write."""

    why: str
    revision: int


@dataclass(frozen=True)
class JobMirror:
    """The records of one job, as last read, each with the store revision of its last write.

    `revision`: store revision up to which changes are included. A field without a comment holds the record of its type;
    mappings are by step (`seals`), incarnation (`offers`, `members`), log number (`log`), version (`evaluations`), data
    epoch (`epochs`) or node (`fetches`).
    """

    keys: JobKeys
    revision: int = 0
    job: Versioned[JobRecord] | None = None
    status: Versioned[JobStatus] | None = None
    head: Versioned[Head] | None = None
    assign: Versioned[Assignment] | None = None
    checkpoints: Versioned[Checkpoints] | None = None
    plan: Versioned[Plan] | None = None
    seals: Mapping[int, Versioned[Seal]] = field(default_factory=dict)
    offers: Mapping[str, Versioned[Offer]] = field(default_factory=dict)
    members: Mapping[str, Versioned[Member]] = field(default_factory=dict)
    log: Mapping[int, Versioned[LogEntry]] = field(default_factory=dict)
    evaluations: Mapping[str, Versioned[Evaluation]] = field(default_factory=dict)
    eval_parts: Mapping[str, Versioned[EvalPart]] = field(default_factory=dict)
    """Parts of incomplete evaluations, by "version/number" as in the key."""
    epochs: Mapping[int, Versioned[EpochRecord]] = field(default_factory=dict)
    fetches: Mapping[str, Versioned[ModelFetch]] = field(default_factory=dict)
    parts: Mapping[str, Versioned[Part]] = field(default_factory=dict)
    """Contributions of controllers to collectives, by incarnation."""
    agreed: Mapping[str, Versioned[Agreed]] = field(default_factory=dict)
    """Answers of collectives, by "version/name"."""
    claims: Mapping[str, Versioned[RankClaim]] = field(default_factory=dict)
    """Which worker instance runs each train rank, by key."""
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    """Address (host:port) at which rank 0 of a train world listens for the other ranks, by key."""
    copies: Mapping[str, Versioned[NodeCopies]] = field(default_factory=dict)
    """In-memory replicas of train states, by node."""
    folders: Mapping[str, Versioned[NodeFolder]] = field(default_factory=dict)
    """Content of the nodes' own run folders, by node; only if nodes share no folder."""

    leaders: Mapping[str, Versioned[Leader]] = field(default_factory=dict)
    """Holds at most one record, under the key "". So do `pins` and `movings`. Use `leader`, `pin` and `moves`."""
    pins: Mapping[str, Versioned[Pin]] = field(default_factory=dict)
    movings: Mapping[str, Versioned[Moves]] = field(default_factory=dict)
    askings: Mapping[str, Versioned[EvalAsked]] = field(default_factory=dict)
    """Holds at most one record, under the key "". Use `asked`."""
    spent: Mapping[str, Versioned[NodeSpent]] = field(default_factory=dict)
    """Use of external judges, by node, including absent nodes."""
    books: Mapping[str, Versioned[NodeAccounts]] = field(default_factory=dict)
    """Slot accounts of the newest steps, by node, including absent nodes."""
    troubles: Mapping[str, Versioned[Trouble]] = field(default_factory=dict)
    """The newest warnings, by topic."""
    unreadable: Mapping[str, UnreadableHint] = field(default_factory=dict)
    """Unreadable hints (`HINTS`), by key. They count as absent until they are written again."""

    def fold(self, batch: WatchBatch) -> JobMirror:
        """Return the mirror after the events of `batch`. A batch with `reset` replaces everything.

        Raises UnreadableRecord, except for records in `HINTS`: no transaction depends on them, so a damaged one must
        not block the job.
        """
        mirror = JobMirror(self.keys) if batch.reset else self
        changes: dict[str, Any] = {}
        for event in batch.events:
            mirror._apply(event, changes)
        return replace(mirror, revision=batch.revision, **changes)

    def written(self, key: str, known: Revisioned | None) -> Revisioned | None:
        """The stored value that a write to `key` replaces: `known`, or the unreadable record under that key, or None.

        A transaction compares its revision. For keys of `HINTS`.
        """
        return known or self.unreadable.get(key)

    @property
    def open_slots(self) -> OpenSlots | None:
        """Head and the seals of open steps, with their revisions; None before the job has started."""
        return OpenSlots(self.head, self.seals) if self.head else None

    @property
    def job_record(self) -> JobRecord:
        """The job's record. The job must exist (asserted)."""
        assert self.job is not None
        return self.job.record

    @property
    def run_dir(self) -> Path:
        """The job's run folder. The job must exist (asserted)."""
        return Path(self.job_record.run_dir)

    @property
    def started(self) -> tuple[Versioned[Head], Versioned[Checkpoints]]:
        """Head and the registered checkpoints. The job must have started (asserted)."""
        assert self.head is not None
        assert self.checkpoints is not None
        return self.head, self.checkpoints

    @property
    def has_ended(self) -> bool:
        """Whether the job has a status with a final phase."""
        return self.status is not None and self.status.record.phase.ended

    @property
    def is_running(self) -> bool:
        """Whether the job has a status with phase RUNNING."""
        return self.status is not None and self.status.record.phase is JobPhase.RUNNING

    @property
    def leader(self) -> Versioned[Leader] | None:
        """The controller that plans the job's placement, or None."""
        return self.leaders.get("")

    @property
    def pin(self) -> Pin:
        """What a person fixed of the job's placement. Fixes nothing if there is no such record."""
        stored = self.pins.get("")
        return stored.record if stored is not None else Pin()

    @property
    def asked(self) -> EvalAsked | None:
        """The newest evaluation that a person requested out of schedule, or None."""
        stored = self.askings.get("")
        return stored.record if stored is not None else None

    @property
    def moves(self) -> Moves:
        """The record of the newest placement changes; an empty one if there is none."""
        stored = self.movings.get("")
        return stored.record if stored is not None else Moves()

    @property
    def moves_revision(self) -> int:
        """Store revision of the record of placement changes, even if it is unreadable; 0 if it is absent."""
        known = self.written(self.keys.moves, self.movings.get(""))
        return known.revision if known is not None else 0

    def claim(self, world: str, rank: int) -> RankClaim | None:
        """The worker instance that runs rank `rank` of train world `world`, or None."""
        stored = self.claims.get(self.keys.world_rank(world, rank))
        return stored.record if stored else None

    @property
    def worlds(self) -> frozenset[str]:
        """IDs of the train worlds that have any key in the store."""
        prefix = self.keys.world_prefix
        return frozenset(key.removeprefix(prefix).partition("/")[0] for key in (*self.claims, *self.rendezvous))

    def eval_parts_of(self, version: Version) -> dict[int, EvalPart]:
        """Stored parts of the evaluation of `version`, by part number."""
        parts = (stored.record for stored in self.eval_parts.values())
        return {part.number: part for part in parts if part.version == version}

    def lost_keys(self, *, claimed: bool = True) -> tuple[str, ...]:
        """Keys that are missing although other records imply that they exist.

        gcore writes and deletes these records together, so something other than gcore deleted them. Empty if nothing is
        missing, if the job was deleted as a whole, and for an ended job, which the audit checks. `claimed`: whether the
        job's claim on slots exists, which is stored outside the job's records. Call it only after all records were
        read.
        """
        if self.has_ended or (self.job is None and self.status is None and not claimed):
            return ()
        needed: dict[str, object] = {
            self.keys.job: self.job,
            self.keys.state: self.status,
            self.keys.active: claimed or None,
        }
        if self.is_running:
            needed |= {
                self.keys.head: self.head,
                self.keys.checkpoints: self.checkpoints,
                self.keys.plan: self.plan,
            }
            registered = self.checkpoints.record.entries if self.checkpoints is not None else ()
            seqs = [one.seq for one in registered] + ([self.head.record.seq] if self.head is not None else [])
            needed |= {self.keys.log(seq): self.log.get(seq) for seq in seqs}
        return tuple(key for key, record in needed.items() if record is None)

    def _apply(self, event: WatchEvent, changes: dict[str, Any]) -> None:
        key = event.kv.key
        single = _SINGLE.get(key.removeprefix(self.keys.prefix))
        if single is not None:
            name, record = single
            changes[name] = _stored(event, record)
            return
        if key.startswith(self.keys.world_prefix) and key.endswith("/rendezvous"):
            listeners = changes.setdefault("rendezvous", dict(self.rendezvous))
            if event.kind == "delete":
                listeners.pop(key, None)
            else:
                listeners[key] = _address(event)
            return
        for prefix, name, record in _MANY:
            full = self.keys.prefix + prefix
            if key.startswith(full):
                mapping = changes.setdefault(name, dict(getattr(self, name)))
                item = key if name == "claims" else _item(name, key, key.removeprefix(full))
                if name in HINTS:
                    self._apply_hint(event, record, item, mapping, changes)
                elif event.kind == "delete":
                    mapping.pop(item, None)
                else:
                    mapping[item] = _stored(event, record)
                return

    def _apply_hint(
        self, event: WatchEvent, record: type[Record], item: int | str, mapping: dict[Any, Any], changes: dict[str, Any]
    ) -> None:
        key = event.kv.key
        if key in self.unreadable or key in changes.get("unreadable", ()):
            changes.setdefault("unreadable", dict(self.unreadable)).pop(key, None)
        mapping.pop(item, None)
        if event.kind == "delete":
            return
        try:
            mapping[item] = _stored(event, record)
        except UnreadableRecord as error:
            unread = UnreadableHint(str(error), event.kv.mod_revision)
            changes.setdefault("unreadable", dict(self.unreadable))[key] = unread


_SINGLE: dict[str, tuple[str, type[Record]]] = {
    "job": ("job", JobRecord),
    "state": ("status", JobStatus),
    "head": ("head", Head),
    "assign": ("assign", Assignment),
    "ckpts": ("checkpoints", Checkpoints),
    "plan": ("plan", Plan),
}

_MANY: tuple[tuple[str, str, type[Record]], ...] = (
    ("seal/", "seals", Seal),
    ("offer/", "offers", Offer),
    ("member/", "members", Member),
    ("log/", "log", LogEntry),
    ("eval/", "evaluations", Evaluation),
    ("evalpart/", "eval_parts", EvalPart),
    ("epoch/", "epochs", EpochRecord),
    ("fetch/", "fetches", ModelFetch),
    ("part/", "parts", Part),
    ("agreed/", "agreed", Agreed),
    ("world/", "claims", RankClaim),
    ("copies/", "copies", NodeCopies),
    ("folder/", "folders", NodeFolder),
    ("spent/", "spent", NodeSpent),
    ("placement/books/", "books", NodeAccounts),
    ("placement/leader", "leaders", Leader),
    ("placement/pin", "pins", Pin),
    ("placement/moves", "movings", Moves),
    ("evalask", "askings", EvalAsked),
    ("trouble/", "troubles", Trouble),
)

HINTS = frozenset(
    {
        "offers",
        "fetches",
        "parts",
        "copies",
        "folders",
        "spent",
        "books",
        "leaders",
        "pins",
        "movings",
        "troubles",
        "askings",
    }
)
"""Fields of `JobMirror` whose records no transaction depends on: controllers' reports about themselves and their nodes,
placement records, and texts for people. An unreadable one counts as absent.
"""


def _item(name: str, key: str, rest: str) -> int | str:
    if name not in ("seals", "log", "epochs"):
        return rest
    if not (rest.isascii() and rest.isdigit() and len(rest) <= MOST_DIGITS):
        raise UnreadableRecord(f"{rest!r} is not a number", where=key, fix=DAMAGED)
    return int(rest)


def _address(event: WatchEvent) -> str:
    try:
        return event.kv.value.decode()
    except UnicodeDecodeError as error:
        raise UnreadableRecord(f"not an address ({error})", where=event.kv.key, fix=DAMAGED) from error


def _stored(event: WatchEvent, record: type[R]) -> Versioned[R] | None:
    if event.kind == "delete":
        return None
    return Versioned(record.decode(event.kv.value, event.kv.key), event.kv.mod_revision)
