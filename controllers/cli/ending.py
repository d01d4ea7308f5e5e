"""Ending the processes of a home: asked first, killed after a grace, kind after kind.

Daemons first, or they would start workers again; then workers, which stop their engines and ranks; etcd last, so that
all of them can say goodbye to it. Blocks, and a key press gets through at any moment: the caller may then call again
with no grace at all. Does not look after files (`local`).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from controllers.cli.leftovers import Kind, processes_of
from gcore.clock import Clock
from gcore.errors import GcoreError
from gcore.worker.process import KILL_WAIT_S, ProcessId, send_signal, wait_ended

GRACES_S: Mapping[Kind, float] = {"controller": 10.0, "worker": 15.0, "child": 0.0, "etcd": 10.0}
"""In this order; seconds from SIGTERM to SIGKILL. A worker gives its child ten itself."""
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Ended:
    """How many processes ended, and how many of them had to be killed."""

    ended: int
    killed: int


def end_all(home: Path, *, clock: Clock, grace_s: float | None = None) -> Ended:
    """End every process of `home` (absolute, resolved); with `grace_s` 0 by SIGKILL alone.

    Raises GcoreError if something does not die.
    """
    ended = killed = 0
    # More than one round only if something was started while this looked.
    for _ in range(ROUNDS):
        for kind, grace in GRACES_S.items():
            some = [p.process for p in processes_of(home) if p.kind == kind]
            ended += len(some)
            killed += _end(some, grace if grace_s is None else grace_s, clock)
        left = processes_of(home)
        if not left:
            return Ended(ended, killed)
    pids = ", ".join(str(p.process.pid) for p in left)
    raise GcoreError(f"processes {pids} are still there", where=str(home), fix="Look at them with `ps`")


def _end(processes: Sequence[ProcessId], grace_s: float, clock: Clock) -> int:
    """How many had to be killed."""
    if grace_s > 0:
        for process in processes:
            send_signal(process, signal.SIGTERM)
    end = clock.monotonic() + grace_s
    late = [p for p in processes if not wait_ended(p, max(0.0, end - clock.monotonic()))]
    for process in late:
        send_signal(process, signal.SIGKILL)
    for process in late:
        wait_ended(process, KILL_WAIT_S)
    return len(late)
