"""Which process has a node's emulated engines of a job, and how it comes by those that are placed later.

A folder under the home holds the launch documents that nobody has taken yet, and a file that the process locks which takes them. The kernel
gives the lock back when that process dies, however it does; what lies in the folder then is the next one's. So a document is taken by one
process, and engines that share a slot are in one. Files only; waits for nothing.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gcore.atomic import whole_file
from gcore.emulated.launch import HostLaunch


class Inbox:
    """Of one job's engines on one node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, launch: HostLaunch, home: Path) -> Inbox:
        """That of whoever has the engines of this job and node."""
        return cls(home / "workers" / f"emulated-{launch.node}-{launch.job_uid}")

    def put(self, launch: HostLaunch) -> Path:
        """Lay a document down. It is gone once somebody has taken it."""
        file = self._folder / f"{launch.name}.json"
        whole_file(file, launch.encode(), mode=0o600)
        return file

    def claim(self) -> bool:
        """Whether this process takes them from now on, until it ends."""
        if self._lock is None:
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def take(self) -> list[HostLaunch]:
        """Those that lie there now. Only for who has the claim. Raises UnreadableRecord for what is no launch document."""
        found = []
        for file in sorted(self._folder.glob("*.json")):
            found.append(HostLaunch.decode(file.read_bytes(), str(file)))
            file.unlink()
        return found
