"""Starts a worker's supervisor, so that it outlives whoever starts it.

The launch document goes to HOME/workers/INSTANCE.json, readable by its owner only, since it may carry an environment;
the supervisor's own words go to HOME/logs/INSTANCE.supervisor.log, the child's where the document says. Does not wait
for anything: whether the worker came up stands in the store.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from gcore.worker.process import CannotStart, ProcessId, spawn_detached
from gcore.worker.records import LaunchSpec


def worker_command(home: Path, launch_file: Path) -> tuple[str, ...]:
    """The supervisor's command line. `home` stands on it so that the process can be told to belong to that cluster."""
    return (sys.executable, "-m", "gcore.worker.main", "--home", str(home), "--launch", str(launch_file))


def start_worker(spec: LaunchSpec, home: Path) -> ProcessId:
    """Start the supervisor of `spec`, in the environment of this process. Raises CannotStart."""
    launch_file = home / "workers" / f"{spec.instance}.json"
    half = launch_file.with_suffix(".part")
    try:
        launch_file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(spec.encode())
        half.rename(launch_file)
    except OSError as error:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise CannotStart(
            f"cannot write the launch document ({error.strerror or error})",
            where=str(launch_file),
            fix="Make the home folder writable",
        ) from error
    return spawn_detached(
        worker_command(home, launch_file), log_file=home / "logs" / f"{spec.instance}.supervisor.log", cwd=home
    )
