"""The actions that a job's rules may decide on, one class each. `controllers.job.executor` executes them.

Step protocol in short: a *seal* is the record that fixes which groups form a step; READY means that every train rank
holds its share; a *commit* moves *head* (the newest log entry) to the next step. A *peer* is a controller that works on
the job.
"""

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
    """The result of an action: `outcome` for metrics, `sentence` for the log. `revision`: store revision of its write;
    0: it wrote nothing."""

    outcome: TxnOutcome
    sentence: str
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """One transaction on the store, or one call to a worker.

    `runs_in_background`: it takes long, because it reads or writes many bytes, so it runs beside the cycles of the job.
    `seen_at_once`: the view shows its effect as soon as it is done; for other actions the reconciler waits until a
    watch of the store has reported the effect.
    """

    runs_in_background: ClassVar[bool] = False
    seen_at_once: ClassVar[bool] = False

    kind: ClassVar[str]
    """The action's name in metrics, independent of the class name."""

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:  # `slots` creates each class twice; the second time the attribute is already set
            cls.kind = kind


@dataclass(frozen=True, slots=True)
class BackgroundAction(Action):
    """An action that runs beside the cycles of the job, because it reads or writes many bytes."""

    runs_in_background: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class EngineAction(BackgroundAction):
    """One call to an engine."""

    seen_at_once: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class FolderAction(BackgroundAction):
    """An action on this node's own run folder. Used only if nodes share no folder."""


@dataclass(frozen=True, slots=True)
class StartJob(Action, kind="startjob"):
    """Start a pending job: write its first log entry (the base model) and its first plan."""


@dataclass(frozen=True, slots=True)
class JoinJob(Action, kind="join"):
    """Register this controller (this run of it) as a member of the job."""


@dataclass(frozen=True, slots=True)
class LeaveJob(Action, kind="leave"):
    """Mark this controller's membership as leaving, so that other members take its shards."""


@dataclass(frozen=True, slots=True)
class AssignShards(Action, kind="assign"):
    """Write which member generates for which shard of the prompts."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class PutOffer(Action, kind="putoffer"):
    """Write this peer's offer: the finished groups that it holds, and the outcomes of prompts that ended without
    one."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class MakeSeal(Action, kind="makeseal"):
    """Seal the batch of `step` (fix which groups form it), or one more part of it."""

    step: int
    chosen: SealStep | SealPart
    checkpoint: bool = False
    """Whether a checkpoint is written after the step even if the spec's schedule does not require one."""


@dataclass(frozen=True, slots=True)
class RecordOutcomes(Action, kind="account"):
    """Write an account entry: the outcomes of filtered and failed prompts, when no step is due."""

    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class GiveUpBatch(Action, kind="reseal"):
    """Give up a sealed batch, or the part of it that is not READY yet. Its groups can be sealed again."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class FeedRank(BackgroundAction, kind="feed"):
    """Send the samples that this peer holds of the sealed batch `token` to one train rank."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class FindBlobs(BackgroundAction, kind="findblobs"):
    """Look in the blob stores of all nodes for the blobs that a train rank found in none, in groups of the sealed batch
    `token` that this peer holds. Send the groups again with the nodes that have the blobs; drop a group if no node has
    one of its blobs."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class MarkBatchReady(Action, kind="ready"):
    """Mark the sealed batch of `step` READY: every train rank holds its share."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainBatch(BackgroundAction, kind="apply"):
    """Tell one train rank to train on the READY batch `token`."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class AccumulateParts(BackgroundAction, kind="accumulate"):
    """Tell one train rank to compute the gradients of the READY parts of the next step and to add them up."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class ReleaseRank(BackgroundAction, kind="releaserank"):
    """Have a train rank release its device memory until its next step. `step`: the last step that it has trained."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class RestoreRank(BackgroundAction, kind="restorerank"):
    """Have a train rank load its released state into device memory again."""

    rank: int


@dataclass(frozen=True, slots=True)
class CommitStep(Action, kind="commit"):
    """Commit `step`: move head to it and record the outcomes of its prompts."""

    step: int


@dataclass(frozen=True, slots=True)
class RegisterCheckpoint(Action, kind="register"):
    """Register a checkpoint whose files are complete, so that a rollback can use it."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class RetainCheckpoints(BackgroundAction, kind="retain"):
    """Unregister all checkpoints except `kept`, then delete their files."""

    kept: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class PostWarning(Action, kind="warn"):
    """Write a warning for the user to the store; only the newest warning of a topic is kept."""

    topic: str
    sentence: str


@dataclass(frozen=True, slots=True)
class PruneLog(BackgroundAction, kind="prune"):
    """Move these log entries from the store to the run's folder."""

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepKeys(BackgroundAction, kind="sweep"):
    """Delete what replaced train worlds and rolled-back steps have left: keys in the store, then checkpoints in the
    run's folder."""

    swept: SweptKeys


