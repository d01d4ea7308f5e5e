"""Fetch files of a run from other nodes (peers), for a job whose nodes share no folder. The server side is
`controllers.api.peers`.

A folder is received into a temporary folder, which is renamed when all files have been received and verified. Of a file
that only grows (old log entries, receipts), only the part beyond the local length is fetched, in complete lines.
Received data is compared with the sender's digest. If a peer sends nothing for a while, the transfer is abandoned and
its data is deleted. This module does not retry.
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
from gcore.observability.samples import is_picture
from gcore.system.concurrency import limit_time
from gcore.system.files import DiskFull, replace_folder, sweep_drafts, sync_path

DRAFTS = ".fetched"
"""Folder in the run folder for temporary folders that are being received."""

SILENT_S = 20.0
"""Seconds without data after which a transfer from a peer is abandoned."""

MESSAGE_BYTES = 16 << 20
"""Maximum message size: the largest message is a listing of many files."""


class FetchFailed(GcoreError):
    """A file could not be fetched from a peer, or differs from the peer's."""


class FileMissing(FetchFailed):
    """The peer responds, and does not have the file."""


def _nothing(folder: Path) -> None:
    """Accept the folder without verification."""


@dataclass
class PeerFiles:
    """Fetches files of one job from other nodes to this one. `run_dir`: this node's own run folder. `owner`: part of
    the names of temporary folders, to tell them from those of other processes."""

    uid: str
    run_dir: Path
    owner: str
    silent_s: float = SILENT_S
    connector: Connector = PLAIN
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while growing files are extended, so that each has one writer at a time."""

    async def list(self, address: str, folder: str) -> dict[str, int]:
        """List the files in a peer's folder: names relative to `folder`, and sizes. Raises FetchFailed."""
        async with self._peer(address) as stub:
            reply = await stub.List(pb.ListFilesRequest(job_uid=self.uid, folder=folder), timeout=self.silent_s)
        return {one.name: one.size for one in reply.files}

    async def folder(
        self, address: str, folder: str, prove: Callable[[Path], object] = _nothing, *, durable: bool
    ) -> Path:
        """Fetch a complete folder from the peer at `address`, and replace the local one. Return its local path.

        `prove`: called with the temporary folder before it is renamed; raises GcoreError if the content is wrong.
        `durable`: sync the files to disk. Raises FetchFailed, OSError, and the errors of `prove`.
        """
        target = self.run_dir / folder
        async with self._draft(target, durable=durable) as draft, self._peer(address) as stub:
            reply = await stub.List(pb.ListFilesRequest(job_uid=self.uid, folder=folder), timeout=self.silent_s)
            if not reply.files:
                raise FileMissing(f"{address} does not have {folder}")
            for one in reply.files:
                path = _inside(draft, one.name)
                await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
                with await asyncio.to_thread(path.open, "wb") as file:
                    came = await self._copy(stub, f"{folder}/{one.name}", 0, file)
                if came != one.size:
                    raise FetchFailed(f"{folder}/{one.name} has {came} bytes at {address} instead of {one.size}")
            await asyncio.to_thread(prove, draft)
        return target

    async def grown(self, address: str, folder: str) -> int:
        """Extend the growing files in `folder` by the lines that the peer at `address` has and this node lacks. Return
        the number of received bytes.

        Pictures of samples do not grow: those that this node lacks are fetched as a whole. When this returns, the data
        is on this node's disk. Raises FetchFailed, OSError.
        """
        total = 0
        async with self._writing, self._peer(address) as stub:
            reply = await stub.List(pb.ListFilesRequest(job_uid=self.uid, folder=folder), timeout=self.silent_s)
            have = await asyncio.to_thread(_sizes, self.run_dir / folder, [one.name for one in reply.files])
            for one in reply.files:
                path, name = _inside(self.run_dir / folder, one.name), f"{folder}/{one.name}"
                if is_picture(name):
                    total += 0 if have[one.name] else await self._whole(stub, name, path)
                elif one.size > have[one.name]:
                    total += await self._continue(stub, name, path, have[one.name])
        return total

    def new_draft(self, target: Path, *, durable: bool) -> contextlib.AbstractContextManager[Path]:
        """Return the context manager that provides a temporary folder and renames it to `target` at the end
        (`replace_folder`). Its name is unique, because weights and checkpoint of one version have the same name."""
        owner = f"{target.parent.name}.{self.owner}"
        return replace_folder(target, owner=owner, durable=durable, drafts=self.run_dir / DRAFTS)

    async def sweep(self) -> None:
        """Delete the temporary folders that earlier processes have left."""
        await asyncio.to_thread(sweep_drafts, self.run_dir / DRAFTS)

    async def _whole(self, stub: Any, name: str, path: Path) -> int:
        """Fetch a complete file. Return the number of bytes."""
        draft = path.with_name(f".{path.name}.{self.owner}")
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        try:
            with await asyncio.to_thread(draft.open, "wb") as file:
                count = await self._copy(stub, name, 0, file)
            await asyncio.to_thread(draft.replace, path)
        finally:
            draft.unlink(missing_ok=True)
        return count

    async def _continue(self, stub: Any, name: str, path: Path, have: int) -> int:
        """Append the complete lines that a peer's file has after `have` bytes. Return the number of bytes."""
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        with await asyncio.to_thread(path.open, "ab") as file:
            try:
                await self._copy(stub, name, have, file)
                # An incomplete line is still being written, or will be removed; only complete lines are final.
                return await asyncio.to_thread(_keep_lines, file, path, have)
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(have)
                raise

    async def _copy(self, stub: Any, name: str, offset: int, to: BinaryIO) -> int:
        """Receive a peer's file from byte `offset` on and write it to `to`. Return the number of bytes. Raises
        FetchFailed if they differ from the peer's digest."""
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
            raise FetchFailed(f"received no data of {name} for {self.silent_s:.0f} s") from error
        finally:
            call.cancel()
        if said != digest.digest():
            raise FetchFailed(f"the received {name} differs from the peer's")
        return count

    @contextlib.asynccontextmanager
    async def _peer(self, address: str) -> AsyncIterator[Any]:
        options = [("grpc.max_receive_message_length", MESSAGE_BYTES)]
        async with self.connector.channel(address, options) as channel:
            try:
                yield VersionedStub(files_pb2_grpc.FilesStub(channel), more=self.connector.metadata(address))
            except grpc.aio.AioRpcError as error:
                raise FetchFailed(f"{address} refused ({error.details() or error.code().name})") from error

    @contextlib.asynccontextmanager
    async def _draft(self, target: Path, *, durable: bool) -> AsyncIterator[Path]:
        """The context manager `new_draft` with its disk operations in threads."""
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
    """Result of a fetch. `source`: the node that sent the file; empty: none did. `wrong`: by node, why those that were
    tried before did not."""

    source: str
    wrong: Mapping[str, GcoreError]

    @property
    def why(self) -> str:
        """The problems as a sentence."""
        return "; ".join(f"{node}: {error}" for node, error in self.wrong.items())


async def fetch_from_first(
    addresses: Mapping[str, str], nodes: Iterable[str], fetch: Callable[[str], Awaitable[object]]
) -> FetchResult:
    """Call `fetch` with the address of one node after the other until it succeeds. Raises DiskFull, OSError."""
    wrong: dict[str, GcoreError] = {}
    for node in nodes:
        if node in addresses:
            try:
                await fetch(addresses[node])
            except DiskFull:
                raise  # no other node helps if this disk is full
            except GcoreError as error:
                wrong[node] = error
            else:
                return FetchResult(node, wrong)
    return FetchResult("", wrong)


def _inside(folder: Path, name: str) -> Path:
    """Return the local path of a file that a peer names. Raises FetchFailed for a name that leaves the folder."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(".") or "\0" in part for part in parts):
        raise FetchFailed(f"a peer sent the invalid file name {name[:200]!r}")
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
    """Truncate what was appended after `have` to complete lines, and sync it to disk. Return the number of bytes
    kept."""
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
