"""The job spec, its small sections, and the resolved sources and held-out sets.

Field descriptions hold units and meaning; `gcore schema` prints them. Sections are frozen, and unknown keys are errors.
A spec names flows, rewards and policies; it never contains code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, PositiveInt, ValidationInfo, model_validator

from gcore.config.base import NAMESPACE, FilePath, ModelPath, Option, Section
from gcore.config.capabilities import PICTURE_ENGINES
from gcore.config.data import (
    ACCURACY_OR_REWARD,
    NO_BEST,
    ONLY_SOURCE,
    DataSpec,
    EvalSet,
    EvalSetSpec,
    EvalSpec,
    ResolvedSource,
    SourceSampling,
    SourceSpec,
    SourcesSection,
)
from gcore.config.denoising import check_denoising
from gcore.config.placement import PlacementSpec, SchedulingSpec
from gcore.config.reward import (
    MOST_JUDGES,
    JudgeModel,
    JudgeSpec,
    RewardPart,
    RewardSpec,
    ScoringSpec,
    group_reward_problems,
    picture_reward_problems,
)
from gcore.config.rollout import AgentSpec, EnvironmentSpec, RolloutSpec
from gcore.config.train import FilterSpec, FlowSpec, TrainSpec, is_stored
from gcore.config.validation import (
    check_agent,
    check_best,
    check_chat,
    check_context,
    check_correction,
    check_engine_sizes,
    check_environment,
    check_flow,
    check_groups,
    check_judge_adapters,
    check_judges,
    check_pairs,
    check_pictures,
    check_placement,
    check_published_adapters,
    check_seeing_judges,
    check_sources,
    check_stale,
    check_streamed,
    check_tool_pictures,
    check_tracking,
    check_truncation,
    check_turns,
    check_warmup,
    reward_names,
)
from gcore.plugins import REFERENCE_PATTERN
from gcore.store.keys import DEFAULT_NAMESPACE


class TrackerSpec(Section):
    """A tracker that displays the run's curves. Its package must be installed where controllers run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")] = Field(
        description="tensorboard, wandb, mlflow, swanlab, or your own (an entry point in gcore.trackers)"
    )
    options: dict[str, Option] = Field(
        {}, description="Settings of the tracker, by name. Never put a key or password here"
    )


class SamplesSpec(Section):
    """Which prompts and responses the run's folder keeps for `gcore samples`."""

    every: PositiveInt = Field(1, description="Keep samples every so many steps; step 1 is always kept")
    groups: Annotated[int, Field(ge=0)] = Field(
        64, description="Groups that each controller keeps per step, spread evenly over the step. 0: none"
    )
    keep: PositiveInt = Field(50, description="Newest steps whose samples are kept")
    characters: PositiveInt = Field(
        20_000,
        description="Maximum length of a stored prompt or response, in characters. Longer text is cut and marked",
    )
    picture_mib: Annotated[int, Field(ge=0)] = Field(
        256,
        description="Maximum size of the stored pictures of prompts, tools and policies, in MiB; those of the oldest steps are deleted "
        "first. 0: none",
    )

    def due(self, step: int) -> bool:
        """Return whether the samples of `step` are kept."""
        return self.groups > 0 and (step == 1 or step % self.every == 0)


class ModelSpec(Section):
    """The policy model."""

    path: ModelPath = Field(
        description="Folder of a Hugging Face model with its tokenizer, relative to the spec's folder. Or a model on a hub: "
        "hf://OWNER/NAME[@REVISION] (Hugging Face), ms://OWNER/NAME[@REVISION] (ModelScope)"
    )
    trust_remote_code: bool = Field(False, description="Run Python code from the model's folder. Read that code first")
    chat: bool = Field(
        False, description="Apply the tokenizer's chat template to prompts; false: prompts are plain text"
    )
    max_length: PositiveInt | None = Field(
        None, description="Maximum length of prompt plus response, in tokens. Default: the model's own limit"
    )


