"""The sockets at which emulated engines are asked: one server, a port for each engine, opened and shut while it runs.

A port that is shut takes its connections with it, as an engine's that has died. Leaves signals to the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from gcore.rollout.engine.auth import Guard, Keys

BACKLOG = 128
GRACE_S = 1
KEPT_S = 60
"""Seconds that an idle connection is kept."""


class Doors:
    """Of a process's engines. Belongs to the loop in which it serves."""

    def __init__(self, application: ASGIApp, host: str, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEPT_S,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._open: dict[int, asyncio.Server] = {}

    async def serve(self) -> None:
        """Until it is closed."""
        await self._server.serve(sockets=[])

    def close(self) -> None:
        """End. Ports that are still open answer what is under way first."""
        self._server.should_exit = True

    async def open(self) -> int:
        """A port of its own for one engine."""
        await self._server.up.wait()
        listener = socket.create_server((self._host, 0), backlog=BACKLOG)
        # Inherited by each connection; asyncio does not set it on sockets that it has not made.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = int(listener.getsockname()[1])
        self._open[port] = await self._server.listen(listener)
        return port

    def shut(self, port: int) -> None:
        """Nobody is asked there any more; who was being answered hears nothing further."""
        self._open.pop(port).close()
        self._server.break_off(port)


class KeysByPort:
    """An ASGI application whose ports each have a key, as engines of their own would; an empty one is none."""

    def __init__(self, application: ASGIApp, keys: Mapping[int, str]) -> None:
        self._app = application
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        port = (scope.get("server") or ("", 0))[1]
        await Guard(self._app, Keys(self._keys.get(port) or None))(scope, receive, send)


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
        """As at its start."""
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
        """End the connections of that port at once."""
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if transport is not None and transport.get_extra_info("sockname")[1] == port:
                transport.abort()
