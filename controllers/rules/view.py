"""Everything that one cycle of a job reads, frozen: the mirror of the store and this controller's own state.

The view may be outdated. Every transaction based on it compares the revisions that it has read.

Turns: any peer may run any transaction. A preferred peer tries at once and each other one `TURN_SECONDS` later, which saves the store
transactions that would lose (their bodies go to its log too). Safety never depends on turns.

`Memo` caches results while the source records are the same objects. Records are replaced, never changed, so the result is the same too; most
changes do not touch the records that expensive computations use.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any, TypeVar

from gcore.config.spec import JobSpec
from gcore.ledger import staleness as carried
from gcore.ledger.balance import StepLayout, balance_samples, content_sha256, next_part, part_digests, parts_sha256
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import (
    Checkpoint,
    EndedRef,
    EpochRecord,
    Head,
    LogEntry,
    Offer,
    OfferedGroup,
    Seal,
    SealState,
)
from gcore.ledger.records.cluster import Claim, KnownShare, QueuePosition
from gcore.ledger.records.job import JobRecord, NodeRecord, Plan
from gcore.ledger.selection import (
    AwaitGroups,
    CachedOrder,
    Choice,
    OffersView,
    SealPart,
    StreamRules,
    choose_seal,
    due_refs,
    is_over,
    resumable_checkpoints,
    sealed_refs,
)
from gcore.ledger.statistics import valid_epochs
from gcore.schema import SCHEMA_VERSION
from gcore.train.rank.launch import WorldStart
from gcore.types import PromptRef, Token, Version
from gcore.worker.records import WorkerRecord
from gcore.worker.sandbox.pool import PoolStatus
from placement.moves import MoveProposal, MoveReport

TURN_SECONDS = 1.0
"""Delay between the attempts of two peers in turn order."""

SETTLE_S = 1.0
"""A loss is confirmed after this delay, because registrations and claims reach a controller through different watches."""


def turn_order(members: Iterable[str], topic: str) -> tuple[str, ...]:
    """The members in the order of a hash with `topic`."""
    return _order(frozenset(members), topic)


@functools.lru_cache(maxsize=1024)  # few topics are used again and again
def _order(members: frozenset[str], topic: str) -> tuple[str, ...]:
    return tuple(sorted(members, key=lambda name: hashlib.blake2b(f"{topic}|{name}".encode()).digest()))


def turn_of(members: Iterable[str], me: str, topic: str) -> int:
    """My place in the order of `topic`: 0 goes first. A peer that is not among the members goes last."""
    ordered = turn_order(members, topic)
    return ordered.index(me) if me in ordered else len(ordered) + 1


@dataclass(frozen=True, slots=True)
class Timers:
    """Since when each condition has held without interruption."""

    since: Mapping[str, float]

    def note(self, conditions: Iterable[str], now: float) -> Timers:
        """Keep the start time of conditions that still hold, add new ones at `now`, drop the others."""
        return Timers({c: self.since.get(c, now) for c in conditions})

    def ripe(self, condition: str, turn: int, now: float, *, after: float = 0.0) -> bool:
        """Whether it is my turn: the condition has held for `after` plus the delay of my place in the order."""
        return now - self.since.get(condition, now) >= self.wait(turn, after)

    @staticmethod
    def wait(turn: int, after: float) -> float:
        """Seconds that a peer at this place waits."""
        return after + turn * TURN_SECONDS


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Known:
    sources: tuple[object, ...]
    result: Any


class Memo:
    """A cache of results by name."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def get(self, name: Hashable, sources: tuple[object, ...], work: Callable[[], T]) -> T:
        """The result of `work`, cached while `sources` are the same objects. `work` must depend on nothing else."""
        known = self._known.get(name)
        if known is None or len(known.sources) != len(sources) or not all(map(is_, known.sources, sources)):
            known = self._known[name] = _Known(sources, work())
        result: T = known.result
        return result


@dataclass(frozen=True)
class CheckpointProgress:
    """A checkpoint being written: `written` of `total` bytes; `error`: why the last attempt failed, or empty.

    `over`: this checkpoint is not retried; the next due checkpoint is the next attempt.
    """

    version: Version
    total: int
    written: int
    error: str
    over: bool


