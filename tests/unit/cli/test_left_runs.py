"""Runs whose cluster is gone: their state as their folders tell it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from controllers.api.run_reader import audit_of_folder, events_of_folder, find_run
from controllers.cli.commands.checkpoints import export
from controllers.cli.view.state import ViewState
from controllers.cli.view.summary import describe_finished_run
from gcore.config import parse_spec
from gcore.errors import StoreUnavailable, Unreachable
from gcore.ledger import archive as store_copy
from gcore.ledger import chain, transactions
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry
from gcore.ledger.records.job import EnginePlace, Evaluation, JobPhase, JobRecord, JobStatus, Plan, RankPlace
from gcore.models.layout import MANIFEST_FILE, CheckpointDamaged, Manifest, file_entry
from gcore.store.keys import JobKeys
from gcore.store.types import KeyListing, KeyValue, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Version

UID = "abc123"
SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 2, "window": 8},
        "flow": {"steps": 3, "groups_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
    }
)
AWAY = Unreachable("no cluster is up here", where="home", fix="Start it")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With the folder of a job that was cancelled before its first step, and that was moved since."""
    run_dir = tmp_path / "runs" / f"j-{UID}"
    store, keys = MemoryStore(MemoryCluster(FakeClock())), JobKeys(UID)

    async def made() -> None:
        spec = SPEC.model_dump(mode="json")
        job = JobRecord(uid=UID, name="j", spec=spec, run_dir="/elsewhere/j", created=7.0, prompts=40)
        create = transactions.create(keys, job, JobStatus(phase=JobPhase.PENDING), 0)
        assert (await store.transact(create.compares, create.writes)).won
        listing = await store.list(keys.prefix)
        heard = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
        status = JobMirror(keys).fold(heard).status
        assert status is not None
        plan = Plan(
            generation=1,
            world="w",
            ranks=(RankPlace(rank=0, node="n0", slot="cpu:0"),),
            engines=(EnginePlace(node="n0", slot="cpu:0"),),
        )
        ended = JobStatus(phase=JobPhase.CANCELLED, reason="by hand")
        start = transactions.start(keys, status, chain.base_entry(2, "w", ChainWriter("n0.x", "1")), plan, ended)
        assert (await store.transact(start.compares, start.writes)).won
        store_copy.write_copy(run_dir, "n0.x", UID, await store.list(keys.prefix))

    asyncio.run(made())
    return tmp_path


@pytest.mark.parametrize("name", ["j", UID])
def test_a_run_without_a_summary_is_found_by_the_copy_of_its_records(home: Path, name: str) -> None:
    found = describe_finished_run(home, name, AWAY)
    assert found == {"job": "j", "uid": UID, "checkpoint": "", "folder": str(home / "runs" / f"j-{UID}")}


def test_a_newer_run_that_has_not_finished_is_never_passed_over(home: Path) -> None:
    newer = home / "runs" / "j-newer"
    newer.mkdir()
    os.utime(newer, (2e9, 2e9))
    with pytest.raises(Unreachable, match=r"newest job 'j' \(newer\) has not finished"):
        describe_finished_run(home, "j", AWAY)
    assert describe_finished_run(home, UID, AWAY)["uid"] == UID


@pytest.mark.parametrize("asked", ["k", "u7"])
def test_a_run_that_has_not_finished_is_named_with_what_goes_on_with_it(home: Path, asked: str) -> None:
    (home / "etcd").mkdir()
    for uid, at in (("u7", 2e9), ("u6", 1e9)):
        run_dir = home / "runs" / f"k-{uid}"
        run_dir.mkdir()
        os.utime(run_dir, (at, at))
    with pytest.raises(Unreachable) as told:
        describe_finished_run(home, asked, AWAY)
    assert told.value.what == "job 'k' (u7) has not finished, and no cluster is up here"
    assert str(told.value).endswith("Continue it with `gcore up`, or with `gcore run` and its spec")
    with pytest.raises(Unreachable, match=r"job 'k' \(u6\) has not finished"):
        describe_finished_run(home, "u6", AWAY)


