"""The sections of a job spec.

Every field has its unit and meaning here; `gcore schema` prints them. Frozen, and unknown keys are errors
(`gcore.config.load` names the nearest known one). A spec names flows, rewards and policies; it never carries code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from gcore.config.base import MOST_SLOTS, NAMESPACE, Option, Section
from gcore.config.data import ACCURACY, NO_BEST, DataSpec, EvalSpec, eval_sources, training_sources
from gcore.config.reward import MOST_JUDGES, JudgeSpec, RewardSpec, ScoringSpec
from gcore.config.rollout import AgentSpec, EnvironmentSpec, RolloutSpec
from gcore.config.train import FlowSpec, TrainSpec
from gcore.config.validation import (
    refuse_agent,
    refuse_correction,
    refuse_environment,
    refuse_environment_reward,
    refuse_flow,
    refuse_judges,
    refuse_pairs,
    refuse_placement,
    refuse_source,
    refuse_spans,
    refuse_stale,
    refuse_streamed,
    refuse_turns,
)
from gcore.store.keys import DEFAULT_NAMESPACE

# -------------------- reading
# What of a run is kept for people to read: samples, and where its numbers go besides the run's own folder.


class TrackerSpec(Section):
    """A tracker that shows the run's curves. Its package is installed where controllers run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")] = Field(
        description="tensorboard, wandb, mlflow, swanlab, or one of your own (an entry point of gcore.trackers)"
    )
    options: dict[str, Option] = Field(
        {}, description="Settings of the tracker's own, by name; never a key or password"
    )


class SamplesSpec(Section):
    """Which prompts and responses are kept in the run's folder for `gcore samples`."""

    every: PositiveInt = Field(1, description="Steps between steps whose samples are kept; the first always are")
    groups: Annotated[int, Field(ge=0)] = Field(
        64, description="Groups kept of a step, of each controller; spread evenly over the step. 0: none are kept"
    )
    keep: PositiveInt = Field(50, description="Newest steps whose samples are kept")
    characters: PositiveInt = Field(20_000, description="Of a prompt or a response; a longer one is cut, and says so")

    def due(self, step: int) -> bool:
        """Whether the samples of `step` are kept."""
        return self.groups > 0 and (step == 1 or step % self.every == 0)


# -------------------- scheduling
# What a job says of itself where several share a cluster. Who gets which slots is `placement.shares`' business.

HIGHEST_PRIORITY = 1000


class SchedulingSpec(Section):
    """The job's place among those that want the same slots."""

    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = Field(
        0,
        description="A job of a higher priority gets its slots first, and takes them from those below it at their next commit",
    )
    slots_min: PositiveInt = Field(
        1,
        le=MOST_SLOTS,
        description="Fewer slots it does not run on: until so many are there for it, it waits; what its pools and ranks need counts too",
    )
    slots_max: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="More it does not take; default: all that nobody else has a better claim to",
    )

    @model_validator(mode="after")
    def _most_is_enough(self) -> SchedulingSpec:
        if self.slots_max is not None and self.slots_max < self.slots_min:
            raise ValueError(
                f"slots_max ({self.slots_max}) is less than slots_min ({self.slots_min}); raise one or lower the other"
            )
        return self


FIXED_POLICIES = ("colocated", "static")
"""What stays as it is for as long as the job runs."""


PLUGIN_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class ModelSpec(Section):
    """The policy."""

    path: str = Field(
        description="Folder of a Hugging Face model with its tokenizer, relative to the spec's folder; or "
        "hf://OWNER/NAME[@REVISION] on the Hugging Face hub, ms://OWNER/NAME[@REVISION] on ModelScope"
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model; read that code first"
    )
    chat: bool = Field(False, description="Wrap prompts with the tokenizer's chat template; otherwise plain text")
    max_length: PositiveInt | None = Field(
        None, description="Longest prompt plus response, in tokens; default: the model's own limit"
    )


