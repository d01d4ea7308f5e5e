"""A whole cluster whose policy generates pictures: what people see of them while it runs and afterwards, and the pipeline
that they export."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml
from cluster_run import gcore, run_to_the_end

from gcore.models.diffusion.files import network_folder
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.observability.contact_sheet import SHEET_FILE, read_stamp
from gcore.testing.pipelines import write_pipeline

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]

RULE = """
from PIL import Image

def red(response, fields):
    with Image.open(response.picture) as picture:
        return picture.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))[0] / 255
"""
STEPS = 2


def sha256_of(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def test_generated_pictures_are_in_the_run_folder_and_in_everything_that_people_read(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "model", "sd3")
    (tmp_path / "rule.py").write_text(RULE)
    prompts = [json.dumps({"prompt": f"a {colour} square"}) for colour in ("red", "green", "blue")]
    (tmp_path / "train.jsonl").write_text("\n".join(prompts * 8))
    (tmp_path / "eval.jsonl").write_text("\n".join(prompts))
    tree = {
        "name": "colours",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 4},
        "flow": {"name": "diffusion_nft", "steps": STEPS, "groups_per_step": 4, "samples_per_prompt": 4},
        "rollout": {"diffusion": {"steps": 4, "height": 16, "width": 16}},
        "reward": {"file": "rule.py:red"},
        "train": {"learning_rate": 1.0e-3, "micro_batch_tokens": 256},
        "eval": {"path": "eval.jsonl", "every": 1, "threshold": 0.5},
    }
    spec, home = tmp_path / "spec.yaml", tmp_path / "home"
    spec.write_text(yaml.safe_dump(tree))
    outcome = run_to_the_end(spec, home)
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    run_dir = Path(outcome.summary["run_dir"])

    # The lines of `gcore run` and its summary.
    assert f"→ {run_dir}/samples/evaluation-0-0/" in outcome.output
    assert f"contact sheet       {run_dir / SHEET_FILE}" in outcome.output
    assert "pictures/s" in outcome.output
    for word in ("(empty)", "tok/s", "tokens/s", "length"):
        assert word not in outcome.output

    # The contact sheet names its evaluations: the first, the newest, and the best if it is another one.
    first, *_, newest = read_stamp(run_dir / SHEET_FILE).split()
    assert (first, newest) == ("0.0", f"0.{STEPS}")

    # Samples of each step, without a cluster.
    where = ("colours", "--home", str(home))
    for step in range(1, STEPS + 1):
        groups = json.loads(gcore("samples", *where, "--step", str(step), "--limit", "0", "-o", "json").stdout)[
            "groups"
        ]
        responses = [response for group in groups for response in group["responses"]]
        assert len(responses) == 16
        for one in responses:
            assert (one["tokens"], one["text"], one["picture"]["width"]) == (0, "", 16)
            assert one["steps"] > 0
            assert sha256_of(one["picture"]["file"]) == one["picture"]["sha256"]
    text = gcore("samples", *where).stdout
    assert "(empty)" not in text
    assert "token" not in text

    # Held-out pictures of every evaluation, and sheets.
    steps = [word for step in range(STEPS + 1) for word in ("--step", str(step))]
    evaluations = json.loads(gcore("samples", *where, "--held-out", *steps, "-o", "json").stdout)
    assert [one["step"] for one in evaluations] == list(range(STEPS + 1))
    shown = [response for one in evaluations for response in one["responses"]]
    assert len(shown) == 3 * (STEPS + 1)
    assert all(sha256_of(one["picture"]) == Path(one["picture"]).stem for one in shown)
    sheet = tmp_path / "sheet.png"
    assert gcore("samples", *where, "--held-out", *steps, "--sheet", str(sheet)).stdout.startswith(
        f"Drew {len(shown)} of {len(shown)} pictures"
    )
    assert gcore("samples", *where, "--sheet", str(sheet)).stdout.startswith("Drew 16 of 16 pictures")

    # The trained pipeline, as its engines serve it: a network that follows the trained one.
    (newest_checkpoint,) = run_dir.glob(f"checkpoints/*-{STEPS}")
    assert (newest_checkpoint / "served").is_dir()
    to = tmp_path / "exported"
    gcore("export", *where, "--to", str(to))
    assert (network_folder(to) / "config.json").is_file()
    before, after = (
        ImagePipeline.load(folder, guidance=1.0, dtype=torch.float32, device="cpu").network.module.parameters()
        for folder in (tmp_path / "model", to)
    )
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))

    # Nothing but display needs them, so not the audit.
    for file in run_dir.rglob("*.png"):
        file.unlink()
    audit = json.loads(gcore("audit", *where, "-o", "json").stdout)
    assert (audit["steps"], audit["violations"]) == (STEPS, [])
