"""A job's checkpoints, for people: from its record where a cluster knows it, else from what lies in its run's folder.

What can be seen cheaply is looked at: whether a folder has its manifest, and every file the size that stands there. That each
byte is right is looked at when a job goes back to it, or when its model is exported. Writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from gcore.api.v1 import jobs_pb2 as pb
from gcore.config import stored_spec
from gcore.ledger.evaluation import best_of
from gcore.ledger.mirror import JobMirror
from gcore.ledger.retention import Retention, why_kept
from gcore.weights.layout import MANIFEST_FILE, CheckpointDamaged, checkpoints_in, read_manifest


async def list_checkpoints(
    mirror: JobMirror, holders: Mapping[str, Collection[str]] = MappingProxyType({})
) -> pb.ListCheckpointsReply:
    """Those that are registered, the newest first. `holders`: the nodes that have each, where nodes share no folder."""
    assert mirror.job is not None
    job = mirror.job.record
    reply = pb.ListCheckpointsReply(uid=job.uid, name=job.name)
    if mirror.head is None or mirror.checkpoints is None:
        return reply
    head, entries = mirror.head.record, mirror.checkpoints.record.entries
    spec = stored_spec(job.spec)
    best = best_of(head, [stored.record for stored in mirror.evaluations.values()], spec.best_metric)
    policy = Retention(
        spec.checkpoint.keep, spec.checkpoint.keep_every, best.version.step if best is not None else None
    )
    reasons = why_kept(head, entries, policy)
    for one in sorted((c for c in entries if c.file), key=lambda c: (c.step, c.lineage), reverse=True):
        kept = reasons.get(one, frozenset())
        folder = Path(job.run_dir) / one.file
        seen = await asyncio.to_thread(_seen, folder, one.lineage, one.step, kept)
        seen.nodes.extend(holders.get(folder.name, ()))
        if seen.nodes and not seen.bytes:  # it lies elsewhere, which is nothing wrong
            seen.problem = ""
        reply.checkpoints.append(seen)
    return reply


def checkpoints_of_folder(run_dir: Path, name: str, uid: str) -> pb.ListCheckpointsReply:
    """Those that lie in a run's folder, of which no cluster knows any more; why each was kept is not said. Blocks."""
    found = sorted(checkpoints_in(run_dir).items(), key=lambda pair: (pair[0].step, pair[0].lineage), reverse=True)
    seen = [_seen(folder, version.lineage, version.step, ()) for version, folder in found]
    return pb.ListCheckpointsReply(uid=uid, name=name, checkpoints=seen)


def _seen(folder: Path, lineage: int, step: int, kept: Collection[str]) -> pb.CheckpointInfo:
    info = pb.CheckpointInfo(step=step, lineage=lineage, folder=str(folder), kept=sorted(kept))
    try:
        manifest = read_manifest(folder)
        stat = (folder / MANIFEST_FILE).stat()
        info.bytes, info.written = stat.st_size, stat.st_mtime
        for name, expected in sorted(manifest.files.items()):
            size = (folder / name).stat().st_size
            info.bytes += size
            if size != expected.size:
                info.problem = f"{name} has {size} bytes, not {expected.size}"
                break
    except CheckpointDamaged as error:
        info.problem = error.what
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        info.problem = f"{name} cannot be read ({error.strerror or error})"
    return info
