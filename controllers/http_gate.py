"""Stands before what a daemon shows over HTTP, `/metrics` and the page: whose a request is, and whether they may.

As with gRPC, a token or a client certificate says it. A token comes as `Authorization: Bearer TOKEN`, or as the password of
whatever user name, for browsers ask for these two. A person's page shows what their namespaces have; the metrics are of all
namespaces, so they are for those who have all: an admin, a node, or a viewer whose token says `*`, as Prometheus' does.
Refusals are in the journal of calls.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from controllers.service.access import NOBODY_IS_TOLD_APART, Caller
from controllers.service.call_journal import CallJournal, Entry
from controllers.service.refusals import Unauthenticated
from controllers.service.token_book import TokenBook
from gcore.errors import StoreUnavailable
from gcore.metrics.serving import NAMES

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

CALLER = "gcore.caller"
METRICS = "/metrics"
TEXT = ("Content-Type", "text/plain; charset=utf-8")
ASK = ("WWW-Authenticate", 'Basic realm="gcore: any name, and a token as the password", charset="UTF-8"')


class HttpGate:
    """Before one application. Threads."""

    def __init__(self, book: TokenBook, journal: CallJournal) -> None:
        self._book = book
        self._journal = journal

    def before(self, application: WSGIApplication) -> WSGIApplication:
        """The application, for those who may."""

        def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            path = str(environ.get("PATH_INFO", ""))
            try:
                one = self._book.caller(_bearer(environ.get("HTTP_AUTHORIZATION")), environ.get(NAMES))
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
        entry = Entry(
            caller="" if one is None else one.name,
            role="" if one is None else one.role.word,
            peer=f"http:{environ.get('REMOTE_ADDR', '')}",
            verb=f"GET {environ.get('PATH_INFO', '')}",
            job="",
            outcome=status,
        )
        self._journal.note(entry)
        return _said(start_response, status, said, *([ASK] if status.startswith("401") else []))


def whose(environ: WSGIEnvironment) -> Caller:
    """Whose a request is that was let through."""
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
