"""How far a node is with the job's model: written a few times, told as an event, and as what the job waits for."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from controllers.job.preparation import STEPS, FetchProgress, fetch_model
from controllers.telemetry.events import EventLog
from gcore.config.spec import ModelSpec
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import JobRecord, ModelFetch
from gcore.models.hubs import ModelError
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

KEYS = JobKeys("u")
KEY = KEYS.fetch("node-0")


def report(store: MemoryStore, lease: int) -> FetchProgress:
    return FetchProgress(store, KEY, "node-0", "hf://own/tiny", lease)


async def told(store: MemoryStore, amounts: list[tuple[int, int]]) -> int:
    """How often the store was written to, with the reporter awake after each amount."""
    lease = await store.grant(10)
    one = report(store, lease)
    running = asyncio.create_task(one.run())
    versions = set()
    for done, total in amounts:
        one.note(done, total)
        for _ in range(20):
            await asyncio.sleep(0)
        found = await store.get(KEY)
        if found is not None:
            versions.add(found.mod_revision)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return len(versions)


async def test_progress_is_written_a_few_times_however_often_it_is_told() -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    assert await told(store, [(n, 1000) for n in range(0, 1001, 5)]) == STEPS + 1
    found = await store.get(KEY)
    assert found is not None
    last = ModelFetch.decode(found.value)
    assert (last.node, last.path, last.done, last.total) == ("node-0", "hf://own/tiny", 1000, 1000)


async def test_a_model_that_was_here_all_along_is_not_worth_a_word() -> None:
    assert await told(MemoryStore(MemoryCluster(FakeClock())), [(1000, 1000)]) == 0


def test_the_sentence_has_a_unit_that_fits() -> None:
    large = ModelFetch(node="node-0", path="hf://own/big", done=1_200_000_000, total=3_400_000_000)
    assert large.sentence == "downloading model hf://own/big, 1.2 of 3.4 GB"
    small = ModelFetch(node="node-0", path="ms://own/tiny", done=0, total=4_000_000)
    assert small.sentence == "downloading model ms://own/tiny, 0.0 of 4.0 MB"


def events_of(key: str, value: bytes) -> list[tuple[str, str]]:
    batch = WatchBatch((WatchEvent("put", KeyValue(key, value, 3, 3)),), 3, reset=False)
    log, before = EventLog(KEYS), JobMirror(KEYS)
    log.note(before, batch, before.fold(batch), 0.0)
    return [(event.kind, event.message) for event in log.events]


def test_progress_is_an_event() -> None:
    fetch = ModelFetch(node="node-0", path="hf://own/tiny", done=0, total=4_000_000)
    assert events_of(KEY, fetch.encode()) == [("model", f"node-0 is {fetch.sentence}")]


def test_code_that_a_job_trusts_is_a_warning_that_names_the_files() -> None:
    plain = JobRecord(uid="u", name="n", spec={}, run_dir="/r", created=0.0, prompts=1)
    assert events_of(KEYS.job, plain.encode()) == []
    trusting = plain.model_copy(update={"remote_code": ("modeling_x.py",)})
    ((kind, message),) = events_of(KEYS.job, trusting.encode())
    assert kind == "warning"
    assert "modeling_x.py" in message


async def test_a_folder_is_looked_at_without_a_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    assert (await fetch_model(ModelSpec(path=str(folder)), "", lambda done, total: None)).folder == folder
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickle"):
        await fetch_model(ModelSpec(path=str(folder)), "", lambda done, total: None)
