"""Samples, audits, checkpoints and slot accounts, read from a run's folder or from the store.

In an audit, an unreadable record is a violation. An audit reads the store before the folder: a log entry is in the folder before it leaves
the store, and a receipt is there before the commit that needs it. Lists of checkpoints check only the manifest and the sizes of files; the
bytes are verified when a job restarts from a checkpoint or its model is exported.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from controllers.api.edge.errors import NotFound, bad_field
from controllers.identity import node_of
from controllers.telemetry.events import EventLog
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.load import stored_spec
from gcore.config.spec import SamplesSpec
from gcore.errors import GcoreError, SpecError, Unreachable, explain_os_errors
from gcore.ledger import archive
from gcore.ledger.archive import ArchivedLog
from gcore.ledger.audit.audit import AuditInputs, ManifestFacts, audit_records
from gcore.ledger.audit.chain import Audit, Finding
from gcore.ledger.audit.receipts import ReceiptFolder
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, Head, LogEntry
from gcore.ledger.records.job import Evaluation, JobPhase, KeptPicture
from gcore.ledger.records.slot_accounting import encode_line, read_step_lines
from gcore.ledger.retention import Retention, keep_reasons
from gcore.ledger.selection import StreamRules, rules_of
from gcore.models.layout import (
    MANIFEST_FILE,
    CheckpointDamaged,
    checkpoints_in,
    manifest_digest,
    read_manifest,
)
from gcore.observability.events import JobEvent
from gcore.observability.samples import (
    GroupLine,
    KeptGroup,
    KeptResponse,
    KeptText,
    Order,
    Selection,
    find_kept,
    find_picture,
    find_version,
    kept_steps,
    list_advantages,
    list_groups,
    parse_advantages,
    read_group,
    select_groups,
    sort_responses,
    step_status,
)
from gcore.schema import UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import WatchBatch, WatchEvent
from gcore.types import CHECKPOINTS, Token, Version, checkpoint_file

_ORDERS: dict[int, Order] = {
    pb.SAMPLE_ORDER_UNSPECIFIED: "stream",
    pb.SAMPLE_ORDER_BEST: "best",
    pb.SAMPLE_ORDER_WORST: "worst",
}

_STANDINGS = {
    "committed": pb.STEP_STANDING_COMMITTED,
    "under way": pb.STEP_STANDING_UNDER_WAY,
    "cut off": pb.STEP_STANDING_CUT_OFF,
}


async def find_samples(mirror: JobMirror, request: pb.GetSamplesRequest) -> Iterator[pb.SampleGroup]:
    """The groups that match the request. Reading each one blocks. Raises BadFields, NoSamples, and, also during iteration, GcoreError if the
    folder cannot be read."""
    job = mirror.job_record
    run_dir, head = Path(job.run_dir), mirror.head.record if mirror.head else None
    spec = SamplesSpec.model_validate(job.spec.get("samples", {}))
    ended = mirror.has_ended

    def find(kept: Sequence[Version], step: int | None) -> Version:
        return find_version(kept, head, spec, step, ended=ended)

    picked = await asyncio.to_thread(_pick, run_dir, request, find)
    return _messages(picked, _STANDINGS[step_status(head, picked.version)] if head is not None else None)


def samples_of_folder(run_dir: Path, request: pb.GetSamplesRequest) -> Iterator[pb.SampleGroup]:
    """The groups of a run that no cluster knows any more, without the status of its steps. Blocks on the disk."""
    return _messages(_pick(run_dir, request, find_kept), None)


@dataclass(frozen=True, slots=True)
class _Picked:
    """The samples that a request selects, and their files. `advantages`: as stored, by the group's digest."""

    run_dir: Path
    version: Version
    selection: Selection[GroupLine]
    advantages: Mapping[str, Sequence[bytes]]
    order: Order


def _pick(
    run_dir: Path, request: pb.GetSamplesRequest, find: Callable[[Sequence[Version], int | None], Version]
) -> _Picked:
    order = _order(request)
    with _reading(run_dir):
        version = find(kept_steps(run_dir), request.step if request.HasField("step") else None)
        groups = list_groups(run_dir, version)
        selection = select_groups(groups, source=request.source, order=order, limit=request.limit)
        known, wanted = list_advantages(run_dir, version), {group.digest for group in selection.groups}
    return _Picked(run_dir, version, selection, {name: lines for name, lines in known.items() if name in wanted}, order)


