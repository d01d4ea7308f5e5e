"""`gcore plan`: the displayed placements, the suggested spec, and one clear sentence for each error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from large_pipelines import write_stable_diffusion_3_5_medium
from warm_programs import COMMANDS

from gcore.config import load_spec

ROOT = Path(__file__).parents[3]
SEVEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
SPEC = """\
# What is learned here.
name: sevens
model:
  path: model
data:
  path: prompts.jsonl
  max_prompt_tokens: 512 # longer ones are filtered
flow:
  steps: 10
  groups_per_step: 128
rollout:
  max_new_tokens: 1024
  batch_slots: 128

placement:
  policy: colocated # in turn

train:
  # as many as there are
  ranks: 3 # for now
  zero_stage: 3
  dtype: bf16
  activation_checkpointing: true
"""
CLUSTER = {"nodes": [{"accelerators": 8, "device": "h100", "host_memory_gib": 1800}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A spec, its model's configuration, and a cluster."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SEVEN))
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return tmp_path


def plan(
    folder: Path, *more: str, cluster: str = "cluster.yaml", spec: str = "spec.yaml"
) -> subprocess.CompletedProcess[str]:
    return COMMANDS.run("controllers.cli.main", "plan", spec, "--cluster", cluster, *more, cwd=folder)


def test_the_best_are_shown_with_their_times_and_why_others_do_not_fit(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = plan(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(folder.rglob("*")) == before, "a plan leaves nothing behind"
    assert "7,615,616,512" in done.stdout
    assert "policy training" in done.stdout
    assert "placements fit" in done.stdout
    assert "policy training + rollout exceed 79.6 GiB on 2 slots by " in done.stdout


def test_all_of_it_is_there_as_json(folder: Path) -> None:
    done = plan(folder, "-o", "json", "--show", "3", "--prompt-tokens", "200", "--response-tokens", "300")
    assert (done.returncode, done.stderr) == (0, "")
    tree = json.loads(done.stdout)
    assert tree["lengths"] == {"prompt_tokens": 200, "response_tokens": 300}
    assert tree["cluster"]["slots"] == 8
    assert tree["models"][0]["parameters"] == 7_615_616_512
    assert len(tree["placements"]) == 3
    steps = [one["seconds"]["step"] for one in tree["placements"]]
    assert steps == sorted(steps)
    assert tree["start"]["placement"]["policy"] in ("colocated", "static")
    assert all(one["why"] and one["count"] for one in tree["misfits"])


PICTURES = """\
name: pictures
model: {path: pipeline}
data: {path: prompts.jsonl}
flow: {name: mix_grpo, steps: 10, groups_per_step: 48, samples_per_prompt: 24}
rollout: {batch_slots: 16, diffusion: {steps: 10, height: 512, width: 512, guidance: 4.5}}
reward: {file: "rules.py:score"}
train: {dtype: bf16, backend: deepspeed, micro_batch_tokens: 8192}
"""


@pytest.fixture
def pictures(folder: Path) -> Path:
    """A spec of a job that generates pictures, with its pipeline."""
    write_stable_diffusion_3_5_medium(folder / "pipeline")
    (folder / "pictures.yaml").write_text(PICTURES)
    (folder / "rules.py").write_text("def score(prompt, response):\n    return 0.0\n")
    return folder


def test_a_job_that_generates_pictures_is_planned_by_the_sizes_of_its_pipeline(pictures: Path) -> None:
    done = plan(pictures, spec="pictures.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "pictures of 512 x 512 pixels (1024 image tokens), 10 denoising steps with two passes each, of which 3 are trained"
        in done.stdout
    )
    assert "7,907,612,003" in done.stdout, "an engine has text encoders and VAE too"
    assert "2,243,171,520" in done.stdout, "a rank has the network"
    tree = json.loads(plan(pictures, "-o", "json", spec="pictures.yaml").stdout)
    assert tree["lengths"]["denoising_steps"] == 10
    assert tree["models"][0]["cache_gib"] == 0
    assert tree["placements"][0]["cache_tokens"] == {}
    section = yaml.safe_load(plan(pictures, "-o", "yaml", spec="pictures.yaml").stdout)
    assert section["placement"]["policy"] in ("colocated", "static")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--response-tokens", "9"), "a picture has no tokens, and its denoising steps are those of the spec"),
        (("--set", "rollout.diffusion.height=513"), "its sides must be multiples of 16 pixels"),
        (("--set", "model.path=model"), "model_index.json: cannot read a file of the pipeline"),
    ],
)
def test_plans_of_pictures_that_cannot_be_computed_are_refused_in_a_sentence(
    words: tuple[str, ...], said: str, pictures: Path
) -> None:
    done = plan(pictures, *words, spec="pictures.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_a_pipeline_whose_weights_are_elsewhere_is_refused_by_the_part(pictures: Path) -> None:
    next((pictures / "pipeline" / "transformer").glob("*.safetensors")).unlink()
    done = plan(pictures, spec="pictures.yaml")
    assert done.returncode == 2
    assert (
        "the size of the network that denoises is not known, because the weights are not on this machine" in done.stderr
    )


def test_printed_yaml_can_be_pasted_and_gives_the_same_plan(folder: Path) -> None:
    first = plan(folder, "-o", "yaml")
    assert first.returncode == 0, first.stderr
    section = yaml.safe_load(first.stdout)
    assert section.keys() == {"placement", "train"}
    spec = yaml.safe_load(SPEC)
    spec |= {"placement": section["placement"], "train": spec["train"] | section["train"]}
    (folder / "pasted.yaml").write_text(yaml.safe_dump(spec))
    assert plan(folder, "-o", "yaml", spec="pasted.yaml").stdout == first.stdout
    assert load_spec(folder / "pasted.yaml").train.ranks == section["train"]["ranks"]


def test_a_job_that_fits_nowhere_is_refused_with_who_is_too_large_and_what_would_help(folder: Path) -> None:
    (folder / "small.yaml").write_text(
        yaml.safe_dump({"nodes": [CLUSTER["nodes"][0] | {"memory_gib": 40, "accelerators": 4}]})
    )
    done = plan(folder, "-o", "json", cluster="small.yaml")
    assert done.returncode == 2
    assert json.loads(done.stdout)["start"] is None
    assert "no placement of job 'sevens' fits. The closest is " in done.stderr
    assert "exceed" in done.stderr
    assert done.stderr.count("\n") == 1
    assert plan(folder, "-o", "yaml", cluster="small.yaml").stdout == ""


@pytest.mark.parametrize(
    ("words", "cluster", "said"),
    [
        (("--cluster", "none.yaml"), None, "none.yaml: the cluster file cannot be read"),
        (("--set", "model.path=other"), None, "model.path: the folder does not exist"),
        (("--set", "model.path=."), None, "model.path: the folder has no config.json"),
        ((), "nodes: [", "the file is not YAML"),
        ((), "- a", "the cluster file must be a mapping with nodes"),
        (
            (),
            "nodes: [{accelerators: 8, device: h1000, host_memory_gib: 5}]",
            "there is no device 'h1000', did you mean 'h100'?",
        ),
        ((), "nodes: [{accelerators: 8, device: h100}]", "'nodes.0.host_memory_gib' is missing"),
        ((), "nodes: [{accelerators: 8, tflops: .nan, host_memory_gib: 5}]", "nodes.0.tflops: "),
    ],
)
def test_errors_are_one_sentence(folder: Path, words: tuple[str, ...], cluster: str | None, said: str) -> None:
    if cluster is not None:
        (folder / "cluster.yaml").write_text(cluster)
    done = plan(folder, *words)
    assert (done.returncode, done.stdout.strip()[:0]) == (2, "")
    assert said in done.stderr
    assert done.stderr.startswith("gcore: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("spec", ["arithmetic/grpo.yaml", "arithmetic/judge.yaml", "arithmetic/ppo.yaml"])
@pytest.mark.parametrize("cluster", ["two-cores", "eight-h100"])
def test_examples_can_be_planned(spec: str, cluster: str, tmp_path: Path) -> None:
    shape = SEVEN | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    judged = ("--set", f"judges.0.model.path={tmp_path}") if "judge" in spec else ()
    done = plan(
        ROOT, "-o", "yaml", "--set", f"model.path={tmp_path}", *judged,
        spec=f"examples/{spec}", cluster=f"deploy/local/clusters/{cluster}.yaml",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["placement"]["policy"] in ("colocated", "static")
