"""Python programs forked from a process with the heavy imports done, instead of cold starts.

Importing torch and transformers takes four seconds of CPU time, the command line half a second, and tests start
hundreds of both. A program gets its own arguments, environment, folder and descriptors, and exits on its own. It is not a
child of the test; other tests cover the requirements on the parent process with real starts.

    process = COMMANDS.popen("controllers.cli.main", "list", stdout=subprocess.PIPE, text=True)
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class WarmProcess(subprocess.Popen[Any]):
    """A program of a WarmStarter; used like any other Popen."""

    def __init__(self, starter: WarmStarter, module: str, arguments: tuple[str, ...], options: dict[str, Any]) -> None:
        self._starter = starter
        self._module = module
        self._line: socket.socket | None = None
        super().__init__([sys.executable, "-m", module, *arguments], **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Ask the warm process for the program, instead of a fork and an exec here. The order of `rest` is CPython's."""
        _, _, _, pass_fds, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:15]
        ours = self._starter.connect()
        files = [p2cread, c2pwrite, errwrite]
        standard = [number if number >= 0 else place for place, number in enumerate(files)]
        environment = dict(os.environ if env is None else env)
        request = {"module": self._module, "arguments": args[3:], "cwd": str(cwd or os.getcwd()), "env": environment}
        request["pass_fds"] = sorted(pass_fds)
        body = json.dumps(request).encode()
        descriptors = array.array("i", [*standard, *sorted(pass_fds)])
        ours.sendmsg([len(body).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        ours.sendall(body)
        self._line = ours
        self.pid = self._hear()
        self._child_created = True
        for mine, theirs in ((p2cwrite, p2cread), (c2pread, c2pwrite), (errread, errwrite)):
            if mine != -1 and theirs != -1:
                os.close(theirs)

    def _hear(self) -> int:
        """A number that the program's parent says; SIGKILL as a status if it is gone."""
        assert self._line is not None
        said = b""
        while not said.endswith(b"\n"):
            if not (byte := self._line.recv(1)):
                return int(signal.SIGKILL)
            said += byte
        return int(said)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Like the wait of a child: its id and its status as waitpid returns it; 0 for the id while it runs."""
        assert self._line is not None
        if wait_flags & os.WNOHANG and not select.select([self._line], [], [], 0.0)[0]:
            return 0, 0
        status = self._hear()
        self._line.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


class WarmStarter:
    """A process that has imported `modules`, and forks once a program. It is started for the first one.

    `module:function` is also called: what a program does before its slow imports.
    """

    def __init__(self, modules: tuple[str, ...], **env: str) -> None:
        self._modules = modules
        self._env = env
        self._line: socket.socket | None = None
        self._lock = threading.Lock()

    def _started(self) -> socket.socket:
        """The line to the process, which ends with it."""
        if self._line is None:
            self._line, theirs = socket.socketpair()
            paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
            fixed = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno()), *self._modules]
                subprocess.Popen(command, env=os.environ | fixed | self._env, pass_fds=[theirs.fileno()])
        return self._line

    def connect(self) -> socket.socket:
        """A line to a process that will become the program's parent."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            socket.send_fds(self._started(), [b"n"], [theirs.fileno()])
        return ours

    def popen(self, module: str, *arguments: str, **options: Any) -> WarmProcess:
        """Start `python -m module arguments`; the options of subprocess.Popen but for those of the process itself."""
        return WarmProcess(self, module, arguments, options)

    def run(
        self, module: str, *arguments: str, timeout: float | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end, with its output as text."""
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.popen(module, *arguments, **(piped | options)) as process:
            try:
                out, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


COMMANDS = WarmStarter(("controllers.cli.main", "controllers.cli.view", "gcore.client", "gcore.config", "rich.live"))
"""For `controllers.cli.main`."""
WITHOUT_COMPILER = "gcore.system.torch_imports:leave_compiler_out"
ENGINES = WarmStarter((WITHOUT_COMPILER, "gcore.engines.torch.server", "gcore.engines.hf.engine"))
"""For `gcore.engines.torch` and `gcore.engines.hf`."""
RANKS = WarmStarter(
    (WITHOUT_COMPILER, "gcore.train.rank.main", "gcore.train.models", "gcore.train.step"),
    CUDA_VISIBLE_DEVICES="",
    DS_ACCELERATOR="cpu",
)
"""For `gcore.train`."""


def serve(line: socket.socket, modules: list[str]) -> None:
    """Fork for each line that comes, until the test is gone."""
    path = list(sys.path)
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    assert len(os.listdir("/proc/self/task")) == 1, "what has threads cannot be forked"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        byte, files, _, _ = socket.recv_fds(line, 1, 1)
        if not byte:
            return
        if os.fork() == 0:
            line.close()
            sys.path[:] = path
            parent_of(socket.socket(fileno=files[0]))
        os.close(files[0])


def parent_of(line: socket.socket) -> None:
    """Fork the program, say its id, wait for it and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, _, _ = socket.recv_fds(line, 4, 64)
    body = b""
    while len(body) < int.from_bytes(head, "big"):
        body += line.recv(65536)
    request = json.loads(body)
    pid = os.fork()
    if pid == 0:
        line.close()
        program(request, files)
    for file in files:
        os.close(file)
    for standard in range(3):
        os.close(standard)
    line.sendall(b"%d\n" % pid)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        line.sendall(b"%d\n" % status)
    os._exit(0)


def program(request: dict[str, Any], files: list[int]) -> None:
    """Be the program, in this process, to its end."""
    code = 1
    try:
        wanted = [0, 1, 2, *request["pass_fds"]]
        high = [os.dup(file) for file in files]
        while min(high) <= max(wanted):
            high = [os.dup(file) if file <= max(wanted) else file for file in high]
        for file, number in zip(high, wanted, strict=True):
            os.dup2(file, number)
        os.closerange(max(wanted) + 1, 4096)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.stdin = os.fdopen(0)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        sys.argv = [request["module"], *request["arguments"]]
        sys.path[:0] = [one for one in request["env"].get("PYTHONPATH", "").split(os.pathsep) if one not in sys.path]
        sys.modules.pop(request["module"], None)
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int | None):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
