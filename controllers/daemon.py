"""`gcore-controller --home HOME --config FILE`: one daemon per node.

One life after the other: a life is one incarnation under one lease. When the lease is lost, everything of that life is
thrown away and a new one begins, under a new name; the API goes on answering meanwhile. SIGTERM ends the daemon cleanly:
its shards go to its peers at once, what it has finished is delivered if that is soon (`controllers.leaving`), and its lease
is revoked; its workers stay for whoever adopts them. A second SIGTERM skips all but the last.
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

from controllers.footprint import slim_down
from gcore.clock import SystemClock
from gcore.errors import GcoreError


def main() -> None:
    """The console script."""
    parser = argparse.ArgumentParser(
        prog="gcore-controller",
        description="One gcore daemon. Start one on every node; they find each other through etcd.",
        epilog="example: gcore-controller --home /var/lib/gcore --config /etc/gcore/node.json",
    )
    parser.add_argument("--home", required=True, help="folder of the cluster on this machine")
    parser.add_argument("--config", required=True, type=Path, help="the node's configuration, a JSON file")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=os.environ.get("GCORE_LOG_LEVEL", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    slim_down()
    try:
        asyncio.run(_run(arguments.config))
    except GcoreError as error:
        print(f"gcore-controller: {error}", file=sys.stderr)  # noqa: T201 - the command line's own voice
        raise SystemExit(error.exit_code) from None


async def _run(file: Path) -> None:
    from controllers.wire import Daemon
    from gcore.config import NodeConfig

    daemon = Daemon(NodeConfig.load(file), SystemClock())
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    departing: asyncio.Task[None] | None = None

    def asked() -> None:
        nonlocal departing
        if departing is None:
            departing = loop.create_task(daemon.depart(), name="depart")
            departing.add_done_callback(lambda _: task.cancel())
        else:  # once more: at once
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    with contextlib.suppress(asyncio.CancelledError):
        await daemon.run()
    if departing is not None and departing.done() and not departing.cancelled():
        departing.result()  # a defect must surface


if __name__ == "__main__":
    main()
