"""The policies' input about a committed step has all its measurements, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.records.chain import LogEntry, Seal, SealedGroup, SealState
from gcore.ledger.records.slot_accounting import NEWEST_STEPS, EngineSums, NodeAccounts, StepAccount, group_by_version
from gcore.types import PromptRef, Version
from placement.measurements import least_requests, load_class, measure_step, trained_lengths
from placement.slots import Split

SPLIT = Split("coexisting", 2, 1, 1)
TIMES = {"collect_s": 3.0, "exchange_s": 0.25, "train_s": 1.5, "publish_s": 0.25, "tokens": 900.0}


def entry(**stats: float) -> LogEntry:
    return LogEntry(seq=4, parent=3, kind="train", lineage=0, step=4, world="w", nonce="n", stats=TIMES | stats)


def sealed(*lengths: tuple[int, ...]) -> tuple[float, ...]:
    groups = tuple(
        SealedGroup(
            ref=PromptRef(0, 0, i), digest=str(i), prompt_tokens=5, response_tokens=one, versions=(), holder="me"
        )
        for i, one in enumerate(lengths)
    )
    seal = Seal(
        lineage=0, step=4, attempt=1, state=SealState.READY, world="w", world_size=1, mini_batches=1, groups=groups
    )
    return trained_lengths(seal)


def book(step: int = 4, slots: int = 4, **engines: EngineSums) -> StepAccount:
    booked = {"busy rollout": 2.0, "busy train": 1.5, "idle rollout tail": 0.5, "busy reward": 0.25}
    loads = {pool: (sums,) for pool, sums in engines.items()}
    return StepAccount(
        version=Version(0, step), began=0.0, seconds=5.0, slots=slots, booked=booked, engines=dict(engines), loads=loads
    )


def test_a_step_is_what_its_entry_its_seal_and_the_books_of_all_nodes_say() -> None:
    one = book(rollout=EngineSums(active_s=2.0, running_s=6.0, tokens=300, requests=4))
    other = book(
        rollout=EngineSums(active_s=2.0, running_s=6.0, tokens=300, requests=2),
        reward=EngineSums(active_s=1.0, running_s=2.0, tokens=30, requests=6),
    )
    found = measure_step([one, other], entry(), sealed((10, 20), (30,)), SPLIT)
    assert found.lengths == (10.0, 20.0, 30.0)
    assert found.judged == (10.0, 10.0, 10.0)
    assert [(s.pool, s.running, s.token_s) for s in found.speed] == [("reward", 2.0, 2 / 30), ("rollout", 3.0, 0.02)]
    assert found.busy == {"rollout": 4.0, "train": 3.0, "reward": 0.5}
    assert found.seconds == pytest.approx(5.0)
    assert (found.produce_s, found.train_s, found.other_s) == (3.0, 1.5, 0.5)


@pytest.mark.parametrize("split", [SPLIT, Split("colocated", 4, 4, 2)], ids=["coexisting", "colocated"])
def test_judgements_are_not_told_of_a_part_of_the_nodes(split: Split) -> None:
    judges = {"reward": EngineSums(active_s=1.0, running_s=2.0, tokens=30, requests=6)}
    there, late = book(slots=2, **judges), book(slots=2, **judges)
    part = measure_step([there], entry(), sealed((10, 20), (30,)), split)
    assert (part.judged, part.asked_per_response) == ((), 1.0)
    assert [one.pool for one in part.speed] == ["reward"]  # how fast engines were, the books that are there do say
    whole = measure_step([there, late], entry(), sealed((10, 20), (30,)), split)
    assert (whole.judged, whole.asked_per_response) == ((20.0,) * 3, 4.0)


@pytest.mark.parametrize(
    ("split", "active", "judging", "times"),
    [
        pytest.param(Split("colocated", 4, 4, 2), 9.0, 12.0, 21.0 / 12.0, id="at_once"),
        pytest.param(Split("colocated", 4, 4, 2), 5.0, 7.0, 1.0, id="one_after_the_other"),
        pytest.param(SPLIT, 9.0, 12.0, 1.0, id="slots_of_their_own"),
    ],
)
def test_engines_that_shared_their_slots_are_told_as_fast_as_each_would_have_been_alone(
    split: Split, active: float, judging: float, times: float
) -> None:
    both = book(
        rollout=EngineSums(active_s=active, running_s=2 * active, tokens=100, requests=4),
        reward=EngineSums(active_s=judging, running_s=3 * judging, tokens=100, requests=4),
    )
    found = measure_step([both], entry(), None, split)  # a production of 3 s on 4 slots
    assert [(one.pool, one.running) for one in found.speed] == [("reward", 3.0), ("rollout", 2.0)]
    assert [one.token_s for one in found.speed] == pytest.approx([0.03 * judging / times, 0.02 * active / times])


def test_how_fast_engines_were_is_told_for_each_load_that_they_had() -> None:
    crowd = EngineSums(active_s=2.0, running_s=32.0, tokens=800, requests=16)
    tail = EngineSums(active_s=3.0, running_s=6.0, tokens=300, requests=0)
    moment = EngineSums(active_s=0.1, running_s=0.1, tokens=3, requests=0)
    both = book().model_copy(update={"loads": {"rollout": (moment, tail, crowd)}})
    found = measure_step([both, both], entry(), None, SPLIT)
    assert [(s.running, s.token_s) for s in found.speed] == [(2.0, 0.02), (16.0, 0.04)]


def test_loads_that_a_node_tells_apart_are_told_apart_of_all_nodes() -> None:
    few = EngineSums(active_s=2.0, running_s=7.0, tokens=350, requests=4)
    more = EngineSums(active_s=2.0, running_s=9.0, tokens=300, requests=4)
    books = [book().model_copy(update={"loads": {"rollout": (one,)}}) for one in (few, more, few)]
    found = measure_step(books, entry(), None, SPLIT)
    assert [(s.running, s.token_s) for s in found.speed] == [(3.5, 0.02), (4.5, 0.03)]


@given(st.integers(1, 10**6), st.floats(0, 0.99))
def test_a_load_is_of_all_numbers_of_requests_from_its_least_to_the_next_ones(running: int, more: float) -> None:
    load = load_class(running + more)
    assert least_requests(load) <= running < least_requests(load + 1)


def test_unmeasured_values_are_missing() -> None:
    bare = LogEntry(seq=4, parent=3, kind="train", lineage=0, step=4, world="w", nonce="n")
    found = measure_step([], bare, None, SPLIT)
    assert (found.seconds, found.lengths, found.judged, found.speed, found.busy) == (None, (), (), (), {})


def test_without_the_seal_responses_are_as_long_as_their_mean() -> None:
    found = measure_step([], entry(samples=3.0, response_length=12.5), None, SPLIT)
    assert found.lengths == (12.5, 12.5, 12.5)


def test_judgements_of_groups_that_were_filtered_do_not_make_those_of_others_longer() -> None:
    judges = book(reward=EngineSums(active_s=1.0, running_s=2.0, tokens=120, requests=6))
    found = measure_step([judges], entry(prompts_per_group=2.0), sealed((10, 20), (30,)), SPLIT)
    assert found.judged == (20.0,) * 6


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.floats(1.0, 12.0), st.floats(0.9, 1.5))
def test_filtered_responses_are_as_many_and_as_long_as_is_told(kept: list[int], times: float, longer: float) -> None:
    mean = sum(kept) / len(kept)
    stats = {
        "prompts_per_group": times,
        "response_length_before_filter": mean * (1.0 + (longer - 1.0) * (1 - 1 / times)),
    }
    found = measure_step([], entry(**stats), sealed(*((one,) for one in kept)), SPLIT).lengths
    assert found[: len(kept)] == tuple(map(float, kept))
    assert len(found) == len(kept) + round(len(kept) * (times - 1.0))
    filtered = found[len(kept) :]
    for begin in range(0, len(filtered) - len(kept) + 1, len(kept)):
        assert sum(filtered[begin : begin + len(kept)]) / len(kept) == pytest.approx(mean * longer)


def test_of_seven_filtered_groups_in_ten_the_responses_are_all_there() -> None:
    found = measure_step([], entry(prompts_per_group=10 / 3), sealed(*(((10, 20, 30),) * 3)), SPLIT)
    assert len(found.lengths) == 30
    assert sum(found.lengths) == pytest.approx(600.0, abs=30.0)


def test_where_the_seal_is_gone_filtered_responses_are_there_too() -> None:
    found = measure_step([], entry(samples=4.0, response_length=10.0, prompts_per_group=1.5), None, SPLIT)
    assert found.lengths == (10.0,) * 6


@pytest.mark.parametrize(
    ("requests", "each"),
    [pytest.param(42, 14.0, id="pairwise"), pytest.param(3, 1.0, id="one_each"), pytest.param(0, 1.0, id="unknown")],
)
def test_how_many_questions_a_response_comes_to_is_known(requests: int, each: float) -> None:
    judges = book(reward=EngineSums(active_s=1.0, running_s=2.0, tokens=420, requests=requests))
    found = measure_step([judges], entry(), sealed((10, 20), (30,)), SPLIT)
    assert found.asked_per_response == each
    assert found.judged == (140.0,) * 3


AHEAD = {"staleness": 1.0, "seconds": 5.0, "publish_s": 0.0}


def test_a_batch_that_was_made_ahead_of_its_step_is_not_taken_to_have_been_made_in_no_time() -> None:
    stats = {**AHEAD, "collect_s": 0.02, "exchange_s": 0.25, "train_s": 4.73}
    found = measure_step([], entry(**stats), None, SPLIT)
    assert found.produce_s is None
    assert (found.seconds, found.train_s, found.other_s) == (5.0, 4.73, 0.25)


@pytest.mark.parametrize(
    ("slots", "active", "took"),
    [
        pytest.param(4, 6.0, 3.0, id="by_how_long_engines_had_work"),
        pytest.param(4, 14.0, 5.0, id="never_longer_than_the_step"),
        pytest.param(3, 6.0, None, id="a_node_has_not_booked_it"),
    ],
)
def test_how_long_a_batch_took_that_nobody_waited_for_the_books_tell(
    slots: int, active: float, took: float | None
) -> None:
    stats = {**AHEAD, "collect_s": 0.02, "exchange_s": 0.25, "train_s": 4.73}
    rollout, reward = EngineSums(active_s=active, running_s=active, tokens=90), EngineSums(active_s=2.5, tokens=50)
    there = book(rollout=rollout, reward=reward).model_copy(update={"slots": slots})
    assert measure_step([there], entry(**stats), None, SPLIT).produce_s == took


def test_a_batch_that_ranks_waited_for_was_made_for_as_long_as_the_step_took() -> None:
    stats = {**AHEAD, "publish_s": 1.0, "collect_s": 2.0, "exchange_s": 0.5, "train_s": 1.5}
    found = measure_step([], entry(**stats), None, SPLIT)
    assert (found.produce_s, found.seconds) == (5.0, 5.0)
    assert found.other_s == 0.5, "the weights go out while the next batch is made"


def test_production_time_is_unknown_beside_working_ranks() -> None:
    stats = {**AHEAD, "collect_s": 2.0, "exchange_s": 0.5, "train_s": 2.5}
    found = measure_step([], entry(**stats), None, Split("colocated", 4, 4, 4))
    assert (found.produce_s, found.seconds) == (None, 5.0)


def test_a_node_keeps_its_newest_steps_and_each_once() -> None:
    books = NodeAccounts(node="a")
    for step in range(1, NEWEST_STEPS + 4):
        books = books.plus(book(step)).plus(book(step))
    assert [one.version.step for one in books.steps] == list(range(4, NEWEST_STEPS + 4))
    assert NodeAccounts.decode(books.encode()) == books


def test_node_accounts_are_grouped_by_step() -> None:
    books = {
        "b": NodeAccounts(node="b", steps=(book(4),)),
        "a": NodeAccounts(node="a", steps=(book(4), book(5))),
        "c": NodeAccounts(node="c"),
    }
    found = group_by_version(books)
    assert {version.step: list(of_nodes) for version, of_nodes in found.items()} == {4: ["a", "b"], 5: ["a"]}
    assert found[Version(0, 5)]["a"] == book(5)
