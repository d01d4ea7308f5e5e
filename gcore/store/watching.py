"""A watch that lasts: over stream breaks, restarts of the server, and compaction.

It lists, tells everything as a batch with `reset`, and follows the changes from the next revision on. A broken stream
is opened again behind the last revision told. Where that is not possible, because history was compacted away, or
because the server stands *before* that revision (another or a restored database), it lists again.

A batch's revision is that of its last event, never the one in the answer's header: while a watcher catches up, the
header is ahead of the events. Answers without events (etcd's progress reports) therefore change nothing here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
from aetcd import rpc

from gcore.errors import StoreUnavailable
from gcore.store.calls import Caller, Compacted, StoreRefused, StreamEnded
from gcore.store.types import Listing, WatchBatch, WatchEvent
from gcore.store.wire import range_begin, range_end, watch_event

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Between attempts to open a broken watch again."""


async def watch(
    caller: Caller, prefix: str, list_keys: Callable[[str], Awaitable[Listing]]
) -> AsyncIterator[WatchBatch]:
    """See `gcore.store.types.Store.watch`. Raises StoreRefused if the user may not read `prefix`."""
    known: int | None = None
    pause = FIRST_PAUSE_S
    refused = False
    while True:
        stream: _Stream | None = None
        try:
            if known is None:
                listing = await list_keys(prefix)
                known = listing.revision
                yield WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), known, reset=True)
            stream = await _Stream.open(caller, prefix, known)
            refused = False
            while True:
                batch = await stream.next()
                known, pause = batch.revision, FIRST_PAUSE_S
                yield batch
        except Compacted as error:
            log.info("what changed under %s since revision %s is gone, it is listed again: %s", prefix, known, error)
            known = None
        except _Denied as error:
            # A token that is no longer valid is refused in the same words as a user who lacks the permission.
            if refused:
                raise StoreRefused(f"the store refuses the watch ({error})", fix=_LET_READ) from error
            refused = True
            caller.forget_token()
        except (StoreUnavailable, StreamEnded):
            await caller.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            if stream is not None:
                stream.cancel()


_LET_READ = "Let the etcd user read these keys"


class _Denied(Exception):
    """etcd cancelled the watch for want of a permission."""


class _Stream:
    """One gRPC stream that carries one watch."""

    def __init__(self, call: Any) -> None:
        self._call = call

    @classmethod
    async def open(cls, caller: Caller, prefix: str, known: int) -> _Stream:
        """Opened behind `known`. Raises Compacted, StoreUnavailable, _Denied, StreamEnded."""
        if await _revision_now(caller, prefix) < known:
            raise Compacted(f"the store stands before revision {known}, which it had reached")
        connection = await caller.connection(caller.timeout_s)
        call: Any = None
        try:
            async with asyncio.timeout(caller.timeout_s):
                metadata = await caller.metadata(connection, caller.timeout_s)
                call = connection.watch.Watch(metadata=metadata)
                create = rpc.WatchCreateRequest(
                    key=range_begin(prefix), range_end=range_end(prefix), start_revision=known + 1, fragment=True
                )
                await call.write(rpc.WatchRequest(create_request=create))
                stream = cls(call)
                answer = await stream._read()
                if not answer.created:
                    raise StreamEnded("etcd did not acknowledge the watch")
                return stream
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError, StreamEnded) as error:
            caller.pool.suspect(connection)
            caller.forget_token()  # it may be why; a new one costs one call
            _cancel(call)
            raise StreamEnded(str(error)) from error
        except BaseException:
            _cancel(call)
            raise

    async def next(self) -> WatchBatch:
        """The next changes; waits for them. Raises Compacted, _Denied, StreamEnded."""
        events: list[WatchEvent] = []
        while True:
            answer = await self._read()
            events.extend(watch_event(event) for event in answer.events)
            # A fragment may end within a revision, and a revision is told whole.
            if events and not answer.fragment:
                return WatchBatch(tuple(events), events[-1].kv.mod_revision)

    def cancel(self) -> None:
        """Let go of it."""
        _cancel(self._call)

    async def _read(self) -> Any:
        try:
            answer = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StreamEnded(str(error)) from error
        if answer is grpc.aio.EOF:
            raise StreamEnded("etcd closed the stream")
        if answer.canceled:
            raise _why_cancelled(answer)
        return answer


def _why_cancelled(answer: Any) -> Exception:
    reason = str(answer.cancel_reason)
    if answer.compact_revision:
        return Compacted(reason)
    if "permission denied" in reason:
        return _Denied(reason)
    return StreamEnded(reason)


async def _revision_now(caller: Caller, prefix: str) -> int:
    """The store's revision, linearizable: a member that lags behind asks its leader first."""
    request = rpc.RangeRequest(key=range_begin(prefix), range_end=range_end(prefix), count_only=True)
    answer = await caller.call(
        lambda connection, metadata, within: connection.kv.Range(request, metadata=metadata, timeout=within),
        repeatable=True,
    )
    return int(answer.header.revision)


def _cancel(call: Any) -> None:
    if call is not None:
        call.cancel()
