"""The order in which prompts are started, and the expected outstanding tokens of an engine."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engine_workers import ServingEngine, engines_at
from hypothesis import given
from hypothesis import strategies as st
from peer_bench import RealBench

from controllers.changes import ChangeSignal
from controllers.flow.peer import DuePrompt, LengthEstimates, PromptEntry, sort_longest_first
from controllers.inference.pool import EnginePool
from controllers.inference.requests import EngineConnection
from controllers.inference.rules import LengthExpectation, OutstandingWork
from gcore.rollout.client import SamplingParams
from gcore.testing.flows import Asked
from gcore.types import PromptRef, Sample, Version, VersionSpan

ENTRIES = 10
LONGEST = 1000
refs = st.builds(PromptRef, st.integers(0, 2), st.integers(0, 3), st.integers(0, 9))
turns = st.builds(DuePrompt, st.builds(Version, st.just(0), st.integers(0, 4)), st.floats(0, 1e4))


def entry_of(ref: PromptRef) -> PromptEntry:
    """The same prompts in each data epoch."""
    return PromptEntry("data", (ref.seq + ref.data_epoch) % ENTRIES, LONGEST)


def sample(count: int, reason: Any = "stop") -> Sample:
    return Sample((1,) * count, (0.0,) * count, "a" * count, reason, (VersionSpan(Version(0, 0), 0, count),))


@given(st.dictionaries(refs, turns, max_size=12))
def test_all_that_is_due_is_begun_and_nothing_before_what_was_due_at_an_earlier_head(
    found: dict[PromptRef, DuePrompt],
) -> None:
    order = sort_longest_first(list(found), found)
    assert sorted(order) == sorted(found)
    since = [found[ref].since for ref in order]
    assert since == sorted(since)
    for one, other in itertools.pairwise(order):
        assert found[one].since < found[other].since or found[one].tokens >= found[other].tokens


def test_in_a_later_epoch_the_prompts_whose_responses_were_long_come_first() -> None:
    known = LengthEstimates(entry_of)
    for seq in range(ENTRIES):
        known.note(PromptRef(0, 0, seq), [10 * (seq + 1)] * 4)
    due = [PromptRef(1, 0, seq) for seq in range(ENTRIES)]
    order = known.in_turn(due, Version(0, 1))
    assert [entry_of(ref).number for ref in order] == list(range(ENTRIES))[::-1]


def test_of_prompts_of_which_nothing_is_known_the_stream_says_the_order() -> None:
    known = LengthEstimates(entry_of)
    due = [PromptRef(0, 0, seq) for seq in (3, 1, 2)]
    assert known.in_turn(due, Version(0, 1)) == due
    assert known.tokens(due[0]) == LONGEST


def test_prompts_of_an_earlier_head_go_before_longer_ones_that_came_later() -> None:
    known = LengthEstimates(entry_of)
    for seq, length in enumerate((10, 20, 900)):
        known.note(PromptRef(0, 0, seq), [length] * 8)
    short, longer, longest = (PromptRef(0, 1, seq) for seq in range(3))
    assert known.in_turn([short, longer], Version(0, 1)) == [longer, short]
    assert known.in_turn([short, longest], Version(0, 2)) == [short, longest]


def test_remembered_lengths_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controllers.flow.peer.MOST_PROMPTS", 2)
    known = LengthEstimates(entry_of)
    for seq in range(5):
        known.note(PromptRef(0, 0, seq), [50 + seq] * 2)
    assert list(known._prompts) == [("data", 3), ("data", 4)]


def test_as_responses_grow_and_end_less_is_owed() -> None:
    known = LengthEstimates(entry_of)
    for seq in range(ENTRIES):
        known.note(PromptRef(0, 0, seq), [80, 100, 120, 140])
    owing = OutstandingWork(3, known.of(PromptRef(1, 0, 0)), 1.0)
    first = owing.tokens
    assert 240 < first < 400
    changed = owing.hears(0, sample(60, "abort"))
    assert changed < 0
    assert owing.tokens == first + changed
    for place in range(3):
        owing.hears(place, sample(130))
        owing.hears(place, sample(130))  # told once more: it counts once
    assert owing.tokens == 0.0


def test_expected_tokens_are_reported_without_weighing_engines() -> None:
    known = LengthEstimates(entry_of)
    for seq in range(ENTRIES):
        known.note(PromptRef(0, 0, seq), [80, 100, 120, 140])
    owing = OutstandingWork(3, known.of(PromptRef(1, 0, 0), weighs=False), 1.0)
    assert (owing.tokens, owing.each) == (3.0, 1.0)
    before, count = owing.foreseen()
    assert count == 3
    assert 240 < before < 400
    assert owing.hears(0, sample(90)) == owing.hears(1, sample(60, "abort")) == 0.0
    after, count = owing.foreseen()
    assert count == 2
    assert after < before
    assert OutstandingWork(3, None, 1.0).foreseen() == (0.0, 0)


def test_where_nothing_is_expected_a_response_counts_as_one_of_the_last_request() -> None:
    assert OutstandingWork(4, None, 1.0).tokens == 4.0
    tokens = OutstandingWork(2, LengthExpectation(lambda finished, growing: 50.0 * len(growing)), 1.0)
    assert (tokens.tokens, tokens.each) == (100.0, 50.0)
    assert OutstandingWork(4, None, tokens.each).tokens == 200.0
    assert OutstandingWork(4, None, 1.0).hears(0, sample(3)) == 0.0


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1e6)), max_size=20))
def test_an_engine_that_has_nothing_in_flight_owes_nothing(taken: list[tuple[int, float]]) -> None:
    line = EngineConnection(None, None, "")  # type: ignore[arg-type]
    for samples, owed in taken:
        line.take(samples, owed)
    for samples, owed in reversed(taken):
        line.take(-samples, -owed * 0.9)
    assert (line.in_flight, line.owed) == (0, 0.0)


class Patient(ServingEngine):
    """An engine that answers when it is let."""

    asked: ClassVar[list[tuple[str, str]]] = []
    let: ClassVar[asyncio.Event]

    def __init__(self, url: str, **_: Any) -> None:
        super().__init__(Version(0, 0))
        self.base_url = url

    async def generate_each(self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None) -> Any:
        Patient.asked.append((self.base_url, rid.split("/")[0]))
        await Patient.let.wait()
        return tuple(sample(1) for _ in seeds)


async def test_requests_reach_engines_in_the_order_in_which_they_are_made_and_by_what_is_owed(tmp_path: Any) -> None:
    Patient.asked, Patient.let = [], asyncio.Event()
    engines = EnginePool(ChangeSignal(), timeout_s=1.0, connect=Patient)  # type: ignore[arg-type]
    await engines.aim(engines_at(a="h:1", b="h:2"))
    params = SamplingParams(temperature=1.0, max_new_tokens=4)
    tokens = {"long": 900.0, "half": 400.0, "third": 300.0, "rest": 100.0}
    tasks = []
    for name, owed in tokens.items():

        def left(finished: Any, growing: Any, owed: float = owed) -> float:
            return owed

        made = engines.generate(Version(0, 0), [(1,)], params, (0,), name, None, None, None, LengthExpectation(left))
        tasks.append(asyncio.ensure_future(made))
    await asyncio.sleep(0)
    assert Patient.asked == []  # nobody serves yet
    for name in "ab":
        await engines.publish(name, Version(0, 0), tmp_path)
    for _ in range(5):
        await asyncio.sleep(0)
    assert Patient.asked == [
        ("http://h:1", "long"),
        ("http://h:2", "half"),
        ("http://h:2", "third"),
        ("http://h:2", "rest"),
    ]
    Patient.let.set()
    await asyncio.gather(*tasks)
    await engines.close()


PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(6)]


@pytest.mark.parametrize("order", ["stream", "longest_first"])
async def test_a_peer_hands_out_the_same_prompts_in_either_order(tmp_path: Path, order: str) -> None:
    def long_at_the_end(asked: Asked) -> str:
        return "7" * (1 + int(asked.prompt.fields["answer"]))

    bench = RealBench(PROMPTS, long_at_the_end, tmp_path, flow={"groups_per_step": 6}, rollout={"order": order})
    peer: Any = bench.peer
    step = await anext(peer.steps())
    first = [ref.seq for ref in peer._due_refs()]
    assert first == sorted(first)
    for ref in peer._due_refs():
        step.hand_out(bench.stream.prompt(ref))
        await peer.rollout(bench.stream.prompt(ref))
        step.put_back()
    again = [ref.seq for ref in peer._due_refs()]
    assert sorted(again) == first
