"""The loss of a micro-batch, put together from the job's settings and the pure algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcore.config.base import Option
from gcore.config.spec import JobSpec
from gcore.config.train import ADVANTAGES, LOSSES, TrainSpec, is_own_advantage, is_own_loss
from gcore.plugins import RAISED, PluginFault, PluginKind, error_sentence, find_plugin, plugin_trace
from gcore.train.algorithms.losses import (
    cispo_clip_fraction_tokens,
    cispo_loss,
    clip_fraction_tokens,
    denominator,
    gspo_clip_fraction_tokens,
    gspo_loss,
    icepop_weight,
    kl_estimate,
    loss_sum,
    mis_mask,
    nll_loss,
    ppo_loss,
    ratio_weight,
    sequence_ratio,
    tis_weight,
    token_ratio,
)
from gcore.train.batching import MicroBatch, Scores


@dataclass(frozen=True, slots=True)
class _Own:
    kind: PluginKind
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Option]

    def called(self, shape: torch.Size, *tensors: Tensor, **more: float) -> Tensor:
        """What the function returns for them. Raises PluginFault if it raises, or returns no tensor of that shape."""
        try:
            found = self.function(*tensors, **more, **self.options)
        except RAISED as error:  # the edge to foreign code
            raise self.fault(f"raised {error_sentence(error)}", plugin_trace(error)) from error
        if not isinstance(found, Tensor) or found.shape != shape:
            what = (
                f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            )
            raise self.fault(f"returned {what}, not a tensor of shape {list(shape)}")
        return found

    def fault(self, what: str, trace: str = "") -> PluginFault:
        return PluginFault(
            f"{self.kind.noun} {self.name!r} {what}",
            where=self.kind.where,
            fix="Correct the package that provides it",
            trace=trace,
        )


@dataclass(frozen=True, slots=True)
class PluginAdvantage:
    """An estimator whose every result is checked.

    Advantage estimators and losses of the user's own: entry points in `gcore.advantages` and `gcore.losses`.

        def against_median(outcomes: Tensor, groups: Tensor) -> Tensor: ...

        def my_loss(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Tensor: ...

    An estimator sees the outcomes of the whole step [n] float64 (a sample's reward, less the KL where that stands in
    the reward) and whose group each is [n] int64; it returns an advantage for each [n]. It runs on every rank, which
    must all come to the same. A loss gives a number for each token [b, w] of a micro-batch, to be made small; gcore
    leaves out what the mask leaves out, corrects, adds the KL and the entropy, and divides by the step's global
    counts, so a token's loss must not depend on what else is in the micro-batch. `train.advantage_options` and
    `train.loss_options` come as keywords.

    Both are tried on made-up tensors when a rank starts, and every result is checked: a wrong shape or an advantage
    that is no number ends the rank with a sentence, rather than teach something else.
    """

    own: _Own

    def __call__(self, outcomes: Tensor, groups: Tensor) -> Tensor:
        """`outcomes` [n] float64, `groups` [n] int64; advantages [n] float64. Raises PluginFault."""
        found = self.own.called(outcomes.shape, outcomes, groups).double()
        if not bool(found.isfinite().all()):
            raise self.own.fault("returned an advantage that is no finite number")
        return found


@dataclass(frozen=True, slots=True)
class PluginLoss:
    """A loss whose every result is checked."""

    own: _Own

    def __call__(
        self, logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
    ) -> Tensor:
        """All [b, w], `advantages` also [b, 1]; the loss of each token [b, w]. Raises PluginFault."""
        gain = advantages.expand(logp.shape)
        return self.own.called(logp.shape, logp, old, gain, mask, clip_low=clip_low, clip_high=clip_high)


def find_plugin_advantage(train: TrainSpec) -> PluginAdvantage | None:
    """The spec's estimator, tried, if it is not one of gcore's. Raises PluginFault."""
    if not is_own_advantage(train.advantage):
        return None
    function = find_plugin(ADVANTAGES, train.advantage)
    found = PluginAdvantage(_Own(ADVANTAGES, train.advantage, function, train.advantage_options))
    found(torch.tensor([0.0, 1.0, 0.5, 2.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1]))
    return found


def find_plugin_loss(train: TrainSpec) -> PluginLoss | None:
    """The spec's loss, tried, if it is not one of gcore's. Raises PluginFault."""
    if not is_own_loss(train.loss):
        return None
    found = PluginLoss(_Own(LOSSES, train.loss, find_plugin(LOSSES, train.loss), train.loss_options))
    logp = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, -0.3]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    gain = torch.tensor([[1.0], [-1.0]])
    token_loss = found(logp, logp.detach() - 0.1, gain, mask, clip_low=train.clip_low, clip_high=train.clip_high)
    if not token_loss.requires_grad:
        raise found.own.fault("has no gradient: it does not depend on the log-probabilities that are trained")
    return found


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
    own: PluginLoss | None = None

    @classmethod
    def of(cls, spec: JobSpec) -> Losses:
        """As the spec says. Raises PluginFault for a loss of the user's own that cannot be had."""
        horizon = spec.train.horizon or spec.rollout.max_new_tokens
        return cls(spec.train, spec.rollout.correction, float(horizon), find_plugin_loss(spec.train))

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
