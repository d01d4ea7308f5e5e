"""What others know of a train rank: its launch document, its report, and its rules for offloading memory.

In this order: the launch document (`RankLaunch`); a step's result and the seconds of its phases (`StepResult`,
`PhaseStopwatch`, `PhaseMeter`); the rules by which a rank refuses to release or restore its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from gcore.api.tls import ServingTls
from gcore.config.spec import JobSpec
from gcore.errors import GcoreError
from gcore.ledger.records.chain import WorldState
from gcore.rollout.api import WeightUpdate
from gcore.schema import RecordPart
from gcore.system.clock import Clock
from gcore.train.rank.feed import FeedState, RankRefusal


class WorldStart(RecordPart):
    """Where a world (the training processes of a job) starts: the last finished step, and where to load the state after
    it.

    If `state` is set: from in-memory replicas of it on the world's nodes. Else from `checkpoint`, relative to the run
    folder. If that is empty too: from the job's initial model.
    """

    step: NonNegativeInt
    checkpoint: str = ""
    state: WorldState | None = None


class RankBlobs(RecordPart):
    """Where a rank gets blobs. `store`: base URL of the blob store of its node. `key`: of the job. `folder`: for the
    blobs of this world and rank, named by SHA-256; only this rank deletes there.
    """

    store: str
    key: str = Field(repr=False)
    folder: str


class RankLaunch(RecordPart):
    """The launch document of a rank, the first line on its control line.

    `host`: the address at which the rank serves and meets the other ranks.
    """

    kind: Literal["rank"]
    job_uid: str
    world: str
    lineage: NonNegativeInt
    rank: NonNegativeInt
    world_size: PositiveInt
    spec: JobSpec
    run_dir: str
    start: WorldStart
    host: str = "127.0.0.1"
    tls: ServingTls | None = None
    """If set, the rank serves with mutual TLS, and only nodes of the cluster may call it."""
    threads: PositiveInt = 1
    nodes: tuple[str, ...] = ()
    """The node on which each rank runs, by rank."""
    memory_dir: str = ""
    """Folder on this node's in-memory file system for replicas of the job's state (`gcore.models.replicas`).

    Empty: no replicas are made.
    """
    blobs: RankBlobs | None = None
    """Where the rank gets the blobs of samples (pictures and other arrays); None: the job has none."""

    @model_validator(mode="after")
    def _check_world(self) -> RankLaunch:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} does not exist in a world of {self.world_size} ranks")
        if self.world_size % self.spec.train.sequence_parallel:
            raise ValueError(
                f"a world of {self.world_size} ranks does not consist of whole sequence groups "
                f"(train.sequence_parallel: {self.spec.train.sequence_parallel})"
            )
        if self.memory_dir and len(self.nodes) != self.world_size:
            raise ValueError(f"{len(self.nodes)} nodes are given for {self.world_size} ranks")
        return self

    @property
    def resumes(self) -> bool:
        """Whether the world starts from a trained state (checkpoint or replicas) instead of the initial model."""
        return bool(self.start.checkpoint) or self.start.state is not None

    @property
    def run_path(self) -> Path:
        """The run folder: checkpoints, receipts, metrics and samples of the job."""
        return Path(self.run_dir)

    @property
    def model_path(self) -> Path:
        """The folder of the job's initial model: the reference, and the source of config and tokenizer. For a pipeline that
        generates pictures: the folder of its network, which is what is trained."""
        folder = Path(self.spec.model.path)
        if self.spec.rollout.diffusion is None:
            return folder
        from gcore.models.diffusion.files import network_folder  # daemons import this module, and read no models

        return network_folder(folder)

    @property
    def critic_path(self) -> Path:
        """The folder of the critic's initial model, and the source of its config and tokenizer; by default the
        policy's.
        """
        critic = self.spec.train.critic
        return self.model_path if critic is None or critic.path is None else Path(critic.path)

    @property
    def checkpoint_path(self) -> Path | None:
        """The folder of the checkpoint from which the world starts; None if it starts from replicas or from the initial
        model.
        """
        return self.run_path / self.start.checkpoint if self.start.checkpoint else None

    def total_updates(self, planned_steps: int | None = None) -> int:
        """The policy's number of optimizer updates in the whole job, for the learning-rate schedule.

        `planned_steps`: the estimated number of steps from the seal, used if the spec limits epochs instead of steps;
        the estimate improves from step to step. Raises ValueError if neither is known.
        """
        train = self.spec.train
        warmup = 0 if train.critic is None else train.critic.warmup_steps
        return max(1, self._steps(planned_steps) - warmup) * train.epochs * train.mini_batches

    def critic_updates(self, planned_steps: int | None = None) -> int:
        """The critic's number of optimizer updates in the whole job; unlike the policy it is also trained in warm-up
        steps.
        """
        return self._steps(planned_steps) * self.spec.train.epochs * self.spec.train.mini_batches

    def _steps(self, planned: int | None) -> int:
        steps = self.spec.flow.steps or planned
        if steps is None:
            raise ValueError("the job counts epochs, but the seal has no planned_steps")
        return steps


@dataclass(frozen=True, slots=True)
class StepResult:
    """The report of a trained step, the same on every rank. `weights`: where or how engines get the new weights."""

    metrics: Mapping[str, float]
    weights: WeightUpdate


class PhaseStopwatch:
    """Measures how many seconds each phase of a step takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's duration to phase `name`."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock.monotonic() - began


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """Seconds by phase from the rank's start until `at` (monotonic seconds)."""

    at: float
    seconds: Mapping[str, float]


