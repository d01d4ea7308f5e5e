"""A running host of emulated engines for tests: over real sockets, with the store in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gcore.engines.emulated.host import EngineHost
from gcore.engines.emulated.launch import HostLaunch, LaunchQueue, PlacedEngine
from gcore.engines.emulated.law import TimingModel
from gcore.rollout.client import EngineClient
from gcore.store import keys
from gcore.store.reference import StoreRef
from gcore.store.types import Put
from gcore.system.clock import SystemClock
from gcore.system.process import ProcessId
from gcore.testing import MemoryCluster, MemoryStore
from gcore.worker.records import WorkerRecord

CHARACTERS = "0123456789"
EOS = 1


def make_vocabulary(folder: Path, characters: str = CHARACTERS) -> Path:
    """A model's folder without a model."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"<pad>": 0, "<eos>": EOS} | {character: number + 2 for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(words), "eos_token_id": EOS}))
    return folder


@dataclass
class Scene:
    """A host at work, its store, and a client for each engine."""

    host: EngineHost
    cluster: MemoryCluster
    store: MemoryStore
    clients: list[EngineClient]
    running: asyncio.Task[None]

    def records(self) -> dict[str, WorkerRecord]:
        found = self.cluster.listing(keys.WORKERS).kvs
        return {kv.key.removeprefix(keys.WORKERS): WorkerRecord.decode(kv.value) for kv in found}

    async def until(self, count: int, state: str = "serving") -> dict[str, WorkerRecord]:
        async with asyncio.timeout(30):
            while sum(r.state == state for r in self.records().values()) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self.records()


def launch_of(model: Path, engines: tuple[PlacedEngine, ...], name: str = "emulated-node-0", **more: Any) -> HostLaunch:
    """The document that places them."""
    return HostLaunch(
        name=name,
        node="node-0",
        job_uid="job",
        store=StoreRef(endpoints=("127.0.0.1:1",)),
        engines=engines,
        model=str(model),
        rows=4,
        weight_version="0.0",
        **more,
    )


@asynccontextmanager
async def hosting(
    model: Path,
    law: TimingModel,
    engines: int | tuple[PlacedEngine, ...] = 1,
    inbox: LaunchQueue | None = None,
    serving: int | None = None,
    **more: Any,
) -> AsyncIterator[Scene]:
    """`engines`: so many on slots of their own, or which. `serving`: how many of them come up; None: all."""
    clock = SystemClock()
    cluster = MemoryCluster(clock)
    store = MemoryStore(cluster, "host")
    await store.transact((), (Put(keys.node("node-0"), b"{}"),))
    if isinstance(engines, int):
        engines = tuple(PlacedEngine(instance=f"e{i}", slot=f"emulated:{i}") for i in range(engines))
    host = EngineHost(launch_of(model, engines, **more), law, store, clock, ProcessId(7, 1), inbox)
    running = asyncio.create_task(host.run())
    scene = Scene(host, cluster, store, [], running)
    try:
        records = await scene.until(len(engines) if serving is None else serving)
        addresses = [records[one.instance].address for one in engines if one.instance in records]
        scene.clients = [EngineClient(f"http://{address}", timeout_s=20) for address in addresses if address]
        yield scene
    finally:
        for client in scene.clients:
            await client.close()
        host.stop("the test is over")
        await running
        await store.close()
