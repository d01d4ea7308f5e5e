"""A whole cluster trains a vision-language model on pictures, while a controller, a rank and a blob store are killed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from blob_stores import store_processes
from cluster_run import ClusterRun, Outcome, gcore, processes_of, run_to_the_end

from gcore.quickstart.counting import EVAL_ENTRIES, CountingManifest
from gcore.quickstart.zoom import prepare_zoom
from gcore.testing.vision_models import FAMILIES, Family, make_picture, make_tiny_vision_model

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
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


def check(outcome: Outcome, home: Path) -> None:
    assert outcome.code == 0, outcome.output
    assert outcome.summary["state"] == "SUCCEEDED"
    assert outcome.summary["audit"] == "clean"
    left = [file for folder in ("blobs", "worlds") for file in (home / folder).rglob("*") if len(file.name) == 64]
    # Blobs are deleted at the end of the job. A store moves them aside first, and deletes the rest when it starts again.
    assert not [file for file in left if ".incoming" not in file.parts]


def check_people_can_see_pictures(outcome: Outcome, home: Path) -> None:
    """Pictures of samples stay after the job's end. Nothing but `gcore samples` needs them, so not the audit."""
    command = ("samples", "seeing", "--home", str(home), "--limit", "1", "-o", "json")
    pictures = json.loads(gcore(*command).stdout)["groups"][0]["pictures"]
    assert [hashlib.sha256(Path(one["file"]).read_bytes()).hexdigest() for one in pictures] == [
        one["sha256"] for one in pictures
    ]
    for file in Path(outcome.summary["run_dir"]).rglob("*.png"):
        file.unlink()
    assert [one["file"] for one in json.loads(gcore(*command).stdout)["groups"][0]["pictures"]] == [""] * len(pictures)
    audit = json.loads(gcore("audit", "seeing", "--home", str(home), "-o", "json").stdout)
    assert (audit["steps"], audit["violations"]) == (STEPS, [])


REWARD = """
from PIL import Image

def score(response, fields):
    shown = [Image.open(path) for path in response.pictures]
    assert len(shown) == len(fields["images"]) and all(one.mode == "RGB" for one in shown)
    return 1.0

def parse(answer, spec):
    return 0.25
"""


def seeing_judge(model: Path, parser: str) -> dict[str, Any]:
    """The section of a judge that sees pictures, on one engine."""
    return {
        "name": "eye",
        "model": {"path": str(model)},
        "images": True,
        "template": "{{ prompt }}{{ response }}",
        "max_new_tokens": 2,
        "verdict": {"parser": parser},
        "serving": {"replicas": 1},
    }


def test_a_judge_on_one_node_and_rewards_of_all_nodes_see_the_pictures(spec: Path, tmp_path: Path) -> None:
    make_tiny_vision_model(tmp_path / "judge", seed=2)
    settings = tmp_path / "judge" / "preprocessor_config.json"
    small = {"size": {"shortest_edge": 256, "longest_edge": 256}}  # the judge sees pictures of another size
    settings.write_text(json.dumps(json.loads(settings.read_text()) | small))
    (tmp_path / "seeing.py").write_text(REWARD)
    tree = yaml.safe_load(spec.read_text())
    tree["judges"] = [seeing_judge(tmp_path / "judge", "seeing.py:parse")]
    tree["reward"] = [{"judge": "eye"}, {"file": "seeing.py:score", "label": "opened"}]
    tree["flow"]["steps"] = 2
    spec.write_text(yaml.safe_dump(tree))
    home = tmp_path / "home"
    check(run_to_the_end(spec, home), home)
    (records,) = home.glob("runs/*/metrics.jsonl")
    steps = [one["metrics"] for one in map(json.loads, records.read_text().splitlines()) if one["kind"] == "step"]
    assert [(one["reward_part/eye"], one["reward_part/opened"]) for one in steps] == [(0.25, 1.0)] * 2


ZOOM = """
import io
from PIL import Image
from gcore.rollout.environments.api import PICTURE, Done, Observation, ToolResult

def crop(argument, pictures):
    image = Image.open(pictures[0]).crop((0, 0, 32, 16))
    file = io.BytesIO()
    image.save(file, "PNG")
    return ToolResult("", [file.getvalue()])

def opened(response, fields):
    if not response.tool_pictures:
        return -1.0
    (whole,), (half,) = response.pictures, response.tool_pictures
    return float(Image.open(half).size == (32, 16) and Image.open(half).mode == "RGB")

def parse(answer, spec):
    return 0.25

class Looks:
    def __init__(self, setting):
        self.tools = setting.tools

    async def reset(self):
        return Observation()

    async def step(self, turn):
        if turn.number > 1:
            return Done(float(len(turn.text)))
        said = await self.tools.call("crop", "")
        return Observation(PICTURE, pictures=said.pictures)

    async def close(self):
        pass
"""


