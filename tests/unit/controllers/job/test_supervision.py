"""A daemon's notifications about the cluster, and its handling of unreadable records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_session import make_runner
from stored_job import StoredJob

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import NO_SHARES, ClusterMirror
from controllers.job import supervision as retaking
from controllers.job.supervision import work_on_job
from gcore.errors import GcoreError, LeaseLost, SpecError, StoreUnavailable
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.cluster import Quotas, Share, Shares
from gcore.ledger.records.job import JobPhase, JobStatus, NodeRecord
from gcore.ledger.transactions import Versioned
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Delete, KeyValue, Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

KEYS = JobKeys("u")
NODE = NodeRecord(name="node-0", incarnation="node-0.a", address="h:1", slots=("cpu:0",), pid=1)


async def heard(**nodes: bytes) -> dict[str, NodeRecord]:
    memory = MemoryCluster(FakeClock())
    memory.transact((), tuple(Put(keys.node(name.replace("_", "-")), value) for name, value in nodes.items()))
    changes = ChangeSignal()
    mirror = ClusterMirror(MemoryStore(memory), changes)
    watching = asyncio.create_task(mirror.watch_nodes())
    await changes.until(lambda: keys.NODES in mirror.listened)
    watching.cancel()
    return mirror.nodes


async def test_a_registration_of_another_version_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    later = NODE.encode().replace(b'"schema_version":3', b'"schema_version":7')
    assert await heard(node_0=NODE.encode(), node_1=later, node_2=b"?") == {"node-0": NODE}
    assert "schema version 7" in caplog.text


ERRORS = [
    UnreadableRecord("of another version"),
    SpecError("no flow is called 'new'"),
    retaking.NodeNotReady("the file was changed"),
]


class Tries:
    """Runners that meet these errors, one after the other, as deep in task groups as a job's are; then the job's end."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.left: list[str] = []
        self.ended: list[str] = []

    def __call__(self) -> Any:
        calls = {"withdraw": self.withdraw, "end_left": self.end_left, "end_lost": self.end_lost}
        return SimpleNamespace(run=self.run, uid="u", **calls)

    async def end_lost(self) -> None:
        pass

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.meet())

    async def meet(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self.errors:
                group.create_task(fail(self.errors.pop(0)))

    async def withdraw(self) -> None:
        self.left.append("u")

    async def end_left(self, reason: str) -> None:
        assert self.left
        self.ended.append(reason)


@pytest.mark.parametrize("error", ERRORS)
async def test_a_job_that_cannot_be_read_ends_its_runner_and_not_the_daemon(
    error: GcoreError, caplog: pytest.LogCaptureFixture
) -> None:
    tries = Tries(error)
    with caplog.at_level(logging.ERROR):
        await work_on_job(tries, lambda: False, ChangeSignal())
    assert f"job u is not worked on here: {error}" in caplog.messages
    assert tries.left == ["u"]  # its peers do not wait for its lease's end


async def test_a_job_that_was_left_is_taken_up_again_when_it_can_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retaking, "JOB_RETRY_S", 0.0)
    one, other, _ = ERRORS
    tries = Tries(one, one, other)
    with caplog.at_level(logging.ERROR):
        await work_on_job(tries, lambda: True, ChangeSignal())
    assert tries.errors == []
    assert len(tries.left) == 3
    assert len(caplog.messages) == 2  # what is wrong still is not said again


async def test_after_a_failed_try_no_request_to_cancel_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaking, "JOB_RETRY_S", 0.0)
    task = asyncio.current_task()
    assert task is not None
    tries = Tries(ERRORS[0], ERRORS[1])
    await work_on_job(tries, lambda: True, ChangeSignal())
    assert tries.errors == []
    assert task.cancelling() == 0


async def test_a_job_that_was_left_and_ends_is_not_taken_up_again() -> None:
    tries, changes, looks = Tries(*ERRORS), ChangeSignal(), iter((True, True, False))

    def is_active() -> bool:
        asyncio.get_running_loop().call_soon(changes.notify)
        return next(looks)

    await work_on_job(tries, is_active, changes)
    assert len(tries.left) == 1


