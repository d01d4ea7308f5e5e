"""Routes of many emulated engines in one process, and their listening sockets. The port identifies the engine.

The routes are those of every engine (`serving.routes`), with bodies and error responses of the same modules, so that
clients need no special case for emulated engines. Routes that an emulated engine does not support are refused with an
explanation: weights by broadcast, OpenAI's routes, reading tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gcore.engines.emulated.engine import EmulatedEngine
from gcore.engines.serving.http import ApiKeyGuard, ApiKeys, checked_body, error_event, read_body
from gcore.engines.serving.io_struct import GenerateCall, generate_body
from gcore.engines.serving.routes import (
    CLIENT_CLOSED_REQUEST,
    STREAM_END,
    TRANSFER_ROUTES,
    bind_engine,
    control_routes,
    encode_event,
    health,
    make_app,
    run_unless_disconnected,
)
from gcore.errors import EngineError
from gcore.system.network import http_settings, listen_http

UNSERVED = (*TRANSFER_ROUTES, "/load_lora_adapter", "/open_session", "/v1/chat/completions", "/v1/completions")
BACKLOG = 128
GRACE_S = 1


def new_app(engines: Mapping[int, EmulatedEngine]) -> Starlette:
    """Return the ASGI application for all engines. `engines`: by the port on which each listens; it may change later."""

    def engine_of(request: Request) -> EmulatedEngine | None:
        return engines.get(request.scope["server"][1])

    routes = [
        Route("/generate", bind_engine(engine_of, generate), methods=["POST", "PUT"]),
        Route("/rollout/generate", bind_engine(engine_of, generate_pictures), methods=["POST"]),
        Route("/health_generate", bind_engine(engine_of, health), methods=["GET"]),
    ]
    return make_app([*routes, *control_routes(engine_of, UNSERVED)])


async def generate(engine: EmulatedEngine, request: Request) -> Response:
    """Handle `/generate`: generate samples, and respond with one body or a stream."""
    body = await read_body(request, generate_body)
    if body.stream:
        return StreamingResponse(_events(engine, body), media_type="text/event-stream")
    answers = await run_unless_disconnected(request, engine.answers(engine.admit(body)))
    if answers is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(answers if body.is_list else answers[0])


async def generate_pictures(engine: EmulatedEngine, request: Request) -> Response:
    """Handle `/rollout/generate`: generate pictures, and respond with one body."""
    from gcore.engines.serving.denoising import DenoisingBody  # slow to import

    body = await read_body(request, functools.partial(checked_body, DenoisingBody))
    working = engine.pictures(engine.admit_pictures(body), with_condition=body.rollout_return_denoising_env)
    answers = await run_unless_disconnected(request, working)
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answers is None else JSONResponse(answers)


async def _events(engine: EmulatedEngine, body: GenerateCall) -> AsyncIterator[bytes]:
    """Yield server-sent events. An error is an event too, because the status 200 has been sent."""
    try:
        stream = engine.stream(engine.admit(body))
    except EngineError as error:
        yield encode_event(error_event(error))
    else:
        try:
            async for part in stream:
                if not body.is_list:
                    del part["index"]
                yield encode_event(part)
        except EngineError as error:
            yield encode_event(error_event(error))
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
    yield STREAM_END


class EngineListeners:
    """One HTTP server for all engines of a process, with one port per engine, opened and closed while it runs.

    Closing a port ends its connections, as when an engine dies. The process handles signals itself. Belongs to the
    event loop in which it serves.
    """

    def __init__(self, application: ASGIApp, host: str, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._server = _Server(http_settings(application, backlog=BACKLOG, grace_s=GRACE_S, tls=tls))
        self._open: dict[int, asyncio.Server] = {}

    async def serve(self) -> None:
        """Serve until `close` is called."""
        await self._server.serve(sockets=[])

    def close(self) -> None:
        """Request the end of `serve`. Running requests are finished first, for at most `GRACE_S` seconds."""
        self._server.should_exit = True

    async def open(self) -> int:
        """Open a free port for one engine, and return it."""
        await self._server.up.wait()
        listener = listen_http(self._host, 0, BACKLOG)
        port = int(listener.getsockname()[1])
        self._open[port] = await self._server.listen(listener)
        return port

    def shut(self, port: int) -> None:
        """Close an engine's port and end its connections."""
        self._open.pop(port).close()
        self._server.break_off(port)


class KeysByPort:
    """ASGI middleware that requires an API key per port, as separate engines would. `keys`: by port; empty: none."""

    def __init__(self, application: ASGIApp, keys: Mapping[int, str]) -> None:
        self._app = application
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the API key of one request, and pass it to the application."""
        port = (scope.get("server") or ("", 0))[1]
        await ApiKeyGuard(self._app, ApiKeys(self._keys.get(port) or None))(scope, receive, send)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Accept connections on one more socket, as uvicorn does at its start for its own sockets."""
        loop = asyncio.get_running_loop()
        config, state = self.config, self.server_state

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=state, app_state=self.lifespan.state
            )

        server = await loop.create_server(protocol, sock=listener, backlog=config.backlog, ssl=config.ssl)
        self.servers.append(server)
        return server

    def break_off(self, port: int) -> None:
        """Abort all connections to this port."""
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if transport is not None and transport.get_extra_info("sockname")[1] == port:
                transport.abort()
