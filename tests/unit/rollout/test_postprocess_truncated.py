"""Truncated responses: each policy, on any group."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.reward.api import RewardError
from gcore.rollout.postprocess import TRUNCATED_PART, TruncationPolicy, drop_truncated, is_truncated, treat_truncated
from gcore.types import Outcome, Sample, Version, VersionSpan

POLICIES: tuple[TruncationPolicy, ...] = ("keep", "mask", "penalise", "drop_group")


def sample(tokens: int, reason: Any, reward: float = 0.0) -> Sample:
    return Sample(
        tuple(range(tokens)),
        (0.0,) * tokens,
        "x",
        reason,
        (VersionSpan(Version(0, 0), 0, tokens),),
        reward,
        (("rule", reward),),
    )


samples = st.builds(
    sample, st.integers(1, 9), st.sampled_from(["stop", "length"]), st.floats(-10, 10, allow_nan=False, width=32)
)
groups = st.lists(samples, min_size=1, max_size=8)


@given(groups, st.sampled_from(POLICIES), st.floats(0.125, 4, width=32))
def test_finished_responses_are_never_changed(group: list[Sample], policy: TruncationPolicy, penalty: float) -> None:
    assert all(treat_truncated(one, policy, penalty) == one for one in group if not is_truncated(one))
    if not any(is_truncated(one) for one in group):
        assert drop_truncated(group, policy) is None


@given(groups, st.floats(0.125, 4, width=32))
def test_keep_changes_nothing(group: list[Sample], penalty: float) -> None:
    assert drop_truncated(group, "keep") is None
    assert [treat_truncated(one, "keep", penalty) for one in group] == group


@given(groups, st.floats(0.125, 4, width=32))
def test_mask_leaves_the_rewards_and_masks_exactly_what_was_cut_off(group: list[Sample], penalty: float) -> None:
    after = [treat_truncated(one, "mask", penalty) for one in group]
    assert [one.masked for one in after] == [is_truncated(one) for one in group]
    assert [(one.reward, one.reward_parts) for one in after] == [(one.reward, one.reward_parts) for one in group]


@given(groups)
def test_a_masked_group_is_filtered_exactly_if_nothing_is_left_for_the_loss(group: list[Sample]) -> None:
    nothing_left = all(treat_truncated(one, "mask", 1.0).masked for one in group)
    outcome = drop_truncated(group, "mask")
    assert (outcome is not None) == nothing_left
    assert outcome is None or outcome == Outcome(
        "filtered", "every response was truncated (rollout.max_new_tokens) and masked in the loss"
    )


@given(groups, st.floats(0.125, 4, width=32))
def test_penalise_takes_the_penalty_off_and_says_so_in_a_part(group: list[Sample], penalty: float) -> None:
    assert drop_truncated(group, "penalise") is None
    for before in group:
        after = treat_truncated(before, "penalise", penalty)
        assert not after.masked
        assert math.isclose(math.fsum(value for _, value in after.reward_parts), after.reward, abs_tol=1e-9)
        assert dict(after.reward_parts).get(TRUNCATED_PART) == (-penalty if is_truncated(before) else None)


@given(groups)
def test_drop_group_filters_exactly_the_groups_with_a_response_that_was_cut_off(group: list[Sample]) -> None:
    assert (drop_truncated(group, "drop_group") is not None) == any(is_truncated(one) for one in group)


def test_the_reason_names_the_length() -> None:
    group = [sample(3, "stop"), sample(7, "length")]
    assert drop_truncated(group, "drop_group") == Outcome(
        "filtered", "a response was truncated at 7 tokens (rollout.max_new_tokens)"
    )


def test_a_penalty_beyond_float32_fails_the_prompt_and_not_the_job() -> None:
    with pytest.raises(RewardError, match="not finite in float32"):
        treat_truncated(sample(1, "length", -3e38), "penalise", 1e38)
