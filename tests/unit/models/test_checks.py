"""Code and pickles that come with a model are found before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore.models.checks import check_code, check_weights, is_known, read_config, remote_code_files
from gcore.models.hubs import ModelError
from gcore.models.resolve import resolve_model

CODE: dict[str, Any] = {
    "model_type": "strange_new_model",
    "auto_map": {
        "AutoConfig": "configuration_strange.StrangeConfig",
        "AutoModelForCausalLM": "modeling_strange.StrangeForCausalLM",
        "AutoModelForSequenceClassification": "classifying.Other",
    },
}
FILES = ("configuration_strange.py", "modeling_strange.py")


def test_the_files_that_would_run_are_those_that_engines_and_ranks_import() -> None:
    assert remote_code_files(CODE) == FILES
    assert remote_code_files({"model_type": "qwen3"}) == ()


def test_a_model_that_needs_its_own_code_is_refused_by_naming_the_file_and_the_field() -> None:
    with pytest.raises(ModelError) as caught:
        check_code(CODE, trusted=False, where="/m")
    assert "modeling_strange.py" in str(caught.value)
    assert "model.trust_remote_code: true" in str(caught.value)
    assert check_code(CODE, trusted=True, where="/m") == FILES


def test_a_model_that_transformers_knows_runs_without_its_own_code() -> None:
    known = {**CODE, "model_type": "qwen3"}
    assert check_code(known, trusted=False, where="/m") == ()
    assert check_code(known, trusted=True, where="/m") == FILES


def test_code_of_another_model_is_refused_even_if_trusted() -> None:
    foreign = {"model_type": "x", "auto_map": {"AutoModelForCausalLM": "someone/else--modeling.Model"}}
    with pytest.raises(ModelError, match=r"someone/else: modeling\.py"):
        check_code(foreign, trusted=True, where="/m")


@pytest.mark.parametrize("table", [None, 3, [], {"AutoConfig": 5}, {"AutoConfig": "nodot"}], ids=repr)
def test_a_strange_table_of_code_is_no_code(table: Any) -> None:
    assert remote_code_files({"auto_map": table}) == ()


def test_whether_a_type_is_known_is_read_from_the_installed_transformers() -> None:
    assert is_known("qwen3")
    assert is_known("llama")
    assert not is_known("strange_new_model")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "weights.ckpt"])
def test_weights_that_are_a_pickle_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="pickle") as caught:
        check_weights(["config.json", name], where="/m")
    assert name in str(caught.value)


def test_a_pickle_beside_safetensors_is_not_read_and_so_no_fault() -> None:
    check_weights(["model.safetensors", "pytorch_model.bin"], where="/m")
    check_weights(["config.json", "training_args.bin"], where="/m")


def test_a_folder_resolves_to_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    found = resolve_model(str(tmp_path))
    assert (found.folder, found.revision, found.remote_code) == (tmp_path, "", ())


def test_a_folder_of_pickles_or_of_needed_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CODE))
    with pytest.raises(ModelError, match=r"modeling_strange\.py"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickle"):
        resolve_model(str(tmp_path), trust_remote_code=True)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "\x00"], ids=repr)
def test_a_configuration_that_cannot_be_read_is_left_to_who_loads_the_model(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path) == {}
