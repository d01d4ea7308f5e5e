"""One blob store as a process: its routes, ranges, keys, errors, restarts and TLS."""

import asyncio
import hashlib
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import issued
import pytest
from blob_stores import TIMEOUT_S, Start, StoreProcess, key_of, until

from gcore.api.tls import Connector
from gcore.errors import DataError, NotAllowed
from gcore.media.client import BlobClient, BlobHttp, open_blob_http
from gcore.media.protocol import (
    Blob,
    BlobMissing,
    BlobTooLarge,
    StoreFailed,
    StoreFull,
    StoreUnreachable,
)
from gcore.testing.vision_models import make_picture
from gcore.types import PictureRef

MIB = 1 << 20
DATA = random.Random(1).randbytes(3 * MIB + 17)
BLOB = Blob(hashlib.sha256(DATA).hexdigest(), len(DATA))


def key(job: str = "job") -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(job)}"}


async def health(http: BlobHttp, store: StoreProcess) -> dict[str, Any]:
    answer: dict[str, Any] = (await http.get(f"{store.address}/health")).json()
    return answer


async def read(client: BlobClient, blob: Blob) -> bytes:
    return b"".join([piece async for piece in client.read(blob.sha256)])


async def test_a_client_stores_reads_and_drops_blobs(start: Start, http: BlobHttp, tmp_path: Path) -> None:
    store = start()
    assert store.first_message["event"] == "serving"
    client = store.client(http)
    assert await client.put_bytes(DATA) == BLOB
    assert await client.put_bytes(DATA) == BLOB  # again
    empty = await client.put_bytes(b"")
    assert (await client.stat(BLOB.sha256), await client.stat(empty.sha256)) == (len(DATA), 0)
    for blob, data in ((BLOB, DATA), (empty, b"")):
        assert await read(client, blob) == data
    counters = await health(http, store)
    expected = {"status": "ok", "blobs": 2, "bytes_stored": len(DATA), "bytes_served": len(DATA), "stored": len(DATA)}
    assert expected.items() <= counters.items()
    text = (await http.get(f"{store.address}/metrics")).text
    assert f"gcore_blob_store_bytes_served {len(DATA)}\n" in text
    await client.drop_job()
    with pytest.raises(BlobMissing, match=f"{store.address}: status 404 for blob {BLOB.sha256}"):
        await client.stat(BLOB.sha256)
    with pytest.raises(BlobMissing, match=f"the store has no blob {BLOB.sha256} of job job"):
        await read(client, BLOB)
    assert os.listdir(tmp_path) == ["n1"]
    assert store.stop() == 0


async def test_ranges_select_bytes_and_empty_ranges_are_refused(start: Start, http: BlobHttp) -> None:
    store = start()
    await store.client(http).put_bytes(DATA)
    url = f"{store.address}/jobs/job/blobs/{BLOB.sha256}"

    async def get(selected: str, method: str = "GET") -> httpx.Response:
        return await http.request(method, url, headers={**key(), "Range": selected})

    for selected, part in (
        ("bytes=0-0", range(1)),
        (f"bytes={2 * MIB}-", range(2 * MIB, len(DATA))),
        ("bytes=100-2097251", range(100, 2097252)),
        ("bytes=-5", range(len(DATA) - 5, len(DATA))),
        (f"bytes=7-{10 * len(DATA)}", range(7, len(DATA))),
    ):
        answer = await get(selected)
        assert answer.status_code == 206
        assert answer.content == DATA[part.start : part.stop]
        assert answer.headers["content-range"] == f"bytes {part.start}-{part.stop - 1}/{len(DATA)}"
    for selected in (f"bytes={len(DATA)}-", "bytes=5-4", "bytes=-0"):
        answer = await get(selected)
        assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{len(DATA)}")
        assert (
            answer.json()["error"]["what"] == f"the range {selected!r} selects no byte of a blob of {len(DATA)} bytes"
        )
    for selected in ("bytes=0-1,4-5", "lines=1-2"):
        answer = await get(selected)
        assert (answer.status_code, answer.content == DATA) == (200, True)
    head = await get("bytes=1-", "HEAD")
    assert (head.status_code, head.headers["content-length"], head.content) == (206, str(len(DATA) - 1), b"")


