"""The records that every run must leave for its users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def newest_run(home: Path) -> Path:
    """The folder of the newest run."""
    return max((home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_metrics(run_dir: Path, steps: int) -> None:
    """Of a job that succeeded after `steps`: every entry of its chain once, in order, and one end."""
    lines = metrics_of(run_dir)
    chain = [line for line in lines if "seq" in line]
    assert [line["seq"] for line in chain] == list(range(len(chain)))
    assert [line["kind"] for line in lines].count("end") == 1
    assert (lines[-1]["kind"], lines[-1]["state"]) == ("end", "SUCCEEDED")
    at = 0
    for line in chain:
        if line["kind"] == "rollback":
            assert line["from_step"] == at
            at = line["step"]
        elif line["kind"] == "step":
            at += 1
            assert line["step"] == at
            assert {"reward", "loss"} <= line["metrics"].keys()
            assert line["groups"] > 0
    assert at == steps
    evaluations = [line["id"] for line in lines if line["kind"] == "eval"]
    assert len(set(evaluations)) == len(evaluations) >= 2


def check_tensorboard(run_dir: Path, steps: int) -> None:
    """The curve of the reward shows each step once, as `metrics.jsonl` has it in the newest lineage."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    shown = [(event.step, round(event.value, 4)) for event in found.Scalars("train/reward")]
    newest = {line["step"]: line["metrics"]["reward"] for line in metrics_of(run_dir) if line["kind"] == "step"}
    assert shown == [(step, round(newest[step], 4)) for step in range(1, steps + 1)]
