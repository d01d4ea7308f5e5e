"""The test controls of the store in memory: losing, delaying and ending calls."""

import asyncio
from contextlib import aclosing

import pytest

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.types import Compare, Put, WatchBatch
from gcore.testing import Call, FakeClock, Fate, MemoryCluster, MemoryStore

PUT = [Put("k", b"1")]


class Scripted:
    """A network that treats the calls of one kind as told, and holds replies up."""

    def __init__(self, clock: FakeClock, kind: str, fate: Fate, *, reply_s: float = 0.0) -> None:
        self._clock = clock
        self._kind = kind
        self._fate = fate
        self._reply_s = reply_s
        self.calls: list[Call] = []

    async def request(self, call: Call) -> Fate:
        self.calls.append(call)
        return self._fate if call.kind == self._kind else Fate.DELIVER

    async def reply(self, call: Call) -> None:
        if self._reply_s and call.kind == self._kind:
            await self._clock.sleep(self._reply_s)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def cluster(clock: FakeClock) -> MemoryCluster:
    return MemoryCluster(clock)


@pytest.mark.parametrize(
    ("fate", "made"),
    [
        pytest.param(Fate.LOSE_REQUEST, False, id="lost request"),
        pytest.param(Fate.LOSE_REPLY, True, id="lost reply"),
        pytest.param(Fate.DELIVER_LATE, False, id="late request"),
    ],
)
async def test_an_answer_that_never_came_says_nothing_about_the_write(
    clock: FakeClock, cluster: MemoryCluster, fate: Fate, made: bool
) -> None:
    network = Scripted(clock, "transact", fate)
    store = MemoryStore(cluster, network=network)
    with pytest.raises(StoreUnavailable):
        await store.transact([Compare("k", 0)], PUT)
    assert (await store.get("k") is not None) is made
    assert network.calls[0].writes == tuple(PUT)


async def test_a_late_request_is_done_when_it_arrives(clock: FakeClock, cluster: MemoryCluster) -> None:
    late = MemoryStore(cluster, network=Scripted(clock, "transact", Fate.DELIVER_LATE))
    prompt = MemoryStore(cluster)
    for value in (b"1", b"2"):
        with pytest.raises(StoreUnavailable):
            await late.transact([Compare("k", 0)], [Put("k", value)])
    assert cluster.deliver_late(1) == 1
    kv = await prompt.get("k")
    assert kv is not None
    assert kv.value == b"1"
    assert cluster.deliver_late() == 1  # and loses its compare
    assert await prompt.get("k") == kv
    assert cluster.deliver_late() == 0


async def test_a_late_write_under_a_lease_that_has_ended_is_not_made(clock: FakeClock, cluster: MemoryCluster) -> None:
    late = MemoryStore(cluster, network=Scripted(clock, "transact", Fate.DELIVER_LATE))
    lease = await late.grant(10)
    with pytest.raises(StoreUnavailable):
        await late.transact([], [Put("k", b"1", lease)])
    await clock.advance(11)
    assert cluster.deliver_late() == 1
    assert await late.get("k") is None


async def test_a_lease_ends_when_its_time_is_over(clock: FakeClock, cluster: MemoryCluster) -> None:
    store = MemoryStore(cluster)
    lease = await store.grant(10)
    await store.transact([], [Put("k", b"1", lease)])
    await clock.advance(9)
    assert await store.keep_alive(lease) == 10.0
    await clock.advance(9)
    assert await store.get("k") is not None
    await clock.advance(1)
    assert await store.get("k") is None
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)


async def test_watchers_are_told_of_a_lease_at_the_moment_it_ends(clock: FakeClock, cluster: MemoryCluster) -> None:
    store = MemoryStore(cluster)
    told: list[tuple[float, WatchBatch]] = []

    async def watch() -> None:
        async for batch in store.watch(""):
            told.append((clock.monotonic(), batch))

    task = asyncio.ensure_future(watch())
    await clock.settle()
    long, short = await store.grant(100), await store.grant(10)  # after the watcher went to wait
    await store.transact([], [Put("k", b"1", short), Put("l", b"1", long)])
    start = clock.monotonic()
    await clock.advance(5)
    await store.keep_alive(short)
    await clock.advance(500)
    task.cancel()
    assert [
        (at - start, event.kind, event.kv.key) for at, batch in told for event in batch.events if event.kind == "delete"
    ] == [(15.0, "delete", "k"), (100.0, "delete", "l")]


