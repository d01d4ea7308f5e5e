"""The actions that a job's rules may decide on. `controllers.job.executor` executes them."""

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
    """The result of an action: an outcome for metrics and a sentence for the log."""

    outcome: TxnOutcome
    sentence: str
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """One transaction or one call. `runs_in_background`: it reads or writes many bytes. `seen_at_once`: it writes nothing to the store and its
    effect is in the view as soon as it is done, so the reconciler need not wait for a watch event."""

    runs_in_background: ClassVar[bool] = False
    seen_at_once: ClassVar[bool] = False

    kind: ClassVar[str]
    """The action's name in metrics, independent of the class name."""

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:  # `slots` creates each class twice; the second time the attribute is already set
            cls.kind = kind


@dataclass(frozen=True, slots=True)
class BackgroundAction(Action):
    """An action that reads or writes many bytes."""

    runs_in_background: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class EngineAction(BackgroundAction):
    """One call to an engine."""

    seen_at_once: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class FolderAction(BackgroundAction):
    """An action on this node's own folder of a run, if nodes share no folder."""


@dataclass(frozen=True, slots=True)
class StartJob(Action, kind="startjob"):
    """Write the base entry and the first plan."""


@dataclass(frozen=True, slots=True)
class JoinJob(Action, kind="join"):
    """Register this incarnation as a member of the job."""


@dataclass(frozen=True, slots=True)
class LeaveJob(Action, kind="leave"):
    """Mark this incarnation's membership as leaving."""


@dataclass(frozen=True, slots=True)
class AssignShards(Action, kind="assign"):
    """Write a new assignment."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class PutOffer(Action, kind="putoffer"):
    """Write this peer's offer: the groups that it holds."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class MakeSeal(Action, kind="makeseal"):
    """Seal the batch of `step`, or one more part of it."""

    step: int
    chosen: SealStep | SealPart
    checkpoint: bool = False
    """Whether the step gets a checkpoint regardless of the spec."""


@dataclass(frozen=True, slots=True)
class RecordOutcomes(Action, kind="account"):
    """Write an account entry: outcomes without a step."""

    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class GiveUpBatch(Action, kind="reseal"):
    """Reopen the slot of a sealed batch, or its part that is not READY; the groups can be sealed again."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class FeedRank(BackgroundAction, kind="feed"):
    """Send this peer's groups of the seal to one rank."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class MarkBatchReady(Action, kind="ready"):
    """Mark the seal READY: every rank holds its share of it."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainBatch(BackgroundAction, kind="apply"):
    """Tell one rank to train on the READY seal."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class AccumulateParts(BackgroundAction, kind="accumulate"):
    """Tell one rank to add the READY parts of the next step to its gradients."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class ReleaseRank(BackgroundAction, kind="releaserank"):
    """Release a rank's memory until its next step; `step`: the last step it has trained."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class RestoreRank(BackgroundAction, kind="restorerank"):
    """Restore a rank's memory."""

    rank: int


@dataclass(frozen=True, slots=True)
class CommitStep(Action, kind="commit"):
    """Move head to `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class RegisterCheckpoint(Action, kind="register"):
    """Write a whole checkpoint into the record of checkpoints."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class RetainCheckpoints(BackgroundAction, kind="retain"):
    """Keep these checkpoints, unregister the others, then delete their files."""

    kept: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class PostWarning(Action, kind="warn"):
    """Write a warning that does not stop the run; only the newest warning of a topic is kept."""

    topic: str
    sentence: str


@dataclass(frozen=True, slots=True)
class PruneLog(BackgroundAction, kind="prune"):
    """Move these log entries from the store to the run's folder."""

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepKeys(BackgroundAction, kind="sweep"):
    """Delete keys of past worlds and of discarded branches from the store, then discarded checkpoints from the run's folder."""

    swept: SweptKeys


