"""Calls one blob store over HTTP, in the name of one job.

A broken connection or an answer that does not come is StoreUnreachable. Every call may be repeated. Blobs are sent and
received in pieces, so no blob is in memory as a whole, except with `put_bytes`. Processes of the store's node read the
file of a blob, once the store has it (`BlobClient.fetch`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from gcore.api.tls import Connector
from gcore.media.protocol import (
    PIECE_BYTES,
    STATUS,
    TRANSFERS,
    Blob,
    StoreFailed,
    StoreUnreachable,
    check_sha256,
    decode_error,
)
from gcore.system.network import http_client
from gcore.types import Medium, PictureRef

SILENCE_S = 20.0
"""Seconds without any byte of an answer after which a store counts as unreachable."""

LINK_S = 600.0
"""The same for links: after a restart the store reads the blobs again before it links them."""

_IDLE_S = 30.0
"""Seconds that an idle connection is kept: less than the keep-alive time of the server."""

ProgressReport = Callable[[int, int], None]
"""Called with the bytes that are present, and the bytes of all requested blobs."""


@dataclass(frozen=True, slots=True)
class BlobFetch:
    """The result of a fetch."""

    present: frozenset[str]
    """SHA-256 of blobs that the store has now."""
    unavailable: frozenset[str]
    """SHA-256 of blobs that every named node answered not to have."""
    failed: dict[str, str]
    """Reason for each other blob, by SHA-256: a node that may have it did not answer. The fetch can be repeated."""
    folder: str
    """Folder of the job's blobs on the node of the store (`gcore.media.protocol.blob_path`)."""


BlobHttp: TypeAlias = httpx.AsyncClient  # noqa: TID251 - a type; `open_blob_http` makes one
"""Connections to blob stores."""


def open_blob_http(connector: Connector) -> BlobHttp:
    """Return an HTTP client for blob stores with the TLS settings of `connector`; the caller closes it."""
    return http_client(SILENCE_S, _RenewedTransport(connector))


async def read_counters(address: str, http: BlobHttp) -> dict[str, int]:
    """Return the counters of the blob store at `address` (`GET /health`). Raises StoreUnreachable."""
    with _explained(address):
        response = await http.get(f"{address}/health")
        return {name: value for name, value in response.json().items() if isinstance(value, int)}


