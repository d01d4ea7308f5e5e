"""The contract of every store: in memory, a real etcd, and the simulated cluster's store (in memory behind simulated messages)."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Protocol
from uuid import uuid4

import pytest
from aetcd import rpc
from simulated_network import STORE, Network, PendingWatches, RemoteStore, Weather
from tcp_proxy import Proxy

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd
from gcore.store.types import MAX_BYTES, Compare, Delete, Put, Store, WatchBatch
from gcore.system.clock import SystemClock
from gcore.testing import MemoryCluster, MemoryStore

TIMEOUT_S = 1.0
LONG_S = 3_600
"""Leases that no test waits for. They must not end during another one: that would make a revision."""


class Rig(Protocol):
    """A store, and what a test does behind its back."""

    store: Store
    """The store client whose connection can be cut."""
    other: Store
    """The store client whose connection stays."""

    async def cut(self) -> None: ...

    async def deafen(self) -> None:
        """What is sent arrives, and nothing comes back."""
        ...

    async def heal(self) -> None: ...

    async def compact(self) -> None:
        """Forget all history up to now."""
        ...


class MemoryRig:
    def __init__(self) -> None:
        self.cluster = MemoryCluster(SystemClock())
        self._memory = MemoryStore(self.cluster, timeout_s=TIMEOUT_S)
        self.store: Store = self._memory
        self.other: Store = MemoryStore(self.cluster)

    async def cut(self) -> None:
        self._memory.away = True

    async def deafen(self) -> None:
        self._memory.deaf = True

    async def heal(self) -> None:
        self._memory.away = self._memory.deaf = False

    async def compact(self) -> None:
        self.cluster.compact()


class EtcdRig:
    def __init__(self, store: EtcdStore, other: EtcdStore, proxy: Proxy) -> None:
        self.store: Store = store
        self.other: Store = other
        self._proxy = proxy
        self._admin = other

    async def cut(self) -> None:
        await self._proxy.cut()

    async def deafen(self) -> None:
        await self._proxy.lose_replies()

    async def heal(self) -> None:
        await self._proxy.heal()

    async def compact(self) -> None:
        revision = (await self.other.list("nothing/")).revision
        await self._admin._caller.call(
            lambda connection, metadata, within: connection.kv.Compact(
                rpc.CompactionRequest(revision=revision, physical=True), metadata=metadata, timeout=within
            ),
            repeatable=False,
        )


class SimulatedRig:
    """The store of simulated controllers: messages to a cluster in memory, by the real clock here."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(SystemClock())
        self._network = Network(asyncio.get_running_loop(), random.Random(0))
        self._network.weather = Weather(typical_s=0.001)
        waiting = PendingWatches(self.cluster)
        cut_off = RemoteStore(self.cluster, self._network, "here", waiting, timeout_s=TIMEOUT_S)
        cut_off.longest_poll_s = TIMEOUT_S
        self.store: Store = cut_off
        self.other: Store = RemoteStore(self.cluster, self._network, "there", waiting)

    async def cut(self) -> None:
        self._network.cut = {("here", STORE), (STORE, "here")}

    async def deafen(self) -> None:
        self._network.cut = {(STORE, "here")}

    async def heal(self) -> None:
        self._network.cut = set()

    async def compact(self) -> None:
        self.cluster.compact()

    async def end_leases(self) -> None:
        """As a server does by itself."""
        while True:
            await asyncio.sleep(0.1)
            self.cluster.end_leases()