class PlacementSpec(Section):
    """Which slots the job uses."""

    policy: Annotated[str, Field(pattern=PLUGIN_NAME)] = Field(
        "colocated",
        description="How slots are shared. colocated: every slot runs rollout, judges and train in turn; static: each pool has slots "
        "of its own, for as long as the job runs; any other: a policy that is asked after each step and moves slots",
    )
    train: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="With static: slots of train ranks, one rank each. With a policy that moves slots: as many to begin with",
    )
    reward: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="With static: slots of judges; each judge has an engine on serving.replicas of them, or on all. With a policy that "
        "moves slots: as many to begin with",
    )
    memory: Literal["kept", "in_turns"] | None = Field(
        None,
        description="Of a slot that engines and a train rank share: kept: all stays in memory; in_turns: engines give theirs back "
        "while the rank trains, and the rank its own while they work. Default: in_turns on GPUs, kept on CPUs",
    )
    lend: bool | None = Field(
        None,
        description="Slots are lent between rollout and judges within a step, by putting one engine to sleep and waking another; "
        "default: with policy: dynamic",
    )
    dry_run: bool = Field(
        False,
        description="A policy that moves slots moves none, and only says what it would do (gcore placement explain)",
    )

    @property
    def is_live(self) -> bool:
        """Whether slots move while the job runs."""
        return self.policy not in FIXED_POLICIES

    @property
    def lends(self) -> bool:
        """Whether slots are lent within a step."""
        return self.policy == "dynamic" if self.lend is None else self.lend

    @model_validator(mode="after")
    def _pools_are_statics(self) -> PlacementSpec:
        if self.policy == "static" and self.train is None:
            raise ValueError("policy: static needs train, the number of slots that train")
        if self.policy == "colocated" and (self.train is not None or self.reward is not None):
            raise ValueError(
                "with policy: colocated all pools share all slots; train and reward belong to policy: static"
            )
        if self.is_live and self.reward is not None and self.train is None:
            raise ValueError(
                f"reward says what policy: {self.policy} begins with, and so must train; give both or none"
            )
        if not self.is_live and self.dry_run:
            raise ValueError(
                f"policy: {self.policy} moves nothing, so there is nothing that dry_run could only say; leave it out"
            )
        if not self.is_live and self.lend:
            raise ValueError(
                f"policy: {self.policy} moves nothing, so no slot is lent; leave lend out, or set policy: dynamic"
            )
        return self


class CheckpointSpec(Section):
    """When checkpoints are written and kept."""

    every: PositiveInt = Field(50, description="Steps between checkpoints; the last step always has one")
    keep: PositiveInt = Field(3, description="Newest checkpoints kept; the job's first model always is")
    keep_every: PositiveInt | None = Field(
        None,
        description="Checkpoints of steps that are multiples of this are kept for ever; a multiple of checkpoint.every",
    )
    best: str | None = Field(
        None,
        description="The evaluated metric whose best checkpoint is kept too: accuracy (over all sets), SET/accuracy, "
        "SET/mean@N, SET/pass@K, or none; default: accuracy, if anything is evaluated. Evaluated steps then have checkpoints",
    )

    @model_validator(mode="after")
    def _kept_ones_are_written(self) -> CheckpointSpec:
        if self.keep_every is not None and self.keep_every % self.every:
            above = (self.keep_every // self.every + 1) * self.every
            raise ValueError(
                f"keep_every is {self.keep_every}, and steps have checkpoints every {self.every}; use a multiple of that, "
                f"such as {above}"
            )
        return self


class StorageSpec(Section):
    """Where a job's checkpoints, staged weights and records lie."""

    root: str | None = Field(
        None,
        description="Folder that every node sees at this very path, in which the run's folder is made; nodes prove that "
        "they see it before the job starts. Default: the daemons' own (run_root)",
    )
    copies: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Nodes share no folder: each has the run's folder under its own run_root, and checkpoints, receipts and "
        "old records lie on so many nodes, or on as many as there are, before the store names them or forgets them. "
        "Default: one folder for all",
    )

    @model_validator(mode="after")
    def _one_way_to_store(self) -> StorageSpec:
        if self.root is not None and self.copies is not None:
            raise ValueError(
                "storage.root is a folder that all nodes share, and storage.copies is for nodes that share none; leave one out"
            )
        return self


