"""Roles, callers and tokens: the identity of a caller, and which RPCs each role may call.

A *viewer* reads. A *submitter* also creates, changes and ends jobs. An *admin* does both in every namespace and manages the cluster.
Viewers and submitters have access to the namespaces of their token; other namespaces do not exist for them. A *node* is another daemon.
Only nodes read the load of engines and ranks, and no token grants the node role.

The table gives the lowest role for each RPC and whether the RPC is written to the audit log. An RPC without an entry is refused. The
token or client certificate of a call identifies the caller (`controllers.api.edge.gate`); a token takes precedence over a certificate.
Without authentication, which is allowed on loopback only, every caller is an unnamed admin. A revoked token becomes invalid when the
store's watch reports it. The token of `auth.admin_token_file` always grants the admin role.

Services call `may_see` with the namespace of what they return. A token's secret is returned once, when the token is created.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from controllers.api.edge.errors import CallContext, NotFound, Unauthenticated, bad_field, handle_errors
from gcore.api.tls import EVERY, CertName, check_user, parse_cert_name
from gcore.api.tokens import DEFAULT_S, KEPT_S, LONGEST_S, MOST_TOKENS, TokenRecord, UserToken, new_token, parse_token
from gcore.api.v1 import access_pb2 as pb
from gcore.api.v1 import access_pb2_grpc
from gcore.errors import GcoreError, StoreUnavailable, UsageError
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.keys import DEFAULT_NAMESPACE
from gcore.store.types import Compare, Delete, Put, Store, WatchBatch
from gcore.system.clock import Clock

OPEN = "/grpc.health.v1.Health/"
"""Path prefix of the health service's RPCs, which need no authentication."""

log = logging.getLogger(__name__)

FIRST_ADMIN = "first-admin"
"""The caller's name for the token in the configured file."""

HOW = (
    "Send a token (create one with `gcore token create`, set it in GCORE_TOKEN or the context) or a client certificate"
)


class Role(IntEnum):
    """The roles of callers. A higher role includes the permissions of the lower ones."""

    VIEWER = 1
    SUBMITTER = 2
    ADMIN = 3
    NODE = 4

    @property
    def word(self) -> str:
        """The role as users write it."""
        return self.name.lower()


USER_ROLES: Mapping[str, Role] = MappingProxyType(
    {role.word: role for role in (Role.VIEWER, Role.SUBMITTER, Role.ADMIN)}
)
"""The roles that a token or a user's certificate may have."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an RPC: name, role and the namespaces that it may access (None: all). An empty name means that the
    daemon does not authenticate callers."""

    name: str
    role: Role
    namespaces: frozenset[str] | None = None

    def may_see(self, namespace: str) -> bool:
        """Whether this caller has access to `namespace`."""
        return self.namespaces is None or namespace in self.namespaces

    @property
    def home(self) -> str:
        """The namespace of the caller's new jobs, and of names that are given without a namespace: `default` if the
        caller may access it, otherwise the first of its namespaces."""
        if self.may_see(DEFAULT_NAMESPACE):
            return DEFAULT_NAMESPACE
        return min(self.namespaces or (DEFAULT_NAMESPACE,))


NOBODY_IS_TOLD_APART = Caller("", Role.ADMIN)


_caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY_IS_TOLD_APART)


def current_caller() -> Caller:
    """The caller of the RPC that this task serves."""
    return _caller.get()


def may_see(namespace: str) -> bool:
    """Whether the current caller has access to `namespace`."""
    return current_caller().may_see(namespace)


def set_caller(one: Caller) -> None:
    """Set the caller for the rest of this task."""
    _caller.set(one)


@contextlib.contextmanager
def acting_as(one: Caller) -> Iterator[None]:
    """Set the caller within a `with` block: code in it is served as if `one` had made the call."""
    token = _caller.set(one)
    try:
        yield
    finally:
        _caller.reset(token)


@dataclass(frozen=True, slots=True)
class AccessRule:
    """The access rule of one RPC: the lowest role that may call it, and whether it changes anything."""

    least: Role
    changes: bool = False
    """Whether the RPC changes anything. Every call of such an RPC is written to the audit log; of other RPCs, only
    refused calls."""


def _reads(least: Role = Role.VIEWER) -> AccessRule:
    return AccessRule(least)


