"""Whole clusters train models that generate pictures: every flow, families of pipelines, and a controller and a rank that
are killed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_run import ClusterRun, Outcome, gcore, run_to_the_end
from tiny_classifiers import make_tiny_clip

from gcore.testing.pipelines import Family, write_pipeline

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]

RULE = """
from PIL import Image

def red(response, fields):
    with Image.open(response.picture) as picture:
        assert picture.mode == "RGB" and picture.size == (16, 16)
        return picture.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))[0] / 255
"""


def spec_in(folder: Path, family: Family = "sd3", flow: str = "flow_grpo", **sections: Any) -> Path:
    write_pipeline(folder / "model", family)
    (folder / "rule.py").write_text(RULE)
    prompts = [f"a {colour} {form}" for colour in ("red", "green", "blue") for form in ("square", "circle")]
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"prompt": one}) for one in prompts * 4))
    tree: dict[str, Any] = {
        "name": "pictures",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 4},
        "flow": {"name": flow, "steps": 3, "groups_per_step": 4, "samples_per_prompt": 4},
        "rollout": {"diffusion": {"steps": 4, "height": 16, "width": 16}},
        "reward": {"file": "rule.py:red"},
        "train": {"learning_rate": 1.0e-3, "micro_batch_tokens": 256},
        "checkpoint": {"every": 1},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def check(outcome: Outcome) -> list[dict[str, float]]:
    """Check that a job succeeded with a clean audit; return the metrics of its steps."""
    assert outcome.code == 0, outcome.output
    assert outcome.summary["state"] == "SUCCEEDED"
    assert outcome.summary["audit"] == "clean"
    records = (Path(outcome.summary["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [one["metrics"] for one in map(json.loads, records) if one["kind"] == "step"]


SMALL = {"steps": 4, "height": 16, "width": 16}

FLOWS: list[tuple[str, Family, dict[str, Any]]] = [
    ("flow_grpo", "sd3", {"train": {"kl_coef": 0.01, "micro_batch_tokens": 32}}),
    ("dance_grpo", "sd3", {}),
    ("mix_grpo", "sd3", {"rollout": {"diffusion": {"steps": 4, "window": {"size": 2, "strategy": "random"}}}}),
    ("diffusion_nft", "sd3", {"train": {"kl_coef": 0.01}}),
    ("weighted_sft", "sd3", {}),
    ("flow_grpo", "sd3", {"train": {"diffusion": {"ema_decay": 0.5}}, "eval": {"path": "train.jsonl", "every": 1}}),
    ("flow_grpo", "flux", {"rollout": {"diffusion": {**SMALL, "guidance": 2.0}}}),
    ("flow_grpo", "qwen_image", {"rollout": {"diffusion": {**SMALL, "guidance": 2.0}}}),
    ("flow_grpo", "sd3", {"train": {"backend": "fsdp2", "kl_coef": 0.01}}),
    ("flow_grpo", "sd3", {"train": {"zero_stage": 3, "kl_coef": 0.01, "loss": "grpo_guard", "clip_low": 1e-5}}),
    ("dance_grpo", "sd3", {"train": {"stream": True, "stream_min": 1}}),
    ("diffusion_nft", "sd3", {"train": {"backend": "fsdp2"}}),
    ("diffusion_nft", "sd3", {"placement": {"memory": "in_turns"}}),
    ("flow_grpo", "sd3", {"rollout": {"diffusion": SMALL, "staleness": 1, "correction": "tis"}}),
    ("ddpo", "sd", {}),
    ("weighted_sft", "sd", {}),
]


@pytest.mark.large
@pytest.mark.parametrize(
    ("flow", "family", "sections"),
    FLOWS,
    ids=[f"{flow}-{family}-{number}" for number, (flow, family, _) in enumerate(FLOWS)],
)
def test_every_flow_trains_and_the_first_ratio_is_1(
    tmp_path: Path, flow: str, family: Family, sections: dict[str, Any]
) -> None:
    steps = check(run_to_the_end(spec_in(tmp_path, family, flow, **sections), tmp_path / "home"))
    assert len(steps) == 3
    for step in steps:
        assert step["skipped_updates"] == 0
        assert step["grad_norm"] > 0
        if flow in ("flow_grpo", "dance_grpo", "mix_grpo", "ddpo") and "staleness" not in sections.get("rollout", {}):
            assert step["ratio_max"] == step["ratio_min"] == 1.0, "log-probabilities were recomputed"
            assert step["mismatch_max"] < 1e-5, "and are the engine's"


@pytest.mark.large
@pytest.mark.parametrize("flow", ["flow_grpo", "diffusion_nft"])
def test_a_job_continues_with_another_number_of_controllers_and_ranks(tmp_path: Path, flow: str) -> None:
    spec, home = spec_in(tmp_path, flow=flow), tmp_path / "home"
    assert len(check(run_to_the_end(spec, home))) == 3
    for controllers, steps in ((1, 5), (3, 7)):
        more = ("--set", f"flow.steps={steps}")
        assert len(check(run_to_the_end(spec, home, more, controllers=controllers, slots=controllers))) == steps


@pytest.mark.chaos
def test_a_job_continues_after_a_controller_and_a_rank_were_killed(tmp_path: Path) -> None:
    flow = {"name": "diffusion_nft", "steps": 8, "groups_per_step": 4, "samples_per_prompt": 4}
    spec, home = spec_in(tmp_path, flow="diffusion_nft"), tmp_path / "home"
    tree = yaml.safe_load(spec.read_text())
    spec.write_text(yaml.safe_dump({**tree, "flow": flow}))
    run = ClusterRun(spec, home)
    try:
        run.until_step(2)
        run.kill_worker("train", child=True)
        run.until_step(4)
        run.kill_controller("node-1")
        check(run.wait())
    finally:
        run.close()
    (newest,) = home.glob("runs/*/checkpoints/*-8")
    assert (newest / "served").is_dir(), "engines serve a network that follows the trained one"


def standardised(values: list[float]) -> list[float]:
    """Distances from the mean in deviations of a sample."""
    deviation = statistics.stdev(values) + 1e-8
    return [(value - statistics.fmean(values)) / deviation for value in values]


def test_a_scorer_and_a_rule_are_standardised_in_training_and_added_up_in_evaluation(tmp_path: Path) -> None:
    make_tiny_clip(tmp_path / "clip", seed=5)
    judge = {"name": "clip", "kind": "classifier", "model": {"path": "clip"}, "images": True}
    judge |= {"template": "{{ prompt }}{{ response }}", "serving": {"replicas": 1}}
    path, home = spec_in(tmp_path, eval={"path": "train.jsonl", "limit": 6, "every": 1}), tmp_path / "home"
    tree = yaml.safe_load(path.read_text())
    parts = [{"file": "rule.py:red"}, {"judge": "clip", "weight": 0.5}]
    path.write_text(yaml.safe_dump(tree | {"judges": [judge], "reward": {"compose": "standardised", "parts": parts}}))
    outcome = run_to_the_end(path, home)
    for step in check(outcome):
        assert step["reward"] == pytest.approx(0.0, abs=1e-5)
        assert step["reward_part/clip"] != 0
    shown = gcore("samples", "pictures", "--home", str(home), "--limit", "100", "-o", "json").stdout
    groups = json.loads(shown)["groups"]
    assert groups
    for group in groups:
        parts_of = {name: [one["parts"][name] for one in group["responses"]] for name in ("red", "clip")}
        expected = zip(*map(standardised, parts_of.values()), strict=True)
        rewards = [response["reward"] for response in group["responses"]]
        assert rewards == pytest.approx([red + 0.5 * clip for red, clip in expected], abs=1e-5)
    records = (Path(outcome.summary["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    evaluated = [one["metrics"] for one in map(json.loads, records) if one["kind"] == "eval"]
    assert len(evaluated) == 4
    for metrics in evaluated:
        red, clip = (metrics[f"by_source/data/metrics/part:{part}"] for part in ("red", "clip"))
        assert metrics["reward"] == pytest.approx(red + 0.5 * clip)
