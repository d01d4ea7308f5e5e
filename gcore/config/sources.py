"""Where prompts come from: the section `data` of a spec, and the sources it resolves to; of `eval`, what both share.

A spec with one file says `data.path`; one with several lists `data.sources`. What a source leaves out, the section says
for all of them. `training_sources` is what the rest of gcore reads: every field decided, no fallback left to apply.
Held-out sets are `gcore.config.evaluation`'s.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from gcore.config.base import Option, Section
from gcore.config.reward import RewardSpec

if TYPE_CHECKING:
    from gcore.config.spec import JobSpec

DataFormat = Literal["auto", "jsonl", "parquet", "hf"]
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
Temperature = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Below, engines take the likeliest token and tell log-probabilities of another distribution; and it travels as float32."""
StopString = Annotated[str, Field(min_length=1)]
ONLY_SOURCE = "data"
"""The name of the source of a spec that has one file."""
FORMAT_HELP = (
    "How it is written: jsonl, parquet, hf (a folder saved by `datasets`, save_to_disk), or auto: by what lies there"
)
SYSTEM_HELP = "System message before the prompt; needs a chat template"
TEMPLATE_HELP = "Jinja file with a chat template in place of the tokenizer's, relative to the spec's folder"
TOOLS_HELP = "JSON file with a list of tool definitions for the chat template, relative to the spec's folder"


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


class SourceSpec(Section):
    """One of several sources."""

    name: SourceName = Field(description="The source's name in metrics and views")
    path: str = Field(description="File or folder with the prompts, relative to the spec's folder")
    format: DataFormat = Field("auto", description=FORMAT_HELP)
    split: str | None = Field(None, description="Split of a saved dataset that has several")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0, description="How often an epoch shows each entry; 0.5: half of them, another half in the next epoch"
    )
    prompt: str | None = Field(None, description="Field with the prompt; default: data.prompt")
    chat: bool | None = Field(None, description="Whether prompts go through a chat template; default: model.chat")
    template: str | None = Field(None, description=TEMPLATE_HELP)
    system: str | None = Field(None, description=SYSTEM_HELP)
    tools: str | None = Field(None, description=TOOLS_HELP)
    min_prompt_tokens: PositiveInt | None = Field(None, description="Shorter prompts are filtered")
    max_prompt_tokens: PositiveInt | None = Field(None, description="Longer prompts are filtered")
    reward: RewardSpec | None = Field(None, description="Scoring of this source; default: the job's")
    sampling: SamplingSpec = SamplingSpec()


class Origin(Section):
    """What `data` and `eval` have in common: one path, or several sources."""

    path: str | None = Field(None, description="File or folder with the prompts, relative to the spec's folder")
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
    def _one_form(self) -> Origin:
        if self.path is not None and self.sources:
            raise ValueError("give one path or several sources, not both")
        if self.path is None and (self.split is not None or self.format != "auto"):
            raise ValueError("format and split belong to path; a source has its own")
        return self


class DataSpec(Origin):
    """The prompt stream."""

    prompt: str = Field("prompt", description="Field with the prompt: a string, or a list of chat messages")
    template: str | None = Field(None, description=TEMPLATE_HELP)
    system: str | None = Field(None, description=SYSTEM_HELP)
    tools: str | None = Field(None, description=TOOLS_HELP)
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
class Source:
    """A source with every field decided. Paths are those of the spec, absolute once it was loaded from a file."""

    name: str
    path: str
    format: DataFormat
    split: str | None
    weight: float
    prompt: str
    chat: bool
    template: str | None
    system: str | None
    tools: str | None
    min_prompt_tokens: int | None
    max_prompt_tokens: int | None
    reward: RewardSpec
    sampling: SourceSampling


def training_sources(spec: JobSpec) -> tuple[Source, ...]:
    """Where the prompt stream comes from; at least one source."""
    return tuple(resolved(spec, source) for source in _listed(spec.data))


def _listed(origin: Origin) -> tuple[SourceSpec, ...]:
    if origin.path is None:
        return origin.sources
    return (SourceSpec(name=ONLY_SOURCE, path=origin.path, format=origin.format, split=origin.split),)


def resolved(spec: JobSpec, source: SourceSpec) -> Source:
    """The source with every field decided, as `data`, `model`, `reward` and `rollout` say where it says nothing."""
    data, rollout, own = spec.data, spec.rollout, source.sampling
    return Source(
        name=source.name,
        path=source.path,
        format=source.format,
        split=source.split,
        weight=source.weight,
        prompt=data.prompt if source.prompt is None else source.prompt,
        chat=spec.model.chat if source.chat is None else source.chat,
        template=source.template or data.template,
        system=data.system if source.system is None else source.system,
        tools=source.tools or data.tools,
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
    )
