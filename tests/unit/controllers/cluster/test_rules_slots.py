"""Slots are marked sick for failures of their workers, and tried again later."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.cluster.rules import FAILURES, LONGEST_REST_S, REST_S, NodeHealth, next_check_at, update_health
from gcore.types import Pool
from gcore.worker.records import WorkerRecord, WorkerState

ACTIVE = frozenset({"j"})


def worker(
    instance: str,
    slot: str,
    state: WorkerState,
    *,
    node: str = "n",
    role: Pool = "rollout",
    job: str = "j",
    reason: str = "CUDA error: uncorrectable ECC error",
    further: tuple[str, ...] = (),
    judge: str = "",
) -> WorkerRecord:
    return WorkerRecord(
        instance=instance,
        node=node,
        role=role,
        job_uid=job,
        slot=slot,
        further=further,
        pid=1,
        pid_started=1,
        state=state,
        address="h:1" if state == "serving" else "",
        reason=reason if state == "failed" else "",
        judge=judge,
    )


def by_name(*workers: WorkerRecord) -> Mapping[str, WorkerRecord]:
    return {one.instance: one for one in workers}


SERVES = worker("good", "cuda:1", "serving")


def after_failures(count: int, *others: WorkerRecord, health: NodeHealth | None = None, first: int = 0) -> NodeHealth:
    """Failures on cuda:0, a second apart."""
    health = health or NodeHealth("n")
    for number in range(first, first + count):
        health = update_health(
            health, by_name(worker(f"bad-{number}", "cuda:0", "failed"), *others), ACTIVE, float(number)
        )
    return health


def test_a_slot_on_which_starts_fail_while_another_serves_is_sick_with_the_reason() -> None:
    assert after_failures(FAILURES - 1, SERVES).sick == {}
    sick = after_failures(FAILURES, SERVES).sick
    assert sick.keys() == {"cuda:0"}
    assert "cuda:1 of n" in sick["cuda:0"]
    assert "uncorrectable ECC error" in sick["cuda:0"]


@pytest.mark.parametrize(
    "others",
    [
        pytest.param((), id="nothing serves"),
        pytest.param((worker("o", "cuda:1", "serving", role="reward", judge="x"),), id="only another kind serves"),
        pytest.param((worker("o", "cuda:1", "serving", job="other"),), id="only another job's serves"),
        pytest.param((worker("o", "cuda:1", "starting"),), id="another starts"),
    ],
)
def test_without_one_of_the_same_kind_that_serves_the_slot_is_not_blamed(others: tuple[WorkerRecord, ...]) -> None:
    assert after_failures(10, *others).sick == {}


def test_worker_that_served_before_the_failures_does_not_mark_the_slot() -> None:
    before = update_health(NodeHealth("n"), by_name(SERVES), ACTIVE, -100.0)
    assert after_failures(10, health=before).sick == {}


def test_worker_that_serves_on_another_node_counts_as_evidence() -> None:
    assert after_failures(FAILURES, worker("o", "cuda:0", "serving", node="m")).sick.keys() == {"cuda:0"}


@pytest.mark.parametrize("reason", ["killed by the kernel because memory ran out (SIGKILL)", "No space left on device"])
def test_failures_with_other_causes_do_not_count(reason: str) -> None:
    health = NodeHealth("n")
    for number in range(10):
        failed = worker(f"bad-{number}", "cuda:0", "failed", reason=reason)
        health = update_health(health, by_name(failed, SERVES), ACTIVE, float(number))
    assert health.sick == {}


def test_one_failure_counts_once_however_often_it_is_seen() -> None:
    health = NodeHealth("n")
    for now in range(10):
        health = update_health(health, by_name(worker("bad", "cuda:0", "failed"), SERVES), ACTIVE, float(now))
    assert health.sick == {}


def test_a_worker_that_served_and_failed_then_is_no_failed_start() -> None:
    health = NodeHealth("n")
    for number in range(10):
        broke = worker(f"bad-{number}", "cuda:0", "failed").model_copy(update={"address": "h:2"})
        health = update_health(health, by_name(broke, SERVES), ACTIVE, float(number))
    assert health.sick == {}


def test_a_start_that_lasts_in_between_begins_the_count_anew() -> None:
    health = after_failures(FAILURES - 1, SERVES)
    health = update_health(health, by_name(worker("ok", "cuda:0", "serving"), SERVES), ACTIVE, 10.0)
    assert after_failures(FAILURES - 1, SERVES, health=health, first=20).sick == {}


def test_an_engine_over_several_slots_speaks_for_all_of_them() -> None:
    health, good = NodeHealth("n"), worker("good", "cuda:2", "serving", further=("cuda:3",))
    for number in range(FAILURES):
        failed = worker(f"bad-{number}", "cuda:0", "failed", further=("cuda:1",))
        health = update_health(health, by_name(failed, good), ACTIVE, float(number))
    assert health.sick.keys() == {"cuda:0", "cuda:1"}


def test_after_its_rest_it_is_tried_once_and_rests_twice_as_long_after_a_relapse() -> None:
    health = after_failures(FAILURES, SERVES)
    due = next_check_at(health)
    assert due == FAILURES - 1 + REST_S
    health = update_health(health, by_name(SERVES), ACTIVE, due)
    assert health.sick == {}
    assert next_check_at(health) is None
    again = worker("again", "cuda:0", "failed")
    health = update_health(health, by_name(again, SERVES), ACTIVE, due + 1)
    assert health.sick.keys() == {"cuda:0"}
    assert next_check_at(health) == due + 1 + 2 * REST_S


def test_worker_that_serves_after_the_rest_clears_the_slot() -> None:
    health = after_failures(FAILURES, SERVES)
    now = next_check_at(health)
    assert now is not None
    health = update_health(health, by_name(SERVES, worker("ok", "cuda:0", "serving")), ACTIVE, now)
    assert (health.sick, dict(health.failing), dict(health.relapses)) == ({}, {}, {})


def test_emulated_slots_are_never_sick() -> None:
    health, good = NodeHealth("n"), worker("good", "emulated:1", "serving")
    for number in range(10):
        health = update_health(
            health, by_name(worker(f"b{number}", "emulated:0", "failed"), good), ACTIVE, float(number)
        )
    assert health.sick == {}


STATES = st.sampled_from(["starting", "serving", "failed", "stopping"])
LOOKS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), STATES), max_size=6), max_size=20)


@given(LOOKS)
def test_only_own_slots_become_sick_and_every_rest_ends(
    looks: list[list[tuple[int, int, WorkerState]]],
) -> None:
    health, now = NodeHealth("n"), 0.0
    for number, seen in enumerate(looks):
        now = float(number)
        workers = by_name(*(worker(f"w{number}-{w}", f"cuda:{s}", state, node="nm"[s % 2]) for w, s, state in seen))
        health = update_health(health, workers, ACTIVE, now)
        assert set(health.sick) <= {"cuda:0", "cuda:2"}
        assert health.counted <= workers.keys()
        serving = {one.slot for one in workers.values() if one.state == "serving" and one.node == "n"}
        failing = {one.slot for one in workers.values() if one.state == "failed"}
        assert not (serving - failing) & health.failing.keys() - health.sick.keys()
    later = update_health(health, {}, ACTIVE, now + LONGEST_REST_S + 1)
    assert later.sick == {}


def test_health_of_an_ended_job_is_deleted() -> None:
    health = update_health(after_failures(2, SERVES), {}, frozenset(), 5.0)
    assert (dict(health.failing), dict(health.served), health.counted) == ({}, {}, frozenset())
