"""Security of a daemon as configured: certificates, tokens of callers, the audit log of calls, and connections to other
daemons.

With certificates the daemon listens on two ports, because a gRPC server requests a certificate either from every client
or from none: one port for users with tokens, and one for nodes, on which every client must send a certificate.
`HttpGate` authenticates HTTP requests (metrics and web page).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from controllers.api.edge.access import NOBODY_IS_TOLD_APART, Authenticator, Caller
from controllers.api.edge.errors import Unauthenticated
from controllers.api.edge.gate import CallEntry, CallJournal
from gcore.api.rpc import server_credentials
from gcore.api.tls import PLAIN, Connector, ReloadingFiles, TlsMaterial, serving_context
from gcore.config.node import NodeConfig
from gcore.errors import StoreUnavailable, UsageError, explain_os_errors
from gcore.observability.http import NAMES, MetricsServer, serve_metrics
from gcore.observability.metrics import Metrics
from gcore.system.clock import Clock
from gcore.system.network import describe_listen_error, join_host_port, listen_error

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

CALLER = "gcore.caller"

METRICS = "/metrics"

TEXT = ("Content-Type", "text/plain; charset=utf-8")

ASK = ("WWW-Authenticate", 'Basic realm="gcore: any name, and a token as the password", charset="UTF-8"')

JOURNAL = Path("logs") / "calls.jsonl"

LEAST_ENGINES_KEY = 32


@dataclass(frozen=True)
class Security:
    """Certificates, tokens and audit log of one daemon process. `connector`: connects to other daemons. `journal`: the
    audit log."""

    connector: Connector
    authenticator: Authenticator
    journal: CallJournal
    watched: ReloadingFiles | None = None
    """The daemon's certificates, which can be reloaded."""

    @classmethod
    def of(cls, config: NodeConfig, clock: Clock) -> Security:
        """Load certificates and tokens as the configuration says. Raises UsageError for unusable files."""
        auth = config.auth
        admin = None if auth is None or auth.admin_token_file is None else Path(auth.admin_token_file)
        authenticator = Authenticator(clock, required=config.tells_apart, admin_file=admin)
        named = None if auth is None or auth.journal is None else Path(auth.journal)
        kept = {} if auth is None else {"most_bytes": auth.journal_mib << 20, "kept": auth.journal_kept}
        file = (named or Path(config.home) / JOURNAL) if config.tells_apart else None
        journal = CallJournal(file, clock, **kept)
        if config.tls is None:
            return cls(PLAIN, authenticator, journal)
        material = tls_material(config)
        watched = ReloadingFiles(material)
        engines = None if config.tls.engines_key is None else read_engines_key(Path(config.tls.engines_key))
        return cls(Connector(material, engines=engines), authenticator, journal, watched)

    def reload(self) -> None:
        """Reload the certificates. Raises UsageError if that fails; the old ones then stay in use."""
        if self.watched is not None:
            self.watched.reload()

    def serve_http(self, metrics: Metrics, config: NodeConfig, page: WSGIApplication) -> MetricsServer:
        """Start the HTTP server for metrics and the web page, which serves authorized callers only. Raises
        CannotListen, UsageError."""
        gate = HttpGate(self.authenticator, self.journal)
        tls = None if self.watched is None else serving_context(self.watched, ask=True)
        return serve_metrics(metrics, config.metrics_listen_on, config.metrics_port, page, guard=gate.before, tls=tls)

    def listen(self, server: grpc.aio.Server, config: NodeConfig) -> tuple[str, str]:
        """Bind the gRPC `server` to its ports. Return its address for users and its address for other nodes (empty: the
        same). Raises CannotListen, UsageError."""
        listens_on = config.listen_host, config.listen_port
        if self.watched is None:
            port = _bound(*listens_on, lambda at: server.add_insecure_port(at))
            return config.advertised(port), ""
        assert config.tls is not None
        for_people, for_peers = (server_credentials(self.watched, mutual=mutual) for mutual in (False, True))
        port = _bound(*listens_on, lambda at: server.add_secure_port(at, for_people))
        peer_port = _bound(config.listen_host, config.tls.peer_port, lambda at: server.add_secure_port(at, for_peers))
        return config.advertised(port), join_host_port(config.advertised_host, peer_port)


