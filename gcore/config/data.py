"""The sections `data` and `eval` of a job spec, and the sources and held-out sets they resolve to.

A spec has one file (`data.path`) or several (`data.sources`). A source inherits the fields that it leaves out from its
section; `eval` inherits the prompt format from `data` and response lengths from `rollout`. `gcore.config.spec` resolves a
spec (`training_sources`, `eval_sets`) into `ResolvedSource` and `EvalSet`, which have every field set.

Each held-out set has the metrics `accuracy`, `mean@N` (N: samples per prompt), `pass@1`, and `pass@K` for each K in `pass_k`
(`EvalSampling.metrics`). `gcore.ledger.evaluation` computes and records them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from gcore.config.base import (
    VARIABLES_HELP,
    FilePath,
    Option,
    Section,
    StopString,
    Temperature,
    TemplateVariables,
    is_unset,
)
from gcore.config.reward import RewardSpec
from gcore.errors import did_you_mean

DataFormat = Literal["auto", "jsonl", "parquet", "hf"]
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]

ONLY_SOURCE = "data"
"""The source name in a spec with a single `data.path`."""

FORMAT_HELP = (
    "File format: jsonl, parquet, hf (a folder that `datasets` saved with save_to_disk), or auto (detect from the path)"
)

SYSTEM_HELP = "System message before the prompt. Needs a chat template"
TEMPLATE_HELP = "Jinja file with a chat template that replaces the tokenizer's, relative to the spec's folder"
TOOLS_HELP = "JSON file with a list of tool definitions for the chat template, relative to the spec's folder"


COLUMNS_HELP = (
    "Columns to read besides those of the prompt and the answer. Columns not read may hold any type. Default: all that JSON "
    "can represent"
)


IMAGES_HELP = (
    "Field with the paths of an entry's pictures, relative to the data: a list, or one path. Parquet data and saved "
    "datasets may have the pictures themselves there. Needs a vision-language model"
)
MARKER_HELP = "Text in a prompt that stands for its next picture"
MIN_PIXELS_HELP = (
    "Enlarge pictures to at least this many pixels (height x width). Not below the bound of the model's processor, which is "
    "used if this is not set"
)
MAX_PIXELS_HELP = (
    "Shrink pictures to at most this many pixels (height x width). Not above the bound of the model's processor, which is "
    "used if this is not set"
)

IMAGE_MARKER = "<image>"
"""Default of `data.image_marker`."""

Marker = Annotated[str, Field(min_length=1, max_length=100)]


class ColumnsSection(Section):
    """A section that may select the columns to read."""

    columns: tuple[str, ...] | None = Field(None, description=COLUMNS_HELP)

    @model_serializer(mode="wrap")
    def _omit_unset_columns(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `columns` when unset, so that daemons of an older gcore can read the spec."""
        tree: dict[str, Any] = written(self)
        return tree if self.columns is not None else {name: value for name, value in tree.items() if name != "columns"}


class SamplingSpec(Section):
    """Sampling settings of a source that differ from `rollout`."""

    temperature: Temperature | None = Field(None, description="Sampling temperature")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Nucleus sampling")
    top_k: PositiveInt | None = Field(None, description="Sample from the k likeliest tokens only")
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Drop tokens below this fraction of the likeliest token's probability"
    )
    max_new_tokens: PositiveInt | None = Field(
        None, description="Maximum length of a response, in tokens. In training at most rollout.max_new_tokens"
    )
    stop: tuple[StopString, ...] | None = Field(None, description="Strings that end a response")


class SourceSpec(ColumnsSection):
    """One item of `data.sources`: a file or folder of prompts with its own weight, prompt format, reward and sampling."""

    name: SourceName = Field(description="Name of the source in metrics and views")
    path: FilePath = Field(description="File or folder with the prompts, relative to the spec's folder")
    format: DataFormat = Field("auto", description=FORMAT_HELP)
    split: str | None = Field(None, description="Split, for a saved dataset that has several")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0,
        description="How often an epoch uses each entry. 0.5: half of the entries, the other half in the next epoch",
    )
    prompt: str | None = Field(None, description="Field with the prompt. Default: data.prompt")
    images: str | None = Field(None, exclude_if=is_unset, description=f"{IMAGES_HELP}. Default: data.images")
    image_marker: Marker | None = Field(
        None, exclude_if=is_unset, description=f"{MARKER_HELP}. Default: data.image_marker"
    )
    min_pixels: PositiveInt | None = Field(
        None, exclude_if=is_unset, description=f"{MIN_PIXELS_HELP}. Default: data.min_pixels"
    )
    max_pixels: PositiveInt | None = Field(
        None, exclude_if=is_unset, description=f"{MAX_PIXELS_HELP}. Default: data.max_pixels"
    )
    chat: bool | None = Field(None, description="Apply a chat template to the prompts. Default: model.chat")
    template: FilePath | None = Field(None, description=TEMPLATE_HELP)
    system: str | None = Field(None, description=SYSTEM_HELP)
    tools: FilePath | None = Field(None, description=TOOLS_HELP)
    template_variables: TemplateVariables | None = Field(
        None, exclude_if=is_unset, description=f"{VARIABLES_HELP}. Default: data.template_variables"
    )
    min_prompt_tokens: PositiveInt | None = Field(None, description="Filter shorter prompts")
    max_prompt_tokens: PositiveInt | None = Field(None, description="Filter longer prompts")
    reward: RewardSpec | None = Field(None, description="Reward of this source. Default: the job's")
    sampling: SamplingSpec = SamplingSpec()


