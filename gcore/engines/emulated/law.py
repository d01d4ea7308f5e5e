"""Durations of an emulated device.

Every replica has a constant speed, sampled from its name, and every duration has some noise: real devices differ, and
by an amount that an observer cannot know. Code that forecasts must not import this module; it has to measure, as with
real devices.

The law has the form of real engines: a decode step has a fixed part and a part per sequence, a prompt is prefilled at a
rate, a training step has a fixed part and a part per token. Its numbers are of no particular device. Times are emulated
seconds: `speedup` of them pass in a real one. This module knows no requests (`device`) and reads no clock.

What changes during a run depends on the step of the weights, never on the clock, so every step is the same work for
every observer, no matter when it is reached. A rollout engine knows the step from its version. A judge engine, whose
weights never change, gets it explicitly (`ReplicaTiming.step`).
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from gcore.engines.emulated.launch import LAW_FILE
from gcore.errors import UsageError
from gcore.schema import RecordPart

Proportion = Annotated[float, Field(ge=0, le=1)]

MOST_GROWN = 50.0
"""The logarithm that growth comes to at most: no response is so long."""


class TimingModel(RecordPart):
    """The numbers. Times in emulated seconds, rates in tokens a second."""

    seed: int = 0
    speedup: PositiveFloat = 1.0
    """Emulated seconds that pass in a real one."""
    load_s: NonNegativeFloat = 1.0
    """From an engine's or a rank's start to its serving."""
    prefill_tokens_per_s: PositiveFloat = 20_000.0
    decode_s: PositiveFloat = 0.02
    """A decode step of one sequence, which makes one token of it."""
    decode_per_sequence_s: NonNegativeFloat = 0.0005
    """What each further sequence adds to the step."""
    shared_loss: NonNegativeFloat = 0.0
    """What engines that compute on one slot at once lose by that, beside the pace that they share: of two, each step takes
    2 * (1 + `shared_loss`) times as long."""
    span_gain: Proportion = 0.8
    """What an engine gains by slots: over n of them it reads and decodes n ** `span_gain` times as fast as over one."""
    publish_s: NonNegativeFloat = 0.2
    """New weights into an engine."""
    sleep_s: NonNegativeFloat = 0.2
    wake_s: NonNegativeFloat = 0.4
    train_s: NonNegativeFloat = 0.3
    """A rank's step, without what goes by tokens."""
    train_tokens_per_s: PositiveFloat = 50_000.0
    """Of one rank, of prompts and responses."""
    save_s: NonNegativeFloat = 0.1
    """Staging the weights of a step."""
    replica_noise: NonNegativeFloat = 0.05
    """Spread of the replicas' paces: the standard deviation of their logarithm."""
    event_noise: NonNegativeFloat = 0.02
    """The same of a single duration."""
    response_tokens: PositiveInt = 24
    """The median length of a response."""
    response_spread: NonNegativeFloat = 0.6
    """The standard deviation of its logarithm."""
    response_likeness: Proportion = 0.4
    """How much of that the responses to one prompt have in common: their correlation."""
    response_growth: PositiveFloat = 1.0
    """The median's factor from the weights of one step to those of the next."""
    response_jump_at: NonNegativeInt | None = None
    """From this step's weights on, the median is `response_jump` times as large."""
    response_jump: PositiveFloat = 1.0
    judge_decode_s: PositiveFloat = 0.02
    """The same numbers for engines that serve a judge; reading, sleep and wake are as the policy's."""
    judge_decode_per_sequence_s: NonNegativeFloat = 0.0005
    judge_response_tokens: PositiveInt = 12
    judge_response_spread: NonNegativeFloat = 0.4
    judge_response_growth: PositiveFloat = 1.0
    judge_slow_at: NonNegativeInt | None = None
    """From this step on, decode steps of judges take `judge_slow` times as long."""
    judge_slow: PositiveFloat = 1.0
    judge_positive: Proportion = 0.5
    """How many verdicts are the best one; all others are the worst."""

    @property
    def of_policy(self) -> EngineTimingModel:
        """What differs from one kind of engine to another, for those of the policy."""
        lengths = ResponseLengths(
            self.response_tokens,
            self.response_spread,
            self.response_likeness,
            self.response_growth,
            self.response_jump_at,
            self.response_jump,
        )
        return EngineTimingModel(self.decode_s, self.decode_per_sequence_s, lengths)

    @property
    def of_judges(self) -> EngineTimingModel:
        """The same for those of judges."""
        lengths = ResponseLengths(
            self.judge_response_tokens, self.judge_response_spread, likeness=0.0, growth=self.judge_response_growth
        )
        return EngineTimingModel(
            self.judge_decode_s, self.judge_decode_per_sequence_s, lengths, self.judge_slow_at, self.judge_slow
        )

    @property
    def judges_change(self) -> bool:
        """Whether engines of judges have to be told the step."""
        return self.judge_slow_at is not None or self.judge_response_growth != 1.0


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Of responses. See `TimingModel.response_tokens` and what follows it."""

    median: float
    spread: float
    likeness: float
    growth: float = 1.0
    jump_at: int | None = None
    jump: float = 1.0

    def median_at(self, step: int) -> float:
        """With the weights of that step; a number that a float holds, however long a run is."""
        jumped = self.jump if self.jump_at is not None and step >= self.jump_at else 1.0
        grown = math.exp(min(step * math.log(self.growth), MOST_GROWN))
        return max(self.median * grown * jumped, 1.0)


@dataclass(frozen=True, slots=True)
class EngineTimingModel:
    """What differs from one kind of engine to another."""

    decode_s: float
    decode_per_sequence_s: float
    lengths: ResponseLengths
    slow_at: int | None = None
    slow: float = 1.0

    def decode_step(self, sequences: int, step: int) -> float:
        """How long one takes at that step of the run, before paces and noise."""
        slow = self.slow if self.slow_at is not None and step >= self.slow_at else 1.0
        return slow * (self.decode_s + self.decode_per_sequence_s * (sequences - 1))


def named_generator(*names: object) -> np.random.Generator:
    """A stream of numbers that belongs to these names, on any machine."""
    text = "\0".join(map(str, names)).encode()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(text).digest()[:16], "big")))


class ReplicaTiming:
    """One replica's durations, in emulated seconds; each call draws anew. `name` tells replicas apart, and runs.

    `engine`: of which kind it is, if it is an engine; None: the policy's. `slots`: that it spans. `step`: the step that its weights are of,
    or that it was told.
    """

    def __init__(self, law: TimingModel, name: str, engine: EngineTimingModel | None = None, slots: int = 1) -> None:
        self.law = law
        self._faster = float(slots**law.span_gain)
        self.engine = engine or law.of_policy
        self.step = 0
        self._draws = named_generator("timing", law.seed, name)
        self._pace = self._noise(law.replica_noise)

    def load(self) -> float:
        """Until it serves."""
        return self._taken(self.law.load_s)

    def prefill(self, tokens: int) -> float:
        """Reading so many tokens of prompts."""
        return self._taken(tokens / self.law.prefill_tokens_per_s / self._faster)

    def decode_step(self, sequences: int) -> float:
        """One more token of each of so many sequences, at least 1."""
        return self._taken(self.engine.decode_step(sequences, self.step) / self._faster)

    def publish(self) -> float:
        """Taking new weights in."""
        return self._taken(self.law.publish_s)

    def sleep(self) -> float:
        """Giving the device's memory back."""
        return self._taken(self.law.sleep_s)

    def wake(self) -> float:
        """Taking it again."""
        return self._taken(self.law.wake_s)

    def train(self, tokens: int) -> float:
        """A step on a rank whose share has so many tokens."""
        return self._taken(self.law.train_s + tokens / self.law.train_tokens_per_s)

    def accumulate(self, tokens: int) -> float:
        """A part of a step that comes in parts; the fixed part of the step is not in it."""
        return self._taken(tokens / self.law.train_tokens_per_s)

    def save(self) -> float:
        """Staging weights."""
        return self._taken(self.law.save_s)

    def _taken(self, seconds: float) -> float:
        return seconds * self._pace * self._noise(self.law.event_noise) if seconds else 0.0

    def _noise(self, spread: float) -> float:
        """A factor whose mean is 1."""
        return math.exp(spread * float(self._draws.standard_normal()) - spread * spread / 2) if spread else 1.0


def read_timing_model(environment: Mapping[str, str]) -> TimingModel:
    """The timing model of emulated devices: the file that `GCORE_EMULATED_LAW` names, else the default.

    Raises UsageError for a file that holds none, and for a relative path.
    """
    name = environment.get(LAW_FILE)
    if not name:
        return TimingModel()
    if not Path(name).is_absolute():
        fix = "Name it by its whole path, or bring the cluster up by `gcore up` or `gcore run`, which do"
        raise UsageError("a worker does not stand where this path begins", where=f"{LAW_FILE}={name}", fix=fix)
    try:
        return TimingModel.model_validate_json(Path(name).read_bytes())
    except OSError as error:
        raise UsageError(f"the law cannot be read ({error.strerror or error})", where=name) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(
            f"no law: {field}: {first['msg']}", where=name, fix="See gcore.engines.emulated.law"
        ) from error


def main() -> None:
    """Ends with 2 and one sentence if the file that is named holds no law."""
    try:
        read_timing_model({LAW_FILE: sys.argv[1]})
    except UsageError as error:
        sys.stdout.write(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
