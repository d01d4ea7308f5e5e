"""Faults that disable a whole cluster or point at a wrong cause: all daemons lost, a store that refuses writes, a lost head."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from aetcd import rpc
from cluster_run import ClusterRun, gcore
from emulated_job import write_emulated_job

from gcore.config.local_cluster import LocalClusterState
from gcore.store.client import EtcdStore
from gcore.store.keys import JobKeys
from gcore.store.types import Delete
from gcore.system.clock import SystemClock

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

NOSPACE, ACTIVATE, DEACTIVATE = 1, 1, 2
STEPS = 12


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of `STEPS` steps on emulated slots, after its second step."""
    flow = {"steps": STEPS, "groups_per_step": 16, "samples_per_prompt": 2}
    spec = write_emulated_job(tmp_path, monkeypatch, "lost", speedup=2.0, flow=flow, checkpoint={"every": 2})
    found = ClusterRun(spec, tmp_path / "home", "--slots", "emulated:4")
    try:
        found.until_step(2)
        yield found
    finally:
        found.close()


def cluster_of(run: ClusterRun) -> LocalClusterState:
    cluster = LocalClusterState.load(run.home)
    assert cluster is not None
    return cluster


def test_all_daemons_and_etcd_are_killed_at_once_and_the_command_brings_them_back(run: ClusterRun) -> None:
    cluster = cluster_of(run)
    for process in (*(one.process for one in cluster.controllers), cluster.etcd.process):
        os.kill(process.pid, signal.SIGKILL)
    ended = run.wait()
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", STEPS)
    for name in ("etcd", "node-0", "node-1"):
        assert f"{name} was ended by SIGKILL and was restarted" in ended.output


def set_alarm(endpoint: str, action: int) -> None:
    """Raise or disarm etcd's NOSPACE alarm, under which it answers reads and refuses writes."""

    async def ask() -> None:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            maintenance = rpc.MaintenanceStub(channel)
            member = (await maintenance.Status(rpc.StatusRequest())).header.member_id
            await maintenance.Alarm(rpc.AlarmRequest(action=action, memberID=member, alarm=NOSPACE))

    asyncio.run(ask())


def test_a_store_that_refuses_writes_is_named_and_the_run_goes_on_when_it_takes_them(run: ClusterRun) -> None:
    endpoint = cluster_of(run).etcd.endpoint
    set_alarm(endpoint, ACTIVATE)
    run.until("the cause in the view", lambda: "cannot write to the store" in run.log.read_text())
    said = run.until(
        "the cause in describe", lambda: [w for w in getattr(run.job(), "waiting", ()) if w.cause == "store"]
    )
    assert "the store's database is full" in said[0].what
    assert "no progress for" not in run.log.read_text()
    set_alarm(endpoint, DEACTIVATE)
    ended = run.wait()
    assert (ended.code, ended.summary["audit"]) == (0, "clean"), ended.output


def test_a_job_whose_head_is_deleted_fails_with_its_key_and_is_not_certified(run: ClusterRun) -> None:
    job = run.job()
    assert job is not None
    head = JobKeys(job.uid).head

    async def delete() -> None:
        store = await EtcdStore.connect([cluster_of(run).etcd.endpoint], clock=SystemClock())
        await store.transact((), (Delete(head),))
        await store.close()

    asyncio.run(delete())
    ended = run.wait()
    assert ended.code == 1, ended.output
    assert ended.summary["reason"].startswith(f"the store has lost {head}")
    assert ended.summary["audit"] != "clean"
    assert "AssertionError" not in ended.output
    assert gcore("audit", job.uid, "--home", str(run.home), check=None).returncode == 1
