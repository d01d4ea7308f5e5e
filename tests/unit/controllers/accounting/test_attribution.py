"""Why engines and ranks are idle: each cause by evidence of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import ME, RULES, SPEC, running_job, sealed_job, stored

from controllers.accounting.attribution import find_idle_cause, worker_idle_cause
from controllers.rules.view import EngineView, JobView
from gcore.ledger.records.chain import Assignment, OfferedGroup
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.types import PromptRef, Version

HEAD = Version(0, 0)


def mine(view: JobView) -> list[PromptRef]:
    assert view.mirror.assign is not None
    shards = view.mirror.assign.record.shards_of(ME)
    return [ref for ref in view.due if ref.shard in shards]


def group(ref: PromptRef) -> OfferedGroup:
    return OfferedGroup(ref=ref, digest=str(ref), prompt_tokens=3, response_tokens=(2, 2), versions=(HEAD,))


def begun(view: JobView, count: int) -> JobView:
    return replace(view, in_flight=dict.fromkeys(mine(view)[:count], HEAD))


def test_prompts_that_are_due_and_not_begun_are_work_that_is_not_there_yet() -> None:
    view = running_job()
    assert len(mine(view)) >= 2
    assert find_idle_cause(view, held_back=False) == "no_work"
    assert find_idle_cause(begun(view, 1), held_back=False) == "no_work"


def test_once_all_is_begun_or_finished_others_have_the_tail() -> None:
    view = running_job()
    refs = mine(view)
    assert find_idle_cause(begun(view, len(refs)), held_back=True) == "tail"
    some = replace(begun(view, 1), holdings={ref: group(ref) for ref in refs[1:]})
    assert find_idle_cause(some, held_back=False) == "tail"


@pytest.mark.parametrize("cause", ["judge", "concurrency", "leaving"])
def test_what_admission_holds_is_back_pressure(cause: str) -> None:
    view = begun(running_job(), 1)
    if cause == "concurrency":
        rollout = SPEC.rollout.model_copy(update={"concurrency": 1})
        view = replace(view, spec=SPEC.model_copy(update={"rollout": rollout}))
    if cause == "leaving":
        view = replace(view, leaving=True)
    assert find_idle_cause(view, held_back=cause == "judge") == "back_pressure"


@pytest.mark.parametrize("ready", [False, True], ids=["exchanged", "trained"])
def test_while_a_closed_batch_is_worked_on_there_is_a_barrier(ready: bool) -> None:
    assert find_idle_cause(sealed_job(ready=ready), held_back=False) == "barrier"


def test_with_staleness_a_closed_batch_is_no_barrier_but_a_bound_on_age() -> None:
    sealed = sealed_job()
    view = replace(sealed, rules=replace(RULES, staleness=1))
    assert find_idle_cause(view, held_back=False) == ("no_work" if view.due else "back_pressure")
    none_left = replace(view, rules=replace(RULES, staleness=1, steps=1))
    assert none_left.due == ()
    assert find_idle_cause(none_left, held_back=False) == "back_pressure"


def test_before_and_after_there_is_no_work() -> None:
    view = running_job()
    assert find_idle_cause(replace(view, mirror=replace(view.mirror, head=None)), held_back=True) == "no_work"
    pending = replace(view.mirror, status=stored(JobStatus(phase=JobPhase.PENDING)))
    assert find_idle_cause(replace(view, mirror=pending), held_back=True) == "no_work"


def test_a_controller_without_shards_says_that_there_is_no_work_while_the_batch_is_open() -> None:
    view = running_job()
    others = stored(Assignment(members=("other",), owners=(0, 0, 0, 0)))
    assert find_idle_cause(replace(view, mirror=replace(view.mirror, assign=others)), held_back=False) == "no_work"


def engine(version: Version | None, *, asleep: bool = False) -> dict[str, EngineView]:
    return {"e": EngineView("e", "h:1", version, asleep=asleep)}


@pytest.mark.parametrize("stage", ["tail", "barrier", "no_work"])
def test_an_engine_with_other_weights_waits_for_weights_whatever_else_there_is(stage: str) -> None:
    view = replace(running_job(), engines=engine(None))
    assert worker_idle_cause(view, stage, "rollout", "e") == "waiting_weights"  # type: ignore[arg-type]
    current = replace(view, engines=engine(HEAD))
    assert worker_idle_cause(current, stage, "rollout", "e") == stage  # type: ignore[arg-type]


def test_ranks_and_judges_wait_for_weights_while_no_engine_has_them() -> None:
    view = replace(running_job(), engines=engine(None))
    assert worker_idle_cause(view, "no_work", "train", "t0") == "waiting_weights"
    assert worker_idle_cause(view, "no_work", "reward", "j") == "waiting_weights"
    assert worker_idle_cause(view, "barrier", "train", "t0") == "barrier"
    asleep = replace(view, engines=engine(None, asleep=True))
    assert worker_idle_cause(asleep, "no_work", "train", "t0") == "no_work"


def test_a_judge_that_has_nothing_while_admission_is_held_has_no_work() -> None:
    view = replace(running_job(), engines=engine(HEAD))
    assert worker_idle_cause(view, "back_pressure", "reward", "j") == "no_work"
    assert worker_idle_cause(view, "back_pressure", "train", "t0") == "back_pressure"
