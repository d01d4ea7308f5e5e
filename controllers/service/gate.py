"""Stands before every service of a daemon: finds out whose a call is, lets pass what the role table allows, and notes who did what.

Health answers everybody. Everything else needs a token or a client certificate where the node's configuration tells callers
apart; the rest is refused before any service sees it. A stream ends when the token that it was begun with has: whether it
counts is asked with each message. What a service does within the call it does for its caller (`controllers.service.access.caller`).

Whose a call is stands in what it begins with, and so it is asked before its request has come: a stranger holds no place by sending
none. Who is known has a place among their own (`controllers.service.room`), and a while for the request.
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
from controllers.service.room import CallRoom
from controllers.service.statuses import Context, ended_with, refusal_of, refuse
from controllers.service.token_book import TokenBook
from gcore.errors import GcoreError
from gcore.rpc_handlers import REQUEST_WITHIN_S, Handler, answer_of, early, request_of
from gcore.tls.connecting import AUTHORIZATION
from gcore.tls.names import SCHEME

STRANGERS_WITHIN_S = 5.0
"""From the beginning of a stranger's call to its request."""
_NAMES = "peer_uri"
_TRANSPORT = "transport_security_type"
_WATCH = access.OPEN + "Watch"


class AccessGate(grpc.aio.ServerInterceptor):
    """Comes before what looks at requests, and behind what counts calls. `within_s`: a request that comes later is refused."""

    def __init__(
        self, book: TokenBook, journal: CallJournal, room: CallRoom, *, within_s: float = REQUEST_WITHIN_S
    ) -> None:
        self._book = book
        self._journal = journal
        self._room = room
        self._within_s = within_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if method.startswith(access.OPEN):
            within_s = min(self._within_s, STRANGERS_WITHIN_S)
            call: _Begun = _Strangers(handler, self._room, within_s, watches=method == _WATCH)
        else:
            metadata = handler_call_details.invocation_metadata or ()
            shown = [str(value) for key, value in metadata if key == AUTHORIZATION]
            one = shown[0] if len(shown) == 1 else "twice" if shown else None
            call = _Call(handler, self._room, self._within_s, self._book, self._journal, method, one)
        return early(handler, call.streamed if handler.response_streaming else call.answered)


class _Begun:
    """A call that has begun."""

    def __init__(self, handler: Handler, room: CallRoom, within_s: float) -> None:
        self._handler = handler
        self._inner = answer_of(handler)
        self._room = room
        self._within_s = within_s
        self._request: Any = None
        """Once it has come."""

    async def answered(self, requests: AsyncIterator[Any], context: Context) -> Any:
        """For a call with one answer."""
        done, answer = False, None
        try:
            await self._admit(requests, context)
            answer = await self._inner(self._request, context)
            done = True
            return answer
        finally:
            self._over(context, answer, done=done)

    async def streamed(self, requests: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any, None]:
        """For a call with many."""
        done = left = False
        try:
            await self._admit(requests, context)
            async with aclosing(self._inner(self._request, context)) as answers:
                async for one in answers:
                    # Before it is sent: between two messages of a quiet stream a token may have been taken back long ago.
                    await self._still(context)
                    yield one
            done = True
        except GeneratorExit:
            left = True
            raise
        finally:
            self._over(context, None, done=done, left=left)

    async def _admit(self, requests: AsyncIterator[Any], context: Context) -> None:
        """Until its request has come, or it was refused."""
        try:
            await self._enter(requests, context)
        except GcoreError as error:
            await refuse(context, refusal_of(error))

    async def _enter(self, requests: AsyncIterator[Any], context: Context) -> None:
        """The same. Raises GcoreError."""
        raise NotImplementedError

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        self._request = await request_of(self._handler, requests, self._within_s)

    async def _still(self, context: Context) -> None:
        """Whether it may go on."""

    def _over(self, context: Context, answer: Any, *, done: bool, left: bool = False) -> None:
        """It has ended."""


class _Strangers(_Begun):
    """What everybody may."""

    def __init__(self, handler: Handler, room: CallRoom, within_s: float, *, watches: bool) -> None:
        super().__init__(handler, room, within_s)
        self._watches = watches

    async def _enter(self, requests: AsyncIterator[Any], context: Context) -> None:
        self._room.enter_stranger(context, watches=self._watches)
        await self._read(requests)


class _Call(_Begun):
    """What needs a role."""

    def __init__(
        self,
        handler: Handler,
        room: CallRoom,
        within_s: float,
        book: TokenBook,
        journal: CallJournal,
        method: str,
        shown: str | None,
    ) -> None:
        super().__init__(handler, room, within_s)
        self._book = book
        self._journal = journal
        self._method = method
        self._shown = shown
        self._caller: Caller | None = None

    async def _enter(self, requests: AsyncIterator[Any], context: Context) -> None:
        one = self._caller = self._book.caller(self._shown, names_shown(context))
        self._room.enter(one, context)
        # Before it is looked whether they may: what a known caller wanted in vain is noted.
        await self._read(requests)
        why = access.refusal(one, self._method)
        if why is not None:
            raise Forbidden(why, fix="Ask an admin for a token with that role")
        serve_for(one)

    async def _still(self, context: Context) -> None:
        try:
            self._book.caller(self._shown, names_shown(context))
        except Unauthenticated as error:
            await refuse(context, refusal_of(error))

    def _over(self, context: Context, answer: Any, *, done: bool, left: bool = False) -> None:
        row = TABLE.get(self._method)
        outcome = ended_with(context, done=done, left=left)
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
                job=_about(self._request, answer),
                outcome=outcome,
                reason=str(context.details() or "") if outcome != "OK" else "",
            )
        )


def _about(request: Any, answer: Any) -> str:
    """The job, node, token or namespace that a call is about: as it says, or, of one that it made, as it was told."""
    told = (getattr(request, name, "") for name in ("job", "node", "id", "name", "namespace"))
    made = (getattr(answer, name, "") for name in ("uid", "name"))
    return next((one for one in (*told, *made) if isinstance(one, str) and one), "")


def names_shown(context: Any) -> list[str] | None:
    """The URIs of gcore in the certificate of whoever calls; None: no certificate was shown."""
    shown = context.auth_context()
    if "x509_pem_cert" not in shown:
        return None
    texts = [value.decode(errors="replace") for value in shown.get(_NAMES, ())]
    return [text for text in texts if text.startswith(f"{SCHEME}://")]
