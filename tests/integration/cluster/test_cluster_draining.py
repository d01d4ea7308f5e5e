"""A daemon is drained during a run: its shards move, no step is rolled back, and no prompt is trained twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cluster_run import ClusterRun
from run_read import newest_run

from gcore.config.local_cluster import LocalClusterState

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(600)]


def test_a_controller_that_is_asked_to_end_hands_over_and_nothing_is_lost(spec: Path, home: Path) -> None:
    run = ClusterRun(spec, home, "--set", "flow.steps=14")
    try:
        run.until_step(3)
        cluster = LocalClusterState.load(home)
        assert cluster is not None
        pids = {one.name: one.pid for one in cluster.controllers}
        os.kill(pids["node-1"], signal.SIGTERM)
        run.until("the end of node-1", lambda: "handed over" in (home / "logs" / "node-1.log").read_text())
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == 14
    events = [json.loads(line) for line in (newest_run(home) / "events.jsonl").read_text().splitlines()]
    told = [event["message"] for event in events if event["kind"] == "member"]
    leaving = told.index("node-1 is leaving: its daemon shuts down; its shards move to other nodes")
    assert told.index("node-1 has left") > leaving
    assert "node-1 has joined" in told[leaving:]  # it is brought back, as it would be by systemd
    assert [event for event in events if event["kind"] == "rollback"] == []
    moved = next(e["data"]["shares"] for e in events[events_after(events, "is leaving") :] if e["kind"] == "shards")
    assert set(moved) == {"node-0"}


def events_after(events: list[dict], words: str) -> int:
    """The number of the first event that says so."""
    return next(number for number, event in enumerate(events) if words in event["message"])
