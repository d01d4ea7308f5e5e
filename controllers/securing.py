"""What a daemon is secured with, from its configuration: its certificates, who its callers are, the journal of their calls, and how it
reaches others. Where it listens follows from that: with certificates on two ports, one for people with tokens and one on which
whoever calls shows a certificate, for gRPC's servers ask either every client for one or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from controllers.http_gate import HttpGate
from controllers.service.call_journal import CallJournal
from controllers.service.token_book import TokenBook
from gcore.clock import Clock
from gcore.config import NodeConfig
from gcore.config.node import joined
from gcore.errors import UsageError
from gcore.listening import asked, refused
from gcore.metrics import Metrics
from gcore.metrics.serving import MetricsServer, serve_metrics
from gcore.tls.connecting import PLAIN, Connector
from gcore.tls.material import TlsMaterial, Watched
from gcore.tls.serving import server_credentials
from gcore.tls.serving_http import serving_context

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

JOURNAL = Path("logs") / "calls.jsonl"
LEAST_ENGINES_KEY = 32


@dataclass(frozen=True)
class Security:
    """Of one daemon, for its process's life."""

    connector: Connector
    book: TokenBook
    journal: CallJournal
    watched: Watched | None = None
    """Its certificates."""

    @classmethod
    def of(cls, config: NodeConfig, clock: Clock) -> Security:
        """Raises UsageError for files that cannot be used."""
        auth = config.auth
        admin = None if auth is None or auth.admin_token_file is None else Path(auth.admin_token_file)
        book = TokenBook(clock, required=config.tells_apart, admin_file=admin)
        named = None if auth is None or auth.journal is None else Path(auth.journal)
        kept = {} if auth is None else {"most_bytes": auth.journal_mib << 20, "kept": auth.journal_kept}
        file = (named or Path(config.home) / JOURNAL) if config.tells_apart else None
        journal = CallJournal(file, clock, **kept)
        if config.tls is None:
            return cls(PLAIN, book, journal)
        material = material_of(config)
        watched = Watched(material)
        engines = None if config.tls.engines_key is None else read_engines_key(Path(config.tls.engines_key))
        return cls(Connector(material, engines=engines), book, journal, watched)

    def reload(self) -> None:
        """Read the certificates anew. Raises UsageError if they cannot be; then what was read before goes on to count."""
        if self.watched is not None:
            self.watched.reload()

    def serve_http(self, metrics: Metrics, config: NodeConfig, page: WSGIApplication) -> MetricsServer:
        """Metrics and the page, for those who may. Raises CannotListen, UsageError."""
        gate = HttpGate(self.book, self.journal)
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
        return config.advertised(port), joined(config.advertised_host, peer_port)


def material_of(config: NodeConfig) -> TlsMaterial:
    """A node's certificates."""
    assert config.tls is not None
    return TlsMaterial(Path(config.tls.ca), Path(config.tls.cert), Path(config.tls.key))


def read_engines_key(file: Path) -> bytes:
    """The cluster's key of engines. Raises UsageError."""
    fix = "Name the engines.key that `gcore certs issue` put beside the node's certificate"
    try:
        if file.stat().st_mode & 0o077:
            raise UsageError("others may read the key", where=str(file), fix=f"chmod 600 {file}")
        key = file.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror or error})", where=str(file), fix=fix) from error
    if len(key) < LEAST_ENGINES_KEY:
        raise UsageError(f"a key of engines has at least {LEAST_ENGINES_KEY} bytes", where=str(file), fix=fix)
    return key


def _bound(host: str, port: int, bind: Callable[[str], int]) -> int:
    at = joined(host, port)
    try:
        return bind(at)
    except RuntimeError as error:  # gRPC does not say why
        raise refused(f"cannot listen on {at}", asked(host, port)) from error