def _changes(least: Role = Role.SUBMITTER) -> AccessRule:
    return AccessRule(least, changes=True)


TABLE: Mapping[str, AccessRule] = MappingProxyType(
    {
        "/gcore.api.v1.Jobs/CreateJob": _changes(),
        "/gcore.api.v1.Jobs/GetJob": _reads(),
        "/gcore.api.v1.Jobs/ListJobs": _reads(),
        "/gcore.api.v1.Jobs/WatchJob": _reads(),
        "/gcore.api.v1.Jobs/StreamLogs": _reads(),
        "/gcore.api.v1.Jobs/StreamMetrics": _reads(),
        "/gcore.api.v1.Jobs/UpdateJob": _changes(),
        "/gcore.api.v1.Jobs/PauseJob": _changes(),
        "/gcore.api.v1.Jobs/ResumeJob": _changes(),
        "/gcore.api.v1.Jobs/CancelJob": _changes(),
        "/gcore.api.v1.Jobs/DeleteJob": _changes(),
        "/gcore.api.v1.Jobs/RunEval": _changes(),
        "/gcore.api.v1.Jobs/ListShards": _reads(),
        "/gcore.api.v1.Jobs/AuditJob": _reads(),
        "/gcore.api.v1.Jobs/GetSamples": _reads(),
        "/gcore.api.v1.Jobs/GetBooks": _reads(),
        "/gcore.api.v1.Jobs/ListCheckpoints": _reads(),
        "/gcore.api.v1.Jobs/GetPlacement": _reads(),
        "/gcore.api.v1.Jobs/PinPlacement": _changes(),
        "/gcore.api.v1.Jobs/ListNodes": _reads(),
        "/gcore.api.v1.Jobs/DrainNode": _changes(Role.ADMIN),
        "/gcore.api.v1.Jobs/GetUsage": _reads(),
        "/gcore.api.v1.Jobs/GetQuotas": _reads(),
        "/gcore.api.v1.Jobs/SetQuota": _changes(Role.ADMIN),
        "/gcore.api.v1.Placement/Loads": _reads(Role.NODE),
        "/gcore.api.v1.Files/List": _reads(Role.SUBMITTER),
        "/gcore.api.v1.Files/Read": _reads(Role.SUBMITTER),
        "/gcore.api.v1.TrainRank/Feed": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Apply": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Accumulate": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Release": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Restore": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Watch": _reads(Role.NODE),
        "/gcore.api.v1.Access/WhoAmI": _reads(),
        "/gcore.api.v1.Access/CreateToken": _changes(Role.ADMIN),
        "/gcore.api.v1.Access/ListTokens": _reads(Role.ADMIN),
        "/gcore.api.v1.Access/RevokeToken": _changes(Role.ADMIN),
    }
)


TOOLS: Mapping[str, AccessRule] = MappingProxyType(
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _reads()}
)
"""Services that are not gcore's; served only if the node's configuration enables them."""


def access_refusal(one: Caller, method: str) -> str | None:
    """A sentence why the caller `one` may not call the RPC `method` (its full gRPC path); None if it may."""
    row = TABLE.get(method) or TOOLS.get(method)
    if row is None:
        return f"{method[:200]} is not in the role table, so no caller may use it"
    if one != NOBODY_IS_TOLD_APART and one.role < row.least:
        verb = method.rpartition("/")[2]
        return f"{verb} needs the role {row.least.word}, but {one.name or 'the caller'} has the role {one.role.word}"
    return None


class NoCredentials(Unauthenticated):
    """The call has neither a token nor a certificate."""

    reason = "NO_CREDENTIALS"


class BadToken(Unauthenticated):
    """The token is malformed, unknown to this cluster, or revoked."""

    reason = "BAD_TOKEN"


class TokenExpired(Unauthenticated):
    """The token has expired."""

    reason = "TOKEN_EXPIRED"


class BadCertificate(Unauthenticated):
    """The cluster's authority signed the certificate, but it names no node or user of gcore."""

    reason = "BAD_CERTIFICATE"


