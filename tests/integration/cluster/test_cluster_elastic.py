"""A whole cluster whose train ranks and nodes leave and join: no committed step is lost, and none is trained twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun
from run_read import newest_run

from gcore.config.local_cluster import LocalClusterState
from gcore.config.node import NodeConfig
from gcore.models.replicas import MEMORY, home_folder
from gcore.system.process import spawn_detached

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(600)]

NO_CHECKPOINT = ("--set", "checkpoint.every=1000", "--set", "eval.every=null", "--set", "checkpoint.best=none")


def events_of(home: Path, kind: str) -> list[dict[str, Any]]:
    """The run's recorded events of a kind."""
    lines = (newest_run(home) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def check_no_step_was_lost(home: Path, outcome: Any, steps: int) -> None:
    assert outcome.code == 0, outcome.output
    assert (outcome.summary["audit"], outcome.summary["steps"]) == ("clean", steps)
    trained = [event["data"]["step"] for event in events_of(home, "step")]
    assert trained == list(range(1, steps + 1)), "each step is committed once, in order"
    back = [(event["data"]["from_step"], event["data"]["to_step"]) for event in events_of(home, "rollback")]
    assert back, "there was a new world"
    assert all(began == ended for began, ended in back), "and it went on from the newest step"


def test_a_killed_rank_costs_no_committed_step_though_there_is_no_checkpoint(spec: Path, home: Path) -> None:
    run = ClusterRun(spec, home, "--set", "flow.steps=8", *NO_CHECKPOINT)
    try:
        run.until_step(3)
        run.kill_worker("train", child=True)
        run.until_step(6)
        run.kill_worker("train", child=False)
        outcome = run.wait()
    finally:
        run.close()
    check_no_step_was_lost(home, outcome, steps=8)
    assert not list(home_folder(MEMORY, str(home)).glob("*/*/*.data")), "an ended job gives the memory back"


def test_a_node_that_is_lost_with_its_memory_costs_no_committed_step(spec: Path, home: Path) -> None:
    """Controller, engine, rank and memory of a node go at once; its shard of the state lies in its neighbour's memory."""
    run = ClusterRun(spec, home, "--set", "flow.steps=8", *NO_CHECKPOINT)
    try:
        run.until_step(3)
        workers = run.ask(lambda client: client.list_nodes()).workers
        run.kill_controller("node-1")
        for worker in workers:
            if worker.node == "node-1":
                os.kill(worker.pid, signal.SIGKILL)
        shutil.rmtree(home_folder(MEMORY, str(home)) / "node-1")
        outcome = run.wait()
    finally:
        run.close()
    check_no_step_was_lost(home, outcome, steps=8)


def join(run: ClusterRun, node: str = "node-1") -> int:
    """Start a daemon of a new node in a running cluster. Returns its process ID."""
    cluster = LocalClusterState.load(run.home)
    assert cluster is not None
    first = NodeConfig.load(Path(cluster.controllers[0].config_file))
    config = first.model_copy(update={"node": node, "listen_port": 0, "metrics_port": 0, "slots": ("cpu:1",)})
    file = run.home / "controllers" / f"{node}.json"
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "controllers.daemon", "--home", str(run.home), "--config", str(file)]
    return spawn_detached(command, log_file=run.home / "logs" / f"{node}.log").pid


def serving(run: ClusterRun, node: str) -> set[str]:
    """The roles that a node's workers serve in."""
    nodes = run.ask(lambda client: client.list_nodes())
    return {w.role for w in nodes.workers if w.node == node and w.state == "serving"} if nodes else set()


def test_a_node_that_joins_gets_an_engine_and_prompts_without_a_rollback(spec: Path, home: Path) -> None:
    fixed = ("--set", "flow.steps=5000", "--set", "train.ranks=1")
    run = ClusterRun(spec, home, *fixed, *NO_CHECKPOINT, controllers=1, slots=1)
    try:
        run.until_step(2)
        join(run)
        run.until("an engine on the new node", lambda: serving(run, "node-1") == {"rollout"})
        job = run.until("prompts for the new node", lambda: _with_shards_on(run, "node-1"))
        run.until_step(job.step + 2)
    finally:
        run.close()
    assert events_of(home, "rollback") == []


def test_the_world_grows_by_a_node_that_joins_and_no_step_is_lost(spec: Path, home: Path) -> None:
    run = ClusterRun(spec, home, "--set", "flow.steps=5000", *NO_CHECKPOINT, controllers=1, slots=1)
    try:
        run.until_step(2)
        join(run)
        run.until("an engine and a rank on the new node", lambda: serving(run, "node-1") == {"rollout", "train"})
        (grown,) = events_of(home, "rollback")
        assert grown["data"]["from_step"] == grown["data"]["to_step"]
        assert "2 ranks instead of 1" in grown["data"]["reason"]
        run.until_step(grown["data"]["to_step"] + 2)
    finally:
        run.close()
    trained = [event["data"]["step"] for event in events_of(home, "step")]
    assert trained == list(range(1, len(trained) + 1))


def lose(run: ClusterRun, node: str, controller: int) -> None:
    """End a node's controller, which is this process, and its workers at once."""
    workers = run.ask(lambda client: client.list_nodes()).workers
    for pid in (controller, *(worker.pid for worker in workers if worker.node == node)):
        os.kill(pid, signal.SIGKILL)


def rollback_of(run: ClusterRun, home: Path, count: int) -> dict[str, Any]:
    """The event of the job's `count`th rollback, once it is there."""
    run.until(f"rollback {count}", lambda: len(events_of(home, "rollback")) >= count)
    found: dict[str, Any] = events_of(home, "rollback")[count - 1]["data"]
    return found


def test_a_world_of_sequence_groups_grows_and_shrinks_by_whole_groups(spec: Path, home: Path) -> None:
    """Two nodes with one rank each are a group. A third node trains only with a fourth, and no more when that is lost."""
    grouped = ("--set", "flow.steps=5000", "--set", "train.sequence_parallel=2", *NO_CHECKPOINT)
    # The two nodes of the last world may lack a shard of the state of four, so it needs checkpoints.
    run = ClusterRun(spec, home, *grouped, "--set", "checkpoint.every=1", controllers=2, slots=2)
    try:
        run.until_step(2)
        join(run, "node-2")
        run.until("an engine on the third node", lambda: serving(run, "node-2") == {"rollout"})
        run.until_step(run.job().step + 2)
        assert events_of(home, "rollback") == [], "three ranks form no whole groups"
        fourth = join(run, "node-3")
        grown = rollback_of(run, home, 1)
        assert "4 ranks instead of 2" in grown["reason"]
        assert grown["from_step"] == grown["to_step"]
        run.until_step(grown["to_step"] + 2)
        trained = [event["data"]["step"] for event in events_of(home, "step")]
        assert trained == list(range(1, len(trained) + 1))
        lose(run, "node-3", fourth)
        shrunk = rollback_of(run, home, 2)
        run.until_step(shrunk["to_step"] + 3)
        training = [node for node in ("node-0", "node-1", "node-2") if "train" in serving(run, node)]
        assert len(training) == 2
    finally:
        run.close()


def _with_shards_on(run: ClusterRun, node: str) -> Any:
    job = run.job()
    return job if job is not None and any(s.node == node and s.shards for s in job.shares) else None