@dataclass(frozen=True, slots=True)
class ForgetEvaluations(BackgroundAction, kind="forgetevaluations"):
    """Move these versions' evaluations from the store to the run's folder."""

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BeginEpoch(Action, kind="beginepoch"):
    """Record the statistics of a data epoch, and delete records of epochs that are no longer needed."""

    record: EpochRecord
    forgotten: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rollback(BackgroundAction, kind="rollback"):
    """Start a new world: from copies of head's state if they are available, else from the newest complete checkpoint on its chain.

    `between_steps`: only from head's own state, because the current world is healthy. `slots_as_seen`: only if the open steps are unchanged.
    `split`: the division of slots that a policy wants; None: unchanged, or as in the spec. `stands_still`: the new world has no ranks and
    nothing else is placed, until another world follows.
    """

    reason: str
    between_steps: bool = False
    slots_as_seen: bool = False
    split: SplitPart | None = None
    stands_still: bool = False


@dataclass(frozen=True, slots=True)
class ReportCopies(BackgroundAction, kind="takestock"):
    """Report which copies of train states this node's memory holds, for head's entry `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class ReportFolder(FolderAction, kind="sayfolder"):
    """Report which checkpoints this node's own folder contains."""


@dataclass(frozen=True, slots=True)
class FetchWeights(FolderAction, kind="fetchweights"):
    """Copy staged weights to this node, from `source` if possible."""

    version: Version
    source: str


@dataclass(frozen=True, slots=True)
class FetchCheckpoint(FolderAction, kind="fetchcheckpoint"):
    """Copy a checkpoint to this node."""

    checkpoint: SavedCheckpoint


@dataclass(frozen=True, slots=True)
class FetchStart(FolderAction, kind="bringstart"):
    """Verify every byte of this node's copy of the checkpoint that `world` starts from; fetch it again if it is damaged."""

    checkpoint: SavedCheckpoint
    world: str


@dataclass(frozen=True, slots=True)
class GatherReceipts(FolderAction, kind="gather"):
    """Fetch the receipts of all ranks up to `token` to this node."""

    token: Token


@dataclass(frozen=True, slots=True)
class ArchiveRecords(FolderAction, kind="archive"):
    """Write these log entries and evaluations into this node's own folder."""

    seqs: tuple[int, ...] = ()
    evaluations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscardCheckpoints(FolderAction, kind="discard"):
    """Delete this node's own copies of checkpoints."""

    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class ChangePlan(Action, kind="replan"):
    """Change which slots run engines."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ReturnSlots(Action, kind="giveback"):
    """Return slots that the job no longer uses to the cluster."""

    slots: frozenset[Slot]


@dataclass(frozen=True, slots=True)
class PublishWeights(EngineAction, kind="publish"):
    """Load the committed weights into one engine."""

    instance: str
    version: Version


@dataclass(frozen=True, slots=True)
class TakeLead(Action, kind="lead"):
    """Become the peer that plans the job's placement."""


@dataclass(frozen=True, slots=True)
class WriteMove(Action, kind="place"):
    """Change the plan as a policy decided, or record which train world it wants, or what it would do."""

    proposal: MoveProposal


@dataclass(frozen=True, slots=True)
class ReportMoves(Action, kind="tellmoves"):
    """Record the results of placement changes, if the record is unchanged."""

    report: MoveReport


@dataclass(frozen=True, slots=True)
class SleepEngine(EngineAction, kind="sleep"):
    """Release an engine's memory. `judge`: the judge it serves; empty: the policy."""

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class WakeEngine(EngineAction, kind="wake"):
    """Restore an engine's memory."""

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class GiveUpPrompt(Action, kind="giveup"):
    """Cancel the requests in flight here for `ref`. `stale`: count it as a failed attempt."""

    ref: PromptRef
    reason: str
    stale: bool


@dataclass(frozen=True, slots=True)
class SetPhase(Action, kind="setphase"):
    """End the job. `at_head`: only if head and the open steps are unchanged."""

    phase: JobPhase
    reason: str
    at_head: bool = False


@dataclass(frozen=True, slots=True)
class Intent:
    """An action, its condition, and this peer's turn.

    It is executed when the condition has held for `after` seconds plus the delay of this peer's turn.
    """

    action: Action
    condition: str
    turn: int = 0
    after: float = 0.0
