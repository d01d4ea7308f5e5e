"""Serves whose a call is, and the tokens of users: made, listed, taken back; by an admin alone. The secret is told once."""

from __future__ import annotations

from typing import Any

from controllers.service.access import Caller, caller
from controllers.service.refusals import NotFound, bad_field
from controllers.service.statuses import Context, edge
from gcore.api.v1 import access_pb2 as pb
from gcore.api.v1 import access_pb2_grpc
from gcore.clock import Clock
from gcore.errors import GcoreError, UsageError
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.types import Compare, Delete, Put, Store
from gcore.tls.names import EVERY, check_user
from gcore.tokens import DEFAULT_S, KEPT_S, LONGEST_S, MOST_TOKENS, TokenRecord, new_token


class TokenNotFound(NotFound):
    """There is no token of that id."""

    reason = "TOKEN_NOT_FOUND"


class AccessService(access_pb2_grpc.AccessServicer):
    """Implements gcore.api.v1.Access."""

    def __init__(self, store: Store, clock: Clock, trouble: Any = str) -> None:
        """`trouble`: why the store cannot be brought back, if that is known here."""
        self._store = store
        self._clock = clock
        self.trouble = trouble

    @edge
    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.WhoAmIReply:
        """Whom this call is taken for."""
        me = caller()
        return pb.WhoAmIReply(name=me.name, role=me.role.word, namespaces=_spaces(me), namespace=me.home)

    @edge
    async def CreateToken(self, request: pb.CreateTokenRequest, context: Context) -> pb.CreateTokenReply:
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
            created_by=caller().name,
        )
        key = keys.token(token.id)
        won = await self._store.transact([Compare(key, 0)], [Put(key, record.encode())])
        if not won.won:
            raise GcoreError("another token has this id, by a chance that never comes", fix="Ask again")
        return pb.CreateTokenReply(token=_told(record), secret=token.text)

    @edge
    async def ListTokens(self, request: pb.ListTokensRequest, context: Context) -> pb.ListTokensReply:
        """All there are."""
        records = sorted(await self._records(), key=lambda one: (one.name, one.id))
        return pb.ListTokensReply(tokens=[_told(record) for record in records])

    @edge
    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Context) -> pb.RevokeTokenReply:
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


def _spaces(one: Caller) -> list[str]:
    return [EVERY] if one.namespaces is None else sorted(one.namespaces)


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
