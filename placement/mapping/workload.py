"""What one step of a job does, model by model, as far as it can be said before it has run. Pure.

Lengths are the one thing that nobody knows yet: they are guessed, or a person gives them. What must fit in memory is taken at
its longest, what takes time at its mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from gcore.config import JobSpec
from gcore.config.judges import JudgeSpec
from gcore.config.sources import training_sources
from placement.mapping.shapes import ModelShape

SGLANG_SHARE = 0.5
"""Of a GPU's memory that SGLang takes at its start, weights and cache together, unless `engine_args` say otherwise."""
LONGEST_GUESSED = 512
"""Tokens of a prompt where the spec bounds them by nothing smaller."""
CHARACTERS_OF_A_TOKEN = 4
"""Of what a judge's template says in words of its own."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The job's models. `critic` None: it has none, or starts from the policy's. Judges by name, those that the cluster serves."""

    policy: ModelShape
    critic: ModelShape | None
    judges: Mapping[str, ModelShape]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a prompt and of a response."""

    prompt: float
    response: float

    @classmethod
    def guessed(
        cls, spec: JobSpec, shape: ModelShape, prompt: float | None = None, response: float | None = None
    ) -> Lengths:
        """Those given; else half of the longest."""
        longest = spec.rollout.max_new_tokens
        return cls(
            longest_prompt(spec, shape) / 2 if prompt is None else prompt,
            longest / 2 if response is None else min(float(longest), response),
        )


@dataclass(frozen=True, slots=True)
class Served:
    """A model that engines serve. A step asks `requests` of it, each of `read` tokens, answered in `written`, on average.

    `longest`: question and answer together at most; `longest_written`: the answer alone. `shared`: requests that begin with the same
    text, which is read once. `share`: of a GPU's memory that the engine takes whatever it needs, None: as it needs.
    """

    name: str
    shape: ModelShape
    engine: Literal["torch", "sglang"]
    rows: int
    cache_tokens: int | None
    replicas: int | None
    requests: int
    read: float
    written: float
    longest: int
    longest_written: int
    shared: int = 1
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """What the train ranks do in a step. `models`: each that is trained, by name; `samples` of `tokens` each, on average.

    `scored`: the largest part of a micro-batch's tokens whose logits are made. `forwards`: passes over the step without a
    gradient, beside the updates' own.
    """

    models: Mapping[str, ModelShape]
    reference: bool
    offloads: bool
    stage: int
    half: bool
    recomputes: bool
    micro_tokens: int
    longest: int
    samples: int
    tokens: float
    scored: float
    mini_batches: int
    epochs: int
    forwards: float


@dataclass(frozen=True, slots=True)
class Workload:
    """A step. `ahead`: whether the next one's responses are made while this one is trained. `turns`: on co-located slots, whether ranks
    and engines have the memory in turns; both, where the spec leaves it open. `resident`: whether each model has an engine on every slot
    that does not train, asleep where the slot is another pool's."""

    rollout: Served
    judges: tuple[Served, ...]
    training: Training
    ahead: bool
    turns: tuple[bool, ...] = (False,)
    resident: bool = False

    @property
    def served(self) -> tuple[Served, ...]:
        """Every model that engines serve."""
        return (self.rollout, *self.judges)


def workload_of(spec: JobSpec, shapes: Shapes, lengths: Lengths) -> Workload:
    """What `spec` says a step is."""
    samples = spec.flow.groups_per_step * spec.flow.samples_per_prompt
    longest = min(_context(spec, shapes.policy), longest_prompt(spec, shapes.policy) + spec.rollout.max_new_tokens)
    rollout = Served(
        name="rollout",
        shape=shapes.policy,
        engine=spec.rollout.engine,
        rows=spec.rollout.batch_slots,
        cache_tokens=spec.rollout.cache_tokens,
        replicas=None,
        requests=0 if spec.train.loss == "sft" else samples,  # which is shown its answers
        read=lengths.prompt,
        written=lengths.response,
        longest=longest,
        longest_written=spec.rollout.max_new_tokens,
        shared=spec.flow.samples_per_prompt,
        share=_share(spec.rollout.engine, spec.rollout.engine_args),
    )
    judges = tuple(
        _judge(judge, shapes.judges[judge.name], spec, lengths, longest)
        for judge in spec.judges
        if judge.model is not None
    )
    training = _training(spec, shapes, lengths, longest)
    return Workload(
        rollout,
        judges,
        training,
        ahead=spec.rollout.staleness > 0,
        turns=_turns(spec),
        resident=spec.placement.is_live and bool(judges),
    )


