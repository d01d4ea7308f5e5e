"""Records of a job's chain in the store, as JSON: head, log, offers, seals, checkpoints.

Each is a `gcore.schema.Record`. None depends on the number of controllers. The rules for each field are in the module
that uses it: `gcore.ledger.selection` (what a seal takes) and `gcore.ledger.chain` (what each transaction writes).

A world state is named by the world and the token after which the world had it. A world applies a token once, and only
from its READY seal, whose content cannot change. World and token therefore name one state permanently, on every rank
and node. In-memory replicas carry this name (`gcore.models.replicas`), and so does the rollback whose new world starts
from them.

If the nodes of a job share no folder (`storage.copies`), each node registers the content of its own folder under its
controller's lease, after a scan or after it verified a fetched file. Only copies on present nodes count. After a full
restart each node scans again, so no such record has to persist.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, NonNegativeInt, PlainSerializer, PositiveInt

from gcore.data.order import Cursors
from gcore.ledger.records.cluster import ATTENTION_EQUALS_AT
from gcore.schema import Record, RecordPart
from gcore.types import OutcomeKind, PromptRef, Token, Version


class WorldState(RecordPart):
    """State of `world` after it applied the token (lineage, step, attempt). `attempt` 0: the initial state."""

    world: str
    lineage: NonNegativeInt
    step: NonNegativeInt
    attempt: NonNegativeInt
    shards: PositiveInt
    """Number of ranks of the world, and of shards of the whole state."""

    def __str__(self) -> str:
        return f"step {self.step} of world {self.world}"


class HeldState(RecordPart):
    """Shards of a state that are in the memory of one node."""

    state: WorldState
    shards: tuple[NonNegativeInt, ...]


class NodeCopies(Record):
    """`copies/{node}`, under the controller's lease: in-memory replicas on the node at the last scan.

    A hint for choosing where a new world starts from. The world itself verifies what it reads.
    """

    node: str
    by: str
    """Incarnation that scanned."""
    seq: NonNegativeInt
    """Head's sequence number before the scan. Replicas of that head's state either existed at the scan or will never
    exist.
    """
    held: tuple[HeldState, ...] = ()


class StateName(NamedTuple):
    """A `WorldState` without its number of shards, which the log does not contain."""

    world: str
    lineage: int
    step: int
    attempt: int


def head_state_names(head: Head, log: Mapping[int, LogEntry]) -> tuple[StateName, ...]:
    """Names of head's state, the most reliable first. Empty for the base, or if the log does not reach back far enough.

    A commit names the world and the token of the state. If no step has followed a rollback, head's state is the initial
    state of the new world, which the rollback names.
    """
    entry = log.get(head.seq)
    while entry is not None and entry.kind == "account":
        entry = None if entry.parent is None else log.get(entry.parent)
    if entry is None or entry.step != head.step:
        return ()
    if entry.kind == "train":
        if entry.token is None:
            return ()
        return (StateName(entry.world, entry.token.lineage, entry.token.step, entry.token.attempt),)
    if entry.kind != "rollback":
        return ()
    began = StateName(entry.world, entry.lineage, entry.step, 0)
    if entry.state is None:
        return (began,)
    state = entry.state
    return (began, StateName(state.world, state.lineage, state.step, state.attempt))


def whole_state(names: Iterable[StateName], held: Mapping[str, NodeCopies], nodes: Container[str]) -> WorldState | None:
    """The first of these states of which each shard is in the memory of at least one of `nodes`."""
    for name in names:
        shards: dict[WorldState, set[int]] = {}
        for node, copies in held.items():
            for one in copies.held if node in nodes else ():
                if (one.state.world, one.state.lineage, one.state.step, one.state.attempt) == name:
                    shards.setdefault(one.state, set()).update(one.shards)
        for state in sorted(shards, key=lambda state: state.shards):
            if shards[state] >= set(range(state.shards)):
                return state
    return None


def _cursors(value: Any) -> Any:
    return Cursors.decode(value) if isinstance(value, list) else value


StoredCursors = Annotated[Cursors, BeforeValidator(_cursors), PlainSerializer(lambda c: c.encode(), return_type=list)]


class EndedRef(RecordPart):
    """A ref and its outcome. The step is that of the log entry. The audit uses `holder` and `versions`."""

    ref: PromptRef
    kind: OutcomeKind
    reason: str = ""
    holder: str = ""
    versions: tuple[Version, ...] = ()
    source: str = ""
    """Source of a filtered or failed prompt. For a trained prompt the group has it."""
    reward: float | None = None
    """For a filtered prompt with scores: mean reward of its responses."""
    length: float | None = None
    """For the same prompts: mean response length in tokens."""
    digest: str = ""
    """For a trained group: digest of its content, as in the receipts."""
    samples: int = 0
    """For a trained group: number of samples."""


class OfferedGroup(RecordPart):
    """A finished group that passed the filters, with token counts instead of tokens.

    `prompt_tokens` and `response_tokens` (one number per sample) are the weights that `balance_samples` uses.
    """

    ref: PromptRef
    digest: str
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    versions: tuple[Version, ...]
    reward: float = 0.0
    """Mean reward of the group, for display."""
    source: str = ""
    """Source of the prompt, for metrics."""
    masked: tuple[int, ...] = ()
    """Samples, ascending, that are masked in the loss. They do not count in its denominators."""
    truncated: int = 0
    """Number of samples that reached their maximum length."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Mean over the samples of each part of the reward, for display."""
    observed: tuple[int, ...] = ()
    """Per sample, the number of `response_tokens` that the policy did not generate. They cost as much compute as others
    and count nowhere else. Empty: none in any sample. Jobs with an environment are refused until every node supports
    this field.
    """

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """Per sample, the number of tokens that the policy generated."""
        if not self.observed:
            return self.response_tokens
        return tuple(total - told for total, told in zip(self.response_tokens, self.observed, strict=True))


