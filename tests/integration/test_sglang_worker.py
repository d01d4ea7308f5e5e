"""The worker beside SGLang's server as a process: what its supervisor hears, and that nothing of it is ever left behind.

The server is a small stand-in that answers at once (`tests/support/fake_sglang.py`); the same worker in front of the
real one is in test_sglang_real.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_sglang
import httpx
import pytest

from gcore.worker.child import CONTROL_FD, ORPHANED_EXIT
from gcore.worker.process import ProcessId, identify, wait_ended

LONG_S = 60.0
"""Only reached when something is broken."""


@dataclass
class Worker:
    """A worker, held as its supervisor holds it."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    log: Path
    pids_file: Path

    def __post_init__(self) -> None:
        self._reader = self.line.makefile("r")

    def hear(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next message of that kind with those fields; others are passed over."""
        for text in self._reader:
            message: dict[str, Any] = json.loads(text)
            if message["event"] == event and fields.items() <= message.items():
                return message
        raise AssertionError(f"the line ended before {event} {fields}:\n{self.log.read_text()}")

    def say(self, command: str) -> None:
        self.line.sendall(json.dumps({"command": command}).encode() + b"\n")

    def servers(self) -> list[ProcessId]:
        """The server and all that it started."""
        found = [identify(int(pid)) for pid in self.pids_file.read_text().split()]
        assert None not in found
        return [process for process in found if process is not None]

    def scratch(self) -> Path:
        return Path(next(line.split()[1] for line in self.log.read_text().splitlines() if line.startswith("TMPDIR")))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Any]:
    python = fake_sglang.install(tmp_path / "env")
    started: list[Worker] = []

    def begin(*engine_args: str, **more: Any) -> Worker:
        pids, log = tmp_path / f"pids{len(started)}", tmp_path / f"log{len(started)}"
        document = {"kind": "sglang", "python": str(python), "model": str(model), "weight_version": "2.7"}
        document |= {"engine_args": ["--fake-pids", str(pids), *engine_args], **more}
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "gcore.rollout.sglang"],
                env={**os.environ, CONTROL_FD: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        ours.sendall(json.dumps(document).encode() + b"\n")
        started.append(Worker(process, ours, log, pids))
        return started[-1]

    yield begin
    for worker in started:
        worker.process.kill()
        worker.process.wait()
        worker.line.close()


def check_nothing_left(servers: list[ProcessId]) -> None:
    assert len(servers) == 3
    assert all(wait_ended(process, LONG_S) for process in servers)


def test_it_registers_the_servers_own_address_and_tells_how_it_is(start: Any) -> None:
    worker = start()
    assert worker.hear("progress")["phase"] == "loading"
    address = worker.hear("serving")["address"]
    answer = httpx.get(f"http://{address}/model_info", trust_env=False).json()
    assert answer == {"weight_version": "2.7"}
    assert worker.hear("progress", phase="waiting")["progress"] >= 1


def test_while_it_generates_each_answer_of_the_scheduler_is_progress(start: Any) -> None:
    worker = start("--fake-busy", "3")
    first = worker.hear("progress", phase="generating")["progress"]
    assert worker.hear("progress", phase="generating")["progress"] > first


def test_a_server_that_calls_its_weights_otherwise_is_corrected_before_it_is_registered(start: Any) -> None:
    worker = start("--fake-version", "default")
    address = worker.hear("serving")["address"]
    assert httpx.get(f"http://{address}/model_info", trust_env=False).json() == {"weight_version": "2.7"}


def test_told_to_stop_it_ends_with_everything_the_server_started(start: Any) -> None:
    worker = start()
    worker.hear("serving")
    servers, scratch = worker.servers(), worker.scratch()
    assert scratch.is_dir()
    worker.say("stop")
    assert worker.process.wait(LONG_S) == 0
    check_nothing_left(servers)
    assert not scratch.exists()


def test_told_to_stop_while_the_server_loads_it_ends_at_once(start: Any) -> None:
    worker = start("--fake-load-for-ever")
    worker.hear("progress", phase="loading", progress=2)  # two lines were said, so all its processes are there
    servers = worker.servers()
    worker.say("stop")
    assert worker.process.wait(LONG_S) == 0
    check_nothing_left(servers)


@pytest.mark.parametrize("how", ["the worker is killed", "its group is killed", "its supervisor is gone"])
def test_nothing_is_left_of_the_server_when(start: Any, how: str) -> None:
    worker = start()
    worker.hear("serving")
    servers = worker.servers()
    if how == "the worker is killed":
        worker.process.kill()
    elif how == "its group is killed":
        os.killpg(worker.process.pid, signal.SIGKILL)
    else:
        worker.line.shutdown(socket.SHUT_RDWR)
    code = worker.process.wait(LONG_S)
    assert code == (ORPHANED_EXIT if how == "its supervisor is gone" else -signal.SIGKILL)
    check_nothing_left(servers)


def test_the_wardens_death_takes_the_server_and_is_told(start: Any) -> None:
    worker = start()
    worker.hear("serving")
    server = worker.servers()[0]
    stat = Path(f"/proc/{server.pid}/stat").read_text()
    warden = int(stat.rpartition(")")[2].split()[1])
    os.kill(warden, signal.SIGKILL)
    assert "SGLang's server ended: killed by SIGKILL" in worker.hear("failed")["reason"]
    assert worker.process.wait(LONG_S) == 1
    assert wait_ended(server, LONG_S)


def test_a_server_that_is_killed_is_an_orderly_failure_and_takes_the_rest_along(start: Any) -> None:
    worker = start()
    worker.hear("serving")
    servers = worker.servers()
    os.kill(servers[0].pid, signal.SIGKILL)
    assert "SGLang's server ended: killed by SIGKILL" in worker.hear("failed")["reason"]
    assert worker.process.wait(LONG_S) == 1
    check_nothing_left(servers)


def test_a_server_that_does_not_come_up_fails_with_its_own_last_words(start: Any) -> None:
    worker = start("--fake-die")
    reason = worker.hear("failed")["reason"]
    assert "exit code 3" in reason
    assert "RuntimeError: no memory for the cache" in reason
    assert worker.process.wait(LONG_S) == 1
    assert not worker.scratch().exists()
    assert "RuntimeError: no memory for the cache" in worker.log.read_text()


def test_a_scheduler_that_does_not_answer_makes_no_progress(start: Any) -> None:
    worker = start("--fake-silent")
    worker.hear("serving")
    assert worker.hear("progress", phase="answering")["progress"] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        pytest.param({"engine_args": ["--port", "1"]}, "--port is chosen by gcore", id="an argument of gcore's own"),
        pytest.param({"model": "/nowhere"}, "no model folder", id="no model"),
        pytest.param({"python": "/nowhere/bin/python"}, "cannot start '/nowhere/bin/python'", id="no Python"),
        pytest.param({"batch_slots": 0}, "batch_slots", id="a field that does not fit"),
    ],
)
def test_what_cannot_be_started_is_told_in_a_sentence(start: Any, more: dict[str, Any], words: str) -> None:
    worker = start(**more)
    assert words in worker.hear("failed")["reason"]
    assert worker.process.wait(LONG_S) != 0


def test_by_hand_it_says_who_starts_it() -> None:
    env = {name: value for name, value in os.environ.items() if name != CONTROL_FD}
    command = [sys.executable, "-m", "gcore.rollout.sglang"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert result.returncode == 2
    assert "started by its supervisor" in result.stderr
