"""Supervisors and their children as real processes, on a real etcd."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gcore.store import keys
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd
from gcore.store.reference import StoreRef
from gcore.store.types import Delete, KeyValue, Put, WatchEvent
from gcore.system.clock import SystemClock
from gcore.system.process import (
    ProcessId,
    identify_process,
    is_running,
    send_signal,
    terminate_process,
    wait_process_ended,
)
from gcore.worker.main import start_worker
from gcore.worker.records import LaunchSpec, WorkerRecord

CHILD = Path(__file__).with_name("worker_child.py")
SERVE = ["tell", "serving", {"address": "127.0.0.1:4711"}]
READY = ["tell", "progress", {"phase": "waiting", "progress": 1}]
LONG_S = 60.0
"""Only reached when something is broken."""


@dataclass
class Node:
    """A node of its own in the store, with a controller (a key) at first."""

    store: EtcdStore
    endpoint: str
    home: Path
    name: str = field(default_factory=lambda: f"node-{uuid.uuid4().hex[:8]}")
    started: list[ProcessId] = field(default_factory=list)
    history: list[WatchEvent] = field(default_factory=list)
    heard: asyncio.Condition = field(default_factory=asyncio.Condition)

    def spec(self, *steps: list[Any], **changes: Any) -> LaunchSpec:
        instance = f"w-{uuid.uuid4().hex[:8]}"
        defaults: dict[str, Any] = {
            "instance": instance,
            "node": self.name,
            "role": "rollout",
            "job_uid": self.name,
            "slot": "cpu:0",
            "store": StoreRef(endpoints=(self.endpoint,)),
            "log_file": str(self.home / "logs" / f"{instance}.log"),
            "command": (sys.executable, str(CHILD)),
            "child": {"steps": steps},
            "lease_ttl_s": 2,
            "stop_grace_s": LONG_S,
            "linger_s": 1.0,
        }
        return LaunchSpec.model_validate(defaults | changes)

    def start(self, spec: LaunchSpec) -> ProcessId:
        supervisor = start_worker(spec, self.home)
        self.started.append(supervisor)
        return supervisor

    async def listen(self) -> None:
        """Writes the history down, from the beginning on: what lasted a moment only is not missed."""
        async for batch in self.store.watch(keys.WORKERS):
            async with self.heard:
                self.history += batch.events
                self.heard.notify_all()

    async def shown(self, spec: LaunchSpec, state: str, after: int = 0) -> WorkerRecord:
        """The registration as soon as its state was `state`, in a revision later than `after`."""
        async with asyncio.timeout(LONG_S), self.heard:
            while True:
                for kv in self._written(spec):
                    record = WorkerRecord.decode(kv.value)
                    if record.state == state and kv.mod_revision > after:
                        return record
                await self.heard.wait()

    async def gone(self, spec: LaunchSpec) -> None:
        """Until the registration is gone."""
        async with asyncio.timeout(LONG_S), self.heard:
            await self.heard.wait_for(lambda: self._events(spec)[-1].kind == "delete")

    def _events(self, spec: LaunchSpec) -> list[WatchEvent]:
        return [event for event in self.history if event.kv.key == keys.worker(spec.instance)]

    def _written(self, spec: LaunchSpec) -> list[KeyValue]:
        return [event.kv for event in self._events(spec) if event.kind == "put"]

    async def has_controller(self, present: bool, node: str | None = None) -> None:
        key = keys.node(node or self.name)
        await self.store.transact((), (Put(key, b"{}") if present else Delete(key),))

    def log(self, spec: LaunchSpec) -> str:
        """What the child said."""
        path = Path(spec.log_file)
        return path.read_text() if path.exists() else ""

    def supervisor_log(self, spec: LaunchSpec) -> str:
        return (self.home / "logs" / f"{spec.instance}.supervisor.log").read_text()


async def ended(process: ProcessId) -> None:
    assert await asyncio.to_thread(wait_process_ended, process, LONG_S)


def child_of(record: WorkerRecord) -> ProcessId:
    assert record.child_pid is not None
    child = identify_process(record.child_pid)
    assert child is not None
    return child


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEtcd]:
    folder = tmp_path_factory.mktemp("etcd")
    etcd = asyncio.run(LocalEtcd.start(folder / "data", log_file=folder / "log", clock=SystemClock()))
    yield etcd
    terminate_process(etcd.process, grace_s=0)


@asynccontextmanager
async def a_node(etcd: LocalEtcd, home: Path) -> AsyncIterator[Node]:
    store = await EtcdStore.connect([etcd.endpoint], clock=SystemClock())
    node = Node(store, etcd.endpoint, home)
    await node.has_controller(True)
    listening = asyncio.create_task(node.listen())
    try:
        yield node
    finally:
        listening.cancel()
        for process in node.started:
            terminate_process(process, grace_s=0)
        await store.close()


@pytest.fixture
async def node(shared_etcd: LocalEtcd, tmp_path: Path) -> AsyncIterator[Node]:
    async with a_node(shared_etcd, tmp_path) as node:
        yield node


async def test_a_serving_child_is_found_in_the_store_and_a_stop_ends_it_in_order(node: Node) -> None:
    spec = node.spec(["say environment", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "EXTRA"], SERVE, env={"EXTRA": "1"})
    supervisor = node.start(spec)
    record = await node.shown(spec, "serving")
    assert (record.address, record.process) == ("127.0.0.1:4711", supervisor)
    child = child_of(record)
    send_signal(supervisor, signal.SIGTERM)
    await ended(supervisor)
    await node.gone(spec)
    assert not is_running(child)
    assert node.log(spec).split("\n") == ["OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 EXTRA=1", "stopped as told", ""]
    assert "stopping: received SIGTERM" in node.supervisor_log(spec)


async def test_a_child_runs_on_its_cores_alone_in_its_jobs_group_and_folder(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    core = min(os.sched_getaffinity(0))
    folder, group = Path(tempfile.mkdtemp(prefix="gcore-j-")), tmp_path / "group"
    group.mkdir()
    try:
        spec = node.spec(
            ["say environment", "TMPDIR", "PWD"], SERVE, cpus=(core,), cgroup=str(group), folder=str(folder)
        )
        supervisor = node.start(spec)
        record = await node.shown(spec, "serving")
        child = child_of(record)
        assert os.sched_getaffinity(child.pid) == {core}
        assert os.readlink(f"/proc/{child.pid}/cwd") == str(folder)
        assert f"TMPDIR={folder}/tmp" in node.log(spec)
        assert (folder / "tmp").is_dir()
        assert (group / "cgroup.procs").read_text() == str(supervisor.pid), (
            "it moved itself, before it started the child"
        )
    finally:
        shutil.rmtree(folder)


async def test_cores_that_are_not_to_be_had_are_a_failure_that_names_them(node: Node) -> None:
    spec = node.spec(SERVE, slot="cpu:4000-4001", cpus=(4000, 4001))
    node.start(spec)
    failed = await node.shown(spec, "failed")
    assert "cpu:4000-4001" in failed.reason
    assert failed.child_pid is None


async def test_a_group_that_is_gone_is_no_failure(node: Node, tmp_path: Path) -> None:
    spec = node.spec(SERVE, cgroup=str(tmp_path / "gone"))
    node.start(spec)
    await node.shown(spec, "serving")
    assert "runs without its job's limits" in node.supervisor_log(spec)


async def test_a_child_that_does_not_stop_is_shown_as_stopping_and_killed_when_it_is_asked_again(node: Node) -> None:
    spec = node.spec(SERVE, ["sleep"])
    supervisor = node.start(spec)
    child = child_of(await node.shown(spec, "serving"))
    send_signal(supervisor, signal.SIGTERM)
    assert (await node.shown(spec, "stopping")).reason == "received SIGTERM"
    assert is_running(child)
    send_signal(supervisor, signal.SIGTERM)
    await ended(supervisor)
    assert not is_running(child)
    await node.gone(spec)


async def test_a_killed_child_is_shown_as_failed_and_why(node: Node) -> None:
    spec = node.spec(["say", "last words"], SERVE)
    supervisor = node.start(spec)
    os.kill(child_of(await node.shown(spec, "serving")).pid, signal.SIGKILL)
    assert (await node.shown(spec, "failed")).reason == "killed by SIGKILL: last words"
    await ended(supervisor)
    await node.gone(spec)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (
            [["say", "Traceback"], ["say", "ValueError: no"], ["exit", 3]],
            "ended by itself with exit code 3: Traceback | ValueError: no",
        ),
        ([["tell", "failed", {"reason": "no such model"}], ["exit", 2]], "no such model"),
    ],
    ids=["a crash", "a failure told"],
)
async def test_a_child_that_fails_while_it_starts_is_shown_with_its_last_words(
    node: Node, steps: list[list[Any]], reason: str
) -> None:
    spec = node.spec(*steps)
    node.start(spec)
    assert (await node.shown(spec, "failed")).reason == reason


async def test_a_command_that_does_not_exist_is_shown_as_failed(node: Node) -> None:
    spec = node.spec(command=("/no/such/engine",))
    node.start(spec)
    assert "cannot start '/no/such/engine': No such file or directory" in (await node.shown(spec, "failed")).reason


async def test_a_child_dies_with_its_supervisor_and_the_registration_with_its_lease(node: Node) -> None:
    spec = node.spec(SERVE)
    supervisor = node.start(spec)
    child = child_of(await node.shown(spec, "serving"))
    send_signal(supervisor, signal.SIGKILL)
    await ended(child)
    await node.gone(spec)


async def test_grandchildren_of_a_dead_child_are_killed(node: Node) -> None:
    spec = node.spec(["leave a grandchild"], SERVE)
    node.start(spec)
    child = child_of(await node.shown(spec, "serving"))
    grandchild = identify_process(int(node.log(spec).split()[1]))
    assert grandchild is not None
    os.kill(child.pid, signal.SIGKILL)
    await node.shown(spec, "failed")
    await ended(grandchild)


async def test_a_hung_child_is_killed_by_the_watchdog(node: Node) -> None:
    spec = node.spec(SERVE, ["tell", "progress", {"phase": "update", "progress": 1}], watchdog_s=0.5)
    node.start(spec)
    child = child_of(await node.shown(spec, "serving"))
    record = await node.shown(spec, "failed")
    assert re.fullmatch(r"no progress in phase 'update' for \d+ s", record.reason)
    await ended(child)


async def test_a_child_that_was_stopped_by_a_signal_is_found_though_it_only_waits(node: Node) -> None:
    spec = node.spec(SERVE, READY, watchdog_s=0.5)
    node.start(spec)
    child = child_of(await node.shown(spec, "serving"))
    os.kill(child.pid, signal.SIGSTOP)
    assert "stopped by a signal" in (await node.shown(spec, "failed")).reason
    await ended(child)


async def test_a_child_that_never_serves_is_failed(node: Node) -> None:
    spec = node.spec(["sleep"], start_limit_s=2.0)
    node.start(spec)
    assert (await node.shown(spec, "failed")).reason == "did not serve within 2 s of its start"


async def test_a_worker_without_a_controller_on_its_node_drains_and_ends(node: Node) -> None:
    spec = node.spec(SERVE, orphan_grace_s=1.0)
    supervisor = node.start(spec)
    await node.shown(spec, "serving")
    await node.has_controller(False)
    await ended(supervisor)
    await node.gone(spec)
    assert node.log(spec) == "stopped as told\n"
    assert f"orphaned: node {node.name} has had no controller" in node.supervisor_log(spec)


async def test_a_worker_whose_controller_came_back_stays(node: Node) -> None:
    adopted = node.spec(SERVE, orphan_grace_s=1.0)
    orphan = node.spec(SERVE, orphan_grace_s=1.0, node=node.name + "-b")
    await node.has_controller(True, orphan.node)
    supervisors = [node.start(spec) for spec in (adopted, orphan)]
    for spec in (adopted, orphan):
        await node.shown(spec, "serving")
    await node.has_controller(False)
    await node.has_controller(False, orphan.node)  # its grace begins later, and so does its end
    await node.has_controller(True)
    await ended(supervisors[1])
    assert is_running(supervisors[0])
    assert (await node.shown(adopted, "serving")).state == "serving"


async def test_a_second_instance_for_the_same_rank_is_refused_and_starts_no_child(node: Node) -> None:
    rank = {"role": "train", "world": "w", "rank": 0}
    first, second = node.spec(SERVE, **rank), node.spec(SERVE, **rank)
    node.start(first)
    await node.shown(first, "serving")
    supervisor = node.start(second)
    refused = await node.shown(second, "failed")
    assert (refused.reason, refused.child_pid) == (f"rank 0 of world w is taken by worker {first.instance}", None)
    await ended(supervisor)
    assert node.log(second) == ""


async def test_the_rendezvous_of_rank_0_reaches_the_other_ranks_and_only_them(node: Node) -> None:
    late = node.spec(["serve where the rendezvous is"], role="train", world="w", rank=1)
    zero = node.spec(["tell", "store", {"address": "10.0.0.1:29500"}], SERVE, role="train", world="w", rank=0)
    other = node.spec(["serve where the rendezvous is"], role="train", world="w2", rank=1)
    for spec in (other, late, zero):
        node.start(spec)
    assert (await node.shown(late, "serving")).address == "10.0.0.1:29500"
    assert (await node.shown(zero, "serving")).address == "127.0.0.1:4711"
    assert (await node.shown(other, "starting")).address == ""


async def test_a_lost_lease_is_replaced_while_the_child_works_on(node: Node) -> None:
    spec = node.spec(SERVE)
    node.start(spec)
    before = await node.shown(spec, "serving")
    kv = await node.store.get(keys.worker(spec.instance))
    assert kv is not None
    await node.store.revoke(kv.lease)
    assert await node.shown(spec, "serving", after=kv.mod_revision) == before


async def test_an_unusable_launch_document_is_one_sentence(node: Node) -> None:
    spec = node.spec(SERVE)
    supervisor = node.start(spec.model_copy(update={"role": "train"}))
    await ended(supervisor)
    log = node.supervisor_log(spec)
    assert "a train rank has both" in log
    assert "Traceback" not in log


async def test_a_child_works_on_while_the_store_is_away_and_what_happened_is_shown_later(tmp_path: Path) -> None:
    start = partial(LocalEtcd.start, tmp_path / "etcd", log_file=tmp_path / "etcd.log", clock=SystemClock())
    etcd = await start()
    try:
        async with a_node(etcd, tmp_path) as node:
            quiet, dying = node.spec(SERVE), node.spec(SERVE)
            for spec in (quiet, dying):
                node.start(spec)
            child, doomed = [child_of(await node.shown(spec, "serving")) for spec in (quiet, dying)]
            terminate_process(etcd.process, grace_s=0)
            os.kill(doomed.pid, signal.SIGKILL)
            await ended(doomed)
            etcd = await start(client_port=etcd.client_port, peer_port=etcd.peer_port)
            assert (await node.shown(dying, "failed")).reason == "killed by SIGKILL"
            assert is_running(child)
            there = await node.store.get(keys.worker(quiet.instance))
            assert there is not None
            assert WorkerRecord.decode(there.value).child_pid == child.pid
    finally:
        terminate_process(etcd.process, grace_s=0)


async def test_a_worker_that_never_found_the_store_goes_when_it_is_told_to(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        spec = node.spec(SERVE, store=StoreRef(endpoints=(f"127.0.0.1:{silent.getsockname()[1]}",)))
        supervisor = node.start(spec)
        await asyncio.to_thread(until_it_handles_sigterm, supervisor)
        send_signal(supervisor, signal.SIGTERM)
        await ended(supervisor)
    assert "stopping: received SIGTERM" in node.supervisor_log(spec)
    assert node.log(spec) == ""


def until_it_handles_sigterm(process: ProcessId) -> None:
    while not wait_process_ended(process, timeout_s=0.02):
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        if caught is not None and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
    raise AssertionError("it ended")


async def test_a_child_that_is_stuck_in_a_collective_is_killed_and_so_is_the_one_that_never_comes(node: Node) -> None:
    program = Path(__file__).with_name("collective_child.py")
    command = (sys.executable, str(program))
    both = [
        node.spec(command=command, child={"rank": rank, "meet": str(node.home / "meet")}, watchdog_s=3.0)
        for rank in range(2)
    ]
    for spec in both:
        node.start(spec)
    stuck, stopped = [child_of(await node.shown(spec, "serving")) for spec in both]
    os.kill(stopped.pid, signal.SIGSTOP)
    reasons = [(await node.shown(spec, "failed")).reason for spec in both]
    assert re.match(r"no progress in phase 'collective' for \d+ s", reasons[0])
    assert re.match(r"no progress in phase '(collective|stopped by a signal)' for \d+ s", reasons[1])
    for child in (stuck, stopped):
        await ended(child)
