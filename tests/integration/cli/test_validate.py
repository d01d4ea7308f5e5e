"""`gcore validate` checks everything that a spec names and displays it as the job will use it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from warm_programs import COMMANDS

from controllers.api.submission.checks import check_submission
from gcore.config import load_spec
from gcore.errors import UsageError
from gcore.media.placeholders import PictureRule
from gcore.testing.models import make_tiny_model
from gcore.testing.vision_models import make_picture, make_tiny_vision_model

TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A spec of two sources in different formats, with everything they name."""
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "1": 1, "+": 2, "=": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "=", "unk_token": "?"}))
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 32}))
    save_file({"w": np.zeros(16, dtype=np.float32)}, model / "model.safetensors")
    lines = [{"prompt": "1 + " * (i % 10) + "1 =", "answer": "2"} for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pq.write_table(pa.table({"q": ["1 + 1"] * 9, "label": ["2"] * 9}), tmp_path / "others.parquet")
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    (tmp_path / "spec.yaml").write_text(json.dumps(TREE))
    return tmp_path


TREE: dict[str, Any] = {
    "name": "mixed",
    "model": {"path": "model"},
    "data": {
        "shards": 4,
        "sources": [
            {"name": "sums", "path": "sums.jsonl", "weight": 0.5, "min_prompt_tokens": 4, "max_prompt_tokens": 16},
            {
                "name": "others", "path": "others.parquet", "weight": 2, "prompt": "q", "chat": True,
                "template": "own.jinja", "system": "1\x1b[2J", "reward": {"name": "exact", "answer": "label"},
            },
        ],
    },
    "flow": {"steps": 2, "groups_per_step": 2},
    "rollout": {"max_new_tokens": 4},
    "eval": {"path": "sums.jsonl", "limit": 5},
}  # fmt: skip


def validate(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return COMMANDS.run("controllers.cli.main", "validate", "spec.yaml", "--home", "home", *more, cwd=folder)


def test_each_source_is_shown_with_its_part_in_an_epoch_its_lengths_filters_and_first_prompt(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = validate(folder, "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(folder.rglob("*")) == before, "a check leaves nothing behind"
    tree = json.loads(done.stdout)
    assert tree["prompts"] == 20 + 18
    sums, others, held = tree["sources"]
    # Prompts of 2, 4, ... 20 tokens, four of each.
    assert sums == {
        "source": "sums",
        "for": "training",
        "path": str(folder / "sums.jsonl"),
        "entries": 40,
        "weight": 0.5,
        "refs": 20,
        "reward": "numeric",
        "counted": 40,
        "filtered": {
            "the prompt is shorter than min_prompt_tokens (4)": 4,
            "the prompt is longer than max_prompt_tokens (16)": 8,
        },
        "unknown": 0,
        "tokens": {"mean": 10.0, "p50": 10, "p95": 16, "max": 16},
        "longest": f"{folder / 'sums.jsonl'}, entry 7",
        "first": "1 + 1 =",
    }
    assert (others["refs"], others["reward"], others["unknown"]) == (18, "exact", 9)
    assert others["first"] == "system : 1\x1b[2J user : 1 + 1 "
    assert (held["for"], held["refs"], held["filtered"]) == ("evaluation", 5, {})


def test_people_see_a_table_a_histogram_and_prompts_without_control_characters(folder: Path) -> None:
    done = validate(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = [" ".join(line.split()) for line in done.stdout.split("\n")]
    assert "sums training 40 0.5 20 12 (30.0 %) numeric" in lines
    assert "sums: 8 filtered: the prompt is longer than max_prompt_tokens (16)." in lines
    assert "others: 9 prompts contain text that the model's tokenizer does not know." in lines
    assert "First prompt of others: system : 1\\x1b[2J user : 1 + 1" in lines
    assert "First prompt of data (evaluation): 1 =" in lines
    histogram = lines[lines.index("Prompts of sums by tokens (mean 10.0, P50 10, P95 16, longest 16):") + 1 :][:7]
    assert [line.split()[0] for line in histogram] == ["4-5", "6-7", "8-9", "10-11", "12-13", "14-15", "16-17"]
    assert {line.split()[-1] for line in histogram} == {"4"}
    assert "spec.yaml is valid: 38 prompts, 2 steps." in lines


def test_a_sample_is_named_as_one(folder: Path) -> None:
    done = validate(folder, "--sample", "4")
    assert done.returncode == 0
    assert "sums: 4 of 40 prompts were tokenized, evenly spaced." in done.stdout


def test_pictures_are_shown_with_their_sizes_and_tokens_and_refused_where_the_spec_leaves_them_out(
    tmp_path: Path,
) -> None:
    model = make_tiny_vision_model(tmp_path / "model")
    for name, height, width in (("small", 20, 40), ("large", 64, 128)):
        (tmp_path / f"{name}.png").write_bytes(make_picture(height, width))
    entries = [{"prompt": "<image>?", "images": f"{name}.png", "answer": "1"} for name in ("small", "large") * 4]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    data = {"path": "data.jsonl", "shards": 4, "images": "images", "max_pixels": 64 * 64}
    tree = {"name": "seen", "model": {"path": str(model)}, "flow": {"steps": 2, "groups_per_step": 2}}
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(tree | {"data": data, "rollout": {"max_new_tokens": 4}}))
    done = validate(tmp_path)
    rule = PictureRule.load(model, max_pixels=64 * 64)
    seen = [rule.target_size(20, 40), rule.target_size(64, 128)]
    shown = " to ".join(f"{width}x{height} ({rule.token_count(height, width)} tokens)" for height, width in seen)
    assert f"data: 2 pictures, 40x20 to 128x64 pixels. The model sees {shown}." in done.stdout.split("\n")
    without = ("--set", "data.images=null", "--set", "data.max_pixels=null")
    assert "has 1 image marker, but data.images is not set" in validate(tmp_path, *without).stderr
    text = make_tiny_model(tmp_path / "text")
    done = validate(tmp_path, *without, "--set", f"model.path={text}")
    assert "data: data.images is not set, so the model sees no pictures, and reads '<image>' as text." in done.stdout
    done = validate(tmp_path, "--set", "data.images=pictures")
    assert "0 pictures, because its field 'pictures' is missing or null. Correct data.images. Or write" in done.stderr


WIPE = """
def score(response, fields):
    for path in response.pictures:
        path.chmod(0o600)
        path.write_bytes(b"")
    return 1.0
"""


def test_a_reward_that_writes_to_pictures_does_not_change_the_data(tmp_path: Path) -> None:
    model = make_tiny_vision_model(tmp_path / "model")
    (tmp_path / "wipe.py").write_text(WIPE)
    (tmp_path / "a.png").write_bytes(picture := make_picture(20, 40))
    entries = [{"prompt": f"<image>{number}?", "images": "a.png", "answer": "1"} for number in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    data = {"path": "data.jsonl", "shards": 4, "images": "images"}
    tree = {"name": "wiped", "model": {"path": str(model)}, "flow": {"steps": 2, "groups_per_step": 2}}
    tree |= {"data": data, "rollout": {"max_new_tokens": 4}, "reward": {"file": "wipe.py:score"}}
    (tmp_path / "spec.yaml").write_text(json.dumps(tree))
    done = validate(tmp_path)
    assert "a picture of the prompt has other bytes than its SHA-256 says" in done.stderr
    assert (tmp_path / "a.png").read_bytes() == picture


MISTAKES: list[tuple[str, tuple[str, ...], Callable[[Path], object], str]] = [
    (
        "weights that are cut off",
        (),
        lambda f: (f / "model/model.safetensors").write_bytes((f / "model/model.safetensors").read_bytes()[:-4]),
        "model/model.safetensors: the file is cut off: it has",
    ),
    (
        "a bad line",
        (),
        lambda f: (f / "sums.jsonl").open("a").write('{"prompt": "", "answer": "2"}\n'),
        "sums.jsonl:41: field 'prompt' is empty",
    ),
    (
        "a bad row",
        (),
        lambda f: pq.write_table(pa.table({"q": ["1", None], "label": ["2", "2"]}), f / "others.parquet"),
        "others.parquet, row 1: field 'q' is null",
    ),
    ("no template", (), lambda f: (f / "own.jinja").unlink(), "own.jinja: cannot read the chat template"),
    (
        "a template that fails",
        (),
        lambda f: (f / "own.jinja").write_text("{{ raise_exception('no system message') }}"),
        "others.parquet, row 0: the chat template failed on the prompt (TemplateError: no system message)",
    ),
    (
        "tools without chat",
        ("--set", "data.sources.0.tools=tools.json"),
        lambda f: None,
        "data, source 'sums': `tools` is set, but the prompts are plain text",
    ),
    (
        "an unknown reward",
        ("--set", "data.sources.1.reward.name=exakt"),
        lambda f: None,
        "'exakt'",
    ),
    (
        "an option that the reward does not know",
        ("--set", "data.sources.1.reward={name: exact, answer: label, options: {tolerence: 1}}"),
        lambda f: None,
        "has no option 'tolerence'",
    ),
    (
        "an expected answer that the reward cannot compare, far behind the first",
        (),
        lambda f: (f / "sums.jsonl").open("a").write('{"prompt": "1 + 1 + 1 =", "answer": {"value": "2"}}\n'),
        "sums.jsonl, entry 40: field 'answer' holds an object, which reward 'numeric' cannot compare. Name a field within it, such as "
        "reward.answer: answer.value",
    ),
    (
        "an expected answer that is no number, far behind the first",
        (),
        lambda f: (f / "sums.jsonl").open("a").write('{"prompt": "1 + 1 + 1 =", "answer": "two"}\n'),
        "sums.jsonl, entry 40: the expected answer 'two' in field 'answer' is not a number",
    ),
    (
        "more shards than prompts",
        ("--set", "data.shards=39"),
        lambda f: None,
        "data.shards: an epoch has 38 prompts, but data.shards is 39",
    ),
    (
        "a quota larger than the data",
        ("--set", "flow.groups_per_step=39"),
        lambda f: None,
        "flow.groups_per_step: a step takes 39 groups, but a data epoch has only 38 prompts",
    ),
    (
        "two sources of one name",
        ("--set", "data.sources.1.name=sums"),
        lambda f: None,
        "two sources have the same name",
    ),
    (
        "a prompt without room for its response",
        ("--set", "data.sources.0.max_prompt_tokens=null", "--set", "rollout.max_new_tokens=20"),
        lambda f: None,
        "sums.jsonl, entry 6: the prompt has 14 tokens, but at most 12 leave room for the response",
    ),
    (
        "filters that leave nothing",
        ("--set", "data.sources.0.min_prompt_tokens=16", "--set", "data.sources.0.max_prompt_tokens=15"),
        lambda f: None,
        "the filters exclude every prompt",
    ),
]


@pytest.mark.parametrize(("more", "damage", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_sentence_that_names_its_place(
    folder: Path, more: tuple[str, ...], damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)

    def check() -> None:
        spec = load_spec(folder / "spec.yaml", [part for part in more if part != "--set"])
        check_submission(spec, folder / "runs", folder / "cache", sample=None)

    with pytest.raises(UsageError) as caught:
        check()
    assert message in str(caught.value)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_a_mistake_ends_the_command_with_2_and_its_sentence(folder: Path) -> None:
    done = validate(folder, "--set", "data.shards=39")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gcore: data.shards: an epoch has 38 prompts, but data.shards is 39")
    assert done.stderr.count("\n") == 1


def test_offloading_to_host_memory_is_refused_on_cpu_slots_that_were_named_and_warned_of_on_default_ones(
    folder: Path,
) -> None:
    offload = ("--set", "train.backend=fsdp2", "--set", "train.offload_state=true")
    done = validate(folder, *offload)
    assert done.returncode == 0
    assert "warning: 'gcore run' would refuse the spec on its default slots, cpu:2: train.offload_state:" in done.stderr
    refused = validate(folder, *offload, "--slots", "cpu:2")
    assert refused.returncode == 2
    assert "train.offload_state: offload_state moves the train state from a GPU to host memory" in refused.stderr
    assert validate(folder, *offload, "--slots", "cuda:2").stderr == ""


def test_memory_in_turns_is_refused_on_cpu_slots_where_the_engine_cannot_release_it(folder: Path) -> None:
    turns = ("--set", "rollout.engine=vllm", "--set", "placement.memory=in_turns")
    refused = validate(folder, *turns, "--slots", "cpu:2")
    assert refused.returncode == 2
    assert "placement.memory: vLLM cannot release its memory on the CPU slots of node-0, node-1" in refused.stderr
