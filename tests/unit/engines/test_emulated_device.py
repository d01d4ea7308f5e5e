"""The emulated engine in time: every sample ends at its computed time, whatever else starts or ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore.engines.emulated.device import EmulatedDevice
from gcore.engines.emulated.law import ReplicaTiming, TimingModel
from gcore.engines.emulated.responses import EmulatedResponse
from gcore.engines.request import Finish, GenerationRequest, RequestOutput, RequestSampling

QUIET = TimingModel(
    replica_noise=0.0, event_noise=0.0, decode_s=1.0, decode_per_sequence_s=0.0, prefill_tokens_per_s=1e15
)


def task(number: int, length: int, prompt: tuple[int, ...] = (1, 2)) -> GenerationRequest:
    return GenerationRequest(number, f"r{number}", prompt, RequestSampling(max_new_tokens=length, seed=number))


def whole(task: GenerationRequest, version: str) -> EmulatedResponse:
    count = task.sampling.max_new_tokens
    return EmulatedResponse(tuple(range(count)), (-1.0,) * count, Finish("length"))


def device(
    law: TimingModel = QUIET, rows: int = 8, respond: Callable[[GenerationRequest, str], EmulatedResponse] = whole
) -> EmulatedDevice:
    return EmulatedDevice(ReplicaTiming(law, "one"), respond, rows=rows, version="0.0")


def run(one: EmulatedDevice, until: float) -> list[tuple[float, RequestOutput]]:
    """Everything that ends until then, and when."""
    ended = []
    while (at := one.wake_at()) is not None and at <= until:
        found = one.advance(at)
        assert found, "an alarm that brings nothing would ring for ever"
        ended += [(at, delivery) for delivery in found]
    one.advance(until)
    return ended


def test_a_sample_takes_a_decode_step_for_each_token() -> None:
    one = device()
    one.submit([task(0, 5), task(1, 3)], 10.0)
    assert [(round(at, 6), d.number, len(d.tokens)) for at, d in run(one, 100.0)] == [(13.0, 1, 3), (15.0, 0, 5)]


def test_more_sequences_make_a_step_longer_from_when_they_join_to_when_they_end() -> None:
    one = device(QUIET.model_copy(update={"decode_per_sequence_s": 1.0}))
    one.submit([task(0, 4)], 0.0)
    one.submit([task(1, 1)], 2.0)  # two of four are made; the third takes twice as long
    assert [(round(at, 6), d.number) for at, d in run(one, 100.0)] == [(4.0, 1), (5.0, 0)]


def test_sample_without_a_row_waits() -> None:
    one = device(rows=1)
    one.submit([task(0, 2), task(1, 2)], 0.0)
    assert (one.running, one.waiting) == (1, 1)
    assert [(round(at, 6), d.number) for at, d in run(one, 100.0)] == [(2.0, 0), (4.0, 1)]


def test_a_prompt_is_read_once_for_the_samples_that_share_it_and_holds_the_steps_up() -> None:
    one = device(QUIET.model_copy(update={"prefill_tokens_per_s": 2.0}))
    one.submit([task(0, 1), task(1, 1)], 0.0)
    ended = run(one, 100.0)
    assert [round(at, 6) for at, _ in ended] == [2.0, 2.0]
    assert sorted(d.cached_tokens for _, d in ended) == [0, 1]


def test_nothing_is_made_during_a_pause_and_what_is_taken_back_keeps_its_tokens() -> None:
    one = device()
    one.submit([task(0, 4)], 0.0)
    one.pause("retract", 2.5)
    assert (one.running, one.waiting, one.wake_at()) == (0, 1, None)
    one.call_weights("0.1", 50.0)
    one.resume(100.0)
    ((at, delivery),) = run(one, 200.0)
    assert round(at, 5) == 102.0  # two were whole, two are left
    assert [(s.version, s.start, s.end) for s in delivery.spans] == [("0.0", 0, 2), ("0.1", 2, 4)]
    assert delivery.retractions == 1


def test_weights_that_change_in_place_begin_with_the_next_token() -> None:
    one = device()
    one.submit([task(0, 3)], 0.0)
    one.pause("in_place", 1.0)
    one.call_weights("0.1", 5.0)
    one.resume(5.0)
    ((at, delivery),) = run(one, 100.0)
    assert (round(at, 6), [(s.version, s.start, s.end) for s in delivery.spans]) == (
        7.0,
        [("0.0", 0, 1), ("0.1", 1, 3)],
    )


def test_an_aborted_sample_has_the_tokens_made_so_far() -> None:
    one = device(rows=1)
    one.submit([task(0, 9), task(1, 9)], 0.0)
    ended = {d.number: d for d in one.abort(lambda _: True, 3.5)}
    assert (ended[0].tokens, ended[1].tokens) == ((0, 1, 2), ())
    assert {d.ending.kind for d in ended.values() if d.ending} == {"abort"}
    assert one.wake_at() is None


def test_retracted_sample_does_not_end_at_its_old_time() -> None:
    one = device()
    one.submit([task(0, 10)], 0.0)
    for at in (1.0, 2.0, 3.0):
        one.pause("retract", at)
        one.resume(at)
    assert [round(at, 5) for at, _ in run(one, 100.0)] == [10.0]


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 12)), min_size=1, max_size=12),
    rows=st.integers(1, 4),
    looks=st.lists(st.floats(0, 60), max_size=8),
    noise=st.sampled_from([0.0, 0.3]),
)
def test_when_it_is_looked_at_changes_nothing_and_everything_ends_once_and_whole(
    arrivals: list[tuple[float, int]], rows: int, looks: list[float], noise: float
) -> None:
    law = QUIET.model_copy(update={"decode_per_sequence_s": 0.5, "event_noise": noise})

    def ends(extra: list[float]) -> dict[int, tuple[float, int]]:
        one = device(law, rows)
        found: dict[int, tuple[float, int]] = {}
        number = {id(a): i for i, a in enumerate(arrivals)}
        moments = sorted([(a[0], 0, number[id(a)]) for a in arrivals] + [(at, 1, -1) for at in extra])
        for at, _, index in moments:
            for when, delivery in run(one, at):
                assert delivery.number not in found
                found[delivery.number] = (round(when, 4), len(delivery.tokens))
            if index >= 0:
                one.submit([task(index, arrivals[index][1], (index,))], at)
        found |= {d.number: (round(when, 4), len(d.tokens)) for when, d in run(one, 1e9)}
        return found

    plain = ends([])
    assert {n: length for n, (_, length) in plain.items()} == {i: a[1] for i, a in enumerate(arrivals)}
    looked = ends(looks)
    assert looked.keys() == plain.keys()
    for n, (when, length) in plain.items():
        assert looked[n] == (pytest.approx(when, abs=1e-2), length)


def test_tokens_are_counted_as_they_are_made_and_time_as_it_passes() -> None:
    one = device(rows=2)
    one.sums(0.0)
    one.submit([task(0, 10), task(1, 4), task(2, 4)], 2.0)
    assert one.tokens(2.0 + 3.5) == 6
    one.pause("retract", 6.0)
    assert one.tokens(9.0) == one.tokens(6.0) == 8
    one.resume(9.0)
    run(one, 100.0)
    assert one.tokens(100.0) == 18
    sums = one.sums(100.0)
    assert sums.busy_s + sums.idle_s + sums.paused_s + sums.asleep_s == pytest.approx(100.0)
    assert sums.paused_s == pytest.approx(3.0)
