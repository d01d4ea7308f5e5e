"""The stopped clock."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.testing import FakeClock


async def test_time_passes_only_when_it_is_told_to() -> None:
    clock = FakeClock(monotonic=10.0, wall=1_000.0)
    await clock.settle()
    assert (clock.monotonic(), clock.wall()) == (10.0, 1_000.0)
    await clock.advance(2.5)
    assert (clock.monotonic(), clock.wall()) == (12.5, 1_002.5)


async def test_a_sleeper_wakes_at_its_own_moment_and_not_before() -> None:
    clock = FakeClock(monotonic=0.0)
    woke: list[float] = []

    async def sleep() -> None:
        await clock.sleep(3)
        woke.append(clock.monotonic())

    task = asyncio.ensure_future(sleep())
    await clock.advance(2.999)
    assert woke == []
    await clock.advance(100)
    assert woke == [3.0]
    await task


@given(naps=st.lists(st.lists(st.floats(0.001, 100), min_size=1, max_size=5), min_size=1, max_size=6))
def test_all_sleepers_wake_in_the_order_of_their_moments(naps: list[list[float]]) -> None:
    clock = FakeClock(monotonic=0.0)
    woke: list[float] = []

    async def sleep(lengths: list[float]) -> None:
        for length in lengths:
            before = clock.monotonic()
            await clock.sleep(length)
            assert clock.monotonic() == before + length
            woke.append(clock.monotonic())

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for lengths in naps:
                group.create_task(sleep(lengths))
            await clock.advance(1_000)

    asyncio.run(run())
    assert woke == sorted(woke)
    assert len(woke) == sum(len(lengths) for lengths in naps)


async def test_those_who_wake_at_the_same_moment_wake_in_the_order_in_which_they_lay_down() -> None:
    clock = FakeClock()
    woke: list[int] = []

    async def sleep(number: int) -> None:
        await clock.sleep(1)
        woke.append(number)

    tasks = [asyncio.ensure_future(sleep(number)) for number in range(20)]
    await clock.advance(1)
    assert woke == list(range(20))
    await asyncio.gather(*tasks)


async def test_tasks_of_a_wake_up_finish_before_time_advances() -> None:
    clock = FakeClock(monotonic=0.0)
    seen: list[float] = []

    async def chain(depth: int) -> None:
        if depth:
            await asyncio.ensure_future(chain(depth - 1))
        else:
            seen.append(clock.monotonic())

    async def first() -> None:
        await clock.sleep(1)
        await chain(200)

    tasks = [asyncio.ensure_future(first()), asyncio.ensure_future(clock.sleep(1.001))]
    await clock.advance(5)
    assert seen == [1.0]
    await asyncio.gather(*tasks)


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = FakeClock()
    task = asyncio.ensure_future(clock.sleep(1))
    await clock.settle()
    assert clock.next_wake() is not None
    task.cancel()
    await clock.settle()
    assert clock.next_wake() is None


async def test_after_a_jump_sleepers_wake_late() -> None:
    clock = FakeClock(monotonic=0.0)
    woke: list[float] = []

    async def sleep() -> None:
        await clock.sleep(1)
        woke.append(clock.monotonic())

    task = asyncio.ensure_future(sleep())
    await clock.settle()
    clock.jump(60)
    await clock.settle()
    assert woke == []
    await clock.advance(0)
    assert woke == [60.0]
    await task


async def test_running_something_passes_just_the_time_it_takes() -> None:
    clock = FakeClock(monotonic=0.0)

    async def work() -> str:
        await clock.sleep(1_000)
        await clock.sleep(0)
        await clock.sleep(500)
        return "done"

    assert await clock.run(work()) == "done"
    assert clock.monotonic() == 1_500.0


async def test_running_what_nobody_will_ever_wake_is_an_error() -> None:
    clock = FakeClock()
    with pytest.raises(TimeoutError, match="no task sleeps"):
        await clock.run(asyncio.Event().wait())


async def test_running_what_takes_longer_than_allowed_is_an_error() -> None:
    clock = FakeClock()
    with pytest.raises(TimeoutError, match="after 10 s"):
        await clock.run(clock.sleep(11), limit_s=10)
