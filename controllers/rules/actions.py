"""What one cycle of a job may decide to do. `controllers.job.executor` carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controllers.rules.view import SavedCheckpoint
from gcore.ledger.records.chain import Assignment, Checkpoint, EndedRef, EpochRecord, Offer
from gcore.ledger.records.cluster import Slot
from gcore.ledger.records.job import JobPhase, Plan, SplitPart
from gcore.ledger.retention import SweptKeys
from gcore.ledger.selection import SealPart, SealStep
from gcore.ledger.transactions import TxnOutcome
from gcore.types import PromptRef, Token, Version
from placement.moves import MoveProposal, MoveReport


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What became of an action: a code that is counted, a sentence that is logged."""

    outcome: TxnOutcome
    sentence: str
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """One transaction or one call. `runs_in_background`: it reads or writes many bytes. `seen_at_once`: it writes nothing to the store and
    shows in the view as soon as it is done, so there is nothing to hear of."""

    runs_in_background: ClassVar[bool] = False
    seen_at_once: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """As metrics call it."""
        return type(self).__name__.lower()


@dataclass(frozen=True, slots=True)
class BackgroundAction(Action):
    """Reads or writes many bytes."""

    runs_in_background: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class EngineAction(BackgroundAction):
    """One call to an engine."""

    seen_at_once: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class FolderAction(BackgroundAction):
    """Concerns this node's own folder of a run, where nodes share none."""


@dataclass(frozen=True, slots=True)
class StartJob(Action):
    """Write the base entry and the first plan."""


@dataclass(frozen=True, slots=True)
class Join(Action):
    """Register this incarnation as a member of the job."""


@dataclass(frozen=True, slots=True)
class Leave(Action):
    """Say in this incarnation's membership that it is about to end."""


@dataclass(frozen=True, slots=True)
class Assign(Action):
    """Write a new assignment."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class PutOffer(Action):
    """Publish what this peer holds."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class MakeSeal(Action):
    """Close the batch of `step`, or seal one more part of it."""

    step: int
    chosen: SealStep | SealPart
    checkpoint: bool = False
    """Whether the step is to have a checkpoint, whatever the spec says."""


@dataclass(frozen=True, slots=True)
class Account(Action):
    """Write outcomes down without a step."""

    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class Reseal(Action):
    """Give a sealed batch up, or the part of it that is not READY."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Feed(BackgroundAction):
    """Push this peer's groups of the seal to one rank."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class Ready(Action):
    """Say that every rank holds its share of what is sealed."""

    step: int


@dataclass(frozen=True, slots=True)
class Apply(BackgroundAction):
    """Tell one rank to train on the READY seal."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class Accumulate(BackgroundAction):
    """Tell one rank to add the READY parts of the next step to its gradients."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class ReleaseRank(BackgroundAction):
    """Have a rank give its memory back until its next step; `step` is the last that it has done."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class RestoreRank(BackgroundAction):
    """Have a rank take its memory again."""

    rank: int


@dataclass(frozen=True, slots=True)
class Commit(Action):
    """Move head to `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Register(Action):
    """Name a whole checkpoint."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Retain(BackgroundAction):
    """Keep these checkpoints, forget the others, then delete their files."""

    kept: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class Warn(Action):
    """Tell people what went wrong beside the run, under one topic the newest only."""

    topic: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Prune(BackgroundAction):
    """Move these log entries from the store to the run's folder."""

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sweep(BackgroundAction):
    """Take away what belongs to past worlds and cut-off weights: in the store, then checkpoints in the run's folder."""

    swept: SweptKeys


@dataclass(frozen=True, slots=True)
class ForgetEvaluations(BackgroundAction):
    """Move these versions' evaluations from the store to the run's folder."""

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BeginEpoch(Action):
    """Fix the statistics of a data epoch, and forget the records of these that nothing asks for any more."""

    record: EpochRecord
    forgotten: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rollback(BackgroundAction):
    """Start a new world: from copies of head's state if they are at hand, else from the newest whole checkpoint on its chain.

    `between_steps`: only from head's own state, since the world that is there is well. `slots_as_seen`: only if the open steps
    are still what they were. `split`: of the slots, that a policy wants; None: as there was, or as the spec says. `stands_still`: the
    new world has no ranks, and nothing else is placed, until it is followed by another.
    """

    reason: str
    between_steps: bool = False
    slots_as_seen: bool = False
    split: SplitPart | None = None
    stands_still: bool = False


@dataclass(frozen=True, slots=True)
class TakeStock(BackgroundAction):
    """Write down which copies of train states lie in this node's memory, now that head's entry is `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class SayFolder(FolderAction):
    """Write down which checkpoints lie in this node's own folder."""


@dataclass(frozen=True, slots=True)
class FetchWeights(FolderAction):
    """Bring staged weights to this node, from `source` if it gives them."""

    version: Version
    source: str


@dataclass(frozen=True, slots=True)
class FetchCheckpoint(FolderAction):
    """Bring a copy of a checkpoint to this node."""

    checkpoint: SavedCheckpoint


@dataclass(frozen=True, slots=True)
class BringStart(FolderAction):
    """See that the checkpoint which `world` starts from lies whole on this node: every byte, and fetched anew if need be."""

    checkpoint: SavedCheckpoint
    world: str


@dataclass(frozen=True, slots=True)
class Gather(FolderAction):
    """Bring the receipts of all ranks up to `token` to this node."""

    token: Token


@dataclass(frozen=True, slots=True)
class Archive(FolderAction):
    """Write these log entries and evaluations down in this node's own folder."""

    seqs: tuple[int, ...] = ()
    evaluations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Discard(FolderAction):
    """Delete this node's own copies of checkpoints."""

    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Replan(Action):
    """Change which slots run engines."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class GiveBack(Action):
    """Say of slots that the job uses them no more."""

    slots: frozenset[Slot]


@dataclass(frozen=True, slots=True)
class Publish(EngineAction):
    """Bring one engine to the committed weights."""

    instance: str
    version: Version


@dataclass(frozen=True, slots=True)
class Lead(Action):
    """Plan the job's placement from now on."""


@dataclass(frozen=True, slots=True)
class Place(Action):
    """Change the plan as a policy decided, or write down which train world it wants, or what it would do."""

    proposal: MoveProposal


@dataclass(frozen=True, slots=True)
class TellMoves(Action):
    """Write down what came of moves, if the record is still the one that this was made from."""

    account: MoveReport


@dataclass(frozen=True, slots=True)
class Sleep(EngineAction):
    """Have an engine's memory back. `judge`: whose it is; empty: the policy's."""

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class Wake(EngineAction):
    """Give an engine its memory again."""

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class GiveUp(Action):
    """Cancel what is in flight here for `ref`. `stale`: it was issued in vain, and counts."""

    ref: PromptRef
    reason: str
    stale: bool


@dataclass(frozen=True, slots=True)
class SetPhase(Action):
    """End the job. `at_head`: only if head and the open steps are still what the decision followed from."""

    phase: JobPhase
    reason: str
    at_head: bool = False


@dataclass(frozen=True, slots=True)
class Intent:
    """An action, the condition that calls for it, and whose turn it is.

    It is carried out once the condition has held for `after` seconds plus this peer's turn.
    """

    action: Action
    condition: str
    turn: int = 0
    after: float = 0.0