async def test_each_job_needs_its_own_key_and_sees_only_its_own_blobs(start: Start, http: BlobHttp) -> None:
    store = start()
    await store.client(http, "one").put_bytes(DATA)
    with pytest.raises(BlobMissing):
        await store.client(http, "two").stat(BLOB.sha256)
    assert (await store.client(http, "two").fetch([BLOB], [])).unavailable == {BLOB.sha256}
    wrong = BlobClient(store.address, "one", key_of("two"), http)
    for call in (
        wrong.stat(BLOB.sha256),
        wrong.put_bytes(b"small"),
        wrong.pin("i", [BLOB.sha256], 1.0),
        wrong.unpin("i", [BLOB.sha256]),
        wrong.reserve("h", 1, 1.0),
        wrong.fetch([BLOB], []),
        wrong.link([BLOB.sha256], store.folder),
        wrong.drop_job(),
    ):
        with pytest.raises(NotAllowed):
            await call
    for headers in ({}, {"Authorization": "Bearer junk"}, {"Authorization": key("one")["Authorization"][7:]}):
        answer = await http.get(f"{store.address}/jobs/one/blobs/{BLOB.sha256}", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["what"] == "the key is not that of job one"
    assert await store.client(http, "one").stat(BLOB.sha256) == len(DATA)


async def test_invalid_requests_are_refused_with_a_reason(start: Start, http: BlobHttp) -> None:
    store = start()
    for method, path, body, status, reason in (
        (
            "POST",
            "pins",
            {"incarnation": "i", "sha256": ["x"], "ttl_s": 1},
            400,
            "sha256.0: string should match pattern",
        ),
        ("POST", "pins", {"incarnation": "i", "sha256": [], "ttl_s": -1}, 400, "ttl_s: input should be greater than 0"),
        ("POST", "fetch", {"blobs": [], "nodes": [], "urls": []}, 400, "urls: extra inputs are not permitted"),
        ("POST", "link", [], 400, "input should be an object"),
        ("PUT", "blobs/XYZ", {}, 400, "'XYZ' is not a SHA-256"),
        ("PUT", f"blobs/{'0' * 64}", {}, 422, "have the SHA-256"),
    ):
        answer = await http.request(method, f"{store.address}/jobs/job/{path}", json=body, headers=key())
        assert (answer.status_code, reason in answer.json()["error"]["what"]) == (status, True), answer.text
    answer = await http.get(f"{store.address}/jobs/%2e%2e%20/blobs/{'0' * 64}", headers=key(".. "))
    assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "BlobRequestRefused")

    async def chunks() -> AsyncIterator[bytes]:
        yield DATA

    answer = await http.put(f"{store.address}/jobs/job/blobs/{BLOB.sha256}", content=chunks(), headers=key())
    assert (answer.status_code, answer.json()["error"]["what"]) == (400, "the size of the blob is missing")
    assert (await health(http, store))["blobs"] == 0


async def test_an_interrupted_upload_leaves_nothing(start: Start, http: BlobHttp) -> None:
    store = start()
    host, port = store.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"PUT /jobs/job/blobs/{BLOB.sha256} HTTP/1.1\r\nhost: x\r\nauthorization: {key()['Authorization']}\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(DATA) + DATA[: 2 * MIB])
    await writer.drain()
    await until(lambda: count(store.folder / ".incoming"), 1)
    writer.transport.abort()
    await until(lambda: count(store.folder / ".incoming"), 0)
    assert (await health(http, store))["incoming"] == 0
    with pytest.raises(BlobMissing):
        await store.client(http).stat(BLOB.sha256)


async def test_a_full_store_refuses_blobs_and_reservations_until_pins_end(start: Start, http: BlobHttp) -> None:
    store = start(bound_bytes=len(DATA) + MIB, grace_s=0.0)
    client = store.client(http)
    with pytest.raises(BlobTooLarge, match=f"the blob has {len(DATA) + 2 * MIB} bytes, but the whole store may have"):
        await client.put_bytes(bytes(len(DATA) + 2 * MIB))
    assert await client.reserve("controller", len(DATA), 60.0)
    assert not await client.reserve("engine", 2 * MIB, 60.0)
    with pytest.raises(StoreFull, match=f"{len(DATA)} are reserved"):
        await client.put_bytes(bytes(2 * MIB))
    await client.put_bytes(DATA, holder="controller")
    await client.pin("i", [BLOB.sha256], 60.0)
    with pytest.raises(StoreFull, match=f"no room for {2 * MIB} bytes: of {len(DATA) + MIB}, {len(DATA)} are pinned"):
        await client.put_bytes(bytes(2 * MIB))
    assert await client.reserve("controller", 0, 0.0)
    await client.unpin("i", [BLOB.sha256])
    assert await client.reserve("engine", 2 * MIB, 60.0)
    await client.put_bytes(bytes(2 * MIB), holder="engine")
    with pytest.raises(BlobMissing):
        await client.stat(BLOB.sha256)
    counters = await health(http, store)
    assert (counters["blobs_deleted"], counters["reserved"], counters["pinned"]) == (1, 0, 0)
    assert (counters["refused_full"], counters["failed_disk"]) == (3, 0)


