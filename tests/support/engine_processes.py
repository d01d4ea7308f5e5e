"""Engine servers as processes of their own: the torch engine and a real SGLang, started as a worker starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from warm_programs import ENGINES

from gcore.engines.environments import SGLANG, VLLM, EngineEnvironment
from gcore.engines.launch import SglangLaunch
from gcore.engines.sglang.adapter import SglangServer, make_scratch
from gcore.engines.sglang.command import check_engine_args, prepare_head_bias, server_command, server_environment
from gcore.engines.vllm.command import program
from gcore.errors import EngineError, UsageError
from gcore.system.clock import Clock, SystemClock
from gcore.system.network import free_ports
from gcore.system.process import thread_environment

STOP_S = 20


TORCH = (sys.executable, "-m", "gcore.engines.torch")
HF = (sys.executable, "-m", "gcore.engines.hf")


def vllm_command() -> tuple[str, ...]:
    """Of the vLLM engine, in vLLM's own Python. Raises UsageError where there is none."""
    return (str(require_python(VLLM)), "-P", program())


@contextmanager
def engine_process(
    model: Path, command: Sequence[str] = TORCH, *, cold: bool = False, **options: object
) -> Iterator[str]:
    """An engine that serves `model`, as a process of its own; its base URL. For tests and benchmarks. Its errors show.

    `command` starts it by hand: `TORCH`, `HF` or `vllm_command()`. `options` as on its command line
    (`batch_slots=4`). `TORCH` and `HF` are forked from a process with their imports done, unless `cold`.
    """
    arguments = ["--model", str(model), *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **thread_environment(1)}}
    if command in (TORCH, HF) and not cold:
        process: subprocess.Popen[str] = ENGINES.popen(command[-1], *arguments, **how)
    else:
        process = subprocess.Popen([*command, *arguments], **how)
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("serving on ")), "")  # vLLM says more before
        if not line:
            raise EngineError(f"the engine did not start (exit code {process.wait(STOP_S)})", where=str(model))
        yield f"http://{line.removeprefix('serving on ').strip()}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def require_python(environment: EngineEnvironment) -> Path:
    """Like its `find`, but none is an error. Raises UsageError."""
    python = environment.find()
    if python is None:
        raise UsageError(f"no environment with {environment.name} was found here", fix=environment.how)
    return python


START_S = 600.0
"""It takes 10 to 20 s on an idle machine, and minutes on one that is busy."""

POLL_S = 0.2
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}


class SglangProcess:
    """A real SGLang server for `model` on a free loopback port, healthy when the constructor returns. A context manager.

    `options` are fields of `SglangLaunch`, e.g. `batch_slots=4, cache_tokens=20_000, engine_args=("--x",)`. Started by the
    command that a job's worker uses (`gcore.engines.sglang.command`), on the CPU. Raises UsageError where no environment with
    SGLang is found, EngineError if the server does not come up.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        launch = SglangLaunch(python=str(require_python(SGLANG)), model=str(model), **options)
        port = launch.port or free_ports(1, launch.host)[0]
        check_engine_args(launch.engine_args)
        scratch = make_scratch()
        env = server_environment(launch, {**os.environ, **ENVIRONMENT}, scratch)
        self.base_url = f"http://{launch.host}:{port}"
        self._server = SglangServer(
            server_command(prepare_head_bias(launch, scratch), port), env, scratch, sys.stderr.buffer
        )
        try:
            self._wait(SystemClock())
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Of the process that holds the server; killing it takes the server with it."""
        return self._server.pid

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines of its output."""
        return tuple(self._server.lines)

    def stop(self) -> None:
        """End it, by force: it holds nothing that is worth a farewell. Again: nothing."""
        self._server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _wait(self, clock: Clock) -> None:
        end = clock.monotonic() + START_S
        while clock.monotonic() < end:
            if self._server.wait(POLL_S):
                raise EngineError(f"SGLang's server did not start: {self._server.death()}")
            try:
                if httpx.get(f"{self.base_url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                continue
        raise EngineError(f"SGLang's server did not serve within {START_S:.0f} s")