class JobSpec(Section):
    """A job. YAML on disk; see examples/."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")] = Field(
        description="The job's name: lower-case letters, digits, '.', '_' and '-'"
    )
    namespace: Annotated[str, Field(pattern=NAMESPACE)] = Field(
        DEFAULT_NAMESPACE,
        description="Whose job it is: names are told apart by it, and what people may see, and quotas are its",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="Every random choice follows from it")
    model: ModelSpec
    data: DataSpec
    flow: FlowSpec
    rollout: RolloutSpec
    environment: EnvironmentSpec | None = Field(
        None, description="What the model meets between its turns; without it, a response is one turn"
    )
    agent: AgentSpec | None = Field(
        None, description="Foreign agent code that makes the responses, and asks the policy through OpenAI's API"
    )
    reward: RewardSpec = RewardSpec()
    scoring: ScoringSpec = ScoringSpec()
    judges: tuple[JudgeSpec, ...] = Field(
        (), max_length=MOST_JUDGES, description="Models that judge responses; rewards name them"
    )
    train: TrainSpec = TrainSpec()
    placement: PlacementSpec = PlacementSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    storage: StorageSpec = StorageSpec()
    eval: EvalSpec = EvalSpec()
    samples: SamplesSpec = SamplesSpec()
    tracking: tuple[TrackerSpec, ...] = Field((), description="Where the run's numbers go besides metrics.jsonl")

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        names = [tracker.name for tracker in self.tracking]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tracking names {twice[0]!r} twice; a tracker takes the numbers once")
        if names and self.storage.copies is not None:
            raise ValueError(
                f"tracking names {names[0]!r}, and how far a tracker has got stands on one node only; with storage.copies leave "
                "tracking out: metrics.jsonl lies on every node"
            )
        if (of_flow := refuse_flow(self.flow, self.train)) is not None:
            raise ValueError(of_flow)  # before a group's size: a group of two would not help
        if self.flow.samples_per_prompt < 2 and self.train.compares_group:
            raise ValueError(
                f"flow.samples_per_prompt is {self.flow.samples_per_prompt}, and train.advantage {self.train.advantage!r} "
                "compares the samples of a group; use at least 2"
            )
        if self.train.mini_batches > self.flow.groups_per_step:
            raise ValueError(
                f"train.mini_batches ({self.train.mini_batches}) is more than flow.groups_per_step "
                f"({self.flow.groups_per_step}); a mini-batch holds at least one group"
            )
        rollout, train, groups = self.rollout, self.train, self.flow.groups_per_step
        why = (
            refuse_correction(rollout, train) or refuse_stale(rollout, train) or refuse_streamed(rollout, train, groups)
        )
        if why is not None:
            raise ValueError(why)
        why = refuse_judges(self) or refuse_placement(self) or refuse_spans(self) or refuse_turns(self)
        if why is not None:
            raise ValueError(why)
        longest, context = self.rollout.max_new_tokens, self.model.max_length
        why = refuse_environment_reward(self) or refuse_environment(self.environment, longest, context)
        if (why := why or refuse_agent(self) or refuse_pairs(self)) is not None:
            raise ValueError(why)
        critic = self.train.critic
        if critic is not None and self.flow.steps is not None and critic.warmup_steps >= self.flow.steps:
            raise ValueError(
                f"train.critic.warmup_steps ({critic.warmup_steps}) leaves none of flow.steps ({self.flow.steps}) to the "
                "policy"
            )
        for source in training_sources(self):
            if (why := refuse_source(source, self.rollout)) is not None:
                raise ValueError(f"source {source.name!r} {why}")
        for source in eval_sources(self):
            if source.sampling.max_new_tokens < self.rollout.min_new_tokens:
                raise ValueError(
                    f"eval source {source.name!r} allows {source.sampling.max_new_tokens} new tokens, fewer than "
                    f"rollout.min_new_tokens ({self.rollout.min_new_tokens})"
                )
        if self.best_metric is not None and (why := self.eval.refuse_metric(self.best_metric)) is not None:
            raise ValueError(f"checkpoint.{why}")
        if self.model.max_length is not None and self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) leaves no room for a prompt in model.max_length "
                f"({self.model.max_length})"
            )
        return self

    @property
    def served_judges(self) -> list[JudgeSpec]:
        """Those that the cluster serves; the others are asked elsewhere."""
        return [judge for judge in self.judges if judge.model is not None]

    @property
    def best_metric(self) -> str | None:
        """By which the best checkpoint is told; None if none is."""
        if self.checkpoint.best is None:
            return ACCURACY if self.eval.wanted else None
        return None if self.checkpoint.best == NO_BEST else self.checkpoint.best

    def evaluates_after(self, step: int, *, last: bool) -> bool:
        """Whether the model is evaluated after `step`; 0 is before training. Never without an eval set."""
        if not self.eval.wanted or step == 0:
            return self.eval.wanted and self.eval.at_start
        return last or (self.eval.every is not None and step % self.eval.every == 0)

    def checkpoints_after(self, step: int, *, last: bool, asked: bool = False) -> bool:
        """Whether a checkpoint is written after `step`: so often, after the last, after each that may be the best, and where one is
        `asked` for by its seal.

        Which evaluated step is the best is known only after its evaluation, when its optimizer's state is about to change;
        so each of them has a checkpoint, and those that were not the best go as the newest do (`controllers.housekeeping`).
        """
        if step == 0:
            return False
        may_be_best = self.best_metric is not None and self.evaluates_after(step, last=last)
        return last or asked or step % self.checkpoint.every == 0 or may_be_best
