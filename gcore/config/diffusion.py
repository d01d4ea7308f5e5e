"""The sections `rollout.diffusion` and `train.diffusion` of a job spec: how pictures are generated, and how their denoising steps
are trained.

A denoising policy generates a picture in `steps` steps. Some of them are random and have a log-probability; these are trained.
`gcore.config.denoising` checks the other sections of such a job.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gcore.config.base import Section

MOST_DENOISING_STEPS = 1000

Sampler = Literal["sde", "cps", "dance", "ode"]

DENOISING_LOSSES = ("grpo_guard", "nft", "weighted_matching")
"""Losses that only denoising policies have. With `ppo` they share the clipped loss."""

LARGEST_CLIP = 0.05
"""Largest clip range of denoising steps."""

FORWARD_LOSSES = ("nft", "weighted_matching")
"""Losses that need only finished pictures: they add noise to them again. No log-probabilities are compared."""


class WindowSpec(Section):
    """Which denoising steps are random and trained (MixGRPO, arXiv 2507.21802). All others follow the ODE."""

    size: PositiveInt = Field(description="Number of steps in the window")
    start: NonNegativeInt = Field(0, description="First step of the first window")
    strategy: Literal["fixed", "progressive", "random", "decay", "exp_decay"] = Field(
        "fixed",
        description="How the window moves with training steps. fixed: not at all. progressive: on, after `stay` training steps. decay, "
        "exp_decay: the same, and each later window stays shorter. random: to a random place at each training step",
    )
    stay: PositiveInt = Field(25, description="Training steps until the window moves on")
    stride: PositiveInt | None = Field(
        None, description="Denoising steps by which it moves on. Default: its size, so that windows do not overlap"
    )
    roll_back: bool = Field(True, description="Return to the first window after the last one. false: stay at the last")
    least_stay: PositiveInt | None = Field(
        None, description="Fewest training steps that a window stays, with decay. Default: a quarter of `stay`"
    )
    decay_after: NonNegativeInt = Field(13, description="Start of a window from which exp_decay shortens its stay")
    decay_rate: NonNegativeFloat = Field(0.1, description="Rate of exp_decay for each denoising step")


class DenoisingSpec(Section):
    """How the policy generates pictures, with an engine that generates pictures."""

    steps: PositiveInt = Field(10, le=MOST_DENOISING_STEPS, description="Denoising steps of a picture")
    eval_steps: PositiveInt | None = Field(
        None,
        le=MOST_DENOISING_STEPS,
        description="Denoising steps of a picture in evaluation, which follows the ODE without noise. Default: `steps`",
    )
    height: PositiveInt | None = Field(
        None, le=16384, description="Height of pictures in pixels. Default: the pipeline's"
    )
    width: PositiveInt | None = Field(
        None, le=16384, description="Width of pictures in pixels. Default: the pipeline's"
    )
    guidance: Annotated[float, Field(ge=0, le=1000)] = Field(
        1.0,
        description="Guidance: how far predictions are moved from those of the negative prompt to those of the prompt. Up to 1: none. "
        "Training replays steps with the same guidance",
    )
    negative: str = Field("", max_length=10_000, description="Negative prompt, used with guidance")
    sampler: Sampler = Field(
        "sde",
        description="Random steps. sde: Flow-GRPO (with a DDIM scheduler: DDIM's own). cps: coefficients-preserving sampling. dance: "
        "DanceGRPO. ode: none, for losses that need no log-probabilities",
    )
    noise_level: PositiveFloat = Field(
        0.7, le=100, description="Strength of the noise in random steps: a of sde and cps, η of dance and DDIM"
    )
    constants: bool = Field(
        True,
        description="Whether log-probabilities are those of the normal distribution. false: without constants and variance, as Flow-GRPO "
        "computes them for cps. Ratios and clip ranges then mean something else",
    )
    window: WindowSpec | None = Field(
        None, description="Window of random steps. Default: all steps are random that can be trained"
    )
    trained_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="Share of the random steps that is trained, drawn for each picture. With losses without log-probabilities: share of "
        "the noise levels",
    )
    same_noise: bool = Field(
        False, description="Begin all pictures of a group with the same noise. Their random steps still differ"
    )

    @model_validator(mode="after")
    def _check_fields(self) -> DenoisingSpec:
        if self.window is not None and self.sampler == "ode":
            raise ValueError("sampler: ode has no random steps, so it cannot have a window; leave window out")
        if self.window is not None and self.window.start + self.window.size > self.steps:
            raise ValueError(
                f"a window of {self.window.size} steps from step {self.window.start} is not within {self.steps} steps; lower "
                "window.size or window.start"
            )
        if self.sampler == "cps" and self.noise_level > 1:
            raise ValueError(
                f"noise_level is {self.noise_level:g}, but cps replaces at most all of the noise; use at most 1"
            )
        return self


class AverageSpec(Section):
    """How the served network follows the trained one, with loss: nft. After training step n (from 0), the served weights keep
    min(most, rise·max(0, n - after)) of themselves and take the rest from the trained ones."""

    rise: NonNegativeFloat = Field(0.001, description="Growth of the share that is kept, by training step")
    most: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="Largest share that is kept")
    after: NonNegativeInt = Field(0, description="Training step after which the share grows from 0")


class DenoisingTraining(Section):
    """How denoising steps are trained."""

    adv_std: Literal["batch", "group", "none"] = Field(
        "batch",
        description="Which rewards' deviation divides advantages: of the whole step, or of the prompt's group. none: not divided, for "
        "reward.compose: standardised",
    )
    adv_ddof: Literal[0, 1] = Field(0, description="0: deviation of a population. 1: of a sample")
    adv_eps: NonNegativeFloat = Field(1e-4, description="What is added to the deviation")
    adv_clip: PositiveFloat | None = Field(5.0, description="Largest size of an advantage. null: no bound")
    kl: Literal["flow", "exact"] = Field(
        "flow",
        description="KL to the reference, of a step. flow: divided by the SDE's coefficient, as Flow-GRPO does. exact: of the two normal "
        "distributions",
    )
    nft_beta: PositiveFloat = Field(
        1.0, le=10, description="How far loss: nft moves from the served network to the trained one. 1: all the way"
    )
    average: AverageSpec = AverageSpec()
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Evaluate a moving average of the trained weights, which keeps this share of itself at each step. Engines hold both. "
        "Default: evaluate the trained weights",
    )
    temperature: PositiveFloat = Field(
        1.0,
        description="With loss: weighted_matching, a picture counts with exp(advantage / temperature), so lower values prefer the best",
    )

    def kept_share(self, step: int) -> float:
        """The share of itself that the network that follows the trained one keeps after training step `step`, from 0."""
        if self.ema_decay is not None:
            return self.ema_decay
        average = self.average
        return min(average.most, average.rise * max(0, step - average.after))
