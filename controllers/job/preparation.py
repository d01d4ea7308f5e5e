"""Prepares a node for a job: checks the run's folder, fetches the models, and opens the data, which must be the same as
when the job was created.

An error ends the job with a sentence, except in the following cases, which are reported and retried. The data has
changed. The job has trained a step, so that its progress would be lost for a file that can be restored or a disk that
is mounted late. The store is unavailable or the lease has expired. The plan does not use this node, so that the job
runs without it.

The model is fetched before any part of the job starts here. A separate process (`python -m gcore.models`) downloads a hub model at the commit
with which the job was created, so that all nodes load the same weights. The process ends with this controller; downloaded files stay in
the hub's cache. For users, its progress is in the store under the controller's lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from controllers.changes import ChangeSignal
from controllers.flow.job_data import JobData, make_job_data
from controllers.identity import Identity
from controllers.storage.run_folder import StorageProof, has_own_folder
from controllers.workers.job_media import JobMedia
from gcore.config.reward import JudgeModel
from gcore.config.spec import JobSpec, ModelSpec
from gcore.data.dataset import DataChanged
from gcore.data.stream import DataIdentity, JobPrompts, identify_data, open_prompts
from gcore.errors import GcoreError, LeaseLost, StoreUnavailable
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import JobRecord, ModelFetch
from gcore.models.hubs import ModelError, hub_model
from gcore.models.resolve import ResolvedModel, resolve_model
from gcore.reward.judges.judge import Judge
from gcore.reward.pool import FunctionScorer
from gcore.store.keys import JobKeys
from gcore.store.types import Put, Store
from gcore.system.concurrency import limit_time
from gcore.system.process import GUARD

PUT_BACK = "Restore the data, or use --new to end the job and start a new one on the changed data"


def check_unchanged(job: JobRecord, data: DataIdentity) -> None:
    """Raise DataChanged if the data differs from the data with which the job was created.

    Otherwise its prompt refs would name other prompts, and its evaluations would not be comparable.
    """
    if data.prompts != job.prompts or (job.data_digest and data.digest != job.data_digest):
        same = data.prompts == job.prompts
        now = (
            f"still {job.prompts} prompts, with other content"
            if same
            else f"then {job.prompts} prompts, now {data.prompts}"
        )
        raise DataChanged(
            f"the data have changed since the job was created ({now})",
            where=data.where,
            fix=PUT_BACK,
        )
    if job.held_out_digest and data.held_out != job.held_out_digest:
        raise DataChanged(
            "the held-out prompts have changed since the job was created", where=data.where_held_out, fix=PUT_BACK
        )


def check_processor(job: JobRecord, prompts: JobPrompts, model_dir: Path) -> None:
    """Raise DataChanged if engines and ranks of this node would make other tensors of pictures than those of the node
    that created the job. `model_dir`: the model on this node."""
    if job.picture_settings and prompts.picture_settings != job.picture_settings:
        raise DataChanged(
            "the settings of the model's image processor differ from those with which the job was created",
            where=str(model_dir),
            fix="Copy preprocessor_config.json or processor_config.json from a node where the job runs",
        )


def spec_differences(old: dict[str, object], new: dict[str, object], prefix: str = "") -> list[str]:
    """List the fields of two specs that differ, as dotted keys. `prefix`: of the keys."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += spec_differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}")
    return found


STEPS = 20
"""Maximum number of progress updates that are written to the store."""

Progress = Callable[[int, int], None]


