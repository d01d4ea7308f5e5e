"""gRPC service `TrainRank`: converts calls to events of the state machine in `gcore.train.rank.feed`, and sends
replies.

Runs in the event loop and never blocks it: payloads are checked in a thread; training and offloading run in another.
The state changes only in the loop, between two awaits, so calls cannot interleave within a decision.

Status codes of errors: FAILED_PRECONDITION for a refused request; DATA_LOSS for a damaged payload; INVALID_ARGUMENT for
chunks or a seal that violate the protocol; RESOURCE_EXHAUSTED for memory that cannot be offloaded.
`gcore.train.rank.main` decides when the process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import NoReturn

import grpc

from gcore.api.rpc import version_refusal
from gcore.api.v1 import train_pb2 as pb
from gcore.api.v1 import train_pb2_grpc
from gcore.ledger.records.chain import Seal
from gcore.rollout.api import FolderUpdate
from gcore.schema import UnreadableRecord
from gcore.system.clock import Clock
from gcore.train.checkpoint.run_files import WriteProgress, WrittenCheckpoint
from gcore.train.rank import feed
from gcore.train.rank.feed import (
    AlreadyApplied,
    Begin,
    BeginParts,
    FeedState,
    RankRefusal,
    StepInput,
    StepPartInput,
    WorldName,
)
from gcore.train.rank.launch import (
    PARTS,
    CannotOffload,
    PhaseTotals,
    StepResult,
    refuse_release,
    refuse_restore,
    unknown_parts,
)
from gcore.train.rank.messages import (
    CHUNK_BYTES,
    LARGEST_PAYLOAD,
    FeedDamaged,
    read_payload,
    read_token,
    read_world,
    write_checkpoint_progress,
    write_fetching,
    write_sample_listing,
    write_saved_checkpoint,
    write_state,
)

COALESCE_S = 0.05
"""Minimum interval in seconds between two status messages to watchers."""

PARTS_S = 0.5
"""Minimum interval in seconds between messages about changes that nothing waits for, such as the arrival of a part of
the rank's samples.
"""

CONTEXT = grpc.aio.ServicerContext[object, object]


class RankStatus:
    """The rank's status, which its watchers receive: protocol state, phase, checkpoints, last report.

    Used in the event loop only. A change of `progress` alone is not worth a message; the caller decides when to `show`
    it.
    """

    def __init__(self, state: FeedState, clock: Clock, phase_totals: Callable[[], PhaseTotals] | None = None) -> None:
        """`state`: the initial state of the protocol. `phase_totals`: returns the rank's seconds by phase."""
        self.state = state
        self._clock = clock
        self._phase_totals = phase_totals
        self.phase = "waiting"
        self.progress = 0
        self.error = ""
        self.saved: WrittenCheckpoint | None = None
        self.writing: WriteProgress | None = None
        self.trouble = ""
        self.fetched_bytes = 0
        """Bytes of blobs that were received so far, also of incomplete ones."""
        self.released: frozenset[str] = frozenset()
        """The parts of the rank's memory that are released: `optimizer`, `weights`, both or none."""
        self._report: pb.StepReport | None = None
        self._changed, self._wanted = asyncio.Event(), asyncio.Event()
        self._said: pb.RankState | None = None
        """The newest message, encoded once for all watchers; None: it must be encoded again."""

    @property
    def checkpointing(self) -> object:
        """The part of the checkpoint status of which a change is sent to watchers at once; the bytes written are not in
        it.
        """
        writing = self.writing
        return self.trouble, self.saved, writing and (writing.version, writing.error, writing.over)

    def show(self, *, wanted: bool = True) -> None:
        """Send the current status to all watchers.

        `wanted` False: nothing waits for this change, so it may be combined with others for up to `PARTS_S`.
        """
        self._said = None
        self._changed.set()
        self._changed = asyncio.Event()
        if wanted:
            self._wanted.set()
            self._wanted = asyncio.Event()

    def add_blobs(self, blobs: Collection[str]) -> None:
        """Record that these blobs (SHA-256) are verified and in the world's folder."""
        self.state = feed.add_blobs(self.state, blobs)
        self.show(wanted=not self.state.fetching)

    def miss_blobs(self, blobs: Collection[str]) -> None:
        """Record that no holder's store has these blobs (SHA-256)."""
        self.state = feed.miss_blobs(self.state, blobs)
        self.show()

    def reported(self, result: StepResult, content: bytes) -> None:
        """Record that the step was trained, with its report, and show it. `content`: digest of the seal's content."""
        self.state = feed.finish_step(self.state)
        self.phase = "waiting"
        self._report = pb.StepReport(
            content_sha256=content,
            metrics=dict(result.metrics),
            weights_file=result.weights.folder if isinstance(result.weights, FolderUpdate) else "",
        )
        self.show()

    def failed(self, reason: str) -> None:
        """Record that the rank has failed; watchers get the reason and their streams end."""
        self.phase, self.error = "failed", reason
        self.show()

    def message(self) -> pb.RankState:
        """Encode the status as the protocol message that watchers receive."""
        message = write_state(self.state)
        # The training thread may still report a phase; a failure takes precedence.
        message.phase = "failed" if self.error else self.phase
        message.progress, message.error = self.progress, self.error
        message.trouble = self.trouble
        message.fetched_bytes = self.fetched_bytes
        if self._phase_totals is not None:
            totals = self._phase_totals()
            message.clock = totals.at
            message.phase_seconds.update(totals.seconds)
        message.released.extend(sorted(self.released))
        if self._report is not None:
            message.report.CopyFrom(self._report)
        if self.saved is not None:
            message.saved.CopyFrom(write_saved_checkpoint(self.saved))
        if self.writing is not None:
            message.writing.CopyFrom(write_checkpoint_progress(self.writing))
        return message

    async def messages(self) -> AsyncIterator[pb.RankState]:
        """Yield the status now and after each change; a slow reader gets only the newest. Ends after a failure.

        Changes within `COALESCE_S` are combined into one message, and those that nothing waits for within `PARTS_S`:
        all controllers send their samples at once, and otherwise each of them would get a message about every arrival.
        """
        self._said = None  # a new watcher gets the current status, including changes not worth a message
        while True:
            if self._said is None:
                self._said = self.message()
            changed, wanted, message = self._changed, self._wanted, self._said
            yield message
            if message.error:
                return
            said = self._clock.monotonic()
            await changed.wait()
            await self._until(wanted, said + PARTS_S)
            rest = said + COALESCE_S - self._clock.monotonic()
            if rest > 0 and not self.error:
                await self._clock.sleep(rest)

    async def _until(self, wanted: asyncio.Event, at: float) -> None:
        """Wait for `wanted`, at most until the monotonic time `at`."""
        resting = asyncio.create_task(self._clock.sleep(max(0.0, at - self._clock.monotonic())))
        hearing = asyncio.create_task(wanted.wait())
        try:
            await asyncio.wait({resting, hearing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            resting.cancel()
            hearing.cancel()


class TrainRankService(train_pb2_grpc.TrainRankServicer):
    """The gRPC servicer of one rank."""

    def __init__(
        self,
        board: RankStatus,
        begin: Callable[[StepInput], None],
        begin_part: Callable[[StepPartInput], None],
        rest: Callable[[Collection[str]], Awaitable[None]],
        received: Callable[[], None] = lambda: None,
    ) -> None:
        """`begin` and `begin_part` pass a step or a part to the training thread and return at once.

        `rest` releases the given memory parts, restores all others, and returns when that is done. `received` is called
        after samples have arrived, which may lack blobs (`FeedState.wanted`).
        """
        self._board = board
        self._begin = begin
        self._begin_part = begin_part
        self._rest = rest
        self._received = received

    async def Feed(self, request_iterator: AsyncIterator[pb.FeedChunk], context: CONTEXT) -> pb.FeedReply:
        """Receive samples for one step attempt (token), in chunks; reply which samples the rank now holds for it."""
        header: pb.FeedHeader | None = None
        data = bytearray()
        async for chunk in request_iterator:
            if header is None:
                header = await self._header(chunk, context)
            if len(chunk.data) > CHUNK_BYTES or len(data) + len(chunk.data) > header.total_bytes:
                await _invalid(
                    context,
                    f"a chunk has {len(chunk.data)} bytes; the maximum is {CHUNK_BYTES}, and the size in the header in total",
                )
            data += chunk.data
        if header is None:
            await _invalid(context, "the feed has no chunk")
        try:
            groups = await asyncio.to_thread(read_payload, header, bytes(data))
        except FeedDamaged as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        token = read_token(header.token)
        answer = feed.feed_samples(self._board.state, read_world(header.world), token, groups)
        if isinstance(answer, RankRefusal):
            await _refused(context, answer)
        if answer.state != self._board.state:
            self._board.state = answer.state
            held = sum(len(samples) for samples in answer.state.held.values())
            self._board.show(wanted=held >= header.share)
            self._received()
        state = self._board.state
        if state.holding != token:
            return pb.FeedReply()
        return pb.FeedReply(held=write_sample_listing(state.held), fetching=write_fetching(state.fetching))

    async def Apply(self, request: pb.ApplyRequest, context: CONTEXT) -> pb.ApplyReply:
        """Begin to train a sealed step; the result arrives with `Watch`. A repeated request does nothing."""
        name, token = read_world(request.world), read_token(request.token)
        seal = await self._seal(request, context)
        answer = feed.apply_step(self._board.state, name, token, seal)
        match answer:
            case RankRefusal():
                await _refused(context, answer)
            case Begin(state, work):
                self._board.state = state
                self._board.show()
                self._begin(work)
            case AlreadyApplied():
                pass
        return pb.ApplyReply()

    async def Accumulate(self, request: pb.ApplyRequest, context: CONTEXT) -> pb.ApplyReply:
        """Begin to compute the gradients of those parts of a streamed step that are READY and not begun yet."""
        name, token = read_world(request.world), read_token(request.token)
        seal = await self._seal(request, context)
        answer = feed.accumulate_parts(self._board.state, name, token, seal)
        match answer:
            case RankRefusal():
                await _refused(context, answer)
            case BeginParts(state, parts):
                self._board.state = state
                self._board.show()
                for part in parts:
                    self._begin_part(part)
            case AlreadyApplied():
                pass
        return pb.ApplyReply()

    async def Release(self, request: pb.ReleaseRequest, context: CONTEXT) -> pb.RestReply:
        """Release the requested parts of the rank's memory (none named: all), in addition to those released before."""
        await self._admit(read_world(request.world), context)
        if wrong := unknown_parts(request.what):
            await _invalid(context, wrong)
        refused = refuse_release(self._board.state, request.step)
        if refused is not None:
            await _refused(context, refused)
        return await self._put_to_rest(self._board.released | frozenset(request.what or PARTS), context)

    async def Restore(self, request: pb.RestoreRequest, context: CONTEXT) -> pb.RestReply:
        """Restore all released memory."""
        await self._admit(read_world(request.world), context)
        refused = refuse_restore(self._board.state)
        if refused is not None:
            await _refused(context, refused)
        return await self._put_to_rest(frozenset(), context)

    async def _put_to_rest(self, what: frozenset[str], context: CONTEXT) -> pb.RestReply:
        try:
            await self._rest(what)
        except CannotOffload as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return pb.RestReply(released=sorted(self._board.released))

    async def _seal(self, request: pb.ApplyRequest, context: CONTEXT) -> Seal:
        """Decode the seal in the request, after checking that the caller addresses this world."""
        refused = feed.check_caller(self._board.state, read_world(request.world), read_token(request.token))
        if refused is not None:
            await _refused(context, refused)
        await _served(request.schema_version, context)
        try:
            return Seal.decode(request.seal, "the seal in Apply")
        except UnreadableRecord as error:
            await _invalid(context, str(error))

    async def Watch(self, request: pb.WatchRequest, context: CONTEXT) -> AsyncIterator[pb.RankState]:
        """Stream the rank's status: the current one at once, then a message after each change."""
        await self._admit(read_world(request.world), context)
        async for message in self._board.messages():
            yield message

    async def _header(self, chunk: pb.FeedChunk, context: CONTEXT) -> pb.FeedHeader:
        """Read the feed's header from its first chunk.

        A caller of another world is refused before it sends everything.
        """
        if not chunk.HasField("header"):
            await _invalid(context, "the first chunk has no header")
        await self._admit(read_world(chunk.header.world), context)
        await _served(chunk.header.schema_version, context)
        if chunk.header.total_bytes > LARGEST_PAYLOAD:
            await _invalid(
                context,
                f"the payload has {chunk.header.total_bytes} bytes; the maximum is {LARGEST_PAYLOAD}, send it in parts",
            )
        return chunk.header

    async def _admit(self, name: WorldName, context: CONTEXT) -> None:
        refused = feed.check_caller(self._board.state, name)
        if refused is not None:
            await _refused(context, refused)


async def _refused(context: CONTEXT, refused: RankRefusal) -> NoReturn:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refused.reason)
    raise AssertionError("abort raises")


async def _served(version: int, context: CONTEXT) -> None:
    """Refuse a message whose schema version this rank does not support."""
    why = version_refusal(str(version))
    if why is not None:
        await _refused(context, RankRefusal(why))


async def _invalid(context: CONTEXT, what: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
    raise AssertionError("abort raises")
