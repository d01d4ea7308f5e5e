"""Reading jobs from the store on demand: one record of another version does not hide the rest."""

from __future__ import annotations

import asyncio
from typing import Any

from stored_job import StoredJob

from controllers.api.job_messages import source_reports
from controllers.api.store_reader import StoreReader, UnreadableJob
from gcore.ledger.records.job import Evaluation, NodeRecord, SourceScore
from gcore.store import keys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Version


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


def test_a_list_tells_of_the_newest_evaluation() -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    stored = StoredJob(store, "scored", "n0.me")

    async def listed() -> Any:
        await stored.create()
        for step, share in ((0, 0.25), (10, 0.5)):
            score = SourceScore(accuracy=share, count=8, samples=8, metrics={"mean@1": share})
            version = Version(0, step)
            one = Evaluation(version=version, accuracy=share, count=8, by_source={"data": score})
            await store.transact((), (Put(stored.keys.evaluation(str(version)), one.encode()),))
        return await StoreReader(store).summary("scored")

    (source,) = source_reports(asyncio.run(listed()))
    assert (source.name, source.accuracy, source.eval_samples) == ("data", 0.5, 8)
    assert dict(source.metrics) == {"mean@1": 0.5}
