"""The files of `deploy/` fit one another and the repository: what they copy, mount and name is there, once and the same."""

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

import gcore
from gcore.config import NodeConfig
from gcore.tls.folder import look, renew_in

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
CHART: dict[str, Any] = yaml.safe_load((DEPLOY / "helm" / "gcore" / "Chart.yaml").read_text())
VALUES: dict[str, Any] = yaml.safe_load((DEPLOY / "helm" / "gcore" / "values.yaml").read_text())


def copied() -> list[str]:
    """What the Dockerfile takes from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_what_the_images_copy_is_there_and_is_sent_to_the_builder() -> None:
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"
    for source in copied():
        assert (ROOT / source).exists(), source
        assert source in sent
    assert sent == set(copied())


def test_what_is_installed_in_the_images_is_pinned() -> None:
    installs = re.findall(r"pip install ([^\n\\]+)", DOCKERFILE)
    assert installs
    for install in installs:
        assert "-c constraints" in install or "${SGLANG}" in install, install
    assert re.search(r"^ARG SGLANG=sglang==\d", DOCKERFILE, re.MULTILINE)
    for base in re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE):
        assert re.search(r":\d+\.\d+\.\d+-", base), f"{base} names no version"


def test_the_images_end_as_a_user_without_rights_with_a_probe_and_an_init() -> None:
    for target in ("cpu", "cuda"):
        stage = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
        assert stage is not None
        text = stage[1]
        users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
        assert users == ["10001:10001"]
        assert "HEALTHCHECK" in text
        assert 'ENTRYPOINT ["tini", "--", "/opt/gcore/node/run.sh"]' in text


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_what_a_service_of_compose_mounts_is_there(service: str) -> None:
    for mount in COMPOSE["services"][service].get("volumes", ()):
        source = mount.partition(":")[0]
        if source.startswith("."):
            assert (DEPLOY / "compose" / source).exists(), source
        else:
            assert source in COMPOSE["volumes"]


def test_every_image_of_compose_and_the_chart_names_its_version() -> None:
    images = [service["image"] for service in COMPOSE["services"].values()]
    etcd = VALUES["etcd"]["image"]
    images.append(f"{etcd['repository']}:{etcd['tag']}")
    for image in images:
        assert image == "gcore:cpu" or re.search(r":v?\d+\.\d+\.\d+$", image), image
    assert len({image for image in images if "etcd" in image}) == 1, "one version of etcd, wherever it stands"


def test_ports_of_compose_are_this_machines_alone() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_chart_is_of_this_version() -> None:
    assert CHART["appVersion"] == gcore.__version__


def test_specs_of_an_images_daemon_name_what_is_mounted_for_them(tmp_path: Path) -> None:
    out = tmp_path / "node.yaml"
    environment = {"GCORE_NODE": "n", "GCORE_ADVERTISE": "n", "GCORE_ETCD": "[a:2379]", "SLOTS": '["cpu:0"]'}
    command = [sys.executable, str(DEPLOY / "node" / "render.py"), str(DEPLOY / "docker" / "node.yaml"), str(out)]
    subprocess.run(command, env={"PATH": os.environ["PATH"], **environment}, check=True)
    specs_may_name(NodeConfig.load(out), "/models", "/data")


@pytest.mark.parametrize("node", ["node-0", "node-1"])
def test_a_daemon_takes_the_configuration_that_compose_gives_it(node: str, tmp_path: Path) -> None:
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


def test_grafana_and_prometheus_of_compose_find_what_they_are_given() -> None:
    grafana, prometheus = COMPOSE["services"]["grafana"], COMPOSE["services"]["prometheus"]
    targets = {mount.split(":")[1] for mount in grafana["volumes"]}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/gcore.yml").read_text())["providers"]
    assert provider["options"]["path"] in targets
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    url = grafana["environment"][source["url"].strip("${}")]
    assert url.removeprefix("http://").partition(":")[0] in COMPOSE["services"]
    scraping = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    mounts = {mount.split(":")[1] for mount in prometheus["volumes"]}
    assert all(str(Path(rules).parent) in mounts for rules in scraping["rule_files"])
    scraped = {one["job_name"]: one["static_configs"] for one in scraping["scrape_configs"]}
    hosts = [target.partition(":")[0] for configs in scraped.values() for one in configs for target in one["targets"]]
    assert sorted(hosts) == sorted(name for name in COMPOSE["services"] if name.startswith(("etcd-", "node-")))


def with_programs(folder: Path) -> dict[str, str]:
    """The environment of a service of Compose, with `gcore`; who is given what is written into `owners`."""
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
def test_the_certificates_of_compose_are_made_once_and_are_those_that_are_mounted(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    command = ["sh", "-eu", str(DEPLOY / "compose" / "certs.sh"), str(tmp_path / "certs")]
    environment = with_programs(tmp_path)
    made = []
    for _ in range(2):
        subprocess.run(command, env=environment, check=True)
        made.append({p.relative_to(tmp_path): p.read_bytes() for p in (tmp_path / "certs").rglob("*") if p.is_file()})
    assert made[0] == made[1], "the second time finds all there"
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
def test_certificates_of_compose_that_end_soon_are_renewed_when_it_starts_and_while_it_runs(tmp_path: Path) -> None:
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
        """They were made months ago."""
        for name in names:
            renew_in(certs / name, certs, within_days=None, days=29, now=datetime.now(UTC))
        return {name: look(certs / name).sha256 for name in names}

    def renewed(old: dict[str, str]) -> bool:
        return not any(look(certs / name).sha256 == sha256 for name, sha256 in old.items())

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