class CheckpointSpec(Section):
    """When checkpoints are written and which are kept."""

    every: PositiveInt = Field(50, description="Steps between checkpoints. The last step always has one")
    keep: PositiveInt = Field(3, description="Newest checkpoints to keep. The job's initial model is always kept")
    keep_every: PositiveInt | None = Field(
        None,
        description="Keep the checkpoints of steps that are multiples of this permanently. Must be a multiple of checkpoint.every",
    )
    best: str | None = Field(
        None,
        description="Metric that selects the best checkpoint, which is kept too: accuracy or reward (over all sets), "
        "SET/accuracy, SET/mean@N, SET/pass@K, or none. Every evaluated step then writes a checkpoint. Default, if anything is "
        "evaluated: accuracy, or reward where rewards are not only 0 and 1",
    )

    @model_validator(mode="after")
    def _check_keep_every(self) -> CheckpointSpec:
        if self.keep_every is not None and self.keep_every % self.every:
            above = (self.keep_every // self.every + 1) * self.every
            raise ValueError(
                f"keep_every is {self.keep_every}, but checkpoints are written every {self.every} steps; use a multiple of "
                f"{self.every}, such as {above}"
            )
        return self


class StorageSpec(Section):
    """Where a job stores its checkpoints, staged weights and records."""

    root: FilePath | None = Field(
        None,
        description="Folder that contains the run's folder. Every node must see it at the same path; nodes verify this before the "
        "job starts. Default: run_root of the daemons' configuration",
    )
    copies: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Set this when nodes share no folder: number of nodes that hold each checkpoint, receipt and archived record "
        "(or all nodes, if fewer). Each node stores the run's folder under its own run_root. The store refers to a file, or drops "
        "a record, only after the copies exist. Default: one shared folder",
    )

    @model_validator(mode="after")
    def _check_storage(self) -> StorageSpec:
        if self.root is not None and self.copies is not None:
            raise ValueError(
                "storage.root is for nodes that share a folder, and storage.copies is for nodes that share none; leave one out"
            )
        return self


