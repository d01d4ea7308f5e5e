"""The etcd client on a cluster of three members, some of which die or are stopped."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
from stopping import stop_process

from gcore.errors import StoreUnavailable
from gcore.store.client import EtcdStore
from gcore.store.etcd import EtcdBinary, find_etcd
from gcore.store.types import Compare, Put
from gcore.system.clock import SystemClock
from gcore.system.network import free_ports
from gcore.system.process import ProcessId, send_signal, spawn_detached, terminate_process

CLOCK = SystemClock()


@dataclass(frozen=True)
class Member:
    """A running etcd of several."""

    endpoint: str
    process: ProcessId


@pytest.fixture
def members(tmp_path: Path) -> list[Member]:
    binary = find_etcd()
    assert isinstance(binary, EtcdBinary)
    ports = free_ports(6)
    clients, peers = ports[:3], ports[3:]
    cluster = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(peers))
    members = []
    for i, (client, peer) in enumerate(zip(clients, peers, strict=True)):
        command = [
            *(str(binary.path), f"--name=m{i}", f"--data-dir={tmp_path / str(i)}", f"--initial-cluster={cluster}"),
            *(f"--listen-client-urls=http://127.0.0.1:{client}", f"--advertise-client-urls=http://127.0.0.1:{client}"),
            *(f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
        ]
        members.append(Member(f"127.0.0.1:{client}", spawn_detached(command, log_file=tmp_path / f"{i}.log")))
    return members


@pytest.fixture
async def store(members: list[Member]) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.connect([member.endpoint for member in members], clock=CLOCK, timeout_s=60.0)
    await store.transact([Compare("k", 0)], [Put("k", b"0")])
    yield store
    await store.close()
    for member in members:
        terminate_process(member.process, 0.0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_while_one_member_of_three_is_gone_everything_goes_on(
    members: list[Member], store: EtcdStore, how: signal.Signals
) -> None:
    lease = await store.grant(60)
    patient = await EtcdStore.connect([member.endpoint for member in members], clock=CLOCK, timeout_s=10.0)
    async with aclosing(patient.watch("k")) as batches:
        await anext(batches)
        await patient.transact([], [Put("k", b"0")])
        await anext(batches)  # the stream stands
        send_signal(members[0].process, how)  # the one that all are connected to, and the leader one time in three
        kv = await patient.get("k")
        assert kv is not None
        while True:
            try:
                result = await patient.transact([Compare("k", kv.mod_revision)], [Put("k", b"1")])
                break
            except StoreUnavailable:  # it had been sent to the member that died; whoever asks again looks first
                kv = await patient.get("k")
                assert kv is not None
        after = await patient.get("k")
        assert after is not None
        assert after.value == b"1"
        assert result.won or kv.value == b"1"
        assert await patient.keep_alive(lease) == 60.0
        assert [event.kv.value for event in (await anext(batches)).events] == [b"1"]  # once a ping went unanswered
    await patient.close()


async def test_without_a_majority_nothing_is_done_and_it_is_told(members: list[Member], store: EtcdStore) -> None:
    hasty = await EtcdStore.connect([member.endpoint for member in members], clock=CLOCK, timeout_s=2.0)
    for member in members[1:]:
        stop_process(member.process.pid)
    results = await asyncio.gather(
        hasty.get("k"), hasty.transact([Compare("k", 0)], [Put("l", b"1")]), hasty.grant(60), return_exceptions=True
    )
    assert [result for result in results if not isinstance(result, StoreUnavailable)] == []
    for member in members[1:]:
        send_signal(member.process, signal.SIGCONT)
    kv = await store.get("k")
    assert kv is not None
    assert kv.value == b"0"
    assert await store.get("l") is None
    await hasty.close()
