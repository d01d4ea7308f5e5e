"""Creating and cancelling jobs.

A spec started again: interrupted → the same job goes on; finished → a new job; changed under the same name while the
old one has not ended → refused, naming `--new`, which ends the old one and starts afresh. Whatever can be known to be
wrong is refused here, before anything is written.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from controllers.material import rewards_of
from controllers.ordering import check_curriculum
from controllers.service.capability import check_engine
from controllers.service.capability import check_engine
from controllers.service.records import StoredJobs
from gcore.clock import Clock
from gcore.config import JobSpec, parse_spec
from gcore.config.sources import eval_sources, training_sources
from gcore.errors import GcoreError, SpecError, StoreUnavailable
from gcore.flows import find_flow
from gcore.ledger import transactions
from gcore.ledger.cost import attention_equals_at
from gcore.ledger.job import JobPhase, JobRecord, JobStatus
from gcore.ledger.transactions import Ledger, TxnOutcome
from gcore.models.resolve import ResolvedModel, resolve_model
from gcore.prompts.dataset import DataChanged
from gcore.prompts.lengths import check_lengths
from gcore.prompts.opening import DataIdentity, identify_data, open_prompts
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Store

MAX_SEAL_BYTES = 1 << 20
"""A sealed step's record must stay well under the store's 1.5 MiB a request."""
GROUP_BYTES, SAMPLE_BYTES = 260, 11
"""What a group, beside its source's name, and a sample take in a seal, generously."""
MIN_FREE_BYTES = 64 << 20
LENGTH_SAMPLE = 10_000
"""Prompts whose length is looked at before a job starts; `gcore validate` looks at all. A longer one fails alone."""


class NotFound(GcoreError):
    """No job of that name or uid."""


class Conflict(GcoreError):
    """The request does not fit what stands in the store."""


class Submissions:
    """Writes jobs; each write is one guarded transaction."""

    def __init__(self, store: Store, jobs: StoredJobs, run_root: Path, cache_dir: Path, clock: Clock) -> None:
        self._store = store
        self._jobs = jobs
        self._run_root = run_root
        self._cache_dir = cache_dir
        self._clock = clock

    async def create(self, request_id: str, spec_json: str, anew: bool) -> str:
        """The uid of the new job, or of the one that the request means. Raises GcoreError."""
        try:
            tree = json.loads(spec_json)
        except (ValueError, RecursionError) as error:
            raise SpecError("the spec in the request is not JSON", fix="Submit it with `gcore submit`") from error
        if not isinstance(tree, dict):
            raise SpecError("the spec in the request is not an object", fix="Submit it with `gcore submit`")
        spec = parse_spec(tree)
        while True:
            if request_id and (known := await self._store.get(keys.request(request_id))) is not None:
                return known.value.decode()
            named = await self._store.get(keys.name(spec.name))
            if named is not None:
                existing = await self._same_or_ended(named.value.decode(), spec, anew)
                if existing is not None:
                    return existing
            check_engine(spec, (await self._jobs.cluster()).nodes)
            check_engine(spec, (await self._jobs.cluster()).nodes)
            data = await asyncio.to_thread(check_submission, spec, self._run_root, self._cache_dir)
            uid = uuid.uuid4().hex[:12]
            job = JobRecord(
                uid=uid,
                name=spec.name,
                spec=spec.model_dump(mode="json"),
                run_dir=str(self._run_root / f"{spec.name}-{uid}"),
                created=self._clock.wall(),
                request_id=request_id,
                prompts=data.prompts,
                data_digest=data.digest,
                model_revision=data.model.revision,
                remote_code=data.model.remote_code,
                attention_equals_at=data.attention_equals_at,
            )
            created = JobStatus(phase=JobPhase.PENDING, reason="created", changed=job.created)
            job_keys = JobKeys(uid)
            txn = transactions.create(job_keys, job, created, named.mod_revision if named else 0)
            report = await Ledger(self._store, job_keys).run(txn)
            if report.outcome is TxnOutcome.WON:
                return uid
            if report.outcome is TxnOutcome.UNKNOWN and await self._store.get(job_keys.job) is not None:
                return uid
            if report.outcome is TxnOutcome.UNKNOWN:
                raise StoreUnavailable(
                    "whether the job was created is not known", fix="Submit it again, with the same request id"
                )

    async def _same_or_ended(self, uid: str, spec: JobSpec, anew: bool) -> str | None:
        """The job that goes on under this name; None if a new one may be made."""
        mirror = await self._jobs.mirror(uid)
        if mirror.job is None or mirror.status is None or mirror.status.record.phase.ended:
            return None
        if anew:
            await self.cancel(uid, "replaced by a new job of the same name")
            return None
        if parse_spec(mirror.job.record.spec) != spec:
            changed = ", ".join(_differences(mirror.job.record.spec, spec.model_dump(mode="json")))
            raise Conflict(
                f"job {spec.name!r} is not finished and its spec differs ({changed})",
                fix="Start it with --new to end the old one and begin afresh, or give the spec another name",
            )
        data = await asyncio.to_thread(identify_data, spec, self._cache_dir)
        check_unchanged(mirror.job.record, data)
        return uid

    async def cancel(self, uid: str, reason: str) -> None:
        """End a job, if it has not ended. Raises StoreUnavailable."""
        while True:
            mirror = await self._jobs.mirror(uid)
            if mirror.status is None or mirror.status.record.phase.ended:
                return
            status = JobStatus(phase=JobPhase.CANCELLED, reason=reason, changed=self._clock.wall())
            txn = transactions.set_status(mirror.keys, mirror.status, status, None)
            report = await Ledger(self._store, mirror.keys).run(txn)
            if report.outcome is TxnOutcome.UNKNOWN:
                raise StoreUnavailable("whether the job was cancelled is not known", fix="Ask again")


