"""Training objectives: compute a loss from a model's outputs for a micro-batch, from the job's settings and the pure
algorithms.

The trainer uses only the interface `Objective`: it computes the passes that the objective needs, divides its sums by
one global count, and sums up its metrics. `PolicyGradient` and `Supervised` train the policy, `ValueFunction` the
critic.

Users' advantage estimators and losses are entry points in `gcore.advantages` and `gcore.losses`:

    def against_median(outcomes: Tensor, groups: Tensor) -> Tensor: ...

    def my_loss(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Tensor: ...

An estimator gets the outcomes of the whole step [n] float64 (a sample's reward, minus the KL if it is in the reward)
and the group of each [n] int64; it returns an advantage for each [n]. It runs on every rank and must be deterministic.
A loss returns a value to minimize for each token [b, w] of a micro-batch. gcore applies the mask and the correction,
adds KL and entropy, and divides by the step's global counts, so a token's loss must not depend on the rest of the
micro-batch. `train.advantage_options` and `train.loss_options` are passed as keyword arguments. Both functions are
tried on artificial tensors when a rank starts, and every result is checked: a wrong shape or a non-finite advantage
ends the rank with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from gcore.config.base import Option
from gcore.config.spec import JobSpec
from gcore.config.train import ADVANTAGES, LOSSES, CriticSpec, TrainSpec, is_own_advantage, is_own_loss
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
    value_clip_tokens,
    value_loss,
)
from gcore.train.batching import MicroBatch, Scores


@dataclass(frozen=True, slots=True)
class _Own:
    kind: PluginKind
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Option]

    def called(self, shape: torch.Size, *tensors: Tensor, **more: float) -> Tensor:
        """Call the function. Raises PluginFault if it raises or does not return a tensor of that shape."""
        try:
            found = self.function(*tensors, **more, **self.options)
        except RAISED as error:  # foreign code
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
    """A user's estimator with checked results."""

    own: _Own

    def __call__(self, outcomes: Tensor, groups: Tensor) -> Tensor:
        """Advantages [n] float64 from `outcomes` [n] float64 and `groups` [n] int64. Raises PluginFault."""
        found = self.own.called(outcomes.shape, outcomes, groups).double()
        if not bool(found.isfinite().all()):
            raise self.own.fault("returned an advantage that is not finite")
        return found


@dataclass(frozen=True, slots=True)
class PluginLoss:
    """A user's loss with checked results."""

    own: _Own

    def __call__(
        self, logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
    ) -> Tensor:
        """Loss of each token [b, w]. All inputs [b, w], `advantages` also [b, 1]. Raises PluginFault."""
        gain = advantages.expand(logp.shape)
        return self.own.called(logp.shape, logp, old, gain, mask, clip_low=clip_low, clip_high=clip_high)


def find_plugin_advantage(train: TrainSpec) -> PluginAdvantage | None:
    """Load and try the spec's estimator; None for gcore's own. Raises PluginFault."""
    if not is_own_advantage(train.advantage):
        return None
    function = find_plugin(ADVANTAGES, train.advantage)
    found = PluginAdvantage(_Own(ADVANTAGES, train.advantage, function, train.advantage_options))
    found(torch.tensor([0.0, 1.0, 0.5, 2.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1]))
    return found


def find_plugin_loss(train: TrainSpec) -> PluginLoss | None:
    """Load and try the spec's loss; None for gcore's own. Raises PluginFault."""
    if not is_own_loss(train.loss):
        return None
    found = PluginLoss(_Own(LOSSES, train.loss, find_plugin(LOSSES, train.loss), train.loss_options))
    logp = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, -0.3]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    gain = torch.tensor([[1.0], [-1.0]])
    token_loss = found(logp, logp.detach() - 0.1, gain, mask, clip_low=train.clip_low, clip_high=train.clip_high)
    if not token_loss.requires_grad:
        raise found.own.fault("has no gradient: it does not depend on the trained log-probabilities")
    return found


Need = Literal["old_logprobs", "all_old_logprobs", "reference", "entropy_gradient"]
"""`old_logprobs`: the policy's log-probabilities before the step's updates; `all_old_logprobs`: those of all mini-batches, before the
first update; `reference`: log-probabilities of the job's initial model; `entropy_gradient`: entropies with a gradient."""


@dataclass(frozen=True, slots=True)
class Count:
    """Counts of an update over all ranks: trained tokens, and sequences with at least one."""

    tokens: int
    sequences: int


S = TypeVar("S", contravariant=True)
T = TypeVar("T", contravariant=True)


