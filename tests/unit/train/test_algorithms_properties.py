"""Properties for every input: splits do not matter, gradients equal the formulas, known pitfalls stay fixed."""

from __future__ import annotations

import math
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gcore.config.train import learning_rate
from gcore.train.algorithms.advantages import GroupKind, group_advantages
from gcore.train.algorithms.losses import (
    Mode,
    cispo_clip_fraction_tokens,
    cispo_loss,
    clip_fraction_tokens,
    denominator,
    kl_estimate,
    loss_sum,
    ppo_loss,
    tis_weight,
)

MODES: tuple[Mode, ...] = get_args(Mode)
KINDS = ("grpo", "dr_grpo", "rloo")
CLIP = {"clip_low": 0.2, "clip_high": 0.28}

rewards_lists = st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=6), min_size=1, max_size=5)


def flat(groups: list[list[float]]) -> tuple[Tensor, Tensor]:
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    return rewards, torch.tensor([index for index, group in enumerate(groups) for _ in group])


def generic(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- advantages


@given(rewards_lists, st.sampled_from(KINDS))
def test_the_advantages_of_a_group_sum_to_zero(groups: list[list[float]], kind: GroupKind) -> None:
    rewards, index = flat(groups)
    advantages = group_advantages(rewards, index, kind)
    for group in range(len(groups)):
        assert abs(float(advantages[index == group].sum())) < 1e-9 * 100


@given(rewards_lists, st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_the_order_of_samples_and_the_names_of_groups_do_not_matter(
    groups: list[list[float]], kind: GroupKind, random: object
) -> None:
    rewards, index = flat(groups)
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = group_advantages(rewards[order], 1000 - 7 * index[order], kind)
    torch.testing.assert_close(shuffled, group_advantages(rewards, index, kind)[order], atol=1e-6, rtol=1e-6)


@given(st.integers(2, 9), st.floats(-1e3, 1e3), st.sampled_from(KINDS), st.sampled_from([torch.float32, torch.float64]))
def test_a_group_whose_rewards_are_all_the_same_gets_zeros(
    samples: int, reward: float, kind: GroupKind, dtype: torch.dtype
) -> None:
    rewards = torch.full((samples,), reward, dtype=dtype)
    assert group_advantages(rewards, torch.zeros(samples, dtype=torch.int64), kind).tolist() == [0.0] * samples


def test_a_group_that_is_constant_up_to_rounding_gets_zeros_too() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    assert group_advantages(rewards, torch.zeros(3, dtype=torch.int64), "grpo").tolist() == [0.0] * 3


def test_rewards_far_from_zero_keep_their_differences() -> None:
    rewards = torch.tensor([16_777_216.0, 16_777_218.0], dtype=torch.float32)
    advantages = group_advantages(rewards, torch.zeros(2, dtype=torch.int64), "dr_grpo")
    assert advantages.tolist() == [-1.0, 1.0]
    assert advantages.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_refused(kind: GroupKind) -> None:
    with pytest.raises(ValueError, match="group of one"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), kind)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(torch.tensor([1.0, bad]), torch.tensor([0, 0]), "grpo")


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[n\]"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64), "grpo")
    with pytest.raises(ValueError, match=r"\[batch, tokens\]"):
        loss_sum(torch.zeros(2, 3), torch.ones(3, 2), "token-mean")


# --- aggregation

batches = st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any)


