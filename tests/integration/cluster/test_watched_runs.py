"""A real Prometheus over real runs: every query of every dashboard panel has data, and the values change during the runs.

One run on emulated slots covers the events of many slots: moves, cluster and external judges, a killed controller, a killed rank and an
unavailable store. One run on the cores of this machine learns: only this one has a loss.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun, gcore
from fake_openai import FakeFailure, FakeOpenAI
from placement_run import write_job
from prometheus_server import PrometheusServer, changes
from trace_collector import Collector

from gcore.config.local_cluster import LocalClusterState
from tools.monitoring import every_query, rules

pytestmark = [pytest.mark.needs("prometheus"), pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(900)]

WINDOW_S = 8
STEPS = 16
SCRAPE_S = 1.0
AWAY_S = 8.0
"""Longer than a lease."""
STEADY = ("job:gcore_job_slots:max",)
"""What is recorded for alerts alone, and stays the same for as long as a job keeps its slots: there are data."""
LEARNING = {
    "flow.steps": 8,
    "flow.groups_per_step": 8,
    "flow.filters": json.dumps([{"name": "signal"}]),
    "rollout.staleness": 1,
    "rollout.correction": "tis",
    "train.kl_coef": 0.01,
    "train.epochs": 2,
    "eval.every": 2,
    "eval.limit": 20,
    "checkpoint.every": 3,
}


@pytest.fixture
def outside() -> Iterator[FakeOpenAI]:
    """A judge that others serve, in a thread of its own: it contradicts itself, mumbles, and is away now and then."""
    counted = itertools.count()

    def say(body: Mapping[str, Any]) -> str:
        turn = next(counted)
        return "hm" if turn % 7 == 0 else str(turn % 3)

    fake, loop, ready = FakeOpenAI(say), asyncio.new_event_loop(), threading.Event()
    fake.script = [FakeFailure(status=503) if turn % 9 == 8 else FakeFailure() for turn in range(2000)]
    over = asyncio.Event()

    async def serve() -> None:
        async with fake:
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield fake
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


class Watched:
    """A cluster whose controllers and store are scraped, wherever they are by now."""

    def __init__(self, prometheus: PrometheusServer, run: ClusterRun, name: str) -> None:
        self._prometheus = prometheus
        self._name = name
        self.run = run
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._over.wait(0.3):
            cluster = self._cluster()
            if cluster is None:
                continue
            self._prometheus.scrape("etcd", {"store": cluster.etcd.endpoint})
            for controller in cluster.controllers:
                try:
                    with urllib.request.urlopen(
                        f"http://{metrics_of(self.run.home, controller.name)}/targets", timeout=2
                    ) as answer:
                        told = json.loads(answer.read())
                except (OSError, ValueError):
                    continue
                self._prometheus.scrape("gcore", {one["labels"]["node"]: one["targets"][0] for one in told})
                break

    def _cluster(self) -> LocalClusterState | None:
        try:
            return LocalClusterState.load(self.run.home)
        except Exception:  # half written
            return None

    def stop_store(self) -> None:
        """For longer than a lease lasts."""
        cluster = self._cluster()
        assert cluster is not None
        os.kill(cluster.etcd.pid, signal.SIGSTOP)
        time.sleep(AWAY_S)
        os.kill(cluster.etcd.pid, signal.SIGCONT)

    def close(self) -> None:
        """Watched no more."""
        self._over.set()
        self._thread.join()


def metrics_of(home: Path, node: str) -> str:
    """Where a node's controller serves its metrics in its present life, by its log."""
    (log,) = (home / "logs").glob(f"*{node}*.log")
    return re.findall(r"metrics and a page on ([\w.:\[\]]+)", log.read_text(errors="replace"))[-1]


def watch_emulated(prometheus: PrometheusServer, spec: Path, home: Path) -> None:
    gcore("up", "--home", str(home), "--controllers", "2", "--slots", "emulated:8")  # for a while without a job
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    watched = Watched(prometheus, run, "emulated")
    try:
        run.until_step(3)
        run.kill_worker("train", child=True)
        run.until_step(5)
        run.kill_controller("node-1")
        run.until_step(8)
        watched.stop_store()
        run.until_step(9)
        gcore("submit", str(guest_of(spec)), "--home", str(home), "--follow")  # it takes two slots, and gives them back
        ended = run.wait()
        assert ended.code == 0, ended.output
        assert ended.summary["audit"] == "clean"
        time.sleep(3 * SCRAPE_S)
    finally:
        watched.close()
        run.close()
        gcore("down", "--home", str(home), check=None)


