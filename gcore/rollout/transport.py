"""HTTP/1.1 for many requests to one host at once, as a transport of httpx.

httpx's own pool looks at every connection for every request, several times: with 256 requests under way a request costs
5 ms of the controller's thread, most of what a short response takes to make. This one keeps idle connections in a list,
takes the youngest, and gives each request a connection of its own. It does no redirects, proxies, HTTP/2 or streaming of
answers: an engine's client needs none of them.

A request that is cancelled, or whose time is up, closes its connection: that is how an engine learns of it.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

import h11
import httpx

READ_BYTES = 1 << 16
MOST_IDLE = 64
"""Idle connections that are kept."""
IDLE_S = 30.0
"""An idle connection is not used any more after so long: less than servers keep them."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A connection, and since when it has been idle, in the loop's time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection
    idle_since: float

    @property
    def is_open(self) -> bool:
        return not (self.reader.at_eof() or self.writer.is_closing())


class PlainTransport(httpx.AsyncBaseTransport):
    """Belongs to the loop in which it is first used. Raises httpx.TransportError, as transports do."""

    def __init__(self) -> None:
        self._idle: list[_Line] = []
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it, and read the whole answer."""
        limits = request.extensions.get("timeout", {})
        line = self._take() or await self._connect(request.url, limits.get("connect"))
        kept = False
        try:
            async with asyncio.timeout(limits.get("read")):
                response = await _exchange(line, request)
            line.protocol.start_next_cycle()
            kept = True
            return response
        except TimeoutError as error:
            raise httpx.ReadTimeout("the time is up", request=request) from error
        except OSError as error:
            raise httpx.ReadError(str(error) or type(error).__name__, request=request) from error
        except h11.LocalProtocolError:
            # The server wants the connection closed after this answer.
            return response
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from error
        finally:
            if kept and not self._closed and len(self._idle) < MOST_IDLE:
                now = asyncio.get_running_loop().time()
                self._idle.append(_Line(line.reader, line.writer, line.protocol, now))
            else:
                line.writer.close()

    def _take(self) -> _Line | None:
        """The youngest idle connection that still holds."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            line = self._idle.pop()
            if line.is_open and now - line.idle_since < IDLE_S:
                return line
            line.writer.close()
        return None

    async def _connect(self, url: httpx.URL, limit_s: float | None) -> _Line:
        secure = url.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_connection(
                    url.host, url.port or (443 if secure else 80), ssl=self._tls if secure else None
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx.ConnectError(error.strerror or str(error)) from error
        return _Line(reader, writer, h11.Connection(h11.CLIENT), 0.0)

    async def aclose(self) -> None:
        """Close what is idle, and what is under way once it has its answer."""
        self._closed = True
        while self._idle:
            self._idle.pop().writer.close()


async def _exchange(line: _Line, request: httpx.Request) -> httpx.Response:
    body = await request.aread()
    head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
    send = line.protocol.send
    line.writer.writelines(part for part in (send(head), send(h11.Data(body)), send(h11.EndOfMessage())) if part)
    await line.writer.drain()
    answer: h11.Response | None = None
    content: list[bytes] = []
    while True:
        event = line.protocol.next_event()
        if event is h11.NEED_DATA:
            line.protocol.receive_data(await line.reader.read(READ_BYTES))
        elif isinstance(event, h11.Response):
            answer = event
        elif isinstance(event, h11.Data):
            content.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            break
        elif isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("the connection was closed")
    assert answer is not None
    headers = [(bytes(name), bytes(value)) for name, value in answer.headers]
    return httpx.Response(answer.status_code, headers=headers, content=b"".join(content), request=request)