@dataclass(frozen=True)
class RankView:
    """A train rank of head's world, as it last reported."""

    rank: int
    holding: Token | None = None
    held: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Group digest -> indexes of its samples."""
    applied: Token | None = None
    content: bytes = b""
    """Digest of the applied batch (`gcore.ledger.balance`); empty: not reported."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    phase: str = ""
    writing: CheckpointProgress | None = None
    """The newest checkpoint write, reported by the rank that writes checkpoints."""
    trouble: str = ""
    """A failing write to the run's folder, other than a checkpoint, that is being retried."""
    progress: int = 0
    """Increases with any progress."""
    begun: int = 0
    """Parts of step `begun_step` that the rank has started; `begun_content` identifies them (`gcore.ledger.balance.parts_sha256`)."""
    begun_step: int = 0
    begun_content: bytes = b""
    released: frozenset[str] = frozenset()
    """The parts whose memory the rank has released (`gcore.train.rank.launch`)."""
    unrested: str = ""
    """Why the rank could not release its memory after the newest step; empty if it could."""
    speaks: int = SCHEMA_VERSION
    """The schema version used in requests to the rank."""
    clock: float | None = None
    """The rank's monotonic clock at this report; None: not reported."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the rank has spent in each phase since its start."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk, as rank 0 reported it."""

    version: Version
    file: str
    digest: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SavedCheckpoint:
        """The same for a registered checkpoint."""
        return cls(checkpoint.version, checkpoint.file, checkpoint.digest)


@dataclass(frozen=True)
class EngineView:
    """A rollout engine that this controller manages. `version` None: unknown.

    `silent`: it has open requests and does not respond; `hung`: for so long that it must be ended; `why`: the sentence for users. `trouble`: why
    it did not load its weights the last time, or empty. `asleep`: its memory is released, and its weights are gone.
    """

    instance: str
    address: str
    version: Version | None
    silent: bool = False
    hung: bool = False
    why: str = ""
    trouble: str = ""
    asleep: bool = False


