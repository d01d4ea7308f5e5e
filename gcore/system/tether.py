"""Runs a command that dies with its parent: `tether.py PARENT_PID COMMAND...`.

Asks the kernel for a SIGKILL at the parent's death (PR_SET_PDEATHSIG), and becomes the command; the request survives
the exec. A small program of its own, because between fork and exec of a process that has threads no Python may run.

Run by its path, with an interpreter that loads nothing else; imports nothing of gcore.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


PARENT_IS_DEAD = 70


NO_SUCH_COMMAND = 127


def main() -> None:
    """Never returns."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(PARENT_IS_DEAD)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        os._exit(NO_SUCH_COMMAND)


if __name__ == "__main__":
    main()
