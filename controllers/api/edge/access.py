"""Roles, callers and tokens: who makes a call, and what the role table of every RPC allows.

A *viewer* reads, a *submitter* also begins, changes and ends jobs, an *admin* does both in every namespace and manages the
cluster. Viewers and submitters have the namespaces of their token; others do not exist for them. A *node* is another daemon; only
nodes read loads of engines and ranks, and no token makes a node.

The table names the least role of each RPC and whether the RPC is written to the audit log. An RPC without a row is refused. The call's
token or client certificate decides who the caller is (`controllers.api.edge.gate`); a token wins over a certificate. Where no
authentication is configured, which is allowed on loopback only, everybody is an admin without a name. A revoked token counts no
more as soon as the store's watch says so. The token of `auth.admin_token_file` is always an admin's.

Services ask `may_see` for the namespace of what they return. A token's secret is returned once, when it is created.
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
"""Answers everybody."""

log = logging.getLogger(__name__)

FIRST_ADMIN = "first-admin"
"""Who shows the token of the configuration's file."""

HOW = "Show a token (`gcore token create` makes one; GCORE_TOKEN or the context names it) or a client certificate"


class Role(IntEnum):
    """The roles of callers. A greater role may do all that a smaller one may."""

    VIEWER = 1
    SUBMITTER = 2
    ADMIN = 3
    NODE = 4

    @property
    def word(self) -> str:
        """The role as people write it."""
        return self.name.lower()


USER_ROLES: Mapping[str, Role] = MappingProxyType(
    {role.word: role for role in (Role.VIEWER, Role.SUBMITTER, Role.ADMIN)}
)
"""What a token or a person's certificate may say."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated caller of a call. `namespaces` None: all. `name` empty: nobody is told apart."""

    name: str
    role: Role
    namespaces: frozenset[str] | None = None

    def may_see(self, namespace: str) -> bool:
        """Whether what is in `namespace` is there for this caller."""
        return self.namespaces is None or namespace in self.namespaces

    @property
    def home(self) -> str:
        """The namespace in which the caller's jobs are, and names are looked up, if none is named."""
        if self.may_see(DEFAULT_NAMESPACE):
            return DEFAULT_NAMESPACE
        return min(self.namespaces or (DEFAULT_NAMESPACE,))


NOBODY_IS_TOLD_APART = Caller("", Role.ADMIN)


_caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY_IS_TOLD_APART)


def current_caller() -> Caller:
    """The caller of the call that this task serves."""
    return _caller.get()


def may_see(namespace: str) -> bool:
    """Whether what is in `namespace` is there for whoever calls."""
    return current_caller().may_see(namespace)


def set_caller(one: Caller) -> None:
    """Set the caller for whom this task acts from now on."""
    _caller.set(one)


@contextlib.contextmanager
def acting_as(one: Caller) -> Iterator[None]:
    """Act as the caller within a block."""
    token = _caller.set(one)
    try:
        yield
    finally:
        _caller.reset(token)


@dataclass(frozen=True, slots=True)
class AccessRule:
    """The least role that an RPC needs."""

    least: Role
    changes: bool = False
    """Whether it changes anything: then it is written to the audit log each time."""


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
"""What is no service of gcore's, and is there only where the node's configuration lets it be."""


def access_refusal(one: Caller, method: str) -> str | None:
    """Why `one` may not call an RPC, or None."""
    row = TABLE.get(method) or TOOLS.get(method)
    if row is None:
        return f"{method[:200]} is served to nobody: it is not in the role table"
    if one != NOBODY_IS_TOLD_APART and one.role < row.least:
        verb = method.rpartition("/")[2]
        return f"{verb} needs the role {row.least.word}, and {one.name or 'the caller'} is a {one.role.word}"
    return None


class NoCredentials(Unauthenticated):
    """The call has neither a token nor a certificate."""

    reason = "NO_CREDENTIALS"


class BadToken(Unauthenticated):
    """The token is malformed, not of this cluster, or revoked."""

    reason = "BAD_TOKEN"


class TokenExpired(Unauthenticated):
    """The token has expired."""

    reason = "TOKEN_EXPIRED"


class BadCertificate(Unauthenticated):
    """The cluster's authority signed the certificate, which names no node or user of gcore."""

    reason = "BAD_CERTIFICATE"


