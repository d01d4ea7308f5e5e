"""A train rank from outside: its launch document, report and memory rules.

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
    """Starting point of a world: the last finished step, and the source of its state.

    In-memory replicas of `state` on the world's nodes; else a checkpoint; else (empty) the job's initial model.
    """

    step: NonNegativeInt
    checkpoint: str = ""
    state: WorldState | None = None


class RankLaunch(RecordPart):
    """First line on the control line. `host`: the address on which it serves and meets the other ranks."""

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
    """If set, the rank serves with mutual TLS, to nodes of the cluster only."""
    threads: PositiveInt = 1
    nodes: tuple[str, ...] = ()
    """Node of each rank, by rank."""
    memory_dir: str = ""
    """Folder in this node's memory for replicas of this job's state (`gcore.models.replicas`); empty: no replicas are
    made.
    """

    @model_validator(mode="after")
    def _rank_is_in_the_world(self) -> RankLaunch:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} does not exist in a world of {self.world_size} ranks")
        if self.memory_dir and len(self.nodes) != self.world_size:
            raise ValueError(f"{len(self.nodes)} nodes are given for {self.world_size} ranks")
        return self

    @property
    def resumes(self) -> bool:
        """Whether the world continues from a trained state."""
        return bool(self.start.checkpoint) or self.start.state is not None

    @property
    def run_path(self) -> Path:
        """The run folder."""
        return Path(self.run_dir)

    @property
    def model_path(self) -> Path:
        """The job's initial model: the reference, and the source of config and tokenizer."""
        return Path(self.spec.model.path)

    @property
    def critic_path(self) -> Path:
        """The critic's initial model, the source of its config and tokenizer."""
        critic = self.spec.train.critic
        return self.model_path if critic is None or critic.path is None else Path(critic.path)

    @property
    def checkpoint_path(self) -> Path | None:
        """The checkpoint to continue from; None: the job's initial model."""
        return self.run_path / self.start.checkpoint if self.start.checkpoint else None

    def total_updates(self, planned_steps: int | None = None) -> int:
        """The policy's number of optimizer updates in the whole job, for the learning-rate schedule.

        `planned_steps`: from the seal, for a job that counts epochs; the estimate improves from step to step.
        """
        train = self.spec.train
        warmup = 0 if train.critic is None else train.critic.warmup_steps
        return max(1, self._steps(planned_steps) - warmup) * train.epochs * train.mini_batches

    def critic_updates(self, planned_steps: int | None = None) -> int:
        """The critic's number of updates; it is trained in every step."""
        return self._steps(planned_steps) * self.spec.train.epochs * self.spec.train.mini_batches

    def _steps(self, planned: int | None) -> int:
        steps = self.spec.flow.steps or planned
        if steps is None:
            raise ValueError("the job counts epochs, but the seal has no planned_steps")
        return steps


@dataclass(frozen=True, slots=True)
class StepResult:
    """Report of an applied step, the same on every rank. `weights`: how engines get the new weights."""

    metrics: Mapping[str, float]
    weights: WeightUpdate


class PhaseStopwatch:
    """Seconds by phase."""

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
    """Seconds by phase since the rank started, until `at` (monotonic seconds)."""

    at: float
    seconds: Mapping[str, float]


class PhaseMeter:
    """Sums up a rank's time by phase: every second belongs to the last reported phase. The caller passes the time.

    Sums only grow, so two readings give the values in between, including short phases. One thread writes, any may read:
    the shared state is replaced, never changed.
    """

    def __init__(self, phase: str, now: float) -> None:
        self._state: tuple[str, PhaseTotals] = phase, PhaseTotals(now, {})

    def tell(self, phase: str, now: float) -> None:
        """Start a phase."""
        if phase != self._state[0]:
            self._state = phase, self.read(now)

    def read(self, now: float) -> PhaseTotals:
        """The sums until now."""
        phase, totals = self._state
        passed = max(now - totals.at, 0.0)
        return PhaseTotals(totals.at + passed, {**totals.seconds, phase: totals.seconds.get(phase, 0.0) + passed})


OPTIMIZER, WEIGHTS = "optimizer", "weights"

PARTS = frozenset({OPTIMIZER, WEIGHTS})
"""All parts of its memory that a rank can release."""


class CannotOffload(GcoreError):
    """There is no room to offload the rank's memory; its state is unchanged."""


def unknown_parts(what: Collection[str]) -> str:
    """Error message for a part in `what` that ranks do not have, or empty."""
    strange = sorted(set(what) - PARTS)
    return f"a rank has no part {strange[0]!r}; it releases {' and '.join(sorted(PARTS))}" if strange else ""


def refuse_release(state: FeedState, step: int) -> RankRefusal | None:
    """Why a rank may not release its memory now, for a caller that names `step` as the last applied one; None: it may.

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
    """Why a caller may not restore the memory now; None: it may."""
    if state.applying is not None:
        return RankRefusal(f"token {state.applying} is being applied, which restores the rank's memory itself")
    return None
