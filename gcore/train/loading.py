"""Brings a rank to life: meets the others, loads the model, the checkpoint or the copies, stages the weights it starts from.

Rank 0 opens its store before the slow imports and the others look for it after them, so that nobody waits for somebody
else's import. Runs in the thread that will do all of torch's work: CUDA's current device belongs to a thread.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gcore.clock import Clock
from gcore.errors import GcoreError
from gcore.train.feed_state import PartWork, Work
from gcore.train.launch import RankLaunch
from gcore.train.report import StepResult
from gcore.train.writing import CheckpointWriter
from gcore.types import Version
from gcore.weights.layout import Manifest, has_critic, read_manifest, verify_checkpoint

if TYPE_CHECKING:
    from gcore.train.collective import Collective
    from gcore.train.models import Fill, Models


@dataclass(frozen=True, slots=True)
class Meet:
    """How a rank finds the others: `publish` where rank 0's store listens, or `find` it (blocks)."""

    publish: Callable[[str], None]
    find: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank that can train. `run` applies a step, `accumulate` adds a part of the next to its gradients, `rest` has exactly the
    named parts of its memory given back, `leave` says farewell to the others; all in the loading thread. `released`: which parts
    are, for any thread."""

    run: Callable[[Work, Callable[[str], None]], StepResult]
    leave: Callable[[], None]
    accumulate: Callable[[PartWork, Callable[[str], None]], None]
    rest: Callable[[Collection[str], Callable[[str], None]], None]
    released: Callable[[], frozenset[str]]


def load(launch: RankLaunch, meet: Meet, clock: Clock, tell: Callable[[str], None], writer: CheckpointWriter) -> Loaded:
    """Everything up to serving; `tell` hears of progress, `writer` writes the checkpoints. Raises GcoreError."""
    began = clock.monotonic()
    manifest = _manifest(launch)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import torch

    from gcore.train import collective as meeting_place

    tell("loading")
    torch.set_num_threads(launch.threads)
    torch.set_num_interop_threads(1)  # nothing here runs operators side by side
    meeting = meeting_place.Meeting(launch.rank, launch.world_size, launch.host)
    if launch.rank == 0:
        opened = meeting_place.open_store(meeting)
        meet.publish(opened.address)
        _import_the_rest(tell)
        store = opened.store
    else:
        _import_the_rest(tell)
        store = meeting_place.find_store(meet.find(), meeting)
    collective = meeting_place.Collective.join(meeting, store)
    tell("loading")

    from gcore.train.copied import Copies
    from gcore.train.copying import Copier
    from gcore.train.resting import Resting, RestingTrainer
    from gcore.train.saving import Progress, Saver, restore_critic, restore_optimizer
    from gcore.train.step import StepTrainer

    def loading() -> None:
        tell("loading")

    copies = None if launch.start.state is None else Copies(launch, launch.start.state, collective, loading)
    models = _models(launch, collective, tell, None if copies is None else copies.fill)
    progress = Progress(0, 0)
    folder = launch.checkpoint_path
    if copies is not None:
        copies.restore(models)
        progress = copies.progress
    if manifest is not None and folder is not None:
        restore_optimizer(models.policy, folder, manifest)
        if models.critic is not None:
            restore_critic(models.critic, folder, manifest)
        progress = Progress.of(manifest)
    saver = Saver(launch, models.policy, models.critic, writer)
    saver.stage(Version(launch.lineage, launch.start.step), loading, collective.max)
    loading()
    copier = Copier(launch, collective, models)
    if launch.resumes:
        copier.keep(launch.start.step, 0, progress, loading)
    trainer = StepTrainer(launch, collective, models, saver, clock, progress, copier, start_s=clock.monotonic() - began)
    resting = Resting(models, launch.spec.train, collective.device, clock)
    rested = RestingTrainer(resting, collective, trainer)
    return Loaded(rested.run, collective.leave, rested.accumulate, resting.rest, lambda: resting.released)


def _models(launch: RankLaunch, collective: Collective, tell: Callable[[str], None], fill: Fill | None) -> Models:
    """All that the spec asks for. One reading of the files serves them all at the first start."""
    import torch

    from gcore.train.memory import explained
    from gcore.train.models import load_models

    with explained("loading the model", launch.spec.train, ("zero_stage", "offload_reference")):
        models = load_models(launch, collective.device, collective.max, lambda: tell("loading"), fill)
    if collective.device.type == "cuda":
        torch.cuda.empty_cache()
    return models


def _manifest(launch: RankLaunch) -> Manifest | None:
    """The start checkpoint's. Rank 0 reads every byte of it once more; when it ends, so does the world."""
    folder = launch.checkpoint_path
    if folder is None:
        return None
    manifest = verify_checkpoint(folder) if launch.rank == 0 else read_manifest(folder)
    if manifest.step != launch.start.step or manifest.job_uid != launch.job_uid:
        raise GcoreError(
            f"the checkpoint is of step {manifest.step} of job {manifest.job_uid}, "
            f"not of step {launch.start.step} of job {launch.job_uid}",
            where=str(folder),
        )
    if launch.spec.train.critic is not None and not has_critic(manifest):
        raise GcoreError(
            "the checkpoint holds no critic, and this job trains one (train.advantage: gae)",
            where=str(folder),
            fix="Go on from a checkpoint of a job with a critic, or start from the model with a new one",
        )
    return manifest


def _import_the_rest(tell: Callable[[str], None]) -> None:
    from gcore.uncompiled import leave_compiler_out

    leave_compiler_out()
    import gcore.train.models  # DeepSpeed and transformers: seconds

    del gcore
    tell("loading")
