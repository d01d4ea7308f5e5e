"""Audits for whoever asks: of a job in the store, and of a run of which no cluster knows any more, from its folder.

Reads; what is proved, `gcore.ledger.audit` says. What cannot be read is a violation like any other. The store is read before the
folder: an entry that leaves the store stands in the folder before, and a receipt before the commit that needs it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from controllers.identity import node_of
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import Unreachable
from gcore.ledger import store_copy
from gcore.ledger.archive import ArchivedLog
from gcore.ledger.audit import Audit, Finding, Standing, audit
from gcore.ledger.job import JobPhase
from gcore.ledger.mirror import JobMirror
from gcore.ledger.receipts import ReceiptFolder
from gcore.ledger.stream import rules_of
from gcore.schema import UnreadableRecord
from gcore.store.types import WatchBatch


class NoCopy(Unreachable):
    """A run's folder does not hold what an audit needs, so only a cluster can answer. No violation: nothing was audited."""


def audit_of_records(uid: str, batch: WatchBatch, run_dir: Path | None = None) -> Audit:
    """Of a job whose records are `batch`. `run_dir`: where its folder lies; None: where its record says. Blocks on the disk."""
    try:
        mirror = store_copy.mirror_of(uid, batch)
    except UnreadableRecord as error:
        return Audit((Finding("record", str(error)),))
    if mirror.job is None:
        return Audit((Finding("record", f"the job's own record is missing ({mirror.keys.job})"),))
    if mirror.head is None:
        if mirror.status is None or mirror.status.record.phase is JobPhase.RUNNING:
            return Audit((Finding("record", f"head is missing ({mirror.keys.head})"),))
        return Audit()  # it ended, or waits, without having begun
    folder = run_dir if run_dir is not None else Path(mirror.job.record.run_dir)
    try:
        return _audit(mirror, folder)
    except OSError as error:
        return Audit((Finding("record", f"the run's folder {folder} cannot be read ({error.strerror or error})"),))


def _audit(mirror: JobMirror, run_dir: Path) -> Audit:
    assert mirror.job is not None
    assert mirror.head is not None
    log = ArchivedLog(run_dir, {seq: stored.record for seq, stored in mirror.log.items()})
    receipts = ReceiptFolder(run_dir)
    standing = Standing(
        seals=[stored.record for stored in mirror.seals.values()],
        offers=[stored.record for stored in mirror.offers.values()],
        checkpoints=mirror.checkpoints.record.entries if mirror.checkpoints is not None else (),
        phase=mirror.status.record.phase if mirror.status is not None else None,
    )
    found = audit(rules_of(mirror.job.record), mirror.head.record, log, receipts, standing)
    return found.with_problems((*(one.why for one in mirror.unreadable.values()), *log.problems, *receipts.problems))


def audit_of_folder(run_dir: Path) -> Audit:
    """Of a run that has ended, from its folder alone. Raises NoCopy. Blocks on the disk."""
    try:
        copy = store_copy.read(run_dir)
    except OSError as error:
        raise NoCopy(f"the run's folder cannot be read ({error.strerror or error})", where=str(run_dir)) from error
    except UnreadableRecord as error:
        return Audit((Finding("record", str(error)),))
    if copy is None:
        raise NoCopy(
            "the run's folder has no copy of the job's records",
            where=str(run_dir / store_copy.FOLDER),
            fix="Start its cluster (`gcore up`) and ask again: the copy is written when a job ends, or is audited after",
        )
    return audit_of_records(copy.uid, copy.batch, run_dir)


def run_of(runs: Path, job: str) -> Path | None:
    """The folder of the newest run of that name or uid under `runs` that holds a copy; None if there is none.

    One whose copy is damaged goes by its folder's name, and by when that was changed: that it is damaged is for the audit to say.
    """
    found: list[tuple[float, Path]] = []
    for folder in runs.glob(f"*/{store_copy.FOLDER}"):
        run_dir = folder.parent
        with contextlib.suppress(OSError):
            try:
                copy = store_copy.read(run_dir)
                if copy is not None and job in (copy.uid, copy.job.name):
                    found.append((copy.job.created, run_dir))
            except UnreadableRecord:
                name, _, uid = run_dir.name.rpartition("-")
                if job in (name, uid):
                    found.append((folder.stat().st_mtime, run_dir))
    return max(found)[1] if found else None


def report_of(found: Audit) -> pb.AuditReport:
    """As it is answered."""
    by_node: dict[str, int] = {}
    for holder, count in found.groups_by_holder.items():
        by_node[node_of(holder)] = by_node.get(node_of(holder), 0) + count
    return pb.AuditReport(
        clean=found.clean,
        violations=found.violations,
        findings=[
            pb.AuditFinding(kind=one.kind, sentence=one.sentence, refs=map(str, one.refs)) for one in found.findings
        ],
        steps=found.steps,
        trained=found.trained,
        filtered=found.filtered,
        failed=found.failed,
        in_flight=found.in_flight,
        issued=found.issued,
        epochs=found.epochs,
        groups_by_node=by_node,
        lineages=found.lineages,
    )
