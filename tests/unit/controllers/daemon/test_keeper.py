"""What the keeper brings back, it notes, or it has not brought it back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from controllers.daemon.keeper import ProcessKeeper
from gcore.config import NodeConfig
from gcore.config.local_cluster import ControllerProcess, EtcdProcess, LocalCluster
from gcore.store.reference import StoreRef
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
    config = NodeConfig(
        node="node-0", home=str(tmp_path), etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",), run_root="r"
    )
    clock = FakeClock()
    return ProcessKeeper(config, MemoryStore(MemoryCluster(clock), "node-0"), clock)


def test_what_was_brought_back_and_cannot_be_noted_is_ended(tmp_path: Path, keeper: ProcessKeeper) -> None:
    (tmp_path / "cluster.json").mkdir()
    process = spawn_detached(SLEEP, log_file=tmp_path / "log")
    cluster = LocalCluster(home=str(tmp_path), etcd=ETCD, controllers=(DAEMON,))
    with pytest.raises(IsADirectoryError):
        keeper._write(cluster, process)
    assert wait_process_ended(process, 30)
    assert not (tmp_path / ".cluster.json.part").exists()


def test_what_was_brought_back_and_noted_goes_on(tmp_path: Path, keeper: ProcessKeeper) -> None:
    process = spawn_detached(SLEEP, log_file=tmp_path / "log")
    cluster = LocalCluster(home=str(tmp_path), etcd=ETCD, controllers=(DAEMON,))
    try:
        keeper._write(cluster, process)
        assert LocalCluster.load(tmp_path) == cluster
        assert is_running(process)
    finally:
        terminate_process(process, grace_s=5)