def _turns(spec: JobSpec) -> tuple[bool, ...]:
    if spec.placement.memory is not None:
        return (spec.placement.memory == "in_turns",)
    overlaps = spec.rollout.staleness > 0 or spec.train.stream
    return (False,) if overlaps else (False, True)


def longest_prompt(spec: JobSpec, shape: ModelShape) -> int:
    """Tokens, as far as the spec bounds them."""
    said = max(source.max_prompt_tokens or LONGEST_GUESSED for source in training_sources(spec))
    return max(1, min(said, _context(spec, shape) - spec.rollout.max_new_tokens))


def _context(spec: JobSpec, shape: ModelShape) -> int:
    return min(shape.context, spec.model.max_length or shape.context)


def _judge(judge: JudgeSpec, shape: ModelShape, spec: JobSpec, lengths: Lengths, longest: int) -> Served:
    assert judge.model is not None
    classifies = judge.kind == "classifier"
    template = _template_tokens(judge)
    others = (judge.opponents or spec.flow.samples_per_prompt - 1) if judge.mode == "pairwise" else 1
    shown = 2 if judge.mode == "pairwise" else 1
    most_written = 0 if classifies else judge.max_new_tokens
    context = min(shape.context, judge.model.max_length or shape.context)
    return Served(
        name=f"judge {judge.name}",
        shape=shape.with_one_output(bias=False) if classifies else shape,
        engine=judge.serving.engine,
        rows=judge.serving.batch_slots,
        cache_tokens=judge.serving.cache_tokens,
        replicas=judge.serving.replicas,
        requests=spec.flow.groups_per_step * spec.flow.samples_per_prompt * max(1, others) * judge.votes,
        read=template + lengths.prompt + shown * lengths.response,
        written=most_written / 2,
        longest=min(context, template + longest + (shown - 1) * spec.rollout.max_new_tokens + most_written),
        longest_written=most_written,
        shared=judge.votes,
        share=_share(judge.serving.engine, judge.serving.engine_args),
    )


def _template_tokens(judge: JudgeSpec) -> int:
    """What it adds to prompt and response."""
    said = re.sub(r"\{[{%#].*?[}%#]\}", "", judge.template or "", flags=re.DOTALL)
    return -(-(len(said) + len(judge.system or "")) // CHARACTERS_OF_A_TOKEN)


def _share(engine: str, arguments: Sequence[str]) -> float | None:
    if engine != "sglang":
        return None
    words = [word for argument in arguments for word in argument.split("=", 1)]
    for name, value in pairwise(words):
        if name == "--mem-fraction-static":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                break  # SGLang says what is wrong with it
    return SGLANG_SHARE


def _training(spec: JobSpec, shapes: Shapes, lengths: Lengths, longest: int) -> Training:
    train = spec.train
    models = {"policy training": shapes.policy}
    if train.critic is not None:
        models["critic training"] = (shapes.critic or shapes.policy).with_one_output(bias=True)
    written = spec.rollout.max_new_tokens
    later = train.mini_batches - 1 if train.epochs == 1 and train.critic is None else train.mini_batches
    recomputed = later / train.mini_batches if train.old_logprobs == "recompute" and train.loss != "sft" else 0.0
    return Training(
        models=models,
        reference=train.kl_coef > 0,
        offloads=train.offload_reference,
        stage=train.zero_stage,
        half=train.dtype == "bf16",
        recomputes=train.activation_checkpointing,
        micro_tokens=train.micro_batch_tokens,
        longest=longest,
        samples=spec.flow.groups_per_step * spec.flow.samples_per_prompt,
        tokens=lengths.prompt + lengths.response,
        scored=written / (written + lengths.prompt),
        mini_batches=train.mini_batches,
        epochs=train.epochs,
        forwards=recomputed + (train.kl_coef > 0),
    )
