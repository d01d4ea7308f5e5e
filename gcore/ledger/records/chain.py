"""Records of a job's chain in the store, as JSON: head, log, offers, seals, checkpoints.

The log is a chain of entries, one per committed step, account entry or rollback; head is the newest entry and the state
after it. An offer lists a controller's finished groups; a seal fixes which groups form a step. Each record is a
`gcore.schema.Record`. The rules for each field are in the module that uses it: `gcore.ledger.selection` (what a seal
takes) and `gcore.ledger.chain` (what each transaction writes).

*Names of train states.* A state is named by its train world (the process group of all ranks) and by the token (lineage,
step, attempt) that the world applied last. A world applies a token once, and only from its READY seal, whose content
cannot change. World and token therefore name one state permanently, on every rank and node. In-memory replicas have
this name (`gcore.models.replicas`), and the log entry of a rollback to such replicas contains it.

*Node folders.* If the nodes of a job share no folder (`storage.copies`), each node registers the content of its own
folder under its controller's lease, after a scan or after it verified a fetched file. Only copies on present nodes
count. After a full restart each node scans again, so no such record has to persist.
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
    """Names a train state: that of train world `world` after it applied the token (lineage, step, attempt).

    `attempt` 0: the state with which the world started.
    """

    world: str
    lineage: NonNegativeInt
    step: NonNegativeInt
    attempt: NonNegativeInt
    shards: PositiveInt
    """Number of ranks of the world. Each holds one shard of the state."""

    def __str__(self) -> str:
        return f"step {self.step} of world {self.world}"


class HeldState(RecordPart):
    """Which shards of a train state are in the memory of one node, by rank number."""

    state: WorldState
    shards: tuple[NonNegativeInt, ...]


class NodeCopies(Record):
    """Record `copies/{node}`, under the controller's lease: in-memory replicas on the node at the last scan.

    A hint for choosing whether a new train world can start from them. The world itself verifies what it reads.
    """

    node: str
    by: str
    """Incarnation of the controller that scanned."""
    seq: NonNegativeInt
    """Head's log number before the scan. Replicas of that head's state either existed at the scan or will never exist.
    """
    held: tuple[HeldState, ...] = ()


class StateName(NamedTuple):
    """A `WorldState` without its number of shards, which the log does not contain."""

    world: str
    lineage: int
    step: int
    attempt: int


def head_state_names(head: Head, log: Mapping[int, LogEntry]) -> tuple[StateName, ...]:
    """Names under which in-memory replicas of head's train state may exist, the most reliable first.

    If a commit made head, it names world and token of the state. If no step has followed a rollback, the state is the
    initial one of the new world, and also the one from which that world started. Empty before the first step, or if
    `log` lacks the entries.
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
    """The first of `names` whose state is complete: each shard is in the memory of at least one of `nodes`; else None.

    `held`: replicas by node.
    """
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
    """The outcome of one prompt: trained, filtered or failed, and why.

    The step is that of the log entry. `holder` (incarnation that held the group) and `versions` (those that generated
    it) are for the audit.
    """

    ref: PromptRef
    kind: OutcomeKind
    reason: str = ""
    holder: str = ""
    versions: tuple[Version, ...] = ()
    source: str = ""
    """Source of a filtered or failed prompt; empty for a trained one, whose group names the source."""
    reward: float | None = None
    """Mean reward of the responses, for a filtered prompt whose responses were scored."""
    length: float | None = None
    """Mean response length in tokens, for the same prompts as `reward`."""
    digest: str = ""
    """For a trained group: digest of its content, as in the receipts."""
    samples: int = 0
    """For a trained group: number of samples."""


class OfferedGroup(RecordPart):
    """A finished group that passed the filters: its prompt, digest, statistics and token counts, without the tokens.

    `balance_samples` computes the costs of the samples from `prompt_tokens` and `response_tokens` (one per sample).
    `versions`: the policy versions that generated it.
    """

    came_with: ClassVar[Mapping[str, int]] = {"patches": 3, "picture_tokens": 3, "media_bytes": 3, "step_tokens": 3}

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
    """Indexes of the samples, ascending, that are masked in the loss. They do not count in its denominators."""
    truncated: int = 0
    """Number of samples that reached their maximum length."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Mean over the samples of each part of the reward, for display."""
    observed: tuple[int, ...] = ()
    """Per sample, the number of `response_tokens` that the policy did not generate. They cost as much compute as others
    and count nowhere else. Empty: none in any sample. Jobs with an environment are refused until every node supports
    this field.
    """
    patches: NonNegativeInt = 0
    """Patches that the vision tower computes for the group's distinct pictures; 0 without pictures."""
    picture_tokens: NonNegativeInt = 0
    """What the tower costs for these patches: the number of tokens for which the language model costs the same."""
    media_bytes: NonNegativeInt = 0
    """Bytes of the group's distinct blobs: those of the prompt and of all samples."""
    step_tokens: NonNegativeInt = 0
    """Of generated pictures: the cost of one trained denoising step, in image tokens. `response_tokens` then counts steps. 0
    for texts."""

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """Per sample, the number of tokens that the policy generated."""
        if not self.observed:
            return self.response_tokens
        return tuple(total - observed for total, observed in zip(self.response_tokens, self.observed, strict=True))


