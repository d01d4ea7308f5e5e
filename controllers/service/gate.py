"""Stands before every service of a daemon: finds out whose a call is, lets pass what the role table allows, and notes who did what.

Health answers everybody. Everything else needs a token or a client certificate where the node's configuration tells callers
apart; the rest is refused before any service sees it. A stream ends when the token that it was begun with has: whether it
counts is asked with each message. What a service does within the call it does for its caller (`controllers.service.access.caller`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from controllers.service import access
from controllers.service.access import NOBODY_IS_TOLD_APART, TABLE, Caller, serve_for
from controllers.service.call_journal import CallJournal, Entry
from controllers.service.refusals import Forbidden, Unauthenticated
from controllers.service.statuses import Context, ended_with, refusal_of, refuse
from controllers.service.token_book import TokenBook
from gcore.errors import GcoreError
from gcore.rpc_handlers import Handler, answer_of, like
from gcore.tls.connecting import AUTHORIZATION
from gcore.tls.names import SCHEME

_NAMES = "peer_uri"
_TRANSPORT = "transport_security_type"


class AccessGate(grpc.aio.ServerInterceptor):
    """Comes before what looks at requests, and behind what counts calls."""

    def __init__(self, book: TokenBook, journal: CallJournal) -> None:
        self._book = book
        self._journal = journal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(access.OPEN):
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        shown = [str(value) for key, value in metadata if key == AUTHORIZATION]
        call = _Call(self._book, self._journal, method, shown[0] if len(shown) == 1 else "twice" if shown else None)
        behind = answer_of(handler)
        return like(handler, call.streamed(behind) if handler.response_streaming else call.answered(behind))


class _Call:
    """One call."""

    def __init__(self, book: TokenBook, journal: CallJournal, method: str, shown: str | None) -> None:
        self._book = book
        self._journal = journal
        self._method = method
        self._shown = shown
        self._caller: Caller | None = None

    def answered(self, inner: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        """For a call with one answer."""

        async def guarded(request: Any, context: Context) -> Any:
            done, answer = False, None
            try:
                await self._admit(context)
                answer = await inner(request, context)
                done = True
                return answer
            finally:
                self._note(request, context, answer, done=done)

        return guarded

    def streamed(self, inner: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Context], AsyncIterator[Any]]:
        """For a call with many."""

        async def guarded(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            done = False
            try:
                await self._admit(context)
                async with aclosing(inner(request, context)) as answers:  # type: ignore[type-var]
                    async for one in answers:
                        # Before it is sent: between two messages of a quiet stream a token may have been taken back long ago.
                        await self._still(context)
                        yield one
                done = True
            finally:
                self._note(request, context, None, done=done)

        return guarded

    async def _admit(self, context: Context) -> None:
        try:
            one = self._caller = self._book.caller(self._shown, names_shown(context))
            why = access.refusal(one, self._method)
            if why is not None:
                raise Forbidden(why, fix="Ask an admin for a token with that role")
        except GcoreError as error:
            await refuse(context, refusal_of(error))
        serve_for(one)

    async def _still(self, context: Context) -> None:
        try:
            self._book.caller(self._shown, names_shown(context))
        except Unauthenticated as error:
            await refuse(context, refusal_of(error))

    def _note(self, request: Any, context: Context, answer: Any, *, done: bool) -> None:
        row = TABLE.get(self._method)
        outcome = ended_with(context, done=done)
        refused = outcome in ("UNAUTHENTICATED", "PERMISSION_DENIED")
        if not refused and (row is None or not row.changes):
            return
        one = self._caller or Caller("", NOBODY_IS_TOLD_APART.role)
        known = self._caller is not None
        self._journal.note(
            Entry(
                caller=one.name if known else "",
                role=one.role.word if known else "",
                peer=context.peer() or "",
                verb=self._method.rpartition("/")[2],
                job=_about(request, answer),
                outcome=outcome,
                reason=str(context.details() or "") if outcome != "OK" else "",
            )
        )


def _about(request: Any, answer: Any) -> str:
    """The job, node or token that a call is about: as it says, or, of one that it made, as it was told."""
    told = (getattr(request, name, "") for name in ("job", "node", "id", "name"))
    made = (getattr(answer, name, "") for name in ("uid", "name"))
    return next((one for one in (*told, *made) if isinstance(one, str) and one), "")


def names_shown(context: Any) -> list[str] | None:
    """The URIs of gcore in the certificate of whoever calls; None: no certificate was shown."""
    shown = context.auth_context()
    if "x509_pem_cert" not in shown:
        return None
    texts = [value.decode(errors="replace") for value in shown.get(_NAMES, ())]
    return [text for text in texts if text.startswith(f"{SCHEME}://")]
