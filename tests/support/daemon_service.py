"""A daemon as a service: started as systemd does it, with its messages to systemd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gcore.system.clock import SystemClock
from gcore.system.network import free_ports

CLOCK = SystemClock()
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Service:
    """A daemon, and the systemd that started it. `config` is written before each start."""

    process: asyncio.subprocess.Process

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.said: list[str] = []
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.bind(str(folder / "notify"))
        self._line.setblocking(False)
        (self.port,) = free_ports(1)
        self.config: dict[str, Any] = {
            "node": "node-a",
            "home": "home",
            "run_root": "runs",
            "listen_port": self.port,
            "advertise": f"localhost:{self.port}",
            "etcd": {"endpoints": [endpoint]},
            "slots": ["cpu:0"],
            "lease_ttl_s": 2,
        }

    async def start(self, **environment: str) -> asyncio.subprocess.Process:
        file = self.folder / "node.yaml"
        file.write_text(yaml.safe_dump(self.config))
        told = {"NOTIFY_SOCKET": str(self.folder / "notify"), **environment}
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "controllers.daemon", "--config", str(file)),
                env={**os.environ, **told},
                stderr=log,
            )
        return self.process

    async def hears(self, words: str) -> str:
        """The first message from now on that has these words."""
        while True:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.said.append(self._line.recv(4096).decode())
                    if words in self.said[-1]:
                        return self.said[-1]
            assert self.process.returncode is None, (self.folder / "log").read_text()
            await CLOCK.sleep(0.02)

    async def health(self) -> int | None:
        """None while no server answers."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                return None
            return int(answer.status)

    async def until(self, condition: Callable[[int | None], bool]) -> None:
        while not condition(await self.health()):
            await CLOCK.sleep(0.05)

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        self.end_line()

    def end_line(self) -> None:
        self._line.close()
