"""SGLang's server as a child process: started in a group of its own, its output passed on, and ended with all it started.

What it says goes to this process's standard error, line by line, and the last lines are kept, so that its death can be
told with its own words. No orphans: see `gcore.worker.warden`. Does not know whether the server is well.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from gcore.errors import EngineError
from gcore.worker import death

WARDEN = Path(death.__file__).with_name("warden.py")
TETHER = WARDEN.with_name("tether.py")
KEPT_LINES = 200
KILL_S = 30.0
LAST_WORD_S = 1.0
"""How long a dead server's output is read on, should something hold it open."""


def free_port(host: str) -> int:
    """A port that is free now. Another may take it before the server does; then the server ends and says so."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def make_scratch() -> Path:
    """A folder for the server's temporary files. Directly under /tmp where that is: a socket's path has 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="gcore-sgl-", dir="/tmp" if os.path.isdir("/tmp") else None))


class Server:
    """A started server. `scratch` is removed with it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], scratch: Path, output: IO[bytes]) -> None:
        """Start it. Raises EngineError."""
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        """The last lines of its output."""
        self.line_count = 0
        self._output = output
        self._scratch = scratch
        self._oom_kills = death.out_of_memory_kills()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WARDEN), str(TETHER), str(scratch), *command],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"SGLang's server cannot be started ({error.strerror or error})") from error
        self._reader = threading.Thread(target=self._read, name="sglang output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The warden's."""
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended within `timeout_s`; None: when it has. Blocks."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def death(self) -> str:
        """How it ended, in one sentence with its last words. Only after its end."""
        self._reader.join(LAST_WORD_S)
        out_of_memory = death.out_of_memory_kills() > self._oom_kills
        return death.sentence(self._process.wait(), last_words(tuple(self.lines)), out_of_memory=out_of_memory)

    def stop(self) -> None:
        """End it, by force: it has nothing on disk, and SIGTERM makes it wait for its requests. Blocks; then all is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the warden's sign
        if not self.wait(KILL_S):
            self._process.kill()
            self._process.wait()
        # The warden did it, unless it was killed.
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())
            self.line_count += 1
            self._output.write(line)
            self._output.flush()


def last_words(lines: Sequence[str]) -> str:
    """What of a log's end explains a death: the last line that names an error, and the last line."""
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if _names_an_error(line)]
    chosen = list(dict.fromkeys((*errors[-1:], *said[-1:])))
    return " | ".join(chosen)[-death.LAST_WORDS :]


def _names_an_error(line: str) -> bool:
    """An exception's last line ("RuntimeError: ..."), or argparse's."""
    name = line.partition(":")[0].rpartition(".")[2]
    return (name.endswith(("Error", "Exception", "Interrupt")) and name.isidentifier()) or ": error:" in line
