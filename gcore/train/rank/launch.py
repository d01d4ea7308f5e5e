"""A train rank as its starter and its callers know it.

In this order: the launch document (`RankLaunch`); a step's result and the seconds of its phases (`StepResult`,
`PhaseStopwatch`, `PhaseMeter`); the rules by which a rank refuses to release or restore its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from gcore.api.tls import ServingTls
from gcore.config.spec import JobSpec
from gcore.errors import GcoreError
from gcore.ledger.records.chain import WorldState
from gcore.rollout.api import WeightUpdate
from gcore.schema import RecordPart
from gcore.system.clock import Clock
from gcore.train.rank.feed import FeedState, RankRefusal


class WorldStart(RecordPart):
    """What the world goes on from: the step it has done, and where the state of it is.

    Copies of `state` in the memory of the world's nodes; else a checkpoint; else (empty) the job's model as it was.
    """

    step: NonNegativeInt
    checkpoint: str = ""
    state: WorldState | None = None


class RankLaunch(RecordPart):
    """First line on the control line. `host`: the address to serve at, and to meet the other ranks from."""

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
    """With it the rank serves over mutual TLS, to nodes of the cluster alone."""
    threads: PositiveInt = 1
    nodes: tuple[str, ...] = ()
    """The node of each rank, by rank."""
    memory_dir: str = ""
    """Where copies of this job's state lie in the memory of this rank's node (`gcore.models.replicas`); empty: none are made."""

    @model_validator(mode="after")
    def _rank_is_in_the_world(self) -> RankLaunch:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} in a world of {self.world_size}")
        if self.memory_dir and len(self.nodes) != self.world_size:
            raise ValueError(f"{len(self.nodes)} nodes are named for {self.world_size} ranks")
        return self

    @property
    def resumes(self) -> bool:
        """Whether the world goes on from something that was trained."""
        return bool(self.start.checkpoint) or self.start.state is not None

    @property
    def run_path(self) -> Path:
        """The run's folder."""
        return Path(self.run_dir)

    @property
    def model_path(self) -> Path:
        """The job's model as it was: the reference, and where config and tokenizer come from."""
        return Path(self.spec.model.path)

    @property
    def critic_path(self) -> Path:
        """What the critic started from: where its config and tokenizer come from."""
        critic = self.spec.train.critic
        return self.model_path if critic is None or critic.path is None else Path(critic.path)

    @property
    def checkpoint_path(self) -> Path | None:
        """The checkpoint to go on from; None: the job's model."""
        return self.run_path / self.start.checkpoint if self.start.checkpoint else None

    def total_updates(self, planned_steps: int | None = None) -> int:
        """The policy's optimizer updates in the whole job, which the learning rate's schedule runs over.

        `planned_steps`: the seal's, for a job that goes by epochs; it comes closer from step to step.
        """
        train = self.spec.train
        warmup = 0 if train.critic is None else train.critic.warmup_steps
        return max(1, self._steps(planned_steps) - warmup) * train.epochs * train.mini_batches

    def critic_updates(self, planned_steps: int | None = None) -> int:
        """The critic's, which is trained in every step."""
        return self._steps(planned_steps) * self.spec.train.epochs * self.spec.train.mini_batches

    def _steps(self, planned: int | None) -> int:
        steps = self.spec.flow.steps or planned
        if steps is None:
            raise ValueError("a job that goes by epochs has its number of steps in each seal, and this one has none")
        return steps


@dataclass(frozen=True, slots=True)
class StepResult:
    """The report of an applied step, the same on every rank. `weights`: how engines get what it came to."""

    metrics: Mapping[str, float]
    weights: WeightUpdate


class PhaseStopwatch:
    """Seconds by phase."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the block's time on `name`."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock.monotonic() - began


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """Until `at`, monotonic seconds: seconds by phase since the rank began."""

    at: float
    seconds: Mapping[str, float]


class PhaseMeter:
    """A rank's time, summed up by phase: every second is of the phase that was told last. The caller says what time it is.

    Sums only grow, so two readings tell all that was between, also of phases that came and went meanwhile. One thread tells,
    any may read: what they share is replaced, never changed.
    """

    def __init__(self, phase: str, now: float) -> None:
        self._state: tuple[str, PhaseTotals] = phase, PhaseTotals(now, {})

    def tell(self, phase: str, now: float) -> None:
        """It is in this phase from now on."""
        if phase != self._state[0]:
            self._state = phase, self.read(now)

    def read(self, now: float) -> PhaseTotals:
        """Everything until now."""
        phase, told = self._state
        passed = max(now - told.at, 0.0)
        return PhaseTotals(told.at + passed, {**told.seconds, phase: told.seconds.get(phase, 0.0) + passed})


OPTIMIZER, WEIGHTS = "optimizer", "weights"

PARTS = frozenset({OPTIMIZER, WEIGHTS})
"""All that a rank can release."""


class CannotOffload(GcoreError):
    """There is no room to put aside what a rank holds; it is as it was."""


def unknown_parts(what: Collection[str]) -> str:
    """What of `what` no rank has, in one sentence; empty if there is nothing."""
    strange = sorted(set(what) - PARTS)
    return f"a rank has no part {strange[0]!r}; it releases {' and '.join(sorted(PARTS))}" if strange else ""


def refuse_release(state: FeedState, step: int) -> RankRefusal | None:
    """Why a rank may not release its memory now, by a caller who knows `step` as the last that is done; None: it may.

    Only between two steps: not from Apply to its end, and not once parts of a streamed step were begun, whose
    gradients are there already. A caller that names another step than the last that is done is late, or early, and is
    refused: a rank must not release memory by a request that was meant for the pause before the step that comes.
    """
    if state.applying is not None:
        return RankRefusal(f"token {state.applying} is being applied, which needs all of the rank's memory")
    if state.begun:
        return RankRefusal(f"parts of step {state.done + 1} were begun, and their gradients stay in memory")
    if step != state.done:
        return RankRefusal(f"step {state.done} is the last that is done here, not {step}")
    return None


def refuse_restore(state: FeedState) -> RankRefusal | None:
    """Why there is nothing to restore by hand now."""
    if state.applying is not None:
        return RankRefusal(f"token {state.applying} is being applied, which takes the rank's memory by itself")
    return None
