"""The loss of a micro-batch, put together from the job's settings and the pure algorithms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gcore.config.spec import JobSpec, TrainSpec
from gcore.train.algorithms.aggregate import denominator, loss_sum
from gcore.train.algorithms.corrections import icepop_weight, tis_weight
from gcore.train.algorithms.kl import kl_estimate
from gcore.train.algorithms.losses import (
    cispo_loss,
    clip_fraction_tokens,
    gspo_clip_fraction_tokens,
    gspo_loss,
    ppo_loss,
)
from gcore.train.batch import MicroBatch, Scores
from gcore.train.packing import MiniBatchPlan


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What the policy's log-probabilities are held against. `advantages` [b, 1] or [b, w]; `old` and `reference` [b, w]."""

    batch: MicroBatch
    advantages: Tensor
    old: Tensor
    reference: Tensor | None


@dataclass(frozen=True, slots=True)
class Losses:
    """The job's loss. `horizon`: the constant of seq-mean-token-sum-norm, in tokens."""

    train: TrainSpec
    correction: str
    horizon: float

    @classmethod
    def of(cls, spec: JobSpec) -> Losses:
        """As the spec says."""
        horizon = spec.train.horizon or spec.rollout.max_new_tokens
        return cls(spec.train, spec.rollout.correction, float(horizon))

    @property
    def entropic(self) -> bool:
        """Whether the entropies need a gradient."""
        return self.train.entropy_coef > 0

    def sum(self, scores: Scores, targets: Targets) -> Tensor:
        """This micro-batch's part of the loss, a scalar still to be divided by `denominator`."""
        train = self.train
        token_loss = self._policy_loss(scores.logp, targets) * self._weight(targets)
        if targets.reference is not None and train.kl_in == "loss":
            token_loss = token_loss + train.kl_coef * kl_estimate(scores.logp, targets.reference, train.kl_estimator)
        if self.entropic:
            token_loss = token_loss - train.entropy_coef * scores.entropy
        return loss_sum(token_loss, targets.batch.mask, train.aggregation, self.horizon)

    def _policy_loss(self, logp: Tensor, targets: Targets) -> Tensor:
        train, old, gain = self.train, targets.old, targets.advantages
        low, high = train.clip_low, train.clip_high
        match train.loss:
            case "ppo":
                return ppo_loss(logp, old, gain, clip_low=low, clip_high=high, dual_clip=train.dual_clip)
            case "gspo":
                return gspo_loss(logp, old, gain, targets.batch.mask, clip_low=low, clip_high=high)
            case "cispo":
                return cispo_loss(logp, old, gain, clip_low=low, clip_high=high)

    def _weight(self, targets: Targets) -> Tensor | float:
        match self.correction:
            case "tis":
                return tis_weight(targets.old, targets.batch.rollout_logp, self.train.tis_cap)
            case "icepop":
                low, high = self.train.icepop_band
                return icepop_weight(targets.old, targets.batch.rollout_logp, low=low, high=high)
            case _:
                return 1.0

    def denominator(self, plan: MiniBatchPlan) -> float:
        """What the sum over all ranks and micro-batches of an update is divided by."""
        return denominator(self.train.aggregation, tokens=plan.tokens, sequences=plan.sequences, horizon=self.horizon)

    def clipped(self, logp: Tensor, targets: Targets) -> Tensor:
        """1 where the clip holds a token back, or cispo's weight; [b, w]."""
        train, old, gain = self.train, targets.old, targets.advantages
        low, high = train.clip_low, train.clip_high
        if train.loss == "gspo":
            return gspo_clip_fraction_tokens(logp, old, gain, targets.batch.mask, clip_low=low, clip_high=high)
        return clip_fraction_tokens(logp, old, gain, clip_low=low, clip_high=high)
