"""Resource limits of a job on a node, end to end: a real daemon and a real etcd, emulated devices."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cluster_run import gcore
from daemon_service import Service

from gcore.engines.emulated.launch import LAW_FILE
from gcore.store.etcd import LocalEtcd
from gcore.system.clock import SystemClock
from gcore.testing.models import make_tiny_model

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]
CLOCK = SystemClock()
STEPS = 6


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[LocalEtcd]:
    started = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "etcd.log", clock=CLOCK)
    yield started
    await started.stop()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    law = tmp_path / "law.json"
    law.write_text(json.dumps({"speedup": 4.0, "load_s": 0.2}))
    monkeypatch.setenv(LAW_FILE, str(law))
    make_tiny_model(tmp_path / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    job = {
        "name": "greedy",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 32},
        "flow": {"steps": STEPS, "groups_per_step": 16, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 80},
    }
    file = tmp_path / "greedy.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in job.items()))
    return file


async def test_a_job_over_its_disk_quota_is_paused_with_the_reason_and_goes_on_when_there_is_room(
    tmp_path: Path, etcd: LocalEtcd, spec: Path
) -> None:
    service = Service(tmp_path, etcd.endpoint)
    service.config |= {"slots": [f"emulated:{n}" for n in range(4)], "advertise": f"127.0.0.1:{service.port}"}
    service.config["limits"] = {"disk_gib": 0.00001}
    address = ("--address", f"127.0.0.1:{service.port}")

    def described() -> Any:
        return json.loads(gcore("describe", "greedy", *address, "-o", "json").stdout)

    async def until(state: str) -> Any:
        while (job := described())["state"] != state:
            assert job["state"] not in ("FAILED", "CANCELLED"), job
            await CLOCK.sleep(0.5)
        return job

    await service.start()
    try:
        await service.hears("READY=1")
        gcore("submit", str(spec), *address)
        job = await until("PAUSED")
        assert "limits.disk_gib" in json.dumps(job), "describe says why, and what to do"

        service.process.terminate()
        assert await service.process.wait() == 0
        service.config["limits"] = {"disk_gib": 10}
        await service.start()
        await service.hears("READY=1")
        gcore("resume", "greedy", *address)
        assert (await until("SUCCEEDED"))["step"] == STEPS
        audit = json.loads(gcore("audit", "greedy", *address, "-o", "json").stdout)
        assert (audit["clean"], audit["steps"]) == (True, STEPS)
    finally:
        await service.end()
