"""Daemons accept the configurations of `deploy/`; Compose creates and renews its certificates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import specs_may_name

from gcore.api.authority import inspect_certificate, renew_certificate
from gcore.config import NodeConfig

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())


def test_specs_may_name_the_folders_mounted_into_the_image(tmp_path: Path) -> None:
    out = tmp_path / "node.yaml"
    environment = {"GCORE_NODE": "n", "GCORE_ADVERTISE": "n", "GCORE_ETCD": "[a:2379]", "SLOTS": '["cpu:0"]'}
    command = [sys.executable, str(DEPLOY / "node" / "render.py"), str(DEPLOY / "docker" / "node.yaml"), str(out)]
    subprocess.run(command, env={"PATH": os.environ["PATH"], **environment}, check=True)
    specs_may_name(NodeConfig.load(out), "/models", "/data")


@pytest.mark.parametrize("node", ["node-0", "node-1"])
def test_a_daemon_accepts_the_compose_configuration(node: str, tmp_path: Path) -> None:
    environment = COMPOSE["services"][node]["environment"]
    out = tmp_path / "node.yaml"
    subprocess.run(
        [sys.executable, str(DEPLOY / "node" / "render.py"), str(DEPLOY / "docker" / "node.yaml"), str(out)],
        env={"PATH": os.environ["PATH"], **environment},
        check=True,
    )
    config = NodeConfig.load(out)
    assert config.node == node
    assert config.advertised(config.listen_port) == f"{node}:7700"
    assert config.etcd.endpoints == tuple(f"etcd-{n}:2379" for n in range(3))
    assert config.tls is not None
    assert config.tls.cert == f"/certs/{node}/cert.pem"
    (root,) = config.allow.roots or ()
    assert f"data:{root}" in COMPOSE["services"][node]["volumes"]
    specs_may_name(config, root)
    exposed = set(map(int, re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)[0].split()))
    assert {config.listen_port, config.metrics_port, config.tls.peer_port} == exposed


def with_programs(folder: Path) -> dict[str, str]:
    """The environment of a Compose service with `gcore`. A stand-in for chown writes its arguments to `owners`."""
    (folder / "bin").mkdir()
    for name, text in (
        ("gcore", f'exec {sys.executable} -P -m controllers.cli.main "$@"'),
        ("chown", f'echo "$*" >> {folder}/owners'),
    ):
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}


@pytest.mark.deploy
def test_compose_creates_its_certificates_once_and_mounts_them(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    command = ["sh", "-eu", str(DEPLOY / "compose" / "certs.sh"), str(tmp_path / "certs")]
    environment = with_programs(tmp_path)
    made = []
    for _ in range(2):
        subprocess.run(command, env=environment, check=True)
        made.append({p.relative_to(tmp_path): p.read_bytes() for p in (tmp_path / "certs").rglob("*") if p.is_file()})
    assert made[0] == made[1], "the second run changes nothing"
    for node in ("node-0", "node-1"):
        folder = Path(COMPOSE["services"][node]["environment"]["GCORE_CERTS"])
        assert {"ca.pem", "cert.pem", "key.pem", "engines.key"} <= {p.name for p in made[0] if p.parent.name == node}
        assert folder == Path("/certs") / node
    scraping = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    for file in scraping["scrape_configs"][0]["tls_config"].values():
        assert Path(file.removeprefix("/")) in made[0], file
    owners = (tmp_path / "owners").read_text().split("\n")
    assert {"-R 10001:10001 node-0 node-1", "-R 65534:65534 prometheus"} <= set(owners)


@pytest.mark.deploy
def test_compose_renews_expiring_certificates_at_start_and_while_it_runs(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    owners = tmp_path / "owners"
    environment = with_programs(tmp_path)
    service = COMPOSE["services"]["renewal"]
    assert (service["command"][0], service["restart"]) == ("/certs", "unless-stopped")
    script = ["sh", "-eu", str(DEPLOY / "compose" / "certs.sh"), str(certs)]
    certs.mkdir()
    subprocess.run(script, env=environment, check=True)
    names = ("node-0", "node-1", "prometheus", "you")

    def ending() -> dict[str, str]:
        """Make all certificates expire in 29 days and return their fingerprints."""
        for name in names:
            renew_certificate(certs / name, certs, within_days=None, days=29, now=datetime.now(UTC))
        return {name: inspect_certificate(certs / name).sha256 for name in names}

    def renewed(old: dict[str, str]) -> bool:
        return not any(inspect_certificate(certs / name).sha256 == sha256 for name, sha256 in old.items())

    old = ending()
    subprocess.run(script, env=environment, check=True)
    assert renewed(old)
    old = ending()
    owners.unlink()
    with subprocess.Popen([*script, "0.1"], env=environment) as running:
        end = time.monotonic() + 60.0
        while not (renewed(old) and owners.exists() and "65534" in owners.read_text()):
            assert running.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        running.terminate()
