"""A node without the job's requirements: when the job fails, and when only the node retries later.

A node's progress with the job's model: written a few times, reported as an event, and as the job's wait cause.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from controllers.changes import ChangeSignal
from controllers.flow.job_data import JobData
from controllers.identity import Identity
from controllers.job import preparation as preparing
from controllers.job.preparation import STEPS, FetchProgress, Preparation, fetch_model
from controllers.storage import run_folder as storage
from controllers.storage.run_folder import StorageNotShared
from controllers.telemetry.events import EventLog
from gcore.config import JobSpec, parse_spec
from gcore.config.spec import ModelSpec
from gcore.data.dataset import DataChanged
from gcore.data.order import Cursors
from gcore.errors import DataError, LeaseLost, StoreUnavailable
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Head
from gcore.ledger.records.job import EnginePlace, JobPhase, JobRecord, JobStatus, ModelFetch, Plan, StorageMark
from gcore.ledger.transactions import Versioned
from gcore.models.hubs import ModelError
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore


def plan_over(node: str) -> Versioned[Plan]:
    return Versioned(Plan(generation=1, world="w", ranks=(), engines=(EnginePlace(node=node, slot="cpu:0"),)), 1)


def mirror_of(**records: Any) -> JobMirror:
    return JobMirror(JobKeys("u"), status=Versioned(JobStatus(phase=JobPhase.RUNNING), 1), **records)


class Node:
    """`late`, whose data are what `mistakes` say: each an error at one try, after which they are there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *mistakes: Exception) -> None:
        tree = {"name": "j", "model": {"path": str(folder)}, "data": {"path": "d"}, "flow": {"steps": 1}}
        self.spec: JobSpec = parse_spec(tree | {"rollout": {"max_new_tokens": 4}})
        self.job = JobRecord(uid="u", name="j", spec={}, run_dir=str(folder / "run"), created=0.0, prompts=1)
        self.mirror = mirror_of()
        self.mistakes = list(mistakes)
        self.reward_mistakes: list[Exception] = []
        self.changes = ChangeSignal()
        self.made = JobData(self.spec, "u", None, {}, (), {})  # type: ignore[arg-type]
        self.told: list[str] = []
        cluster = MemoryCluster(FakeClock())
        store, identity = MemoryStore(cluster), Identity("late", "late.aaaa", "h:1", cluster.grant(60))
        self.preparation = Preparation(
            store, JobKeys("u"), identity, folder, self.changes, lambda: self.mirror, self, self.told.append
        )
        monkeypatch.setattr(Preparation, "_open", self.open)
        monkeypatch.setattr(preparing, "LATE_AGAIN_S", 0.0)
        monkeypatch.setattr(preparing, "DATA_AGAIN_S", 0.0)

    def open(self, *_: Any) -> JobData:
        if self.mistakes:
            raise self.mistakes.pop(0)
        return self.made

    async def warm(self) -> None:
        """As a scorer whose rewards are what `reward_mistakes` say."""
        if self.reward_mistakes:
            raise self.reward_mistakes.pop(0)

    async def prepare(self) -> JobData | None:
        return await self.preparation.prepare(self.spec, self.job)


@pytest.mark.parametrize("records", [{}, {"plan": plan_over("late")}], ids=["before a plan", "named by the plan"])
async def test_a_job_that_counts_on_the_node_hears_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: dict[str, Any]
) -> None:
    node = Node(tmp_path, monkeypatch, DataError("there is no such file"))
    node.mirror = mirror_of(**records)
    with pytest.raises(DataError, match="no such file"):
        await node.prepare()


async def test_a_node_that_came_later_tries_again_and_the_job_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, DataError("there is no such file"), DataError("there is no such file"))
    node.mirror = mirror_of(plan=plan_over("other"))
    assert await node.prepare() is node.made


async def test_data_that_have_changed_are_waited_for_whoever_counts_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, DataChanged("the data have changed"))
    node.mirror = mirror_of(plan=plan_over("late"))
    assert await node.prepare() is node.made


async def test_job_with_progress_waits_for_missing_input_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, DataError("there is no such file"), DataError("the last line is cut off"))
    cursors = Cursors.start(1)
    head = Head(seq=7, parent=6, lineage=0, step=3, cursors=cursors, lineages=(), world="w", nonce="n")
    node.mirror = mirror_of(plan=plan_over("late"), head=Versioned(head, 1))
    assert await node.prepare() is node.made
    assert node.told == ["there is no such file", "the last line is cut off", ""]


async def test_a_reward_that_cannot_be_loaded_is_treated_as_data_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch)
    node.reward_mistakes = [DataError("no reward is called so")]
    with pytest.raises(DataError, match="no reward is called so"):
        await node.prepare()
    node.reward_mistakes = [DataError("no reward is called so")]
    node.mirror = mirror_of(plan=plan_over("other"))
    assert await node.prepare() is node.made
    assert node.told[-2:] == ["no reward is called so", ""]


async def test_a_job_that_has_ended_is_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, DataError("there is no such file"))
    node.mirror = JobMirror(JobKeys("u"), status=Versioned(JobStatus(phase=JobPhase.CANCELLED), 1))
    assert await node.prepare() is None
    assert len(node.mistakes) == 1


async def test_a_folder_that_the_nodes_do_not_share_is_treated_as_data_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LOOKS", 1)
    node = Node(tmp_path, monkeypatch)
    mark = StorageMark(node="early", nonce="of a file that is on another disk")
    await node.preparation.store.transact((), (Put(JobKeys("u").storage("early"), mark.encode()),))
    with pytest.raises(StorageNotShared, match="late does not see what early wrote"):
        await node.prepare()


@pytest.mark.parametrize("error", [StoreUnavailable("no answer in time"), LeaseLost("lease 1 has ended")])
async def test_a_store_that_does_not_answer_and_a_lease_that_is_lost_say_nothing_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    node = Node(tmp_path, monkeypatch, error)
    assert await node.prepare() is node.made


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
