"""The audit of a real job: while it runs, after its end, without its cluster, and with damaged records in etcd."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun, gcore
from corruptions import CORRUPTIONS, Refuted, Scene

from gcore.config.local_cluster import LocalClusterState
from gcore.ledger import archive, chain, transactions
from gcore.ledger.archive import mirror_of
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.store.client import EtcdStore
from gcore.store.keys import JobKeys
from gcore.store.types import Delete, Put, WatchBatch, WatchEvent
from gcore.system.clock import SystemClock

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(600)]


@asynccontextmanager
async def opened(home: Path) -> AsyncIterator[EtcdStore]:
    cluster = LocalClusterState.load(home)
    assert cluster is not None
    store = await EtcdStore.connect((cluster.etcd.endpoint,), clock=SystemClock())
    try:
        yield store
    finally:
        await store.close()


async def move_to_the_archive(home: Path, uid: str, run_dir: Path) -> None:
    """As pruning does, though the job is too short for it."""
    keys = JobKeys(uid)
    async with opened(home) as store:
        listing = await store.list(keys.prefix)
        batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
        mirror = mirror_of(uid, batch)
        assert mirror.head is not None
        assert mirror.checkpoints is not None
        log = {seq: stored.record for seq, stored in mirror.log.items()}
        old = chain.prunable_entries(mirror.head.record, mirror.checkpoints.record.entries, log, keep=3)
        assert len(old) >= 2
        archive.append_entries(run_dir, "test", [log[seq] for seq in old])
        txn = transactions.prune(keys, mirror.head, mirror.checkpoints, old)
        assert (await TransactionExecutor(store, keys).run(txn)).outcome is TxnOutcome.WON


async def records_of(home: Path, uid: str) -> dict[str, bytes]:
    prefix = JobKeys(uid).prefix
    async with opened(home) as store:
        return {kv.key.removeprefix(prefix): kv.value for kv in (await store.list(prefix)).kvs}


async def write(home: Path, uid: str, wanted: dict[str, bytes], there: dict[str, bytes]) -> None:
    """Make etcd hold `wanted` where it holds `there`. Only records under no lease are ever changed."""
    prefix = JobKeys(uid).prefix
    changed = {key for key in wanted | there if wanted.get(key) != there.get(key)}
    writes: list[Put | Delete] = [
        Put(prefix + key, wanted[key]) if key in wanted else Delete(prefix + key) for key in sorted(changed)
    ]
    async with opened(home) as store:
        if writes:
            assert (await store.transact((), writes)).won


def audited(home: Path, job: str) -> tuple[int, dict[str, Any]]:
    answer = gcore("audit", job, "--home", str(home), "-o", "json", check=None)
    return answer.returncode, json.loads(answer.stdout)


def damaged(home: Path, uid: str, run_dir: Path, corruption: Callable[[Scene], Refuted]) -> tuple[Refuted, int, Any]:
    """What is said of the job with this damage, which is undone afterwards."""
    before = asyncio.run(records_of(home, uid))
    kept = run_dir.parent / "kept"
    for folder in ("log", "receipts"):
        shutil.copytree(run_dir / folder, kept / folder)
    manifests = {file: file.read_bytes() for file in run_dir.glob("checkpoints/*/manifest.json")}
    scene = Scene(dict(before), run_dir)
    try:
        refuted = corruption(scene)
        asyncio.run(write(home, uid, scene.records, before))
        return refuted, *audited(home, uid)
    finally:
        asyncio.run(write(home, uid, before, scene.records))
        for folder in ("log", "receipts"):
            shutil.rmtree(run_dir / folder)
            shutil.copytree(kept / folder, run_dir / folder)
        shutil.rmtree(kept)
        for file, content in manifests.items():
            file.write_bytes(content)


def test_a_real_jobs_accounts_are_proved_and_every_damage_to_them_is_refuted(spec: Path, home: Path) -> None:
    gcore("up", "--home", str(home), "--controllers", "2", "--slots", "cpu:2")
    few = ("flow.steps=6", "eval.every=6", "checkpoint.every=2")
    sets = [word for one in few for word in ("--set", one)]
    answer = gcore("submit", str(spec), "--home", str(home), *sets, "-o", "json")
    uid, run_dir = (json.loads(answer.stdout)[key] for key in ("uid", "run_dir"))
    run_dir = Path(run_dir)
    state, while_running = "", 0
    while state not in ("SUCCEEDED", "FAILED", "CANCELLED"):
        code, said = audited(home, uid)
        assert (code, said["violations"]) == (0, [])
        assert said["issued"] == said["trained"] + said["filtered"] + said["failed"] + said["in_flight"]
        while_running += said["steps"] > 0
        state = json.loads(gcore("describe", uid, "--home", str(home), "-o", "json").stdout)["state"]
    assert state == "SUCCEEDED"
    assert while_running >= 2
    asyncio.run(move_to_the_archive(home, uid, run_dir))
    code, clean = audited(home, uid)
    assert (code, clean["violations"], clean["steps"]) == (0, [], 6)

    missed = []
    for corruption in CORRUPTIONS:
        refuted, code, said = damaged(home, uid, run_dir, corruption)
        fitting = [
            one
            for one in said["findings"]
            if one["kind"] == refuted.kind
            and refuted.words in one["sentence"]
            and {str(ref) for ref in refuted.refs} <= set(one["refs"])
        ]
        if code != 1 or not fitting:
            missed.append((corruption.__name__, code, said["findings"][:5]))
    assert missed == []
    assert audited(home, uid) == (0, clean)

    gcore("down", "--home", str(home))
    code, from_the_folder = audited(home, uid)
    assert (code, from_the_folder["violations"]) == (0, [])
    assert from_the_folder["steps"] == 6
    file = max((run_dir / "receipts").glob("*.jsonl"))
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-1]))
    code, said = audited(home, uid)
    assert code == 1
    assert any(one["kind"] == "receipt" for one in said["findings"])


def test_a_run_leaves_what_an_audit_needs_when_it_ends(spec: Path, home: Path) -> None:
    run = ClusterRun(spec, home, "--set", "flow.steps=2", "--set", "eval.every=2")
    try:
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    code, said = audited(home, "arithmetic")
    assert (code, said["violations"], said["steps"]) == (0, [], 2)
    copies = list((home / "runs").glob("*/ended/*.json"))
    assert copies
