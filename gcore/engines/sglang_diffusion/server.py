"""Process of SGLang's diffusion server as an engine: starts the server as a child, and serves gcore's routes in front of it.

The server listens on the loopback interface alone, because it has no keys. The engine's port is bound before the server
starts; requests wait until it has loaded its model. While it loads, progress is the number of lines that it has logged.
Afterwards it is the number of pictures, so that the supervisor's watchdog ends an engine whose server hangs. The process
ends with its server, and leaves no process behind (`gcore.system.guard`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from pathlib import Path

import uvicorn
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.api.tls import ReloadingFiles, serving_context
from gcore.engines.environments import SGLANG_DIFFUSION
from gcore.engines.launch import SglangDiffusionLaunch
from gcore.engines.serving.denoising import AnswerWriter, DenoisingBody, describe_pipeline
from gcore.engines.serving.http import ApiKeys, answer_errors, checked_body, read_body, read_fields
from gcore.engines.serving.routes import (
    CLIENT_CLOSED_REQUEST,
    TEXT_ROUTES,
    TRANSFER_ROUTES,
    bind_engine,
    control_routes,
    guard_routes,
    health,
    run_unless_disconnected,
)
from gcore.engines.sglang.adapter import SglangServer, make_scratch, run_beside
from gcore.engines.sglang.command import DiffusionPorts, check_pipeline, diffusion_command, server_environment
from gcore.engines.sglang_diffusion.engine import DiffusionServer, SglangDiffusionEngine
from gcore.errors import EngineError, EngineUnreachable, UsageError
from gcore.models.diffusion.pipeline import SampledPipeline
from gcore.system.clock import Clock, SystemClock
from gcore.system.control_line import ControlLine, report_serving
from gcore.system.network import http_settings, join_host_port, listen_http

BACKLOG = 1024
GRACE_S = 2
HEALTH_S = 0.5
"""Seconds between two health checks of a server that is loading."""

LOOK_S = 1.0
"""Seconds between two reports of a server that is serving."""

UNSERVED = (*TEXT_ROUTES, *TRANSFER_ROUTES)
"""SGLang's routes that this engine refuses."""


class ChecksumBody(BaseModel):
    """POST /get_weights_checksum. `module_names`: parts of the pipeline; None: all."""

    module_names: list[str] | None = None


def sglang_diffusion_app(engine: SglangDiffusionEngine, keys: ApiKeys) -> ASGIApp:
    """The ASGI application of the engine, protected by the API keys."""

    async def generate(request: Request) -> Response:
        body = await read_body(request, partial(checked_body, DenoisingBody))
        working = engine.answers(engine.admit(body), with_condition=body.rollout_return_denoising_env)
        try:
            answers = await run_unless_disconnected(request, working)
        except EngineUnreachable as error:
            return JSONResponse({"error": {"message": str(error)}}, 503)
        return Response(status_code=CLIENT_CLOSED_REQUEST) if answers is None else JSONResponse(answers)

    async def checksums(request: Request) -> Response:
        body = await read_fields(request, ChecksumBody)
        return JSONResponse(await engine.checksums(body.module_names))

    routes = [Route("/rollout/generate", answer_errors(generate), methods=["POST"])]
    routes += [Route("/get_weights_checksum", answer_errors(checksums), methods=["POST"])]
    routes += [Route("/health_generate", bind_engine(lambda _: engine, health), methods=["GET"])]
    return guard_routes([*routes, *control_routes(lambda _: engine, UNSERVED)], keys)


class DiffusionAdapter:
    """Runs SGLang's diffusion server and the engine in front of it. `listener`: of the engine. `control`: the connection to the
    supervisor; None: started by hand.
    """

    def __init__(
        self,
        launch: SglangDiffusionLaunch,
        pipeline: SampledPipeline,
        listener: socket.socket,
        control: ControlLine | None,
        clock: Clock,
    ) -> None:
        """Start the server process. Raises UsageError, EngineError."""
        self._launch = launch
        self._pipeline = pipeline
        self._listener = listener
        self._control = control
        self._clock = clock
        ports = DiffusionPorts.free()
        self._port = ports.http
        command = diffusion_command(launch, pipeline.files.kind, ports)
        self._scratch = make_scratch()
        environment = server_environment(launch, os.environ, self._scratch)
        self._server = SglangServer(command, environment, self._scratch, sys.stderr.buffer)
        self._routes = DiffusionServer(f"http://127.0.0.1:{ports.http}")

    async def run(self) -> None:
        """Run until the supervisor requests a stop or a signal arrives, then kill the server. Raises EngineError if it ended
        by itself."""
        try:
            await run_beside(self._server, self._control, self._serve())
        finally:
            await self._routes.close()

    async def _serve(self) -> None:
        """Wait until the server is ready, then serve the engine's routes until a signal arrives."""
        self._report("loading", 0)
        while not await self._routes.healthy():
            self._report("loading", self._server.line_count)
            await self._clock.sleep(HEALTH_S)
        await asyncio.to_thread(self._server.check_port, self._port)
        launch, files = self._launch, self._pipeline.files
        engine = SglangDiffusionEngine(
            self._routes,
            self._pipeline,
            AnswerWriter.open(launch),
            clock=self._clock,
            alive=lambda: not self._server.wait(0),
            description=describe_pipeline(launch, files, launch.device),
            device=launch.device,
            version=launch.weight_version,
            side=files.size(launch.height, launch.width),
            scratch=self._scratch,
            report=self._report,
        )
        app = sglang_diffusion_app(engine, ApiKeys(launch.api_key, launch.admin_api_key))
        tls = None if launch.tls is None else serving_context(ReloadingFiles(launch.tls.material))
        server = uvicorn.Server(http_settings(app, backlog=BACKLOG, grace_s=GRACE_S, tls=tls))
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        report_serving(self._control, join_host_port(launch.host, self._listener.getsockname()[1]))
        watching = asyncio.create_task(self._watch(engine))
        try:
            done, _ = await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            server.should_exit = True
            watching.cancel()
            await asyncio.gather(serving, watching, return_exceptions=True)

    async def _watch(self, engine: SglangDiffusionEngine) -> None:
        """Report progress until the server says that it cannot denoise any more, which it never undoes. Raises EngineError."""
        while await self._routes.healthy() is not False:
            engine.report_progress()
            await self._clock.sleep(LOOK_S)
        raise EngineError("SGLang's server reports that its scheduler has ended", fix="See its last lines in the log")

    def _report(self, phase: str, progress: int) -> None:
        if self._control is not None:
            self._control.report_progress(phase, progress)


def serve_engine(launch: SglangDiffusionLaunch, control: ControlLine | None) -> None:
    """Start SGLang's diffusion server for a launch document and serve until the supervisor sends "stop" or a signal arrives.

    Raises UsageError, DataError or EngineError if it cannot start, or if its server ends.
    """
    python = Path(launch.python)
    if not SGLANG_DIFFUSION.is_in(python):
        raise UsageError(f"{SGLANG_DIFFUSION.name} are not installed in {python}", fix=SGLANG_DIFFUSION.how)
    pipeline = SampledPipeline.read(Path(launch.model), guidance=launch.guidance)
    check_pipeline(pipeline.files, pipeline.guidance)
    clock = SystemClock()
    with listen_http(launch.host, launch.port, BACKLOG) as listener:
        asyncio.run(DiffusionAdapter(launch, pipeline, listener, control, clock).run())
