"""Whole runs on emulated slots: control plane, network and storage are real, compute is simulated."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_run import ClusterRun, gcore, processes_of
from emulated_job import write_emulated_job

from gcore.engines.emulated.launch import SAID
from gcore.testing.pipelines import write_pipeline

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

STEPS = 6
RULES = """\
from PIL import Image


def score(response, entry):
    return float(Image.open(response.picture).height)
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose model is only read for its vocabulary."""
    flow = {"steps": STEPS, "groups_per_step": 16, "samples_per_prompt": 2}
    return write_emulated_job(tmp_path, monkeypatch, flow=flow, checkpoint={"every": 2})


def add_judge(spec: Path, **judge: Any) -> None:
    """Let a judge of the policy's model score the responses."""
    tutor = {"name": "tutor", "model": {"path": "model"}, "template": "{{ prompt }}{{ response }}", **judge}
    with spec.open("a") as file:
        file.write(f"judges: {json.dumps([tutor])}\nreward: {json.dumps({'judge': 'tutor'})}\n")


def kinds_of(home: Path, module: str) -> list[int]:
    """The pids of the home's processes that run a module."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in processes_of(home)}
    return [pid for pid, arguments in words.items() if module.encode() in arguments]


def stand_ins(home: Path) -> dict[str, int]:
    """The processes that stand for the home's emulated engines, by instance."""
    hosts, found = kinds_of(home, "gcore.emulated.host"), {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        if parent in hosts and b"read never" in words:
            found[words[words.index(b"read never") + 1].decode()] = int(process.name)
    return found


def check_no_torch(home: Path) -> None:
    """No process of the home has loaded torch."""
    for pid in processes_of(home):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_run_on_emulated_slots_is_clean_says_what_it_is_and_loads_no_torch(spec: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until_step(2)
        check_no_torch(home)
        assert len(kinds_of(home, "gcore.emulated.host")) == 2
        listed = gcore("list", "--home", str(home), "-o", "json").stdout
        assert SAID in listed
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", STEPS)
    assert SAID.capitalize() in ended.output
    assert SAID in ended.summary["reason"]
    (folder,) = (home / "runs").glob("emulated-*")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line["metrics"] for line in steps if line["kind"] == "step"]
    assert len(trained) == STEPS
    assert all(metrics["emulated"] == 1.0 and "loss" not in metrics for metrics in trained)


@pytest.mark.parametrize(
    ("flow", "diffusion"),
    [
        ("mix_grpo", {"steps": 6, "window": {"size": 2, "strategy": "progressive", "stay": 2}}),
        ("diffusion_nft", {"steps": 6, "trained_share": 0.5}),
    ],
)
def test_a_run_generates_pictures_whose_arrays_ranks_get_through_blob_stores(
    flow: str, diffusion: dict[str, Any], spec: Path, tmp_path: Path
) -> None:
    write_pipeline(tmp_path / "pipeline")
    (tmp_path / "rules.py").write_text(RULES)
    job = yaml.safe_load(spec.read_text()) | {"model": {"path": "pipeline"}, "reward": {"file": "rules.py:score"}}
    job |= {"flow": job["flow"] | {"name": flow}, "rollout": {"diffusion": diffusion}}
    spec.write_text(yaml.safe_dump(job))
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:4")
    try:
        run.until_step(2)
        check_no_torch(home)
        run.kill_worker("train", child=True)
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", STEPS)
    (folder,) = (home / "runs").glob("emulated-*")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["metrics"]["reward"] == 16 for line in steps if line["kind"] == "step"), "each was a PNG file"


def test_a_node_whose_emulated_engines_and_rank_are_killed_goes_on(spec: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until_step(1)
        os.kill(kinds_of(home, "gcore.emulated.host")[0], signal.SIGKILL)
        run.until_step(2)
        run.kill_worker("train", child=True)
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", STEPS)


def test_judges_are_served_beside_the_policy_and_an_engine_of_each_that_is_killed_alone_is_replaced(
    spec: Path, tmp_path: Path
) -> None:
    add_judge(spec, max_new_tokens=60, verdict={"parser": "words", "words": {"y": 1, "n": 0}})
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until_step(2)
        engines = stand_ins(home)
        assert len(engines) == 16
        for role in ("rollout", "reward"):
            os.kill(next(pid for name, pid in sorted(engines.items()) if name.startswith(role)), signal.SIGKILL)
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", STEPS)
    (folder,) = (home / "runs").glob("emulated-*")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["metrics"]["reward"] for line in steps if line["kind"] == "step"]
    assert all(0.1 < reward < 0.9 for reward in rewards)


def test_a_job_whose_judge_is_never_readable_ends_early_and_says_why_unless_another_reward_takes_its_place(
    spec: Path, tmp_path: Path
) -> None:
    verdict = {"parser": "words", "words": {"there is no room for this": 1}}
    job = spec.read_text()
    for on_error, code in (("retry", 1), ({"fallback": "numeric"}, 0)):
        spec.write_text(job)
        add_judge(spec, max_new_tokens=1, verdict=verdict, on_error=on_error)
        run = ClusterRun(spec, tmp_path / f"home{code}", "--slots", "emulated:8")
        try:
            ended = run.wait()
        finally:
            run.close()
        assert ended.code == code, ended.output
        assert ended.summary["audit"] == "clean"
        assert ("answers and none of them can be parsed, such as" in run.log.read_text()) == bool(code)
        assert ended.summary["steps"] == (0 if code else STEPS)


def test_a_job_that_has_succeeded_goes_on_with_more_steps_as_often_as_it_is_asked(spec: Path, tmp_path: Path) -> None:
    """On a cluster that stays up, whose daemons may still be ending it."""
    home = tmp_path / "home"
    gcore("up", "--home", str(home), "--slots", "emulated:4")
    try:
        for steps in (2, 3, 5):
            submitted = gcore("submit", str(spec), "--home", str(home), "--set", f"flow.steps={steps}", "--wait")
            assert "is SUCCEEDED" in submitted.stdout
        jobs = json.loads(gcore("list", "--home", str(home), "-o", "json").stdout)
        assert [(job["state"], job["step"]) for job in jobs] == [("SUCCEEDED", 5)]
        audit = json.loads(gcore("audit", "emulated", "--home", str(home), "-o", "json").stdout)
    finally:
        gcore("down", "--home", str(home))
    assert audit["clean"]
    assert audit["steps"] == 5
    (folder,) = (home / "runs").glob("emulated-*")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert [line["state"] for line in lines if line["kind"] == "end"] == ["SUCCEEDED"] * 3


def test_the_model_of_an_emulated_job_cannot_be_taken_for_one(spec: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:4")
    try:
        assert run.wait().code == 0
        refused = gcore("export", "emulated", "--home", str(home), "--to", str(tmp_path / "out"), check=None)
    finally:
        run.close()
    assert refused.returncode != 0
    assert "emulated train ranks wrote it" in refused.stdout + refused.stderr
    assert not (tmp_path / "out").exists()
