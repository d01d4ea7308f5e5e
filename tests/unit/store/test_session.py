"""A lease with keep-alives, on a stopped clock."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gcore.errors import LeaseLost
from gcore.store.session import Session
from gcore.store.types import Put
from gcore.testing import Call, FakeClock, Fate, MemoryCluster, MemoryStore


class SlowNetwork:
    """Takes `request_s` there and `reply_s` back, and notes when renewals were sent."""

    def __init__(self, clock: FakeClock, request_s: float = 0.0, reply_s: float = 0.0) -> None:
        self._clock = clock
        self._request_s = request_s
        self._reply_s = reply_s
        self.renewals: list[float] = []

    async def request(self, call: Call) -> Fate:
        if call.kind == "keep_alive":
            self.renewals.append(self._clock.monotonic())
        await self._clock.sleep(self._request_s)
        return Fate.DELIVER

    async def reply(self, call: Call) -> None:
        await self._clock.sleep(self._reply_s)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(monotonic=0.0)


@pytest.fixture
def network(clock: FakeClock) -> SlowNetwork:
    return SlowNetwork(clock)


@pytest.fixture
def store(clock: FakeClock, network: SlowNetwork) -> MemoryStore:
    return MemoryStore(MemoryCluster(clock), network=network, timeout_s=2.0)


@pytest.fixture
async def session(store: MemoryStore, clock: FakeClock) -> Session:
    return await Session.open(store, clock=clock, ttl=15)


@pytest.fixture
async def running(session: Session) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(session.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_session_outlives_its_first_lease(
    session: Session, running: asyncio.Task[None], store: MemoryStore, clock: FakeClock, network: SlowNetwork
) -> None:
    await store.transact([], [Put("k", b"1", session.lease)])
    await clock.advance(100)
    assert await store.get("k") is not None
    assert session.alive(clock.monotonic())
    assert network.renewals[:3] == [5.0, 10.0, 15.0]


async def test_a_lease_is_valid_from_before_its_renewal_was_sent(clock: FakeClock) -> None:
    store = MemoryStore(MemoryCluster(clock), network=SlowNetwork(clock, request_s=1.0, reply_s=2.0))
    session = await clock.run(Session.open(store, clock=clock, ttl=15))
    assert (clock.monotonic(), session.valid_until) == (3.0, 15.0)
    task = asyncio.ensure_future(session.run())
    await clock.advance(8.0)  # renewed at 8, told at 11
    assert (clock.monotonic(), session.valid_until) == (11.0, 23.0)
    assert session.alive(22.9)
    assert not session.alive(23.0)
    task.cancel()


async def test_while_the_store_is_away_a_session_goes_on_trying(
    session: Session, running: asyncio.Task[None], store: MemoryStore, clock: FakeClock
) -> None:
    store.away = True
    await clock.advance(16)
    assert not session.alive(clock.monotonic())
    assert not running.done()


async def test_a_store_that_comes_back_in_time_finds_the_lease_alive(
    session: Session, running: asyncio.Task[None], store: MemoryStore, clock: FakeClock
) -> None:
    store.away = True
    await clock.advance(12)
    store.away = False
    await clock.advance(3)
    assert session.alive(clock.monotonic())
    assert session.valid_until > 15.0


async def test_an_outage_of_the_store_itself_loses_no_lease(
    session: Session, running: asyncio.Task[None], store: MemoryStore, clock: FakeClock
) -> None:
    await store.transact([], [Put("k", b"1", session.lease)])
    store.cluster.stop()
    await clock.advance(3_600)
    assert not session.alive(clock.monotonic())
    store.cluster.start()
    await clock.advance(60)
    assert session.alive(clock.monotonic())
    assert await store.get("k") is not None


async def test_only_the_store_says_that_a_lease_is_lost(
    session: Session, running: asyncio.Task[None], store: MemoryStore, clock: FakeClock
) -> None:
    store.away = True
    await clock.advance(60)
    assert not session.lost.is_set()
    store.away = False
    await clock.advance(3)
    assert session.lost.is_set()
    with pytest.raises(LeaseLost):
        await running


async def test_a_lost_lease_ends_the_task_group_that_keeps_it(
    session: Session, store: MemoryStore, clock: FakeClock
) -> None:
    async def program() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(session.run())
            await asyncio.Event().wait()

    task = asyncio.ensure_future(program())
    await clock.advance(7)
    store.cluster.end_lease(session.lease)
    await clock.advance(5)
    assert not session.alive(clock.monotonic())
    with pytest.RaisesGroup(LeaseLost):
        await task


async def test_closing_a_session_ends_its_lease_and_its_task(
    session: Session, running: asyncio.Task[None], store: MemoryStore, clock: FakeClock
) -> None:
    await store.transact([], [Put("k", b"1", session.lease)])
    await clock.advance(7)
    await session.close()
    await clock.settle()
    assert await store.get("k") is None
    assert not session.alive(clock.monotonic())
    assert running.done()
    await running
    assert not session.lost.is_set()


async def test_closing_a_session_while_it_is_renewed_is_no_loss(clock: FakeClock) -> None:
    store = MemoryStore(MemoryCluster(clock), network=SlowNetwork(clock, request_s=1.0))
    session = await clock.run(Session.open(store, clock=clock, ttl=15))
    task = asyncio.ensure_future(session.run())
    await clock.advance(5.0)  # the renewal is on its way
    store.cluster.end_lease(session.lease)
    await clock.run(session.close())
    await clock.advance(2.0)
    await task


async def test_closing_a_session_of_a_store_that_is_away_is_no_error(
    session: Session, store: MemoryStore, clock: FakeClock
) -> None:
    store.away = True
    await clock.run(session.close())
    assert not session.alive(clock.monotonic())


async def test_a_process_that_was_stopped_sees_that_its_lease_may_be_over(
    session: Session, running: asyncio.Task[None], clock: FakeClock
) -> None:
    await clock.advance(7)
    clock.jump(3_600)
    assert not session.alive(clock.monotonic())


async def test_the_interval_can_be_chosen(store: MemoryStore, clock: FakeClock, network: SlowNetwork) -> None:
    session = await Session.open(store, clock=clock, ttl=15, interval_s=1.0)
    task = asyncio.ensure_future(session.run())
    await clock.advance(3)
    assert network.renewals == [1.0, 2.0, 3.0]
    task.cancel()
