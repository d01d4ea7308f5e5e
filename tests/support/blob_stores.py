"""Blob stores as processes, each with the supervisor's end of its control line, and a proxy that stops within a blob."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from warm_programs import WarmProcess, WarmStarter

from gcore.media.client import BlobClient, BlobHttp
from gcore.media.protocol import job_key
from gcore.system.control_line import CONTROL_FD
from gcore.types import Medium


def store_processes(roots: Collection[int]) -> list[int]:
    """The processes of blob stores below the processes `roots`, such as those of controllers."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        pid = int(file.parent.name)
        if b"gcore.media" in words and b"tether" not in words and _is_under(pid, roots):
            found.append(pid)
    return found


def _is_under(pid: int, roots: Collection[int]) -> bool:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
        if pid in roots:
            return True
    return False


STORES = WarmStarter(("gcore.media.server", "anyio._backends._asyncio", "httpcore"))
SECRET = "5e" * 32
TIMEOUT_S = 60.0


def key_of(job: str = "job") -> str:
    """The key of a job at all these stores."""
    return job_key(bytes.fromhex(SECRET), job)


async def until(read: Callable[[], int], wanted: int) -> None:
    """Wait until `read` returns the wanted number."""
    async with asyncio.timeout(TIMEOUT_S):
        while await asyncio.to_thread(read) != wanted:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


class StoreProcess:
    """The blob store of one node. `launch`: fields of its launch document besides node, folder and secret."""

    def __init__(self, name: str, folder: Path, **launch: Any) -> None:
        self.name = name
        self.folder = folder
        self._launch = {"bound_bytes": 1 << 30, **launch}
        self._socket: socket.socket | None = None
        self.process: WarmProcess | None = None
        self.address = ""
        self.start()

    def start(self, **launch: Any) -> None:
        """Start it, again after `kill`; `launch` replaces fields of the launch document."""
        self._launch |= launch
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, CONTROL_FD: str(theirs.fileno())}
            self.process = STORES.popen(
                "gcore.media", env=environment, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL
            )
        ours.settimeout(TIMEOUT_S)
        self._socket = ours
        self.say({"node": self.name, "folder": str(self.folder), "secret": SECRET, **self._launch})
        with ours.makefile("r", encoding="utf-8") as lines:
            self.first_message = json.loads(lines.readline())
        scheme = "https" if self._launch.get("tls") else "http"
        self.address = f"{scheme}://{self.first_message.get('address')}"

    def say(self, message: dict[str, Any]) -> None:
        """Send a line on the control line."""
        assert self._socket is not None
        self._socket.sendall((json.dumps(message) + "\n").encode())

    def set_nodes(self, *others: StoreProcess) -> None:
        """Send it the addresses of other stores."""
        self.say({"command": "nodes", "nodes": {other.name: other.address for other in others}})

    def stop(self) -> int:
        """Stop it in order, and return its exit code."""
        assert self.process is not None
        self.say({"command": "stop"})
        code = self.process.wait(TIMEOUT_S)
        self._close()
        return code

    def kill(self) -> None:
        """Send SIGKILL and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
            self._close()

    def client(self, http: BlobHttp, job: str = "job") -> BlobClient:
        """A client with the key of `job`."""
        return BlobClient(self.address, job, key_of(job), http)

    def path(self, sha256: str, job: str = "job") -> Path:
        """Where it keeps a blob."""
        return self.folder / job / sha256[:2] / sha256

    def _close(self) -> None:
        self.process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


Start = Callable[..., StoreProcess]
"""Starts a store with a name and settings of its launch document."""


class NarrowProxy:
    """A TCP proxy that forwards `allowance` bytes of replies and then waits, until `open` or `cut`. Made by `start`."""

    def __init__(self, target: str, allowance: int) -> None:
        self.target = target
        """Where new connections go: a URL."""
        self.exhausted = asyncio.Event()
        """Set when the allowance is used up."""
        self._allowance = allowance
        self._opened = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    @classmethod
    async def start(cls, target: str, allowance: int) -> NarrowProxy:
        """Listen on a free port of loopback."""
        proxy = cls(target, allowance)
        proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        return proxy

    @property
    def address(self) -> str:
        """The URL for clients."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def open(self) -> None:
        """Forward everything from now on."""
        self._opened.set()

    def cut(self) -> None:
        """Close the connections, and forward everything from now on."""
        self.open()
        for connection in self._connections:
            connection.cancel()

    async def close(self) -> None:
        """End it."""
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        host, port = self.target.removeprefix("http://").split(":")
        writers = [writer]
        try:
            upstream, out = await asyncio.open_connection(host, int(port))
            writers.append(out)
            await asyncio.gather(self._forward(reader, out), self._reply(upstream, writer))
        except (OSError, asyncio.CancelledError):
            return
        finally:
            for one in writers:
                one.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            if not self._opened.is_set():
                if self._allowance < len(chunk):
                    self.exhausted.set()
                    await self._opened.wait()
                self._allowance -= len(chunk)
            writer.write(chunk)
            await writer.drain()
        raise ConnectionResetError


class TwoStores:
    """The stores of two nodes, as the controller of the first one reaches them (`controllers.workers.blobs.NodeBlobs`)."""

    trouble = ""

    def __init__(self, own: StoreProcess, other: StoreProcess, http: BlobHttp) -> None:
        self._own, self._other, self._http = own, other, http
        self.node = own.name

    async def client(self, job: str, address: str = "") -> BlobClient:
        return self._own.client(self._http, job)

    async def client_of(self, job: str, node: str) -> BlobClient:
        assert node == self._other.name
        return self._other.client(self._http, job)

    def job_folder(self, job: str) -> Path:
        return self._own.folder / job

    async def locate(self, job: str, blobs: Sequence[str]) -> dict[str, list[str]]:
        return {blob: [one.name for one in (self._own, self._other) if one.path(blob, job).exists()] for blob in blobs}

    async def find_lost(self, job: str, media: Sequence[Medium]) -> str | None:
        return next((one.sha256 for one in media if not self._own.path(one.sha256, job).exists()), None)
