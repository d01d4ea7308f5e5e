"""A whole cluster with a classic reward model as the judge: a random policy learns the outputs that the model scores high."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from blob_stores import store_processes
from cluster_run import ClusterRun, Outcome, gcore, processes_of, run_to_the_end
from PIL import Image
from run_read import metrics_of, newest_run
from tiny_classifiers import make_liking_classifier, make_tiny_seeing_classifier
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from gcore.media.placeholders import PictureRule
from gcore.models.vision import PictureProcessor
from gcore.testing.models import make_tiny_model
from gcore.testing.vision_models import IMAGE, make_picture, make_tiny_vision_model

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

STEPS = 12
LIKED = "aeiou"


def rewards(home: Path) -> list[float]:
    """The mean of each step."""
    return [line["metrics"]["reward"] for line in metrics_of(newest_run(home)) if line["kind"] == "step"]


def test_a_policy_comes_to_write_what_a_classifier_likes(home: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=2, ends=False)
    make_liking_classifier(tmp_path / "judge", LIKED)
    prompts = [json.dumps({"prompt": f"{n}+{m}="}) for n in range(20) for m in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    tree = {
        "name": "taste",
        "model": {"path": "model"},
        "data": {"path": "prompts.jsonl", "shards": 16},
        "flow": {"name": "grpo", "steps": STEPS, "groups_per_step": 16, "samples_per_prompt": 8},
        "rollout": {"max_new_tokens": 6},
        "judges": [{"name": "taste", "kind": "classifier", "model": {"path": "judge"}, "template": "={{ response }}"}],
        "reward": {"judge": "taste"},
        "train": {"learning_rate": 1.0e-2, "micro_batch_tokens": 1024},
    }
    (tmp_path / "taste.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    outcome = run_to_the_end(tmp_path / "taste.yaml", home, controllers=1, slots=1)
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    told = rewards(home)
    assert len(told) == STEPS
    # From -2.3 (nothing that it likes) to 2.3 (nothing else).
    assert sum(told[-3:]) / 3 > sum(told[:3]) / 3 + 2.0, told


class PlainJudge:
    """The judge's model in transformers, which gets each picture in the size of its own processor."""

    def __init__(self, folder: Path) -> None:
        self._module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor, self._rule = PictureProcessor(folder), PictureRule.load(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def score(self, text: str, picture: bytes) -> float:
        """The score of a question that begins with the picture."""
        image = Image.open(io.BytesIO(picture))
        height, width = self._rule.target_size(image.height, image.width)
        file = io.BytesIO()
        image.resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
        short = self._tokenizer.encode(self._rule.picture_text + text).ids
        ids = torch.tensor([self._rule.expand(short, [(height, width)])])
        pixels = self._processor.read(hashlib.sha256(picture).hexdigest(), file.getvalue()).arguments
        with torch.inference_mode():
            return float(self._module(ids, token_type_ids=(ids == IMAGE).int(), **pixels).logits[0, 0])


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    """The spec of a job with pictures whose only reward is a classifier that sees them, on one of two nodes."""
    make_tiny_vision_model(tmp_path / "model", seed=1)
    make_tiny_seeing_classifier(tmp_path / "judge", seed=2)
    (tmp_path / "pictures").mkdir()
    entries = []
    for number in range(16):
        size = ((32, 32), (64, 48))[number % 2]
        (tmp_path / "pictures" / f"{number}.png").write_bytes(make_picture(*size, seed=number))
        entries.append(json.dumps({"prompt": f"<image>{number}?", "images": [f"pictures/{number}.png"]}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(entries) + "\n")
    judge = {
        "name": "eye",
        "kind": "classifier",
        "model": {"path": "judge"},
        "images": True,
        "template": "{{ prompt }}={{ response }}",
        "serving": {"replicas": 1},  # pictures of the other node travel to it
    }
    tree = {
        "name": "seeing-taste",
        "model": {"path": "model"},
        "data": {"path": "prompts.jsonl", "images": "images", "shards": 8},
        "flow": {"name": "grpo", "steps": 2, "groups_per_step": 8, "samples_per_prompt": 4},
        "rollout": {"max_new_tokens": 3},
        "judges": [judge],
        "reward": {"judge": "eye"},
        "train": {"learning_rate": 1.0e-3, "micro_batch_tokens": 1024},
    }
    (tmp_path / "taste.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return tmp_path / "taste.yaml"


def check_rewards(outcome: Outcome, home: Path, folder: Path) -> None:
    """Each reward is what transformers gives the question with the prompt's picture."""
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    command = ("samples", "seeing-taste", "--home", str(home), "--limit", "100", "-o", "json")
    groups = json.loads(gcore(*command).stdout)["groups"]
    assert {group["holder"].partition(".")[0] for group in groups} == {"node-0", "node-1"}
    plain, shown = PlainJudge(folder / "judge"), PictureRule.load(folder / "model").picture_text
    for group in groups:
        prompt = group["prompt"].removeprefix(shown)
        picture = (folder / "pictures" / f"{prompt.removesuffix('?')}.png").read_bytes()
        for response in group["responses"]:
            expected = plain.score(f"{prompt}={response['text']}", picture)
            assert response["reward"] == pytest.approx(expected, abs=1e-4)


def test_the_score_of_a_classifier_that_sees_the_picture_is_the_reward(
    seeing: Path, home: Path, tmp_path: Path
) -> None:
    check_rewards(run_to_the_end(seeing, home), home, tmp_path)


@pytest.mark.timeout(600)  # the judge's engine starts three times
def test_rewards_stay_right_when_the_judges_engine_and_a_blob_store_are_killed(
    seeing: Path, home: Path, tmp_path: Path
) -> None:
    run = ClusterRun(seeing, home, "--set", "flow.steps=5", patience_s=560)
    try:
        run.until_step(1)
        run.kill_worker("reward", child=True)
        run.until_step(2)
        for store in store_processes(processes_of(home)):
            os.kill(store, signal.SIGKILL)
        run.kill_worker("reward", child=False)
        check_rewards(run.wait(), home, tmp_path)
    finally:
        run.close()
