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
    """The action's name in metrics, which does not follow the class's. A class gives it where it names its base."""

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:  # `slots` makes each class a second time, with what it has by then
            cls.kind = kind


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
class StartJob(Action, kind="startjob"):
    """Write the base entry and the first plan."""


@dataclass(frozen=True, slots=True)
class JoinJob(Action, kind="join"):
    """Register this incarnation as a member of the job."""


@dataclass(frozen=True, slots=True)
class LeaveJob(Action, kind="leave"):
    """Mark this incarnation's membership: it is about to end."""


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
    """Close the batch of `step`, or seal one more part of it."""

    step: int
    chosen: SealStep | SealPart
    checkpoint: bool = False
    """Whether the step is to have a checkpoint, whatever the spec says."""


@dataclass(frozen=True, slots=True)
class RecordOutcomes(Action, kind="account"):
    """Write an entry of outcomes alone, without a step."""

    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class GiveUpBatch(Action, kind="reseal"):
    """Reopen the slot of a sealed batch, or the part of it that is not READY; its groups can be sealed again."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class FeedRank(BackgroundAction, kind="feed"):
    """Push this peer's groups of the seal to one rank."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class MarkBatchReady(Action, kind="ready"):
    """Mark the seal READY: every rank holds its share of what is sealed."""

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
    """Release a rank's memory until its next step; `step` is the last that it has done."""

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
    """Keep these checkpoints, forget the others, then delete their files."""

    kept: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class PostWarning(Action, kind="warn"):
    """Write a warning about something that does not stop the run; a topic keeps its newest only."""

    topic: str
    sentence: str


@dataclass(frozen=True, slots=True)
class PruneLog(BackgroundAction, kind="prune"):
    """Move these log entries from the store to the run's folder."""

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepKeys(BackgroundAction, kind="sweep"):
    """Delete what belongs to past worlds and cut-off weights: in the store, then checkpoints in the run's folder."""

    swept: SweptKeys


@dataclass(frozen=True, slots=True)
class ForgetEvaluations(BackgroundAction, kind="forgetevaluations"):
    """Move these versions' evaluations from the store to the run's folder."""

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BeginEpoch(Action, kind="beginepoch"):
    """Fix the statistics of a data epoch, and forget the records of these that nothing asks for any more."""

    record: EpochRecord
    forgotten: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rollback(BackgroundAction, kind="rollback"):
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
class ReportCopies(BackgroundAction, kind="takestock"):
    """Write down which copies of train states this node's memory has, now that head's entry is `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class ReportFolder(FolderAction, kind="sayfolder"):
    """Write down which checkpoints this node's own folder has."""


@dataclass(frozen=True, slots=True)
class FetchWeights(FolderAction, kind="fetchweights"):
    """Bring staged weights to this node, from `source` if it gives them."""

    version: Version
    source: str


@dataclass(frozen=True, slots=True)
class FetchCheckpoint(FolderAction, kind="fetchcheckpoint"):
    """Bring a copy of a checkpoint to this node."""

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
    """Write these log entries and evaluations down in this node's own folder."""

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
    """Bring one engine to the committed weights."""

    instance: str
    version: Version


@dataclass(frozen=True, slots=True)
class TakeLead(Action, kind="lead"):
    """Become the peer that plans the job's placement."""


@dataclass(frozen=True, slots=True)
class WriteMove(Action, kind="place"):
    """Change the plan as a policy decided, or write down which train world it wants, or what it would do."""

    proposal: MoveProposal


@dataclass(frozen=True, slots=True)
class ReportMoves(Action, kind="tellmoves"):
    """Write down the results of moves, if the record is still the one that this was made from."""

    report: MoveReport


@dataclass(frozen=True, slots=True)
class SleepEngine(EngineAction, kind="sleep"):
    """Release an engine's memory. `judge`: whose engine it is; empty: the policy's."""

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class WakeEngine(EngineAction, kind="wake"):
    """Restore an engine's memory."""

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class GiveUpPrompt(Action, kind="giveup"):
    """Cancel what is in flight here for `ref`. `stale`: it was issued in vain, and counts."""

    ref: PromptRef
    reason: str
    stale: bool


@dataclass(frozen=True, slots=True)
class SetPhase(Action, kind="setphase"):
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
