"""The files of `deploy/` by other people's rules: Helm's own code renders the chart, Kubernetes' schemas check what comes out, and linters
and specifications of Docker, Compose and the shell the rest. Nothing is run: no container engine and no cluster is here.

`make test-deploy` makes the environment and names it in GCORE_DEPLOY_PYTHON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from chart import CHART, Manifest, checks, container, one, rendered
from deployed import specs_may_name

from gcore.config import NodeConfig
from tools.monitoring import rules

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SHELL = sorted(path for path in DEPLOY.rglob("*") if path.suffix in (".sh", ".sbatch"))
pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]

EXTERNAL = {"etcd": {"bundled": False, "endpoints": ["https://etcd-0.x:2379"], "tlsSecret": "etcd-client"}}
VALUES: dict[str, Manifest] = {
    "as it comes": {},
    "no GPU": {"gpus": 0, "slots": ["cpu:0-3", "cpu:4-7"], "image": {"repository": "registry.x/gcore", "tag": "7"}},
    "an etcd elsewhere": EXTERNAL,
    "an etcd elsewhere without certificates": {"etcd": {"bundled": False, "endpoints": ["a:2379", "b:2379"]}},
    "everything on": {
        "hostNetwork": True,
        "priorityClassName": "high",
        "trainInterface": "eth1",
        "storage": {"runs": {"claim": "runs"}},
        "auth": {"adminTokenSecret": "admin"},
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "registry"}]},
        "extraConfig": {"orphan_grace_s": 120, "lease_ttl_s": 10},
        "extraEnv": [{"name": "JUDGE_KEY", "valueFrom": {"secretKeyRef": {"name": "judge", "key": "key"}}}],
        "etcd": {
            "replicas": 5,
            "storage": {"className": "fast"},
            "nodeSelector": {"disk": "nvme"},
            "tolerations": [{"operator": "Exists"}],
        },
        "networkPolicy": {
            "clientsFrom": [{"podSelector": {"matchLabels": {"app": "notebook"}}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
        "podDisruptionBudget": {"minAvailable": 3},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "tokenSecret": "viewer"},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
        "extraResources": {"rdma/hca": 1},
        "capabilities": ["IPC_LOCK"],
        "extraVolumes": [{"name": "datasets", "hostPath": {"path": "/mnt/datasets"}}],
        "extraVolumeMounts": [{"name": "datasets", "mountPath": "/datasets", "readOnly": True}],
    },
    "a shared folder of the nodes": {
        "storage": {"runs": {"hostPath": "/mnt/runs"}},
        "networkPolicy": {"enabled": False},
    },
}


def test_helms_linter_has_no_complaint() -> None:
    found = checks("lint", str(CHART))
    assert found["total_charts_linted"] == 1
    assert found["errors"] == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_the_chart_makes_fits_kubernetes_schemas(values: Manifest) -> None:
    manifests = rendered(values)
    assert checks("kubernetes", given=manifests) == []
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    assert all(m["metadata"]["namespace"] == "rl" for m in manifests)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_selectors_ports_and_volumes_of_the_chart_meet(values: Manifest) -> None:
    manifests = rendered(values)
    workloads = [m for m in manifests if m["kind"] in ("DaemonSet", "StatefulSet")]
    labels = [m["spec"]["template"]["metadata"]["labels"] for m in workloads]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels")}
        wanted = selector.get(manifest["kind"]) or (spec.get("selector") or {}).get("matchLabels")
        if wanted is not None and manifest["kind"] != "ServiceMonitor":
            assert sum(wanted.items() <= found.items() for found in labels) == 1, manifest
    for workload in workloads:
        pod = workload["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        used = {m["name"] for c in (*pod["containers"], *pod["initContainers"]) for m in c["volumeMounts"]}
        assert used == volumes


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_containers_of_the_chart_may_do_nothing_but_their_work(values: Manifest) -> None:
    for workload in (m for m in rendered(values) if m["kind"] in ("DaemonSet", "StatefulSet")):
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for every in (*pod["containers"], *pod["initContainers"]):
            rights = every["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert "privileged" not in rights
            # The authority's key signs anybody: only what issues this pod's certificate, and renews it, sees it.
            sees = any(mount["name"] == "authority" for mount in every["volumeMounts"])
            assert sees == (every["name"] in ("certificate", "renewal"))


@pytest.mark.parametrize("address", ["10.1.2.3", "fd00::1", "2001:10:20:30:40:50:1:2"])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_daemon_takes_the_configuration_that_the_chart_gives_it(
    values: Manifest, address: str, tmp_path: Path
) -> None:
    template = tmp_path / "template.yaml"
    template.write_text(one(rendered(values), "ConfigMap")["data"]["node.yaml"])
    out = tmp_path / "node.yaml"
    environment = {"PATH": os.environ["PATH"], "GCORE_NODE": "12", "POD_IP": address, "SLOTS": '["cuda:0"]'}
    command = [shutil.which("python3") or "python3", str(DEPLOY / "node" / "render.py"), str(template), str(out)]
    subprocess.run(command, env=environment, check=True)
    config = NodeConfig.load(out)
    assert config.node == "12", "a word, though YAML has numbers"
    assert config.advertised(config.listen_port) == f"{f'[{address}]' if ':' in address else address}:7700"
    assert config.advertised_host == config.workers_listen_on == address
    extra = values.get("extraConfig", {})
    specs_may_name(config, "/runs/models", "/runs/data")
    assert config.lease_ttl_s == extra.get("lease_ttl_s", 5)
    replicas = values.get("etcd", {}).get("replicas", 3)
    expected = values.get("etcd", {}).get("endpoints") or [
        f"https://gcore-etcd-{n}.gcore-etcd.rl.svc:2379" for n in range(replicas)
    ]
    assert [*config.etcd.endpoints] == expected


def test_members_of_the_bundled_etcd_find_one_another(tmp_path: Path) -> None:
    manifests = rendered({})
    etcd = one(manifests, "StatefulSet", "gcore-etcd")
    command = container(etcd, "etcd")["command"]
    options = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
    members = dict(member.split("=", 1) for member in options["initial-cluster"].split(","))
    for number in range(etcd["spec"]["replicas"]):
        name = f"gcore-etcd-{number}"
        assert members[name] == options["initial-advertise-peer-urls"].replace("$(MEMBER)", name)
    assert int(options["quota-backend-bytes"]) == 8 << 30
    budget = one(manifests, "PodDisruptionBudget", "gcore-etcd")
    assert budget["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpu": 8}, "additional properties 'gpu' not allowed"),
        ({"etcd": {"replicas": 2}}, "/etcd/replicas"),
        ({"etcd": {"bundled": False}}, "/etcd/endpoints"),
        ({"serviceMonitor": {"enabled": True}}, "/serviceMonitor/tokenSecret"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"slots": ["gpu0"]}, "/slots/0"),
        ({"storage": {"home": {"hostPath": "here"}}}, "/storage/home/hostPath"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values: Manifest, words: str) -> None:
    assert words in checks("helm", str(CHART), given=values)["refused"]


def test_who_is_not_named_reaches_nothing_of_the_daemons_but_other_daemons() -> None:
    policy = one(rendered({}), "NetworkPolicy")
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"


@pytest.mark.parametrize("release", ["gcore", "lab", "team-gcore"])
def test_what_alerts_ask_for_is_the_job_that_prometheus_gives_whatever_the_release_is_called(release: str) -> None:
    """The Prometheus operator makes `job` of the Service's label that `jobLabel` names; without that, of the Service's name."""
    manifests = rendered({"serviceMonitor": {"enabled": True, "tokenSecret": "viewer"}}, release)
    monitors = [m["spec"] for m in manifests if m["kind"] == "ServiceMonitor"]
    services = [m["metadata"] for m in manifests if m["kind"] == "Service"]
    jobs = {}
    for monitor in monitors:
        wanted = monitor["selector"]["matchLabels"]
        (service,) = (one for one in services if wanted.items() <= one["labels"].items())
        name = monitor.get("jobLabel")
        jobs[wanted["app.kubernetes.io/component"]] = service["name"] if name is None else service["labels"][name]
    asked = set(re.findall(r'up\{job="(\w+)"\}', " ".join(map(str, rules("expr")))))
    assert jobs == {"controller": "gcore", "etcd": "etcd"}
    assert asked == set(jobs.values())


def test_compose_files_fit_the_specification() -> None:
    file = DEPLOY / "compose" / "compose.yaml"
    services = checks("compose", str(file))
    tree = yaml.safe_load(file.read_text())
    assert sorted(services) == sorted(tree["services"])
    assert sum(name.startswith("etcd-") for name in services) == 3
    assert sum(name.startswith("node-") for name in services) == 2


def test_the_dockerfile_has_nothing_that_hadolint_complains_of() -> None:
    python = Path(os.environ.get("GCORE_DEPLOY_PYTHON", str(ROOT / ".venv-deploy" / "bin" / "python")))
    hadolint = python.with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), "--no-color", str(DEPLOY / "docker" / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize("script", SHELL, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_scripts_have_nothing_that_shellcheck_complains_of(script: Path) -> None:
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_probe_of_the_chart_is_the_images() -> None:
    command = container(one(rendered({}), "DaemonSet"), "controller")["readinessProbe"]["exec"]["command"]
    spec = importlib.util.spec_from_file_location("health", DEPLOY / "node" / "health.py")
    assert spec is not None
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert f'"{command[1]}", "{command[2]}"' in dockerfile
    assert command[1] == "/opt/gcore/node/health.py"


@pytest.mark.parametrize("options", [(), ("gcore.service.d/limits.conf",)], ids=["as it is", "with limits of jobs"])
def test_the_unit_of_systemd_passes_systemds_own_check(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Debian's systemd 252 does not know DelegateSubgroup=, which came with 254: that, and nothing else, may be unknown to it."""
    analyze = shutil.which("systemd-analyze")
    assert analyze, "install Debian's systemd"
    program = tmp_path / "gcore-controller"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "systemd" / "gcore.service").read_text().replace("/opt/gcore/bin/gcore-controller", str(program))
    text = text.replace("User=gcore", "User=root").replace("Group=gcore", "Group=root")
    (tmp_path / "gcore.service").write_text(text)
    for option in options:
        (tmp_path / option).parent.mkdir()
        shutil.copy(DEPLOY / "systemd" / option, tmp_path / option)
    checked = subprocess.run(
        [analyze, "verify", "--man=no", str(tmp_path / "gcore.service")], capture_output=True, text=True, check=False
    )
    said = [line for line in checked.stderr.splitlines() if "DelegateSubgroup" not in line and "gcore" in line]
    assert (checked.returncode, said) == (0, []), checked.stderr


def test_rules_and_dashboards_of_the_chart_are_those_beside_it() -> None:
    manifests = rendered(VALUES["everything on"])
    for name in ("alerts", "recording", "etcd"):
        rule = one(manifests, "PrometheusRule", f"gcore-{name}")
        assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules" / f"{name}.yml").read_text())
    boards = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
    for board in boards:
        found = one(manifests, "ConfigMap", f"gcore-dashboard-{board.stem}")
        assert json.loads(found["data"][f"gcore-{board.name}"]) == json.loads(board.read_text())
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_rdma_gets_its_devices_memory_lock_and_volumes() -> None:
    found = container(one(rendered(VALUES["everything on"]), "DaemonSet"), "controller")
    assert found["resources"]["limits"]["rdma/hca"] == 1
    assert found["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {"name": "datasets", "mountPath": "/datasets", "readOnly": True} in found["volumeMounts"]
