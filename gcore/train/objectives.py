"""Training objectives: compute a loss from a model's outputs for a micro-batch.

An objective combines the job's settings with the pure functions of `gcore.train.algorithms`. The trainer uses only the
interface `Objective`: it runs the passes that the objective needs, divides the summed loss by one global count, and
adds up the objective's metrics. `PolicyGradient` and `Supervised` train the policy, `ValueFunction` the critic.

Users' advantage estimators and losses are entry points in `gcore.advantages` and `gcore.losses`:

    def against_median(outcomes: Tensor, groups: Tensor) -> Tensor: ...

    def my_loss(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Tensor: ...

An estimator gets the outcomes of the whole step [n] float64 (a sample's reward, minus the KL if it is in the reward)
and the group of each [n] int64; it returns an advantage for each [n]. It runs on every rank and must be deterministic.
A loss returns a value to minimize for each token [b, w] of a micro-batch. gcore applies the mask and the correction,
adds KL and entropy, and divides by the step's global counts, so a token's loss must not depend on the rest of the
micro-batch. `train.advantage_options` and `train.loss_options` are passed as keyword arguments. Both functions are
tried on artificial tensors before the job exists and when a rank starts, and every result is checked: a wrong shape or
a non-finite advantage ends the rank with an error.

`python -m gcore.train.objectives FD BEGUN` is the process that tries them before the job exists, because a controller
does not import torch:

    controller -> process   {"train": SECTION, "memory_mb": 8192}             once
    process -> controller   {"ready": true, ...} or {"failed": {...}}         once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from gcore.config.base import Option
from gcore.config.spec import JobSpec
from gcore.config.train import ADVANTAGES, LOSSES, STORED, CriticSpec, TrainSpec, is_own_advantage, is_own_loss
from gcore.plugins import (
    RAISED,
    PluginFault,
    PluginKind,
    describe_result,
    error_sentence,
    find_plugin,
    plugin_trace,
)
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
from gcore.worker.sandbox.child import Loaded, serve


@dataclass(frozen=True, slots=True)
class _Own:
    kind: PluginKind
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Option]

    def called(self, shape: torch.Size, *tensors: Tensor, **more: float) -> Tensor:
        """Call the user's function and check its result.

        Raises PluginFault if it raises or does not return a tensor of shape `shape`.
        """
        try:
            found = self.function(*tensors, **more, **self.options)
        except RAISED as error:  # foreign code
            raise self.fault(f"raised {error_sentence(error)}", plugin_trace(error)) from error
        if not isinstance(found, Tensor) or found.shape != shape:
            what = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else describe_result(found)
            raise self.fault(f"returned {what}, not a tensor of shape {list(shape)}")
        return found

    def fault(self, what: str, trace: str = "") -> PluginFault:
        return PluginFault(
            f"{self.kind.noun} {self.name!r} {what}",
            where=self.kind.where,
            fix="Correct the function",
            trace=trace,
        )


@dataclass(frozen=True, slots=True)
class PluginAdvantage:
    """A user's advantage estimator; checks that each result has the right shape and is finite."""

    own: _Own

    def __call__(self, outcomes: Tensor, groups: Tensor) -> Tensor:
        """Advantages [n] float64 from `outcomes` [n] float64 and `groups` [n] int64. Raises PluginFault for an invalid
        result.
        """
        found = self.own.called(outcomes.shape, outcomes, groups).double()
        if not bool(found.isfinite().all()):
            raise self.own.fault("returned an advantage that is not finite")
        return found


@dataclass(frozen=True, slots=True)
class PluginLoss:
    """A user's policy loss; checks that each result has one value per token."""

    own: _Own

    def __call__(
        self, logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
    ) -> Tensor:
        """Loss of each token [b, w], before the mask. All inputs [b, w], `advantages` also [b, 1].

        Raises PluginFault for an invalid result.
        """
        gain = advantages.expand(logp.shape)
        return self.own.called(logp.shape, logp, old, gain, mask, clip_low=clip_low, clip_high=clip_high)


def find_plugin_advantage(train: TrainSpec) -> PluginAdvantage | None:
    """Load the user's estimator that the spec names, and try it; None if the spec names one of gcore's. Raises
    PluginFault.
    """
    if not is_own_advantage(train.advantage):
        return None
    function = find_plugin(ADVANTAGES, train.advantage)
    found = PluginAdvantage(_Own(ADVANTAGES, train.advantage, function, train.advantage_options))
    found(torch.tensor([0.0, 1.0, 0.5, 2.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1]))
    return found


def find_plugin_loss(train: TrainSpec) -> PluginLoss | None:
    """Load the user's loss that the spec names, and try it; None if the spec names one of gcore's.

    Raises PluginFault.
    """
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


Need = Literal["old_logprobs", "all_old_logprobs", "reference", "served", "entropy_gradient"]
"""What an objective needs besides the forward pass of its update.

`old_logprobs`: the policy's log-probabilities before the step's updates. `all_old_logprobs`: those of all mini-batches,
before the first update. `reference`: log-probabilities of the job's initial model. `served`: scores of the network that engines serve,
if it is not the trained one. `entropy_gradient`: entropies
through which the gradient flows.
"""


