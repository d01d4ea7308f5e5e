"""The process of a node's blob store: HTTP routes for clients of this machine and for the stores of other nodes.

    GET, HEAD  /jobs/JOB/blobs/SHA256      the bytes; a range `bytes=START-`, `bytes=START-END` or `bytes=-LAST` is possible
                                           HEAD with ?verify=1 compares the bytes with the name again first
    PUT        /jobs/JOB/blobs/SHA256      store the body; ?holder=HOLDER uses up a reservation
    POST       /jobs/JOB/pins              {"incarnation", "sha256": [...], "ttl_s"}; DELETE without "ttl_s" ends pins
    POST       /jobs/JOB/reservations      {"holder", "bytes", "ttl_s"} -> {"granted"}; "bytes": 0 ends it
    POST       /jobs/JOB/fetch             {"blobs": [{"sha256", "size"}], "nodes": [...], "progress", "holder"}
                                           -> {"present", "unavailable", "failed"}; with "progress" as lines of JSON:
                                           {"bytes", "of"} each second, at last {"result"} or {"error"}
    POST       /jobs/JOB/link              {"sha256": [...], "folder"} -> {"linked", "missing"}
    POST       /jobs/JOB/pictures          {"path", "sha256", "height", "width", "incarnation", "ttl_s"} -> the medium:
                                           convert a picture file of this machine, store it and pin it
    DELETE     /jobs/JOB                   delete everything of the job
    GET        /health, /metrics           counters, as JSON and as Prometheus text

Every route of a job needs `Authorization: Bearer KEY` with the key of that job (`gcore.media.protocol.job_key`). The
key is checked before the body is read. Errors are JSON (`gcore.media.protocol`).

The process knows addresses of other stores only from its launch document and from its supervisor, which sends
`{"command": "nodes", "nodes": {NAME: URL}}` on the control line. A request names nodes, never addresses. Files are read
and written in threads, 1 MiB at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gcore.api.tls import Connector, ReloadingFiles, ServingTls, serving_context
from gcore.errors import GcoreError, NotAllowed, UsageError, explain_os_errors
from gcore.media.blobs import GRACE_S, BlobStore
from gcore.media.client import BlobFetch, open_blob_http
from gcore.media.picture_index import read_verified
from gcore.media.pictures import PictureError, normalize_picture
from gcore.media.protocol import (
    PIECE_BYTES,
    STATUS,
    TRANSFERS,
    Blob,
    BlobMismatch,
    BlobRequestRefused,
    StoreFailed,
    StoreFull,
    check_job,
    check_sha256,
    disk_error,
    encode_error,
    job_key,
    key_matches,
)
from gcore.media.transfers import BlobTransfers
from gcore.system.clock import Clock, SystemClock
from gcore.system.concurrency import cancel_all
from gcore.system.control_line import ControlLine, report_serving
from gcore.system.daemon import set_up_logging
from gcore.system.network import http_settings, join_host_port, listen_http
from gcore.types import Medium

MAX_BODY_BYTES = 16 << 20
"""Maximum size of a JSON body: about 150,000 blobs."""

MAX_DISCARDED_BYTES = 1 << 30
"""Maximum bytes of a refused blob that are read, so that the client can read the error."""

GRACE_OF_STOP_S = 2
"""Seconds before open connections are closed after "stop"."""

BACKLOG = 1024

THREADS = 16
"""Number of threads that read, write and hash files."""

RANGE_NOT_SATISFIABLE = 416

_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))")

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class BlobStoreLaunch(BaseModel):
    """Launch document of a blob store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["blobs"] = "blobs"
    node: str = Field(description="name of this node")
    folder: str = Field(description="folder of the blobs")
    bound_bytes: PositiveInt = Field(description="maximum bytes of all blobs")
    secret: str = Field(
        pattern=r"^([0-9a-f]{2}){16,}$",
        repr=False,
        description="secret from which the keys of jobs are derived, in hex digits",
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, lt=65536, description="port to listen on; 0: any free one")
    nodes: dict[str, str] = Field({}, description="base URL of the store of each other node, by the node's name")
    link_roots: tuple[str, ...] = Field((), description="folders into which blobs may be linked")
    transfers: PositiveInt = Field(8, description="maximum number of blobs fetched at the same time")
    grace_s: float = Field(GRACE_S, ge=0, description="seconds in which a new blob is kept without a pin")
    tls: ServingTls | None = Field(None, description="certificate to serve with; default: plain HTTP")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PinBody(_Body):
    """Pins of an incarnation."""

    incarnation: Name
    sha256: tuple[Sha256, ...]
    ttl_s: float = Field(gt=0, le=86_400)


