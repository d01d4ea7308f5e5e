"""A process for each emulated engine, which does nothing: it stands for the engine where processes are spoken of.

A worker is ended, or killed, by its process; emulated engines of a node share one. So each has a shell beside it that waits for an end
that never comes: its pid stands in the engine's registration, and when it ends, by whatever signal, the engine is gone at once, alone. All of
them wait on one pipe, whose other end the host holds: when the host dies, they end too.
"""

from __future__ import annotations

import os
import subprocess

from gcore.worker.process import CannotStart, ProcessId, child_ended, status_of

COMMAND = ("sh", "-c", "read never")


class StandIn:
    """Of one engine."""

    def __init__(self, child: subprocess.Popen[bytes], identity: ProcessId) -> None:
        self._child = child
        self.identity = identity

    async def ended(self) -> None:
        """Returns once it has ended."""
        await child_ended(self._child.pid)
        self._child.wait()

    def end(self) -> None:
        """End it, if it lives."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()


class StandIns:
    """Of a process's engines."""

    def __init__(self) -> None:
        self._end, self._held = os.pipe()

    def start(self, instance: str) -> StandIn:
        """For the engine called `instance`, which is shown in lists of processes. Raises CannotStart."""
        try:
            child = subprocess.Popen([*COMMAND, instance], stdin=self._end, stdout=subprocess.DEVNULL)
        except OSError as error:
            raise CannotStart(f"no process can be started that stands for {instance} ({error.strerror})") from error
        status = status_of(child.pid)
        if status is None:
            raise CannotStart(f"the process that stands for {instance} cannot be seen under /proc", fix="Mount /proc")
        return StandIn(child, status.identity)

    def close(self) -> None:
        """End all of them."""
        os.close(self._held)
        os.close(self._end)
