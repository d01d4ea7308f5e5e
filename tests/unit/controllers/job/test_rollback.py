"""A store restored from an older backup: files of the discarded branch in the run's folder do no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_job import KEYS, UID, RecordedJob

from controllers.api.run_reader import audit_of_folder, audit_of_records
from controllers.api.store_reader import StoreReader
from controllers.job.executor import apply_action
from controllers.job.rollback import highest_numbers
from controllers.rules.actions import RecordOutcomes
from gcore.config import parse_spec
from gcore.ledger import archive
from gcore.ledger import archive as store_copy
from gcore.ledger.archive import highest_in_folder
from gcore.ledger.audit.chain import Audit
from gcore.ledger.chain import HighWater
from gcore.ledger.records.chain import EndedRef, NodeFolder
from gcore.ledger.records.job import JobPhase, NodeRecord
from gcore.ledger.selection import refs_in_order
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.observability.metrics_file import MetricsFile, MetricsSource, decode_line
from gcore.store.types import WatchBatch, WatchEvent


def audited(job: RecordedJob) -> Audit:
    listing = job.listing
    batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
    return audit_of_records(UID, batch, job.run_dir)


def told(job: RecordedJob) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, brought up to date."""
    mirror = job.mirror
    assert mirror.job is not None
    assert mirror.status is not None
    log = {seq: stored.record for seq, stored in mirror.log.items()}
    source = MetricsSource(mirror.job.record, mirror.status.record, log, {})
    file = MetricsFile(job.run_dir)
    file.bring(source, 1.0, lambda: archive.read_entries(job.run_dir))
    return [line for raw in file.path.read_bytes().splitlines() if (line := decode_line(raw)) is not None]


def steps(job: RecordedJob, count: int) -> None:
    for _ in range(count):
        job.step()


def test_archived_entries_of_a_discarded_branch_are_not_part_of_the_new_lineage(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path)
    steps(job, 3)
    older = job.snapshot()
    steps(job, 4)
    job.prune(3)
    told(job)
    lost = job.head.seq
    job.put_back(older)
    assert job.head.seq == 3
    assert highest_in_folder(tmp_path) == HighWater(lineage=0, entry=lost)
    job.roll_back(highest_in_folder(tmp_path))
    assert (job.head.lineage, job.head.step, job.head.seq) == (1, 2, lost + 1)
    assert job.head.lineages[-1].entry == lost + 1
    steps(job, 4)
    job.prune(9)
    found = audited(job)
    assert found.clean, found.violations
    assert found.steps == 6
    assert found.lineages == 1
    assert [line["seq"] for line in told(job)] == list(range(job.head.seq + 1))


def test_numbers_that_are_given_out_twice_are_refuted(tmp_path: Path) -> None:
    """The reason for the rule: without it the audit reports the discarded branch's entries as damage."""
    job = RecordedJob(tmp_path)
    steps(job, 3)
    older = job.snapshot()
    steps(job, 4)
    job.prune(5)
    job.put_back(older)
    job.roll_back()
    steps(job, 4)
    assert not audited(job).clean


def test_only_numbers_that_a_rollback_says_were_left_out_may_be_missing(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path)
    steps(job, 3)
    older = job.snapshot()
    steps(job, 3)
    told(job)
    job.put_back(older)
    job.roll_back(highest_in_folder(tmp_path))
    steps(job, 1)
    assert audited(job).clean, audited(job).violations
    head, told_by = job.head, job.head.lineages[-1].entry
    assert told_by is not None
    silent = head.model_copy(update={"lineages": (*head.lineages[:-1], replaced(head.lineages[-1], None))})
    elsewhere = head.model_copy(update={"lineages": (*head.lineages[:-1], replaced(head.lineages[-1], head.seq))})
    entry = job.mirror.log[told_by].record
    for harm in (
        {KEYS.head: silent.encode()},
        {KEYS.head: elsewhere.encode()},
        {KEYS.log(told_by): entry.model_copy(update={"follows": None}).encode()},
        {KEYS.log(told_by): entry.model_copy(update={"follows": 1}).encode()},
        {KEYS.log(2): None},
    ):
        before = {key: kv.value for key in harm for kv in job.listing.kvs if kv.key == key}
        job.corrupt(dict(harm))
        assert not audited(job).clean, harm
        job.corrupt(dict(before))
    assert audited(job).clean


