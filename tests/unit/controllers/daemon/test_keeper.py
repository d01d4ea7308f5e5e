"""The keeper records each repair; without the record it has repaired nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from controllers.daemon.keeper import ProcessKeeper
from gcore.config.local_cluster import ControllerProcess, EtcdProcess, LocalClusterState
from gcore.store import keys
from gcore.store.types import Delete, Put
from gcore.system.process import is_running, spawn_detached, terminate_process, wait_process_ended
from gcore.testing import FakeClock
from gcore.testing.store import MemoryCluster, MemoryStore

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
ETCD = EtcdProcess(endpoint="h:1", data_dir="d", client_port=1, peer_port=2, binary="etcd", pid=1, started=1)
DAEMON = ControllerProcess(
    name="node-0", address="h:3", metrics_address="h:4", slots=("cpu:0",), config_file="c", pid=1, started=1
)


@pytest.fixture
def keeper(tmp_path: Path) -> ProcessKeeper:
    clock = FakeClock()
    return ProcessKeeper(tmp_path, "node-0", MemoryStore(MemoryCluster(clock), "node-0"), clock)


def test_restarted_process_that_cannot_be_recorded_is_ended(tmp_path: Path, keeper: ProcessKeeper) -> None:
    (tmp_path / "cluster.json").mkdir()
    process = spawn_detached(SLEEP, log_file=tmp_path / "log")
    cluster = LocalClusterState(home=str(tmp_path), etcd=ETCD, controllers=(DAEMON,))
    with pytest.raises(IsADirectoryError):
        keeper._write(cluster, process)
    assert wait_process_ended(process, 30)
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_recorded_restart_keeps_running(tmp_path: Path, keeper: ProcessKeeper) -> None:
    process = spawn_detached(SLEEP, log_file=tmp_path / "log")
    cluster = LocalClusterState(home=str(tmp_path), etcd=ETCD, controllers=(DAEMON,))
    try:
        keeper._write(cluster, process)
        assert LocalClusterState.load(tmp_path) == cluster
        assert is_running(process)
    finally:
        terminate_process(process, grace_s=5)


async def test_a_keeper_that_is_no_daemon_brings_back_all_of_them_once_their_leases_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `gcore run` does, which lives on when every daemon is killed at once."""
    clock = FakeClock()
    memory = MemoryCluster(clock)
    alive = spawn_detached(SLEEP, log_file=tmp_path / "log")
    etcd = ETCD.model_copy(update={"pid": alive.pid, "started": alive.started})
    daemons = tuple(DAEMON.model_copy(update={"name": f"node-{number}"}) for number in range(2))
    document = LocalClusterState(home=str(tmp_path), etcd=etcd, controllers=daemons)
    (tmp_path / "cluster.json").write_text(document.model_dump_json())
    monkeypatch.setattr("controllers.daemon.keeper.daemon_command", lambda home, config: SLEEP)
    memory.transact((), (Put(keys.node("node-1"), b"{}"),))
    keeper = ProcessKeeper(tmp_path, "", MemoryStore(memory), clock)

    def running() -> list[str]:
        cluster = LocalClusterState.load(tmp_path)
        assert cluster is not None
        return [one.name for one in cluster.controllers if is_running(one.process)]

    try:
        await keeper.look()
        assert running() == ["node-0"]
        memory.transact((), (Delete(keys.node("node-1")),))
        await keeper.look()
        assert running() == ["node-0", "node-1"]
    finally:
        cluster = LocalClusterState.load(tmp_path)
        assert cluster is not None
        for process in (alive, *(one.process for one in cluster.controllers)):
            terminate_process(process, grace_s=5)
