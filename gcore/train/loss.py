"""The loss of a micro-batch, put together from the job's settings and the pure algorithms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gcore.config.spec import JobSpec, TrainSpec
from gcore.train.algorithms.aggregate import denominator, loss_sum
from gcore.train.algorithms.corrections import tis_weight
from gcore.train.algorithms.kl import kl_estimate
from gcore.train.algorithms.losses import clip_fraction_tokens, ppo_loss
from gcore.train.batch import MicroBatch
from gcore.train.packing import MiniBatchPlan


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What the policy's log-probabilities are held against. `advantages` [b, 1]; `old` and `reference` [b, w]."""

    batch: MicroBatch
    advantages: Tensor
    old: Tensor
    reference: Tensor | None


@dataclass(frozen=True, slots=True)
class Losses:
    """The job's loss. `horizon`: the constant of seq-mean-token-sum-norm, in tokens."""

    train: TrainSpec
    tis: bool
    horizon: float

    @classmethod
    def of(cls, spec: JobSpec) -> Losses:
        """As the spec says."""
        horizon = spec.train.horizon or spec.rollout.max_new_tokens
        return cls(spec.train, spec.rollout.correction == "tis", float(horizon))

    def sum(self, logp: Tensor, targets: Targets) -> Tensor:
        """This micro-batch's part of the loss, a scalar still to be divided by `denominator`. `logp` [b, w]."""
        train = self.train
        token_loss = ppo_loss(logp, targets.old, targets.advantages, clip_low=train.clip_low, clip_high=train.clip_high)
        if self.tis:
            token_loss = token_loss * tis_weight(targets.old, targets.batch.rollout_logp, train.tis_cap)
        if targets.reference is not None and train.kl_in == "loss":
            token_loss = token_loss + train.kl_coef * kl_estimate(logp, targets.reference, train.kl_estimator)
        return loss_sum(token_loss, targets.batch.mask, train.aggregation, self.horizon)

    def denominator(self, plan: MiniBatchPlan) -> float:
        """What the sum over all ranks and micro-batches of an update is divided by."""
        return denominator(self.train.aggregation, tokens=plan.tokens, sequences=plan.sequences, horizon=self.horizon)

    def clipped(self, logp: Tensor, targets: Targets) -> Tensor:
        """1 where the clip holds a token back; [b, w]."""
        train = self.train
        return clip_fraction_tokens(
            logp, targets.old, targets.advantages, clip_low=train.clip_low, clip_high=train.clip_high
        )
