"""The engine as a process: start, messages to its supervisor, refused models, shutdown."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import issued
import pytest
import transformers
from engine_core import LLAMA_LIKE, save
from warm_programs import ENGINES

from gcore.api.authority import renew_certificate
from gcore.system.control_line import CONTROL_FD, ORPHANED_EXIT
from gcore.testing.models import make_tiny_model

TIMEOUT_S = 120


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=40_000, ends=False)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **more}


class Supervisor:
    """The other end of the control line."""

    def __init__(self, launch: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self.process = ENGINES.popen(
            "gcore.rollout.engine",
            env=environment(**{CONTROL_FD: str(theirs.fileno())}),
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        ours.settimeout(TIMEOUT_S)
        self._socket = ours
        self._lines = ours.makefile("r", encoding="utf-8")
        self.say(launch)

    def say(self, message: dict[str, Any]) -> None:
        self._socket.sendall((json.dumps(message) + "\n").encode())

    def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._lines.readline())
        return message

    def hear_until(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        heard = [self.hear()]
        while not wanted(heard[-1]):
            heard.append(self.hear())
        return heard

    def hang_up(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    started: list[Supervisor] = []

    def start(model: Path, **more: Any) -> Supervisor:
        document = {"kind": "engine", "model": str(model), "host": "127.0.0.1", "port": 0, "batch_slots": 4}
        document |= {"threads": 1, "dtype": "float32", "weight_version": "2.5"}
        started.append(Supervisor(document | more))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.process.kill()
        supervisor.process.communicate()
        supervisor.hang_up()


def test_a_supervised_engine_tells_that_it_serves_and_how_it_gets_on_and_stops_when_told(
    folder: Path, supervise: Callable[..., Supervisor]
) -> None:
    supervisor = supervise(folder)
    serving = supervisor.hear()
    assert serving["event"] == "serving"
    assert supervisor.hear() == {"event": "progress", "phase": "waiting", "progress": 0}
    with httpx.Client(base_url=f"http://{serving['address']}", trust_env=False, timeout=TIMEOUT_S) as http:
        assert http.get("/model_info").json()["weight_version"] == "2.5"
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4000}}
        assert http.post("/generate", json=body).status_code == 200
    heard = supervisor.hear_until(lambda m: m["phase"] == "waiting")
    assert {m["event"] for m in heard} == {"progress"}
    assert {m["phase"] for m in heard[:-1]} == {"generate"}
    progress = [m["progress"] for m in heard]
    assert len(progress) > 2
    assert all(later > earlier for earlier, later in pairwise(progress[:-1]))
    supervisor.say({"command": "stop"})
    assert supervisor.process.wait(TIMEOUT_S) == 0


def test_an_engine_with_a_certificate_serves_whoever_has_its_key_over_tls_alone(
    folder: Path, supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    material = issued.node(issued.authority(tmp_path / "ca"), "n1")
    files = {"ca": str(material.ca), "cert": str(material.cert), "key": str(material.key)}
    address = supervise(folder, tls=files, api_key="the key").hear()["address"]
    context = material.context(material.read())

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"https://{address}/model_info", headers=headers, verify=context, trust_env=False).status_code

    assert (status("the key"), status("junk")) == (200, 401)
    renew_certificate(tmp_path / "ca" / "n1", tmp_path / "ca", within_days=None, days=2, now=datetime.now(UTC))
    assert status("the key") == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{address}/model_info", trust_env=False)


def test_stop_ends_an_engine_that_is_busy(folder: Path, supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(folder)
    address = supervisor.hear()["address"]
    body = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 30_000}}).encode()
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        supervisor.hear_until(lambda m: m.get("phase") == "generate")
        supervisor.say({"command": "stop"})
        assert supervisor.process.wait(TIMEOUT_S) == 0


def test_an_engine_does_not_outlive_its_supervisor(folder: Path, supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(folder)
    supervisor.hear()
    supervisor.hang_up()
    assert supervisor.process.wait(TIMEOUT_S) == ORPHANED_EXIT


def test_a_supervisor_hears_why_an_engine_could_not_start(tmp_path: Path, supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(tmp_path)
    heard = supervisor.hear()
    assert heard["event"] == "failed"
    assert str(tmp_path) in heard["reason"]
    assert supervisor.process.wait(TIMEOUT_S) == 2


def test_a_launch_document_with_an_unknown_key_is_refused(folder: Path, supervise: Callable[..., Supervisor]) -> None:
    assert "slots" in supervise(folder, slots=4).hear()["reason"]


@pytest.mark.parametrize(
    "prepare", ["nothing there", "an empty folder", "a broken config", "no weights", "broken weights"]
)
def test_a_folder_that_is_no_model_is_one_sentence_and_exit_code_two(
    tmp_path: Path, folder: Path, prepare: str
) -> None:
    model = tmp_path / "model"
    if prepare != "nothing there":
        model.mkdir()
    if prepare == "a broken config":
        (model / "config.json").write_text("{")
    if prepare in ("no weights", "broken weights"):
        (model / "config.json").write_text((folder / "config.json").read_text())
    if prepare == "broken weights":
        (model / "model.safetensors").write_bytes(b"nothing")
    one_sentence(run_engine("--model", str(model)), str(model))


def test_a_port_in_use_is_one_sentence_and_exit_code_two(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one_sentence(run_engine("--model", str(folder), "--port", str(port)), f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("option", "value"), [("--batch-slots", "0"), ("--dtype", "int3"), ("--port", "x"), ("--device", "cuda")]
)
def test_an_option_that_does_not_fit_is_one_sentence_and_exit_code_two(folder: Path, option: str, value: str) -> None:
    one_sentence(run_engine("--model", str(folder), option, value), value)


def run_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = environment(CUDA_VISIBLE_DEVICES="")
    return ENGINES.run("gcore.rollout.engine", *arguments, env=env, timeout=TIMEOUT_S)


def one_sentence(ended: subprocess.CompletedProcess[str], names: str) -> None:
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert names in ended.stderr
    assert ended.stdout == ""


def test_an_interrupted_engine_ends_without_a_traceback(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore.rollout.engine", "--model", str(folder)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving on 127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert errors == ""
    assert process.returncode == 130


def test_a_model_that_no_lane_can_serve_is_refused_in_one_sentence(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    folder = save(transformers.LlamaConfig(**LLAMA_LIKE, rope_parameters=rope), tmp_path)
    ended = run_engine("--model", str(folder))
    one_sentence(ended, "the torch engine cannot serve this model")
    assert "Serve it with SGLang instead" in ended.stderr


def test_an_engine_may_have_as_many_connections_as_the_system_allows(folder: Path) -> None:
    """Not only the 1024 of a login shell: each waiting request is one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    engine = subprocess.Popen(
        ["bash", "-c", f"ulimit -Sn 64 && exec {sys.executable} -m gcore.rollout.engine --model {folder}"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline().startswith("serving on ")
        assert resource.prlimit(engine.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        engine.terminate()
        engine.communicate()
