"""Runs a command in a control group: `enter.py GROUP COMMAND...`. Where it cannot get there it says so, and runs the command all the same.

A small program of its own, for between fork and exec of a process that has threads no Python may run; by its path, with an
interpreter that loads nothing else. Imports nothing of gcore.
"""

import os
import sys

NO_SUCH_COMMAND = 127


def main() -> None:
    """Never returns."""
    group, command = sys.argv[1], sys.argv[2:]
    try:
        with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    except OSError as error:
        sys.stderr.write(f"not in the control group {group}: {error.strerror}\n")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        os._exit(NO_SUCH_COMMAND)


if __name__ == "__main__":
    main()
