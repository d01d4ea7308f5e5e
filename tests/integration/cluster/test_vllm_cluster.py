"""A training run on vLLM in which an engine is killed, and its export served by vLLM (make test-vllm)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_run import ClusterRun, gcore, processes_of
from engine_processes import engine_process, vllm_command
from sglang_worker import check_ended, children_of
from transformers import AutoModelForCausalLM

from gcore.engines.vllm.command import program
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.system.process import ProcessId, identify_process

pytestmark = [pytest.mark.vllm, pytest.mark.serial, pytest.mark.timeout(1800)]

VLLM = ["--set", "rollout.engine=vllm"]
LONG_RUN_S = 1500.0
PROMPT = (5, 6, 7)


def steps_of(home: Path) -> list[dict[str, Any]]:
    newest = max((home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    events = [json.loads(line) for line in (newest / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "step"]


def engines_of(home: Path) -> list[ProcessId]:
    """The processes of the cluster that are vLLM engines."""
    found, seen, pids = [], set(), list(processes_of(home))
    while pids:
        pid = pids.pop()
        seen.add(pid)
        words = Path(f"/proc/{pid}/cmdline")
        process = identify_process(pid)
        if process is not None and words.exists():
            command = words.read_bytes().split(b"\0")
            if program().encode() in command and b"guard.py" not in words.read_bytes():
                found.append(process)
        pids += [child for child in children_of(pid) if child not in seen]
    return found


def test_a_run_whose_engine_is_killed_learns_and_its_export_has_the_same_log_probabilities(
    spec: Path, home: Path, tmp_path: Path
) -> None:
    run = ClusterRun(spec, home, *VLLM, "--set", "flow.steps=16", patience_s=LONG_RUN_S)
    try:
        run.until_step(3)
        engines = engines_of(home)
        assert len(engines) >= 2
        os.kill(engines[0].pid, signal.SIGKILL)
        check_ended(engines[:1])
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == 16
    assert outcome.summary["rollbacks"] == 0
    assert outcome.summary["eval_accuracy_after"] > outcome.summary["eval_accuracy_before"]
    steps = steps_of(home)
    assert max(step["data"]["stats"]["mismatch_max"] for step in steps) < 1e-4
    newest = max((home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    assert len(list((newest / "logs").glob("rollout-*.log"))) == 3
    export = tmp_path / "export"
    gcore("export", run.name, "--home", str(home), "--to", str(export))
    with engine_process(export, vllm_command(), batch_slots=4, cache_tokens=32) as url:  # below the context
        error = asyncio.run(export_error(url, export))
    assert error < 1e-4


async def export_error(url: str, folder: Path) -> float:
    """The largest difference of vLLM's log-probabilities from transformers'."""
    client = EngineClient(url, timeout_s=120)
    params = SamplingParams(temperature=1.0, max_new_tokens=20)
    samples = await client.generate(PROMPT, params, seeds=(1, 2, 3), rid="export")
    await client.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst = 0.0
    for sample in samples:
        ids = torch.tensor([PROMPT + sample.token_ids])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(PROMPT) - 1 : -1]
        plain = torch.log_softmax(logits, -1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
        worst = max(worst, float((plain - torch.tensor(sample.logprobs)).abs().max()))
    return worst
