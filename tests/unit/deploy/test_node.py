"""The scripts in deploy/node: rendering the configuration, restarting the daemon, the health probe."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from gcore.api.authority import CertificateRequest, issue_certificate_into, make_authority
from gcore.system.slots import bound_cores, is_cuda, slots_problem

NODE = Path(__file__).parents[3] / "deploy" / "node"
WAIT_S = 60.0


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"deploy_{name}", NODE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


render, probe = loaded("render"), loaded("health")


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("node: ${NAME}\n", "node: a\n"),
        ("node: ${NAME}-${NAME}", "node: a-a"),
        ("root: ${ROOT:-/runs}/x", "root: /runs/x"),
        ("root: ${EMPTY:-/runs}", "root: /runs"),
        ("node: ${NAME:-b}", "node: a"),
        ("cost: 5$$", "cost: 5$"),
        ("  # ${UNSET} and $ stay\nnode: x", "  # ${UNSET} and $ stay\nnode: x"),
    ],
)
def test_placeholders_are_replaced(template: str, made: str) -> None:
    assert render.filled(template, {"NAME": "a", "EMPTY": ""}) == made


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a: b\nnode: ${UNSET}", r"line 2: \$\{UNSET\} has no value. Set UNSET in the environment"),
        ("cost: 5$", r"line 1: a \$ without"),
        ("node: $NAME", r"line 1: a \$ without"),
        ("node: ${NA ME}", r"line 1: a \$ without"),
        ("node: ${BROKEN}", "line 1: the value of BROKEN has a line break"),
    ],
)
def test_an_invalid_placeholder_is_reported_with_its_line(template: str, words: str) -> None:
    with pytest.raises(render.Unfit, match=words):
        render.filled(template, {"NAME": "a", "BROKEN": "a\nslots: [cuda:0]"})


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_without_gpus_all_cores_form_one_slot(cores: frozenset[int]) -> None:
    (slot,) = yaml.safe_load(render.slots_of("", cores))
    assert slots_problem([slot]) == ""
    assert bound_cores(slot) == cores


def test_each_gpu_that_the_driver_lists_is_a_slot() -> None:
    listed = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1f)\n  MIG 1g.10gb Device 0: (UUID: MIG-2)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n"
    slots = yaml.safe_load(render.slots_of(listed, frozenset({0})))
    assert slots == ["cuda:0", "cuda:1"]
    assert all(is_cuda(slot) for slot in slots)


def test_the_rendered_file_is_complete_or_absent(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("node: ${GCORE_TEST_NODE}\nslots: ${SLOTS}\n")
    command = [sys.executable, str(NODE / "render.py"), str(tmp_path / "t.yaml"), str(tmp_path / "out.yaml")]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == (
        f"render.py: {tmp_path}/t.yaml: line 1: ${{GCORE_TEST_NODE}} has no value. Set GCORE_TEST_NODE in the environment\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.yaml"]
    subprocess.run(command, env={**os.environ, "GCORE_TEST_NODE": "a", "SLOTS": "[cuda:7]"}, check=True)
    assert yaml.safe_load((tmp_path / "out.yaml").read_text()) == {"node": "a", "slots": ["cuda:7"]}


DAEMON = """#!/bin/bash
echo "$*" >> calls
code=$(sed -n "$(wc -l < calls)p" codes)
if [ "$code" = wait ]; then
  trap 'echo ended >> calls; exit 0' TERM
  while :; do sleep 0.05; done
