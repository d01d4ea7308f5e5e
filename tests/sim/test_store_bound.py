"""The store's size for a job is the same after 100,000 steps as after a few thousand, and within its stated bound."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from long_job import CONTROLLERS, KEYS, LOST_EVERY, PROMPTS, RANKS, TIDYING, UID, LongJob, spec
from store_bounds import KEPT_LOG, LAG, MOST_FAULTS, JobScale, KeyBound, archived_evaluations, key_bounds

from controllers.api.store_reader import StoreReader
from controllers.rules.retention import KEEP_LOG, PRUNE_AT, register_and_forget_checkpoints
from controllers.telemetry.notices import MOST_OF_JOB
from gcore.ledger import archive
from gcore.ledger.archive import ArchivedLog
from gcore.ledger.records.chain import LogEntry
from gcore.ledger.transactions import MOST_PRUNED
from gcore.store.keys import JobKeys

STEPS = int(os.environ.get("GCORE_SIM_STEPS", "4000"))
"""`make sim-long` makes it 100,000; what grew would show long before."""
FAILED = "fault"


def bound_of(job: LongJob) -> dict[str, KeyBound]:
    scale = JobScale(
        prompts=PROMPTS, controllers=CONTROLLERS, ranks=RANKS, engines=0, rollbacks=job.rollbacks, steps=job.committed
    )
    return dict(key_bounds(job.spec, scale))


def beyond(job: LongJob) -> dict[str, tuple[int, int]]:
    """The kinds of keys of which there were more, in number or in bytes, than the bound says."""
    bound = bound_of(job)
    return {
        kind: (number, job.seen.bytes[kind])
        for kind, number in job.seen.keys.items()
        if number > bound[kind].keys or job.seen.bytes[kind] > bound[kind].bytes
    }


@pytest.mark.timeout(3600)
def test_after_very_many_steps_the_store_holds_no_more_than_after_few_and_nothing_was_lost(tmp_path: Path) -> None:
    early = max(STEPS // 10, 3 * LOST_EVERY)
    job = LongJob(tmp_path)
    asyncio.run(job.run(early))
    assert beyond(job) == {}
    first = job.seen.forget()
    asyncio.run(job.run(STEPS - early))
    assert job.committed == STEPS
    assert job.rollbacks >= STEPS // (2 * LOST_EVERY)
    assert beyond(job) == {}
    grown = {
        kind: (first.keys.get(kind, 0), number)
        for kind, number in job.seen.keys.items()
        if number > 1.25 * first.keys.get(kind, 0) + 4 and kind != FAILED
    }
    assert grown == {}
    log = ArchivedLog(tmp_path, {seq: stored.record for seq, stored in job.mirror.log.items()})
    assert sorted(log) == list(range(job.slots.head.record.seq + 1))
    assert log.problems == []
    evaluated = set(archived_evaluations(tmp_path)) | set(job.mirror.evaluations)
    assert len(evaluated) >= STEPS // 100


@pytest.mark.parametrize(
    "rule", [rule for rule in TIDYING if rule is not register_and_forget_checkpoints], ids=lambda rule: rule.__name__
)
def test_the_bound_rests_on_each_rule(tmp_path: Path, rule: object) -> None:
    job = LongJob(tmp_path, lacking=rule)
    for _ in range(4):
        asyncio.run(job.run(LOST_EVERY))
        if beyond(job):
            return
    pytest.fail("the store stays within its bound without the rule")


def test_the_audit_of_a_job_whose_log_has_left_the_store_is_clean_and_misses_what_the_folder_lost(
    tmp_path: Path,
) -> None:
    job = LongJob(tmp_path, receipts=True)
    asyncio.run(job.run(LOST_EVERY + 300))
    found = asyncio.run(StoreReader(job.store).audit(UID))
    assert found.violations == ()
    assert found.lineages == 1
    assert found.steps == job.slots.head.record.step
    assert found.epochs == (found.trained + found.filtered) // PROMPTS
    assert found.issued == found.trained + found.filtered + found.failed + found.in_flight
    file = max((tmp_path / archive.LOG_FOLDER).glob("*.jsonl"))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:7] + lines[8:]))
    gone = LogEntry.decode(lines[7]).seq
    assert f"log entry {gone} is missing" in asyncio.run(StoreReader(job.store).audit(UID)).violations


def test_every_kind_of_key_of_a_job_has_a_bound() -> None:
    keys = JobKeys(UID)
    kinds = {
        value.removeprefix(keys.prefix).rstrip("/")
        for value in vars(keys).values()
        if isinstance(value, str) and value.startswith(keys.prefix) and value != keys.prefix
    }
    stated = key_bounds(spec(), JobScale(prompts=PROMPTS, controllers=1, ranks=1, engines=1))
    assert kinds == set(stated)
    assert KEYS.prefix == keys.prefix


def test_the_bound_is_of_the_numbers_that_the_rules_go_by() -> None:
    assert KEPT_LOG == KEEP_LOG
    assert LAG == PRUNE_AT + MOST_PRUNED
    assert MOST_FAULTS == MOST_OF_JOB


def test_the_bound_does_not_grow_with_steps_but_for_checkpoints_that_are_kept_for_ever() -> None:
    few = JobScale(prompts=PROMPTS, controllers=4, ranks=2, engines=2, steps=10)
    many = JobScale(prompts=PROMPTS, controllers=4, ranks=2, engines=2, steps=10**6)
    usual = spec()
    assert key_bounds(usual, few) == key_bounds(usual, many)
    for_ever = usual.model_copy(update={"checkpoint": usual.checkpoint.model_copy(update={"keep_every": 1000})})
    assert key_bounds(for_ever, many)["log"].keys == key_bounds(for_ever, few)["log"].keys + 1000