class JobSpec(Section):
    """A job spec. Stored as YAML; see examples/."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")] = Field(
        description="The job's name: lower-case letters, digits, '.', '_' and '-'"
    )
    namespace: Annotated[str, Field(pattern=NAMESPACE)] = Field(
        DEFAULT_NAMESPACE,
        description="Namespace of the job. Job names are unique within it, and permissions and quotas apply to it",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="Seed of every random choice")
    model: ModelSpec
    data: DataSpec
    flow: FlowSpec
    rollout: RolloutSpec
    environment: EnvironmentSpec | None = Field(
        None, description="Environment that answers the model between its turns. Without it, a response is one turn"
    )
    agent: AgentSpec | None = Field(
        None, description="External agent code that produces the responses and calls the policy through the OpenAI API"
    )
    reward: RewardSpec = RewardSpec()
    scoring: ScoringSpec = ScoringSpec()
    judges: tuple[JudgeSpec, ...] = Field(
        (), max_length=MOST_JUDGES, description="Models that score responses. Rewards refer to them by name"
    )
    train: TrainSpec = TrainSpec()
    placement: PlacementSpec = PlacementSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    storage: StorageSpec = StorageSpec()
    eval: EvalSpec = EvalSpec()
    samples: SamplesSpec = SamplesSpec()
    tracking: tuple[TrackerSpec, ...] = Field(
        (), description="Trackers that receive the run's metrics in addition to metrics.jsonl"
    )

    @model_validator(mode="before")
    @classmethod
    def _add_denoising(cls, tree: Any) -> Any:
        """Give the policy of a job that generates pictures its section of `train`."""
        rollout = tree.get("rollout") if isinstance(tree, dict) else None
        engine = rollout.get("engine") if isinstance(rollout, dict) else getattr(rollout, "engine", None)
        train = tree.get("train", {}) if isinstance(tree, dict) else None
        if engine not in PICTURE_ENGINES or not isinstance(train, dict) or train.get("diffusion") is not None:
            return tree
        return {**tree, "train": {**train, "diffusion": {}}}

    @model_validator(mode="after")
    def _check_sections(self, info: ValidationInfo) -> JobSpec:
        rules = _RULES if is_stored(info) else (*_RULES, *_RULES_OF_NEW_JOBS)
        if (why := next((why for rule in rules for why in rule(self)), None)) is not None:
            raise ValueError(why)
        return self

    @property
    def rewards(self) -> list[tuple[str, RewardSpec]]:
        """All `reward` sections, each with its location in the spec: of the job, of its sources and of its held-out sets."""
        found = [("reward", self.reward)]
        for noun, section in (("source", self.data), ("set", self.eval)):
            found += [
                (f"reward of {noun} {one.name!r}", one.reward) for one in section.sources if one.reward is not None
            ]
        return found

    @property
    def reward_names(self) -> frozenset[str]:
        """All reward functions that any section names."""
        return reward_names(self.rewards, self.judges)

    @property
    def served_judges(self) -> list[JudgeSpec]:
        """Judges that have engines of their own: neither external judges nor adapters of the policy's model."""
        return [judge for judge in self.judges if judge.model is not None]

    def judge_model(self, judge: JudgeSpec) -> JudgeModel:
        """The model that serves a judge of the cluster: its own, or the policy's."""
        if judge.model is not None:
            return judge.model
        policy = self.model
        return JudgeModel(path=policy.path, trust_remote_code=policy.trust_remote_code, max_length=policy.max_length)

    @property
    def tool_picture_bytes(self) -> int:
        """Upper bound for the bytes of the pictures that tools return in the responses of a group."""
        each = 0 if self.environment is None else self.environment.tools.response_bytes
        return each * self.flow.samples_per_prompt

    @property
    def judge_adapters(self) -> dict[str, str]:
        """By judge: the folder of its adapter, which the policy's engines serve."""
        return {judge.name: judge.adapter for judge in self.judges if judge.adapter is not None}

    @property
    def best_metric(self) -> str | None:
        """The metric that selects the best checkpoint; None if no checkpoint is selected."""
        if self.checkpoint.best is None:
            return ACCURACY_OR_REWARD if self.eval.wanted else None
        return None if self.checkpoint.best == NO_BEST else self.checkpoint.best

    def evaluates_after(self, step: int, *, last: bool) -> bool:
        """Return whether the model is evaluated after `step` (0: before training). Always false without an eval set."""
        if not self.eval.wanted or step == 0:
            return self.eval.wanted and self.eval.at_start
        return last or (self.eval.every is not None and step % self.eval.every == 0)

    def checkpoints_after(self, step: int, *, last: bool, asked: bool = False) -> bool:
        """Return whether a checkpoint is written after `step`: by `checkpoint.every`, after the last step, if `asked` (the seal,
        the record that fixes the step's groups, requests one), and after every evaluated step if the best checkpoint is kept.

        The evaluation of a step finishes when the next update is about to change the optimizer state. So every evaluated step
        writes a checkpoint; `controllers.rules.retention` later deletes those that were not the best.
        """
        if step == 0:
            return False
        may_be_best = self.best_metric is not None and self.evaluates_after(step, last=last)
        return last or asked or step % self.checkpoint.every == 0 or may_be_best


def training_sources(spec: JobSpec) -> tuple[ResolvedSource, ...]:
    """Return the sources of the prompt stream; at least one."""
    return tuple(resolve_source(spec, source) for source in _listed(spec.data))


def uses_pictures(spec: JobSpec) -> bool:
    """Whether any source or held-out set of the job has pictures."""
    return any(source.images is not None for source in (*training_sources(spec), *eval_sources(spec)))


def uses_blobs(spec: JobSpec) -> bool:
    """Whether prompts or responses of the job have blobs: pictures in prompts, or a policy that generates pictures."""
    return spec.rollout.diffusion is not None or uses_pictures(spec)


def _listed(origin: SourcesSection) -> tuple[SourceSpec, ...]:
    """Return the sources of a section; a single `path` becomes one source."""
    if origin.path is None:
        return origin.sources
    one = SourceSpec(
        name=ONLY_SOURCE, path=origin.path, format=origin.format, split=origin.split, columns=origin.columns
    )
    return (one,)