@dataclass(frozen=True)
class JobView:
    """A snapshot of one job."""

    spec: JobSpec
    rules: StreamRules
    mirror: JobMirror
    me: str
    node: str
    nodes: Mapping[str, NodeRecord]
    workers: Mapping[str, WorkerRecord]
    ranks: Mapping[int, RankView] = field(default_factory=dict)
    engines: Mapping[str, EngineView] = field(default_factory=dict)
    judges: Mapping[str, EngineView] = field(default_factory=dict)
    """The engines of the job's judges in the whole cluster; any peer may send requests to any of them."""
    holdings: Mapping[PromptRef, OfferedGroup] = field(default_factory=dict)
    outcomes: Mapping[PromptRef, EndedRef] = field(default_factory=dict)
    in_flight: Mapping[PromptRef, Version] = field(default_factory=dict)
    """Prompts that this peer has started and not finished, with the oldest weights that may have sampled part of each."""
    busy: bool = False
    """Whether this peer still produces something that is due."""
    under_way: frozenset[str] = frozenset()
    """Conditions whose action runs in the background now."""
    saved: Mapping[Version, SavedCheckpoint] = field(default_factory=dict)
    """Checkpoints that ranks reported, registered or not."""
    staged: frozenset[Version] = frozenset()
    """Versions whose weights are in the run's folder."""
    fetched_starts: frozenset[str] = frozenset()
    """Train worlds whose start checkpoint is verified in this node's own folder; used only if nodes share no folder."""
    is_ordering: bool = False
    """Whether this peer is computing the order of a curriculum."""
    share: KnownShare | None = None
    """The slots of the job; None: all slots."""
    claim: Claim = field(default_factory=Claim)
    """The job's claim on slots."""
    queued: QueuePosition | None = None
    """The job's position in the queue for slots, if it waits."""
    outdated_nodes: Mapping[str, int] = field(default_factory=dict)
    """Nodes too old to read the records written now, with the newest schema version that each reads. They are not in `nodes`."""
    missing_input: str = ""
    """Why this node cannot work on the job yet: a missing input; empty: none."""
    reward_pool: PoolStatus | None = None
    """The state of this peer's reward pool."""
    judge_pool: PoolStatus | None = None
    """The state of this peer's requests to judges."""
    tool_pool: PoolStatus | None = None
    """The state of this peer's processes for agents and tools."""
    store_trouble: str = ""
    """Why the store refused the last write of this controller; empty if it accepted it or a newer change of the job was seen."""
    failed_start: str = ""
    """Why a worker of the job cannot be started here, after several attempts; empty: none failed."""
    leaving: bool = False
    """Whether this controller is shutting down and hands over its work."""

    proposal: MoveProposal | None = None
    """The placement change that this controller wants, if it plans the placement."""
    move_report: MoveReport | None = None
    """Its report on earlier placement changes."""

    remembered: Memo = field(default_factory=Memo, repr=False, compare=False)
    """Cached results for the same records."""

    @cached_property
    def offered(self) -> OffersView:
        """All live offers, by ref."""
        return self.remembered.get("offered", self._batch, self._offered)

    def _offered(self) -> OffersView:
        offers = [stored.record for stored in self.mirror.offers.values()]
        return OffersView.collect(self.rules, self.head, offers, self._part)

    def _part(self, rules: StreamRules, head: Head, offer: Offer) -> OffersView:
        # When one peer writes its offer, the offers of the others are unchanged.
        sources = (offer, rules, head)
        return self.remembered.get(("offer", offer.incarnation), sources, lambda: OffersView.of(rules, head, offer))

    @cached_property
    def due(self) -> tuple[PromptRef, ...]:
        """The refs that any peer must still produce for the next seal, oldest first."""
        rule = carried.due_refs if self.rules.staleness else due_refs
        return self.remembered.get(
            "due", self._batch, lambda: rule(self.rules, self.head, self._seals, self.offered, order=self._order)
        )

    @cached_property
    def chosen(self) -> Choice:
        """The choice of the next seal."""
        rule = carried.choose_seal if self.rules.staleness else choose_seal
        return self.remembered.get(
            "chosen", self._batch, lambda: rule(self.rules, self.head, self._seals, self.offered, order=self._order)
        )

    @cached_property
    def part(self) -> SealPart | None:
        """The part of the next step that is worth sealing while other groups of its batch are missing; None if there is none."""
        if self.rules.part is None or not isinstance(self.chosen, AwaitGroups):
            return None
        return self.remembered.get(
            "part", self._batch, lambda: next_part(self.rules, self.head, self._seals, self.offered, order=self._order)
        )

    @property
    def _order(self) -> CachedOrder:
        """The refs that are neither terminal nor sealed. Offers, which change more often than seals, do not affect it."""
        sources = (self.rules, self.mirror.head, self.mirror.seals)
        return self.remembered.get("order", sources, lambda: CachedOrder(self.rules, self.head, self._seals))

    @cached_property
    def awaited(self) -> tuple[PromptRef, ...]:
        """The prompts that the next seal waits for because they would exceed the staleness limit after it; none at staleness 0."""
        if not self.rules.staleness:
            return ()
        return self.remembered.get(
            "awaited", self._batch, lambda: carried.awaited_refs(self.rules, self.head, self._seals, self.offered)
        )

    @property
    def _batch(self) -> tuple[object, ...]:
        """The records that determine the next seal."""
        mirror = self.mirror
        return self.rules, mirror.head, mirror.seals, mirror.offers

    @cached_property
    def epochs(self) -> Mapping[int, EpochRecord]:
        """The data epochs that have started, of a job with a curriculum."""
        return valid_epochs(self.head, [stored.record for stored in self.mirror.epochs.values()])

    @property
    def writing(self) -> CheckpointProgress | None:
        """The progress of the newest checkpoint write in head's world; None if there is none."""
        return next((rank.writing for rank in self.ranks.values() if rank.writing is not None), None)

    @property
    def hindered(self) -> str:
        """A failing write of head's world to the run's folder, other than a checkpoint; empty if there is none."""
        return next((rank.trouble for rank in self.ranks.values() if rank.trouble), "")

    @cached_property
    def log(self) -> Mapping[int, LogEntry]:
        """The newest part of the log, by sequence number."""
        log = self.mirror.log
        return self.remembered.get("log", (log,), lambda: {seq: stored.record for seq, stored in log.items()})

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return is_over(self.rules, self.head)

    def is_evaluated_after(self, step: int, *, last: bool) -> bool:
        """Whether the weights of `step` are evaluated, by schedule or by request."""
        asked = self.mirror.asked
        by_hand = asked is not None and asked.step == step and self.spec.eval.wanted
        return by_hand or self.spec.evaluates_after(step, last=last)

    @property
    def _seals(self) -> list[Seal]:
        return [stored.record for stored in self.mirror.seals.values()]

    @property
    def head(self) -> Head:
        """The newest entry of the chain. Requires that there is one."""
        assert self.mirror.head is not None
        return self.mirror.head.record

    @property
    def plan(self) -> Plan:
        """The plan of the placement. Requires that there is one."""
        assert self.mirror.plan is not None
        return self.mirror.plan.record

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The registered checkpoints. Requires that their record exists."""
        assert self.mirror.checkpoints is not None
        return self.mirror.checkpoints.record.entries

    @property
    def job(self) -> JobRecord:
        """The record of the job. Requires that there is one."""
        return self.mirror.job_record

    def has_lost(self, node: str, slots: Collection[str]) -> bool:
        """Whether a registered node lacks some of these slots: it restarted with fewer slots than planned."""
        record = self.nodes.get(node)
        return record is not None and not set(slots) <= set(record.slots)

    def turn(self, topic: str) -> int:
        """My place among the members for `topic`."""
        return turn_of(self.mirror.members, self.me, topic)

    @property
    def seal(self) -> Seal | None:
        """The slot of the next step, if there is one."""
        stored = self.mirror.seals.get(self.head.step + 1)
        return stored.record if stored else None

    @property
    def unsealed(self) -> tuple[OfferedGroup, ...]:
        """Groups that this peer holds and that no open seal contains, oldest first."""
        return self.remembered.get("unsealed", (self.holdings, self.mirror.seals), self._unsealed)

    def _unsealed(self) -> tuple[OfferedGroup, ...]:
        sealed = sealed_refs(self._seals)
        return tuple(g for ref, g in sorted(self.holdings.items()) if ref not in sealed)

    def contradicts(self, rank: RankView) -> bool:
        """Whether `rank` has trained, under the token of the next step's seal, another batch than the seal's, or has started parts of that step that
        are not READY in it.

        A store that was restored from an older backup issues tokens a second time. A rank that does not report what it trained is trusted.
        """
        seal = self.seal
        if begun := self.begun(rank):
            ready = 0 if seal is None else seal.ready_parts
            if seal is None or begun > ready or rank.begun_content != parts_sha256(part_digests(seal, begun)):
                return True
        if seal is None or seal.state is SealState.OPEN or rank.applied != seal.token or not rank.content:
            return False
        return rank.content != self.remembered.get("content", (seal,), lambda: content_sha256(seal))

    def begun(self, rank: RankView) -> int:
        """Parts of the next step that `rank` has started."""
        return rank.begun if rank.begun_step == self.head.step + 1 else 0

    def layout(self, seal: Seal) -> StepLayout:
        """Which rank gets which sample of `seal`."""
        return self.remembered.get("layout", (seal,), lambda: balance_samples(seal))

    def held_for(self, seal: Seal) -> frozenset[str]:
        """The digests of the groups of `seal` that this peer must deliver."""
        groups = seal.groups
        return self.remembered.get(
            "held for", (seal, self.me), lambda: frozenset(group.digest for group in groups if group.holder == self.me)
        )

    def missing(self, seal: Seal, rank: int) -> Mapping[str, set[int]]:
        """The samples of its share that `rank` has not reported: group digest -> sample indexes."""
        known = self.ranks.get(rank)
        return self.remembered.get(("missing", rank), (seal, known), lambda: self._missing(seal, rank, known))

    def _missing(self, seal: Seal, rank: int, known: RankView | None) -> Mapping[str, set[int]]:
        held = known.held if known is not None and self._holds(known.holding, seal) else {}
        missing: dict[str, set[int]] = {}
        for slot in self.layout(seal).of_rank(rank):
            digest = seal.groups[slot.group].digest
            if slot.sample not in held.get(digest, frozenset()):
                missing.setdefault(digest, set()).add(slot.sample)
        return missing

    def _holds(self, holding: Token | None, seal: Seal) -> bool:
        """Whether the samples that a rank reported for `holding` count for `seal`. In a streamed step they stay valid across attempts."""
        if holding is None or self.rules.part is None:
            return holding == seal.token
        return (holding.lineage, holding.step) == (seal.lineage, seal.step)


def world_start(view: JobView) -> WorldStart | None:
    """The start state of head's world: the copies or checkpoint that its lineage's rollback named, or the base model."""
    head = view.head
    entries = view.checkpoints
    if head.lineage == 0:
        return WorldStart(step=0)
    for entry in view.mirror.log.values():
        if entry.record.kind == "rollback" and entry.record.lineage == head.lineage:
            if entry.record.state is not None:
                return WorldStart(step=entry.record.step, state=entry.record.state)
            named = (c for c in resumable_checkpoints(head, entries) if c.seq == entry.record.parent)
            return next((WorldStart(step=c.step, checkpoint=c.file) for c in named), None)
    return None


def start_checkpoint(view: JobView) -> Checkpoint | None:
    """The registered checkpoint from which head's world starts, if it starts from one."""
    start = world_start(view)
    if start is None or not start.checkpoint:
        return None
    entries = view.checkpoints
    return next((c for c in entries if c.file == start.checkpoint), None)
