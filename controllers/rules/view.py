"""The view: an immutable snapshot of everything that the rules of a job read in one cycle. It contains the mirror of
the job's records in the store, and the state of this controller.

The view may be outdated. Every transaction based on it compares the revisions that it has read.

Turns: any controller of the job (peer) may run any transaction. A hash selects one that tries at once; each further one
tries `TURN_SECONDS` later. This saves the store transactions that would fail their compares (etcd logs their bodies
too). Safety never depends on turns.

`Memo` caches a result while the records that it was computed from are the same objects. Records are replaced and never
changed, so the result would be the same. Most changes of a view do not touch the records that expensive computations
use.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING, Any, TypeVar

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
    SealedGroup,
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
from gcore.train.rank.feed import Fetching
from gcore.train.rank.launch import WorldStart
from gcore.types import PromptRef, Token, Version
from gcore.worker.records import WorkerRecord
from placement.moves import MoveProposal, MoveReport

if TYPE_CHECKING:
    from gcore.worker.sandbox.pool import PoolStatus

TURN_SECONDS = 1.0
"""Delay between the attempts of two peers in turn order."""

SETTLE_S = 1.0
"""A loss must persist for this long before a rule acts on it, because registrations and claims reach a controller
through different watches."""


def turn_order(members: Iterable[str], topic: str) -> tuple[str, ...]:
    """The members in a pseudo-random order that `topic` determines; the same on every controller."""
    return _order(frozenset(members), topic)


@functools.lru_cache(maxsize=1024)  # few topics are used again and again
def _order(members: frozenset[str], topic: str) -> tuple[str, ...]:
    return tuple(sorted(members, key=lambda name: hashlib.blake2b(f"{topic}|{name}".encode()).digest()))


def turn_of(members: Iterable[str], me: str, topic: str) -> int:
    """The place of `me` in `turn_order`: 0 acts first. A peer that is not among the members acts last."""
    ordered = turn_order(members, topic)
    return ordered.index(me) if me in ordered else len(ordered) + 1


@dataclass(frozen=True, slots=True)
class Timers:
    """Since when each condition (of an intent) has held without interruption, in seconds of a monotonic clock."""

    since: Mapping[str, float]

    def note(self, conditions: Iterable[str], now: float) -> Timers:
        """The timers for the `conditions` that hold `now`: new ones start now, the others keep their start."""
        return Timers({c: self.since.get(c, now) for c in conditions})

    def ripe(self, condition: str, turn: int, now: float, *, after: float = 0.0) -> bool:
        """Whether the condition has held for `after` seconds plus the delay of a peer at place `turn`."""
        return now - self.since.get(condition, now) >= self.wait(turn, after)

    @staticmethod
    def wait(turn: int, after: float) -> float:
        """Seconds that a peer at place `turn` waits before it acts."""
        return after + turn * TURN_SECONDS


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Known:
    """A cached result, and the objects that it was computed from."""

    sources: tuple[object, ...]
    result: Any


class Memo:
    """A cache of computed results by name, each valid while its source objects are the same."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def get(self, name: Hashable, sources: tuple[object, ...], work: Callable[[], T]) -> T:
        """The result of `work()`. It is called again only if one of `sources` is another object than at the last call
        for this `name`. `work` must depend on nothing else."""
        known = self._known.get(name)
        if known is None or len(known.sources) != len(sources) or not all(map(is_, known.sources, sources)):
            known = self._known[name] = _Known(sources, work())
        result: T = known.result
        return result


@dataclass(frozen=True)
class CheckpointProgress:
    """Progress of a checkpoint that is being written: `written` of `total` bytes. `error`: why the last attempt failed;
    empty if it did not.

    `over`: this checkpoint is given up; the next attempt is the next checkpoint that is due.
    """

    version: Version
    total: int
    written: int
    error: str
    over: bool


