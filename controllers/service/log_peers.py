"""Logs that lie on other nodes, where nodes share no folder: asked for there, and put beside those that lie here.

A peer is asked for its own node's logs only, so no question goes round in a circle. One that does not give them is told of in a line of
its own: what the others have is told all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import grpc
import grpc.aio

from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.rpc_schema import VersionedStub
from gcore.tls.connecting import Connector
from gcore.together import all_or_none, end_all

Source = Callable[[], AsyncGenerator[pb.LogLine, None]]
HELD = 64
"""Lines that wait for a client that reads slowly."""


def of_peer(connector: Connector, node: str, address: str, request: pb.StreamLogsRequest) -> Source:
    """What a node's daemon tells of its own logs. `request` names the job by its uid: a peer is asked by a daemon, in whose namespace a
    name may be another's job."""

    async def lines() -> AsyncGenerator[pb.LogLine, None]:
        asked = pb.StreamLogsRequest()
        asked.CopyFrom(request)
        asked.node = node
        async with connector.channel(address) as channel:
            stub = VersionedStub(jobs_pb2_grpc.JobsStub(channel), more=connector.metadata(address))
            try:
                async for line in stub.StreamLogs(asked):
                    # That stream's own beginning and end are none of this one's.
                    if line.HasField("place") or not line.mark:
                        yield line
            except grpc.aio.AioRpcError as error:
                why = " ".join((error.details() or error.code().name).split())
                yield pb.LogLine(node=node, text=f"[the logs of {node} cannot be read: {why[:500]}]")

    return lines


async def merged(sources: Sequence[Source]) -> AsyncGenerator[pb.LogLine, None]:
    """The lines of all sources, each source's in its order. Raises what one of them raises."""
    if len(sources) == 1:
        async with aclosing(sources[0]()) as lines:
            async for line in lines:
                yield line
        return
    waiting: asyncio.Queue[pb.LogLine] = asyncio.Queue(HELD)

    async def bring(source: Source) -> None:
        async with aclosing(source()) as lines:
            async for line in lines:
                await waiting.put(line)

    bringing = asyncio.create_task(all_or_none(bring(source) for source in sources), name="logs of peers")
    try:
        while not (bringing.done() and waiting.empty()):
            getting = asyncio.ensure_future(waiting.get())
            try:
                await asyncio.wait({getting, bringing}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    continue
                told = getting.result()
            finally:
                getting.cancel()
            yield told
        bringing.result()
    finally:
        await end_all([bringing])
