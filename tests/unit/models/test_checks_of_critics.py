"""A critic's folder that cannot be started from is refused when the job is submitted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gcore.models.checks import check_critic
from gcore.models.hubs import ModelError


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    save_file({"score.weight": np.zeros((1, 4), np.float32)}, folder / "model.safetensors")
    return folder


def test_a_whole_model_is_fine(tmp_path: Path) -> None:
    check_critic(str(make(tmp_path / "judge")), trust_remote_code=False)


def test_a_folder_that_is_not_there_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"train\.critic\.path: the folder does not exist"):
        check_critic(str(tmp_path / "nowhere"), trust_remote_code=False)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model is here: there is no config\.json"):
        check_critic(str(tmp_path), trust_remote_code=False)


def test_weights_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "judge")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4])
    with pytest.raises(ModelError):
        check_critic(str(folder), trust_remote_code=False)


def test_code_that_comes_with_it_does_not_run_unasked(tmp_path: Path) -> None:
    folder = make(tmp_path / "judge")
    config = {"model_type": "unheard_of", "auto_map": {"AutoModelForCausalLM": "modeling.Judge"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"modeling\.py"):
        check_critic(str(folder), trust_remote_code=False)
    check_critic(str(folder), trust_remote_code=True)