@dataclass(frozen=True)
class RankView:
    """A train rank of the present train world, as it last reported."""

    rank: int
    holding: Token | None = None
    """The batch that the rank is receiving or has received."""
    held: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The samples of that batch that have arrived: group digest -> indexes of samples."""
    applied: Token | None = None
    """The batch that the rank has trained last."""
    content: bytes = b""
    """Digest of that batch's content (`gcore.ledger.balance`); empty: not reported."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    phase: str = ""
    writing: CheckpointProgress | None = None
    """The newest checkpoint write, reported by the rank that writes checkpoints."""
    trouble: str = ""
    """Description of a write to the run's folder (other than a checkpoint) that fails and is being retried; empty:
    none."""
    progress: int = 0
    """Counter that increases with any progress of the rank."""
    begun: int = 0
    """Number of parts of step `begun_step` whose training the rank has started; `begun_content` is their digest
    (`gcore.ledger.balance.parts_sha256`)."""
    begun_step: int = 0
    begun_content: bytes = b""
    released: frozenset[str] = frozenset()
    """The parts of its state (`gcore.train.rank.launch.PARTS`) that the rank has moved out of device memory."""
    unrested: str = ""
    """Why the rank could not release its memory after the newest step; empty if it could."""
    speaks: int = SCHEMA_VERSION
    """The schema version of requests to the rank."""
    clock: float | None = None
    """The rank's monotonic clock at this report; None: not reported."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the rank has spent in each phase since its start."""
    fetching: Mapping[str, Fetching] = field(default_factory=dict)
    """The samples of the batch `holding` that have arrived and whose blobs (pictures, arrays) the rank does not have yet: group
    digest -> their indexes and bytes."""
    fetched_bytes: int = 0
    """Bytes of blobs that the rank has received in its life, also of incomplete ones."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk, as rank 0 reported it."""

    version: Version
    file: str
    digest: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SavedCheckpoint:
        """The files of a registered checkpoint."""
        return cls(checkpoint.version, checkpoint.file, checkpoint.digest)


