"""Daemons of the first schema version and an invented next version side by side, as real processes, without a job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gcore.config import NodeConfig
from gcore.ledger.records.job import NodeRecord
from gcore.schema import NEWEST_VERSION, PIN
from gcore.store import keys
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd
from gcore.store.reference import StoreRef
from gcore.system.clock import SystemClock

CLOCK = SystemClock()
OLDER, NEWEST = NEWEST_VERSION - 1, NEWEST_VERSION
pytestmark = [pytest.mark.serial, pytest.mark.timeout(120)]


class Nodes:
    """Daemons on one etcd. A daemon is killed at the end if it has not ended by then."""

    def __init__(self, folder: Path, etcd: LocalEtcd, store: EtcdStore) -> None:
        self.folder = folder
        self.etcd = etcd
        self.store = store
        self.daemons: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, *, version: int | None = None) -> None:
        """`version`: it is pinned to that one."""
        home = self.folder / name
        config = NodeConfig(
            node=name,
            home=str(home),
            listen_host="127.0.0.1",
            listen_port=0,
            metrics_port=0,
            etcd=StoreRef(endpoints=(self.etcd.endpoint,)),
            slots=("cpu:0",),
            run_root=str(home / "runs"),
        )
        home.mkdir()
        file = home / "node.json"
        file.write_text(config.model_dump_json())
        pin = {PIN: str(version)} if version is not None else {}
        self.daemons[name] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "controllers.daemon", "--home", str(home), "--config", str(file)),
            env=os.environ | pin,
            stderr=(home / "log").open("wb"),
        )
        await self.until(lambda there: keys.node(name) in there)

    async def stop(self, name: str) -> int:
        """In good order; its exit code."""
        self.daemons[name].send_signal(signal.SIGTERM)
        return await self.daemons[name].wait()

    async def until(self, condition: Callable[[dict[str, bytes]], bool]) -> dict[str, bytes]:
        """What stands in the store once `condition` holds."""
        while True:
            there = {kv.key: kv.value for kv in (await self.store.list(keys.ROOT)).kvs}
            if condition(there):
                return there
            for name, daemon in self.daemons.items():
                if daemon.returncode not in (None, 0):
                    raise AssertionError((self.folder / name / "log").read_text())
            await CLOCK.sleep(0.05)

    async def written(self, name: str) -> int:
        """The schema version of a node's record."""
        kv = await self.store.get(keys.node(name))
        assert kv is not None
        version: int = json.loads(kv.value)["schema_version"]
        return version


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    etcd = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)
    store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    nodes = Nodes(tmp_path, etcd, store)
    yield nodes
    for daemon in nodes.daemons.values():
        if daemon.returncode is None:
            daemon.kill()
            await daemon.wait()
    await store.close()
    await etcd.stop()


async def test_a_newer_daemon_writes_as_the_older_ones_read_until_the_last_of_them_has_gone(nodes: Nodes) -> None:
    await nodes.start("old", version=OLDER)
    await nodes.start("new")
    assert await nodes.written("old") == OLDER
    assert await nodes.written("new") == OLDER
    there = await nodes.until(lambda there: keys.readable_version("new") in there)
    assert there[keys.readable_version("new")] == str(NEWEST).encode()
    assert there[keys.readable_version("old")] == str(OLDER).encode()
    assert NodeRecord.decode(there[keys.node("new")]).name == "new"
    assert await nodes.stop("old") == 0
    await nodes.until(lambda there: keys.node("old") not in there and keys.readable_version("old") not in there)
    # What it has written before is brought up to date: the version after the next must read it.
    await nodes.until(lambda there: json.loads(there[keys.node("new")])["schema_version"] == NEWEST)
    await nodes.start("next")
    assert await nodes.written("next") == NEWEST


async def test_beside_an_older_daemon_that_came_back_a_new_one_writes_what_was_written_before(nodes: Nodes) -> None:
    """What stands there cannot be taken back, and has fields without a word in the older version."""
    await nodes.start("first")
    await nodes.start("old", version=OLDER)
    assert await nodes.written("first") == NEWEST
    assert await nodes.stop("first") == 0
    await nodes.start("second")
    assert await nodes.written("old") == OLDER
    assert await nodes.written("second") == NEWEST


async def test_a_daemon_that_is_asked_to_end_leaves_nothing_under_its_lease(nodes: Nodes) -> None:
    await nodes.start("one")
    assert await nodes.stop("one") == 0
    there = await nodes.until(lambda _: True)
    assert there == {keys.WRITTEN: str(NEWEST).encode()}, "which is for ever"
    assert "handed over" in (nodes.folder / "one" / "log").read_text()


async def test_a_daemon_that_is_pinned_to_what_it_does_not_know_says_so(nodes: Nodes) -> None:
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controllers.daemon", "--home", "h", "--config", "c"),
        env=os.environ | {PIN: "9"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await daemon.communicate()
    assert daemon.returncode == 2
    assert said.decode().count("\n") == 1
    assert f"{PIN}: schema version '9' is not supported. Use {OLDER} or {NEWEST}" in said.decode()
