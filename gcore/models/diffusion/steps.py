"""One denoising step as a normal distribution of the next state, and the log-probability of a state that was sampled.

Flow matching: the state at noise level σ is x = (1 - σ)·x0 + σ·ε, with clean data x0 and Gaussian noise ε. The network
gives the velocity v ≈ ε - x0, so x0 = x - σv and ε = x + (1 - σ)v. A schedule has falling levels from 1 to 0, and a step
goes from σ to the next level σ'; Δ = σ' - σ is negative. Levels are those of the pipeline's scheduler. Do not compute them
again from timesteps: the first level must be exactly the scheduler's.

Kinds of steps:

- `sde` (Flow-GRPO, arXiv 2505.05470): Euler-Maruyama of an SDE with the marginals of the ODE.
- `cps` (coefficients-preserving sampling, arXiv 2509.05952): noise replaces a part of the predicted noise.
- `dance` (DanceGRPO, arXiv 2505.07818): the ODE with a score correction of constant strength.
- `ode`: the deterministic Euler step. It has no log-probability and is not trained.
- `ddim` (DDPO, arXiv 2305.13301): DDIM's step with noise, for models that predict ε or v (`ddim_step`).

All states are [batch, ...]. Log-probabilities are **means over all dimensions but the batch**, in float32 or wider, as in
the reference implementations: they are 10⁴ to 10⁵ times smaller than the true ones, and so are the clip ranges that fit them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

StepKind = Literal["sde", "cps", "dance", "ode"]
PredictionType = Literal["epsilon", "v_prediction"]


@dataclass(frozen=True, slots=True, eq=False)
class DenoisingStep:
    """The distribution of the next state. `mean` [batch, ...]. `std`: standard deviation of each dimension; 0 for a
    deterministic step. `diffusion`: coefficient s of the SDE without the step size, by which Flow-GRPO's KL divides.
    """

    mean: Tensor
    std: float
    diffusion: float

    def sample(self, noise: Tensor) -> Tensor:
        """The next state for standard normal `noise` of the shape of the mean."""
        return self.mean + self.std * noise

    def log_prob(self, state: Tensor, *, constants: bool = True) -> Tensor:
        """Log-probability [batch] of the next state `state`, as a mean over its dimensions.

        `constants`: False leaves out the constants and the variance, as Flow-GRPO and verl-omni do for `cps`: the mean of
        -(state - mean)². Both sides of a ratio need the same form. Raises ValueError for a deterministic step.
        """
        if self.std <= 0:
            raise ValueError("a deterministic step has no log-probability")
        squares = ((state.to(self.mean.dtype) - self.mean) ** 2).flatten(1).mean(1)
        if not constants:
            return -squares
        return -squares / (2 * self.std**2) - math.log(self.std) - 0.5 * math.log(2 * math.pi)


def flow_step(
    kind: StepKind, state: Tensor, velocity: Tensor, sigmas: Tensor | list[float], index: int, noise_level: float
) -> DenoisingStep:
    """Step `index` of a flow-matching schedule: from `sigmas[index]` to `sigmas[index + 1]`.

    `state`, `velocity` [batch, ...] in float32 or wider; the velocity is the guided one if the sampler uses guidance.
    `sigmas` [steps + 1]: the scheduler's levels. `noise_level`: a of `sde` and `cps`, η of `dance`; ignored by `ode`.
    The first step of `sde` starts at σ = 1, where 1 - σ is 0; it uses `sigmas[1]` inside the root, by its index and not by
    a comparison of floating-point numbers. Raises ValueError.
    """
    if state.dtype in (torch.float16, torch.bfloat16) or velocity.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"states and velocities need float32 or wider, not {state.dtype} and {velocity.dtype}")
    if not 0 <= index < len(sigmas) - 1:
        raise ValueError(f"step {index} is not among the {len(sigmas) - 1} steps of the schedule")
    sigma, following = float(sigmas[index]), float(sigmas[index + 1])
    delta = following - sigma
    if delta >= 0:
        raise ValueError(f"the levels must fall, but step {index} goes from {sigma} to {following}")
    if kind != "ode" and noise_level <= 0:
        raise ValueError(f"the noise level of a random step must be positive, not {noise_level}")
    match kind:
        case "sde":
            level = float(sigmas[1]) if index == 0 else sigma
            s = noise_level * math.sqrt(sigma / (1 - level))
            mean = state * (1 + s * s * delta / (2 * sigma))
            mean = mean + velocity * ((1 + s * s * (1 - sigma) / (2 * sigma)) * delta)
            return DenoisingStep(mean, s * math.sqrt(-delta), s)
        case "cps":
            std = following * math.sin(noise_level * math.pi / 2)
            clean, noise = state - sigma * velocity, state + (1 - sigma) * velocity
            return DenoisingStep((1 - following) * clean + math.sqrt(following**2 - std**2) * noise, std, std)
        case "dance":
            clean = state - sigma * velocity
            score = -(state - (1 - sigma) * clean) / sigma**2
            mean = state + delta * velocity - 0.5 * noise_level**2 * delta * score
            return DenoisingStep(mean, noise_level * math.sqrt(-delta), noise_level)
        case "ode":
            return DenoisingStep(state + delta * velocity, 0.0, 0.0)


def ddim_step(
    state: Tensor,
    prediction: Tensor,
    alpha_bar: float,
    alpha_bar_next: float,
    eta: float,
    kind: PredictionType = "epsilon",
) -> DenoisingStep:
    """DDIM's step with noise (arXiv 2010.02502, equation 12), whose log-probability DDPO trains.

    `state`, `prediction` [batch, ...] in float32 or wider. `alpha_bar`, `alpha_bar_next`: cumulative products of α at the
    timestep and at the next, less noisy one. `eta`: share of DDPM's noise; 0 is deterministic. `kind`: what the network
    predicts. Raises ValueError for levels in the wrong order.
    """
    if not 0 < alpha_bar < alpha_bar_next <= 1:
        raise ValueError(f"0 < alpha_bar ({alpha_bar}) < alpha_bar_next ({alpha_bar_next}) <= 1 does not hold")
    root, rest = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
    if kind == "epsilon":
        noise = prediction
        clean = (state - rest * prediction) / root
    else:
        clean = root * state - rest * prediction
        noise = root * prediction + rest * state
    variance = (1 - alpha_bar_next) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_next)
    std = eta * math.sqrt(variance)
    mean = math.sqrt(alpha_bar_next) * clean + math.sqrt(1 - alpha_bar_next - std**2) * noise
    return DenoisingStep(mean, std, std)
