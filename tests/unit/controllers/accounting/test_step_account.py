"""A node's slot accounting: reports of engines and ranks, and slots without a worker, give an account of the step that sums."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from builders import SPEC, running_job, sealed_job, stored
from hypothesis import given
from hypothesis import strategies as st

from controllers.accounting.attribution import Attribution, RankReports
from controllers.accounting.states import FAILED, NOBODY, SYNCING, UNALLOCATED, Timeline, busy, idle, switching
from controllers.accounting.step_account import PATIENCE_S, REPORT_DELAY_S, StepAccountBuilder
from controllers.rules.view import EngineView, JobView, RankView
from gcore.ledger.records.job import EnginePlace, NodeRecord, Plan, RankPlace
from gcore.ledger.records.slot_accounting import StepAccount, WorkerTotals, encode_line, parse_line
from gcore.rollout.engine_time import EngineReading, EngineTimeSums
from gcore.types import Version
from gcore.worker.records import WorkerRecord

SLOTS = ("cpu:0", "cpu:1", "cpu:2")
STEP = Version(0, 1)


def engine_of(instance: str, slot: str, judge: str = "", state: str = "serving") -> WorkerRecord:
    tree: dict[str, Any] = {"instance": instance, "role": "reward" if judge else "rollout", "judge": judge}
    more = {"node": "node-0", "job_uid": "u", "pid": 1, "pid_started": 1, "state": state, "address": "h:9"}
    return WorkerRecord.model_validate(tree | more | {"slot": slot})


def job(*engines: EnginePlace, workers: tuple[WorkerRecord, ...] = (), rank: bool = False) -> JobView:
    """`node-0` has three slots; the ranks of the made job are there if asked for."""
    view = running_job()
    ranks = (RankPlace(rank=0, node="node-0", slot="cpu:0"),) if rank else ()
    plan = Plan(generation=2, world="w", ranks=ranks, engines=engines)
    node = NodeRecord(name="node-0", incarnation="node-0.aaaa", address="a:1", slots=SLOTS, pid=1)
    there = {worker.instance: worker for worker in workers} | ({"t0": view.workers["t0"]} if rank else {})
    return replace(view, mirror=replace(view.mirror, plan=stored(plan)), nodes={"node-0": node}, workers=there)


def place(slot: str, judge: str = "", *, asleep: bool = False) -> EnginePlace:
    return EnginePlace(node="node-0", slot=slot, judge=judge, asleep=asleep)


def reading(at: float, busy_s: float = 0.0, **more: float) -> EngineReading:
    """Of an engine that began at 0 and was idle else."""
    rest = at - busy_s - sum(more.values())
    return EngineReading(
        at, EngineTimeSums(at, busy_s, rest, more.get("paused_s", 0.0), more.get("asleep_s", 0.0)), 0, 0, 0, 0
    )


def closed(books: StepAccountBuilder, at: float) -> StepAccount:
    (found,) = books.close(at)
    book = found.book
    assert sum(book.booked.values()) + book.unbooked == pytest.approx(book.seconds * book.slots, abs=1e-4)
    read = parse_line(encode_line(found.line("node-0")))
    assert read is not None
    assert read.book == book
    assert sum(one.end - one.begin for one in read.phases) == pytest.approx(book.seconds, abs=1e-3)
    assert all(spans[-1].end == pytest.approx(book.seconds, abs=1e-3) for spans in read.spans.values())
    return book


def begun(view: JobView) -> StepAccountBuilder:
    books = StepAccountBuilder(SPEC, 0.0, 1000.0)
    books.update(view, "no_work", 0.0)
    return books


def ended(books: StepAccountBuilder, at: float) -> None:
    books.head_moved(STEP, at, 1000.0 + at)


def test_a_start_that_was_over_before_the_job_was_looked_at_has_no_book_and_the_next_step_begins_at_its_end() -> None:
    books = StepAccountBuilder(SPEC, 0.0, 1000.0)
    books.head_moved(Version(0, 0), 0.4, 1000.4)
    assert books.close(0.5 + REPORT_DELAY_S) == []
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books.update(view, "no_work", 0.5 + REPORT_DELAY_S)
    ended(books, 3.0)
    books.engine_read("e", reading(3.0))
    assert closed(books, 3.0 + REPORT_DELAY_S).seconds == pytest.approx(2.6)


def test_engine_idle_time_has_the_cause_known_at_that_time() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books = begun(view)
    books.update(view, "tail", 6.0)
    books.engine_read("e", reading(6.0, busy_s=4.0))
    ended(books, 10.0)
    books.engine_read("e", reading(10.0, busy_s=5.0))
    book = closed(books, 10.0 + REPORT_DELAY_S)
    assert book.version == STEP
    assert book.booked == pytest.approx(
        {busy("rollout"): 5.0, idle("rollout", "no_work"): 2.0, idle("rollout", "tail"): 3.0, UNALLOCATED: 20.0}
    )
    assert book.error == 0


def test_a_step_is_closed_when_every_engine_was_read_after_it_or_after_a_while() -> None:
    view = job(place("cpu:0"), place("cpu:1"), workers=(engine_of("e", "cpu:0"), engine_of("f", "cpu:1")))
    books = begun(view)
    ended(books, 10.0)
    for name in ("e", "f"):
        books.engine_read(name, reading(9.0))
    books.engine_read("e", reading(10.5))
    assert books.close(11.0) == []
    assert books.is_behind
    late = closed(books, 10.0 + PATIENCE_S)
    assert late.unbooked == pytest.approx(1.0)
    assert late.error == pytest.approx(1.0 / 30.0)


def test_an_engine_that_does_not_answer_has_failed_and_what_was_before_nobody_knows() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books = begun(view)
    books.engine_read("e", reading(4.0, busy_s=4.0))
    books.engine_unreachable("e", 5.0)
    books.engine_unreachable("e", 6.0)
    ended(books, 8.0)
    book = closed(books, 9.0)
    assert book.booked == pytest.approx({busy("rollout"): 4.0, FAILED: 3.0, UNALLOCATED: 16.0})
    assert book.unbooked == pytest.approx(1.0)


def test_an_engine_that_was_only_slow_tells_all_of_its_time_itself() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books = begun(view)
    books.engine_read("e", reading(4.0, busy_s=4.0))
    books.engine_unreachable("e", 5.0)
    books.engine_read("e", reading(9.0, busy_s=9.0))
    ended(books, 8.0)
    assert closed(books, 9.0).booked == pytest.approx({busy("rollout"): 8.0, UNALLOCATED: 16.0})


def test_an_engine_whose_connection_breaks_once_tells_the_time_before_that_too() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books = begun(view)
    books.engine_read("e", reading(4.0, busy_s=4.0))
    books.engine_unreachable("e", 5.0)
    assert books.close(5.2) == []
    books.engine_read("e", reading(5.3, busy_s=5.3))
    ended(books, 8.0)
    books.engine_unreachable("e", 8.0)
    assert books.close(8.2) == []
    books.engine_read("e", reading(8.3, busy_s=8.3))
    assert closed(books, 8.4).booked == pytest.approx({busy("rollout"): 8.0, UNALLOCATED: 16.0})


def test_a_place_is_switching_while_its_worker_loads_and_failed_once_it_was_there_and_is_not() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0", state="starting"),))
    books = begun(view)
    serving = replace(view, workers={"e": engine_of("e", "cpu:0")})
    books.update(serving, "no_work", 3.0)
    # The engine's own sums began when it could be asked.
    books.engine_read("e", EngineReading(5.0, EngineTimeSums(5.0, busy_s=2.0), 0, 0, 0, 0))
    gone = replace(view, workers={})
    books.update(gone, "no_work", 5.0)
    ended(books, 9.0)
    book = closed(books, 10.0)
    change = switching(NOBODY, "rollout")
    assert book.booked == pytest.approx({change: 3.0, busy("rollout"): 2.0, FAILED: 4.0, UNALLOCATED: 18.0})
    assert book.switches == {f"{NOBODY}>rollout": pytest.approx((3.0,))}


def test_an_engine_that_began_to_load_in_the_step_before_has_the_time_from_when_it_serves_booked() -> None:
    """It counts from when it began to load, and is read a while after it began to serve."""
    loading = job(place("cpu:0"), workers=(engine_of("e", "cpu:0", state="starting"),))
    books = begun(loading)
    ended(books, 4.0)
    closed(books, 4.0 + REPORT_DELAY_S)
    books.update(replace(loading, workers={"e": engine_of("e", "cpu:0")}), "tail", 6.0)
    books.engine_read("e", reading(7.0, busy_s=0.25))
    books.head_moved(Version(0, 2), 8.0, 1008.0)
    books.engine_read("e", reading(8.0, busy_s=0.75))
    book = closed(books, 8.0 + REPORT_DELAY_S)
    assert book.booked == pytest.approx(
        {switching(NOBODY, "rollout"): 2.0, busy("rollout"): 0.75, idle("rollout", "tail"): 1.25, UNALLOCATED: 8.0}
    )
    assert book.unbooked == pytest.approx(0.0, abs=1e-9)


def test_of_an_engine_that_is_gone_and_comes_back_nothing_is_booked_twice() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books = begun(view)
    books.engine_read("e", reading(3.0, busy_s=1.0))
    ended(books, 4.0)
    books.engine_read("e", reading(4.0, busy_s=1.0))
    closed(books, 4.0 + REPORT_DELAY_S)
    books.update(replace(view, workers={}), "tail", 5.0)
    books.update(view, "tail", 6.0)
    books.engine_read("e", reading(9.0, busy_s=1.5))
    books.head_moved(Version(0, 2), 10.0, 1010.0)
    books.engine_read("e", reading(10.0, busy_s=2.0))
    book = closed(books, 10.0 + REPORT_DELAY_S)
    assert book.booked[busy("rollout")] == pytest.approx(0.5)


def test_a_loan_is_switching_from_the_plan_until_the_other_is_awake() -> None:
    rollout, judge = engine_of("e", "cpu:0"), engine_of("j", "cpu:0", "critic")
    before = job(place("cpu:0"), place("cpu:0", "critic", asleep=True), workers=(rollout, judge))
    books = begun(before)
    books.engine_read("e", reading(4.0, busy_s=4.0))
    books.engine_read("j", reading(4.0, asleep_s=4.0))
    lent = job(place("cpu:0", asleep=True), place("cpu:0", "critic"), workers=(rollout, judge))
    books.update(lent, "tail", 4.0)
    # One second to let go of what it had, two to give the memory back; the judge wakes a second later.
    books.engine_read("e", reading(5.0, busy_s=4.5))
    books.engine_read("j", reading(5.0, asleep_s=5.0))
    books.engine_read("e", reading(10.0, busy_s=4.5, asleep_s=3.0))
    books.engine_read("j", reading(10.0, busy_s=2.0, asleep_s=8.0))
    ended(books, 10.0)
    book = closed(books, 11.0)
    assert book.booked[busy("rollout")] == pytest.approx(4.5)
    assert book.booked[busy("reward")] == pytest.approx(2.0)
    assert book.booked[switching("rollout", "reward")] == pytest.approx(3.5)
    assert book.unbooked == pytest.approx(0.0)


def test_a_slot_that_changes_over_has_all_its_time_booked_whenever_its_engines_are_read() -> None:
    rollout, judge = engine_of("e", "cpu:0"), engine_of("j", "cpu:0", "critic")
    books = begun(job(place("cpu:0"), place("cpu:0", "critic", asleep=True), workers=(rollout, judge)))
    lent = job(place("cpu:0", asleep=True), place("cpu:0", "critic"), workers=(rollout, judge))
    awake = {"j": EngineView("j", "h:9", None)}
    books.update(replace(lent, judges={"j": EngineView("j", "h:9", None, asleep=True)}), "tail", 5.0)
    books.update(replace(lent, engines={"e": EngineView("e", "h:9", None, asleep=True)}, judges=awake), "tail", 6.0)
    # The judge is read in between, and the other is not, for it did not answer while it slept.
    books.engine_read("j", reading(5.5, asleep_s=5.5))
    books.engine_read("j", reading(10.0, busy_s=3.0, asleep_s=6.0))
    books.engine_read("e", reading(10.5, busy_s=4.0, asleep_s=5.3))
    ended(books, 10.0)
    book = closed(books, 11.0)
    assert book.unbooked == pytest.approx(0.0, abs=1e-9)
    assert book.overbooked == pytest.approx(0.0, abs=1e-9)


def test_a_rank_that_gives_its_slot_away_has_all_the_time_before_that_booked() -> None:
    line = Timeline(Attribution(idle("train", "tail")), 0.0)
    line.set(Attribution(None), 6.0)
    claims = RankReports("t0")
    claims.receive(told(0.0, "waiting", waiting=0.0), line)
    tellings = claims.receive(told(10.0, "update", waiting=10.0), line)
    assert [(one.begin, one.end, dict(one.seconds)) for one in tellings] == [
        (0.0, 6.0, {idle("train", "tail"): pytest.approx(6.0)}),
        (6.0, 10.0, {}),
    ]


def test_an_engine_that_keeps_no_sums_claims_nothing_while_it_is_known_to_sleep() -> None:
    rollout, judge = engine_of("e", "cpu:0"), engine_of("j", "cpu:0", "critic")
    lent = job(place("cpu:0", asleep=True), place("cpu:0", "critic"), workers=(rollout, judge))
    books = begun(replace(lent, engines={"e": EngineView("e", "h:9", None)}))
    asleep = replace(lent, engines={"e": EngineView("e", "h:9", None, asleep=True)})
    books.update(asleep, "tail", 1.0)
    for at in (0.0, 1.0, 10.0):
        books.engine_read("e", EngineReading(at, None, 0, 0, 0, 0))
    books.engine_read("j", reading(1.0, asleep_s=1.0))
    books.engine_read("j", reading(10.0, busy_s=3.0, asleep_s=1.0))
    ended(books, 10.0)
    book = closed(books, 11.0)
    assert book.booked == pytest.approx(
        {
            switching("rollout", "reward"): 1.0,
            busy("reward"): 3.0,
            idle("reward", "tail"): 6.0,
            UNALLOCATED: 20.0,
        }
    )


def test_where_ranks_and_engines_take_turns_the_slot_is_of_one_or_on_its_way_to_the_other() -> None:
    worker = engine_of("e", "cpu:0")
    placement = SPEC.placement.model_copy(update={"memory": "in_turns"})
    spec = SPEC.model_copy(update={"placement": placement})
    base = replace(job(place("cpu:0"), workers=(worker,), rank=True), spec=spec)
    resting = RankView(0, phase="waiting", clock=0.0, phases={}, released=frozenset({"optimizer", "weights"}))
    books = StepAccountBuilder(spec, 0.0, 1000.0)
    books.update(replace(base, ranks={0: resting}), "tail", 0.0)
    books.engine_read("e", reading(4.0, busy_s=4.0))
    sealed = sealed_job(ready=True).mirror.seals
    ready = replace(base, mirror=replace(base.mirror, seals=sealed), engines={"e": EngineView("e", "h:9", None)})
    books.update(replace(ready, ranks={0: replace(resting, clock=4.0, phases={"waiting": 4.0})}), "barrier", 4.0)
    # Half a second until the engine sleeps, half a second until the rank begins to take its memory, and one for that.
    books.engine_read("e", reading(4.5, busy_s=4.0))
    for clock, phase, phases in (
        (5.0, "restoring", {"waiting": 5.0}),
        (6.0, "update", {"waiting": 5.0, "restoring": 1.0}),
        (10.0, "waiting", {"waiting": 5.0, "restoring": 1.0, "update": 4.0}),
    ):
        rank = replace(resting, clock=clock, phase=phase, phases=phases)
        books.update(replace(ready, ranks={0: rank}), "barrier", clock)
    books.engine_read("e", reading(10.0, busy_s=4.0, asleep_s=5.5))
    ended(books, 10.0)
    book = closed(books, 11.0)
    assert book.booked == pytest.approx(
        {busy("rollout"): 4.0, switching("rollout", "train"): 2.0, busy("train"): 4.0, UNALLOCATED: 20.0}
    )


def told(at: float, phase: str, **phases: float) -> RankView:
    return RankView(0, phase=phase, clock=at, phases=phases)


def test_a_rank_tells_its_phases_and_is_believed_until_it_tells_again() -> None:
    view = job(rank=True)
    books = begun(replace(view, ranks={0: told(0.0, "waiting")}))
    words = [
        told(4.0, "update", waiting=4.0),
        told(7.0, "saving", waiting=4.0, update=3.0),
        told(8.0, "waiting", waiting=4.0, update=3.0, saving=1.0),
    ]
    for word in words:
        books.update(
            replace(view, ranks={0: word}), "barrier" if word.phase != "update" else "no_work", word.clock or 0
        )
    ended(books, 10.0)
    book = closed(books, 11.0)
    assert book.booked == pytest.approx(
        {
            idle("train", "no_work"): 4.0,
            busy("train"): 3.0,
            SYNCING: 1.0,
            idle("train", "barrier"): 2.0,
            UNALLOCATED: 20.0,
        }
    )
    assert book.error == pytest.approx(0.0, abs=1e-9)


def test_rank_report_does_not_repeat_extrapolated_time() -> None:
    line, claims = Timeline(Attribution(idle("train", "tail")), 0.0), RankReports("t0")
    assert not claims.receive(told(0.0, "waiting"), line)
    (ahead,) = claims.extend(3.0, line)
    assert ahead.seconds == {idle("train", "tail"): 3.0}
    (after,) = claims.receive(told(5.0, "update", waiting=3.5, update=1.5), line)
    assert (after.begin, after.end) == (3.0, 5.0)
    assert after.seconds == pytest.approx({idle("train", "tail"): 0.5, busy("train"): 1.5})
    assert not claims.extend(5.0, line)


def test_time_before_the_job_was_taken_up_is_not_booked() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books = StepAccountBuilder(SPEC, 100.0, 0.0)
    books.update(view, "no_work", 100.0)
    books.engine_read("e", reading(100.5, busy_s=100.0))
    ended(books, 104.0)
    books.engine_read("e", reading(105.0, busy_s=104.5))
    book = closed(books, 106.0)
    assert book.booked == pytest.approx({busy("rollout"): 3.5, UNALLOCATED: 8.0})
    assert book.unbooked == pytest.approx(0.5)


def test_while_nobody_kept_the_books_a_worker_that_nothing_was_kept_of_leaves_its_slot_unbooked() -> None:
    view = job(place("cpu:0"), place("cpu:2"), workers=(engine_of("e", "cpu:0"),))
    books = StepAccountBuilder(SPEC, 100.0, 1000.0, gap_s=6.0)
    books.update(view, "no_work", 100.0)
    books.engine_read("e", reading(100.0, busy_s=100.0))
    ended(books, 104.0)
    books.engine_read("e", reading(105.0, busy_s=105.0))
    book = closed(books, 106.0)
    assert (book.began, book.seconds) == (994.0, 10.0)
    # Nobody could fill the place that the plan has on the third slot; nobody was to be on the second.
    loading = switching(NOBODY, "rollout")
    assert book.booked == pytest.approx({busy("rollout"): 4.0, UNALLOCATED: 10.0, FAILED: 6.0, loading: 4.0})
    assert book.unbooked == pytest.approx(6.0)


def test_a_rank_that_began_while_nobody_kept_the_books_says_all_that_it_did() -> None:
    """As where a controller dies while a train world of another size is formed: its rank loads, and trains, meanwhile."""
    view = job(rank=True)
    books = StepAccountBuilder(SPEC, 16.0, 1016.0, head=STEP, gap_s=6.0)
    books.update(view, "no_work", 16.0)
    assert books.close(16.4) == [], "it is waited for"
    # It began 1 s after the last life of its controller had ended.
    books.update(replace(view, ranks={0: told(16.5, "waiting", loading=2.0, waiting=2.5, update=1.0)}), "tail", 16.5)
    books.head_moved(Version(0, 2), 18.0, 1018.0)
    (found,) = books.close(18.0 + REPORT_DELAY_S)
    booked = {state: seconds for state, seconds in found.book.booked.items() if state != UNALLOCATED}
    assert booked[switching(NOBODY, "train")] == pytest.approx(2.0)
    assert booked[busy("train")] == pytest.approx(1.0)
    assert sum(booked.values()) == pytest.approx(7.0)
    assert found.book.unbooked == pytest.approx(1.0)


def kept_until(at: float, view: JobView) -> dict[str, WorkerTotals]:
    """What the other life of the controller kept of an engine `e` and a rank, whose step ended at `at`."""
    books = begun(replace(view, ranks={0: told(0.0, "waiting")}))
    books.update(replace(view, ranks={0: told(at - 2, "update", waiting=at - 2)}), "tail", at - 2)
    books.engine_read("e", reading(at - 1, busy_s=at - 1))
    ended(books, at)
    books.engine_read("e", reading(at + 0.1, busy_s=at - 1))
    books.update(replace(view, ranks={0: told(at + 0.1, "waiting", waiting=at - 2, update=2.1)}), "tail", at + 0.1)
    (line,) = books.close(at + 0.2)
    return dict(line.kept)


def test_worker_stopped_before_it_reports_the_gap_is_booked_as_failed() -> None:
    view = job(place("cpu:1"), workers=(engine_of("e", "cpu:1"),), rank=True)
    kept = kept_until(10.0, view)
    # As the controller comes back, the plan has nobody here any more: the rank is on its way out, the engine goes before it is read.
    rank = view.workers["t0"].model_copy(update={"state": "stopping"})
    dropped = replace(job(workers=(engine_of("e", "cpu:1"),)), workers={"e": engine_of("e", "cpu:1"), "t0": rank})
    books = StepAccountBuilder(SPEC, 16.0, 1016.0, head=STEP, gap_s=6.0, kept=kept)
    books.update(dropped, "no_work", 16.0)
    assert books.close(16.3) == []
    books.update(replace(dropped, workers={}), "no_work", 16.5)
    books.head_moved(Version(0, 2), 18.0, 1018.0)
    (found,) = books.close(18.0 + REPORT_DELAY_S)
    assert found.book.unbooked == pytest.approx(0.0, abs=1e-6)
    leaving = switching("rollout", NOBODY), switching("train", NOBODY)
    assert found.book.booked == pytest.approx({FAILED: 12.0, UNALLOCATED: 11.0, leaving[0]: 0.5, leaving[1]: 0.5})


def test_a_rank_that_is_slow_to_say_what_it_did_while_its_controller_was_away_is_waited_for() -> None:
    view = job(place("cpu:1"), workers=(engine_of("e", "cpu:1"),), rank=True)
    kept = kept_until(10.0, view)
    books = StepAccountBuilder(SPEC, 16.0, 1016.0, head=STEP, gap_s=6.0, kept=kept)
    books.update(view, "tail", 16.0)
    books.engine_read("e", reading(16.0, busy_s=9.0))
    assert books.close(17.0) == []
    books.update(replace(view, ranks={0: told(18.0, "waiting", waiting=13.0, update=5.0)}), "tail", 18.0)
    books.head_moved(Version(0, 2), 19.0, 1019.0)
    books.engine_read("e", reading(19.0, busy_s=9.0))
    (found,) = books.close(19.0 + REPORT_DELAY_S)
    assert found.book.error == pytest.approx(0.0, abs=1e-6)
    assert FAILED not in found.book.booked


def test_silent_rank_is_waited_for_no_longer_than_an_engine() -> None:
    view = job(place("cpu:1"), workers=(engine_of("e", "cpu:1"),), rank=True)
    books = StepAccountBuilder(SPEC, 16.0, 1016.0, head=STEP, gap_s=6.0, kept=kept_until(10.0, view))
    books.update(view, "tail", 16.0)
    books.engine_unreachable("e", 16.1)
    books.head_moved(Version(0, 2), 16.5, 1016.5)
    assert books.close(16.0 + PATIENCE_S - 0.1) == []
    (found,) = books.close(16.0 + PATIENCE_S)
    assert found.book.booked[FAILED] == pytest.approx(12.4)


def test_kept_reports_are_older_than_the_end_of_the_step() -> None:
    kept = kept_until(10.0, job(place("cpu:1"), workers=(engine_of("e", "cpu:1"),), rank=True))
    assert {name: one.at for name, one in kept.items()} == {"e": 9.0, "t0": 8.0}


def test_a_slot_whose_engines_are_all_to_sleep_is_nobodys_once_they_do() -> None:
    rollout, judge = engine_of("e", "cpu:0"), engine_of("j", "cpu:0", "critic")
    view = job(place("cpu:0", asleep=True), place("cpu:0", "critic", asleep=True), workers=(rollout, judge))
    books = begun(view)
    asleep = {"e": EngineView("e", "h:9", None, asleep=True)}
    books.engine_read("e", reading(2.0))
    books.engine_read("j", reading(2.0, asleep_s=2.0))
    books.update(replace(view, engines=asleep), "tail", 2.0)
    books.engine_read("e", reading(10.0, asleep_s=8.0))
    books.engine_read("j", reading(10.0, asleep_s=10.0))
    ended(books, 10.0)
    assert closed(books, 11.0).booked == pytest.approx({switching("rollout", "reward"): 2.0, UNALLOCATED: 28.0})


def test_a_slot_whose_rank_rests_beside_engines_that_are_to_sleep_is_the_idle_ranks() -> None:
    base = job(place("cpu:0", asleep=True), workers=(engine_of("e", "cpu:0"),), rank=True)
    spec = SPEC.model_copy(update={"placement": SPEC.placement.model_copy(update={"memory": "in_turns"})})
    resting = RankView(0, phase="waiting", clock=0.0, phases={}, released=frozenset({"optimizer", "weights"}))
    asleep = {"e": EngineView("e", "h:9", None, asleep=True)}
    books = StepAccountBuilder(spec, 0.0, 1000.0)
    books.update(replace(base, spec=spec, ranks={0: resting}, engines=asleep), "tail", 0.0)
    books.engine_read("e", reading(10.0, asleep_s=10.0))
    ended(books, 10.0)
    assert closed(books, 11.0).booked == pytest.approx({idle("train", "tail"): 10.0, UNALLOCATED: 20.0})


def test_surviving_workers_report_the_gap_and_dead_ones_count_as_failed() -> None:
    workers = engine_of("e", "cpu:1"), engine_of("f", "cpu:2")
    view = job(place("cpu:1"), place("cpu:2"), workers=workers, rank=True)
    before = begun(replace(view, ranks={0: told(0.0, "waiting")}))
    before.update(replace(view, ranks={0: told(8.0, "update", waiting=8.0)}), "tail", 8.0)
    for name in ("e", "f"):
        before.engine_read(name, reading(10.0, busy_s=10.0))
    ended(before, 10.0)
    (line,) = before.close(10.2)
    kept = line.line("node-0").kept
    assert kept.keys() == {"e", "f", "t0"}
    after = StepAccountBuilder(SPEC, 16.0, 1016.0, head=STEP, gap_s=6.0, kept=kept)
    left = replace(view, workers={name: one for name, one in view.workers.items() if name != "f"})
    now = told(16.0, "waiting", waiting=11.0, update=5.0)
    after.update(replace(left, ranks={0: now}), "tail", 16.0)
    after.engine_read("e", reading(16.0, busy_s=13.0))
    after.head_moved(Version(0, 2), 18.0, 1018.0)
    after.engine_read("e", reading(19.0, busy_s=13.0))
    (found,) = after.close(18.2)
    assert found.book.seconds == pytest.approx(8.0)
    assert found.book.unbooked == pytest.approx(0.0, abs=1e-6)
    booked = found.book.booked
    assert booked[busy("rollout")] == pytest.approx(3.0)
    assert booked[idle("rollout", "no_work")] == pytest.approx(3.0)
    assert booked[idle("rollout", "tail")] == pytest.approx(2.0)
    assert booked[FAILED] == pytest.approx(6.0)
    # Of the rank's eight seconds since its last word two were before the gap.
    assert booked[busy("train")] + booked[idle("train", "no_work")] == pytest.approx(6.0)
    assert booked[idle("train", "tail")] == pytest.approx(2.0)


def test_a_slot_on_which_all_slept_while_its_controller_was_away_was_nobodys() -> None:
    """A controller that dies in the middle of a loan: the giving engine sleeps, and the receiving one is not woken."""
    view = job(
        place("cpu:1", asleep=True),
        place("cpu:1", "tutor"),
        workers=(engine_of("e", "cpu:1"), engine_of("j", "cpu:1", "tutor")),
    )
    before = begun(view)
    before.engine_read("e", reading(10.0, busy_s=10.0))
    before.engine_read("j", reading(10.0, asleep_s=10.0))
    ended(before, 10.0)
    (line,) = before.close(10.2)
    after = StepAccountBuilder(SPEC, 16.0, 1016.0, head=STEP, gap_s=6.0, kept=line.line("node-0").kept)
    after.update(view, "tail", 16.0)
    after.engine_read("e", reading(16.0, busy_s=11.0, asleep_s=5.0))
    after.engine_read("j", reading(16.0, busy_s=1.0, asleep_s=14.0))
    after.head_moved(Version(0, 2), 16.1, 1016.1)
    after.engine_read("e", reading(16.2, busy_s=11.0, asleep_s=5.2))
    after.engine_read("j", reading(16.2, busy_s=1.2, asleep_s=14.0))
    (found,) = after.close(16.3)
    assert found.book.unbooked == pytest.approx(0.0, abs=1e-6)
    booked = found.book.booked
    assert (booked[busy("rollout")], booked[idle("reward", "no_work")]) == pytest.approx((1.0, 1.0))
    assert booked[UNALLOCATED] == pytest.approx(2 * 6.1 + 3.0)


def test_engine_sums_are_grouped_by_pool_and_cut_at_the_end_of_the_step() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books = begun(view)
    books.engine_read("e", EngineReading(8.0, EngineTimeSums(8.0, 8.0, 0, 0, 0, 8.0, 32.0), 4, 0, 160, 4))
    ended(books, 10.0)
    books.engine_read("e", EngineReading(12.0, EngineTimeSums(12.0, 12.0, 0, 0, 0, 12.0, 48.0), 4, 0, 240, 6))
    book = closed(books, 12.5)
    sums = book.engines["rollout"]
    assert (sums.active_s, sums.running_s, sums.tokens, sums.requests) == (10.0, 40.0, 200, 5)
    assert book.loads == {"rollout": (sums,)}


def test_a_step_that_takes_days_takes_no_more_room_the_longer_it_takes() -> None:
    books, sizes = begun(job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))), []
    for at in range(1, 2001):
        books.engine_read("e", EngineReading(at, EngineTimeSums(at, at, 0, 0, 0, at, 4.0 * at), 4, 0, 10 * at, at))
        books.close(float(at))
        if at % 1000 == 0:
            sizes.append(len(pickle.dumps(books)))
    assert sizes[1] < sizes[0] + 100
    ended(books, 2000.0)
    sums = closed(books, 2000.5).engines["rollout"]
    assert (sums.active_s, sums.tokens, sums.requests) == (pytest.approx(2000.0), 20_000, 2000)


def test_engine_sums_are_reported_by_number_of_requests() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    books = begun(view)
    for at, running_s, tokens in ((2.0, 32.0, 640), (3.0, 35.0, 710), (5.0, 41.0, 860)):
        books.engine_read("e", EngineReading(at, EngineTimeSums(at, at, 0, 0, 0, at, running_s), 4, 0, tokens, 4))
    ended(books, 5.0)
    crowd, tail = closed(books, 5.5).loads["rollout"][::-1]
    assert (crowd.active_s, crowd.running_s, crowd.tokens) == (2.0, 32.0, 640)
    assert (tail.active_s, tail.running_s, tail.tokens) == (3.0, 9.0, 220)


@given(
    phases=st.lists(
        st.tuples(st.floats(0.1, 5), st.sampled_from(["waiting", "update", "saving"]), st.booleans()), max_size=12
    ),
    extends=st.lists(st.floats(0, 60), max_size=8),
)
def test_rank_seconds_are_reported_exactly_once(phases: list[tuple[float, str, bool]], extends: list[float]) -> None:
    line = Timeline(Attribution(idle("train", "tail")), 0.0)
    claims, totals, now, phase = RankReports("t0"), {"waiting": 0.0}, 0.0, "waiting"
    words = [(0.0, told(0.0, "waiting", waiting=0.0))]
    for passed, following, says in phases:
        now += passed
        totals[phase] = totals.get(phase, 0.0) + passed
        phase = following
        if says:
            words.append((now, told(now, phase, **totals)))
    moments = [(at, None) for at in extends if at <= now] + words
    covered = 0.0
    for at, word in sorted(moments, key=lambda one: one[0]):
        for telling in claims.receive(word, line) if word is not None else claims.extend(at, line):
            assert telling.begin == pytest.approx(covered)
            assert min(telling.seconds.values()) >= 0
            assert sum(telling.seconds.values()) == pytest.approx(telling.end - telling.begin)
            covered = telling.end
    assert covered >= words[-1][0] - 1e-9


def check_sum(book: StepAccount) -> None:
    assert sum(book.booked.values()) + book.unbooked == pytest.approx(book.seconds * book.slots, abs=1e-4)
    assert book.unbooked >= 0


def test_a_controller_that_looks_late_books_its_absence_in_the_step_that_it_is_of() -> None:
    view = job(place("cpu:0"), workers=(engine_of("e", "cpu:0"),))
    kept = kept_until(10.0, job(place("cpu:1"), workers=(engine_of("e", "cpu:1"),), rank=True))
    books = StepAccountBuilder(SPEC, 50.0, 1050.0, head=STEP, gap_s=40.0, kept=kept)
    books.head_moved(Version(0, 2), 50.1, 1050.1)
    assert books.close(50.1 + PATIENCE_S) == []
    books.update(view, "no_work", 55.4)
    books.engine_read("e", reading(55.5, busy_s=55.0))
    books.head_moved(Version(0, 3), 57.0, 1057.0)
    books.engine_read("e", reading(57.1, busy_s=56.0))
    away, newest = (found.book for found in books.close(57.0 + PATIENCE_S))
    assert (away.seconds, newest.seconds) == (pytest.approx(40.1), pytest.approx(6.9))
    for book in (away, newest):
        check_sum(book)


WHAT = st.sampled_from(["look", "look elsewhere", "read", "head", "close", "unreachable"])


@given(
    gap_s=st.sampled_from([0.0, 3.0, 40.0]),
    events=st.lists(st.tuples(st.floats(0.01, 8.0), WHAT, st.floats(0, 1)), max_size=25),
)
def test_booked_and_unbooked_time_fill_the_window_in_any_order_of_events(
    gap_s: float, events: list[tuple[float, str, float]]
) -> None:
    """A controller comes back: head moves, it looks at the job, engines answer, in any order and as late as can be."""
    here = job(place("cpu:1"), workers=(engine_of("e", "cpu:1"),), rank=True)
    elsewhere = job(place("cpu:2"), workers=(engine_of("f", "cpu:2"),))
    now, step, busy_s = 50.0, 1, 0.0
    kept = kept_until(now - gap_s, here) if gap_s else {}
    books = StepAccountBuilder(SPEC, now, 1000.0 + now, head=STEP, gap_s=gap_s, kept=kept)
    closed_until = now - gap_s
    for passed, what, share in [*events, (9.0, "look", 0.0), (1.0, "head", 0.0), (PATIENCE_S + 0.1, "close", 0.0)]:
        now += passed
        if what.startswith("look"):
            books.update(here if what == "look" else elsewhere, "no_work", now)
        elif what == "read":
            busy_s += share * passed
            books.engine_read("e", reading(now, busy_s=min(busy_s, now)))
        elif what == "head":
            step += 1
            books.head_moved(Version(0, step), now, 1000.0 + now)
        elif what == "unreachable":
            books.engine_unreachable("e", now)
        for found in books.close(now):
            check_sum(found.book)
            if gap_s:  # else a start that was over before the first look has no book
                assert found.book.began == pytest.approx(1000.0 + closed_until, abs=0.5)
            closed_until = found.book.began - 1000.0 + found.book.seconds
    assert closed_until > 50.0, "the last step is closed"
