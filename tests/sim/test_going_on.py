"""Simulate, in simulated time, changes of a job's spec: a succeeded job continues to a higher goal, and a running one with another train
backend, while nodes are killed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_cluster import Story, tell_story
from simulated_network import Weather

SEEDS = [0, pytest.param(1, marks=pytest.mark.large)]


def test_a_node_that_still_ends_a_job_takes_it_up_again_when_that_goes_on() -> None:
    calm = replace(Story.of(0), nodes=1, ranks=1, weather=Weather(), faults_s=0.0, goes_on=2)
    ended = tell_story(calm)
    assert not ended.wrong, ended.why
    assert sum("the job goes on" in line for line in ended.history) == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_continued_job_trains_earlier_prompts_once_under_random_faults(seed: int) -> None:
    ended = tell_story(replace(Story.of(seed), goes_on=2))
    assert not ended.wrong, ended.why
    assert any("the job goes on" in line for line in ended.history)


@pytest.mark.parametrize("seed", SEEDS)
def test_job_whose_backend_changes_trains_each_prompt_once_and_never_with_both_in_a_world(seed: int) -> None:
    ended = tell_story(replace(Story.of(seed), changes=3))
    assert not ended.wrong, ended.why
    assert any("is to be trained with fsdp2" in line for line in ended.history)
