"""The causes of idle engines and ranks, each with its own evidence.

Seconds of a step in which ranks had no batch, and in which engines had no work.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import ME, RULES, SPEC, running_job, sealed_job, stored
from hypothesis import given
from hypothesis import strategies as st

from controllers.accounting.attribution import IdleEngines, StepWaits, WaitCause, find_idle_cause, worker_idle_cause
from controllers.cli.view.live import find_bottleneck, usual_waits, waits_line
from controllers.cli.view.state import StepPoint
from controllers.rules.view import EngineView, JobView
from controllers.telemetry.step_stats import StepTimer
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment, OfferedGroup, Seal, SealState
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.observability.step_metrics import STEP_STATS
from gcore.store.keys import JobKeys
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
def test_held_back_requests_count_as_back_pressure(cause: str) -> None:
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


CAUSES: list[WaitCause | None] = ["wait_for_weights_s", "tail_s", None]


def view(version: int | None, *, asleep: bool = False) -> Any:
    served = None if version is None else Version(0, version)
    head: Any = SimpleNamespace(version=Version(0, 3))
    return SimpleNamespace(
        head=head,
        mirror=SimpleNamespace(head=head),
        is_over=False,
        engines={"e": EngineView("e", "h:1", served, asleep=asleep)},
    )


@pytest.mark.parametrize(
    ("served", "stage", "busy", "cause"),
    [
        (3, "tail", True, None),
        (3, "tail", False, "tail_s"),
        (3, "no_work", False, None),
        (3, "back_pressure", False, None),
        (3, "barrier", False, "wait_for_weights_s"),
        (2, "tail", False, "wait_for_weights_s"),
        (None, "no_work", False, "wait_for_weights_s"),
        (2, "barrier", True, None),
    ],
    ids=[
        *("at work", "others have the last", "its first are on their way", "admission holds it back"),
        *("the batch is closed", "its weights are old", "nobody knows what it serves"),
        "it goes on with what is left over",
    ],
)
def test_an_engine_that_has_nothing_to_do_waits_for_something(
    served: int | None, stage: Any, busy: bool, cause: str | None
) -> None:
    assert IdleEngines.of(view(served), {"e"} if busy else (), stage).causes == {"e": cause}


def test_sleeping_engine_has_no_idle_cause() -> None:
    assert IdleEngines.of(view(3, asleep=True), (), "tail").causes == {}


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.lists(st.sampled_from(CAUSES), min_size=1, max_size=4)), min_size=1, max_size=12
    )
)
def test_no_engine_waits_longer_than_the_step_is(looks: list[tuple[float, list[WaitCause | None]]]) -> None:
    waits, now = StepWaits(), 5.0
    for after, causes in looks:
        waits.note(IdleEngines({str(number): cause for number, cause in enumerate(causes)}), now)
        now += after
    stats = waits.stats(now)
    assert stats.keys() == {"wait_for_weights_s", "tail_s"}
    assert 0.0 <= sum(stats.values()) <= now - 5.0 + 1e-6


def test_each_step_counts_from_its_beginning_and_the_mean_is_over_engines() -> None:
    waits = StepWaits()
    waits.note(IdleEngines({"a": "wait_for_weights_s", "b": None}), 0.0)
    waits.begin(10.0)
    waits.note(IdleEngines({"a": None, "b": "tail_s"}), 14.0)
    waits.note(IdleEngines({"a": None, "b": None}), 20.0)
    assert waits.stats(25.0) == {"wait_for_weights_s": 2.0, "tail_s": 3.0}


def test_a_controller_without_engines_says_nothing_of_them() -> None:
    waits = StepWaits()
    assert waits.stats(3.0) == {}
    waits.note(IdleEngines({}), 4.0)
    assert waits.stats(9.0) == {}


def records(step: int, state: SealState | None = None) -> JobMirror:
    head: Any = SimpleNamespace(record=SimpleNamespace(version=Version(0, step), step=step))
    seals: Any = {} if state is None else {step + 1: SimpleNamespace(record=Seal.model_construct(state=state))}
    mirror = JobMirror(JobKeys("u"))
    object.__setattr__(mirror, "head", head)
    object.__setattr__(mirror, "seals", seals)
    return mirror


def test_ranks_wait_for_a_batch_from_one_commit_until_all_have_their_part_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, empty = StepTimer(), JobMirror(JobKeys("u"))
    watch.note(empty, records(4), 100.0)
    watch.engines.note(IdleEngines({"e": None}), 100.0)
    watch.produced(101.0)
    watch.engines.note(IdleEngines({"e": "tail_s"}), 106.0)
    watch.note(records(4), records(4, SealState.SEALED), 108.0)
    watch.engines.note(IdleEngines({"e": "wait_for_weights_s"}), 108.0)
    watch.note(records(4), records(4, SealState.READY), 109.0)
    monkeypatch.setattr("controllers.telemetry.step_stats.sampling_stats", lambda *_: {})
    group = OfferedGroup(
        ref=PromptRef(0, 0, 0), digest="d", prompt_tokens=2, response_tokens=(5, 5), versions=(Version(0, 4),)
    )
    seal = Seal.model_construct(groups=(group,), outcomes=(), parts=())
    spec = SimpleNamespace(data=SimpleNamespace(sources=()), train=SimpleNamespace(loss="policy"))
    rules = SimpleNamespace(staleness=0)
    seen: Any = SimpleNamespace(seal=seal, mirror=records(4), rules=rules, spec=spec, ranks={})
    stats = watch.stats(seen, 112.0)
    assert (stats["seconds"], stats["wait_for_batch_s"], stats["train_s"]) == (12.0, 9.0, 3.0)
    assert (stats["tail_s"], stats["wait_for_weights_s"]) == (2.0, 4.0)
    assert (stats["publish_s"], stats["collect_s"]) == (1.0, 7.0)
    late = StepTimer()
    late.note(empty, records(4), 100.0)
    late.note(records(4), records(4, SealState.READY), 102.0)
    late.produced(103.0)
    stats = late.stats(seen, 110.0)
    assert (stats["publish_s"], stats["collect_s"]) == (2.0, 0.0)  # the batch was there before anything was begun
    assert {"wait_for_batch_s", "wait_for_weights_s", "tail_s"} <= STEP_STATS.keys()
    back = StepTimer()
    back.note(empty, records(4, SealState.SEALED), 107.0)
    back.note(records(4, SealState.SEALED), records(4, SealState.READY), 109.0)
    assert "seconds" not in back.stats(seen, 112.0), "who comes back in the middle of a step did not see it begin"
    back.note(records(4, SealState.READY), records(5), 112.0)
    back.note(records(5), records(5, SealState.READY), 115.0)
    later: Any = SimpleNamespace(**(vars(seen) | {"mirror": records(5)}))
    assert back.stats(later, 120.0)["seconds"] == 8.0


@pytest.mark.parametrize(("step_tokens", "shown"), [(16, (5.0, 0.2)), (0, (None, None))])
def test_steps_and_pictures_per_second_are_reported_only_of_generated_pictures(
    monkeypatch: pytest.MonkeyPatch, step_tokens: int, shown: tuple[float | None, float | None]
) -> None:
    monkeypatch.setattr("controllers.telemetry.step_stats.sampling_stats", lambda *_: {})
    group = OfferedGroup(
        ref=PromptRef(0, 0, 0), digest="d", prompt_tokens=2, response_tokens=(4, 6), versions=(Version(0, 4),),
        step_tokens=step_tokens,
    )  # fmt: skip
    watch = StepTimer()
    watch.note(JobMirror(JobKeys("u")), records(4), 0.0)
    watch.note(records(4), records(4, SealState.SEALED), 8.0)
    watch.note(records(4), records(4, SealState.READY), 9.0)
    spec = SimpleNamespace(data=SimpleNamespace(sources=()), train=SimpleNamespace(loss="policy"))
    seal = Seal.model_construct(groups=(group,), outcomes=(), parts=())
    rules = SimpleNamespace(staleness=0)
    seen: Any = SimpleNamespace(seal=seal, mirror=records(4), rules=rules, spec=spec, ranks={})
    stats = watch.stats(seen, 10.0)
    assert (stats.get("denoising_steps"), stats.get("pictures_per_second")) == shown
    assert stats["response_length"] == 5.0, "the planner reads the length of responses under this name"


def test_ranks_do_not_wait_while_they_train_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controllers.telemetry.step_stats.sampling_stats", lambda *_: {})
    group = OfferedGroup(
        ref=PromptRef(0, 0, 0), digest="d", prompt_tokens=2, response_tokens=(5, 5), versions=(Version(0, 4),)
    )
    seal = Seal.model_construct(groups=(group,), outcomes=(), parts=(1, 0))
    spec = SimpleNamespace(data=SimpleNamespace(sources=()), train=SimpleNamespace(loss="policy"))

    def stats(**trained: float) -> dict[str, float]:
        watch = StepTimer()
        watch.note(JobMirror(JobKeys("u")), records(4), 0.0)
        watch.note(records(4), records(4, SealState.PARTIAL), 8.0)
        watch.note(records(4), records(4, SealState.READY), 60.0)
        rank = SimpleNamespace(metrics={f"{phase}_seconds": seconds for phase, seconds in trained.items()})
        seen: Any = SimpleNamespace(
            seal=seal, mirror=records(4), rules=SimpleNamespace(staleness=0), spec=spec, ranks={0: rank}
        )
        return watch.stats(seen, 90.0)

    found = stats(cut=1.0, reference=29.0, update=50.0, start=500.0)
    assert (found["streamed_s"], found["wait_for_batch_s"], found["train_s"]) == (50.0, 10.0, 30.0)
    assert stats()["wait_for_batch_s"] == 60.0  # of ranks that nobody knows it is not said that they trained
    assert stats(update=1000.0)["wait_for_batch_s"] == 0.0


def test_the_line_names_whom_the_others_wait_for() -> None:
    slow = {"wait_for_batch_s": 8.0, "wait_for_weights_s": 0.5, "tail_s": 1.0}
    said = "ranks wait 8.00s for a batch, engines wait 0.50s for weights, tail 1.00s; bottleneck: generation"
    assert waits_line(slow) == said
    assert find_bottleneck(slow | {"tail_s": 6.0}) == "the tail of generation"
    assert find_bottleneck(slow | {"wait_for_weights_s": 9.0}) == "training"
    assert waits_line({}) == ""
    assert find_bottleneck({"wait_for_batch_s": 8.0}) == ""


def test_a_usual_wait_is_the_median_of_the_steps_that_tell_it() -> None:
    points = [StepPoint(step, 0, 0.0, {"wait_for_batch_s": float(step)}) for step in (1, 2, 9)]
    assert usual_waits([*points, StepPoint(4, 0, 0.0)]) == {"wait_for_batch_s": 2.0}