class Authenticator:
    """Authenticates callers by token or certificate. `required` False: all callers are the same, whatever a call shows. Any thread may ask."""

    def __init__(self, clock: Clock, *, required: bool = False, admin_file: Path | None = None) -> None:
        """Raises UsageError for an admin's file that has no token."""
        self._clock = clock
        self.required = required
        self._first = None if admin_file is None else read_token(admin_file)
        self._known: dict[str, TokenRecord] = {}
        self._heard = False

    async def watch(self, store: Store) -> None:
        """Hear of tokens, for ever."""
        async for batch in store.watch(keys.TOKENS):
            self.note(batch)

    def note(self, batch: WatchBatch) -> None:
        """Note a change of the tokens."""
        known = {} if batch.reset else dict(self._known)
        for event in batch.events:
            token_id = event.kv.key.removeprefix(keys.TOKENS)
            known.pop(token_id, None)
            if event.kind == "put":
                try:
                    known[token_id] = TokenRecord.decode(event.kv.value, event.kv.key)
                except UnreadableRecord as error:
                    log.error("passed over: %s", error)
        self._known, self._heard = known, True

    def caller(self, authorization: str | None, uris: Iterable[str] | None) -> Caller:
        """Whose a call is that shows this header and a certificate with these names (None: no certificate).

        Raises Unauthenticated; StoreUnavailable while it is not known which tokens there are.
        """
        if not self.required:
            return NOBODY_IS_TOLD_APART
        if authorization is not None:
            scheme, _, text = authorization.partition(" ")
            if scheme.lower() != "bearer":
                raise BadToken("the header `authorization` is no Bearer token", fix=HOW)
            return self.by_token(text.strip())
        if uris is not None:
            return caller_by_certificate(uris)
        raise NoCredentials("the call does not say whose it is", fix=HOW)

    def by_token(self, text: str) -> Caller:
        """Whose the token is. Raises Unauthenticated, StoreUnavailable."""
        token = parse_token(text)
        if token is None:
            raise BadToken("what was shown is no token", fix="A token begins with gcore_; copy all of it")
        if self._first is not None and token.id == self._first.id and token.is_of(self._first.sha256):
            return Caller(FIRST_ADMIN, Role.ADMIN)
        if not self._heard:
            raise StoreUnavailable(
                "which tokens there are was not heard from the store yet", fix="Ask again in a moment"
            )
        record = self._known.get(token.id)
        if record is None or not token.is_of(record.sha256):
            raise BadToken("the token is not one of this cluster, or was revoked", fix=HOW)
        if self._clock.wall() >= record.expires:
            raise TokenExpired(f"the token {record.id} of {record.name} has expired", fix="Have an admin make another")
        try:
            return _user(record.whose)
        except UsageError as error:
            raise BadToken(f"the token's record says nothing that holds ({error})", fix=HOW) from error


def caller_by_certificate(uris: Iterable[str]) -> Caller:
    """Whose a certificate is that the cluster's authority signed. Raises Unauthenticated."""
    whose = parse_cert_name(uris)
    if whose is None:
        raise BadCertificate(
            "the certificate does not say for whom of gcore it is", fix="`gcore certs issue NAME --for user` makes one"
        )
    return Caller(whose.name, Role.NODE) if whose.kind == "node" else _user(whose)


def _user(whose: CertName) -> Caller:
    role = USER_ROLES[whose.role]
    every = role is Role.ADMIN or EVERY in whose.namespaces
    return Caller(whose.name, role, None if every else whose.namespaces)


def read_token(file: Path) -> UserToken:
    """The token in a file of its own. Raises UsageError."""
    fix = f"`gcore token first-admin --to {file}` makes one"
    try:
        if file.stat().st_mode & 0o077:
            raise UsageError("others may read the token", where=str(file), fix=f"chmod 600 {file}")
        token = parse_token(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"the token cannot be read ({why})", where=str(file), fix=fix) from error
    if token is None:
        raise UsageError("there is no token in it", where=str(file), fix=fix)
    return token


class TokenNotFound(NotFound):
    """There is no token of that id."""

    reason = "TOKEN_NOT_FOUND"


class AccessService(access_pb2_grpc.AccessServicer):
    """Implements gcore.api.v1.Access: creates, lists and revokes tokens."""

    def __init__(self, store: Store, clock: Clock, trouble: Any = str) -> None:
        """`trouble`: why the store cannot be brought back, if that is known here."""
        self._store = store
        self._clock = clock
        self.trouble = trouble

    @handle_errors
    async def WhoAmI(self, request: pb.WhoAmIRequest, context: CallContext) -> pb.WhoAmIReply:
        """Whom this call is taken for."""
        me = current_caller()
        return pb.WhoAmIReply(
            name=me.name,
            role=me.role.word,
            namespaces=[EVERY] if me.namespaces is None else sorted(me.namespaces),
            namespace=me.home,
        )

    @handle_errors
    async def CreateToken(self, request: pb.CreateTokenRequest, context: CallContext) -> pb.CreateTokenReply:
        """Make a token."""
        lifetime_s = request.lifetime_s or DEFAULT_S
        if not 0 < lifetime_s <= LONGEST_S:
            raise bad_field("lifetime_s", f"{request.lifetime_s} is no lifetime", "Name seconds, ten years at most")
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
            raise GcoreError("another token has this id, by a chance that never comes", fix="Ask again")
        return pb.CreateTokenReply(token=_told(record), secret=token.text)

    @handle_errors
    async def ListTokens(self, request: pb.ListTokensRequest, context: CallContext) -> pb.ListTokensReply:
        """All there are."""
        records = sorted(await self._records(), key=lambda one: (one.name, one.id))
        return pb.ListTokensReply(tokens=[_told(record) for record in records])

    @handle_errors
    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: CallContext) -> pb.RevokeTokenReply:
        """Take a token back."""
        key = keys.token(request.id)
        known = await self._store.get(key) if request.id and len(request.id) < 64 else None
        if known is None:
            raise TokenNotFound(f"there is no token {request.id[:40]!r}", fix="`gcore token list` shows their ids")
        await self._store.transact([], [Delete(key)])
        try:
            return pb.RevokeTokenReply(token=_told(TokenRecord.decode(known.value, key)))
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
        """Those that expired long ago go when others are made; there are never more than so many."""
        records, now = await self._records(), self._clock.wall()
        gone = [one for one in records if one.role != "?" and one.expires + KEPT_S < now]
        for one in gone[:64]:
            await self._store.transact([], [Delete(keys.token(one.id))])
        if len(records) - len(gone) >= MOST_TOKENS:
            raise GcoreError(f"there are {MOST_TOKENS} tokens already", fix="Revoke those that nobody uses")


def _field_of(error: UsageError) -> str:
    return "role" if "role" in error.what else "namespaces" if "namespace" in error.what else "name"


def _told(record: TokenRecord) -> pb.TokenInfo:
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
