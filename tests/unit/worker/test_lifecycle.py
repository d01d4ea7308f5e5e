"""The supervisor's decisions, as sequences of events and as properties over any such sequence.

The watchdog, exactly at its limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore.store.reference import StoreRef
from gcore.worker import lifecycle as e
from gcore.worker.lifecycle import (
    FAILED,
    LINE_GRACE_S,
    SHOW_LIMIT_S,
    SIGNAL_STOPPED,
    STOPPED,
    ChildState,
    ProgressOk,
    ProgressStalled,
    SupervisorState,
    Watchdog,
    decide,
    wake_at,
)
from gcore.worker.records import LaunchSpec

ENGINE = LaunchSpec(
    instance="w1",
    node="node-1",
    role="rollout",
    job_uid="j",
    slot="cpu:0",
    store=StoreRef(endpoints=("127.0.0.1:1",)),
    log_file="/dev/null",
    command=("true",),
    orphan_grace_s=60,
    store_grace_s=1000,
    start_limit_s=300,
    watchdog_s=20,
    stop_grace_s=10,
    linger_s=3,
)
RANK = ENGINE.model_copy(update={"role": "train", "world": "w", "rank": 1})


@dataclass
class Story:
    """A life under events. `done` are all instructions so far."""

    spec: LaunchSpec = ENGINE
    now: float = 0.0
    done: list[e.Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.life = SupervisorState.begin(self.spec, self.now)

    def meets(self, *happening: e.WorkerEvent) -> list[e.Instruction]:
        """The instructions that followed from these events."""
        new: list[e.Instruction] = []
        for event in happening:
            decision = decide(self.life, event, self.now)
            self.life = decision.life
            new += decision.instructions
        self.done += new
        return new

    def passes(self, seconds: float) -> list[e.Instruction]:
        """Time passes, and the supervisor looks whenever it planned to."""
        new: list[e.Instruction] = []
        end = self.now + seconds
        while (due := wake_at(self.life)) is not None and due <= end and not self.life.left:
            self.now = due
            new += self.meets(e.Tick())
        self.now = end
        return new + self.meets(e.Tick())


def serving(spec: LaunchSpec = ENGINE) -> Story:
    story = Story(spec)
    assert story.meets(e.NodeWatched(True)) == []
    assert story.meets(e.Registered()) == [e.StartChild()]
    assert story.meets(e.ChildStarted(42), e.ChildServes("127.0.0.1:8000"), e.StatePublished("serving")) == []
    assert (story.life.state, story.life.address, story.life.child_pid) == ("serving", "127.0.0.1:8000", 42)
    return story


def test_the_child_is_started_only_after_the_registration_and_once() -> None:
    story = Story()
    assert story.passes(100) == []
    assert story.meets(e.Registered()) == [e.StartChild()]
    story.meets(e.ChildStarted(42))
    assert story.meets(e.Registered()) == [], "a lease lost and found again"


def test_an_idle_engine_is_left_alone_for_ever() -> None:
    assert serving().passes(1e6) == []


def test_second_worker_for_a_rank_starts_no_child_and_exits_with_the_reason() -> None:
    story = Story(RANK)
    assert story.meets(e.RegistrationRefused("rank 1 of world w is taken by worker w0")) == []
    assert (story.life.state, story.life.reason) == ("failed", "rank 1 of world w is taken by worker w0")
    story.meets(e.StatePublished("failed"))
    assert story.passes(RANK.linger_s) == [e.EndSupervisor(FAILED)]


def test_a_child_that_ends_by_itself_has_failed_and_the_failure_lingers() -> None:
    story = serving()
    assert story.meets(e.LineClosed(), e.ChildEnded("killed by SIGKILL"), e.StatePublished("failed")) == []
    assert (story.life.state, story.life.reason) == ("failed", "killed by SIGKILL")
    assert story.passes(2.9) == []
    assert story.passes(0.1) == [e.EndSupervisor(FAILED)]


def test_a_failure_that_the_store_does_not_take_lingers_longer_but_not_for_ever() -> None:
    story = serving()
    story.meets(e.StoreSeen(False), e.ChildEnded("killed by SIGKILL"))
    assert story.passes(SHOW_LIMIT_S - 0.1) == []
    assert story.passes(0.1) == [e.EndSupervisor(FAILED)]


def test_a_failure_shown_before_the_child_has_died_lingers_from_its_death_on() -> None:
    story = serving()
    story.meets(e.ChildFailed("no such model"), e.StatePublished("failed"))
    story.passes(1)
    story.meets(e.ChildEnded("ended by itself with exit code 2"))
    assert story.life.reason == "no such model", "the child's own words, not what followed"
    assert story.passes(2.9) == []
    assert story.passes(0.1) == [e.EndSupervisor(FAILED)]


@pytest.mark.parametrize(
    ("farewell", "reason"),
    [
        (e.ChildFailed("no such model"), "no such model"),
        (e.LineClosed(), f"closed its control line and was still running {LINE_GRACE_S:.0f} s later"),
    ],
    ids=["said that it failed", "closed its line"],
)
def test_a_child_that_said_farewell_and_stays_is_killed(farewell: e.WorkerEvent, reason: str) -> None:
    story = serving()
    assert story.meets(farewell) == []
    assert story.passes(LINE_GRACE_S) == [e.KillChild()]
    assert (story.life.state, story.life.reason) == ("failed", reason)


def test_a_hung_child_is_killed_and_the_phase_is_named() -> None:
    story = serving()
    story.meets(e.ChildProgressed("update", 7))
    assert story.passes(19.9) == []
    assert story.meets(e.ChildProgressed("update", 7)) == [], "that is no progress"
    assert story.passes(0.1) == [e.KillChild()]
    assert story.life.reason == "no progress in phase 'update' for 20 s"


def test_a_child_that_never_serves_is_failed_though_it_reports_progress() -> None:
    story = Story()
    story.meets(e.Registered(), e.ChildStarted(42))
    for progress in range(299):
        story.meets(e.ChildProgressed("loading", progress))
        assert story.passes(1) == []
    assert story.passes(1) == [e.KillChild()]
    assert story.life.reason == "did not serve within 300 s of its start"


def test_a_worker_that_cannot_register_gives_up() -> None:
    story = Story()
    story.meets(e.StoreSeen(False))
    story.passes(300)
    assert story.life.reason == "could not register in the store within 300 s of its start"
    assert story.passes(SHOW_LIMIT_S) == [e.EndSupervisor(FAILED)]


def test_a_supervisor_that_was_paused_itself_does_not_blame_the_child() -> None:
    story = serving()
    story.meets(e.ChildProgressed("update", 7))
    story.now += 3600
    assert story.meets(e.Tick()) == []
    assert story.passes(19.9) == []
    assert story.passes(0.1) == [e.KillChild()], "from then on it counts again"


def test_a_stop_lets_the_child_drain() -> None:
    story = serving()
    assert story.meets(e.StopRequested("received SIGTERM")) == [e.SendStop()]
    assert (story.life.state, story.life.reason) == ("stopping", "received SIGTERM")
    assert story.passes(9) == []
    assert story.meets(e.LineClosed(), e.ChildEnded("ended by itself with exit code 0")) == [e.EndSupervisor(STOPPED)]


def test_a_child_that_does_not_stop_is_killed_after_the_grace() -> None:
    story = serving()
    story.meets(e.StopRequested("received SIGTERM"))
    assert story.passes(10) == [e.KillChild()]
    assert story.meets(e.ChildEnded("killed by SIGKILL")) == [e.EndSupervisor(STOPPED)]


def test_worker_that_does_not_serve_yet_is_killed_at_once() -> None:
    story = Story()
    story.meets(e.Registered(), e.ChildStarted(7))
    assert story.meets(e.StopRequested("received SIGTERM")) == [e.SendStop(), e.KillChild()]
    assert story.meets(e.ChildEnded("killed by SIGKILL")) == [e.EndSupervisor(STOPPED)]


def test_second_stop_request_kills_the_child() -> None:
    story = serving()
    story.meets(e.StopRequested("received SIGTERM"))
    assert story.meets(e.StopRequested("received SIGTERM")) == [e.KillChild()]


def test_a_stop_before_the_child_was_started_leaves_at_once() -> None:
    assert Story().meets(e.StopRequested("received SIGTERM")) == [e.EndSupervisor(STOPPED)]


def test_a_hang_while_stopping_changes_nothing() -> None:
    story = serving(ENGINE.model_copy(update={"stop_grace_s": 1000.0}))
    story.meets(e.ChildProgressed("update", 7), e.StopRequested("received SIGTERM"))
    assert story.passes(999) == []
    assert story.life.state == "stopping"


def test_an_orphan_is_called_one_only_after_the_store_was_read_once_more() -> None:
    story = serving()
    story.meets(e.NodeWatched(False))
    assert story.passes(60) == [e.ReadNode()]
    assert story.passes(600) == [], "the store does not answer: nobody is called an orphan"
    assert story.meets(e.NodeRead(False)) == [e.SendStop()]
    assert story.life.reason == "orphaned: node node-1 has had no controller for 660 s"


def test_a_controller_that_comes_back_adopts_the_worker() -> None:
    story = serving()
    story.meets(e.NodeWatched(False))
    assert story.passes(59) == []
    story.meets(e.NodeWatched(True))
    assert story.passes(1e5) == []
    story.meets(e.NodeWatched(False))
    assert story.passes(60) == [e.ReadNode()], "the grace begins anew"
    assert story.meets(e.NodeRead(True)) == []
    assert story.passes(1e5) == []


def test_a_controller_that_came_and_went_while_the_store_was_asked_starts_the_grace_anew() -> None:
    story = serving()
    story.meets(e.NodeWatched(False))
    assert story.passes(60) == [e.ReadNode()]
    story.meets(e.NodeWatched(True), e.NodeWatched(False))
    assert story.meets(e.NodeRead(False)) == []
    assert story.passes(60) == [e.ReadNode()]


def test_a_store_that_is_away_for_very_long_ends_the_worker() -> None:
    story = serving()
    story.meets(e.StoreSeen(False))
    story.passes(500)
    story.meets(e.StoreSeen(False))
    assert story.passes(500) == [e.SendStop()]
    assert story.life.reason == "the store has been unreachable for 1000 s"


def test_a_store_that_comes_back_is_forgiven() -> None:
    story = serving()
    story.meets(e.StoreSeen(False))
    story.passes(999)
    story.meets(e.StoreSeen(True))
    assert story.passes(1e5) == []


def test_a_rank_that_lost_its_place_is_killed() -> None:
    story = serving(RANK)
    assert story.meets(e.RegistrationRefused("world w is gone from the store")) == [e.KillChild()]
    assert story.life.reason == "world w is gone from the store"


def test_the_rendezvous_goes_both_ways() -> None:
    story = serving(RANK)
    assert story.meets(e.ChildListens("h:1")) == [e.PublishRendezvous("h:1")]
    assert story.meets(e.RendezvousKnown("h:1")) == [e.SendRendezvous("h:1")]


def test_a_child_that_could_not_be_started_is_a_failure() -> None:
    story = Story()
    story.meets(e.Registered(), e.ChildFailed("cannot start 'nonsense'"), e.StatePublished("failed"))
    assert story.passes(3) == [e.EndSupervisor(FAILED)]


WORDS = st.sampled_from(["a", "b"])
HAPPENINGS = st.one_of(
    st.builds(e.RegistrationRefused, WORDS),
    st.builds(e.StatePublished, st.sampled_from(["starting", "serving", "failed", "stopping"])),
    st.builds(e.StoreSeen, st.booleans()),
    st.builds(e.NodeWatched, st.booleans()),
    st.builds(e.NodeRead, st.booleans()),
    st.builds(e.RendezvousKnown, WORDS),
    st.builds(e.ChildServes, WORDS),
    st.builds(e.ChildListens, WORDS),
    st.builds(e.ChildProgressed, st.sampled_from(["waiting", "loading", "update"]), st.integers(0, 3)),
    st.builds(e.ChildFailed, WORDS),
    st.builds(e.StopRequested, WORDS),
    st.builds(e.Tick, st.booleans()),
    st.just(e.LineClosed()),
    st.just(e.Registered()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(HAPPENINGS, st.sampled_from([0.0, 0.1, 1.0, 5.0, 25.0, 400.0]), st.booleans()), max_size=40))
def test_in_any_story_the_supervisor_leaves_no_child_behind_and_always_ends(
    story_of: list[tuple[e.WorkerEvent, float, bool]],
) -> None:
    story = Story(RANK)
    for event, later, dies in story_of:
        state = story.life.state
        started = e.StartChild() in story.done
        new = story.meets(event)
        if e.StartChild() in new:
            assert not started, "one child in a life"
            new += story.meets(e.ChildStarted(42))
        running = story.life.child is ChildState.RUNNING
        if dies and running:
            new += story.meets(e.ChildEnded("died"))
        new += story.passes(later)
        for instruction in new:
            if isinstance(instruction, e.EndSupervisor):
                assert story.life.child is not ChildState.RUNNING
                assert instruction.code == (STOPPED if story.life.state == "stopping" else FAILED)
            if isinstance(instruction, e.KillChild | e.SendStop | e.SendRendezvous):
                assert running
        if state in ("failed", "stopping"):
            assert story.life.state == state, "there is no way back"
        due = wake_at(story.life)
        assert story.life.left or due is None or due > story.now, "what is due has been done"
    # Whatever came before: asked to go, with a child that dies when it is killed, it goes.
    story.meets(e.StopRequested("end"))
    story.passes(ENGINE.stop_grace_s + LINE_GRACE_S)
    if story.life.child is ChildState.RUNNING:
        assert story.life.killed
        story.meets(e.ChildEnded("killed by SIGKILL"))
    story.passes(SHOW_LIMIT_S)
    assert story.life.left
    assert sum(isinstance(instruction, e.EndSupervisor) for instruction in story.done) == 1
    assert decide(replace(story.life), e.Registered(), story.now).instructions == ()


FRESH = Watchdog(limit_s=10, loading_limit_s=100, phase="loading", since=0)


@pytest.mark.parametrize(
    ("phase", "now", "expected"),
    [
        ("update", 9.9, ProgressOk(10)),
        ("update", 10.0, ProgressStalled("update", 0)),
        ("loading", 99.0, ProgressOk(100)),
        ("loading", 100.0, ProgressStalled("loading", 0)),
        ("waiting", 1e9, ProgressOk(None)),
    ],
    ids=["work in time", "work stands still", "loading may take longer", "loading stands still", "waiting may last"],
)
def test_a_phase_without_progress_is_judged_by_its_own_limit(
    phase: str, now: float, expected: ProgressOk | ProgressStalled
) -> None:
    assert FRESH.note(phase, 1, 0).verdict(now) == expected


def test_the_same_phase_with_the_same_number_is_no_progress() -> None:
    dog = FRESH.note("update", 3, 1).note("update", 3, 9)
    assert dog.verdict(11) == ProgressStalled("update", 1)
    assert dog.note("update", 4, 9).verdict(11) == ProgressOk(19)
    assert dog.note("saving", 3, 9).verdict(11) == ProgressOk(19)


def test_a_hang_is_told_with_phase_and_seconds() -> None:
    assert ProgressStalled("update", 2.0).reason(14.4) == "no progress in phase 'update' for 12 s"


def test_a_child_stopped_by_a_signal_hangs_even_where_it_may_wait() -> None:
    dog = FRESH.note("waiting", 0, 0).note_stopped(stopped=True, now=50)
    assert dog.note_stopped(stopped=True, now=55).verdict(59) == ProgressOk(60)
    assert dog.verdict(60) == ProgressStalled(SIGNAL_STOPPED, 50)
    assert dog.note_stopped(stopped=False, now=55).verdict(1e9) == ProgressOk(None)


REPORTS = st.lists(
    st.tuples(st.sampled_from(["waiting", "loading", "update"]), st.integers(0, 3), st.floats(0, 30)), max_size=20
)


@given(REPORTS)
def test_the_verdict_turns_exactly_when_it_was_said_to_be_due(reports: list[tuple[str, int, float]]) -> None:
    dog, now = FRESH, 0.0
    for phase, progress, later in reports:
        now += later
        dog = dog.note(phase, progress, now)
    if dog.due is None:
        assert dog.phase == "waiting"
        assert dog.verdict(1e12) == ProgressOk(None)
    else:
        assert isinstance(dog.verdict(dog.due), ProgressStalled)
        assert dog.verdict(dog.due - 0.001) == ProgressOk(dog.due)


@given(st.lists(st.floats(0, 9.9), max_size=30))
def test_worker_with_progress_within_the_limit_never_hangs(gaps: list[float]) -> None:
    dog, now = FRESH, 0.0
    for progress, gap in enumerate(gaps):
        now += gap
        assert isinstance(dog.verdict(now), ProgressOk)
        dog = dog.note("update", progress, now)
