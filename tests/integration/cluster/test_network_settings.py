"""Whole runs of real engines and ranks with proxy settings in the environment, and on IPv6 addresses."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from cluster_run import ClusterRun
from three_nodes import three_nodes

from gcore.api.v1 import jobs_pb2 as pb
from gcore.config import dump_explicit, load_spec
from gcore.testing.models import make_tiny_model

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

NOWHERE = "http://127.0.0.1:9"
PROXIES = {
    name: NOWHERE for word in ("http", "https", "all", "grpc") for name in (f"{word}_proxy", f"{word}_proxy".upper())
}
ELSEWHERE = {"no_proxy": "example.org", "NO_PROXY": "example.org"}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A job of two steps."""
    make_tiny_model(tmp_path / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(9) for b in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    job = {
        "model": {"path": "model"},
        "data": {"path": "train.jsonl"},
        "flow": {"steps": 2, "groups_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 8},
    }
    file = tmp_path / "job.yaml"
    file.write_text("name: small\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in job.items()) + "\n")
    return file


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(PROXIES, id="proxies that do not answer"),
        pytest.param({**PROXIES, **ELSEWHERE}, id="and others are reached without"),
        pytest.param({"SSL_CERT_FILE": "no-such-file.pem", "SSL_CERT_DIR": "no-such-folder"}, id="no certificates"),
    ],
)
def test_a_run_reaches_its_own_processes(
    settings: dict[str, str], small: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {*PROXIES, *ELSEWHERE}:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    run = ClusterRun(small, home)
    try:
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert ended.summary["steps"] == 2


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_nodes_at_addresses_of_version_6_train(small: Path, tmp_path: Path) -> None:
    async with three_nodes(tmp_path / "cluster", 1, host="::1", device="cpu") as nodes, nodes.client() as client:
        assert all(address.startswith("[::1]:") for address in [*nodes.addresses.values(), *nodes.endpoints])
        job = await client.create_job(dump_explicit(load_spec(small)), request_id="r", mode=pb.START_MODE_RESUME)
        steps = [event.data["step"] async for event in client.follow(job.uid) if event.kind == "step"]
        ended = await client.get_job(job.uid)
        audit = await client.audit_job(job.uid)
    assert (ended.state, steps) == (pb.JOB_STATE_SUCCEEDED, [1, 2]), ended.reason
    assert audit.clean, list(audit.violations)
