"""The sections `data` and `eval` of a job spec, and the sources and held-out sets they resolve to.

A spec with one file says `data.path`; one with several lists `data.sources`. What a source leaves out, its section says
for all of them; what `eval` leaves out of how prompts look and how long answers may be, `data` and `rollout` say.
`gcore.config.spec` resolves a spec (`training_sources`, `eval_sets`): in a `ResolvedSource` and an `EvalSet` every field is
decided.

A set measures `accuracy`, `mean@N`, `pass@1` and a `pass@K` for each K in `pass_k` (`EvalSampling.metrics`);
`gcore.ledger.evaluation` computes and records them.
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
"""The name of the source of a spec that has one file."""

FORMAT_HELP = (
    "How it is written: jsonl, parquet, hf (a folder saved by `datasets`, save_to_disk), or auto: by what lies there"
)

SYSTEM_HELP = "System message before the prompt; needs a chat template"
TEMPLATE_HELP = "Jinja file with a chat template in place of the tokenizer's, relative to the spec's folder"
TOOLS_HELP = "JSON file with a list of tool definitions for the chat template, relative to the spec's folder"


COLUMNS_HELP = "Columns that are read, beside those of the prompt and the answer; default: all that JSON can say. The others may hold anything"


class ColumnsSection(Section):
    """What may name the columns that are read."""

    columns: tuple[str, ...] | None = Field(None, description=COLUMNS_HELP)

    @model_serializer(mode="wrap")
    def _as_before(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `columns` where it says nothing: a daemon from before there was one reads the rest."""
        tree: dict[str, Any] = written(self)
        return tree if self.columns is not None else {name: value for name, value in tree.items() if name != "columns"}


class SamplingSpec(Section):
    """What a source draws differently from `rollout`."""

    temperature: Temperature | None = Field(None, description="Sampling temperature")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Nucleus")
    top_k: PositiveInt | None = Field(None, description="Keep only the k likeliest tokens")
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="Least share of the likeliest token")
    max_new_tokens: PositiveInt | None = Field(
        None, description="Longest response, in tokens; in training at most rollout's"
    )
    stop: tuple[StopString, ...] | None = Field(None, description="Strings that end a response")


class SourceSpec(ColumnsSection):
    """One of several sources."""

    name: SourceName = Field(description="The source's name in metrics and views")
    path: FilePath = Field(description="File or folder with the prompts, relative to the spec's folder")
    format: DataFormat = Field("auto", description=FORMAT_HELP)
    split: str | None = Field(None, description="Split of a saved dataset that has several")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0, description="How often an epoch shows each entry; 0.5: half of them, another half in the next epoch"
    )
    prompt: str | None = Field(None, description="Field with the prompt; default: data.prompt")
    chat: bool | None = Field(None, description="Whether prompts go through a chat template; default: model.chat")
    template: FilePath | None = Field(None, description=TEMPLATE_HELP)
    system: str | None = Field(None, description=SYSTEM_HELP)
    tools: FilePath | None = Field(None, description=TOOLS_HELP)
    template_variables: TemplateVariables | None = Field(
        None, exclude_if=is_unset, description=f"{VARIABLES_HELP}; default: data.template_variables"
    )
    min_prompt_tokens: PositiveInt | None = Field(None, description="Shorter prompts are filtered")
    max_prompt_tokens: PositiveInt | None = Field(None, description="Longer prompts are filtered")
    reward: RewardSpec | None = Field(None, description="Scoring of this source; default: the job's")
    sampling: SamplingSpec = SamplingSpec()


class SourcesSection(ColumnsSection):
    """What `data` and `eval` have in common: one path, or several sources."""

    path: FilePath | None = Field(None, description="File or folder with the prompts, relative to the spec's folder")
    format: DataFormat = Field("auto", description=FORMAT_HELP)
    split: str | None = Field(None, description="Split of a saved dataset that has several")
    sources: tuple[SourceSpec, ...] = Field((), description="Several sources in place of one path")

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: tuple[SourceSpec, ...]) -> tuple[SourceSpec, ...]:
        twice = [name for name, count in Counter(source.name for source in sources).items() if count > 1]
        if twice:
            raise ValueError(f"two sources have the same name ({', '.join(map(repr, sorted(twice)[:8]))})")
        return sources

    @model_validator(mode="after")
    def _one_form(self) -> SourcesSection:
        if self.path is not None and self.sources:
            raise ValueError("give one path or several sources, not both")
        if self.path is None and (self.split is not None or self.format != "auto" or self.columns is not None):
            raise ValueError("format, split and columns belong to path; a source has its own")
        return self


