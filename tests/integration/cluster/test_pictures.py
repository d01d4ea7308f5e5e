"""A whole cluster trains a vision-language model on pictures, while a controller, a rank and a blob store are killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_run import ClusterRun, Outcome, processes_of

from gcore.testing.vision_models import make_picture, make_tiny_vision_model

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]

STEPS = 6


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    make_tiny_vision_model(tmp_path / "model", seed=1)
    (tmp_path / "pictures").mkdir()
    entries = []
    for number in range(24):
        height, width = ((32, 32), (64, 48))[number % 2]
        (tmp_path / "pictures" / f"{number}.png").write_bytes(make_picture(height, width, seed=number))
        names = [f"pictures/{number}.png"] * (1 + number % 3)
        entries.append(
            {"prompt": "<image>" * len(names) + f"{number % 10}?", "images": names, "answer": str(number % 10)}
        )
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, entries)))
    tree: dict[str, Any] = {
        "name": "seeing",
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "train.jsonl"), "images": "images", "shards": 8},
        "flow": {"name": "grpo", "steps": STEPS, "groups_per_step": 8, "samples_per_prompt": 4},
        "rollout": {"max_new_tokens": 3},
        "reward": {"name": "exact"},
        "train": {"learning_rate": 1.0e-4, "mini_batches": 1},
        "checkpoint": {"every": 2},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def blob_stores(home: Path) -> list[int]:
    """The processes of the cluster's blob stores."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
            parent = int((file.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"gcore.media" in words and b"tether" not in words and _under(parent, set(processes_of(home))):
            found.append(int(file.parent.name))
    return found


def _under(pid: int, roots: set[int]) -> bool:
    while pid > 1:
        if pid in roots:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def check(outcome: Outcome, home: Path) -> None:
    assert outcome.code == 0, outcome.output
    assert outcome.summary["state"] == "SUCCEEDED"
    assert outcome.summary["audit"] == "clean"
    left = [file for folder in ("blobs", "worlds") for file in (home / folder).rglob("*") if len(file.name) == 64]
    assert not left  # they are deleted at the end of the job


def test_a_run_with_pictures_survives_kills_of_a_controller_a_rank_and_a_store(spec: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run = ClusterRun(spec, home)
    try:
        run.until_step(1)
        stores = run.until("both blob stores run", lambda: (found := blob_stores(home)) and len(found) == 2 and found)
        os.kill(stores[0], signal.SIGKILL)
        run.until_step(2)
        run.kill_worker("train", child=True)
        run.until_step(3)
        run.kill_controller("node-1")
        check(run.wait(), home)
    finally:
        run.close()
