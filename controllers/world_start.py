"""What head's train world starts from. Pure."""

from __future__ import annotations

from controllers.view import JobView
from gcore.ledger.ancestry import resumable
from gcore.ledger.records import Checkpoint
from gcore.train.launch import Start


def world_start(view: JobView) -> Start | None:
    """What head's world starts from: what its lineage's rollback named, copies or a checkpoint, or the base."""
    assert view.mirror.head is not None
    assert view.mirror.checkpoints is not None
    head = view.mirror.head.record
    entries = view.mirror.checkpoints.record.entries
    if head.lineage == 0:
        return Start(step=0)
    for entry in view.mirror.log.values():
        if entry.record.kind == "rollback" and entry.record.lineage == head.lineage:
            if entry.record.state is not None:
                return Start(step=entry.record.step, state=entry.record.state)
            named = (c for c in resumable(head, entries) if c.seq == entry.record.parent)
            return next((Start(step=c.step, checkpoint=c.file) for c in named), None)
    return None


def start_checkpoint(view: JobView) -> Checkpoint | None:
    """The registered checkpoint that head's world starts from, if it does from one."""
    assert view.mirror.checkpoints is not None
    start = world_start(view)
    if start is None or not start.checkpoint:
        return None
    entries = view.mirror.checkpoints.record.entries
    return next((c for c in entries if c.file == start.checkpoint), None)