class DataSpec(SourcesSection):
    """The prompt stream."""

    prompt: str = Field(
        "prompt",
        description="Field with the prompt: a string, or a list of chat messages, whose content is a text or a list of text parts",
    )
    template: FilePath | None = Field(None, description=TEMPLATE_HELP)
    system: str | None = Field(None, description=SYSTEM_HELP)
    tools: FilePath | None = Field(None, description=TOOLS_HELP)
    template_variables: TemplateVariables | None = Field(None, exclude_if=is_unset, description=VARIABLES_HELP)
    min_prompt_tokens: PositiveInt | None = Field(None, description="Shorter prompts are filtered")
    max_prompt_tokens: PositiveInt | None = Field(None, description="Longer prompts are filtered")
    shards: PositiveInt = Field(64, description="Slices of the stream; at least 16 times the most controllers expected")
    window: PositiveInt = Field(256, description="How far a shard may run ahead of its oldest unfinished prompt")
    curriculum: str | None = Field(
        None, description="Order of the prompts within an epoch, by entry-point name in `gcore.curricula`"
    )
    curriculum_options: dict[str, Option] = Field({}, description="Settings of the curriculum's own, by name")

    @model_validator(mode="after")
    def _has_prompts(self) -> DataSpec:
        if self.path is None and not self.sources:
            raise ValueError("name the prompts: data.path, or data.sources")
        if self.min_prompt_tokens and self.max_prompt_tokens and self.min_prompt_tokens > self.max_prompt_tokens:
            raise ValueError(f"min_prompt_tokens {self.min_prompt_tokens} is above max_prompt_tokens")
        if self.curriculum_options and self.curriculum is None:
            raise ValueError("curriculum_options are a curriculum's; name it in data.curriculum")
        return self


@dataclass(frozen=True, slots=True)
class SourceSampling:
    """How responses to a source's prompts are drawn, every field decided."""

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    max_new_tokens: int
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """A source with every field decided. Paths are those of the spec, absolute once it was loaded from a file."""

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


LEAST_TEMPERATURE = 1e-6
"""Below it, and above 0, engines take the likeliest token: whoever wants that says 0."""

MOST_SAMPLES = 10_000

MOST_SETS, MOST_KS = 256, 32
"""What all of them measure stands in one record, which the store must take."""

ACCURACY = "accuracy"
REWARD = "reward"
"""The mean reward over all sets."""
ACCURACY_OR_REWARD = "accuracy, or reward where rewards are graded"
"""The share of correct responses; without a set before it, over the prompts of all sets."""

NO_BEST = "none"

OF_PART = "part:"
"""What the mean of a reward's part is called among a set's metrics, before its label."""

