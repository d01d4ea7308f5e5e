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
import yaml
from cluster_run import ClusterRun, processes_of
from sglang_worker import LONG_S, check_ended, children_of

from gcore.system.process import identify_process
from gcore.testing.pipelines import Family, write_pipeline

pytestmark = [pytest.mark.sglang, pytest.mark.serial, pytest.mark.timeout(1800)]

RED = """
from PIL import Image

def red(response, fields):
    with Image.open(response.picture) as picture:
        return picture.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))[0] / 255
"""
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


@pytest.mark.parametrize(("flow", "family"), [("flow_grpo", "qwen_image"), ("diffusion_nft", "sd3")])
def test_two_controllers_train_pictures_with_two_diffusion_servers(tmp_path: Path, flow: str, family: Family) -> None:
    write_pipeline(tmp_path / "model", family, whole=True)
    (tmp_path / "rule.py").write_text(RED)
    prompts = [json.dumps({"prompt": f"a {colour} square"}) for colour in ("red", "green", "blue")]
    (tmp_path / "train.jsonl").write_text("\n".join(prompts * 8))
    side = 32 if family == "sd3" else 16
    tree = {
        "name": "pictures",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 4},
        "flow": {"name": flow, "steps": 3, "groups_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"engine": "sglang-diffusion", "diffusion": {"steps": 4, "height": side, "width": side}},
        "reward": {"file": "rule.py:red"},
        "train": {"learning_rate": 1.0e-3},
        "eval": {"path": "train.jsonl", "limit": 3, "every": 3},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(tree))
    run = ClusterRun(path, tmp_path / "home", patience_s=LONG_RUN_S)
    try:
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == 3
    steps = events_of(tmp_path / "home", "step")
    assert all(step["data"]["stats"]["grad_norm"] > 0 for step in steps)
    if flow == "flow_grpo":
        assert max(step["data"]["stats"]["mismatch_max"] for step in steps) < 1e-4


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
