"""`gcore-worker --home HOME --launch FILE`: the supervisor's process.

Reads the launch document, connects to the store and hands over to `gcore.worker.supervisor`. `--home` is not used: it
stands on the command line so that a person, and `gcore down`, see which cluster the process belongs to.

Ends with 0 after an orderly stop, 1 when the worker failed, 2 when the launch document cannot be used. Stays small: no
torch, no command-line framework.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from gcore import logs
from gcore.clock import SystemClock
from gcore.errors import GcoreError, UsageError
from gcore.schema import UnreadableRecord
from gcore.store.connecting import connect
from gcore.store.lease_times import LeaseTimes
from gcore.worker.process import status_of
from gcore.worker.records import LaunchSpec
from gcore.worker.supervisor import Supervisor

log = logging.getLogger("gcore.worker")


def main() -> None:
    """The console script."""
    parser = argparse.ArgumentParser(prog="gcore-worker", description="Supervises one engine or train rank.")
    parser.add_argument("--home", required=True, help="folder of the cluster it belongs to; shown, not used")
    parser.add_argument("--launch", required=True, type=Path, help="launch document, a JSON file")
    arguments = parser.parse_args()
    code = 0
    try:
        logs.set_up()
        spec = read_launch(arguments.launch)
        logs.set_up(spec.about)
        code = asyncio.run(supervise(spec))
    except* GcoreError as errors:
        code = _explain(errors)
    sys.exit(code)


def read_launch(path: Path) -> LaunchSpec:
    """The launch document. Raises UsageError."""
    try:
        return LaunchSpec.decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read the launch document ({error.strerror})", where=str(path)) from error
    except UnreadableRecord as error:
        raise UsageError(error.what, where=error.where, fix=error.fix) from error


async def supervise(spec: LaunchSpec) -> int:
    """Run the worker of `spec` until it has ended; its exit code. SIGTERM and SIGINT stop it."""
    me = status_of(os.getpid())
    if me is None:
        raise UsageError("this process cannot see itself under /proc", fix="Mount /proc")
    clock = SystemClock()
    store = await connect(spec.store, clock, LeaseTimes.of(spec.lease_ttl_s).call_s)
    try:
        supervisor = Supervisor(spec, store, clock, me.identity)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.stop, f"asked to by {number.name}")
        return await supervisor.run()
    finally:
        await store.close()


def _explain(errors: BaseExceptionGroup[GcoreError]) -> int:
    """Log each as one sentence; the exit code."""
    code = 1
    for error in errors.exceptions:
        if isinstance(error, GcoreError):
            code = error.exit_code
            log.error("%s", error)
        elif isinstance(error, BaseExceptionGroup):
            code = _explain(error)
    return code


if __name__ == "__main__":
    main()