def _order(request: pb.GetSamplesRequest) -> Order:
    if request.order not in _ORDERS:
        raise bad_field("order", f"{request.order} is not a sample order", f"Use {', '.join(pb.SampleOrder.keys())}")
    return _ORDERS[request.order]


def _messages(picked: _Picked, stands: pb.StepStanding | None) -> Iterator[pb.SampleGroup]:
    for where in picked.selection.groups:
        with _reading(where.file.parent):
            group = read_group(where)
        advantages = parse_advantages(picked.advantages.get(where.digest, ()))
        responses = sort_responses(group, advantages, picked.order)
        message = _group(group, responses)
        message.pictures.extend(_picture(one, picked.run_dir, picked.version) for one in group.pictures)
        for shown, kept in zip(message.responses, responses, strict=True):
            shown.pictures.extend(_picture(one, picked.run_dir, picked.version) for one in kept.sample.pictures)
            if kept.sample.picture is not None:
                shown.picture.CopyFrom(_picture(kept.sample.picture, picked.run_dir, picked.version))
        message.lineage, message.step, message.of = picked.version.lineage, picked.version.step, picked.selection.of
        if stands is not None:
            message.standing = stands
        yield message


@contextlib.contextmanager
def _reading(where: Path) -> Iterator[None]:
    with explain_os_errors("the run's folder cannot be read", where=where):
        try:
            yield
        except (FileNotFoundError, UnreadableRecord) as error:
            raise GcoreError("the samples of this step were removed while they were read", where=str(where)) from error


def _group(group: KeptGroup, responses: tuple[KeptResponse, ...]) -> pb.SampleGroup:
    return pb.SampleGroup(
        ref=str(group.ref),
        digest=group.digest,
        source=group.source,
        holder=group.holder,
        prompt=_text(group.prompt),
        prompt_tokens=group.prompt_tokens,
        answer=group.answer,
        temperature=group.temperature,
        responses=[_response(one) for one in responses],
    )


def _picture(one: KeptPicture, run_dir: Path, version: Version) -> pb.SamplePicture:
    file = find_picture(run_dir, version, one.sha256)
    return pb.SamplePicture(
        sha256=one.sha256, bytes=one.size, height=one.height, width=one.width, file="" if file is None else str(file)
    )


def _response(one: KeptResponse) -> pb.SampleResponse:
    sample, advantage = one.sample, one.advantage
    message = pb.SampleResponse(
        index=one.index,
        text=_text(sample.response),
        tokens=sample.tokens,
        reward=sample.reward,
        parts=[pb.RewardPart(name=name, value=value) for name, value in sample.parts],
        finish_reason=sample.finish_reason,
        masked=sample.masked,
        versions=sample.versions,
        observed=[pb.ObservedText(start=start, end=end) for start, end in sample.observed],
        observed_tokens=sample.observed_tokens,
        steps=sample.steps,
    )
    if advantage is not None:
        message.advantage = advantage.mean
        if advantage.least is not None and advantage.most is not None:
            message.advantage_least, message.advantage_most = advantage.least, advantage.most
    return message


def _text(text: KeptText) -> pb.SampleText:
    return pb.SampleText(text=text.text, more=text.more)


class NoRecordsCopy(Unreachable):
    """A run's folder lacks what an audit needs, so only a cluster can audit it. This is no violation: nothing was audited."""


def audit_of_records(
    uid: str,
    batch: WatchBatch,
    run_dir: Path | None = None,
    known: Collection[tuple[str, Token]] | None = None,
) -> Audit:
    """Audit a job with the records `batch` and the files of its run. `run_dir`: the run's folder; None: the one that
    its record names. `known`: the tokens for which there were receipts before the records were read
    (`check_uncommitted`). Blocks on the disk."""
    try:
        mirror = archive.mirror_of(uid, batch)
    except UnreadableRecord as error:
        return _violation(str(error))
    if mirror.job is None:
        return _violation(f"the job's own record is missing ({mirror.keys.job})")
    if mirror.job.record.uid != uid:
        return _violation(f"the job's own record ({mirror.keys.job}) is of job {mirror.job.record.uid}")
    folder = run_dir if run_dir is not None else mirror.run_dir
    try:
        if mirror.head is None:
            return _audit_without_head(mirror, folder, known)
        rules = rules_of(mirror.job_record)
        if min(rules.shape.lengths) < 1:
            what = f"{mirror.job_record.prompts} prompts are in {len(rules.shape.lengths)} shards"
            return _violation(f"the job's own record ({mirror.keys.job}) describes no valid job: {what}")
        return _audit(mirror, mirror.head.record, rules, folder, known)
    except SpecError as error:
        return _violation(f"the job's own record ({mirror.keys.job}) describes no valid job: {error}")
    except OSError as error:
        return _violation(f"the run's folder {folder} cannot be read ({error.strerror or error})")


