"""Worker between a supervisor and SGLang's server: starts the server, reports its readiness and health, and explains
its exit.

Requests do not pass through the worker: the server's own address is registered. The supervisor sees a worker like any
other: it passes a launch document and "stop", and receives "serving", progress, and "failed" with an explanation. The
worker never restarts the server.

While the server loads, progress is the number of lines that it has logged. Afterwards the adapter polls the scheduler
over /server_info, which the scheduler answers between two steps of the model: each response is progress. If the
scheduler stops responding, the supervisor's watchdog ends it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from gcore.api.tls import ReloadingFiles
from gcore.engines.launch import SglangLaunch, check_folder, parse_launch
from gcore.engines.sglang.command import check_engine_args, prepare_head_bias, server_command, server_environment
from gcore.errors import EngineError, EngineUnreachable, GcoreError, UsageError, explain_os_errors
from gcore.rollout.client import EngineClient
from gcore.rollout.transport import EngineTransport
from gcore.system.clock import Clock, SystemClock
from gcore.system.control_line import ControlLine
from gcore.system.network import free_ports, join_host_port
from gcore.system.process import GUARD, LAST_WORDS, exit_sentence, is_foreign_listener, out_of_memory_kills
from gcore.types import Version

KEPT_LINES = 200
KILL_S = 30.0

LAST_WORD_S = 1.0
"""Maximum seconds to read a dead server's output, in case another process keeps it open."""


def make_scratch() -> Path:
    """Create a folder for the server's temporary files, directly under /tmp if it exists.

    The path must be short, because the path of a Unix socket has at most 107 bytes.
    """
    return Path(tempfile.mkdtemp(prefix="gcore-sgl-", dir="/tmp" if os.path.isdir("/tmp") else None))


