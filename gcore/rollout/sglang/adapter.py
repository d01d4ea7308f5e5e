"""The worker between a supervisor and SGLang's server: starts it, tells when it serves, and how it is, and when it died.

It stands beside the path of requests, not in it: what is registered is the server's own address. From the outside it is
a worker like any other: a launch document, "serving", progress, "stop", and "failed" with a sentence.

Progress while loading is the number of lines that the server has said. Afterwards its scheduler is asked now and then,
over /server_info, which it answers between two steps of the model: each answer is progress. A scheduler that answers no
more gets nowhere, and the supervisor's watchdog ends it. Does not restart anything.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable

from gcore.clock import Clock
from gcore.errors import EngineError, EngineUnreachable
from gcore.rollout.client import EngineClient
from gcore.rollout.sglang.command import check_engine_args, server_command, server_environment
from gcore.rollout.sglang.head_bias import prepared
from gcore.rollout.sglang.launch import SglangLaunch
from gcore.rollout.sglang.server import Server, free_port, make_scratch
from gcore.rollout.transport import PlainTransport
from gcore.tls.material import Watched
from gcore.types import Version
from gcore.worker.child import Control

HEALTH_S = 0.5
"""Between two looks at a server that loads."""
LOOK_S = 5.0
"""Between two looks at one that serves."""
HEALTH_PATIENCE_S = 30.0
"""For the first token, which comes with compilations."""
LOOK_PATIENCE_S = 5.0
"""For the scheduler's answer; a step of the model may stand before it."""


class Adapter:
    """One server. `control` is the line to the supervisor."""

    def __init__(self, launch: SglangLaunch, control: Control, clock: Clock) -> None:
        """Start the server. Raises UsageError, EngineError."""
        self._launch = launch
        self._control = control
        self._clock = clock
        port = launch.port or free_port(launch.host)
        self._address = f"{launch.host}:{port}"
        check_engine_args(launch.engine_args)  # before there is a folder that would be left behind
        scratch = make_scratch()
        command = server_command(prepared(launch, scratch), port)
        self._server = Server(command, server_environment(launch, os.environ, scratch), scratch, sys.stderr.buffer)

    async def run(self) -> None:
        """Until told to stop, with nothing of the server left. Raises EngineError when the server ended by itself."""
        loop = asyncio.get_running_loop()
        stop, ended = asyncio.Event(), asyncio.Event()
        _in_thread("stop", lambda: self._control.wait_for("stop"), loop, stop)
        _in_thread("server", self._server.wait, loop, ended)
        tasks = [asyncio.create_task(work) for work in (stop.wait(), ended.wait(), self._serve())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return
            if ended.is_set():
                raise EngineError(f"SGLang's server ended: {self._server.death()}")
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(self._server.stop)

    async def _serve(self) -> None:
        """Wait for the server, register it, and tell how it is. Ends only with an error."""
        client, watcher = (self._connect(limit) for limit in (HEALTH_PATIENCE_S, LOOK_PATIENCE_S))
        try:
            self._control.send("progress", phase="loading", progress=0)
            while not await client.health():
                self._control.send("progress", phase="loading", progress=self._server.line_count)
                await self._clock.sleep(HEALTH_S)
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
        watched = Watched(tls.material)
        transport = PlainTransport(lambda: watched.material.context(watched.pem))
        return EngineClient(f"https://{self._address}", timeout_s=timeout_s, transport=transport, key=key)

    async def _check_version(self, client: EngineClient) -> None:
        """What is served is called what it was to be called, or nobody would know whose tokens it makes."""
        wanted = Version.parse(self._launch.weight_version)
        if await client.served() != wanted:
            await client.call_weights(wanted)
        if (found := await client.served()) != wanted:
            raise EngineError(f"the server calls its weights {found}, not {wanted}", where=self._address)

    async def _watch(self, client: EngineClient) -> None:
        answers = 0
        while True:
            try:
                await client.scheduler_state()
                busy = (await client.info()).running
                answers += 1
                phase = "generating" if busy else "waiting"
            except EngineUnreachable:
                # Whether it is only busy, or hangs, time will tell: this phase may not last.
                phase = "answering"
            self._control.send("progress", phase=phase, progress=answers)
            await self._clock.sleep(LOOK_S)


def _in_thread(name: str, wait: Callable[[], object], loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set `event` when `wait`, which blocks, returns. The thread is left behind at the end."""

    def waiting() -> None:
        wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    threading.Thread(target=waiting, name=name, daemon=True).start()
