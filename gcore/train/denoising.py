"""Trained denoising steps as rows of a micro-batch, and their log-probabilities under a network.

A row is one trained step of one generated picture: the state before it, the state that the engine sampled after it, the
levels of the engine's schedule, and the embeddings of the prompt. Rows are independent of each other, so a micro-batch may
cut a picture's rows apart. The arrays come from blobs: states as float32 numbers, embeddings as a safetensors file
(`gcore.models.diffusion.networks.pack_conditions`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gcore.errors import DataError
from gcore.models.diffusion.networks import Condition, unpack_conditions
from gcore.models.diffusion.schedule import NoiseSchedule
from gcore.models.diffusion.steps import StepKind, kept_states
from gcore.train.rank.feed import TrainSample
from gcore.types import Medium


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How the engine sampled: kind of the random steps, their noise level, and the form of log-probabilities
    (`DenoisingStep.log_prob`). The guidance belongs to the network."""

    kind: StepKind
    noise_level: float
    constants: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class DenoisingRows:
    """Rows of a micro-batch on its device.

    `states`, `following` [n, channels, height, width] float32: before each step, and as sampled after it. `levels`: all
    levels of each row's schedule. `steps`: the number of each row's step. `conditions`, `negatives`: embeddings of each
    row's prompt; rows of one prompt share them. `negatives` is empty without guidance.
    """

    states: Tensor
    following: Tensor
    levels: tuple[tuple[float, ...], ...]
    steps: tuple[int, ...]
    conditions: tuple[Condition, ...]
    negatives: tuple[Condition, ...]

    @property
    def noise(self) -> Tensor:
        """The level of each state [n] float32, which the network gets."""
        found = [levels[step] for levels, step in zip(self.levels, self.steps, strict=True)]
        return torch.tensor(found, dtype=torch.float32, device=self.states.device)


PredictionOf = Callable[[DenoisingRows], Tensor]
"""Maps rows to the network's guided predictions [n, channels, height, width] float32."""


@dataclass(frozen=True, slots=True, eq=False)
class StepScores:
    """What a network makes of rows. `logp` [n]: log-probability of the sampled states. `mean` [n, channels, height, width]:
    of each step. `std`, `diffusion` [n]: of `gcore.models.diffusion.steps.DenoisingStep`; they do not depend on the network.
    """

    logp: Tensor
    mean: Tensor
    std: Tensor
    diffusion: Tensor

    def kl(self, reference: Tensor, *, exact: bool) -> Tensor:
        """KL divergence [n] to the steps with means `reference`: `DenoisingStep.kl`."""
        scale = self.std if exact else self.diffusion
        return ((self.mean - reference) ** 2).flatten(1).mean(1) / (2 * scale**2)


def score_rows(predictions: Tensor, rows: DenoisingRows, schedule: NoiseSchedule, settings: StepSettings) -> StepScores:
    """The distributions of all rows' steps, and the log-probabilities of the sampled states.

    `predictions` [n, channels, height, width] float32. Rows that take the same step of the same schedule are computed
    together. The gradient flows through the predictions.
    """
    logp, mean, std, diffusion, order = [], [], [], [], []
    for (levels, step), places in _alike(rows).items():
        index = torch.tensor(places, device=predictions.device)
        found = schedule.step(settings.kind, rows.states[index], predictions[index], levels, step, settings.noise_level)
        logp.append(found.log_prob(rows.following[index], constants=settings.constants))
        mean.append(found.mean)
        std += [found.std] * len(places)
        diffusion += [found.diffusion] * len(places)
        order += places
    back = torch.empty(len(order), dtype=torch.int64, device=predictions.device)
    back[torch.tensor(order, device=predictions.device)] = torch.arange(len(order), device=predictions.device)
    numbers = (
        torch.tensor(values, dtype=torch.float32, device=predictions.device)[back] for values in (std, diffusion)
    )
    return StepScores(torch.cat(logp)[back], torch.cat(mean)[back], *numbers)


def _alike(rows: DenoisingRows) -> dict[tuple[tuple[float, ...], int], list[int]]:
    """The places of rows that take the same step, by levels and step."""
    found: dict[tuple[tuple[float, ...], int], list[int]] = {}
    for place, key in enumerate(zip(rows.levels, rows.steps, strict=True)):
        found.setdefault(key, []).append(place)
    return found


def read_rows(
    samples: Sequence[tuple[TrainSample, Sequence[int]]], folder: Path, device: torch.device
) -> DenoisingRows:
    """Read the rows of some steps of some samples from their blobs. Each embedding is read once.

    `samples`: each with the places of its trained steps that are rows. `folder`: of the blobs, named by SHA-256. Raises
    DataError for arrays that do not belong to the sample's numbers.
    """
    states, following = [], []
    levels: list[tuple[float, ...]] = []
    steps: list[int] = []
    conditions: list[Condition] = []
    negatives: list[Condition | None] = []
    known: dict[str, tuple[Condition, Condition | None]] = {}
    for sample, places in samples:
        assert sample.steps is not None
        assert sample.sigmas is not None
        kept, numbers = _states(sample, folder), sample.steps.tolist()
        at = {number: row for row, number in enumerate(kept_states(numbers))}
        medium = _medium(sample, "embeds")
        if medium.sha256 not in known:
            known[medium.sha256] = unpack_conditions((folder / medium.sha256).read_bytes())
        condition, negative = known[medium.sha256]
        own = tuple(sample.sigmas.tolist())
        for place in places:
            step = numbers[place]
            states.append(kept[at[step]])
            following.append(kept[at[step + 1]])
            levels.append(own)
            steps.append(step)
            conditions.append(condition)
            negatives.append(negative)
    if len({negative is None for negative in negatives}) > 1:
        raise DataError("some samples have embeddings of a negative prompt, and others have none")

    def put(condition: Condition) -> Condition:
        return {name: tensor.to(device) for name, tensor in condition.items()}

    placed = {id(one): put(one) for one in (*conditions, *negatives) if one is not None}
    return DenoisingRows(
        torch.from_numpy(np.stack(states)).to(device),
        torch.from_numpy(np.stack(following)).to(device),
        tuple(levels),
        tuple(steps),
        tuple(placed[id(one)] for one in conditions),
        tuple(placed[id(one)] for one in negatives if one is not None),
    )


def _medium(sample: TrainSample, kind: str) -> Medium:
    found = [one for one in sample.media if one.kind == kind]
    if len(found) != 1:
        raise DataError(f"the sample of a generated picture has {len(found)} blobs of the kind {kind} instead of one")
    return found[0]


def _states(sample: TrainSample, folder: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The stored states of a sample, mapped from its blob. Raises DataError."""
    medium = _medium(sample, "trajectory")
    assert sample.steps is not None
    wanted = len(kept_states(sample.steps.tolist()))
    if medium.dtype != "float32" or len(medium.shape) != 4 or medium.shape[0] != wanted:
        raise DataError(
            f"the states of a generated picture are {medium.dtype} {list(medium.shape)}, but {wanted} float32 states "
            "of the trained steps are needed: their log-probabilities were computed from these",
            fix="Use the engine and the trainer of one version",
        )
    file = folder / medium.sha256
    if (size := file.stat().st_size) != 4 * int(np.prod(medium.shape)):
        raise DataError(f"the states of a generated picture have {size} bytes, not those of {list(medium.shape)}")
    return np.memmap(file, dtype="<f4", mode="r", shape=medium.shape)
