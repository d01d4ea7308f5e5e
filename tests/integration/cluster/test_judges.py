"""Judges in whole clusters: a policy learns from a useful judge, learns nothing from a random one, and survives a lost controller or judge engine."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_run import ClusterRun, Outcome, run_job, run_to_the_end
from fake_openai import FakeFailure, FakeOpenAI
from run_read import metrics_of, newest_run

from gcore.config.local_cluster import LocalClusterState
from gcore.testing.models import CHARACTERS, make_tiny_model

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "examples" / "arithmetic" / "judge.yaml"
ADAPTER_SPEC = SPEC.with_name("judge_adapter.yaml")
SHORT = 16
"""Steps. Most of what there is to learn is learned by then."""


def tree_here() -> dict[str, Any]:
    """The example's spec, its paths absolute."""
    tree: dict[str, Any] = yaml.safe_load(SPEC.read_text())
    places = [tree["model"], tree["data"], tree["judges"][0]["model"], *tree["eval"]["sources"]]
    for place in places:
        place["path"] = str((SPEC.parent / place["path"]).resolve())
    return tree


def written(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def accuracies(outcome: Outcome) -> tuple[float, float, float]:
    """True accuracy before and after, and how many of the answers after it the judge takes for right."""
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    source = outcome.summary["sources"]["sums"]
    return source["eval_accuracy_before"], source["eval_accuracy_after"], source["eval_after"]["part:judged"]


def with_random_judge(folder: Path, steps: int) -> Path:
    """The example's spec with a judge of random weights, which answers with any letter or digit."""
    make_tiny_model(folder / "judge", seed=3, ends=False)
    letters = [one for one in CHARACTERS if one.isalnum()]
    tree = tree_here()
    tree["flow"]["steps"] = steps
    tree["judges"] = [
        {
            "name": "sums",
            "model": {"path": str(folder / "judge")},
            "template": "{{ prompt }}{{ response }}",
            "max_new_tokens": 1,
            "verdict": {"parser": "words", "words": {one: number % 2 for number, one in enumerate(letters)}},
            "on_error": {"fallback": "regex", "options": {"pattern": "never"}},
        }
    ]
    return written(folder, tree)


@pytest.mark.usefixtures("example")
def test_trained_samples_were_scored_by_the_judge(cluster: LocalClusterState, tmp_path: Path) -> None:
    ended = run_job(cluster, with_random_judge(tmp_path, 2))
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", 2)
    lines = metrics_of(Path(ended.summary["run_dir"]))
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert [0 < step["reward"] == step["reward_part/sums"] < 1 for step in steps] == [True, True], (
        "it says yes now and then"
    )


@pytest.mark.chaos
@pytest.mark.usefixtures("example", "judge")
def test_a_policy_learns_from_a_judge_alone(home: Path) -> None:
    before, after, judged = accuracies(run_to_the_end(SPEC, home, ["--set", f"flow.steps={SHORT}"]))
    assert before < 0.5
    assert after >= 0.85
    assert abs(judged - after) < 0.06, "the judge is nearly always right"


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("judge_adapter")
def test_a_judge_that_is_an_adapter_teaches_though_an_engine_is_killed(home: Path) -> None:
    run = ClusterRun(ADAPTER_SPEC, home, "--set", f"flow.steps={SHORT}")
    try:
        run.until_step(3)
        run.kill_worker("rollout", child=True)  # the engine serves the policy and the judge
        before, after, judged = accuracies(run.wait())
    finally:
        run.close()
    assert before < 0.5
    assert after >= 0.85
    assert abs(judged - after) < 0.06, "the judge is nearly always right"


@pytest.mark.chaos
@pytest.mark.usefixtures("example")
def test_a_judge_with_random_weights_does_not_teach(home: Path, tmp_path: Path) -> None:
    before, after, _ = accuracies(run_to_the_end(with_random_judge(tmp_path, SHORT), home))
    assert max(before, after) < 0.7, (
        "what it likes may be right now and then; a judge that knows teaches 0.85 in as many steps"
    )


@pytest.mark.chaos
@pytest.mark.usefixtures("example", "judge")
def test_nothing_is_lost_with_dynamic_sampling_staleness_a_judge_and_what_is_killed(home: Path, tmp_path: Path) -> None:
    tree = tree_here()
    tree["flow"] |= {"name": "dapo", "steps": 24, "groups_per_step": 32}
    tree["rollout"] |= {"staleness": 2, "correction": "tis"}
    run = ClusterRun(written(tmp_path, tree), home)
    try:
        run.until_step(5)
        run.kill_controller("node-1")
        run.until_step(10)
        run.kill_worker("reward", child=True)
        outcome = run.wait()
    finally:
        run.close()
    before, after, _ = accuracies(outcome)
    assert after >= before + 0.3
    lines = (newest_run(home) / "events.jsonl").read_text().splitlines()
    steps = [event["data"] for event in map(json.loads, lines) if event["kind"] == "step"]
    assert {sum(step["groups_by_node"].values()) for step in steps} == {32}, "the quota, each step"


def right_or_wrong(body: Mapping[str, Any]) -> str:
    """What somebody says who can add: of "12+7=19?" that it is right."""
    found = re.fullmatch(r"(\d+)\+(\d+)=(.*)\?", body["messages"][-1]["content"])
    assert found is not None
    one, other, answer = found.groups()
    return "Y" if answer == str(int(one) + int(other)) else "N"


@contextmanager
def served(fake: FakeOpenAI) -> Iterator[str]:
    """The fake in a loop of its own; its URL."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with fake:
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield fake.url
    finally:
        over.set()
        thread.join(10)


@pytest.mark.chaos
@pytest.mark.usefixtures("example")
def test_a_judge_that_others_serve_teaches_too_and_what_it_costs_is_known_though_a_controller_is_killed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGES_KEY", "sk-of-the-test")
    fake = FakeOpenAI(right_or_wrong, key="sk-of-the-test")
    fake.script = [
        FakeFailure(status=500),
        FakeFailure(status=429, headers={"retry-after": "1"}),
        FakeFailure(status=None),
    ]
    tree = tree_here()
    tree["flow"]["steps"] = SHORT
    with served(fake) as url:
        judge = tree["judges"][0]
        judge.pop("model")
        judge["external"] = {
            "url": url,
            "model": "any",
            "key_env": "JUDGES_KEY",
            "requests_per_s": 2000,
            "price_in": 1.0,
            "price_out": 2.0,
        }
        judge["verdict"].pop("after")
        run = ClusterRun(written(tmp_path, tree), home)
        try:
            run.until_step(4)
            run.kill_controller("node-1")
            outcome = run.wait()
        finally:
            run.close()
    before, after, judged = accuracies(outcome)
    assert (before < 0.5, after >= 0.8) == (True, True)
    assert judged == pytest.approx(after), "it knows"
    assert fake.refused == 0
    asked = {body["messages"][-1]["content"] for body in fake.asked}
    assert len(asked) > 500
    assert "sk-of-the-test" not in outcome.output