class SglangServer:
    """SGLang's server as a child process in its own process group. `scratch` is deleted with it.

    Its output is copied to this process's standard error line by line; the last lines are kept to explain its exit. No
    process is left behind: see `gcore.system.guard`. This class does not check the server's health.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], scratch: Path, output: IO[bytes]) -> None:
        """Start the server. `command`, `env`: its command line and environment. Raises EngineError."""
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        """The last lines of the server's output."""
        self.line_count = 0
        self._output = output
        self._scratch = scratch
        self._oom_kills = out_of_memory_kills()
        with explain_os_errors("cannot start SGLang's server", EngineError):
            self._process = subprocess.Popen(
                [*GUARD, "warden", str(scratch), *command],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="sglang output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process ID of the warden (`gcore.system.guard`), the parent of the server."""
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` seconds (None: without limit) until the server ends. Return whether it did. Blocks."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def check_port(self, port: int) -> None:
        """Raise EngineError if another process listens on the port that was chosen for this server."""
        if is_foreign_listener(self.pid, port):
            raise EngineError(
                f"another process took port {port} before SGLang's server could listen on it",
                fix="The engine is restarted",
            )

    def death(self) -> str:
        """Describe the server's exit in one sentence with its last output. Call it only after the exit."""
        self._reader.join(LAST_WORD_S)
        out_of_memory = out_of_memory_kills() > self._oom_kills
        return exit_sentence(self._process.wait(), last_log_lines(tuple(self.lines)), out_of_memory=out_of_memory)

    def stop(self) -> None:
        """Kill the server, and block until all its processes are gone.

        It has nothing to save, and on SIGTERM it would wait for its requests.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()  # tells the warden to end it
        if not self.wait(KILL_S):
            self._process.kill()
            self._process.wait()
        # The warden has done so, unless it was killed.
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())
            self.line_count += 1
            self._output.write(line)
            self._output.flush()


def last_log_lines(lines: Sequence[str]) -> str:
    """Return the part of a log's end that explains an exit: the last line that names an error, and the last line."""
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if _names_an_error(line)]
    chosen = list(dict.fromkeys((*errors[-1:], *said[-1:])))
    return " | ".join(chosen)[-LAST_WORDS:]


def _names_an_error(line: str) -> bool:
    """Whether `line` is the last line of an exception ("RuntimeError: ..."), or of argparse's error."""
    name = line.partition(":")[0].rpartition(".")[2]
    return (name.endswith(("Error", "Exception", "Interrupt")) and name.isidentifier()) or ": error:" in line


HEALTH_S = 0.5
"""Seconds between two health checks of a server that is loading."""

LOOK_S = 5.0
"""Seconds between two polls of the scheduler of a server that is serving."""

HEALTH_PATIENCE_S = 30.0
"""Timeout in seconds of a health check, which generates a token; the first includes compilations."""

LOOK_PATIENCE_S = 5.0
"""Timeout in seconds of a poll of the scheduler, which may first finish a step of the model."""


class SglangAdapter:
    """Runs one SGLang server as a worker. `control`: the connection to the supervisor."""

    def __init__(self, launch: SglangLaunch, control: ControlLine, clock: Clock) -> None:
        """Start the server process. Raises UsageError, EngineError."""
        self._launch = launch
        self._control = control
        self._clock = clock
        self._port = port = launch.port or free_ports(1, launch.host)[0]
        self._address = join_host_port(launch.host, port)
        check_engine_args(launch.engine_args)  # before a folder is created
        scratch = make_scratch()
        command = server_command(prepare_head_bias(launch, scratch), port)
        self._server = SglangServer(
            command, server_environment(launch, os.environ, scratch), scratch, sys.stderr.buffer
        )

    async def run(self) -> None:
        """Run until the supervisor requests a stop, then kill the server. Raises EngineError if it ended by itself."""
        await run_beside(self._server, self._control, self._serve())

    async def _serve(self) -> None:
        """Wait until the server is ready, report its address, then report its health. Ends only with an error."""
        client, watcher = (self._connect(limit) for limit in (HEALTH_PATIENCE_S, LOOK_PATIENCE_S))
        try:
            self._control.report_progress("loading", 0)
            while not await client.health():
                self._control.report_progress("loading", self._server.line_count)
                await self._clock.sleep(HEALTH_S)
            await asyncio.to_thread(self._server.check_port, self._port)
            await self._check_version(client)
            self._control.send("serving", address=self._address)
            await self._watch(watcher)
        finally:
            await client.close()
            await watcher.close()

    def _connect(self, timeout_s: float) -> EngineClient:
        tls, key = self._launch.tls, self._launch.api_key
        if tls is None:
            return EngineClient(f"http://{self._address}", timeout_s=timeout_s, key=key)
        watched = ReloadingFiles(tls.material)
        transport = EngineTransport(lambda: watched.material.context(watched.pem))
        return EngineClient(f"https://{self._address}", timeout_s=timeout_s, transport=transport, key=key)

    async def _check_version(self, client: EngineClient) -> None:
        """Make the server report the expected weight version. Raises EngineError if it does not.

        Otherwise the version of its tokens would be unknown.
        """
        wanted = Version.parse(self._launch.weight_version)
        if await client.served() != wanted:
            await client.call_weights(wanted)
        if (found := await client.served()) != wanted:
            raise EngineError(f"the server reports weight version {found}, not {wanted}", where=self._address)

    async def _watch(self, client: EngineClient) -> None:
        answers = 0
        while True:
            try:
                await client.scheduler_state()
                busy = (await client.info()).running
                answers += 1
                phase = "generating" if busy else "waiting"
            except EngineUnreachable:
                # It may be busy or hang: the time limit of this phase decides.
                phase = "answering"
            self._control.report_progress(phase, answers)
            await self._clock.sleep(LOOK_S)


async def run_beside(server: SglangServer, control: ControlLine | None, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the supervisor requests a stop, then kill the server. Raises EngineError if the server ended
    by itself, and the errors of `work`. `control`: the connection to the supervisor; None: started by hand.
    """
    loop = asyncio.get_running_loop()
    stop, ended = asyncio.Event(), asyncio.Event()
    if control is not None:
        set_when_done("stop", partial(control.wait_for, "stop"), loop, stop)
    set_when_done("server", server.wait, loop, ended)
    tasks = [asyncio.create_task(one) for one in (stop.wait(), ended.wait(), work)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        if ended.is_set():
            raise EngineError(f"SGLang's server ended: {server.death()}")
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(server.stop)


def set_when_done(name: str, wait: Callable[[], object], loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Call `wait`, which blocks, in a daemon thread, and set `event` on the loop when it returns."""

    def waiting() -> None:
        wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    threading.Thread(target=waiting, name=name, daemon=True).start()


def main() -> int:
    """Read the launch document, run the adapter, and return the exit code.

    Must be started by a supervisor. Does not import torch.
    """
    control = ControlLine.inherit()
    if control is None:
        error = UsageError(
            "this program is a worker and must be started by its supervisor",
            fix="Set rollout.engine: sglang in a job, or start SGLang by hand with python -m sglang.launch_server",
        )
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    try:
        launch = parse_launch(SglangLaunch, control.launch)
        check_folder(launch.model)
        asyncio.run(SglangAdapter(launch, control, SystemClock()).run())
    except GcoreError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        control.send("failed", reason=str(error))
        return error.exit_code
    return 0


def run() -> None:
    """Run `main` and end the process with its exit code. Entry point of `python -m gcore.engines.sglang`."""
    code = main()
    sys.stderr.flush()
    # Threads that wait for the line and the server's output are abandoned.
    os._exit(code)
