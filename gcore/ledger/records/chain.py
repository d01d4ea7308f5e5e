"""The records of a job's chain in the store (the step protocol's documents, as JSON): head, log, offers, seals, checkpoints.

Each is a `gcore.schema.Record`. None depends on the number of controllers. The policy of each field is with the rule that uses
it, in `gcore.ledger.selection` (what a seal takes) and `gcore.ledger.chain` (what each transaction writes).

A world state is named by the world and the token after which it had it. A world applies a token once, and only from its READY
seal, whose content cannot change; so world and token name one state for ever, on every rank and node. Copies of it carry the
name (`gcore.models.replicas`), and so does the rollback whose new world starts from them.

A node whose job shares no folder (`storage.copies`) registers what its own folder holds, under its controller's lease, after it
has looked or after a fetched file was verified. So only copies on present nodes count; after a full restart each node looks
again, and no record has to outlive it.
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
    """The state of `world` after it applied the token (lineage, step, attempt). `attempt` 0: the one it began with."""

    world: str
    lineage: NonNegativeInt
    step: NonNegativeInt
    attempt: NonNegativeInt
    shards: PositiveInt
    """Of how many ranks the world is: so many shards are the whole state."""

    def __str__(self) -> str:
        return f"step {self.step} of world {self.world}"


class HeldState(RecordPart):
    """The shards of a state that lie in one node's memory."""

    state: WorldState
    shards: tuple[NonNegativeInt, ...]


class NodeCopies(Record):
    """`copies/{node}`, under its controller's lease: what lies in the node's memory, as it looked. A hint for who chooses
    where a new world starts from; the world itself proves what it reads."""

    node: str
    by: str
    """The incarnation that looked."""
    seq: NonNegativeInt
    """Head's, before it looked: copies of head's state were there by then, or never will be."""
    held: tuple[HeldState, ...] = ()


class StateName(NamedTuple):
    """A `WorldState` but for its number of shards, which the log does not say."""

    world: str
    lineage: int
    step: int
    attempt: int


def head_state_names(head: Head, log: Mapping[int, LogEntry]) -> tuple[StateName, ...]:
    """What head's state is called, best known first; nothing if the log does not reach far enough back, or for the base.

    A commit names the world and the token it was trained by. After a rollback that no step has followed, head's state is
    what the new world began with, and that is what the rollback says it started from.
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
    """The first of these states of which every shard lies in the memory of one of `nodes` at least."""
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
    """A ref and its outcome. `holder` and `versions` are kept for the audit; `step` is the entry's."""

    ref: PromptRef
    kind: OutcomeKind
    reason: str = ""
    holder: str = ""
    versions: tuple[Version, ...] = ()
    source: str = ""
    """Of what was filtered or failed: the source its prompt comes from. A trained one's stands in its group."""
    reward: float | None = None
    """Of what was scored and filtered: the mean reward of its responses."""
    length: float | None = None
    """Of the same: the mean length of its responses, in tokens."""
    digest: str = ""
    """Of a trained group: names its content, as the ranks' receipts do."""
    samples: int = 0
    """Of a trained group: how many there are."""


class OfferedGroup(RecordPart):
    """A finished, kept group of one holder. No tokens: counts only.

    `prompt_tokens` and `response_tokens` (one number a sample) are what `balance()` weighs.
    """

    ref: PromptRef
    digest: str
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    versions: tuple[Version, ...]
    reward: float = 0.0
    """Mean reward of the group, for people."""
    source: str = ""
    """The source its prompt comes from, for metrics."""
    masked: tuple[int, ...] = ()
    """The samples, ascending, whose tokens are left out of the loss: they do not count in its denominators."""
    truncated: int = 0
    """Samples that were cut off at their longest length."""
    parts: dict[str, float] = Field(default_factory=dict)
    """What its reward is made of: means over its samples, by part, for people."""
    observed: tuple[int, ...] = ()
    """Of `response_tokens`, one number a sample: those that the policy did not make. They cost what others cost, and count
    nowhere else. Empty: none of any sample. No job with an environment is taken before every node reads this."""

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """Of each sample: the tokens that the policy made."""
        if not self.observed:
            return self.response_tokens
        return tuple(total - told for total, told in zip(self.response_tokens, self.observed, strict=True))


class InFlightRef(RecordPart):
    """A ref that its holder has begun and not finished. `version`: the weights that made, or may make, its first token."""

    ref: PromptRef
    version: Version


class Offer(Record):
    """`offer/{incarnation}`, under that incarnation's lease."""

    incarnation: str
    groups: tuple[OfferedGroup, ...] = ()
    outcomes: tuple[EndedRef, ...] = ()
    in_flight: tuple[InFlightRef, ...] = ()
    """What goes on from step to step; none at staleness 0, where nothing does."""


