"""HTTP server of a process: `/metrics` for Prometheus, and the process's other paths (`others`).

Read-only: GET only. Each connection has a thread, and there are at most `MOST_CONNECTIONS`. The server closes a
connection that sends no request for `SILENT_S` seconds, or is not finished after `LONGEST_S` seconds. At the limit it
closes the oldest connection without a request to make room for a new one; if all have sent requests, it closes the new
one. So neither a forgotten browser nor a client that only opens connections can make the process grow or block
Prometheus. Against DNS rebinding by a web page, a server on loopback only accepts loopback host names (`is_own_name`).
Access control is in the `guard`.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from gcore.observability.metrics import Metrics
from gcore.system.clock import SystemClock
from gcore.system.network import is_loopback, listen_error

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

EVERY_ADDRESS = ("0.0.0.0", "::")
"""Listen addresses that mean all addresses, IPv4 and IPv6, as for gRPC's server on the other port."""

MOST_CONNECTIONS = 32
SILENT_S = 10.0
LONGEST_S = 30.0
NAMES = "gcore.certificate_names"

ROOM_S = 0.5
"""Maximum seconds that a new connection waits for the end of the one that was closed for it."""

STOP_LOOK_S = 0.2
"""Seconds between two checks whether the server should stop."""

TEXT = [("Content-Type", "text/plain; charset=utf-8")]


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running metrics server. `address`: host:port; for port 0 the port that the system chose."""

    address: str
    _server: WSGIServer

    def close(self) -> None:
        """Stop serving; blocks until the server's thread has stopped (at most half a second)."""
        self._server.shutdown()
        self._server.server_close()


def serve_metrics(
    metrics: Metrics,
    host: str = "127.0.0.1",
    port: int = 0,
    others: WSGIApplication | None = None,
    *,
    guard: Callable[[WSGIApplication], WSGIApplication] = lambda app: app,
    tls: ssl.SSLContext | None = None,
) -> MetricsServer:
    """Serve `metrics` at /metrics, and other paths with the WSGI application `others`, in threads.

    `guard`: wraps the complete application, for access control. `tls`: serve HTTPS; the WSGI environment then has the
    names in the client's certificate under the key `NAMES`. Raises CannotListen or UsageError if the address is not
    available.
    """
    every = host in EVERY_ADDRESS and socket.has_dualstack_ipv6()
    kind, at = (_Server6, "::") if every else (_Server6 if ":" in host else _Server, host)
    shown = f"[{host}]" if ":" in host else host
    try:
        server = kind((at, port), _Handler, tls)
    except OSError as error:
        raise listen_error(f"cannot serve metrics on {shown}:{port}", error) from error
    server.set_app(guard(metrics_app(metrics, host, others or _nothing)))
    looks = {"poll_interval": STOP_LOOK_S}
    threading.Thread(target=server.serve_forever, kwargs=looks, name="metrics", daemon=True).start()
    return MetricsServer(f"{shown}:{server.server_port}", server)


def metrics_app(metrics: Metrics, host: str, others: WSGIApplication) -> WSGIApplication:
    """Return the WSGI application. `host`: the address on which it is served, to check the requests' host names."""
    own = make_wsgi_app(metrics.registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET",):
            return _refused(start_response, "405 Method Not Allowed", "Only GET is allowed.")
        if not is_own_name(host, environ.get("HTTP_HOST", "")):
            return _refused(start_response, "403 Forbidden", "Use the address that this process listens on.")
        answer = own if environ["PATH_INFO"] == "/metrics" else others
        return answer(environ, start_response)

    return app


def is_own_name(host: str, asked: str) -> bool:
    """Return whether a request's Host header (`asked`) may name a server on `host`.

    A server on loopback accepts only loopback names. Any other server accepts all, because it does not know its names.
    A missing header is accepted.
    """
    if not is_loopback(host) or not asked:
        return True
    name = asked.rpartition("]")[0].lstrip("[") if asked.startswith("[") else asked.partition(":")[0]
    return is_loopback(name)


def _refused(start_response: StartResponse, status: str, said: str) -> Iterable[bytes]:
    start_response(status, TEXT)
    return [f"{said}\n".encode()]


def _nothing(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    return _refused(start_response, "404 Not Found", "There is only /metrics here.")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Callable[..., Any], tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._turns = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._clock = SystemClock()
        self._open: dict[int, tuple[float, Any]] = {}
        """Open connections: their start on the monotonic clock, and their socket, by the ID of their thread."""
        self._asked: set[int] = set()
        """IDs of threads whose connection has sent a request."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the connection in a thread, or close it at the limit."""
        if not self._turns.acquire(blocking=False) and not (self._cut_silent() and self._turns.acquire(timeout=ROOM_S)):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle one connection, with its TLS handshake. Runs in the connection's thread."""
        me, begun = threading.get_ident(), self._clock.monotonic()
        self._open[me] = begun, request
        try:
            if self._tls is not None:
                request = self._handshaken(request, client_address, self._tls)
            if request is not None:
                self._open[me] = begun, request
                super().process_request_thread(request, client_address)
        finally:
            self._open.pop(me, None)
            self._asked.discard(me)
            self._turns.release()

    def has_asked(self) -> None:
        """Note that the connection of the calling thread has sent a request."""
        self._asked.add(threading.get_ident())

    def _cut_silent(self) -> bool:
        """Close the oldest connection without a request; return whether there is one."""
        silent = [(begun, request) for me, (begun, request) in list(self._open.items()) if me not in self._asked]
        if not silent:
            return False
        _cut(min(silent, key=lambda one: one[0])[1])
        return True

    def service_actions(self) -> None:
        """Close connections that exceed the time limit. Called several times per second."""
        now = self._clock.monotonic()
        for begun, request in list(self._open.values()):
            if now - begun > LONGEST_S:
                _cut(request)

    def _handshaken(self, request: Any, client_address: Any, tls: ssl.SSLContext) -> Any:
        """Do the TLS handshake, and return the TLS socket; None if it failed.

        Runs in the connection's own thread, so that slow clients do not delay others.
        """
        request.settimeout(SILENT_S)
        try:
            return tls.wrap_socket(request, server_side=True)
        except OSError as error:
            log.debug("TLS handshake with %s failed: %s", client_address, error)
            self.shutdown_request(request)
            return None

    def server_bind(self) -> None:
        """Bind the socket without http.server's DNS lookup of the machine's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log only at debug level, because clients disconnect or send invalid requests at any time."""
        log.debug("a connection from %s ended early", client_address, exc_info=True)


def _cut(request: Any) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        """Bind the socket; for the address `::` to IPv4 too."""
        if self.server_address[0] == "::" and socket.has_dualstack_ipv6():
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S
    server: _Server

    def parse_request(self) -> bool:
        """Parse a request, and note that the connection has sent one."""
        self.server.has_asked()
        return super().parse_request()

    def get_environ(self) -> dict[str, Any]:
        """Return the WSGI environment, with the URI names in the client's certificate, if there is one, as `NAMES`."""
        environ: dict[str, Any] = super().get_environ()
        environ["REMOTE_ADDR"] = environ["REMOTE_ADDR"].removeprefix(
            "::ffff:"
        )  # an IPv4 address in the notation of a dual-stack server
        if isinstance(self.connection, ssl.SSLSocket) and (shown := self.connection.getpeercert()):
            names: Any = shown.get("subjectAltName", ())
            environ[NAMES] = [value for kind, value in names if kind == "URI"]
        return environ

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are frequent."""
