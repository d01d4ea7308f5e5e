"""What is read of the store on demand, and that one record of another version does not hide the rest."""

from __future__ import annotations

import asyncio
from typing import Any

from stored_job import StoredJob

from controllers.api.store_reader import StoreReader, UnreadableJob
from gcore.ledger.records.job import NodeRecord
from gcore.store import keys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore


async def all_of(store: MemoryStore) -> list[Any]:
    """The newest first."""
    jobs = StoreReader(store)
    found = [await jobs.summary(uid) for uid, _ in await jobs.newest(10, None)]
    return [one for one in found if one is not None]


def test_a_job_that_cannot_be_read_is_listed_with_the_reason_and_hides_no_other() -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))

    async def listed() -> list[Any]:
        old, new = StoredJob(store, "old", "n0.me"), StoredJob(store, "new", "n0.me")
        await old.create()
        await new.create()
        for job in (old, new):
            await store.transact((), (Put(keys.request(job.keys.uid), job.keys.uid.encode()),))
        assert len(await all_of(store)) == 2
        await store.transact((), (Put(old.keys.state, b'{"schema_version":99}'),))
        await store.transact((), (Put(keys.name("damaged"), b"\xff"), Put(keys.request("damaged"), b"\xff")))
        assert (await StoreReader(store).mirror(await StoreReader(store).find("damaged") or "")).job is None
        return await all_of(store)

    new, unreadable = asyncio.run(listed())
    assert isinstance(unreadable, UnreadableJob)
    assert (unreadable.uid, unreadable.name) == ("old", "old")
    assert "99" in unreadable.why
    assert new.keys.uid == "new"


def test_a_node_that_cannot_be_read_hides_no_other() -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    record = NodeRecord(name="node-0", incarnation="node-0.a", address="h:1", slots=("cpu:0",), pid=1)

    async def there() -> list[str]:
        await store.transact((), (Put(keys.node("node-0"), record.encode()),))
        await store.transact((), (Put(keys.node("node-1"), b'{"schema_version":99}'),))
        return [node.name for node in (await StoreReader(store).cluster()).nodes]

    assert asyncio.run(there()) == ["node-0"]