class SourcesSection(ColumnsSection):
    """Fields that `data` and `eval` share: one path, or several sources."""

    path: FilePath | None = Field(None, description="File or folder with the prompts, relative to the spec's folder")
    format: DataFormat = Field("auto", description=FORMAT_HELP)
    split: str | None = Field(None, description="Split, for a saved dataset that has several")
    sources: tuple[SourceSpec, ...] = Field((), description="Several sources instead of one path")

    @field_validator("sources")
    @classmethod
    def _check_source_names(cls, sources: tuple[SourceSpec, ...]) -> tuple[SourceSpec, ...]:
        twice = [name for name, count in Counter(source.name for source in sources).items() if count > 1]
        if twice:
            raise ValueError(f"two sources have the same name ({', '.join(map(repr, sorted(twice)[:8]))}); rename one")
        return sources

    @model_validator(mode="after")
    def _check_path(self) -> SourcesSection:
        if self.path is not None and self.sources:
            raise ValueError("path and sources are both set; leave one out")
        if self.path is None and (self.split is not None or self.format != "auto" or self.columns is not None):
            raise ValueError("format, split and columns need path; with sources, set them on each source")
        return self


class DataSpec(SourcesSection):
    """The section `data`: the files of prompts, how they are rendered, and how the prompt stream is sharded and ordered."""

    prompt: str = Field(
        "prompt",
        description="Field with the prompt: a string, or a list of chat messages whose content is text or a list of text parts",
    )
    images: str | None = Field(None, exclude_if=is_unset, description=f"{IMAGES_HELP}. Default: no pictures")
    image_marker: Marker = Field(
        IMAGE_MARKER, exclude_if=lambda marker: marker == IMAGE_MARKER, description=MARKER_HELP
    )
    min_pixels: PositiveInt | None = Field(None, exclude_if=is_unset, description=MIN_PIXELS_HELP)
    max_pixels: PositiveInt | None = Field(None, exclude_if=is_unset, description=MAX_PIXELS_HELP)
    template: FilePath | None = Field(None, description=TEMPLATE_HELP)
    system: str | None = Field(None, description=SYSTEM_HELP)
    tools: FilePath | None = Field(None, description=TOOLS_HELP)
    template_variables: TemplateVariables | None = Field(None, exclude_if=is_unset, description=VARIABLES_HELP)
    min_prompt_tokens: PositiveInt | None = Field(None, description="Filter shorter prompts")
    max_prompt_tokens: PositiveInt | None = Field(None, description="Filter longer prompts")
    shards: PositiveInt = Field(
        64, description="Number of shards of the prompt stream. Use at least 16 times the largest number of controllers"
    )
    window: PositiveInt = Field(256, description="Prompts that a shard may run ahead of its oldest unfinished prompt")
    curriculum: str | None = Field(
        None, description="Curriculum that orders the prompts within an epoch, by entry-point name in `gcore.curricula`"
    )
    curriculum_options: dict[str, Option] = Field({}, description="Settings of the curriculum, by name")

    @model_validator(mode="after")
    def _check_prompts(self) -> DataSpec:
        if self.path is None and not self.sources:
            raise ValueError("there are no prompts; set data.path or data.sources")
        if self.min_prompt_tokens and self.max_prompt_tokens and self.min_prompt_tokens > self.max_prompt_tokens:
            raise ValueError(
                f"min_prompt_tokens ({self.min_prompt_tokens}) is above max_prompt_tokens ({self.max_prompt_tokens}), which "
                "filters every prompt; lower it"
            )
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) is above max_pixels ({self.max_pixels}); lower it")
        if self.curriculum_options and self.curriculum is None:
            raise ValueError("curriculum_options need a curriculum; name it in data.curriculum")
        return self