async def test_blobs_are_linked_only_into_the_roots_of_the_launch_document(
    start: Start, http: BlobHttp, tmp_path: Path
) -> None:
    world = tmp_path / "run" / "world"
    world.mkdir(parents=True)
    (tmp_path / "run" / "escape").symlink_to(tmp_path)
    store = start(link_roots=[str(tmp_path / "run")])
    client = store.client(http)
    await client.put_bytes(DATA)
    assert await client.link([BLOB.sha256, "0" * 64], world) == ("0" * 64,)
    assert (world / BLOB.sha256).samefile(store.path(BLOB.sha256))
    for folder in (tmp_path, world / ".." / "..", tmp_path / "run" / "escape"):
        with pytest.raises(NotAllowed, match="blobs may not be linked into"):
            await client.link([BLOB.sha256], folder)
    with pytest.raises(StoreFailed, match="No such file or directory"):
        await client.link([BLOB.sha256], world / "absent")
    assert await store.client(http, "two").link([BLOB.sha256], world) == (BLOB.sha256,)


async def test_the_error_about_a_damaged_picture_names_its_file(start: Start, http: BlobHttp, tmp_path: Path) -> None:
    whole = make_picture(32, 32)
    data = whole[:-30] + bytes(10) + whole[-20:]
    file = tmp_path / "damaged.png"
    file.write_bytes(data)
    picture = PictureRef(str(file), hashlib.sha256(data).hexdigest(), 32, 32, 32, 32, len(data))
    with pytest.raises(DataError, match="the picture file is damaged or cut off") as caught:
        await start().client(http).make_picture(picture, "me", 9.0)
    assert caught.value.where == str(file)


async def test_a_store_that_was_killed_serves_its_blobs_again_and_removes_damaged_ones(
    start: Start, http: BlobHttp
) -> None:
    store = start()
    client = store.client(http)
    other = await client.put_bytes(DATA[:MIB])
    await client.put_bytes(DATA)
    store.kill()
    with pytest.raises(StoreUnreachable, match="does not answer"):
        await client.stat(BLOB.sha256)
    store.path(BLOB.sha256).chmod(0o644)
    with store.path(BLOB.sha256).open("r+b") as file:
        file.seek(MIB)
        file.write(b"damage")
    store.start()
    client = store.client(http)
    assert await read(client, other) == DATA[:MIB]
    with pytest.raises(BlobMissing, match="have changed, so it was removed"):
        await read(client, BLOB)
    counters = await health(http, store)
    assert (counters["blobs_damaged"], counters["blobs"]) == (1, 1)
    assert not store.path(BLOB.sha256).exists()
    await client.put_bytes(DATA)
    assert await client.stat(BLOB.sha256) == len(DATA)


async def test_stores_with_certificates_serve_and_fetch_over_tls(start: Start, tmp_path: Path) -> None:
    ca = issued.authority(tmp_path / "ca")
    materials = {name: issued.node(ca, name) for name in ("n1", "n2")}
    first, second = (
        start(name, tls={"ca": str(one.ca), "cert": str(one.cert), "key": str(one.key)})
        for name, one in materials.items()
    )
    second.set_nodes(first)
    async with open_blob_http(Connector(materials["n1"])) as http:
        await first.client(http).put_bytes(DATA)
        result = await second.client(http).fetch([BLOB], ["n1"])
        assert result.present == {BLOB.sha256}
        assert await second.client(http).stat(BLOB.sha256) == len(DATA)
    foreign = issued.node(issued.authority(tmp_path / "foreign"), "n1")
    async with open_blob_http(Connector(foreign)) as http:
        with pytest.raises(StoreUnreachable, match="certificate verify failed"):
            await first.client(http).stat(BLOB.sha256)


def test_a_store_reports_why_it_cannot_start(start: Start, tmp_path: Path) -> None:
    start()
    again = StoreProcess("n1", tmp_path / "n1")
    assert again.first_message["event"] == "failed"
    assert "another process uses this blob store" in again.first_message["reason"]
    assert again.process is not None
    assert again.process.wait(TIMEOUT_S) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = StoreProcess("n2", tmp_path / "n2", port=taken.getsockname()[1])
        assert "cannot listen at this address" in other.first_message["reason"]
    wrong = StoreProcess("n3", tmp_path / "n3", bound_bytes=0)
    assert wrong.first_message["reason"].startswith("launch document: bound_bytes: input should be greater than 0")
    for one in (again, other, wrong):
        one.kill()


def count(folder: Path) -> int:
    return len(list(folder.iterdir()))
