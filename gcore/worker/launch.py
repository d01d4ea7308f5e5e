"""Starts a worker's supervisor, so that it outlives whoever starts it.

The launch document goes to HOME/workers/INSTANCE.json, readable by its owner only, since it may carry an environment;
the supervisor's own words go to HOME/logs/INSTANCE.supervisor.log, the child's where the document says. Does not wait
for anything: whether the worker came up stands in the store. While nodes of the schema version before are in the cluster, a
worker is of that version for its whole life: they are to read what it writes.

A document is read once, at the start. With each start those of long ago are deleted, or a home would gather one of every
worker it ever had.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from gcore.atomic import whole_file
from gcore.schema import NEWEST_VERSION, PIN, spoken
from gcore.worker.process import CannotStart, ProcessId, spawn_detached
from gcore.worker.records import LaunchSpec

READ_WITHIN_S = 3600.0
"""A document that is so much older than the newest was read, or never will be."""


def worker_command(home: Path, launch_file: Path) -> tuple[str, ...]:
    """The supervisor's command line. `home` stands on it so that the process can be told to belong to that cluster."""
    return (sys.executable, "-P", "-m", "gcore.worker.main", "--home", str(home), "--launch", str(launch_file))


def supervisor_log(instance: str, home: Path) -> Path:
    """Where the supervisor's own words are."""
    return home / "logs" / f"{instance}.supervisor.log"


def start_worker(spec: LaunchSpec, home: Path) -> ProcessId:
    """Start the supervisor of `spec`, in the environment of this process. Raises CannotStart."""
    launch_file = home / "workers" / f"{spec.instance}.json"
    try:
        launch_file.parent.mkdir(parents=True, exist_ok=True)
        whole_file(launch_file, spec.encode(), mode=0o600)
        sweep_launches(launch_file)
    except OSError as error:
        raise CannotStart(
            f"cannot write the launch document ({error.strerror or error})",
            where=str(launch_file),
            fix="Make the home folder writable",
        ) from error
    pinned = {PIN: str(spoken())} if spoken() < NEWEST_VERSION else {}
    return spawn_detached(
        worker_command(home, launch_file),
        env={**os.environ, **pinned},
        log_file=supervisor_log(spec.instance, home),
        cwd=home,
    )


def sweep_launches(newest: Path) -> None:
    """Delete the launch documents beside `newest` that are so old that they were read. Raises OSError if it is not there."""
    now = newest.stat().st_mtime
    for file in newest.parent.glob("*.json"):
        with contextlib.suppress(OSError):  # another controller of this home is at the same
            if now - file.stat().st_mtime > READ_WITHIN_S:
                file.unlink()
