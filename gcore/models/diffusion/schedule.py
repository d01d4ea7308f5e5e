"""Noise levels of a pipeline's scheduler, and the distribution of each denoising step between them.

The levels always come from the scheduler of diffusers that the pipeline's folder has. Engines send the levels that they
used with each sample, and ranks replay with those numbers; a rank's own scheduler only says which process it is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gcore.errors import DataError
from gcore.models.diffusion.networks import read_settings
from gcore.models.diffusion.steps import DenoisingStep, StepKind, ddim_step, flow_step

FLOW, DDIM = "FlowMatchEulerDiscreteScheduler", "DDIMScheduler"
REFUSED = {
    "stochastic_sampling": "its steps are random",
    "invert_sigmas": "its levels rise",
    "use_karras_sigmas": "its levels are spread by another rule",
    "use_exponential_sigmas": "its levels are spread by another rule",
    "use_beta_sigmas": "its levels are spread by another rule",
    "thresholding": "it cuts off predictions",
    "clip_sample": "it cuts off predictions",
    "rescale_betas_zero_snr": "its first level has no signal",
}
"""Settings of a scheduler that a replayed step would not follow, and why."""


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """The scheduler of a pipeline. `settings`: of its configuration. `alphas`: cumulative products of α by timestep, of a
    DDIM scheduler."""

    settings: dict[str, Any]
    alphas: tuple[float, ...] = ()

    @staticmethod
    def load(folder: Path) -> NoiseSchedule:
        """Load the scheduler of a pipeline's folder. Raises DataError for one that gcore cannot replay."""
        file = folder / "scheduler" / "scheduler_config.json"
        settings = read_settings(file)
        name = settings["_class_name"]
        if name not in (FLOW, DDIM):
            raise DataError(
                f"the scheduler {name} is not supported",
                where=str(file),
                fix=f"Save the pipeline with {FLOW} or {DDIM}",
            )
        for setting, why in REFUSED.items():
            if settings.get(setting):
                raise DataError(
                    f"the scheduler has {setting}: {why}, which training cannot replay",
                    where=str(file),
                    fix=f"Set {setting} to false",
                )
        if name == FLOW:
            return NoiseSchedule(settings)
        if settings.get("prediction_type", "epsilon") not in ("epsilon", "v_prediction"):
            raise DataError(
                f"the scheduler's prediction_type is {settings['prediction_type']}",
                where=str(file),
                fix="Use a model that predicts epsilon or v_prediction",
            )
        return NoiseSchedule(settings, tuple(_scheduler(settings).alphas_cumprod.tolist()))

    @property
    def is_flow(self) -> bool:
        """Whether it is a flow-matching schedule, whose levels are σ; otherwise levels are timesteps of DDIM."""
        return not self.alphas

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the scheduler's settings, 64 hex digits."""
        own = {name: value for name, value in self.settings.items() if name != "_diffusers_version"}
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()

    def levels(self, steps: int, tokens: int, *, linear: bool = False) -> tuple[float, ...]:
        """The `steps` + 1 levels of a schedule, falling; the last is that of the finished picture.

        Raises ValueError if they do not fall: the last timestep of some DDIM schedules has no step after it.

        `tokens`: image tokens, by which a scheduler with `use_dynamic_shifting` shifts its levels. `linear`: the pipeline
        gives its scheduler the levels 1 to 1/steps, as Flux and Qwen-Image do. Raises ValueError.
        """
        if self.alphas:
            if steps > len(self.alphas):
                raise ValueError(f"{steps} steps are more than the {len(self.alphas)} timesteps of the scheduler")
            scheduler = _scheduler(self.settings)
            scheduler.set_timesteps(steps)
            times = [int(one) for one in scheduler.timesteps]
            return _falling([*times, max(times[-1] - len(self.alphas) // steps, 0)])
        scheduler = _scheduler(self.settings)
        given: dict[str, Any] = {"mu": self._shift(tokens)} if self.settings.get("use_dynamic_shifting") else {}
        if linear and not self.settings.get("use_flow_sigmas"):
            given["sigmas"] = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(steps, **given)
        return _falling(scheduler.sigmas)

    def _shift(self, tokens: int) -> float:
        """The shift of the levels of a picture with so many tokens: a line through two points of the configuration."""
        least, most = self.settings.get("base_image_seq_len", 256), self.settings.get("max_image_seq_len", 4096)
        low, high = self.settings.get("base_shift", 0.5), self.settings.get("max_shift", 1.15)
        return float(low + (tokens - least) * (high - low) / (most - least))

    def step(
        self,
        kind: StepKind,
        states: Tensor,
        predictions: Tensor,
        levels: Sequence[float],
        index: int,
        noise_level: float,
    ) -> DenoisingStep:
        """The distribution of the states after step `index` of `levels`. `states`, `predictions` [batch, ...], float32.

        With DDIM, `kind` sde is DDIM's own step with η = `noise_level`. Raises ValueError.
        """
        if not self.alphas:
            return flow_step(kind, states, predictions, list(levels), index, noise_level)
        if kind not in ("sde", "ode"):
            raise ValueError(f"a DDIM schedule has no steps of the kind {kind}")
        alpha, following = (self.alphas[int(level)] for level in levels[index : index + 2])
        eta = noise_level if kind == "sde" else 0.0
        prediction = self.settings.get("prediction_type", "epsilon")
        return ddim_step(states, predictions, alpha, following, eta, prediction)

    def is_trainable(self, kind: StepKind, levels: Sequence[float], index: int) -> bool:
        """Whether step `index` has a log-probability that training can use: not of the last step of a flow, whose
        standard deviation is close to 0, so that log-probabilities are beyond -1,000 where other steps have -1."""
        if kind == "ode" or not 0 <= index < len(levels) - 1:
            return False
        return bool(self.alphas) or not math.isclose(levels[index + 1], 0.0, abs_tol=1e-8)


def _falling(levels: Iterable[Any]) -> tuple[float, ...]:
    """These levels as numbers. Raises ValueError unless each is below the one before it."""
    found = tuple(float(one) for one in levels)
    if any(second >= first for first, second in pairwise(found)):
        raise ValueError(
            f"the scheduler's levels do not fall: {found[-2]:g} is followed by {found[-1]:g} at the end; a DDIM scheduler needs "
            "steps_offset: 1"
        )
    return found


def _scheduler(settings: dict[str, Any]) -> Any:
    """The scheduler of diffusers with these settings."""
    import diffusers  # slow to import

    return getattr(diffusers, settings["_class_name"]).from_config(settings)
