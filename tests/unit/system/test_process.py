"""Processes by identity, with real processes of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcore.system import process
from gcore.system.process import (
    CannotStart,
    ProcessId,
    identify_process,
    is_foreign_listener,
    is_running,
    send_signal,
    spawn_detached,
    terminate_process,
)

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[ProcessId]:
    spawned = spawn_detached(["sleep", "600"], log_file=tmp_path / "logs" / "sleeper.log")
    yield spawned
    terminate_process(spawned, grace_s=0)


def test_a_spawned_process_runs_in_a_session_of_its_own(sleeper: ProcessId) -> None:
    assert is_running(sleeper)
    assert os.getsid(sleeper.pid) == sleeper.pid != os.getsid(0)


def test_a_terminated_process_is_not_running_and_is_reaped(sleeper: ProcessId) -> None:
    assert terminate_process(sleeper, grace_s=30)
    assert not is_running(sleeper)
    assert terminate_process(sleeper, grace_s=30), "ending it once more is no error"


def test_a_process_deaf_to_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    log = tmp_path / "deaf.log"
    deaf = subprocess.Popen([sys.executable, "-I", "-S", "-c", DEAF], stdout=subprocess.PIPE)
    assert deaf.stdout is not None
    deaf.stdout.readline()
    found = identify_process(deaf.pid)
    assert found is not None
    assert not terminate_process(found, grace_s=0.05)
    assert deaf.wait() == -signal.SIGKILL
    assert not log.exists()


def test_a_reused_pid_is_never_signalled(sleeper: ProcessId) -> None:
    earlier = ProcessId(sleeper.pid, sleeper.started - 1)
    assert not is_running(earlier)
    assert not send_signal(earlier, signal.SIGKILL)
    assert terminate_process(earlier, grace_s=0)
    assert is_running(sleeper)


def test_a_zombie_counts_as_dead() -> None:
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is left to be collected
    status = process.process_status(zombie.pid)
    assert status is not None
    assert status.state == "Z"
    assert not is_running(status.identity)
    assert identify_process(zombie.pid) is None
    assert not send_signal(status.identity, signal.SIGTERM)
    zombie.wait()


def test_a_process_name_with_parentheses_and_spaces_is_read_right(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    spawned = spawn_detached([str(odd), "600"], log_file=tmp_path / "log")
    try:
        assert is_running(spawned)
        status = process.process_status(spawned.pid)
        assert status is not None
        assert status.identity == spawned
        assert status.state in "RS"  # it may still be starting
    finally:
        terminate_process(spawned, grace_s=0)


LISTENER = """
import socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_a_port_is_foreign_if_no_descendant_of_a_process_listens_on_it(sleeper: ProcessId) -> None:
    # The shell stays, because a command follows: the listener is its child.
    child = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1"; true', sys.executable, LISTENER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    port = int(child.stdout.readline())
    assert not is_foreign_listener(child.pid, port)
    assert is_foreign_listener(sleeper.pid, port)
    child.communicate()
    assert not is_foreign_listener(sleeper.pid, port)


def test_output_is_appended_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log"
    for word in ("one", "two"):
        echo = spawn_detached(
            ["sh", "-c", f"echo {word}; pwd; echo $X >&2"], log_file=log, cwd=tmp_path, env={"X": "x"}
        )
        assert process.wait_process_ended(echo, timeout_s=30)
    assert log.read_text().split() == ["one", str(tmp_path), "x", "two", str(tmp_path), "x"]


def test_a_command_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"cannot start '/no/such' .*No such file"):
        spawn_detached(["/no/such"], log_file=tmp_path / "log")


def test_waiting_gives_up_after_the_time_out(sleeper: ProcessId) -> None:
    assert not process.wait_process_ended(sleeper, timeout_s=0.01)


def test_a_tethered_command_dies_with_its_parent(tmp_path: Path) -> None:
    tether = [*process.GUARD, "tether"]
    script = (
        "import subprocess, sys, os, signal\n"
        f"child = subprocess.Popen([*{tether!r}, str(os.getpid()), 'sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = identify_process(int(parent.stdout.readline()))
    assert child is not None
    while Path(f"/proc/{child.pid}/comm").read_text().strip() != "sleep":
        process.wait_process_ended(child, timeout_s=0.005)
    parent.kill()
    parent.wait()
    assert process.wait_process_ended(child, timeout_s=30)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["1", "true"], 70), ([str(os.getpid()), "/no/such"], 127)],
    ids=["its parent is gone", "no such command"],
)
def test_a_tether_that_cannot_hold_says_so(arguments: list[str], code: int) -> None:
    done = subprocess.run([*process.GUARD, "tether", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("cannot start '/no/such'" in done.stderr) == (code == 127)
