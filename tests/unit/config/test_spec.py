"""The spec beside its validation: defaults, dates, and incompatible fields."""

from __future__ import annotations

import pytest
from due_steps import steps_evaluated, steps_with_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from gcore.config import JobSpec, parse_spec
from gcore.errors import SpecError
from gcore.ledger.records.job import JobRecord
from gcore.ledger.selection import rules_of


def test_the_defaults_are_valid_themselves() -> None:
    spec = make(steps=1)
    assert JobSpec.model_validate(spec.model_dump()) == spec


def test_a_spec_that_names_no_columns_is_written_as_before_there_were_any() -> None:
    tree = make(steps=1).model_dump(mode="json")
    assert "columns" not in tree["data"]
    tree["data"] = {"sources": [{"name": "a", "path": "d", "columns": ["topic"]}, {"name": "b", "path": "d"}]}
    sources = JobSpec.model_validate(tree).model_dump(mode="json")["data"]["sources"]
    assert [source.get("columns") for source in sources] == [["topic"], None]
    assert "columns" not in sources[1]


def make(*, steps: int, checkpoint: int = 50, evaluation: bool = False, every: int | None = None) -> JobSpec:
    return parse_spec(
        {
            "name": "job",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": steps},
            "rollout": {"max_new_tokens": 8},
            "checkpoint": {"every": checkpoint},
            "eval": {"path": "e" if evaluation else None, "every": every},
        }
    )


@given(st.integers(1, 300), st.integers(1, 100))
def test_checkpoints_are_due_every_so_often_and_at_the_end(steps: int, every: int) -> None:
    due = steps_with_checkpoint(make(steps=steps, checkpoint=every))
    assert due == {step for step in range(1, steps + 1) if step % every == 0 or step == steps}


@given(st.integers(1, 300), st.none() | st.integers(1, 100))
def test_evaluations_are_due_before_after_and_every_so_often(steps: int, every: int | None) -> None:
    due = steps_evaluated(make(steps=steps, evaluation=True, every=every))
    assert due == {0, steps} | {step for step in range(steps) if every is not None and step % every == 0}
    assert steps_evaluated(make(steps=steps)) == frozenset()


def test_more_steps_than_anyone_trains_are_refused_because_every_controller_lists_them() -> None:
    with pytest.raises(SpecError, match=r"flow\.steps"):
        make(steps=10**30)


TREE = {
    "name": "t",
    "model": {"path": "m"},
    "data": {"sources": [{"name": "a", "path": "a.jsonl", "sampling": {"max_new_tokens": 4}}]},
    "flow": {"steps": 1},
    "rollout": {"max_new_tokens": 8},
}


@pytest.mark.parametrize(
    ("section", "more", "said"),
    [
        ("rollout", {"min_new_tokens": 5}, "allows 4 new tokens, fewer than rollout.min_new_tokens"),
        ("data", {"curriculum_options": {"field": "level"}}, "name it in data.curriculum"),
        ("eval", {"path": "e.jsonl", "show": 51}, "less than or equal to 50"),
        ("storage", {"root": "/shared", "copies": 2}, "leave one out"),
        ("storage", {"copies": 1}, "greater than or equal to 2"),
        ("rollout", {"over_provision": 1.5}, "would favor short responses; set staleness: 1 or more"),
        ("rollout", {"over_provision": 2.5, "staleness": 1, "correction": "tis"}, "too old when their step comes"),
        ("rollout", {"over_provision": 0.5}, "greater than or equal to 1"),
    ],
    ids=[
        *("shorter than the shortest", "options of no curriculum", "too many answers shown"),
        *("a shared folder and copies", "one copy"),
        *("on-policy, more at once", "more than is ever trained", "less than a step"),
    ],
)
def test_incompatible_settings_are_refused(section: str, more: dict[str, object], said: str) -> None:
    tree = {**TREE, section: {**TREE.get(section, {}), **more}}  # type: ignore[dict-item]
    with pytest.raises(SpecError, match=said):
        parse_spec(tree)


def test_a_tracker_is_refused_where_nodes_share_no_folder() -> None:
    tree = TREE | {"tracking": [{"name": "tensorboard"}]}
    parse_spec(tree)
    with pytest.raises(SpecError, match="is stored on one node only"):
        parse_spec(tree | {"storage": {"copies": 2}})


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_as_much_may_be_begun_at_once_as_staleness_has_room_for(staleness: int) -> None:
    rollout = {"max_new_tokens": 8, "staleness": staleness, "correction": "tis"}
    for over_provision in (None, 1.0, staleness + 1.0):
        spec = parse_spec({**TREE, "rollout": {**rollout, "over_provision": over_provision}})
        job = JobRecord.model_construct(spec=spec.model_dump(mode="json"), prompts=64)
        assert rules_of(job).quotas == (staleness + 1 if over_provision is None else over_provision)
