"""A daemon's security, from its configuration: its certificates, its callers' tokens, the journal of calls, and how it reaches others.

Where the daemon listens follows from that. With certificates it listens on two ports, one for people with tokens and one on which every
caller shows a certificate, since a gRPC server asks either every client for a certificate or none. `HttpGate` guards what it serves over
HTTP.
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
    """The certificates, tokens and call journal of one daemon, for its process's life."""

    connector: Connector
    authenticator: Authenticator
    journal: CallJournal
    watched: ReloadingFiles | None = None
    """Its certificates."""

    @classmethod
    def of(cls, config: NodeConfig, clock: Clock) -> Security:
        """Raises UsageError for files that cannot be used."""
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
        """Read the certificates anew. Raises UsageError if they cannot be; then what was read before goes on to count."""
        if self.watched is not None:
            self.watched.reload()

    def serve_http(self, metrics: Metrics, config: NodeConfig, page: WSGIApplication) -> MetricsServer:
        """Metrics and the page, for those who may. Raises CannotListen, UsageError."""
        gate = HttpGate(self.authenticator, self.journal)
        tls = None if self.watched is None else serving_context(self.watched, ask=True)
        return serve_metrics(metrics, config.metrics_listen_on, config.metrics_port, page, guard=gate.before, tls=tls)

    def listen(self, server: grpc.aio.Server, config: NodeConfig) -> tuple[str, str]:
        """Where people, and where other nodes reach `server`; the second empty: in the same place. Raises CannotListen, UsageError."""
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
    """A node's certificates."""
    assert config.tls is not None
    return TlsMaterial(Path(config.tls.ca), Path(config.tls.cert), Path(config.tls.key))


def read_engines_key(file: Path) -> bytes:
    """The cluster's key of engines. Raises UsageError."""
    fix = "Name the engines.key that `gcore certs issue` put beside the node's certificate"
    with explain_os_errors("cannot be read", UsageError, where=file, fix=fix):
        if file.stat().st_mode & 0o077:
            raise UsageError("others may read the key", where=str(file), fix=f"chmod 600 {file}")
        key = file.read_bytes().strip()
    if len(key) < LEAST_ENGINES_KEY:
        raise UsageError(f"a key of engines has at least {LEAST_ENGINES_KEY} bytes", where=str(file), fix=fix)
    return key


def _bound(host: str, port: int, bind: Callable[[str], int]) -> int:
    at = join_host_port(host, port)
    try:
        return bind(at)
    except RuntimeError as error:  # gRPC does not say why
        raise listen_error(f"cannot listen on {at}", describe_listen_error(host, port)) from error


class HttpGate:
    """Guards an HTTP application, `/metrics` and the page: authenticates a request, and says whether it is allowed. Runs in threads.

    As with gRPC, a token or a client certificate authenticates. A token comes as `Authorization: Bearer TOKEN`, or as the password of any
    user name, since browsers ask for these two. A person's page shows the person's namespaces. The metrics are of all namespaces, so they
    are for callers who have all: an admin, a node, or a viewer whose token says `*`, as Prometheus' does. Refusals are in the journal of
    calls.
    """

    def __init__(self, authenticator: Authenticator, journal: CallJournal) -> None:
        self._authenticator = authenticator
        self._journal = journal

    def before(self, application: WSGIApplication) -> WSGIApplication:
        """The application, for those who may."""

        def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            path = str(environ.get("PATH_INFO", ""))
            try:
                one = self._authenticator.caller(_bearer(environ.get("HTTP_AUTHORIZATION")), environ.get(NAMES))
            except Unauthenticated as error:
                return self._refused(environ, start_response, "401 Unauthorized", str(error), None)
            except StoreUnavailable as error:
                return _said(start_response, "503 Service Unavailable", str(error))
            if path == METRICS and one.namespaces is not None:
                said = "Metrics are of every namespace: show a token that has them all (`gcore token create --namespace '*'`)."
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
    """The caller of a request that was let through."""
    one: Any = environ.get(CALLER, NOBODY_IS_TOLD_APART)
    assert isinstance(one, Caller)
    return one


def _bearer(header: str | None) -> str | None:
    """The header as gRPC's calls carry it."""
    scheme, _, rest = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return header
    try:
        _, colon, password = base64.b64decode(rest, validate=True).decode().partition(":")
    except ValueError:  # it is not base64, not even ASCII, or what it says is no text
        return header
    return f"Bearer {password}" if colon else header


def _said(start_response: StartResponse, status: str, said: str, *more: tuple[str, str]) -> Iterable[bytes]:
    start_response(status, [TEXT, ("Cache-Control", "no-store"), *more])
    return [f"{said}\n".encode()]