def test_responses_with_pictures_of_a_tool_are_trained_and_evaluated(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "zoom.py").write_text(ZOOM)
    tree = yaml.safe_load(spec.read_text())
    tree["environment"] = {
        "file": "zoom.py:Looks",
        "max_tokens": 32,
        "tools": {"names": ["zoom.py:crop"], "max_pictures": 1, "max_pixels": 1024, "timeout_s": 60},
    }
    tree["rollout"] |= {"max_new_tokens": 8, "stop": ["1", "2", "3"], "truncated": "keep"}
    make_tiny_vision_model(tmp_path / "judge", seed=2)
    tree["judges"] = [seeing_judge(tmp_path / "judge", "zoom.py:parse")]
    tree["reward"] = [{"name": "environment"}, {"file": "zoom.py:opened", "weight": 0}, {"judge": "eye", "weight": 0}]
    tree["flow"] |= {"steps": 2, "groups_per_step": 4}
    tree["eval"] = {"path": tree["data"]["path"], "every": 2, "limit": 4}
    spec.write_text(yaml.safe_dump(tree))
    home = tmp_path / "home"
    check(run_to_the_end(spec, home), home)
    command = ("samples", "seeing", "--home", str(home), "--limit", "8", "-o", "json")
    made = [one for group in json.loads(gcore(*command).stdout)["groups"] for one in group["responses"]]
    told = {int(one["observed_tokens"]) for one in made} - {0}
    assert told == {4}, "two placeholders, and a token before and after them"
    for one in made:
        shows = one["observed_tokens"] > 0
        assert (len(one["pictures"]), one["parts"]["opened"]) == ((1, 1.0) if shows else (0, -1.0))
        assert one["parts"]["eye"] == 0.25, "the judge's question has as many pictures as the response"
        for picture in one["pictures"]:
            assert hashlib.sha256(Path(picture["file"]).read_bytes()).hexdigest() == picture["sha256"]
            assert (picture["width"], picture["height"]) == (32, 16)
    (records,) = home.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert sum(one["kind"] == "step" for one in lines) == 2


@pytest.mark.chaos
def test_a_run_with_pictures_survives_kills_of_a_controller_a_rank_and_a_store(spec: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run = ClusterRun(spec, home)
    try:
        run.until_step(1)
        stores = run.until(
            "both blob stores run", lambda: (found := store_processes(processes_of(home))) and len(found) == 2 and found
        )
        os.kill(stores[0], signal.SIGKILL)
        run.until_step(2)
        run.kill_worker("train", child=True)
        run.until_step(3)
        run.kill_controller("node-1")
        outcome = run.wait()
        check(outcome, home)
        assert "the process of the blob store ended and is started again" in outcome.output
        check_people_can_see_pictures(outcome, home)
    finally:
        run.close()


def test_a_job_with_pictures_runs_on_emulated_slots(spec: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    check(run_to_the_end(spec, home, ["--slots", "emulated:2", "--set", "flow.steps=2"]), home)


@pytest.mark.large  # the same with other models
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "qwen3_vl"])
def test_a_job_runs_with_a_model_of_each_family(spec: Path, tmp_path: Path, family: Family) -> None:
    shutil.rmtree(tmp_path / "model")
    make_tiny_vision_model(tmp_path / "model", family, seed=1)
    home = tmp_path / "home"
    check(run_to_the_end(spec, home, ["--set", "flow.steps=2"]), home)


@pytest.mark.large  # prepares the counting example, and runs 20 steps of it
@pytest.mark.timeout(900)
def test_with_noise_in_place_of_pictures_a_policy_stays_at_the_constant_answer(counting: Path, tmp_path: Path) -> None:
    data, spec = tmp_path / "noise", tmp_path / "spec.yaml"
    shutil.copytree(counting, data)
    for seed, file in enumerate(sorted((data / "pictures").iterdir())):
        file.unlink()
        file.write_bytes(make_picture(48, 48, seed=seed))
    text = (ROOT / "examples" / "counting" / "grpo.yaml").read_text()
    spec.write_text(text.replace("../../.cache/examples/counting", str(data)))
    ended = run_to_the_end(
        spec, tmp_path / "home", ["--set", "flow.steps=20", "--set", "train.learning_rate=4e-4"], patience_s=800
    )
    assert (ended.code, ended.summary["audit"]) == (0, "clean"), ended.output
    constant = CountingManifest.model_validate_json((counting / "manifest.json").read_bytes()).best_constant
    deviation = math.sqrt(constant * (1 - constant) / EVAL_ENTRIES)
    assert ended.summary["eval_accuracy_after"] <= constant + 3 * deviation  # with pictures: 1.0


@pytest.mark.large  # prepares the zoom example, and runs 8 steps of it
@pytest.mark.timeout(900)
def test_a_policy_learns_to_call_the_tool_that_enlarges_a_panel(tmp_path: Path) -> None:
    data = tmp_path / "zoom"
    prepared = prepare_zoom(data, progress=False)
    folder = tmp_path / "example"
    shutil.copytree(ROOT / "examples" / "counting", folder)
    spec = folder / "zoom.yaml"
    spec.write_text(spec.read_text().replace("../../.cache/examples/zoom", str(data)))
    ended = run_to_the_end(spec, tmp_path / "home", ["--set", "flow.steps=8"], patience_s=600)
    assert (ended.code, ended.summary["audit"]) == (0, "clean"), ended.output
    assert prepared.manifest.greedy_accuracy < 0.4
    assert ended.summary["eval_accuracy_after"] > 0.9