fi
exit "$code"
"""


def started(folder: Path, *codes: str) -> subprocess.Popen[str]:
    """Start run.sh with a stand-in daemon that exits with these codes in turn, or waits for a signal."""
    (folder / "bin").mkdir()
    daemon = folder / "bin" / "gcore-controller"
    daemon.write_text(DAEMON)
    daemon.chmod(daemon.stat().st_mode | stat.S_IXUSR)
    (folder / "codes").write_text("\n".join(codes) + "\n")
    (folder / "t.yaml").write_text("node: n\n")
    environment = {
        **os.environ,
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "GCORE_CONFIG": str(folder / "node.yaml"),
        "GCORE_RESTART_S": "0.05",
        "GCORE_PYTHON": sys.executable,
    }
    return subprocess.Popen(
        [str(NODE / "run.sh"), str(folder / "t.yaml")], cwd=folder, env=environment, text=True, stderr=subprocess.PIPE
    )


def calls(folder: Path) -> list[str]:
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [(["0"], 0, 1), (["2"], 2, 1), (["1", "137", "0"], 0, 3), (["3", "2"], 2, 2)],
    ids=["clean exit", "invalid configuration", "dies twice", "dies, then invalid configuration"],
)
def test_a_daemon_that_dies_is_restarted(tmp_path: Path, codes: list[str], code: int, starts: int) -> None:
    process = started(tmp_path, *codes)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == code, said
    assert calls(tmp_path) == [f"--config {tmp_path}/node.yaml"] * starts
    assert said.count("is started again") == starts - 1


def test_sigterm_stops_the_daemon_gracefully(tmp_path: Path) -> None:
    process = started(tmp_path, "1", "wait")
    end = time.monotonic() + WAIT_S
    while len(calls(tmp_path)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)  # until its trap is set
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert calls(tmp_path)[-1] == "ended"


@pytest.fixture
def serving() -> Iterator[tuple[int, health.HealthServicer]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port, servicer
    server.stop(None)


def test_the_probe_reports_whether_the_daemon_serves(
    tmp_path: Path, serving: tuple[int, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    port, servicer = serving
    file = tmp_path / "node.yaml"
    file.write_text(f"node: n\nlisten_host: 0.0.0.0\nadvertise: n:{port}\nlisten_port: {port}\n")
    status = health_pb2.HealthCheckResponse
    servicer.set("", status.NOT_SERVING)
    assert probe.main([str(file)]) == 1
    servicer.set("", status.SERVING)
    assert probe.main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == ["NOT_SERVING", "SERVING"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node: n\nlisten_port: 1\n", "no answer: UNAVAILABLE"),
        ("node: n\n", "cannot ask: listen_port is not fixed"),
        ("", "cannot ask: "),
        ("node: n\nlisten_port: 1\ntls: {ca: no, cert: no, key: no}\n", "cannot ask: "),
    ],
)
def test_a_probe_without_an_answer_fails_with_the_reason(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node.yaml").write_text(text)
    assert probe.main([str(tmp_path / "node.yaml")]) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "where", "name"),
    [
        ({"node": "n", "listen_port": 7}, "127.0.0.1:7", "n"),
        ({"node": "n", "listen_host": "::", "listen_port": 7, "advertise": "[fe80::1]:7"}, "[::1]:7", "fe80::1"),
        ({"node": "n", "listen_host": "fe80::1", "listen_port": 7, "advertise": "h"}, "[fe80::1]:7", "h"),
        ({"node": "n", "listen_host": "0.0.0.0", "listen_port": 7, "advertise": "fd00::1"}, "127.0.0.1:7", "fd00::1"),
        ({"node": "n", "listen_host": "10.0.0.1", "listen_port": 7, "advertise": "h.x:9"}, "10.0.0.1:7", "h.x"),
    ],
)
def test_the_probe_uses_the_listening_address_and_the_certificates_name(
    config: dict[str, object], where: str, name: str
) -> None:
    assert probe.address(config) == where
    assert probe.named(config) == name


@pytest.mark.parametrize("host", ["gpu-1.cluster.example", "127.0.0.1", "fd00::1"], ids=["name", "IPv4", "IPv6"])
@pytest.mark.parametrize("foreign", [False, True], ids=["own authority", "other authority"])
def test_the_probe_uses_tls_with_the_nodes_certificate(
    tmp_path: Path, host: str, foreign: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    now = datetime.now(UTC)
    for authority in ("ours", "theirs"):
        make_authority(tmp_path / authority, "gcore", days=900, now=now)
    wanted = CertificateRequest("node", "gpu-1", (host,))
    issue_certificate_into(tmp_path / "node", tmp_path / "ours", wanted, now)
    issue_certificate_into(tmp_path / "served", tmp_path / ("theirs" if foreign else "ours"), wanted, now)
    cert, key = ((tmp_path / "served" / name).read_bytes() for name in ("cert.pem", "key.pem"))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
    server.start()
    tls = {name: f"node/{name}.pem" for name in ("ca", "cert", "key")}
    config = {"node": "gpu-1", "listen_host": "0.0.0.0", "listen_port": port, "advertise": host, "tls": tls}
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(config))
    code = probe.main([str(tmp_path / "node.yaml")])
    server.stop(None)
    assert (code, capsys.readouterr().out) == ((1, "no answer: UNAVAILABLE\n") if foreign else (0, "SERVING\n"))
