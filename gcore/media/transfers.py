"""Fetches blobs from the stores of other nodes into the store of this node.

A blob is transferred once, however many requests wait for it. A transfer belongs to the store: it goes on when the
client that requested it is gone. At most `limit` transfers run at the same time.

For each blob the named nodes are asked in an order of its own, so that all nodes that have the blobs of a request send
some of them. A node that answers not to have the blob is not asked again. A store that sends other bytes is asked to
compare them with the name, and removes a damaged blob. When a connection breaks, the transfer continues at the same byte,
at the next node, or at the same node after a delay. It ends when all nodes lack the blob, or after `ROUNDS` rounds through
the nodes without any new byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gcore.errors import GcoreError
from gcore.media.accounts import BlobKey
from gcore.media.blobs import BlobStore, IncomingBlob
from gcore.media.client import BlobClient, BlobFetch, BlobHttp, ProgressReport
from gcore.media.protocol import TRANSFERS, Blob, BlobMismatch, BlobMissing, StoreUnreachable, job_key
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import cancel_all, gather_or_cancel, is_cancelled

log = logging.getLogger(__name__)

ROUNDS = 5
"""Number of rounds through all nodes without progress after which a transfer fails."""


PROGRESS_S = 1.0
"""Seconds between two reports of progress."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A running transfer.

    `task`: its result is None when the store has the blob, otherwise the reason why not; empty if all nodes lack it.
    """

    nodes: frozenset[str]
    received: int = 0
    task: asyncio.Task[str | None] = field(init=False)


class BlobTransfers:
    """The transfers of a store. Belongs to one event loop.

    `name`: the name of this node. `secret`: from which the keys of jobs are derived. `nodes`: the base URL of each
    node's store. `http`: connections to these stores.
    """

    def __init__(
        self,
        store: BlobStore,
        name: str,
        secret: bytes,
        nodes: Mapping[str, str],
        http: BlobHttp,
        clock: Clock,
        *,
        limit: int,
    ) -> None:
        self.bytes_fetched = 0
        """Bytes received from other stores."""
        self.fetches = 0
        """Number of transfers that received a blob."""
        self.fetch_s = 0.0
        """Seconds that these transfers took in all."""
        self._store = store
        self._name = name
        self._secret = secret
        self._nodes = dict(nodes)
        self._http = http
        self._clock = clock
        self._turns = asyncio.Semaphore(limit)
        self._running: dict[BlobKey, _Transfer] = {}

    def set_nodes(self, nodes: Mapping[str, str]) -> None:
        """Replace the addresses of the other stores; running transfers use them from their next try on."""
        self._nodes = dict(nodes)

    async def fetch(
        self,
        job: str,
        blobs: Sequence[Blob],
        nodes: Collection[str],
        progress: ProgressReport | None = None,
        *,
        holder: str = TRANSFERS,
    ) -> BlobFetch:
        """Transfer the blobs that the store lacks; see `BlobClient.fetch`. Raises StoreFull and StoreFailed."""
        wanted = {blob.sha256: blob for blob in blobs}
        total = sum(blob.size for blob in wanted.values())
        present: set[str] = set()
        reasons: dict[str, str] = {}

        def received(blob: Blob) -> int:
            running = self._running.get(BlobKey(job, blob.sha256))
            return blob.size if blob.sha256 in present else 0 if running is None else running.received

        async def report() -> None:
            while progress is not None:
                progress(sum(map(received, wanted.values())), total)
                await self._clock.sleep(PROGRESS_S)

        async def obtain(blob: Blob) -> None:
            reason = await self._obtain(job, blob, nodes, holder)
            if reason is None:
                present.add(blob.sha256)
            else:
                reasons[blob.sha256] = reason

        reporting = asyncio.ensure_future(report())
        try:
            await gather_or_cancel(obtain(blob) for blob in wanted.values())
        finally:
            await cancel_all([reporting])
        unavailable = frozenset(sha256 for sha256, reason in reasons.items() if not reason)
        failed = {one: why for one, why in reasons.items() if why}
        return BlobFetch(frozenset(present), unavailable, failed, str(self._store.job_folder(job)))

    async def drop_job(self, job: str) -> None:
        """End the transfers of a job."""
        await cancel_all(one.task for key, one in self._running.items() if key.job == job)

    async def close(self) -> None:
        """End all transfers."""
        await cancel_all(one.task for one in self._running.values())

    async def _obtain(self, job: str, blob: Blob, nodes: Collection[str], holder: str) -> str | None:
        """Start the transfer of a blob, or wait for one that runs; return its result (`_Transfer.task`)."""
        key = BlobKey(job, blob.sha256)
        while (running := self._running.get(key)) is not None:
            reason = await self._result(running)
            if reason is None or running.nodes >= set(nodes):
                return reason
        started = self._running[key] = _Transfer(frozenset(nodes))
        started.task = asyncio.create_task(self._transfer(job, blob, nodes, holder, started))
        started.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await self._result(started)

    async def _result(self, transfer: _Transfer) -> str | None:
        try:
            return await asyncio.shield(transfer.task)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "the transfer was ended"  # by `drop_job`

    async def _transfer(
        self, job: str, blob: Blob, nodes: Collection[str], holder: str, transfer: _Transfer
    ) -> str | None:
        try:
            if await asyncio.to_thread(self._store.confirm, job, blob):
                return None
            others = order_of_nodes(blob.sha256, set(nodes) - {self._name})
            if not others:
                return ""
            async with self._turns:
                began = self._clock.monotonic()
                incoming = await asyncio.to_thread(self._store.begin, job, blob, holder=holder)
                try:
                    reason = await self._receive_from(others, job, blob, incoming, transfer)
                    if reason is None:
                        self.fetches += 1
                        self.fetch_s += self._clock.monotonic() - began
                    return reason
                finally:
                    await asyncio.to_thread(incoming.close)
        except (BlobMismatch, BlobMissing) as error:  # the request has a wrong size, or the job was dropped
            return str(error)
        finally:
            del self._running[BlobKey(job, blob.sha256)]

    async def _receive_from(
        self, nodes: Sequence[str], job: str, blob: Blob, incoming: IncomingBlob, transfer: _Transfer
    ) -> str | None:
        lacking: set[str] = set()
        wrong: set[str] = set()
        why, idle_rounds = "", 0
        while idle_rounds < ROUNDS:
            before = incoming.written
            for node in nodes:
                if node in lacking or node in wrong:
                    continue
                start = incoming.written
                error = await self._receive(node, job, blob, incoming, transfer)
                if error is None:
                    return None
                if isinstance(error, BlobMissing):
                    lacking.add(node)
                    continue
                why = f"node {node}: {error}"
                log.warning("transfer of blob %s of job %s at byte %d: %s", blob.sha256, job, incoming.written, why)
                if isinstance(error, BlobMismatch):
                    await asyncio.to_thread(incoming.restart)
                    transfer.received = 0
                    if start == 0:  # otherwise the first bytes may have come from another node
                        (lacking if await self._is_damaged(node, job, blob) else wrong).add(node)
            if lacking.issuperset(nodes):
                return ""
            if (lacking | wrong).issuperset(nodes):
                return why
            idle_rounds = 0 if incoming.written > before else idle_rounds + 1
            if idle_rounds < ROUNDS:
                await self._clock.sleep(retry_delay(max(1, idle_rounds)))
        return why

    async def _receive(
        self, node: str, job: str, blob: Blob, incoming: IncomingBlob, transfer: _Transfer
    ) -> GcoreError | None:
        """Receive the rest of a blob from one node and store it. Return the error if the node is the cause.

        Raises StoreFailed if this store fails, and BlobMissing if the job was dropped.
        """
        address = self._nodes.get(node)
        if address is None:
            return StoreUnreachable("the address of its blob store is not known")
        client = self._client(address, job)
        async with contextlib.aclosing(client.read(blob.sha256, incoming.written)) as pieces:
            while incoming.written < blob.size:
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return BlobMismatch(f"blob {blob.sha256} ends after {incoming.written} of {blob.size} bytes")
                except GcoreError as error:
                    return error
                try:
                    await asyncio.to_thread(incoming.write, piece)
                except BlobMismatch as error:
                    return error
                transfer.received = incoming.written
                self.bytes_fetched += len(piece)
        try:
            await asyncio.to_thread(incoming.commit)
        except BlobMismatch as error:
            return error
        return None

    async def _is_damaged(self, node: str, job: str, blob: Blob) -> bool:
        """Let the store of a node that sent other bytes compare its blob again. Return whether it has removed the blob."""
        try:
            await self._client(self._nodes.get(node, ""), job).stat(blob.sha256, verify=True)
        except BlobMissing:
            return True
        except GcoreError:
            return False
        return False

    def _client(self, address: str, job: str) -> BlobClient:
        return BlobClient(address, job, job_key(self._secret, job), self._http)


def order_of_nodes(sha256: str, nodes: Collection[str]) -> list[str]:
    """Return the order in which nodes are asked for a blob. It depends only on names and SHA-256; over many blobs each node is
    first about equally often."""
    return sorted(nodes, key=lambda node: hashlib.sha256(f"{sha256} {node}".encode()).digest())