def tls_material(config: NodeConfig) -> TlsMaterial:
    """The paths of a node's certificate files."""
    assert config.tls is not None
    return TlsMaterial(Path(config.tls.ca), Path(config.tls.cert), Path(config.tls.key))


def read_engines_key(file: Path) -> bytes:
    """Read the key from which the API keys of the cluster's engines are derived. Raises UsageError."""
    fix = "Use the engines.key that `gcore certs issue` wrote next to the node's certificate"
    with explain_os_errors("the engine key cannot be read", UsageError, where=file, fix=fix):
        if file.stat().st_mode & 0o077:
            raise UsageError("other users can read the key file", where=str(file), fix=f"chmod 600 {file}")
        key = file.read_bytes().strip()
    if len(key) < LEAST_ENGINES_KEY:
        raise UsageError(
            f"the engine key has {len(key)} bytes, fewer than {LEAST_ENGINES_KEY}", where=str(file), fix=fix
        )
    return key


def _bound(host: str, port: int, bind: Callable[[str], int]) -> int:
    at = join_host_port(host, port)
    try:
        return bind(at)
    except RuntimeError as error:  # gRPC does not report the cause
        raise listen_error(f"cannot listen on {at}", describe_listen_error(host, port)) from error


class HttpGate:
    """Authenticates and authorizes each HTTP request, to `/metrics` and to the web page. Runs in threads.

    As with gRPC, a client authenticates by a token or a client certificate. It sends a token as `Authorization: Bearer
    TOKEN`, or as the password of any user name, for which browsers prompt. The page shows the caller's namespaces.
    Metrics cover all namespaces, so they need a caller with access to all: an admin, a node, or a viewer whose token
    has `*`, such as Prometheus. Rejected requests are written to the audit log.
    """

    def __init__(self, authenticator: Authenticator, journal: CallJournal) -> None:
        self._authenticator = authenticator
        self._journal = journal

    def before(self, application: WSGIApplication) -> WSGIApplication:
        """Wrap an HTTP application so that it serves authorized callers only."""

        def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            path = str(environ.get("PATH_INFO", ""))
            try:
                one = self._authenticator.caller(_bearer(environ.get("HTTP_AUTHORIZATION")), environ.get(NAMES))
            except Unauthenticated as error:
                return self._refused(environ, start_response, "401 Unauthorized", str(error), None)
            except StoreUnavailable as error:
                return _said(start_response, "503 Service Unavailable", str(error))
            if path == METRICS and one.namespaces is not None:
                said = "Metrics cover all namespaces. Use a token with access to all of them (`gcore token create --namespace '*'`)."
                return self._refused(environ, start_response, "403 Forbidden", said, one)
            environ[CALLER] = one
            return application(environ, start_response)

        return guarded

    def _refused(
        self, environ: WSGIEnvironment, start_response: StartResponse, status: str, said: str, one: Caller | None
    ) -> Iterable[bytes]:
        entry = CallEntry(
            caller="" if one is None else one.name,
            role="" if one is None else one.role.word,
            peer=f"http:{environ.get('REMOTE_ADDR', '')}",
            verb=f"GET {environ.get('PATH_INFO', '')}",
            job="",
            outcome=status,
        )
        self._journal.note(entry)
        return _said(start_response, status, said, *([ASK] if status.startswith("401") else []))


def request_caller(environ: WSGIEnvironment) -> Caller:
    """Return the authenticated caller of an HTTP request."""
    one: Any = environ.get(CALLER, NOBODY_IS_TOLD_APART)
    assert isinstance(one, Caller)
    return one


def _bearer(header: str | None) -> str | None:
    """Convert an HTTP authorization header to the form of gRPC calls (`Bearer TOKEN`); the token may be the password of
    basic authentication."""
    scheme, _, rest = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return header
    try:
        _, colon, password = base64.b64decode(rest, validate=True).decode().partition(":")
    except ValueError:  # invalid base64 or not UTF-8 text
        return header
    return f"Bearer {password}" if colon else header


def _said(start_response: StartResponse, status: str, said: str, *more: tuple[str, str]) -> Iterable[bytes]:
    start_response(status, [TEXT, ("Cache-Control", "no-store"), *more])
    return [f"{said}\n".encode()]
