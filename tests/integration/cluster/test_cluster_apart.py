"""Nodes without a shared folder: one node is lost with its data, and the job continues from the copies on its peers."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from chaos_cluster import ChaosCluster, Shape
from chaos_run import prepare, prepare_pipeline, spec_file
from cluster_run import gcore

from controllers.api.run_reader import audit_of_folder
from controllers.cli.local import home_processes
from gcore.ledger import archive as store_copy
from gcore.ledger.records.job import JobPhase
from gcore.models.layout import AVERAGE_FOLDER, SERVED_FOLDER, checkpoints_in, verify_checkpoint
from gcore.models.replicas import MEMORY, home_folder
from gcore.system.process import send_signal, wait_process_ended

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(600)]

STEPS = 24
APART = ("storage.copies=2", "checkpoint.every=3", "train.copies_gb=0", "rollout.staleness=0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The job's model, data and reward."""
    prepare(tmp_path)
    return tmp_path


def wipe(cluster: ChaosCluster, node: str) -> None:
    """kill -9 of all of a node, which is not started again, and its disk is gone."""
    daemon = cluster.daemons[node]
    daemon.wanted = False
    everything = [one.process for one in home_processes(cluster.homes[node])]
    for process in everything:
        send_signal(process, signal.SIGSTOP)
    for process in everything:
        send_signal(process, signal.SIGKILL)
    for process in everything:
        wait_process_ended(process, 10.0)
    shutil.rmtree(cluster.run_root(node))
    shutil.rmtree(home_folder(MEMORY, str(cluster.homes[node])), ignore_errors=True)


def run_of(cluster: ChaosCluster, node: str) -> Path:
    """A node's own folder of the run."""
    (found,) = cluster.run_root(node).iterdir()
    return found


def named(cluster: ChaosCluster) -> int:
    """The step of the newest checkpoint that the store names."""
    known = cluster.seen.mirror.checkpoints
    return 0 if known is None else max(checkpoint.step for checkpoint in known.record.entries)


def check_ended(cluster: ChaosCluster, steps: int, step: int) -> None:
    """The job has all its steps, and lost none up to `step`, which was named when something happened."""
    mirror = cluster.seen.mirror
    assert mirror.status is not None
    assert mirror.status.record.phase is JobPhase.SUCCEEDED, mirror.status.record.reason
    assert mirror.head is not None
    assert mirror.head.record.step == steps
    back = [seen.entry for seen in cluster.seen.entries if seen.entry.kind == "rollback"]
    assert back, "there was a new world"
    assert all(entry.step >= step for entry in back), "and it began at what the store had named, which a peer had"
    assert not cluster.seen.broken


@pytest.mark.parametrize("lost", ["node-0", "node-1"])
async def test_a_node_that_is_lost_with_its_folder_costs_nothing_that_the_store_had_named(
    folder: Path, lost: str
) -> None:
    async with ChaosCluster.running(folder / "cluster", Shape(nodes=2, apart=True), random.Random(lost)) as cluster:
        left = "node-1" if lost == "node-0" else "node-0"
        await cluster.submit(spec_file(folder, STEPS), *APART)
        await cluster.until("a registered checkpoint", lambda: named(cluster) >= 3, 240.0)
        step = named(cluster)
        wipe(cluster, lost)
        await cluster.until("end of the job", lambda: cluster.ended, 300.0)
        check_ended(cluster, STEPS, step)
        assert await cluster.audit() == []
        own = run_of(cluster, left)
        assert audit_of_folder(own).clean, "also from the folder of the node that is left, alone"
        assert checkpoints_in(own)
        for checkpoint in checkpoints_in(own).values():
            verify_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("flow", "inner", "sets"),
    [("diffusion_nft", SERVED_FOLDER, ()), ("flow_grpo", AVERAGE_FOLDER, ("train.diffusion.ema_decay=0.5",))],
)
async def test_networks_that_follow_the_trained_one_are_copied_too(
    folder: Path, flow: str, inner: str, sets: tuple[str, ...]
) -> None:
    prepare_pipeline(folder)
    async with ChaosCluster.running(folder / "cluster", Shape(nodes=2, apart=True), random.Random(flow)) as cluster:
        await cluster.submit(spec_file(folder, STEPS, generates=flow), *APART, *sets)
        await cluster.until("a registered checkpoint", lambda: named(cluster) >= 3, 240.0)
        step = named(cluster)
        wipe(cluster, "node-0")
        await cluster.until("end of the job", lambda: cluster.ended, 300.0)
        check_ended(cluster, STEPS, step)
        assert await cluster.audit() == []
        kept = checkpoints_in(run_of(cluster, "node-1"))
        assert kept
        for checkpoint in kept.values():
            verify_checkpoint(checkpoint)
            assert list((checkpoint / inner).glob("*.safetensors"))


