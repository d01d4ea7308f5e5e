"""Carry out the decisions of `controllers.rules.replication`, for a job whose nodes share no folder: copy missing files
from other nodes into this node's own run folder, and record in the store what it contains.

A copy counts only after this node has read every byte of it: a checkpoint is compared with its manifest and the
registered digest, other files with the sender's digest. If a peer sends nothing or the disk cannot be written, this is
reported and retried; neither ends the job.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from controllers.rules.actions import (
    ActionResult,
    ArchiveRecords,
    DiscardCheckpoints,
    FetchCheckpoint,
    FetchStart,
    FetchWeights,
    FolderAction,
    GatherReceipts,
    ReportFolder,
)
from controllers.rules.replication import checkpoint_holders
from controllers.rules.view import JobView, SavedCheckpoint, turn_order
from controllers.storage.peer_files import FileMissing, fetch_from_first
from controllers.storage.run_folder import RECORDS, LocalRunFolder, extend_files
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger import archive, transactions
from gcore.ledger.archive import highest_in_folder
from gcore.ledger.audit import receipts
from gcore.ledger.records.chain import HeldCheckpoint, NodeFolder
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.models.layout import (
    CheckpointDamaged,
    checkpoint_folder,
    checkpoints_in,
    delete_old_staged,
    manifest_digest,
    verify_checkpoint,
    weights_folder,
)
from gcore.schema import UnreadableRecord
from gcore.store.types import KeyValue, Store
from gcore.system.clock import Clock
from gcore.system.fault_injection import FaultPoint, fault_point
from gcore.system.files import DiskFull

TOPIC = "copies"
"""Topic of warnings about a node's own run folder."""

PATIENCE_S = 15.0
"""Seconds for which data from peers must be missing before this is reported. A lost node is detected sooner."""

AGAIN_S = 1.0
"""Seconds before a retry after a failed fetch or write."""


@dataclass(frozen=True, slots=True)
class CheckpointFetch:
    """Result of a fetch of a checkpoint. `problem`: why it is not complete on this node; empty: it is. `is_final`: a
    retry does not help, because no present node has it undamaged."""

    problem: str = ""
    is_final: bool = False


def verify_files(folder: Path, digest: str) -> None:
    """Read every byte of a checkpoint. Raises CheckpointDamaged if it is incomplete or has another digest."""
    verify_checkpoint(folder)
    verify_digest(folder, digest)


def verify_digest(folder: Path, digest: str) -> None:
    """Raises CheckpointDamaged if the manifest is missing or does not have `digest`."""
    if manifest_digest(folder) != digest:
        raise CheckpointDamaged("the folder's content differs from the registered checkpoint", where=str(folder))


def peer_addresses(view: JobView) -> dict[str, str]:
    """Return the addresses of the other registered nodes, by node."""
    return {name: record.for_peers for name, record in view.nodes.items() if name != view.node}


def _lying(run_dir: Path) -> tuple[HeldCheckpoint, ...]:
    """List the checkpoints with a manifest in a run folder."""
    found = []
    for version, folder in sorted(checkpoints_in(run_dir).items()):
        try:
            found.append(HeldCheckpoint(lineage=version.lineage, step=version.step, digest=manifest_digest(folder)))
        except CheckpointDamaged:
            continue  # without a manifest it is not a checkpoint
    return tuple(found)


def _read(kv: KeyValue) -> NodeFolder | None:
    """Parse the record of a node's folder; None if it is damaged, so that a new one is written."""
    try:
        return NodeFolder.decode(kv.value, kv.key)
    except UnreadableRecord:
        return None


