"""The Slurm batch script, end to end, with stand-ins for Slurm's commands, etcd and the daemons."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deployed import specs_may_name
from slurm_stand_ins import make_stand_ins

from gcore.api.authority import (
    CertificateRequest,
    inspect_certificate,
    issue_certificate_into,
    make_authority,
    renew_certificate,
)
from gcore.api.tls import CertName
from gcore.config import NodeConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
NODES = ["node0", "node1", "node2"]
WAIT_S = 120.0
Change = dict[str, str | None]


@dataclass
class Batch:
    """One run of the script."""

    folder: Path
    environment: dict[str, str]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(DEPLOY / "slurm" / "gcore.sbatch")],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def calls(self) -> list[str]:
        """The calls in order."""
        file = Path(self.environment["CALLS"])
        return file.read_text().splitlines() if file.exists() else []

    def until(self, condition: Callable[[list[str]], bool], process: subprocess.Popen[str]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition(self.calls):
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.monotonic() < end, self.calls
            time.sleep(0.02)

    def config(self, node: str) -> NodeConfig:
        """Return the configuration of a node's daemon."""
        return NodeConfig.load(self.folder / "tmp" / f"gcore-7-{node}" / "node.yaml")


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    environment = make_stand_ins(tmp_path / "bin", NODES)
    (tmp_path / "tmp").mkdir()
    environment |= {"TMPDIR": str(tmp_path / "tmp"), "GCORE_DEPLOY": str(DEPLOY)}
    environment |= {"GCORE_AUTHORITY": str(tmp_path / "authority")}
    return Batch(tmp_path, environment | {"GCORE_CLUSTER": str(tmp_path / "cluster")})


def test_each_node_runs_a_daemon_and_all_stop_gracefully(batch: Batch) -> None:
    process = batch.start()
    batch.until(lambda calls: calls.count("gcore-controller runs") == 3 and "etcd runs" in calls, process)
    cluster = batch.folder / "cluster"
    configs = [batch.config(node) for node in NODES]
    specs_may_name(configs[0], f"{cluster}/models", f"{cluster}/data")
    assert [one.node for one in configs] == NODES
    for node, one in zip(NODES, configs, strict=True):
        assert one.advertised(7700) == f"{node}:7700"
        assert one.run_root == str(cluster / "runs")
        assert [*one.etcd.endpoints] == ["https://node0:7703"]
        assert one.etcd.tls is not None
        assert one.tls is not None
        assert (one.metrics_port, one.tls.peer_port) == (7701, 7702)
        for file in (one.tls.ca, one.tls.cert, one.tls.key, one.tls.engines_key):
            assert file is not None
            assert Path(file).stat().st_mode & 0o077 == 0 or Path(file).name in ("ca.pem", "cert.pem")
    (etcd,) = (call for call in batch.calls if call.startswith("etcd --"))
    assert "--listen-client-urls https://0.0.0.0:7703" in etcd
    assert "--client-cert-auth" in etcd
    assert "--listen-peer-urls http://127.0.0.1:" in etcd, "peers have no TLS, so the port must be loopback only"
    assert (cluster / "addresses").read_text().split() == [f"{node}:7700" for node in NODES]
    assert (cluster / "certs" / "users" / "ada" / "cert.pem").exists()
    assert (batch.folder / "authority" / "ca-key.pem").exists()
    assert not list(cluster.rglob("ca-key.pem")), "a process that reads the authority's key can sign any certificate"
    assert cluster.stat().st_mode & 0o077 == 0

    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    ended = [call for call in batch.calls if call.endswith(" ended")]
    assert ended == ["gcore-controller ended"] * 3 + ["etcd ended"], "etcd stops last"


@pytest.mark.deploy
def test_a_later_allocation_continues_with_existing_files(batch: Batch) -> None:
    (batch.folder / "bin" / "gcore-controller.code").write_text("0")
    first = batch.start()
    said, _ = first.communicate(timeout=WAIT_S)
    assert first.returncode == 0, said
    authority = (batch.folder / "authority" / "ca.pem").read_bytes()
    (batch.folder / "bin" / "nodes").write_text("node2\nnode9\n")
    second = batch.start()
    said, _ = second.communicate(timeout=WAIT_S)
    assert second.returncode == 0, said
    assert (batch.folder / "authority" / "ca.pem").read_bytes() == authority
    starts = [call for call in batch.calls if call.startswith("etcd --")]
    assert len({start.split("--data-dir ")[1].split()[0] for start in starts}) == 1
    assert batch.config("node9").etcd.endpoints == ("https://node2:7703",)