async def test_when_all_was_killed_the_job_goes_on_from_the_folders_that_are_left(folder: Path) -> None:
    """Of three nodes one has lost its folder when they come back; which checkpoints there are is asked of those that have any."""
    async with ChaosCluster.running(folder / "cluster", Shape(nodes=3, apart=True), random.Random("all")) as cluster:
        await cluster.submit(spec_file(folder, STEPS), *APART)
        await cluster.until("a registered checkpoint", lambda: named(cluster) >= 3, 240.0)
        for kept in (*cluster.members.values(), *cluster.daemons.values()):
            kept.wanted = False
        cluster.kill_all()
        step = named(cluster)
        shutil.rmtree(cluster.run_root("node-1"))
        for kept in (*cluster.members.values(), *cluster.daemons.values()):
            kept.wanted = True
        await cluster.until("end of the job", lambda: cluster.ended, 300.0)
        check_ended(cluster, STEPS, step)
        assert await cluster.audit() == []


def left_over(to: Path) -> list[Path]:
    """Drafts beside an exported model."""
    return list(to.parent.glob(f".{to.name}*"))


async def test_any_node_answers_with_what_lies_on_others(folder: Path) -> None:
    async with ChaosCluster.running(folder / "cluster", Shape(nodes=2, apart=True), random.Random("ask")) as cluster:
        await cluster.submit(spec_file(folder, 4), *APART, "samples.every=1", "checkpoint.every=9")
        await cluster.until("end of the job", lambda: cluster.ended, 300.0)
        for name in ("checkpoints", "samples", "log", "receipts", "evaluations"):
            shutil.rmtree(run_of(cluster, "node-0") / name, ignore_errors=True)
        asked = ("--address", cluster.addresses["node-0"])

        def says(*words: str) -> str:
            return gcore(*words, *asked).stdout

        found = json.loads(await asyncio.to_thread(says, "checkpoints", cluster.uid, "-o", "json"))
        assert [(one["step"], one["nodes"], one["problem"]) for one in found] == [(4, ["node-1"], "")]
        to = folder / "exported"
        await asyncio.to_thread(says, "export", cluster.uid, "--to", str(to))
        assert (to / "model.safetensors").is_file()
        assert not left_over(to)
        shown = json.loads(await asyncio.to_thread(says, "samples", cluster.uid, "--step", "4", "-o", "json"))
        assert shown, "node-1's samples"
        assert "clean" in await asyncio.to_thread(says, "audit", cluster.uid)
        for words, nodes in ((("--role", "train"), {"node-0", "node-1"}), (("--node", "node-1"), {"node-1"})):
            told = await asyncio.to_thread(says, "logs", cluster.uid, *words, "-o", "json")
            assert {json.loads(line)["node"] for line in told.splitlines()} == nodes, "each has its own workers' logs"


async def test_old_records_of_a_lost_node_lie_with_its_peer(folder: Path) -> None:
    steps = 130
    async with ChaosCluster.running(folder / "cluster", Shape(nodes=2, apart=True), random.Random("old")) as cluster:
        await cluster.submit(spec_file(folder, steps), *APART)
        await cluster.until("end of the job", lambda: cluster.ended, 400.0)
        assert len(cluster.seen.mirror.log) < steps, "old entries left the store"
        lost = run_of(cluster, "node-0")
        await cluster.until("the copy of its records", lambda: store_copy.read_copy(lost) is not None, 60.0)
        found = audit_of_folder(lost)
        assert (found.clean, found.steps) == (True, steps)
        wipe(cluster, "node-0")
        assert await cluster.audit() == []
        found = audit_of_folder(run_of(cluster, "node-1"))
        assert (found.clean, found.steps) == (True, steps)
