"""Returns, generalised advantages and whitening: properties for every input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gcore.train.algorithms.advantages import (
    Moments,
    at_last_token,
    discounted,
    gae,
    group_advantages,
    less_kl,
    overlong_penalty,
    whitened,
)
from gcore.train.algorithms.losses import cispo_loss, gspo_loss, icepop_weight, mis_mask, ppo_loss, value_loss

seeds = st.integers(0, 2**31)
factors = st.floats(0, 1)


def generic(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def holes(seed: int, rows: int, tokens: int) -> Tensor:
    """Masks of sequences with observations between their turns; at least one token of each row counts."""
    mask = generic(seed, rows, tokens) > 0
    mask[torch.arange(rows), torch.arange(rows) % tokens] = True
    return mask


@given(seeds, factors)
def test_returns_and_advantages_do_not_see_observations_in_the_middle(seed: int, gamma: float) -> None:
    """They are those of the sequence without them."""
    rewards, values, mask = generic(seed, 1, 9), generic(seed + 1, 1, 9), holes(seed, 1, 9)
    kept = mask[0]
    everything = torch.ones(1, int(kept.sum()))
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=0.7)
    short_advantages, short_returns = gae(rewards[:, kept], values[:, kept], everything, gamma=gamma, lam=0.7)
    torch.testing.assert_close(advantages[:, kept], short_advantages)
    torch.testing.assert_close(returns[:, kept], short_returns)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()
    whole = discounted(rewards, mask, gamma)
    torch.testing.assert_close(whole[:, kept], discounted(rewards[:, kept], everything, gamma))
    assert not whole[~mask].any()


@given(seeds, factors)
def test_with_lambda_one_the_critic_is_fitted_to_the_discounted_return(seed: int, gamma: float) -> None:
    rewards, values, mask = generic(seed, 3, 6), generic(seed + 1, 3, 6), holes(seed, 3, 6)
    _, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    torch.testing.assert_close(returns, discounted(rewards, mask, gamma))


@given(seeds, factors, factors)
def test_a_critic_that_knows_everything_leaves_no_advantage(seed: int, gamma: float, lam: float) -> None:
    rewards, mask = generic(seed, 3, 6), holes(seed, 3, 6)
    values = discounted(rewards, mask, gamma)
    advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages))


@given(seeds)
def test_without_discount_every_token_has_the_reward_of_its_sequence(seed: int) -> None:
    rewards, mask = generic(seed, 4), holes(seed, 4, 7)
    tokens = discounted(at_last_token(rewards, mask), mask, 1.0)
    torch.testing.assert_close(tokens, torch.where(mask, rewards[:, None], 0.0))


def test_a_reward_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="its reward cannot be placed"):
        at_last_token(torch.ones(2), torch.tensor([[1, 0], [0, 0]]))


@given(seeds, st.integers(0, 12), st.floats(-1e6, 1e6))
def test_moments_of_parts_add_up_to_those_of_the_whole(seed: int, cut: int, shift: float) -> None:
    values, mask = generic(seed, 12, 3) + shift, holes(seed, 12, 3)
    whole = Moments.of(values, mask)
    added = Moments.of(values[:cut], mask[:cut]) + Moments.of(values[cut:], mask[cut:])
    assert added.count == whole.count
    assert added.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-9)
    assert added.variance == pytest.approx(whole.variance, rel=1e-6)
    torch.testing.assert_close(torch.tensor(whole.variance).double(), values[mask].var(), rtol=1e-6, atol=1e-9)


@given(seeds)
def test_whitened_values_have_mean_zero_and_variance_one_and_masked_ones_are_zero(seed: int) -> None:
    values, mask = generic(seed, 6, 5) * 7 + 3, holes(seed, 6, 5)
    made = whitened(values, mask, Moments.of(values, mask))
    assert float(made[mask].mean()) == pytest.approx(0, abs=1e-9)
    assert float(made[mask].var()) == pytest.approx(1, rel=1e-6)
    assert not made[~mask].any()


@pytest.mark.parametrize("rows", [1, 4])
def test_values_that_are_all_the_same_become_zero_and_an_empty_part_says_nothing(rows: int) -> None:
    values = torch.full((rows, 1), 3.25)
    assert not whitened(values, torch.ones(rows, 1), Moments.of(values, torch.ones(rows, 1))).any()
    assert Moments() + Moments.of(values, torch.zeros(rows, 1)) == Moments()


# Losses ---------------------------------------------------------------------------------------------------------------


def gradients_agree(loss: object, at: Tensor) -> None:
    assert torch.autograd.gradcheck(loss, (at.clone().requires_grad_(),), eps=1e-6, atol=1e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))  # drawn once, so that no kink is met by chance
def test_gradients_of_the_losses_agree_with_finite_differences(seed: int) -> None:
    logp, old, gain = generic(seed, 3, 4) * 0.2, generic(seed + 1, 3, 4) * 0.2, generic(seed + 2, 3, 1)
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    gradients_agree(lambda x: ppo_loss(x, old, gain, **clip, dual_clip=1.3), logp)
    gradients_agree(lambda x: value_loss(x, gain.expand(3, 4), old, 0.15), logp)
    # The weight is detached: the gradient is that of a constant times the log-probability.
    weight = (logp - old).exp().clamp(0.8, 1.28)
    x = logp.clone().requires_grad_()
    cispo_loss(x, old, gain, **clip).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -weight * gain.expand(3, 4))


@given(seeds)
def test_gspos_tokens_share_the_ratio_of_their_sequence_and_its_gradient(seed: int) -> None:
    logp, old, mask = generic(seed, 3, 5) * 0.05, generic(seed + 1, 3, 5) * 0.05, holes(seed, 3, 5)
    gain = generic(seed + 2, 3, 1)
    x = logp.clone().requires_grad_()
    loss = gspo_loss(x, old, gain, mask, clip_low=0.9, clip_high=9.0)
    for row in range(3):
        kept = mask[row]
        ratio = (logp - old)[row, kept].mean().exp()
        torch.testing.assert_close(loss[row].detach(), (-gain[row] * ratio).expand(5))
    torch.where(mask, loss, 0.0).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(mask, loss.detach(), 0.0))


@given(seeds)
def test_gspo_does_not_see_what_is_masked(seed: int) -> None:
    logp, old, mask, gain = generic(seed, 3, 5), generic(seed + 1, 3, 5), holes(seed, 3, 5), generic(seed + 2, 3, 1)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    other = torch.where(mask, logp, generic(seed + 3, 3, 5))
    assert torch.equal(gspo_loss(logp, old, gain, mask, **clip)[mask], gspo_loss(other, old, gain, mask, **clip)[mask])


@given(seeds)
def test_a_sequence_of_one_token_has_the_same_loss_under_gspo_and_ppo(seed: int) -> None:
    logp, old, gain = generic(seed, 4, 1), generic(seed + 1, 4, 1), generic(seed + 2, 4, 1)
    clip = {"clip_low": 0.2, "clip_high": 0.3}
    torch.testing.assert_close(gspo_loss(logp, old, gain, torch.ones(4, 1), **clip), ppo_loss(logp, old, gain, **clip))


@given(seeds, st.floats(1.01, 5))
def test_the_dual_clip_only_lowers_and_only_where_the_advantage_is_negative(seed: int, bound: float) -> None:
    logp, old, gain = generic(seed, 3, 4) * 3, generic(seed + 1, 3, 4), generic(seed + 2, 3, 4)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    plain, dual = ppo_loss(logp, old, gain, **clip), ppo_loss(logp, old, gain, **clip, dual_clip=bound)
    assert bool((dual <= plain).all())
    assert torch.equal(dual[gain >= 0], plain[gain >= 0])
    assert bool((dual <= -gain * bound)[gain < 0].all())


@given(seeds)
def test_a_critic_within_its_clip_has_the_plain_loss(seed: int) -> None:
    old, returns = generic(seed, 3, 4), generic(seed + 1, 3, 4)
    values = old + generic(seed + 2, 3, 4).clamp(-0.19, 0.19)
    torch.testing.assert_close(value_loss(values, returns, old, 0.2), 0.5 * (values - returns) ** 2)


@given(seeds, st.floats(0, 0.9), st.floats(1.1, 4))
def test_icepop_and_mis_agree_on_what_is_outside(seed: int, low: float, high: float) -> None:
    old, rollout, mask = generic(seed, 3, 5), generic(seed + 1, 3, 5), holes(seed, 3, 5)
    weight, kept = icepop_weight(old, rollout, low=low, high=high), mis_mask(old, rollout, mask, low=low, high=high)
    assert torch.equal(kept, mask & (weight > 0))
    assert bool(((weight == 0) | ((weight >= low) & (weight <= high))).all())


@given(seeds)
def test_no_gradient_reaches_what_is_held_fixed(seed: int) -> None:
    logp = generic(seed, 2, 3).requires_grad_()
    fixed = [generic(seed + n, 2, 3).requires_grad_() for n in range(1, 4)]
    old, gain, returns = fixed
    mask = torch.ones(2, 3)
    losses = [
        gspo_loss(logp, old, gain, mask, clip_low=0.2, clip_high=0.2),
        cispo_loss(logp, old, gain, clip_low=1.0, clip_high=0.28),
        value_loss(logp, returns, old, 0.2),
        logp * icepop_weight(old, gain, low=0.1, high=9.0),
    ]
    torch.stack([loss.sum() for loss in losses]).sum().backward()
    assert all(one.grad is None for one in fixed)
    advantages, _ = gae(old, logp, mask, gamma=0.9, lam=0.9)
    assert not advantages.requires_grad
    assert not less_kl(returns.detach(), logp, mask, 0.1).requires_grad


# What is refused ------------------------------------------------------------------------------------------------------


def test_settings_that_mean_nothing_are_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="above 1"):
        ppo_loss(one, one, one, clip_low=0.2, clip_high=0.2, dual_clip=1.0)
    with pytest.raises(ValueError, match="0 <= low < high"):
        icepop_weight(one, one, low=2.0, high=0.5)
    with pytest.raises(ValueError, match="at most 4"):
        overlong_penalty(torch.ones(1), longest=4, cache=5, factor=1.0)
    with pytest.raises(ValueError, match="at least 0"):
        overlong_penalty(torch.ones(1), longest=4, cache=2, factor=-1.0)
    with pytest.raises(ValueError, match=r"must both be \[n\]"):
        group_advantages(torch.ones(2), torch.zeros(3, dtype=torch.int64), "grpo")


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 100), st.floats(0, 5))
def test_the_penalty_of_length_never_rises_and_is_the_factor_at_the_longest(
    lengths: list[int], cache: int, factor: float
) -> None:
    found = overlong_penalty(torch.tensor(sorted(lengths)), longest=120, cache=cache, factor=factor)
    assert bool((found.diff() <= 0).all())
    assert bool((found <= 0).all())
    assert float(overlong_penalty(torch.tensor([120]), longest=120, cache=cache, factor=factor)) == pytest.approx(
        -factor
    )
