"""The contract kit for what train ranks load: advantage estimators and losses of one's own. Imports torch.

    from gcore.testing.algorithm_contract import check_advantage, check_loss

    def test_my_estimator():
        check_advantage("against_median")

As `gcore.testing.contracts`: each check takes the plug-in by its entry-point name and raises `ContractBroken` with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from gcore.config.base import Option, explain_errors
from gcore.config.train import TrainSpec
from gcore.testing.contracts import ContractBroken
from gcore.train.objectives import find_plugin_advantage, find_plugin_loss

OUTCOMES = ((1.0, 0.0, 1.0, 2.0, 0.5, -1.0), (0.0,) * 6, (1e6, -1e6, 3.0, 0.25, 0.25, 0.25))
GROUPS = (0, 0, 0, 1, 1, 1)
TOLERANCE = 1e-9


def check_advantage(name: str, *, options: Mapping[str, Option] | None = None) -> None:
    """An estimator: the same whatever order the samples come in and whatever the groups are called, finite, repeatable.

    Ranks compute it each for itself, and a group's number means nothing. Raises ContractBroken, PluginFault.
    """
    estimate = find_plugin_advantage(_train(advantage=name, advantage_options=dict(options or {})))
    _check_promise(estimate is not None, f"{name!r} is gcore's own")
    assert estimate is not None
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    for outcomes in OUTCOMES:
        values, groups = torch.tensor(outcomes, dtype=torch.float64), torch.tensor(GROUPS)
        found = estimate(values.clone(), groups.clone())
        _same(found, estimate(values, groups), f"estimator {name!r} says another thing of the same outcomes")
        _same(found[order], estimate(values[order], groups[order]), f"estimator {name!r} depends on the samples' order")
        _same(found, estimate(values, 1000 - 7 * groups), f"estimator {name!r} depends on the groups' numbers")


def check_loss(name: str, *, options: Mapping[str, Option] | None = None) -> None:
    """A loss: finite with a finite gradient, the same for a row alone as beside others, whatever stands where the mask is 0.

    Else it would depend on how samples are split over ranks and micro-batches. Raises ContractBroken, PluginFault.
    """
    train = _train(loss=name, loss_options=dict(options or {}))
    loss = find_plugin_loss(train)
    _check_promise(loss is not None, f"{name!r} is gcore's own")
    assert loss is not None
    logp = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, -0.3]], dtype=torch.float64)
    old = torch.tensor([[-1.2, -0.9, -1.5], [-0.7, -0.8, -0.9]], dtype=torch.float64)
    gain = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])

    def of(rows: slice, logp: Tensor = logp) -> tuple[Tensor, Tensor]:
        """The masked token losses of some rows, and their gradient."""
        own = logp[rows].clone().requires_grad_()
        clips = {"clip_low": train.clip_low, "clip_high": train.clip_high}
        token_loss = loss(own, old[rows], gain[rows], mask[rows], **clips).where(mask[rows], 0.0)
        (gradient,) = torch.autograd.grad(token_loss.sum(), own)
        return token_loss.detach(), gradient

    both, gradient = of(slice(0, 2))
    _check_promise(
        bool(both.isfinite().all() and gradient.isfinite().all()), f"loss {name!r} or its gradient is not finite"
    )
    for row in range(2):
        alone, of_alone = of(slice(row, row + 1))
        _same(both[row : row + 1], alone, f"loss {name!r} of a row depends on the rows beside it")
        _same(gradient[row : row + 1], of_alone, f"the gradient of loss {name!r} depends on the rows beside it")
    odd = logp.clone()
    odd[1, 2] = -9.0  # behind the response's end
    _same(both, of(slice(0, 2), odd)[0], f"loss {name!r} looks at what the mask leaves out")


def _train(**settings: Any) -> TrainSpec:
    """The section; a name that there is not in words, with the nearest."""
    try:
        return TrainSpec(**settings)
    except ValidationError as error:
        problems = explain_errors(error, TrainSpec, root="spec")
        raise ContractBroken("; ".join(f"train.{problem}" for problem in problems)) from error


def _check_promise(kept: bool, sentence: str) -> None:
    if not kept:
        raise ContractBroken(sentence)


def _same(one: Tensor, other: Tensor, sentence: str) -> None:
    scale = max(1.0, float(one.abs().max()))
    _check_promise(bool(((one - other).abs() <= TOLERANCE * scale).all()), sentence)
