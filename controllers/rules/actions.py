"""The actions that one look at a job may decide on. `controllers.job.executor` carries them out."""

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
    """The result of an action: an outcome that is counted, a sentence that is logged."""

    outcome: TxnOutcome
    sentence: str
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """One transaction or one call. `runs_in_background`: it reads or writes many bytes. `seen_at_once`: it writes nothing to the store and
    shows in the view as soon as it is done, so there is nothing to hear of."""

    runs_in_background: ClassVar[bool] = False
    seen_at_once: ClassVar[bool] = False

    kind: ClassVar[str]
    """The action's name in metrics, which does not follow the class's."""


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

    kind: ClassVar[str] = "startjob"


@dataclass(frozen=True, slots=True)
class JoinJob(Action):
    """Register this incarnation as a member of the job."""

    kind: ClassVar[str] = "join"


@dataclass(frozen=True, slots=True)
class LeaveJob(Action):
    """Mark this incarnation's membership: it is about to end."""

    kind: ClassVar[str] = "leave"


@dataclass(frozen=True, slots=True)
class AssignShards(Action):
    """Write a new assignment."""

    kind: ClassVar[str] = "assign"

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class PutOffer(Action):
    """Write this peer's offer: the groups that it holds."""

    kind: ClassVar[str] = "putoffer"

    offer: Offer


@dataclass(frozen=True, slots=True)
class MakeSeal(Action):
    """Close the batch of `step`, or seal one more part of it."""

    kind: ClassVar[str] = "makeseal"

    step: int
    chosen: SealStep | SealPart
    checkpoint: bool = False
    """Whether the step is to have a checkpoint, whatever the spec says."""


@dataclass(frozen=True, slots=True)
class RecordOutcomes(Action):
    """Write an entry of outcomes alone, without a step."""

    kind: ClassVar[str] = "account"

    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class GiveUpBatch(Action):
    """Reopen the slot of a sealed batch, or the part of it that is not READY; its groups can be sealed again."""

    kind: ClassVar[str] = "reseal"

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class FeedRank(BackgroundAction):
    """Push this peer's groups of the seal to one rank."""

    kind: ClassVar[str] = "feed"

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class MarkBatchReady(Action):
    """Mark the seal READY: every rank holds its share of what is sealed."""

    kind: ClassVar[str] = "ready"

    step: int


@dataclass(frozen=True, slots=True)
class TrainBatch(BackgroundAction):
    """Tell one rank to train on the READY seal."""

    kind: ClassVar[str] = "apply"

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class AccumulateParts(BackgroundAction):
    """Tell one rank to add the READY parts of the next step to its gradients."""

    kind: ClassVar[str] = "accumulate"

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class ReleaseRank(BackgroundAction):
    """Release a rank's memory until its next step; `step` is the last that it has done."""

    kind: ClassVar[str] = "releaserank"

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class RestoreRank(BackgroundAction):
    """Restore a rank's memory."""

    kind: ClassVar[str] = "restorerank"

    rank: int


@dataclass(frozen=True, slots=True)
class CommitStep(Action):
    """Move head to `step`."""

    kind: ClassVar[str] = "commit"

    step: int


@dataclass(frozen=True, slots=True)
class RegisterCheckpoint(Action):
    """Write a whole checkpoint into the record of checkpoints."""

    kind: ClassVar[str] = "register"

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class RetainCheckpoints(BackgroundAction):
    """Keep these checkpoints, forget the others, then delete their files."""

    kind: ClassVar[str] = "retain"

    kept: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class PostWarning(Action):
    """Write a warning about something that does not stop the run; a topic keeps its newest only."""

    kind: ClassVar[str] = "warn"

    topic: str
    sentence: str


@dataclass(frozen=True, slots=True)
class PruneLog(BackgroundAction):
    """Move these log entries from the store to the run's folder."""

    kind: ClassVar[str] = "prune"

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepKeys(BackgroundAction):
    """Delete what belongs to past worlds and cut-off weights: in the store, then checkpoints in the run's folder."""

    kind: ClassVar[str] = "sweep"

    swept: SweptKeys


