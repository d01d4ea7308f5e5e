"""Connections to etcd's members, and single calls: deadline, authentication, the meaning of errors, and retries.

Each endpoint has its own channel, so that a host name is checked against that host's certificate, and another member
can be used if one does not answer. The first ready endpoint is used until it fails; the order is a preference, so put
the nearest first. A member that accepts connections but does not answer is *suspect* and is used last until it answers
again.

A call that may be repeated (a read or a keep-alive) is retried until its deadline. Any other call is sent once. It is
sent again only if the failure proves that etcd never began it:

- there was no connection, so nothing was sent;
- etcd rejected it before proposing it (no leader, too many requests, an expired token).

After any other failure the outcome of such a call is unknown, which is reported as `StoreUnavailable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TypeAlias, TypeVar
from urllib.parse import urlsplit

import grpc
from aetcd.rpc import AuthenticateRequest, AuthStub, KVStub, LeaseStub, MaintenanceStub, WatchStub
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from gcore.errors import LeaseLost, StoreUnavailable, Unreachable, UsageError
from gcore.system.clock import Clock
from gcore.system.concurrency import limit_time
from gcore.system.network import join_host_port, open_channel

log = logging.getLogger(__name__)

SUSPECT_GRACE_S = 1.0
"""Maximum seconds to wait for endpoints that are not suspect before a suspect one is used."""

HEAD_START_S = 0.1
"""Seconds for which only the preferred endpoint may become ready. Longer than a connection takes, but not noticeable.
"""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # separate connections, whose state belongs to this store alone
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Pings detect a stopped or disconnected peer while a watch waits. etcd rejects more than one per 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the effective timeout in gRPC 1.6x and later; the default is a minute
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class EtcdEndpoint:
    """Address of an etcd member. `secure`: whether it was written with https."""

    host: str
    port: int
    secure: bool = False

    @classmethod
    def parse(cls, text: str) -> EtcdEndpoint:
        """Parse `host:port` or `[v6]:port`, optionally with http:// or https://. Raises UsageError."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or port is None or parts.scheme not in ("http", "https") or parts.path not in ("", "/"):
            raise UsageError(
                f"{text!r} is not an etcd endpoint", fix="Write host:port, http://host:port or https://host:port"
            )
        return cls(host, port, parts.scheme == "https")

    @property
    def target(self) -> str:
        """The address as host:port, as gRPC expects it."""
        return join_host_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class StoreTls:
    """PEM files for TLS to etcd. `cert` and `key`: the client's own.

    `ca`: authority that signed etcd's certificates; None: the system's authorities.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Load the credentials. Raises UsageError if a file cannot be read, or if only one of cert and key is set."""
        if (self.cert is None) != (self.key is None):
            raise UsageError("only one of etcd client certificate and key is set", fix="Set both or neither")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes when the files change: modification time, size and inode. Raises OSError."""
        found = (path.stat() for path in (self.ca, self.cert, self.key) if path is not None)
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


@dataclass(frozen=True, slots=True)
class StoreUser:
    """Name and password of an etcd user."""

    name: str
    password: str = field(repr=False)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror})", where="etcd TLS", fix="Check the path and its permissions"
        ) from error


class EtcdConnection:
    """A gRPC channel to one endpoint, with the stubs of etcd's services."""

    def __init__(self, endpoint: EtcdEndpoint, channel: grpc.aio.Channel) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.kv = KVStub(channel)
        self.lease = LeaseStub(channel)
        self.watch = WatchStub(channel)
        self.auth = AuthStub(channel)
        self.maintenance = MaintenanceStub(channel)

    def is_ready(self) -> bool:
        """Return whether the connection is established; start connecting if it is not."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


class ConnectionPool:
    """Connections to all members, and the choice of the one to use.

    If no connection is ready and the certificate files in `tls` have changed, the pool reconnects with the new files
    (`again` opens the new connections). So renewed certificates take effect without a restart, and working connections
    are not touched.
    """

    def __init__(
        self,
        connections: Sequence[EtcdConnection],
        tls: StoreTls | None = None,
        again: Callable[[], Sequence[EtcdConnection]] | None = None,
    ) -> None:
        self._connections = tuple(connections)
        self._tls = tls
        self._again = again
        self._stamp = None if tls is None else _stamp_of(tls)
        self._closing: set[asyncio.Future[None]] = set()
        self._current = 0
        self._suspects: set[EtcdConnection] = set()

    @classmethod
    def open(cls, endpoints: Sequence[str], tls: StoreTls | None) -> ConnectionPool:
        """Create connections that connect when they are used, with TLS if `tls` is given or an endpoint has https.

        Raises UsageError.
        """
        parsed = [EtcdEndpoint.parse(text) for text in endpoints]
        if not parsed:
            raise UsageError("there are no etcd endpoints", fix="Give at least one host:port")
        return cls(_made(parsed, tls), tls, lambda: _made(parsed, tls))

    def __len__(self) -> int:
        return len(self._connections)

    def __str__(self) -> str:
        return ", ".join(connection.endpoint.target for connection in self._connections)

    async def ready(self, within_s: float) -> EtcdConnection | None:
        """Return an established connection, preferably that of the last call; None if there is none in `within_s`
        seconds.
        """
        start = self._current
        ordered = self._connections[start:] + self._connections[:start]
        trusted = tuple(c for c in ordered if c not in self._suspects)
        found = trusted[0] if trusted and trusted[0].is_ready() else None
        if found is None and not any(connection.is_ready() for connection in ordered) and self._renew():
            ordered = trusted = self._connections
        if found is None and trusted and len(self._connections) > 1:
            head_start = min(HEAD_START_S, within_s / 2)
            found = await _first_ready(trusted[:1], head_start)
            within_s -= head_start
        if found is None and trusted and self._suspects:
            grace = min(SUSPECT_GRACE_S, within_s / 2)
            found = await _first_ready(trusted, grace)
            within_s -= grace
        if found is None:
            found = await _first_ready(ordered, within_s)
        if found is not None:
            self._current = self._connections.index(found)
        return found

    def _renew(self) -> bool:
        """Reconnect to all members if the certificate files have changed. Return whether they have."""
        if self._tls is None or self._again is None or (stamp := _stamp_of(self._tls)) == self._stamp:
            return False
        try:
            made = tuple(self._again())
        except UsageError as error:
            log.warning("the store's certificates changed but cannot be used: %s", error)
            return False
        log.info("reconnecting to the store with new certificates")
        for old in self._connections:
            closing = asyncio.ensure_future(old.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._stamp, self._connections, self._current = stamp, made, 0
        self._suspects.clear()
        return True

    @property
    def all(self) -> tuple[EtcdConnection, ...]:
        """All connections, in the order of the endpoints."""
        return self._connections

    def suspect(self, connection: EtcdConnection) -> None:
        """Mark a connection as suspect, because it did not answer. Others are preferred."""
        self._suspects.add(connection)

    def answered(self, connection: EtcdConnection) -> None:
        """Note that a connection answered, so that it is no longer suspect."""
        self._suspects.discard(connection)

    async def close(self) -> None:
        """Close all channels and cancel running calls."""
        for connection in self._connections:
            await connection.channel.close()


def _made(endpoints: Sequence[EtcdEndpoint], tls: StoreTls | None) -> list[EtcdConnection]:
    """Open channels to the endpoints. Raises UsageError."""
    credentials = (tls or StoreTls()).credentials() if tls or any(e.secure for e in endpoints) else None
    connections = []
    for endpoint in endpoints:
        if credentials is not None and (tls is not None or endpoint.secure):
            channel = open_channel(endpoint.target, credentials, _OPTIONS)
        else:
            channel = open_channel(endpoint.target, options=_OPTIONS)
        connections.append(EtcdConnection(endpoint, channel))
    return connections


def _stamp_of(tls: StoreTls) -> tuple[tuple[int, int, int], ...] | None:
    try:
        return tls.stamp()
    except OSError:
        return None


async def _first_ready(connections: Sequence[EtcdConnection], within_s: float) -> EtcdConnection | None:
    """Wait up to `within_s` seconds until any connection is established, and return the first such one in order, or
    None.
    """
    waits = [asyncio.ensure_future(connection.channel.channel_ready()) for connection in connections]
    try:
        await asyncio.wait(waits, timeout=max(within_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        return next(
            (
                connection
                for connection, wait in zip(connections, waits, strict=True)
                if wait.done() and not wait.cancelled() and wait.exception() is None
            ),
            None,
        )
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


T = TypeVar("T")
Metadata: TypeAlias = tuple[tuple[str, str], ...]

Action: TypeAlias = Callable[[EtcdConnection, Metadata, float], Awaitable[T]]
"""A function that makes one call, given the connection, gRPC metadata, and timeout in seconds."""


class StoreRefused(Unreachable):
    """etcd rejected the request because of the user, a permission, or the request itself."""


class RevisionCompacted(Exception):
    """The requested revision was compacted, so a listing or watch must start over. Internal to this package."""


class StreamEnded(Exception):
    """etcd closed a stream without an error. Internal to this package."""


class _Again(StoreUnavailable):
    """A failure after which the call may be sent again."""


class ErrorClass(Enum):
    """What an error of etcd means for the call.

    LEASE_GONE: the lease has ended. COMPACTED: the revision is no longer available. TOKEN_STALE: authenticate again.
    NOT_BEGUN: etcd did not begin the request, so it may be repeated. FULL: the database is full. REFUSED: because of
    the user, a permission, or the request itself. UNKNOWN: a write may have happened.
    """

    LEASE_GONE = auto()
    COMPACTED = auto()
    TOKEN_STALE = auto()
    NOT_BEGUN = auto()
    FULL = auto()
    REFUSED = auto()
    UNKNOWN = auto()


def classify_error(code: grpc.StatusCode, details: str) -> ErrorClass:
    """Classify an error of etcd by its text, which is more specific than the code, and the same in 3.4, 3.5 and 3.6."""
    table = (
        ("requested lease not found", ErrorClass.LEASE_GONE),
        ("required revision has been compacted", ErrorClass.COMPACTED),
        ("invalid auth token", ErrorClass.TOKEN_STALE),
        ("revision of auth store is old", ErrorClass.TOKEN_STALE),
        ("etcdserver: no leader", ErrorClass.NOT_BEGUN),
        ("too many requests", ErrorClass.NOT_BEGUN),
        ("database space exceeded", ErrorClass.FULL),
    )
    for words, meaning in table:
        if words in details:
            return meaning
    if code in REFUSALS:
        return ErrorClass.REFUSED
    return ErrorClass.UNKNOWN


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


class EtcdCaller:
    """Makes calls over a pool of connections, each with the timeout `timeout_s`."""

    def __init__(self, pool: ConnectionPool, clock: Clock, *, user: StoreUser | None, timeout_s: float) -> None:
        self.pool = pool
        self.clock = clock
        self.timeout_s = timeout_s
        self._user = user
        self._token: str | None = None
        self._last_warning: float | None = None
        """Monotonic time at which a full database was last logged."""

    async def call(self, action: Action[T], *, repeatable: bool, within_s: float | None = None) -> T:
        """Make a call, with retries until the timeout, and return its response.

        `repeatable`: whether the call may be sent again although etcd may have executed it. `within_s`: timeout in
        seconds; None: the default. Raises StoreUnavailable, StoreRefused, LeaseLost, RevisionCompacted.
        """
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

    async def connection(self, within_s: float, *, repeatable: bool = True) -> EtcdConnection:
        """Return an established connection within `within_s` seconds.

        Raises StoreUnavailable; if not `repeatable`, the error says that nothing was sent.
        """
        connection = await self.pool.ready(within_s)
        if connection is None:
            raise _Again(
                f"the store cannot be reached, tried for {within_s:.1f} s",
                where=f"etcd at {self.pool}",
                fix="Check that etcd runs there, and that both sides use the same TLS settings"
                + ("" if repeatable else "; nothing was sent"),
            )
        return connection

    async def metadata(self, connection: EtcdConnection, within_s: float) -> Metadata:
        """Return the gRPC metadata of a call: the user's token, which may need a call to etcd to authenticate.

        `hasleader` makes a member without a leader report an error instead of waiting.
        """
        if self._user is None:
            return (("hasleader", "true"),)
        if self._token is None:
            request = AuthenticateRequest(name=self._user.name, password=self._user.password)
            answer = await connection.auth.Authenticate(request, timeout=within_s)
            self._token = str(answer.token)
        return (("hasleader", "true"), ("token", self._token))

    def forget_token(self) -> None:
        """Discard the user's token, so that the next call authenticates again."""
        self._token = None

    async def _attempt(self, action: Action[T], deadline: float, repeatable: bool) -> T:
        connection = await self.connection(deadline - self.clock.monotonic(), repeatable=repeatable)
        left = max(deadline - self.clock.monotonic(), _LEAST_S)
        # A repeatable call leaves time for another member, in case this one hangs.
        within = left / 2 if repeatable and len(self.pool) > 1 else left
        sent = False
        try:
            async with limit_time(within + _SLACK_S):
                metadata = await self.metadata(connection, within)
                sent = True
                answer = await action(connection, metadata, within)
        except grpc.aio.AioRpcError as error:
            raise self._translated(connection, error, repeatable or not sent) from error
        except (StreamEnded, asyncio.InvalidStateError, TimeoutError) as error:
            raise self._unknown(connection, f"{type(error).__name__} {error}", repeatable or not sent) from error
        self.pool.answered(connection)
        return answer

    def _translated(self, connection: EtcdConnection, error: grpc.aio.AioRpcError, repeatable: bool) -> Exception:
        code, details = error.code(), error.details() or ""
        match classify_error(code, details):
            case ErrorClass.UNKNOWN:
                return self._unknown(connection, f"{code.name}: {details}", repeatable)
            case ErrorClass.NOT_BEGUN:
                self.pool.suspect(connection)
                return _Again(f"the store is not ready ({details})", where=f"etcd at {connection.endpoint.target}")
            case ErrorClass.TOKEN_STALE:
                self.forget_token()
                return _Again(f"the store rejects the user's token ({details})", where=f"etcd at {self.pool}")
            case ErrorClass.FULL:
                full = StoreUnavailable(
                    "the store's database is full",
                    where=f"etcd at {connection.endpoint.target}",
                    fix="Compact and defragment it, raise --quota-backend-bytes, then disarm the alarm",
                )
                self._tell(full)
                return full
            case ErrorClass.LEASE_GONE:
                return LeaseLost("the lease has ended", fix="Open a new session; the keys under the lease are deleted")
            case ErrorClass.COMPACTED:
                return RevisionCompacted(details)
            case ErrorClass.REFUSED:
                return StoreRefused(
                    f"the store rejects the request ({code.name}: {details})",
                    where=f"etcd at {connection.endpoint.target}",
                    fix="Check the etcd user, its permissions and etcd's version (3.4 or later)",
                )

    def _tell(self, full: StoreUnavailable) -> None:
        """Log a full database, at most once per `TELL_AGAIN_S`: reads still work, and writers retry silently."""
        now = self.clock.monotonic()
        if self._last_warning is None or now - self._last_warning >= TELL_AGAIN_S:
            self._last_warning = now
            log.error("%s", full)

    def _unknown(self, connection: EtcdConnection, why: str, repeatable: bool) -> StoreUnavailable:
        self.pool.suspect(connection)
        kind = _Again if repeatable else StoreUnavailable
        return kind(
            f"the store did not answer ({why})",
            where=f"etcd at {connection.endpoint.target}",
            fix="" if repeatable else "The write may have happened or may still happen; read before repeating it",
        )


_LEAST_S = 0.05
"""Minimum timeout in seconds of a call for which a connection was found, even if its deadline has passed."""

_SLACK_S = 0.5
"""Seconds after gRPC's own timeout at which asyncio ends a call, for streams that gRPC does not end."""