EvalTemperature = Annotated[float, Field(ge=0, le=1e6)]
TopP = Annotated[float, Field(gt=0, le=1)]
PassK = Annotated[tuple[PositiveInt, ...], Field(max_length=MOST_KS)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Threshold = Annotated[float, Field(allow_inf_nan=False)]
SAMPLES_HELP = "Responses to each prompt; more than 1 needs a temperature"
TEMPERATURE_HELP = "0: the likeliest token, always (greedy); above: drawn, each response from a seed of its own"
TOP_P_HELP = "Nucleus of what is drawn"
PASS_K_HELP = "Estimate pass@k (unbiased) for each of these k, at most `samples`; pass@1 is always there"
MAX_NEW_HELP = "Longest answer, in tokens; default: rollout.max_new_tokens"
THRESHOLD_HELP = "A response whose reward is at least this counts as correct, for accuracy and pass@k"


class EvalSetSpec(SourceSpec):
    """One of several held-out sets. It may say all that a source of `data` may but what training alone heeds."""

    sampling: SamplingSpec = Field(
        SamplingSpec(),
        description="Here only `stop` may be said: how an evaluation draws and how long its answers may be stands beside it",
    )
    samples: Samples | None = Field(None, description=f"{SAMPLES_HELP}; default: eval.samples")
    temperature: EvalTemperature | None = Field(None, description=f"{TEMPERATURE_HELP}; default: eval.temperature")
    top_p: TopP | None = Field(None, description=f"{TOP_P_HELP}; default: eval.top_p")
    pass_k: PassK | None = Field(None, description=f"{PASS_K_HELP}; default: eval.pass_k")
    max_new_tokens: PositiveInt | None = Field(None, description="Longest answer, in tokens; default: eval's")
    threshold: Threshold | None = Field(None, description=f"{THRESHOLD_HELP}; default: eval.threshold")
    limit: PositiveInt | None = Field(None, description="Prompts evaluated of this set, at most; default: eval.limit")

    @model_validator(mode="after")
    def _nothing_is_said_that_is_not_heeded(self) -> EvalSetSpec:
        beside = {"max_new_tokens", "temperature", "top_p"}
        said = [key for key, value in self.sampling.model_dump(exclude_none=True).items() if key != "stop"]
        for key in said:
            fix = f"say {key} on the set itself" if key in beside else "leave it out"
            raise ValueError(f"set {self.name!r}: an evaluation does not heed sampling.{key}; {fix}")
        for key in ("weight", "min_prompt_tokens", "max_prompt_tokens"):
            if getattr(self, key) != EvalSetSpec.model_fields[key].default:
                raise ValueError(
                    f"set {self.name!r}: an evaluation asks every prompt once, whatever its {key}; leave it out"
                )
        return self


class EvalSpec(SourcesSection):
    """Evaluation on held-out prompts, shown as those of `data` are, none of them filtered.

    Before the first step (`at_start`), every `every` steps, and after the last; greedy unless a temperature is set.
    """

    sources: tuple[EvalSetSpec, ...] = Field(
        (), max_length=MOST_SETS, description=f"Several named sets in place of one path, at most {MOST_SETS}"
    )
    at_start: bool = Field(True, description="Whether the model is evaluated before the first step too")
    every: PositiveInt | None = Field(None, description="Steps between evaluations; always after the last step")
    limit: PositiveInt = Field(1000, description="Prompts evaluated of each set, at most")
    samples: Samples = Field(1, description=SAMPLES_HELP)
    temperature: EvalTemperature = Field(0.0, description=TEMPERATURE_HELP)
    top_p: TopP = Field(1.0, description=TOP_P_HELP)
    pass_k: PassK = Field((), description=PASS_K_HELP)
    max_new_tokens: PositiveInt | None = Field(None, description=MAX_NEW_HELP)
    threshold: Threshold = Field(1.0, description=THRESHOLD_HELP)
    show: Annotated[int, Field(ge=0, le=50)] = Field(5, description="Answers shown before and after, at most 50")

    @field_validator("sources")
    @classmethod
    def _no_set_is_called_as_a_metric(cls, sources: tuple[EvalSetSpec, ...]) -> tuple[EvalSetSpec, ...]:
        if any(source.name == ACCURACY for source in sources):
            raise ValueError(f"a set cannot be called {ACCURACY!r}: that names what is measured over all sets")
        return sources

    @model_validator(mode="after")
    def _can_be_measured(self) -> EvalSpec:
        if not self.wanted:
            for name, value in self:
                if value != EvalSpec.model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(
                        f"{name} is set, and nothing is evaluated; name held-out prompts in eval.path or eval.sources"
                    )
            return self
        for name, draws in self.drawn.items():
            draws.check(f"set {name!r}: " if self.sources else "")
        return self

    @property
    def wanted(self) -> bool:
        """Whether anything is evaluated."""
        return self.path is not None or bool(self.sources)

    @property
    def drawn(self) -> dict[str, EvalSampling]:
        """How each set is answered and counted, by name, in the order of the spec."""
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
        """Everything that is measured, as `checkpoint.best` may name it: `accuracy`, `SET/accuracy`, `SET/pass@4`, ..."""
        if not self.wanted:
            return ()
        return (
            ACCURACY,
            REWARD,
            *(f"{name}/{metric}" for name, draws in self.drawn.items() for metric in draws.metrics),
        )

    def refuse_metric(self, name: str) -> str | None:
        """Why `name` cannot tell which checkpoint is best, with the nearest name; None if it can."""
        if name in self.metrics or (name == ACCURACY_OR_REWARD and self.wanted):
            return None
        if not self.wanted:
            return f"best is {name!r}, and nothing is evaluated; name held-out prompts in eval, or say best: {NO_BEST}"
        hint = did_you_mean(name, self.metrics)
        return f"best is {name!r}, which is not measured{hint} (measured: {', '.join(self.metrics[:12])})"


@dataclass(frozen=True, slots=True)
class EvalSampling:
    """How the prompts of a set are answered and counted. `samples` responses to each; `temperature` 0 is greedy."""

    samples: int
    temperature: float
    top_p: float
    pass_k: tuple[int, ...]
    threshold: float
    limit: int

    def check(self, where: str) -> None:
        """Raises ValueError, in one sentence that begins with `where`."""
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"{where}a temperature of {self.temperature} is neither greedy (0) nor at least 1e-06")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"{where}samples is {self.samples} with temperature 0, which draws the same response each time; set a "
                "temperature, or samples: 1"
            )
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(f"{where}top_p is {self.top_p} with temperature 0, which draws nothing; set a temperature")
        if self.pass_k and max(self.pass_k) > self.samples:
            raise ValueError(
                f"{where}pass@{max(self.pass_k)} needs at least {max(self.pass_k)} responses to a prompt, and samples is "
                f"{self.samples}; raise samples, or lower pass_k"
            )

    @property
    def ks(self) -> tuple[int, ...]:
        """Every k of which pass@k is estimated, ascending: 1 is always there."""
        return tuple(sorted({1, *self.pass_k}))

    @property
    def metrics(self) -> tuple[str, ...]:
        """What the set measures."""
        return (ACCURACY, f"mean@{self.samples}", *(f"pass@{k}" for k in self.ks))


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A held-out set with every field decided: how its prompts look and are asked is the source's, how answers count, `draws`'."""

    source: ResolvedSource
    draws: EvalSampling
