"""The known pitfalls, one test each: points where implementations disagree or fail silently."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from gcore.config import parse_spec
from gcore.errors import SpecError
from gcore.flows.filters import has_signal
from gcore.train.algorithms.advantages import (
    Moments,
    at_last_token,
    discounted,
    gae,
    group_advantages,
    less_kl,
    whitened,
)
from gcore.train.algorithms.losses import denominator, kl_estimate, loss_sum, mis_mask, ppo_loss, tis_weight
from gcore.types import Group, PromptRef, Sample, Version, VersionSpan


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_trap_a_group_of_one_is_refused_at_validation_and_by_the_function(kind: str) -> None:
    tree = {
        "name": "job",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 1, "samples_per_prompt": 1},
        "rollout": {"max_new_tokens": 8},
        "train": {"advantage": kind},
    }
    with pytest.raises(SpecError, match="use at least 2"):
        parse_spec(tree)
    function = "dr_grpo" if kind == "reinforce_pp_baseline" else kind
    with pytest.raises(ValueError, match="group of one"):
        group_advantages(torch.tensor([1.0]), torch.tensor([0]), function)  # type: ignore[arg-type]


def test_trap_a_mean_over_parts_is_not_the_mean_over_all_of_them() -> None:
    """Two ranks with 3 and 1 tokens: a mean of their means would give the one token as much weight as the three."""
    losses, mask = f64([1, 1, 1], [9, 0, 0]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    parts = [loss_sum(losses[row : row + 1], mask[row : row + 1], "token-mean") for row in range(2)]
    whole = sum(float(part) for part in parts) / denominator("token-mean", tokens=4, sequences=2)
    assert whole == pytest.approx(3.0)
    assert sum(float(part) / n for part, n in zip(parts, (3, 1), strict=True)) / 2 == pytest.approx(5.0)


def test_trap_returns_are_taken_before_advantages_are_whitened() -> None:
    rewards, values, mask = f64([0, 0, 1], [0, 2, 0]), f64([0.5, 0.4, 0.3], [0.1, 0.2, 0]), f64([1, 1, 1], [1, 1, 0])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, discounted(rewards, mask, 1.0))
    white = whitened(advantages, mask, Moments.of(advantages, mask))
    assert not torch.allclose(white + values * mask, returns), "fitted to whitened ones, the critic would learn nothing"


def test_trap_whitening_is_over_the_whole_step_with_the_unbiased_variance() -> None:
    values, mask = f64([1, 2], [3, 10]), torch.ones(2, 2)
    parts = Moments.of(values[:1], mask[:1]) + Moments.of(values[1:], mask[1:])
    expected = (values - values.mean()) / (values.var(unbiased=True) + 1e-8).sqrt()
    torch.testing.assert_close(whitened(values, mask, parts), expected)


def test_trap_observations_between_turns_hand_values_and_advantages_through() -> None:
    """Two tokens of the model, two of a tool, one of the model: as if the tool's were not there, whatever they hold."""
    mask = torch.tensor([[1, 1, 0, 0, 1]])
    values, rewards = f64([0.5, 0.4, 77, -77, 0.3]), f64([0, 0, 55, 55, 1])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    short = [0, 1, 4]
    plain = gae(rewards[:, short], values[:, short], torch.ones(1, 3), gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages[:, short], plain[0])
    torch.testing.assert_close(returns[:, short], plain[1])
    assert not advantages[:, 2:4].any()


def test_trap_a_constant_group_is_found_with_a_tolerance_in_float64() -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(rewards)) == 2, "by ==, this group has a signal"
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), "grpo")
    assert found.tolist() == [0.0, 0.0, 0.0]
    spans = (VersionSpan(Version(0, 0), 0, 1),)
    samples = tuple(Sample((1,), (-1.0,), "", "stop", spans, reward=reward) for reward in rewards)
    assert not has_signal(Group(PromptRef(0, 0, 0), (1,), samples))
    # In float32 two large rewards that differ would be the same; here they are not.
    far = group_advantages(torch.tensor([1e8, 1e8 + 1], dtype=torch.float64), torch.zeros(2, dtype=torch.int64), "rloo")
    assert far.tolist() == [-1.0, 1.0]


