"""Scenarios of the simulator: a job and its cluster, read from a file. Lengths in tokens, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from gcore.config.base import shorten_text
from gcore.errors import SpecError, did_you_mean
from placement.slots import SplitBounds

MOST_SLOTS = 4096
MOST_STEPS = 100_000

MOST_RESPONSES = 1_000_000
"""Maximum responses to a step's prompts, including filtered ones. Limits the memory of a simulation."""

MOST_SCENARIO_BYTES = 1 << 20
Proportion = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]

Longer = Annotated[float, Field(gt=0, le=1e6)]
"""A positive number of seconds, or a factor."""

Spread = Annotated[float, Field(ge=0, le=10)]
Tokens = Annotated[float, Field(gt=0, le=1e7)]
StepNumber = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Slots = Annotated[int, Field(ge=1, le=MOST_SLOTS)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ScenarioEngine(_Section):
    """Speed of an engine: with `b` running requests, a token of each takes `token_s + sequence_s * b` seconds. Requests
    beyond `running` wait."""

    token_s: Longer = 0.02
    sequence_s: Longer = 0.001
    running: Annotated[PositiveInt, Field(le=MOST_RESPONSES)] = 64
    size: Slots = Field(1, description="Slots of a replica")


class ScenarioLengths(_Section):
    """Response lengths in tokens: log-normal, cut off at `cap`. `same_prompt`: correlation between the logarithms of
    two responses to the same prompt. `jump`: factor on the mean from step `jump_at` on."""

    mean: Tokens = 500.0
    spread: Spread = Field(
        0.9, description="Standard deviation, beside the mean. 0: all are equal, as pictures have denoising steps"
    )
    same_prompt: float = Field(0.5, ge=0, le=1)
    cap: Annotated[PositiveInt, Field(le=10_000_000)] = 8192
    growth: Longer = Field(1.0, description="Of the mean, from the first step to the last")
    jump_at: Annotated[StepNumber, Field(ge=1)] | None = None
    jump: Longer = 1.0


class ScenarioJudging(_Section):
    """Judgement lengths in tokens: mean, and standard deviation relative to it. From step `slow_from` until before step
    `slow_until`, a judgement has `slow` times as many tokens, and each token takes `paced` times as long."""

    tokens: Tokens = 64.0
    spread: Annotated[Spread, Field(gt=0)] = 0.3
    slow: Longer = 1.0
    paced: Longer = 1.0
    slow_from: StepNumber = 0
    slow_until: StepNumber = 0


class ScenarioTraining(_Section):
    """Training of a step takes `fixed_s + tokens / (rate * slots)` seconds, then weight sync takes `sync_s`. `sizes`:
    possible train world sizes."""

    fixed_s: Seconds = 2.0
    rate: Annotated[float, Field(ge=1e-6, le=1e15)] = 1500.0
    sync_s: Seconds = 1.0
    sizes: Annotated[tuple[Slots, ...], Field(max_length=MOST_SLOTS)] = (2, 4, 8, 16)


class ScenarioLoss(_Section):
    """A number of slots (`slots`) that the simulated cluster lacks from step `at` up to, not including, step `until`."""

    at: Annotated[StepNumber, Field(ge=1)]
    until: Annotated[StepNumber, Field(ge=1)]
    slots: Slots


class ScenarioNoise(_Section):
    """Relative standard deviations of random errors. `replica`: of a replica's speed, constant in a run and not known
    to policies. `train`: of each step's training time. `measured`: of measurements. `missing`: probability that the
    measurements of a step are missing."""

    replica: Spread = 0.05
    train: Spread = 0.03
    measured: Spread = 0.1
    missing: Proportion = 0.1


class Scenario(_Section):
    """A simulated job of `steps` steps on `slots` slots, with `groups` prompts per step and `samples` responses per
    prompt. With `staleness` above 0 the next batch is generated while this one trains."""

    name: str
    what: str
    slots: Slots = 16
    steps: Annotated[PositiveInt, Field(le=MOST_STEPS)] = 200
    groups: Annotated[PositiveInt, Field(le=MOST_RESPONSES)] = 32
    samples: Annotated[PositiveInt, Field(le=MOST_RESPONSES)] = 8
    staleness: StepNumber = 0
    filtered: Proportion = Field(0.0, description="Share of the groups that are judged and not trained")
    rollout: ScenarioEngine = ScenarioEngine()
    reward: ScenarioEngine = ScenarioEngine()
    lengths: ScenarioLengths = ScenarioLengths()
    judging: ScenarioJudging | None = ScenarioJudging()
    training: ScenarioTraining = ScenarioTraining()
    prompt: Annotated[PositiveInt, Field(le=10_000_000)] = 200
    wake_s: Seconds = Field(1.0, description="Sleep and wake of what takes its turn on co-located slots")
    losses: Annotated[tuple[ScenarioLoss, ...], Field(max_length=1000)] = ()
    noise: ScenarioNoise = ScenarioNoise()
    colocated: bool = Field(True, description="Whether the memory of a slot holds all models")

    @model_validator(mode="after")
    def _is_not_too_large(self) -> Scenario:
        made = self.groups * self.samples / (1 - self.filtered)
        if made > MOST_RESPONSES:
            raise ValueError(f"a step has {made:.3g} responses; the maximum is {MOST_RESPONSES:,}")
        return self

    @property
    def overlaps(self) -> bool:
        """Whether in a co-existing split the next batch is generated while this one trains."""
        return self.staleness > 0

    @property
    def lendable(self) -> bool:
        """Whether replicas can be lent within a step: there is a judge, and engines of both pools span equally many
        slots."""
        return self.judging is not None and self.rollout.size == self.reward.size

    def reward_at(self, step: int) -> ScenarioEngine:
        """Return the speed of a judge's engine in this step."""
        judging = self.judging
        if judging is None or judging.paced == 1.0 or not judging.slow_from <= step < judging.slow_until:
            return self.reward
        slower = {"token_s": self.reward.token_s * judging.paced, "sequence_s": self.reward.sequence_s * judging.paced}
        return self.reward.model_copy(update=slower)

    def slots_at(self, step: int) -> int:
        """Return the number of slots that are present in a step."""
        return self.slots - sum(loss.slots for loss in self.losses if loss.at <= step < loss.until)

    def bounds(self, step: int) -> SplitBounds:
        """Return the bounds of splits in this step."""
        return self.bounds_of(self.slots_at(step))

    def bounds_of(self, slots: int) -> SplitBounds:
        """Return the bounds of splits if this many slots are present."""
        return SplitBounds(
            slots,
            self.rollout.size,
            self.reward.size,
            self.training.sizes,
            self.judging is not None,
            self.colocated,
        )

    def changed(self, **fields: Any) -> Scenario:
        """Return a copy with changed fields, validated again."""
        return Scenario.model_validate({**self.model_dump(), **fields})


SECTIONS: Mapping[str, type[BaseModel]] = {  # for the names that an error message suggests
    "rollout": ScenarioEngine,
    "reward": ScenarioEngine,
    "lengths": ScenarioLengths,
    "judging": ScenarioJudging,
    "training": ScenarioTraining,
    "losses": ScenarioLoss,
    "noise": ScenarioNoise,
}


def read_scenario(path: Path) -> Scenario:
    """Read a scenario from a YAML file. Raises SpecError that names the mistake."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_SCENARIO_BYTES + 1)
        if len(raw) > MOST_SCENARIO_BYTES:
            raise ValueError(f"the file is larger than {MOST_SCENARIO_BYTES} bytes")
        return Scenario.model_validate(yaml.safe_load(raw))
    except OSError as error:
        raise SpecError(
            f"cannot read the scenario {path}: {error.strerror}", fix="Use a file of benchmarks/scenarios"
        ) from error
    except ValidationError as error:
        raise SpecError(
            f"the scenario {path} is not valid: {scenario_problem(error)}",
            fix="docs/develop/placement-simulation.md lists all fields",
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        problem = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())[:200]
        raise SpecError(
            f"the scenario {path} is not valid YAML: {problem}",
            fix="See benchmarks/scenarios for examples",
        ) from error


def scenario_problem(error: ValidationError) -> str:
    """Describe the first mistake in a scenario in words, with its key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section = next((kind for name, kind in SECTIONS.items() if first["loc"][0] == name), Scenario)
        known = (section if len(first["loc"]) > 1 else Scenario).model_fields
        return f"unknown key {shorten_text(repr(key))}{did_you_mean(str(first['loc'][-1]), known)}"
    if first["type"] == "missing":
        return f"{key!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if not key:
        return message if first["type"] == "value_error" else "the content is not a mapping"
    return f"{key}: {message[:1].lower()}{message[1:]}"