def padded(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    losses = generic(seed, len(lengths), max(lengths))
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    return losses, mask


@given(batches, st.integers(0, 1000), st.sampled_from(MODES), st.data())
def test_the_loss_and_its_gradient_are_the_same_for_every_split(
    lengths: list[int], seed: int, mode: Mode, data: st.DataObject
) -> None:
    losses, mask = padded(lengths, seed)
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    counts = {"tokens": sum(lengths), "sequences": sum(length > 0 for length in lengths), "horizon": 11.0}
    below = denominator(mode, **counts)  # type: ignore[arg-type]

    whole = losses.clone().requires_grad_()
    whole_loss = loss_sum(whole, mask, mode, 11.0) / below
    whole_loss.backward()

    split = losses.clone().requires_grad_()
    split_loss = torch.zeros((), dtype=torch.float64)
    for part in range(5):  # part 4 is always empty: a rank without a share
        rows = [row for row, where in enumerate(part_of) if where == part]
        width = max((lengths[row] for row in rows), default=0) + 1  # each part is padded to its own width
        part_losses = torch.nn.functional.pad(split[rows], (0, 7), value=1e9)[:, :width]
        part_mask = torch.nn.functional.pad(mask[rows], (0, 7), value=False)[:, :width]
        loss = loss_sum(part_losses, part_mask, mode, 11.0) / below
        split_loss = split_loss + loss.detach()
        loss.backward()

    torch.testing.assert_close(split_loss, whole_loss.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(split.grad, whole.grad, atol=1e-12, rtol=1e-12)


@given(batches, st.integers(0, 1000), st.sampled_from(MODES))
def test_aggregation_agrees_with_its_definition_spelled_out(lengths: list[int], seed: int, mode: Mode) -> None:
    losses, mask = padded(lengths, seed)
    rows = [losses[row, :length].tolist() for row, length in enumerate(lengths) if length]
    spelled_out = {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / len(rows) / 9.0,
    }
    below = denominator(mode, tokens=sum(map(len, rows)), sequences=len(rows), horizon=9.0)
    assert float(loss_sum(losses, mask, mode, 9.0)) / below == pytest.approx(spelled_out[mode], abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_masked_positions_have_no_effect(mode: Mode) -> None:
    losses, mask = padded([3, 1], 5)
    dirty = torch.where(mask, losses, torch.tensor(math.inf, dtype=torch.float64))
    assert float(loss_sum(dirty, mask, mode, 4.0)) == float(loss_sum(losses, mask, mode, 4.0))


@pytest.mark.parametrize("mode", MODES)
def test_an_update_without_tokens_is_refused(mode: Mode) -> None:
    with pytest.raises(ValueError, match="needs at least 1"):
        denominator(mode, tokens=0, sequences=0, horizon=1.0)


@pytest.mark.parametrize("horizon", [None, 0.0, -1.0])
def test_dr_grpos_aggregation_needs_its_horizon(horizon: float | None) -> None:
    with pytest.raises(ValueError, match="horizon"):
        loss_sum(torch.ones(1, 1), torch.ones(1, 1), "seq-mean-token-sum-norm", horizon)
    with pytest.raises(ValueError, match="horizon"):
        denominator("seq-mean-token-sum-norm", tokens=1, sequences=1, horizon=horizon)


# --- gradients


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_of_the_loss_agrees_with_finite_differences(seed: int, mode: Mode) -> None:
    old, advantages = generic(seed, 3, 5), generic(seed + 100, 3, 1)
    mask = generic(seed + 200, 3, 5) > -0.5

    def loss(logp: Tensor) -> Tensor:
        return loss_sum(ppo_loss(logp, old, advantages, **CLIP), mask, mode, 7.0)

    assert torch.autograd.gradcheck(loss, (generic(seed + 300, 3, 5).requires_grad_(),), atol=1e-6)


def test_k3_has_no_bound_unless_one_is_given_and_no_gradient_beyond_it() -> None:
    policy = torch.tensor([-8.0, -2.7, -2.5, 3.0], dtype=torch.float64, requires_grad=True)
    free, held = (kl_estimate(policy, torch.zeros(4, dtype=torch.float64), "k3", most=most) for most in (None, 10.0))
    assert free.tolist() == pytest.approx([math.exp(-d) - 1 + d for d in policy.tolist()])
    assert held.tolist() == pytest.approx([10.0, 10.0, *free.tolist()[2:]])
    (of_free,), (of_held,) = (torch.autograd.grad(one.sum(), policy) for one in (free, held))
    assert of_free[0] == pytest.approx(1 - math.exp(8))
    assert of_held.tolist() == pytest.approx([0.0, 0.0, *of_free.tolist()[2:]])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_gradient_of_a_kl_estimate_agrees_with_finite_differences(kind: Literal["k1", "k2", "k3"]) -> None:
    ref = generic(1, 2, 4)
    assert torch.autograd.gradcheck(lambda logp: kl_estimate(logp, ref, kind), (generic(2, 2, 4).requires_grad_(),))


@given(st.floats(-15, 15), st.floats(-15, 15), st.sampled_from([torch.float32, torch.float64]))
def test_k3_plus_shows_k3_and_pulls_like_k2(logp: float, ref: float, dtype: torch.dtype) -> None:
    policy = torch.tensor(logp, dtype=dtype, requires_grad=True)
    reference = torch.tensor(ref, dtype=dtype)
    estimate = kl_estimate(policy, reference, "k3+")
    estimate.backward()
    assert policy.grad is not None
    assert float(estimate.detach()) == float(kl_estimate(policy.detach(), reference, "k3"))
    # Exact but for half of a denormal number, which is none.
    assert float(policy.grad) == pytest.approx(float(policy.detach() - reference), rel=0, abs=1e-37)


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k2_and_k3_are_never_negative_and_vanish_only_together(logp: float, ref: float) -> None:
    policy, reference = torch.tensor(logp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
    assert float(kl_estimate(policy, reference, "k2")) >= 0
    assert float(kl_estimate(policy, reference, "k3")) >= -1e-15
    assert float(kl_estimate(policy, policy, "k3")) == 0


def test_the_mean_of_k1_and_of_k3_over_the_policy_is_the_divergence() -> None:
    policy, reference = torch.log_softmax(generic(1, 40), 0), torch.log_softmax(generic(2, 40), 0)
    exact = float((policy.exp() * (policy - reference)).sum())
    for kind in ("k1", "k3"):
        assert float((policy.exp() * kl_estimate(policy, reference, kind)).sum()) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("dual", [None, 2.0], ids=["plain", "dual"])
@pytest.mark.parametrize("seed", range(5))
def test_a_token_has_no_gradient_exactly_where_the_clip_holds_it_back(seed: int, dual: float | None) -> None:
    logp, old, advantages = generic(seed, 4, 6).requires_grad_(), generic(seed + 50, 4, 6), generic(seed + 90, 4, 1)
    ppo_loss(logp, old, advantages, **CLIP, dual_clip=dual).sum().backward()
    assert logp.grad is not None
    assert torch.equal(logp.grad == 0, clip_fraction_tokens(logp, old, advantages, **CLIP, dual_clip=dual) == 1)


@pytest.mark.parametrize("seed", range(5))
def test_cispos_clip_changes_weights_whatever_the_advantage_and_leaves_every_gradient(seed: int) -> None:
    logp, old, advantages = generic(seed, 4, 6).requires_grad_(), generic(seed + 50, 4, 6), generic(seed + 90, 4, 1)
    cispo_loss(logp, old, advantages, **CLIP).sum().backward()
    assert logp.grad is not None
    assert bool(logp.grad.all())
    plain = -(logp.detach() - old).exp() * advantages
    changed = cispo_clip_fraction_tokens(logp, old, **CLIP) == 1
    assert torch.equal(changed, ~torch.isclose(logp.grad, plain, rtol=1e-12, atol=0))


def test_no_gradient_reaches_the_old_log_probabilities_the_advantages_or_the_weights() -> None:
    old, rollout = generic(1, 2, 3).requires_grad_(), generic(2, 2, 3).requires_grad_()
    advantages, logp = generic(3, 2, 1).requires_grad_(), generic(4, 2, 3).requires_grad_()
    loss = ppo_loss(logp, old, advantages, **CLIP) * tis_weight(old, rollout, 2.0) + kl_estimate(logp, rollout, "k3")
    loss.sum().backward()
    assert (old.grad, rollout.grad, advantages.grad) == (None, None, None)
    assert logp.grad is not None


@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_log_probabilities_that_are_worlds_apart_give_finite_losses_and_gradients(gap: float, sign: float) -> None:
    logp = torch.full((1, 1), gap, requires_grad=True)
    zero = torch.zeros(1, 1)
    loss = ppo_loss(logp, zero, torch.full((1, 1), sign), **CLIP) * tis_weight(zero, logp, 2.0)
    (loss + kl_estimate(logp, zero, "k3")).sum().backward()
    assert bool(torch.isfinite(loss).all())
    assert logp.grad is not None
    assert bool(torch.isfinite(logp.grad).all())


@given(st.integers(0, 10**6))
def test_with_the_policy_unchanged_the_loss_is_minus_the_advantage_and_pulls_as_the_policy_gradient(seed: int) -> None:
    logp = generic(seed, 2, 3).requires_grad_()
    advantages = generic(seed + 1, 2, 1)
    loss = ppo_loss(logp, logp.detach(), advantages, **CLIP)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), -advantages.expand(2, 3))
    torch.testing.assert_close(logp.grad, -advantages.expand(2, 3))


@given(st.integers(0, 10**6), st.floats(0.01, 10))
def test_the_importance_weight_lies_between_zero_and_its_cap(seed: int, cap: float) -> None:
    weight = tis_weight(generic(seed, 3, 3) * 10, generic(seed + 1, 3, 3) * 10, cap)
    assert bool(((weight > 0) & (weight <= cap)).all())


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_a_cap_that_is_not_above_zero_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="cap"):
        tis_weight(torch.zeros(1), torch.zeros(1), cap)


# --- the learning rate

schedules = st.sampled_from(["constant", "linear", "cosine"])


@given(st.integers(0, 200), st.integers(0, 50), schedules, st.integers(1, 200))
def test_the_rate_stays_within_zero_and_its_peak(update: int, warmup: int, schedule: str, total: int) -> None:
    rate = learning_rate(update, peak=3e-4, warmup_updates=warmup, schedule=schedule, total_updates=total)  # type: ignore[arg-type]
    assert 0 <= rate <= 3e-4
    if update < total:
        assert rate > 0


@given(st.integers(0, 50), st.sampled_from(["linear", "cosine"]), st.integers(60, 200))
def test_the_rate_rises_in_the_warm_up_and_falls_after_it(warmup: int, schedule: str, total: int) -> None:
    rates = [
        learning_rate(u, peak=1.0, warmup_updates=warmup, schedule=schedule, total_updates=total)  # type: ignore[arg-type]
        for u in range(total + 1)
    ]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == 1.0
    assert rates[total] == 0.0


@pytest.mark.parametrize(
    ("update", "schedule", "expected"),
    [
        pytest.param(0, "constant", 0.25, id="first of four warm-up updates"),
        pytest.param(3, "constant", 1.0, id="last of the warm-up"),
        pytest.param(500, "constant", 1.0, id="constant for ever"),
        pytest.param(8, "linear", 0.5, id="half way down the line"),
        pytest.param(8, "cosine", 0.5, id="half way down the cosine"),
        pytest.param(10, "cosine", 0.14644660940672624, id="three quarters down the cosine"),
    ],
)
def test_the_rate_at_some_updates(
    update: int, schedule: Literal["constant", "linear", "cosine"], expected: float
) -> None:
    rate = learning_rate(update, peak=1.0, warmup_updates=4, schedule=schedule, total_updates=12)
    assert rate == pytest.approx(expected)


def test_a_negative_update_is_refused() -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        learning_rate(-1, peak=1.0, warmup_updates=0, schedule="constant", total_updates=1)
