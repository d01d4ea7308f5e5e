"""A process's metrics over HTTP: `/metrics` as Prometheus reads them, and beside it whatever else the process shows (`others`).

Read-only: GET alone. A thread for each connection, of which there are few at a time (`MOST_CONNECTIONS`); one that says
nothing for `SILENT_S` is closed, and one that is still not done after `LONGEST_S`, whoever dribbles. Where there are as many, the one that has
waited for longest without asking anything makes room; if all of them have asked, the new one is closed at once. So neither a forgotten browser nor somebody who opens connections only makes the process grow or keeps Prometheus out. A page elsewhere on the web that has its own name point at this
machine gets nothing: on loopback only loopback's names are answered to (`is_own_name`). Knows nothing of who may ask.
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
"""Of either family, whichever is written: so does gRPC's server take them, which has the other port."""

MOST_CONNECTIONS = 32
SILENT_S = 10.0
LONGEST_S = 30.0
NAMES = "gcore.certificate_names"

ROOM_S = 0.5
"""For a connection that was cut to be gone."""

STOP_LOOK_S = 0.2
"""How soon the server notices that it is to stop."""

TEXT = [("Content-Type", "text/plain; charset=utf-8")]


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """Metrics being served. `address`: host:port, the port as the system chose it if 0 was asked for."""

    address: str
    _server: WSGIServer

    def close(self) -> None:
        """Stop serving; blocks until the server's thread has stopped (half a second at most)."""
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
    """Serve `metrics` at /metrics, and every other path by `others`, in threads. Raises CannotListen or UsageError if the address
    cannot be had.

    `guard` stands before all of it. With `tls` the names in a client's certificate are in the request's environment, as `NAMES`.
    """
    every = host in EVERY_ADDRESS and socket.has_dualstack_ipv6()
    kind, at = (_Server6, "::") if every else (_Server6 if ":" in host else _Server, host)
    shown = f"[{host}]" if ":" in host else host
    try:
        server = kind((at, port), _Handler, tls)
    except OSError as error:
        raise listen_error(f"metrics cannot be served on {shown}:{port}", error) from error
    server.set_app(guard(metrics_app(metrics, host, others or _nothing)))
    looks = {"poll_interval": STOP_LOOK_S}
    threading.Thread(target=server.serve_forever, kwargs=looks, name="metrics", daemon=True).start()
    return MetricsServer(f"{shown}:{server.server_port}", server)


def metrics_app(metrics: Metrics, host: str, others: WSGIApplication) -> WSGIApplication:
    """What answers on an address."""
    own = make_wsgi_app(metrics.registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET",):
            return _refused(start_response, "405 Method Not Allowed", "Only GET is answered here.")
        if not is_own_name(host, environ.get("HTTP_HOST", "")):
            return _refused(start_response, "403 Forbidden", "Ask by the address that this process listens on.")
        answer = own if environ["PATH_INFO"] == "/metrics" else others
        return answer(environ, start_response)

    return app


def is_own_name(host: str, asked: str) -> bool:
    """Whether who asked meant this server. One that listens on loopback is known by loopback's names only; of one that listens elsewhere
    nobody knows all names. `asked`: the header Host, which old clients leave out."""
    if not is_loopback(host) or not asked:
        return True
    name = asked.rpartition("]")[0].lstrip("[") if asked.startswith("[") else asked.partition(":")[0]
    return is_loopback(name)


def _refused(start_response: StartResponse, status: str, said: str) -> Iterable[bytes]:
    start_response(status, TEXT)
    return [f"{said}\n".encode()]


def _nothing(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    return _refused(start_response, "404 Not Found", "There is /metrics here.")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Callable[..., Any], tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._turns = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._clock = SystemClock()
        self._open: dict[int, tuple[float, Any]] = {}
        """By thread: since when its connection is open."""
        self._asked: set[int] = set()
        """Threads whose connection has begun to ask for something."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, or not at all."""
        if not self._turns.acquire(blocking=False) and not (self._cut_silent() and self._turns.acquire(timeout=ROOM_S)):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See ThreadingMixIn."""
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
        """The connection of this thread is used for something."""
        self._asked.add(threading.get_ident())

    def _cut_silent(self) -> bool:
        """End the connection that is open for longest of those that asked for nothing; whether there is one."""
        silent = [(begun, request) for me, (begun, request) in list(self._open.items()) if me not in self._asked]
        if not silent:
            return False
        _cut(min(silent, key=lambda one: one[0])[1])
        return True

    def service_actions(self) -> None:
        """Several times a second: who has been there for too long is cut off."""
        now = self._clock.monotonic()
        for begun, request in list(self._open.values()):
            if now - begun > LONGEST_S:
                _cut(request)

    def _handshaken(self, request: Any, client_address: Any, tls: ssl.SSLContext) -> Any:
        """In the connection's own thread: whoever is slow keeps nobody else waiting. None: it came to nothing."""
        request.settimeout(SILENT_S)
        try:
            return tls.wrap_socket(request, server_side=True)
        except OSError as error:
            log.debug("no TLS with %s: %s", client_address, error)
            self.shutdown_request(request)
            return None

    def server_bind(self) -> None:
        """Without the look-up of the machine's name that http.server makes, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has gone, or asked nonsense: no news for the log's reader."""
        log.debug("a connection from %s ended early", client_address, exc_info=True)


def _cut(request: Any) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        """On every address: of IPv4 too."""
        if self.server_address[0] == "::" and socket.has_dualstack_ipv6():
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S
    server: _Server

    def parse_request(self) -> bool:
        """The first line of a request is there."""
        self.server.has_asked()
        return super().parse_request()

    def get_environ(self) -> dict[str, Any]:
        """With the names of the client's certificate, if it showed one."""
        environ: dict[str, Any] = super().get_environ()
        environ["REMOTE_ADDR"] = environ["REMOTE_ADDR"].removeprefix(
            "::ffff:"
        )  # IPv4, as a server of both families hears of it
        if isinstance(self.connection, ssl.SSLSocket) and (shown := self.connection.getpeercert()):
            names: Any = shown.get("subjectAltName", ())
            environ[NAMES] = [value for kind, value in names if kind == "URI"]
        return environ

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
