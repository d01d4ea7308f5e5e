"""What a gRPC server of gcore shows of itself, and, of those that serve nodes alone, whom it lets in.

A server has one certificate, read anew when its files have changed: each connection is made with the newest. Where client
certificates are asked for, whoever has none of the cluster's authority does not get through the handshake; a train rank then serves nodes
only (`NodesOnly`), for a user's certificate is of the same authority. Who calls is asked when a call begins, not when its request has come.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from gcore.errors import UsageError
from gcore.rpc_handlers import Handler, LateRequest, answer_of, early, request_of
from gcore.tls.material import Pem, Watched
from gcore.tls.names import SCHEME, name_in


def server_credentials(watched: Watched, *, mutual: bool) -> grpc.ServerCredentials:
    """`mutual`: whether clients must show a certificate, too."""
    given = [watched.pem]
    first = _configuration(given[0], mutual=mutual)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        newest = watched.pem
        if newest is given[0]:
            return None
        given[0] = newest
        return _configuration(newest, mutual=mutual)

    return grpc.dynamic_ssl_server_credentials(first, fetch, mutual)  # type: ignore[arg-type]


def _configuration(pem: Pem, *, mutual: bool) -> grpc.ServerCertificateConfiguration:
    if pem.key is None or pem.cert is None:
        raise UsageError("a server has a certificate and its key", where="tls", fix="Name both: cert and key")
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca if mutual else None)


class NodesOnly(grpc.aio.ServerInterceptor):
    """Refuses, with PERMISSION_DENIED, whoever is no node of the cluster."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        either = answer_of(handler)

        async def answered(requests: AsyncIterator[Any], context: Any) -> Any:
            return await either(await _admitted(handler, requests, context), context)

        async def streamed(requests: AsyncIterator[Any], context: Any) -> Any:
            async with aclosing(either(await _admitted(handler, requests, context), context)) as answers:
                async for one in answers:
                    yield one

        return early(handler, streamed if handler.response_streaming else answered)


async def _admitted(handler: Handler, requests: AsyncIterator[Any], context: Any) -> Any:
    """The request of a node."""
    names = (value.decode(errors="replace") for value in context.auth_context().get("peer_uri", ()))
    whose = name_in([name for name in names if name.startswith(f"{SCHEME}://")])
    if whose is None or whose.kind != "node":
        await _refuse(
            context, grpc.StatusCode.PERMISSION_DENIED, "train ranks serve nodes of the cluster, and nobody else"
        )
    try:
        return await request_of(handler, requests)
    except LateRequest as error:
        await _refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    except UsageError as error:
        await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))


async def _refuse(context: Any, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError("abort raises")
