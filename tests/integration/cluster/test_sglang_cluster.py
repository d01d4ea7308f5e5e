"""A training run on the real SGLang, undisturbed and with its server killed (make test-sglang)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun, processes_of
from sglang_worker import LONG_S, check_ended, children_of

from gcore.system.process import identify_process

pytestmark = [pytest.mark.sglang, pytest.mark.serial, pytest.mark.timeout(1800)]

SGLANG = ["--set", "rollout.engine=sglang"]
LONG_RUN_S = 1500.0


def events_of(home: Path, kind: str) -> list[dict[str, Any]]:
    newest = max((home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    events = [json.loads(line) for line in (newest / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]


def sglang_pids(home: Path) -> list[int]:
    """Every process below the cluster's that is SGLang's, the server first."""
    found, pids = [], processes_of(home)
    seen = set(pids)
    while pids:
        pid = pids.pop(0)
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"sglang.launch_server" in words and b"guard.py" not in words:
            found.append(pid)
        new = [child for child in children_of(pid) if child not in seen]
        seen.update(new)
        pids += new
    return found


def test_two_controllers_train_with_two_servers_whose_log_probabilities_are_the_trainers(
    spec: Path, home: Path
) -> None:
    run = ClusterRun(spec, home, *SGLANG, "--set", "flow.steps=10", patience_s=LONG_RUN_S)
    try:
        run.until_step(5)
        servers = [process for pid in sglang_pids(home) if (process := identify_process(pid)) is not None]
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert len(servers) >= 2
    check_ended(servers)
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == 10
    assert len(outcome.summary["groups_by_controller"]) == 2
    assert outcome.summary["eval_accuracy_after"] > outcome.summary["eval_accuracy_before"]
    steps = events_of(home, "step")
    assert len(steps) == 10
    assert max(step["data"]["stats"]["mismatch_max"] for step in steps) < 1e-4


def test_the_server_is_killed_and_the_run_goes_on_and_learns(spec: Path, home: Path) -> None:
    more = [*SGLANG, "--set", "flow.steps=24"]
    run = ClusterRun(spec, home, *more, controllers=1, slots=1, patience_s=LONG_RUN_S)
    try:
        run.until_step(3)
        victims = [identify_process(pid) for pid in sglang_pids(home)]
        assert victims[0] is not None
        os.kill(victims[0].pid, signal.SIGKILL)
        check_ended([process for process in victims if process is not None])
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["rollbacks"] == 0
    assert outcome.summary["eval_accuracy_after"] >= 0.9
    newest = max((home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    assert len(list((newest / "logs").glob("rollout-*.log"))) == 2


def test_a_job_that_wants_sglang_is_refused_at_once_where_there_is_none(spec: Path, home: Path, tmp_path: Path) -> None:
    """The cluster's nodes were started without it: from a copy of the program that finds no environment."""
    program = tmp_path / "without.py"
    program.write_text(
        "from gcore.engines.environments import EngineEnvironment\n"
        "EngineEnvironment.find = lambda *a, **k: None\n"
        "from controllers.cli.main import main\nmain()\n"
    )
    command = [sys.executable, str(program), "run", str(spec), "--home", str(home), "--plain", *SGLANG]
    result = subprocess.run(
        [*command, "--controllers", "1", "--slots", "cpu:1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "rollout.engine: no node has SGLang" in result.stderr
    assert "make sglang-setup" in result.stderr
