"""DAPO over two controllers with most prompts filtered and one controller killed: quotas, the end of the epoch, the audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cluster_run import ClusterRun
from plug_in_package import installer

from gcore.testing.models import make_tiny_model

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]

PROMPTS, QUOTA = 100, 4
FILTER = """
def marked(group, fields, options):
    return None if fields["keep"] else "it is not marked"
"""


def written(folder: Path, kept: int, of: int) -> Path:
    """The spec, with a model and data of which `kept` prompts in `of` are kept."""
    make_tiny_model(folder / "model", seed=5)
    lines = [{"prompt": f"say {n}", "answer": "x", "keep": n % of < kept} for n in range(PROMPTS)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = {
        "name": "filtered",
        "model": {"path": "model"},
        "data": {"path": "data.jsonl", "shards": 8},
        "flow": {
            "name": "dapo",
            "epochs": 1,
            "groups_per_step": QUOTA,
            "samples_per_prompt": 2,
            "filters": [{"name": "marked"}],
        },
        "rollout": {"max_new_tokens": 8},
        "reward": {"name": "exact"},
        "checkpoint": {"every": 100},
        "eval": {"path": "data.jsonl", "limit": 4},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.mark.parametrize(
    ("kept", "of", "rest", "killed"),
    [
        pytest.param(3, 10, 2, True, id="a controller killed", marks=pytest.mark.chaos),
        pytest.param(7, 25, 0, False, id="a rest all filtered", marks=pytest.mark.chaos),
    ],
)
def test_with_seven_of_ten_prompts_filtered_every_step_has_its_quota_and_the_epoch_ends(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, of: int, rest: int, killed: bool
) -> None:
    installer(tmp_path, monkeypatch, "gcore.filters")("filtering", "marked = filtering:marked", FILTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "filtering"))
    run = ClusterRun(written(tmp_path, kept, of), home)
    try:
        if killed:
            run.until_step(2)
            run.kill_controller("node-1")
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    (folder,) = (home / "runs").iterdir()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event["data"] for event in events if event["kind"] == "step"]
    # Of the 100 so many are kept that there are seven quotas and a rest, which is a last step of its own even if it is empty.
    assert [sum(step["groups_by_node"].values()) for step in steps] == [QUOTA] * 7 + [rest]
    assert sum(step["stats"]["prompts_used"] for step in steps) == PROMPTS
    assert steps[0]["stats"]["issue_ratio"] == 1.0
    assert all(step["stats"]["issue_ratio"] > 1.5 for step in steps[1:])
    assert {event["data"]["step"] for event in events if event["kind"] == "checkpoint"} == {8}
    assert [event["data"]["step"] for event in events if event["kind"] == "eval"] == [0, 8]
    assert any(event["kind"] == "member" and not event["data"]["joined"] for event in events) == killed
