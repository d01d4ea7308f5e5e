"""The length of a job and the prompt limit of a step: valid specs, and the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.cli.commands.specs import run_length
from controllers.cli.view.state import JobSnapshot, ViewState
from gcore.config import JobSpec, parse_spec
from gcore.config.train import FlowSpec
from gcore.errors import SpecError
from gcore.ledger.records.job import JobRecord
from gcore.ledger.selection import rules_of
from gcore.observability.events import JobEvent
from gcore.testing.models import rank_launch


def spec(**sections: dict[str, Any]) -> JobSpec:
    tree: dict[str, Any] = {
        "name": "job",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {},
        "rollout": {"max_new_tokens": 8},
        "checkpoint": {"every": 5, "best": "none"},
    }
    return parse_spec(
        {
            name: {**tree.get(name, {}), **sections.get(name, {})} if name != "name" else "job"
            for name in {**tree, **sections}
        }
    )


@pytest.mark.parametrize(
    ("flow", "said"),
    [
        ({}, "exactly one of .*; neither is set"),
        ({"steps": 3, "epochs": 1}, "exactly one of .*; both are set. Remove one"),
        ({"epochs": 0}, "greater than 0"),
        ({"epochs": 1, "count": "groups"}, "flow.count"),
        ({"steps": 3, "groups_per_step": 8, "max_prompts_per_step": 7}, "is below groups_per_step"),
        ({"steps": 3, "on_limit": "stop"}, "flow.on_limit"),
        ({"steps": 3, "issue_cap": 0.5}, "flow.issue_cap"),
    ],
    ids=["neither", "both", "no epoch", "another count", "a limit below the quota", "another choice", "a cap below 1"],
)
def test_contradictions_are_refused_in_a_sentence(flow: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        spec(flow=flow)


def test_the_limit_is_ten_quotas_unless_another_is_given_and_never_few_prompts() -> None:
    assert FlowSpec(steps=1, groups_per_step=64).prompt_limit == 640
    assert FlowSpec(steps=1, groups_per_step=1).prompt_limit == 256
    assert FlowSpec(steps=1, groups_per_step=8, max_prompts_per_step=9).prompt_limit == 9
    assert FlowSpec(steps=1, max_prompts_per_step=None).prompt_limit is None


def test_rules_follow_from_the_spec_and_the_number_of_prompts() -> None:
    def rules(**flow: Any) -> Any:
        tree = spec(flow={"groups_per_step": 8, **flow}).model_dump(mode="json")
        return rules_of(JobRecord(uid="u", name="job", spec=tree, run_dir="", created=0.0, prompts=20_000))

    by_steps, by_prompts = rules(steps=7, on_limit="fail"), rules(epochs=2, issue_cap=2.0)
    assert (by_steps.steps, by_steps.epochs, by_steps.on_limit) == (7, None, "fail")
    assert (by_prompts.steps, by_prompts.epochs, by_prompts.issue_cap, by_prompts.limit) == (None, 2, 2.0, 256)
    fixed = rules(epochs=2, count="steps")
    assert (fixed.steps, fixed.epochs) == (5000, None)


def test_no_more_is_issued_at_once_than_one_peer_can_offer() -> None:
    tree = spec(flow={"groups_per_step": 2000, "steps": 1}).model_dump(mode="json")
    constants = rules_of(JobRecord(uid="u", name="job", spec=tree, run_dir="", created=0.0, prompts=20_000))
    assert 1.0 < constants.issue_cap < 2.0


@given(st.integers(1, 50), st.integers(1, 5000), st.integers(1, 64))
def test_an_epoch_of_steps_is_as_many_as_take_every_prompt_once(epochs: int, prompts: int, quota: int) -> None:
    last = FlowSpec(epochs=epochs, count="steps", groups_per_step=quota).last_step(prompts)
    assert last is not None
    assert last % epochs == 0
    assert (last // epochs - 1) * quota < prompts <= last // epochs * quota
    assert FlowSpec(epochs=epochs, groups_per_step=quota).last_step(prompts) is None


def test_the_last_step_is_evaluated_and_has_a_checkpoint_whichever_it_is() -> None:
    job = spec(flow={"epochs": 1}, eval={"path": "e", "every": 4})
    assert [step for step in range(13) if job.evaluates_after(step, last=step == 11)] == [0, 4, 8, 11, 12]
    assert [step for step in range(13) if job.checkpoints_after(step, last=step == 11)] == [5, 10, 11]


def test_how_far_a_job_goes_is_said_in_words() -> None:
    assert run_length(FlowSpec(steps=20), 100) == "20 steps"
    assert run_length(FlowSpec(epochs=1, count="steps", groups_per_step=32), 100) == "1 data epoch, 4 steps"
    assert run_length(FlowSpec(epochs=2, groups_per_step=32), 100) == (
        "2 data epochs, at most 7 steps, fewer if prompts are filtered"
    )


def test_an_estimated_number_of_steps_is_marked_as_one() -> None:
    by_prompts = spec(flow={"epochs": 2}).model_dump(mode="json")
    job = JobSnapshot("job", "u", "RUNNING", step=3, steps=40, spec=by_prompts)
    assert (job.of_steps, ViewState().observe(job).of_steps) == ("~40", "~40")
    assert JobSnapshot("job", "u", "SUCCEEDED", step=38, steps=38, ended=1.0, spec=by_prompts).of_steps == "38"
    assert JobSnapshot("job", "u", "RUNNING", steps=40, spec=spec(flow={"steps": 40}).model_dump()).of_steps == "40"
    said = JobEvent(1, 0.0, "step", data={"step": 3, "steps": 41, "steps_estimated": True})
    assert ViewState().apply(said).of_steps == "~41"
    assert ViewState().of_steps == "?"


def test_the_learning_rates_schedule_runs_over_the_steps_that_the_seal_says(tmp_path: Path) -> None:
    by_prompts = spec(flow={"epochs": 2}, train={"epochs": 2, "mini_batches": 3}).model_dump(mode="json")
    launch = rank_launch(by_prompts, tmp_path)
    assert launch.total_updates(12) == 12 * 2 * 3
    with pytest.raises(ValueError, match="has no planned_steps"):
        launch.total_updates(None)
    by_steps = spec(flow={"steps": 5}, train={"epochs": 2, "mini_batches": 3}).model_dump(mode="json")
    assert rank_launch(by_steps, tmp_path).total_updates(99) == 5 * 2 * 3
