"""The critic's part of a step: its values before the updates, and an update of its own for each mini-batch.

Values are taken once, before anything is updated, in the micro-batches that the policy is trained in; what the critic is
fitted to is computed from them and stays for all the step's updates, as do the values that its clip holds it near. An
update has the same global denominator as the policy's, and the same aggregation. Masked samples train neither.

Metrics, over the tokens that are trained:

    value_loss                  mean over the updates
    value_mean, return_mean     before the updates; of what the critic says, and of what it is fitted to
    value_explained_variance    1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one that says the same of
                                every token, below 0 one that is worse than that
    value_clip_fraction         share of the tokens that the clip holds back
    advantage_mean, advantage_std    before whitening
    critic_grad_norm            global, before clipping, mean over the updates that were made
    critic_learning_rate        of the last update;  critic_skipped_updates: gradient not finite

Does not know the policy, nor when a step's updates are its turn (`step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gcore.train.advantages import Summing, ValueTargets, moments, value_targets
from gcore.train.algorithms.aggregate import loss_sum
from gcore.train.algorithms.losses import value_clip_tokens, value_loss
from gcore.train.algorithms.schedule import learning_rate
from gcore.train.batch import MicroBatch
from gcore.train.critic import Critic
from gcore.train.cut_step import Place, Step
from gcore.train.launch import RankLaunch
from gcore.train.loss import Losses
from gcore.train.memory import REMEDIES, explained
from gcore.train.trained import UpdateResult

Tell = Callable[[str], None]


class ValueTally:
    """One rank's counts of the critic in one step."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}
        self._loss, self._clipped, self._tokens = 0.0, 0.0, 0.0
        self._norms: list[float] = []
        self._updates = 0
        self._rate = 0.0

    def before(self, step: Step, targets: ValueTargets, values: Mapping[Place, Tensor], over_ranks: Summing) -> None:
        """The step's values and what they lead to, before the updates. A collective."""
        exact = {place: value.double() for place, value in values.items()}
        left = {place: targets.returns[place] - value for place, value in exact.items()}
        value, goal = moments(step, exact, over_ranks), moments(step, targets.returns, over_ranks)
        gain, error = moments(step, targets.advantages, over_ranks), moments(step, left, over_ranks)
        self._found = {
            "value_mean": value.mean,
            "return_mean": goal.mean,
            # Returns that are all the same leave nothing to explain.
            "value_explained_variance": 1 - error.variance / goal.variance if goal.variance > 0 else math.nan,
            "advantage_mean": gain.mean,
            "advantage_std": math.sqrt(gain.variance),
        }

    def trained(self, loss: float, clipped: Tensor, mask: Tensor) -> None:
        """A micro-batch went through an update; `loss` is its part of the update's, `clipped` [b, w] says where it was held."""
        self._loss += loss
        self._clipped += float(clipped[mask].sum())
        self._tokens += float(mask.sum())

    def updated(self, result: UpdateResult, rate: float) -> None:
        """An update is over; the same on every rank."""
        self._updates += 1
        self._rate = rate
        if result.applied:
            self._norms.append(result.grad_norm)

    def metrics(self, over_ranks: Summing) -> dict[str, float]:
        """The step's. A collective."""
        loss, clipped, tokens = over_ranks.sum([self._loss, self._clipped, self._tokens])
        found = self._found | {
            "value_loss": loss / self._updates if self._updates else math.nan,
            "value_clip_fraction": clipped / tokens if tokens else math.nan,
            "critic_grad_norm": math.fsum(self._norms) / len(self._norms) if self._norms else math.nan,
            "critic_learning_rate": self._rate,
            "critic_skipped_updates": float(self._updates - len(self._norms)),
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


class Critique:
    """A critic in a job."""

    def __init__(self, critic: Critic, launch: RankLaunch, losses: Losses) -> None:
        """`losses`: the job's, for the denominators that the critic's loss shares with the policy's."""
        self.critic = critic
        self.launch = launch
        self.losses = losses

    def warms_up(self, step: int) -> bool:
        """Whether the critic alone is trained in step number `step`."""
        own = self.launch.spec.train.critic
        return own is not None and step <= own.warmup_steps

    def begin(self, step: Step, penalties: Mapping[Place, Tensor], over_ranks: Summing, tell: Tell) -> CriticStep:
        """Values of the whole step, and what follows from them. A collective."""
        train, values = self.launch.spec.train, {}
        with torch.no_grad():
            for place in step.places():
                tell("values")
                batch = step.at(place)
                with explained(f"values: {batch.size}", train, REMEDIES):
                    values[place] = self.critic.values(batch)
        targets = value_targets(step, train, values, penalties)
        tally = ValueTally()
        tally.before(step, targets, values, over_ranks)
        return CriticStep(self, step, targets, values, tally)


class CriticStep:
    """The critic's part of one step, after its values are known."""

    def __init__(
        self,
        critique: Critique,
        step: Step,
        targets: ValueTargets,
        values: Mapping[Place, Tensor],
        tally: ValueTally,
    ) -> None:
        assert critique.launch.spec.train.critic is not None
        self._critique = critique
        self._train = critique.launch.spec.train
        self._own = critique.launch.spec.train.critic
        self._step = step
        self._returns = {place: one.float() for place, one in targets.returns.items()}
        self._values = values
        self._tally = tally
        self.targets = targets

    def update(self, number: int, made: int, tell: Tell) -> UpdateResult | None:
        """Train on mini-batch `number`; None: it holds nothing. `made`: the critic's updates so far. A collective."""
        plan, batches = self._step.plans[number], self._step.batches[number]
        if not plan.tokens:
            return None  # every rank sees that in the seal
        divisor = self._critique.losses.denominator(tokens=plan.tokens, sequences=plan.sequences)
        divisor *= self._step.work.seal.padding_scale
        for k, batch in enumerate(batches):
            tell("critic")
            with explained(f"critic: {batch.size}", self._train, REMEDIES):
                self._backward(batch, Place(number, k), divisor, last=k + 1 == len(batches))
        launch = self._critique.launch
        rate = learning_rate(
            made,
            peak=self._own.learning_rate,
            warmup_updates=self._own.warmup_updates,
            schedule=self._train.schedule,
            total_updates=launch.critic_updates(self._step.work.seal.planned_steps),
        )
        with explained("critic: the optimizer", self._train, ("zero_stage", "offload_reference")):
            result = self._critique.critic.update(rate)
        self._tally.updated(result, rate)
        return result

    def metrics(self, over_ranks: Summing) -> dict[str, float]:
        """The step's. A collective."""
        return self._tally.metrics(over_ranks)

    def _backward(self, batch: MicroBatch, place: Place, divisor: float, *, last: bool) -> None:
        values, returns, old = self._critique.critic.values(batch), self._returns[place], self._values[place]
        token_loss = value_loss(values, returns, old, self._own.clip)
        loss = loss_sum(token_loss, batch.mask, self._train.aggregation, self._critique.losses.horizon) / divisor
        self._critique.critic.backward(loss, last=last)
        held = value_clip_tokens(values, returns, old, self._own.clip)
        self._tally.trained(float(loss.detach()), held, batch.mask)
