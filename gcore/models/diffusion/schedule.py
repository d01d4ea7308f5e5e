"""Noise levels of a pipeline's scheduler, and the distribution of each denoising step between them.

The levels always come from the scheduler of diffusers that the pipeline's folder has. Engines send the levels that they
used with each sample, and ranks replay with those numbers; a rank's own scheduler only says which process it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore.models.diffusion.files import read_scheduler
from gcore.models.diffusion.settings import FLOW
from gcore.models.diffusion.steps import DenoisingStep, StepKind, ddim_step, flow_step


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """The scheduler of a pipeline. `settings`: of its configuration. `alphas`: cumulative products of α by timestep, of a
    DDIM scheduler."""

    settings: dict[str, Any]
    alphas: tuple[float, ...] = ()

    @staticmethod
    def load(folder: Path) -> NoiseSchedule:
        """Load the scheduler of a pipeline's folder. Raises DataError for one that gcore cannot replay."""
        settings = read_scheduler(folder)
        if settings["_class_name"] == FLOW:
            return NoiseSchedule(settings)
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

        `tokens`: image tokens, by which a scheduler with `use_dynamic_shifting` shifts its levels. `linear`: the pipeline
        gives its scheduler the levels 1 to 1/steps, as Flux and Qwen-Image do. Raises ValueError for more steps than DDIM has
        timesteps, and if levels do not fall: the last timestep of some DDIM schedules has no step after it.
        """
        scheduler = _scheduler(self.settings)
        if self.alphas:
            if steps > len(self.alphas):
                raise ValueError(f"{steps} steps are more than the {len(self.alphas)} timesteps of the scheduler")
            scheduler.set_timesteps(steps)
            times = [int(one) for one in scheduler.timesteps]
            return _falling([*times, max(times[-1] - len(self.alphas) // steps, 0)])
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

    def noised(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """The states [n, ...] of finished pictures `clean` [n, ...] with `noise` [n, ...] at `levels` [n]."""
        signal, strength = (one.view(-1, *(1,) * (clean.dim() - 1)) for one in self._shares(levels))
        return signal * clean + strength * noise

    def target(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """What a network that knew `clean` and `noise` would predict at `levels` [n]: velocity, ε or v; [n, ...]."""
        if not self.alphas:
            return noise - clean
        if self.settings.get("prediction_type", "epsilon") == "epsilon":
            return noise
        signal, strength = (one.view(-1, *(1,) * (clean.dim() - 1)) for one in self._shares(levels))
        return signal * noise - strength * clean

    def _shares(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """The factors [n] of the finished picture and of the noise at `levels` [n]."""
        if not self.alphas:
            return 1 - levels, levels
        alphas = torch.tensor([self.alphas[int(level)] for level in levels.tolist()], device=levels.device)
        return alphas.sqrt(), (1 - alphas).sqrt()


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