async def test_a_defect_ends_its_jobs_runner_and_not_the_daemon_and_its_traceback_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retaking, "JOB_RETRY_S", 0.0)
    tries = Tries(AssertionError("a defect"), OverflowError("another"))
    with caplog.at_level(logging.ERROR):
        await work_on_job(tries, lambda: True, ChangeSignal())
    assert tries.errors == []
    assert tries.left == ["u", "u"]
    assert tries.ended == []  # a single one may be of the moment
    assert caplog.text.count("job u met a defect of gcore") == 2
    assert "AssertionError: a defect" in caplog.text
    assert "in fail" in caplog.text


async def test_repeated_defects_end_the_job_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaking, "JOB_RETRY_S", 0.0)
    tries = Tries(*(OverflowError("too large") for _ in range(retaking.MOST_DEFECTS)))
    await work_on_job(tries, lambda: True, ChangeSignal())
    (reason,) = tries.ended
    assert reason.startswith(
        "a defect of gcore was met 3 times in a row: OverflowError: too large at test_supervision.py:"
    )


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), OSError(28, "No space left on device")])
async def test_errors_of_the_store_or_a_node_end_no_job(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaking, "JOB_RETRY_S", 0.0)
    tries = Tries(*(error,) * (2 * retaking.MOST_DEFECTS))
    await work_on_job(tries, lambda: True, ChangeSignal())
    assert len(tries.left) == 2 * retaking.MOST_DEFECTS
    assert tries.ended == []


async def test_defects_far_apart_are_not_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaking, "JOB_RETRY_S", 0.0)
    monkeypatch.setattr(retaking, "CALM_S", 0.0)
    tries = Tries(*(OverflowError() for _ in range(2 * retaking.MOST_DEFECTS)))
    await work_on_job(tries, lambda: True, ChangeSignal())
    assert tries.ended == []


async def test_a_lost_lease_is_the_lifes() -> None:
    tries = Tries(LeaseLost("it has ended"))
    with pytest.raises(ExceptionGroup):
        await work_on_job(tries, lambda: True, ChangeSignal())
    assert tries.left == []


async def test_a_job_is_ended_by_who_leaves_it_last_only(tmp_path: Path) -> None:
    clock = FakeClock()
    memory = MemoryCluster(clock)
    store = MemoryStore(memory)
    runner = make_runner(tmp_path, store, clock)
    await runner.end_left("nothing is there")
    running = JobStatus(phase=JobPhase.RUNNING)
    memory.transact((), (Put(KEYS.state, running.encode()), Put(KEYS.active, b"{}"), Put(KEYS.member("m.1"), b"{}")))
    await runner.end_left("too early")
    assert KEYS.active in {kv.key for kv in (await store.list("")).kvs}
    memory.transact((), (Delete(KEYS.member("m.1")),))
    await runner.end_left("a mistake")
    await runner.end_left("another")
    there = {kv.key: kv.value for kv in (await store.list("")).kvs}
    ended = JobStatus.decode(there[KEYS.state])
    assert (ended.phase, ended.reason) == (JobPhase.FAILED, "a mistake")
    assert KEYS.active not in there


@pytest.mark.parametrize(
    "key", [KEYS.job, KEYS.state, KEYS.head, KEYS.checkpoints, KEYS.plan, KEYS.log(0), KEYS.active, KEYS.prefix]
)
async def test_a_job_whose_central_record_is_gone_ends_with_its_name_and_no_try_goes_on(
    key: str, tmp_path: Path
) -> None:
    """Also where the claim is gone, or everything but the claim."""
    memory = MemoryCluster(FakeClock())
    store = MemoryStore(memory)
    await StoredJob(store, "u", "a").create()
    runner = make_runner(tmp_path, store, FakeClock())
    runner._cluster.active = frozenset({"u"} if key != KEYS.active else ())
    memory.transact((), (Delete(key, prefix=key == KEYS.prefix),))

    def is_active() -> bool:
        return bool(memory.listing(KEYS.active).kvs)

    changes = ChangeSignal()
    work = asyncio.create_task(work_on_job(lambda: runner, is_active, changes))
    states = store.watch(KEYS.state)
    async with asyncio.timeout(60):
        async for batch in states:
            if found := [event.kv.value for event in batch.events if b"FAILED" in event.kv.value]:
                break
    changes.notify()
    await work
    status = JobStatus.decode(found[0])
    lost = KEYS.job if key == KEYS.prefix else key
    assert status.reason.startswith(f"the store has lost {lost}")
    assert "model.path" in status.reason
    assert not is_active()


