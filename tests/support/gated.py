"""A server behind authentication, over real gRPC and TLS, with every RPC of every service of gcore; and its clients."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import issued
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2_grpc

from controllers.api.edge.access import Authenticator, current_caller
from controllers.api.edge.gate import AccessGate, CallJournal
from controllers.api.edge.server import CallLimiter, HealthService, new_server
from gcore.api.rpc import VersionGate, parse_refusal, server_credentials, version_metadata
from gcore.api.tls import Connector, ReloadingFiles, TlsMaterial
from gcore.api.tokens import TokenRecord, new_token
from gcore.config.node import ApiConfig
from gcore.store import keys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.system.clock import SystemClock

Code = grpc.StatusCode
CLOCK = SystemClock()
WITHIN_S = 2.0
"""To the request of a call. Tests whose calls bring none wait for it."""
CALLS = 16
MADE = "made-0"
"""What a call tells of a job that it made, or is about."""
STREAMS = 3
"""Messages that a stream of the double sends."""


class EveryService(grpc.GenericRpcHandler):
    """Answers each RPC of each service of gcore with an empty message for every caller, and records the callers."""

    def __init__(self) -> None:
        self.served: list[tuple[str, str]] = []
        self.between = asyncio.Event()
        self.between.set()

    def service(self, details: Any) -> Any:
        method = methods().get(details.method)
        if method is None:
            return None
        answer = GetMessageClass(method.output_type)

        async def one(request: Any, context: Any) -> Any:
            self.served.append((details.method, current_caller().name))
            return answer(uid=MADE) if "uid" in answer.DESCRIPTOR.fields_by_name else answer()

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            self.served.append((details.method, current_caller().name))
            for _ in range(STREAMS):
                yield answer()
                await self.between.wait()

        kind = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
        make = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
        read, write = GetMessageClass(method.input_type).FromString, answer.SerializeToString
        return make(many if method.server_streaming else one, read, write)


def methods() -> dict[str, Any]:
    """The descriptor of each RPC, by its full name."""
    found: dict[str, Any] = {}
    for name in ("jobs", "files", "placement", "train", "access"):
        module = importlib.import_module(f"gcore.api.v1.{name}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            found |= {f"/{service.full_name}/{one.name}": one for one in service.methods}
    return found


@dataclass
class Served:
    """A server behind the gate. `people` is the port for tokens, `peers` the one for certificates."""

    people: int
    peers: int
    service: EveryService
    book: Authenticator
    room: CallLimiter
    health: HealthService
    ca: Path
    journal: CallJournal
    file: Path

    def token(self, role: str, *namespaces: str, seconds: float = 1000.0) -> str:
        """A new token that the server has received."""
        token = new_token()
        now = CLOCK.wall()
        record = TokenRecord(
            id=token.id,
            name=role,
            role=role,
            namespaces=namespaces,
            sha256=token.sha256,
            created=now,
            expires=now + seconds,
        )
        kv = KeyValue(keys.token(token.id), record.encode(), 1, 1)
        self.book.note(WatchBatch((WatchEvent("put", kv),), 1))
        return token.text

    def revoke(self, token: str) -> None:
        kv = KeyValue(keys.token(token.split("_")[1]), b"", 1, 2)
        self.book.note(WatchBatch((WatchEvent("delete", kv),), 2))


@asynccontextmanager
async def behind_the_gate(folder: Path) -> AsyncIterator[Served]:
    """A server of everything."""
    ca = issued.authority(folder / "ca")
    watched = ReloadingFiles(issued.node(ca, "n1"))
    book = Authenticator(CLOCK, required=True)
    book.note(WatchBatch((), 1, reset=True))
    journal = CallJournal(folder / "calls.jsonl", CLOCK)
    service, room = EveryService(), CallLimiter(CALLS)
    gate = AccessGate(book, journal, room, within_s=WITHIN_S)
    server = new_server([gate, VersionGate()], ApiConfig(calls=CALLS))
    server.add_generic_rpc_handlers((service,))
    healthy = HealthService()
    healthy.set(serving=True)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    people, peers = (
        server.add_secure_port("127.0.0.1:0", server_credentials(watched, mutual=mutual)) for mutual in (False, True)
    )
    await server.start()
    try:
        yield Served(people, peers, service, book, room, healthy, ca, journal, folder / "calls.jsonl")
    finally:
        await server.stop(None)
        journal.close()


async def ask(
    connector: Connector, port: int, method: str, version: tuple[tuple[str, str], ...] | None = None, **fields: Any
) -> tuple[grpc.StatusCode, str]:
    """The status and the reason with which a call ends."""
    described = methods()[method]
    kind = ("stream" if described.client_streaming else "unary", "stream" if described.server_streaming else "unary")
    request = functools.partial(GetMessageClass(described.input_type), **fields)
    address = f"127.0.0.1:{port}"
    async with channel_to(connector, address) as channel:
        call = getattr(channel, f"{kind[0]}_{kind[1]}")(
            method,
            GetMessageClass(described.input_type).SerializeToString,
            GetMessageClass(described.output_type).FromString,
        )
        asked = iter([request()]) if described.client_streaming else request()
        going = call(asked, metadata=(*(version or version_metadata()), *connector.metadata(address)), timeout=10)
        try:
            if described.server_streaming:
                return (Code.OK, "") if len([one async for one in going]) == STREAMS else (Code.UNKNOWN, "")
            await going
        except grpc.aio.AioRpcError as error:
            return error.code(), parse_refusal(error).reason
    return Code.OK, ""


@asynccontextmanager
async def channel_to(connector: Connector, address: str) -> AsyncIterator[grpc.aio.Channel]:
    channel = connector.channel(address)
    try:
        yield channel
    finally:
        await channel.close()


def by_token(served: Served, token: str) -> Connector:
    return Connector(TlsMaterial(served.ca / "ca.pem"), token=token)
