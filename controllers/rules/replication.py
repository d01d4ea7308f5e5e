"""Decides which node keeps which files of a run, if nodes share no folder (`storage.copies`). With a shared folder
these rules do nothing.

Files that must survive the loss of a node are copied to as many nodes as the spec requests, or as there are. This is
done to a checkpoint before it is registered, to receipts (what each rank trained) before their step is committed, and
to old records before they are deleted from the store. Each node reports the contents of its folder (`NodeFolder`), and
fetches missing files from other nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from controllers.rules.actions import (
    ArchiveRecords,
    DiscardCheckpoints,
    FetchCheckpoint,
    FetchStart,
    FetchWeights,
    GatherReceipts,
    Intent,
    ReportFolder,
)
from controllers.rules.view import SETTLE_S, JobView, SavedCheckpoint, start_checkpoint, turn_order
from gcore.ledger.records.chain import Checkpoint, NodeFolder
from gcore.ledger.retention import orphaned_checkpoints
from gcore.ledger.selection import is_ancestor, resumable_checkpoints
from gcore.types import Token, Version

SPREAD_PATIENCE_S = 60.0
"""Time that a selected node has to fetch a copy before the next node fetches one too."""

REPAIR_PATIENCE_S = 60.0
"""Time that a node must be missing before another node gets a copy in its place."""

GATHER_PATIENCE_S = 2.0
"""Time that a selected node has to fetch the receipts of a step, whose commit waits for them."""

HOLDERS_GRACE_S = 300.0
"""Maximum delay of a world until a node with its start checkpoint returns."""


def keeps_copies(view: JobView) -> bool:
    """Whether nodes keep copies because they share no folder."""
    return view.spec.storage.copies is not None


def copies_wanted(view: JobView) -> int:
    """The number of nodes that must have a copy of each file now: that of the spec, or all nodes if there are fewer."""
    return min(view.spec.storage.copies or 1, max(1, len(_member_nodes(view))))


def node_folders(view: JobView) -> Mapping[str, NodeFolder]:
    """The folder contents that the current members have reported, by node."""
    said = {node: stored.record for node, stored in view.mirror.folders.items()}
    return {node: folder for node, folder in said.items() if folder.by in view.mirror.members}


def checkpoint_holders(view: JobView, version: Version, digest: str) -> frozenset[str]:
    """The nodes whose folder has the complete checkpoint of `version` with this digest."""
    return frozenset(node for node, folder in node_folders(view).items() if folder.has(version, digest))


def is_safe(view: JobView, version: Version, digest: str) -> bool:
    """Whether enough nodes have a checkpoint, so that it may be registered. Always true with a shared folder."""
    return not keeps_copies(view) or len(checkpoint_holders(view, version, digest)) >= copies_wanted(view)


def has_receipts(view: JobView, token: Token) -> bool:
    """Whether enough nodes have the ranks' receipts of the batch `token`, so that it may be committed. Always true with
    a shared folder."""
    return not keeps_copies(view) or len(_witnesses(view, token)) >= copies_wanted(view)


def archived_entries(view: JobView, seqs: Collection[int]) -> tuple[int, ...]:
    """The log entries among `seqs` that enough nodes have in their folder, so that the store may delete them. With a
    shared folder all of them, because pruning writes them there first."""
    if not keeps_copies(view):
        return tuple(seqs)
    there = [frozenset(folder.log) for folder in node_folders(view).values()]
    return tuple(seq for seq in seqs if sum(seq in log for log in there) >= copies_wanted(view))


def archived_evaluations(view: JobView, versions: Collection[str]) -> tuple[str, ...]:
    """The evaluations of `versions` that enough nodes have in their folder. With a shared folder all of them."""
    if not keeps_copies(view):
        return tuple(versions)
    there = [folder.evaluations for folder in node_folders(view).values()]
    return tuple(version for version in versions if sum(version in known for known in there) >= copies_wanted(view))


def archive_records(view: JobView, seqs: tuple[int, ...] = (), evaluations: tuple[str, ...] = ()) -> Iterator[Intent]:
    """Write log entries and evaluations that will be deleted from the store to this node's folder, if this node is
    selected for a copy."""
    own = _own(view)
    if own is None or (set(seqs) <= set(own.log) and set(evaluations) <= set(own.evaluations)):
        return
    topic = f"archive {seqs[0] if seqs else evaluations[0]}"
    after = 0.0 if _is_my_turn(view, "archive", frozenset()) else SPREAD_PATIENCE_S
    yield Intent(ArchiveRecords(seqs, evaluations), topic, after=after + SETTLE_S)


def gather_receipts(view: JobView, token: Token) -> Iterator[Intent]:
    """Fetch the ranks' receipts of a batch that all ranks have trained to this node, if it is selected for a copy."""
    there = _witnesses(view, token)
    if view.node in there or _own(view) is None:
        return
    # The same nodes at every step, so that each fetch adds little.
    after = 0.0 if _is_my_turn(view, "receipts", there) else GATHER_PATIENCE_S
    yield Intent(GatherReceipts(token), f"gather {token}", after=after)


