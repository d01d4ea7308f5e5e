"""The audit finds every kind of damage to a job's records, with exactly the affected prompts: in the store, and in the run's folder."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.testing
from corruptions import CORRUPTIONS, Refuted, Scene
from recorded_job import KEYS, UID, RecordedJob, a_job_under_way

from controllers.api.run_reader import NoRecordsCopy, audit_of_folder
from controllers.api.store_reader import StoreReader
from controllers.changes import ChangeSignal
from controllers.cli.main import app
from controllers.identity import Identity
from controllers.telemetry.run_recorder import RunRecorder
from gcore.ledger import archive as store_copy
from gcore.ledger.audit.chain import MOST_FOUND, Audit, FindingCollector
from gcore.ledger.records.job import JobPhase
from gcore.store.types import KeyListing
from gcore.system.clock import SystemClock
from gcore.types import PromptRef

Corruption = Callable[[Scene], Refuted]


@pytest.fixture
def job(tmp_path: Path) -> RecordedJob:
    return a_job_under_way(tmp_path / "runs" / f"sums-{UID}")


def audited(job: RecordedJob) -> Audit:
    return asyncio.run(StoreReader(job.store).audit(UID))


def scene_of(job: RecordedJob) -> Scene:
    return Scene({kv.key.removeprefix(KEYS.prefix): kv.value for kv in job.listing.kvs}, job.run_dir)


def damage(job: RecordedJob, corruption: Corruption) -> Refuted:
    scene = scene_of(job)
    before = dict(scene.records)
    refuted = corruption(scene)
    changed = {
        key: scene.records.get(key) for key in before | scene.records if scene.records.get(key) != before.get(key)
    }
    job.corrupt({KEYS.prefix + key: value for key, value in changed.items()})
    return refuted


def test_a_job_under_way_is_clean_and_its_prompts_balance(job: RecordedJob) -> None:
    found = audited(job)
    assert found.violations == ()
    assert (found.steps, found.lineages) == (5, 1)
    assert (found.issued, found.trained, found.filtered, found.failed, found.in_flight) == (31, 20, 5, 1, 5)
    assert found.issued == found.trained + found.filtered + found.failed + found.in_flight


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda one: one.__name__)
def test_corruption_is_found_with_the_affected_prompts(job: RecordedJob, corruption: Corruption) -> None:
    refuted = damage(job, corruption)
    found = audited(job).findings
    fitting = [one for one in found if one.kind == refuted.kind and refuted.words in one.sentence]
    assert fitting, found
    assert any(set(refuted.refs) == set(one.refs) for one in fitting), (refuted, fitting)


def test_most_kinds_of_damage_are_about_prompts_and_the_others_say_about_what(tmp_path: Path) -> None:
    about: dict[str, set[str]] = {}
    whole = scene_of(a_job_under_way(tmp_path / "whole"))
    for number, corruption in enumerate(CORRUPTIONS):
        scene = Scene(dict(whole.records), shutil.copytree(whole.run_dir, tmp_path / str(number)))
        about.setdefault(corruption(scene).about, set()).add(corruption.__name__)
    assert {kind: len(names) for kind, names in about.items()} == {
        "prompts": 25,
        "an entry": 11,
        "a record": 16,
        "a step": 2,
    }


def test_damage_cannot_be_expected_to_name_nothing_by_an_oversight() -> None:
    with pytest.raises(AssertionError, match="about prompts, or says about what else"):
        Refuted("chain")
    with pytest.raises(AssertionError):
        Refuted("chain", (PromptRef(0, 0, 0),), about="a record")


def run_cli(home: Path, *words: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, ["audit", UID, "--home", str(home), *words])


def test_a_run_that_has_ended_is_audited_from_its_folder_when_no_cluster_is_up(
    job: RecordedJob, tmp_path: Path
) -> None:
    job.end(JobPhase.CANCELLED)
    assert audited(job).clean
    answer = run_cli(tmp_path, "-o", "json")
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.output)
    assert said["clean"] is True
    assert (said["steps"], said["issued"], said["in_flight"], said["findings"]) == (5, 31, 5, [])
    table = run_cli(tmp_path)
    assert table.exit_code == 0
    assert "31 sampled: 20 trained, 5 filtered, 1 failed, 5 in flight" in table.output


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda one: one.__name__)
def test_corruption_before_the_store_copy_is_found_from_the_folder(
    job: RecordedJob, corruption: Corruption, tmp_path: Path
) -> None:
    refuted = damage(job, corruption)
    store_copy.write_copy(job.run_dir, "node-0.a", UID, job.listing)
    answer = run_cli(tmp_path, "-o", "json")
    assert answer.exit_code == 1, answer.output
    said = json.loads(answer.output)
    assert said["clean"] is False
    fitting = [one for one in said["findings"] if one["kind"] == refuted.kind and refuted.words in one["sentence"]]
    assert any({str(ref) for ref in refuted.refs} == set(one["refs"]) for one in fitting), said["findings"]
    assert {one["sentence"] for one in said["findings"]} <= set(said["violations"])


def test_a_job_that_never_ended_leaves_no_copy_and_the_command_says_so(job: RecordedJob, tmp_path: Path) -> None:
    assert audited(job).clean
    assert not store_copy.has_copy(job.run_dir, None)
    answer = run_cli(tmp_path)
    assert answer.exit_code != 0
    assert "no local cluster is running" in str(answer.exception)
    with pytest.raises(NoRecordsCopy, match="no copy of the job's records") as raised:
        audit_of_folder(job.run_dir)
    assert raised.value.exit_code == 3, "nothing was audited, so nothing was found"


def test_the_newest_copy_counts_and_one_that_cannot_be_read_is_passed_over(job: RecordedJob) -> None:
    store_copy.write_copy(job.run_dir, "a", UID, job.listing)
    job.end(JobPhase.CANCELLED)
    store_copy.write_copy(job.run_dir, "b", UID, job.listing)
    (job.run_dir / store_copy.COPY_FOLDER / "c.json").write_text("{")
    copy = store_copy.read_copy(job.run_dir)
    assert copy is not None
    assert copy.revision == job.listing.revision
    assert copy.records == {kv.key.removeprefix(KEYS.prefix): kv.value.decode() for kv in job.listing.kvs}


@pytest.mark.parametrize("already", [False, True], ids=["the first to notice", "another did before"])
async def test_a_controller_leaves_one_copy_when_the_job_has_ended(job: RecordedJob, already: bool) -> None:
    await asyncio.to_thread(job.end, JobPhase.CANCELLED)
    if already:
        store_copy.write_copy(job.run_dir, "another", UID, job.listing)
    mirror = job.mirror
    identity = Identity("node-0", "node-0.a", "127.0.0.1:1", 1)
    reading = RunRecorder(identity, job.run_dir, job.store, KEYS, lambda: mirror, ChangeSignal(), SystemClock())
    await reading.finish()
    (file,) = (job.run_dir / store_copy.COPY_FOLDER).iterdir()
    assert file.name == ("another.json" if already else "node-0.a.json")
    copy = store_copy.read_copy(job.run_dir)
    assert copy is not None
    assert copy.job.uid == UID


def test_a_job_of_schema_version_2_goes_on_and_binds_from_its_next_entry_on(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path, binds=False)
    job.step()
    job.step()
    assert audited(job).clean
    job.binds = True
    job.step()
    job.roll_back()
    assert audited(job).clean
    job.binds = False
    job.step()
    assert "has no digest of the job's record, but entry 3 has one" in audited(job).violations[0]


def test_very_many_violations_are_counted_not_told() -> None:
    found = FindingCollector()
    for number in range(MOST_FOUND + 7):
        found.add("outcome", f"number {number}", [PromptRef(0, 0, number)])
    told = Audit(tuple(found.findings), more=found.more).violations
    assert len(told) == MOST_FOUND + 1
    assert told[-1] == "and 7 more violations"
    assert Audit(tuple(found.findings), more=1).violations[-1] == "and 1 more violation"


def test_of_a_job_that_was_deleted_meanwhile_no_copy_makes_its_folder_again(tmp_path: Path) -> None:
    store_copy.write_copy(tmp_path / "gone", "node-0.a", UID, KeyListing((), 9))
    assert list(tmp_path.iterdir()) == []
