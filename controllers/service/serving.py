"""The gRPC server of a daemon: how large messages may be, how much is served at once, whether it tells tools what it serves.

What is beyond a bound ends as RESOURCE_EXHAUSTED, and costs the daemon nothing else. How many calls are served is bounded behind the gate
(`controllers.service.room`), where it is known whose they are; the server itself takes more than that, so that people who have filled their places
leave some for health, for nodes, and for being refused. A deadline that a caller set ends what is done for it.
A connection whose other end is gone is noticed by pings, so that its streams end.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

from controllers.service.decoding import Decoding
from controllers.service.room import most_at_once
from gcore.api.v1 import jobs_pb2
from gcore.config.api import ApiConfig

MOST_REQUEST = 4 << 20
"""Bytes of a request: a spec with its templates is the largest."""
MOST_ANSWER = 64 << 20
"""Bytes of an answer; what a client takes (`gcore.client.patience.MAX_ANSWER_BYTES`)."""
MOST_METADATA = 16 << 10
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MOST_REQUEST),
    ("grpc.max_send_message_length", MOST_ANSWER),
    ("grpc.max_metadata_size", MOST_METADATA),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients may ask whether it is there, but not without end.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor], api: ApiConfig) -> grpc.aio.Server:
    """Without services yet."""
    most = most_at_once(api.calls)
    return grpc.aio.server(interceptors=[*interceptors, Decoding()], options=OPTIONS, maximum_concurrent_rpcs=most)


def reflect(server: grpc.aio.Server, api: ApiConfig) -> None:
    """Tell tools what is served, where that is wanted. What they are told is no secret: it stands in docs/api.md."""
    if not api.reflection:
        return
    from grpc_reflection.v1alpha import reflection

    name = jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].full_name
    reflection.enable_server_reflection((name, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