class InFlightRef(RecordPart):
    """An unfinished ref. `version`: the weights that generate its first token."""

    ref: PromptRef
    version: Version


class Offer(Record):
    """`offer/{incarnation}`, under the lease of that incarnation."""

    incarnation: str
    groups: tuple[OfferedGroup, ...] = ()
    outcomes: tuple[EndedRef, ...] = ()
    in_flight: tuple[InFlightRef, ...] = ()
    """Refs that continue across steps; empty at staleness 0."""


class SealedGroup(OfferedGroup):
    """A group of a sealed step, with the incarnation that holds it."""

    holder: str


class SealState(StrEnum):
    """OPEN: no transfer; the attempt number is kept. SEALED: transfer in progress. READY: every rank holds its share.

    PARTIAL: transfer of one part of a streamed step. Once every rank holds its share of the part, the slot is OPEN
    again and the part is final.
    """

    OPEN = "OPEN"
    PARTIAL = "PARTIAL"
    SEALED = "SEALED"
    READY = "READY"


class Seal(Record):
    """`seal/{step}`: the slot of an open step.

    `world_size`, `mini_batches` and `attention_equals_at` (`gcore.ledger.records.cluster`) are inputs of
    `balance_samples`. The seal therefore determines which rank trains which sample in which update.

    In a streamed step `groups` grows part by part. READY parts are never given up; an OPEN slot holds READY parts only.
    """

    lineage: int
    step: int
    attempt: int
    state: SealState
    world: str
    world_size: PositiveInt
    mini_batches: PositiveInt
    groups: tuple[SealedGroup, ...] = ()
    outcomes: tuple[EndedRef, ...] = ()
    sealer: str = ""
    attention_equals_at: PositiveInt = ATTENTION_EQUALS_AT
    padding: NonNegativeInt = 0
    """Number of missing groups, which the loss denominators count as masked groups."""
    last: bool = False
    """Whether this is the last step. It may contain outcomes without groups."""
    planned_steps: int | None = None
    """Total number of steps of the job, if known. The learning-rate schedule uses it."""
    parts: tuple[NonNegativeInt, ...] = ()
    """Number of groups per part, in order; empty for a step that is sealed as a whole. The last part may have 0 groups.
    """
    ready_parts: NonNegativeInt = 0
    """Number of parts, from the first, that every rank holds."""
    checkpoint: bool = False
    """Whether this step writes a checkpoint even if the spec does not ask for one, because the job must give back its
    slots.
    """

    @property
    def collects(self) -> bool:
        """Whether its batch is still open."""
        return self.state in (SealState.OPEN, SealState.PARTIAL)

    @property
    def kept(self) -> tuple[SealedGroup, ...]:
        """Groups of its READY parts."""
        return self.groups[: sum(self.parts[: self.ready_parts])]

    @property
    def padding_scale(self) -> float:
        """Factor of the loss denominators, at least 1."""
        return 1.0 + self.padding / len(self.groups) if self.groups else 1.0

    @property
    def token(self) -> Token:
        """The fencing token of this attempt."""
        return Token(self.lineage, self.step, self.attempt)


