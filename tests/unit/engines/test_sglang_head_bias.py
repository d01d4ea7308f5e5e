"""The folder of a classifier for SGLang: the model's own, or one with a zero bias of the head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gcore.engines.launch import SglangLaunch
from gcore.engines.sglang.command import FILE, NAME, prepare_head_bias, server_command, zero_bias_file


def model(folder: Path, architecture: str = "Qwen3ForSequenceClassification", *, bias: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    tensors = {"score.weight": torch.ones(1, 4)} | ({NAME: torch.ones(1)} if bias else {})
    save_file(tensors, folder / "model.safetensors")
    return folder


def launch(folder: Path, task: str = "classify") -> SglangLaunch:
    return SglangLaunch.model_validate({"python": "/p", "model": str(folder), "task": task})


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_a_head_that_would_have_a_bias_of_chance_is_shown_with_none(tmp_path: Path, scratch: Path) -> None:
    folder = model(tmp_path / "m")
    shown = Path(prepare_head_bias(launch(folder), scratch).model)
    assert shown.parent == scratch
    assert load_file(shown / FILE) == {NAME: torch.zeros(1)}
    assert (shown / "model.safetensors").resolve() == folder / "model.safetensors"
    assert not (folder / FILE).exists()
    assert len(zero_bias_file()) % 4 == 0


def test_of_weights_in_several_files_the_index_names_it_too(tmp_path: Path, scratch: Path) -> None:
    folder = model(tmp_path / "m")
    index = {"metadata": {"total_size": 16}, "weight_map": {"score.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shown = Path(prepare_head_bias(launch(folder), scratch).model)
    told = json.loads((shown / "model.safetensors.index.json").read_text())
    assert told["weight_map"] == {"score.weight": "model.safetensors", NAME: FILE}
    assert json.loads((folder / "model.safetensors.index.json").read_text()) == index


def test_every_other_model_is_shown_as_it_is(tmp_path: Path, scratch: Path) -> None:
    others = [
        launch(model(tmp_path / "llama", "LlamaForSequenceClassification")),
        launch(model(tmp_path / "biased", bias=True)),
        launch(model(tmp_path / "writes"), task="generate"),
        launch(tmp_path / "missing"),
    ]
    assert [prepare_head_bias(one, scratch) for one in others] == others


def test_a_classifier_is_started_with_the_word_that_sglang_has_for_it(tmp_path: Path) -> None:
    assert "--is-embedding" in server_command(launch(tmp_path), 1)
    assert "--is-embedding" not in server_command(launch(tmp_path, task="generate"), 1)
