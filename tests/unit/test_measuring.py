"""What policies are shown of a committed step is what was measured of it, and nothing that was not."""

from __future__ import annotations

import pytest

from gcore.ledger.books import NEWEST_STEPS, EngineSums, NodeBooks, StepBook, of_version
from gcore.ledger.records import LogEntry, Seal, SealedGroup, SealState
from gcore.types import PromptRef, Version
from placement.measuring import measured
from placement.split import Split

SPLIT = Split("coexisting", 2, 1, 1)
TIMES = {"collect_s": 3.0, "exchange_s": 0.25, "train_s": 1.5, "publish_s": 0.25, "tokens": 900.0}


def entry(**stats: float) -> LogEntry:
    return LogEntry(seq=4, parent=3, kind="train", lineage=0, step=4, world="w", nonce="n", stats=TIMES | stats)


def seal(*lengths: tuple[int, ...]) -> Seal:
    groups = tuple(
        SealedGroup(
            ref=PromptRef(0, 0, i), digest=str(i), prompt_tokens=5, response_tokens=one, versions=(), holder="me"
        )
        for i, one in enumerate(lengths)
    )
    return Seal(
        lineage=0, step=4, attempt=1, state=SealState.READY, world="w", world_size=1, mini_batches=1, groups=groups
    )


def book(step: int = 4, **engines: EngineSums) -> StepBook:
    booked = {"busy rollout": 2.0, "busy train": 1.5, "idle rollout tail": 0.5, "busy reward": 0.25}
    loads = {pool: (sums,) for pool, sums in engines.items()}
    return StepBook(
        version=Version(0, step), began=0.0, seconds=5.0, slots=1, booked=booked, engines=dict(engines), loads=loads
    )


def test_a_step_is_what_its_entry_its_seal_and_the_books_of_all_nodes_say() -> None:
    one = book(rollout=EngineSums(active_s=2.0, running_s=6.0, tokens=300, requests=4))
    other = book(
        rollout=EngineSums(active_s=2.0, running_s=6.0, tokens=300, requests=2),
        reward=EngineSums(active_s=1.0, running_s=2.0, tokens=30, requests=6),
    )
    found = measured([one, other], entry(), seal((10, 20), (30,)), SPLIT)
    assert found.lengths == (10.0, 20.0, 30.0)
    assert found.judged == (10.0, 10.0, 10.0)
    assert [(s.pool, s.running, s.token_s) for s in found.speed] == [("reward", 2.0, 2 / 30), ("rollout", 3.0, 0.02)]
    assert found.busy == {"rollout": 4.0, "train": 3.0, "reward": 0.5}
    assert found.seconds == pytest.approx(5.0)
    assert (found.produce_s, found.train_s, found.other_s) == (3.0, 1.5, 0.5)


def test_how_fast_engines_were_is_told_for_each_load_that_they_had() -> None:
    crowd = EngineSums(active_s=2.0, running_s=32.0, tokens=800, requests=16)
    tail = EngineSums(active_s=3.0, running_s=6.0, tokens=300, requests=0)
    moment = EngineSums(active_s=0.1, running_s=0.1, tokens=3, requests=0)
    both = book().model_copy(update={"loads": {"rollout": (moment, tail, crowd)}})
    found = measured([both, both], entry(), None, SPLIT)
    assert [(s.running, s.token_s) for s in found.speed] == [(2.0, 0.02), (16.0, 0.04)]


def test_what_nobody_measured_is_missing() -> None:
    bare = LogEntry(seq=4, parent=3, kind="train", lineage=0, step=4, world="w", nonce="n")
    found = measured([], bare, None, SPLIT)
    assert (found.seconds, found.lengths, found.judged, found.speed, found.busy) == (None, (), (), (), {})


def test_without_the_seal_responses_are_as_long_as_their_mean() -> None:
    found = measured([], entry(samples=3.0, response_length=12.5), None, SPLIT)
    assert found.lengths == (12.5, 12.5, 12.5)


def test_judgements_of_groups_that_were_filtered_do_not_make_those_of_others_longer() -> None:
    judges = book(reward=EngineSums(active_s=1.0, running_s=2.0, tokens=120, requests=6))
    found = measured([judges], entry(prompts_per_group=2.0), seal((10, 20), (30,)), SPLIT)
    assert found.judged == (20.0, 20.0, 20.0)


def test_a_node_keeps_its_newest_steps_and_each_once() -> None:
    books = NodeBooks(node="a")
    for step in range(1, NEWEST_STEPS + 4):
        books = books.plus(book(step)).plus(book(step))
    assert [one.version.step for one in books.steps] == list(range(4, NEWEST_STEPS + 4))
    assert NodeBooks.decode(books.encode()) == books
    assert list(of_version({"a": books, "b": NodeBooks(node="b")}, Version(0, 5))) == ["a"]