class SourceTally(RecordPart):
    """Sums over the prompts of one source along the chain. Tallies can be subtracted."""

    kept: int = 0
    """Prompts whose group was trained."""
    filtered: int = 0
    failed: int = 0
    samples: int = 0
    """Samples of the trained groups. The fields below also count trained groups only."""
    truncated: int = 0
    tokens: int = 0
    """Response tokens that the policy generated."""
    reward: float = 0.0
    """Sum of the groups' mean rewards."""


class SinceStep(RecordPart):
    """Outcomes since the newest step, along the chain. They count for the next step."""

    filtered: int = 0
    failed: int = 0
    scored: int = 0
    """Filtered prompts with known reward and length."""
    reward: float = 0.0
    """Sum of their mean rewards."""
    length: float = 0.0
    """Sum of their mean lengths in tokens."""

    @property
    def ended(self) -> int:
        """Number of prompts that the next step has used up so far."""
        return self.filtered + self.failed


class Tally(RecordPart):
    """Counts of all outcomes along the chain by source: a pure function of the seals and outcomes in its entries."""

    sources: dict[str, SourceTally] = Field(default_factory=dict)
    since_step: SinceStep = SinceStep()
    issue_ratio: float = 1.0
    """Prompts needed per trained group: an exponentially weighted mean over recent steps."""
    trained_epoch: int | None = None
    """Newest data epoch with a trained prompt."""


class Lineage(RecordPart):
    """Lineage `number` started from `base_step` of an earlier lineage."""

    number: int
    base_step: int
    entry: int | None = None
    """If the store was restored from a backup: number of the rollback entry that began this lineage and skipped lost
    numbers.
    """


class Head(Record):
    """`head`: the newest log entry and the state after it."""

    seq: int
    parent: int | None
    lineage: int
    step: int
    cursors: StoredCursors
    lineages: tuple[Lineage, ...]
    world: str
    nonce: str
    deleted: bool = False
    tally: Tally = Tally()
    digest: str = ""
    """Digest of entry `seq`. Empty if a gcore version without digests wrote it."""

    @property
    def version(self) -> Version:
        """Policy version that engines should serve."""
        return Version(self.lineage, self.step)


class RaisedGoal(RecordPart):
    """A job in phase SUCCEEDED continues: its `flow.steps` or `flow.epochs` was `before` and is now `after`."""

    what: Literal["steps", "epochs"]
    before: PositiveInt
    after: PositiveInt

    def __str__(self) -> str:
        return f"{self.after} {self.what} in place of {self.before}"


class LogEntry(Record):
    """`log/{seq}`: one entry of the log. `stats` are numbers for display (reward, loss, seconds per phase).

    Each entry contains the digest of its parent, and head the digest of its entry. A later change anywhere on the
    chain, in the store or in the run folder, is detected from head (`gcore.ledger.chain`). From schema version 3 an
    entry also contains digests of the job's record and of head.
    """

    came_with: ClassVar[Mapping[str, int]] = {"job": 3, "head": 3, "shares": 3, "undoes": 3, "raised": 3}

    seq: int
    parent: int | None
    kind: Literal["base", "train", "account", "rollback"]
    lineage: int
    step: int
    world: str
    nonce: str
    token: Token | None = None
    delta: tuple[EndedRef, ...] = ()
    cursors: StoredCursors | None = None
    tally: Tally | None = None
    """Head's tally, stored together with `cursors`. A rollback restores both."""
    writer: str = ""
    stats: dict[str, float] = Field(default_factory=dict)
    reason: str = ""
    state: WorldState | None = None
    """For a rollback to head's own step: the in-memory replicas from which the new world starts. None: the checkpoint
    of the parent.
    """
    ranks: int | None = None
    """For a step: number of ranks that write receipts."""
    parent_digest: str = ""
    """Empty if a gcore version without digests wrote the parent."""
    follows: int | None = None
    """For a rollback after the store was restored from a backup: head's number before it. The numbers between belong to
    lost history, of which the run folder may have traces, and are never reused.
    """
    job: str = ""
    """Digest of the job's record (`gcore.ledger.chain.job_digest`)."""
    head: str = ""
    """Digest of head after this entry (`gcore.ledger.chain.head_digest`)."""
    shares: str = ""
    """For a step: digest of the samples that each rank trained (`gcore.ledger.chain.shares_digest`)."""
    undoes: str = ""
    """For a rollback: digest of the entry that head was at, the newest that it discards or continues from."""
    raised: RaisedGoal | None = None
    """For the rollback with which a job in phase SUCCEEDED continues: the new goal. Entries before it contain the
    digest of the earlier job record.
    """


