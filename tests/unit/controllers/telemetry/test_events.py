"""Events follow from records, with the same numbers on every controller."""

from __future__ import annotations

import pytest

from controllers.telemetry.events import MOST_EVENTS, PER_REVISION, EventLog, split_by_revision
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment, Checkpoint, Checkpoints, EndedRef, Member
from gcore.ledger.records.job import (
    EvalSample,
    Evaluation,
    JobPhase,
    JobRecord,
    JobStatus,
    KeptPicture,
    Move,
    MoveOutcome,
    Moves,
    SourceScore,
    SplitPart,
)
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.types import PromptRef, Version

KEYS = JobKeys("u")


def put(key: str, value: bytes, revision: int) -> WatchEvent:
    return WatchEvent("put", KeyValue(key, value, revision, revision))


def gone(key: str, revision: int) -> WatchEvent:
    return WatchEvent("delete", KeyValue(key, b"", 0, revision))


def changes() -> list[WatchEvent]:
    base = chain.base_entry(2, "w", ChainWriter("node-0.a", "n"))
    first = Assignment(members=("node-0.a", "node-1.b"), owners=(0, 1))
    second = Assignment(members=("node-0.a",), owners=(0, 0))
    evaluation = Evaluation(version=Version(0, 0), accuracy=0.5, count=10)
    member = Member(incarnation="node-1.b", node="node-1", address="h:1")
    return [
        put(KEYS.state, JobStatus(phase=JobPhase.RUNNING, reason="training").encode(), 3),
        put(KEYS.head, base.head.encode(), 4),
        put(KEYS.log(0), base.entry.encode(), 4),
        put(KEYS.member("node-1.b"), member.encode(), 5),
        put(KEYS.assign, first.encode(), 6),
        put(KEYS.evaluation("0.0"), evaluation.encode(), 7),
        gone(KEYS.member("node-1.b"), 8),
        put(KEYS.assign, second.encode(), 9),
    ]


def heard(batches: list[list[WatchEvent]], *, reset: bool = False) -> EventLog:
    log, mirror = EventLog(KEYS), JobMirror(KEYS)
    for number, events in enumerate(batches):
        batch = WatchBatch(tuple(events), events[-1].kv.mod_revision, reset=reset and number == 0)
        after = mirror.fold(batch)
        log.note(mirror, batch, after, 0.0)
        mirror = after
    return log


def test_each_change_is_told_once_and_in_order() -> None:
    log = heard([[change] for change in changes()])
    assert [event.kind for event in log.events] == ["state", "member", "shards", "eval", "member", "shards"]
    assert log.events[-1].data == {"moved": 1, "shares": {"node-0": [0, 1]}}
    sequences = [event.sequence for event in log.events]
    assert sequences == sorted(set(sequences))


def test_batching_does_not_change_event_numbers() -> None:
    one_by_one = heard([[change] for change in changes()])
    at_once = heard([changes()[:3], changes()[3:7], changes()[7:]])
    assert [(e.sequence, e.kind) for e in at_once.events] == [(e.sequence, e.kind) for e in one_by_one.events]


def checkpoints(*steps: int, revision: int) -> WatchEvent:
    entries = tuple(Checkpoint(seq=step, lineage=0, step=step, file=f"checkpoints/0-{step}") for step in steps)
    return put(KEYS.checkpoints, Checkpoints(entries=entries).encode(), revision)


def told(batches: list[list[WatchEvent]]) -> list[tuple[int, str]]:
    pieces = [
        list(piece.events)
        for events in batches
        for piece in split_by_revision(WatchBatch(tuple(events), events[-1].kv.mod_revision))
    ]
    return [(event.sequence, event.message) for event in heard(pieces).events]


def test_two_checkpoints_in_one_batch_give_one_event_each() -> None:
    both = [checkpoints(1, revision=5), checkpoints(1, 2, revision=6)]
    alone = told([[both[0]], [both[1]]])
    assert [message for _, message in alone] == [
        "step 1 is saved; a restart can begin from it",
        "step 2 is saved; a restart can begin from it",
    ]
    assert told([both]) == alone


def test_overwritten_records_do_not_change_the_numbers_of_others() -> None:
    """Of one revision: who lists the records afterwards finds the entry and the state, and another assignment."""
    base = chain.base_entry(2, "w", ChainWriter("node-0.a", "n"))
    entry = base.entry.model_copy(update={"kind": "rollback", "reason": "r", "lineage": 1})
    state = put(KEYS.state, JobStatus(phase=JobPhase.RUNNING).encode(), 4)
    log = put(KEYS.log(0), entry.encode(), 4)
    shares = put(KEYS.assign, Assignment(members=("node-0.a",), owners=(0, 0)).encode(), 4)
    in_time, late = told([[shares, state, log]]), told([[state, log]])
    assert late == in_time[:2]
    assert [message.partition(" ")[0] for _, message in in_time] == ["restarted", "RUNNING:", "prompt"]