def _violation(sentence: str) -> Audit:
    return Audit((Finding("record", sentence),))


def _audit_without_head(mirror: JobMirror, run_dir: Path, known: Collection[tuple[str, Token]] | None) -> Audit:
    """Audit a job without a head record. That is right only for a job that has not started: its first transaction
    creates head, and none deletes it alone. If there is any later record or file, head was lost."""
    log = ArchivedLog(run_dir, {seq: stored.record for seq, stored in mirror.log.items()})
    registered = len(mirror.checkpoints.record.entries) if mirror.checkpoints is not None else 0
    counts = {
        "log entries": len(log),
        "receipts": len(known_tokens(run_dir) if known is None else known),
        "checkpoints": max(registered, len(checkpoints_in(run_dir))),
        "seals": len(mirror.seals),
        "evaluations": len(mirror.evaluations),
    }
    shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    phase = mirror.status.record.phase if mirror.status is not None else None
    if shown:
        return _violation(f"head is missing ({mirror.keys.head}), but the job has {shown}")
    if phase is None or phase in (JobPhase.RUNNING, JobPhase.SUCCEEDED):
        return _violation(f"head is missing ({mirror.keys.head}), and the job is {phase or 'without a state'}")
    return Audit()  # it ended, or waits, without having started


def _audit(
    mirror: JobMirror,
    head: Head,
    rules: StreamRules,
    run_dir: Path,
    known: Collection[tuple[str, Token]] | None,
) -> Audit:
    log = ArchivedLog(run_dir, {seq: stored.record for seq, stored in mirror.log.items()})
    receipts = ReceiptFolder(run_dir)
    checkpoints = mirror.checkpoints.record.entries if mirror.checkpoints is not None else ()
    standing = AuditInputs(
        uid=mirror.job_record.uid,
        job=mirror.job_record,
        seals=[stored.record for stored in mirror.seals.values()],
        offers=[stored.record for stored in mirror.offers.values()],
        checkpoints=checkpoints,
        manifests=_manifests(run_dir, checkpoints),
        phase=mirror.status.record.phase if mirror.status is not None else None,
        known=known,
    )
    found = audit_records(rules, head, log, receipts, standing)
    stateless = ["the job's state is missing"] if mirror.status is None else []
    unread = (one.why for one in mirror.unreadable.values())
    return found.with_problems((*stateless, *unread, *log.problems, *receipts.problems))


def _manifests(run_dir: Path, checkpoints: Sequence[Checkpoint]) -> dict[str, ManifestFacts]:
    """The facts of each checkpoint's manifest, as far as it can be read in the run's folder. A missing manifest is no
    violation: the checkpoint may be on another node, and a rollback verifies a checkpoint before it uses it."""
    found = {}
    for one in checkpoints:
        if one.file != checkpoint_file(one.version):
            continue  # the audit reports this; do not read a made-up path
        folder = run_dir / one.file
        with contextlib.suppress(CheckpointDamaged):
            manifest = read_manifest(folder)
            found[one.file] = ManifestFacts(manifest.job_uid, manifest.version, manifest_digest(folder))
    return found


def known_tokens(run_dir: Path) -> frozenset[tuple[str, Token]]:
    """The receipts in a run's folder, each as its train world and token. Raises OSError. Blocks."""
    return frozenset(ReceiptFolder(run_dir).tokens())