def test_trap_kl_in_the_reward_and_kl_as_a_loss_are_different_things() -> None:
    logp, ref, mask = f64([-1.0, -0.5]).requires_grad_(), f64([-1.2, -0.1]), torch.ones(1, 2)
    inside = less_kl(at_last_token(torch.tensor([1.0]), mask), kl_estimate(logp, ref, "k1"), mask, 0.5)
    assert not inside.requires_grad
    torch.testing.assert_close(inside, f64([-0.1, 1.2]))
    beside = 0.5 * kl_estimate(logp, ref, "k3").sum()
    (gradient,) = torch.autograd.grad(beside, logp)
    assert bool(gradient.any())
    # As a loss k1 pulls every token the same way, wherever the reference is: it teaches nothing.
    (pull,) = torch.autograd.grad(kl_estimate(logp, ref, "k1").sum(), logp)
    assert pull.tolist() == [[1.0, 1.0]]


def test_trap_the_engines_numbers_are_not_the_trainers_and_which_is_old_matters() -> None:
    """Against its own numbers the policy's ratio is 1 and nothing is clipped; against the engine's a mismatch is a ratio."""
    own, engine, gain = f64([-1.0, -2.0]), f64([-1.0, -2.5]), f64([1.0])
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    recomputed = ppo_loss(own, own, gain, **clip)
    against_engine = ppo_loss(own, engine, gain, **clip)
    assert recomputed.tolist() == [[-1.0, -1.0]]
    assert against_engine.tolist() == [[-1.0, pytest.approx(-1.2)]]
    # Named, the mismatch is a weight of its own, and the clip is left to what training changed.
    assert (recomputed * tis_weight(own, engine, 2.0)).tolist() == [[-1.0, pytest.approx(-math.exp(0.5))]]


def test_trap_tokens_that_mis_leaves_out_are_not_counted() -> None:
    own, engine, mask = f64([-1.0, -1.0, -1.0]), f64([-1.0, -9.0, -1.0]), torch.ones(1, 3)
    kept = mis_mask(own, engine, mask, low=0.5, high=2.0)
    loss = loss_sum(f64([3.0, 100.0, 3.0]), kept, "token-mean")
    assert float(loss) / denominator("token-mean", tokens=int(kept.sum()), sequences=1) == pytest.approx(3.0)
    assert float(loss) / denominator("token-mean", tokens=3, sequences=1) == pytest.approx(2.0), "icepop's count"


def test_trap_a_length_weighs_in_each_aggregation_as_its_name_says() -> None:
    """A long and a short response with the same loss a token: what the long one weighs, of all."""
    mask = torch.tensor([[1] * 8, [1] * 2 + [0] * 6])
    share = {}
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        x = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
        below = denominator(mode, tokens=10, sequences=2, horizon=16.0)  # type: ignore[arg-type]
        (loss_sum(x, mask, mode, 16.0) / below).backward()  # type: ignore[arg-type,no-untyped-call]
        assert x.grad is not None
        share[mode] = [round(float(row.sum()), 6) for row in x.grad]
    assert share == {
        "token-mean": [0.8, 0.2],
        "seq-mean-token-mean": [0.5, 0.5],
        "seq-mean-token-sum": [4.0, 1.0],
        "seq-mean-token-sum-norm": [0.25, 0.0625],
    }


def test_trap_the_order_and_the_split_of_samples_never_matter() -> None:
    rewards, index = torch.tensor([1.0, 0, 1, 2, 0.5, -1], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1])
    expected = group_advantages(rewards, index, "grpo")
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 37):
        places = torch.tensor(order)
        assert torch.allclose(group_advantages(rewards[places], index[places], "grpo"), expected[places], atol=1e-12)
