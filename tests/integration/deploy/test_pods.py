"""Certificates and secrets in the chart's pods: the containers' commands run with folders in place of volumes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from chart import Manifest, container, one, rendered
from typer.testing import CliRunner

from controllers.api.edge.access import read_token
from controllers.cli.main import app
from controllers.daemon.security import read_engines_key
from gcore.api.authority import (
    CertificateRequest,
    inspect_certificate,
    issue_certificate_into,
    make_authority,
    renew_certificate,
)
from gcore.api.tls import TlsMaterial
from gcore.config import NodeConfig
from gcore.store.reference import connect_store
from gcore.system.clock import SystemClock

NODE = Path(__file__).parents[3] / "deploy" / "node"
NOW = datetime.now(UTC)
WAIT_S = 60.0
SECRETS: Manifest = {
    "auth": {"adminTokenSecret": "admin"},
    "etcd": {"bundled": False, "endpoints": ["https://etcd-0.x:2379"], "tlsSecret": "etcd-client"},
    "extraConfig": {"etcd": {"user": {"name": "gcore", "password_file": "/run/gcore-keys/etcd/password"}}},
}
pytestmark = [pytest.mark.deploy, pytest.mark.timeout(180)]


class Pod:
    """A workload's pod: its volumes are folders, and its containers' commands run in them."""

    def __init__(self, folder: Path, workload: Manifest) -> None:
        self.folder = folder
        self.workload = workload
        (folder / "bin").mkdir()
        gcore = folder / "bin" / "gcore"
        gcore.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m controllers.cli.main "$@"\n')
        gcore.chmod(0o755)
        make_authority(self.volume("authority"), "gcore", days=900, now=NOW)

    def volume(self, name: str) -> Path:
        found = self.folder / "volumes" / name
        found.mkdir(parents=True, exist_ok=True)
        return found

    def secret(self, name: str, files: dict[str, bytes]) -> None:
        """Create a Secret volume as the kubelet does: links to group-readable files."""
        data = self.volume(name) / "..data"
        data.mkdir(exist_ok=True)
        for file, content in files.items():
            (data / file).unlink(missing_ok=True)
            (data / file).write_bytes(content)
            (data / file).chmod(0o440)
            if not (link := self.volume(name) / file).is_symlink():
                link.symlink_to(Path("..data") / file)

    def started(self, name: str, **environment: str) -> subprocess.Popen[str]:
        """Start a container's command with the folders of its volumes."""
        found = container(self.workload, name)
        told = {one["name"]: self.here(name, one["value"]) for one in found["env"] if "value" in one}
        words = [self.here(name, word) for word in (*found["command"], *found.get("args", ()))]
        own = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", **told, **environment}
        return subprocess.Popen(words, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def here(self, name: str, text: str) -> str:
        """Replace mount paths by the folders that this container mounts."""
        mounts = {
            mount["mountPath"]: self.volume(mount["name"]) for mount in container(self.workload, name)["volumeMounts"]
        }
        mounts["/opt/gcore/node"] = NODE
        pattern = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])(?:{pattern})(?![\w-])", lambda found: str(mounts[found[0]]), text)

    def run(self, name: str, **environment: str) -> str:
        process = self.started(name, **environment)
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, said
        return said


def daemons(folder: Path, values: Manifest, release: str = "gcore") -> tuple[Pod, str]:
    """Return a pod of the DaemonSet and the template of its daemon's configuration."""
    manifests = rendered(values, release)
    workload = next(m for m in manifests if m["kind"] == "DaemonSet")
    return Pod(folder, workload), one(manifests, "ConfigMap", workload["metadata"]["name"])["data"]["node.yaml"]


def modes(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()}


async def connected(config: NodeConfig) -> None:
    """Connect to the store with the files of the configuration and close the connection."""
    store = await connect_store(config.etcd, SystemClock())
    await store.close()


