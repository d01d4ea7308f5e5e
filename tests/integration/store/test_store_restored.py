"""An older backup of the store is restored with etcd's own tools, and the job continues: real daemons, engines, ranks and etcd.

By then some log entries have left the store, so the run's folder has every kind of file of the discarded branch: archived entries, lines
of `metrics.jsonl`, receipts, weights, checkpoints, samples.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from chaos_cluster import ChaosCluster, Shape
from chaos_run import prepare, spec_file
from etcd_tools import EtcdTools

from gcore.ledger import archive
from gcore.ledger.archive import highest_in_folder
from gcore.ledger.records.chain import Head, LogEntry
from gcore.ledger.records.job import JobPhase
from gcore.system.process import wait_process_ended

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(900)]

BACKUP_AT, LOST_AT, STEPS = 7, 112, 124
LIFE_S = 300.0
SHAPE = Shape(nodes=2, slots=1)
SETTINGS = ("train.ranks=2",)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EtcdTools:
    tools = EtcdTools.find()
    monkeypatch.setenv("PATH", tools.first_on_path(tmp_path / "bin"))
    prepare(tmp_path)
    return tools


async def test_an_older_backup_begins_a_new_lineage_and_what_was_cut_off_does_no_harm(
    tmp_path: Path, tools: EtcdTools
) -> None:
    """As it is to be done: with everything ended."""
    spec, folder, backup = spec_file(tmp_path, STEPS), tmp_path / "cluster", tmp_path / "backup.db"
    async with ChaosCluster.running(folder, SHAPE, random.Random(1)) as cluster:
        lost = await until_lost(cluster, tools, spec, backup, LOST_AT)
        await cluster.until("archived entries", lambda: bool(archive.read_entries(lost.run_dir)), 60.0)
    assert max(archive.read_entries(lost.run_dir)) > lost.before.seq, "nothing of what is cut off was archived"
    tools.restore(backup, folder / "store-0", "store-0")
    async with ChaosCluster.running(folder, SHAPE, random.Random(2)) as cluster:
        await until_ended(cluster, spec, lost, STEPS)


async def test_daemons_and_workers_that_lived_through_it_begin_anew(tmp_path: Path, tools: EtcdTools) -> None:
    """As it is not to be done: only the store is stopped. Ranks and engines go on with what they have, and so do leases in the backup."""
    spec, folder, backup = spec_file(tmp_path, 40), tmp_path / "cluster", tmp_path / "backup.db"
    async with ChaosCluster.running(folder, SHAPE, random.Random(1)) as cluster:
        lost = await until_lost(cluster, tools, spec, backup, 20)
        etcd = cluster.members["store-0"]
        etcd.wanted = False
        etcd.signal(signal.SIGTERM)
        assert etcd.process is not None
        assert await asyncio.to_thread(wait_process_ended, etcd.process, 30.0)
        tools.restore(backup, folder / "store-0", "store-0")
        etcd.wanted = True
        await cluster.look_anew()
        await until_ended(cluster, spec, lost, 40)


@dataclass(frozen=True)
class Lost:
    """What is known of the future that is cut off. `before`: head, as the backup has it; `head`: when it was cut off."""

    uid: str
    before: Head
    head: Head
    entries: list[LogEntry]
    run_dir: Path


async def until_lost(cluster: ChaosCluster, tools: EtcdTools, spec: Path, backup: Path, steps: int) -> Lost:
    """A job, a backup on its way, and some more steps."""
    await cluster.submit(spec, *SETTINGS)
    await cluster.until(f"step {BACKUP_AT}", partial(is_at, cluster, BACKUP_AT), LIFE_S)
    await asyncio.to_thread(tools.save, cluster.endpoints["store-0"], backup)
    before = head_of(cluster)
    await cluster.until(f"step {steps}", partial(is_at, cluster, steps), LIFE_S)
    entries = [seen.entry for seen in cluster.seen.entries]
    return Lost(cluster.uid, before, head_of(cluster), entries, run_folder(cluster))


async def until_ended(cluster: ChaosCluster, spec: Path, lost: Lost, steps: int) -> None:
    """The job goes on from the backup to its end, and all that is promised holds."""
    before, left = lost.before, highest_in_folder(lost.run_dir)
    assert left.entry > before.seq
    await cluster.submit(spec, *SETTINGS)
    assert cluster.uid == lost.uid
    await cluster.until("the rollback", lambda: is_later(cluster, before), LIFE_S)
    await cluster.until("end of the job", lambda: cluster.ended, LIFE_S)
    await cluster.serve()
    found = [*await cluster.audit(), *cluster.seen.broken]
    head, entries = head_of(cluster), [seen.entry for seen in cluster.seen.entries]
    status = cluster.seen.mirror.status
    assert found == []
    assert status is not None
    assert (status.record.phase, head.step) == (JobPhase.SUCCEEDED, steps), status.record.reason
    first = next(one for one in head.lineages if one.number > before.lineage)
    rollback = next(entry for entry in entries if entry.kind == "rollback" and entry.lineage == first.number)
    assert rollback.seq > left.entry, "no number was given out twice"
    assert rollback.follows is not None
    assert before.seq <= rollback.follows < rollback.seq
    assert rollback.step <= before.step
    assert f"the run's folder has entries up to {left.entry}" in rollback.reason
    check_nothing_is_trained_twice(head, [*lost.entries, *entries], rollback, steps)
    check_folder(lost.run_dir, head, lost.head, steps)


def check_nothing_is_trained_twice(head: Head, entries: list[LogEntry], rollback: LogEntry, steps: int) -> None:
    """Along the chain from head, as a bystander saw it: of the time before only what the backup knew of."""
    assert rollback.follows is not None
    known = {entry.seq: entry for entry in entries if entry.seq <= rollback.follows or entry.seq >= rollback.seq}
    trained: Counter[object] = Counter()
    seq: int | None = head.seq
    made = 0
    while seq is not None:
        entry = known[seq]
        made += entry.kind == "train"
        trained.update(one.ref for one in entry.delta)
        seq = entry.parent
    assert made == steps
    assert max(trained.values()) == 1


def check_folder(run_dir: Path, head: Head, lost: Head, steps: int) -> None:
    """What people read tells of each number once; what the cut-off lineage left at its end is gone or passed over."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    numbers = [line["seq"] for line in lines if "seq" in line]
    assert numbers == sorted(set(numbers))
    assert [line["step"] for line in lines if line["kind"] == "step" and line["lineage"] == head.lineage][-1] == steps
    assert lines[-1]["kind"] == "end"
    base = next(one.base_step for one in head.lineages if one.number > lost.lineage)
    left = {int(path.name.partition("-")[2]) for path in (run_dir / "checkpoints").glob(f"{lost.lineage}-*")}
    assert all(step <= base for step in left), "checkpoints that no record names were deleted"


def is_at(cluster: ChaosCluster, step: int) -> bool:
    return cluster.seen.step >= step


def is_later(cluster: ChaosCluster, before: Head) -> bool:
    head = cluster.seen.mirror.head
    return head is not None and head.record.lineage > before.lineage


def head_of(cluster: ChaosCluster) -> Head:
    head = cluster.seen.mirror.head
    assert head is not None
    return head.record


def run_folder(cluster: ChaosCluster) -> Path:
    job = cluster.seen.mirror.job
    assert job is not None
    return Path(job.record.run_dir)
