"""The loss of a micro-batch, put together from the job's settings and the pure algorithms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gcore.config.spec import JobSpec, TrainSpec
from gcore.train.algorithms.aggregate import denominator, loss_sum
from gcore.train.algorithms.corrections import icepop_weight, mis_mask, ratio_weight, tis_weight
from gcore.train.algorithms.kl import kl_estimate
from gcore.train.algorithms.losses import (
    cispo_clip_fraction_tokens,
    cispo_loss,
    clip_fraction_tokens,
    gspo_clip_fraction_tokens,
    gspo_loss,
    nll_loss,
    ppo_loss,
    sequence_ratio,
    token_ratio,
)
from gcore.train.batch import MicroBatch, Scores
from gcore.train.own import OwnLoss, own_loss


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What the policy's log-probabilities are held against, and where.

    `advantages` [b, 1] or [b, w]; `old` and `reference` [b, w]; `mask` [b, w] bool: the tokens that are trained.
    """

    batch: MicroBatch
    advantages: Tensor
    old: Tensor
    reference: Tensor | None
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Losses:
    """The job's loss. `horizon`: the constant of seq-mean-token-sum-norm, in tokens."""

    train: TrainSpec
    correction: str
    horizon: float
    own: OwnLoss | None = None

    @classmethod
    def of(cls, spec: JobSpec) -> Losses:
        """As the spec says. Raises PluginFault for a loss of the user's own that cannot be had."""
        horizon = spec.train.horizon or spec.rollout.max_new_tokens
        return cls(spec.train, spec.rollout.correction, float(horizon), own_loss(spec.train))

    @property
    def entropic(self) -> bool:
        """Whether the entropies need a gradient."""
        return self.train.entropy_coef > 0

    @property
    def supervised(self) -> bool:
        """Whether responses are only imitated: no engine drew them, nothing was rewarded, there is no ratio."""
        return self.train.loss == "sft"

    @property
    def drops(self) -> bool:
        """Whether the correction leaves tokens out of the count."""
        return self.correction == "mis"

    def sum(self, scores: Scores, targets: Targets) -> Tensor:
        """This micro-batch's part of the loss, a scalar still to be divided by `denominator`."""
        train = self.train
        token_loss = self._policy_loss(scores.logp, targets)
        if self.correction in ("tis", "icepop", "decoupled"):
            token_loss = token_loss * self.weight(targets)
        if targets.reference is not None and train.kl_in == "loss":
            token_loss = token_loss + train.kl_coef * kl_estimate(scores.logp, targets.reference, train.kl_kind)
        if self.entropic:
            token_loss = token_loss - train.entropy_coef * scores.entropy
        return loss_sum(token_loss, targets.mask, train.aggregation, self.horizon)

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
            case "sft":
                return nll_loss(logp)
            case name:
                assert self.own is not None, name
                return self.own(logp, old, gain, targets.batch.mask, clip_low=low, clip_high=high)

    def weight(self, targets: Targets) -> Tensor:
        """What the correction multiplies each token's loss by, [b, w]; 1 where there is none."""
        old, engine = targets.old, targets.batch.rollout_logp
        match self.correction:
            case "tis":
                return tis_weight(old, engine, self.train.tis_cap)
            case "icepop":
                low, high = self.train.correction_band
                return icepop_weight(old, engine, low=low, high=high)
            case "decoupled":
                return ratio_weight(old, engine)
            case _:
                return old.new_ones(old.shape)

    def kept(self, batch: MicroBatch, old: Tensor) -> Tensor:
        """The batch's mask without the tokens that the correction leaves out, [b, w] bool; `old` [b, w]."""
        if not self.drops:
            return batch.mask
        low, high = self.train.correction_band
        return mis_mask(old, batch.rollout_logp, batch.mask, low=low, high=high)

    def denominator(self, *, tokens: int, sequences: int) -> float:
        """What the sum over all ranks and micro-batches of an update is divided by, from the update's own counts."""
        return denominator(self.train.aggregation, tokens=tokens, sequences=sequences, horizon=self.horizon)

    def ratio(self, logp: Tensor, targets: Targets) -> Tensor:
        """What the clip acts on, [b, w]: the policy's probability over the old one's, of the token or of its sequence."""
        if self.train.loss == "gspo":
            return sequence_ratio(logp, targets.old, targets.batch.mask).expand(logp.shape)
        return token_ratio(logp, targets.old)

    def clipped(self, logp: Tensor, targets: Targets) -> Tensor:
        """1 where the clip holds a token back, or cispo's weight; [b, w]. For a loss of the user's own: where ppo's would."""
        train, old, gain = self.train, targets.old, targets.advantages
        low, high = train.clip_low, train.clip_high
        match train.loss:
            case "gspo":
                return gspo_clip_fraction_tokens(logp, old, gain, targets.batch.mask, clip_low=low, clip_high=high)
            case "cispo":
                return cispo_clip_fraction_tokens(logp, old, clip_low=low, clip_high=high)
            case _:
                return clip_fraction_tokens(logp, old, gain, clip_low=low, clip_high=high, dual_clip=train.dual_clip)
