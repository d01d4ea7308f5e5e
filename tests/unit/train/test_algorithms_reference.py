"""Reference numbers of independent implementations in float64, to 1e-6."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from gcore.train.algorithms.advantages import (
    GroupKind,
    Moments,
    at_last_token,
    discounted,
    gae,
    group_advantages,
    less_kl,
    overlong_penalty,
    whitened,
)
from gcore.train.algorithms.losses import (
    Mode,
    cispo_loss,
    clip_fraction_tokens,
    denominator,
    gspo_loss,
    icepop_weight,
    kl_estimate,
    loss_sum,
    mis_mask,
    nll_loss,
    ppo_loss,
    ratio_weight,
    tis_weight,
    value_loss,
)


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
        pytest.param("rloo", [0.5, -1, 0.5, 2.25, 0, -2.25], id="rloo"),
    ],
)
def test_advantages_agree_with_the_reference(kind: GroupKind, expected: list[float]) -> None:
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


def test_maximum_likelihood_is_the_cross_entropy_a_token() -> None:
    close(total(nll_loss(LOGP), "token-mean"), f64([1, 0.5, 2, 0.7, 1.2]).mean())


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


LENGTHS = [4, 3, 2, 4, 2, 1]
RESPONSES = torch.tensor([[1] * n + [0] * (4 - n) for n in LENGTHS])


def first_tokens(values: Tensor) -> Tensor:
    """A sequence's advantage, which all of its tokens share."""
    for row, count in zip(values, LENGTHS, strict=True):
        close(row[:count], row[:1].expand(count))
        close(row[count:], torch.zeros(4 - count).double())
    return values[:, 0]


def test_reinforce_plus_plus_with_a_baseline_whitens_what_is_left_of_the_groups_mean() -> None:
    tokens = group_advantages(REWARDS, GROUPS, "dr_grpo")[:, None] * RESPONSES
    made = whitened(tokens, RESPONSES, Moments.of(tokens, RESPONSES))
    close(first_tokens(made), f64([0.058269, -1.060494, 0.058269, 1.363492, -0.314652, -1.992796]))


def test_reinforce_plus_plus_whitens_returns_to_go() -> None:
    tokens = discounted(at_last_token(REWARDS, RESPONSES), RESPONSES, 1.0)
    made = whitened(tokens, RESPONSES, Moments.of(tokens, RESPONSES))
    close(first_tokens(made), f64([0.144338, -1.010363, 0.144338, 1.299038, -0.433013, -2.165063]))


def test_remax_compares_with_the_greedy_answer() -> None:
    greedy = f64([0.5, 0.5, 0.5, 1, 1, 1])
    to_go = discounted(at_last_token(REWARDS, RESPONSES), RESPONSES, 1.0)
    close(first_tokens((to_go - greedy[:, None]) * RESPONSES), f64([0.5, -0.5, 0.5, 1, -0.5, -2]))


def test_groups_of_different_sizes_are_each_measured_by_their_own() -> None:
    index = torch.tensor([0, 0, 1, 1, 1, 1])  # rewards 1, 0 and 1, 2, .5, -1
    std = 4.6875**0.5 / 3**0.5  # squares of .375, 1.375, -.125, -1.625 over 3
    wide = [0.375, 1.375, -0.125, -1.625]
    close(group_advantages(REWARDS, index, "dr_grpo"), f64([0.5, -0.5, *wide]))
    close(group_advantages(REWARDS, index, "rloo"), f64([1, -1, *(value * 4 / 3 for value in wide)]))
    half = 0.5 / (0.5**0.5 + 1e-6)
    close(group_advantages(REWARDS, index, "grpo"), f64([half, -half, *(value / (std + 1e-6) for value in wide)]))


def test_generalised_advantages_agree_with_the_reference() -> None:
    values, mask = f64([[0.5, 0.4, 0.3, 0.2]]), torch.ones(1, 4)
    advantages, returns = gae(f64([[0, 0, 0, 1]]), values, mask, gamma=0.9, lam=0.8)
    # The reference gives .00279; by hand it is -.14 + .72 * .19832.
    close(advantages, f64([[0.0027904, 0.19832, 0.456, 0.8]]))
    close(returns, advantages + values)


def test_gspo_agrees_with_the_reference() -> None:
    loss = gspo_loss(LOGP, OLD, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2)
    close(total(loss, "seq-mean-token-mean"), torch.tensor(-0.107582).double())


def test_cispo_agrees_with_the_reference() -> None:
    loss = cispo_loss(LOGP, OLD, ADVANTAGES, clip_low=1.0, clip_high=0.28)
    close(total(loss, "token-mean"), torch.tensor(0.314016).double())


def test_the_dual_clip_agrees_with_the_reference() -> None:
    logp = f64([[5.0]]).log()
    close(ppo_loss(logp, f64([[0]]), f64([[-1]]), clip_low=0.2, clip_high=0.2, dual_clip=3.0), f64([[3]]))
    close(ppo_loss(logp, f64([[0]]), f64([[-1]]), clip_low=0.2, clip_high=0.2), f64([[5]]))
    close(ppo_loss(logp, f64([[0]]), f64([[1]]), clip_low=0.2, clip_high=0.2, dual_clip=3.0), f64([[-1.2]]))


def test_the_value_loss_agrees_with_the_reference() -> None:
    values, returns, old = f64([[0.8, 0.1], [0.4, 0.9]]), f64([[1, 0.5], [0, 0.9]]), f64([[0.5, 0.2], [0.4, 0.5]])
    loss = value_loss(values, returns, old, 0.2)
    close(loss_sum(loss, torch.ones(2, 2), "token-mean") / 4, torch.tensor(0.05625).double())
    close(value_loss(values, returns, old, None), 0.5 * (values - returns) ** 2)


def test_the_penalty_of_length_agrees_with_the_reference() -> None:
    made = overlong_penalty(torch.tensor([3, 16, 17, 18, 20]), longest=20, cache=4, factor=1.0)
    close(made, f64([0, 0, -0.25, -0.5, -1]))


def test_icepop_drops_what_is_outside_its_band_and_mis_does_not_count_it() -> None:
    # ratios of OLD to ROLLOUT: e^.7, e^-.1, 1; e^-.1, e^.2, 1
    weight = icepop_weight(OLD, ROLLOUT, low=0.5, high=2.0)
    inside = f64([[0, 1, 1], [1, 1, 1]])
    close(weight, (OLD - ROLLOUT).exp() * inside)
    close(mis_mask(OLD, ROLLOUT, MASK, low=0.5, high=2.0).double(), MASK * inside)


def test_decoupled_ppo_weighs_by_the_proximal_policy_and_clips_around_it() -> None:
    loss = ratio_weight(OLD, ROLLOUT) * ppo_loss(LOGP, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    spelled = (OLD - ROLLOUT).exp() * torch.maximum(
        -ADVANTAGES * (LOGP - OLD).exp(), -ADVANTAGES * (LOGP - OLD).exp().clamp(0.8, 1.2)
    )
    close(loss, spelled)


def test_kl_inside_the_reward_is_taken_off_token_by_token() -> None:
    rewards = at_last_token(f64([1, 2]), MASK)
    kl = kl_estimate(LOGP, OLD, "k1")
    close(less_kl(rewards, kl, MASK, 0.1), f64([[-0.02, -0.04, 1.05], [0, 2.04, 0]]))