class BlobClient:
    """Calls the blob store at `address`, such as `http://127.0.0.1:8000`, with the key of `job`.

    `http`: connections (`open_blob_http`), which several clients can share. All methods raise StoreUnreachable,
    NotAllowed if the key is wrong, StoreFailed if the disk of the store fails, and what they document.
    """

    def __init__(self, address: str, job: str, key: str, http: BlobHttp) -> None:
        self.address = address.rstrip("/")
        self._base = f"{self.address}/jobs/{job}"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._http = http

    async def put_bytes(self, data: bytes, *, holder: str = "") -> Blob:
        """Store bytes and return their blob. `holder`: uses up the reservation of this holder. Raises StoreFull."""
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        with self._explain():
            self._result(
                await self._http.put(
                    f"{self._base}/blobs/{blob.sha256}",
                    content=data,
                    headers=self._headers,
                    params={"holder": holder} if holder else {},
                )
            )
        return blob

    async def stat(self, sha256: str, *, verify: bool = False) -> int:
        """Return the size of a blob in bytes. `verify`: the store compares its bytes again first, and removes the blob if
        they have changed. Raises BlobMissing.
        """
        with self._explain():
            url = f"{self._base}/blobs/{check_sha256(sha256)}"
            params = {"verify": "1"} if verify else {}
            response = await self._http.head(url, headers=self._headers, params=params)
            if response.is_error:  # without a body that explains it
                kind = next((kind for kind, status in STATUS.items() if status == response.status_code), StoreFailed)
                raise kind(f"status {response.status_code} for blob {sha256}", where=self.address)
            return int(response.headers["content-length"])

    async def read(self, sha256: str, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a blob from byte `start` on, in pieces. Does not compare the SHA-256. Raises BlobMissing."""
        url, headers = f"{self._base}/blobs/{check_sha256(sha256)}", dict(self._headers)
        if start:
            headers["Range"] = f"bytes={start}-"
        with self._explain():
            async with self._http.stream("GET", url, headers=headers) as response:
                if response.status_code != (206 if start else 200):
                    await response.aread()
                    self._result(response)
                    raise StoreUnreachable(f"the store answered status {response.status_code}", where=self.address)
                async for piece in response.aiter_raw(PIECE_BYTES):
                    yield piece

    async def fetch(
        self,
        blobs: Iterable[Blob],
        nodes: Iterable[str],
        progress: ProgressReport | None = None,
        *,
        holder: str = TRANSFERS,
    ) -> BlobFetch:
        """Let the store fetch the blobs that it lacks from the stores of the named nodes.

        `progress`: called from time to time. `holder`: uses up the reservation of this holder. Raises StoreFull. If the
        caller is cancelled, the store finishes the transfers that it has begun.
        """
        body = {"blobs": [blob._asdict() for blob in blobs], "nodes": list(nodes), "progress": True}
        if holder != TRANSFERS:
            body["holder"] = holder
        with self._explain():
            async with self._http.stream("POST", f"{self._base}/fetch", json=body, headers=self._headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._result(response)
                async for line in response.aiter_lines():
                    message = json.loads(line)
                    if "error" in message:
                        raise decode_error(message, self.address)
                    if "result" in message:
                        result = message["result"]
                        return BlobFetch(
                            frozenset(result["present"]),
                            frozenset(result["unavailable"]),
                            dict(result["failed"]),
                            str(result["folder"]),
                        )
                    if progress is not None:
                        progress(message["bytes"], message["of"])
        raise StoreUnreachable("the store closed the connection before the end of a fetch", where=self.address)

    async def make_picture(self, picture: PictureRef, incarnation: str, ttl_s: float) -> Medium:
        """Let the store convert a picture file of its machine to its canonical form, store it and pin it.

        Raises PictureError if the file has changed or is no usable picture, and StoreFull.
        """
        body = {
            "path": picture.path,
            "sha256": picture.sha256,
            "height": picture.target_height,
            "width": picture.target_width,
            "incarnation": incarnation,
            "ttl_s": ttl_s,
        }
        made = await self._call("POST", "pictures", body, silence_s=LINK_S)
        return Medium(made["kind"], made["sha256"], made["size"], tuple(made["shape"]), made["dtype"])

    async def pin(self, incarnation: str, sha256s: Iterable[str], ttl_s: float) -> None:
        """Protect blobs from deletion for `ttl_s` seconds, in the name of an incarnation. Call again to renew."""
        await self._call("POST", "pins", {"incarnation": incarnation, "sha256": list(sha256s), "ttl_s": ttl_s})

    async def unpin(self, incarnation: str, sha256s: Iterable[str], *, ends_grace: bool = False) -> None:
        """End pins of an incarnation. `ends_grace`: nothing will use the blobs, so they may be deleted at once."""
        body = {"incarnation": incarnation, "sha256": list(sha256s), "ends_grace": ends_grace}
        await self._call("DELETE", "pins", body)

    async def reserve(self, holder: str, size: int, ttl_s: float) -> bool:
        """Set the reservation of a holder to `size` bytes for `ttl_s` seconds; return whether there is room.

        If there is no room, the previous reservation stays.
        """
        answer = await self._call("POST", "reservations", {"holder": holder, "bytes": size, "ttl_s": ttl_s})
        return bool(answer["granted"])

    async def link(self, sha256s: Iterable[str], folder: Path) -> tuple[str, ...]:
        """Link verified blobs into a folder of this machine under their SHA-256; return those that the store lacks.

        The folder must exist and be inside the roots of the store. Raises NotAllowed if it is elsewhere.
        """
        body = {"sha256": list(sha256s), "folder": str(folder)}
        answer = await self._call("POST", "link", body, silence_s=LINK_S)
        return tuple(answer["missing"])

    async def drop_job(self) -> None:
        """Delete all blobs, pins and reservations of the job."""
        await self._call("DELETE", "")

    async def _call(self, method: str, path: str, body: Any = None, *, silence_s: float = SILENCE_S) -> Any:
        with self._explain():
            response = await self._http.request(
                method, f"{self._base}/{path}".rstrip("/"), json=body, headers=self._headers, timeout=silence_s
            )
            return self._result(response)

    def _result(self, response: httpx.Response) -> Any:
        """Return the JSON of an answer. Raises the error in it."""
        value = json.loads(response.content)
        if response.is_error:
            raise decode_error(value, self.address)
        return value

    def _explain(self) -> contextlib.AbstractContextManager[None]:
        return _explained(self.address)


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Turn errors of a call into StoreUnreachable."""
    try:
        yield
    except httpx.HTTPError as error:
        raise StoreUnreachable(
            f"the blob store does not answer ({str(error) or type(error).__name__})",
            where=address,
            fix="Check whether the daemon of its node runs",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StoreUnreachable(f"the answer is not one of a blob store ({error!r})", where=address) from error


class _RenewedTransport(httpx.AsyncBaseTransport):
    """httpx's transport, opened again when the certificates change. Belongs to one event loop."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._opened: dict[int, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        generation = self._connector.generation
        if generation not in self._opened:
            self._opened[generation] = httpx.AsyncHTTPTransport(
                verify=self._connector.http or _no_certificates(),
                trust_env=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=_IDLE_S),
            )
        return await self._opened[generation].handle_async_request(request)

    async def aclose(self) -> None:
        # Transports of older certificates may still send a long blob, so none is closed earlier.
        for one in self._opened.values():
            await one.aclose()


@functools.cache
def _no_certificates() -> ssl.SSLContext:
    """Return a TLS context that trusts no certificate: for plain HTTP, without reading the system's certificates."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