@dataclass(frozen=True, slots=True)
class SourceSampling:
    """Sampling parameters for the responses to a source's prompts, with every field set."""

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    max_new_tokens: int
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """A source with every field set. Paths are as in the spec; they are absolute if the spec came from a file."""

    name: str
    path: str
    format: DataFormat
    split: str | None
    columns: tuple[str, ...] | None
    weight: float
    prompt: str
    chat: bool
    template: str | None
    system: str | None
    tools: str | None
    template_variables: dict[str, Any]
    min_prompt_tokens: int | None
    max_prompt_tokens: int | None
    reward: RewardSpec
    sampling: SourceSampling
    images: str | None = None
    image_marker: str = IMAGE_MARKER
    min_pixels: int | None = None
    max_pixels: int | None = None


LEAST_TEMPERATURE = 1e-6
"""Between 0 and this value, engines sample greedily, so the spec must say 0."""

MOST_SAMPLES = 10_000

MOST_SETS, MOST_KS = 256, 32
"""Limits that keep all metrics of one evaluation within one record of the store."""

ACCURACY = "accuracy"
REWARD = "reward"
"""Name of the metric for the mean reward over all sets."""
ACCURACY_OR_REWARD = "accuracy, or reward where rewards are graded"
"""Default of `checkpoint.best`. `accuracy` is the share of correct responses; without a set's name, over the prompts of all sets."""

NO_BEST = "none"
"""Value of `checkpoint.best` with which no checkpoint is selected as the best."""

OF_PART = "part:"
"""Prefix of metric names for a composed reward: `part:LABEL` is the mean value of the part LABEL over a held-out set."""

