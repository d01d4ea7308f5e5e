"""A client of gRPC's wire protocol that accepts no response: it grants no flow-control window, which no library allows."""

from __future__ import annotations

import socket
import ssl
import struct
from pathlib import Path
from types import TracebackType

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4


class TakesNothing:
    """One connection over TLS on which no answer can be sent."""

    def __init__(self, port: int, ca: Path) -> None:
        context = ssl.create_default_context(cafile=str(ca))
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", port))
        self._line = context.wrap_socket(plain, server_hostname="127.0.0.1")
        self._stream = 1
        no_room = struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)
        self._line.sendall(PREFACE + _frame(SETTINGS, 0, 0, no_room) + _frame(SETTINGS, ACK, 0, b""))

    def call(self, method: str, request: bytes, *metadata: tuple[str, str]) -> None:
        """Ask, and take no answer."""
        said = [(":method", "POST"), (":scheme", "https"), (":path", method), (":authority", "127.0.0.1")]
        said += [("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in said)
        message = struct.pack(">BI", 0, len(request)) + request
        whole = _frame(HEADERS, END_HEADERS, self._stream, headers) + _frame(DATA, END_STREAM, self._stream, message)
        self._stream += 2
        self._line.sendall(whole)

    def __enter__(self) -> TakesNothing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._line.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(text: str) -> bytes:
    """As HPACK has it, without its compression."""
    data, rest = text.encode(), len(text.encode()) - 127
    if rest < 0:
        return bytes([len(data)]) + data
    length = [127]
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + data
