"""Processes by identity: a pid together with the moment the process started; how a child died; thread counts of workers.

Pids are used again. So whoever remembers a process (in a file, in the store) remembers both numbers, and a signal is sent only to a
process that has both: through a pidfd that was opened first and checked afterwards, so that nothing can come in between. A zombie
counts as dead. Identities are good on the machine, and for the boot, that they were taken on. Linux only (`/proc`, pidfd).

How a child died is one sentence, from its exit code, its last words, and whether the kernel was out of memory. The kernel counts its
out-of-memory kills, per control group and for the whole machine; a SIGKILL that the supervisor did not send, with a counter that grew
meanwhile, is named as one. Another process may have been the victim and this child killed by hand in the same moment; that is rarer
than the opposite mistake.

A worker has as many threads for arithmetic as its slot has cores, whichever library asks, and none of them spins while it waits: on a
small machine the neighbour needs the core (engine and rank take turns on it). Libraries read these variables when they are loaded, so
they are set in the environment before the start. torch's own pools are set in the worker (its launch document says `threads`).

Engines set these variables at their entry, and only who waits for a child has an event loop: `wait_child_ended` imports asyncio.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gcore.errors import GcoreError, explain_os_errors

GUARD = (sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")))
"""Begins a command line of `gcore.system.guard`, which is run by its path; a subcommand follows."""


def accept_signals() -> None:
    """Reset inherited signal settings: SIGTERM is neither ignored nor blocked, and SIGINT is not blocked.

    An ignored SIGINT stays ignored: a shell sets that for background jobs of a script.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


DEAD_STATES = frozenset("ZXx")
"""Process states, as in /proc/PID/stat, of what has ended."""


PROCESSOR_TIME_AGAIN_S = 0.05
"""The signal is repeated: foreign code may have swallowed the first."""


class ProcessorTimeUsed(BaseException):
    """A block has used up its processor time. No `Exception`, because foreign code within the block catches those."""


@contextmanager
def limit_processor_time(seconds: float) -> Iterator[None]:
    """Raise ProcessorTimeUsed within the block once the process has computed for `seconds`, however long it waited.

    Uses SIGPROF, so it is for the main thread. Code that is not Python's is interrupted when it returns.
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
    """A process, for as long as the machine is up. `started`: clock ticks from boot to its start."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What the kernel says of a process. `state` is its letter: R, S, D, T (stopped by a signal), Z (zombie), ..."""

    identity: ProcessId
    state: str


def process_status(pid: int) -> ProcessStatus | None:
    """The process that has `pid` now, a zombie too; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command's name in parentheses, and may itself contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return ProcessStatus(ProcessId(pid, int(fields[19])), fields[0])


def identify_process(pid: int) -> ProcessId | None:
    """The identity of the living process that has `pid` now; None if there is none."""
    status = process_status(pid)
    return None if status is None or status.state in DEAD_STATES else status.identity


def is_running(process: ProcessId) -> bool:
    """Whether `process` lives: the same pid, the same start, and no zombie."""
    return identify_process(process.pid) == process


_CHILDREN: dict[ProcessId, subprocess.Popen[bytes]] = {}
"""What this process has started detached: the kernel tells how a process ended to its parent alone."""

COLLECTED_S = 1.0
"""After its end a child's exit status is there within so long."""


class EndedBySignal(GcoreError):
    """A process was ended by a signal before it was ready. Another start may succeed."""

    exit_code = 3


def ending_signal(process: ProcessId) -> str:
    """The name of the signal that ended a process, `SIGKILL`; empty if it lives, has ended by itself, or is no child of this process."""
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
    """Start `command` in a session of its own, so that it outlives its starter and no key press reaches it.

    Its output is appended to `log_file` (its folder is made), its input is empty. `env` is the whole environment, None
    this process's. Raises CannotStart.
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
    status = process_status(
        process.pid
    )  # not reaped before the thread below runs, so it is there, as a zombie at least
    if status is None:
        raise CannotStart(f"{command[0]!r} (pid {process.pid}) cannot be seen under /proc", fix="Mount /proc")
    # While the starter lives it must collect what ended, or zombies pile up; the thread ends with either of them.
    threading.Thread(target=process.wait, name=f"reap-{process.pid}", daemon=True).start()
    _CHILDREN[status.identity] = process
    return status.identity


def send_signal(process: ProcessId, number: int) -> bool:
    """Signal `process`; False, and nothing done, if it has ended. PermissionError if it is another user's."""
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
    """Return when the child `pid` has ended; it is not collected yet, so the pid is nobody else's."""
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
    """Block until `process` has ended, at most `timeout_s`. Whether it has."""
    fd = _open(process)
    if fd is None:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # a pidfd is readable once the process has ended, zombie or not
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(fd)


def terminate_process(process: ProcessId, grace_s: float) -> bool:
    """End `process`: SIGTERM, then SIGKILL after `grace_s` seconds; returns when it has ended.

    Blocks; call it in a thread where an event loop runs. True if it ended by itself within the grace, or had ended
    before; False if it had to be killed. Raises GcoreError if it does not even die of SIGKILL (a process in an
    uninterruptible wait), PermissionError if it is another user's.
    """
    if not send_signal(process, signal.SIGTERM) or wait_process_ended(process, grace_s):
        return True
    send_signal(process, signal.SIGKILL)
    if not wait_process_ended(process, KILL_WAIT_S):
        raise GcoreError(
            f"process {process.pid} does not die, {KILL_WAIT_S:.0f} s after SIGKILL",
            fix="It hangs in the kernel (a disk, a device); look at /proc/PID/stack",
        )
    return False


KILL_WAIT_S = 30.0
"""Seconds in which a killed process must be gone. A process with a GPU and much memory takes a while."""


def _open(process: ProcessId) -> int | None:
    """A pidfd of `process`, or None if it has ended. Opened first and checked afterwards: it cannot change hands."""
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
    """`returncode` as subprocess has it: negative for a signal. `last_log_lines`: the log's end, may be empty."""
    if returncode >= 0:
        how = f"ended by itself with exit code {returncode}"
    elif returncode == -signal.SIGKILL and out_of_memory:
        how = "killed by the kernel because memory ran out (SIGKILL)"
    else:
        how = f"killed by {_signal_name(-returncode)}"
    return f"{how}: {last_words}" if last_words else how


def last_log_lines(log_file: Path, since: int) -> str:
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


SIZED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""One pool each; without them a library takes every core that it sees."""


def thread_environment(threads: int) -> dict[str, str]:
    """The variables for a worker of `threads` threads."""
    return {name: str(threads) for name in SIZED} | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_DYNAMIC": "FALSE",
        "KMP_BLOCKTIME": "0",  # Intel's runtime spins this long (ms) whatever OMP_WAIT_POLICY says
        "TOKENIZERS_PARALLELISM": "false",
    }
