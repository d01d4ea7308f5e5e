"""A whole cluster with certificates and tokens: a run over TLS only, isolated namespaces, and no secret in any file."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import ssl
import uuid
from pathlib import Path
from typing import Any

import grpc
import httpx
import issued
import pytest
import yaml
from fake_openai import FakeOpenAI
from prometheus_server import PrometheusServer
from secured_cluster import CLOCK, SecuredCluster, secured

from gcore.api.authority import inspect_certificate
from gcore.api.tls import Connector
from gcore.api.v1 import jobs_pb2 as pb
from gcore.client import JobsClient
from gcore.config import load_spec
from gcore.engines.emulated.launch import LAW_FILE
from gcore.errors import GcoreError, NotAllowed
from gcore.system.clock import SystemClock
from gcore.testing.models import make_tiny_model
from gcore.worker.records import WorkerRecord

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
CANARY = "canary-4f1d7c9a2b"
STEPS = 4


class UntilLooked(SystemClock):
    """The clock of a judge whose first answers wait for somebody."""

    def __init__(self) -> None:
        self.looked = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Until somebody has looked."""
        await self.looked.wait()


def job(folder: Path, judge_url: str, **more: Any) -> str:
    """A spec on emulated slots whose judge is asked with a key."""
    make_tiny_model(folder / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(20)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    judge = {
        "name": "teacher",
        "external": {"url": judge_url, "model": "m", "key_env": "JUDGE_KEY"},
        "template": "{{ prompt }}{{ response }}",
    }
    tree = {
        "name": "secured",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 32},
        "flow": {"steps": STEPS, "groups_per_step": 8, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 40},
        "checkpoint": {"every": 2},
        "judges": [judge],
        "reward": {"judge": "teacher"},
        **more,
    }
    (folder / "job.yaml").write_text(json.dumps(tree))
    return load_spec(folder / "job.yaml").model_dump_json()


@pytest.mark.chaos
@pytest.mark.parametrize("apart", [False, True])
async def test_a_run_over_certificates_alone_ends_clean_and_its_secret_is_written_nowhere(
    tmp_path: Path, apart: bool
) -> None:
    law = tmp_path / "law.json"
    law.write_text(json.dumps({"speedup": 20.0, "load_s": 0.2}))
    cluster = SecuredCluster(
        tmp_path / "cluster",
        apart=apart,
        env={LAW_FILE: str(law), "JUDGE_KEY": CANARY, "GCORE_LOG_LEVEL": "DEBUG"},
        more={"allow": {"secrets": ["env:JUDGE_KEY"], "roots": [str(tmp_path / "work")], "trackers": []}},
    )
    (work := tmp_path / "work").mkdir()
    waits = UntilLooked()
    async with FakeOpenAI(lambda asked: "0.5", key=CANARY, clock=waits) as fake, secured(cluster):
        more = {"storage": {"copies": 2}, "train": {"copies_gb": 0}} if apart else {}
        spec = job(work, fake.url, **more)
        async with cluster.client() as client:
            created = await client.create_job(spec, request_id=uuid.uuid4().hex, mode=pb.START_MODE_NEW)
            try:
                await look_at_workers(cluster)  # while they serve: no judge answers before
            finally:
                waits.looked.set()
            async for _ in client.follow(created.uid):
                pass
            ended = await client.get_job(created.uid)
            report = await client.audit_job(created.uid)
        assert ended.state == pb.JOB_STATE_SUCCEEDED, ended.reason
        assert report.clean, report.violations
        assert len(fake.asked) > 0
        assert fake.refused == 0
        await check_people(cluster, created.uid)
        await asyncio.to_thread(check_commands, cluster)
        store = await cluster.store()
        kept = b"\n".join(kv.value for kv in (await store.list("/gcore/")).kvs)
        await store.close()
    written = dict(cluster.everything_written())
    assert any("metrics.jsonl" in name for name in written)
    secrets = {"the judge's key": CANARY, "a token": cluster.admin.secret, "the key of engines": cluster.engines_key}
    for what, secret in secrets.items():
        for form in (secret.encode(), base64.b64encode(secret.encode())):
            assert form not in kept, f"{what} is in the store"
            found = [name for name, data in written.items() if form in data]
            assert not found, f"{what} is in {found}"