def test_a_store_that_is_away_is_no_cluster_that_has_to_be_started(home: Path) -> None:
    away = StoreUnavailable("cannot look up the job: the store cannot be reached", where="127.0.0.1:1")
    (home / "runs" / "k-u7").mkdir()
    for asked in ("k", "other"):
        with pytest.raises(StoreUnavailable) as told:
            describe_finished_run(home, asked, away)
        assert told.value is away
    newer = home / "runs" / "j-newer"
    newer.mkdir()
    os.utime(newer, (2e9, 2e9))
    with pytest.raises(Unreachable, match="Try again when the store is available, or use the older") as named:
        describe_finished_run(home, "j", away)
    assert "gcore up" not in str(named.value)
    assert describe_finished_run(home, UID, away)["uid"] == UID


def test_an_export_of_a_damaged_checkpoint_says_how_to_take_another(home: Path, tmp_path: Path) -> None:
    run_dir = home / "runs" / "k-u7"
    folder = run_dir / "checkpoints" / "0-8"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors"):
        (folder / name).write_bytes(b"{}")
    files = {path.name: file_entry(path) for path in folder.iterdir()}
    manifest = Manifest(job_uid="u7", world="w", lineage=0, step=8, updates=8, files=files)
    (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    (run_dir / "summary.json").write_text(json.dumps({"job": "k", "uid": "u7", "checkpoint": str(folder)}))
    (folder / "model.safetensors").write_bytes(b"[]")
    with pytest.raises(CheckpointDamaged, match="content differs from what was saved") as told:
        export("k", tmp_path / "to", home)
    assert told.value.fix == "List the others with `gcore checkpoints u7`; export one with `gcore export u7 --step N`"


@pytest.mark.parametrize("name", ["j", UID])
def test_a_damaged_copy_is_told_by_the_audit_and_is_no_missing_run(home: Path, name: str) -> None:
    run_dir = home / "runs" / f"j-{UID}"
    (file,) = (run_dir / store_copy.COPY_FOLDER).iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert find_run(home / "runs", name) == run_dir
    (finding,) = audit_of_folder(run_dir).findings
    assert finding.kind == "record"
    assert str(file) in finding.sentence
    with pytest.raises(Unreachable):
        describe_finished_run(home, name, AWAY)
    assert find_run(home / "runs", "other") is None


def evaluations_of_copy(run_dir: Path, versions: list[Version], *entries: LogEntry) -> list[tuple[int, int]]:
    """Lineage and step of the evaluations that a view shows of a copy with these records."""
    keys = JobKeys(UID)
    job = JobRecord(uid=UID, name="j", spec=SPEC.model_dump(mode="json"), run_dir=str(run_dir), created=7.0, prompts=40)
    records = {keys.evaluation(str(one)): Evaluation(version=one, accuracy=0.5, count=8).encode() for one in versions}
    records |= {keys.job: job.encode()} | {keys.log(one.seq): one.encode() for one in entries}
    kvs = tuple(KeyValue(key, value, 9, 9) for key, value in records.items())
    store_copy.write_copy(run_dir, "n0.x", UID, KeyListing(kvs, 9))
    state = ViewState()
    for event in events_of_folder(run_dir):
        state = state.apply(event)
    return [(one.lineage, one.step) for one in state.evals]


def test_evaluations_of_a_left_run_are_in_the_order_of_their_steps_and_complete(tmp_path: Path) -> None:
    steps = list(range(0, 200, 5))
    assert evaluations_of_copy(tmp_path, [Version(0, step) for step in steps]) == [(0, step) for step in steps]


def test_evaluations_of_a_left_run_that_restarted_are_those_of_its_newest_branch(tmp_path: Path) -> None:
    rollback = LogEntry(seq=9, parent=4, kind="rollback", lineage=1, step=10, world="v", nonce="n", reason="by hand")
    before, after = [Version(0, step) for step in (0, 5, 10, 15, 20)], [Version(1, step) for step in (15, 20)]
    assert evaluations_of_copy(tmp_path, [*before, *after], rollback) == [(0, 0), (0, 5), (0, 10), (1, 15), (1, 20)]
