"""Which node keeps what, of a job whose nodes share no folder (`storage.copies`).

What must survive a node is on as many nodes as the spec asks for, or as there are, before the store names it or forgets it: a checkpoint
before it is registered, receipts of ranks before their step is committed, old records before they leave the store. Each node's record says
what is in its folder (`NodeFolder`), and each node fetches what it is to have from peers. Where nodes share a folder, no rule applies.
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
"""A node whose turn it is has so long to fetch a copy before the next node fetches one too."""

REPAIR_PATIENCE_S = 60.0
"""A node is missing for so long before another gets a copy in its place."""

GATHER_PATIENCE_S = 2.0
"""A node whose turn it is has so long to fetch the receipts of a step, which waits for them."""

HOLDERS_GRACE_S = 300.0
"""A world that is to start from a checkpoint which no node has that is there waits so long for one to come back."""


def keeps_copies(view: JobView) -> bool:
    """Whether nodes keep copies, since they share no folder."""
    return view.spec.storage.copies is not None


def copies_wanted(view: JobView) -> int:
    """On how many nodes something must lie now."""
    return min(view.spec.storage.copies or 1, max(1, len(_member_nodes(view))))


def node_folders(view: JobView) -> Mapping[str, NodeFolder]:
    """What lies on the nodes that work on the job, as they said in this life of theirs."""
    said = {node: stored.record for node, stored in view.mirror.folders.items()}
    return {node: folder for node, folder in said.items() if folder.by in view.mirror.members}


def checkpoint_holders(view: JobView, version: Version, digest: str) -> frozenset[str]:
    """The nodes that have a checkpoint."""
    return frozenset(node for node, folder in node_folders(view).items() if folder.has(version, digest))


def is_safe(view: JobView, version: Version, digest: str) -> bool:
    """Whether enough nodes have a checkpoint that the store may name it."""
    return not keeps_copies(view) or len(checkpoint_holders(view, version, digest)) >= copies_wanted(view)


def has_receipts(view: JobView, token: Token) -> bool:
    """Whether enough nodes have the ranks' receipts of `token` that its step may be committed."""
    return not keeps_copies(view) or len(_witnesses(view, token)) >= copies_wanted(view)


def archived_entries(view: JobView, seqs: Collection[int]) -> tuple[int, ...]:
    """Those of `seqs` that enough nodes have written down; all, where nodes share a folder, for who prunes writes there."""
    if not keeps_copies(view):
        return tuple(seqs)
    there = [frozenset(folder.log) for folder in node_folders(view).values()]
    return tuple(seq for seq in seqs if sum(seq in log for log in there) >= copies_wanted(view))


def archived_evaluations(view: JobView, versions: Collection[str]) -> tuple[str, ...]:
    """The same of evaluations."""
    if not keeps_copies(view):
        return tuple(versions)
    there = [folder.evaluations for folder in node_folders(view).values()]
    return tuple(version for version in versions if sum(version in known for known in there) >= copies_wanted(view))


def archive_records(view: JobView, seqs: tuple[int, ...] = (), evaluations: tuple[str, ...] = ()) -> Iterator[Intent]:
    """Write down here what is to leave the store."""
    own = _own(view)
    if own is None or (set(seqs) <= set(own.log) and set(evaluations) <= set(own.evaluations)):
        return
    topic = f"archive {seqs[0] if seqs else evaluations[0]}"
    after = 0.0 if _is_my_turn(view, "archive", frozenset()) else SPREAD_PATIENCE_S
    yield Intent(ArchiveRecords(seqs, evaluations), topic, after=after + SETTLE_S)


def gather_receipts(view: JobView, token: Token) -> Iterator[Intent]:
    """Fetch the ranks' receipts of the step that all have trained."""
    there = _witnesses(view, token)
    if view.node in there or _own(view) is None:
        return
    # The same nodes at every step: what they fetch is little more each time.
    after = 0.0 if _is_my_turn(view, "receipts", there) else GATHER_PATIENCE_S
    yield Intent(GatherReceipts(token), f"gather {token}", after=after)


def report_folder(view: JobView) -> Iterator[Intent]:
    """Say what lies here: at first, after a change of the world, and when a rank here has written a checkpoint."""
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
    """Fetch a checkpoint of which there are too few copies, the newest first and one at a time."""
    if not keeps_copies(view) or _own(view) is None or any(c.startswith("checkpoint ") for c in view.under_way):
        return
    fresh = unregistered_checkpoints(view)
    for one in (*fresh, *_registered(view)):
        have = checkpoint_holders(view, one.version, one.digest)
        if have and view.node not in have and len(have) < copies_wanted(view):
            topic = f"checkpoint {one.version}"
            # What is registered has had its copies: a node whose controller is started again is back with them at once.
            after = 0.0 if one in fresh else REPAIR_PATIENCE_S
            after += 0.0 if _is_my_turn(view, topic, have) else SPREAD_PATIENCE_S
            yield Intent(FetchCheckpoint(one), topic, after=after)
            return


