"""What a node must have before it works on a job: the folder that all its nodes see, the model, and the data as they were when
the job was created.

What is wrong ends the job, with a sentence: nothing could be made here. With exceptions. Data that have changed are looked at
again and again, and so is whatever is wrong once the job has trained a step: its progress would be lost for a file that can
be put back, or for a disk that is mounted later than the daemon is started. A store that does not answer, and a lease that
has ended (and with it, soon, this life of the controller), say nothing of the job. And a node that the plan does not name,
because it came later, only stays away, and tries again: the others get on without it. Whatever is waited for so is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from controllers.changes import Changes
from controllers.fetching import FetchReport, fetch_model
from controllers.identity import Identity
from controllers.material import Material, material_of
from controllers.service.submission import check_unchanged
from controllers.storage import StorageProof, is_apart
from gcore.config import JobSpec
from gcore.config.judges import JudgeModel
from gcore.config.spec import ModelSpec
from gcore.errors import GcoreError, LeaseLost, StoreUnavailable
from gcore.ledger.job import JobRecord
from gcore.ledger.mirror import JobMirror
from gcore.prompts.dataset import DataChanged
from gcore.prompts.opening import identify_data, open_prompts
from gcore.reward.generative.judge import Judge
from gcore.reward.scoring import Scorer
from gcore.store.keys import JobKeys
from gcore.store.types import Store

log = logging.getLogger(__name__)
M = TypeVar("M", ModelSpec, JudgeModel)

DATA_AGAIN_S = 5.0
"""Until data that were changed, or what a job with progress lacks, are looked at again."""
LATE_AGAIN_S = 30.0
"""Until a node that came later tries again."""


@dataclass(frozen=True)
class Preparation:
    """One job on one node. `mirror`: the job's records as they are when it is called. `scorer`: its rewards; `judges`: opens its
    judges, of a spec that names their models' folders on this node. Blocks."""

    store: Store
    keys: JobKeys
    identity: Identity
    cache_dir: Path
    changes: Changes
    mirror: Callable[[], JobMirror]
    scorer: Scorer
    lacks: Callable[[str], None] = lambda reason: None
    """Told why the node cannot work on the job yet; nothing when it can."""
    judges: Callable[[JobSpec], Mapping[str, Judge]] = lambda spec: {}

    async def material(self, spec: JobSpec, job: JobRecord) -> Material | None:
        """What the job is made of, its spec naming the model's folder on this node; None if the job ended before.

        Raises GcoreError.
        """
        said = ""
        while not self._ended():
            try:
                material = await self._prepared(spec, job)
            except GcoreError as error:
                waits = isinstance(error, DataChanged | StoreUnavailable | LeaseLost) or self._has_progress()
                if self._is_counted_on() and not waits:
                    raise
                if str(error) != said:
                    said = str(error)
                    log.warning("job %s is not worked on by %s: %s", job.uid, self.identity.node, said)
                self.lacks(said)
                await self._pause(DATA_AGAIN_S if waits else LATE_AGAIN_S)
            else:
                self.lacks("")
                return material
        return None

    async def _prepared(self, spec: JobSpec, job: JobRecord) -> Material | None:
        """The material, with the rewards loaded meanwhile; None if the job ended before. Raises GcoreError."""
        warming = asyncio.create_task(self.scorer.warm(), name=f"rewards {job.uid}")
        try:
            await StorageProof(
                self.store, self.keys, self.identity, Path(job.run_dir), self._pause, is_apart(job)
            ).run()
            here = await self._with_models(spec, job)
            material = None if here is None else await asyncio.to_thread(self._open, here, job)
            if material is not None:
                await warming
            return material
        finally:
            warming.cancel()
            await asyncio.wait({warming})

    async def _with_models(self, spec: JobSpec, job: JobRecord) -> JobSpec | None:
        """The spec, naming the models' folders on this node; None if the job ended before. Raises ModelError."""
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
        """The model's section, naming its folder on this node; None if the job ended before. Raises ModelError."""
        node = self.identity.node
        report = FetchReport(self.store, self.keys.fetch(node), node, model.path, lease=self.identity.lease)
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

    def _open(self, spec: JobSpec, job: JobRecord) -> Material:
        check_unchanged(job, identify_data(spec, self.cache_dir))
        prompts = open_prompts(spec, self.cache_dir, Path(spec.model.path))
        return material_of(spec, job.uid, prompts, self.scorer, self.judges(spec))

    def _is_counted_on(self) -> bool:
        """Whether the job waits for this node: before it has a plan for all, then if the plan names it."""
        plan = self.mirror().plan
        return plan is None or self.identity.node in plan.record.nodes

    def _has_progress(self) -> bool:
        """Whether a step of the job stands, which its end would throw away."""
        head = self.mirror().head
        return head is not None and head.record.step > 0

    def _ended(self) -> bool:
        status = self.mirror().status
        return status is not None and status.record.phase.ended

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.changes.until(self._ended)