@dataclass(frozen=True, slots=True)
class Count:
    """What an update trains, over all ranks: its trained tokens, and the sequences with at least one trained token."""

    tokens: int
    sequences: int


S = TypeVar("S", contravariant=True)
T = TypeVar("T", contravariant=True)


class Objective(Protocol[S, T]):
    """A training objective. `S`: the model's outputs for a micro-batch (scores); `T`: what the loss compares them
    with.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """What the trainer must compute for this objective in addition to the forward pass of the update."""
        ...

    def trained(self, batch: MicroBatch, old: Tensor | None) -> Tensor:
        """The mask of the tokens that are trained and counted, [b, w] bool; a subset of the batch's mask.

        `old` [b, w]: old log-probabilities if the objective needs `all_old_logprobs`, else None.
        """
        ...

    def loss(self, scores: S, targets: T) -> Tensor:
        """The loss of this micro-batch summed over tokens, a scalar; the caller divides it by `denominator`."""
        ...

    def denominator(self, count: Count) -> float:
        """The global divisor of an update's loss, after `loss` is summed over all its micro-batches and ranks."""
        ...

    def metrics(self, scores: S, targets: T) -> Mapping[str, Tensor]:
        """Metrics summed over the trained tokens of a micro-batch, scalars by name."""
        ...


class OtherScores(NamedTuple):
    """Scores of a micro-batch by other models: the old policy and the reference, whose log-probabilities `Targets` has too, and
    the network that engines serve, if it is not the trained one."""

    old: Scores | None = None
    reference: Scores | None = None
    served: Scores | None = None


NO_OTHERS = OtherScores()


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What the policy's loss needs besides the model's outputs for a micro-batch.

    `advantages` [b, 1] or [b, w]; `old` and `reference` (None without a KL to it): log-probabilities [b, w]; `mask` [b,
    w] bool: the tokens that are trained.
    """

    batch: MicroBatch
    advantages: Tensor
    old: Tensor
    reference: Tensor | None
    mask: Tensor
    others: OtherScores = NO_OTHERS


@dataclass(frozen=True, slots=True, eq=False)
class ValueFit:
    """What the critic's loss needs besides its values for a micro-batch.

    `returns`: the targets; `old`: the values before the updates, around which the loss clips; both [b, w] float32.
    `mask` [b, w] bool: the tokens that are trained.
    """

    returns: Tensor
    old: Tensor
    mask: Tensor


PolicyObjective = Objective[Scores, Targets]
"""An objective that trains the policy: from log-probabilities and entropies."""


def policy_objective(spec: JobSpec) -> PolicyObjective:
    """The objective for the job's policy: supervised, or policy gradient.

    Raises PluginFault if the spec names a user's loss that cannot be loaded or fails its trial.
    """
    horizon = float(spec.train.horizon or spec.rollout.max_new_tokens)
    if spec.train.loss == "sft":
        return Supervised(spec.train, horizon)
    return PolicyGradient(spec.train, horizon, spec.rollout.correction, find_plugin_loss(spec.train))


@dataclass(frozen=True, slots=True)
class TokenObjective:
    """Base of objectives with one loss per token.

    `horizon`: the constant by which the aggregation seq-mean-token-sum-norm divides, in tokens.
    """

    train: TrainSpec
    horizon: float

    def denominator(self, count: Count) -> float:
        """The update's number of trained tokens or of sequences, depending on `train.aggregation`."""
        return denominator(self.train.aggregation, tokens=count.tokens, sequences=count.sequences, horizon=self.horizon)

    def trained(self, batch: MicroBatch, old: Tensor | None) -> Tensor:
        """All tokens of the batch's mask: nothing else is masked."""
        return batch.mask


@dataclass(frozen=True, slots=True)
class Supervised(TokenObjective):
    """Supervised fine-tuning: maximize the likelihood of given responses, without rewards or ratios."""

    @property
    def needs(self) -> frozenset[Need]:
        """A pass of the reference for a KL coefficient, entropies with a gradient for an entropy coefficient."""
        return frozenset(_needs(self.train))

    def loss(self, scores: Scores, targets: Targets) -> Tensor:
        """The negative log-likelihood plus KL and entropy terms, summed over the trained tokens."""
        token_loss = _regularized(nll_loss(scores.logp), scores, targets, self.train)
        return loss_sum(token_loss, targets.mask, self.train.aggregation, self.horizon)

    @torch.no_grad()
    def metrics(self, scores: Scores, targets: Targets) -> Mapping[str, Tensor]:
        """Entropy, token counts, and the KL to the reference."""
        return _policy_metrics(scores, targets)