def test_a_follower_goes_on_after_the_last_number_it_saw() -> None:
    log = heard([[change] for change in changes()])
    third = log.events[2].sequence
    assert [event.kind for event in log.after(third)] == ["eval", "member", "shards"]
    assert log.after(log.events[-1].sequence) == []


def test_repeated_listing_repeats_no_event() -> None:
    log, mirror = EventLog(KEYS), JobMirror(KEYS)
    for _ in range(2):
        batch = WatchBatch(tuple(changes()[:6]), 7, reset=True)
        after = mirror.fold(batch)
        log.note(mirror, batch, after, 0.0)
        mirror = after
    assert [event.kind for event in log.events] == ["state", "member", "shards", "eval"]


def test_a_step_that_skipped_updates_says_so_after_it() -> None:
    entries = [
        chain.base_entry(2, "w", ChainWriter("node-0.a", "n")).entry.model_copy(
            update={"seq": seq, "kind": "train", "step": seq, "stats": {"skipped_updates": skipped}}
        )
        for seq, skipped in ((1, 0.0), (2, 1.0), (3, 2.0))
    ]
    log = heard([[put(KEYS.log(entry.seq), entry.encode(), 10 + entry.seq)] for entry in entries])
    assert [event.kind for event in log.events] == ["step", "step", "skipped", "step", "skipped"]
    assert log.events[2].message == "1 update of step 2 skipped: the gradient is not finite"
    assert log.events[4].message == "2 updates of step 3 skipped: the gradient is not finite"
    assert log.events[4].data == {"step": 3, "updates": 2}


def steps_with(*stats: dict[str, float]) -> list[list[WatchEvent]]:
    """Committed steps with these numbers, one after the other."""
    entry = chain.base_entry(2, "w", ChainWriter("node-0.a", "n")).entry
    made = [
        entry.model_copy(update={"seq": number, "kind": "train", "step": number, "stats": one})
        for number, one in enumerate(stats, 1)
    ]
    return [[put(KEYS.log(entry.seq), entry.encode(), 10 + entry.seq)] for entry in made]


def test_a_source_whose_responses_are_mostly_cut_off_is_warned_of_once() -> None:
    batches = steps_with(
        {"truncated/sums": 0.5, "truncated/words": 0.2, "truncated": 0.6},
        {"truncated/sums": 0.62, "truncated/words": 0.2},
        {"truncated/sums": 0.9, "truncated/words": 0.7},
    )
    log = heard(batches)
    assert [event.kind for event in log.events] == ["step", "step", "warning", "step", "warning"]
    assert log.events[2].message == (
        "62% of the responses of source 'sums' were truncated in step 2. Raise max_new_tokens, or see rollout.truncated"
    )
    assert log.events[2].data == {"cause": "truncated", "source": "sums", "share": 0.62, "step": 2}
    assert log.events[4].data["source"] == "words"
    together = heard([[change for batch in batches for change in batch]], reset=True)
    assert [event.sequence for event in together.events] == [event.sequence for event in log.events]


def test_of_a_job_with_one_source_the_steps_own_share_is_looked_at() -> None:
    log = heard(steps_with({"truncated": 0.51}, {"truncated": 0.99}))
    assert [event.kind for event in log.events] == ["step", "warning", "step"]
    assert log.events[1].data["source"] == "data"


@pytest.mark.parametrize("picture_mib", [1, 0])
def test_an_evaluation_names_the_files_of_its_generated_pictures(picture_mib: int) -> None:
    spec = {"samples": {"picture_mib": picture_mib}}
    job = JobRecord(uid="u", name="j", spec=spec, run_dir="/runs/j-u", created=0.0, prompts=9)
    picture = KeptPicture(sha256="ab" * 32, size=9, height=8, width=16)
    samples = tuple(
        EvalSample(prompt="red", response="", answer="", reward=1.0, picture=shown) for shown in (picture, None)
    )
    evaluation = Evaluation(version=Version(1, 4), accuracy=0.5, count=2, samples=samples)
    log = heard([[put(KEYS.job, job.encode(), 6)], [put(KEYS.evaluation("1.4"), evaluation.encode(), 7)]])
    first, second = log.events[-1].data["samples"]
    file = f"/runs/j-u/samples/evaluation-1-4/{'ab' * 32}.png" if picture_mib else ""
    assert first["picture"] == {"sha256": "ab" * 32, "size": 9, "height": 8, "width": 16, "file": file}
    assert "picture" not in second


def test_an_evaluation_tells_the_accuracy_of_each_source() -> None:
    scores = {"sums": SourceScore(accuracy=0.75, count=4), "words": SourceScore(accuracy=0.0, count=2)}
    evaluation = Evaluation(version=Version(0, 0), accuracy=0.5, count=6, by_source=scores)
    (event,) = heard([[put(KEYS.evaluation("0.0"), evaluation.encode(), 7)]]).events
    assert event.data["by_source"] == {
        "sums": {"accuracy": 0.75, "count": 4},
        "words": {"accuracy": 0.0, "count": 2},
    }


