"""The client of the Access service: whom a call is taken for, and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gcore.api.v1 import access_pb2 as pb
from gcore.api.v1 import access_pb2_grpc
from gcore.client.calling import Calls
from gcore.rpc_schema import VersionedStub


class AccessClient(Calls):
    """Any controller answers. Use it as an async context manager."""

    async def who_am_i(self) -> pb.WhoAmIReply:
        """Whom the calls of this client are taken for."""
        return await self._anywhere("ask who calls", lambda s, t: s.WhoAmI(pb.WhoAmIRequest(), timeout=t))

    async def create_token(
        self, name: str, role: str, namespaces: Sequence[str], lifetime_s: float
    ) -> pb.CreateTokenReply:
        """Make a token: at the first controller that answers, once. One whose answer got lost is to be revoked."""
        request = pb.CreateTokenRequest(name=name, role=role, namespaces=namespaces, lifetime_s=lifetime_s)
        return await self._anywhere("make the token", lambda s, t: s.CreateToken(request, timeout=t))

    async def list_tokens(self) -> pb.ListTokensReply:
        """All there are, without their secrets."""
        return await self._anywhere("list the tokens", lambda s, t: s.ListTokens(pb.ListTokensRequest(), timeout=t))

    async def revoke_token(self, token_id: str) -> pb.RevokeTokenReply:
        """End a token."""
        request = pb.RevokeTokenRequest(id=token_id)
        return await self._anywhere("revoke the token", lambda s, t: s.RevokeToken(request, timeout=t))

    def _stub(self, address: str) -> Any:
        channel = self._channel(address)
        return VersionedStub(access_pb2_grpc.AccessStub(channel), more=self._connector.metadata(address))
