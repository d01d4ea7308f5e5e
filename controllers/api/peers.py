"""Services for peers: a run's files, of jobs whose nodes share no folder (`storage.copies`), and the load of engines.

Only files in the run's own folder on this node are served, and of these only `SERVED`. Each part of a path is opened by itself and
never through a link, so that nothing outside can be named. Hidden files are drafts and do not exist here.
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
"""The folders of a run whose files peers fetch."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

FolderOf = Callable[[str], Awaitable[Path]]
"""The folder of a job's run on this node. Raises GcoreError for a job whose files are not served."""


class FilesService(files_pb2_grpc.FilesServicer):
    """Implements gcore.api.v1.Files: gives other nodes the files of runs."""

    def __init__(
        self, folder_of: FolderOf, trouble: Callable[[], str] = str, room: StreamLimiter | None = None
    ) -> None:
        """`trouble`: why the store cannot be brought back, if that is known here. `room`: for how many files that are read at once; None:
        as usual. Daemons need no place: a run goes on with what they fetch here, and each fetches one file of a job at a time."""
        self._folder_of = folder_of
        self.trouble = trouble
        self._room = room or StreamLimiter(ApiConfig().streams)

    @handle_errors
    async def List(self, request: pb.ListFilesRequest, context: CallContext) -> pb.ListFilesReply:
        """The files of a folder."""
        parts = parse_path(request.folder)
        run_dir = await self._folder_of(request.job_uid)
        found = await asyncio.to_thread(list_files, run_dir, parts)
        return pb.ListFilesReply(files=[pb.FileInfo(name=name, size=size) for name, size in sorted(found.items())])

    @handle_stream_errors
    async def Read(self, request: pb.ReadFileRequest, context: CallContext) -> AsyncGenerator[pb.FileChunk, None]:
        """A file, from an offset to where it ends when it is opened."""
        with contextlib.nullcontext() if current_caller().role is Role.NODE else self._room.place():
            parts = parse_path(request.file)
            run_dir = await self._folder_of(request.job_uid)
            file, left = await asyncio.to_thread(_opened, run_dir, parts, request.offset)
            digest = hashlib.sha256()
            try:
                while left:
                    data = await asyncio.to_thread(_read, file, min(left, CHUNK_BYTES), digest)
                    if not data:  # it became shorter: whoever asked sees that by the digest of what it was to be
                        break
                    left -= len(data)
                    yield pb.FileChunk(data=data)
                yield pb.FileChunk(sha256=digest.digest())
            except OSError as error:
                await context.abort(grpc.StatusCode.DATA_LOSS, f"{request.file}: {error.strerror or error}")
            finally:
                file.close()


def parse_path(path: str) -> tuple[str, ...]:
    """A path below the run's folder, in its parts. Raises UsageError for one that is not served."""
    parts = tuple(path.split("/"))
    if parts[0] not in SERVED or not all(_PLAIN.fullmatch(part) for part in parts):
        raise UsageError(
            f"no file {path[:200]!r} is served", fix=f"Name one below {', '.join(sorted(SERVED))} of a job's run"
        )
    return parts


def list_files(run_dir: Path, parts: tuple[str, ...]) -> dict[str, int]:
    """The plain files below a folder of the run, and their sizes; none where it is not. Raises GcoreError. Blocks."""
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
    """The file, at `offset`, and how many bytes there are from there. Raises GcoreError."""
    try:
        with _directory(run_dir, parts[:-1]) as handle:
            file = os.fdopen(os.open(parts[-1], _FILE, dir_fd=handle), "rb", buffering=0)
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            file.close()
            raise UsageError(f"{'/'.join(parts)} is no file", fix="List its folder")
        file.seek(offset)
        return file, max(0, status.st_size - offset)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{'/'.join(parts)} is not on this node", fix="Ask another") from error
    except OSError as error:
        raise _unreadable(parts, error) from error


@contextlib.contextmanager
def _directory(run_dir: Path, parts: tuple[str, ...]) -> Iterator[int]:
    """The open folder that `parts` lead to, none of them a link. Raises OSError."""
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
    return GcoreError(f"{'/'.join(parts)} cannot be read here ({error.strerror or error})", fix="Ask another node")


class PlacementService(placement_pb2_grpc.PlacementServicer):
    """Implements gcore.api.v1.Placement: gives other controllers the load of the engines here."""

    def __init__(self, runner: Callable[[str], JobRunner | None], trouble: Callable[[], str] = str) -> None:
        """`trouble`: why the store cannot be brought back, if that is known here."""
        self._runner = runner
        self.trouble = trouble

    @handle_errors
    async def Loads(self, request: placement_pb2.LoadsRequest, context: CallContext) -> placement_pb2.LoadsReply:
        """What the engines that this controller sees to have to do."""
        runner = self._runner(request.job_uid)
        if runner is None or not runner.is_working:
            raise NotFound(f"job {request.job_uid} is not worked on here")
        return await runner.loads()