async def test_a_new_leader_gives_leases_their_full_time_again(clock: FakeClock, cluster: MemoryCluster) -> None:
    store = MemoryStore(cluster)
    lease = await store.grant(10)
    await clock.advance(9)
    cluster.extend_leases()
    await clock.advance(9)
    assert await store.keep_alive(lease) == 10.0


async def test_a_stopped_server_answers_nobody_and_forgets_nothing(clock: FakeClock, cluster: MemoryCluster) -> None:
    stores = [MemoryStore(cluster, name) for name in ("a", "b")]
    lease = await stores[0].grant(10)
    await stores[0].transact([], [Put("k", b"1", lease)])
    async with aclosing(stores[0].watch("")) as batches:
        await anext(batches)
        waiting = asyncio.ensure_future(anext(batches))
        await clock.advance(1)
        cluster.stop()
        for store in stores:
            with pytest.raises(StoreUnavailable):
                await clock.run(store.get("k"))
        await clock.advance(100)
        cluster.start()
        await clock.advance(9)
        assert await stores[1].get("k") is not None
        assert not waiting.done()
        await clock.advance(1)
        assert [event.kind for event in (await clock.run(waiting)).events] == ["delete"]


async def test_a_lease_is_never_shorter_than_etcd_makes_it(cluster: MemoryCluster) -> None:
    store = MemoryStore(cluster)
    assert await store.keep_alive(await store.grant(1)) == 2.0


async def test_a_lease_can_be_ended_at_will(cluster: MemoryCluster) -> None:
    store = MemoryStore(cluster)
    lease = await store.grant(10)
    await store.transact([], [Put("k", b"1", lease)])
    cluster.end_lease(lease)
    cluster.end_lease(lease)
    assert await store.get("k") is None


async def test_a_slow_reply_does_not_delay_the_write(clock: FakeClock, cluster: MemoryCluster) -> None:
    slow = MemoryStore(cluster, network=Scripted(clock, "transact", Fate.DELIVER, reply_s=60))
    task = asyncio.ensure_future(slow.transact([], PUT))
    await clock.advance(1)
    assert await MemoryStore(cluster).get("k") is not None
    assert not task.done()
    assert (await clock.run(task)).won


async def test_one_client_can_be_cut_off_alone(clock: FakeClock, cluster: MemoryCluster) -> None:
    lonely, other = MemoryStore(cluster, "lonely"), MemoryStore(cluster)
    lonely.away = True
    assert (await other.transact([], PUT)).won
    started = clock.monotonic()
    with pytest.raises(StoreUnavailable, match="lonely"):
        await clock.run(lonely.get("k"))
    assert clock.monotonic() - started == 5.0


async def test_a_watch_of_a_client_that_is_cut_off_is_late_and_whole(clock: FakeClock, cluster: MemoryCluster) -> None:
    lonely, other = MemoryStore(cluster, "lonely"), MemoryStore(cluster)
    async with aclosing(lonely.watch("")) as batches:
        await anext(batches)
        lonely.away = True
        for value in (b"1", b"2"):
            await other.transact([], [Put("k", value)])
        waiting = asyncio.ensure_future(anext(batches))
        await clock.advance(60)
        assert not waiting.done()
        lonely.away = False
        first, second = await clock.run(waiting), await clock.run(anext(batches))
    assert [event.kv.value for batch in (first, second) for event in batch.events] == [b"1", b"2"]


async def test_history_is_forgotten_up_to_a_revision(cluster: MemoryCluster) -> None:
    store = MemoryStore(cluster)
    revisions = [(await store.transact([], [Put("k", b"%d" % i)])).revision for i in range(5)]
    cluster.compact(revisions[2])
    assert cluster.events_since(revisions[1], "") is None
    since = cluster.events_since(revisions[2], "")
    assert since is not None
    assert [batch.revision for batch in since] == revisions[3:]
    cluster.compact()
    assert cluster.events_since(revisions[4], "") == ()
    with pytest.raises(ValueError, match="is not between"):
        cluster.compact(revisions[4])


async def test_a_closed_connection_is_not_used_again(cluster: MemoryCluster) -> None:
    store = MemoryStore(cluster)
    await store.close()
    with pytest.raises(RuntimeError, match="closed"):
        await store.get("k")