@pytest.fixture(params=["memory", "simulated", "etcd"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    if request.param == "memory":
        yield MemoryRig()
        return
    if request.param == "simulated":
        simulated = SimulatedRig()
        ending = asyncio.create_task(simulated.end_leases())
        yield simulated
        ending.cancel()
        return
    server: LocalEtcd = request.getfixturevalue("etcd")
    proxy = await Proxy.start(server.endpoint)
    store = await EtcdStore.connect([proxy.endpoint], clock=SystemClock(), timeout_s=TIMEOUT_S)
    other = await EtcdStore.connect([server.endpoint], clock=SystemClock())
    yield EtcdRig(store, other, proxy)
    await store.close()
    await other.close()
    await proxy.close()


@pytest.fixture
def store(rig: Rig) -> Store:
    return rig.store


@pytest.fixture
def at() -> str:
    """A prefix of the test's own."""
    return f"/test/{uuid4().hex}/"


async def put(store: Store, key: str, value: bytes = b"v", lease: int = 0) -> int:
    result = await store.transact([], [Put(key, value, lease)])
    assert result.won
    return result.revision


async def value(store: Store, key: str) -> bytes | None:
    kv = await store.get(key)
    return kv.value if kv else None


async def following(batches: AsyncIterator[WatchBatch], until: str) -> list[WatchBatch]:
    """Batches up to the one that puts the key `until`."""
    seen = []
    async for batch in batches:
        seen.append(batch)
        if any(event.kv.key == until for event in batch.events):
            return seen
    raise AssertionError("a watch never ends")


# --- transactions


async def test_a_key_that_was_never_written_is_absent(store: Store, at: str) -> None:
    assert await store.get(at + "k") is None


async def test_of_two_who_create_a_key_one_wins(store: Store, at: str) -> None:
    first = await store.transact([Compare(at + "k", 0)], [Put(at + "k", b"1")])
    second = await store.transact([Compare(at + "k", 0)], [Put(at + "k", b"2")])
    assert (first.won, second.won) == (True, False)
    assert await value(store, at + "k") == b"1"


async def test_of_many_who_write_at_once_after_the_same_read_one_wins(rig: Rig, at: str) -> None:
    revision = await put(rig.store, at + "k")
    results = await asyncio.gather(
        *(
            [rig.store, rig.other][i % 2].transact([Compare(at + "k", revision)], [Put(at + "k", b"%d" % i)])
            for i in range(10)
        )
    )
    assert [result.won for result in results].count(True) == 1


async def test_a_write_that_compares_the_revision_it_read_wins(store: Store, at: str) -> None:
    revision = await put(store, at + "k", b"1")
    assert (await store.transact([Compare(at + "k", revision)], [Put(at + "k", b"2")])).won
    assert await value(store, at + "k") == b"2"


async def test_a_transaction_that_loses_one_compare_writes_nothing(store: Store, at: str) -> None:
    old = await put(store, at + "k", b"1")
    await put(store, at + "k", b"2")
    before = await store.list(at)
    result = await store.transact(
        [Compare(at + "other", 0), Compare(at + "k", old)], [Put(at + "other", b"x"), Delete(at + "k")]
    )
    assert not result.won
    assert (await store.list(at)).kvs == before.kvs


async def test_a_deleted_key_compares_as_absent(store: Store, at: str) -> None:
    revision = await put(store, at + "k")
    await store.transact([], [Delete(at + "k")])
    assert not (await store.transact([Compare(at + "k", revision)], [Put(at + "k", b"1")])).won
    assert (await store.transact([Compare(at + "k", 0)], [Put(at + "k", b"1")])).won


async def test_the_writes_of_a_transaction_share_its_revision(store: Store, at: str) -> None:
    await put(store, at + "b")
    result = await store.transact([], [Put(at + "a", b"1"), Put(at + "b", b"2")])
    listing = await store.list(at)
    assert [kv.mod_revision for kv in listing.kvs] == [result.revision] * 2
    assert listing.revision >= result.revision


async def test_a_key_tells_its_creation_and_how_often_it_was_written(store: Store, at: str) -> None:
    first = await put(store, at + "k")
    last = await put(store, at + "k")
    kv = await store.get(at + "k")
    assert kv is not None
    assert (kv.create_revision, kv.mod_revision, kv.version, kv.lease) == (first, last, 2, 0)
    await store.transact([], [Delete(at + "k")])
    again = await put(store, at + "k")
    kv = await store.get(at + "k")
    assert kv is not None
    assert (kv.create_revision, kv.version) == (again, 1)


async def test_a_transaction_that_changes_nothing_makes_no_revision(store: Store, at: str) -> None:
    revision = await put(store, at + "k")
    for writes in ([], [Delete(at + "nothing")], [Delete(at + "nothing/", prefix=True)]):
        result = await store.transact([Compare(at + "k", revision)], writes)
        assert result.won
        assert result.revision == revision


async def test_a_transaction_that_lost_tells_a_revision_that_is_not_older_than_what_beat_it(
    store: Store, at: str
) -> None:
    revision = await put(store, at + "k")
    assert (await store.transact([Compare(at + "k", 0)], [Put(at + "k", b"")])).revision >= revision


async def test_deleting_a_prefix_leaves_its_neighbours(store: Store, at: str) -> None:
    for key in ("a", "a.", "a/", "a/b", "a/b/c", "a0", "b"):
        await put(store, at + key)
    await store.transact([], [Delete(at + "a/", prefix=True)])
    assert [kv.key.removeprefix(at) for kv in (await store.list(at)).kvs] == ["a", "a.", "a0", "b"]


async def test_an_empty_value_is_a_value(store: Store, at: str) -> None:
    await put(store, at + "k", b"")
    assert await value(store, at + "k") == b""


# --- listings


async def test_a_listing_is_ascending_and_keeps_to_its_prefix(store: Store, at: str) -> None:
    for key in ("b", "é", "a", "aa", "ü", "Z", "日本", "z"):
        await put(store, at + "in/" + key)
    await put(store, at + "in")
    await put(store, at + "in0")
    keys = [kv.key.removeprefix(at + "in/") for kv in (await store.list(at + "in/")).kvs]
    assert keys == ["Z", "a", "aa", "b", "z", "é", "ü", "日本"]


async def test_the_newest_keys_come_first_by_when_they_were_created_and_in_pages(store: Store, at: str) -> None:
    for name in ("b", "d", "a", "c", "e"):
        await put(store, at + name)
    await put(store, at + "b")  # written again, and not created
    await put(store, at.rstrip("/") + "-beside")
    first = await store.newest(at, 2)
    assert [kv.key.removeprefix(at) for kv in first.kvs] == ["e", "c"]
    second = await store.newest(at, 2, first.kvs[-1].create_revision)
    assert [kv.key.removeprefix(at) for kv in second.kvs] == ["a", "d"]
    last = await store.newest(at, 2, second.kvs[-1].create_revision)
    assert [kv.key.removeprefix(at) for kv in last.kvs] == ["b"]
    assert (await store.newest(at, 2, last.kvs[-1].create_revision)).kvs == ()
    assert (await store.newest(at, 2, 1)).kvs == ()


async def test_the_first_keys_of_a_range_are_found_from_any_key_on(store: Store, at: str) -> None:
    for name in ("a/1", "a/2", "a/3", "b/1", "é", "c"):
        await put(store, at + name)

    async def names(first: str, behind: str, limit: int) -> list[str]:
        return [kv.key.removeprefix(at) for kv in (await store.between(at + first, at + behind, limit)).kvs]

    assert await names("a/", "a0", 2) == ["a/1", "a/2"]
    assert await names("a/2\0", "a0", 2) == ["a/3"]
    assert await names("a/2", "b/1", 9) == ["a/2", "a/3"]
    assert await names("a0", "\U0010ffff", 9) == ["b/1", "c", "é"]
    assert await names("b", "a", 9) == []
    assert await names("a", "a", 9) == []


async def test_a_listing_of_many_keys_is_whole(store: Store, at: str) -> None:
    names = [f"{at}{i:05d}" for i in range(1_200)]
    for start in range(0, len(names), 100):
        await store.transact([], [Put(name, b"v") for name in names[start : start + 100]])
    assert [kv.key for kv in (await store.list(at)).kvs] == names


async def test_a_listing_may_be_larger_than_a_grpc_message_usually_is(store: Store, at: str) -> None:
    for i in range(6):
        await put(store, f"{at}{i}", bytes([i]) * (1 << 20))
    assert [kv.value[0] for kv in (await store.list(at)).kvs] == list(range(6))


async def test_a_listing_is_of_one_revision_while_others_write(rig: Rig, at: str) -> None:
    names = [f"{at}{i:05d}" for i in range(1_000)]
    for start in range(0, len(names), 100):
        await rig.store.transact([], [Put(name, b"0") for name in names[start : start + 100]])
    both = (names[0], names[-1])  # written together, and on different pages

    async def write() -> None:
        for i in range(50):
            await rig.other.transact([], [Put(name, b"%d" % i) for name in both])

    writing = asyncio.ensure_future(write())
    while not writing.done():
        found = (await rig.store.list(at)).by_key()
        assert found[both[0]].value == found[both[1]].value
    await writing


# --- leases


async def test_the_end_of_a_lease_deletes_its_keys_at_once(rig: Rig, at: str) -> None:
    lease = await rig.store.grant(LONG_S)
    await put(rig.store, at + "a", lease=lease)
    await put(rig.store, at + "b", lease=lease)
    await put(rig.store, at + "c")
    async with aclosing(rig.other.watch(at)) as batches:
        await anext(batches)
        await rig.store.revoke(lease)
        batch = await anext(batches)
    assert [(event.kind, event.kv.key) for event in batch.events] == [("delete", at + "a"), ("delete", at + "b")]
    assert [kv.key for kv in (await rig.store.list(at)).kvs] == [at + "c"]


async def test_a_lease_that_nobody_renews_ends_by_itself(rig: Rig, at: str) -> None:
    lease = await rig.store.grant(2)
    await put(rig.store, at + "k", lease=lease)
    async with aclosing(rig.store.watch(at)) as batches:
        await anext(batches)
        batch = await anext(batches)
    assert [event.kind for event in batch.events] == ["delete"]
    with pytest.raises(LeaseLost):
        await rig.store.keep_alive(lease)


async def test_a_renewed_lease_has_its_full_time(store: Store) -> None:
    lease = await store.grant(LONG_S)
    assert await store.keep_alive(lease) == float(LONG_S)


async def test_a_put_under_an_ended_lease_fails_the_whole_transaction(store: Store, at: str) -> None:
    lease = await store.grant(LONG_S)
    await store.revoke(lease)
    with pytest.raises(LeaseLost):
        await store.transact([], [Put(at + "a", b"1"), Put(at + "b", b"1", lease)])
    assert (await store.list(at)).kvs == ()


async def test_a_lost_compare_is_told_before_an_ended_lease(store: Store, at: str) -> None:
    lease = await store.grant(LONG_S)
    await store.revoke(lease)
    assert not (await store.transact([Compare(at + "k", 5)], [Put(at + "k", b"1", lease)])).won


async def test_an_ended_lease_cannot_be_renewed_and_may_be_revoked_again(store: Store) -> None:
    lease = await store.grant(LONG_S)
    await store.revoke(lease)
    await store.revoke(lease)
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)


async def test_a_key_belongs_to_the_lease_of_its_last_write(store: Store, at: str) -> None:
    first, second = await store.grant(LONG_S), await store.grant(LONG_S)
    assert first != second
    for key in ("moved", "freed", "kept"):
        await put(store, at + key, lease=first)
    await put(store, at + "moved", lease=second)
    await put(store, at + "freed")
    await store.revoke(first)
    kept = {kv.key: kv.lease for kv in (await store.list(at)).kvs}
    assert kept == {at + "moved": second, at + "freed": 0}


# --- watches


async def test_a_watch_begins_with_everything_there_is(store: Store, at: str) -> None:
    await put(store, at + "a", b"1")
    await put(store, at + "b", b"2")
    async with aclosing(store.watch(at)) as batches:
        first = await anext(batches)
    assert first.reset
    assert [(event.kind, event.kv.key, event.kv.value) for event in first.events] == [
        ("put", at + "a", b"1"),
        ("put", at + "b", b"2"),
    ]


async def test_a_watch_of_nothing_begins_with_an_empty_batch(store: Store, at: str) -> None:
    async with aclosing(store.watch(at)) as batches:
        first = await anext(batches)
    assert first.reset
    assert first.events == ()


async def test_a_watch_tells_changes_in_order_and_only_its_own(rig: Rig, at: str) -> None:
    async with aclosing(rig.store.watch(at + "in/")) as batches:
        await anext(batches)
        await put(rig.other, at + "in/a", b"1")
        await put(rig.other, at + "out", b"1")
        both = await rig.other.transact([], [Put(at + "in/b", b"2"), Delete(at + "in/a"), Put(at + "in/c", b"3")])
        last = await put(rig.other, at + "in/end")
        seen = await following(batches, at + "in/end")
    events = [event for batch in seen for event in batch.events]
    assert [(event.kind, event.kv.key.removeprefix(at), event.kv.value) for event in events] == [
        ("put", "in/a", b"1"),
        ("put", "in/b", b"2"),
        ("delete", "in/a", b""),
        ("put", "in/c", b"3"),
        ("put", "in/end", b"v"),
    ]
    assert [event.kv.mod_revision for event in events[1:4]] == [both.revision] * 3
    assert not any(batch.reset for batch in seen)
    assert seen[-1].revision == last
    for batch in seen:
        assert batch.revision == max(event.kv.mod_revision for event in batch.events)


async def test_a_transaction_is_told_in_one_batch(rig: Rig, at: str) -> None:
    async with aclosing(rig.store.watch(at)) as batches:
        await anext(batches)
        # Larger than what etcd puts into one message of its stream: it arrives there in fragments.
        await rig.other.transact([], [Put(f"{at}{i:03d}", bytes(10_000)) for i in range(128)])
        batch = await anext(batches)
    assert len(batch.events) == 128


async def test_a_deletion_tells_its_revision(store: Store, at: str) -> None:
    await put(store, at + "k", b"1")
    async with aclosing(store.watch(at)) as batches:
        await anext(batches)
        result = await store.transact([], [Delete(at + "k")])
        batch = await anext(batches)
    (event,) = batch.events
    assert (event.kind, event.kv.value, event.kv.mod_revision) == ("delete", b"", result.revision)


async def test_nothing_is_lost_between_the_beginning_of_a_watch_and_its_changes(rig: Rig, at: str) -> None:
    async def write() -> None:
        for i in range(100):
            await put(rig.other, at + "counter", b"%d" % i)

    writing = asyncio.ensure_future(write())
    values: list[int] = []
    async with aclosing(rig.store.watch(at)) as batches:
        async for batch in batches:
            values += [int(event.kv.value) for event in batch.events]
            if values and values[-1] == 99:
                break
    await writing
    assert values == list(range(values[0], 100))


async def test_a_watch_that_was_cut_off_goes_on_where_it_was(rig: Rig, at: str) -> None:
    async with aclosing(rig.store.watch(at)) as batches:
        await anext(batches)
        await put(rig.other, at + "k", b"1")
        await anext(batches)
        await rig.cut()
        await put(rig.other, at + "k", b"2")
        await put(rig.other, at + "k", b"3")
        await rig.other.transact([], [Delete(at + "k")])
        await rig.heal()
        await put(rig.other, at + "end")
        seen = await following(batches, at + "end")
    events = [(event.kind, event.kv.value) for batch in seen for event in batch.events]
    assert events == [("put", b"2"), ("put", b"3"), ("delete", b""), ("put", b"v")]
    assert not any(batch.reset for batch in seen)


async def test_a_watch_whose_history_is_gone_begins_again(rig: Rig, at: str) -> None:
    await put(rig.other, at + "gone")
    async with aclosing(rig.store.watch(at)) as batches:
        await anext(batches)
        await rig.cut()
        await rig.other.transact([], [Delete(at + "gone")])
        await put(rig.other, at + "k", b"2")
        revision = await put(rig.other, at + "k", b"3")
        await rig.compact()
        await rig.heal()
        again = await anext(batches)
        await put(rig.other, at + "end")
        after = await anext(batches)
    assert again.reset
    assert again.revision >= revision
    assert [(event.kind, event.kv.key, event.kv.value) for event in again.events] == [("put", at + "k", b"3")]
    assert not after.reset


async def test_a_watch_that_heard_nothing_while_history_was_forgotten_lists_again(rig: Rig, at: str) -> None:
    """Cut off in one direction only, and with keys that came and went meanwhile."""
    await put(rig.other, at + "gone")
    async with aclosing(rig.store.watch(at)) as batches:
        await anext(batches)
        await rig.deafen()
        await rig.other.transact([], [Delete(at + "gone")])
        await put(rig.other, at + "came and went")
        await rig.other.transact([], [Delete(at + "came and went")])
        await put(rig.other, at + "stays")
        await rig.compact()
        await rig.heal()
        again = await anext(batches)
        revision = await put(rig.other, at + "end")
        after = await anext(batches)
    assert again.reset
    assert [event.kv.key for event in again.events] == [at + "stays"]
    assert not after.reset
    assert after.revision == revision


async def test_a_watch_to_which_nothing_comes_back_misses_nothing(rig: Rig, at: str) -> None:
    async with aclosing(rig.store.watch(at)) as batches:
        await anext(batches)
        await rig.deafen()
        await put(rig.other, at + "k", b"1")
        await put(rig.other, at + "k", b"2")
        await rig.heal()
        await put(rig.other, at + "end")
        seen = await following(batches, at + "end")
    assert [event.kv.value for batch in seen for event in batch.events] == [b"1", b"2", b"v"]


async def test_write_without_a_reply_takes_effect_and_its_outcome_is_unknown(rig: Rig, at: str) -> None:
    revision = await put(rig.store, at + "k", b"1")
    await rig.deafen()
    with pytest.raises(StoreUnavailable):
        await rig.store.transact([Compare(at + "k", revision)], [Put(at + "k", b"2")])
    assert await value(rig.other, at + "k") == b"2"
    await rig.heal()
    assert await value(rig.store, at + "k") == b"2"
    assert not (await rig.store.transact([Compare(at + "k", revision)], [Put(at + "k", b"3")])).won
    assert await value(rig.other, at + "k") == b"2"


async def test_a_lease_ends_while_its_holder_is_cut_off_and_the_holder_finds_out(rig: Rig, at: str) -> None:
    lease = await rig.store.grant(2)
    await put(rig.store, at + "k", lease=lease)
    async with aclosing(rig.other.watch(at)) as batches:
        await anext(batches)
        await rig.cut()
        assert [event.kind for event in (await anext(batches)).events] == ["delete"]
    await rig.heal()
    with pytest.raises(LeaseLost):
        await rig.store.keep_alive(lease)
    with pytest.raises(LeaseLost):
        await rig.store.transact([], [Put(at + "k", b"late", lease)])
    assert await rig.store.get(at + "k") is None


async def test_compaction_does_not_disturb_a_watch_that_follows(rig: Rig, at: str) -> None:
    async with aclosing(rig.store.watch(at)) as batches:
        await anext(batches)
        await put(rig.other, at + "a")
        await anext(batches)
        await rig.compact()
        await put(rig.other, at + "b")
        batch = await anext(batches)
    assert not batch.reset
    assert [event.kv.key for event in batch.events] == [at + "b"]


async def test_a_watch_that_begins_while_the_store_is_away_waits_for_it(rig: Rig, at: str) -> None:
    await put(rig.other, at + "k")
    await rig.cut()
    async with aclosing(rig.store.watch(at)) as batches:
        first = asyncio.ensure_future(anext(batches))
        with pytest.raises(StoreUnavailable):  # longer than any call takes
            await rig.store.get(at + "k")
        assert not first.done()
        await rig.heal()
        assert [event.kv.key for event in (await first).events] == [at + "k"]


# --- limits, and a store that is away


@pytest.mark.parametrize(
    ("compares", "writes", "words"),
    [
        pytest.param(129, 0, "128 compares, not 129", id="compares"),
        pytest.param(0, 129, "128 writes, not 129", id="writes"),
    ],
)
async def test_too_many_operations_are_refused(store: Store, at: str, compares: int, writes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        await store.transact(
            [Compare(f"{at}{i}", 0) for i in range(compares)], [Put(f"{at}{i}", b"") for i in range(writes)]
        )


async def test_as_many_operations_as_are_allowed_are_made(store: Store, at: str) -> None:
    result = await store.transact(
        [Compare(f"{at}{i}", 0) for i in range(128)], [Put(f"{at}{i}", b"") for i in range(128)]
    )
    assert result.won
    assert len((await store.list(at)).kvs) == 128


async def test_a_transaction_of_more_than_a_megabyte_and_a_half_is_refused(store: Store, at: str) -> None:
    with pytest.raises(ValueError, match="bytes, not"):
        await store.transact([], [Put(at + "k", bytes(MAX_BYTES))])


async def test_a_transaction_of_nearly_a_megabyte_and_a_half_is_made(store: Store, at: str) -> None:
    big = bytes(MAX_BYTES - 1_024)
    assert (await store.transact([], [Put(at + "k", big)])).won
    assert await value(store, at + "k") == big


@pytest.mark.parametrize(
    "writes",
    [
        pytest.param([Put("/t/k", b"1"), Put("/t/k", b"2")], id="put twice"),
        pytest.param([Put("/t/k", b"1"), Delete("/t/k")], id="put and deleted"),
        pytest.param([Delete("/t/", prefix=True), Put("/t/k", b"1")], id="put under a deleted prefix"),
        pytest.param([Put("", b"1")], id="put without a key"),
        pytest.param([Delete("")], id="delete without a key"),
    ],
)
async def test_writes_that_contradict_each_other_are_refused(store: Store, writes: list[Put | Delete]) -> None:
    with pytest.raises(ValueError, match=r"transaction puts|needs a key"):
        await store.transact([], writes)


async def test_deletions_may_overlap(store: Store, at: str) -> None:
    await put(store, at + "a/b")
    result = await store.transact([], [Delete(at + "a/b"), Delete(at + "a/", prefix=True), Delete(at, prefix=True)])
    assert result.won
    assert (await store.list(at)).kvs == ()


async def test_every_call_to_a_store_that_is_away_ends(rig: Rig, at: str) -> None:
    lease = await rig.store.grant(LONG_S)
    await rig.cut()
    calls = (
        rig.store.get(at + "k"),
        rig.store.list(at),
        rig.store.transact([], [Put(at + "k", b"1")]),
        rig.store.grant(LONG_S),
        rig.store.keep_alive(lease),
        rig.store.revoke(lease),
    )
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [result for result in results if not isinstance(result, StoreUnavailable)] == []
    await rig.heal()
    assert await rig.store.get(at + "k") is None  # it had never been sent
    assert await rig.store.keep_alive(lease) == float(LONG_S)
