"""Who has which shards of a job's prompt stream, and how far each is, from the assignment and head alone. Pure."""

from __future__ import annotations

from controllers.identity import node_of
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.mirror import JobMirror
from gcore.ledger.rules import rules_of
from gcore.prompts.cursor import ShardCursor


def shards_of(mirror: JobMirror) -> pb.ListShardsReply:
    """Every shard, in order. Of a job that has not begun each is at its first prompt, and nobody's."""
    assert mirror.job is not None
    shape = rules_of(mirror.job.record).shape
    assigned = mirror.assign.record if mirror.assign is not None else None
    cursors = mirror.head.record.cursors.shards if mirror.head is not None else ()
    reply = pb.ListShardsReply()
    for shard, length in enumerate(shape.lengths):
        owner = (assigned.owner(shard) if assigned is not None and shard < len(assigned.owners) else None) or ""
        cursor = cursors[shard] if shard < len(cursors) else ShardCursor()
        epoch, seq = divmod(cursor.low_water, length) if length else (0, 0)
        reply.shards.add(
            shard=shard,
            node=node_of(owner) if owner else "",
            incarnation=owner,
            data_epoch=epoch,
            seq=seq,
            length=length,
            ahead=cursor.beyond.bit_count(),
        )
    return reply