async def test_nothing_is_ended_for_what_is_there_again_or_for_a_job_that_was_deleted(tmp_path: Path) -> None:
    memory = MemoryCluster(FakeClock())
    store = MemoryStore(memory)
    await StoredJob(store, "u", "a").create()
    runner = make_runner(tmp_path, store, FakeClock())
    await runner.end_lost()
    assert b"RUNNING" in memory.listing(KEYS.state).kvs[0].value
    memory.transact((), (Delete(KEYS.prefix, prefix=True), Delete(KEYS.active)))
    await runner.end_lost()
    assert not memory.listing(KEYS.prefix).kvs


async def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (KEYS.seal_prefix + "x", b"{}"),
        (KEYS.log_prefix + "9" * 5000, b"{}"),
        (KEYS.epoch_prefix + "-1", b"{}"),
        (KEYS.rendezvous("w"), b"\xff"),
        (KEYS.head, b'{"schema_version":2,"cursors":[1]}'),
        (KEYS.plan, b"[" * 100_000),
    ],
    ids=["a step", "a long number", "an epoch", "an address", "a cursor", "no end of depth"],
)
def test_damage_of_any_kind_is_told_as_a_record_that_cannot_be_read(key: str, value: bytes) -> None:
    batch = WatchBatch((WatchEvent("put", KeyValue(key, value, 1, 1)),), 1)
    with pytest.raises(UnreadableRecord) as raised:
        JobMirror(KEYS).fold(batch)
    assert raised.value.where == key


class Batches(MemoryStore):
    """A store whose watches deliver these batches, and then nothing more."""

    def __init__(self, *batches: WatchBatch) -> None:
        super().__init__(MemoryCluster(FakeClock()))
        self.batches = batches

    async def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        for batch in self.batches:
            yield batch


def put(key: str, value: bytes, revision: int) -> WatchEvent:
    return WatchEvent("put", KeyValue(key, value, revision, revision))


async def test_quotas_that_went_while_nobody_listened_are_gone() -> None:
    quotas = put(keys.QUOTAS, Quotas(slots={"a": 2}).encode(), 1)
    mirror = ClusterMirror(Batches(WatchBatch((quotas,), 1, True), WatchBatch((), 2, False)), ChangeSignal())
    await mirror.watch_pool()
    assert mirror.quotas == {"a": 2}
    mirror._store = Batches(WatchBatch((), 9, True))
    await mirror.watch_pool()
    assert mirror.quotas == {}


async def test_shares_that_cannot_be_read_are_not_taken_for_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """Or all slots would be dealt out a second time."""
    shares = Shares(jobs={"u": Share(granted={"a": ("cpu:0",)})})
    read, unread = put(keys.SHARES, shares.encode(), 1), put(keys.SHARES, b"?", 2)
    mirror = ClusterMirror(Batches(WatchBatch((unread,), 2, True)), ChangeSignal())
    mirror.listened.update(mirror.watches.keys() - {keys.SHARES})
    await mirror.watch_shares()
    assert mirror.shares is None
    assert not mirror.is_complete
    assert "ignoring an unreadable record" in caplog.text
    mirror._store = Batches(WatchBatch((read,), 1, True), WatchBatch((unread,), 2, False))
    await mirror.watch_shares()
    assert mirror.shares == Versioned(shares, 1)
    assert mirror.is_complete
    mirror._store = Batches(WatchBatch((WatchEvent("delete", KeyValue(keys.SHARES, b"", 0, 3)),), 3, False))
    await mirror.watch_shares()
    assert mirror.shares == NO_SHARES
