"""Computes the advantage of every token that this rank trains from the rewards of the whole step.

Group estimators need all samples of a group, and whitening needs all tokens of the step; both are spread over ranks.
Rewards are therefore gathered first, and every rank computes the same advantages. A critic's advantages need only their
own sample, and the critic's targets are computed before whitening. Computation is in float64; losses get float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from gcore.config.train import TrainSpec
from gcore.ledger.balance import SampleSlot
from gcore.train.algorithms.advantages import (
    Moments,
    at_last_token,
    discounted,
    gae,
    group_advantages,
    less_kl,
    whitened,
)
from gcore.train.algorithms.denoising import denoising_advantages
from gcore.train.batching import BatchIndex, MicroBatch, StepTensors
from gcore.train.objectives import PluginAdvantage

Estimate = Callable[[Tensor, Tensor], Tensor]
"""An advantage estimator: maps outcomes [n] float64 and group numbers [n] int64 of samples to advantages [n]."""


class RankReductions(Protocol):
    """Sums and maxima over ranks. Both are collectives."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum of each number over the ranks."""
        ...

    def max(self, values: Sequence[float]) -> list[float]:
        """Maximum of each number over the ranks."""
        ...


def advantages(
    step: StepTensors,
    train: TrainSpec,
    penalties: Mapping[BatchIndex, Tensor],
    over_ranks: RankReductions,
    targets: ValueTargets | None = None,
    own: PluginAdvantage | None = None,
) -> dict[BatchIndex, Tensor]:
    """Advantages of this rank's tokens: [b, 1] or [b, w] float32 by micro-batch; 0 for rows without a sample.

    `penalties` [b, w] float64: amounts subtracted from each token's reward, for KL in the reward; may be empty.
    `targets`: the critic's, for `gae` only. `own`: the user's estimator, if the spec names one. All advantages are 0
    for supervised training. A collective. Raises PluginFault for an invalid result of the user's estimator, and
    DataError for a group without the baseline that ReMax needs.
    """
    if train.loss == "sft":
        return {place: torch.zeros_like(step.at(place).rollout_logp[:, :1]) for place in step.places()}
    if train.diffusion is not None:
        how = train.diffusion
        of_group = partial(
            denoising_advantages, std_of=how.adv_std, ddof=how.adv_ddof, epsilon=how.adv_eps, clip=how.adv_clip
        )
        return _spread(step, _by_group(step, of_group, {}, over_ranks))
    match train.advantage:
        case "grpo" | "dr_grpo" | "rloo" as kind:
            return _spread(step, _by_group(step, partial(group_advantages, kind=kind), penalties, over_ranks))
        case "reinforce_pp_baseline":
            centred = partial(group_advantages, kind="dr_grpo")
            found = _spread(step, _by_group(step, centred, penalties, over_ranks))
            return _whitened(step, found, over_ranks)
        case "reinforce_pp":
            return _whitened(step, _returns(step, train.gamma, penalties), over_ranks)
        case "gae":
            assert targets is not None, "a job with this estimator has a critic"
            return _whitened(step, targets.advantages, over_ranks)
        case "remax":
            return _less_baseline(step, _returns(step, train.gamma, penalties))
        case name:
            assert own is not None, name
            return _spread(step, _by_group(step, own, penalties, over_ranks))


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    """By micro-batch: advantages relative to the critic's values, and returns, the critic's targets; [b, w] float64."""

    advantages: dict[BatchIndex, Tensor]
    returns: dict[BatchIndex, Tensor]


def value_targets(
    step: StepTensors, train: TrainSpec, values: Mapping[BatchIndex, Tensor], penalties: Mapping[BatchIndex, Tensor]
) -> ValueTargets:
    """Advantages and returns by GAE, each [b, w] float64 by micro-batch; 0 for unscored tokens.

    `values` [b, w]: the critic's value before each token. `penalties` as in `advantages`.
    """
    found, returns = {}, {}
    for place in step.places():
        rewards, scored = _token_rewards(step, place, penalties), step.at(place).scored
        found[place], returns[place] = gae(rewards, values[place], scored, gamma=train.gamma, lam=train.gae_lambda)
    return ValueTargets(found, returns)


