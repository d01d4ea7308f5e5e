"""Connections to the train ranks of one train world: receives their reports, sends samples to them, and tells them to
train.

A `Watch` stream from each rank keeps `views` current. The responses to `Feed` calls (which send samples) also say which
samples a rank holds. Either source may be newer, and both only grow. If a call fails, its effect is missing in the
rank's reports, and the reconciler repeats it. A rank of another world rejects all calls. Requests use the older one of
the rank's schema version and that of this process.

Samples are sent in calls of limited size, each with a timeout that depends on its bytes. So a large step can be sent
over a slow network, samples that have arrived are not sent again after a later failure, and no message reaches the
limits of gRPC and protobuf. The samples of a group are never split.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc

from controllers.rules.view import CheckpointProgress, RankView, SavedCheckpoint
from gcore.api.rpc import VersionedStub
from gcore.api.tls import PLAIN, Connector
from gcore.api.v1 import train_pb2 as pb
from gcore.api.v1 import train_pb2_grpc
from gcore.errors import GcoreError
from gcore.ledger.records.chain import Seal
from gcore.schema import READABLE, SCHEMA_VERSION
from gcore.system.clock import Clock
from gcore.train.rank.feed import Fetching, WorldName
from gcore.train.rank.messages import (
    CHUNK_BYTES,
    read_checkpoint_progress,
    read_fetching,
    read_sample_listing,
    read_saved_checkpoint,
    read_token,
    write_payload,
    write_token,
    write_world,
)
from gcore.types import Group, Token, Version

PART_BYTES = 16 << 20
"""Approximate maximum bytes of one `Feed` call."""

LEAST_S = 30.0
"""Timeout in seconds of the smallest `Feed` call: a rank may be busy for this long."""

SLOWEST_BYTES_S = 1 << 20
"""Bytes per second that the timeout of a `Feed` call allows for."""

GroupShare = tuple[Group, frozenset[int]]
"""A group, and the indices of those samples that one rank gets."""


def split_shares(shares: Iterable[GroupShare], limit: int = PART_BYTES) -> Iterator[tuple[GroupShare, ...]]:
    """Split shares of groups, in their order, into parts of at most about `limit` bytes. A larger share becomes a part
    of its own."""
    part: list[GroupShare] = []
    size = 0
    for share in shares:
        more = share_bytes(share)
        if part and size + more > limit:
            yield tuple(part)
            part, size = [], 0
        part.append(share)
        size += more
    if part:
        yield tuple(part)


def share_bytes(share: GroupShare) -> int:
    """The approximate bytes of a share on the network: four per token ID and four per log-probability; the rest is
    negligible."""
    group, samples = share
    return 4 * len(group.prompt_ids) + sum(8 * len(group.samples[index].token_ids) for index in samples)


def feed_timeout_s(size: int) -> float:
    """The timeout in seconds of a `Feed` call with `size` bytes."""
    return LEAST_S + size / SLOWEST_BYTES_S


class ReceivedSamples(Mapping[str, frozenset[int]]):
    """The samples of one batch that a rank holds, by group digest: as its stream last reported, together with its
    responses to `Feed` calls, which may be newer.

    The report is parsed only when it is read, because it lists all samples, and while many peers send a batch, most
    reports are replaced before this controller reads them.
    """

    def __init__(self, listed: Iterable[pb.HeldGroup], answered: Mapping[str, frozenset[int]]) -> None:
        self._listed = listed
        self._answered = answered

    @functools.cached_property
    def _read(self) -> Mapping[str, frozenset[int]]:
        return merge_samples(read_sample_listing(self._listed), self._answered)

    def __getitem__(self, digest: str) -> frozenset[int]:
        return self._read[digest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def merge_samples(
    one: Mapping[str, frozenset[int]], other: Mapping[str, frozenset[int]]
) -> Mapping[str, frozenset[int]]:
    """The union of two sets of samples, by group digest."""
    if one == other:
        return one
    joined = {**one, **other}
    for digest, samples in one.items():
        if not samples <= joined[digest]:
            joined[digest] |= samples
    return joined


log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 30.0

REST_TIMEOUT_S = 600.0
"""Timeout in seconds of `Release` and `Restore`: many gigabytes may go through a disk of the host. Both are safe to
repeat."""

CANNOT_REST = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
"""Codes with which a rank says that it cannot release its memory: the host has no room for its state, or the rank's
version does not support it."""

RECONNECT_S = 0.3
"""Seconds before a broken `Watch` stream is opened again."""

SAVED_KNOWN = 16
"""Number of newest written checkpoints that are remembered; each is registered soon after it is reported."""


class RankNotConnected(GcoreError):
    """Raised if there is no connection to a rank; it may have ended between decision and action."""


@dataclass(slots=True)
class _RankConnection:
    address: str
    channel: grpc.aio.Channel
    task: asyncio.Task[None]
    generation: int
    """Number of the certificates with which this connection was made."""


class RankConnections:
    """Connections to the ranks of the present train world. `aim` sets the world and the addresses. `on_change`: called
    when a report arrives."""

    def __init__(self, clock: Clock, on_change: Callable[[], None], connector: Connector = PLAIN) -> None:
        self._connector = connector
        self._clock = clock
        self._on_change = on_change
        self._world: WorldName | None = None
        self._connections: dict[int, _RankConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None
        self.views: dict[int, RankView] = {}
        """The last report of each rank. The dictionary is replaced and never changed."""
        self._listings: dict[int, tuple[Token | None, Sequence[pb.HeldGroup], Sequence[pb.FetchingGroup]]] = {}
        """By rank: a batch and the samples of it that the rank holds or whose blobs it fetches, as its stream last
        reported."""
        self._answered: dict[int, tuple[Token | None, Mapping[str, frozenset[int]], Mapping[str, Fetching]]] = {}
        """By rank: the same as its responses to `Feed` calls have reported."""
        self._unrested: dict[int, tuple[Token | None, str]] = {}
        """By rank: the batch after which it could not release its memory, and the reason."""
        self.saved: dict[Version, SavedCheckpoint] = {}
        """The newest complete checkpoints that ranks have reported."""

    def aim(self, world: WorldName | None, addresses: Mapping[int, str]) -> None:
        """Set the train world and the addresses of its ranks: connect to new ones, and close other connections."""
        if world != self._world:
            self._world = world
            self.views, self._listings, self._answered, self._unrested = {}, {}, {}, {}
            for rank in list(self._connections):
                self._drop(rank)
        for rank in list(self._connections):
            if addresses.get(rank) != self._connections[rank].address or self._is_outdated(self._connections[rank]):
                self._drop(rank)
        for rank, address in addresses.items():
            if rank not in self._connections and world is not None:
                channel = self._connector.channel(address)
                task = asyncio.create_task(self._listen(world, rank, channel), name=f"rank {rank}")
                task.add_done_callback(self._note_defect)
                self._connections[rank] = _RankConnection(address, channel, task, self._connector.generation)

    def _is_outdated(self, connection: _RankConnection) -> bool:
        """Whether a connection is broken and was made with certificates that have been replaced, so that it cannot
        reconnect."""
        broken = connection.channel.get_state() is not grpc.ChannelConnectivity.READY
        return broken and connection.generation != self._connector.generation

    def raise_defect(self) -> None:
        """Raise the unexpected exception of a `Watch` stream, if there was one. Without this the reports of the rank
        would stop silently, and the step would wait forever."""
        if self._defect is not None:
            raise self._defect

    def _note_defect(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._defect = self._defect or defect
            self._on_change()

    async def close(self) -> None:
        """Close all connections."""
        self.aim(None, {})

    async def feed(
        self,
        rank: int,
        seal: Seal,
        groups: Iterable[tuple[Group, frozenset[int]]],
        share: int,
        sender: str,
        holders: Collection[str] = (),
    ) -> None:
        """Send samples of the sealed batch `seal` to a rank. `groups`: groups with the indices of the samples to send.
        `share`: the number of samples of the batch that the rank gets from all peers together. `sender`: this
        controller. `holders`: the nodes whose blob stores have the groups' media. Raises grpc.aio.AioRpcError,
        RankNotConnected.
        """
        self._reach(rank)
        world = self._world
        for part in split_shares(groups):
            await self._feed_part(world, rank, seal, part, share, sender, holders)

    async def _feed_part(
        self,
        world: WorldName | None,
        rank: int,
        seal: Seal,
        part: tuple[tuple[Group, frozenset[int]], ...],
        share: int,
        sender: str,
        holders: Collection[str],
    ) -> None:
        # Off the event loop: a part may have many MB, and the lease must be renewed meanwhile.
        payload, digest = await asyncio.to_thread(_payload_of, part, holders)
        connection = self._reach(rank)
        if world is None or world != self._world:
            raise RankNotConnected(f"the train world of rank {rank} has ended", fix="Retry with the new world")
        header = pb.FeedHeader(
            schema_version=self._speaks(rank),
            world=write_world(world),
            token=write_token(seal.token),
            sender=sender,
            total_bytes=len(payload),
            sha256=digest,
            share=share,
        )
        stub = VersionedStub(train_pb2_grpc.TrainRankStub(connection.channel))
        reply = await stub.Feed(_chunks(header, payload), timeout=feed_timeout_s(len(payload)))
        if world == self._world:
            self._note_received(rank, seal.token, reply)

    async def apply(self, rank: int, seal: Seal, stored: bytes, *, whole: bool = True) -> None:
        """Tell a rank to train the READY batch `seal`; without `whole`, to add the gradients of its READY parts.
        `stored`: the encoded seal. Raises grpc.aio.AioRpcError, RankNotConnected."""
        connection, world = self._reach(rank), self._world
        assert world is not None
        request = pb.ApplyRequest(
            schema_version=self._speaks(rank), world=write_world(world), token=write_token(seal.token), seal=stored
        )
        stub = VersionedStub(train_pb2_grpc.TrainRankStub(connection.channel))
        await (stub.Apply if whole else stub.Accumulate)(request, timeout=CALL_TIMEOUT_S)

    async def rest(self, rank: int, step: int | None) -> None:
        """Have a rank release its device memory after it has trained `step`; None: have it load its state again. Raises
        grpc.aio.AioRpcError, RankNotConnected."""
        connection, world = self._reach(rank), self._world
        assert world is not None
        stub = VersionedStub(train_pb2_grpc.TrainRankStub(connection.channel))
        try:
            if step is None:
                await stub.Restore(pb.RestoreRequest(world=write_world(world)), timeout=REST_TIMEOUT_S)
            else:
                await stub.Release(pb.ReleaseRequest(world=write_world(world), step=step), timeout=REST_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            known = self.views.get(rank)
            if error.code() in CANNOT_REST and known is not None and world == self._world:
                log.warning("rank %d cannot release its memory: %s", rank, error.details())
                self._unrested[rank] = known.applied, error.details() or "no reason reported"
                self._show(replace(known, unrested=self._unrested[rank][1]))
            raise

    def _speaks(self, rank: int) -> int:
        known = self.views.get(rank)
        return min(READABLE) if known is None else known.speaks

    def _reach(self, rank: int) -> _RankConnection:
        connection = self._connections.get(rank)
        if connection is None:
            raise RankNotConnected(f"rank {rank} is not connected", fix="Retry when it is connected")
        return connection

    def _drop(self, rank: int) -> None:
        connection = self._connections.pop(rank)
        connection.task.cancel()
        # The channel is closed in the background, because a dead rank must not delay the loop.
        closing = asyncio.ensure_future(connection.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _listen(self, world: WorldName, rank: int, channel: grpc.aio.Channel) -> None:
        stub = VersionedStub(train_pb2_grpc.TrainRankStub(channel))
        while True:
            try:
                async for state in stub.Watch(pb.WatchRequest(world=write_world(world))):
                    if world == self._world:
                        self._note(rank, state)
            except grpc.aio.AioRpcError as error:
                log.debug("rank %d: %s", rank, error.details())
            await self._clock.sleep(RECONNECT_S)

    def _note(self, rank: int, state: pb.RankState) -> None:
        """Process a report of a rank's stream."""
        holding = read_token(state.holding) if state.HasField("holding") else None
        applied = read_token(state.applied) if state.HasField("applied") else None
        behind, why = self._unrested.get(rank, (None, ""))
        self._listings[rank] = holding, state.held, state.fetching
        view = RankView(
            rank=rank,
            holding=holding,
            held=self._held(rank, holding),
            fetching=self._fetching(rank, holding),
            fetched_bytes=state.fetched_bytes,
            applied=applied,
            content=state.report.content_sha256,
            metrics=dict(state.report.metrics),
            phase=state.phase,
            writing=_writing(state),
            trouble=state.trouble,
            progress=state.progress,
            begun=state.begun,
            begun_step=state.streaming.step,
            begun_content=state.begun_sha256,
            released=frozenset(state.released),
            unrested=why if behind == applied else "",
            speaks=max(min(READABLE), min(SCHEMA_VERSION, state.schema_version)),
            clock=state.clock or None,
            phases=dict(state.phase_seconds),
        )
        for saved in _saved(state, view):
            self.saved[saved.version] = saved
        for forgotten in sorted(self.saved)[:-SAVED_KNOWN]:
            del self.saved[forgotten]
        self._show(view)

    def _note_received(self, rank: int, token: Token, reply: pb.FeedReply) -> None:
        """Process the response to a `Feed` call: the samples of the batch `token` that the rank has."""
        view = self.views.get(rank, RankView(rank))
        if view.holding is None or view.holding <= token:
            known = self._answered.get(rank)
            held, fetching = known[1:] if known is not None and known[0] == token else ({}, {})
            held = merge_samples(held, read_sample_listing(reply.held))
            self._answered[rank] = token, held, {**fetching, **read_fetching(reply.fetching)}
            fetched = self._fetching(rank, token)
            self._show(replace(view, holding=token, held=self._held(rank, token), fetching=fetched))

    def _held(self, rank: int, token: Token | None) -> ReceivedSamples:
        """The samples of the batch `token` that a rank holds, from its stream and its responses."""
        listed_for, listed, _ = self._listings.get(rank, (None, (), ()))
        answered_of, answered, _ = self._answered.get(rank, (None, {}, {}))
        return ReceivedSamples(listed if listed_for == token else (), answered if answered_of == token else {})

    def _fetching(self, rank: int, token: Token | None) -> Mapping[str, Fetching]:
        """The samples of the batch `token` that a rank has received without all their blobs.

        Only its stream reports which blobs are unavailable, because a response does not say when that ends.
        """
        listed_for, _, listed = self._listings.get(rank, (None, (), ()))
        answered_of, _, answered = self._answered.get(rank, (None, {}, {}))
        found = dict(answered) if answered_of == token else {}
        if listed_for == token:
            for digest, one in read_fetching(listed).items():
                earlier = found[digest].samples if digest in found else frozenset()
                found[digest] = replace(one, samples=one.samples | earlier)
        if not found:
            return {}
        held = self._held(rank, token)
        left = {digest: one.samples - held.get(digest, frozenset()) for digest, one in found.items()}
        return {digest: replace(found[digest], samples=samples) for digest, samples in left.items() if samples}

    def _show(self, view: RankView) -> None:
        self.views = {**self.views, view.rank: view}
        self._on_change()


