"""Creates and cancels jobs.

If a spec is submitted again: an interrupted job resumes; a finished job is replaced by a new one, or continues if only its goal is higher
(`controllers.api.submission.spec_changes`). If the spec changed and the job of that name has not ended, the request is refused; `--new` ends
the old job and starts a new one. All checks run before anything is written.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controllers.api.edge.access import current_caller, may_see
from controllers.api.edge.errors import Conflict, Forbidden
from controllers.api.store_reader import StoreReader
from controllers.api.submission.allowlist import EVERYTHING, Allowlist
from controllers.api.submission.checks import (
    CheckedJob,
    adapter_digests,
    check_submission,
    judge_remote_code,
    judge_revisions,
)
from controllers.api.submission.nodes import (
    check_backend,
    check_blob_room,
    check_blob_stores,
    check_copies,
    check_engine,
    check_offload,
    check_ranks,
    check_served_judges,
    check_spans,
)
from controllers.api.submission.spec_changes import (
    change_settings,
    changed_keys,
    changed_settings,
    extend_job,
    fixed_changes,
    raised_goal,
)
from controllers.job.preparation import check_unchanged
from gcore.config.load import new_spec
from gcore.config.spec import JobSpec
from gcore.data.stream import identify_data
from gcore.errors import SpecError, StoreUnavailable, explain_os_errors
from gcore.ledger import transactions
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.plugins import (
    PluginFile,
    copied_file,
    plugin_files,
    read_plugin_file,
    replace_plugin_files,
)
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.system.files import replace_file
from placement.shares import new_claim


class Submitter:
    """Creates and cancels jobs; each write is one guarded transaction."""

    def __init__(
        self,
        store: Store,
        jobs: StoreReader,
        run_root: Path,
        cache_dir: Path,
        clock: Clock,
        most_slots: Callable[[], int | None] = lambda: None,
        *,
        local: bool = False,
        allowed: Allowlist = EVERYTHING,
        owner_key: str = "",
    ) -> None:
        """`most_slots`: the slots of a cluster that cannot grow, None if nodes may join. `local`: the cluster of `gcore up`. `owner_key`: a
        caller who sends it may submit specs that name plug-in files; empty: no caller may."""
        self._store = store
        self._jobs = jobs
        self._run_root = run_root
        self._cache_dir = cache_dir
        self._clock = clock
        self._most_slots = most_slots
        self._local = local
        self._allowed = allowed
        self._owner_key = owner_key

    async def create(self, request_id: str, spec_json: str, anew: bool, owner: str = "", owner_key: str = "") -> str:
        """Create a job, or find the one that the request refers to; return its uid. `owner`: the caller. `owner_key`: the cluster's key as the
        caller sent it. Raises GcoreError."""
        try:
            tree = json.loads(spec_json)
        except (ValueError, RecursionError) as error:
            raise SpecError("the spec in the request is not JSON", fix="Submit it with `gcore submit`") from error
        if not isinstance(tree, dict):
            raise SpecError("the spec in the request is not an object", fix="Submit it with `gcore submit`")
        tree.setdefault("namespace", current_caller().home)
        if plugin_files(tree):
            self._check_owner(owner_key)
            tree = await asyncio.to_thread(copy_plugin_files, tree, self._cache_dir)
        self._allowed.check_flow(tree)
        spec = await asyncio.to_thread(new_spec, tree)
        if not may_see(spec.namespace):
            mine = ", ".join(sorted(current_caller().namespaces or ())) or "none"
            raise Forbidden(
                f"you have no access to namespace {spec.namespace!r}",
                where="namespace",
                fix=f"Use one of your namespaces in the spec: {mine}",
            )
        await asyncio.to_thread(self._allowed.check, spec)
        while True:
            if request_id and (known := await self._store.get(keys.request(request_id))) is not None:
                return await self._asked_before(known.value.decode(errors="replace"), request_id, spec)
            named = await self._store.get(keys.name(spec.name, spec.namespace))
            if named is not None and not anew:
                existing = await self._same_or_ended(named.value.decode(errors="replace"), spec)
                if existing is not None:
                    return existing
            run_root, checked = await self._checked(spec)
            if named is not None and anew:  # only after the checks: a refused spec must not end the old job
                await self.cancel(named.value.decode(errors="replace"), "replaced by a new job of the same name")
            uid = uuid.uuid4().hex[:12]
            run_dir = run_root / run_name(spec, uid)
            job = JobRecord(
                uid=uid,
                name=spec.name,
                spec=await asyncio.to_thread(copy_plugin_files, spec.model_dump(mode="json"), run_dir),
                run_dir=str(run_dir),
                created=self._clock.wall(),
                request_id=request_id,
                prompts=checked.prompts.prompts,
                data_digest=checked.prompts.digest,
                held_out_digest=checked.prompts.identity.held_out,
                picture_settings=checked.prompts.picture_settings,
                model_revision=checked.model.revision,
                remote_code=(*checked.model.remote_code, *judge_remote_code(checked.judges)),
                judge_revisions=judge_revisions(checked.judges),
                adapter_digests=await asyncio.to_thread(adapter_digests, spec.judges),
                attention_equals_at=checked.attention_equals_at,
                models=checked.models,
                namespace=spec.namespace,
                owner=owner,
            )
            claim = new_claim(spec, created=job.created, owner=owner)
            created = JobStatus(phase=JobPhase.PENDING, reason="created", changed=job.created)
            job_keys = JobKeys(uid)
            txn = transactions.create(job_keys, job, created, named.mod_revision if named else 0, claim)
            report = await TransactionExecutor(self._store, job_keys).run(txn)
            if report.outcome is TxnOutcome.WON:
                return uid
            if report.outcome is TxnOutcome.UNKNOWN and await self._store.get(job_keys.job) is not None:
                return uid
            if report.outcome is TxnOutcome.UNKNOWN:
                raise StoreUnavailable(
                    f"it is unknown whether the job was created ({report.why})",
                    fix="Submit it again with the same request id",
                )
            await asyncio.to_thread(shutil.rmtree, run_dir, ignore_errors=True)  # of no job: only copied files

    async def _checked(self, spec: JobSpec) -> tuple[Path, CheckedJob]:
        """Check the spec; return the folder of the runs and the checked job. Raises GcoreError."""
        nodes = (await self._jobs.cluster()).nodes
        check_engine(spec, nodes)
        check_backend(spec, nodes)
        check_blob_stores(spec, nodes)
        check_offload(spec, (slot for node in nodes for slot in node.slots))
        check_ranks(spec, self._most_slots())
        check_served_judges(spec, nodes)
        check_spans(spec, nodes)
        check_copies(spec, local=self._local)
        run_root = self._run_root if spec.storage.root is None else Path(spec.storage.root)
        checked = await asyncio.to_thread(check_submission, spec, run_root, self._cache_dir)
        check_blob_room(spec, nodes, checked.prompts.stream.sources, checked.model.folder)
        return run_root, checked

    def _check_owner(self, key: str) -> None:
        """Raises Forbidden unless the caller owns this local cluster."""
        if not self._owner_key:
            raise Forbidden(
                "this cluster runs no plug-in files: only a local cluster without users does",
                fix="Install the plug-in as a package on every node (docs/use/plugins.md) and name it",
            )
        if not hmac.compare_digest(key.encode(), self._owner_key.encode()):
            raise Forbidden(
                "only the owner of this local cluster may submit a spec that names plug-in files",
                fix="Submit it with the --home of the cluster, as the user who started it",
            )

    async def _asked_before(self, uid: str, request_id: str, spec: JobSpec) -> str:
        """Return `uid`, the job that an earlier request with the same ID created. Raises Conflict if its spec differs
        from this one."""
        job = (await self._jobs.mirror(uid)).job
        if job is not None and may_see(job.record.namespace) and (changes := changed_keys(job.record, spec)):
            changed = ", ".join(changes)
            raise Conflict(
                f"request id {request_id!r} was used for job {job.record.name!r}, whose spec differs ({changed})",
                where="request_id",
                fix="Use a new request id for each new job",
            )
        return uid

    async def _same_or_ended(self, uid: str, spec: JobSpec) -> str | None:
        """Return `uid`, the job that has this name, if the request refers to it: it has not ended, or has succeeded and
        continues with a higher goal. None if it is replaced by a new job. An unfinished job continues with other
        execution settings. Raises Conflict if its spec differs in others."""
        mirror = await self._jobs.mirror(uid)
        if mirror.job is None or mirror.status is None:
            return None
        if mirror.status.record.phase.ended:
            raised = raised_goal(mirror.job.record, spec)
            if mirror.status.record.phase is not JobPhase.SUCCEEDED or raised is None:
                return None
            await self._checked(spec)
            check_unchanged(mirror.job.record, await asyncio.to_thread(identify_data, spec, self._cache_dir))
            await extend_job(self._jobs, uid, raised, self._clock)
            return uid
        if changed_settings(mirror.job.record, spec) is not None:
            await self._checked(spec)
            check_unchanged(mirror.job.record, await asyncio.to_thread(identify_data, spec, self._cache_dir))
            if mirror.head is None:
                raise Conflict(
                    f"job {spec.name!r} has not started, and its spec differs",
                    fix="Use --new to start it with these settings: it has trained nothing",
                )
            await change_settings(self._jobs, uid, spec)
            return uid
        changes, only_goal = fixed_changes(mirror.job.record, spec)
        if changes:
            changed = ", ".join(changes)
            first = "Let it finish before you raise its goal. Or use" if only_goal else "Use"
            fix = f"{first} --new to end the old job and start a new one, or give the spec another name"
            if any(key.partition(".")[2].partition(".")[0] == "lora" for key in changes):
                fix += (
                    ". To continue the trained model with other adapters or with full training, export it (gcore export) and name "
                    "the new folder in model.path of a new job"
                )
            raise Conflict(f"job {spec.name!r} is not finished and its spec differs ({changed})", fix=fix)
        data = await asyncio.to_thread(identify_data, spec, self._cache_dir)
        check_unchanged(mirror.job.record, data)
        return uid

    async def cancel(self, uid: str, reason: str) -> JobStatus | None:
        """End a job if it has not ended; return its status. Raises StoreUnavailable, UnreadableRecord.

        Reads only the job's status, so that a job with another damaged record can be cancelled.
        """
        job_keys = JobKeys(uid)
        while True:
            known = await self._store.get(job_keys.state)
            if known is None:
                return None
            old = Versioned(JobStatus.decode(known.value, known.key), known.mod_revision)
            if old.record.phase.ended:
                return old.record
            status = JobStatus(phase=JobPhase.CANCELLED, reason=reason, changed=self._clock.wall())
            txn = transactions.set_status(job_keys, old, status, None)
            report = await TransactionExecutor(self._store, job_keys).run(txn)
            if report.outcome is TxnOutcome.UNKNOWN:
                raise StoreUnavailable(
                    f"it is unknown whether the job was cancelled ({report.why})", fix="Retry the request"
                )


def run_name(spec: JobSpec, uid: str) -> str:
    """The name of a new run's folder: the namespace (if it is not the default one), the job's name and its ID."""
    return keys.full_name(f"{spec.name}-{uid}", spec.namespace).replace("/", ".")


def copy_plugin_files(tree: Any, folder: Path) -> Any:
    """Copy the plug-in files that a spec names into `folder`, and return the spec with the paths of the copies. Raises
    SpecError, GcoreError."""

    def copy(file: PluginFile, where: str) -> str:
        data = read_plugin_file(file.path, where)
        target = copied_file(folder, data, file.path.name)
        if not target.exists():
            with explain_os_errors("cannot copy the plug-in file", where=target, fix="Make room, or make it writable"):
                target.parent.mkdir(parents=True, exist_ok=True)
                replace_file(target, data, mode=0o600)
        return f"{target}:{file.name}"

    return replace_plugin_files(tree, copy)
