"""The views when no controller answers, or when the record cannot be written."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from rich.console import Console

from controllers.api.jobs import JobsService
from controllers.cli.view.event_file import FILE_NAME, EventFile
from controllers.cli.view.screens import PlainScreen, trouble_lines
from controllers.cli.view.state import ViewState, WaitPoint
from controllers.daemon.keeper import ProcessKeeper
from gcore.config.local_cluster import EtcdProcess, LocalClusterState
from gcore.errors import StoreUnavailable
from gcore.observability.events import JobEvent
from gcore.system.network import free_ports
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

AWAY = "the store cannot be reached, tried for 5.0 s"


def test_a_line_says_that_it_begins_and_one_that_it_is_over() -> None:
    assert trouble_lines(None, "the cluster", AWAY, 100.0) == (f"waiting: the cluster: {AWAY}",)
    before = WaitPoint("the cluster", AWAY, 100.0)
    assert trouble_lines(before, "the cluster", "", 134.0) == ("waiting: the cluster recovered after 34s",)
    assert trouble_lines(None, "the cluster", "", 134.0) == ()


def test_the_same_reason_with_other_figures_is_no_news_and_another_reason_is() -> None:
    before = WaitPoint("the cluster", AWAY, 100.0)
    assert trouble_lines(before, "the cluster", AWAY.replace("5.0", "4.9"), 110.0) == ()
    assert trouble_lines(before, "the cluster", "etcd has ended", 110.0) == ("waiting: the cluster: etcd has ended",)


def test_the_drawn_view_shows_it_beside_what_the_job_waits_for_with_its_own_beginning() -> None:
    state = ViewState(waiting=(WaitPoint("node-0", "something", 90.0),)).with_trouble("the cluster", AWAY, 100.0)
    later = state.with_trouble("the cluster", "etcd has ended", 110.0)
    assert later.waiting == (WaitPoint("node-0", "something", 90.0), WaitPoint("the cluster", "etcd has ended", 100.0))
    assert later.with_trouble("the cluster", "", 120.0).waiting == (WaitPoint("node-0", "something", 90.0),)


@contextmanager
def full(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size`, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def event(sequence: int) -> JobEvent:
    return JobEvent(sequence, 0.0, "step", f"step {sequence} is committed")


def test_events_that_the_disk_does_not_take_are_written_in_order_when_it_does(tmp_path: Path) -> None:
    with EventFile(tmp_path) as record:
        assert record.offer(event(1)) == ""
        with full((tmp_path / FILE_NAME).stat().st_size + 10):
            assert all("cannot write the events" in record.offer(event(number)) for number in (2, 3))
        assert record.offer(event(4)) == ""
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert [JobEvent.from_line(line).sequence for line in lines] == [1, 2, 3, 4]


class Edge(Exception):
    """The error of a refused call."""


class Context:
    """Of a call."""

    async def abort(self, code: Any, words: str, metadata: Any = ()) -> None:
        raise Edge(words)


async def refusal(service: JobsService) -> str:
    with pytest.raises(Edge) as said:
        await service.GetJob(SimpleNamespace(job="j"), Context())  # type: ignore[arg-type]
    return str(said.value)


class AwayJobs:
    """The store is away."""

    async def find(self, name: str, namespace: str = "") -> str:
        raise StoreUnavailable(AWAY)


async def test_unavailable_store_error_gives_the_keepers_reason() -> None:
    jobs: Any = AwayJobs()
    trouble = ["etcd has ended and cannot be started again: no space left"]
    service = JobsService(jobs, None, None, FakeClock(), lambda: trouble[0])  # type: ignore[arg-type]
    assert await refusal(service) == trouble[0]
    trouble[0] = ""
    assert await refusal(service) == AWAY


async def test_the_keeper_says_why_etcd_cannot_be_started_again_until_it_can(tmp_path: Path) -> None:
    client, peer = free_ports(2)
    etcd = EtcdProcess(
        endpoint=f"127.0.0.1:{client}",
        data_dir=str(tmp_path / "data"),
        client_port=client,
        peer_port=peer,
        binary="e",
        pid=1,
        started=1,
    )
    (tmp_path / "cluster.json").write_text(
        LocalClusterState(home=str(tmp_path), etcd=etcd, controllers=()).model_dump_json()
    )
    clock = FakeClock()
    keeper = ProcessKeeper(tmp_path, "node-0", MemoryStore(MemoryCluster(clock), "node-0"), clock)
    (tmp_path / "data").write_text("a file where its folder should be")
    await keeper.look()
    assert keeper.trouble.startswith("etcd has ended and cannot be started again: etcd: cannot create its data folder")
    (tmp_path / "stopping").touch()
    await keeper.look()
    assert keeper.trouble == ""


async def test_the_keeper_says_why_when_etcd_is_started_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "etcd.log").write_text(
        '{"level":"info","msg":"started"}\n{"level":"fatal","msg":"failed to write","error":"no space left on device"}\ngoroutine 1\n'
    )
    clock = FakeClock()
    keeper = ProcessKeeper(tmp_path, "node-0", MemoryStore(MemoryCluster(clock), "node-0"), clock)
    keeper._bring_back_etcd = AsyncMock()  # type: ignore[method-assign]
    for number in range(4):  # the first is the one that was there
        assert keeper.trouble == ""
        etcd = EtcdProcess(
            endpoint="h:9", data_dir="d", client_port=9, peer_port=9, binary="e", pid=number + 2, started=1
        )
        cluster = LocalClusterState(home=str(tmp_path), etcd=etcd, controllers=())
        (tmp_path / "cluster.json").write_text(cluster.model_dump_json())
        await keeper.look()
        clock.jump(5.0)
    assert keeper.trouble == (
        "etcd has ended 3 times within 60 s after being started; its last log line: failed to write: no space left on device"
    )
    clock.jump(60.0)
    await keeper.look()
    assert keeper.trouble == ""


def test_a_view_that_goes_to_a_full_disk_does_not_end_the_run() -> None:
    disk = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 - closing it fails too
    screen = PlainScreen(Console(file=disk))
    screen.trouble("the cluster", AWAY, 1.0)
    screen.show(event(1))
    assert screen.state.sequence == 1
    with pytest.raises(OSError, match="No space left"):
        disk.close()


def test_a_view_that_nobody_reads_any_more_ends() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with suppress(OSError), open(writes, "w", encoding="utf-8") as pipe:
        screen = PlainScreen(Console(file=pipe))
        with pytest.raises(BrokenPipeError):
            screen.show(event(1))