def _payload_of(part: Iterable[tuple[Group, frozenset[int]]], holders: Collection[str]) -> tuple[bytes, bytes]:
    payload = write_payload(part, holders)
    return payload, hashlib.sha256(payload).digest()


def _saved(state: pb.RankState, view: RankView) -> Iterator[SavedCheckpoint]:
    """Yield the newest complete checkpoint that the rank reports, if there is one."""
    if state.HasField("saved"):
        found = read_saved_checkpoint(state.saved)
        yield SavedCheckpoint(found.version, found.file, found.sha256)
    elif (
        view.applied and state.report.checkpoint_file
    ):  # a rank of the previous version, which writes checkpoints within the step
        version = Version(view.applied.lineage, view.applied.step)
        yield SavedCheckpoint(version, state.report.checkpoint_file, state.report.checkpoint_sha256)


def _writing(state: pb.RankState) -> CheckpointProgress | None:
    if not state.HasField("writing"):
        return None
    found = read_checkpoint_progress(state.writing)
    return CheckpointProgress(found.version, found.total, found.written, found.error, found.over)


async def _chunks(header: pb.FeedHeader, payload: bytes) -> AsyncIterator[pb.FeedChunk]:
    yield pb.FeedChunk(header=header, data=payload[:CHUNK_BYTES])
    for start in range(CHUNK_BYTES, len(payload), CHUNK_BYTES):
        yield pb.FeedChunk(data=payload[start : start + CHUNK_BYTES])