def test_prompts_that_ended_untrained_are_told_with_how_and_why() -> None:
    long, empty = "the prompt has 90 tokens, more than 80", "every response was cut off"
    refs = [EndedRef(ref=PromptRef(0, 0, n), kind="filtered", reason=r) for n, r in enumerate([empty, empty, long])]
    failed = EndedRef(ref=PromptRef(0, 1, 0), kind="failed", reason="its reward raised an error")
    entry = chain.base_entry(2, "w", ChainWriter("node-0.a", "n")).entry
    deltas = [tuple(refs[:1]), (*refs, failed)]
    made = [entry.model_copy(update={"seq": n, "kind": "account", "delta": d}) for n, d in enumerate(deltas, 1)]
    one, several = heard([[put(KEYS.log(e.seq), e.encode(), 10 + e.seq)] for e in made]).events
    assert (one.kind, one.message) == ("account", "1 prompt filtered: every response was cut off")
    assert several.message == (
        "3 prompts filtered, 1 prompt failed; most frequent reason (2 times): every response was cut off"
    )
    assert several.data == {"count": 4, "filtered": 3, "failed": 1, "reason": empty}


def test_of_a_long_job_the_newest_events_are_remembered() -> None:
    """A controller lives as long as its node; what it remembers of a job must not grow with every step."""
    status = JobStatus(phase=JobPhase.RUNNING, reason="training").encode()
    log, mirror = EventLog(KEYS), JobMirror(KEYS)
    for revision in range(1, MOST_EVENTS + 6):
        change = put(KEYS.state, status, revision)
        log.note(mirror, WatchBatch((change,), revision), mirror, 0.0)
    assert len(log.events) == MOST_EVENTS
    newest = log.events[-1].sequence
    assert [event.sequence for event in log.after(newest - PER_REVISION)] == [newest]
    assert len(log.after(0)) == MOST_EVENTS, "who asks for all gets what there is"


def moved(number: int, **more: object) -> Move:
    split = SplitPart(mode="coexisting", rollout=2, reward=1, train=1)
    fields = {"generation": number, "step": number, "kind": "split", "before": split, "after": split, "reason": "why"}
    return Move.model_validate(fields | {"time": float(number)} | more)


def test_each_move_is_told_once_however_its_record_is_written() -> None:
    first = Moves().plus(moved(2))
    known = Moves().plus(moved(2, outcome=MoveOutcome(took_s=1.0)))
    second = known.plus(moved(3, kind="world", state="wanted"))
    third = known.plus(moved(3, kind="world", state="done"))
    writes = [
        put(KEYS.moves, record.encode(), 5 + number) for number, record in enumerate((first, known, second, third))
    ]
    for batches in ([[one] for one in writes], [writes], [writes[:2], writes[2:]]):
        told = [(event.kind, event.data["generation"], event.data["state"]) for event in heard(batches).events]
        assert told == [("placement", 2, "done"), ("placement", 3, "wanted"), ("placement", 3, "done")]
    assert len({tuple(e.sequence for e in heard(b).events) for b in ([[one] for one in writes], [writes])}) == 1


def test_resumed_follower_does_not_get_summarized_events_again() -> None:
    """Found later in one record, two checkpoints have other numbers than when each was registered."""
    listed = heard([[checkpoints(1, 2, revision=9), put(KEYS.log(0), changes()[2].kv.value, 10)]], reset=True)
    assert [event.message for event in listed.after(0)] == [
        "step 1 is saved; a restart can begin from it",
        "step 2 is saved; a restart can begin from it",
    ]
    assert listed.after(100, goes_on=True) == []


def member(node: str, *, leaving: bool = False, revision: int) -> WatchEvent:
    record = Member(incarnation=f"{node}.a", node=node, address="h:1", leaving=leaving)
    return put(KEYS.member(f"{node}.a"), record.encode(), revision)


def test_a_controller_that_hands_over_first_leaves_otherwise_than_one_that_is_lost() -> None:
    leaves = [member("n", revision=3), member("n", leaving=True, revision=4), gone(KEYS.member("n.a"), 5)]
    lost = [member("m", revision=3), gone(KEYS.member("m.a"), 4)]
    ended = put(KEYS.state, JobStatus(phase=JobPhase.SUCCEEDED).encode(), 4)
    after = [member("m", revision=3), ended, gone(KEYS.member("m.a"), 5)]
    messages = [heard([[change] for change in story]).events[-1].message for story in (leaves, lost, after)]
    assert messages[0] == "n has left"
    assert messages[1].startswith("m has left without handing over its prompt shards: its daemon ended, lost its lease")
    assert messages[2] == "m has left"
