"""A daemon as a system service, a real process with a real etcd: readiness, messages to systemd, configuration."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from daemon_service import NOT_SERVING, SERVING, Service
from etcd_tools import EtcdTools
from stopping import stop_process

from controllers.cluster.rules import FAILURES
from gcore.api.authority import CertificateRequest, issue_certificate_into, make_authority
from gcore.errors import CannotListen, StoreUnavailable, UsageError
from gcore.ledger.records.cluster import Claim, Shares, SickSlots
from gcore.ledger.records.job import NodeRecord
from gcore.store import keys
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd
from gcore.store.keys import JobKeys
from gcore.store.types import Delete, Put
from gcore.system.clock import SystemClock
from gcore.worker.records import WorkerRecord

CLOCK = SystemClock()
ROOT = Path(__file__).parents[3]
NOBODYS = "192.0.2.1"
"""An address that no machine has: it is for documents."""
pytestmark = [pytest.mark.serial, pytest.mark.timeout(120)]


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[LocalEtcd]:
    started = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "etcd.log", clock=CLOCK)
    yield started
    os.kill(started.process.pid, signal.SIGCONT)
    await started.stop()


async def test_it_is_ready_while_it_can_work_and_says_what_it_waits_for(tmp_path: Path, etcd: LocalEtcd) -> None:
    service = Service(tmp_path, etcd.endpoint)
    stop_process(etcd.process.pid)
    await service.start(WATCHDOG_USEC="600000")
    try:
        assert "store" in await service.hears("STATUS=waiting for the store")
        assert await service.health() == NOT_SERVING
        await service.hears("WATCHDOG=1")
        assert not any("READY=1" in said for said in service.said)
        os.kill(etcd.process.pid, signal.SIGCONT)
        assert "ready: 1 slots" in await service.hears("READY=1")
        assert await service.health() == SERVING
        store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
        found = await store.get(keys.node("node-a"))
        assert found is not None
        assert NodeRecord.decode(found.value).address == f"localhost:{service.port}"
        await store.close()

        stop_process(etcd.process.pid)  # the lease is not renewed any more
        await service.until(lambda health: health == NOT_SERVING)
        await service.hears("STATUS=waiting for the store: the lease is not renewed")
        os.kill(etcd.process.pid, signal.SIGCONT)
        await service.until(lambda health: health == SERVING)
        assert sum("READY=1" in said for said in service.said) == 1

        service.process.send_signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in await service.hears("RELOADING=1")
        await service.hears("READY=1")
        service.process.send_signal(signal.SIGTERM)
        await service.hears("STOPPING=1")
        assert await service.process.wait() == 0
    finally:
        await service.end()


async def test_the_stores_user_has_its_password_from_a_file_and_a_wrong_one_is_one_sentence(
    tmp_path: Path, etcd: LocalEtcd
) -> None:
    await _with_users(etcd)
    service = Service(tmp_path, etcd.endpoint)
    service.config["etcd"]["user"] = {"name": "root", "password_file": "password"}
    (tmp_path / "password").write_text("wrong\n")
    (tmp_path / "password").chmod(0o600)
    process = await service.start()
    assert await process.wait() == StoreUnavailable.exit_code
    assert "invalid user ID or password" in (last := (tmp_path / "log").read_text().splitlines()[-1])
    assert last.startswith("gcore-controller: etcd at ")
    (tmp_path / "password").write_text("right\n")
    await service.start()
    try:
        await service.hears("READY=1")
    finally:
        await service.end()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param(
            {"etcd": {"endpoints": ["a:1"], "user": {"name": "u", "password_file": "none"}}}, "none", id="password"
        ),
        pytest.param({"etcd": {"endpoints": ["https://a:1"], "tls": {"ca": "no-ca.pem"}}}, "no-ca.pem", id="authority"),
        pytest.param({"etcd": {"endpoints": ["a:1:2"]}}, "'a:1:2' is not an etcd endpoint", id="endpoint"),
    ],
)
async def test_invalid_configuration_ends_the_daemon_with_one_sentence_and_code_2(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    await _ends_with(tmp_path, changed, said, UsageError.exit_code)


@pytest.mark.parametrize(
    ("key", "said"),
    [("listen_port", "cannot listen on 127.0.0.1:"), ("metrics_port", "cannot serve metrics on 127.0.0.1:")],
    ids=["API", "metrics"],
)
async def test_a_port_that_is_in_use_ends_it_with_one_sentence_and_may_be_free_at_the_next_start(
    tmp_path: Path, key: str, said: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        await _ends_with(tmp_path, {key: taken.getsockname()[1]}, said, CannotListen.exit_code)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({"metrics_host": "127.0.0.1"}, f"cannot listen on {NOBODYS}:", id="API"),
        pytest.param({}, f"cannot serve metrics on {NOBODYS}:0 (Cannot assign requested address)", id="metrics"),
    ],
)
async def test_an_address_that_is_not_up_yet_ends_it_with_a_code_after_which_systemd_starts_it_again(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    authority, now = tmp_path / "authority", datetime.now(UTC)
    make_authority(authority, "gcore", days=900, now=now)
    issue_certificate_into(tmp_path / "certs", authority, CertificateRequest("node", "node-a", (NOBODYS,)), now)
    files = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem", "engines_key": "engines.key"}
    tls = {name: str(tmp_path / "certs" / file) for name, file in files.items()}
    changed = {"listen_host": NOBODYS, "advertise": NOBODYS, "worker_host": "127.0.0.1", "tls": tls, **changed}
    await _ends_with(tmp_path, changed, said, CannotListen.exit_code)
    unit = (ROOT / "deploy" / "systemd" / "gcore.service").read_text()
    assert CannotListen.exit_code not in map(int, re.findall(r"RestartPreventExitStatus=(.+)", unit)[0].split())


async def _ends_with(folder: Path, changed: dict[str, Any], said: str, code: int) -> None:
    service = Service(folder, "127.0.0.1:1")
    service.config |= changed
    process = await service.start()
    assert await process.wait() == code
    lines = (folder / "log").read_text().splitlines()
    assert said in lines[-1]
    assert "Traceback" not in "".join(lines)
    await service.end()


async def test_gcore_gc_says_what_would_go_and_deletes_it_by_the_daemons_configuration(
    tmp_path: Path, etcd: LocalEtcd
) -> None:
    service = Service(tmp_path, etcd.endpoint)
    log = tmp_path / "home" / "logs" / "rollout-node-a-1.supervisor.log"
    log.parent.mkdir(parents=True)
    log.write_text("long ago")
    os.utime(log, (1.0, 1.0))
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump(service.config))
    shown = await _gcore("gc", "--config", str(file), "--dry-run")
    assert "delete" in shown
    assert "older than 30 days" in shown
    assert shown.endswith("1 of 1 entries would be deleted, 0.000 GiB.\n")
    assert log.exists()
    told = json.loads(await _gcore("gc", "--config", str(file), "-o", "json"))
    assert [(one["kind"], one["path"], one["goes"]) for one in told] == [("log", str(log), True)]
    assert not log.exists()
    refused = await _gcore("gc", "--home", str(tmp_path / "none"), code=3)
    assert "no local cluster is running" in refused
    service.end_line()


async def _gcore(*words: str, code: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controllers.cli.main", *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode == code, out
    return out.decode()


async def _with_users(etcd: LocalEtcd) -> None:
    for words in (("user", "add", "root:right"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
        await asyncio.to_thread(EtcdTools.find().run, "--endpoints", etcd.endpoint, *words)


async def test_a_slot_on_which_starts_fail_is_told_to_the_cluster_under_the_daemons_lease(
    tmp_path: Path, etcd: LocalEtcd
) -> None:
    service = Service(tmp_path, etcd.endpoint)
    service.config["slots"] = ["cpu:0", "cpu:1"]
    store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    # Until slots were shared out, a daemon works on every job. The job is paused, so that no controller works on it: of one that goes on
    # the store would have lost the records. It is there before its workers: a daemon watches both apart, and stops workers of no job.
    before = (Put(keys.SHARES, Shares().encode()), Put(JobKeys("j").active, Claim(paused=True).encode()))
    await store.transact((), before)
    await service.start()

    def worker(instance: str, slot: str, **more: Any) -> Put:
        record = WorkerRecord(
            instance=instance, node="node-a", role="rollout", job_uid="j", slot=slot, pid=1, pid_started=1, **more
        )
        return Put(keys.worker(instance), record.encode())

    async def told() -> SickSlots | None:
        found = await store.get(keys.sick_slots("node-a"))
        return None if found is None else SickSlots.decode(found.value, found.key)

    try:
        await service.hears("READY=1")
        await store.transact((), (worker("good", "cpu:1", state="serving", address="h:1"),))
        for number in range(FAILURES):
            assert await told() is None
            failed = worker(f"bad-{number}", "cpu:0", state="failed", reason="the device does not answer")
            await store.transact((), (failed,))
        while (sick := await told()) is None:
            await CLOCK.sleep(0.05)
        assert sick.slots.keys() == {"cpu:0"}
        assert "the device does not answer" in sick.slots["cpu:0"]
        assert "slot cpu:0 is unhealthy" in (tmp_path / "log").read_text()
        await service.hears("STATUS=ready: 2 slots, 1 of them unhealthy")
        # Whoever tried it, it is well; then the other one is not.
        await store.transact(
            (), (worker("again", "cpu:0", state="serving", address="h:2"), Delete(keys.worker("good")))
        )
        while await told() is not None:
            await CLOCK.sleep(0.05)
        await store.transact((), tuple(worker(f"w-{n}", "cpu:1", state="failed", reason="x") for n in range(FAILURES)))
        while await told() is None:
            await CLOCK.sleep(0.05)
        service.process.send_signal(signal.SIGTERM)
        await service.process.wait()
        assert await told() is None, "what a daemon says of its slots ends with its lease"
    finally:
        await service.end()
        await store.close()
