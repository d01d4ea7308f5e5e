"""The worker beside SGLang's server as a process: messages to its supervisor, and no leftover processes.

The server is a small stand-in (`tests/support/fake_sglang.py`); test_sglang_real.py runs the same worker in front of the real one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fake_sglang
import httpx
import pytest
from sglang_worker import LONG_S, Worker, check_ended, start_worker

from gcore.system.control_line import CONTROL_FD, ORPHANED_EXIT
from gcore.system.process import ProcessId, identify_process, wait_process_ended


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@dataclass(frozen=True)
class Fake:
    """A worker whose server is the stand-in."""

    worker: Worker
    pids: Path

    def servers(self) -> list[ProcessId]:
        """The server, and the two that it started: one in its group, one in a session of its own."""
        found = [identify_process(int(pid)) for pid in self.pids.read_text().split()]
        assert len(found) == 3
        assert None not in found
        return [process for process in found if process is not None]

    def scratch(self) -> Path:
        lines = self.worker.log.read_text().splitlines()
        return Path(next(line.split()[1] for line in lines if line.startswith("TMPDIR")))


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Fake]]:
    python = fake_sglang.install(tmp_path / "env")
    started: list[Fake] = []

    def begin(*engine_args: str, **more: Any) -> Fake:
        pids = tmp_path / f"pids{len(started)}"
        document = {"kind": "sglang", "python": str(python), "model": str(model), "weight_version": "2.7"}
        document |= {"engine_args": ["--fake-pids", str(pids), *engine_args], **more}
        started.append(Fake(start_worker(document, tmp_path / f"log{len(started)}"), pids))
        return started[-1]

    yield begin
    for fake in started:
        fake.worker.close()


def test_it_registers_the_servers_own_address_and_tells_how_it_is(start: Callable[..., Fake]) -> None:
    fake = start()
    worker = fake.worker
    assert worker.hear("progress")["phase"] == "loading"
    address = worker.hear("serving")["address"]
    answer = httpx.get(f"http://{address}/model_info", trust_env=False).json()
    assert answer == {"weight_version": "2.7"}
    assert worker.hear("progress", phase="waiting")["progress"] >= 1


def test_while_it_generates_each_answer_of_the_scheduler_is_progress(start: Callable[..., Fake]) -> None:
    fake = start("--fake-busy", "3")
    worker = fake.worker
    first = worker.hear("progress", phase="generating")["progress"]
    assert worker.hear("progress", phase="generating")["progress"] > first


def test_a_server_that_calls_its_weights_otherwise_is_corrected_before_it_is_registered(
    start: Callable[..., Fake],
) -> None:
    fake = start("--fake-version", "default")
    worker = fake.worker
    address = worker.hear("serving")["address"]
    assert httpx.get(f"http://{address}/model_info", trust_env=False).json() == {"weight_version": "2.7"}


def test_a_server_of_another_process_on_its_port_is_not_taken_for_its_own(start: Callable[..., Fake]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fake = start("--fake-load-for-ever", port=server.server_port)
        expected = f"another process took port {server.server_port} before SGLang's server could listen on it"
        assert expected in fake.worker.hear("failed")["reason"]
        assert fake.worker.process.wait(LONG_S) != 0
        server.shutdown()


def test_told_to_stop_it_ends_with_everything_the_server_started(start: Callable[..., Fake]) -> None:
    fake = start()
    worker = fake.worker
    worker.hear("serving")
    servers, scratch = fake.servers(), fake.scratch()
    assert scratch.is_dir()
    worker.say("stop")
    assert worker.process.wait(LONG_S) == 0
    check_ended(servers)
    assert not scratch.exists()


def test_told_to_stop_while_the_server_loads_it_ends_at_once(start: Callable[..., Fake]) -> None:
    fake = start("--fake-load-for-ever")
    worker = fake.worker
    worker.hear("progress", phase="loading", progress=2)  # two lines were said, so all its processes are there
    servers = fake.servers()
    worker.say("stop")
    assert worker.process.wait(LONG_S) == 0
    check_ended(servers)


@pytest.mark.parametrize("how", ["the worker is killed", "its group is killed", "its supervisor is gone"])
def test_nothing_is_left_of_the_server_when(start: Callable[..., Fake], how: str) -> None:
    fake = start()
    worker = fake.worker
    worker.hear("serving")
    servers, scratch, wardens = fake.servers(), fake.scratch(), worker.below()[:1]
    assert scratch.is_dir()
    if how == "the worker is killed":
        worker.process.kill()
    elif how == "its group is killed":
        os.killpg(worker.process.pid, signal.SIGKILL)
    else:
        worker.line.shutdown(socket.SHUT_RDWR)
    code = worker.process.wait(LONG_S)
    assert code == (ORPHANED_EXIT if how == "its supervisor is gone" else -signal.SIGKILL)
    check_ended(servers + wardens)
    assert not scratch.exists()


def test_the_wardens_death_takes_the_server_and_is_told(start: Callable[..., Fake]) -> None:
    fake = start()
    worker = fake.worker
    worker.hear("serving")
    server = fake.servers()[0]
    stat = Path(f"/proc/{server.pid}/stat").read_text()
    warden = int(stat.rpartition(")")[2].split()[1])
    os.kill(warden, signal.SIGKILL)
    assert "SGLang's server ended: killed by SIGKILL" in worker.hear("failed")["reason"]
    assert worker.process.wait(LONG_S) == 1
    assert wait_process_ended(server, LONG_S)


def test_a_server_that_is_killed_is_an_orderly_failure_and_takes_the_rest_along(start: Callable[..., Fake]) -> None:
    fake = start()
    worker = fake.worker
    worker.hear("serving")
    servers = fake.servers()
    os.kill(servers[0].pid, signal.SIGKILL)
    assert "SGLang's server ended: killed by SIGKILL" in worker.hear("failed")["reason"]
    assert worker.process.wait(LONG_S) == 1
    check_ended(servers)


def test_a_server_that_does_not_come_up_fails_with_its_own_last_words(start: Callable[..., Fake]) -> None:
    fake = start("--fake-die")
    worker = fake.worker
    reason = worker.hear("failed")["reason"]
    assert "exit code 3" in reason
    assert "RuntimeError: no memory for the cache" in reason
    assert worker.process.wait(LONG_S) == 1
    assert not fake.scratch().exists()
    assert "RuntimeError: no memory for the cache" in worker.log.read_text()


def test_a_scheduler_that_does_not_answer_makes_no_progress(start: Callable[..., Fake]) -> None:
    fake = start("--fake-silent")
    worker = fake.worker
    worker.hear("serving")
    assert worker.hear("progress", phase="answering")["progress"] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        pytest.param({"engine_args": ["--port", "1"]}, "--port is set by gcore", id="an argument of gcore's own"),
        pytest.param({"model": "/nowhere"}, "not a model folder", id="no model"),
        pytest.param({"python": "/nowhere/bin/python"}, "cannot start '/nowhere/bin/python'", id="no Python"),
        pytest.param({"batch_slots": 0}, "batch_slots", id="a field that does not fit"),
    ],
)
def test_failed_start_is_reported_with_a_sentence(start: Callable[..., Fake], more: dict[str, Any], words: str) -> None:
    fake = start(**more)
    worker = fake.worker
    assert words in worker.hear("failed")["reason"]
    assert worker.process.wait(LONG_S) != 0


def test_by_hand_it_says_who_starts_it() -> None:
    env = {name: value for name, value in os.environ.items() if name != CONTROL_FD}
    command = [sys.executable, "-m", "gcore.rollout.sglang"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert result.returncode == 2
    assert "started by its supervisor" in result.stderr
