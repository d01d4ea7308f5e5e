"""A real SGLang server as a process of its own, for tests and benchmarks: found, started, waited for, stopped.

Started with the same words that a job's worker uses (`gcore.rollout.sglang.command`), on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from gcore.clock import Clock, SystemClock
from gcore.errors import EngineError
from gcore.rollout.sglang.command import check_engine_args, server_command, server_environment
from gcore.rollout.sglang.environment import require_python
from gcore.rollout.sglang.head_bias import prepared
from gcore.rollout.sglang.launch import SglangLaunch
from gcore.rollout.sglang.server import Server, free_port, make_scratch

START_S = 600.0
"""It takes 10 to 20 s on an idle machine, and minutes on one that is busy."""
POLL_S = 0.2
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}


class SglangProcess:
    """A server for `model` on a free loopback port, healthy when the constructor returns. A context manager.

    `options` are fields of `SglangLaunch`, e.g. `batch_slots=4, cache_tokens=20_000, engine_args=("--x",)`. Raises
    UsageError where no environment with SGLang is found, EngineError if the server does not come up.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        launch = SglangLaunch(python=str(require_python()), model=str(model), **options)
        port = launch.port or free_port(launch.host)
        check_engine_args(launch.engine_args)
        scratch = make_scratch()
        env = server_environment(launch, {**os.environ, **ENVIRONMENT}, scratch)
        self.base_url = f"http://{launch.host}:{port}"
        self._server = Server(server_command(prepared(launch, scratch), port), env, scratch, sys.stderr.buffer)
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


@contextmanager
def sglang_process(model: Path, **options: Any) -> Iterator[str]:
    """The same as `engine_process` for the torch engine: the base URL of a server that lives as long as the block."""
    with SglangProcess(model, **options) as server:
        yield server.base_url
