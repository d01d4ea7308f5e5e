"""Runs a command in a control group, tethered to its parent, or under a warden; a program that imports nothing of gcore.

    guard.py enter GROUP COMMAND...          in a control group; where that cannot be entered, says so and runs it all the same
    guard.py tether PARENT_PID COMMAND...    so that it dies with its parent
    guard.py warden SCRATCH COMMAND...       so that it leaves nothing behind; standard input is held open by its owner

It is run by its path, with an interpreter that loads nothing else (`python -I -S`), because between fork and exec of a
process that has threads no Python may run. No threads here either. Each subcommand imports what it needs: whatever foreign code
and every worker is started through enter and tether, and an import of `contextlib` or `signal` would take longer than their work.

enter and tether become the command. tether asks the kernel for a SIGKILL at the parent's death (PR_SET_PDEATHSIG), and the
request survives the exec.

Under a warden the command leads a process group of its own, and is tethered to the warden. When the owner dies, however it
dies, standard input ends, and the warden kills the whole group and everything else that came from it: orphans fall to the
warden, which made itself their reaper. When the command has ended, the warden kills the rest of its group, removes SCRATCH,
the command's folder for temporary files (or nothing), and ends the way the command did. It has a session of its own, so that
a kill of its owner's group does not end it before its work.
"""

import os
import sys

SIGKILL = 9
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PARENT_IS_DEAD = 70
NO_SUCH_COMMAND = 127

REAP_MS = 30_000
"""How often orphans that have ended are collected while the command lives."""


def main() -> None:
    """Never returns."""
    {"enter": enter, "tether": tether, "warden": warden}[sys.argv[1]](sys.argv[2], sys.argv[3:])


def enter(group: str, command: list[str]) -> None:
    """Become the command in the control group `group`, a folder."""
    try:
        with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    except OSError as error:
        sys.stderr.write(f"not in the control group {group}: {error.strerror}\n")
    become(command)


def tether(parent: str, command: list[str]) -> None:
    """Become the command, which dies with the process `parent`."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before we asked
        os._exit(PARENT_IS_DEAD)
    become(command)


def become(command: list[str]) -> None:
    """Exec the command, or exit as a shell does for one that does not exist."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        os._exit(NO_SUCH_COMMAND)


def warden(scratch: str, command: list[str]) -> None:
    """Run the command until it or the owner ends, and end all that it started."""
    import contextlib
    import ctypes
    import shutil
    import subprocess

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    leader = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "tether", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        close_fds=False,  # what the owner handed on
        process_group=0,
    )
    close_inherited()
    wait_for_end(leader.pid)
    # Before it is collected, its pid, and so its group, cannot be anybody else's.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, SIGKILL)
    code = leader.wait()
    kill_orphans()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    exit_like(code)


def close_inherited() -> None:
    """Let go of what only the command shall hold: whoever is at the other end waits for it to be closed."""
    import contextlib

    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):  # the one that the listing was read through
                os.close(fd)


def wait_for_end(pid: int) -> None:
    """Until `pid` has ended, or the owner has."""
    import select

    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while not poll.poll(REAP_MS):
        for child in list_children():
            if child != pid:
                reap_child(child, os.WNOHANG)


def kill_orphans() -> None:
    """What left the group (a session of its own) came to us when its parent died. Until there is none."""
    import contextlib

    while left := list_children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
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
    import contextlib

    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, how)


def exit_like(code: int) -> None:
    """Exit with the command's code, or die of its signal, without a core."""
    import contextlib
    import resource
    import signal

    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
