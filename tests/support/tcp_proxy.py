"""A TCP proxy that can be cut, stalled, or drop replies: the network between two real processes.

It is in front of a real server on loopback. `cut` closes every connection and refuses new ones, as a dead host does.
`stall` accepts and forwards nothing, as a stopped host does. `lose_replies` forwards only traffic to the server.
`heal` undoes all three on the same port and closes connections that missed bytes.
It limits no bandwidth and understands no protocol.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from gcore.errors import GcoreError

_CHUNK_BYTES = 65_536


class Condition(StrEnum):
    """The proxy's handling of bytes."""

    OPEN = "open"
    CUT = "cut"
    STALLED = "stalled"
    ONE_WAY = "one_way"


class Proxy:
    """Between clients and `target` (host:port). Made by `start`; belongs to the loop it was started in."""

    def __init__(self, host: str, port: int) -> None:
        self._target_host = host
        self._target_port = port
        self._condition = Condition.OPEN
        self._server: asyncio.Server | None = None
        self._port = 0
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, target: str) -> Proxy:
        """Listens on a free port of loopback."""
        host, _, port = target.rpartition(":")
        proxy = cls(host, int(port))
        await proxy._listen()
        return proxy

    @property
    def endpoint(self) -> str:
        """Where clients connect: host:port."""
        return f"127.0.0.1:{self._port}"

    async def cut(self) -> None:
        """Close what is open, and refuse what comes."""
        self._condition = Condition.CUT
        await self._hush()
        await self._drop()

    async def stall(self) -> None:
        """Forward nothing more, either way."""
        self._condition = Condition.STALLED

    async def lose_replies(self) -> None:
        """Forward only to the server."""
        self._condition = Condition.ONE_WAY

    async def heal(self) -> None:
        """Forward everything again."""
        if self._condition is not Condition.OPEN:
            await self._drop()
        self._condition = Condition.OPEN
        if self._server is None:
            await self._listen()

    async def close(self) -> None:
        """End it."""
        await self.cut()

    async def _listen(self) -> None:
        try:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        except OSError as error:
            raise GcoreError(f"the proxy cannot listen on port {self._port} ({error.strerror})") from error
        self._port = int(self._server.sockets[0].getsockname()[1])

    async def _hush(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _drop(self) -> None:
        connections = tuple(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self._target_host, self._target_port)
            writers.append(upstream_writer)
            pumps = [
                asyncio.ensure_future(self._pump(reader, upstream_writer, lost_in=(Condition.STALLED,))),
                asyncio.ensure_future(
                    self._pump(upstream_reader, writer, lost_in=(Condition.STALLED, Condition.ONE_WAY))
                ),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            return  # the server is not there: the client's connection is closed, as if nobody listened
        finally:
            for open_writer in writers:
                open_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, lost_in: tuple[Condition, ...]
    ) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            if self._condition in lost_in:
                continue
            writer.write(chunk)
            await writer.drain()