class EpochRecord(Record):
    """`epoch/{epoch}`: the statistics at the start of a data epoch, the same for every controller.

    It is valid while `version`, head's version when it was written, is an ancestor of head. After a rollback that
    discards that version it is ignored and written again. Exists only for jobs with a curriculum, and not for epoch 0.
    """

    epoch: int
    version: Version
    so_far: dict[str, SourceTally] = Field(default_factory=dict)
    """Everything committed before the epoch, by source."""
    latest: dict[str, SourceTally] = Field(default_factory=dict)
    """The part of `so_far` that was committed since the previous epoch began."""


class Checkpoint(RecordPart):
    """A complete checkpoint of (lineage, step) and log entry `seq`, in folder `file` of the run folder."""

    lineage: int
    step: int
    seq: int
    file: str
    digest: str = ""
    """SHA-256 of its manifest; empty for the base (the job's initial model)."""

    @property
    def version(self) -> Version:
        """Policy version of its weights."""
        return Version(self.lineage, self.step)


class Checkpoints(Record):
    """`ckpts`: all registered checkpoints of a job, oldest first, always including the base (0, 0)."""

    entries: tuple[Checkpoint, ...]


class Assignment(Record):
    """`assign`: which incarnation generates for which shard. A hint; safety does not depend on it.

    `owners[shard]` is an index into `members`; None: no owner.
    """

    members: tuple[str, ...]
    owners: tuple[int | None, ...]

    def owner(self, shard: int) -> str | None:
        """The incarnation that owns `shard`, or None."""
        index = self.owners[shard]
        return None if index is None else self.members[index]

    def shards_of(self, incarnation: str) -> tuple[int, ...]:
        """Shards of `incarnation`, ascending."""
        return tuple(shard for shard in range(len(self.owners)) if self.owner(shard) == incarnation)


class Member(Record):
    """`member/{incarnation}` of a job, under the lease of the incarnation."""

    incarnation: str
    node: str
    address: str
    leaving: bool = False
    """Whether the controller is about to end: it takes no shards, but still delivers the groups that it holds. A gcore
    version without this field treats such a member as absent.
    """


class HeldCheckpoint(RecordPart):
    """A checkpoint in a node's folder. `digest` is that of its manifest, which names every file."""

    lineage: NonNegativeInt
    step: NonNegativeInt
    digest: str

    @property
    def version(self) -> Version:
        """Policy version of the checkpoint."""
        return Version(self.lineage, self.step)


class NodeFolder(Record):
    """`folder/{node}`: content of a node's own run folder.

    `log` and `evaluations` cover only records that are next to leave the store.
    """

    node: str
    by: str
    """Incarnation that scanned."""
    lineage: NonNegativeInt = 0
    """Head's lineage before the scan."""
    checkpoints: tuple[HeldCheckpoint, ...] = ()
    receipts: str = ""
    """Newest token for which the receipts of all ranks are in the folder."""
    log: tuple[NonNegativeInt, ...] = ()
    """Numbers of log entries in the folder."""
    evaluations: tuple[str, ...] = ()
    """Versions whose evaluations are in the folder."""
    entry: NonNegativeInt = 0
    """Highest log number found in the folder when that incarnation first scanned. It exceeds head's if the store was
    restored from a backup (`gcore.ledger.archive`).
    """

    def has(self, version: Version, digest: str) -> bool:
        """Whether that checkpoint is in the folder."""
        return any(one.version == version and one.digest == digest for one in self.checkpoints)
