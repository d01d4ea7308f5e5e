"""The image's command without the image: the daemon of `deploy/docker/node.yaml` with certificates and a real etcd."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from gcore.api.authority import CertificateRequest, issue_certificate_into, make_authority
from gcore.store.etcd import LocalEtcd
from gcore.system.network import free_ports

DEPLOY = Path(__file__).parents[3] / "deploy"
WAIT_S = 60.0
pytestmark = pytest.mark.timeout(180)


def command_in(folder: Path, name: str, module: str) -> None:
    """Create a program on PATH, as the installation of the wheel does."""
    program = folder / name
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m {module} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def scraped(url: str, certificate: Path) -> str:
    """Return what Prometheus scrapes with this certificate."""
    context = ssl.create_default_context(cafile=certificate / "ca.pem")
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with urllib.request.urlopen(url, context=context, timeout=30) as answer:
        text: bytes = answer.read()
    return text.decode()


def as_a_user(folder: Path, *words: str) -> str:
    """Run `gcore` on a machine without a local cluster."""
    command = [sys.executable, "-P", "-m", "controllers.cli.main", *words]
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / ".config")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("advertised", "at"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")], ids=["IPv4", "IPv6"])
def test_a_daemon_starts_from_the_images_template_serves_and_stops(
    tmp_path: Path, etcd: LocalEtcd, advertised: str, at: str
) -> None:
    if at != advertised and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    for folder in ("bin", "home", "runs"):
        (tmp_path / folder).mkdir()
    command_in(tmp_path / "bin", "gcore-controller", "controllers.daemon")
    now = datetime.now(UTC)
    make_authority(tmp_path / "authority", "gcore", days=900, now=now)
    issue_certificate_into(
        tmp_path / "certs", tmp_path / "authority", CertificateRequest("node", "box", (advertised,)), now
    )
    issue_certificate_into(
        tmp_path / "ada", tmp_path / "authority", CertificateRequest("user", "ada", role="admin"), now
    )
    scraper = CertificateRequest(
        "user", "prometheus", role="viewer", namespaces=("*",)
    )  # as in deploy/compose/certs.sh
    issue_certificate_into(tmp_path / "prometheus", tmp_path / "authority", scraper, now)
    # Only the ports and the home differ from a container's.
    text = (DEPLOY / "docker" / "node.yaml").read_text()
    ports = free_ports(3)
    for fixed, port in zip(("7700", "7701", "7702"), ports, strict=True):
        text = text.replace(fixed, str(port))
    template = tmp_path / "template.yaml"
    template.write_text(text.replace("home: /var/lib/gcore", f"home: {tmp_path}/home"))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "GCORE_CONFIG": str(tmp_path / "node.yaml"),
        "GCORE_PYTHON": sys.executable,
        "GCORE_NODE": "box",
        "GCORE_ADVERTISE": advertised,
        "GCORE_ETCD": f"[{etcd.endpoint}]",
        "GCORE_RUN_ROOT": str(tmp_path / "runs"),
        "GCORE_CERTS": str(tmp_path / "certs"),
        "SLOTS": '["cpu:0"]',
    }
    log = (tmp_path / "log").open("w")
    daemon = subprocess.Popen(
        [str(DEPLOY / "node" / "run.sh"), str(template)], env=environment, stdout=log, stderr=subprocess.STDOUT
    )
    probe = [sys.executable, str(DEPLOY / "node" / "health.py"), str(tmp_path / "node.yaml")]
    end = time.monotonic() + WAIT_S
    try:
        while subprocess.run(probe, capture_output=True, check=False).returncode != 0:
            assert daemon.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()
        assert yaml.safe_load((tmp_path / "node.yaml").read_text())["node"] == "box"
        address = f"{at}:{ports[2]}"
        files = [f"--{one}={tmp_path}/ada/{one}.pem" for one in ("ca", "cert", "key")]
        as_a_user(tmp_path, "context", "set", "box", f"--address={address}", *files)
        (node,) = json.loads(as_a_user(tmp_path, "nodes", "-o", "json"))["nodes"]
        assert node["name"] == "box"
        assert "gcore_" in scraped(f"https://{at}:{ports[1]}/metrics", tmp_path / "prometheus")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(WAIT_S) == 0, (tmp_path / "log").read_text()
    finally:
        daemon.kill()
        log.close()
    assert "is started again" not in (tmp_path / "log").read_text()
    assert subprocess.run(probe, capture_output=True, check=False).returncode == 1
