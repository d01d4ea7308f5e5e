"""A trainer as a process of its own (`weight_trainer`), which broadcasts weights to engines over gloo."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from engine_contract import post
from safetensors.torch import load_file
from warm_programs import ENGINES

from gcore.models.publisher import describe_tensors


class Trainer:
    """The process, and what it sends."""

    def __init__(self, folder: Path, port: int, group: str, world_size: int = 2) -> None:
        self.weights = dict(sorted(load_file(folder / "model.safetensors").items()))
        self.port, self.group, self.world_size = port, group, world_size
        arguments = [str(folder), str(port), str(world_size), group]
        self.process = ENGINES.popen(
            "weight_trainer", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def says(self) -> str:
        assert self.process.stdout is not None
        line: str = await asyncio.to_thread(self.process.stdout.readline)
        return line.strip()

    def send(self, names: list[str] | None = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"send {'*' if names is None else ','.join(names)}\n")
        self.process.stdin.flush()

    def body(self, names: list[str] | None = None, **more: Any) -> dict[str, Any]:
        manifest = describe_tensors({name: self.weights[name] for name in names or self.weights})
        shapes = [list(shape) for shape in manifest.shapes]
        return {
            "names": list(manifest.names),
            "dtypes": list(manifest.dtypes),
            "shapes": shapes,
            "group_name": self.group,
            **more,
        }

    def joining(self, rank: int = 1) -> dict[str, Any]:
        return {
            "master_address": "127.0.0.1",
            "master_port": self.port,
            "rank_offset": rank,
            "world_size": self.world_size,
            "group_name": self.group,
            "backend": "gloo",
        }


@asynccontextmanager
async def joined(http: httpx.AsyncClient, trainer: Trainer) -> AsyncIterator[None]:
    """While engine and trainer are in one group."""
    assert (await post(http, "/init_weights_update_group", **trainer.joining()))["success"] is True
    assert await trainer.says() == "joined"
    try:
        yield
    finally:
        assert (await post(http, "/destroy_weights_update_group", group_name=trainer.group))["success"] is True


async def updated(
    http: httpx.AsyncClient, trainer: Trainer, names: list[str] | None = None, **more: Any
) -> httpx.Response:
    """Ask the engine to receive, and the trainer to send."""
    asked = asyncio.create_task(http.post("/update_weights_from_distributed", json=trainer.body(names, **more)))
    trainer.send(names)
    assert await trainer.says() == "sent"
    return await asked
