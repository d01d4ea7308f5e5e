"""Run a command in a control group, tethered to its parent, or under a warden. A program without gcore imports.

    guard.py enter GROUP COMMAND...          in a control group; if it cannot be entered, report it and run the command anyway
    guard.py tether PARENT_PID COMMAND...    the command dies with its parent
    guard.py warden SCRATCH COMMAND...       the command leaves nothing behind; its owner holds standard input open

It is run by its path with an interpreter that loads nothing else (`python -I -S`), because Python must not run between fork and exec of a
process with threads. It has no threads itself. Each subcommand imports what it needs: all foreign code and every worker start through enter and
tether, and importing `contextlib` or `signal` would take longer than their work.

enter and tether exec the command. tether asks the kernel for SIGKILL at the parent's death (PR_SET_PDEATHSIG), which survives the exec.

Under a warden, the command leads its own process group and is tethered to the warden. When the owner dies, standard input ends, and the warden
kills the whole group and all other descendants: the warden is their subreaper, so orphans become its children. When the command has ended, the
warden kills the rest of its group, removes SCRATCH (the command's folder for temporary files, or nothing), and exits in the same way as the
command. The warden has its own session, so that a kill of its owner's group does not end it too early.
"""

import os
import sys

SIGKILL = 9
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PARENT_IS_DEAD = 70
NO_SUCH_COMMAND = 127

REAP_MS = 30_000
"""Interval at which ended orphans are reaped while the command runs."""


def main() -> None:
    """Run the subcommand in argv (enter, tether or warden). Never returns."""
    {"enter": enter, "tether": tether, "warden": warden}[sys.argv[1]](sys.argv[2], sys.argv[3:])


def enter(group: str, command: list[str]) -> None:
    """Exec the command in the control group `group`, a folder."""
    try:
        with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    except OSError as error:
        sys.stderr.write(f"not in the control group {group}: {error.strerror}\n")
    become(command)


def tether(parent: str, command: list[str]) -> None:
    """Exec the command so that it dies with the process `parent`."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before prctl took effect
        os._exit(PARENT_IS_DEAD)
    become(command)


def become(command: list[str]) -> None:
    """Replace this process by the command. If it cannot start, exit with 127, as a shell does."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        os._exit(NO_SUCH_COMMAND)


def warden(scratch: str, command: list[str]) -> None:
    """Run the command until it ends or the owner closes standard input, then kill all its descendants and remove the folder `scratch`."""
    import contextlib
    import ctypes
    import shutil
    import subprocess

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    leader = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "tether", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        close_fds=False,  # pass the owner's descriptors on
        process_group=0,
    )
    close_inherited()
    wait_for_end(leader.pid)
    # Kill the group before reaping: until then the pid, and so the group, cannot be reused.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, SIGKILL)
    code = leader.wait()
    kill_orphans()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    exit_like(code)


def close_inherited() -> None:
    """Close the inherited descriptors in the warden: a reader at the other end of a pipe waits until all copies are closed."""
    import contextlib

    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)


def wait_for_end(pid: int) -> None:
    """Wait until the process `pid` has ended or the owner has closed standard input. Meanwhile, reap ended orphans."""
    import select

    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while not poll.poll(REAP_MS):
        for child in list_children():
            if child != pid:
                reap_child(child, os.WNOHANG)


def kill_orphans() -> None:
    """Kill all orphans: descendants that left the group (own session) and became this process's children."""
    import contextlib

    while left := list_children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
        for pid in left:
            reap_child(pid, 0)


def list_children() -> list[int]:
    """Return the pids of this process's children; empty if the kernel does not report them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []


def reap_child(pid: int, how: int) -> None:
    """Reap the child `pid`. `how`: 0 waits for its end; WNOHANG returns at once if it still runs."""
    import contextlib

    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, how)


def exit_like(code: int) -> None:
    """Exit with the command's exit code; if it is negative (the command died of a signal), die of the same signal without a core dump."""
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
