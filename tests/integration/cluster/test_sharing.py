"""Several jobs on the same slots, as users run them: real controllers, a real store, emulated devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun, gcore

from gcore.api.v1 import jobs_pb2 as pb
from gcore.engines.emulated.launch import LAW_FILE
from gcore.ledger.records.restart_reasons import GAVE_BACK, HAS_AGAIN
from gcore.testing.models import make_tiny_model

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(400)]

LAW = {"speedup": 4.0, "load_s": 0.2}
SLOTS = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    law = tmp_path / "law.json"
    law.write_text(json.dumps(LAW))
    monkeypatch.setenv(LAW_FILE, str(law))
    make_tiny_model(tmp_path / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def spec_of(folder: Path, name: str, *, steps: int, **more: Any) -> Path:
    job = {
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 32},
        "flow": {"steps": steps, "groups_per_step": 16, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 80},
        "checkpoint": {"every": 50},
        **more,
    }
    file = folder / f"{name}.yaml"
    file.write_text(f"name: {name}\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in job.items()) + "\n")
    return file


def committed(home: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics that are of steps and rollbacks, in their order."""
    (run,) = (home / "runs").glob(f"{name}-*")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_job_is_pre_empted_at_a_commit_by_one_of_a_higher_priority_and_both_end_clean(folder: Path) -> None:
    home = folder / "home"
    low = ClusterRun(spec_of(folder, "low", steps=24), home, "--slots", f"emulated:{SLOTS}")
    try:
        low.until_step(2)
        scheduling = {"priority": 10, "slots_min": SLOTS}
        high = spec_of(folder, "high", steps=4, scheduling=scheduling)
        gcore("submit", str(high), "--home", str(home))

        def state(name: str) -> int | None:
            job = low.ask(lambda client: client.get_job(name))
            return None if job is None else job.state

        low.until("the higher one's end", lambda: state("high") == pb.JOB_STATE_SUCCEEDED)
        job = low.job()
        assert job is not None
        assert job.state == pb.JOB_STATE_RUNNING, "it gave its slots up, and has not ended"
        ended = low.wait()
    finally:
        low.close()
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", 24)
    audit = json.loads(gcore("audit", "high", "--home", str(home), "-o", "json").stdout)
    assert (audit["clean"], audit["steps"]) == (True, 4)
    lines = committed(home, "low")
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(1, 25)), "each step was committed once"
    reasons = [line.get("reason") or line.get("message", "") for line in lines if line["kind"] == "rollback"]
    assert [any(words in reason for reason in reasons) for words in (GAVE_BACK, HAS_AGAIN)] == [True, True], reasons


def test_a_job_that_is_paused_leaves_its_slots_to_another_and_goes_on_when_it_is_resumed(folder: Path) -> None:
    home = folder / "home"
    one = ClusterRun(spec_of(folder, "one", steps=16), home, "--slots", f"emulated:{SLOTS}")
    try:
        one.until_step(2)
        gcore("pause", "one", "--home", str(home))

        def job(name: str) -> pb.Job:
            found = one.ask(lambda client: client.get_job(name))
            return found if found is not None else pb.Job()

        one.until("the pause", lambda: job("one").state == pb.JOB_STATE_PAUSED)
        stood = job("one").step
        gcore("submit", str(spec_of(folder, "two", steps=3)), "--home", str(home))
        one.until("the other one's end", lambda: job("two").state == pb.JOB_STATE_SUCCEEDED)
        assert job("one").step == stood, "nothing is trained meanwhile"
        gcore("resume", "one", "--home", str(home))
        ended = one.wait()
    finally:
        one.close()
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", 16)
    steps = [line["step"] for line in committed(home, "one") if line["kind"] == "step"]
    assert steps == list(range(1, 17)), "each step was committed once"