class InFlightRef(RecordPart):
    """A ref whose samples are still being generated. `version`: the policy version that generated its first token."""

    ref: PromptRef
    version: Version


class Offer(Record):
    """Record `offer/{incarnation}`: finished groups and outcomes of one controller, under its lease."""

    incarnation: str
    groups: tuple[OfferedGroup, ...] = ()
    outcomes: tuple[EndedRef, ...] = ()
    in_flight: tuple[InFlightRef, ...] = ()
    """Unfinished refs whose generation continues across steps; empty at staleness 0."""


class SealedGroup(OfferedGroup):
    """A group of a sealed step. `holder`: incarnation of the controller that holds its samples."""

    holder: str


class SealState(StrEnum):
    """State of an open step.

    OPEN: its groups were given up, or its READY parts wait for further groups. SEALED: its groups are fixed and are
    being sent to the ranks. READY: every rank holds its share. PARTIAL: one part of a streamed step is being sent; once
    every rank holds its share of the part, the step is OPEN again and the part is final.
    """

    OPEN = "OPEN"
    PARTIAL = "PARTIAL"
    SEALED = "SEALED"
    READY = "READY"


class Seal(Record):
    """Record `seal/{step}`: the groups that form an open step, and how far their transfer to the ranks is.

    `world_size`, `sequence_parallel`, `mini_batches` and `attention_equals_at` (`gcore.ledger.records.cluster`) are inputs of
    `balance_samples`. The seal therefore determines which rank trains which sample in which update. `attempt` counts
    the seals of this step. `outcomes`: filtered and failed prompts that the commit records. `sealer`: incarnation of
    the last writer. In a streamed step `groups` grows part by part. READY parts are never given up; an OPEN seal
    contains READY parts only.
    """

    came_with: ClassVar[Mapping[str, int]] = {"sequence_parallel": 3, "near": 3}

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
    sequence_parallel: PositiveInt = 1
    """Number of consecutive ranks that compute each sample together (a sequence group). It divides `world_size`."""
    near: dict[str, tuple[NonNegativeInt, ...]] = Field(default_factory=dict)
    """For each holder of groups with blobs: the sequence groups, ascending, with a rank on its node, whose store has the
    blobs. Empty without blobs."""

    @property
    def collects(self) -> bool:
        """Whether further groups may still be added: the seal is OPEN or PARTIAL."""
        return self.state in (SealState.OPEN, SealState.PARTIAL)

    @property
    def kept(self) -> tuple[SealedGroup, ...]:
        """Groups of the READY parts of a streamed step, which no reseal gives up."""
        return self.groups[: sum(self.parts[: self.ready_parts])]

    @property
    def padding_scale(self) -> float:
        """Factor, at least 1, by which missing groups (`padding`) increase the loss denominators."""
        return 1.0 + self.padding / len(self.groups) if self.groups else 1.0

    @property
    def token(self) -> Token:
        """The fencing token of this attempt."""
        return Token(self.lineage, self.step, self.attempt)


class SourceTally(RecordPart):
    """Counts and sums over the prompts of one source (dataset) that have an outcome on the chain."""

    kept: int = 0
    """Prompts whose group was trained."""
    filtered: int = 0
    failed: int = 0
    samples: int = 0
    """Number of samples in the trained groups. The fields below also cover trained groups only."""
    truncated: int = 0
    tokens: int = 0
    """Response tokens that the policy generated."""
    reward: float = 0.0
    """Sum of the groups' mean rewards."""


class SinceStep(RecordPart):
    """Counts of prompts that ended without training since the newest step. They count for the next step."""

    filtered: int = 0
    failed: int = 0
    scored: int = 0
    """Number of prompts that were filtered after their responses were scored."""
    reward: float = 0.0
    """Sum over the `scored` prompts of the mean reward of their responses."""
    length: float = 0.0
    """Sum over the `scored` prompts of the mean length of their responses in tokens."""

    @property
    def ended(self) -> int:
        """Number of prompts that the next step has used up so far: filtered and failed."""
        return self.filtered + self.failed