def report_folder(view: JobView) -> Iterator[Intent]:
    """Report the contents of this node's folder: when the controller joins, after a rollback, and when the rank here
    has written a checkpoint."""
    if not keeps_copies(view):
        return
    own = _own(view)
    if own is None or own.lineage != view.head.lineage:
        yield Intent(ReportFolder(), f"folder {view.head.lineage}")
    elif _writer(view) == view.node:
        fresh = [one for one in unregistered_checkpoints(view) if not own.has(one.version, one.digest)]
        if fresh:
            yield Intent(ReportFolder(), f"folder {fresh[0].version}")


def copy_checkpoints(view: JobView) -> Iterator[Intent]:
    """Fetch a checkpoint that too few nodes have, the newest first, one at a time."""
    if not keeps_copies(view) or _own(view) is None or any(c.startswith("checkpoint ") for c in view.under_way):
        return
    fresh = unregistered_checkpoints(view)
    for one in (*fresh, *_registered(view)):
        have = checkpoint_holders(view, one.version, one.digest)
        if have and view.node not in have and len(have) < copies_wanted(view):
            topic = f"checkpoint {one.version}"
            # A registered checkpoint had enough copies: a restarted controller brings its node's copies back soon.
            after = 0.0 if one in fresh else REPAIR_PATIENCE_S
            after += 0.0 if _is_my_turn(view, topic, have) else SPREAD_PATIENCE_S
            yield Intent(FetchCheckpoint(one), topic, after=after)
            return


def fetch_inputs(view: JobView) -> Iterator[Intent]:
    """Fetch the files that this node's workers will load: the newest weights for its engines, and the checkpoint from
    which its train ranks start."""
    if not keeps_copies(view):
        return
    head, plan = view.head, view.plan
    source = _writer(view)
    has_engines = any(place.node == view.node for place in plan.engines)
    if has_engines and head.version not in view.staged and source not in ("", view.node) and _stages(view):
        yield Intent(FetchWeights(head.version, source), f"weights {head.version}")
    mine = [place for place in plan.ranks if place.node == view.node]
    if plan.world == head.world and any(view.mirror.claim(head.world, place.rank) is None for place in mine):
        checkpoint = start_checkpoint(view)
        if checkpoint is not None and head.world not in view.fetched_starts:
            yield Intent(FetchStart(SavedCheckpoint.of(checkpoint), head.world), f"start {head.world}")


def may_start(view: JobView) -> bool:
    """Whether a train rank may be started here: the checkpoint that the world starts from is verified on this node, and
    present on the nodes of all other ranks, because a started rank waits only a limited time for the others."""
    checkpoint = start_checkpoint(view) if keeps_copies(view) else None
    if checkpoint is None:
        return True
    nodes = {place.node for place in view.plan.ranks}
    have = checkpoint_holders(view, checkpoint.version, checkpoint.digest)
    return view.head.world in view.fetched_starts and nodes <= have


