"""A local cluster with a process that a signal kills during the start."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controllers.cli import local
from gcore.system.clock import SystemClock
from gcore.system.process import EndedBySignal, ending_signal, spawn_detached, wait_process_ended


def test_the_signal_that_ended_a_child_is_named_and_an_end_of_its_own_is_none(tmp_path: Path) -> None:
    killed = spawn_detached([sys.executable, "-c", "import time; time.sleep(600)"], log_file=tmp_path / "log")
    assert ending_signal(killed) == ""
    os.kill(killed.pid, signal.SIGKILL)
    assert wait_process_ended(killed, 30)
    assert ending_signal(killed) == "SIGKILL"
    ended = spawn_detached([sys.executable, "-c", "raise SystemExit(2)"], log_file=tmp_path / "log")
    assert wait_process_ended(ended, 30)
    assert ending_signal(ended) == ""


@pytest.mark.parametrize("kills", [2, 3])
async def test_a_start_that_a_signal_ends_is_repeated_twice_and_then_fails_with_its_name(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, said = [], []
    cluster = SimpleNamespace()

    async def start(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) <= kills:
            raise EndedBySignal("node-0 was ended by SIGKILL before it was ready")
        return cluster

    monkeypatch.setattr(local, "_start", start)
    request = local.UpRequest(tmp_path, 2, "cpu:2")
    if kills == local.STARTS:
        with pytest.raises(EndedBySignal, match="node-0 was ended by SIGKILL"):
            await local.start_cluster(request, clock=SystemClock(), say=said.append)
    else:
        found = await local.start_cluster(request, clock=SystemClock(), say=said.append)
        assert (found.started, found.cluster) == (True, cluster)
    assert len(asked) == local.STARTS
    assert [line for line in said if "Starting again" in line] == [
        "node-0 was ended by SIGKILL before it was ready. Starting again (2 of 3) ...",
        "node-0 was ended by SIGKILL before it was ready. Starting again (3 of 3) ...",
    ]


async def test_a_daemon_that_is_killed_before_it_is_ready_is_told_by_its_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    said: list[str] = []
    with pytest.raises(EndedBySignal, match=r"node-[01] was ended by SIGKILL before it was ready") as raised:
        await local.start_cluster(
            local.UpRequest(tmp_path, 2, "cpu:2"),
            clock=SystemClock(),
            command=lambda home, file: command,
            say=said.append,
        )
    assert raised.value.exit_code == 3
    assert not local.home_processes(tmp_path)