def replaced(lineage: Any, entry: int | None) -> Any:
    return lineage.model_copy(update={"entry": entry})


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=3))
def test_audit_stays_clean_after_any_sequence_of_restores(
    tmp_path_factory: pytest.TempPathFactory, tries: list[tuple[int, int, bool]]
) -> None:
    """Also from a backup of a future that was cut off itself."""
    job = RecordedJob(tmp_path_factory.mktemp("run"))
    backups = [job.snapshot()]
    for before, after, from_first in tries:
        steps(job, before)
        backups.append(job.snapshot())
        if job.head.step + after < 9:
            steps(job, after)
        job.prune(4)
        told(job)
        job.put_back(backups[len(backups) // 2 if from_first else -1])
        job.roll_back(highest_in_folder(job.run_dir))
        assert audited(job).clean, audited(job).violations
    steps(job, 1)
    job.prune(9)
    assert audited(job).clean, audited(job).violations
    numbers = [line["seq"] for line in told(job)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("over", [False, True], ids=["it goes on", "it comes to another end"])
async def test_an_end_that_was_cut_off_is_not_taken_for_the_new_one(tmp_path: Path, over: bool) -> None:
    def lived() -> RecordedJob:
        job = RecordedJob(tmp_path)
        steps(job, 3)
        older = job.snapshot()
        steps(job, 2)
        job.end(JobPhase.CANCELLED)
        assert told(job)[-1]["kind"] == "end"
        asyncio.run(StoreReader(job.store).audit(UID))  # which leaves a copy of the records
        job.put_back(older)
        assert highest_in_folder(tmp_path).entry == 5
        job.roll_back(highest_in_folder(tmp_path))
        steps(job, 1)
        if over:
            job.end(JobPhase.FAILED)
        return job

    job = await asyncio.to_thread(lived)
    assert (await StoreReader(job.store).audit(UID)).clean
    kinds = [line["kind"] for line in await asyncio.to_thread(told, job)]
    assert kinds.count("end") == 1 + over
    assert (kinds[-1] == "end") == over
    copy = store_copy.read_copy(tmp_path)
    assert copy is not None
    assert copy.head.lineage == (1 if over else 0)
    if over:
        assert audit_of_folder(tmp_path).clean
    else:
        assert "ends in lineage 0, but the folder has lines of lineage 1" in audit_of_folder(tmp_path).violations[0]
    assert store_copy.has_copy(tmp_path, job.head) == over


async def test_nothing_is_accounted_for_before_the_rollback(tmp_path: Path) -> None:
    def prepared() -> RecordedJob:
        job = RecordedJob(tmp_path)
        steps(job, 3)
        older = job.snapshot()
        steps(job, 1)
        told(job)
        job.put_back(older)
        return job

    job = await asyncio.to_thread(prepared)
    ref = next(refs_in_order(job.rules, job.head, ()))
    ended = RecordOutcomes((EndedRef(ref=ref, kind="failed", reason="the reward raised"),))
    effects: Any = SimpleNamespace(ledger=TransactionExecutor(job.store, KEYS), run_dir=tmp_path)
    view = seen_by(job)
    done = await apply_action(ended, view, effects)
    assert done.outcome is TxnOutcome.STALE
    assert "entries up to 4, but head is entry 3; waiting for a rollback" in done.sentence
    await asyncio.to_thread(job.roll_back, highest_in_folder(tmp_path))
    assert (await apply_action(ended, seen_by(job), effects)).outcome is TxnOutcome.WON
    assert job.head.seq == 6


def seen_by(job: RecordedJob) -> Any:
    """A view in which the world is lost, for its first node is gone."""
    from controllers.rules.view import JobView

    nodes = {"node-1": NodeRecord(name="node-1", incarnation="node-1.b", address="h:1", slots=("cpu:0",), pid=1)}
    assert job.mirror.job is not None
    spec = parse_spec(job.mirror.job.record.spec)
    return JobView(spec, job.rules, job.mirror, "node-1.b", "node-1", nodes, {})


async def test_the_highest_number_of_the_log_is_of_the_folder_or_of_what_nodes_say_of_theirs(tmp_path: Path) -> None:
    job = await asyncio.to_thread(RecordedJob, tmp_path)
    archive.append_entries(tmp_path, "a", [job.mirror.log[0].record.model_copy(update={"seq": 9, "lineage": 3})])
    view = replace(seen_by(job), engines={}, ranks={})
    assert await highest_numbers(view, tmp_path) == HighWater(lineage=3, entry=9)
    told = {"node-1": Versioned(NodeFolder(node="node-1", by="node-1.b", entry=12), 1)}
    elsewhere = replace(view, mirror=replace(view.mirror, folders=told))
    assert await highest_numbers(elsewhere, tmp_path) == HighWater(lineage=3, entry=12), (
        "where nodes share no folder, each says of its own"
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def strange(path: Path) -> None:
    path.write_bytes(b'[1]\n{"seq":true,"lineage":-1}\nnull\n\xff\n' + path.read_bytes())


def long(path: Path) -> None:
    path.write_bytes(b"\n" + b"x" * (5 << 20) + b"\n" + path.read_bytes())


@pytest.mark.parametrize(
    ("harm", "entry"), [(cut, 3), (strange, 4), (long, 4)], ids=["the last line is cut off", "strange lines", "long"]
)
def test_high_water_mark_is_read_from_whole_lines(tmp_path: Path, harm: Callable[[Path], None], entry: int) -> None:
    job = RecordedJob(tmp_path)
    steps(job, 4)
    assert highest_in_folder(tmp_path) == HighWater()
    told(job)
    assert highest_in_folder(tmp_path) == HighWater(entry=4)
    harm(MetricsFile(tmp_path).path)
    assert highest_in_folder(tmp_path) == HighWater(entry=entry)
