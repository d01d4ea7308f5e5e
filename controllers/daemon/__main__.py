"""The program `gcore-controller --config FILE`: the daemon of a node.

The daemon runs one incarnation after the other, each under one lease in the store. When a lease is lost, all state of
that incarnation is discarded, and a new one starts under a new name; the API stays available. SIGTERM ends the daemon
cleanly: other controllers take its shards (parts of the prompt stream) at once, its finished groups are delivered if
that is quick (`controllers.rules.decide`), and its lease is revoked. Its workers keep running until another daemon
adopts them. A second SIGTERM ends it at once. SIGHUP reloads its certificates. Under systemd it reports when it is
ready, and what it waits for (`controllers.daemon.daemon`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from gcore.errors import GcoreError
from gcore.system.clock import SystemClock
from gcore.system.daemon import ServiceManager, choose_log_format, clear_environment, set_up_logging
from gcore.system.memory import limit_library_pools
from gcore.system.process import accept_signals


def main() -> None:
    """Run the daemon (console script `gcore-controller`)."""
    parser = argparse.ArgumentParser(
        prog="gcore-controller",
        description="One gcore daemon. Start one on every node; they find each other through etcd.",
        epilog="example: gcore-controller --config /etc/gcore/node.yaml",
    )
    parser.add_argument(
        "--home",
        help="folder of the cluster on this machine; identifies the process in the process list, otherwise unused",
    )
    parser.add_argument("--config", required=True, type=Path, help="the node's configuration, a YAML file")
    arguments = parser.parse_args()
    accept_signals()
    limit_library_pools()
    manager = ServiceManager.from_environment(os.environ, os.getpid())
    clear_environment(os.environ)
    code = 0
    try:
        asyncio.run(_run(arguments.config, manager))
    except* GcoreError as errors:  # also from a task group: users get a sentence, not a traceback
        for error in _each(errors):
            manager.tell(f"STATUS={error}")
            print(f"gcore-controller: {error}", file=sys.stderr)  # noqa: T201 - the command line's own voice
            code = error.exit_code
    raise SystemExit(code)


def _each(errors: BaseExceptionGroup[GcoreError]) -> Iterator[GcoreError]:
    for error in errors.exceptions:
        if isinstance(error, GcoreError):
            yield error
        elif isinstance(error, BaseExceptionGroup):
            yield from _each(error)


async def _run(file: Path, manager: ServiceManager) -> None:
    from controllers.daemon.daemon import Daemon
    from gcore.config.node import NodeConfig

    config = NodeConfig.load(file)
    choose_log_format(config.log_format)
    set_up_logging({"controller": config.node})
    daemon = Daemon(config, SystemClock(), manager)
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    departing: asyncio.Task[None] | None = None

    def asked() -> None:
        nonlocal departing
        if departing is None:
            departing = loop.create_task(daemon.depart(), name="depart")
            departing.add_done_callback(lambda _: task.cancel())
        else:  # second signal: end at once
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    loop.add_signal_handler(signal.SIGHUP, daemon.reload)
    with contextlib.suppress(asyncio.CancelledError):
        await daemon.run()
    if departing is not None and departing.done() and not departing.cancelled():
        departing.result()  # a defect must surface


if __name__ == "__main__":
    main()
