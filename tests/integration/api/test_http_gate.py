"""Access to a daemon's HTTP pages with tokens and certificates: strangers see nothing, users see only their own jobs."""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import issued
import pytest

from controllers.api.edge.access import Authenticator
from controllers.api.edge.gate import CallJournal
from controllers.daemon.security import HttpGate, request_caller
from gcore.api.tls import ReloadingFiles, TlsMaterial, serving_context
from gcore.api.tokens import TokenRecord, new_token
from gcore.observability.http import serve_metrics
from gcore.observability.metrics import Metrics
from gcore.store import keys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.system.clock import SystemClock

CLOCK = SystemClock()
PATHS = ("/", "/metrics", "/page/jobs", "/page/jobs/x", "/nothing")


@dataclass
class Served:
    """A server, and who it knows."""

    url: str
    ca: Path
    tokens: dict[str, str]
    journal: CallJournal
    file: Path

    def get(self, path: str, material: TlsMaterial | None = None, **headers: str) -> httpx.Response:
        """Act as the caller with these credentials."""
        shown = material or TlsMaterial(self.ca / "ca.pem")
        with httpx.Client(verify=shown.context(shown.read()), trust_env=False) as client:
            return client.get(self.url + path, headers=headers)


def other_pages(environ: Any, start_response: Any) -> Iterable[bytes]:
    one = request_caller(environ)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{one.name} {sorted(one.namespaces or ['*'])}".encode()]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    ca = issued.authority(tmp_path / "ca")
    watched = ReloadingFiles(issued.node(ca, "n1"))
    book = Authenticator(CLOCK, required=True)
    tokens, events = {}, []
    for name, role, spaces in [("ada", "viewer", ("vision",)), ("prometheus", "viewer", ("*",)), ("root", "admin", ())]:
        token = new_token()
        record = TokenRecord(
            id=token.id, name=name, role=role, namespaces=spaces, sha256=token.sha256, created=0, expires=1e12
        )
        events.append(WatchEvent("put", KeyValue(keys.token(token.id), record.encode(), 1, 1)))
        tokens[name] = token.text
    book.note(WatchBatch(tuple(events), 1, reset=True))
    journal = CallJournal(tmp_path / "calls.jsonl", CLOCK)
    gate = HttpGate(book, journal)
    server = serve_metrics(Metrics(), others=other_pages, guard=gate.before, tls=serving_context(watched, ask=True))
    yield Served(f"https://{server.address}", ca, tokens, journal, tmp_path / "calls.jsonl")
    server.close()
    journal.close()


@pytest.mark.parametrize("path", PATHS)
def test_without_a_token_or_certificate_nothing_is_shown(served: Served, path: str) -> None:
    for header in ({}, {"Authorization": "Bearer junk"}, {"Authorization": "Basic junk"}, {"Authorization": "x"}):
        answer = served.get(path, **header)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic ")
        assert len(answer.text.splitlines()) == 1


@pytest.mark.parametrize("header", ["Basic \u00e9", "Bearer \u00e9", "Basic /w==", "\u00e9"])
def test_a_header_of_any_bytes_is_refused_and_breaks_nothing(
    served: Served, capfd: pytest.CaptureFixture[str], header: str
) -> None:
    shown = TlsMaterial(served.ca / "ca.pem")
    with httpx.Client(verify=shown.context(shown.read()), trust_env=False) as client:
        answer = client.get(f"{served.url}/", headers={b"Authorization": header.encode("latin-1")})
    assert answer.status_code == 401
    assert "Traceback" not in capfd.readouterr().err


def test_a_page_is_its_callers_however_the_token_comes(served: Served) -> None:
    password = base64.b64encode(f"anybody:{served.tokens['ada']}".encode()).decode()
    for header in (f"Bearer {served.tokens['ada']}", f"Basic {password}"):
        assert served.get("/", Authorization=header).text == "ada ['vision']"


def test_metrics_are_for_those_who_have_every_namespace(served: Served) -> None:
    told = {name: served.get("/metrics", Authorization=f"Bearer {token}") for name, token in served.tokens.items()}
    assert {name: answer.status_code for name, answer in told.items()} == {"ada": 403, "prometheus": 200, "root": 200}
    assert "gcore_" in told["prometheus"].text


def test_a_client_certificate_will_do(served: Served) -> None:
    assert served.get("/", issued.user(served.ca, "bob", "viewer", "speech")).text == "bob ['speech']"
    assert served.get("/metrics", issued.node(served.ca, "n2")).status_code == 200


def test_a_foreign_or_expired_certificate_does_not_get_through_the_handshake(served: Served, tmp_path: Path) -> None:
    foreign = replace(issued.user(issued.authority(tmp_path / "x"), "ada"), ca=served.ca / "ca.pem")
    old = issued.user(served.ca, "old", begun=timedelta(days=30), days=3)
    for material in (foreign, old):
        with pytest.raises(httpx.TransportError):
            served.get("/", material)
    assert served.get("/metrics", issued.node(served.ca, "n2")).status_code == 200


def test_connections_that_say_nothing_or_nonsense_keep_nobody_waiting(served: Served) -> None:
    host, _, port = served.url.removeprefix("https://").partition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(8)]
    for number, one in enumerate(silent):
        if number % 2:
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert served.get("/", Authorization=f"Bearer {served.tokens['ada']}").status_code == 200
    for one in silent:
        one.close()


def test_refusals_are_in_the_journal_without_what_was_shown(served: Served) -> None:
    served.get("/metrics", Authorization=f"Bearer {served.tokens['ada']}")
    served.get("/page/jobs", Authorization="Bearer gcore_secret")
    served.journal.close()
    assert '"verb": "GET /metrics"' in served.file.read_text()
    unknown = served.file.with_name("refused-calls.jsonl").read_text()
    assert '"verb": "GET /page/jobs"' in unknown
    assert "gcore_secret" not in unknown
    assert served.tokens["ada"] not in served.file.read_text()


def test_old_protocols_are_not_spoken(served: Served) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = served.url.removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as line:
        assert line.version() in ("TLSv1.2", "TLSv1.3")
