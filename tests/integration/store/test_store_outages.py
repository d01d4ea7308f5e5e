"""The etcd client when the server dies, hangs, or loses its replies. Real processes, real connections."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from tcp_proxy import Proxy

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd
from gcore.store.session import Session
from gcore.store.types import Compare, Delete, Put
from gcore.system.clock import SystemClock
from gcore.system.process import send_signal, wait_process_ended

CLOCK = SystemClock()


class Server:
    """An etcd that can be killed and comes back on the same data and port."""

    def __init__(self, folder: Path, running: LocalEtcd) -> None:
        self.folder = folder
        self.running = running

    async def kill(self) -> None:
        send_signal(self.running.process, signal.SIGKILL)
        assert await asyncio.to_thread(wait_process_ended, self.running.process, 30.0)

    async def restart(self) -> None:
        self.running = await LocalEtcd.start(
            self.folder / "data", log_file=self.folder / "log", clock=CLOCK, client_port=self.running.client_port
        )


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path, await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK))
    yield server
    await server.running.stop()


@pytest.fixture
async def store(server: Server) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.connect([server.running.endpoint], clock=CLOCK)
    yield store
    await store.close()


async def test_writes_survive_a_killed_server(server: Server, store: EtcdStore) -> None:
    revision = (await store.transact([], [Put("k", b"1")])).revision
    await server.kill()
    await server.restart()
    kv = await store.get("k")
    assert kv is not None
    assert (kv.value, kv.mod_revision) == (b"1", revision)
    assert (await store.transact([Compare("k", revision)], [Put("k", b"2")])).won


async def test_calls_wait_for_a_server_that_comes_back_in_time(server: Server, store: EtcdStore) -> None:
    await store.transact([], [Put("k", b"1")])
    await server.kill()
    patient = await EtcdStore.connect([server.running.endpoint], clock=CLOCK, timeout_s=60.0)
    reading = asyncio.ensure_future(patient.get("k"))
    writing = asyncio.ensure_future(patient.transact([Compare("l", 0)], [Put("l", b"1")]))
    await server.restart()
    kv = await reading
    assert kv is not None
    assert kv.value == b"1"
    assert (await writing).won  # it had never been sent, so it may be
    await patient.close()


async def test_a_watch_goes_on_after_the_server_was_killed(server: Server, store: EtcdStore) -> None:
    async with aclosing(store.watch("")) as batches:
        await anext(batches)
        await store.transact([], [Put("k", b"1")])
        await anext(batches)
        await server.kill()
        waiting = asyncio.ensure_future(anext(batches))
        await server.restart()
        await store.transact([], [Put("k", b"2")])
        batch = await waiting
        await store.transact([], [Delete("k")])
        last = await anext(batches)
    assert not batch.reset
    assert [event.kv.value for event in batch.events] == [b"2"]
    assert [event.kind for event in last.events] == ["delete"]


async def test_a_watch_begins_again_when_the_server_has_lost_its_data(server: Server, store: EtcdStore) -> None:
    for i in range(5):
        await store.transact([], [Put("k", b"%d" % i)])
    async with aclosing(store.watch("")) as batches:
        assert [event.kv.value for event in (await anext(batches)).events] == [b"4"]
        waiting = asyncio.ensure_future(anext(batches))
        await server.kill()
        (server.folder / "data").rename(server.folder / "lost")
        await server.restart()
        batch = await waiting
        assert batch.reset
        assert batch.events == ()
        await store.transact([], [Put("k", b"new")])
        assert [event.kv.value for event in (await anext(batches)).events] == [b"new"]


async def test_a_session_survives_a_server_that_was_killed(server: Server, store: EtcdStore) -> None:
    session = await Session.open(store, clock=CLOCK, ttl=5)
    running = asyncio.ensure_future(session.run())
    await store.transact([], [Put("k", b"1", session.lease)])
    await server.kill()
    await server.restart()
    before = session.valid_until
    async with asyncio.timeout(60):
        while session.valid_until == before:  # noqa: ASYNC110 - there is no event for a renewal
            await asyncio.sleep(0.05)
    assert not running.done()
    assert await store.get("k") is not None
    await session.close()
    await running
    assert await store.get("k") is None


async def test_a_lease_that_ended_while_nobody_looked_is_told_as_lost(store: EtcdStore) -> None:
    session = await Session.open(store, clock=CLOCK, ttl=5, interval_s=0.05)
    running = asyncio.ensure_future(session.run())
    await store.revoke(session.lease)
    with pytest.raises(LeaseLost):
        await running
    assert session.lost.is_set()


async def test_a_server_that_is_gone_is_told_as_unavailable(server: Server) -> None:
    store = await EtcdStore.connect([server.running.endpoint], clock=CLOCK, timeout_s=3.0)
    await server.kill()
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1") as caught:
        await store.transact([], [Put("k", b"1")])
    assert "nothing was sent" in str(caught.value)
    with pytest.raises(StoreUnavailable, match="both sides use the same TLS settings") as asked:
        await store.get("k")
    assert "sent" not in str(asked.value)
    await store.close()


@pytest.fixture
async def proxy(etcd: LocalEtcd) -> AsyncIterator[Proxy]:
    proxy = await Proxy.start(etcd.endpoint)
    yield proxy
    await proxy.close()


async def test_a_write_whose_answer_is_lost_has_an_unknown_outcome_and_was_made_once(
    etcd: LocalEtcd, proxy: Proxy, tmp_path: Path
) -> None:
    key = str(tmp_path)
    store = await EtcdStore.connect([proxy.endpoint], clock=CLOCK, timeout_s=3.0)
    direct = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    assert await store.get(key) is None  # the connection stands
    await proxy.lose_replies()
    with pytest.raises(StoreUnavailable, match="may have happened"):
        await store.transact([], [Put(key, b"1")])
    kv = await direct.get(key)
    assert kv is not None
    assert kv.version == 1  # it was not sent a second time
    await proxy.heal()
    assert await store.get(key) == kv
    await store.close()
    await direct.close()


async def test_a_hanging_server_is_told_as_unavailable(proxy: Proxy, tmp_path: Path) -> None:
    store = await EtcdStore.connect([proxy.endpoint], clock=CLOCK, timeout_s=3.0)
    await store.get("k")
    lease = await store.grant(3_600)
    await proxy.stall()
    results = await asyncio.gather(
        store.get("k"),
        store.keep_alive(lease),
        store.transact([], [Put(str(tmp_path), b"1")]),
        store.list("k"),
        return_exceptions=True,
    )
    assert [result for result in results if not isinstance(result, StoreUnavailable)] == []
    await proxy.heal()
    assert await store.get(str(tmp_path)) is None
    assert await store.keep_alive(lease) == 3_600.0
    await store.close()


async def test_a_dead_first_endpoint_does_no_harm(etcd: LocalEtcd, proxy: Proxy, tmp_path: Path) -> None:
    await proxy.cut()
    store = await EtcdStore.connect([proxy.endpoint, etcd.endpoint], clock=CLOCK)
    assert (await store.transact([Compare(str(tmp_path), 0)], [Put(str(tmp_path), b"1")])).won
    async with aclosing(store.watch(str(tmp_path))) as batches:
        assert [event.kv.value for event in (await anext(batches)).events] == [b"1"]
    await store.close()


async def test_a_name_that_does_not_resolve_does_no_harm_beside_one_that_does(etcd: LocalEtcd) -> None:
    endpoints = ["no-such-host.invalid:2379", f"localhost:{etcd.client_port}"]
    store = await EtcdStore.connect(endpoints, clock=CLOCK)
    await store.list("k")
    await store.close()


async def test_reads_leave_an_endpoint_that_hangs_for_another(etcd: LocalEtcd, proxy: Proxy) -> None:
    store = await EtcdStore.connect([proxy.endpoint, etcd.endpoint], clock=CLOCK, timeout_s=4.0)
    lease = await store.grant(3_600)
    await proxy.stall()
    assert await store.keep_alive(lease) == 3_600.0
    await store.get("k")
    assert (await store.transact([], [])).won  # the next write goes where the read went
    await store.close()


async def test_a_watch_moves_to_another_endpoint(etcd: LocalEtcd, proxy: Proxy, tmp_path: Path) -> None:
    store = await EtcdStore.connect([proxy.endpoint, etcd.endpoint], clock=CLOCK)
    direct = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    async with aclosing(store.watch(str(tmp_path))) as batches:
        await anext(batches)
        await direct.transact([], [Put(str(tmp_path), b"0")])
        await anext(batches)  # the stream stands
        await proxy.cut()
        await direct.transact([], [Put(str(tmp_path), b"1")])
        batch = await anext(batches)
    assert [event.kv.value for event in batch.events] == [b"1"]
    await store.close()
    await direct.close()


async def test_many_calls_at_once_share_one_connection(etcd: LocalEtcd, tmp_path: Path) -> None:
    store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    keys = [f"{tmp_path}/{i}" for i in range(100)]
    await asyncio.gather(*(store.transact([], [Put(key, b"1")]) for key in keys))
    found = await asyncio.gather(*(store.get(key) for key in keys))
    assert None not in found
    await store.close()


async def test_a_watch_leaves_an_endpoint_that_hangs(etcd: LocalEtcd, proxy: Proxy, tmp_path: Path) -> None:
    store = await EtcdStore.connect([proxy.endpoint, etcd.endpoint], clock=CLOCK)
    direct = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    async with aclosing(store.watch(str(tmp_path))) as batches:
        await anext(batches)
        await direct.transact([], [Put(str(tmp_path), b"0")])
        await anext(batches)  # the stream stands
        await proxy.stall()
        await direct.transact([], [Put(str(tmp_path), b"1")])
        batch = await anext(batches)  # once a ping has gone unanswered
    assert [event.kv.value for event in batch.events] == [b"1"]
    await store.close()
    await direct.close()
