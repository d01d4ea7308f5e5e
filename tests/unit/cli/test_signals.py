"""SIGTERM ends every command cleanly, whatever signal state its parent left; SIGINT does too, unless it was ignored."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from controllers.cli.commands import run as run_command
from gcore.api.v1 import jobs_pb2 as pb
from gcore.client.contexts import ClusterAddress
from gcore.ledger.records.cluster import PAUSES
from gcore.system.clock import SystemClock

COMMAND = """
import asyncio, sys
from controllers.cli import main

@main.app.command("wait-here")
def wait_here() -> None:
    async def answer() -> None:
        print("ready", flush=True)
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(line.strip(), flush=True)
        finally:
            print("in order", flush=True)
    asyncio.run(answer())

sys.argv = ["gcore", "wait-here"]
main.main()
"""


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ignore_both() -> None:
    ignore_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def block_both() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})


def nothing() -> None:
    pass


@contextmanager
def waiting(inherited: Callable[[], None]) -> Iterator[subprocess.Popen[str]]:
    """A command that echoes lines, in a process whose parent left it that."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=inherited,
    ) as command:
        try:
            assert command.stdout is not None
            assert command.stdout.readline() == "ready\n"
            yield command
        finally:
            command.kill()


def end(command: subprocess.Popen[str], number: int) -> str:
    """Send the signal; what else it printed. The thread that reads its input ends with the input."""
    command.send_signal(number)
    out, errors = command.communicate(timeout=60)
    assert command.returncode == 130, errors
    assert "Traceback" not in errors
    return out


@pytest.mark.parametrize("inherited", [nothing, ignore_interrupts, ignore_both, block_both])
def test_sigterm_ends_a_command_in_order(inherited: Callable[[], None]) -> None:
    with waiting(inherited) as command:
        assert end(command, signal.SIGTERM) == "in order\n"


@pytest.mark.parametrize("inherited", [nothing, block_both])
def test_so_does_sigint(inherited: Callable[[], None]) -> None:
    with waiting(inherited) as command:
        assert end(command, signal.SIGINT) == "in order\n"


def test_sigint_that_was_ignored_stays_so_as_in_the_background_of_a_script() -> None:
    with waiting(ignore_interrupts) as command:
        command.send_signal(signal.SIGINT)
        assert command.stdin is not None
        assert command.stdout is not None
        command.stdin.write("still here\n")
        command.stdin.flush()
        assert command.stdout.readline() == "still here\n"
        assert end(command, signal.SIGTERM) == "in order\n"


class Paused:
    """A client of a cluster with one job, which its own pause leaves with a checkpoint after two looks."""

    def __init__(self, job: pb.Job) -> None:
        self.job, self.calls = job, list[str]()

    async def __aenter__(self) -> Paused:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def get_job(self, uid: str) -> pb.Job:
        self.calls.append("look")
        if self.calls.count("look") == 3:
            self.job.step, self.job.checkpoint = 4, "/runs/u/checkpoints/1-4"
        return self.job

    async def pause_job(self, uid: str) -> pb.Job:
        self.calls.append("pause")
        return self.job

    async def resume_job(self, uid: str) -> pb.Job:
        self.calls.append("resume")
        return self.job


RUNNING = {"uid": "u", "name": "sums", "state": pb.JOB_STATE_RUNNING, "lineage": 1, "step": 3}


@pytest.mark.parametrize(
    ("job", "calls"),
    [
        pytest.param(RUNNING, ["look", "pause", "look", "look", "resume"], id="it trains"),
        pytest.param({**RUNNING, "checkpoint": "/runs/u/checkpoints/1-3"}, ["look"], id="its commit has a checkpoint"),
        pytest.param(
            {**RUNNING, "checkpoint": "/runs/u/checkpoints/0-3"},
            ["look", "pause", "look", "look", "resume"],
            id="of another lineage",
        ),
        pytest.param({**RUNNING, "state": pb.JOB_STATE_PAUSED}, ["look"], id="somebody has paused it"),
        pytest.param(
            {**RUNNING, "reason": f"{PAUSES}; it still has to release 2 slots"}, ["look"], id="and it still has slots"
        ),
        pytest.param({**RUNNING, "state": pb.JOB_STATE_SUCCEEDED}, ["look"], id="it has ended"),
    ],
)
async def test_an_interrupted_run_pauses_its_job_until_there_is_a_checkpoint_and_resumes_nobody_elses_pause(
    monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], calls: list[str]
) -> None:
    client = Paused(pb.Job(**job))
    monkeypatch.setattr("gcore.client.jobs.JobsClient", lambda *_, **__: client)
    further = SimpleNamespace(pressed=False)
    await run_command.save_progress(ClusterAddress(("a:1",)), "u", further)  # type: ignore[arg-type]
    assert client.calls == calls


async def test_a_run_resumes_a_job_that_it_finds_paused(capsys: pytest.CaptureFixture[str]) -> None:
    for state, calls in ((pb.JOB_STATE_PAUSED, ["resume"]), (pb.JOB_STATE_RUNNING, [])):
        job = pb.Job(**{**RUNNING, "state": state})
        client = Paused(job)
        assert await run_command.resume_if_paused(client, job) is job  # type: ignore[arg-type]
        assert client.calls == calls
    assert capsys.readouterr().err == "Job sums (u) was paused; resuming it.\n"


@pytest.mark.parametrize("pressed", [False, True], ids=["in time", "a second key press"])
async def test_an_interrupted_run_waits_for_a_checkpoint_no_longer_than_it_says(
    monkeypatch: pytest.MonkeyPatch, pressed: bool
) -> None:
    clock = SystemClock()
    monkeypatch.setattr(run_command, "CHECKPOINT_S", 30.0 if pressed else 0.5)
    signals = SimpleNamespace(pressed=pressed)
    began = clock.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and answers nothing
        cluster = ClusterAddress((f"127.0.0.1:{silent.getsockname()[1]}",))
        await run_command.save_progress(cluster, "a job", signals)  # type: ignore[arg-type]
    assert clock.monotonic() - began < 20.0