class Replicator:
    """Carries out folder actions for one job on one node: fetches, archives and deletes files, and reports the folder's
    contents."""

    def __init__(
        self,
        store: Store,
        ledger: TransactionExecutor,
        lease: int,
        clock: Clock,
        run_dir: Path,
        tell: Callable[[str, str], None],
        own: LocalRunFolder,
    ) -> None:
        """`tell`: reports a problem of a topic, once while it lasts; an empty sentence ends it. `own`: what is known of
        the folder besides its files."""
        self.own = own
        self._store = store
        self._ledger = ledger
        self._lease = lease
        self._clock = clock
        self._run_dir = run_dir
        self._tell = tell

    async def carry_out(self, action: FolderAction, view: JobView) -> ActionResult:
        """Carry out a folder action. Disk errors are reported at once, missing data from peers after `PATIENCE_S`.
        Neither ends the job."""
        name = type(action).__name__
        patience = PATIENCE_S
        try:
            done = await self._do(action, view)
        except (OSError, DiskFull) as error:
            why, patience = f"{error.strerror or error}" if isinstance(error, OSError) else error.what, 0.0
            done = ActionResult(TxnOutcome.UNKNOWN, f"cannot write to its run folder {self._run_dir} ({why})")
        except StoreUnavailable:
            raise
        except GcoreError as error:
            done = ActionResult(TxnOutcome.UNKNOWN, f"{name}: {error}")
        if done.outcome is not TxnOutcome.UNKNOWN:
            if self.own.failing.pop(name, None) is not None and not self.own.failing:
                self._tell(TOPIC, "")
            return done
        now = self._clock.monotonic()
        if now - self.own.failing.setdefault(name, now) >= patience:
            self._tell(TOPIC, f"{view.node}: {done.sentence}")
        if not isinstance(action, GatherReceipts | ReportFolder):
            await self._clock.sleep(AGAIN_S)  # do not retry a large transfer in a tight loop
        return done

    async def ensure_checkpoint(
        self, checkpoint: SavedCheckpoint, view: JobView, *, read_all: bool = False
    ) -> CheckpointFetch:
        """Make sure that a checkpoint is on this node, and fetch it if not. `read_all`: read every byte of a local one,
        and replace it if it is damaged. Raises OSError."""
        async with self.own.fetching[checkpoint.file]:
            return await self._ensure_checkpoint(checkpoint, view, read_all=read_all)

    async def _ensure_checkpoint(
        self, checkpoint: SavedCheckpoint, view: JobView, *, read_all: bool
    ) -> CheckpointFetch:
        name, folder = (checkpoint.version, checkpoint.digest), self._run_dir / checkpoint.file
        here = ""
        try:
            await asyncio.to_thread(
                verify_files if read_all or name in self.own.damaged else verify_digest, folder, checkpoint.digest
            )
        except CheckpointDamaged as error:
            here = str(error)
        else:
            self.own.damaged.discard(name)
            return CheckpointFetch()
        lies = await asyncio.to_thread(folder.is_dir)
        if lies:
            self.own.damaged.add(name)
        peers = peer_addresses(view)
        said = checkpoint_holders(view, *name) - {view.node}
        fetch = partial(
            self.own.files.folder,
            folder=checkpoint.file,
            prove=partial(verify_files, digest=checkpoint.digest),
            durable=True,
        )
        fetched = await fetch_from_first(peers, turn_order(said, f"source {view.node}"), fetch)
        if fetched.source:
            self.own.damaged.discard(name)
            return CheckpointFetch()
        is_final = said == fetched.wrong.keys() and all(
            isinstance(error, CheckpointDamaged | FileMissing) for error in fetched.wrong.values()
        )
        why = fetched.why or "no other present node has it"
        return CheckpointFetch(f"{here}; {why}" if lies else why, is_final)

    async def _do(self, action: FolderAction, view: JobView) -> ActionResult:
        match action:
            case ReportFolder():
                return await self._report_own_folder(view)
            case FetchWeights():
                return await self._fetch_weights(action, view)
            case FetchCheckpoint():
                return await self._fetch_checkpoint(action, view)
            case FetchStart():
                return await self._fetch_start(action, view)
            case GatherReceipts():
                return await self._fetch_receipts(action, view)
            case ArchiveRecords():
                return await self._write_archive(action, view)
            case DiscardCheckpoints():
                return await self._delete_own_copies(action, view)
            case _:
                raise TypeError(f"{action} is not a folder action")

    async def _report_own_folder(self, view: JobView, **said: object) -> ActionResult:
        """List the checkpoints in this node's folder and write the folder's record. `said`: further fields to set."""
        key = view.mirror.keys.folder(view.node)
        found = await asyncio.to_thread(_lying, self._run_dir)
        kv = await self._store.get(key)
        known = None if kv is None else _read(kv)
        if known is not None and known.by == view.me:
            before = known
        else:
            left = await asyncio.to_thread(highest_in_folder, self._run_dir)
            before = NodeFolder(node=view.node, by=view.me, entry=left.entry)
        checkpoints = tuple(one for one in found if (one.version, one.digest) not in self.own.damaged)
        now = before.model_copy(update={"lineage": view.head.lineage, "checkpoints": checkpoints, **said})
        sentence = f"{view.node} has {len(checkpoints)} checkpoints in its folder"
        if known == now:
            return ActionResult(TxnOutcome.STALE, sentence)
        written = None if kv is None else Versioned(known or now, kv.mod_revision)  # compares only the revision
        report = await self._ledger.run(transactions.say_folder(view.mirror.keys, written, now, self._lease))
        return ActionResult(report.outcome, sentence, report.revision)

    async def _fetch_weights(self, action: FetchWeights, view: JobView) -> ActionResult:
        """Fetch the weights of a version from the node whose rank wrote them, else from any other that has them."""
        target = weights_folder(self._run_dir, action.version)
        name = str(target.relative_to(self._run_dir))
        peers = peer_addresses(view)
        fetch = partial(self.own.files.folder, folder=name, durable=False)
        fetched = await fetch_from_first(peers, (action.source, *sorted(peers.keys() - {action.source})), fetch)
        if not fetched.source:
            return ActionResult(TxnOutcome.UNKNOWN, f"fetch {name}: {fetched.why}")
        await asyncio.to_thread(delete_old_staged, target.parent)
        return ActionResult(TxnOutcome.WON, f"fetch {name} from {fetched.source}")

    async def _fetch_checkpoint(self, action: FetchCheckpoint, view: JobView) -> ActionResult:
        """Fetch a copy of a checkpoint, and record it."""
        brought = await self.ensure_checkpoint(action.checkpoint, view)
        if brought.problem:
            return ActionResult(TxnOutcome.UNKNOWN, f"fetch {action.checkpoint.file}: {brought.problem}")
        return await self._report_own_folder(view)

    async def _fetch_start(self, action: FetchStart, view: JobView) -> ActionResult:
        """Make sure that this node has the checkpoint from which a train world starts, and read it completely."""
        brought = await self.ensure_checkpoint(action.checkpoint, view, read_all=True)
        said = await self._report_own_folder(view)
        if brought.problem:
            return ActionResult(TxnOutcome.UNKNOWN, f"bring {action.checkpoint.file}: {brought.problem}")
        self.own.brought.add(action.world)
        return ActionResult(
            TxnOutcome.WON, f"world {action.world} can start from {action.checkpoint.file}", said.revision
        )

    async def _fetch_receipts(self, action: GatherReceipts, view: JobView) -> ActionResult:
        """Fetch the receipts of ranks on other nodes, up to the token of the action. Those of absent nodes are left
        out."""
        peers = peer_addresses(view)
        nodes = {place.node for place in view.plan.ranks} & peers.keys()
        sentence = f"gather the receipts of {action.token}"
        if wrong := await extend_files(self.own, {node: peers[node] for node in nodes}, (receipts.FOLDER,)):
            return ActionResult(TxnOutcome.UNKNOWN, f"{sentence}: {'; '.join(wrong)}")
        done = await self._report_own_folder(view, receipts=str(action.token))
        return ActionResult(done.outcome, sentence, done.revision)

    async def _write_archive(self, action: ArchiveRecords, view: JobView) -> ActionResult:
        """Write records that will be deleted from the store to this node's folder. Earlier records are fetched from
        peers first, so that a node that joined later, or lost its disk, gets all of them."""
        wrong = await extend_files(self.own, peer_addresses(view), RECORDS)
        entries = [view.mirror.log[seq].record for seq in action.seqs]
        evaluations = [view.mirror.evaluations[version].record for version in action.evaluations]
        if entries:
            await asyncio.to_thread(archive.append_entries, self._run_dir, view.me, entries)
        if evaluations:
            await asyncio.to_thread(archive.append_evaluations, self._run_dir, view.me, evaluations)
        said = {"log": action.seqs} if entries else {}
        more = {"evaluations": action.evaluations} if evaluations else {}
        done = await self._report_own_folder(view, **said, **more)
        sentence = f"{len(entries)} log entries and {len(evaluations)} evaluations were archived"
        return ActionResult(done.outcome, "; ".join((sentence, *wrong)), done.revision)

    async def _delete_own_copies(self, action: DiscardCheckpoints, view: JobView) -> ActionResult:
        """Delete this node's copies of the action's checkpoints, and record it."""
        for version in action.versions:
            fault_point(FaultPoint.FORGET, "before")
            await asyncio.to_thread(shutil.rmtree, checkpoint_folder(self._run_dir, version), ignore_errors=True)
            fault_point(FaultPoint.FORGET, "after")
        return await self._report_own_folder(view)