class Authenticator:
    """Authenticates callers by token or certificate, with a copy of the store's tokens that `watch` keeps current. If
    `required` is false, nothing is authenticated and every caller is an unnamed admin. Thread-safe."""

    def __init__(self, clock: Clock, *, required: bool = False, admin_file: Path | None = None) -> None:
        """`admin_file`: a file with a token that always grants the admin role. Raises UsageError if it contains no
        token."""
        self._clock = clock
        self.required = required
        self._first = None if admin_file is None else read_token(admin_file)
        self._known: dict[str, TokenRecord] = {}
        self._is_loaded = False

    async def watch(self, store: Store) -> None:
        """Keep the copy of the store's tokens current; never returns."""
        async for batch in store.watch(keys.TOKENS):
            self.note(batch)

    def note(self, batch: WatchBatch) -> None:
        """Apply a change of the store's tokens to the copy."""
        known = {} if batch.reset else dict(self._known)
        for event in batch.events:
            token_id = event.kv.key.removeprefix(keys.TOKENS)
            known.pop(token_id, None)
            if event.kind == "put":
                try:
                    known[token_id] = TokenRecord.decode(event.kv.value, event.kv.key)
                except UnreadableRecord as error:
                    log.error("ignoring an unreadable token record: %s", error)
        self._known, self._is_loaded = known, True

    def caller(self, authorization: str | None, uris: Iterable[str] | None) -> Caller:
        """The caller with this `authorization` header and these certificate URIs (None: no certificate).

        Raises Unauthenticated, and StoreUnavailable until the tokens were read from the store.
        """
        if not self.required:
            return NOBODY_IS_TOLD_APART
        if authorization is not None:
            scheme, _, text = authorization.partition(" ")
            if scheme.lower() != "bearer":
                raise BadToken("the `authorization` header is not a Bearer token", fix=HOW)
            return self.by_token(text.strip())
        if uris is not None:
            return caller_by_certificate(uris)
        raise NoCredentials("the call has no credentials", fix=HOW)

    def by_token(self, text: str) -> Caller:
        """The caller with this token. Raises Unauthenticated, StoreUnavailable."""
        token = parse_token(text)
        if token is None:
            raise BadToken("the token is malformed", fix="Copy the whole token, which begins with gcore_")
        if self._first is not None and token.id == self._first.id and token.is_of(self._first.sha256):
            return Caller(FIRST_ADMIN, Role.ADMIN)
        if not self._is_loaded:
            raise StoreUnavailable(
                "this controller has not read the tokens from the store yet", fix="Retry in a few seconds"
            )
        record = self._known.get(token.id)
        if record is None or not token.is_of(record.sha256):
            raise BadToken("the token is unknown to this cluster or was revoked", fix=HOW)
        if self._clock.wall() >= record.expires:
            raise TokenExpired(f"token {record.id} of {record.name} has expired", fix="Ask an admin for a new one")
        try:
            return _user(record.whose)
        except UsageError as error:
            raise BadToken(f"the token's record is invalid ({error})", fix=HOW) from error


def caller_by_certificate(uris: Iterable[str]) -> Caller:
    """The caller with a certificate that the cluster's authority signed. Raises Unauthenticated."""
    whose = parse_cert_name(uris)
    if whose is None:
        raise BadCertificate(
            "the certificate names no node or user of gcore", fix="Create one with `gcore certs issue NAME --for user`"
        )
    return Caller(whose.name, Role.NODE) if whose.kind == "node" else _user(whose)


def _user(whose: CertName) -> Caller:
    role = USER_ROLES[whose.role]
    every = role is Role.ADMIN or EVERY in whose.namespaces
    return Caller(whose.name, role, None if every else whose.namespaces)


def read_token(file: Path) -> UserToken:
    """Read a token from its file. Raises UsageError."""
    fix = f"Create one with `gcore token first-admin --to {file}`"
    try:
        if file.stat().st_mode & 0o077:
            raise UsageError("other users can read the token's file", where=str(file), fix=f"chmod 600 {file}")
        token = parse_token(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"the token cannot be read ({why})", where=str(file), fix=fix) from error
    if token is None:
        raise UsageError("the file contains no token", where=str(file), fix=fix)
    return token


class TokenNotFound(NotFound):
    """There is no token of that id."""

    reason = "TOKEN_NOT_FOUND"