async def look_at_workers(cluster: SecuredCluster) -> None:
    """A serving engine and rank refuse callers without a certificate or key."""
    store = await cluster.store()
    workers: dict[str, WorkerRecord] = {}
    while not {"rollout", "train"} <= workers.keys():
        for kv in (await store.list("/gcore/workers/")).kvs:
            worker = WorkerRecord.decode(kv.value)
            if worker.state == "serving":
                workers[worker.role] = worker
        await CLOCK.sleep(0.05)
    await store.close()
    engine, rank = workers["rollout"], workers["train"]
    trusting = issued.material(cluster.ca / "node-0")
    async with httpx.AsyncClient(verify=trusting.context(trusting.read()), trust_env=False) as http:
        for key in ({}, {"Authorization": "Bearer junk"}):
            answer = await http.post(f"https://{engine.address}/generate", json={}, headers=key)
            assert answer.status_code == 401
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://{engine.address}/model_info")
    for connector in (Connector(), cluster.connector(""), Connector(issued.user(cluster.ca, "eve"))):
        channel = connector.channel(rank.address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/gcore.api.v1.TrainRank/Release")(b"", timeout=5)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED)
        await channel.close()


async def check_people(cluster: SecuredCluster, uid: str) -> None:
    """What a stranger sees of the cluster, and what somebody of another namespace sees of the job: nothing."""
    stranger = cluster.client("")
    with pytest.raises(NotAllowed):
        await stranger.list_jobs()
    await stranger.close()
    made = await asyncio.to_thread(
        cluster.gcore, "token", "create", "bob", "--role", "submitter", "--namespace", "elsewhere", "-o", "json"
    )
    token = json.loads(made.stdout)["token"]
    async with cluster.client(token) as bob:
        assert list(await bob.list_jobs()) == []
        for asked in (
            bob.get_job(uid),
            bob.get_samples(uid),
            bob.get_books(uid),
            bob.audit_job(uid),
            bob.list_checkpoints(uid),
            bob.get_placement(uid),
            bob.cancel_job(uid),
        ):
            with pytest.raises(GcoreError, match="there is no job"):
                await asked
        with pytest.raises(GcoreError, match="there is no job"):
            async for _ in bob.follow(uid):
                pass
    trusting = issued.material(cluster.ca / "node-0")
    async with httpx.AsyncClient(verify=trusting.context(trusting.read(), serves=False), trust_env=False) as http:
        anonymous = ssl.create_default_context(cafile=str(cluster.ca / "ca.pem"))
        page = f"https://127.0.0.1:{cluster.metrics['node-0']}"
        answer = await http.get(f"{page}/page/jobs/{uid}", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 404
        assert (await http.get(f"{page}/metrics", headers={"Authorization": f"Bearer {token}"})).status_code == 403
    async with httpx.AsyncClient(verify=anonymous, trust_env=False) as http:
        for path in ("/", "/metrics", "/page/jobs"):
            assert (await http.get(page + path)).status_code == 401


def check_commands(cluster: SecuredCluster) -> None:
    """The command line finds the cluster by its context, and tells whom it takes one for."""
    assert json.loads(cluster.gcore("whoami", "-o", "json").stdout)["role"] == "admin"
    assert json.loads(cluster.gcore("list", "-o", "json").stdout)
    described = cluster.gcore("describe", "secured", "-o", "json")
    assert described.returncode == 0, described.stderr
    assert CANARY not in described.stdout
    refused = cluster.gcore("list", token="gcore_junk")
    assert refused.returncode == NotAllowed.exit_code, refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    (bob,) = [one for one in json.loads(cluster.gcore("token", "list", "-o", "json").stdout) if one["name"] == "bob"]
    assert cluster.gcore("token", "revoke", bob["id"]).returncode == 0
    journal = [json.loads(line) for line in (cluster.home("node-0") / "logs" / "calls.jsonl").read_text().splitlines()]
    other = cluster.home("node-1") / "logs" / "calls.jsonl"
    journal += [json.loads(line) for line in (other.read_text() if other.exists() else "").splitlines()]
    assert {"CreateJob", "CreateToken", "RevokeToken"} <= {line["verb"] for line in journal}


async def test_a_daemon_with_certificates_answers_whoever_shows_one_or_a_token(tmp_path: Path) -> None:
    cluster = SecuredCluster(tmp_path / "cluster")
    cluster.names = ("node-0",)
    async with secured(cluster):
        async with cluster.client() as admin:
            while not (nodes := (await admin.list_nodes()).nodes):
                await CLOCK.sleep(0.1)  # it may begin a new life on a machine that is very busy
            assert [node.name for node in nodes] == ["node-0"]
            (work := tmp_path / "work").mkdir()
            token = str(cluster.root / "admin.token")
            asked = job(work, "https://judge.example", data={"path": "train.jsonl", "template": token})
            with pytest.raises(GcoreError, match=r"lists no folders that specs may use.*allow\.roots"):
                await admin.create_job(asked, request_id=uuid.uuid4().hex, mode=pb.START_MODE_NEW)
            (work / "reward.py").write_text("def score(response):\n    return 1.0\n")
            (work / "reward.py").chmod(0o600)
            job(work, "https://judge.example", judges=[], reward={"file": "reward.py:score"})
            refused = await asyncio.to_thread(cluster.gcore, "submit", str(work / "job.yaml"))
            assert refused.returncode == NotAllowed.exit_code, refused.stderr
            assert re.fullmatch(r".*this cluster runs no plug-in files.*plugins\.md.*\n", refused.stderr)
            assert list(await admin.list_jobs()) == []
        stranger = cluster.client("")
        with pytest.raises(NotAllowed):
            await stranger.list_nodes()
        await stranger.close()
        of_ada = issued.user(cluster.ca, "ada")
        shown = Connector(of_ada)
        async with JobsClient([f"127.0.0.1:{cluster.peers['node-0']}"], clock=CLOCK, connector=shown) as ada:
            assert list(await ada.list_jobs()) == []
        anonymous = ssl.create_default_context(cafile=str(cluster.ca / "ca.pem"))
        async with httpx.AsyncClient(verify=anonymous, trust_env=False) as http:
            answer = await http.get(f"https://127.0.0.1:{cluster.metrics['node-0']}/metrics")
        assert answer.status_code == 401
        ends = {
            "gcore_": inspect_certificate(cluster.ca / "node-0").ends,
            "gcore_store_": inspect_certificate(cluster.ca / "etcd").ends,
        }
        async with httpx.AsyncClient(verify=of_ada.context(of_ada.read()), trust_env=False) as http:
            while True:
                text = (await http.get(f"https://127.0.0.1:{cluster.metrics['node-0']}/metrics")).text
                told = re.findall(r"^(\w+)certificate_expiry_timestamp_seconds(?:{.*})? (\S+)$", text, re.MULTILINE)
                if {name: float(end) for name, end in told} == {name: end.timestamp() for name, end in ends.items()}:
                    break
                await CLOCK.sleep(0.1)


def documented_settings(cluster: SecuredCluster) -> dict[str, Any]:
    """What docs/operate/monitoring.md has one write for a cluster with certificates, with this cluster's files."""
    text = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
    (lines,) = re.findall(r"^    scheme: https\n(?:    .*\n)+", text, re.MULTILINE)
    found: dict[str, Any] = yaml.safe_load(lines)
    found["tls_config"]["ca_file"] = str(cluster.ca / "ca.pem")
    found["authorization"]["credentials_file"] = str(cluster.root / "admin.token")
    return found


@pytest.mark.needs("prometheus")
async def test_prometheus_finds_and_scrapes_controllers_with_a_token_over_tls(tmp_path: Path) -> None:
    cluster = SecuredCluster(tmp_path / "cluster")
    cluster.names = ("node-0",)
    async with secured(cluster):
        settings = documented_settings(cluster)
        asked = {key: value for key, value in settings.items() if key != "scheme"}
        targets = f"https://127.0.0.1:{cluster.metrics['node-0']}/targets"
        discovery = {"url": targets, "refresh_interval": "1s", **asked}
        scraped = [{"job_name": "gcore", "honor_labels": True, **settings, "http_sd_configs": [discovery]}]
        with PrometheusServer(tmp_path / "prometheus", scraped) as prometheus:
            async with asyncio.timeout(60):
                while not (up := await asyncio.to_thread(prometheus.ask, 'up{job="gcore"} == 1')):
                    await CLOCK.sleep(0.2)
    assert [dict(labels)["node"] for labels in up] == ["node-0"]


async def test_daemons_do_not_start_with_what_does_not_fit(tmp_path: Path) -> None:
    cluster = SecuredCluster(tmp_path / "cluster")
    key = cluster.ca / "node-0" / "key.pem"
    key.chmod(0o644)
    cluster.names = ("node-0",)
    try:
        await asyncio.to_thread(cluster.start)
        log = cluster.home("node-0") / "logs" / "daemon.log"
        async with asyncio.timeout(30):
            while "other users may read the key" not in (log.read_text() if log.exists() else ""):
                await CLOCK.sleep(0.1)
    finally:
        cluster.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", cluster.api["node-0"])) != 0
