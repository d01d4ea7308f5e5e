"""Closed accounting periods are written, even when the accountant is asked to stop meanwhile."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import SPEC, running_job, worker_record

from controllers.accounting import collector as booking
from controllers.accounting.collector import AccountCollector
from gcore.errors import EngineError
from gcore.ledger.records.slot_accounting import AccountLine, NodeAccounts
from gcore.observability.metrics import Metrics
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Version

KEYS = JobKeys("u")


async def test_a_step_that_was_closed_is_written_though_its_round_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a job's end the last step's book is often just being written: on a slow disk it would be in no file."""
    asked, go_on, written = threading.Event(), threading.Event(), list[AccountLine]()

    def slow_append(run_dir: Path, line: AccountLine) -> None:
        asked.set()
        go_on.wait()
        written.append(line)

    monkeypatch.setattr(booking, "append_line", slow_append)
    clock = FakeClock()
    memory = MemoryCluster(clock)
    lease = await MemoryStore(memory).grant(600)
    kept = AccountCollector(MemoryStore(memory), KEYS, "node-0", lease, Metrics(), clock)
    await kept.begin(SPEC, tmp_path, None)
    kept.look(running_job(), held_back=False)
    await clock.advance(100.0)
    kept.head_moved(Version(0, 1))
    await clock.advance(100.0)
    reading = asyncio.create_task(kept.run())
    assert await asyncio.to_thread(asked.wait, 10)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    threading.Timer(0.05, go_on.set).start()
    await kept.finish()
    assert [line.book.version for line in written] == [Version(0, 1)]
    told: Any = await MemoryStore(memory).get(KEYS.books("node-0"))
    assert [book.version for book in NodeAccounts.decode(told.value).steps] == [Version(0, 1)]


async def test_workers_are_needed_until_the_last_reading(tmp_path: Path) -> None:
    """A daemon that ends the engines of an ended job before would leave their last seconds unbooked."""
    read, was_read = list[bool](), asyncio.Event()

    class EngineThatEnds:
        async def metrics(self) -> str:
            read.append(kept.is_reading)
            was_read.set()
            raise EngineError("it has no metrics")

        async def close(self) -> None:
            """Nothing is open."""

    released = list[bool]()
    clock = FakeClock()
    memory = MemoryCluster(clock)
    lease = await MemoryStore(memory).grant(600)
    connect: Any = lambda *_, **__: EngineThatEnds()  # noqa: E731
    kept = AccountCollector(
        MemoryStore(memory),
        KEYS,
        "node-0",
        lease,
        Metrics(),
        clock,
        connect,
        finished=lambda: released.append(kept.is_reading),
    )
    await kept.begin(SPEC, tmp_path, None)
    view = running_job()
    kept.look(replace(view, workers={**view.workers, "e": worker_record("e", "rollout", "node-0")}), held_back=False)
    assert not kept.is_reading
    reading = asyncio.create_task(kept.run())
    await was_read.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    before = len(read)
    assert kept.is_reading
    await kept.finish()
    assert len(read) > before
    assert all(read)
    assert released == [False]