class SealedGroup(OfferedGroup):
    """A group of a sealed step and the incarnation that holds it."""

    holder: str


class SealState(StrEnum):
    """OPEN: nothing is being exchanged, the attempt survives. SEALED: being exchanged. READY: every rank holds its share.

    PARTIAL: a part of a streamed step is being exchanged; once every rank holds its share of that, the slot is OPEN again, and
    holds it for good.
    """

    OPEN = "OPEN"
    PARTIAL = "PARTIAL"
    SEALED = "SEALED"
    READY = "READY"


class Seal(Record):
    """`seal/{step}`: the slot of an open step.

    `world_size`, `mini_batches` and `attention_equals_at` (`gcore.ledger.records.cluster`) are what `balance()` cuts and weighs the
    samples by, so that who reads the seal knows which rank takes which sample in which update.

    Of a streamed step `groups` grow part by part. What is in a READY part is never given up; an OPEN slot holds that and no more.
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
    """Groups that the step lacks, which the loss's denominators count as if they were there, masked."""
    last: bool = False
    """Whether no step follows; such a one may hold outcomes only."""
    planned_steps: int | None = None
    """How many steps the job will have had, as far as that is known; the learning rate's schedule runs over them."""
    parts: tuple[NonNegativeInt, ...] = ()
    """How many groups are in each part, in their order; none of a step that is sealed as a whole. The last part of a whole
    step may have none."""
    ready_parts: NonNegativeInt = 0
    """Parts, from the first, that every rank holds."""
    checkpoint: bool = False
    """Whether its step has a checkpoint, whatever the spec says: the job is to give its slots back."""

    @property
    def collects(self) -> bool:
        """Whether its batch is not closed yet."""
        return self.state in (SealState.OPEN, SealState.PARTIAL)

    @property
    def kept(self) -> tuple[SealedGroup, ...]:
        """The groups of its READY parts."""
        return self.groups[: sum(self.parts[: self.ready_parts])]

    @property
    def padding_scale(self) -> float:
        """What the denominators are to be multiplied by, from 1 on."""
        return 1.0 + self.padding / len(self.groups) if self.groups else 1.0

    @property
    def token(self) -> Token:
        """Names this attempt."""
        return Token(self.lineage, self.step, self.attempt)


class SourceTally(RecordPart):
    """What came of one source's prompts, along the chain. Sums, so that tallies can be subtracted."""

    kept: int = 0
    """Prompts whose group was trained."""
    filtered: int = 0
    failed: int = 0
    samples: int = 0
    """Of the kept groups, like all that follow."""
    truncated: int = 0
    tokens: int = 0
    """Of responses, as far as the policy made them."""
    reward: float = 0.0
    """Sum of the groups' mean rewards."""


class SinceStep(RecordPart):
    """What ended without a step since the newest one, along the chain: it counts for the step to come."""

    filtered: int = 0
    failed: int = 0
    scored: int = 0
    """Of the filtered ones, those of which reward and length are known."""
    reward: float = 0.0
    """Sum of their mean rewards."""
    length: float = 0.0
    """Sum of their mean lengths, in tokens."""

    @property
    def ended(self) -> int:
        """Prompts that the step to come has used up already."""
        return self.filtered + self.failed


class Tally(RecordPart):
    """What came of all prompts along the chain, source by source: a pure function of its entries' seals and outcomes."""

    sources: dict[str, SourceTally] = Field(default_factory=dict)
    since_step: SinceStep = SinceStep()
    issue_ratio: float = 1.0
    """Prompts that a trained group has taken lately: a mean in which older steps count less and less."""
    trained_epoch: int | None = None
    """The newest data epoch of which a prompt was trained."""


class Lineage(RecordPart):
    """Lineage `number` went on from `base_step` of the one before."""

    number: int
    base_step: int
    entry: int | None = None
    """Where the store had been put back: the number of the rollback that began it, before which numbers were left out."""


class Head(Record):
    """`head`: the newest entry of the chain, and the state it leads to."""

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
    """Of entry `seq`; empty if that is of a version of gcore without digests."""

    @property
    def version(self) -> Version:
        """The policy version that engines should serve now."""
        return Version(self.lineage, self.step)


class RaisedGoal(RecordPart):
    """A job that had succeeded goes on: its `flow.steps` or `flow.epochs` was `before` and is `after`."""

    what: Literal["steps", "epochs"]
    before: PositiveInt
    after: PositiveInt

    def __str__(self) -> str:
        return f"{self.after} {self.what} in place of {self.before}"