class AccessService(access_pb2_grpc.AccessServicer):
    """Implements gcore.api.v1.Access: creates, lists and revokes tokens."""

    def __init__(self, store: Store, clock: Clock, trouble: Any = str) -> None:
        """`trouble`: returns the known reason why the store is unavailable, or nothing."""
        self._store = store
        self._clock = clock
        self.trouble = trouble

    @handle_errors
    async def WhoAmI(self, request: pb.WhoAmIRequest, context: CallContext) -> pb.WhoAmIReply:
        """Return the caller as the daemon identified it."""
        me = current_caller()
        return pb.WhoAmIReply(
            name=me.name,
            role=me.role.word,
            namespaces=[EVERY] if me.namespaces is None else sorted(me.namespaces),
            namespace=me.home,
        )

    @handle_errors
    async def CreateToken(self, request: pb.CreateTokenRequest, context: CallContext) -> pb.CreateTokenReply:
        """Create a token. The response is the only place where its secret is shown."""
        lifetime_s = request.lifetime_s or DEFAULT_S
        if not 0 < lifetime_s <= LONGEST_S:
            raise bad_field(
                "lifetime_s", f"{request.lifetime_s} is not a valid lifetime", "Give seconds, at most ten years"
            )
        try:
            check_user(request.name, request.role, request.namespaces, "the token")
        except UsageError as error:
            raise bad_field(_field_of(error), error.what, error.fix) from error
        await self._sweep()
        token, now = new_token(), self._clock.wall()
        record = TokenRecord(
            id=token.id,
            name=request.name,
            role=request.role,
            namespaces=tuple(sorted(set(request.namespaces))),
            sha256=token.sha256,
            created=now,
            expires=now + lifetime_s,
            created_by=current_caller().name,
        )
        key = keys.token(token.id)
        won = await self._store.transact([Compare(key, 0)], [Put(key, record.encode())])
        if not won.won:
            raise GcoreError("another token already has this random id", fix="Retry the request")
        return pb.CreateTokenReply(token=_token_info(record), secret=token.text)

    @handle_errors
    async def ListTokens(self, request: pb.ListTokensRequest, context: CallContext) -> pb.ListTokensReply:
        """List all tokens."""
        records = sorted(await self._records(), key=lambda one: (one.name, one.id))
        return pb.ListTokensReply(tokens=[_token_info(record) for record in records])

    @handle_errors
    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: CallContext) -> pb.RevokeTokenReply:
        """Revoke a token."""
        key = keys.token(request.id)
        known = await self._store.get(key) if request.id and len(request.id) < 64 else None
        if known is None:
            raise TokenNotFound(f"there is no token {request.id[:40]!r}", fix="`gcore token list` shows their ids")
        await self._store.transact([], [Delete(key)])
        try:
            return pb.RevokeTokenReply(token=_token_info(TokenRecord.decode(known.value, key)))
        except UnreadableRecord:
            return pb.RevokeTokenReply(token=pb.TokenInfo(id=request.id))

    async def _records(self) -> list[TokenRecord]:
        found = []
        for kv in (await self._store.list(keys.TOKENS)).kvs:
            try:
                found.append(TokenRecord.decode(kv.value, kv.key))
            except UnreadableRecord:
                found.append(
                    TokenRecord(
                        id=kv.key.removeprefix(keys.TOKENS), name="?", role="?", sha256="", created=0, expires=0
                    )
                )
        return found

    async def _sweep(self) -> None:
        """Delete long-expired tokens before a new one is created. Raises GcoreError if there are too many tokens."""
        records, now = await self._records(), self._clock.wall()
        gone = [one for one in records if one.role != "?" and one.expires + KEPT_S < now]
        for one in gone[:64]:
            await self._store.transact([], [Delete(keys.token(one.id))])
        if len(records) - len(gone) >= MOST_TOKENS:
            raise GcoreError(f"there are {MOST_TOKENS} tokens already", fix="Revoke unused tokens")


def _field_of(error: UsageError) -> str:
    return "role" if "role" in error.what else "namespaces" if "namespace" in error.what else "name"


def _token_info(record: TokenRecord) -> pb.TokenInfo:
    every = record.role == "admin"
    return pb.TokenInfo(
        id=record.id,
        name=record.name,
        role=record.role,
        namespaces=[EVERY] if every else record.namespaces,
        created=record.created,
        expires=record.expires,
        created_by=record.created_by,
    )
