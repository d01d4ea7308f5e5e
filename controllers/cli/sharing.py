"""Who else uses a cluster of this machine that a `gcore run` has started, and is about to end.

Each `gcore run` holds a lock on the home as long as it is at work there; a job that somebody handed in since is among the
cluster's. A job that was interrupted long ago and goes on because a cluster is up is nobody's reason to keep it up.

Whoever ends a cluster holds the lock alone until it has ended: a run that comes meanwhile waits, and starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

from controllers.cli.answers import snapshot
from controllers.cli.finding import find_addresses
from gcore.client import JobsClient, Patience
from gcore.clock import Clock
from gcore.errors import GcoreError, UsageError

LOCK = "followers.lock"
ASK_S = 1.5
"""For an answer: somebody has pressed a key and waits."""
ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


class Following:
    """A command that is at work in a home, since `began` (seconds since the epoch)."""

    def __init__(self, lock: int, clock: Clock) -> None:
        self._lock = lock
        self._clock = clock
        self._began = clock.wall()

    def is_alone(self) -> bool:
        """Whether no other command is at work there. If so, none begins before this one has ended."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def others(self, home: Path, own: str, runner: asyncio.Runner) -> tuple[str, ...]:
        """The names of jobs that were handed in since this began and have not ended, but for job `own`.

        Nothing if no controller answers: then none works on them either. `runner`: the one that called controllers before, if
        any did, for gRPC is in one loop of a process only: what comes late of a call goes to the loop that made it.
        """
        try:
            return runner.run(self._others(home, own))
        except GcoreError:
            return ()

    async def _others(self, home: Path, own: str) -> tuple[str, ...]:
        patience = Patience(call_s=ASK_S)
        async with JobsClient(find_addresses(None, home), clock=self._clock, patience=patience) as client:
            jobs = [snapshot(job) for job in await client.list_jobs()]
        return tuple(j.name for j in jobs if j.created > self._began and j.uid != own and j.state not in ENDED)


@contextlib.contextmanager
def following(home: Path, clock: Clock, *, say: Callable[[str], None]) -> Iterator[Following]:
    """For as long as a command is at work in `home`. Raises UsageError."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / LOCK).open("a")
    except OSError as error:
        raise UsageError(
            f"cannot write there ({error.strerror or error})", where=str(home), fix="Choose another --home"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another `gcore run` is stopping its cluster in {home}; waiting for that ...")
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield Following(lock.fileno(), clock)
