"""Fetches a run's files from peers, of a job whose nodes share no folder: the other end of `controllers.api.peers`.

A folder is filled in a draft and gets its name when all of it is here and proved; until then it is not there. A file that only
grows (old records, receipts) is continued from its own length, by whole lines. What was sent is compared with its digest. A peer
that sends nothing for a while is given up, and so is what came of it; nothing is tried again in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from gcore.api.rpc import VersionedStub
from gcore.api.tls import PLAIN, Connector
from gcore.api.v1 import files_pb2 as pb
from gcore.api.v1 import files_pb2_grpc
from gcore.errors import GcoreError
from gcore.system.concurrency import limit_time
from gcore.system.files import DiskFull, replace_folder, sweep_drafts, sync_path

DRAFTS = ".fetched"
"""In the run's folder: what is not whole yet."""

SILENT_S = 20.0
"""A peer that sends nothing for so long is given up."""

MESSAGE_BYTES = 16 << 20
"""A listing of very many files is the largest."""


class FetchFailed(GcoreError):
    """A file could not be fetched from a peer, or differs from the peer's."""


class FileMissing(FetchFailed):
    """The peer answers, and does not have the file."""


def _nothing(folder: Path) -> None:
    """Nothing to prove."""


@dataclass
class PeerFiles:
    """Fetches one job's files from other nodes to this one. `run_dir`: its own folder of the run; `owner` keeps its drafts apart."""

    uid: str
    run_dir: Path
    owner: str
    silent_s: float = SILENT_S
    connector: Connector = PLAIN
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Files that grow have one writer at a time."""

    async def list(self, address: str, folder: str) -> dict[str, int]:
        """Names, relative to `folder`, and sizes of what lies there on a peer. Raises FetchFailed."""
        async with self._peer(address) as stub:
            reply = await stub.List(pb.ListFilesRequest(job_uid=self.uid, folder=folder), timeout=self.silent_s)
        return {one.name: one.size for one in reply.files}

    async def folder(
        self, address: str, folder: str, prove: Callable[[Path], object] = _nothing, *, durable: bool
    ) -> Path:
        """Bring a whole folder of a peer here, in place of one that was here.

        `prove` reads the draft before it gets its name, and raises GcoreError if it is not what was wanted. Raises
        FetchFailed, OSError, and what `prove` raises.
        """
        target = self.run_dir / folder
        async with self._draft(target, durable=durable) as draft, self._peer(address) as stub:
            reply = await stub.List(pb.ListFilesRequest(job_uid=self.uid, folder=folder), timeout=self.silent_s)
            if not reply.files:
                raise FileMissing(f"{folder} is not at {address}")
            for one in reply.files:
                path = _inside(draft, one.name)
                await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
                with await asyncio.to_thread(path.open, "wb") as file:
                    came = await self._copy(stub, f"{folder}/{one.name}", 0, file)
                if came != one.size:
                    raise FetchFailed(f"{folder}/{one.name} has {came} bytes at {address}, and not {one.size}")
            await asyncio.to_thread(prove, draft)
        return target

    async def grown(self, address: str, folder: str) -> int:
        """Continue the files of `folder` that only grow, by what a peer has more of them; how many bytes came.

        They are on this node's disk when this returns. Raises FetchFailed, OSError.
        """
        total = 0
        async with self._writing, self._peer(address) as stub:
            reply = await stub.List(pb.ListFilesRequest(job_uid=self.uid, folder=folder), timeout=self.silent_s)
            have = await asyncio.to_thread(_sizes, self.run_dir / folder, [one.name for one in reply.files])
            for one in reply.files:
                if one.size > have[one.name]:
                    path = _inside(self.run_dir / folder, one.name)
                    total += await self._continue(stub, f"{folder}/{one.name}", path, have[one.name])
        return total

    def new_draft(self, target: Path, *, durable: bool) -> contextlib.AbstractContextManager[Path]:
        """`replace_folder` with a draft that no other folder has: weights and checkpoint of one version have the same name."""
        owner = f"{target.parent.name}.{self.owner}"
        return replace_folder(target, owner=owner, durable=durable, drafts=self.run_dir / DRAFTS)

    async def sweep(self) -> None:
        """Remove the drafts of lives before this one."""
        await asyncio.to_thread(sweep_drafts, self.run_dir / DRAFTS)

    async def _continue(self, stub: Any, name: str, path: Path, have: int) -> int:
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        with await asyncio.to_thread(path.open, "ab") as file:
            try:
                await self._copy(stub, name, have, file)
                # A line without its end is being written, or will be taken back: only a line that is whole stays as it is.
                return await asyncio.to_thread(_keep_lines, file, path, have)
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(have)
                raise

    async def _copy(self, stub: Any, name: str, offset: int, to: BinaryIO) -> int:
        """Write what a peer sends of a file; how much it was. Raises FetchFailed if it is not what was read there."""
        digest, count, said = hashlib.sha256(), 0, b""
        call = stub.Read(pb.ReadFileRequest(job_uid=self.uid, file=name, offset=offset))
        try:
            while True:
                async with limit_time(self.silent_s):
                    chunk = await call.read()
                if chunk is grpc.aio.EOF:
                    break
                said = chunk.sha256
                count += len(chunk.data)
                await asyncio.to_thread(_write, to, chunk.data, digest)
            await asyncio.to_thread(to.flush)
        except TimeoutError as error:
            raise FetchFailed(f"nothing of {name} came for {self.silent_s:.0f} s") from error
        finally:
            call.cancel()
        if said != digest.digest():
            raise FetchFailed(f"{name} did not come as it is there")
        return count

    @contextlib.asynccontextmanager
    async def _peer(self, address: str) -> AsyncIterator[Any]:
        options = [("grpc.max_receive_message_length", MESSAGE_BYTES)]
        async with self.connector.channel(address, options) as channel:
            try:
                yield VersionedStub(files_pb2_grpc.FilesStub(channel), more=self.connector.metadata(address))
            except grpc.aio.AioRpcError as error:
                raise FetchFailed(f"{address} does not give it ({error.details() or error.code().name})") from error

    @contextlib.asynccontextmanager
    async def _draft(self, target: Path, *, durable: bool) -> AsyncIterator[Path]:
        """`new_draft`, which blocks on the disk, in threads."""
        manager = self.new_draft(target, durable=durable)
        folder = await asyncio.to_thread(manager.__enter__)
        try:
            yield folder
        except BaseException:
            kind, error, trace = sys.exc_info()
            await asyncio.to_thread(manager.__exit__, kind, error, trace)
            raise
        await asyncio.to_thread(manager.__exit__, None, None, None)


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The node that gave a file (empty: none did), and what was wrong with the nodes asked before, by node."""

    source: str
    wrong: Mapping[str, GcoreError]

    @property
    def why(self) -> str:
        """The problems, for people."""
        return "; ".join(f"{node}: {error}" for node, error in self.wrong.items())


