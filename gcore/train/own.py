"""Advantage estimators and losses of the user's own: entry points in `gcore.advantages` and `gcore.losses`.

    def against_median(outcomes: Tensor, groups: Tensor) -> Tensor: ...

    def my_loss(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Tensor: ...

An estimator sees the outcomes of the whole step [n] float64 (a sample's reward, less the KL where that stands in the reward)
and whose group each is [n] int64; it returns an advantage for each [n]. It runs on every rank, which must all come to the
same. A loss gives a number for each token [b, w] of a micro-batch, to be made small; gcore leaves out what the mask leaves
out, corrects, adds the KL and the entropy, and divides by the step's global counts, so a token's loss must not depend on what
else is in the micro-batch. `train.advantage_options` and `train.loss_options` come as keywords.

Both are tried on made-up tensors when a rank starts, and every result is checked: a wrong shape or an advantage that is no
number ends the rank with a sentence, rather than teach something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcore.config.algorithms import ADVANTAGES, LOSSES, is_own_advantage, is_own_loss
from gcore.config.base import Option
from gcore.config.train import TrainSpec
from gcore.plugins import RAISED, PluginFault, PluginKind, find_plugin, sentence_of, trace_of


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
            raise self.fault(f"raised {sentence_of(error)}", trace_of(error)) from error
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
class OwnAdvantage:
    """An estimator whose every result is checked."""

    own: _Own

    def __call__(self, outcomes: Tensor, groups: Tensor) -> Tensor:
        """`outcomes` [n] float64, `groups` [n] int64; advantages [n] float64. Raises PluginFault."""
        found = self.own.called(outcomes.shape, outcomes, groups).double()
        if not bool(found.isfinite().all()):
            raise self.own.fault("returned an advantage that is no finite number")
        return found


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A loss whose every result is checked."""

    own: _Own

    def __call__(
        self, logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
    ) -> Tensor:
        """All [b, w], `advantages` also [b, 1]; the loss of each token [b, w]. Raises PluginFault."""
        gain = advantages.expand(logp.shape)
        return self.own.called(logp.shape, logp, old, gain, mask, clip_low=clip_low, clip_high=clip_high)


def own_advantage(train: TrainSpec) -> OwnAdvantage | None:
    """The spec's estimator, tried, if it is not one of gcore's. Raises PluginFault."""
    if not is_own_advantage(train.advantage):
        return None
    function = find_plugin(ADVANTAGES, train.advantage)
    found = OwnAdvantage(_Own(ADVANTAGES, train.advantage, function, train.advantage_options))
    found(torch.tensor([0.0, 1.0, 0.5, 2.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1]))
    return found


def own_loss(train: TrainSpec) -> OwnLoss | None:
    """The spec's loss, tried, if it is not one of gcore's. Raises PluginFault."""
    if not is_own_loss(train.loss):
        return None
    found = OwnLoss(_Own(LOSSES, train.loss, find_plugin(LOSSES, train.loss), train.loss_options))
    logp = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, -0.3]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    gain = torch.tensor([[1.0], [-1.0]])
    token_loss = found(logp, logp.detach() - 0.1, gain, mask, clip_low=train.clip_low, clip_high=train.clip_high)
    if not token_loss.requires_grad:
        raise found.own.fault("has no gradient: it does not depend on the log-probabilities that are trained")
    return found