def resolve_source(spec: JobSpec, source: SourceSpec) -> ResolvedSource:
    """Return the source with every field set; missing values come from `data`, `model`, `reward` and `rollout`."""
    data, rollout, own = spec.data, spec.rollout, source.sampling
    return ResolvedSource(
        name=source.name,
        path=source.path,
        format=source.format,
        split=source.split,
        columns=source.columns,
        weight=source.weight,
        prompt=data.prompt if source.prompt is None else source.prompt,
        chat=spec.model.chat if source.chat is None else source.chat,
        template=source.template or data.template,
        system=data.system if source.system is None else source.system,
        tools=source.tools or data.tools,
        template_variables=(data.template_variables or {})
        if source.template_variables is None
        else source.template_variables,
        min_prompt_tokens=source.min_prompt_tokens or data.min_prompt_tokens,
        max_prompt_tokens=source.max_prompt_tokens or data.max_prompt_tokens,
        reward=source.reward or spec.reward,
        sampling=SourceSampling(
            temperature=rollout.temperature if own.temperature is None else own.temperature,
            top_p=rollout.top_p if own.top_p is None else own.top_p,
            top_k=rollout.top_k if own.top_k is None else own.top_k,
            min_p=rollout.min_p if own.min_p is None else own.min_p,
            max_new_tokens=own.max_new_tokens or rollout.max_new_tokens,
            stop=rollout.stop if own.stop is None else own.stop,
        ),
        images=source.images or data.images,
        image_marker=source.image_marker or data.image_marker,
        min_pixels=source.min_pixels or data.min_pixels,
        max_pixels=source.max_pixels or data.max_pixels,
    )


def eval_sets(spec: JobSpec) -> tuple[EvalSet, ...]:
    """Return the held-out sets in the order of the spec; empty if nothing is evaluated."""
    section = spec.eval
    sets, drawn = [], section.drawn
    for one in _listed(section):
        draws = drawn[one.name]
        source = resolve_source(spec, one)
        longest = one.max_new_tokens if isinstance(one, EvalSetSpec) else None
        longest = longest or section.max_new_tokens or spec.rollout.max_new_tokens
        sampling = replace(
            source.sampling,
            temperature=draws.temperature,
            top_p=draws.top_p,
            top_k=None,
            min_p=0.0,
            max_new_tokens=longest,
        )
        sets.append(EvalSet(replace(source, sampling=sampling), draws))
    return tuple(sets)


def eval_sources(spec: JobSpec) -> tuple[ResolvedSource, ...]:
    """Return the sources of the held-out prompts, one per set."""
    return tuple(one.source for one in eval_sets(spec))


def _scored(spec: JobSpec) -> Iterator[tuple[str, RewardSpec]]:
    """The reward of each source and of each held-out set, by its name."""
    return ((one.name, one.reward) for one in (*training_sources(spec), *eval_sources(spec)))