@dataclass(frozen=True, slots=True)
class ForgetEvaluations(BackgroundAction):
    """Move these versions' evaluations from the store to the run's folder."""

    kind: ClassVar[str] = "forgetevaluations"

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BeginEpoch(Action):
    """Fix the statistics of a data epoch, and forget the records of these that nothing asks for any more."""

    kind: ClassVar[str] = "beginepoch"

    record: EpochRecord
    forgotten: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rollback(BackgroundAction):
    """Start a new world: from copies of head's state if they are at hand, else from the newest whole checkpoint on its chain.

    `between_steps`: only from head's own state, since the world that is there is well. `slots_as_seen`: only if the open steps
    are still what they were. `split`: of the slots, that a policy wants; None: as there was, or as the spec says. `stands_still`: the
    new world has no ranks, and nothing else is placed, until it is followed by another.
    """

    kind: ClassVar[str] = "rollback"

    reason: str
    between_steps: bool = False
    slots_as_seen: bool = False
    split: SplitPart | None = None
    stands_still: bool = False


@dataclass(frozen=True, slots=True)
class ReportCopies(BackgroundAction):
    """Write down which copies of train states this node's memory has, now that head's entry is `seq`."""

    kind: ClassVar[str] = "takestock"

    seq: int


@dataclass(frozen=True, slots=True)
class ReportFolder(FolderAction):
    """Write down which checkpoints this node's own folder has."""

    kind: ClassVar[str] = "sayfolder"


@dataclass(frozen=True, slots=True)
class FetchWeights(FolderAction):
    """Bring staged weights to this node, from `source` if it gives them."""

    kind: ClassVar[str] = "fetchweights"

    version: Version
    source: str


@dataclass(frozen=True, slots=True)
class FetchCheckpoint(FolderAction):
    """Bring a copy of a checkpoint to this node."""

    kind: ClassVar[str] = "fetchcheckpoint"

    checkpoint: SavedCheckpoint


@dataclass(frozen=True, slots=True)
class FetchStart(FolderAction):
    """Verify every byte of this node's copy of the checkpoint that `world` starts from; fetch it again if it is damaged."""

    kind: ClassVar[str] = "bringstart"

    checkpoint: SavedCheckpoint
    world: str


@dataclass(frozen=True, slots=True)
class GatherReceipts(FolderAction):
    """Fetch the receipts of all ranks up to `token` to this node."""

    kind: ClassVar[str] = "gather"

    token: Token


@dataclass(frozen=True, slots=True)
class ArchiveRecords(FolderAction):
    """Write these log entries and evaluations down in this node's own folder."""

    kind: ClassVar[str] = "archive"

    seqs: tuple[int, ...] = ()
    evaluations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscardCheckpoints(FolderAction):
    """Delete this node's own copies of checkpoints."""

    kind: ClassVar[str] = "discard"

    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class ChangePlan(Action):
    """Change which slots run engines."""

    kind: ClassVar[str] = "replan"

    plan: Plan


@dataclass(frozen=True, slots=True)
class ReturnSlots(Action):
    """Return slots that the job no longer uses to the cluster."""

    kind: ClassVar[str] = "giveback"

    slots: frozenset[Slot]


@dataclass(frozen=True, slots=True)
class PublishWeights(EngineAction):
    """Bring one engine to the committed weights."""

    kind: ClassVar[str] = "publish"

    instance: str
    version: Version


@dataclass(frozen=True, slots=True)
class TakeLead(Action):
    """Become the peer that plans the job's placement."""

    kind: ClassVar[str] = "lead"


@dataclass(frozen=True, slots=True)
class WriteMove(Action):
    """Change the plan as a policy decided, or write down which train world it wants, or what it would do."""

    kind: ClassVar[str] = "place"

    proposal: MoveProposal


@dataclass(frozen=True, slots=True)
class ReportMoves(Action):
    """Write down the results of moves, if the record is still the one that this was made from."""

    kind: ClassVar[str] = "tellmoves"

    report: MoveReport


@dataclass(frozen=True, slots=True)
class SleepEngine(EngineAction):
    """Release an engine's memory. `judge`: whose engine it is; empty: the policy's."""

    kind: ClassVar[str] = "sleep"

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class WakeEngine(EngineAction):
    """Restore an engine's memory."""

    kind: ClassVar[str] = "wake"

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class GiveUpPrompt(Action):
    """Cancel what is in flight here for `ref`. `stale`: it was issued in vain, and counts."""

    kind: ClassVar[str] = "giveup"

    ref: PromptRef
    reason: str
    stale: bool


@dataclass(frozen=True, slots=True)
class SetPhase(Action):
    """End the job. `at_head`: only if head and the open steps are still what the decision followed from."""

    kind: ClassVar[str] = "setphase"

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
