"""Runs a command that leaves nothing behind: `warden.py TETHER SCRATCH COMMAND...`, its standard input held open by its owner.

The command leads a process group of its own. When the owner dies, however it dies, standard input ends, and the whole
group is killed, with everything else that came from it: orphans fall to this process, which made itself their reaper.
When the command has ended, the rest of its group is killed, and this process ends the way the command did. SCRATCH, the
command's folder for temporary files, goes with it. The command is tethered, so that it dies of this process's death too.

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


def main() -> None:
    """Never returns."""
    tether, scratch, command = sys.argv[1], sys.argv[2], sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    leader = subprocess.Popen(
        [sys.executable, "-I", "-S", tether, str(os.getpid()), *command], stdin=subprocess.DEVNULL, process_group=0
    )
    wait_for_end(leader.pid)
    # Before it is collected, its pid, and so its group, cannot be anybody else's.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    code = leader.wait()
    kill_orphans()
    shutil.rmtree(scratch, ignore_errors=True)
    end_as(code)


def wait_for_end(pid: int) -> None:
    """Until `pid` has ended, or the owner has."""
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    poll.poll()


def kill_orphans() -> None:
    """What left the group (a session of its own) came to us when its parent died. Until there is none."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def end_as(code: int) -> None:
    """Exit with the command's code, or die of its signal, without a core."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