class Objective(Protocol[S, T]):
    """A training objective. `S`: scores, the model's outputs for a micro-batch; `T`: the targets of these scores."""

    @property
    def needs(self) -> frozenset[Need]:
        """The passes that the trainer computes for this objective."""
        ...

    def trained(self, batch: MicroBatch, old: Tensor | None) -> Tensor:
        """The mask of the tokens that are trained and counted, [b, w] bool; a subset of the batch's mask.

        `old` [b, w]: old log-probabilities, if it needs `all_old_logprobs`.
        """
        ...

    def loss(self, scores: S, targets: T) -> Tensor:
        """The loss of this micro-batch summed over tokens, a scalar; the caller divides it by `denominator`."""
        ...

    def denominator(self, count: Count) -> float:
        """The divisor of the loss summed over all ranks and micro-batches of an update, from the update's counts."""
        ...

    def metrics(self, scores: S, targets: T) -> Mapping[str, Tensor]:
        """Metrics summed over the trained tokens of a micro-batch, scalars by name."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Targets of the policy's log-probabilities and the mask of the trained tokens.

    `advantages` [b, 1] or [b, w]; `old` and `reference` [b, w]; `mask` [b, w] bool: the tokens that are trained.
    """

    batch: MicroBatch
    advantages: Tensor
    old: Tensor
    reference: Tensor | None
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ValueFit:
    """Targets of the critic's values and their mask.

    `returns`, and `old` values for the clip, [b, w] float32; `mask` [b, w] bool.
    """

    returns: Tensor
    old: Tensor
    mask: Tensor


PolicyObjective = Objective[Scores, Targets]
"""Log-probabilities and entropies of a model whose outputs are logits."""


def policy_objective(spec: JobSpec) -> PolicyObjective:
    """Make the job's objective. Raises PluginFault for a user's loss that does not load."""
    horizon = float(spec.train.horizon or spec.rollout.max_new_tokens)
    if spec.train.loss == "sft":
        return Supervised(spec.train, horizon)
    return PolicyGradient(spec.train, horizon, spec.rollout.correction, find_plugin_loss(spec.train))


@dataclass(frozen=True, slots=True)
class _TokenObjective:
    """A loss for each token. `horizon`: the constant of seq-mean-token-sum-norm, in tokens."""

    train: TrainSpec
    horizon: float

    def denominator(self, count: Count) -> float:
        """The number of trained tokens or of sequences, by the job's aggregation."""
        return denominator(self.train.aggregation, tokens=count.tokens, sequences=count.sequences, horizon=self.horizon)

    def trained(self, batch: MicroBatch, old: Tensor | None) -> Tensor:
        """The batch's whole mask."""
        return batch.mask


@dataclass(frozen=True, slots=True)
class Supervised(_TokenObjective):
    """Supervised fine-tuning: maximize the likelihood of given responses, without rewards or ratios."""

    @property
    def needs(self) -> frozenset[Need]:
        """The passes that the job's coefficients need."""
        return frozenset(_needs(self.train))

    def loss(self, scores: Scores, targets: Targets) -> Tensor:
        """The negative log-likelihood plus the regularizers."""
        token_loss = _regularized(nll_loss(scores.logp), scores, targets, self.train)
        return loss_sum(token_loss, targets.mask, self.train.aggregation, self.horizon)

    @torch.no_grad()
    def metrics(self, scores: Scores, targets: Targets) -> Mapping[str, Tensor]:
        """Metrics that every objective of a policy reports."""
        return _policy_metrics(scores, targets)