_RULES: tuple[Callable[[JobSpec], Iterable[str]], ...] = (
    lambda s: check_tracking([tracker.name for tracker in s.tracking], s.storage.copies),
    lambda s: check_denoising(
        s.rollout,
        s.train,
        s.data,
        {
            "environment (responses of several turns, and tools)": s.environment is not None,
            "agent": s.agent is not None,
            "model.chat": s.model.chat,
            "model.max_length": s.model.max_length is not None,
        },
    ),
    lambda s: () if s.rollout.diffusion is None else picture_reward_problems(_scored(s), s.judges),
    lambda s: check_flow(s.flow, s.train),  # before check_groups, whose advice (two samples) would not solve it
    lambda s: check_groups(s.flow, s.train),
    lambda s: check_published_adapters(s.rollout, s.train),
    lambda s: check_pictures(uses_pictures(s), s.environment, s.agent, s.rollout, s.train),
    lambda s: check_tool_pictures((*training_sources(s), *eval_sources(s)), s.environment),
    lambda s: check_judge_adapters(list(s.judge_adapters), s.rollout, s.train),
    lambda s: check_correction(s.rollout.correction, s.train),
    lambda s: check_stale(s.rollout, s.train),
    lambda s: check_streamed(s.rollout, s.train, s.flow.groups_per_step),
    lambda s: check_judges(s.judges, s.rewards),
    lambda s: check_seeing_judges(uses_blobs(s), s.judges),
    lambda s: check_placement(s.placement, s.train, s.served_judges),
    lambda s: check_engine_sizes(s.rollout, s.served_judges, s.placement.reward),
    lambda s: check_turns(s.placement, s.rollout, s.train),
    lambda s: check_environment(s.environment, s.reward_names, s.train, s.rollout.max_new_tokens, s.model.max_length),
    lambda s: check_agent(
        s.agent, s.environment, s.reward_names, s.train, s.rollout.max_new_tokens, s.model.max_length
    ),
    lambda s: check_chat(s.agent, (*training_sources(s), *eval_sources(s))),
    lambda s: check_pairs(s.judges, s.flow, training_sources(s), eval_sets(s)),
    lambda s: group_reward_problems(((one.name, one.reward) for one in training_sources(s)), s.flow.samples_per_prompt),
    lambda s: check_warmup(s.train, s.flow.steps),
    lambda s: check_sources(s.rollout, training_sources(s), eval_sets(s)),
    lambda s: check_best(s.best_metric, s.eval),
    lambda s: check_context(s.rollout.max_new_tokens, s.model.max_length),
)
"""The checks across sections, in the order in which a spec that breaks several reports them."""

_RULES_OF_NEW_JOBS: tuple[Callable[[JobSpec], Iterator[str]], ...] = (lambda s: check_truncation(training_sources(s)),)
"""Checks for new jobs only. A stored job that breaks one continues, with a warning."""


def outdated_settings(spec: JobSpec) -> str:
    """Return why gcore would reject a new job with the spec of this stored job, which it lets continue; empty if it would not."""
    return next((why for rule in _RULES_OF_NEW_JOBS for why in rule(spec)), "")


_WITH_PLUGIN = (RewardSpec, RewardPart, FlowSpec, FilterSpec, EnvironmentSpec, AgentSpec)
"""Sections in which `name` names a plug-in."""

_FILE = {
    "description": "A function in a Python file, as FILE.py:FUNCTION, in place of `name`. Only on a local cluster",
    "pattern": f"^{REFERENCE_PATTERN}$",
    "title": "File",
    "type": "string",
}


def job_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a job spec's file, with which editors check and complete a spec.

    It is the schema of `JobSpec` with the short forms of files: a list of rewards in place of a section, and `file` in place of
    `name` for a plug-in in a Python file.
    """
    schema = JobSpec.model_json_schema()
    for section in _WITH_PLUGIN:
        _allow_file(schema["$defs"][section.__name__])
    _allow_list(schema)
    _require_length(schema["$defs"]["RolloutSpec"])
    return schema


def _require_length(section: dict[str, Any]) -> None:
    """Require the maximum length only of policies that write text: pictures have none, and their number of steps replaces it."""
    section["required"].remove("max_new_tokens")
    section["anyOf"] = [
        {"required": ["max_new_tokens"]},
        {"required": ["diffusion"]},
        {"required": ["engine"], "properties": {"engine": {"enum": list(PICTURE_ENGINES)}}},
    ]


def _allow_file(section: dict[str, Any]) -> None:
    properties = section["properties"]
    section["properties"] = {"name": properties.pop("name"), "file": _FILE, **properties}
    required = section.pop("required", [])
    if "name" in required:
        section["oneOf"] = [{"required": ["name"]}, {"required": ["file"]}]
    else:
        section["not"] = {"required": ["name", "file"]}
    if others := [name for name in required if name != "name"]:
        section["required"] = others


def _allow_list(schema: Any) -> None:
    """Change each reference to the section of rewards, in place."""
    if isinstance(schema, list):
        for part in schema:
            _allow_list(part)
    if not isinstance(schema, dict):
        return
    for part in schema.values():
        _allow_list(part)
    if schema.get("$ref") == "#/$defs/RewardSpec":
        parts = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/RewardPart"}}
        schema["anyOf"] = [{"$ref": schema.pop("$ref")}, parts]
