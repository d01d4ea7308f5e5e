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

from gcore.clock import Clock, SystemClock
from gcore.errors import GcoreError, UsageError
from gcore.schema import UnreadableRecord
from gcore.store.client import EtcdStore
from gcore.store.endpoints import StoreTls, StoreUser
from gcore.store.lease_times import LeaseTimes
from gcore.worker.process import status_of
from gcore.worker.records import LaunchSpec, StoreRef, TlsFiles
from gcore.worker.supervisor import Supervisor

log = logging.getLogger("gcore.worker")


def main() -> None:
    """The console script."""
    parser = argparse.ArgumentParser(prog="gcore-worker", description="Supervises one engine or train rank.")
    parser.add_argument("--home", required=True, help="folder of the cluster it belongs to; shown, not used")
    parser.add_argument("--launch", required=True, type=Path, help="launch document, a JSON file")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    code = 0
    try:
        code = asyncio.run(supervise(read_launch(arguments.launch)))
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


async def connect(store: StoreRef, clock: Clock, lease_call_s: float | None = None) -> EtcdStore:
    """The store that a launch document names, for a lease whose renewal may take `lease_call_s`. Raises UsageError."""
    tls = None if store.tls is None else _tls(store.tls)
    user = None if store.user is None else StoreUser(store.user.name, _password(Path(store.user.password_file)))
    return await EtcdStore.connect(store.endpoints, clock=clock, tls=tls, user=user, lease_call_s=lease_call_s)


def _tls(files: TlsFiles) -> StoreTls:
    ca, cert, key = (None if path is None else Path(path) for path in (files.ca, files.cert, files.key))
    return StoreTls(ca=ca, cert=cert, key=key)


def _password(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"cannot read the store's password ({error.strerror})", where=str(path)) from error


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