@dataclass(frozen=True, slots=True)
class ForgetEvaluations(BackgroundAction, kind="forgetevaluations"):
    """Move the evaluations of these weight versions from the store to the run's folder."""

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BeginEpoch(Action, kind="beginepoch"):
    """Begin a data epoch of a job with a curriculum: record the statistics that its order is computed from, and delete
    records of epochs that no rollback needs."""

    record: EpochRecord
    forgotten: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rollback(BackgroundAction, kind="rollback"):
    """Replace the train world: the new one starts from in-memory copies of head's state if they are available, else
    from the newest complete checkpoint.

    `between_steps`: do it only if no committed step is lost, because the present world is healthy. `slots_as_seen`: do
    it only if the records of open steps have not changed since the view. `split`: slots per pool that a placement
    policy wants; None: unchanged, or as in the spec. `stands_still`: suspend the job: the new plan places neither ranks
    nor engines until another world follows.
    """

    reason: str
    between_steps: bool = False
    slots_as_seen: bool = False
    split: SplitPart | None = None
    stands_still: bool = False


@dataclass(frozen=True, slots=True)
class ReportCopies(BackgroundAction, kind="takestock"):
    """Report which in-memory copies of train states this node holds, for the log entry `seq` of head."""

    seq: int


@dataclass(frozen=True, slots=True)
class ReportFolder(FolderAction, kind="sayfolder"):
    """Report which checkpoints this node's own folder contains."""


@dataclass(frozen=True, slots=True)
class FetchWeights(FolderAction, kind="fetchweights"):
    """Copy the weights of `version`, which rank 0 wrote for weight sync, to this node. `source`: the node to ask
    first."""

    version: Version
    source: str


@dataclass(frozen=True, slots=True)
class FetchCheckpoint(FolderAction, kind="fetchcheckpoint"):
    """Copy a checkpoint from another node to this node's folder."""

    checkpoint: SavedCheckpoint


@dataclass(frozen=True, slots=True)
class FetchStart(FolderAction, kind="bringstart"):
    """Verify this node's copy of the checkpoint that the train world `world` starts from; fetch it (again) if it is
    missing or damaged."""

    checkpoint: SavedCheckpoint
    world: str


@dataclass(frozen=True, slots=True)
class GatherReceipts(FolderAction, kind="gather"):
    """Copy the receipts (what each train rank has trained, step by step) up to `token` to this node's folder."""

    token: Token


@dataclass(frozen=True, slots=True)
class ArchiveRecords(FolderAction, kind="archive"):
    """Write these log entries and evaluations to this node's own folder, before they are deleted from the store."""

    seqs: tuple[int, ...] = ()
    evaluations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscardCheckpoints(FolderAction, kind="discard"):
    """Delete this node's own copies of checkpoints."""

    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class ChangePlan(Action, kind="replan"):
    """Change the plan: which slots run engines. The train world stays."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ReturnSlots(Action, kind="giveback"):
    """Tell the cluster that the job no longer uses these slots."""

    slots: frozenset[Slot]


@dataclass(frozen=True, slots=True)
class PublishWeights(EngineAction, kind="publish"):
    """Weight sync: load the committed weights of `version` into one engine."""

    instance: str
    version: Version


@dataclass(frozen=True, slots=True)
class TakeLead(Action, kind="lead"):
    """Become the leader: the controller that plans the job's placement."""


@dataclass(frozen=True, slots=True)
class WriteMove(Action, kind="place"):
    """Carry out a placement change that a policy decided. Depending on the proposal this changes the plan, records that
    a train world of another size is wanted, or only records what the policy would do."""

    proposal: MoveProposal


@dataclass(frozen=True, slots=True)
class ReportMoves(Action, kind="tellmoves"):
    """Record the measured results of placement changes, unless another controller has changed the record meanwhile."""

    report: MoveReport


@dataclass(frozen=True, slots=True)
class SleepEngine(EngineAction, kind="sleep"):
    """Put an engine to sleep, so that it releases its memory. `judge`: the judge that it serves; empty: the policy."""

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class WakeEngine(EngineAction, kind="wake"):
    """Wake an engine, so that it allocates its memory again. `judge`: the judge that it serves; empty: the policy."""

    instance: str
    judge: str


@dataclass(frozen=True, slots=True)
class GiveUpPrompt(Action, kind="giveup"):
    """Cancel this peer's requests for the prompt `ref`, which is then sampled again. `stale`: count this as a failed
    attempt of the prompt."""

    ref: PromptRef
    reason: str
    stale: bool


@dataclass(frozen=True, slots=True)
class SetPhase(Action, kind="setphase"):
    """End the job in the state `phase`. `at_head`: only if head and the records of open steps have not changed since
    the view."""

    phase: JobPhase
    reason: str
    at_head: bool = False


@dataclass(frozen=True, slots=True)
class Intent:
    """An action that a rule wants, and when it is executed.

    `condition`: names the situation that requires the action; the same text in the next cycle means that the situation
    persists. The action is executed when the condition has persisted for `after` seconds plus the delay of this peer's
    `turn` (0: no delay; `view.TURN_SECONDS`).
    """

    action: Action
    condition: str
    turn: int = 0
    after: float = 0.0