@dataclass(frozen=True, slots=True)
class PolicyGradient(_TokenObjective):
    """Policy gradient on advantages. `own`: the user's loss, if the spec names one."""

    correction: str = "none"
    own: PluginLoss | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """A correction that leaves tokens out of the count compares old log-probabilities before any update."""
        old: set[Need] = {"old_logprobs", "all_old_logprobs"} if self.correction == "mis" else {"old_logprobs"}
        return frozenset(_needs(self.train) | old)

    def loss(self, scores: Scores, targets: Targets) -> Tensor:
        """The job's loss with its off-policy correction, plus the regularizers."""
        token_loss = self._policy_loss(scores.logp, targets)
        if self.correction in ("tis", "icepop", "decoupled"):
            token_loss = token_loss * self.weight(targets)
        token_loss = _regularized(token_loss, scores, targets, self.train)
        return loss_sum(token_loss, targets.mask, self.train.aggregation, self.horizon)

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
            case name:
                assert self.own is not None, name
                return self.own(logp, old, gain, targets.batch.mask, clip_low=low, clip_high=high)

    def weight(self, targets: Targets) -> Tensor:
        """The off-policy weight of each token's loss, [b, w]; 1 without a correction."""
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

    def trained(self, batch: MicroBatch, old: Tensor | None) -> Tensor:
        """The batch's mask without the tokens that the correction masks."""
        if self.correction != "mis":
            return batch.mask
        assert old is not None
        low, high = self.train.correction_band
        return mis_mask(old, batch.rollout_logp, batch.mask, low=low, high=high)

    @torch.no_grad()
    def metrics(self, scores: Scores, targets: Targets) -> Mapping[str, Tensor]:
        """Metrics of the ratios to π_old and to the engine's probabilities."""
        mask, logp = targets.mask, scores.logp.detach()
        ratio = self.ratio(logp, targets)[mask].double()
        found = {
            **_policy_metrics(scores, targets),
            "kl": _masked(kl_estimate(targets.old, logp, "k3"), mask),
            "clipped": _masked(self.clipped(logp, targets), mask),
            "ratio": ratio.sum(),
            "ratio_tokens": mask.sum(),
            "ratio_off": (ratio - 1).abs().sum(),
        }
        if len(ratio):
            found |= {"ratio_min": ratio.min(), "ratio_max": ratio.max()}
        if self.correction != "none":
            scored = targets.batch.mask
            weight = torch.where(mask, self.weight(targets), 0.0)[scored]
            found |= {
                "weight": weight.double().sum(),
                "dropped": (weight == 0).sum(),
                "weighed_tokens": scored.sum(),
            }
        return found

    def ratio(self, logp: Tensor, targets: Targets) -> Tensor:
        """The ratio that the clip acts on, [b, w]: new over old probability, of the token or of its sequence."""
        if self.train.loss == "gspo":
            return sequence_ratio(logp, targets.old, targets.batch.mask).expand(logp.shape)
        return token_ratio(logp, targets.old)

    def clipped(self, logp: Tensor, targets: Targets) -> Tensor:
        """1 where the clip is active or caps cispo's weight, [b, w]; for a user's loss, where PPO's clip would be."""
        train, old, gain = self.train, targets.old, targets.advantages
        low, high = train.clip_low, train.clip_high
        match train.loss:
            case "gspo":
                return gspo_clip_fraction_tokens(logp, old, gain, targets.batch.mask, clip_low=low, clip_high=high)
            case "cispo":
                return cispo_clip_fraction_tokens(logp, old, clip_low=low, clip_high=high)
            case _:
                return clip_fraction_tokens(logp, old, gain, clip_low=low, clip_high=high, dual_clip=train.dual_clip)


@dataclass(frozen=True, slots=True)
class ValueFunction(_TokenObjective):
    """Value regression on returns, with the policy's aggregation and counts."""

    critic: CriticSpec

    @property
    def needs(self) -> frozenset[Need]:
        """No pass of the policy."""
        return frozenset()

    def loss(self, scores: Tensor, targets: ValueFit) -> Tensor:
        """`scores`: values [b, w]."""
        token_loss = value_loss(scores, targets.returns, targets.old, self.critic.clip)
        return loss_sum(token_loss, targets.mask, self.train.aggregation, self.horizon)

    @torch.no_grad()
    def metrics(self, scores: Tensor, targets: ValueFit) -> Mapping[str, Tensor]:
        """The number of clipped tokens and the number of tokens."""
        held = value_clip_tokens(scores, targets.returns, targets.old, self.critic.clip)
        return {"clipped": held[targets.mask].sum(), "tokens": targets.mask.sum()}


def _needs(train: TrainSpec) -> set[Need]:
    """Passes that the job's coefficients need."""
    found: set[Need] = set()
    if train.kl_coef > 0:
        found.add("reference")
    if train.entropy_coef > 0:
        found.add("entropy_gradient")
    return found


def _regularized(token_loss: Tensor, scores: Scores, targets: Targets, train: TrainSpec) -> Tensor:
    """Add the KL to the reference and subtract the entropy, [b, w]."""
    if targets.reference is not None and train.kl_in == "loss":
        kl = kl_estimate(scores.logp, targets.reference, train.kl_kind, most=train.kl_max)
        token_loss = token_loss + train.kl_coef * kl
    if train.entropy_coef > 0:
        token_loss = token_loss - train.entropy_coef * scores.entropy
    return token_loss


def _policy_metrics(scores: Scores, targets: Targets) -> dict[str, Tensor]:
    mask, logp = targets.mask, scores.logp.detach()
    found = {"entropy": _masked(scores.entropy, mask), "trained_tokens": mask.sum()}
    if targets.reference is not None:
        found["kl_reference"] = _masked(kl_estimate(logp, targets.reference, "k3"), mask)
        found["reference_tokens"] = found["trained_tokens"]
    return found


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values)).sum()
