"""The reference numbers: what independent implementations give in float64, to 1e-6."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from gcore.train.algorithms.advantages import group_advantages
from gcore.train.algorithms.aggregate import Mode, denominator, loss_sum
from gcore.train.algorithms.corrections import tis_weight
from gcore.train.algorithms.kl import kl_estimate
from gcore.train.algorithms.losses import clip_fraction_tokens, ppo_loss


def f64(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


REWARDS = f64([1, 0, 1, 2, 0.5, -1])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
LOGP = f64([[-1, -0.5, -2], [-0.7, -1.2, -0.3]])
OLD = f64([[-1.2, -0.9, -1.5], [-0.7, -0.8, -0.9]])
ROLLOUT = f64([[-1.9, -0.8, -1.5], [-0.6, -1, -0.9]])
ADVANTAGES = f64([[1], [-1]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


def total(token_loss: Tensor, mode: Mode, horizon: float | None = None) -> Tensor:
    tokens = int(MASK.sum())
    return loss_sum(token_loss, MASK, mode, horizon) / denominator(mode, tokens=tokens, sequences=2, horizon=horizon)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("grpo", [0.577349, -1.154699, 0.577349, 0.999999, 0, -0.999999], id="grpo"),
        pytest.param("dr_grpo", [0.333333, -0.666667, 0.333333, 1.5, 0, -1.5], id="dr_grpo"),
    ],
)
def test_advantages_agree_with_the_reference(kind: Literal["grpo", "dr_grpo"], expected: list[float]) -> None:
    close(group_advantages(REWARDS, GROUPS, kind), f64(expected))


@pytest.mark.parametrize(
    ("mode", "high", "expected"),
    [
        pytest.param("token-mean", 0.2, -0.241306, id="ppo token-mean"),
        pytest.param("seq-mean-token-mean", 0.2, -0.051088, id="ppo seq-mean-token-mean"),
        pytest.param("token-mean", 0.28, -0.261587, id="dapo token-mean"),
    ],
)
def test_clipped_losses_agree_with_the_reference(mode: Mode, high: float, expected: float) -> None:
    close(total(ppo_loss(LOGP, OLD, ADVANTAGES, clip_low=0.2, clip_high=high), mode), torch.tensor(expected).double())


def test_the_truncated_importance_weight_agrees_with_the_reference() -> None:
    loss = ppo_loss(LOGP, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.2) * tis_weight(OLD, ROLLOUT, 2.0)
    close(total(loss, "token-mean"), torch.tensor(-0.442075).double())


def test_the_sums_over_sequences_follow_from_the_token_losses() -> None:
    loss = ppo_loss(LOGP, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    by_token = total(loss, "token-mean") * 5
    close(total(loss, "seq-mean-token-sum"), by_token / 2)
    close(total(loss, "seq-mean-token-sum-norm", 8), by_token / 2 / 8)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [0.2, -0.4]), ("k2", [0.02, 0.08]), ("k3", [0.018731, 0.091825]), ("k3+", [0.018731, 0.091825])],
    ids=["k1", "k2", "k3", "k3+"],
)
def test_kl_estimates_agree_with_the_reference(kind: Literal["k1", "k2", "k3", "k3+"], expected: list[float]) -> None:
    close(kl_estimate(f64([-1, -0.5]), f64([-1.2, -0.1]), kind), f64(expected))


def test_the_clip_fraction_counts_the_tokens_that_the_clip_holds_back() -> None:
    # ratios: e^.2, e^.4, e^-.5 with A = 1; 1, e^-.4, e^.6 with A = -1
    held = clip_fraction_tokens(LOGP, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    close(held, f64([[1, 1, 0], [0, 1, 0]]))
    close(clip_fraction_tokens(LOGP, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.28), f64([[0, 1, 0], [0, 1, 0]]))
