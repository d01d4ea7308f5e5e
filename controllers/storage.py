"""The proof that all nodes of a job see one and the same folder, before any of them counts on it.

Staged weights, checkpoints, receipts and old log entries go through the run's folder: one node writes them and another reads
them. Each controller that prepares a job writes a number that nobody can guess into a file of its own there, puts file and
number into the store, and only then looks which others have done so, and reads their files. Of any two, whoever came second
looks for the other's: so no two nodes get past each other unproven, and a node that comes later is proved against all.

Where nodes are to share none (`storage.copies`), the same proves that no two do, and each has the run's folder under its own
run root.

A file that is not there at once is looked for again: a mounted folder may show late what another machine wrote. Proves
nothing about how fast the folder is, nor that its disk keeps what it takes. On one machine it is as good as free.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from controllers.identity import Identity
from gcore.atomic import whole_file
from gcore.errors import GcoreError
from gcore.ledger.job import JobRecord, StorageMark
from gcore.ledger.mirror import JobMirror
from gcore.store.keys import JobKeys
from gcore.store.types import Put, Store

FOLDER = ".nodes"
"""In the run's folder: one small file for each node that has worked on the job."""
LOOK_AGAIN_S = 0.5
LOOKS = 30
"""Times a node looks for what another wrote, `LOOK_AGAIN_S` apart."""
SHARE_IT = (
    "Mount one folder at this path on every node, and name it in storage.root, or in run_root of the daemons; or, if they are to "
    "share none, set storage.copies: 2"
)

Pause = Callable[[float], Awaitable[None]]


def away(run_dir: Path, node: str) -> str:
    """Why `node` does not see the folder any more in which it proved to write, or nothing. Blocks.

    A folder of that name is not enough: where a mount is gone, whoever writes a log makes one beneath it.
    """
    try:
        (run_dir / FOLDER / node).stat()
    except OSError as error:
        return (
            f"{node} does not see the run's folder {run_dir} as it did ({error.strerror or error}); "
            "nothing in it is taken for damaged until it does: see whether its mount is there on this node"
        )
    return ""


class StorageNotShared(GcoreError):
    """A node cannot write where the others read, or does not see what another wrote."""


def run_folder(job: JobRecord, run_root: Path) -> Path:
    """The folder of a job's run on this node: the one that all share, or where they share none, its own of that name."""
    return run_root / Path(job.run_dir).name if is_apart(job) else Path(job.run_dir)


def is_apart(job: JobRecord) -> bool:
    """Whether each node has a folder of its own for the run."""
    storage = job.spec.get("storage")
    return isinstance(storage, dict) and storage.get("copies") is not None


def seen_here(mirror: JobMirror, run_root: Path) -> JobMirror:
    """The mirror, whose job's record names the run's folder as it is on this node."""
    if mirror.job is None or not is_apart(mirror.job.record):
        return mirror
    here = str(run_folder(mirror.job.record, run_root))
    if mirror.job.record.run_dir == here:
        return mirror
    job = replace(mirror.job, record=mirror.job.record.model_copy(update={"run_dir": here}))
    return replace(mirror, job=job)


@dataclass(frozen=True)
class StorageProof:
    """One node's part, for one job. `is_apart`: it is proved that no two share a folder, or a copy on the one would be taken
    for a second one. `pause` waits so many seconds, or until there is nothing to wait for any more."""

    store: Store
    keys: JobKeys
    identity: Identity
    run_dir: Path
    pause: Pause
    is_apart: bool = False

    async def run(self) -> None:
        """Write, then read what the others wrote. Raises StorageNotShared, StoreUnavailable."""
        nonce = uuid.uuid4().hex
        await asyncio.to_thread(self._write, nonce)
        mark = StorageMark(node=self.identity.node, nonce=nonce)
        put = Put(self.keys.storage(mark.node), mark.encode(), lease=self.identity.lease)
        await self.store.transact((), (put,))
        if self.is_apart:
            await self._refuse_shared()
            return
        unseen: list[StorageMark] = []
        for _ in range(LOOKS):
            unseen = [other for other in await self._others() if not await asyncio.to_thread(self._sees, other)]
            if not unseen:
                return
            await self.pause(LOOK_AGAIN_S)
        names = ", ".join(sorted(mark.node for mark in unseen))
        raise StorageNotShared(
            f"{self.identity.node} does not see what {names} wrote in the job's folder; the nodes share no storage there",
            where=str(self.run_dir),
            fix=SHARE_IT,
        )

    async def _refuse_shared(self) -> None:
        seen = [mark.node for mark in await self._others() if await asyncio.to_thread(self._sees, mark)]
        if seen:
            raise StorageNotShared(
                f"{self.identity.node} sees what {', '.join(sorted(seen))} wrote in the job's folder; the nodes share it, so what "
                "lies there once would count as several copies",
                where=str(self.run_dir),
                fix="Leave storage.copies out of the spec, or give each node a run_root of its own",
            )

    def _write(self, nonce: str) -> None:
        path = self._file_of(self.identity.node)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole_file(path, nonce.encode())
        except OSError as error:
            raise StorageNotShared(
                f"{self.identity.node} cannot write in the job's folder ({error.strerror or error})",
                where=str(self.run_dir),
                fix=SHARE_IT,
            ) from error

    def _sees(self, mark: StorageMark) -> bool:
        with contextlib.suppress(OSError):
            return self._file_of(mark.node).read_text(encoding="utf-8", errors="replace") == mark.nonce
        return False

    def _file_of(self, node: str) -> Path:
        return self.run_dir / FOLDER / node

    async def _others(self) -> list[StorageMark]:
        """What stands in the store now; whoever is gone has proved nothing, and need not be seen."""
        listing = await self.store.list(self.keys.storage_prefix)
        marks = (StorageMark.decode(kv.value, kv.key) for kv in listing.kvs)
        return [mark for mark in marks if mark.node != self.identity.node]
