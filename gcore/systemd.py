"""What a service tells systemd of itself (sd_notify): datagrams to the socket that NOTIFY_SOCKET names. Elsewhere nothing is told.

Knows the protocol, and nothing of when a daemon is ready (`controllers.notifying`). What cannot be sent is not sent again: systemd
is not worth failing for.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

SOCKET, WATCHDOG_USEC, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
LONGEST_STATUS = 400


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Where to tell, and how often it wants to hear. `address` empty: nobody listens. `watchdog_s` None: nobody counts."""

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> ServiceManager:
        """As systemd says it to the process `pid`. A watchdog that is another process's is none."""
        address = environment.get(SOCKET, "")
        if not address.startswith(("/", "@")):
            return cls()
        micros, whose = environment.get(WATCHDOG_USEC, ""), environment.get(WATCHDOG_PID, "")
        mine = whose in ("", str(pid))
        counts = mine and micros.isascii() and micros.isdigit() and len(micros) < 16 and int(micros) > 0
        return cls(address, int(micros) / 1e6 if counts else None)

    def tell(self, *lines: str) -> None:
        """One message: `READY=1`, `STATUS=...`."""
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        message = "\n".join(line.replace("\n", " ")[:LONGEST_STATUS] for line in lines)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line,
        ):
            line.setblocking(False)  # a manager that does not read is not waited for
            line.sendto(message.encode(errors="replace"), address)


def forget(environment: dict[str, str] | os._Environ[str]) -> None:
    """Take out what is this process's alone: its workers must not speak for it."""
    for name in (SOCKET, WATCHDOG_USEC, WATCHDOG_PID):
        environment.pop(name, None)