def test_only_the_daemons_user_can_read_its_secrets_at_start(tmp_path: Path) -> None:
    pod, text = daemons(tmp_path, SECRETS)
    shown = CliRunner().invoke(app, ["token", "first-admin", "--to", str(tmp_path / "token")], catch_exceptions=False)
    assert shown.exit_code == 0
    issue_certificate_into(tmp_path / "client", pod.volume("authority"), CertificateRequest("node", "n", ("n",)), NOW)
    pod.secret("admin", {"token": (tmp_path / "token").read_bytes()})
    client = {name: (tmp_path / "client" / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")}
    pod.secret("etcd", {**client, "password": b"secret\n"})
    pod.run("certificate", GCORE_NODE="gpu-1", POD_IP="10.1.2.3")

    for place, value in {"GCORE_NODE": "gpu-1", "POD_IP": "10.1.2.3", "SLOTS": "[cpu:0]"}.items():
        text = text.replace(f"${{{place}}}", value)
    (tmp_path / "node.yaml").write_text(pod.here("controller", text))
    config = NodeConfig.load(tmp_path / "node.yaml")
    assert config.auth is not None
    assert config.auth.admin_token_file is not None
    assert read_token(Path(config.auth.admin_token_file)) == read_token(tmp_path / "token")
    assert config.tls is not None
    assert config.tls.engines_key is not None
    assert read_engines_key(Path(config.tls.engines_key))
    assert TlsMaterial(Path(config.tls.ca), Path(config.tls.cert), Path(config.tls.key)).read().key
    assert config.etcd.user is not None
    assert Path(config.etcd.user.password_file).read_text() == "secret\n"
    asyncio.run(connected(config))
    public = {"cert.pem", "ca.pem"}
    kept = modes(pod.volume("certificates"))
    assert {"token", "password", "key.pem", "engines.key"} <= kept.keys()
    assert {name: mode for name, mode in kept.items() if mode & 0o077 and name not in public} == {}


def test_the_daemons_container_mounts_its_keys_read_only_and_no_secret(tmp_path: Path) -> None:
    """Otherwise a process in the container could replace a certificate by a link and obtain the authority's key."""
    pod, _ = daemons(tmp_path, SECRETS)
    mounts = {mount["name"]: mount for mount in container(pod.workload, "controller")["volumeMounts"]}
    assert mounts["certificates"]["readOnly"] is True
    assert not {"authority", "admin", "etcd", "issuing"} & mounts.keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes the pod's user")
def test_a_user_with_group_access_copies_a_secret() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        script = Path(shutil.copy(NODE / "private.sh", folder))
        (folder / "from").mkdir()
        (folder / "from" / "token").write_text("secret")
        os.chown(folder / "from" / "token", 0, 10001)
        (folder / "from" / "token").chmod(0o440)
        (folder / "keys").mkdir()  # an emptyDir of a pod with fsGroup
        os.chown(folder / "keys", 0, 10001)
        (folder / "keys").chmod(0o2777)
        command = ["sh", str(script), str(folder / "from"), str(folder / "keys" / "admin")]
        subprocess.run(command, check=True, user=10001, group=10001, extra_groups=[])
        made = (folder / "keys" / "admin" / "token").stat()
        assert (stat.S_IMODE(made.st_mode), made.st_uid) == (0o600, 10001)


@pytest.mark.parametrize("release", ["gcore", "lab"])
def test_a_daemons_certificate_covers_the_service_name_and_the_pod_address(release: str, tmp_path: Path) -> None:
    pod, _ = daemons(tmp_path, {"tls": {"hosts": ["gcore.example"]}}, release)
    pod.run("certificate", GCORE_NODE="gpu-1", POD_IP="fd00::1")
    service = pod.workload["metadata"]["name"]
    found = inspect_certificate(pod.volume("certificates") / "node")
    assert {"fd00::1", service, f"{service}.rl", f"{service}.rl.svc", f"{service}.rl.svc.cluster.local"} < set(
        found.hosts
    )
    assert "gcore.example" in found.hosts
    assert found.whose is not None
    assert found.whose.name == "gpu-1"


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(("kind", "days"), [("DaemonSet", 90), ("StatefulSet", 90), ("DaemonSet", 20)])
def test_a_pod_renews_its_certificate_before_expiry(kind: str, days: int, tmp_path: Path) -> None:
    workload = next(m for m in rendered({"tls": {"days": days}}) if m["kind"] == kind)
    pod = Pod(tmp_path, workload)
    pod.run("certificate", GCORE_NODE="gpu-1", POD_IP="10.1.2.3", MEMBER="gcore-etcd-0")
    (folder,) = (file.parent for file in pod.volume("certificates").rglob("cert.pem"))
    assert inspect_certificate(folder).ends > NOW + timedelta(days=days, minutes=-10)
    ends_soon = renew_certificate(folder, pod.volume("authority"), within_days=None, days=15, now=NOW)
    assert ends_soon is not None
    begun = ends_soon
    renewal = pod.started("renewal", GCORE_RENEW_EVERY_S="0.1")
    until(lambda: inspect_certificate(folder).sha256 != begun.sha256, renewal)
    renewal.terminate()
    said, _ = renewal.communicate(timeout=WAIT_S)
    assert renewal.returncode == 0, said
    found = inspect_certificate(folder)
    assert (found.hosts, found.whose, found.serves, found.calls) == (begun.hosts, begun.whose, True, True)


def test_a_replaced_secret_of_an_external_etcd_reaches_the_daemon(tmp_path: Path) -> None:
    pod, _ = daemons(tmp_path, SECRETS)
    pod.secret("admin", {"token": b"gcore_x"})
    pod.secret("etcd", {"ca.pem": b"1", "cert.pem": b"1", "key.pem": b"1"})
    pod.run("certificate", GCORE_NODE="gpu-1", POD_IP="10.1.2.3")
    pod.secret("etcd", {"cert.pem": b"2", "key.pem": b"2"})
    renewal = pod.started("renewal", GCORE_RENEW_EVERY_S="0.1")
    keys = pod.volume("certificates") / "etcd"
    until(lambda: (keys / "key.pem").read_bytes() == (keys / "cert.pem").read_bytes() == b"2", renewal)
    renewal.terminate()
    renewal.communicate(timeout=WAIT_S)
    assert modes(keys) == dict.fromkeys(("ca.pem", "cert.pem", "key.pem"), 0o600)


def test_the_chart_renews_certificates_before_the_alert_fires() -> None:
    rules = yaml.safe_load((NODE.parents[0] / "prometheus" / "rules" / "alerts.yml").read_text())["groups"]
    (alert,) = (r for g in rules for r in g["rules"] if r.get("alert") == "GcoreCertificateEnds")
    (days,) = map(int, re.findall(r"< (\d+) \* 86400", alert["expr"]))
    for lasting in (days + 2, 30, 31, 90, 365):
        for kind in ("DaemonSet", "StatefulSet"):
            workload = next(m for m in rendered({"tls": {"days": lasting}}) if m["kind"] == kind)
            (within,) = (e["value"] for e in container(workload, "renewal")["env"] if e["name"] == "GCORE_RENEW_DAYS")
            assert days < int(within) < lasting