def audit_of_folder(run_dir: Path) -> Audit:
    """Audit a run that has ended, from its folder alone. Raises NoRecordsCopy. Blocks on the disk."""
    try:
        copy = archive.read_copy(run_dir)
    except OSError as error:
        raise NoRecordsCopy(
            f"the run's folder cannot be read ({error.strerror or error})", where=str(run_dir)
        ) from error
    except UnreadableRecord as error:
        return _violation(str(error))
    if copy is None:
        raise NoRecordsCopy(
            "the run's folder has no copy of the job's records",
            where=str(run_dir / archive.COPY_FOLDER),
            fix="Start its cluster (`gcore up`) and audit again. The copy is written when a job ends or when an ended job is audited",
        )
    found = audit_of_records(copy.uid, copy.batch, run_dir)
    with contextlib.suppress(OSError):  # the audit reports an unreadable folder
        newest = archive.highest_in_folder(run_dir).lineage
        if newest > copy.head.lineage:
            # An ended job continues if it was extended, or if etcd was restored from an older backup.
            what = f"the copy of the job's records ends in lineage {copy.head.lineage}, but the folder has lines of lineage {newest}"
            found = found.with_problems([f"{what}: if a cluster still runs the job, audit it there"])
    return found


def events_of_folder(run_dir: Path) -> list[JobEvent]:
    """The events of a run that has ended, from the copy of its records in `run_dir`; empty without a copy. Blocks on the disk.

    Raises UnreadableRecord, OSError.
    """
    copy = archive.read_copy(run_dir)
    if copy is None:
        return []
    mirror = archive.mirror_of(copy.uid, copy.batch)
    if mirror.job is not None:  # the folder may have been moved
        job = replace(mirror.job, record=mirror.job.record.model_copy(update={"run_dir": str(run_dir)}))
        mirror = replace(mirror, job=job)
    events = EventLog(mirror.keys)
    events.note(JobMirror(mirror.keys), _as_written(copy.batch, mirror.keys), mirror, 0.0)
    return [JobEvent(one.sequence, one.time, one.kind, one.message, one.data) for one in events.events]


def _as_written(batch: WatchBatch, keys: JobKeys) -> WatchBatch:
    """The batch of a copy with a revision for each record, in the order in which a job writes them: by lineage and step,
    and an evaluation after its step.

    A copy has one revision for all records. An `EventLog` would order these by key (step 10 before step 5), and has
    room for `PER_REVISION` events of one revision.
    """

    def place(change: WatchEvent) -> tuple[int, int, int, int, str]:
        key, value = change.kv.key, change.kv.value
        if key.startswith(keys.log_prefix):
            entry = LogEntry.decode(value, key)
            return 1, entry.lineage, entry.step, 0, key
        if key.startswith(keys.eval_prefix):
            version = Evaluation.decode(value, key).version
            return 1, version.lineage, version.step, 1, key
        return 0 if key == keys.job else 2, 0, 0, 0, key

    ordered = enumerate(sorted(batch.events, key=place), 1)
    changes = tuple(replace(one, kv=replace(one.kv, mod_revision=number)) for number, one in ordered)
    return replace(batch, events=changes)


def find_run(runs: Path, job: str) -> Path | None:
    """The folder of the newest run with that name or uid under `runs` that holds a copy of its records; None if there is none.

    If a copy is damaged, the folder's name and modification time are used instead; the audit reports the damage.
    """
    found: list[tuple[float, Path]] = []
    for folder in runs.glob(f"*/{archive.COPY_FOLDER}"):
        run_dir = folder.parent
        with contextlib.suppress(OSError):
            try:
                copy = archive.read_copy(run_dir)
                if copy is not None and job in (copy.uid, copy.job.name):
                    found.append((copy.job.created, run_dir))
            except UnreadableRecord:
                name, _, uid = run_dir.name.rpartition("-")
                if job in (name, uid):
                    found.append((folder.stat().st_mtime, run_dir))
    return max(found)[1] if found else None


def audit_report(found: Audit) -> pb.AuditReport:
    """The audit as an API message."""
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


async def list_checkpoints(
    mirror: JobMirror, holders: Mapping[str, Collection[str]] = MappingProxyType({})
) -> pb.ListCheckpointsReply:
    """The registered checkpoints, newest first. `holders`: the nodes that have each checkpoint, if nodes share no folder."""
    job = mirror.job_record
    reply = pb.ListCheckpointsReply(uid=job.uid, name=job.name)
    for one, kept in _newest_first(_registered(mirror)):
        folder = Path(job.run_dir) / one.file
        seen = await asyncio.to_thread(_seen, folder, one, kept)
        seen.nodes.extend(holders.get(folder.name, ()))
        if seen.nodes and not seen.bytes:  # it is on another node, which is no problem
            seen.problem = ""
        reply.checkpoints.append(seen)
    return reply


