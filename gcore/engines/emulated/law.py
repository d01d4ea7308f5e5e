"""Timing model of emulated devices: how long loading, prefill, decoding, training and weight updates take.

Every replica has a constant speed, sampled from its name, and every duration has some noise: real devices differ, and
by an amount that a planner cannot know. Code that forecasts must not import this module; it has to measure, as with
real devices.

The formulas have the form of real engines: a decode step has a fixed part and a part per sequence, a prompt is
prefilled at a rate, a training step has a fixed part and a part per token. The numbers are those of no particular
device. Times are emulated seconds: `speedup` of them pass in a real one. This module does not know requests (`device`
does) and does not read the time.

Changes during a run (slower judges, longer responses) depend on the step of the weights, never on the time, so a step
is the same work no matter when it is reached. A rollout engine knows the step from the version of its weights. A judge
engine, whose weights never change, gets the step from its host (`ReplicaTiming.step`).
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
"""Maximum of the logarithm of the growth factor of response lengths, so that the median fits a float."""


class TimingModel(RecordPart):
    """Parameters of the timing model. Times in emulated seconds, rates in tokens per emulated second.

    `seed`: of all sampled speeds, durations and lengths.
    """

    seed: int = 0
    speedup: PositiveFloat = 1.0
    """Emulated seconds per real second."""
    memory_gib: PositiveFloat | None = None
    """Device memory of each slot, which placement takes into account; None: not known. Nothing is allocated
    (`launch.emulated_memory` reads it)."""
    load_s: NonNegativeFloat = 1.0
    """Time from the start of an engine or a rank until it serves."""
    prefill_tokens_per_s: PositiveFloat = 20_000.0
    decode_s: PositiveFloat = 0.02
    """Duration of a decode step of one sequence, which generates one token."""
    decode_per_sequence_s: NonNegativeFloat = 0.0005
    """Additional duration of a decode step per further sequence."""
    shared_loss: NonNegativeFloat = 0.0
    """Slowdown of engines that compute on one slot at once, in addition to sharing its speed: with two engines each
    step takes 2 * (1 + `shared_loss`) times as long.
    """
    span_gain: Proportion = 0.8
    """Speedup by tensor parallelism: an engine on n slots prefills and decodes n ** `span_gain` times as fast as on
    one.
    """
    publish_s: NonNegativeFloat = 0.2
    """Duration of a weight update of an engine."""
    sleep_s: NonNegativeFloat = 0.2
    """Duration of releasing a device's memory."""
    wake_s: NonNegativeFloat = 0.4
    """Duration of restoring a device's memory."""
    train_s: NonNegativeFloat = 0.3
    """Fixed part of the duration of a rank's step, independent of tokens."""
    train_tokens_per_s: PositiveFloat = 50_000.0
    """Training rate of one rank, over the tokens of prompts and responses."""
    save_s: NonNegativeFloat = 0.1
    """Duration of staging the weights of a step."""
    replica_noise: NonNegativeFloat = 0.05
    """Spread of the replicas' speeds: standard deviation of the logarithm of the speed."""
    event_noise: NonNegativeFloat = 0.02
    """Spread of single durations: standard deviation of the logarithm."""
    response_tokens: PositiveInt = 24
    """Median length of the policy's responses in tokens."""
    response_spread: NonNegativeFloat = 0.6
    """Standard deviation of the logarithm of a response's length."""
    response_likeness: Proportion = 0.4
    """Correlation of the lengths of responses to one prompt."""
    response_growth: PositiveFloat = 1.0
    """Factor by which the median length grows from the weights of one step to those of the next."""
    response_jump_at: NonNegativeInt | None = None
    """From the weights of this step on, the median length is `response_jump` times as large."""
    response_jump: PositiveFloat = 1.0
    response_blob_bytes: NonNegativeInt = 0
    """Random bytes that come with each response of the policy, as a blob in the store of its node; 0: none. Only in jobs
    with pictures, whose nodes have a store.
    """
    denoise_s: PositiveFloat = 0.02
    """Fixed part of the duration of a pass of the network that denoises, of a policy that generates pictures."""
    denoise_per_token_s: NonNegativeFloat = 1e-5
    """Additional duration of a pass for each image token of each picture."""
    denoise_per_pair_s: NonNegativeFloat = 0.0
    """Additional duration of a pass for each pair of image tokens of each picture (attention)."""
    picture_s: NonNegativeFloat = 0.02
    """Duration of decoding a picture, which delays the steps of the others."""
    judge_decode_s: PositiveFloat = 0.02
    """Like `decode_s`, but for judge engines; so are the fields below. Prefill, sleep and wake are as for the policy.
    """
    judge_decode_per_sequence_s: NonNegativeFloat = 0.0005
    judge_response_tokens: PositiveInt = 12
    judge_response_spread: NonNegativeFloat = 0.4
    judge_response_growth: PositiveFloat = 1.0
    judge_slow_at: NonNegativeInt | None = None
    """From this step on, decode steps of judges take `judge_slow` times as long."""
    judge_slow: PositiveFloat = 1.0
    judge_positive: Proportion = 0.5
    """Share of a judge's verdicts that are the best possible one; all others are the worst."""

    @property
    def of_policy(self) -> EngineTimingModel:
        """The parameters that differ between kinds of engines, for rollout engines."""
        lengths = ResponseLengths(
            self.response_tokens,
            self.response_spread,
            self.response_likeness,
            self.response_growth,
            self.response_jump_at,
            self.response_jump,
        )
        return EngineTimingModel(self.decode_s, self.decode_per_sequence_s, lengths)

    def of_pictures(self, tokens: int, passes: int) -> EngineTimingModel:
        """The parameters that differ between kinds of engines, for engines that generate pictures: their decode steps are
        denoising steps. `tokens`: image tokens of a picture. `passes`: of the network in a step."""
        each = passes * (tokens * self.denoise_per_token_s + tokens * tokens * self.denoise_per_pair_s)
        steps = ResponseLengths(1, spread=0.0, likeness=0.0)  # not used: requests say how many steps
        return EngineTimingModel(passes * self.denoise_s + each, each, steps, sample_s=self.picture_s)

    @property
    def of_judges(self) -> EngineTimingModel:
        """The parameters that differ between kinds of engines, for judge engines."""
        lengths = ResponseLengths(
            self.judge_response_tokens, self.judge_response_spread, likeness=0.0, growth=self.judge_response_growth
        )
        return EngineTimingModel(
            self.judge_decode_s, self.judge_decode_per_sequence_s, lengths, self.judge_slow_at, self.judge_slow
        )

    @property
    def judges_change(self) -> bool:
        """Whether the speed or the response lengths of judge engines depend on the step, so that they must be told it."""
        return self.judge_slow_at is not None or self.judge_response_growth != 1.0


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Log-normal distribution of response lengths. See `TimingModel.response_tokens` and the fields after it."""

    median: float
    spread: float
    likeness: float
    growth: float = 1.0
    jump_at: int | None = None
    jump: float = 1.0

    def median_at(self, step: int) -> float:
        """Return the median length in tokens with the weights of that step, limited so that it fits a float."""
        jumped = self.jump if self.jump_at is not None and step >= self.jump_at else 1.0
        grown = math.exp(min(step * math.log(self.growth), MOST_GROWN))
        return max(self.median * grown * jumped, 1.0)


@dataclass(frozen=True, slots=True)
class EngineTimingModel:
    """Timing parameters that differ between rollout engines and judge engines."""

    decode_s: float
    decode_per_sequence_s: float
    lengths: ResponseLengths
    slow_at: int | None = None
    slow: float = 1.0
    sample_s: float = 0.0
    """Duration of what a sample needs beside its steps, in emulated seconds: decoding a picture."""

    def decode_step(self, sequences: int, step: int) -> float:
        """Return the duration of a decode step of this many sequences, in emulated seconds, without speeds and noise.

        `step`: that of the weights.
        """
        slow = self.slow if self.slow_at is not None and step >= self.slow_at else 1.0
        return slow * (self.decode_s + self.decode_per_sequence_s * (sequences - 1))


def named_generator(*names: object) -> np.random.Generator:
    """Return a random generator whose seed is a hash of these names; it is the same on any machine."""
    text = "\0".join(map(str, names)).encode()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(text).digest()[:16], "big")))


class ReplicaTiming:
    """Samples the durations of one replica (engine or train rank), in emulated seconds; every call samples again.

    `name`: determines the replica's speed and its random numbers. `engine`: parameters of its kind of engine; None:
    those of a rollout engine. `slots`: number of slots that it uses. `step`: step of the weights, set by the caller.
    """

    def __init__(self, law: TimingModel, name: str, engine: EngineTimingModel | None = None, slots: int = 1) -> None:
        self.law = law
        self._faster = float(slots**law.span_gain)
        self.engine = engine or law.of_policy
        self.step = 0
        self._draws = named_generator("timing", law.seed, name)
        self._pace = self._noise(law.replica_noise)

    def load(self) -> float:
        """Sample the time from the replica's start until it serves."""
        return self._taken(self.law.load_s)

    def prefill(self, tokens: int) -> float:
        """Sample the time of a prefill with this many tokens."""
        return self._taken(tokens / self.law.prefill_tokens_per_s / self._faster)

    def begin(self, tokens: int, samples: int) -> float:
        """Sample the time of the prefill of this many tokens, and of what so many new samples need beside their steps."""
        prefill = self.prefill(tokens)
        return prefill + (self._taken(samples * self.engine.sample_s) if self.engine.sample_s else 0.0)

    def decode_step(self, sequences: int) -> float:
        """Sample the time of a decode step of this many sequences (at least 1), which generates a token for each."""
        return self._taken(self.engine.decode_step(sequences, self.step) / self._faster)

    def publish(self) -> float:
        """Sample the time of a weight update."""
        return self._taken(self.law.publish_s)

    def sleep(self) -> float:
        """Sample the time to release the device's memory."""
        return self._taken(self.law.sleep_s)

    def wake(self) -> float:
        """Sample the time to restore the device's memory."""
        return self._taken(self.law.wake_s)

    def train(self, tokens: int) -> float:
        """Sample the time of a training step with this many tokens on one rank."""
        return self._taken(self.law.train_s + tokens / self.law.train_tokens_per_s)

    def accumulate(self, tokens: int) -> float:
        """Sample the time to train this many tokens of one part of a streamed step, without the step's fixed time."""
        return self._taken(tokens / self.law.train_tokens_per_s)

    def save(self) -> float:
        """Sample the time to stage weights."""
        return self._taken(self.law.save_s)

    def _taken(self, seconds: float) -> float:
        return seconds * self._pace * self._noise(self.law.event_noise) if seconds else 0.0

    def _noise(self, spread: float) -> float:
        """Return a random factor with mean 1."""
        return math.exp(spread * float(self._draws.standard_normal()) - spread * spread / 2) if spread else 1.0


def read_timing_model(environment: Mapping[str, str]) -> TimingModel:
    """Read the timing model of emulated devices: the file named by `GCORE_EMULATED_LAW`, else the default.

    Raises UsageError for an invalid file, and for a relative path.
    """
    name = environment.get(LAW_FILE)
    if not name:
        return TimingModel()
    if not Path(name).is_absolute():
        fix = "Use an absolute path, or start the cluster with `gcore up` or `gcore run`, which convert it"
        raise UsageError(
            "the path is relative, and a worker runs in another folder", where=f"{LAW_FILE}={name}", fix=fix
        )
    try:
        return TimingModel.model_validate_json(Path(name).read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the timing model ({error.strerror or error})", where=name) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(
            f"invalid timing model: {field}: {first['msg']}", where=name, fix="See gcore.engines.emulated.law"
        ) from error


def main() -> None:
    """Check the timing model file that the first argument names. If it is invalid, print why and exit with 2."""
    try:
        read_timing_model({LAW_FILE: sys.argv[1]})
    except UsageError as error:
        sys.stdout.write(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