EvalTemperature = Annotated[float, Field(ge=0, le=1e6)]
TopP = Annotated[float, Field(gt=0, le=1)]
PassK = Annotated[tuple[PositiveInt, ...], Field(max_length=MOST_KS)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Threshold = Annotated[float, Field(allow_inf_nan=False)]
SAMPLES_HELP = "Responses per prompt. More than 1 needs a temperature above 0"
TEMPERATURE_HELP = "Sampling temperature. 0: greedy. Above 0: sampled, with a separate seed for each response"
TOP_P_HELP = "Nucleus sampling"
PASS_K_HELP = "Estimate pass@k (unbiased) for each of these k, at most `samples`. pass@1 is always included"
MAX_NEW_HELP = "Longest response, in tokens. Default: rollout.max_new_tokens"
THRESHOLD_HELP = "A response with at least this reward counts as correct, for accuracy and pass@k"


class EvalSetSpec(SourceSpec):
    """One of several held-out sets. Accepts all fields of a training source except those that evaluation does not use."""

    sampling: SamplingSpec = Field(
        SamplingSpec(),
        description="Only `stop` may be set here. Set temperature, top_p and max_new_tokens on the set itself",
    )
    samples: Samples | None = Field(None, description=f"{SAMPLES_HELP}. Default: eval.samples")
    temperature: EvalTemperature | None = Field(None, description=f"{TEMPERATURE_HELP}. Default: eval.temperature")
    top_p: TopP | None = Field(None, description=f"{TOP_P_HELP}. Default: eval.top_p")
    pass_k: PassK | None = Field(None, description=f"{PASS_K_HELP}. Default: eval.pass_k")
    max_new_tokens: PositiveInt | None = Field(
        None, description="Maximum length of a response, in tokens. Default: eval.max_new_tokens"
    )
    threshold: Threshold | None = Field(None, description=f"{THRESHOLD_HELP}. Default: eval.threshold")
    limit: PositiveInt | None = Field(
        None, description="Maximum number of prompts of this set to evaluate. Default: eval.limit"
    )

    @model_validator(mode="after")
    def _refuse_unused_fields(self) -> EvalSetSpec:
        beside = {"max_new_tokens", "temperature", "top_p"}
        said = [key for key, value in self.sampling.model_dump(exclude_none=True).items() if key != "stop"]
        for key in said:
            fix = f"set {key} on the set itself" if key in beside else "leave it out"
            raise ValueError(f"set {self.name!r}: evaluation does not use sampling.{key}; {fix}")
        for key in ("weight", "min_prompt_tokens", "max_prompt_tokens"):
            if getattr(self, key) != EvalSetSpec.model_fields[key].default:
                raise ValueError(
                    f"set {self.name!r}: evaluation does not use {key}, because it runs every prompt once; leave it out"
                )
        return self


class EvalSpec(SourcesSection):
    """Evaluation on held-out prompts, rendered like those of `data`. No prompt is filtered.

    Runs before the first step (`at_start`), every `every` steps, and after the last; greedy unless a temperature is set.
    """

    sources: tuple[EvalSetSpec, ...] = Field(
        (), max_length=MOST_SETS, description=f"Several named sets instead of one path, at most {MOST_SETS}"
    )
    at_start: bool = Field(True, description="Also evaluate before the first step")
    every: PositiveInt | None = Field(
        None, description="Steps between evaluations. The model is always evaluated after the last step"
    )
    limit: PositiveInt = Field(1000, description="Maximum number of prompts of each set to evaluate")
    samples: Samples = Field(1, description=SAMPLES_HELP)
    temperature: EvalTemperature = Field(0.0, description=TEMPERATURE_HELP)
    top_p: TopP = Field(1.0, description=TOP_P_HELP)
    pass_k: PassK = Field((), description=PASS_K_HELP)
    max_new_tokens: PositiveInt | None = Field(None, description=MAX_NEW_HELP)
    threshold: Threshold = Field(1.0, description=THRESHOLD_HELP)
    show: Annotated[int, Field(ge=0, le=50)] = Field(
        5, description="Responses displayed from before and after training"
    )

    @field_validator("sources")
    @classmethod
    def _check_set_names(cls, sources: tuple[EvalSetSpec, ...]) -> tuple[EvalSetSpec, ...]:
        if any(source.name == ACCURACY for source in sources):
            raise ValueError(
                f"a set cannot be named {ACCURACY!r}, which is the name of a metric over all sets; rename it"
            )
        return sources

    @model_validator(mode="after")
    def _check_sets(self) -> EvalSpec:
        if not self.wanted:
            for name, value in self:
                if value != EvalSpec.model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(f"{name} is set, but there are no held-out prompts; set eval.path or eval.sources")
            return self
        for name, draws in self.drawn.items():
            draws.check(f"set {name!r}: " if self.sources else "")
        return self

    @property
    def wanted(self) -> bool:
        """Whether the job evaluates anything."""
        return self.path is not None or bool(self.sources)

    @property
    def drawn(self) -> dict[str, EvalSampling]:
        """The sampling and scoring settings of each held-out set, by its name, in the order of the spec. Unset fields come from `eval`."""
        own = EvalSampling(self.samples, self.temperature, self.top_p, self.pass_k, self.threshold, self.limit)
        if self.path is not None:
            return {ONLY_SOURCE: own}
        names = ("samples", "temperature", "top_p", "pass_k", "threshold", "limit")
        return {
            one.name: replace(own, **{n: value for n in names if (value := getattr(one, n)) is not None})
            for one in self.sources
        }

    @property
    def metrics(self) -> tuple[str, ...]:
        """All measured metrics by the names that `checkpoint.best` accepts: `accuracy`, `SET/accuracy`, `SET/pass@4`, ..."""
        if not self.wanted:
            return ()
        return (
            ACCURACY,
            REWARD,
            *(f"{name}/{metric}" for name, draws in self.drawn.items() for metric in draws.metrics),
        )

    def refuse_metric(self, name: str) -> str | None:
        """Return why `name` cannot select the best checkpoint, with the nearest name; None if it can."""
        if name in self.metrics or (name == ACCURACY_OR_REWARD and self.wanted):
            return None
        if not self.wanted:
            return f"best is {name!r}, but there are no held-out prompts; set eval.path, or best: {NO_BEST}"
        hint = did_you_mean(name, self.metrics)
        return f"best is {name!r}, which is not a measured metric{hint} (measured: {', '.join(self.metrics[:12])})"


@dataclass(frozen=True, slots=True)
class EvalSampling:
    """How a held-out set is evaluated: at most `limit` prompts, `samples` responses to each; `temperature` 0 is greedy.

    A response with a reward of at least `threshold` counts as correct.
    """

    samples: int
    temperature: float
    top_p: float
    pass_k: tuple[int, ...]
    threshold: float
    limit: int

    def check(self, where: str) -> None:
        """Check that the settings do not contradict each other. Raises ValueError; its message begins with `where` (the set's name)."""
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"{where}temperature {self.temperature} must be 0 (greedy) or at least 1e-06")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"{where}samples is {self.samples} with temperature 0, which gives the same response each time; set a "
                "temperature, or samples: 1"
            )
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(
                f"{where}top_p is {self.top_p} with temperature 0, which does not sample; set a temperature"
            )
        if self.pass_k and max(self.pass_k) > self.samples:
            raise ValueError(
                f"{where}pass@{max(self.pass_k)} needs at least {max(self.pass_k)} responses per prompt, but samples is "
                f"{self.samples}; raise samples, or lower pass_k"
            )

    @property
    def ks(self) -> tuple[int, ...]:
        """All k for which pass@k is estimated, ascending; always includes 1."""
        return tuple(sorted({1, *self.pass_k}))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of the set: accuracy, mean@N, and pass@k for each of `ks`."""
        return (ACCURACY, f"mean@{self.samples}", *(f"pass@{k}" for k in self.ks))


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A held-out set with every field set. `source`: how its prompts are rendered and sampled. `draws`: responses per prompt and metrics."""

    source: ResolvedSource
    draws: EvalSampling
