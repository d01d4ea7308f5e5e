"""Brings a job's model to this node before anything of the job starts here, and tells how far it is.

A folder is looked at and that is all. A model of a hub is fetched by a process of its own (`python -m gcore.models`),
at the commit that the job was created with, so that all nodes load the same weights; it dies with this controller, and
what it fetched stays in the hub's cache. Progress stands in the store under the controller's lease, for people.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gcore.config.judges import JudgeModel
from gcore.config.spec import ModelSpec
from gcore.errors import StoreUnavailable
from gcore.ledger.job import ModelFetch
from gcore.models.names import ModelError, hub_model
from gcore.models.resolve import ResolvedModel, resolve_model
from gcore.store.types import Put, Store
from gcore.worker.parent import TETHER

STEPS = 20
"""So many times is progress written to the store, at most."""
Progress = Callable[[int, int], None]


async def fetch_model(model: ModelSpec | JudgeModel, revision: str, progress: Progress) -> ResolvedModel:
    """The model on this machine. Raises ModelError. Cancelling ends the transfer."""
    if hub_model(model.path) is None:
        return await asyncio.to_thread(resolve_model, model.path, trust_remote_code=model.trust_remote_code)
    request = {"path": model.path, "revision": revision, "trust_remote_code": model.trust_remote_code}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(TETHER), str(os.getpid())),
        *(sys.executable, "-P", "-m", "gcore.models", json.dumps(request)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    last: dict[str, Any] = {}
    try:
        while line := await process.stdout.readline():
            last = json.loads(line)
            if "total" in last:
                progress(int(last["done"]), int(last["total"]))
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if "folder" in last:
        return ResolvedModel(Path(last["folder"]), last["revision"], tuple(last["remote_code"]))
    if "error" in last:
        raise ModelError(last["error"], where=last["where"], fix=last["fix"])
    raise ModelError(
        f"the process that fetches it ended with {code} and no word", where=model.path, fix="See the controller's log"
    )


class FetchReport:
    """Writes progress to the store, a few times, however often it is told. `run` beside the transfer."""

    def __init__(self, store: Store, key: str, node: str, path: str, lease: int) -> None:
        self._store = store
        self._key = key
        self._node = node
        self._path = path
        self._lease = lease
        self._told = asyncio.Event()
        self._now = (0, 0)

    def note(self, done: int, total: int) -> None:
        """So much is here."""
        self._now = (done, total)
        self._told.set()

    async def run(self) -> None:
        """Until cancelled. A model that was here all along is not worth a word."""
        written = -1
        while True:
            await self._told.wait()
            self._told.clear()
            done, total = self._now
            step = done * STEPS // max(total, 1)
            if step == written or (written < 0 and done >= total):
                continue
            record = ModelFetch(node=self._node, path=self._path, done=done, total=total)
            with contextlib.suppress(StoreUnavailable):  # only for people
                await self._store.transact((), (Put(self._key, record.encode(), lease=self._lease),))
                written = step