async def fetch_from_first(
    addresses: Mapping[str, str], nodes: Iterable[str], fetch: Callable[[str], Awaitable[object]]
) -> FetchResult:
    """Fetch from the first of `nodes` that gives it. Raises DiskFull, OSError."""
    wrong: dict[str, GcoreError] = {}
    for node in nodes:
        if node in addresses:
            try:
                await fetch(addresses[node])
            except DiskFull:
                raise  # whoever gives it, there is no room
            except GcoreError as error:
                wrong[node] = error
            else:
                return FetchResult(node, wrong)
    return FetchResult("", wrong)


def _inside(folder: Path, name: str) -> Path:
    """Where a file goes that a peer names. Raises FetchFailed for a name that leads elsewhere."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(".") or "\0" in part for part in parts):
        raise FetchFailed(f"a peer names a file {name[:200]!r}")
    return folder.joinpath(*parts)


def _sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    sizes = {}
    for name in names:
        path = _inside(folder, name)
        sizes[name] = path.stat().st_size if path.is_file() else 0
    return sizes


def _write(file: BinaryIO, data: bytes, digest: Any) -> None:
    digest.update(data)
    file.write(data)


def _keep_lines(file: BinaryIO, path: Path, have: int) -> int:
    """Cut what was appended after `have` back to whole lines, and bring it to the disk; how much stays."""
    file.flush()
    end = have
    with path.open("rb") as there:
        there.seek(have)
        for block in iter(lambda: there.read(1 << 20), b""):
            if (last := block.rfind(b"\n")) >= 0:
                end = there.tell() - len(block) + last + 1
    file.truncate(end)
    os.fsync(file.fileno())
    if have == 0:
        sync_path(path.parent)
    return end - have
