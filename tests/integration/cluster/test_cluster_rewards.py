"""A whole run with rewards that are composed, differ by source, raise, hang and crash: the job continues and records every prompt.

One controller, a random model of a few thousand weights; nothing is learned here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_run import cluster_up, run_job, stored

from gcore.ledger.records.chain import LogEntry
from gcore.ledger.records.job import FaultRecord
from gcore.store.keys import JobKeys
from gcore.testing.models import make_tiny_model

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]

MOODY = """
import os
from gcore.reward import RewardResult

def score(response, fields, spec):
    if not response:
        return RewardResult(0.0)
    if fields["mood"] == "raises":
        raise ValueError("not today")
    if fields["mood"] == "hangs":
        while True:
            pass
    if fields["mood"] == "crashes":
        os._exit(9)
    return RewardResult(1.0 / len(response), (("short", 1.0 / len(response)),))
"""
MOODS = ["good", "raises", "good", "hangs", "good", "crashes", "good", "good"]


def install(folder: Path) -> None:
    """The package with the reward, where PYTHONPATH finds it."""
    info = folder / "pack_moody-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pack-moody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gcore.rewards]\nmoody = pack_moody:score\nbroken = pack_broken:score\n")
    (folder / "pack_moody.py").write_text(MOODY)
    (folder / "pack_broken.py").write_text("TABLES = {}\nTABLE = TABLES['main']\n")


def spec_of(folder: Path, job: str, **letters: Any) -> Path:
    """A spec with two sources; `letters` is the reward of one."""
    form = {"name": "regex", "label": "form", "options": {"pattern": "[a-p]*"}}
    long = {"name": "length", "label": "brief", "weight": 0.5, "options": {"limit": 3, "slope": 0.1}}
    spec = {
        "name": job,
        "model": {"path": "model"},
        "data": {
            "sources": [
                {"name": "digits", "path": "digits.jsonl", "reward": {"compose": "gate", "parts": [form, long]}},
                {"name": "letters", "path": "letters.jsonl", "reward": letters},
            ],
            "shards": 2,
        },
        "flow": {"steps": 3, "groups_per_step": 8, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 5},
        "scoring": {"workers": 2, "start_timeout_s": 30},
    }
    file = folder / f"{job}.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def test_rewards_that_raise_hang_and_crash_cost_their_own_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path / "model", seed=3)
    for name in ("digits", "letters"):
        lines = [json.dumps({"prompt": f"{name} {n}", "answer": "x", "mood": mood}) for n, mood in enumerate(MOODS)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    install(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    with cluster_up(tmp_path / "home", controllers=1) as cluster:
        refused = run_job(cluster, spec_of(tmp_path, "no", name="broken"))
        assert refused.code == 2
        assert "reward 'broken' cannot be loaded" in refused.output
        assert "pack_broken.py:2" in refused.output.replace("\n", "")
        ended = run_job(cluster, spec_of(tmp_path, "moody", name="moody", timeout_s=1.0))
        assert ended.code == 0, ended.output
        keys = JobKeys(ended.summary["uid"])
        entries = [LogEntry.decode(value, key) for key, value in stored(cluster, keys.log_prefix).items()]
        faults = [FaultRecord.decode(value, key) for key, value in stored(cluster, keys.fault_prefix).items()]
    check(entries, faults)


def cause(reason: str) -> str:
    """The beginning of a reason. A first call in a process has a longer time limit, which its reason names."""
    return reason.split(".")[0].split(" than ")[0]


def check(entries: list[LogEntry], faults: list[FaultRecord]) -> None:
    """Each bad prompt fails for its own reason, which is an event; the step metrics have the parts of the rewards."""
    trained = [entry for entry in entries if entry.kind == "train"]
    assert len(trained) == 3
    for entry in trained:
        assert 0.0 <= entry.stats["reward_part/form"] <= 1.0
        assert 0.0 <= entry.stats["reward_part/brief"] <= 1.0
    failed = {cause(ended.reason) for entry in entries for ended in entry.delta if ended.kind == "failed"}
    assert failed == {
        "reward 'moody' raised ValueError: not today",
        "reward 'moody' took longer",
        "reward 'moody' ended its process, which was ended by itself with exit code 9",
    }
    assert all(ended.source == "letters" for entry in entries for ended in entry.delta if ended.kind == "failed")
    assert {cause(fault.what) for fault in faults} == failed  # an event for each reason, once
    (fault,) = (fault for fault in faults if fault.trace)
    assert fault.what.startswith("reward 'moody' raised ValueError: not today")
    assert 'raise ValueError("not today")' in fault.trace
    assert "pack_moody.py" in fault.trace
