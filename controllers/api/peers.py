"""Services for other controllers: files of runs whose nodes share no folder (`storage.copies`), and the load of engines.

The Files service reads only the run's own folder on this node, and there only `SERVED`. It opens each part of a path separately and follows
no links, so a path cannot leave the folder. Hidden files are unfinished and are not served.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import grpc

from controllers.api.edge.access import Role, current_caller
from controllers.api.edge.errors import CallContext, NotFound, handle_errors, handle_stream_errors
from controllers.api.edge.server import StreamLimiter
from gcore.api.v1 import files_pb2 as pb
from gcore.api.v1 import files_pb2_grpc, placement_pb2, placement_pb2_grpc
from gcore.config.node import ApiConfig
from gcore.errors import GcoreError, UsageError
from gcore.ledger import archive
from gcore.ledger.audit import receipts
from gcore.ledger.records import slot_accounting
from gcore.observability import samples

if TYPE_CHECKING:
    from controllers.job.runner import JobRunner

CHUNK_BYTES = 1 << 20

SERVED = frozenset(
    {
        "checkpoints",
        "weights",
        archive.LOG_FOLDER,
        archive.EVALUATIONS,
        receipts.FOLDER,
        samples.FOLDER,
        slot_accounting.FOLDER,
    }
)
"""The folders of a run that peers may read."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

FolderOf = Callable[[str], Awaitable[Path]]
"""Returns the folder of a job's run on this node. Raises GcoreError if the job's files are not served."""


class FilesService(files_pb2_grpc.FilesServicer):
    """Implements gcore.api.v1.Files: serves the files of runs to other nodes."""

    def __init__(
        self, folder_of: FolderOf, trouble: Callable[[], str] = str, room: StreamLimiter | None = None
    ) -> None:
        """`trouble`: returns the known reason why the store is unavailable, or nothing. `room`: limits concurrent reads; None: the default
        limit. Reads by daemons are not limited: runs depend on them, and a daemon fetches one file of a job at a time."""
        self._folder_of = folder_of
        self.trouble = trouble
        self._room = room or StreamLimiter(ApiConfig().streams)

    @handle_errors
    async def List(self, request: pb.ListFilesRequest, context: CallContext) -> pb.ListFilesReply:
        """List the files of a folder."""
        parts = parse_path(request.folder)
        run_dir = await self._folder_of(request.job_uid)
        found = await asyncio.to_thread(list_files, run_dir, parts)
        return pb.ListFilesReply(files=[pb.FileInfo(name=name, size=size) for name, size in sorted(found.items())])

    @handle_stream_errors
    async def Read(self, request: pb.ReadFileRequest, context: CallContext) -> AsyncGenerator[pb.FileChunk, None]:
        """Stream a file from an offset to its end at the time it is opened."""
        with contextlib.nullcontext() if current_caller().role is Role.NODE else self._room.place():
            parts = parse_path(request.file)
            run_dir = await self._folder_of(request.job_uid)
            file, left = await asyncio.to_thread(_opened, run_dir, parts, request.offset)
            digest = hashlib.sha256()
            try:
                while left:
                    data = await asyncio.to_thread(_read, file, min(left, CHUNK_BYTES), digest)
                    if not data:  # the file became shorter; the client notices by the digest
                        break
                    left -= len(data)
                    yield pb.FileChunk(data=data)
                yield pb.FileChunk(sha256=digest.digest())
            except OSError as error:
                await context.abort(grpc.StatusCode.DATA_LOSS, f"{request.file}: {error.strerror or error}")
            finally:
                file.close()


def parse_path(path: str) -> tuple[str, ...]:
    """Split a path below the run's folder. Raises UsageError if it is not served."""
    parts = tuple(path.split("/"))
    if parts[0] not in SERVED or not all(_PLAIN.fullmatch(part) for part in parts):
        raise UsageError(
            f"the file {path[:200]!r} is not served",
            fix=f"Name a file below {', '.join(sorted(SERVED))} of a run's folder",
        )
    return parts


def list_files(run_dir: Path, parts: tuple[str, ...]) -> dict[str, int]:
    """The regular files below a folder of the run, with their sizes; empty if there is no such folder. Raises GcoreError. Blocks."""
    try:
        with _directory(run_dir, parts) as handle:
            return dict(_below(handle, ""))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _unreadable(parts, error) from error


def _below(handle: int, prefix: str) -> Iterator[tuple[str, int]]:
    with os.scandir(handle) as entries:
        for entry in entries:
            if not _PLAIN.fullmatch(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                inner = os.open(entry.name, _DIRECTORY, dir_fd=handle)
                try:
                    yield from _below(inner, f"{prefix}{entry.name}/")
                finally:
                    os.close(inner)
            elif entry.is_file(follow_symlinks=False):
                yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size


def _opened(run_dir: Path, parts: tuple[str, ...], offset: int) -> tuple[BinaryIO, int]:
    """Open a file of the run without following links, and seek to `offset`. Return it with the number of bytes from
    there to its end. Raises GcoreError."""
    try:
        with _directory(run_dir, parts[:-1]) as handle:
            file = os.fdopen(os.open(parts[-1], _FILE, dir_fd=handle), "rb", buffering=0)
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            file.close()
            raise UsageError(f"{'/'.join(parts)} is not a regular file", fix="List its folder")
        file.seek(offset)
        return file, max(0, status.st_size - offset)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{'/'.join(parts)} is not on this node", fix="Try another node") from error
    except OSError as error:
        raise _unreadable(parts, error) from error


@contextlib.contextmanager
def _directory(run_dir: Path, parts: tuple[str, ...]) -> Iterator[int]:
    """Context manager that opens a folder of the run, one part of its path after the other and without following links,
    and returns its file descriptor. Raises OSError."""
    handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            inner = os.open(part, _DIRECTORY, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _read(file: BinaryIO, count: int, digest: Any) -> bytes:
    data = file.read(count)
    digest.update(data)
    return data


def _unreadable(parts: tuple[str, ...], error: OSError) -> GcoreError:
    return GcoreError(
        f"{'/'.join(parts)} cannot be read on this node ({error.strerror or error})", fix="Try another node"
    )


class PlacementService(placement_pb2_grpc.PlacementServicer):
    """Implements gcore.api.v1.Placement: reports the load of this node's engines to other controllers."""

    def __init__(self, runner: Callable[[str], JobRunner | None], trouble: Callable[[], str] = str) -> None:
        """`trouble`: returns the known reason why the store is unavailable, or nothing."""
        self._runner = runner
        self.trouble = trouble

    @handle_errors
    async def Loads(self, request: placement_pb2.LoadsRequest, context: CallContext) -> placement_pb2.LoadsReply:
        """Return the load of the engines that this controller manages."""
        runner = self._runner(request.job_uid)
        if runner is None or not runner.is_working:
            raise NotFound(f"this controller does not work on job {request.job_uid}")
        return await runner.loads()