class PhaseMeter:
    """Sums up a rank's time by phase: every second belongs to the last reported phase. The caller passes the time.

    Sums only grow, so the difference of two readings gives the time between them, including short phases. One thread
    writes, any may read: the shared state is replaced, never changed.
    """

    def __init__(self, phase: str, now: float) -> None:
        self._state: tuple[str, PhaseTotals] = phase, PhaseTotals(now, {})

    def tell(self, phase: str, now: float) -> None:
        """Record that `phase` begins at `now`; nothing changes if it already runs."""
        if phase != self._state[0]:
            self._state = phase, self.read(now)

    def read(self, now: float) -> PhaseTotals:
        """The seconds by phase until `now`."""
        phase, totals = self._state
        passed = max(now - totals.at, 0.0)
        return PhaseTotals(totals.at + passed, {**totals.seconds, phase: totals.seconds.get(phase, 0.0) + passed})


OPTIMIZER, WEIGHTS = "optimizer", "weights"

PARTS = frozenset({OPTIMIZER, WEIGHTS})
"""The parts of a rank's memory that can be released separately (`gcore.train.offload`)."""


class CannotOffload(GcoreError):
    """There is no room to offload the rank's memory; the rank continues with its memory unchanged."""


def unknown_parts(what: Collection[str]) -> str:
    """The error message if `what` contains a memory part that ranks do not have; empty if all are known."""
    strange = sorted(set(what) - PARTS)
    return f"a rank has no part {strange[0]!r}; it releases {' and '.join(sorted(PARTS))}" if strange else ""


def refuse_release(state: FeedState, step: int) -> RankRefusal | None:
    """Why a rank may not release its memory now; None if it may. `step`: the step that the caller takes for the last
    applied.

    Only between two steps: not from Apply to its end, and not after parts of a streamed step were begun, because their
    gradients are in memory. A caller that names another step is refused, because its request was meant for an earlier
    or later pause.
    """
    if state.applying is not None:
        return RankRefusal(f"token {state.applying} is being applied, which needs all of the rank's memory")
    if state.begun:
        return RankRefusal(f"parts of step {state.done + 1} were begun, so their gradients stay in memory")
    if step != state.done:
        return RankRefusal(f"the last applied step is {state.done}, not {step}")
    return None


def refuse_restore(state: FeedState) -> RankRefusal | None:
    """Why a rank may not restore its memory on request now; None if it may."""
    if state.applying is not None:
        return RankRefusal(f"token {state.applying} is being applied, which restores the rank's memory itself")
    return None
