"""Deletion and retention by policy; and leftovers on a disk and in a store.

A run's disk quota: its state, its warnings, and the pause of the job.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.storage import garbage as clearing
from controllers.storage.garbage import (
    BYTES_PER_GIB,
    MEASURE_S,
    MOST_NODES,
    YOUNG_S,
    DeletionReport,
    DiskQuota,
    DiskUsage,
    GarbageCollector,
    QuotaLevel,
    delete_garbage,
    disk_bytes,
    find_garbage,
    measure_disk_usage,
)
from controllers.storage.rules import DAY_S, GIB, GarbageCandidate, GarbageDecision, decide_garbage
from gcore.config.node import GarbageSection, KeepPolicy, NodeConfig
from gcore.errors import StoreUnavailable
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus
from gcore.ledger.usage import KEPT_DAYS
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.reference import StoreRef
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.worker.records import WorkerRecord

NOW = 1000 * DAY_S


def run(days: float, gib: float = 1.0, needed_by: str = "") -> GarbageCandidate:
    return GarbageCandidate("run", Path(f"/runs/{days}"), int(gib * GIB), NOW - days * DAY_S, needed_by)


def going(found: list[GarbageCandidate], keep: KeepPolicy) -> list[float]:
    """How many days ago those were used that go."""
    verdicts = decide_garbage(found, GarbageSection(runs=keep), NOW)
    return [(NOW - one.found.used) / DAY_S for one in verdicts if one.goes]


FIVE = [run(days) for days in (1.0, 2.0, 3.0, 4.0, 5.0)]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        pytest.param(KeepPolicy(), [], id="nothing is named"),
        pytest.param(KeepPolicy(newest=2), [3, 4, 5], id="the newest two"),
        pytest.param(KeepPolicy(newest=0), [1, 2, 3, 4, 5], id="none"),
        pytest.param(KeepPolicy(days=3.5), [4, 5], id="younger than"),
        pytest.param(KeepPolicy(newest=4, days=2.5), [5], id="the newest, and whatever is young"),
        pytest.param(KeepPolicy(total_gib=2.5), [3, 4, 5], id="as many as have room"),
        pytest.param(KeepPolicy(total_gib=2.5, days=1.5), [2, 3, 4, 5], id="young, and as many as have room"),
        pytest.param(KeepPolicy(newest=3, total_gib=0.5), [4, 5], id="the newest, whatever they take"),
    ],
)
def test_a_policy_says_what_stays(keep: KeepPolicy, expected: list[float]) -> None:
    assert going(FIVE, keep) == expected


def test_needed_runs_stay_and_count_toward_the_quota() -> None:
    needed = run(9.0, gib=2.0, needed_by="job x has not ended")
    assert going([needed, *FIVE], KeepPolicy(newest=0)) == [1, 2, 3, 4, 5]
    assert going([needed, *FIVE], KeepPolicy(total_gib=3.5)) == [2, 3, 4, 5]


FOUND = st.builds(
    GarbageCandidate,
    st.sampled_from(["run", "cache", "log", "scratch"]),
    st.integers(0, 10**6).map(lambda n: Path(f"/{n}")),
    st.integers(0, 10 * GIB),
    st.floats(0, NOW),
    st.sampled_from(["", "", "needed"]),
)
KEEP = st.builds(
    KeepPolicy,
    newest=st.none() | st.integers(0, 5),
    days=st.none() | st.floats(0.1, 1000),
    total_gib=st.none() | st.floats(0.1, 20),
)


@given(st.lists(FOUND, max_size=25), st.builds(GarbageSection, runs=KEEP, caches=KEEP, logs=KEEP))
def test_needed_and_newest_runs_stay_under_any_policy(found: list[GarbageCandidate], section: GarbageSection) -> None:
    verdicts = decide_garbage(found, section, NOW)
    assert sorted(map(id, found)) == sorted(id(one.found) for one in verdicts)
    assert not [one for one in verdicts if one.goes and one.found.needed_by]
    assert all(one.why for one in verdicts)
    for kind, keep in (("run", section.runs), ("cache", section.caches), ("log", section.logs)):
        free = [one for one in verdicts if one.found.kind == kind and not one.found.needed_by]
        newest = free[: keep.newest or 0]
        assert not [one for one in newest if one.goes]
        stays = [one for one in free[len(newest) :] if not one.goes]
        if keep.everything:
            assert len(stays) == len(free)
        if keep.days is not None:
            assert all(NOW - one.found.used <= keep.days * DAY_S for one in stays)
        if keep.total_gib is not None and stays:
            kept = [one.found.bytes for one in verdicts if one.found.kind == kind and not one.goes]
            assert sum(kept) <= keep.total_gib * GIB


class Node:
    """A disk and a store, with an ended job, an unfinished one, and what they left."""

    def __init__(self, folder: Path) -> None:
        self.home, self.runs = folder / "home", folder / "runs"
        self.store = MemoryStore(MemoryCluster(FakeClock()))
        for name in ("cache", "logs", "jobs"):
            (self.home / name).mkdir(parents=True)

    def config(self, **section: Any) -> NodeConfig:
        return NodeConfig(
            node="n",
            home=str(self.home),
            run_root=str(self.runs),
            etcd=StoreRef(endpoints=("h:1",)),
            slots=("cpu:0",),
            gc=GarbageSection.model_validate(section),
        )

    async def job(self, uid: str, phase: JobPhase, created: float = NOW - DAY_S, **spec: Any) -> Path:
        run_dir = self.runs / f"name-{uid}"
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "checkpoints" / "model").write_bytes(b"x" * 10_000)
        record = JobRecord(uid=uid, name=f"name-{uid[0]}", spec=spec, run_dir=str(run_dir), created=created, prompts=1)
        job_keys = JobKeys(uid)
        puts = [
            Put(job_keys.job, record.encode()),
            Put(job_keys.state, JobStatus(phase=phase, changed=created).encode()),
        ]
        if not phase.ended:
            puts.append(Put(job_keys.active, b""))
        await self.store.transact((), puts)
        return run_dir

    def aged(self, path: Path, days: float, text: str = "x") -> Path:
        if not path.exists():
            path.write_text(text)
        os.utime(path, (NOW - days * DAY_S,) * 2)
        return path

    async def clear(self, found: dict[str, GarbageDecision]) -> DeletionReport:
        return await delete_garbage(self.store, list(found.values()), FakeClock(wall=NOW))

    async def verdicts(self, **section: Any) -> dict[str, GarbageDecision]:
        config = self.config(**section)
        return {
            one.found.path.name: one
            for one in decide_garbage(await find_garbage(config, self.store, NOW), config.gc, NOW)
        }


A, B, C, D = (letter * 12 for letter in "abcd")
ALL = {"runs": {"newest": 0}, "caches": {"newest": 0}, "logs": {"newest": 0}}


async def test_only_folders_of_this_stores_ended_jobs_go(tmp_path: Path) -> None:
    node = Node(tmp_path)
    ended = await node.job(A, JobPhase.SUCCEEDED)
    running = await node.job(B, JobPhase.RUNNING)
    strange = [node.runs / f"name-{C}", node.runs / "people-put-this-here", node.runs / f".name-{A}"]
    for folder in strange:
        folder.mkdir()
    (node.runs / f"link-{A}").symlink_to(ended)
    found = await node.verdicts(**ALL)
    assert {name: one.goes for name, one in found.items()} == {ended.name: True, running.name: False}
    assert found[running.name].why == "job name-b has not ended"
    assert found[ended.name].found.bytes >= 10_000
    assert (await node.clear(found)).problems == ()
    assert sorted(one.name for one in node.runs.iterdir()) == sorted(
        [running.name, f"link-{A}", *(folder.name for folder in strange)]
    )


async def test_a_run_whose_checkpoint_an_unfinished_job_began_from_stays(tmp_path: Path) -> None:
    node = Node(tmp_path)
    ended = await node.job(A, JobPhase.FAILED)
    other = await node.job(C, JobPhase.FAILED)
    await node.job(
        B, JobPhase.PENDING, judges=[{"model": {"path": f"{ended}/checkpoints/0-3"}}], data={"path": f"{other}x"}
    )
    found = await node.verdicts(**ALL)
    assert (found[ended.name].goes, found[ended.name].why) == (False, "job name-b uses it")
    assert found[other.name].goes


async def test_caches_logs_and_scratch_go_unless_a_job_or_a_worker_needs_them(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.job(A, JobPhase.CANCELLED)
    await node.job(B, JobPhase.RUNNING, created=NOW - 10 * DAY_S)
    worker = WorkerRecord(
        instance="rollout-n-1", node="n", role="rollout", job_uid=C, slot="cpu:0", pid=1, pid_started=1
    )
    many = worker.model_copy(update={"instance": "rollout-emulated-n-7-3"})
    await node.store.transact((), [Put(keys.worker(one.instance), one.encode()) for one in (worker, many)])
    cache, logs, jobs = node.home / "cache", node.home / "logs", node.home / "jobs"
    goes = {
        node.aged(cache / ".data.00.index", 20),
        node.aged(cache / ".data.11.rows", 90),
        node.aged(cache / ".data.11.copy", 20),
        node.aged(logs / "rollout-n-0.supervisor.log", 20),
        node.aged(logs / "emulated-n-6.log", 20),
    }
    stays = {
        node.aged(cache / ".data.22.index", 5),
        node.aged(cache / ".data.33.rows", 90),
        node.aged(cache / ".data.33.copy", 5),
        node.aged(logs / "rollout-n-1.supervisor.log", 20),
        node.aged(logs / "emulated-n-7.log", 20),
    }
    node.aged(cache / ".data.11.lock", 20)
    node.aged(logs / "node-0.log", 900)
    for uid, is_left in ((A, False), (B, True), (C, True), (D, False)):
        (jobs / uid / "tmp").mkdir(parents=True)
        (stays if is_left else goes).add(node.aged(jobs / uid, 20))
    found = await node.verdicts(**ALL)
    home = {name: one for name, one in found.items() if one.found.kind != "run"}
    assert {name for name, one in home.items() if one.goes} == {one.name for one in goes}
    assert {name for name, one in home.items() if not one.goes} == {one.name for one in stays}
    await node.clear(found)
    left = {one.name for folder in (cache, logs, jobs) for one in folder.iterdir()}
    assert left == {one.name for one in stays} | {".data.11.lock", "node-0.log"}


async def test_files_used_within_the_hour_stay(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.aged(node.home / "cache" / ".data.00.index", 0.01)
    young = await node.job(A, JobPhase.SUCCEEDED, created=NOW - YOUNG_S + 1)
    old = await node.job(B, JobPhase.SUCCEEDED, created=NOW - YOUNG_S)
    found = await node.verdicts(**ALL)
    assert found[".data.00.index"].why == found[young.name].why == "it was used within the last hour"
    assert found[old.name].goes


async def test_files_named_by_a_job_created_since_the_scan_stay(tmp_path: Path) -> None:
    node = Node(tmp_path)
    named, other = await node.job(A, JobPhase.SUCCEEDED), await node.job(B, JobPhase.SUCCEEDED)
    cache = node.aged(node.home / "cache" / ".data.00.index", 20)
    found = await node.verdicts(**ALL)
    assert all(one.goes for one in found.values())
    await node.job(C, JobPhase.PENDING, model={"path": f"{named}/checkpoints/0-3"})
    node.aged(cache, 0.01)
    cleared = {one.found.path.name: one for one in (await node.clear(found)).verdicts}
    assert (cleared[named.name].goes, cleared[named.name].why) == (False, "job name-c uses it")
    assert (cleared[cache.name].goes, cleared[cache.name].why) == (False, "it was used within the last hour")
    assert (named.exists(), cache.exists(), other.exists()) == (True, True, False)


async def test_it_is_asked_before_each_deletion_for_those_before_it_may_have_taken_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    first, second = await node.job(A, JobPhase.SUCCEEDED), await node.job(B, JobPhase.SUCCEEDED)
    found = await node.verdicts(**ALL)
    deleting = clearing._delete

    def slow(path: Path) -> None:
        deleting(path)
        spec = {"model": {"path": str(second)}}
        job = JobRecord(uid=C, name="new", spec=spec, run_dir="/r", created=NOW, prompts=1)
        node.store.cluster.transact((), (Put(JobKeys(C).job, job.encode()), Put(JobKeys(C).active, b"")))

    monkeypatch.setattr(clearing, "_delete", slow)
    await node.clear({name: found[name] for name in (first.name, second.name)})
    assert (first.exists(), second.exists()) == (False, True)


async def test_a_round_of_a_daemon_deletes_by_itself_and_finishes_what_another_began(tmp_path: Path) -> None:
    node = Node(tmp_path)
    ended = await node.job(A, JobPhase.SUCCEEDED)
    half = node.runs / f".gone-name-{C}"
    (half / "checkpoints").mkdir(parents=True)
    scratch = node.home / "jobs" / f".gone-{D}"
    (scratch / "tmp").mkdir(parents=True)
    clock = FakeClock()
    used = keys.usage("a-node-that-left", int(clock.wall() // 86_400) - KEPT_DAYS - 1, A)
    await node.store.transact((), (Put(used, b"{}"),))
    await GarbageCollector(node.config(), node.store, clock).round()
    assert ended.exists(), "the policy names nothing"
    assert await node.store.get(used) is None
    await GarbageCollector(node.config(**ALL), node.store, FakeClock()).round()
    assert not ended.exists()
    assert not half.exists()
    assert not scratch.exists()


async def test_with_a_record_that_cannot_be_read_nothing_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path)
    ended = await node.job(A, JobPhase.SUCCEEDED)
    await node.job(B, JobPhase.RUNNING)
    await node.store.transact((), [Put(JobKeys(B).job, b"{damaged")])
    await GarbageCollector(node.config(**ALL), node.store, FakeClock()).round()
    assert ended.exists()
    assert "garbage collection stops" in caplog.text


async def test_undeletable_file_is_reported_and_the_rest_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    files = [node.aged(tmp_path / name, 20) for name in ("a", "b")]
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self.name == "a":
            raise PermissionError(1, "Operation not permitted")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    going = {file.name: GarbageDecision(GarbageCandidate("cache", file, 1, 0.0), True, "old") for file in files}
    assert (await node.clear(going)).problems == (f"cannot delete {files[0]}: Operation not permitted",)
    assert [file.exists() for file in files] == [True, False]


RUN = Path("/runs/a-1")


@given(st.integers(0, 1 << 50), st.floats(0.001, 1e6))
def test_nearly_full_comes_before_over_and_each_says_what_to_do(taken: int, quota: float) -> None:
    found = measure_disk_usage(taken, quota, RUN)
    if taken > quota * BYTES_PER_GIB:
        assert found.level is QuotaLevel.OVER
        assert "paused" in found.sentence
        assert "gcore resume" in found.sentence
    elif taken >= 0.9 * quota * BYTES_PER_GIB:
        assert found.level is QuotaLevel.NEARLY
        assert "stops recording samples" in found.sentence
    else:
        assert found == DiskUsage(QuotaLevel.FREE)
    assert not found.sentence or "limits.disk_gib" in found.sentence


class Measured:
    """A quota of 10 GiB over a folder that takes what is said next."""

    def __init__(self, *gib: float, members: int = 1) -> None:
        self.sizes = list(gib)
        self.told: list[QuotaLevel] = []
        self.said: list[str] = []
        self.pauses = 0
        self.store_is_away = False
        self.clock = FakeClock()
        self.quota = DiskQuota(RUN, 10.0, lambda: members, self._show, self._pause, self.clock, self._measure)

    def _measure(self, folder: Path) -> int:
        assert folder == RUN
        return int(self.sizes.pop(0) * BYTES_PER_GIB)

    def _show(self, found: DiskUsage) -> None:
        self.told.append(found.level)
        self.said.append(found.sentence)

    async def _pause(self) -> None:
        if self.store_is_away:
            raise StoreUnavailable("away")
        self.pauses += 1

    async def looks(self) -> None:
        while self.sizes:
            await self.quota.look()


async def test_each_level_is_told_once_and_only_beyond_the_quota_is_the_job_paused() -> None:
    run = Measured(1, 2, 9.5, 9.6, 10.5, 11, 3)
    await run.looks()
    assert run.told == [QuotaLevel.NEARLY, QuotaLevel.OVER, QuotaLevel.FREE]
    assert run.said[-1].endswith("is below its limit again")
    assert run.pauses == 2


async def test_a_store_that_is_away_is_asked_again_at_the_next_look() -> None:
    run = Measured(11, 11)
    run.store_is_away = True
    await run.quota.look()
    run.store_is_away = False
    await run.quota.look()
    assert (run.told, run.pauses) == ([QuotaLevel.OVER], 1)


@pytest.mark.parametrize(("members", "times"), [(0, 1), (1, 1), (4, 4), (500, MOST_NODES)])
def test_the_more_nodes_measure_the_more_rarely_each_does(members: int, times: int) -> None:
    assert Measured(members=members).quota.rest_s == MEASURE_S * times


def test_everything_below_the_folder_counts_hidden_files_too_and_links_are_not_followed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / "checkpoints" / "0-1").mkdir(parents=True)
    elsewhere.write_bytes(b"x" * 10_000_000)
    (run / "checkpoints" / "0-1" / "model").write_bytes(b"x" * 100_000)
    (run / ".draft").write_bytes(b"x" * 50_000)
    (run / "link").symlink_to(elsewhere)
    assert 150_000 <= disk_bytes(run) < 300_000
    assert disk_bytes(tmp_path / "none") == 0