def _by_group(
    step: StepTensors, estimate: Estimate, penalties: Mapping[BatchIndex, Tensor], over_ranks: RankReductions
) -> dict[SampleSlot, float]:
    """The advantage of every sample of the step, on all ranks, from the step's outcomes.

    A sample's outcome is its reward minus the penalties of all its tokens.
    """
    every = sorted(slot for by_rank in step.work.layout.shares for share in by_rank for slot in share)
    outcomes = dict.fromkeys(every, 0.0)
    for slot in step.work.layout.of_rank(step.work.rank):
        outcomes[slot] = step.reward(slot)
    for place, penalty in penalties.items():
        for slot, sum_ in zip(step.at(place).slots, penalty.sum(dim=1).tolist(), strict=False):  # a dummy has no slot
            outcomes[slot] -= sum_
    gathered = over_ranks.sum(list(outcomes.values()))  # one rank has each outcome, the others contribute 0
    values = estimate(
        torch.tensor(gathered, dtype=torch.float64),
        torch.tensor([slot.group for slot in every], dtype=torch.int64),
    )
    return dict(zip(every, values.tolist(), strict=True))


def _spread(step: StepTensors, values: Mapping[SampleSlot, float]) -> dict[BatchIndex, Tensor]:
    """The value of each sample of this rank as a row of its micro-batch, [b, 1] float32."""
    return {place: _rows(step.at(place), values) for place in step.places()}


def _rows(batch: MicroBatch, values: Mapping[SampleSlot, float]) -> Tensor:
    rows = [values[slot] for slot in batch.slots] or [0.0]  # a dummy has one row and no slot
    return torch.tensor(rows, dtype=torch.float32, device=batch.mask.device).unsqueeze(1)


def _returns(step: StepTensors, gamma: float, penalties: Mapping[BatchIndex, Tensor]) -> dict[BatchIndex, Tensor]:
    """Return to go of every scored token, [b, w] float64 by micro-batch; 0 elsewhere."""
    places = step.places()
    return {place: discounted(_token_rewards(step, place, penalties), step.at(place).scored, gamma) for place in places}


def _token_rewards(step: StepTensors, place: BatchIndex, penalties: Mapping[BatchIndex, Tensor]) -> Tensor:
    """Reward of each token of a micro-batch, [b, w] float64: the sample's reward at its last scored token, minus
    penalties.
    """
    batch = step.at(place)
    mine = torch.zeros(batch.scored.shape, dtype=torch.float64, device=batch.scored.device)
    some = batch.scored.any(dim=1)
    if bool(some.any()):
        rewards = torch.tensor([step.reward(slot) for slot in batch.slots], dtype=torch.float64, device=mine.device)
        mine[some] = at_last_token(rewards[some], batch.scored[some])
    return (
        less_kl(mine, penalties[place], batch.scored, 1.0) if place in penalties else mine
    )  # the penalty includes the coefficient


def moments(step: StepTensors, values: Mapping[BatchIndex, Tensor], over_ranks: RankReductions) -> Moments:
    """Count, mean and squared deviations of values [b, w] over the step's trained tokens on all ranks. A collective."""
    own = sum((Moments.of(value, step.at(place).mask) for place, value in values.items()), Moments())
    count, total = over_ranks.sum([own.count, own.mean * own.count])
    mean = total / count if count else 0.0
    # Shift each rank's sum of squares from its own mean to the common mean.
    (squares,) = over_ranks.sum([own.squares + own.count * (own.mean - mean) ** 2])
    return Moments(int(count), mean, squares)


def _whitened(
    step: StepTensors, values: Mapping[BatchIndex, Tensor], over_ranks: RankReductions
) -> dict[BatchIndex, Tensor]:
    tokens = {place: value.double().expand(step.at(place).mask.shape) for place, value in values.items()}
    whole = moments(step, tokens, over_ranks)
    return {place: whitened(value, step.at(place).mask, whole).float() for place, value in tokens.items()}


def _less_baseline(step: StepTensors, returns: Mapping[BatchIndex, Tensor]) -> dict[BatchIndex, Tensor]:
    """Return to go of every scored token minus the baseline reward of its group, [b, w] float32 by micro-batch."""
    found = {}
    for place, value in returns.items():
        batch = step.at(place)
        rows = [step.baseline(slot) for slot in batch.slots] or [0.0]  # a dummy has one row and no slot
        baseline = torch.tensor(rows, dtype=torch.float64, device=value.device).unsqueeze(1)
        found[place] = torch.where(batch.scored, value - baseline, 0.0).float()
    return found
