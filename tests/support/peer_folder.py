"""A peer that serves a run's files, with a checkpoint in its folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from controllers.api.edge.errors import NotFound
from controllers.api.peers import FilesService
from gcore.api.v1 import files_pb2_grpc
from gcore.models.layout import FileEntry, Manifest, file_entry, manifest_digest

UID = "u"


@contextlib.asynccontextmanager
async def serving(run_dir: Path, made: Callable[[Any], FilesService] = FilesService) -> AsyncIterator[str]:
    """A peer whose folder of the run is `run_dir`: where it answers."""

    async def folder_of(uid: str) -> Path:
        if uid != UID:
            raise NotFound(f"there is no job {uid!r}", fix="Ask for another")
        return run_dir

    server = grpc.aio.server()
    files_pb2_grpc.add_FilesServicer_to_server(made(folder_of), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def checkpoint(run_dir: Path, step: int = 3) -> str:
    """A whole checkpoint, with one folder in it; its digest."""
    folder = run_dir / "checkpoints" / f"0-{step}"
    (folder / "critic").mkdir(parents=True)
    contents = {"model.safetensors": os.urandom(3 << 20), "exp_avg.safetensors": b"a", "exp_avg_sq.safetensors": b""}
    entries: dict[str, FileEntry] = {}
    for file, data in (contents | {"config.json": b"{}", "critic/model.safetensors": b"critic"}).items():
        (folder / file).write_bytes(data)
        entries[file] = file_entry(folder / file)
    manifest = Manifest(job_uid=UID, world="w", lineage=0, step=step, updates=step, files=entries)
    (folder / "manifest.json").write_bytes(manifest.encode())
    return manifest_digest(folder)
