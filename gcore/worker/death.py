"""How a child died, in one sentence: from its exit code, its last words, and whether the kernel was out of memory.

The kernel counts its out-of-memory kills, per control group and for the whole machine. A SIGKILL that the supervisor
did not send, with a counter that grew meanwhile, is named as one. Another process may have been the victim and this
child killed by hand in the same moment; that is rarer than the opposite mistake.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

TAIL_BYTES = 8192
LAST_LINES = 3
LAST_WORDS = 500


def sentence(returncode: int, last_words: str, *, out_of_memory: bool) -> str:
    """`returncode` as subprocess has it: negative for a signal. `last_words`: the log's end, may be empty."""
    if returncode >= 0:
        how = f"ended by itself with exit code {returncode}"
    elif returncode == -signal.SIGKILL and out_of_memory:
        how = "killed by the kernel because memory ran out (SIGKILL)"
    else:
        how = f"killed by {_signal_name(-returncode)}"
    return f"{how}: {last_words}" if last_words else how


def last_words(log_file: Path, since: int) -> str:
    """The last lines of what was logged from byte `since` on, joined by " | "; empty if there are none."""
    try:
        with log_file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(since, end - TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:])[-LAST_WORDS:]


def out_of_memory_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Kills for want of memory so far that this process could be concerned by; 0 where the kernel does not tell."""
    return _counter(proc / "vmstat") + sum(_counter(path) for path in _memory_files(proc, cgroups))


def _memory_files(proc: Path, cgroups: Path) -> list[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


def _counter(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
