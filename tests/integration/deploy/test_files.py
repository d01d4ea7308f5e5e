"""Check the files of `deploy/` with external tools, without a container engine or a cluster.

Helm's code renders the chart and Kubernetes' schemas validate the result. Linters and specifications check the files for Docker,
Compose and the shell. `make test-deploy` creates the environment and sets GCORE_DEPLOY_PYTHON.
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
    "defaults": {},
    "no GPU": {"gpus": 0, "slots": ["cpu:0-3", "cpu:4-7"], "image": {"repository": "registry.x/gcore", "tag": "7"}},
    "external etcd": EXTERNAL,
    "external etcd without certificates": {"etcd": {"bundled": False, "endpoints": ["a:2379", "b:2379"]}},
    "all features": {
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
    "hostPath for runs": {
        "storage": {"runs": {"hostPath": "/mnt/runs"}},
        "networkPolicy": {"enabled": False},
    },
}


def test_the_chart_passes_helm_lint() -> None:
    found = checks("lint", str(CHART))
    assert found["total_charts_linted"] == 1
    assert found["errors"] == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_rendered_manifests_match_kubernetes_schemas(values: Manifest) -> None:
    manifests = rendered(values)
    assert checks("kubernetes", given=manifests) == []
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    assert all(m["metadata"]["namespace"] == "rl" for m in manifests)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_selectors_ports_and_volumes_of_the_chart_match(values: Manifest) -> None:
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
def test_containers_of_the_chart_have_no_extra_privileges(values: Manifest) -> None:
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
            # The authority's key can sign any identity. Only the containers that issue and renew the pod's certificate may see it.
            sees = any(mount["name"] == "authority" for mount in every["volumeMounts"])
            assert sees == (every["name"] in ("certificate", "renewal"))


@pytest.mark.parametrize("address", ["10.1.2.3", "fd00::1", "2001:10:20:30:40:50:1:2"])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_daemon_accepts_the_chart_configuration(values: Manifest, address: str, tmp_path: Path) -> None:
    template = tmp_path / "template.yaml"
    template.write_text(one(rendered(values), "ConfigMap")["data"]["node.yaml"])
    out = tmp_path / "node.yaml"
    environment = {"PATH": os.environ["PATH"], "GCORE_NODE": "12", "POD_IP": address, "SLOTS": '["cuda:0"]'}
    command = [shutil.which("python3") or "python3", str(DEPLOY / "node" / "render.py"), str(template), str(out)]
    subprocess.run(command, env=environment, check=True)
    config = NodeConfig.load(out)
    assert config.node == "12", "the name stays a string, although YAML would read a number"
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


def test_members_of_the_bundled_etcd_find_each_other(tmp_path: Path) -> None:
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
def test_invalid_values_are_rejected_by_name(values: Manifest, words: str) -> None:
    assert words in checks("helm", str(CHART), given=values)["refused"]


def test_network_policies_admit_only_daemons_and_listed_clients() -> None:
    policy = one(rendered({}), "NetworkPolicy")
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"


@pytest.mark.parametrize("release", ["gcore", "lab", "team-gcore"])
def test_prometheus_job_names_match_the_alerts_for_any_release_name(release: str) -> None:
    """The Prometheus operator sets `job` to the Service's label named by `jobLabel`, or else to the Service's name."""
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


def test_compose_files_match_the_specification() -> None:
    file = DEPLOY / "compose" / "compose.yaml"
    services = checks("compose", str(file))
    tree = yaml.safe_load(file.read_text())
    assert sorted(services) == sorted(tree["services"])
    assert sum(name.startswith("etcd-") for name in services) == 3
    assert sum(name.startswith("node-") for name in services) == 2


def test_the_dockerfile_passes_hadolint() -> None:
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
def test_scripts_pass_shellcheck(script: Path) -> None:
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_chart_and_image_use_the_same_probe() -> None:
    command = container(one(rendered({}), "DaemonSet"), "controller")["readinessProbe"]["exec"]["command"]
    spec = importlib.util.spec_from_file_location("health", DEPLOY / "node" / "health.py")
    assert spec is not None
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert f'"{command[1]}", "{command[2]}"' in dockerfile
    assert command[1] == "/opt/gcore/node/health.py"


@pytest.mark.parametrize(
    "options", [(), ("gcore.service.d/limits.conf",)], ids=["without drop-in", "with limits of jobs"]
)
def test_the_unit_passes_systemd_analyze(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Debian's systemd 252 does not know DelegateSubgroup= (new in 254). No other complaint is allowed."""
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
    manifests = rendered(VALUES["all features"])
    for name in ("alerts", "recording", "etcd"):
        rule = one(manifests, "PrometheusRule", f"gcore-{name}")
        assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules" / f"{name}.yml").read_text())
    boards = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
    for board in boards:
        found = one(manifests, "ConfigMap", f"gcore-dashboard-{board.stem}")
        assert json.loads(found["data"][f"gcore-{board.name}"]) == json.loads(board.read_text())
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_rdma_gets_its_devices_memory_lock_and_volumes() -> None:
    found = container(one(rendered(VALUES["all features"]), "DaemonSet"), "controller")
    assert found["resources"]["limits"]["rdma/hca"] == 1
    assert found["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {"name": "datasets", "mountPath": "/datasets", "readOnly": True} in found["volumeMounts"]