@pytest.mark.deploy
def test_an_allocation_months_later_starts_with_renewed_certificates(batch: Batch) -> None:
    certs, long_ago = batch.folder / "cluster" / "certs", datetime.now(UTC) - timedelta(days=91)
    make_authority(certs, "gcore", days=3650, now=long_ago)
    issue_certificate_into(certs / "node0", certs, CertificateRequest("node", "node0", ("node0",)), long_ago)
    issue_certificate_into(certs / "etcd-node0", certs, CertificateRequest("etcd", "etcd-node0", ("node0",)), long_ago)
    issue_certificate_into(certs / "users" / "ada", certs, CertificateRequest("user", "ada", role="admin"), long_ago)
    engines = (certs / "node0" / "engines.key").read_bytes()
    (batch.folder / "bin" / "gcore-controller.code").write_text("0")
    process = batch.start()
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    for name in (*NODES, "etcd-node0", "users/ada"):
        assert inspect_certificate(certs / name).ends > datetime.now(UTC) + timedelta(days=89), said
    assert inspect_certificate(certs / "users" / "ada").whose == CertName("user", "ada", "admin")
    assert (certs / "node0" / "engines.key").read_bytes() == engines


@pytest.mark.deploy
def test_a_long_allocation_renews_its_certificates(batch: Batch) -> None:
    batch.environment["GCORE_RENEW_EVERY_S"] = "0.1"
    process = batch.start()
    batch.until(lambda calls: calls.count("gcore-controller runs") == 3 and "etcd runs" in calls, process)
    certs, authority = batch.folder / "cluster" / "certs", batch.folder / "authority"
    names = (*NODES, "etcd-node0", "users/ada")
    for name in names:
        renew_certificate(certs / name, authority, within_days=None, days=29, now=datetime.now(UTC))
    old = {name: inspect_certificate(certs / name).sha256 for name in names}
    batch.until(lambda _: all(inspect_certificate(certs / name).sha256 != old[name] for name in names), process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert "some certificates could not be renewed" not in said


@pytest.mark.deploy
def test_with_an_external_etcd_none_is_started(batch: Batch) -> None:
    (batch.folder / "bin" / "gcore-controller.code").write_text("0")
    batch.environment["GCORE_ETCD"] = '["https://a:2379", "https://b:2379"]'
    process = batch.start()
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert not any(call.startswith("etcd") for call in batch.calls)
    assert batch.config("node1").etcd.endpoints == ("https://a:2379", "https://b:2379")


@pytest.mark.deploy
def test_a_daemon_with_an_invalid_configuration_ends_the_job_with_its_exit_code(batch: Batch) -> None:
    (batch.folder / "bin" / "gcore-controller.code").write_text("2")
    process = batch.start()
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, said
    assert batch.calls[-1] in ("etcd ended", "etcd runs") or batch.calls[-1].startswith("etcd --")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_JOB_NODELIST": None}, "submit this script with sbatch"),
        ({"GCORE_CLUSTER": None}, "GCORE_CLUSTER is not set: set it to the absolute path"),
        ({"GCORE_CLUSTER": "team"}, "GCORE_CLUSTER is team: "),
        ({"GCORE_DEPLOY": "/nowhere"}, "/nowhere/slurm/node.yaml does not exist: submit from gcore's folder"),
        ({"GCORE_VENV": "/nowhere"}, "GCORE_VENV /nowhere has no gcore"),
        ({"GCORE_PORT": "http"}, "GCORE_PORT is http: "),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_invalid_settings_are_reported_before_anything_starts(batch: Batch, change: Change, words: str) -> None:
    for name, value in change.items():
        if value is None:
            del batch.environment[name]
        else:
            batch.environment[name] = value
    process = batch.start()
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert said.startswith("gcore.sbatch: ")
    assert words in said
    assert batch.calls == []
