"""Model folders that cannot be served: one error sentence before the server starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_core import make_core
from safetensors.torch import load_file, save_file

from gcore.engines.detokenizer import Detokenizer
from gcore.engines.launch import EngineLaunch
from gcore.engines.torch.model import stage_weights
from gcore.engines.torch.server import start_engine
from gcore.errors import DataError, EngineError, UsageError
from gcore.testing.models import make_tiny_model

WEIGHTS = "model.safetensors"


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def remove(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def reshape_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_config(**more: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | more
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def garble_the_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def make_the_config_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(truncate, "cannot load this model", id="truncated weights"),
        pytest.param(remove, "cannot load this model", id="no weights"),
        pytest.param(lose_a_tensor, r"weights lack model.layers.1.mlp.up_proj.weight", id="a weight is missing"),
        pytest.param(reshape_a_tensor, "cannot load this model", id="a weight of another shape"),
        pytest.param(
            change_config(model_type=None, architectures=None), "cannot load this model", id="no architecture"
        ),
        pytest.param(change_config(model_type="nobody_knows"), "cannot load this model", id="an unknown architecture"),
        pytest.param(change_config(model_type="bert"), "cannot|lack", id="weights of another architecture"),
        pytest.param(garble_the_config, "cannot read the model's config.json", id="a broken configuration"),
        pytest.param(make_the_config_a_list, "it is not a JSON object", id="a configuration that is a list"),
        pytest.param(change_config(num_hidden_layers=0), "num_hidden_layers", id="fewer layers than their kinds"),
        pytest.param(change_config(num_hidden_layers="two"), "expected int", id="a word for a number"),
        pytest.param(change_config(max_position_embeddings=5), "context of 5 tokens is too short", id="no context"),
    ],
)
def test_a_model_that_is_broken_is_refused_in_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    folder = make_tiny_model(tmp_path)
    spoil(folder)
    with pytest.raises(DataError, match=says) as caught:
        make_core(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zzz"] = 49
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match=r"tokenizer has a token 49 \('zzz'\).* vocabulary ends at 48"):
        start_engine(EngineLaunch(model=str(folder), device="cpu"), Detokenizer.load(folder))


def as_whole_numbers(folder: Path) -> None:
    tensors = {name: (10 * tensor).to(torch.int8) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def under_other_names(folder: Path) -> None:
    tensors = {f"somewhere.else.{name}": tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(truncate, "cannot read the weights", id="truncated"),
        pytest.param(remove, "the folder has no weights", id="gone"),
        pytest.param(lose_a_tensor, "lacks model.layers.1.mlp.up_proj.weight", id="a weight is missing"),
        pytest.param(reshape_a_tensor, "in another shape model.layers.0.mlp.up_proj.weight", id="of another shape"),
        pytest.param(as_whole_numbers, "as integers", id="quantised"),
        pytest.param(
            under_other_names, "the checkpoint lacks lm_head.weight", id="of other names, which would come up random"
        ),
    ],
)
def test_new_weights_that_are_broken_are_refused_in_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    core = make_core(make_tiny_model(tmp_path / "served"))
    folder = make_tiny_model(tmp_path / "new", seed=1)
    spoil(folder)
    with pytest.raises(EngineError, match=says) as caught:
        stage_weights(core.model, folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["tpu", "cpux", "meta"])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(UsageError, match="is not available"):
        start_engine(EngineLaunch(model=str(make_tiny_model(tmp_path)), device=device), None)


def test_a_cache_in_which_no_request_fits_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path / "m"))
    with pytest.raises(UsageError, match=r"a cache of 1 tokens is too small.*rollout\.cache_tokens"):
        start_engine(EngineLaunch(model=folder, device="cpu", cache_tokens=1), None)
    assert start_engine(EngineLaunch(model=folder, device="cpu", cache_tokens=200), None).longest >= 2


def test_a_folder_may_lack_what_it_lists_as_frozen(tmp_path: Path) -> None:
    core = make_core(make_tiny_model(tmp_path / "served"))
    folder = make_tiny_model(tmp_path / "new", seed=1)
    lose_a_tensor(folder)
    (folder / "frozen.json").write_text('["model.layers.1.mlp.up_proj.weight"]')
    staged = stage_weights(core.model, folder)
    assert "model.layers.1.mlp.up_proj.weight" not in staged.tensors
    assert "model.layers.0.mlp.up_proj.weight" in staged.tensors
    (folder / "frozen.json").write_text('["model.layers.0.mlp.up_proj.weight"]')
    with pytest.raises(EngineError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        stage_weights(core.model, folder)
    (folder / "frozen.json").write_text("[")
    with pytest.raises(EngineError, match=r"cannot read frozen\.json"):
        stage_weights(core.model, folder)
