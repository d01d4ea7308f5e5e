"""Authentication of calls, and the audit log.

The health service needs no authentication. If the node's configuration enables authentication, every other call needs a token or a client
certificate. The server authenticates a call from its metadata, before it reads the request, so unauthenticated clients hold no permit.
It checks the token of a stream again with each message. Handlers find the caller in `controllers.api.edge.access.current_caller`.

The audit log has one line of JSON for each call that changes something and for each refused call: `{"time", "caller", "role", "peer",
"verb", "job", "outcome", "reason"}`, where `peer` is the address and `outcome` a gRPC or HTTP status. Credentials and requests are never
logged. The file rotates at a maximum size, and a few old files are kept. Calls of unknown callers go to a second file (`refused-...`), so
that they displace no other lines. A thread writes the lines. If writes fail, the oldest of some thousand waiting lines are dropped, and
the daemon logs an error. Only the daemon's owner can read the files.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from controllers.api.edge import access
from controllers.api.edge.access import NOBODY_IS_TOLD_APART, TABLE, Authenticator, Caller, set_caller
from controllers.api.edge.errors import CallContext, Forbidden, Unauthenticated, abort_call, final_status, make_refusal
from controllers.api.edge.server import CallLimiter
from gcore.api.rpc import REQUEST_WITHIN_S, Handler, early_handler, handler_call, read_request
from gcore.api.tls import AUTHORIZATION, SCHEME
from gcore.errors import GcoreError
from gcore.system.clock import Clock

log = logging.getLogger(__name__)

MOST_WAITING = 4096

MOST_OF_A_FIELD = 200

END_S = 2.0

STRANGERS_WITHIN_S = 5.0
"""Seconds within which the request of an unauthenticated call must arrive; otherwise the call is refused."""

_NAMES = "peer_uri"

_WATCH = access.OPEN + "Watch"


@dataclass(frozen=True, slots=True)
class CallEntry:
    """One line of the audit log: who called which RPC for which job, and the outcome."""

    caller: str
    role: str
    peer: str
    verb: str
    job: str
    outcome: str
    reason: str = ""


class CallJournal:
    """Writes the audit log, in a thread. `file` None: writes nothing. `most_bytes`: size at which a new file is
    started; `kept`: how many old files are kept."""

    def __init__(self, file: Path | None, clock: Clock, *, most_bytes: int = 16 << 20, kept: int = 4) -> None:
        self._file = file
        self._clock = clock
        self._most_bytes = most_bytes
        self._kept = kept
        self._lines: queue.Queue[tuple[Path, bytes] | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None
        if file is not None:
            self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
            self._thread.start()

    def note(self, entry: CallEntry) -> None:
        """Add an entry. Never blocks; thread-safe."""
        if self._file is None:
            return
        tree = {"time": round(self._clock.wall(), 3)} | {
            name: getattr(entry, name)[:MOST_OF_A_FIELD] for name in CallEntry.__slots__ if getattr(entry, name)
        }
        line = json.dumps(tree).encode() + b"\n"
        file = self._file
        if not entry.role:
            file = file.with_name(f"refused-{file.name}")
            if self._lines.qsize() > MOST_WAITING // 2:
                return
        while True:
            try:
                self._lines.put_nowait((file, line))
                return
            except queue.Full:
                self._drop_oldest()

    def close(self) -> None:
        """Write the remaining lines, waiting at most END_S."""
        if self._thread is not None:
            try:
                self._lines.put_nowait(None)
            except queue.Full:
                self._drop_oldest()
                self._lines.put(None)
            self._thread.join(END_S)

    def _drop_oldest(self) -> None:
        try:
            self._lines.get_nowait()
        except queue.Empty:
            return
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:
            log.error("the audit log %s cannot be written fast enough: %d lines lost so far", self._file, self._dropped)

    def _write_all(self) -> None:
        while (next_one := self._lines.get()) is not None:
            path, line = next_one
            try:
                self._turn_over(path, len(line))
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
                    file.write(line)
            except OSError as error:
                self._dropped += 1
                if self._dropped & (self._dropped - 1) == 0:
                    log.error(
                        "the audit log %s cannot be written (%s): %d lines lost so far",
                        self._file,
                        error,
                        self._dropped,
                    )

    def _turn_over(self, file: Path, more: int) -> None:
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            file.parent.mkdir(parents=True, exist_ok=True)
            return
        if size + more <= self._most_bytes:
            return
        names = [file, *(file.with_name(f"{file.name}.{number}") for number in range(1, self._kept + 1))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)
        if self._kept == 0:
            file.unlink()


class AccessGate(grpc.aio.ServerInterceptor):
    """An interceptor that authenticates and authorizes calls. It runs before the interceptors that read requests and after the call counter.
    `within_s`: a request that arrives later is refused."""

    def __init__(
        self, book: Authenticator, journal: CallJournal, room: CallLimiter, *, within_s: float = REQUEST_WITHIN_S
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
        return early_handler(handler, call.streamed if handler.response_streaming else call.answered)


class _Begun:
    """One call, from its start until its audit entry is written. Subclasses define which permit it takes and who may
    call it."""

    def __init__(self, handler: Handler, room: CallLimiter, within_s: float) -> None:
        self._handler = handler
        self._inner = handler_call(handler)
        self._room = room
        self._within_s = within_s
        self._request: Any = None
        """The decoded request; None until it has been read."""

    async def answered(self, requests: AsyncIterator[Any], context: CallContext) -> Any:
        """Serve a call that has one response: admit it, then pass the request to its service."""
        done, answer = False, None
        try:
            await self._admit(requests, context)
            answer = await self._inner(self._request, context)
            done = True
            return answer
        finally:
            self._over(context, answer, done=done)

    async def streamed(self, requests: AsyncIterator[Any], context: CallContext) -> AsyncGenerator[Any, None]:
        """Serve a call whose response is a stream. The credentials are checked again before each message."""
        done = left = False
        try:
            await self._admit(requests, context)
            async with aclosing(self._inner(self._request, context)) as answers:
                async for one in answers:
                    # Checked before each message: a token may have been revoked while the stream was quiet.
                    await self._still(context)
                    yield one
            done = True
        except GeneratorExit:
            left = True
            raise
        finally:
            self._over(context, None, done=done, left=left)

    async def _admit(self, requests: AsyncIterator[Any], context: CallContext) -> None:
        """Do all that comes before the service (`_enter`). End the call with a gRPC status if that refuses it."""
        try:
            await self._enter(requests, context)
        except GcoreError as error:
            await abort_call(context, make_refusal(error))

    async def _enter(self, requests: AsyncIterator[Any], context: CallContext) -> None:
        """Take a permit, authorize the call and read the request. Raises GcoreError."""
        raise NotImplementedError

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        self._request = await read_request(self._handler, requests, self._within_s)

    async def _still(self, context: CallContext) -> None:
        """Abort the stream if its credentials are no longer valid."""

    def _over(self, context: CallContext, answer: Any, *, done: bool, left: bool = False) -> None:
        """Called when the call has ended: writes its audit entry, if it needs one. `done` and `left`: see
        `final_status`."""


class _Strangers(_Begun):
    """A call of a service that anyone may use (the health service). It has no caller and no audit entry.

    `watches`: the call is a stream of health changes, which never ends."""

    def __init__(self, handler: Handler, room: CallLimiter, within_s: float, *, watches: bool) -> None:
        super().__init__(handler, room, within_s)
        self._watches = watches

    async def _enter(self, requests: AsyncIterator[Any], context: CallContext) -> None:
        self._room.enter_stranger(context, watches=self._watches)
        await self._read(requests)


class _Call(_Begun):
    """A call of an RPC that needs a role: authenticated, authorized, and written to the audit log if it changes
    something or is refused."""

    def __init__(
        self,
        handler: Handler,
        room: CallLimiter,
        within_s: float,
        book: Authenticator,
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

    async def _enter(self, requests: AsyncIterator[Any], context: CallContext) -> None:
        one = self._caller = self._book.caller(self._shown, certificate_uris(context))
        self._room.enter(one, context)
        # Read before the authorization check, so that the audit log shows the target of a refused call.
        await self._read(requests)
        why = access.access_refusal(one, self._method)
        if why is not None:
            raise Forbidden(why, fix="Ask an admin for a token with a higher role")
        set_caller(one)

    async def _still(self, context: CallContext) -> None:
        try:
            self._book.caller(self._shown, certificate_uris(context))
        except Unauthenticated as error:
            await abort_call(context, make_refusal(error))

    def _over(self, context: CallContext, answer: Any, *, done: bool, left: bool = False) -> None:
        row = TABLE.get(self._method)
        outcome = final_status(context, done=done, left=left)
        refused = outcome in ("UNAUTHENTICATED", "PERMISSION_DENIED")
        if not refused and (row is None or not row.changes):
            return
        one = self._caller or Caller("", NOBODY_IS_TOLD_APART.role)
        known = self._caller is not None
        self._journal.note(
            CallEntry(
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
    """The job, node, token or namespace that a call is about: from the request, or from the response if the call created it."""
    named = (getattr(request, name, "") for name in ("job", "node", "id", "name", "namespace"))
    made = (getattr(answer, name, "") for name in ("uid", "name"))
    return next((one for one in (*named, *made) if isinstance(one, str) and one), "")


def certificate_uris(context: Any) -> list[str] | None:
    """The gcore URIs in the client's certificate; None if the client sent no certificate."""
    shown = context.auth_context()
    if "x509_pem_cert" not in shown:
        return None
    texts = [value.decode(errors="replace") for value in shown.get(_NAMES, ())]
    return [text for text in texts if text.startswith(f"{SCHEME}://")]