class Tally(RecordPart):
    """Counts of all outcomes on the chain by source: a pure function of its log entries and the committed seals."""

    sources: dict[str, SourceTally] = Field(default_factory=dict)
    since_step: SinceStep = SinceStep()
    issue_ratio: float = 1.0
    """Prompts needed per trained group: an exponentially weighted mean over recent steps."""
    trained_epoch: int | None = None
    """Newest data epoch with a trained prompt."""


class Lineage(RecordPart):
    """A lineage (training branch): lineage `number` started from step `base_step` of an earlier lineage."""

    number: int
    base_step: int
    entry: int | None = None
    """If the store was restored from a backup: number of the rollback entry that began this lineage and skipped lost
    numbers.
    """


class Head(Record):
    """Record `head`: number of the newest log entry, and the job's state after it.

    `cursors`: which prompts of each shard have an outcome. `lineages`: all lineages of the job, oldest first. `world`:
    the current train world. `nonce`: of the transaction that wrote it. `deleted`: the job is being deleted.
    """

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
        """Policy version (lineage, step) of the newest weights, which engines should serve."""
        return Version(self.lineage, self.step)


class RaisedGoal(RecordPart):
    """A higher goal with which an ended job continues: its `flow.steps` or `flow.epochs` rises to `after`."""

    what: Literal["steps", "epochs"]
    before: PositiveInt
    after: PositiveInt

    def __str__(self) -> str:
        return f"{self.after} {self.what} in place of {self.before}"


class LogEntry(Record):
    """Record `log/{seq}`: one entry of the log: the base, a committed step, an account entry, or a rollback.

    `parent`: number of the entry before it on its branch. `token`: that of the committed step. `delta`: the outcomes
    that it records. `cursors`: stored only where a rollback may need them. `stats`: numbers for display (reward, loss,
    seconds per phase).

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
    """For a rollback to head's own step: name of the train state whose in-memory replicas the new world loads. None: it
    loads the checkpoint of the parent.
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
    """Record `epoch/{epoch}`: the outcome counts at the start of a data epoch, the same for every controller.

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
    """A complete checkpoint of version (lineage, step), in the subfolder `file` of the run folder.

    `seq`: number of the log entry that committed the step. The base, the job's initial model, has no folder.
    """

    lineage: int
    step: int
    seq: int
    file: str
    digest: str = ""
    """SHA-256 of the checkpoint's manifest; empty for the base."""

    @property
    def version(self) -> Version:
        """Policy version of the checkpoint's weights."""
        return Version(self.lineage, self.step)


class Checkpoints(Record):
    """Record `ckpts`: all registered checkpoints of a job, oldest first, always including the base (0, 0)."""

    entries: tuple[Checkpoint, ...]


class Assignment(Record):
    """Record `assign`: which controller generates for which shard. A hint; safety does not depend on it.

    `members`: incarnations of the controllers. `owners[shard]` is an index into `members`; None: no owner.
    """

    members: tuple[str, ...]
    owners: tuple[int | None, ...]

    def owner(self, shard: int) -> str | None:
        """The incarnation that owns `shard`, or None."""
        index = self.owners[shard]
        return None if index is None else self.members[index]

    def shards_of(self, incarnation: str) -> tuple[int, ...]:
        """Shards that `incarnation` owns, ascending."""
        return tuple(shard for shard in range(len(self.owners)) if self.owner(shard) == incarnation)


class Member(Record):
    """Record `member/{incarnation}`: a controller that works on the job, under its lease."""

    incarnation: str
    node: str
    address: str
    leaving: bool = False
    """Whether the controller is about to end: it takes no shards, but still delivers the groups that it holds. A gcore
    version without this field treats such a member as absent.
    """


class HeldCheckpoint(RecordPart):
    """A checkpoint in a node's own run folder. `digest`: SHA-256 of its manifest, which names every file."""

    lineage: NonNegativeInt
    step: NonNegativeInt
    digest: str

    @property
    def version(self) -> Version:
        """Policy version of the checkpoint."""
        return Version(self.lineage, self.step)


class NodeFolder(Record):
    """Record `folder/{node}`, under the controller's lease: content of a node's own run folder.

    `log` and `evaluations` cover only records that the store is about to delete.
    """

    node: str
    by: str
    """Incarnation of the controller that scanned."""
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
        """Whether the folder contains the checkpoint of `version` with this manifest digest."""
        return any(one.version == version and one.digest == digest for one in self.checkpoints)
