"""The length penalty, and groups without a training signal."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gcore.flows.filters import has_signal
from gcore.reward.api import RewardError
from gcore.rollout.postprocess import OVERLONG_PART, length_penalty, penalize_sample
from gcore.train.algorithms.advantages import group_advantages, overlong_penalty
from gcore.types import Group, PromptRef, Sample, Version, VersionSpan

rewards = st.floats(-1e3, 1e3, width=32)


def sample(length: int, reward: float = 0.0) -> Sample:
    span = VersionSpan(Version(0, 0), 0, length)
    return Sample((5,) * length, (-0.1,) * length, "x", "stop", (span,), reward=reward)


@given(st.integers(1, 200), st.integers(1, 100), st.floats(0.01, 5))
def test_it_is_the_formula_of_the_tensors(length: int, cache: int, penalty: float) -> None:
    expected = overlong_penalty(torch.tensor([length]), longest=120, cache=cache, factor=penalty)
    assert length_penalty(length, longest=120, cache=cache, penalty=penalty) == pytest.approx(float(expected))


def test_length_penalty_is_a_part_of_the_reward() -> None:
    long = penalize_sample(sample(18, 1.0), longest=20, cache=4, penalty=0.5)
    assert (long.reward, long.reward_parts) == (0.75, ((OVERLONG_PART, -0.25),))
    short = sample(16, 1.0)
    assert penalize_sample(short, longest=20, cache=4, penalty=0.5) is short
    assert penalize_sample(sample(20, 1.0), longest=20, cache=None, penalty=0.5).reward == 1.0


def test_a_penalty_beyond_float32_fails_the_prompt() -> None:
    with pytest.raises(RewardError, match=r"rollout\.overlong_penalty"):
        penalize_sample(sample(4, -3e38), longest=4, cache=1, penalty=2e38)


@given(st.lists(rewards, min_size=2, max_size=8))
def test_a_group_has_a_signal_exactly_if_some_advantage_is_not_zero(values: list[float]) -> None:
    group = Group(PromptRef(0, 0, 0), (1,), tuple(sample(2, value) for value in values))
    found = group_advantages(
        torch.tensor(values, dtype=torch.float64), torch.zeros(len(values), dtype=torch.int64), "grpo"
    )
    assert has_signal(group) == bool(found.any())


def test_rewards_that_differ_by_rounding_only_are_no_signal_and_a_masked_sample_counts() -> None:
    same = Group(PromptRef(0, 0, 0), (1,), (sample(2, 0.1 + 0.2), sample(2, 0.3)))
    assert not has_signal(same)
    one_wrong = Group(PromptRef(0, 0, 0), (1,), (sample(2, 1.0), replace(sample(2, 0.0), masked=True)))
    assert has_signal(one_wrong)
    assert not has_signal(Group(PromptRef(0, 0, 0), (1,), (sample(2, 1.0),)))