def watch_learning(prometheus: PrometheusServer, spec: Path, home: Path) -> None:
    settings = [word for key, value in LEARNING.items() for word in ("--set", f"{key}={value}")]
    run = ClusterRun(spec, home, *settings)
    watched = Watched(prometheus, run, "learning")
    try:
        for step in (2, 4, 6):  # requests fail that are under way just then, and there may be none
            run.until_step(step)
            run.kill_worker("rollout", child=True)
        ended = run.wait()
        assert ended.code == 0, ended.output
    finally:
        watched.close()
        run.close()


def test_every_panels_queries_have_data_that_change_during_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Path, outside: FakeOpenAI
) -> None:
    (tmp_path / "placed").mkdir()
    teacher = {
        "name": "teacher",
        "external": {"url": outside.url, "model": "any", "requests_per_s": 12, "price_in": 5, "price_out": 20},
        "template": "{{ prompt }} {{ first }} or {{ second }}?",
        "mode": "pairwise",
        "verdict": {"most": 2, "scale": True},
        "max_new_tokens": 8,
    }
    placed = write_job(tmp_path / "placed", monkeypatch, {"policy": "sway", "train": 1, "reward": 1}, steps=STEPS)
    add_judge(placed, teacher)
    with PrometheusServer(tmp_path / "prometheus") as prometheus, Collector() as collector:
        monkeypatch.setenv("GCORE_LOG_FORMAT", "json")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        watch_emulated(prometheus, placed, tmp_path / "home")
        monkeypatch.delenv("GCORE_LOG_FORMAT")
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
        each_step_is_one_trace(collector)
        logs_say_what_they_are_about(tmp_path / "home")
        watch_learning(prometheus, spec, tmp_path / "home-learning")
        silent = [str(one) for one in every_query() if not changes(prometheus.ask(one.with_window(WINDOW_S)))]
        records = {one["record"]: prometheus.ask(one["record"]) for one in rules("record")}
        recorded = [name for name, series in records.items() if not (series if name in STEADY else changes(series))]
    assert "\n".join(silent) == ""
    assert "\n".join(recorded) == ""


def each_step_is_one_trace(collector: Collector) -> None:
    """Of the job that was placed: of both nodes, but where one was away."""
    steps: dict[str, set[str]] = {}
    for whole in collector.by_trace.values():
        told = {span.name: {a.key: a.value for a in span.attributes} for span in whole if not span.parent_span_id}
        (name,) = told
        if told[name]["gcore.job"].string_value == "placed":
            nodes = {a.value.string_value for span in whole for a in span.attributes if a.key == "gcore.node"}
            steps[name] = steps.get(name, set()) | nodes
            assert {"collect", "train"} & {span.name for span in whole} or name in ("step 0", "step 1")
    assert {f"step {number}" for number in range(2, STEPS)} <= steps.keys()
    assert sum(len(nodes) == 2 for nodes in steps.values()) > STEPS // 2


def logs_say_what_they_are_about(home: Path) -> None:
    """Of daemons and workers, line by line."""
    told: dict[str, list[dict[str, Any]]] = {}
    for file in [*(home / "logs").glob("*.log"), *(home / "runs").glob("placed-*/logs/*.log")]:
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith('{"time"')]
        told[file.name] = [json.loads(line) for line in lines]
    daemons = [line for name, lines in told.items() if name.startswith("node-") for line in lines]
    assert {line["controller"] for line in daemons} == {"node-0", "node-1"}
    assert {"placed", "guest"} <= {line.get("job_name") for line in daemons}
    assert len({line["step"] for line in daemons if line.get("job_name") == "placed" and "step" in line}) > STEPS // 2
    ranks = [line for name, lines in told.items() if name.startswith("train-") for line in lines]
    assert {line["role"] for line in ranks} == {"train"}
    assert all(line["worker"] and line["job"] and line["controller"] for line in ranks)


def guest_of(spec: Path) -> Path:
    """A small job that goes before the one that is there."""
    tree = {line.partition(":")[0]: line.partition(":")[2] for line in spec.read_text().splitlines()}
    job = {
        "model": json.loads(tree["model"]),
        "data": json.loads(tree["data"]),
        "flow": {"steps": 2, "groups_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 20},
        "scheduling": {"priority": 10, "slots_max": 2},
    }
    file = spec.parent / "guest.yaml"
    file.write_text("name: guest\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in job.items()) + "\n")
    return file


def add_judge(spec: Path, judge: Mapping[str, Any]) -> None:
    """One more, whose verdict is a part of the reward."""
    lines = spec.read_text().splitlines()
    tree = {line.partition(":")[0]: line.partition(":")[2] for line in lines}
    tree["judges"] = json.dumps([*json.loads(tree["judges"]), judge])
    tree["reward"] = json.dumps({"compose": "sum", "parts": [{"judge": "tutor"}, {"judge": judge["name"]}]})
    spec.write_text("\n".join(f"{key}:{' ' if value[:1] != ' ' else ''}{value}" for key, value in tree.items()) + "\n")
