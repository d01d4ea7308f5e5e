"""The advantage of every token that this rank trains, from the outcomes of the whole step.

A group's estimate needs all of its samples, and whitening all of the step's tokens; both are spread over ranks. So outcomes
are gathered first, and every rank computes the same from them. A critic's advantages need their own sample only, and
what the critic is fitted to is taken from them before they are whitened. In float64; what the losses get is float32.
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
from gcore.train.batching import BatchIndex, MicroBatch, StepTensors
from gcore.train.objectives import PluginAdvantage

Estimate = Callable[[Tensor, Tensor], Tensor]
"""Outcomes [n] float64 and the numbers of their groups [n] int64, to advantages [n]."""


class RankReductions(Protocol):
    """Sums and maxima of numbers over the ranks. Both are collectives."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each number over the ranks."""
        ...

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each number over the ranks."""
        ...


def advantages(
    step: StepTensors,
    train: TrainSpec,
    penalties: Mapping[BatchIndex, Tensor],
    over_ranks: RankReductions,
    targets: ValueTargets | None = None,
    own: PluginAdvantage | None = None,
) -> dict[BatchIndex, Tensor]:
    """[b, 1] or [b, w] float32 by micro-batch; a row that is no sample's has 0, and so has all that is only imitated.

    `penalties` [b, w] float64: what each token's reward is worth less, for the KL inside it; may be empty. `targets`: of a
    job with a critic; `own`: of one with an estimator of the user's. A collective.
    """
    if train.loss == "sft":
        return {place: torch.zeros_like(step.at(place).rollout_logp[:, :1]) for place in step.places()}
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
    """By micro-batch: advantages against the critic's values, and the returns that it is fitted to; [b, w] float64."""

    advantages: dict[BatchIndex, Tensor]
    returns: dict[BatchIndex, Tensor]


def value_targets(
    step: StepTensors, train: TrainSpec, values: Mapping[BatchIndex, Tensor], penalties: Mapping[BatchIndex, Tensor]
) -> ValueTargets:
    """By GAE from the values before each token [b, w]; 0 where nothing is computed. `penalties` as in `advantages`."""
    found, returns = {}, {}
    for place in step.places():
        rewards, scored = _token_rewards(step, place, penalties), step.at(place).scored
        found[place], returns[place] = gae(rewards, values[place], scored, gamma=train.gamma, lam=train.gae_lambda)
    return ValueTargets(found, returns)


def _by_group(
    step: StepTensors, estimate: Estimate, penalties: Mapping[BatchIndex, Tensor], over_ranks: RankReductions
) -> dict[SampleSlot, float]:
    """Of every sample of the step; a sample's outcome is its reward less the penalties of all its tokens."""
    every = sorted(slot for by_rank in step.work.layout.shares for share in by_rank for slot in share)
    outcomes = dict.fromkeys(every, 0.0)
    for slot in step.work.layout.of_rank(step.work.rank):
        outcomes[slot] = step.reward(slot)
    for place, penalty in penalties.items():
        for slot, sum_ in zip(step.at(place).slots, penalty.sum(dim=1).tolist(), strict=False):  # a dummy has no slot
            outcomes[slot] -= sum_
    gathered = over_ranks.sum(list(outcomes.values()))  # one rank knows each, the others bring 0
    values = estimate(
        torch.tensor(gathered, dtype=torch.float64),
        torch.tensor([slot.group for slot in every], dtype=torch.int64),
    )
    return dict(zip(every, values.tolist(), strict=True))


def _spread(step: StepTensors, values: Mapping[SampleSlot, float]) -> dict[BatchIndex, Tensor]:
    """Each sample's number as a row of its micro-batch, [b, 1]."""
    return {place: _rows(step.at(place), values) for place in step.places()}


def _rows(batch: MicroBatch, values: Mapping[SampleSlot, float]) -> Tensor:
    rows = [values[slot] for slot in batch.slots] or [0.0]  # a dummy has one row and no slot
    return torch.tensor(rows, dtype=torch.float32, device=batch.mask.device).unsqueeze(1)


def _returns(step: StepTensors, gamma: float, penalties: Mapping[BatchIndex, Tensor]) -> dict[BatchIndex, Tensor]:
    """Return to go of every token that is computed, [b, w] float64. A response of no tokens has none."""
    places = step.places()
    return {place: discounted(_token_rewards(step, place, penalties), step.at(place).scored, gamma) for place in places}


def _token_rewards(step: StepTensors, place: BatchIndex, penalties: Mapping[BatchIndex, Tensor]) -> Tensor:
    """What each token of a micro-batch is rewarded with, [b, w] float64."""
    batch = step.at(place)
    mine = torch.zeros(batch.scored.shape, dtype=torch.float64, device=batch.scored.device)
    some = batch.scored.any(dim=1)
    if bool(some.any()):
        rewards = torch.tensor([step.reward(slot) for slot in batch.slots], dtype=torch.float64, device=mine.device)
        mine[some] = at_last_token(rewards[some], batch.scored[some])
    return (
        less_kl(mine, penalties[place], batch.scored, 1.0) if place in penalties else mine
    )  # the coefficient is in it


def moments(step: StepTensors, values: Mapping[BatchIndex, Tensor], over_ranks: RankReductions) -> Moments:
    """Of values [b, w] over the step's trained tokens, wherever they are. A collective."""
    own = sum((Moments.of(value, step.at(place).mask) for place, value in values.items()), Moments())
    count, total = over_ranks.sum([own.count, own.mean * own.count])
    mean = total / count if count else 0.0
    # Around the common mean: what each rank's own squares lack.
    (squares,) = over_ranks.sum([own.squares + own.count * (own.mean - mean) ** 2])
    return Moments(int(count), mean, squares)


def _whitened(
    step: StepTensors, values: Mapping[BatchIndex, Tensor], over_ranks: RankReductions
) -> dict[BatchIndex, Tensor]:
    tokens = {place: value.double().expand(step.at(place).mask.shape) for place, value in values.items()}
    whole = moments(step, tokens, over_ranks)
    return {place: whitened(value, step.at(place).mask, whole).float() for place, value in tokens.items()}


def _less_baseline(step: StepTensors, returns: Mapping[BatchIndex, Tensor]) -> dict[BatchIndex, Tensor]:
    """Every scored token's return to go less what its group's flow found to compare with, [b, w] float32."""
    found = {}
    for place, value in returns.items():
        batch = step.at(place)
        rows = [step.baseline(slot) for slot in batch.slots] or [0.0]  # a dummy has one row and no slot
        baseline = torch.tensor(rows, dtype=torch.float64, device=value.device).unsqueeze(1)
        found[place] = torch.where(batch.scored, value - baseline, 0.0).float()
    return found
