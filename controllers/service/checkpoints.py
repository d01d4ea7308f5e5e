"""A job's checkpoints, for people: from its records where a cluster knows it, else from what lies in its run's folder and the
copy of the records there.

What can be seen cheaply is looked at: whether a folder has its manifest, and every file the size that stands there. That each
byte is right is looked at when a job goes back to it, or when its model is exported. Writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from gcore.api.v1 import jobs_pb2 as pb
from gcore.config import stored_spec
from gcore.errors import GcoreError
from gcore.ledger import store_copy
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import Checkpoint
from gcore.ledger.retention import Retention, why_kept
from gcore.weights.layout import CHECKPOINTS, MANIFEST_FILE, CheckpointDamaged, checkpoints_in, read_manifest


async def list_checkpoints(
    mirror: JobMirror, holders: Mapping[str, Collection[str]] = MappingProxyType({})
) -> pb.ListCheckpointsReply:
    """Those that are registered, the newest first. `holders`: the nodes that have each, where nodes share no folder."""
    assert mirror.job is not None
    job = mirror.job.record
    reply = pb.ListCheckpointsReply(uid=job.uid, name=job.name)
    for one, kept in _newest_first(_registered(mirror)):
        folder = Path(job.run_dir) / one.file
        seen = await asyncio.to_thread(_seen, folder, one, kept)
        seen.nodes.extend(holders.get(folder.name, ()))
        if seen.nodes and not seen.bytes:  # it lies elsewhere, which is nothing wrong
            seen.problem = ""
        reply.checkpoints.append(seen)
    return reply


def checkpoints_of_folder(run_dir: Path, name: str, uid: str) -> pb.ListCheckpointsReply:
    """Those of a run of which no cluster knows any more: what lies in its folder, and what is to be kept by the copy of its records
    there. Without a copy nobody knows why each was kept. Blocks."""
    lying = {f"{CHECKPOINTS}/{folder.name}": version for version, folder in checkpoints_in(run_dir).items()}
    # What was to go when the job ended may have gone since.
    found = {one: kept for one, kept in _left(run_dir, uid).items() if kept or one.file in lying}
    known = {one.file for one in found}
    for file, version in lying.items():
        if file not in known:
            found[Checkpoint(lineage=version.lineage, step=version.step, seq=0, file=file)] = frozenset()
    seen = [_seen(run_dir / one.file, one, kept) for one, kept in _newest_first(found)]
    return pb.ListCheckpointsReply(uid=uid, name=name, checkpoints=seen)


def _registered(mirror: JobMirror) -> dict[Checkpoint, Collection[str]]:
    """The registered ones, and why each is kept."""
    if mirror.job is None or mirror.head is None or mirror.checkpoints is None:
        return {}
    head, entries = mirror.head.record, mirror.checkpoints.record.entries
    evaluations = (stored.record for stored in mirror.evaluations.values())
    reasons = why_kept(head, entries, Retention.of(stored_spec(mirror.job.record.spec), head, evaluations))
    return {one: reasons.get(one, frozenset()) for one in entries if one.file}


def _left(run_dir: Path, uid: str) -> dict[Checkpoint, Collection[str]]:
    """The same from the copy of the records in the run's folder; nothing if there is none, or it is damaged."""
    with contextlib.suppress(OSError, GcoreError):
        copy = store_copy.read(run_dir)
        if copy is not None and copy.uid == uid:
            return _registered(store_copy.mirror_of(uid, copy.batch))
    return {}


def _newest_first(found: Mapping[Checkpoint, Collection[str]]) -> list[tuple[Checkpoint, Collection[str]]]:
    return sorted(found.items(), key=lambda pair: (pair[0].step, pair[0].lineage), reverse=True)


def _seen(folder: Path, one: Checkpoint, kept: Collection[str]) -> pb.CheckpointInfo:
    """With the size of all that lies there, damaged or not, and the first thing that is wrong with it."""
    info = pb.CheckpointInfo(
        step=one.step, lineage=one.lineage, folder=str(folder), kept=sorted(kept), digest=one.digest
    )
    if not folder.is_dir():
        info.problem = "its folder is not there"
        return info
    info.bytes = _size(folder)
    try:
        manifest = read_manifest(folder)
        info.written = (folder / MANIFEST_FILE).stat().st_mtime
        for name, expected in sorted(manifest.files.items()):
            size = (folder / name).stat().st_size
            if size != expected.size:
                info.problem = f"{name} has {size} bytes, not {expected.size}"
                break
    except CheckpointDamaged as error:
        info.problem = error.what
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        info.problem = f"{name} cannot be read ({error.strerror or error})"
    return info


def _size(folder: Path) -> int:
    """Bytes of all files below, as far as they can be seen."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size
