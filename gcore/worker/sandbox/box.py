"""Runs untrusted Python programs in confinement (`gcore.worker.sandbox.jail`), and verifies the confinement.

A sandbox runs one program at a time, each in a new process that it kills at the time limit, and reads its output up to
a limit. System calls that succeed while the confinement is set up do not prove that it works. `prove` therefore runs a
program that tries every escape that must not be possible, in the same way as any other program, and raises if one
works. Calls block.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore.errors import GcoreError
from gcore.system.clock import SystemClock
from gcore.system.process import exit_sentence, thread_environment
from gcore.worker.sandbox.jail import BEGUN

JAIL, PROBE = Path(__file__).with_name("jail.py"), Path(__file__).with_name("probe.py")

MOST_OUTPUT, MOST_REPORT, MOST_OF_A_TEST = 1 << 20, 1 << 16, 8
"""Maximum bytes of a program's output, of the report about it, and of the report about each test. A program that
exceeds one of them is killed.
"""

THREADS = 64
"""Maximum number of threads of a program, including the main thread."""

FIRST_USER, USERS = 1_000_000_000, 1_000_000
"""Range of user ids under which programs run: one for each process that runs programs."""

SYSTEM_FILES = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
)
"""Files that Python itself opens, if they exist: shared libraries, time zones, harmless devices."""

PROOF_S = 30.0
"""Time limit of the program that tests the confinement, in seconds."""


class SandboxError(GcoreError):
    """Programs cannot be confined on this machine."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What became of a program: its output, and which tests passed.

    `error`: what it raised, or how it was killed; empty if neither. `refused`: why it was not started at all.
    """

    output: str = ""
    passed: tuple[bool, ...] = ()
    error: str = ""
    refused: str = ""


class ProgramSandbox:
    """Runs untrusted programs, each in a confined process of its own.

    `memory_mb`: memory limit of a program. `packages`: whether programs may import the packages installed beside gcore.
    """

    def __init__(self, memory_mb: int, *, packages: bool = False) -> None:
        self._clock = SystemClock()
        self._memory_mb = memory_mb
        paths = sysconfig.get_paths()
        self._paths = list(dict.fromkeys((paths["purelib"], paths["platlib"]))) if packages else []
        self._readable = [*SYSTEM_FILES, paths["stdlib"], paths["platstdlib"], *self._paths]

    def prove(self) -> None:
        """Verify the confinement on this machine. Raises SandboxError that names what a program could do or what is
        missing.
        """
        fix = "It needs Linux 5.13 or later with Landlock and seccomp, and libseccomp (Debian: libseccomp2); see docs/use/rewards.md"
        with tempfile.TemporaryDirectory(prefix="gcore-outside-") as outside:
            os.chmod(outside, 0o755)
            secret = Path(outside) / "secret"
            secret.write_text("secret")
            secret.chmod(0o644)
            known = {"secret": str(secret), "memory_mb": self._memory_mb, "parent": os.getpid()}
            ran = self.run(f"KNOWN = {known!r}\n{PROBE.read_text(encoding='utf-8')}", timeout_s=PROOF_S)
        if ran.refused or ran.error:
            raise SandboxError(f"this machine cannot confine programs: {ran.refused or ran.error}", fix=fix)
        try:
            ways = json.loads(ran.output)
        except ValueError:
            ways = ["possibly do anything, because the confinement test did not finish"]
        if ways:
            raise SandboxError(f"this machine cannot confine programs: a program could {', '.join(ways)}", fix=fix)

    def run(self, program: str, tests: Sequence[str] = (), given: str = "", *, timeout_s: float) -> ProgramResult:
        """Run a program, and then each of `tests` in its namespace. Never raises for what the program does.

        `given`: the program's standard input. `timeout_s`: after this time it is killed.
        """
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        uid = _spare_user()
        request = {
            "program": program,
            "tests": list(tests),
            "input": given,
            "memory_mb": self._memory_mb,
            "cpu_s": int(timeout_s) + 1,
            "threads": THREADS if uid is not None else _threads_of_mine() + THREADS,
            "readable": self._readable,
            "paths": self._paths,
            "uid": uid,
            "parent": os.getpid(),
            "report": theirs,
        }
        try:
            process = self._spawn(json.dumps(request).encode("ascii"), theirs)
        except OSError as error:
            os.close(ours)
            return ProgramResult(refused=f"cannot start a process ({error.strerror or error})")
        finally:
            os.close(theirs)
        assert process.stdout is not None
        with process.stdout, open(ours, "rb", buffering=0) as report:
            most = {process.stdout.fileno(): MOST_OUTPUT, report.fileno(): MOST_REPORT + MOST_OF_A_TEST * len(tests)}
            output, said, cut = self._watch(process, most, timeout_s)
        return _ran(process.returncode, output, said, cut, len(tests))

    def _spawn(self, request: bytes, report: int) -> subprocess.Popen[bytes]:
        memory = os.memfd_create("request", os.MFD_CLOEXEC)
        with open(memory, "w+b") as stream:
            stream.write(request)
            stream.seek(0)
            return subprocess.Popen(
                # Not -I: this environment is explicit, and its hash seed makes runs of a program repeatable.
                [sys.executable, "-s", "-P", "-S", "-B", "-X", "utf8", str(JAIL)],
                env={**thread_environment(1), "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
                stdin=stream,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(report,),
                bufsize=0,
            )

    def _watch(
        self, process: subprocess.Popen[bytes], most: dict[int, int], timeout_s: float
    ) -> tuple[bytes, bytes, str]:
        """Read a program's output and report until it has ended, or kill it at a limit.

        `most`: maximum bytes to read, by file descriptor of its output and its report. Returns output, report, and
        which limit it exceeded ("" if none).
        """
        said = {fd: bytearray() for fd in most}
        deadline = self._clock.monotonic() + timeout_s
        cut = ""
        ended = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as ready:
                for fd in (*said, ended):
                    ready.register(fd, selectors.EVENT_READ)
                    os.set_blocking(fd, False)
                # Only the process itself has the other ends: when it has ended, its output ends too.
                while len(ready.get_map()) > 0 and not cut:
                    events = ready.select(max(deadline - self._clock.monotonic(), 0.0))
                    if not events:
                        cut = f"took longer than {timeout_s:g} s"
                    for key, _ in events:
                        data = b"" if key.fd == ended else os.read(key.fd, 1 << 16)
                        if not data:
                            ready.unregister(key.fd)
                            continue
                        said[key.fd] += data
                        if len(said[key.fd]) > most[key.fd]:
                            cut = f"printed more than {most[key.fd] >> 10} KiB"
        finally:
            os.close(ended)
            process.kill()
            process.wait()
        output, report = said.values()
        return bytes(output), bytes(report), cut


def _ran(code: int, output: bytes, said: bytes, cut: str, tests: int) -> ProgramResult:
    text = output.decode("utf-8", errors="replace")
    if cut:
        return ProgramResult(output=text, error=cut)
    begun = said.startswith(BEGUN)
    report: Any = None
    with contextlib.suppress(ValueError, RecursionError):  # the program itself may have written it
        report = json.loads(said.removeprefix(BEGUN))
    ended = exit_sentence(code, "", out_of_memory=False)
    match report:
        case {"refused": str(why)} if not begun:
            return ProgramResult(refused=why)
        case {"error": str(error), "passed": list(passed)} if begun:
            return ProgramResult(output=text, passed=tuple(bool(one) for one in passed[:tests]), error=error)
    return ProgramResult(output=text, error=ended) if begun else ProgramResult(refused=f"its process was {ended}")


def _spare_user() -> int | None:
    """Return a user id without other processes, for the programs of this process; None unless it may change its user
    (root).
    """
    if os.geteuid() != 0:
        return None
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(ranges)
    if count <= 1:
        return None
    if first <= FIRST_USER and first + count > FIRST_USER + USERS:
        return FIRST_USER + os.getpid() % USERS
    return first + count - 1 - os.getpid() % min(1000, count - 1)


def _threads_of_mine() -> int:
    """Return the number of threads of this user: the kernel counts all of them against the limit of one process."""
    count = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if folder.name.isdigit() and folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
    return count