@dataclass(frozen=True, slots=True)
class PolicyGradient(TokenObjective):
    """Policy gradient on advantages: the job's loss with its clip, off-policy correction, KL and entropy terms.

    `correction`: `rollout.correction` of the spec. `own`: the user's loss, if the spec names one.
    """

    correction: str = "none"
    own: PluginLoss | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """Old log-probabilities, and what the coefficients need.

        The correction `mis` masks tokens by their old log-probabilities, so it needs those of all mini-batches before
        the first update.
        """
        old: set[Need] = {"old_logprobs", "all_old_logprobs"} if self.correction == "mis" else {"old_logprobs"}
        return frozenset(_needs(self.train) | old)

    def loss(self, scores: Scores, targets: Targets) -> Tensor:
        """The job's loss with its off-policy correction, plus KL and entropy terms, summed over the trained tokens."""
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
        """The weight by which the off-policy correction multiplies each token's loss, [b, w]; 1 if the correction has
        no weights.
        """
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
        """The batch's mask without the tokens that the correction `mis` masks."""
        if self.correction != "mis":
            return batch.mask
        assert old is not None
        low, high = self.train.correction_band
        return mis_mask(old, batch.rollout_logp, batch.mask, low=low, high=high)

    @torch.no_grad()
    def metrics(self, scores: Scores, targets: Targets) -> Mapping[str, Tensor]:
        """The policy's metrics, and statistics of its ratio to π_old, of the clip and of the off-policy correction."""
        mask, logp = targets.mask, scores.logp.detach()
        new, old = (one.detach() for one in self._compared(scores, targets))
        ratio = self._ratio(new, old, targets)[mask].double()
        found = {
            **_policy_metrics(scores, targets),
            "kl": _masked(kl_estimate(targets.old, logp, "k3"), mask),
            "clipped": _masked(self._clipped(new, old, targets), mask),
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

    def _compared(self, scores: Scores, targets: Targets) -> tuple[Tensor, Tensor]:
        """New and old log-probabilities [b, w] whose ratio is clipped."""
        return scores.logp, targets.old

    def _ratio(self, logp: Tensor, old: Tensor, targets: Targets) -> Tensor:
        """The ratio that the clip acts on, [b, w]: new over old probability, of the token or of its sequence."""
        if self.train.loss == "gspo":
            return sequence_ratio(logp, old, targets.batch.mask).expand(logp.shape)
        return token_ratio(logp, old)

    def _clipped(self, logp: Tensor, old: Tensor, targets: Targets) -> Tensor:
        """1 where the clip removes a token's gradient (for cispo: caps its weight), else 0, [b, w].

        For a user's loss: where PPO's clip would do so.
        """
        train, gain = self.train, targets.advantages
        low, high = train.clip_low, train.clip_high
        match train.loss:
            case "gspo":
                return gspo_clip_fraction_tokens(logp, old, gain, targets.batch.mask, clip_low=low, clip_high=high)
            case "cispo":
                return cispo_clip_fraction_tokens(logp, old, clip_low=low, clip_high=high)
            case _:
                return clip_fraction_tokens(logp, old, gain, clip_low=low, clip_high=high, dual_clip=train.dual_clip)


@dataclass(frozen=True, slots=True)
class ValueFunction(TokenObjective):
    """Regression of the critic's values on returns, with the policy's aggregation and counts."""

    critic: CriticSpec

    @property
    def needs(self) -> frozenset[Need]:
        """Empty: the critic's loss needs no pass of the policy."""
        return frozenset()

    def loss(self, scores: Tensor, targets: ValueFit) -> Tensor:
        """The clipped squared error summed over the trained tokens, a scalar. `scores`: the critic's values [b, w]."""
        token_loss = value_loss(scores, targets.returns, targets.old, self.critic.clip)
        return loss_sum(token_loss, targets.mask, self.train.aggregation, self.horizon)

    @torch.no_grad()
    def metrics(self, scores: Tensor, targets: ValueFit) -> Mapping[str, Tensor]:
        """`clipped`: number of trained tokens whose gradient the value clip removes; `tokens`: number of trained
        tokens.
        """
        held = value_clip_tokens(scores, targets.returns, targets.old, self.critic.clip)
        return {"clipped": held[targets.mask].sum(), "tokens": targets.mask.sum()}


def _needs(train: TrainSpec) -> set[Need]:
    """What the KL and entropy coefficients need: a reference pass, entropies with a gradient."""
    found: set[Need] = set()
    if train.kl_coef > 0:
        found.add("reference")
    if train.entropy_coef > 0:
        found.add("entropy_gradient")
    return found


def _regularized(token_loss: Tensor, scores: Scores, targets: Targets, train: TrainSpec) -> Tensor:
    """Add the weighted KL to the reference (if it is in the loss) to each token's loss, and subtract the weighted
    entropy.
    """
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


def main() -> None:
    """Try the user's estimator and loss of a section `train` for a controller, and report whether they work."""

    def load(setup: dict[str, Any]) -> Loaded:
        train = TrainSpec.model_validate(setup["train"], context=STORED)
        find_plugin_advantage(train)
        find_plugin_loss(train)
        return Loaded(lambda number, call: [])

    serve(load)


if __name__ == "__main__":
    main()
