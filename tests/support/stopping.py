"""SIGSTOP that has taken effect."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

NEVER_S = 30.0


def stop_process(pid: int) -> None:
    """Stop it, and return once each of its threads has stopped: until then one may still answer.

    Raises TimeoutError if the threads do not stop.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + NEVER_S
    while not all(_state(task) in "TtXZ" for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} still runs {NEVER_S:g} s after SIGSTOP")
        time.sleep(0.001)


def _state(task: Path) -> str:
    """One letter of proc(5); `X` (dead) of a thread that is gone."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
