"""Real processes of a real run: memory of daemons, threads of workers, and a model from a hub."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from cluster_run import ClusterRun, gcore
from hub_server import serve_hub

from controllers.cli.local import home_processes as kinds_of
from gcore.config.local_cluster import LocalClusterState
from gcore.system.process import SIZED

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]

LARGEST = 80e6
"""Bytes an idle daemon may take."""


def resident(pid: int) -> int:
    """Bytes of memory that the process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_a_controller_without_a_job_is_small(home: Path) -> None:
    gcore("up", "--home", str(home))
    cluster = LocalClusterState.load(home)
    assert cluster is not None
    sizes = {one.name: resident(one.pid) for one in cluster.controllers}
    assert max(sizes.values()) < LARGEST, sizes


@pytest.mark.chaos
def test_a_model_of_a_hub_is_fetched_pinned_and_trained_by_workers_that_keep_to_their_slots(
    spec: Path, example: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in (example / "model").iterdir() if path.is_file()}
    # What the caller's shell says of threads is not what the workers do.
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("MKL_NUM_THREADS", "64")
    with serve_hub() as hub:
        commit = hub.add("own/arithmetic", files)
        hub.held = threading.Event()
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        run = ClusterRun(spec, home, "--set", "model.path=hf://own/arithmetic", "--set", "flow.steps=2")
        try:
            run.until("both nodes to fetch the model", lambda: _fetching(run) == {"node-0", "node-1"})
            # The branch moves on while the nodes fetch: all of them still get what the job was created with.
            hub.add("own/arithmetic", files | {"model.safetensors": b"other weights"})
            hub.held.set()
            run.until_step(1)
            kinds = {one.process.pid: one.kind for one in kinds_of(home.resolve())}
            sizes = {pid: resident(pid) for pid, kind in kinds.items() if kind == "worker"}
            workers = [environment(pid) for pid, kind in kinds.items() if kind == "child"]
            outcome = run.wait()
        finally:
            hub.held.set()
            run.close()
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    fetched = [request for request in hub.requests if "model.safetensors" in request]
    assert fetched
    assert all(f"/resolve/{commit}/" in request for request in fetched)
    assert len(sizes) == 4
    assert max(sizes.values()) < LARGEST, sizes
    assert len(workers) >= 4
    for own in workers:
        assert {own[name] for name in SIZED} == {"1"}
        assert own["OMP_WAIT_POLICY"] == "PASSIVE"
        assert own["TOKENIZERS_PARALLELISM"] == "false"
    events = next(home.glob("runs/*/events.jsonl")).read_text().splitlines()
    told = [event for event in map(json.loads, events) if event["kind"] == "model"]
    assert {event["data"]["node"] for event in told} == {"node-0", "node-1"}
    assert all("downloading model hf://own/arithmetic" in event["message"] for event in told)


def _fetching(run: ClusterRun) -> set[str]:
    """The nodes that the job waits for, because they fetch its model."""
    job = run.job()
    return {wait.what.split()[0] for wait in job.waiting if "downloading model" in wait.what} if job else set()
