"""`gcore-worker --home HOME --launch FILE`: the supervisor's process, and how a controller starts it.

The process is detached, so that it outlives the controller that starts it. It reads the launch document, connects to
the store and runs `gcore.worker.supervisor`. `--home` is not used: it is on the command line so that users and `gcore
down` see which cluster the process belongs to. Exit status: 0 after an orderly stop, 1 if the worker failed, 2 if the
launch document cannot be used. The process stays small: no torch, no command-line framework.

The launch document is written to HOME/workers/INSTANCE.json, readable by its owner only, because it may contain an
environment. The supervisor's log is HOME/logs/INSTANCE.supervisor.log; the document names the child's log. The starting
process does not wait: the store shows whether the worker started. While the cluster has nodes of the previous schema
version, a worker that is started then writes records of that version until it ends. A document is read once, at start;
each start deletes old ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from gcore.errors import GcoreError, UsageError, explain_os_errors
from gcore.schema import NEWEST_VERSION, PIN, UnreadableRecord, written_version
from gcore.store.reference import connect_store
from gcore.store.types import LeaseTimes
from gcore.system import daemon as logs
from gcore.system.clock import SystemClock
from gcore.system.files import replace_file
from gcore.system.process import CannotStart, ProcessId, accept_signals, process_status, spawn_detached
from gcore.worker.records import LaunchSpec
from gcore.worker.supervisor import Supervisor

log = logging.getLogger("gcore.worker")


def main() -> None:
    """Run `gcore-worker`: parse the command line, supervise one worker, and exit with its status."""
    parser = argparse.ArgumentParser(prog="gcore-worker", description="Supervises one engine or train rank.")
    parser.add_argument("--home", required=True, help="folder of the cluster it belongs to; shown, not used")
    parser.add_argument("--launch", required=True, type=Path, help="launch document, a JSON file")
    arguments = parser.parse_args()
    accept_signals()
    code = 0
    try:
        logs.set_up_logging()
        spec = read_launch(arguments.launch)
        logs.set_up_logging(spec.about)
        code = asyncio.run(supervise(spec))
    except* GcoreError as errors:
        code = _explain(errors)
    sys.exit(code)


def read_launch(path: Path) -> LaunchSpec:
    """Read and validate the launch document. Raises UsageError."""
    try:
        return LaunchSpec.decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read the launch document ({error.strerror})", where=str(path)) from error
    except UnreadableRecord as error:
        raise UsageError(error.what, where=error.where, fix=error.fix) from error


async def supervise(spec: LaunchSpec) -> int:
    """Run the supervisor of `spec` until the worker has ended. Return the exit code. SIGTERM and SIGINT stop the
    worker.
    """
    me = process_status(os.getpid())
    if me is None:
        raise UsageError("this process cannot see itself under /proc", fix="Mount /proc")
    clock = SystemClock()
    store = await connect_store(spec.store, clock, LeaseTimes.of(spec.lease_ttl_s).call_s)
    try:
        supervisor = Supervisor(spec, store, clock, me.identity)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.stop, f"received {number.name}")
        return await supervisor.run()
    finally:
        await store.close()


def _explain(errors: BaseExceptionGroup[GcoreError]) -> int:
    """Log each error of the group as one sentence. Return the exit code of the last one."""
    code = 1
    for error in errors.exceptions:
        if isinstance(error, GcoreError):
            code = error.exit_code
            log.error("%s", error)
        elif isinstance(error, BaseExceptionGroup):
            code = _explain(error)
    return code


READ_WITHIN_S = 3600.0
"""A launch document that is older than the newest by this many seconds is deleted: it has been read, or never will be.
"""


def worker_command(home: Path, launch_file: Path) -> tuple[str, ...]:
    """Return the supervisor's command line.

    `home` is on it only to show which cluster the process belongs to.
    """
    return (sys.executable, "-P", "-m", "gcore.worker.main", "--home", str(home), "--launch", str(launch_file))


def supervisor_log(instance: str, home: Path) -> Path:
    """Return the path of the supervisor's own log, which is separate from the child's."""
    return home / "logs" / f"{instance}.supervisor.log"


def start_worker(spec: LaunchSpec, home: Path) -> ProcessId:
    """Write the launch document and start the supervisor as a detached process, in this process's environment.

    Raises CannotStart.
    """
    launch_file = home / "workers" / f"{spec.instance}.json"
    with explain_os_errors(
        "cannot write the launch document", CannotStart, where=launch_file, fix="Make the home folder writable"
    ):
        launch_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(launch_file, spec.encode(), mode=0o600)
        sweep_launches(launch_file)
    pinned = {PIN: str(written_version())} if written_version() < NEWEST_VERSION else {}
    return spawn_detached(
        worker_command(home, launch_file),
        env={**os.environ, **pinned},
        log_file=supervisor_log(spec.instance, home),
        cwd=home,
    )


def sweep_launches(newest: Path) -> None:
    """Delete launch documents in the folder of `newest` that are much older than it (`READ_WITHIN_S`).

    Raises OSError if `newest` does not exist.
    """
    now = newest.stat().st_mtime
    for file in newest.parent.glob("*.json"):
        with contextlib.suppress(OSError):  # another controller of this home deletes them too
            if now - file.stat().st_mtime > READ_WITHIN_S:
                file.unlink()


if __name__ == "__main__":
    main()