def checkpoints_of_folder(run_dir: Path, name: str, uid: str) -> pb.ListCheckpointsReply:
    """The checkpoints of a run that no cluster knows any more: those in its folder, and those that the copy of its records lists. Without a
    copy, the reasons to keep each one are unknown. Blocks."""
    lying = {f"{CHECKPOINTS}/{folder.name}": version for version, folder in checkpoints_in(run_dir).items()}
    # A checkpoint that was to be deleted when the job ended may be deleted by now.
    found = {one: kept for one, kept in _left(run_dir, uid).items() if kept or one.file in lying}
    known = {one.file for one in found}
    for file, version in lying.items():
        if file not in known:
            found[Checkpoint(lineage=version.lineage, step=version.step, seq=0, file=file)] = frozenset()
    seen = [_seen(run_dir / one.file, one, kept) for one, kept in _newest_first(found)]
    return pb.ListCheckpointsReply(uid=uid, name=name, checkpoints=seen)


def _registered(mirror: JobMirror) -> dict[Checkpoint, Collection[str]]:
    """The registered checkpoints and the reasons to keep each."""
    if mirror.job is None or mirror.head is None or mirror.checkpoints is None:
        return {}
    head, entries = mirror.head.record, mirror.checkpoints.record.entries
    evaluations = (stored.record for stored in mirror.evaluations.values())
    reasons = keep_reasons(head, entries, Retention.of(stored_spec(mirror.job.record.spec), head, evaluations))
    return {one: reasons.get(one, frozenset()) for one in entries if one.file}


def _left(run_dir: Path, uid: str) -> dict[Checkpoint, Collection[str]]:
    """The checkpoints and reasons of `_registered`, but from the copy of the records in the run's folder; empty if
    there is no copy or it is damaged."""
    with contextlib.suppress(OSError, GcoreError):
        copy = archive.read_copy(run_dir)
        if copy is not None and copy.uid == uid:
            return _registered(archive.mirror_of(uid, copy.batch))
    return {}


def _newest_first(found: Mapping[Checkpoint, Collection[str]]) -> list[tuple[Checkpoint, Collection[str]]]:
    return sorted(found.items(), key=lambda pair: (pair[0].step, pair[0].lineage), reverse=True)


def _seen(folder: Path, one: Checkpoint, kept: Collection[str]) -> pb.CheckpointInfo:
    """Describe a checkpoint as an API message: its total size, whether damaged or not, and the first problem of its
    files."""
    info = pb.CheckpointInfo(
        step=one.step, lineage=one.lineage, folder=str(folder), kept=sorted(kept), digest=one.digest
    )
    if not folder.is_dir():
        info.problem = "its folder is missing"
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
    """The bytes of all readable files below a folder."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size


class NoAccounts(NotFound):
    """There is no slot accounting of the requested steps."""


async def find_accounts(mirror: JobMirror, step: int | None) -> Iterator[pb.BookOfNode]:
    """The slot accounting, node by node. Reading each one blocks. Raises NoAccounts, and, also during iteration, GcoreError if the folder cannot
    be read."""
    if step is None:
        return iter(list(_newest(mirror)))
    return await asyncio.to_thread(folder_accounts, mirror.run_dir, step)


def folder_accounts(run_dir: Path, step: int) -> Iterator[pb.BookOfNode]:
    """The slot accounting of one step. Raises NoAccounts, GcoreError. Blocks on the disk."""
    books = _of_folder(run_dir, step)
    first = next(books, None)
    if first is None:
        raise NoAccounts(
            f"there is no slot accounting of step {step}",
            fix="Nodes write it shortly after the commit; `gcore describe` shows the newest step",
        )
    return chain((first,), books)


def _of_folder(run_dir: Path, step: int) -> Iterator[pb.BookOfNode]:
    with explain_os_errors("the run's folder cannot be read", where=run_dir):
        for line in read_step_lines(run_dir, step):
            lineage = line.book.version.lineage
            yield pb.BookOfNode(node=line.node, lineage=lineage, step=step, book_json=encode_line(line))


def _newest(mirror: JobMirror) -> Iterator[pb.BookOfNode]:
    for node, stored in sorted(mirror.books.items()):
        for book in stored.record.steps[-1:]:
            lineage, step = book.version
            yield pb.BookOfNode(node=node, lineage=lineage, step=step, book_json=book.model_dump_json())
