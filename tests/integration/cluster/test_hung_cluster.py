"""Whole clusters with a hung component: an event names it, and the cluster recovers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun, gcore
from stopping import stop_process

from gcore.config.local_cluster import LocalClusterState

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(600)]


def events_of(home: Path) -> list[dict[str, Any]]:
    newest = max((home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    return [json.loads(line) for line in (newest / "events.jsonl").read_text().splitlines()]


def stop_child(run: ClusterRun, role: str, node: str) -> None:
    """SIGSTOP of the computing child of a worker: it lives, its supervisor lives, and it does nothing."""
    nodes = run.ask(lambda client: client.list_nodes())
    worker = next(w for w in nodes.workers if (w.role, w.node, w.state) == (role, node, "serving"))
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    stop_process(int(children[0]))


def check_ended(run: ClusterRun, steps: int) -> None:
    outcome = run.wait()
    assert outcome.code == 0, outcome.output
    assert (outcome.summary["audit"], outcome.summary["steps"]) == ("clean", steps)


def test_an_engine_that_is_stopped_is_left_named_and_replaced(spec: Path, home: Path) -> None:
    times = ["rollout.silent_s=3", "rollout.watchdog_s=9", "flow.steps=14"]
    run = ClusterRun(spec, home, *(word for one in times for word in ("--set", one)))
    try:
        run.until_step(2)
        stop_child(run, "rollout", "node-1")
        run.until(
            "the engine's name in an event", lambda: any(is_of("wait-engine-node-1", one) for one in events_of(home))
        )
        check_ended(run, 14)
    finally:
        run.close()
    said = [one["data"]["reason"] for one in events_of(home) if is_of("wait-engine-node-1", one)]
    assert "has not responded for 3 s" in said[0]
    assert not [one for one in events_of(home) if one["kind"] == "rollback"]  # nothing was trained twice for it


def is_of(cause: str, event: dict[str, Any]) -> bool:
    return event["kind"] == "warning" and event["data"].get("cause") == cause


def test_a_rank_that_is_stopped_holds_its_world_in_a_collective_and_the_world_is_begun_anew(
    spec: Path, home: Path
) -> None:
    run = ClusterRun(spec, home, "--set", "train.watchdog_s=6", "--set", "flow.steps=8")
    try:
        run.until_step(2)
        stop_child(run, "train", "node-1")
        check_ended(run, 8)
    finally:
        run.close()
    reasons = [one["data"]["reason"] for one in events_of(home) if one["kind"] == "rollback"]
    assert reasons
    assert "no progress in phase" in reasons[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A cluster's folder on a file system of its own, that can be filled. To mount one takes root."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        gcore("down", "--home", str(folder), check=None)
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room there is."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * (1 << 20))
        except OSError:
            pass
        try:
            while True:
                file.write(b"\0")
        except OSError:
            return filler


def test_a_full_disk_that_etcd_dies_of_is_told_and_the_run_goes_on_once_there_is_room(
    spec: Path, small_disk: Path
) -> None:
    run = ClusterRun(spec, small_disk, "--set", "flow.steps=8")
    try:
        run.until_step(2)
        cluster = LocalClusterState.load(small_disk)
        assert cluster is not None
        # An etcd that has its files may do without more room for long; one that has to make them cannot.
        data, aside = Path(cluster.etcd.data_dir), small_disk / "aside"
        data.rename(aside)
        filler = fill(small_disk)
        os.kill(cluster.etcd.pid, signal.SIGKILL)
        run.until("the reason in the view", lambda: "etcd has ended and cannot be started again" in run.log.read_text())
        shutil.rmtree(data, ignore_errors=True)
        aside.rename(data)
        filler.unlink()
        check_ended(run, 8)
    finally:
        run.close()
    assert "waiting: the cluster recovered after" in run.log.read_text()
