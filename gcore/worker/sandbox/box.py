"""Runs untrusted Python programs in confinement (`gcore.worker.sandbox.jail`), and verifies the confinement.

A sandbox runs one program at a time, each in a new process that it kills at the time limit, and reads its output up to
a limit. Successful system calls do not prove confinement: `prove` runs a program that tries every escape that must not
be possible, in the same way as any other program, and raises if one works. Calls block.
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
from gcore.system.clock import Clock, SystemClock
from gcore.system.process import exit_sentence, thread_environment
from gcore.worker.sandbox.jail import BEGUN

JAIL, PROBE = Path(__file__).with_name("jail.py"), Path(__file__).with_name("probe.py")

MOST_OUTPUT, MOST_REPORT, MOST_OF_A_TEST = 1 << 20, 1 << 16, 8
"""Bytes of what a program prints, and of what is said of it and of each test. Whoever says more is ended."""

THREADS = 64
"""Of a program, its first one included."""

FIRST_USER, USERS = 1_000_000_000, 1_000_000
"""Users that programs run as: one of these for each process that runs some."""

SYSTEM_FILES = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
)
"""What Python itself opens, wherever it is there: shared libraries, time zones, the harmless devices."""

PROOF_S = 30.0


class SandboxError(GcoreError):
    """Programs cannot be confined on this machine."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What became of a program. `error`: what it raised, or how it was ended; `refused`: why it was not even begun."""

    output: str = ""
    passed: tuple[bool, ...] = ()
    error: str = ""
    refused: str = ""


class ProgramSandbox:
    """Runs programs. `memory_mb`: what one may take; `packages`: whether it may import what is installed beside gcore."""

    def __init__(self, memory_mb: int, *, packages: bool = False, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._memory_mb = memory_mb
        paths = sysconfig.get_paths()
        self._paths = list(dict.fromkeys((paths["purelib"], paths["platlib"]))) if packages else []
        self._readable = [*SYSTEM_FILES, paths["stdlib"], paths["platstdlib"], *self._paths]

    def prove(self) -> None:
        """Raises SandboxError, naming what is missing, if programs cannot be shut in here."""
        fix = "It needs Linux 5.13 or later with Landlock and seccomp, and libseccomp (Debian: libseccomp2); see docs/use/rewards.md"
        with tempfile.TemporaryDirectory(prefix="gcore-outside-") as outside:
            os.chmod(outside, 0o755)
            secret = Path(outside) / "secret"
            secret.write_text("secret")
            secret.chmod(0o644)
            known = {"secret": str(secret), "memory_mb": self._memory_mb, "parent": os.getpid()}
            ran = self.run(f"KNOWN = {known!r}\n{PROBE.read_text(encoding='utf-8')}", timeout_s=PROOF_S)
        if ran.refused or ran.error:
            raise SandboxError(f"programs cannot be shut in here: {ran.refused or ran.error}", fix=fix)
        try:
            ways = json.loads(ran.output)
        except ValueError:
            ways = ["do what cannot be told, for the proof did not come to its end"]
        if ways:
            raise SandboxError(f"programs cannot be shut in here: one could {', '.join(ways)}", fix=fix)

    def run(self, program: str, tests: Sequence[str] = (), given: str = "", *, timeout_s: float) -> ProgramResult:
        """Run a program, and then tests in its names. `given`: what it reads from standard input. Raises nothing of its own."""
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
            return ProgramResult(refused=f"no process can be started ({error.strerror or error})")
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
                # Not -I: the environment is this one and no other, and its hash seed makes a program's run the same again.
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
        """Until it has ended, or is. What it printed, what was said of it, and why it was ended, if it was.

        `most`: bytes that are read from its output, and from the report of it, by descriptor.
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
                # Nobody but the process itself has the other ends: when it has ended, what it said ends too.
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
                            cut = f"said more than {most[key.fd] >> 10} KiB"
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
    with contextlib.suppress(ValueError, RecursionError):  # a program may have written it
        report = json.loads(said.removeprefix(BEGUN))
    ended = exit_sentence(code, "", out_of_memory=False)
    match report:
        case {"refused": str(why)} if not begun:
            return ProgramResult(refused=why)
        case {"error": str(error), "passed": list(passed)} if begun:
            return ProgramResult(output=text, passed=tuple(bool(one) for one in passed[:tests]), error=error)
    return ProgramResult(output=text, error=ended) if begun else ProgramResult(refused=f"its process was {ended}")


def _spare_user() -> int | None:
    """A user that nothing else runs as, if this is root and may become others; one for each process that asks."""
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
    """How many threads this user runs: the kernel counts them all against a limit on one process."""
    count = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if folder.name.isdigit() and folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
    return count
