"""Workers of this machine whose daemon is gone are found and stopped; others stay."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controllers.cli.local import LocalWorker, local_workers
from controllers.cli.main import app

SLEEP = """
import subprocess, sys, time
if "child" in sys.argv:
    subprocess.Popen(["sleep", "600"])
print("up", flush=True)
time.sleep(600)
"""
Started = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Started]:
    """Starts a process that sleeps, with the command line of another."""
    processes: list[subprocess.Popen[bytes]] = []

    def started(*words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", SLEEP, *words], stdout=subprocess.PIPE, process_group=0)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    yield started
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def worker(start: Started, home: Path, name: str = "rollout-n-1") -> subprocess.Popen[bytes]:
    launch = home / "workers" / f"{name}.json"
    return start("gcore.worker.main", "--home", str(home), "--launch", str(launch), "child")


def below(folder: Path) -> list[LocalWorker]:
    return [one for one in local_workers() if one.home.is_relative_to(folder)]


def test_workers_without_a_daemon_are_listed_and_ended_and_others_stay(tmp_path: Path, start: Started) -> None:
    left, kept = worker(start, tmp_path / "left"), worker(start, tmp_path / "kept", "train-n-2")
    start("controllers.daemon", "--home", str(tmp_path / "kept"), "--config", "none.json")
    assert [(one.process.pid, one.instance, one.home.name, one.has_daemon) for one in below(tmp_path)] == [
        (kept.pid, "train-n-2", "kept", True),
        (left.pid, "rollout-n-1", "left", False),
    ]
    answer = CliRunner().invoke(app, ["workers", "--end", "--home", str(tmp_path / "left"), "-o", "json"])
    assert json.loads(answer.stdout)["ended"] == 2
    assert left.wait(20) < 0
    assert kept.poll() is None
    assert [one.instance for one in below(tmp_path)] == ["train-n-2"]


@pytest.mark.parametrize("text", ["home: HOME", "no: configuration"])
def test_a_daemon_that_names_only_its_configuration_is_that_of_its_home(
    tmp_path: Path, start: Started, text: str
) -> None:
    worker(start, tmp_path / "home")
    file = tmp_path / "node.yaml"
    rest = f"\nnode: n\nslots: ['cpu:0']\nrun_root: {tmp_path}\netcd: {{endpoints: ['h:1']}}\n"
    file.write_text(text.replace("HOME", str(tmp_path / "home")) + rest)
    start("gcore-controller", "--config", str(file))
    assert [one.has_daemon for one in below(tmp_path)] == [True]
