"""HTTP/1.1 transport for httpx with many concurrent requests to one host.

httpx's own connection pool scans all connections several times per request. With 256 pending requests that costs 5 ms
of the controller's thread per request, most of the duration of a short response. This transport keeps idle connections
in a list and reuses the most recent one. Each request has a connection of its own. It supports no redirects, proxies or
HTTP/2, which an engine client does not need. A response is read completely. With the request extension `STREAMED`, the
caller reads it as it arrives.

A request that is cancelled or times out closes its connection, which tells the engine to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import h11
import httpx

from gcore.system.concurrency import limit_time

READ_BYTES = 1 << 16

STREAMED = "gcore_streamed"
"""Name of the request extension that asks for a streamed response; the caller must close the response."""

MOST_IDLE = 64
"""Maximum number of idle connections."""

IDLE_S = 30.0
"""Maximum seconds that a connection may have been idle to be reused: less than the servers' keep-alive timeout."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A connection. `idle_since`: the event loop's time at which it became idle."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection
    idle_since: float

    @property
    def is_open(self) -> bool:
        return not (self.reader.at_eof() or self.writer.is_closing())


@functools.cache
def _system() -> ssl.SSLContext:
    """TLS context with the system's trusted certificates."""
    return ssl.create_default_context()


class EngineTransport(httpx.AsyncBaseTransport):
    """httpx transport for engines. Belongs to the event loop in which it is first used. Raises httpx.TransportError."""

    def __init__(self, tls: Callable[[], ssl.SSLContext | None] = _system) -> None:
        """`tls`: returns the TLS context for https; called for each new connection."""
        self._idle: list[_Line] = []
        self._closed = False
        self._tls = tls

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, and read the whole response, or only its head if it is streamed."""
        limits = request.extensions.get("timeout", {})
        line = self._take() or await self._connect(request.url, limits.get("connect"))
        answer = _Answer(self, line, request, limits.get("read"))
        try:
            status, headers = await answer.begin()
        except BaseException:
            await answer.aclose()
            raise
        response = httpx.Response(status, headers=headers, stream=answer, request=request)
        if not request.extensions.get(STREAMED):
            try:
                await response.aread()
            finally:
                await answer.aclose()
        return response

    def give_back(self, line: _Line) -> None:
        """Return a connection after its response was read to the end; it is reused if the server keeps it open."""
        try:
            line.protocol.start_next_cycle()
        except h11.LocalProtocolError:
            line.writer.close()  # the server closes it
            return
        if self._closed or len(self._idle) >= MOST_IDLE:
            line.writer.close()
        else:
            now = asyncio.get_running_loop().time()
            self._idle.append(_Line(line.reader, line.writer, line.protocol, now))

    def _take(self) -> _Line | None:
        """Take the most recently used idle connection that is still open; None without one."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            line = self._idle.pop()
            if line.is_open and now - line.idle_since < IDLE_S:
                return line
            line.writer.close()
        return None

    async def _connect(self, url: httpx.URL, limit_s: float | None) -> _Line:
        secure = url.scheme == "https"
        try:
            async with limit_time(limit_s):
                reader, writer = await asyncio.open_connection(
                    url.host, url.port or (443 if secure else 80), ssl=self._tls() if secure else None
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection before the timeout") from error
        except OSError as error:
            raise httpx.ConnectError(error.strerror or str(error)) from error
        return _Line(reader, writer, h11.Connection(h11.CLIENT), 0.0)

    async def aclose(self) -> None:
        """Close idle connections, and pending ones after their response."""
        self._closed = True
        while self._idle:
            self._idle.pop().writer.close()


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines in `chunks` without their ends (LF or CRLF). An unterminated last line is dropped.

    httpx's line splitting also splits at U+2028 and other characters of Python's `splitlines`, which JSON may contain
    unescaped.
    """
    begun: list[bytes] = []
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end)).removesuffix(b"\r")
            begun = []
        if rest:
            begun.append(rest)


class _Answer(httpx.AsyncByteStream):
    """The response to one request. Closes the connection unless it was read to the end."""

    def __init__(self, transport: EngineTransport, line: _Line, request: httpx.Request, limit_s: float | None) -> None:
        self._transport = transport
        self._line = line
        self._request = request
        self._end = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        """Deadline of the whole response, in the event loop's time."""
        self._is_over = False

    async def begin(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Send the request; return status and headers."""
        line, request = self._line, self._request
        body = await request.aread()
        head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        send = line.protocol.send
        line.writer.writelines(part for part in (send(head), send(h11.Data(body)), send(h11.EndOfMessage())) if part)
        async with self._within():
            await line.writer.drain()
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event.status_code, [(bytes(name), bytes(value)) for name, value in event.headers]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._is_over = True
                self._transport.give_back(self._line)
                return

    async def aclose(self) -> None:
        """Close the connection if the response was not read to the end, which tells the engine to stop."""
        if not self._is_over:
            self._is_over = True
            self._line.writer.close()

    async def _next(self) -> object:
        line = self._line
        while True:
            try:
                event = line.protocol.next_event()
            except h11.RemoteProtocolError as error:
                raise httpx.RemoteProtocolError(str(error), request=self._request) from error
            if isinstance(event, h11.ConnectionClosed):
                raise httpx.RemoteProtocolError("the connection was closed", request=self._request)
            if event is not h11.NEED_DATA:
                return event
            async with self._within():
                received = await line.reader.read(READ_BYTES)
            line.protocol.receive_data(received)

    @contextlib.asynccontextmanager
    async def _within(self) -> AsyncIterator[None]:
        request = self._request
        try:
            async with asyncio.timeout_at(self._end):
                yield
        except TimeoutError as error:
            raise httpx.ReadTimeout("no complete response before the timeout", request=request) from error
        except OSError as error:
            raise httpx.ReadError(str(error) or type(error).__name__, request=request) from error
