"""The verbs of the Jobs service that tell what came of a job: its audit, its checkpoints, its placement, its samples and books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TypeVar

from controllers.own_files import collect_books, collect_samples
from controllers.service.audits import report_of
from controllers.service.books import find_books
from controllers.service.checkpoints import list_checkpoints
from controllers.service.desk import JobsDesk
from controllers.service.placed import placement_of, write_pin
from controllers.service.samples import find_samples
from controllers.service.shards import shards_of
from controllers.service.statuses import Context, edge, stream_edge
from gcore.api.v1 import jobs_pb2 as pb

T = TypeVar("T")


class Accounts(JobsDesk):
    """Reads the records, and what lies in the run's folder; writes a person's pin."""

    @edge
    async def AuditJob(self, request: pb.AuditJobRequest, context: Context) -> pb.AuditReport:
        """Recompute a job's accounts."""
        uid = await self._find(request.job)
        return report_of(await self._jobs.audit(uid))

    @edge
    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsReply:
        """A job's registered checkpoints."""
        mirror = await self._mirror(request.job)
        return await list_checkpoints(mirror, await self._jobs.holders(mirror))

    @edge
    async def ListShards(self, request: pb.ListShardsRequest, context: Context) -> pb.ListShardsReply:
        """Who has which shards, and how far each is."""
        return shards_of(await self._mirror(request.job))

    @edge
    async def GetPlacement(self, request: pb.GetPlacementRequest, context: Context) -> pb.PlacementReply:
        """How a job's slots are shared out."""
        return await self._placement(await self._find(request.job))

    @edge
    async def PinPlacement(self, request: pb.PinPlacementRequest, context: Context) -> pb.PlacementReply:
        """Fix something of it."""
        uid = await self._find(request.job)
        slots = sum(len(node.slots) for node in (await self._jobs.cluster()).nodes)
        ledger, look = self._jobs.ledger(uid), self._looking(uid)
        await write_pin(ledger, look, request, slots, self._jobs.node, self._clock.wall())
        return await self._placement(uid)

    async def _placement(self, uid: str) -> pb.PlacementReply:
        mirror, listing = await self._jobs.mirror(uid), await self._jobs.cluster()
        return placement_of(mirror, frozenset(node.name for node in listing.nodes))

    @stream_edge
    async def GetSamples(self, request: pb.GetSamplesRequest, context: Context) -> AsyncGenerator[pb.SampleGroup, None]:
        """What a step was trained on, as far as it is kept."""
        with self._room.place():
            async with aclosing(_one_by_one(await self._samples(request))) as groups:
                async for group in groups:
                    yield group

    @stream_edge
    async def GetBooks(self, request: pb.GetBooksRequest, context: Context) -> AsyncGenerator[pb.BookOfNode, None]:
        """What the slots of a job did."""
        with self._room.place():
            async with aclosing(_one_by_one(await self._books(request))) as books:
                async for book in books:
                    yield book

    # The records of a job are not held for as long as somebody reads what was found by them.

    async def _samples(self, request: pb.GetSamplesRequest) -> Iterator[pb.SampleGroup]:
        mirror = await self._mirror(request.job)
        await self._jobs.collect(mirror, collect_samples)
        return await find_samples(mirror, request)

    async def _books(self, request: pb.GetBooksRequest) -> Iterator[pb.BookOfNode]:
        mirror = await self._mirror(request.job)
        if request.HasField("step"):
            await self._jobs.collect(mirror, collect_books)
        return await find_books(mirror, request.step if request.HasField("step") else None)


async def _one_by_one(messages: Iterator[T]) -> AsyncGenerator[T, None]:
    """Each is looked for, which blocks, when the client has taken the one before it."""
    while (one := await asyncio.to_thread(next, messages, None)) is not None:
        yield one
