"""Blob stores that fetch from one another: several sources, kills within a transfer, damaged sources, full stores."""

import asyncio
import hashlib
import os
import random
from pathlib import Path

import pytest
from blob_stores import TIMEOUT_S, NarrowProxy, Start, StoreProcess, key_of, until

from gcore.media.client import BlobHttp
from gcore.media.protocol import TRANSFERS, Blob, StoreFull, StoreUnreachable, blob_path
from gcore.media.transfers import order_of_nodes

MIB = 1 << 20
DATA = random.Random(2).randbytes(6 * MIB + 5)
BLOB = Blob(hashlib.sha256(DATA).hexdigest(), len(DATA))
SMALL = Blob(hashlib.sha256(b"small").hexdigest(), 5)
ABSENT = Blob("0" * 64, 10)


async def count(http: BlobHttp, store: StoreProcess, name: str) -> int:
    counters = (await http.get(f"{store.address}/health")).json()
    return int(counters[name])


async def test_a_store_fetches_what_it_lacks_from_the_nodes_that_have_it(start: Start, http: BlobHttp) -> None:
    first, second, third = start("n1"), start("n2"), start("n3")
    third.set_nodes(first, second)
    await second.client(http).put_bytes(DATA)
    await third.client(http).put_bytes(b"small")
    reports: list[tuple[int, int]] = []
    result = await third.client(http).fetch(
        [BLOB, SMALL, ABSENT], ["n3", "n1", "n2"], lambda *numbers: reports.append(numbers)
    )
    assert (result.present, result.unavailable) == ({BLOB.sha256, SMALL.sha256}, {ABSENT.sha256})
    assert result.failed == {}
    assert {total for _, total in reports} == {len(DATA) + 5 + 10}
    assert third.path(BLOB.sha256) == Path(result.folder) / blob_path(BLOB.sha256)
    assert third.path(BLOB.sha256).read_bytes() == DATA
    assert await count(http, third, "bytes_fetched") == await count(http, second, "bytes_served") == len(DATA)
    body = {"blobs": [BLOB._asdict()], "nodes": ["n1", "n2"]}
    headers = {"Authorization": f"Bearer {key_of()}"}
    answer = await http.post(f"{third.address}/jobs/job/fetch", json=body, headers=headers)
    assert answer.json() == {"present": [BLOB.sha256], "unavailable": [], "failed": {}, "folder": result.folder}
    assert await count(http, third, "bytes_fetched") == len(DATA)


async def test_a_fetch_sees_only_the_blobs_of_its_own_job(start: Start, http: BlobHttp) -> None:
    first, second = start("n1"), start("n2")
    second.set_nodes(first)
    await first.client(http, "one").put_bytes(b"small")
    assert (await second.client(http, "two").fetch([SMALL], ["n1"])).unavailable == {SMALL.sha256}
    assert (await second.client(http, "one").fetch([SMALL], ["n1"])).present == {SMALL.sha256}
    assert not second.path(SMALL.sha256, "two").exists()


async def test_a_transfer_continues_at_the_same_byte_when_its_source_was_killed_and_restarted(
    start: Start, http: BlobHttp
) -> None:
    source, target = start("n1"), start("n2")
    await source.client(http).put_bytes(DATA)
    proxy = await NarrowProxy.start(source.address, 3 * MIB + 100_000)
    target.say({"command": "nodes", "nodes": {"n1": proxy.address}})
    fetching = asyncio.create_task(target.client(http).fetch([BLOB], ["n1"]))
    await asyncio.wait_for(proxy.exhausted.wait(), TIMEOUT_S)
    source.kill()
    source.start()
    proxy.target = source.address
    proxy.cut()
    assert (await fetching).present == {BLOB.sha256}
    await proxy.close()
    assert target.path(BLOB.sha256).read_bytes() == DATA
    assert await count(http, source, "bytes_served") <= len(DATA) - 2 * MIB
    assert await count(http, target, "bytes_fetched") == len(DATA)


async def test_a_store_that_was_killed_within_a_transfer_fetches_again_and_leaves_no_part(
    start: Start, http: BlobHttp
) -> None:
    source, target = start("n1"), start("n2")
    await source.client(http).put_bytes(DATA)
    proxy = await NarrowProxy.start(source.address, 3 * MIB)
    target.say({"command": "nodes", "nodes": {"n1": proxy.address}})
    fetching = asyncio.create_task(target.client(http).fetch([BLOB, SMALL], ["n1"]))
    await asyncio.wait_for(proxy.exhausted.wait(), TIMEOUT_S)
    await until(lambda: len(os.listdir(target.folder / ".incoming")), 1)
    target.kill()
    with pytest.raises(StoreUnreachable):
        await fetching
    await proxy.close()
    target.start(nodes={"n1": source.address})
    assert os.listdir(target.folder / ".incoming") == []
    assert await count(http, target, "stored") == 0
    result = await target.client(http).fetch([BLOB, SMALL], ["n1"])
    assert (result.present, result.unavailable) == ({BLOB.sha256}, {SMALL.sha256})
    assert target.path(BLOB.sha256).read_bytes() == DATA


