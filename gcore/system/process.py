"""Processes by identity (pid and start time), how a child died, and thread counts of workers.

Pids are reused. So a stored process (in a file or in the store) has both numbers, and a signal is sent only to a process that matches both. It goes
through a pidfd that is opened first and checked afterwards, so that there is no race. A zombie counts as dead. An identity is valid on its machine
until the next boot. Linux only (`/proc`, pidfd).

How a child died is one sentence, from its exit code, its last log lines, and whether the kernel ran out of memory. The kernel counts
out-of-memory kills per control group and per machine. A SIGKILL that the supervisor did not send counts as one if a counter grew in the
meantime. Another process may have been the victim while somebody killed this child by hand, but that is rarer than the opposite mistake.

A worker has as many compute threads as its slot has cores, for every library, and none of them busy-waits: on a small machine the neighbour
needs the core (engine and rank take turns on it). Libraries read these variables at load, so they are set in the environment before the start.
The worker sets torch's own pools (`threads` in its launch document).

Engines set these variables at their entry, and only processes that wait for a child have an event loop, so `wait_child_ended` imports asyncio
itself.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gcore.errors import GcoreError, explain_os_errors

GUARD = (sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")))
"""Start of a command line that runs `gcore.system.guard` by its path; a subcommand follows."""


def accept_signals() -> None:
    """Reset inherited signal settings: SIGTERM is neither ignored nor blocked, and SIGINT is not blocked.

    An ignored SIGINT stays ignored: a shell sets that for background jobs of a script.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


DEAD_STATES = frozenset("ZXx")
"""States of ended processes in /proc/PID/stat."""


PROCESSOR_TIME_AGAIN_S = 0.05
"""Seconds of CPU time after which SIGPROF is repeated, because foreign code may have suppressed the first."""


class ProcessorTimeUsed(BaseException):
    """A block has used up its CPU time. Not an `Exception`, because foreign code in the block catches those."""


@contextmanager
def limit_processor_time(seconds: float) -> Iterator[None]:
    """Raise ProcessorTimeUsed in the block when the process has used `seconds` of CPU time, regardless of waiting.

    Uses SIGPROF, so it works in the main thread only. Native code is interrupted when it returns.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise ProcessorTimeUsed

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, PROCESSOR_TIME_AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class CannotStart(GcoreError):
    """A process could not be started."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process on this machine until the next boot. `started`: clock ticks from boot to its start."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process's status in the kernel. `state`: R, S, D, T (stopped by a signal), Z (zombie), ..."""

    identity: ProcessId
    state: str


def process_status(pid: int) -> ProcessStatus | None:
    """Return the process that has `pid` now, including a zombie; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command name in parentheses and may itself contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return ProcessStatus(ProcessId(pid, int(fields[19])), fields[0])


def identify_process(pid: int) -> ProcessId | None:
    """Return the identity of the living process that has `pid` now; None if there is none."""
    status = process_status(pid)
    return None if status is None or status.state in DEAD_STATES else status.identity


def is_running(process: ProcessId) -> bool:
    """Return whether `process` lives: same pid, same start, and not a zombie."""
    return identify_process(process.pid) == process


_CHILDREN: dict[ProcessId, subprocess.Popen[bytes]] = {}
"""Children that `spawn_detached` started. `ending_signal` needs them, because the kernel reports an exit status only to the parent."""


def child_pids(pid: int) -> list[int]:
    """Return the pids of a process's children, over all of its threads, the oldest of each thread first."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def is_foreign_listener(pid: int, port: int) -> bool:
    """Return whether a process that is neither `pid` nor a descendant of it listens on a TCP port, as far as `/proc` tells.

    A server whose port was chosen before it started may find the port taken, while clients already talk to the other process.
    """
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]]
            sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING and _port(row[1]) == port}
    pids = [pid]
    for one in pids:
        pids += child_pids(one)
        for file in Path(f"/proc/{one}/fd").glob("*"):
            with suppress(OSError):
                if os.readlink(file) in sockets:
                    return False
    return bool(sockets)


LISTENING = "0A"
"""State of a listening socket in `/proc/net/tcp`."""


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


COLLECTED_S = 1.0
"""Seconds to wait for the exit status of a child that has ended."""


class EndedBySignal(GcoreError):
    """A signal ended a process before it was ready. Another start may succeed."""

    exit_code = 3


def ending_signal(process: ProcessId) -> str:
    """Return the signal that ended a process, such as `SIGKILL`; empty if it lives, exited normally, or is not a child of this process."""
    child = _CHILDREN.get(process)
    if child is None or is_running(process):
        return ""
    try:
        code = child.wait(COLLECTED_S)
    except subprocess.TimeoutExpired:
        return ""
    if code >= 0:
        return ""
    names = {one.value: one.name for one in signal.Signals}
    return names.get(-code, f"signal {-code}")