@dataclass(frozen=True, slots=True)
class CheckedData:
    """The training data as they are when a job is created: entries, and what names their content.

    `attention_equals_at`: how the model weighs long samples (`gcore.ledger.cost`).
    """

    prompts: int
    digest: str
    attention_equals_at: int
    model: ResolvedModel
    """As it is on the hub now, with its small files here; the weights are fetched when the job runs."""


def check_unchanged(job: JobRecord, data: DataIdentity) -> None:
    """Raises DataChanged if the data are not those that the job was created with: its prompt refs would mean others."""
    if data.prompts != job.prompts or (job.data_digest and data.digest != job.data_digest):
        raise DataChanged(
            f"the data have changed since the job was created (then {job.prompts} prompts, now {data.prompts})",
            where=data.where,
            fix="Put them back as they were, or start it with --new to end the job and begin afresh on these",
        )


def check_submission(spec: JobSpec, run_root: Path, cache_dir: Path) -> CheckedData:
    """Everything about a spec that needs its files. Raises GcoreError."""
    find_flow(spec.flow.name)
    rewards_of((*training_sources(spec), *eval_sources(spec)))
    model = resolve_model(spec.model.path, trust_remote_code=spec.model.trust_remote_code, weights=False)
    prompts = open_prompts(spec, cache_dir, model.folder)
    for source in (*prompts.stream.sources, *(held_out.opened for held_out in prompts.evaluation)):
        check_lengths(source, sample=LENGTH_SAMPLE)
    check_curriculum(spec, prompts.stream, LENGTH_SAMPLE)
    group = GROUP_BYTES + max(len(source.name) for source in prompts.stream.sources)
    seal = spec.flow.groups_per_step * (group + SAMPLE_BYTES * spec.flow.samples_per_prompt)
    if seal > MAX_SEAL_BYTES:
        raise SpecError(
            f"a step of {spec.flow.groups_per_step} groups of {spec.flow.samples_per_prompt} takes about {seal >> 10} KiB "
            f"in the store, more than {MAX_SEAL_BYTES >> 10}",
            where="flow.groups_per_step",
            fix="Lower it",
        )
    if spec.flow.groups_per_step > spec.data.shards * spec.data.window:
        raise SpecError(
            f"a step takes {spec.flow.groups_per_step} groups, the shards' windows hold "
            f"{spec.data.shards * spec.data.window}",
            where="data.window",
            fix="Raise data.window or data.shards",
        )
    try:
        run_root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(run_root).free
    except OSError as error:
        raise GcoreError(
            f"runs cannot be kept there ({error.strerror})", where=str(run_root), fix="Choose another --home"
        ) from error
    if free < MIN_FREE_BYTES:
        raise GcoreError(f"only {free >> 20} MiB are free on the disk", where=str(run_root), fix="Make room")
    config = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))
    return CheckedData(prompts.prompts, prompts.digest, attention_equals_at(config), model)


def _differences(old: dict[str, object], new: dict[str, object], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}")
    return found