class UnpinBody(_Body):
    """Pins of an incarnation that end. `ends_grace`: nothing will use the blobs, so they may be deleted at once."""

    incarnation: Name
    sha256: tuple[Sha256, ...]
    ends_grace: bool = False


class ReservationBody(_Body):
    """A reservation of a holder; 0 bytes end it."""

    holder: Name
    bytes: NonNegativeInt
    ttl_s: float = Field(ge=0, le=86_400)


class FetchedBlob(_Body):
    """A blob that the store fetches."""

    sha256: Sha256
    size: NonNegativeInt


class FetchBody(_Body):
    """Blobs to fetch, and the nodes that may have them. `holder`: uses up the reservation of this holder."""

    blobs: tuple[FetchedBlob, ...]
    nodes: tuple[Name, ...]
    progress: bool = False
    holder: Name = TRANSFERS


class PictureBody(_Body):
    """A picture file to store in its canonical form, and the pin of its blob."""

    path: str
    sha256: Sha256
    height: PositiveInt
    width: PositiveInt
    incarnation: Name
    ttl_s: float = Field(gt=0, le=86_400)


class LinkBody(_Body):
    """Blobs to link into a folder."""

    sha256: tuple[Sha256, ...]
    folder: str


B = TypeVar("B", bound=_Body)
Handler = Callable[[Request, str], Awaitable[Response]]


