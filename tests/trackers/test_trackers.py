"""The trackers' real packages, offline: a run with a rollback is sent by two processes and read back with the packages' own readers.

In an environment of their own (make test-trackers): they are many packages, and none of them is needed to work on gcore.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gcore.observability.metrics_file import encode_lines
from gcore.observability.tracking import TrackerDocument

pytestmark = [pytest.mark.trackers, pytest.mark.timeout(300)]

SPEC = {"seed": 0, "train": {"learning_rate": 1e-4}, "tracking": []}
LINES = [
    {"kind": "start", "seq": 0, "lineage": 0, "step": 0, "time": 1.7e9},
    {"kind": "eval", "id": "0.0", "lineage": 0, "step": 0, "time": 1.7e9 + 1, "metrics": {"accuracy": 0.25}},
    {"kind": "step", "seq": 1, "lineage": 0, "step": 1, "time": 1.7e9 + 2, "metrics": {"reward": 0.5}, "groups": 4},
    {"kind": "step", "seq": 2, "lineage": 0, "step": 2, "time": 1.7e9 + 3, "metrics": {"reward": 0.25}, "groups": 4},
    {"kind": "rollback", "seq": 3, "lineage": 1, "step": 1, "from_step": 2, "time": 1.7e9 + 4, "reason": "a rank died"},
    {"kind": "step", "seq": 4, "lineage": 1, "step": 2, "time": 1.7e9 + 5, "metrics": {"reward": 0.75}, "groups": 4},
    {"kind": "step", "seq": 5, "lineage": 1, "step": 3, "time": 1.7e9 + 6, "metrics": {"truncated/a@b": 1.0}, "groups": 4},
    {"kind": "eval", "id": "1.3", "lineage": 1, "step": 3, "time": 1.7e9 + 6, "metrics": {"accuracy": 0.75}},
    {"kind": "end", "state": "FAILED", "reason": "no more", "time": 1.7e9 + 7},
]  # fmt: skip


def give(tmp_path: Path, tracker: str, options: dict[str, str]) -> Path:
    """Both parts of the run, each by a process of its own; the run's folder."""
    run_dir = tmp_path / "runs" / "job-u1"
    run_dir.mkdir(parents=True)
    document = TrackerDocument("u1", "job", SPEC, dict(options)).encode()
    command = [sys.executable, "-m", "gcore.tracking", "--home", "/h", "--run-dir", str(run_dir), "--tracker", tracker]
    for upto in (4, len(LINES)):
        (run_dir / "metrics.jsonl").write_bytes(encode_lines(LINES[:upto]))
        done = subprocess.run(command, input=document, capture_output=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
        words = [json.loads(line) for line in done.stdout.splitlines()]
        assert words[-1] == {"offset": (run_dir / "metrics.jsonl").stat().st_size}
    return run_dir


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(give(tmp_path, "tensorboard", {}) / "tensorboard"))
    found.Reload()
    shown = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert shown["train/reward"] == [(1, 0.5), (2, 0.75)]
    assert shown["eval/accuracy"] == [(0, 0.25), (3, 0.75)]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = give(tmp_path, "mlflow", {"experiment": "sums"})
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run_dir.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.25), (2, 0.75)]
    assert run.data.metrics["train/reward"] == 0.75
    assert run.data.metrics["train/truncated/a_b"] == 1.0
    assert run.data.params["train.learning_rate"] == "0.0001"
    assert run.data.tags["gcore.lineage"] == "1"
    assert (run.info.run_name, run.info.status) == ("job", "FAILED")


def wandb_records(file: Path) -> Iterator[Any]:
    """W&B's own messages, out of the blocks of LevelDB's log in which they lie."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = give(tmp_path, "wandb", {"project": "sums"})
    files = sorted(run_dir.glob("trackers/wandb/wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    records = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {("u1", "sums", "job")}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["train"] == {"learning_rate": 1e-4}
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row["lineage"], row["train/reward"]) for row in rows if "train/reward" in row] == [
        (1, 0, 0.5),
        (2, 0, 0.25),
        (2, 1, 0.75),
    ]
    assert [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row] == [(0, 0.25), (3, 0.75)]
    assert any(record.exit.exit_code == 1 for record in records if record.HasField("exit"))


def test_swanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    run_dir = give(tmp_path, "swanlab", {"project": "sums"})
    from swanlab.log.backup.datastore import DataStore

    values: dict[str, list[tuple[int, float]]] = {}
    files = sorted((run_dir.parent / "swanlog").glob("run-*/*.swanlab"), key=os.path.getmtime)
    assert len(files) == 2
    for file in files:
        store = DataStore()
        store.open_for_scan(str(file))
        while (raw := store.scan()) is not None:
            record = json.loads(raw)
            if record["model_type"] == "Scalar":
                data = record["data"]
                values.setdefault(data["key"], []).append((data["step"], data["metric"]["data"]))
    assert values["train/reward"] == [(1, 0.5), (2, 0.25), (4, 0.75)]
    assert values["train/step"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 1.0), (4, 2.0), (5, 3.0)]
    assert values["eval/accuracy"] == [(0, 0.25), (5, 0.75)]
