"""Runs a command that leaves nothing behind: `warden.py TETHER SCRATCH COMMAND...`, its standard input held open by its owner.

The command leads a process group of its own. When the owner dies, however it dies, standard input ends, and the whole
group is killed, with everything else that came from it: orphans fall to this process, which made itself their reaper.
When the command has ended, the rest of its group is killed, and this process ends the way the command did. SCRATCH, the
command's folder for temporary files (or nothing), goes with it. The command is tethered, so that it dies of this process's death too.

A program of its own, run by its path with an interpreter that loads nothing else, in a session of its own, so that
whoever kills its owner's group does not kill it before its work. Imports nothing of gcore; no threads.
"""

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


REAP_MS = 30_000
"""How often orphans that have ended are collected while the command lives."""


def main() -> None:
    """Never returns."""
    tether, scratch, command = sys.argv[1], sys.argv[2], sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    leader = subprocess.Popen(
        [sys.executable, "-I", "-S", tether, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        close_fds=False,  # what the owner handed on
        process_group=0,
    )
    close_inherited()
    wait_for_end(leader.pid)
    # Before it is collected, its pid, and so its group, cannot be anybody else's.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    code = leader.wait()
    kill_orphans()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    exit_like(code)


def close_inherited() -> None:
    """Let go of what only the command shall hold: whoever is at the other end waits for it to be closed."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):  # the one that the listing was read through
                os.close(fd)


def wait_for_end(pid: int) -> None:
    """Until `pid` has ended, or the owner has."""
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while not poll.poll(REAP_MS):
        for child in list_children():
            if child != pid:
                reap_child(child, os.WNOHANG)


def kill_orphans() -> None:
    """What left the group (a session of its own) came to us when its parent died. Until there is none."""
    while left := list_children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            reap_child(pid, 0)


def list_children() -> list[int]:
    """Of this process; none where the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []


def reap_child(pid: int, how: int) -> None:
    """Wait for it, or only look (WNOHANG)."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, how)


def exit_like(code: int) -> None:
    """Exit with the command's code, or die of its signal, without a core."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