def delete_orphans(view: JobView) -> Iterator[Intent]:
    """Delete this node's copies of checkpoints that are no longer registered and can no longer be registered."""
    own = _own(view) if keeps_copies(view) else None
    if own is None:
        return
    lying = [one.version for one in own.checkpoints]
    # The contents were listed before head reached its current state, so they include nothing of a later world.
    gone = sorted(orphaned_checkpoints(view.head, view.checkpoints, lying))
    if gone:
        yield Intent(DiscardCheckpoints(tuple(gone)), f"discard {gone[0]}", after=SETTLE_S)


def why_start_lost(view: JobView) -> str:
    """Why the train world cannot start: no registered node has the checkpoint that it starts from. Empty if one has."""
    checkpoint = start_checkpoint(view) if keeps_copies(view) else None
    if checkpoint is None or checkpoint_holders(view, checkpoint.version, checkpoint.digest):
        return ""
    waiting = [p for p in view.plan.ranks if view.mirror.claim(view.head.world, p.rank) is None]
    return f"no registered node has {checkpoint.file}, from which the world should start" if waiting else ""


def newest_checkpoint_away(view: JobView) -> str:
    """The file of the newest checkpoint that a rollback could use, if no registered node has it; otherwise empty."""
    if not keeps_copies(view):
        return ""
    newest = next(iter(resumable_checkpoints(view.head, view.checkpoints)), None)
    if newest is None or not newest.file:
        return ""
    return "" if checkpoint_holders(view, newest.version, newest.digest) else newest.file


def unregistered_checkpoints(view: JobView) -> tuple[SavedCheckpoint, ...]:
    """The complete checkpoints that ranks have written and that are newer than every registered one, newest first."""
    newest = max((c.step for c in _on_chain(view)), default=0)
    fresh = (one for v, one in view.saved.items() if v.step > newest and is_ancestor(view.head, v))
    return tuple(sorted(fresh, key=lambda one: one.version, reverse=True))


def _registered(view: JobView) -> Iterator[SavedCheckpoint]:
    """The registered checkpoints that a rollback could use, without the base model."""
    for one in _on_chain(view):
        if one.file:
            yield SavedCheckpoint.of(one)


def _on_chain(view: JobView) -> tuple[Checkpoint, ...]:
    return resumable_checkpoints(view.head, view.checkpoints)


def _own(view: JobView) -> NodeFolder | None:
    """The contents of this node's folder as this run of the controller has reported them; None: not reported yet."""
    said = view.mirror.folders.get(view.node)
    return said.record if said is not None and said.record.by == view.me else None


def _witnesses(view: JobView, token: Token) -> frozenset[str]:
    """The nodes whose folder has the receipts of the batch `token`."""
    return frozenset(node for node, folder in node_folders(view).items() if folder.receipts == str(token))


def _member_nodes(view: JobView) -> frozenset[str]:
    return frozenset(stored.record.node for stored in view.mirror.members.values())


def _is_my_turn(view: JobView, topic: str, have: frozenset[str]) -> bool:
    """Whether a hash with `topic` selects this node to get one of the missing copies. `have`: nodes that already have
    one."""
    lacking = turn_order(_member_nodes(view) - have, topic)
    return view.node in lacking[: copies_wanted(view) - len(have)]


def _writer(view: JobView) -> str:
    """The node of the rank that writes weights and checkpoints; empty while the plan belongs to another world."""
    plan = view.plan
    return next((p.node for p in plan.ranks if p.rank == 0 and plan.world == view.head.world), "")


def _stages(view: JobView) -> bool:
    """Whether rank 0 serves, so that it has written the newest weights for weight sync."""
    claim = view.mirror.claim(view.head.world, 0)
    worker = view.workers.get(claim.instance) if claim is not None else None
    return worker is not None and worker.state == "serving"
