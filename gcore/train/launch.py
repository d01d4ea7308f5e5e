"""The document a train rank is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from gcore.config.spec import JobSpec
from gcore.ledger.world_state import WorldState
from gcore.schema import Part
from gcore.tls.serving_http import ServingTls


class Start(Part):
    """What the world goes on from: the step it has done, and where the state of it is.

    Copies of `state` in the memory of the world's nodes; else a checkpoint; else (empty) the job's model as it was.
    """

    step: NonNegativeInt
    checkpoint: str = ""
    state: WorldState | None = None


class RankLaunch(Part):
    """First line on the control line. `host`: the address to serve at, and to meet the other ranks from."""

    kind: Literal["rank"]
    job_uid: str
    world: str
    lineage: NonNegativeInt
    rank: NonNegativeInt
    world_size: PositiveInt
    spec: JobSpec
    run_dir: str
    start: Start
    host: str = "127.0.0.1"
    tls: ServingTls | None = None
    """With it the rank serves over mutual TLS, to nodes of the cluster alone."""
    threads: PositiveInt = 1
    nodes: tuple[str, ...] = ()
    """The node of each rank, by rank."""
    memory_dir: str = ""
    """Where copies of this job's state lie in the memory of this rank's node (`gcore.weights.copies`); empty: none are made."""

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
