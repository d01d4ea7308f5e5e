"""Emulated engines on one slot: two that compute at the same time run at half speed for as long as both do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore.engines.emulated.device import EmulatedDevice, EmulatedSlot
from gcore.engines.emulated.law import ReplicaTiming, TimingModel
from gcore.engines.emulated.responses import EmulatedResponse
from gcore.engines.request import Finish, GenerationRequest, RequestSampling

QUIET = TimingModel(
    replica_noise=0.0, event_noise=0.0, decode_s=1.0, decode_per_sequence_s=0.0, prefill_tokens_per_s=1e15
)
BOTH = frozenset({"weights", "kv_cache"})


def task(number: int, length: int) -> GenerationRequest:
    return GenerationRequest(number, f"r{number}", (number, 2), RequestSampling(max_new_tokens=length, seed=number))


class Scene:
    """A slot with devices, and when what ended."""

    def __init__(self, devices: int, law: TimingModel = QUIET, rows: int = 8) -> None:
        def whole(task: GenerationRequest, version: str) -> EmulatedResponse:
            count = task.sampling.max_new_tokens
            return EmulatedResponse(tuple(range(count)), (-1.0,) * count, Finish("length"))

        self.slot = EmulatedSlot()
        self.devices = [
            EmulatedDevice(ReplicaTiming(law, f"{i}"), whole, rows=rows, version="0.0") for i in range(devices)
        ]
        self.ended: dict[tuple[int, int], float] = {}
        for device in self.devices:
            self.slot.add(device, 0.0)

    def until(self, now: float) -> None:
        while (at := self.slot.wake_at()) is not None and at <= now:
            self.to(at)
        self.to(now)

    def to(self, now: float) -> None:
        for device, found in self.slot.advance(now):
            for delivery in found:
                self.ended[self.devices.index(device), delivery.number] = now
        self.slot.share(now)

    def submit(self, which: int, one: GenerationRequest, now: float) -> None:
        self.until(now)
        self.devices[which].submit([one], now)
        self.slot.share(now)


def test_of_two_that_compute_at_once_each_goes_half_as_fast_until_one_has_ended() -> None:
    scene = Scene(2)
    scene.submit(0, task(0, 10), 0.0)
    scene.submit(1, task(1, 2), 4.0)  # four of ten are made; then both go at half the pace
    scene.until(100.0)
    assert scene.ended == {(1, 1): pytest.approx(8.0), (0, 0): pytest.approx(12.0)}


def test_those_that_share_lose_as_much_by_it_as_the_law_says() -> None:
    scene = Scene(2, QUIET.model_copy(update={"shared_loss": 0.5}))
    scene.submit(0, task(0, 4), 0.0)
    scene.submit(1, task(1, 2), 0.0)
    scene.until(100.0)
    assert scene.ended == {(1, 1): pytest.approx(6.0), (0, 0): pytest.approx(8.0)}


def test_sleeping_or_paused_engines_slow_down_no_other() -> None:
    scene = Scene(3)
    scene.devices[1].release(BOTH, 0.0)
    scene.devices[2].pause("in_place", 0.0)
    for which in range(3):
        scene.submit(which, task(which, 4), 0.0)
    scene.until(4.5)
    assert scene.ended == {(0, 0): pytest.approx(4.0)}
    scene.devices[1].wake(BOTH, 4.5)
    scene.slot.share(4.5)
    scene.until(100.0)
    assert scene.ended[1, 1] == pytest.approx(8.5)


def test_reading_a_prompt_takes_longer_too_beside_another_that_computes() -> None:
    scene = Scene(2, QUIET.model_copy(update={"prefill_tokens_per_s": 1.0}))
    scene.submit(0, task(0, 1), 0.0)  # two seconds of reading, one token
    scene.submit(1, task(1, 1), 1.0)
    scene.until(100.0)
    # One second of the first is left to read, and one to write: at half the pace until 5. Then the second has the slot for itself.
    assert scene.ended == {(0, 0): pytest.approx(5.0), (1, 1): pytest.approx(6.0)}


def test_removed_engine_leaves_the_slot_to_the_others() -> None:
    scene = Scene(2)
    scene.submit(0, task(0, 10), 0.0)
    scene.submit(1, task(1, 10), 0.0)
    scene.until(4.0)
    scene.slot.remove(scene.devices[1], 4.0)
    scene.until(100.0)
    assert scene.ended == {(0, 0): pytest.approx(12.0)}


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=12),
    looks=st.lists(st.floats(0, 60), max_size=8),
    rows=st.integers(1, 3),
)
def test_when_a_shared_slot_is_looked_at_changes_nothing_and_no_work_is_won_by_sharing(
    arrivals: list[tuple[float, int, int]], looks: list[float], rows: int
) -> None:
    def run(extra: list[float]) -> Scene:
        scene = Scene(3, rows=rows)
        moments = sorted([(at, number) for number, (at, _, _) in enumerate(arrivals)] + [(at, -1) for at in extra])
        for at, number in moments:
            if number < 0:
                scene.until(at)
            else:
                scene.submit(arrivals[number][1], task(number, arrivals[number][2]), at)
        scene.until(1e6)
        return scene

    plain, looked = run([]), run(looks)
    assert plain.ended.keys() == {(which, number) for number, (_, which, _) in enumerate(arrivals)}
    for key, when in plain.ended.items():
        assert looked.ended[key] == pytest.approx(when, abs=1e-4)
        at, _, length = arrivals[key[1]]
        assert when >= at + length - 1e-4


def test_one_over_two_slots_is_held_up_by_who_computes_on_either_and_those_beside_it_by_it_alone() -> None:
    scene = Scene(3)
    for device, on in zip(scene.devices, (("a", "b"), ("a",), ("b",)), strict=True):
        scene.slot.remove(device, 0.0)
        scene.slot.add(device, 0.0, on)
    for which in range(3):
        scene.submit(which, task(which, 4), 0.0)
    scene.until(100.0)
    assert scene.ended == {(which, which): pytest.approx(8.0) for which in range(3)}, "on each slot two had their turns"
    scene.submit(1, task(3, 4), 100.0)
    scene.submit(2, task(4, 4), 100.0)
    scene.until(200.0)
    assert (scene.ended[1, 3], scene.ended[2, 4]) == (pytest.approx(104.0), pytest.approx(104.0)), "slots of their own"
