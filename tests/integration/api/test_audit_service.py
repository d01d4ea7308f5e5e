"""`gcore audit` against a real controller service and a real etcd: damaged records end the command with exit code 1."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from corruptions import (
    Refuted,
    Scene,
    archived_line_changed,
    cursors_ahead,
    ended_twice,
    half_a_record,
    receipt_of_another_group,
    sealed_again,
)
from recorded_job import KEYS, UID, RecordedJob, a_job_under_way

from controllers.api.jobs import JobsService
from controllers.api.store_reader import StoreReader
from gcore.api.v1 import jobs_pb2_grpc
from gcore.store import keys
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd
from gcore.store.types import Delete, Put
from gcore.system.clock import SystemClock

CLOCK = SystemClock()
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def job(tmp_path: Path) -> RecordedJob:
    return await asyncio.to_thread(a_job_under_way, tmp_path / f"sums-{UID}")


@pytest.fixture
async def store(etcd: LocalEtcd, job: RecordedJob) -> AsyncIterator[EtcdStore]:
    """With the job's records, as they were written in memory."""
    store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    await store.transact((), (Delete(KEYS.prefix, prefix=True),))
    await store.transact((), [Put(kv.key, kv.value) for kv in job.cluster.listing(keys.ROOT).kvs])
    yield store
    await store.close()


@pytest.fixture
async def address(store: EtcdStore) -> AsyncIterator[str]:
    """Where a controller's service answers."""

    async def submissions() -> Any:
        raise NotImplementedError

    server = grpc.aio.server()
    service = JobsService(StoreReader(store), submissions, lambda uid: None, CLOCK)
    jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=None)


async def audited(address: str) -> tuple[int, dict[str, Any]]:
    words = ("audit", "sums", "--address", address, "-o", "json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controllers.cli.main", *words, env=dict(os.environ), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out)


async def test_a_job_that_adds_up_ends_with_0_and_tells_its_balance(address: str) -> None:
    code, said = await audited(address)
    assert (code, said["clean"], said["violations"], said["findings"]) == (0, True, [], [])
    assert said["issued"] == said["trained"] + said["filtered"] + said["failed"] + said["in_flight"] == 31


@pytest.mark.parametrize(
    "corruption",
    [ended_twice, cursors_ahead, receipt_of_another_group, archived_line_changed, sealed_again, half_a_record],
    ids=lambda one: one.__name__,
)
async def test_damage_to_what_etcd_holds_ends_with_1_and_names_the_prompts(
    store: EtcdStore, job: RecordedJob, address: str, corruption: Callable[[Scene], Refuted]
) -> None:
    before = {kv.key.removeprefix(KEYS.prefix): kv.value for kv in (await store.list(KEYS.prefix)).kvs}
    scene = Scene(dict(before), job.run_dir)
    refuted = corruption(scene)
    changed = [Put(KEYS.prefix + key, value) for key, value in scene.records.items() if before.get(key) != value]
    if changed:
        await store.transact((), changed)
    code, said = await audited(address)
    assert (code, said["clean"]) == (1, False)
    fitting = [one for one in said["findings"] if one["kind"] == refuted.kind and refuted.words in one["sentence"]]
    assert any({str(ref) for ref in refuted.refs} <= set(one["refs"]) for one in fitting), said["findings"]
