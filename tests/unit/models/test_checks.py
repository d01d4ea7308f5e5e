"""Code and pickles in a model's folder are found before any process starts.

Missing weights are reported before any process starts, from names and sizes alone.
An unusable critic folder is refused at the job's submission.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import DataError
from gcore.models.adapter_checks import check_adapter
from gcore.models.checks import (
    check_code,
    check_critic,
    check_weight_file,
    check_weights,
    check_whole,
    is_known,
    read_config,
    remote_code_files,
    require_config,
)
from gcore.models.hubs import ModelError
from gcore.models.resolve import resolve_model
from gcore.models.tensors import BITS

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


TENSORS = {"a": np.arange(64, dtype=np.float32), "b": np.ones((3, 5), dtype=np.float16)}


def write(path: Path, size: int | None = None) -> Path:
    save_file(TENSORS, path, metadata={"format": "pt"})
    if size is not None:
        path.write_bytes(path.read_bytes()[:size])
    return path


def test_whole_weights_pass_in_one_file_and_in_several(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    check_whole(tmp_path)
    several = tmp_path / "several"
    several.mkdir()
    for name in ("one.safetensors", "two.safetensors"):
        write(several / name)
    (several / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    check_whole(several)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 60, -1, -100])
def test_a_file_cut_off_anywhere_is_told_with_its_size(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with pytest.raises(ModelError, match=rf"cut off: it has {len(whole[:cut])} ") as caught:
        check_whole(tmp_path)
    assert str(path) in str(caught.value)
    assert "Copy or download it again" in str(caught.value)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    ("another content", lambda f: (f / "model.safetensors").write_text("x" * 99), "not a safetensors file"),
    ("more than there should be", lambda f: (f / "model.safetensors").open("ab").write(b"x"), "not a safetensors file"),
    (
        "a broken header",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b"{1234567"),
        "cannot read the header of the safetensors file",
    ),
    (
        "a header that is a list",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 14) + b'{"a": [1, 2] }'),
        "cannot read the header of the safetensors file",
    ),
    ("a broken index", lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index of the weights"),
    (
        "an index of a file that is not there",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
        "1 of 1 weight files are missing, first x.safetensors",
    ),
    (
        "an index of a file of another folder",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}'),
        "names a file in another folder",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_weight_errors_are_one_sentence(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write(tmp_path / "model.safetensors")
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        check_whole(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


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
    with pytest.raises(ModelError, match=r"the folder is not a model: it has no config\.json"):
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


MATRIX = "model.layers.0.self_attn.q_proj"


def write_adapter(folder: Path, *, rank: int = 2, layer: str = MATRIX, width: int = 4, **settings: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = f"base_model.model.{layer}"
    matrices = {
        f"{name}.lora_A.weight": np.zeros((2, width), np.float32),
        f"{name}.lora_B.weight": np.zeros((6, 2), np.float32),
    }
    save_file(matrices, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({f"{MATRIX}.weight": np.zeros((6, 4), np.float32)}, folder / "model.safetensors")
    return folder


def test_an_adapter_that_fits_its_model_is_accepted(tmp_path: Path, base: Path) -> None:
    check_adapter(write_adapter(tmp_path / "fits"), base)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(DEEP, "no configuration", id="deeply-nested"),
        pytest.param('{"r": 2, "lora_alpha": %s}' % ("9" * 401), "lora_alpha should be", id="huge-alpha"),
        pytest.param('{"r": 2, "lora_alpha": %s}' % ("9" * 5000), "no configuration", id="number-above-pythons-limit"),
        pytest.param('{"r": %s, "lora_alpha": 4}' % ("9" * 401), "r should be", id="huge-rank"),
        pytest.param("[]", "no configuration", id="a-list"),
        pytest.param(None, "cannot read", id="missing"),
    ],
)
def test_a_damaged_configuration_of_an_adapter_is_refused(
    tmp_path: Path, base: Path, content: str | None, said: str
) -> None:
    folder = write_adapter(tmp_path / "adapter")
    config = folder / "adapter_config.json"
    config.unlink()
    if content is not None:
        config.write_text(content)
    with pytest.raises(DataError, match=said) as error:
        check_adapter(folder, base)
    assert error.value.where == str(config)
    assert error.value.fix


@pytest.mark.parametrize(
    "content",
    [DEEP, '{"a\\u0000b": ""}', '{"a\\ud800": ""}', '{"a\\udc80": ""}', '[["model.safetensors", ""]]', "[5]"],
    ids=["deeply-nested", "nul", "surrogate", "escaped-byte", "list-of-pairs", "list"],
)
def test_a_damaged_list_of_base_files_is_refused(tmp_path: Path, base: Path, content: str) -> None:
    folder = write_adapter(tmp_path / "adapter")
    (folder / "base_model.json").write_text(content)
    with pytest.raises(DataError, match="does not list the files of a base model") as error:
        check_adapter(folder, base)
    assert error.value.where == str(folder / "base_model.json")


def replace_by_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "base_model.json"])
def test_a_fifo_in_an_adapters_folder_is_refused_unopened(tmp_path: Path, base: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "adapter")
    replace_by_fifo(folder / name)
    with pytest.raises(DataError, match="not a regular file") as error:
        check_adapter(folder, base)
    assert error.value.where == str(folder / name)


def test_a_fifo_in_a_models_folder_is_not_opened(tmp_path: Path, base: Path) -> None:
    replace_by_fifo(base / "config.json")
    assert read_config(base) == {}
    with pytest.raises(DataError, match="not a regular file"):
        require_config(base)
    with pytest.raises(DataError, match="not a regular file"):
        ModelTokenizer.load(base)
    replace_by_fifo(base / "model.safetensors")
    with pytest.raises(ModelError):
        check_whole(base)
    with pytest.raises(ModelError, match="not a regular file"):
        check_weight_file(base / "model.safetensors")


def test_a_fifo_among_the_base_files_is_not_opened(tmp_path: Path, base: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    (folder / "base_model.json").write_text(json.dumps({"model.safetensors": "", "more.safetensors": ""}))
    replace_by_fifo(base / "more.safetensors")
    with pytest.raises(DataError, match="not a regular file"):
        check_adapter(folder, base)


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "strange",
    [Path.mkdir, make_loop, lambda path: path.symlink_to("nowhere")],
    ids=["folder", "symlink-loop", "broken-symlink"],
)
def test_a_list_of_base_files_that_cannot_be_read_does_not_turn_the_check_off(
    tmp_path: Path, base: Path, strange: Callable[[Path], None]
) -> None:
    folder = write_adapter(tmp_path / "adapter")
    strange(folder / "base_model.json")
    with pytest.raises(DataError, match="cannot read the list") as error:
        check_adapter(folder, base)
    assert error.value.where == str(folder / "base_model.json")


def write_header(path: Path, size: int, **tensors: Any) -> None:
    text = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "strange",
    [
        pytest.param({"dtype": "F32", "data_offsets": [0, 8]}, id="no-shape"),
        pytest.param(GOOD | {"shape": None}, id="shape-null"),
        pytest.param(GOOD | {"shape": {}}, id="shape-object"),
        pytest.param(GOOD | {"shape": [2.0]}, id="fraction"),
        pytest.param(GOOD | {"shape": [-2]}, id="negative"),
        pytest.param(GOOD | {"shape": [True]}, id="bool"),
        pytest.param(GOOD | {"shape": [3]}, id="more-elements-than-bytes"),
        pytest.param(GOOD | {"dtype": "F64"}, id="larger-dtype-than-bytes"),
        pytest.param(GOOD | {"dtype": "F31"}, id="unknown-dtype"),
        pytest.param(GOOD | {"dtype": ["F32"]}, id="dtype-list"),
        pytest.param(GOOD | {"data_offsets": [0]}, id="one-offset"),
        pytest.param(GOOD | {"data_offsets": ["0", "8"]}, id="offset-strings"),
        pytest.param(GOOD | {"data_offsets": [4, 12]}, id="gap"),
        pytest.param(GOOD | {"data_offsets": [8, 0]}, id="reversed"),
        pytest.param(None, id="null"),
    ],
)
def test_a_header_that_the_library_does_not_read_is_refused(tmp_path: Path, strange: Any) -> None:
    path = tmp_path / "model.safetensors"
    offsets = strange.get("data_offsets") if strange else None
    size = offsets[1] if offsets in ([0, 8], [4, 12]) else 8
    write_header(path, size, a=strange)
    with pytest.raises(SafetensorError), safe_open(path, "numpy"):
        pass
    with pytest.raises(ModelError, match=r"header|cut off|not a safetensors file") as error:
        check_weight_file(path)
    assert error.value.fix


@pytest.mark.parametrize("second", [[0, 8], [4, 12], [12, 20]], ids=["same", "overlapping", "gap"])
def test_tensors_that_do_not_follow_each_other_are_refused_by_name(tmp_path: Path, second: list[int]) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, second[1], a=GOOD, b=GOOD | {"data_offsets": second})
    with pytest.raises(ModelError, match=r"tensor 'b' \(F32 \[2\]\) has bytes"):
        check_weight_file(path)


def test_every_dtype_of_the_library_has_its_size(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for dtype, bits in BITS.items():
        write_header(path, bits, a={"dtype": dtype, "shape": [8], "data_offsets": [0, bits]})
        assert check_weight_file(path)["a"].nbytes == bits
        with safe_open(path, "numpy") as file:
            assert list(file.keys()) == ["a"]


def test_a_model_whose_json_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(DEEP)
    with pytest.raises(ModelError, match="cannot read the index"):
        check_whole(tmp_path)
    (tmp_path / "config.json").write_text(DEEP)
    assert read_config(tmp_path) == {}
    with pytest.raises(DataError, match="nested too deeply"):
        require_config(tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param({"width": 5}, "whose matrix is [6, 4]", id="wrong-width"),
        pytest.param({"rank": 3}, "rank 3", id="rank-of-the-configuration"),
        pytest.param({"layer": "model.layers.9.q_proj"}, "which the model does not have", id="unknown-layer"),
        pytest.param({"use_dora": True}, "use_dora", id="dora"),
        pytest.param({"rank_pattern": {"q_proj": 4}}, "rank_pattern", id="several-ranks"),
        pytest.param({"peft_type": "IA3"}, "peft_type", id="another-kind"),
        pytest.param({"kasa_config": {"beta": 1e-4}}, "kasa_config", id="kasa"),
        pytest.param({"trainable_token_indices": [3]}, "trainable_token_indices", id="trained-tokens"),
        pytest.param({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights", id="pissa"),
        pytest.param({"lora_alpha": None}, "lora_alpha should be a finite number", id="no-alpha"),
        pytest.param({"lora_alpha": 0}, "lora_alpha should be a finite number", id="alpha-0"),
        pytest.param({"lora_alpha": 1e-60}, "lora_alpha should be", id="alpha-0-in-float32"),
        pytest.param({"lora_alpha": 1e39}, "lora_alpha should be", id="alpha-above-float32"),
        pytest.param({"target_modules": 5}, "target_modules should be a list of names", id="targets-number"),
        pytest.param({"target_modules": ["q_proj", 5]}, "target_modules should be", id="a-target-number"),
        pytest.param({"target_modules": [""]}, "target_modules should be", id="an-empty-target"),
        pytest.param({"target_modules": {"q_proj": 1}}, "target_modules should be", id="targets-object"),
        pytest.param({"target_modules": ""}, "target_modules should be", id="empty-expression"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(
    tmp_path: Path, base: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as error:
        check_adapter(write_adapter(tmp_path / "strange", **settings), base)
    assert said in str(error.value)


@pytest.mark.parametrize("targets", [None, ["q_proj"], r".*\.q_proj"], ids=["null", "list", "expression"])
def test_peft_may_name_an_adapters_layers_in_several_ways(tmp_path: Path, base: Path, targets: Any) -> None:
    check_adapter(write_adapter(tmp_path / "adapter", target_modules=targets), base)


def test_an_adapter_of_another_base_with_equal_shapes_is_refused(tmp_path: Path, base: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    (folder / "base_model.json").write_text(json.dumps({"model.safetensors": "0" * 64}))
    with pytest.raises(DataError, match="not that of the adapter's base"):
        check_adapter(folder, base)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(DataError, match="configuration"):
        check_adapter(base, base)
    folder = write_adapter(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError, match="weights"):
        check_adapter(folder, base)
