"""SIGTERM ends every command in order, whatever its parent left of signals; SIGINT too, unless it was ignored."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from controllers.cli.commands import run as run_command
from gcore.client.contexts import ClusterAddress
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
        await run_command.keep_last_commit(cluster, "a job", signals)  # type: ignore[arg-type]
    assert clock.monotonic() - began < 20.0
