"""A job's events have ascending numbers for any records and any order of notification; none is lost or duplicated."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.telemetry.events import MOST_CHECKPOINTS, PER_REVISION, Event, EventLog, split_by_revision
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment, Checkpoint, Checkpoints, Member
from gcore.ledger.records.job import Evaluation, JobPhase, JobStatus, Move, Moves, SplitPart, Trouble
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.types import Version

KEYS = JobKeys("u")
Write = tuple[str, bytes | None]
"""A key, and its value; None: it is deleted."""
LASTING = ("step", "rollback")
SPLIT = SplitPart(mode="coexisting", rollout=2, reward=1, train=1)


def checkpoints(number: int) -> Write:
    entries = (Checkpoint(seq=step, lineage=0, step=step, file=f"checkpoints/0-{step}") for step in range(number))
    return KEYS.checkpoints, Checkpoints(entries=tuple(entries)).encode()


def moves(number: int) -> Write:
    record = Moves()
    for one in range(number):
        fields = {"generation": one, "step": one, "kind": "split", "before": SPLIT, "after": SPLIT, "reason": "why"}
        record = record.plus(Move.model_validate(fields | {"time": float(one)}))
    return KEYS.moves, record.encode()


def state(phase: JobPhase) -> Write:
    return KEYS.state, JobStatus(phase=phase, reason="why").encode()


def member(number: int, *, there: bool) -> Write:
    record = Member(incarnation=f"node-{number}.a", node=f"node-{number}", address="h:1")
    return KEYS.member(record.incarnation), record.encode() if there else None


def trouble(number: int) -> Write:
    return KEYS.trouble(f"t-{number}"), Trouble(topic=f"t-{number}", node="n", sentence="why").encode()


def evaluation(step: int) -> Write:
    return KEYS.evaluation(f"0.{step}"), Evaluation(version=Version(0, step), accuracy=0.5, count=1).encode()


def shards(number: int) -> Write:
    return KEYS.assign, Assignment(members=tuple(f"node-{n}.a" for n in range(number)), owners=(0,)).encode()


def entry(kind: str, stats: dict[str, float]) -> bytes:
    """What is written to the log; its key is given when it is written."""
    base = chain.base_entry(2, "w", ChainWriter("node-0.a", "n")).entry
    return base.model_copy(update={"kind": kind, "step": 1, "stats": stats}).encode()


CUT_OFF = {f"truncated/source-{n}": 0.9 for n in range(2 * PER_REVISION)}
STATS = st.sampled_from([{}, {"skipped_updates": 1.0}, CUT_OFF])
WRITE = st.one_of(
    st.integers(0, 40).map(checkpoints),
    st.integers(1, 20).map(moves),
    st.sampled_from(list(JobPhase)).map(state),
    st.builds(member, st.integers(0, 30), there=st.booleans()),
    st.integers(0, 30).map(trouble),
    st.integers(0, 3).map(evaluation),
    st.integers(1, 3).map(shards),
)
CROWD = st.integers(1, 40).map(lambda n: [trouble(one) for one in range(n)])


@dataclass
class History:
    """The records of a job, one revision after the other."""

    revisions: list[list[WatchEvent]] = field(default_factory=list)
    there: list[dict[str, KeyValue]] = field(default_factory=list)
    """The records after each change."""

    def add(self, writes: dict[str, bytes | None]) -> None:
        known = dict(self.there[-1]) if self.there else {}
        revision, events = 10 + len(self.revisions), list[WatchEvent]()
        for key, value in writes.items():
            if key in known and key.startswith(KEYS.evaluation("")):
                continue  # no transaction writes an evaluation twice
            kv = KeyValue(key, value or b"", revision, revision)
            if value is not None:
                known[key] = kv
                events.append(WatchEvent("put", kv))
            elif known.pop(key, None) is not None:
                events.append(WatchEvent("delete", kv))
        if events:
            self.revisions.append(events)
            self.there.append(known)

    def heard(self, *, begin: int = 0, resets: frozenset[int] = frozenset(), together: int = 1) -> EventLog:
        """As a controller hears it that begins at one of the revisions, and to whom history is lost at others."""
        log, mirror, at = EventLog(KEYS), JobMirror(KEYS), begin
        listed = True
        while at < len(self.revisions):
            to = at if listed or at in resets else min(at + together, len(self.revisions)) - 1
            if listed or at in resets:
                puts = sorted(self.there[at].values(), key=lambda kv: kv.key)
                batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in puts), 10 + at, reset=True)
            else:
                batch = WatchBatch(tuple(one for some in self.revisions[at : to + 1] for one in some), 10 + to)
            for piece in split_by_revision(batch):
                after = mirror.fold(piece)
                log.note(mirror, piece, after, 0.0)
                mirror = after
            at, listed = to + 1, False
        return log


@st.composite
def histories(draw: st.DrawFn) -> History:
    history, entries = History(), 0
    for _ in range(draw(st.integers(1, 12))):
        writes: dict[str, bytes | None] = dict(draw(st.lists(WRITE, min_size=1, max_size=3) | CROWD))
        if draw(st.booleans()):
            writes[KEYS.log(entries)] = entry(draw(st.sampled_from(["train", "rollback", "account"])), draw(STATS))
            entries += 1
        history.add(writes)
    return history


HEARD = st.fixed_dictionaries(
    {"begin": st.integers(0, 11), "resets": st.frozensets(st.integers(0, 11)), "together": st.integers(1, 4)}
)


def lasting(log: EventLog) -> list[tuple[int, str]]:
    return [(event.sequence, event.message) for event in log.events if event.kind in LASTING]


def check(events: list[Event], log: EventLog) -> None:
    numbers = [event.sequence for event in events]
    assert numbers == sorted(set(numbers))
    for seen in {0, *numbers, *(number + 1 for number in numbers)}:
        rest = [event for event in events if event.sequence > seen]
        assert log.after(seen) == rest
        assert log.after(seen, goes_on=True) == [event for event in rest if not event.again]


@given(histories(), HEARD)
@settings(deadline=None)
def test_numbers_ascend_and_whoever_goes_on_after_any_of_them_gets_exactly_the_rest(
    history: History, how: dict[str, int]
) -> None:
    log = history.heard(**how)  # type: ignore[arg-type]
    check(list(log.events), log)
    revisions = {event.kv.mod_revision for events in history.revisions for event in events}
    assert {event.sequence // PER_REVISION for event in log.events} <= revisions


@given(histories(), HEARD)
@settings(deadline=None)
def test_immutable_records_have_the_same_event_number_for_every_reader(history: History, how: dict[str, int]) -> None:
    one_by_one, other = history.heard(), history.heard(**how)  # type: ignore[arg-type]
    assert lasting(one_by_one)[-len(lasting(other)) or len(lasting(one_by_one)) :] == lasting(other)


@given(histories(), st.integers(1, 5))
@settings(deadline=None)
def test_batching_does_not_change_the_events_of_a_complete_reader(history: History, together: int) -> None:
    assert list(history.heard(together=together).events) == list(history.heard().events)


def test_a_job_with_many_checkpoints_is_told_to_its_end_by_a_daemon_that_begins_then() -> None:
    history = History()
    history.add(dict([checkpoints(40)]))
    history.add(dict([trouble(1)]))
    history.add(dict([state(JobPhase.SUCCEEDED)]))
    log = history.heard(begin=2)
    check(list(log.events), log)
    assert [event.kind for event in log.events] == ["checkpoint"] * (MOST_CHECKPOINTS + 1) + ["warning", "state"]
    summed_up = log.events[0]
    assert summed_up.message == "32 checkpoints up to step 31 saved before the newest 8"
    assert summed_up.data == {"step": 31, "lineage": 0, "file": "checkpoints/0-31", "count": 32}
    assert [event.kind for event in log.after(log.events[-2].sequence)] == ["state"]


def test_of_more_than_one_revision_has_numbers_for_the_last_one_says_what_there_was() -> None:
    history = History()
    history.add(dict(trouble(n) for n in range(PER_REVISION + 4)))
    events = list(history.heard().events)
    assert len(events) == PER_REVISION
    assert (events[-1].kind, events[-1].data) == ("note", {"more": {"warning": 5}})
    assert events[-1].message == "5 more events at the same time: warning 5"