class BlobServer:
    """The routes of a blob store. `secret`: from which the keys of jobs are derived. `roots`: folders for links."""

    def __init__(self, store: BlobStore, transfers: BlobTransfers, secret: bytes, roots: tuple[Path, ...]) -> None:
        self._store = store
        self._transfers = transfers
        self._secret = secret
        self._roots = tuple(root.resolve() for root in roots)
        self._bytes_served = 0
        self._refused_full = 0
        self._failed_disk = 0

    def app(self) -> Starlette:
        """Return the ASGI application."""
        job = "/jobs/{job}"
        routes: tuple[tuple[str, str, Handler], ...] = (
            ("GET", f"{job}/blobs/{{sha256}}", self._get),  # and HEAD
            ("PUT", f"{job}/blobs/{{sha256}}", self._put),
            ("POST", f"{job}/pins", self._pin),
            ("DELETE", f"{job}/pins", self._unpin),
            ("POST", f"{job}/reservations", self._reserve),
            ("POST", f"{job}/fetch", self._fetch),
            ("POST", f"{job}/link", self._link),
            ("POST", f"{job}/pictures", self._make_picture),
            ("DELETE", job, self._drop),
        )
        return Starlette(
            routes=[
                *(Route(path, self._guarded(handler), methods=[method]) for method, path, handler in routes),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    def counters(self) -> dict[str, int]:
        """Return the counters of the store and of its transfers, by name."""
        return {
            **asdict(self._store.counters()),
            "bytes_served": self._bytes_served,
            "bytes_fetched": self._transfers.bytes_fetched,
            "fetches": self._transfers.fetches,
            "fetch_ms": round(1000 * self._transfers.fetch_s),
            "refused_full": self._refused_full,
            "failed_disk": self._failed_disk,
        }

    def _encode(self, error: GcoreError) -> dict[str, Any]:
        """Return the JSON of an error, and count it."""
        self._refused_full += isinstance(error, StoreFull)
        self._failed_disk += isinstance(error, StoreFailed)
        return encode_error(error)

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: check the job's key, and turn a GcoreError into a response."""

        async def handle(request: Request) -> Response:
            try:
                job = check_job(request.path_params["job"])
                if not key_matches(request.headers.get("authorization"), job_key(self._secret, job)):
                    raise NotAllowed(f"the key is not that of job {job}", fix="Use the key of the job")
                return await handler(request, job)
            except GcoreError as error:
                return JSONResponse(self._encode(error), STATUS.get(type(error), 500))

        return handle

    async def _get(self, request: Request, job: str) -> Response:
        sha256 = check_sha256(request.path_params["sha256"])
        if request.query_params.get("verify") == "1":
            (await asyncio.to_thread(partial(self._store.open, job, sha256, again=True))).close()
        if request.method == "HEAD" and "range" not in request.headers:
            size = await asyncio.to_thread(self._store.size, job, sha256)
            return Response(headers=_blob_headers(sha256, size))
        reader = _BlobReader(await asyncio.to_thread(self._store.open, job, sha256))
        try:
            selected = parse_range(request.headers.get("range"), reader.size)
        except BlobRequestRefused as error:
            reader.close()
            headers = {"content-range": f"bytes */{reader.size}"}
            return JSONResponse(encode_error(error), RANGE_NOT_SATISFIABLE, headers)
        part = range(reader.size) if selected is None else selected
        headers = _blob_headers(sha256, len(part))
        if selected is not None:
            headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{reader.size}"
        status = 200 if selected is None else 206
        if request.method == "HEAD":
            reader.close()
            return Response(None, status, headers)
        return _BlobResponse(self._read(reader, part), reader, status, headers)

    async def _read(self, reader: _BlobReader, part: range) -> AsyncIterator[bytes]:
        place = part.start
        while place < part.stop:
            piece = await asyncio.to_thread(reader.read, place, min(part.stop - place, PIECE_BYTES))
            if not piece:  # truncated by someone else; the client notices the missing bytes
                raise StoreFailed("a blob was truncated while it was read")
            place += len(piece)
            self._bytes_served += len(piece)
            yield piece

    async def _put(self, request: Request, job: str) -> Response:
        length = request.headers.get("content-length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise BlobRequestRefused("the size of the blob is missing", fix="Send a Content-Length")
        blob = Blob(check_sha256(request.path_params["sha256"]), int(length))
        try:
            if not await asyncio.to_thread(self._store.confirm, job, blob):
                await self._receive(request, job, blob)
                return JSONResponse(blob._asdict(), 201)
        except ClientDisconnect as error:
            raise BlobMismatch("the client closed the connection before the end of the blob") from error
        except GcoreError:
            await _discard(request)
            raise
        await _discard(request)
        return JSONResponse(blob._asdict())

    async def _receive(self, request: Request, job: str, blob: Blob) -> None:
        holder = request.query_params.get("holder", "")
        incoming = await asyncio.to_thread(partial(self._store.begin, job, blob, holder=holder))
        try:
            waiting = bytearray()
            async for chunk in request.stream():
                waiting += chunk
                if len(waiting) >= PIECE_BYTES:
                    await asyncio.to_thread(incoming.write, bytes(waiting))
                    waiting.clear()
            await asyncio.to_thread(incoming.write, bytes(waiting))
            await asyncio.to_thread(incoming.commit)
        finally:
            await asyncio.to_thread(incoming.close)

    async def _pin(self, request: Request, job: str) -> Response:
        body = await _read_body(request, PinBody)
        await asyncio.to_thread(self._store.pin, body.incarnation, job, body.sha256, body.ttl_s)
        return JSONResponse({})

    async def _unpin(self, request: Request, job: str) -> Response:
        body = await _read_body(request, UnpinBody)
        await asyncio.to_thread(
            partial(self._store.unpin, ends_grace=body.ends_grace), body.incarnation, job, body.sha256
        )
        return JSONResponse({})

    async def _reserve(self, request: Request, job: str) -> Response:
        body = await _read_body(request, ReservationBody)
        granted = await asyncio.to_thread(self._store.reserve, job, body.holder, body.bytes, body.ttl_s)
        return JSONResponse({"granted": granted})

    async def _fetch(self, request: Request, job: str) -> Response:
        body = await _read_body(request, FetchBody)
        blobs = [Blob(one.sha256, one.size) for one in body.blobs]
        if body.progress:
            lines = self._fetch_lines(job, blobs, body.nodes, body.holder)
            return StreamingResponse(lines, media_type="application/x-ndjson")
        found = await self._transfers.fetch(job, blobs, body.nodes, holder=body.holder)
        return JSONResponse(_result_fields(found))

    async def _fetch_lines(
        self, job: str, blobs: list[Blob], nodes: tuple[str, ...], holder: str
    ) -> AsyncIterator[bytes]:
        lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        def report(received: int, total: int) -> None:
            lines.put_nowait({"bytes": received, "of": total})

        async def fetch() -> None:
            try:
                result = await self._transfers.fetch(job, blobs, nodes, report, holder=holder)
                lines.put_nowait({"result": _result_fields(result)})
            except GcoreError as error:
                lines.put_nowait(self._encode(error))

        fetching = asyncio.create_task(fetch())
        try:
            while True:
                line = await lines.get()
                yield json.dumps(line).encode() + b"\n"
                if "of" not in line:
                    return
        finally:
            await cancel_all([fetching])

    async def _link(self, request: Request, job: str) -> Response:
        body = await _read_body(request, LinkBody)
        folder = await asyncio.to_thread(self._inside_roots, body.folder)
        missing = set(await asyncio.to_thread(self._store.link_to, job, body.sha256, folder))
        linked = [sha256 for sha256 in body.sha256 if sha256 not in missing]
        return JSONResponse({"linked": linked, "missing": sorted(missing)})

    async def _make_picture(self, request: Request, job: str) -> Response:
        body = await _read_body(request, PictureBody)
        return JSONResponse((await asyncio.to_thread(self._store_picture, job, body))._asdict())

    def _store_picture(self, job: str, body: PictureBody) -> Medium:
        """Convert a picture file, store it, and pin it. Raises PictureError, StoreFull and StoreFailed.

        The caller must know the file's SHA-256, so this route reveals no file that the caller has not read.
        """
        content = read_verified(Path(body.path), body.sha256)
        try:
            data, medium = normalize_picture(content, (body.height, body.width))
        except PictureError as error:
            raise PictureError(error.what, where=body.path, fix=error.fix) from error
        self._store.put_bytes(job, data, holder=body.incarnation)
        self._store.pin(body.incarnation, job, (medium.sha256,), body.ttl_s)
        return medium

    def _inside_roots(self, folder: str) -> Path:
        try:
            path = Path(folder).resolve(strict=True)
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, OSError) else OSError(str(error))
            raise disk_error(f"cannot link blobs into {folder[:200]!r}", reason) from error
        if not any(path.is_relative_to(root) for root in self._roots):
            raise NotAllowed(f"blobs may not be linked into {path}", fix="Name a folder inside the node's run folders")
        return path

    async def _drop(self, request: Request, job: str) -> Response:
        await self._transfers.drop_job(job)
        await asyncio.to_thread(self._store.drop_job, job)
        return JSONResponse({})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", **await asyncio.to_thread(self.counters)})

    async def _metrics(self, request: Request) -> Response:
        counters = await asyncio.to_thread(self.counters)
        text = "".join(f"gcore_blob_store_{name} {value}\n" for name, value in counters.items())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


class _BlobReader:
    """An open blob. Threads read and close it: `close` waits for a read that a cancelled task has left behind."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self._file = file
        self._lock = threading.Lock()

    def read(self, start: int, size: int) -> bytes:
        """Return up to `size` bytes from byte `start` on."""
        with self._lock:
            return os.pread(self._file.fileno(), size, start)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class _BlobResponse(StreamingResponse):
    """A response that closes its blob at the end, also when the client is gone before the first byte."""

    def __init__(
        self, content: AsyncIterator[bytes], reader: _BlobReader, status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(content, status, headers)
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            asyncio.get_running_loop().run_in_executor(None, self._reader.close)


def parse_range(header: str | None, size: int) -> range | None:
    """Return the bytes that a Range header selects from a blob of `size` bytes. None: there is no valid header.

    Several ranges in one header count as invalid. Raises BlobRequestRefused if the header selects no byte.
    """
    match = _RANGE.fullmatch((header or "").replace(" ", ""))
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        part = range(max(0, size - int(suffix)), size)
    else:
        part = range(int(first), min(size, int(last) + 1) if last else size)
    if not part:
        raise BlobRequestRefused(f"the range {header!r} selects no byte of a blob of {size} bytes")
    return part


def serve_blobs(launch: BlobStoreLaunch, control: ControlLine | None) -> None:
    """Open the store of a launch document and serve it until the supervisor sends "stop" or a signal arrives.

    `control`: connection to the supervisor; None: started by hand. Raises UsageError and StoreFailed.
    """
    clock = SystemClock()
    listener = listen_http(launch.host, launch.port, BACKLOG)
    store = BlobStore(Path(launch.folder), launch.bound_bytes, clock, grace_s=launch.grace_s)
    asyncio.run(_run(launch, store, listener, control, clock))


async def _run(
    launch: BlobStoreLaunch, store: BlobStore, listener: socket.socket, control: ControlLine | None, clock: Clock
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    connector = Connector(None if launch.tls is None else launch.tls.material)
    secret = bytes.fromhex(launch.secret)
    async with open_blob_http(connector) as http:
        transfers = BlobTransfers(store, launch.node, secret, launch.nodes, http, clock, limit=launch.transfers)
        app = BlobServer(store, transfers, secret, tuple(map(Path, launch.link_roots))).app()
        tls = None if launch.tls is None else serving_context(ReloadingFiles(launch.tls.material))
        server = uvicorn.Server(http_settings(app, backlog=BACKLOG, grace_s=GRACE_OF_STOP_S, tls=tls))
        report_serving(control, join_host_port(launch.host, listener.getsockname()[1]))
        if control is not None:
            arguments = (control, server, transfers)
            threading.Thread(target=_obey, args=arguments, name="commands", daemon=True).start()
        try:
            await server.serve(sockets=[listener])
        finally:
            await transfers.close()
            store.close()


def _obey(control: ControlLine, server: uvicorn.Server, transfers: BlobTransfers) -> None:
    """Execute the commands of the supervisor until it sends "stop"."""
    while True:
        match control.commands.get():
            case {"command": "stop"}:
                server.should_exit = True
                return
            case {"command": "nodes", "nodes": dict(nodes)}:
                transfers.set_nodes(nodes)


def main() -> int:
    """Serve with the launch document of the control line, or of the file in the first argument; return the exit code."""
    control = ControlLine.inherit()
    set_up_logging(level="WARNING")
    try:
        serve_blobs(_read_launch() if control is None else _parse_launch(control.launch), control)
    except GcoreError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        if control is not None:
            control.send("failed", reason=str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _read_launch() -> BlobStoreLaunch:
    if len(sys.argv) != 2:
        raise UsageError("the launch document is missing", fix="Run python -m gcore.media LAUNCH.json")
    with explain_os_errors("cannot read the launch document", UsageError, where=sys.argv[1]):
        text = Path(sys.argv[1]).read_bytes()
    try:
        return _parse_launch(json.loads(text))
    except ValueError as error:
        raise UsageError(f"the launch document is not JSON ({error})", where=sys.argv[1]) from error


def _parse_launch(document: object) -> BlobStoreLaunch:
    try:
        return BlobStoreLaunch.model_validate(document)
    except ValidationError as error:
        raise UsageError(_first_problem(error), where="launch document") from error


async def _read_body(request: Request, kind: type[B]) -> B:
    """Read the JSON body as the pydantic model `kind`. Raises BlobRequestRefused."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise BlobRequestRefused(f"the body is larger than {MAX_BODY_BYTES} bytes", fix="Send several requests")
    try:
        return await asyncio.to_thread(kind.model_validate_json, bytes(raw))
    except ValidationError as error:
        raise BlobRequestRefused(_first_problem(error)) from error


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg'].lower()}" if place else first["msg"].lower()


async def _discard(request: Request) -> None:
    """Read the rest of a refused body: a client that is still sending could not read the answer otherwise."""
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_DISCARDED_BYTES:
                return
    except (ClientDisconnect, RuntimeError):  # gone, or read to the end before
        return


def _result_fields(result: BlobFetch) -> dict[str, Any]:
    return {
        "present": sorted(result.present),
        "unavailable": sorted(result.unavailable),
        "failed": result.failed,
        "folder": result.folder,
    }


def _blob_headers(sha256: str, length: int) -> dict[str, str]:
    return {
        "content-length": str(length),
        "content-type": "application/octet-stream",
        "accept-ranges": "bytes",
        "etag": f'"{sha256}"',
    }