@dataclass(frozen=True)
class EngineView:
    """State of an engine as this controller knows it. `version`: of its weights; None: not known.

    `silent`: it has open requests and does not respond. `hung`: it has been silent for so long that its process must be
    ended. `why`: sentence for users about that. `trouble`: why its last sleep, wake or load of weights failed; empty if
    it did not. `asleep`: it has released its memory and lost its weights.
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
    """Snapshot of one job, as the controller `me` on `node` sees it. `mirror`: the job's records in the store. `nodes`,
    `workers`: registered nodes of the cluster and worker processes."""

    spec: JobSpec
    rules: StreamRules
    mirror: JobMirror
    me: str
    node: str
    nodes: Mapping[str, NodeRecord]
    workers: Mapping[str, WorkerRecord]
    ranks: Mapping[int, RankView] = field(default_factory=dict)
    engines: Mapping[str, EngineView] = field(default_factory=dict)
    """The rollout engines that this controller manages, by instance."""
    judges: Mapping[str, EngineView] = field(default_factory=dict)
    """The engines of the job's judges in the whole cluster, by instance; any peer may send requests to any of them."""
    holdings: Mapping[PromptRef, OfferedGroup] = field(default_factory=dict)
    """The finished groups that this peer holds."""
    outcomes: Mapping[PromptRef, EndedRef] = field(default_factory=dict)
    """Prompts that ended at this peer without a group (filtered or failed)."""
    in_flight: Mapping[PromptRef, Version] = field(default_factory=dict)
    """Prompts that this peer has started and not finished, with the oldest weights that may have generated a part of
    each."""
    busy: bool = False
    """Whether this peer is still producing groups that the next step needs."""
    under_way: frozenset[str] = frozenset()
    """Conditions of the intents whose action runs in the background now."""
    saved: Mapping[Version, SavedCheckpoint] = field(default_factory=dict)
    """Complete checkpoints that ranks reported, registered or not."""
    staged: frozenset[Version] = frozenset()
    """Versions whose weights are in the run's folder, ready for weight sync."""
    fetched_starts: frozenset[str] = frozenset()
    """Train worlds whose start checkpoint is verified in this node's own folder; used only if nodes share no folder."""
    is_ordering: bool = False
    """Whether this peer is computing the prompt order of a curriculum."""
    share: KnownShare | None = None
    """The slots that are granted to the job; None: all slots of the cluster."""
    claim: Claim = field(default_factory=Claim)
    """The job's claim on slots."""
    queued: QueuePosition | None = None
    """The job's position in the queue for slots, if it waits."""
    surplus_reasons: tuple[str, ...] = ()
    """Why the job must give back slots: who gets them, or why they may not be used."""
    outdated_nodes: Mapping[str, int] = field(default_factory=dict)
    """Nodes too old to read the records written now, with the newest schema version that each reads. They are not in `nodes`."""
    missing_input: str = ""
    """Why this node cannot work on the job yet: a missing input; empty: none."""
    reward_pool: PoolStatus | None = None
    """Load of this peer's processes that run reward functions; None: it has none."""
    judge_pool: PoolStatus | None = None
    """Load of this peer's requests to judges; None: it sends none."""
    tool_pool: PoolStatus | None = None
    """Load of this peer's processes that run agents and tools; None: it has none."""
    store_trouble: str = ""
    """Why the store refused the last write of this controller; empty if it accepted it, or if a newer change of the job
    was seen since."""
    rank_failures: Mapping[str, str] = field(default_factory=dict)
    """By instance: why train ranks of the present worlds failed, also if they are no longer registered."""
    failed_start: str = ""
    """Why a worker of the job cannot be started here, after several attempts; empty: none failed."""
    leaving: bool = False
    """Whether this controller is shutting down and hands over its work."""

    proposal: MoveProposal | None = None
    """The placement change that a policy has decided, if this controller plans the placement."""
    move_report: MoveReport | None = None
    """Results of earlier placement changes to be recorded, if this controller plans the placement."""

    remembered: Memo = field(default_factory=Memo, repr=False, compare=False)
    """Cache that all views of the job on this controller share."""

    @cached_property
    def offered(self) -> OffersView:
        """The groups, outcomes and prompts in flight of all offers together, by ref (prompt)."""
        return self.remembered.get("offered", self._batch, self._offered)

    def _offered(self) -> OffersView:
        offers = [stored.record for stored in self.mirror.offers.values()]
        return OffersView.collect(self.rules, self.head, offers, self._part)

    def _part(self, rules: StreamRules, head: Head, offer: Offer) -> OffersView:
        """The contents of a single offer, cached."""
        # When one peer writes its offer, the offers of the others are unchanged.
        sources = (offer, rules, head)
        return self.remembered.get(("offer", offer.incarnation), sources, lambda: OffersView.of(rules, head, offer))

    @cached_property
    def due(self) -> tuple[PromptRef, ...]:
        """The prompts that must still be sampled, by any peer, for the next batch, oldest first."""
        rule = carried.due_refs if self.rules.staleness else due_refs
        return self.remembered.get(
            "due", self._batch, lambda: rule(self.rules, self.head, self._seals, self.offered, order=self._order)
        )

    @cached_property
    def chosen(self) -> Choice:
        """What to seal next: the chosen batch, or why there is none yet."""
        rule = carried.choose_seal if self.rules.staleness else choose_seal
        return self.remembered.get(
            "chosen", self._batch, lambda: rule(self.rules, self.head, self._seals, self.offered, order=self._order)
        )

    @cached_property
    def part(self) -> SealPart | None:
        """The part of the next batch that can be sealed now, while other groups of the batch are missing; None if there
        is none."""
        if self.rules.part is None or not isinstance(self.chosen, AwaitGroups):
            return None
        return self.remembered.get(
            "part", self._batch, lambda: next_part(self.rules, self.head, self._seals, self.offered, order=self._order)
        )

    @property
    def _order(self) -> CachedOrder:
        """The prompts without an outcome that are in no seal, in the order of the stream. Cached separately, because
        offers change more often than seals and do not affect it."""
        sources = (self.rules, self.mirror.head, self.mirror.seals)
        return self.remembered.get("order", sources, lambda: CachedOrder(self.rules, self.head, self._seals))

    @cached_property
    def awaited(self) -> tuple[PromptRef, ...]:
        """The prompts in flight that the next seal waits for, because they would exceed the staleness limit in a later
        step; none at staleness 0."""
        if not self.rules.staleness:
            return ()
        return self.remembered.get(
            "awaited", self._batch, lambda: carried.awaited_refs(self.rules, self.head, self._seals, self.offered)
        )

    @property
    def _batch(self) -> tuple[object, ...]:
        """The records that determine what is sealed next, as sources for `Memo`."""
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
        """Description of a failing write of a train rank to the run's folder, other than a checkpoint; empty if there
        is none."""
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
        """Whether the weights of `step` are evaluated: by the schedule of the spec, or because a user asked for it.
        `last`: `step` is the last one."""
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
        """The place of this controller in the turn order of the job's members for `topic`; 0 acts first."""
        return turn_of(self.mirror.members, self.me, topic)

    @property
    def seal(self) -> Seal | None:
        """The seal record of the next step (in any of its states), if there is one."""
        stored = self.mirror.seals.get(self.head.step + 1)
        return stored.record if stored else None

    def lacking_bytes(self, node: str) -> int:
        """Bytes of blobs that the train ranks of a node still lack for samples of the next step; 0 before the job's first
        placement."""
        if self.mirror.head is None or self.mirror.plan is None or (seal := self.seal) is None:
            return 0
        ranks = [place.rank for place in self.plan.ranks if place.node == node]
        return sum(one.total - one.fetched for rank in ranks for one in self.fetching(seal, rank).values())

    @property
    def unsealed(self) -> tuple[OfferedGroup, ...]:
        """The groups that this peer holds and that no seal of an open step contains, oldest first."""
        return self.remembered.get("unsealed", (self.holdings, self.mirror.seals), self._unsealed)

    @property
    def duplicates(self) -> tuple[OfferedGroup, ...]:
        """The groups that this peer holds of prompts whose group or outcome an open seal takes from another peer."""
        sealed, taken = sealed_refs(self._seals), {group.digest for seal in self._seals for group in seal.groups}
        return tuple(g for ref, g in sorted(self.holdings.items()) if ref in sealed and g.digest not in taken)

    def _unsealed(self) -> tuple[OfferedGroup, ...]:
        sealed = sealed_refs(self._seals)
        return tuple(g for ref, g in sorted(self.holdings.items()) if ref not in sealed)

    def contradicts(self, rank: RankView) -> bool:
        """Whether `rank` has trained another batch than the seal of the next step contains, under the same token, or
        has started parts of that step that are not READY in the seal.

        This happens after etcd was restored from an older backup, because tokens are then issued a second time. A rank
        that does not report the digest of what it trained is trusted.
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
        """The number of parts of the next step whose training `rank` has started."""
        return rank.begun if rank.begun_step == self.head.step + 1 else 0

    def layout(self, seal: Seal) -> StepLayout:
        """Which rank gets which sample of `seal`."""
        return self.remembered.get("layout", (seal,), lambda: balance_samples(seal))

    def near_ranks(self, groups: Iterable[SealedGroup]) -> dict[str, tuple[int, ...]]:
        """For each holder of `groups` with blobs: the sequence groups with a rank on the holder's node, as in a seal."""
        nodes = {name: stored.record.node for name, stored in self.mirror.members.items()}
        size, found = self.spec.train.sequence_parallel, dict[str, tuple[int, ...]]()
        for holder in {group.holder for group in groups if group.media_bytes} & nodes.keys():
            found[holder] = tuple(
                sorted({place.rank // size for place in self.plan.ranks if place.node == nodes[holder]})
            )
        return found

    def held_for(self, seal: Seal) -> frozenset[str]:
        """The digests of the groups of `seal` that this peer must deliver."""
        groups = seal.groups
        return self.remembered.get(
            "held for", (seal, self.me), lambda: frozenset(group.digest for group in groups if group.holder == self.me)
        )

    def missing(self, seal: Seal, rank: int) -> Mapping[str, set[int]]:
        """The samples of its share of `seal` that `rank` has not received as far as reported: group digest -> sample
        indexes."""
        known = self.ranks.get(rank)
        return self.remembered.get(("missing", rank), (seal, known), lambda: self._missing(seal, rank, known))

    def unsent(self, seal: Seal, rank: int) -> Mapping[str, set[int]]:
        """The samples of its share of `seal` that `rank` neither holds nor fetches the blobs of, as far as reported:
        group digest -> sample indexes."""
        missing, fetching = self.missing(seal, rank), self.fetching(seal, rank)
        if not fetching:
            return missing
        left = {
            digest: samples - fetching[digest].samples if digest in fetching else samples
            for digest, samples in missing.items()
        }
        return {digest: samples for digest, samples in left.items() if samples}

    def fetching(self, seal: Seal, rank: int) -> Mapping[str, Fetching]:
        """The samples of `seal` that `rank` has received without all their blobs, by group digest."""
        known = self.ranks.get(rank)
        if known is None or not self._holds(known.holding, seal):
            return {}
        sealed = {group.digest for group in seal.groups}  # an earlier attempt may have had a group that is dropped
        return {digest: one for digest, one in known.fetching.items() if digest in sealed}

    def _missing(self, seal: Seal, rank: int, known: RankView | None) -> Mapping[str, set[int]]:
        held = known.held if known is not None and self._holds(known.holding, seal) else {}
        missing: dict[str, set[int]] = {}
        for slot in self.layout(seal).of_rank(rank):
            digest = seal.groups[slot.group].digest
            if slot.sample not in held.get(digest, frozenset()):
                missing.setdefault(digest, set()).add(slot.sample)
        return missing

    def _holds(self, holding: Token | None, seal: Seal) -> bool:
        """Whether samples that a rank received for the token `holding` count for `seal`. If batches are sealed in
        parts, samples of an earlier attempt of the step count too."""
        if holding is None or self.rules.part is None:
            return holding == seal.token
        return (holding.lineage, holding.step) == (seal.lineage, seal.step)


def world_start(view: JobView) -> WorldStart | None:
    """The state that the present train world starts from: the in-memory copies or the checkpoint that the last rollback
    named, or the base model. None if the log entry of that rollback is no longer known."""
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
    """The registered checkpoint that the present train world starts from; None if it starts from something else."""
    start = world_start(view)
    if start is None or not start.checkpoint:
        return None
    entries = view.checkpoints
    return next((c for c in entries if c.file == start.checkpoint), None)