def fetch_inputs(view: JobView) -> Iterator[Intent]:
    """Fetch what this node's workers load: head's weights, and the checkpoint that a rank starts from."""
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
    """Whether what head's world starts from lies where it has to: here, read to the last byte, and on the other ranks' nodes, for
    a rank that is started waits for the others only so long."""
    checkpoint = start_checkpoint(view) if keeps_copies(view) else None
    if checkpoint is None:
        return True
    nodes = {place.node for place in view.plan.ranks}
    have = checkpoint_holders(view, checkpoint.version, checkpoint.digest)
    return view.head.world in view.fetched_starts and nodes <= have


def delete_orphans(view: JobView) -> Iterator[Intent]:
    """Each node deletes its own copies of what no record names any more."""
    own = _own(view) if keeps_copies(view) else None
    if own is None:
        return
    lying = [one.version for one in own.checkpoints]
    # What lies here was listed before head came to be what it is now, so nothing of a later world is among it.
    gone = sorted(orphaned_checkpoints(view.head, view.checkpoints, lying))
    if gone:
        yield Intent(DiscardCheckpoints(tuple(gone)), f"discard {gone[0]}", after=SETTLE_S)


def why_start_lost(view: JobView) -> str:
    """Why head's world cannot be started any more, for want of what it starts from, or nothing."""
    checkpoint = start_checkpoint(view) if keeps_copies(view) else None
    if checkpoint is None or checkpoint_holders(view, checkpoint.version, checkpoint.digest):
        return ""
    waiting = [p for p in view.plan.ranks if view.mirror.claim(view.head.world, p.rank) is None]
    return f"no node that is there has {checkpoint.file}, which the world was to start from" if waiting else ""


def newest_checkpoint_away(view: JobView) -> str:
    """The newest checkpoint on the chain, if no node has it that is there, or nothing."""
    if not keeps_copies(view):
        return ""
    newest = next(iter(resumable_checkpoints(view.head, view.checkpoints)), None)
    if newest is None or not newest.file:
        return ""
    return "" if checkpoint_holders(view, newest.version, newest.digest) else newest.file


def unregistered_checkpoints(view: JobView) -> tuple[SavedCheckpoint, ...]:
    """The checkpoints that ranks have saved and that the store may still register, the newest first."""
    newest = max((c.step for c in _on_chain(view)), default=0)
    fresh = (one for v, one in view.saved.items() if v.step > newest and is_ancestor(view.head, v))
    return tuple(sorted(fresh, key=lambda one: one.version, reverse=True))


def _registered(view: JobView) -> Iterator[SavedCheckpoint]:
    for one in _on_chain(view):
        if one.file:
            yield SavedCheckpoint.of(one)


def _on_chain(view: JobView) -> tuple[Checkpoint, ...]:
    return resumable_checkpoints(view.head, view.checkpoints)


def _own(view: JobView) -> NodeFolder | None:
    """What this incarnation has reported of its own folder."""
    said = view.mirror.folders.get(view.node)
    return said.record if said is not None and said.record.by == view.me else None


def _witnesses(view: JobView, token: Token) -> frozenset[str]:
    return frozenset(node for node, folder in node_folders(view).items() if folder.receipts == str(token))


def _member_nodes(view: JobView) -> frozenset[str]:
    return frozenset(stored.record.node for stored in view.mirror.members.values())


def _is_my_turn(view: JobView, topic: str, have: frozenset[str]) -> bool:
    """Whether this node is among those that are to have a copy, beside those that have one."""
    lacking = turn_order(_member_nodes(view) - have, topic)
    return view.node in lacking[: copies_wanted(view) - len(have)]


def _writer(view: JobView) -> str:
    """The node of the rank that writes weights and checkpoints; nothing while the plan is another world's."""
    plan = view.plan
    return next((p.node for p in plan.ranks if p.rank == 0 and plan.world == view.head.world), "")


def _stages(view: JobView) -> bool:
    """Whether that rank has come so far that head's weights are staged."""
    claim = view.mirror.claim(view.head.world, 0)
    worker = view.workers.get(claim.instance) if claim is not None else None
    return worker is not None and worker.state == "serving"