class LogEntry(Record):
    """`log/{seq}`: how head came to be. `stats` are numbers for people (reward, loss, seconds a phase).

    Each entry names its parent by digest too, and head names its own entry so: what is changed anywhere along the chain later,
    in the store or in the run's folder, is found from head (`gcore.ledger.chain`). From schema version 3 on an entry also binds what
    the job is, and what head said when it was written.
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
    """Head's, where `cursors` are kept: a rollback takes both from here."""
    writer: str = ""
    stats: dict[str, float] = Field(default_factory=dict)
    reason: str = ""
    state: WorldState | None = None
    """Of a rollback to head's own step: whose copies the new world starts from. None: from its parent's checkpoint."""
    ranks: int | None = None
    """Of a step: in how many ranks' receipts it stands."""
    parent_digest: str = ""
    """Empty if the parent is of a version of gcore without digests."""
    follows: int | None = None
    """Of a rollback in a store that had been put back to an older state: the number that head had before it. Those between are of
    what was cut off, as far as anything is left of it in the run's folder, and are given to nothing else."""
    job: str = ""
    """Digest of the job's record (`gcore.ledger.chain.job_digest`)."""
    head: str = ""
    """Digest of head as this entry left it (`gcore.ledger.chain.head_digest`)."""
    shares: str = ""
    """Of a step: digest of which rank trained which samples (`gcore.ledger.chain.shares_digest`)."""
    undoes: str = ""
    """Of a rollback: digest of the entry that head was at, the newest of what it cuts off, or the one that it goes on from."""
    raised: RaisedGoal | None = None
    """Of the rollback with which a job that had succeeded goes on: how much further. Entries before it bind the job's record as it was."""


class EpochRecord(Record):
    """`epoch/{epoch}`: the statistics with which a data epoch begins, the same for every peer and for ever.

    It counts only while `version`, head's when it was written, is an ancestor of head: what was cut off by a rollback is
    as if it were not there, and is written again. Only of a job with a curriculum, and not of epoch 0.
    """

    epoch: int
    version: Version
    so_far: dict[str, SourceTally] = Field(default_factory=dict)
    """Everything committed until then, by source."""
    latest: dict[str, SourceTally] = Field(default_factory=dict)
    """The part of it that was committed since the epoch before began."""


class Checkpoint(RecordPart):
    """A whole checkpoint: made at (lineage, step), of log entry `seq`, in folder `file` under the run's folder."""

    lineage: int
    step: int
    seq: int
    file: str
    digest: str = ""
    """SHA-256 of its manifest; empty for the base (the job's model as it was)."""

    @property
    def version(self) -> Version:
        """The policy version whose weights it holds."""
        return Version(self.lineage, self.step)


class Checkpoints(Record):
    """`ckpts`: all of a job's registered checkpoints in one key, oldest first; the base (0, 0) always."""

    entries: tuple[Checkpoint, ...]


class Assignment(Record):
    """`assign`: which incarnation works on which shard. A hint; safety is the seal's.

    `owners[shard]` is an index into `members`; None: nobody's.
    """

    members: tuple[str, ...]
    owners: tuple[int | None, ...]

    def owner(self, shard: int) -> str | None:
        """The incarnation that works on `shard`."""
        index = self.owners[shard]
        return None if index is None else self.members[index]

    def shards_of(self, incarnation: str) -> tuple[int, ...]:
        """The shards of `incarnation`, ascending."""
        return tuple(shard for shard in range(len(self.owners)) if self.owner(shard) == incarnation)


class Member(Record):
    """`member/{incarnation}` of a job, under the incarnation's lease."""

    incarnation: str
    node: str
    address: str
    leaving: bool = False
    """Whether it is about to end: it takes no shards, and delivers what it holds. Who does not read this finds it gone."""


class HeldCheckpoint(RecordPart):
    """A checkpoint, and the digest of its manifest, which names its every file."""

    lineage: NonNegativeInt
    step: NonNegativeInt
    digest: str

    @property
    def version(self) -> Version:
        """The policy version that it was made at."""
        return Version(self.lineage, self.step)


class NodeFolder(Record):
    """`folder/{node}`. What it says of the log and of evaluations is of those alone that are next to leave the store."""

    node: str
    by: str
    """The incarnation that looked."""
    lineage: NonNegativeInt = 0
    """Head's, before it looked."""
    checkpoints: tuple[HeldCheckpoint, ...] = ()
    receipts: str = ""
    """The newest token of which every rank's receipt lies here."""
    log: tuple[NonNegativeInt, ...] = ()
    """Entries that were written down here."""
    evaluations: tuple[str, ...] = ()
    """Versions whose evaluations were."""
    entry: NonNegativeInt = 0
    """The highest number of the log of which anything lay here when that incarnation first looked: higher than head's, if the store
    was put back (`gcore.ledger.archive`)."""

    def has(self, version: Version, digest: str) -> bool:
        """Whether that checkpoint lies here."""
        return any(one.version == version and one.digest == digest for one in self.checkpoints)
