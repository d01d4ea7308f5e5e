"""A scripted job API in a thread of its own, for synchronous tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from fake_jobs import FakeJobs, Script


@contextlib.contextmanager
def served(script: Script, servers: int = 1) -> Iterator[list[FakeJobs]]:
    """So many controllers of one cluster; their addresses are known."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)  # type: ignore[arg-type]

    found = [run(FakeJobs(script).start()) for _ in range(servers)]
    try:
        yield found  # type: ignore[misc]
    finally:
        for server in found:
            run(server.kill())  # type: ignore[attr-defined]
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
