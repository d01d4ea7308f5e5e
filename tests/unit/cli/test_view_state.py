"""The fold behind the views: the displayed state equals the job's chain."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.cli.view.state import JobSnapshot, NodeView, ViewState, WaitPoint
from gcore.observability.events import JobEvent

NODES = st.sampled_from(["node-0", "node-1", "node-2"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(string.ascii_lowercase, max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["state", "reason", "step", "steps", "lineage", "stats", "groups_by_node", "to_step", "shares", "node", "joined"]
    + ["accuracy", "count", "samples", "file", "filtered", "other"]
)
KINDS = st.sampled_from(
    ["state", "step", "rollback", "shards", "member", "eval", "checkpoint", "note", "account", "new"]
)


@st.composite
def histories(draw: st.DrawFn) -> list[JobEvent]:
    """A job that steps, rolls back, deals shards out and is evaluated, in any order that can happen."""
    step = lineage = 0
    events = []
    for sequence in range(1, draw(st.integers(0, 25)) + 1):
        kind = draw(st.sampled_from(["step", "step", "step", "rollback", "shards", "member", "eval"]))
        data: dict[str, object] = {}
        if kind == "step":
            step += 1
            groups = draw(st.dictionaries(NODES, st.integers(1, 9), max_size=3))
            data = {"step": step, "steps": 30, "lineage": lineage, "groups_by_node": groups, "stats": {"reward": 0.5}}
        elif kind == "rollback":
            step, lineage = draw(st.integers(0, step)), lineage + 1
            data = {"to_step": step, "lineage": lineage}
        elif kind == "shards":
            owners = draw(st.lists(NODES, min_size=8, max_size=8))
            data = {"shares": {n: [s for s, o in enumerate(owners) if o == n] for n in set(owners)}}
        elif kind == "member":
            data = {"node": draw(NODES), "joined": draw(st.booleans())}
        else:
            data = {"step": step, "lineage": lineage, "accuracy": draw(st.floats(0, 1)), "count": 10}
        events.append(JobEvent(sequence, float(sequence), kind, data=data))
    return events


def fold(events, state=None):
    state = state or ViewState()
    for event in events:
        state = state.apply(event)
    return state


@given(st.lists(st.tuples(KINDS, st.dictionaries(KEYS, ANYTHING, max_size=6)), max_size=8))
def test_no_event_breaks_the_fold_whatever_its_data(contents):
    fold(JobEvent(n, float(n), kind, data=data) for n, (kind, data) in enumerate(contents, 1))


@given(histories(), st.data())
def test_an_event_that_comes_again_changes_nothing(events, data):
    cut = data.draw(st.integers(0, len(events)))
    assert fold([*events[:cut], *events[:cut], *events[cut:]]) == fold(events)


@given(histories())
def test_the_step_goes_back_only_by_a_rollback(events):
    state = ViewState()
    for event in events:
        after = state.apply(event)
        assert after.step >= state.step or event.kind == "rollback"
        state = after


@given(histories())
def test_the_curves_hold_each_step_of_the_chain_once_and_in_order(events):
    state = fold(events)
    steps = [point.step for point in state.points]
    assert steps == list(range(1, state.step + 1))
    assert [e.step for e in state.evals] == sorted({e.step for e in state.evals})
    assert all(e.step <= state.step for e in state.evals)


@given(histories())
def test_the_groups_of_the_controllers_sum_to_those_of_the_steps(events):
    state = fold(events)
    assert sum(state.groups_by_node.values()) == sum(sum(p.groups.values()) for p in state.points)


@given(histories())
def test_a_shard_has_one_owner_at_most(events):
    owned = [shard for node in fold(events).nodes for shard in node.shards]
    assert len(owned) == len(set(owned))


@given(
    st.builds(
        JobEvent, st.integers(0), st.floats(0, 1e10), st.text(), st.text(), st.dictionaries(st.text(), st.integers())
    )
)
def test_an_event_is_the_same_after_a_line_of_json(event):
    assert JobEvent.from_line(event.to_line()) == event


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"sequence": "1"}', "{"], ids=["empty", "list", "no number", "text", "cut"]
)
def test_a_line_that_is_no_event_is_refused(line):
    with pytest.raises(ValueError, match=r"event|Expecting|delimiter"):
        JobEvent.from_line(line)


def test_when_a_controller_dies_its_shards_are_seen_to_move():
    state = fold(
        [
            JobEvent(1, 1.0, "shards", data={"shares": {"node-0": [0, 1], "node-1": [2, 3]}}),
            JobEvent(2, 2.0, "member", "node-1 is gone", {"node": "node-1", "joined": False}),
        ]
    )
    assert state.nodes == (NodeView("node-0", True, (0, 1)), NodeView("node-1", False, (2, 3)))
    assert state.moved == frozenset()  # dealing out is no move
    state = state.apply(JobEvent(3, 3.0, "shards", data={"shares": {"node-0": [0, 1, 2, 3]}}))
    assert state.nodes == (NodeView("node-0", True, (0, 1, 2, 3)), NodeView("node-1", False, ()))
    assert (state.moved, state.moved_at) == ({2, 3}, 3.0)
    assert [line.text for line in state.log][1:] == ["node-1 is gone", "2 of 4 prompt shards moved; now node-0 has 4"]


def test_a_rollback_takes_back_steps_groups_and_evaluations():
    def step(n):
        return JobEvent(n, float(n), "step", data={"step": n, "steps": 9, "groups_by_node": {"node-0": 4}})

    accuracy = JobEvent(4, 4.0, "eval", data={"step": 3, "accuracy": 0.9})
    state = fold([step(1), step(2), step(3), accuracy])
    state = state.apply(
        JobEvent(5, 5.0, "rollback", data={"from_step": 3, "to_step": 1, "lineage": 1, "reason": "rank 0 died"})
    )
    assert (state.step, state.lineage, state.rollbacks) == (1, 1, 1)
    assert state.groups_by_node == {"node-0": 4}
    assert state.evals == ()
    assert state.log[-1].text == "restarted from checkpoint 1 (attempt 2): rank 0 died; 2 steps are lost"


def test_a_new_world_that_loses_no_step_is_not_told_as_going_back():
    state = fold(JobEvent(n, float(n), "step", data={"step": n, "steps": 9}) for n in (1, 2))
    state = state.apply(
        JobEvent(3, 3.0, "rollback", data={"from_step": 2, "to_step": 2, "lineage": 1, "reason": "rank 0 died"})
    )
    assert (state.step, state.lineage) == (2, 1)
    assert state.log[-1].text == "restarted from checkpoint 2 (attempt 2): rank 0 died; no step is lost"


def test_a_start_after_waiting_for_slots_is_no_rollback():
    reasons = (
        "its slots are given back: the job is paused",
        "it has slots again",
        "slots go to other jobs: it needs 1 slot",
        "it has slots again",
        "rank 1 on node-1 is gone",
    )
    events = (
        JobEvent(n, float(n), "rollback", data={"to_step": 2, "lineage": n, "reason": reason})
        for n, reason in enumerate(reasons, 1)
    )
    assert fold(events).rollbacks == 2, "preempted once, and a lost rank"


def test_accuracy_before_and_after_are_those_of_the_first_and_the_last_evaluation():
    state = ViewState().apply(JobEvent(1, 1.0, "eval", data={"step": 0, "accuracy": 0.4}))
    assert (state.accuracy_before, state.accuracy_after) == (0.4, None)
    state = state.apply(JobEvent(2, 2.0, "eval", data={"step": 9, "accuracy": 0.9}))
    assert (state.accuracy_before, state.accuracy_after) == (0.4, 0.9)


def test_the_only_evaluation_of_a_job_that_had_none_at_its_start_is_the_one_after_it():
    state = ViewState().apply(JobEvent(1, 1.0, "eval", data={"step": 9, "accuracy": 0.9}))
    assert (state.accuracy_before, state.accuracy_after) == (None, 0.9)


def test_the_speed_is_all_tokens_over_all_seconds():
    stats = [{"tokens": 100, "seconds": 1.0}, {"tokens": 100, "seconds": 3.0}, {"tokens": 7}]
    state = fold(JobEvent(n, 0.0, "step", data={"step": n, "stats": s}) for n, s in enumerate(stats, 1))
    assert state.tokens_per_second == 50.0


@pytest.mark.parametrize(
    ("step_seconds", "left"),
    [
        pytest.param([2.0, 2.0, 2.0, 2.0], 12.0, id="an even pace"),
        pytest.param([90.0, 2.0, 2.0, 2.0], 12.0, id="the first step starts engines and ranks"),
        pytest.param([90.0, 2.0, 2.0, 300.0, 2.0], 10.0, id="a world was started again in between"),
        pytest.param([90.0, 2.0], None, id="too early to say"),
        pytest.param([], None, id="nothing yet"),
    ],
)
def test_the_time_left_is_the_steps_left_at_the_recent_pace(step_seconds, left):
    state = ViewState(steps=10)
    for n, seconds in enumerate(step_seconds, 1):
        state = state.apply(JobEvent(n, 0.0, "step", data={"step": n, "steps": 10, "stats": {"seconds": seconds}}))
    assert state.seconds_left == left


def test_job_snapshot_fills_in_what_events_lack():
    job = JobSnapshot(
        "sums", "u1", "RUNNING", steps=9, step=5, spec={"data": {"shards": 4}},
        shares=(NodeView("node-0", True, (0, 1, 2, 3)),), waiting=(WaitPoint("node-0", "engines", 1.0),),
    )  # fmt: skip
    state = ViewState().observe(job)
    assert (state.job, state.uid, state.state, state.step, state.shard_count) == ("sums", "u1", "RUNNING", 5, 4)
    assert state.nodes == (NodeView("node-0", True, (0, 1, 2, 3)),)
    state = ViewState().apply(JobEvent(1, 1.0, "step", data={"step": 1})).observe(job)
    assert state.step == 1
    assert state.waiting == job.waiting
