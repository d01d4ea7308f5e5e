"""What a step of a simulated job has to do: drawn once for each scenario, seed and step, whatever policy meets it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.simulate.scenario import Scenario

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """`lengths`, `judged`: tokens of each response and of its judgement, [n]; `train_tokens`: of the groups that are kept. `pace`: what
    this step's training takes beside what it usually would."""

    lengths: Floats
    judged: Floats
    train_tokens: float
    pace: float


def workload(scenario: Scenario, seed: int, step: int) -> Workload:
    """Of a step, from 0 on."""
    draw = np.random.default_rng((seed, step, 1))
    groups = max(scenario.groups, round(scenario.groups / (1 - scenario.filtered)))
    lengths = _lengths(scenario, draw, groups, step)
    judged = _judged(scenario, draw, lengths.size, step)
    kept = lengths.reshape(groups, -1)[draw.permutation(groups)[: scenario.groups]]
    tokens = float(kept.sum()) + scenario.prompt * kept.size
    pace = float(np.exp(draw.normal(0.0, scenario.noise.train)))
    return Workload(lengths, judged, tokens, pace)


def replica_pace(scenario: Scenario, seed: int) -> Floats:
    """How much longer a token takes on each slot's replica than it usually does, [slots]. Nobody who plans is told."""
    return np.exp(np.random.default_rng((seed, 0, 2)).normal(0.0, scenario.noise.replica, scenario.slots))


def _lengths(scenario: Scenario, draw: np.random.Generator, groups: int, step: int) -> Floats:
    told = scenario.lengths
    mean = told.mean * told.growth ** (step / max(scenario.steps - 1, 1))
    if told.jump_at is not None and step >= told.jump_at:
        mean *= told.jump
    width = np.sqrt(np.log1p(told.spread**2))
    own = draw.standard_normal((groups, scenario.samples))
    shared = draw.standard_normal((groups, 1))
    z = np.sqrt(told.same_prompt) * shared + np.sqrt(1 - told.same_prompt) * own
    drawn: Floats = np.exp(np.log(mean) - width**2 / 2 + width * z)
    return np.clip(np.ceil(drawn), 1, told.cap).ravel()


def _judged(scenario: Scenario, draw: np.random.Generator, count: int, step: int) -> Floats:
    told = scenario.judging
    if told is None:
        return np.zeros(count)
    slow = told.slow if told.slow_from <= step < told.slow_until else 1.0
    width = np.sqrt(np.log1p(told.spread**2))
    drawn: Floats = np.ceil(told.tokens * slow * np.exp(width * draw.standard_normal(count) - width**2 / 2))
    return drawn