def spawn_detached(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, log_file: Path, cwd: Path | None = None
) -> ProcessId:
    """Start `command` in its own session, so that it outlives the caller and gets no signals from the terminal.

    Its output is appended to `log_file` (creating the folder); its input is empty. `env`: the whole environment; None: this process's. Raises
    CannotStart.
    """
    with explain_os_errors(
        f"cannot start {command[0]!r} with output to {log_file}",
        CannotStart,
        fix="Check that the command exists and that the folder is writable",
    ):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                list(command),
                env=None if env is None else dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    status = process_status(process.pid)  # the thread below has not reaped it yet, so it exists, at least as a zombie
    if status is None:
        raise CannotStart(f"{command[0]!r} (pid {process.pid}) does not appear under /proc", fix="Mount /proc")
    # The parent must reap ended children, or zombies accumulate. The thread ends with the child or with this process.
    threading.Thread(target=process.wait, name=f"reap-{process.pid}", daemon=True).start()
    _CHILDREN[status.identity] = process
    return status.identity


def send_signal(process: ProcessId, number: int) -> bool:
    """Send a signal to `process`. Return False if it has ended. Raises PermissionError if it belongs to another user."""
    fd = _open(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


async def wait_child_ended(pid: int) -> None:
    """Return when the child `pid` has ended. It is not reaped yet, so the pid is not reused."""
    import asyncio

    fd = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def wait_process_ended(process: ProcessId, timeout_s: float) -> bool:
    """Block until `process` has ended, at most `timeout_s`. Return whether it has."""
    fd = _open(process)
    if fd is None:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # a pidfd becomes readable when the process ends, also as a zombie
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(fd)


def terminate_process(process: ProcessId, grace_s: float) -> bool:
    """End `process`: SIGTERM, then SIGKILL after `grace_s` seconds. Return when it has ended.

    Blocks, so run it in a thread if there is an event loop. Returns True if it ended within the grace period or had already ended, False if it was
    killed. Raises GcoreError if it does not end after SIGKILL (a process in an uninterruptible wait), and PermissionError if it belongs to another
    user.
    """
    if not send_signal(process, signal.SIGTERM) or wait_process_ended(process, grace_s):
        return True
    send_signal(process, signal.SIGKILL)
    if not wait_process_ended(process, KILL_WAIT_S):
        raise GcoreError(
            f"process {process.pid} has not ended {KILL_WAIT_S:.0f} s after SIGKILL",
            fix="It hangs in the kernel (a disk, a device); see /proc/PID/stack",
        )
    return False


KILL_WAIT_S = 30.0
"""Longest wait for a killed process, in seconds. A process with a GPU and much memory takes a while."""


def _open(process: ProcessId) -> int | None:
    """Return a pidfd of `process`, or None if it has ended. Opened first and checked afterwards, so that there is no race."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if is_running(process):
        return fd
    os.close(fd)
    return None


TAIL_BYTES = 8192
LAST_LINES = 3
LAST_WORDS = 500


def exit_sentence(returncode: int, last_words: str, *, out_of_memory: bool) -> str:
    """Return how a process ended, for an error message. `returncode`: as in subprocess, negative for a signal. `last_words`: end of its log; may be empty."""
    if returncode >= 0:
        how = f"ended by itself with exit code {returncode}"
    elif returncode == -signal.SIGKILL and out_of_memory:
        how = "killed by the kernel because memory ran out (SIGKILL)"
    else:
        how = f"killed by {_signal_name(-returncode)}"
    return f"{how}: {last_words}" if last_words else how


def last_log_lines(log_file: Path, since: int) -> str:
    """Return the last lines of the log from byte `since` on, joined by " | "; empty if there are none."""
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
    """Return how many processes the kernel has killed for lack of memory, on this machine and in this process's control groups; 0 if it does not say.

    The caller compares two counts: a growth means that one of its processes may have been killed.
    """
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


SIZED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""Environment variables that set the size of one library's thread pool each. By default a library uses all cores that it sees."""


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment variables that limit the thread pools of libraries to `threads` threads and forbid busy waiting."""
    return {name: str(threads) for name in SIZED} | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_DYNAMIC": "FALSE",
        "KMP_BLOCKTIME": "0",  # Intel's runtime busy-waits this long (ms) regardless of OMP_WAIT_POLICY
        "TOKENIZERS_PARALLELISM": "false",
    }
