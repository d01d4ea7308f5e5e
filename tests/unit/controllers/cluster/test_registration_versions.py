"""The switch to the next schema version: its writer, and the state of the store at that time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.cluster.registration import raise_version
from gcore.errors import StoreUnavailable
from gcore.ledger.records.job import NodeRecord
from gcore.schema import NEWEST_VERSION, set_written_version, written_version
from gcore.store import keys
from gcore.store.types import Compare, Delete, Put, TxnResult
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

OLDER = NEWEST_VERSION - 1
NEWEST = str(NEWEST_VERSION).encode()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    set_written_version(NEWEST_VERSION)


def registered(name: str, reads: int | None) -> tuple[Put, ...]:
    node = NodeRecord(name=name, incarnation=f"{name}.a", address="h:1", slots=("cpu:0",), pid=1)
    said = () if reads is None else (Put(keys.readable_version(name), str(reads).encode()),)
    return (Put(keys.node(name), node.encode()), *said)


class Daemon:
    """What speaks, of node `me`."""

    def __init__(self, memory: MemoryCluster, clock: FakeClock, store: MemoryStore | None = None) -> None:
        self.store = store if store is not None else MemoryStore(memory)
        self.clock = clock
        self.changes = ChangeSignal()
        self.cluster = ClusterMirror(self.store, self.changes)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(watch()) for watch in self.cluster.watches.values()]
        async with AsyncExitStack() as stack:
            for task in tasks:
                stack.callback(task.cancel)
            await self.changes.until(lambda: self.cluster.is_complete)
            yield

    async def speaks(self, after: int = 0) -> int:
        return await raise_version(after, "me", self.cluster, self.store, self.changes, self.clock)


@pytest.fixture
def memory() -> MemoryCluster:
    return MemoryCluster(FakeClock())


async def test_the_store_says_first_what_is_spoken_then(memory: MemoryCluster) -> None:
    daemon = Daemon(memory, FakeClock())
    memory.transact((), registered("other", NEWEST_VERSION))
    set_written_version(OLDER)

    class Looks(MemoryStore):
        async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            assert written_version() == OLDER
            return await super().transact(compares, writes)

    daemon.store = Looks(memory)
    async with daemon.listening():
        assert await daemon.speaks() == written_version() == NEWEST_VERSION
    told = await daemon.store.get(keys.WRITTEN)
    assert told is not None
    assert (told.value, told.lease) == (NEWEST, 0)


async def test_beside_an_older_node_that_came_back_what_was_written_before_is_spoken(memory: MemoryCluster) -> None:
    memory.transact((), (*registered("old", None), Put(keys.WRITTEN, NEWEST)))
    daemon = Daemon(memory, FakeClock())
    async with daemon.listening():
        assert await daemon.speaks() == NEWEST_VERSION


async def test_beside_an_older_node_the_older_version_until_it_has_gone(memory: MemoryCluster) -> None:
    memory.transact((), registered("old", None))
    daemon = Daemon(memory, FakeClock())
    async with daemon.listening():
        assert await daemon.speaks() == OLDER
        told = await daemon.store.get(keys.WRITTEN)
        assert told is not None
        assert told.value == str(OLDER).encode()
        memory.transact((), (Delete(keys.node("old")),))
        assert await daemon.speaks(OLDER) == NEWEST_VERSION


async def test_daemon_follows_another_that_writes_the_next_version(memory: MemoryCluster) -> None:
    """It has seen the older node go, and this one has not, for that came back at once."""
    memory.transact((), registered("old", OLDER))
    daemon = Daemon(memory, FakeClock())
    async with daemon.listening():
        assert await daemon.speaks() == OLDER
        memory.transact((), (Put(keys.WRITTEN, NEWEST),))
        assert await daemon.speaks(OLDER) == NEWEST_VERSION


async def test_a_store_that_does_not_answer_is_asked_again_and_nothing_newer_is_spoken_meanwhile(
    memory: MemoryCluster,
) -> None:
    clock = FakeClock()

    class Away(MemoryStore):
        tries = 0

        async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            self.tries += 1
            assert written_version() == OLDER
            if self.tries < 3:
                raise StoreUnavailable("away")
            return await super().transact(compares, writes)

    set_written_version(OLDER)
    store = Away(memory)
    daemon = Daemon(memory, clock, store)
    async with daemon.listening():
        speaking = asyncio.create_task(daemon.speaks())
        while not speaking.done():
            await clock.advance(1.0)
        assert (await speaking, store.tries) == (NEWEST_VERSION, 3)


@pytest.mark.parametrize("said", [b"two", b"9" * 5000, b""])
async def test_invalid_version_is_overwritten(memory: MemoryCluster, said: bytes) -> None:
    memory.transact((), (Put(keys.WRITTEN, said),))
    daemon = Daemon(memory, FakeClock())
    async with daemon.listening():
        assert daemon.cluster.written == OLDER
        assert await daemon.speaks() == NEWEST_VERSION
    told = await daemon.store.get(keys.WRITTEN)
    assert told is not None
    assert told.value == NEWEST


async def test_node_list_counts_as_received_only_with_the_nodes_versions(memory: MemoryCluster) -> None:
    """A node that was there without what it reads would be taken for an older one."""
    daemon = Daemon(memory, FakeClock())
    watching = asyncio.create_task(daemon.cluster.watch_schemas())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not daemon.cluster.listened
    memory.transact((), registered("other", NEWEST_VERSION))
    watching_nodes = asyncio.create_task(daemon.cluster.watch_nodes())
    await daemon.changes.until(lambda: keys.SCHEMAS in daemon.cluster.listened)
    assert daemon.cluster.reads.keys() == daemon.cluster.nodes.keys() == {"other"}
    watching.cancel()
    watching_nodes.cancel()
