"""What a daemon hears of the cluster, and what it does with what it cannot read."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.wire import _work_on
from gcore.errors import GcoreError, SpecError
from gcore.ledger.job import NodeRecord
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

NODE = NodeRecord(name="node-0", incarnation="node-0.a", address="h:1", slots=("cpu:0",), pid=1)


async def heard(**nodes: bytes) -> dict[str, NodeRecord]:
    memory = MemoryCluster(FakeClock())
    memory.transact((), tuple(Put(keys.node(name.replace("_", "-")), value) for name, value in nodes.items()))
    changes = Changes()
    mirror = ClusterMirror(MemoryStore(memory), changes)
    watching = asyncio.create_task(mirror.watch_nodes())
    await changes.until(lambda: keys.NODES in mirror.listened)
    watching.cancel()
    return mirror.nodes


async def test_a_registration_of_another_version_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    later = NODE.encode().replace(b'"schema_version":2', b'"schema_version":7')
    assert await heard(node_0=NODE.encode(), node_1=later, node_2=b"?") == {"node-0": NODE}
    assert "schema version 7" in caplog.text


@pytest.mark.parametrize("error", [UnreadableRecord("of another version"), SpecError("no flow is called 'new'")])
async def test_a_job_that_cannot_be_read_ends_its_runner_and_not_the_daemon(
    error: GcoreError, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(error))

    left = []

    async def withdraw() -> None:
        left.append("u")

    runner: Any = SimpleNamespace(run=run, uid="u", withdraw=withdraw)
    with caplog.at_level(logging.ERROR):
        await _work_on(runner)
    assert error.what in caplog.text
    assert left == ["u"]  # its peers do not wait for its lease's end


async def test_a_defect_ends_the_daemon() -> None:
    async def run() -> None:
        raise AssertionError("a defect")

    runner: Any = SimpleNamespace(run=run, uid="u")
    with pytest.raises(AssertionError):
        await _work_on(runner)


async def fail(error: GcoreError) -> None:
    raise error