async def test_the_next_node_continues_a_transfer_whose_source_is_gone(start: Start, http: BlobHttp) -> None:
    earlier, later = order_of_nodes(BLOB.sha256, ["n1", "n2"])
    first, second, target = start(earlier), start(later), start("n3")
    for store in (first, second):
        await store.client(http).put_bytes(DATA)
    proxy = await NarrowProxy.start(first.address, 3 * MIB + 100_000)
    target.say({"command": "nodes", "nodes": {earlier: proxy.address, later: second.address}})
    fetching = asyncio.create_task(target.client(http).fetch([BLOB], ["n1", "n2"]))
    await asyncio.wait_for(proxy.exhausted.wait(), TIMEOUT_S)
    first.kill()
    await proxy.close()
    assert (await fetching).present == {BLOB.sha256}
    assert target.path(BLOB.sha256).read_bytes() == DATA
    assert await count(http, second, "bytes_served") <= len(DATA) - 2 * MIB


async def test_requests_for_one_blob_share_a_transfer_that_outlives_its_first_client(
    start: Start, http: BlobHttp
) -> None:
    source, target = start("n1"), start("n2")
    await source.client(http).put_bytes(DATA)
    proxy = await NarrowProxy.start(source.address, 2 * MIB)
    target.say({"command": "nodes", "nodes": {"n1": proxy.address}})
    first, *others = [asyncio.create_task(target.client(http).fetch([BLOB], ["n1"])) for _ in range(3)]
    await asyncio.wait_for(proxy.exhausted.wait(), TIMEOUT_S)
    first.cancel()
    await asyncio.wait([first])
    proxy.open()
    for other in others:
        assert (await other).present == {BLOB.sha256}
    assert await count(http, target, "bytes_fetched") == len(DATA)
    await proxy.close()


async def test_a_source_with_a_damaged_blob_counts_as_lacking_it_and_sent_damage_is_not_stored(
    start: Start, http: BlobHttp
) -> None:
    """Otherwise a rank would ask for the blob without end, and its holder would not drop the group."""
    first, second, target = start("n1"), start("n2"), start("n3")
    for store in (first, second):
        await store.client(http).put_bytes(DATA)
        store.path(BLOB.sha256).chmod(0o644)
        with store.path(BLOB.sha256).open("r+b") as file:
            file.write(b"damage")
    first.kill()
    first.start()  # so it verifies the blob again; the second store does not
    target.set_nodes(first, second)
    result = await target.client(http).fetch([BLOB], ["n1", "n2"])
    assert (result.unavailable, result.failed) == ({BLOB.sha256}, {})
    assert [await count(http, store, "blobs_damaged") for store in (first, second)] == [1, 1]
    await first.client(http).put_bytes(DATA)
    assert (await target.client(http).fetch([BLOB], ["n2", "n1"])).present == {BLOB.sha256}
    assert target.path(BLOB.sha256).read_bytes() == DATA
    assert await count(http, target, "stored") == len(DATA)


async def test_a_full_store_refuses_to_fetch(start: Start, http: BlobHttp) -> None:
    source, target = start("n1"), start("n2", bound_bytes=len(DATA) + MIB)
    await source.client(http).put_bytes(DATA)
    pinned = await target.client(http).put_bytes(bytes(2 * MIB))
    await target.client(http).pin("i", [pinned.sha256], 60.0)
    target.set_nodes(source)
    with pytest.raises(StoreFull, match=f"{target.address}: no room for {len(DATA)} bytes"):
        await target.client(http).fetch([BLOB], ["n1"])
    assert await count(http, target, "incoming") == 0
    assert os.listdir(target.folder / ".incoming") == []


async def test_transfers_use_up_the_room_that_is_reserved_for_them(start: Start, http: BlobHttp) -> None:
    source, target = start("n1"), start("n2", bound_bytes=len(DATA) + MIB)
    await source.client(http).put_bytes(DATA)
    target.set_nodes(source)
    client = target.client(http)
    assert await client.reserve(TRANSFERS, len(DATA), 60.0)
    assert not await client.reserve("i", 2 * MIB, 60.0), "prompts do not get this room"
    assert await client.reserve("i", MIB, 60.0)
    found = await client.fetch([BLOB], ["n1"])
    assert found.present == {BLOB.sha256}


async def test_a_fetch_uses_up_the_room_that_is_reserved_for_its_holder(start: Start, http: BlobHttp) -> None:
    source, target = start("n1"), start("n2", bound_bytes=len(DATA) + MIB)
    await source.client(http).put_bytes(DATA)
    target.set_nodes(source)
    client = target.client(http)
    assert await client.reserve("i", len(DATA) + MIB, 60.0)
    with pytest.raises(StoreFull):
        await client.fetch([BLOB], ["n1"])
    assert (await client.fetch([BLOB], ["n1"], holder="i")).present == {BLOB.sha256}


async def test_a_fetch_reports_nodes_that_do_not_answer_and_a_dropped_job_ends_it(start: Start, http: BlobHttp) -> None:
    gone, target = start("n1"), start("n2")
    target.set_nodes(gone)
    gone.kill()
    wrong_size = target.client(http, "other")
    await wrong_size.put_bytes(b"small")
    failed = (await wrong_size.fetch([SMALL._replace(size=6)], ["n1"])).failed[SMALL.sha256]
    assert failed == f"blob {SMALL.sha256} has 5 bytes, but the request says 6"
    client = target.client(http)
    fetching = asyncio.create_task(client.fetch([BLOB], ["n1", "unknown"]))
    async with asyncio.timeout(TIMEOUT_S):
        while not await count(http, target, "incoming"):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)
    await client.drop_job()
    assert (await fetching).failed == {BLOB.sha256: "the transfer was ended"}
    failed = (await client.fetch([BLOB], ["n1"])).failed[BLOB.sha256]
    assert failed.startswith(f"node n1: {gone.address}: the blob store does not answer")