async def fetch_model(model: ModelSpec | JudgeModel, revision: str, progress: Progress) -> ResolvedModel:
    """Make a model available on this machine, by download if it is named by its hub ID. `progress`: called with the
    bytes done and the total. Raises ModelError. Cancelling ends the download."""
    if hub_model(model.path) is None:
        return await asyncio.to_thread(resolve_model, model.path, trust_remote_code=model.trust_remote_code)
    request = {"path": model.path, "revision": revision, "trust_remote_code": model.trust_remote_code}
    process = await asyncio.create_subprocess_exec(
        *(*GUARD, "tether", str(os.getpid())),
        *(sys.executable, "-P", "-m", "gcore.models", json.dumps(request)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    last: dict[str, Any] = {}
    try:
        while line := await process.stdout.readline():
            last = json.loads(line)
            if "total" in last:
                progress(int(last["done"]), int(last["total"]))
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if "folder" in last:
        return ResolvedModel(Path(last["folder"]), last["revision"], tuple(last["remote_code"]))
    if "error" in last:
        raise ModelError(last["error"], where=last["where"], fix=last["fix"])
    raise ModelError(
        f"the process that fetches the model ended with exit code {code} and no output",
        where=model.path,
        fix="See the controller's log",
    )


class FetchProgress:
    """Writes the progress of a model download to the store, at most `STEPS` times. Run `run` beside the download."""

    def __init__(self, store: Store, key: str, node: str, path: str, lease: int) -> None:
        self._store = store
        self._key = key
        self._node = node
        self._path = path
        self._lease = lease
        self._news = asyncio.Event()
        self._now = (0, 0)

    def note(self, done: int, total: int) -> None:
        """Set the current progress."""
        self._now = (done, total)
        self._news.set()

    async def run(self) -> None:
        """Write progress until cancelled. Writes nothing for a model that is already present."""
        written = -1
        while True:
            await self._news.wait()
            self._news.clear()
            done, total = self._now
            step = done * STEPS // max(total, 1)
            if step == written or (written < 0 and done >= total):
                continue
            record = ModelFetch(node=self._node, path=self._path, done=done, total=total)
            with contextlib.suppress(StoreUnavailable):  # progress is only informational
                await self._store.transact((), (Put(self._key, record.encode(), lease=self._lease),))
                written = step


log = logging.getLogger(__name__)
M = TypeVar("M", ModelSpec, JudgeModel)

DATA_AGAIN_S = 5.0
"""Seconds until this node tries again after an error that may go away (changed data, any error of a job that has
trained a step)."""

LATE_AGAIN_S = 30.0
"""Seconds until a node that the plan does not use tries again."""


@dataclass(frozen=True)
class Preparation:
    """Prepares one node for one job. `mirror`: returns the job's present records. `scorer`: the processes of its reward
    functions. `judges`: opens its judges, given a spec that names the models' folders on this node; blocks."""

    store: Store
    keys: JobKeys
    identity: Identity
    cache_dir: Path
    changes: ChangeSignal
    mirror: Callable[[], JobMirror]
    scorer: FunctionScorer
    report_missing: Callable[[str], None] = lambda reason: None
    """Called with the reason why the node cannot work on the job yet; with an empty one when it can."""
    judges: Callable[[JobSpec], Mapping[str, Judge]] = lambda spec: {}
    media: JobMedia | None = None
    """The pictures of the job's prompts; None: they have none."""

    async def prepare(self, spec: JobSpec, job: JobRecord) -> JobData | None:
        """Prepare the node, and retry while an error may go away. Return the job's data, whose spec names the models'
        folders on this node; None if the job has ended meanwhile.

        Raises GcoreError if the error should end the job.
        """
        said = ""
        while not self._ended():
            try:
                data = await self._prepared(spec, job)
            except GcoreError as error:
                waits = isinstance(error, DataChanged | StoreUnavailable | LeaseLost) or self._has_progress()
                if self._is_counted_on() and not waits:
                    raise
                if str(error) != said:
                    said = str(error)
                    log.warning("job %s cannot run on %s: %s", job.uid, self.identity.node, said)
                self.report_missing(said)
                await self._pause(DATA_AGAIN_S if waits else LATE_AGAIN_S)
            else:
                self.report_missing("")
                return data
        return None

    async def _prepared(self, spec: JobSpec, job: JobRecord) -> JobData | None:
        """Try to prepare the node once. Return the job's data; None if the job has ended meanwhile. Raises
        GcoreError."""
        warming = asyncio.create_task(self.scorer.warm(), name=f"rewards {job.uid}")
        try:
            await StorageProof(
                self.store, self.keys, self.identity, Path(job.run_dir), self._pause, has_own_folder(job)
            ).run()
            here = await self._with_models(spec, job)
            data = None if here is None else await asyncio.to_thread(self._open, here, job)
            if data is not None:
                await warming
            return data
        finally:
            warming.cancel()
            await asyncio.wait({warming})

    async def _with_models(self, spec: JobSpec, job: JobRecord) -> JobSpec | None:
        """Fetch the policy's and all judges' models. Return the spec with their folders on this node; None if the job
        has ended meanwhile. Raises ModelError."""
        model = await self._fetched(spec.model, job.model_revision)
        judges = []
        for judge in spec.judges:
            if judge.model is None:
                judges.append(judge)
                continue
            served = await self._fetched(judge.model, job.judge_revisions.get(judge.name, ""))
            if served is not None:
                judges.append(judge.model_copy(update={"model": served}))
        if model is None or len(judges) < len(spec.judges):
            return None
        return spec.model_copy(update={"model": model, "judges": tuple(judges)})

    async def _fetched(self, model: M, revision: str) -> M | None:
        """Fetch one model, and report the progress in the store. Return its section of the spec with its folder on this
        node; None if the job has ended meanwhile. Raises ModelError."""
        node = self.identity.node
        report = FetchProgress(self.store, self.keys.fetch(node), node, model.path, lease=self.identity.lease)
        reporting = asyncio.create_task(report.run(), name=f"model {model.path}")
        fetching = asyncio.create_task(fetch_model(model, revision, report.note), name=f"fetch {model.path}")
        ended = asyncio.create_task(self.changes.until(self._ended))
        try:
            await asyncio.wait({fetching, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                return None
            return model.model_copy(update={"path": str(fetching.result().folder)})
        finally:
            for task in (fetching, reporting, ended):
                task.cancel()
            await asyncio.wait({fetching})

    def _open(self, spec: JobSpec, job: JobRecord) -> JobData:
        check_unchanged(job, identify_data(spec, self.cache_dir))
        model_dir = Path(spec.model.path)
        prompts = open_prompts(spec, self.cache_dir, model_dir)
        check_processor(job, prompts, model_dir)
        return make_job_data(spec, job.uid, prompts, self.scorer, self.judges(spec), self.media)

    def _is_counted_on(self) -> bool:
        """Whether the job needs this node: the job has no plan yet, or the plan includes the node."""
        plan = self.mirror().plan
        return plan is None or self.identity.node in plan.record.nodes

    def _has_progress(self) -> bool:
        """Whether the job has a committed step, which would be lost if the job ended."""
        head = self.mirror().head
        return head is not None and head.record.step > 0

    def _ended(self) -> bool:
        return self.mirror().has_ended

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with limit_time(seconds):
                await self.changes.until(self._ended)
