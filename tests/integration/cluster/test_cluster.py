"""Whole runs of `gcore run` with etcd, daemons, engines and train ranks, with and without killed processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from booked_run import books_of, check_accounted
from cluster_run import ClusterRun, gcore, run_to_the_end
from run_read import check_metrics, check_tensorboard, newest_run

from gcore.config.local_cluster import LocalClusterState

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]


def events_of(home: Path) -> list[dict]:
    """The newest run's recorded events."""
    newest = max((home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    return [json.loads(line) for line in (newest / "events.jsonl").read_text().splitlines()]


def check_learned(summary: dict) -> None:
    assert summary["audit"] == "clean"
    assert summary["eval_accuracy_before"] <= 0.5
    assert summary["eval_accuracy_after"] >= 0.9


def test_the_demo_learns_on_two_controllers_and_two_ranks_and_every_second_is_accounted_for(
    spec: Path, home: Path
) -> None:
    outcome = run_to_the_end(spec, home, ["--set", "flow.steps=24"])
    assert outcome.code == 0, outcome.output
    check_learned(outcome.summary)
    groups = outcome.summary["groups_by_controller"]
    assert min(groups.values()) >= 0.3 * sum(groups.values())
    assert len(groups) == 2
    best = outcome.summary["best"]
    assert best["value"] >= outcome.summary["eval_accuracy_after"]
    gcore("export", "arithmetic", "--best", "--to", str(home / "best"), "--home", str(home))
    assert (home / "best" / "model.safetensors").read_bytes() == (
        Path(best["checkpoint"]) / "model.safetensors"
    ).read_bytes()
    newest = max((home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    assert len({p.name.split("-")[1] for p in (newest / "receipts").glob("*.jsonl")}) == 2
    check_metrics(newest, steps=24)
    assert {folder.name for folder in (newest / "samples").iterdir()} == {f"0-{step}" for step in range(1, 25)}
    check_accounted(*books_of(home), 24)
    trace = home / "trace.json"
    gcore("trace", "arithmetic", "--step", "5", "--home", str(home), "--to", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"moves", "phases", "cpu:0", "cpu:1"} <= names
    assert {"generate", "train"} <= {event["name"] for event in events if event.get("cat") == "phase"}


@pytest.mark.chaos
def test_etcd_is_killed_and_the_run_goes_on(spec: Path, home: Path) -> None:
    run = ClusterRun(spec, home, "--set", "flow.steps=8")
    try:
        run.until_step(3)
        cluster = LocalClusterState.load(home)
        assert cluster is not None
        os.kill(cluster.etcd.pid, signal.SIGKILL)
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == 8


@pytest.mark.chaos
def test_a_learning_rate_of_zero_teaches_nothing_and_exports_what_it_began_with(
    spec: Path, example: Path, home: Path, tmp_path: Path
) -> None:
    outcome = run_to_the_end(spec, home, ["--set", "train.learning_rate=0", "--set", "flow.steps=2"])
    assert outcome.code == 0, outcome.output
    assert outcome.summary["eval_accuracy_after"] == outcome.summary["eval_accuracy_before"]
    assert outcome.summary["audit"] == "clean"
    gcore("export", "arithmetic", "--to", str(tmp_path / "model"), "--home", str(home))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")("12+3=", return_tensors="pt")
    assert exported(**tokens).logits.isfinite().all()
    first = AutoModelForCausalLM.from_pretrained(example / "model").state_dict()
    assert all(value.equal(first[name]) for name, value in exported.state_dict().items())


@pytest.mark.chaos
def test_each_controller_is_killed_in_turn_and_the_run_goes_on(spec: Path, home: Path) -> None:
    run = ClusterRun(spec, home, "--set", "flow.steps=28", "--set", "tracking=[{name: tensorboard}]")
    try:
        run.until_step(3)
        run.kill_controller("node-1")
        run.until("the other's shards", lambda: shards_of(run) == {"node-0": 64})
        run.until("the return of node-1", lambda: shards_of(run) == {"node-0": 32, "node-1": 32})
        run.kill_controller("node-0")
        run.until("the other's shards", lambda: shards_of(run) == {"node-1": 64})
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    check_learned(outcome.summary)
    check_metrics(newest_run(home), steps=28)
    check_tensorboard(newest_run(home), steps=28)


def shards_of(run: ClusterRun) -> dict[str, int]:
    job = run.job()
    return {share.node: len(share.shards) for share in job.shares} if job is not None else {}


@pytest.mark.chaos
def test_an_engine_and_a_rank_are_killed_and_the_run_goes_on(spec: Path, home: Path) -> None:
    """The short one; what is learned under many more kills stands below."""
    run = ClusterRun(spec, home, "--set", "flow.steps=8")
    try:
        run.until_step(2)
        run.kill_worker("rollout", child=True)
        run.until_step(4)
        run.kill_worker("train", child=False)
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert (outcome.summary["audit"], outcome.summary["steps"]) == ("clean", 8)
    rollbacks = [event for event in events_of(home) if event["kind"] == "rollback"]
    assert len(rollbacks) == 1  # an engine's death needs none
    check_metrics(newest_run(home), steps=8)


@pytest.mark.chaos
def test_workers_and_supervisors_are_killed_and_the_run_goes_on(spec: Path, home: Path) -> None:
    run = ClusterRun(spec, home, "--set", "flow.steps=24", "--set", "tracking=[{name: tensorboard}]")
    try:
        run.until_step(2)
        run.kill_worker("rollout", child=True)
        run.kill_worker("train", child=True)
        run.until_step(11)  # past the checkpoint of step 10, so that a rollback from here keeps what was learned
        run.kill_worker("rollout", child=False)
        run.until_step(13)
        run.kill_worker("train", child=False)
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    check_learned(outcome.summary)
    rollbacks = [event for event in events_of(home) if event["kind"] == "rollback"]
    assert len(rollbacks) == 2  # an engine's death needs none
    check_metrics(newest_run(home), steps=24)
    check_tensorboard(newest_run(home), steps=24)


@pytest.mark.chaos
def test_everything_is_killed_at_several_moments_and_the_run_resumes(spec: Path, home: Path) -> None:
    """Also with another number of controllers."""
    steps = ["--set", "flow.steps=8", "--set", "checkpoint.every=2"]
    for at_step, controllers in ((0, 2), (3, 1)):
        run = ClusterRun(spec, home, *steps, controllers=controllers)
        try:
            run.until("the job", run.job) if at_step == 0 else run.until_step(at_step)
        finally:
            run.kill_everything()
    outcome = run_to_the_end(spec, home, steps)
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == 8
    assert len(list((home / "runs").iterdir())) == 1
    check_metrics(newest_run(home), steps=8)
