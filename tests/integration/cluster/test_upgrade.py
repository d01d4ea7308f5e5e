"""A rolling upgrade under a running job: three daemons from an earlier commit's wheel are replaced one after the other by today's.

The earlier commit is the newest one that changed the package; GCORE_UPGRADE_FROM names another.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml
from chaos_cluster import TTL_S, ChaosCluster, Shape
from chaos_run import prepare, spec_file
from wheel_venv import Installed, commit_before, git, install

from gcore.ledger.records.job import JobPhase
from gcore.store import keys
from gcore.system.process import process_status, wait_process_ended

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(900)]

NODES, STEPS, FIRST, BETWEEN = 3, 120, 4, 4
LIFE_S = 240.0
FROM = "GCORE_UPGRADE_FROM"


async def test_three_daemons_are_upgraded_one_by_one_under_a_running_job(tmp_path: Path) -> None:
    commit = git("rev-parse", f"{os.environ[FROM]}^{{commit}}").strip() if os.environ.get(FROM) else commit_before()
    old = await asyncio.to_thread(install, tmp_path / "old", commit)
    new = await asyncio.to_thread(install, tmp_path / "new")
    prepare(tmp_path)
    spec = spec_file(tmp_path, STEPS)
    async with ChaosCluster.running(
        tmp_path / "cluster", Shape(nodes=NODES, slots=1), random.Random(3), up=False
    ) as cluster:
        for name in cluster.daemons:
            run_with(cluster, name, old)
            cluster.daemons[name].wanted = True
        await cluster.serve()
        await cluster.submit(spec, "train.ranks=2")
        await cluster.until(f"step {FIRST}", partial(is_at, cluster, FIRST), LIFE_S)
        workers = {name for name in await cluster.workers() if name.endswith("supervisor")}
        audits = []
        for name in sorted(cluster.daemons):
            await upgrade(cluster, name, new)
            goal = cluster.seen.step + BETWEEN
            await cluster.until(f"step {goal} after {name}", partial(is_at, cluster, goal), LIFE_S)
            assert not cluster.ended, "the job is too short for the upgrade"
            audits += await cluster.audit()
        for name, daemon in cluster.daemons.items():
            assert daemon.process is not None
            assert f"{new.folder}/" in command_of(daemon.process.pid), name
        assert {name for name in await cluster.workers() if name.endswith("supervisor")} == workers, (
            "engines and ranks of the version before were to go on"
        )
        await cluster.until("end of the job", lambda: cluster.ended, LIFE_S)
        audits += [*await cluster.audit(), *cluster.seen.broken]
        status = cluster.seen.mirror.status
        assert status is not None
        assert (status.record.phase, cluster.seen.step) == (JobPhase.SUCCEEDED, STEPS), status.record.reason
        assert audits == []
        assert cluster.seen.rollbacks == 0, "daemons come and go; the train world does not"


async def upgrade(cluster: ChaosCluster, name: str, new: Installed) -> None:
    """As an operator does it: end the daemon in good order, install, start it again."""
    daemon, before = cluster.daemons[name], cluster.seen.incarnation(name)
    assert daemon.process is not None
    daemon.wanted = False
    daemon.signal(signal.SIGTERM)
    ended = await asyncio.to_thread(wait_process_ended, daemon.process, 30.0)
    assert ended, f"{name} does not end"
    run_with(cluster, name, new)
    daemon.wanted = True
    await cluster.until(f"{name} of the new wheel", lambda: cluster.seen.incarnation(name) not in (None, before))
    kv = await cluster.store.get(keys.node(name))
    assert kv is not None


def run_with(cluster: ChaosCluster, name: str, installed: Installed) -> None:
    """From its next start on. The configuration says only what every version reads."""
    home = cluster.homes[name]
    host, _, port = cluster.addresses[name].rpartition(":")
    config = {
        "node": name,
        "home": str(home),
        "listen_host": host,
        "listen_port": int(port),
        "etcd": {"endpoints": list(cluster.endpoints.values())},
        "slots": ["cpu:0"],
        "run_root": str(cluster.run_root(name)),
        "lease_ttl_s": TTL_S,
    }
    file = home / "node.yaml"
    file.write_text(yaml.safe_dump(config))
    daemon = cluster.daemons[name]
    daemon.command = [installed.controller, "--home", str(home), "--config", str(file)]
    daemon.environment["PYTHONPATH"] = str(cluster.packages)


def command_of(pid: int) -> str:
    assert process_status(pid) is not None
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def is_at(cluster: ChaosCluster, step: int) -> bool:
    return cluster.ended or cluster.seen.step >= step
