"""One call to etcd: a deadline, the user's token, what an error means, and whether the call may be made again.

A call that may be repeated (a read, a keep-alive: doing it twice is doing it once) is retried until its deadline. Any
other is sent once; only where the failure proves that etcd never began with it is it sent again:

- no connection stood, so nothing was sent;
- etcd refused it before proposing it (no leader, too many requests, a token that is no longer valid).

Every other failure of such a call leaves its outcome unknown, and is reported as `StoreUnavailable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TypeAlias, TypeVar

import grpc
import grpc.aio
from aetcd.rpc import AuthenticateRequest
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from gcore.clock import Clock
from gcore.errors import LeaseLost, StoreUnavailable, Unreachable
from gcore.store.endpoints import Connection, ConnectionPool, StoreUser

log = logging.getLogger(__name__)

T = TypeVar("T")
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Action: TypeAlias = Callable[[Connection, Metadata, float], Awaitable[T]]
"""A call over this connection, with this metadata, within so many seconds."""


class StoreRefused(Unreachable):
    """etcd answered, and will not do it: the user, a permission, or the request itself is wrong."""


class Compacted(Exception):
    """The revision asked for has been compacted away. Never leaves this package."""


class StreamEnded(Exception):
    """etcd closed a stream without a word. Never leaves this package."""


class _Again(StoreUnavailable):
    """A failure after which this call may be sent again."""


class Meaning(Enum):
    """What an error says about the call."""

    LEASE_GONE = auto()
    COMPACTED = auto()
    TOKEN_STALE = auto()
    NOT_BEGUN = auto()
    FULL = auto()
    REFUSED = auto()
    UNKNOWN = auto()


def meaning_of(code: grpc.StatusCode, details: str) -> Meaning:
    """etcd tells its errors apart by words more than by codes; these are the same in 3.4, 3.5 and 3.6."""
    table = (
        ("requested lease not found", Meaning.LEASE_GONE),
        ("required revision has been compacted", Meaning.COMPACTED),
        ("invalid auth token", Meaning.TOKEN_STALE),
        ("revision of auth store is old", Meaning.TOKEN_STALE),
        ("etcdserver: no leader", Meaning.NOT_BEGUN),
        ("too many requests", Meaning.NOT_BEGUN),
        ("database space exceeded", Meaning.FULL),
    )
    for words, meaning in table:
        if words in details:
            return meaning
    if code in REFUSALS:
        return Meaning.REFUSED
    return Meaning.UNKNOWN


REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


TELL_AGAIN_S = 60.0


class Caller:
    """Makes calls over a pool of connections, each within `timeout_s`."""

    def __init__(self, pool: ConnectionPool, clock: Clock, *, user: StoreUser | None, timeout_s: float) -> None:
        self.pool = pool
        self.clock = clock
        self.timeout_s = timeout_s
        self._user = user
        self._token: str | None = None
        self._told: float | None = None
        """When it was last told that the store is full."""

    async def call(self, action: Action[T], *, repeatable: bool, within_s: float | None = None) -> T:
        """Within `within_s` instead of the time that every call has. Raises StoreUnavailable, StoreRefused, LeaseLost, Compacted."""
        deadline = self.clock.monotonic() + (self.timeout_s if within_s is None else within_s)

        def over(state: RetryCallState) -> bool:
            return self.clock.monotonic() >= deadline

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Again),
            wait=wait_exponential(multiplier=0.02, max=0.5),
            stop=over,
            sleep=self.clock.sleep,
            reraise=True,
        )
        return await retrying(self._attempt, action, deadline, repeatable)

    async def connection(self, within_s: float, *, repeatable: bool = True) -> Connection:
        """A connection that stands. Raises StoreUnavailable; for a call that is no mere question it says that none was made."""
        connection = await self.pool.ready(within_s)
        if connection is None:
            raise _Again(
                f"the store cannot be reached, tried for {within_s:.1f} s",
                where=f"etcd at {self.pool}",
                fix="Check that etcd runs there, and that both sides agree on TLS"
                + ("" if repeatable else "; nothing was sent"),
            )
        return connection

    async def metadata(self, connection: Connection, within_s: float) -> Metadata:
        """What goes with every call. `hasleader`: a member cut off from its cluster says so instead of hanging."""
        if self._user is None:
            return (("hasleader", "true"),)
        if self._token is None:
            request = AuthenticateRequest(name=self._user.name, password=self._user.password)
            answer = await connection.auth.Authenticate(request, timeout=within_s)
            self._token = str(answer.token)
        return (("hasleader", "true"), ("token", self._token))

    def forget_token(self) -> None:
        """Authenticate again before the next call."""
        self._token = None

    async def _attempt(self, action: Action[T], deadline: float, repeatable: bool) -> T:
        connection = await self.connection(deadline - self.clock.monotonic(), repeatable=repeatable)
        left = max(deadline - self.clock.monotonic(), _LEAST_S)
        # A repeatable call leaves time for another member, should this one be stuck.
        within = left / 2 if repeatable and len(self.pool) > 1 else left
        sent = False
        try:
            async with asyncio.timeout(within + _SLACK_S):
                metadata = await self.metadata(connection, within)
                sent = True
                answer = await action(connection, metadata, within)
        except grpc.aio.AioRpcError as error:
            raise self._translated(connection, error, repeatable or not sent) from error
        except (StreamEnded, asyncio.InvalidStateError, TimeoutError) as error:
            raise self._unknown(connection, f"{type(error).__name__} {error}", repeatable or not sent) from error
        self.pool.answered(connection)
        return answer

    def _translated(self, connection: Connection, error: grpc.aio.AioRpcError, repeatable: bool) -> Exception:
        code, details = error.code(), error.details() or ""
        match meaning_of(code, details):
            case Meaning.UNKNOWN:
                return self._unknown(connection, f"{code.name}: {details}", repeatable)
            case Meaning.NOT_BEGUN:
                self.pool.suspect(connection)
                return _Again(f"the store is not ready ({details})", where=f"etcd at {connection.endpoint.target}")
            case Meaning.TOKEN_STALE:
                self.forget_token()
                return _Again(f"the store refuses the user's token ({details})", where=f"etcd at {self.pool}")
            case Meaning.FULL:
                full = StoreUnavailable(
                    "the store's database is full",
                    where=f"etcd at {connection.endpoint.target}",
                    fix="Compact and defragment it, raise --quota-backend-bytes, then disarm the alarm",
                )
                self._tell(full)
                return full
            case Meaning.LEASE_GONE:
                return LeaseLost("the lease has ended", fix="Begin a new session; what stood under it is gone")
            case Meaning.COMPACTED:
                return Compacted(details)
            case Meaning.REFUSED:
                return StoreRefused(
                    f"the store refuses the request ({code.name}: {details})",
                    where=f"etcd at {connection.endpoint.target}",
                    fix="Check the etcd user, its permissions and etcd's version (3.4 or later)",
                )

    def _tell(self, full: StoreUnavailable) -> None:
        """Now and then: reads go on, and whoever writes tries again in silence."""
        now = self.clock.monotonic()
        if self._told is None or now - self._told >= TELL_AGAIN_S:
            self._told = now
            log.error("%s", full)

    def _unknown(self, connection: Connection, why: str, repeatable: bool) -> StoreUnavailable:
        self.pool.suspect(connection)
        kind = _Again if repeatable else StoreUnavailable
        return kind(
            f"the store did not answer ({why})",
            where=f"etcd at {connection.endpoint.target}",
            fix="" if repeatable else "What was asked may have been done, or may yet be; read before asking again",
        )


_LEAST_S = 0.05
"""A call that has come so far is given this much, even if its deadline is due."""
_SLACK_S = 0.5
"""gRPC keeps the deadline; asyncio's comes after it, for a stream that gRPC does not end."""
