"""A model's exact size follows from its configuration."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from told_nodes import QWEN
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from gcore.errors import DataError
from gcore.ledger.records.cluster import ModelConfigs
from gcore.models.vision import part_of
from gcore.train.critic import make_value_model
from placement.mapping.workload import KNOWN, READ, VISION, read_shape, relevant_sizes

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "pad_token_id": 0,
}


def saved(kind: str, folder: Path, **more: Any) -> tuple[Any, dict[str, Any]]:
    """The configuration as transformers has it, and as its file says it."""
    config = AutoConfig.for_model(kind, **SMALL | more)
    config.save_pretrained(folder)
    return config, json.loads((folder / "config.json").read_text())


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize(
    "more",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 6, "tie_word_embeddings": False},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ],
    ids=["tied", "untied", "no groups", "one key", "biases"],
)
def test_parameters_are_those_of_the_model_that_transformers_builds(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    config, tree = saved(kind, tmp_path, **more)
    shape = read_shape(tree, where="here")
    with torch.device("meta"):
        assert shape.parameters == count(AutoModelForCausalLM.from_config(config))
    assert shape.context == config.max_position_embeddings
    assert shape.cache_numbers == 2 * 3 * config.num_key_value_heads * 10


@pytest.mark.parametrize("kind", KNOWN)
def test_a_classifier_and_a_critic_have_a_head_of_one_number(kind: str, tmp_path: Path) -> None:
    config, tree = saved(kind, tmp_path, num_labels=1, tie_word_embeddings=True)
    shape = read_shape(tree, where="here")
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
        critic = make_value_model(AutoModelForCausalLM.from_config(config), None)
    assert shape.with_one_output(bias=False).parameters == count(classifier)
    assert shape.with_one_output(bias=True).parameters == count(critic)


def test_known_models_have_as_many_parameters_as_their_names_say() -> None:
    large = {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    assert read_shape(large, where="Llama 3 70B").parameters == 70_553_706_496
    assert read_shape(QWEN | {"tie_word_embeddings": True}, where="Qwen2.5 0.5B").parameters == 494_032_768


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "the model's config.json cannot be read"),
        ({"model_type": "qwen"}, "'qwen' is not supported for planning, did you mean 'qwen[23]'?"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"model_type": "llama"}, "hidden_size is missing"),
        ({"model_type": "llama", **SMALL, "hidden_size": -1}, "hidden_size is '-1'"),
        ({"model_type": "llama", **SMALL, "vocab_size": True}, "vocab_size is 'True'"),
        ({"model_type": "llama", **SMALL, "vocab_size": 1 << 40}, "vocab_size is"),
        (
            {"model_type": "llama", **SMALL, "num_key_value_heads": 4},
            "num_attention_heads 6 is not a multiple of num_key_value_heads 4",
        ),
    ],
)
def test_a_configuration_that_says_no_size_is_refused(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said.replace("?", r"\?")) as caught:
        read_shape(tree, where="here")
    assert str(caught.value).startswith("here: ")
    assert caught.value.fix is not None


@given(st.dictionaries(st.sampled_from([*SMALL, "model_type"]), st.none() | st.integers() | st.sampled_from(KNOWN)))
def test_configuration_gives_a_size_or_is_refused(tree: dict[str, Any]) -> None:
    with contextlib.suppress(DataError):
        assert read_shape(tree, where="here").parameters > 0


TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 48, "patch_size": 8}


def seeing(kind: str, **tower: Any) -> Any:
    """The configuration of a small vision-language model."""
    own = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]} if kind == "qwen3_vl" else {}
    return AutoConfig.for_model(kind, text_config=SMALL, vision_config=TOWER | own | {"intermediate_size": 250} | tower)


@pytest.mark.parametrize("kind", VISION)
@pytest.mark.parametrize("nested", [True, False])
def test_vision_language_models_have_the_parameters_of_tower_projector_and_language_model(
    kind: str, nested: bool, tmp_path: Path
) -> None:
    config = seeing(kind)
    config.save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    if not nested:  # as Qwen2.5-VL has its files
        tree = {**tree.pop("text_config"), **tree}
    shape = read_shape(tree, where="here")
    with torch.device("meta"):
        module = AutoModelForImageTextToText.from_config(config)
    found: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        found[part_of(name)] += parameter.numel()
    assert shape.tower is not None
    assert (shape.tower.parameters, shape.tower.projector_parameters) == (found["vision"], found["projector"])
    assert shape.parameters == found.total()
    assert shape.frozen_parameters(("vision", "projector")) == found["vision"] + found["projector"]
    assert read_shape(relevant_sizes(tree), where="here") == shape


@pytest.mark.parametrize("kind", VISION)
def test_a_tower_keeps_as_many_values_for_its_backward_pass_as_autograd_does(kind: str) -> None:
    config = seeing(kind, depth=6, hidden_size=128, intermediate_size=400)
    config.vision_config.fullatt_block_indexes = list(range(6))
    with torch.random.fork_rng():
        tower = AutoModelForImageTextToText.from_config(config).model.visual.float()
    own = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    patches = torch.randn(256, 3 * 2 * 8 * 8)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(patches, grid_thw=torch.tensor([[1, 16, 16]]))
    found = sum(size for pointer, (size, _) in kept.items() if pointer not in own) / 4 / 256
    shape = read_shape(config.to_dict(), where="here").tower
    assert shape is not None
    assert shape.activation_numbers(recomputes=False) == pytest.approx(found, rel=0.25)
    assert shape.activation_numbers(recomputes=True) < shape.activation_numbers(recomputes=False) / 3


@pytest.mark.parametrize("kind", VISION)
def test_a_tower_needs_as_many_operations_for_a_patch_as_torch_counts(kind: str) -> None:
    config = seeing(kind, depth=6, hidden_size=128, intermediate_size=400)
    with torch.random.fork_rng():
        tower = AutoModelForImageTextToText.from_config(config).model.visual.float()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tower(torch.randn(256, 3 * 2 * 8 * 8), grid_thw=torch.tensor([[1, 16, 16]]))
    counted = sum(
        ops for op, ops in counter.get_flop_counts()["Global"].items() if "mm" in str(op) or "conv" in str(op)
    )
    shape = read_shape(config.to_dict(), where="here").tower
    assert shape is not None
    assert 256 * shape.forward_ops() == pytest.approx(counted, rel=0.05)
    assert shape.forward_ops() == shape.forward_ops(("vision",)) + shape.forward_ops(("projector",))


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=99), st.lists(st.integers(), max_size=30)
)
configs = st.builds(
    lambda base, more: base | more,
    st.sampled_from(
        [
            {},
            {"model_type": "qwen2", **SMALL},
            {"model_type": "gemma", **SMALL},
            {"model_type": "qwen3_vl", "text_config": SMALL, "vision_config": TOWER},
        ]
    ),
    st.dictionaries(st.sampled_from([*READ, "rope_scaling", "vision_config", "text_config"]), anything, max_size=3),
)


@given(configs)
@example({"model_type": []})
def test_reduced_configuration_gives_the_same_shape_and_is_short(config: dict[str, Any]) -> None:
    kept = relevant_sizes(config)
    assert len(json.dumps(kept)) < 2000
    assert ModelConfigs.model_validate_json(ModelConfigs(policy=kept).model_dump_json()).policy == kept

    def said(of: dict[str, Any]) -> Any:
        try:
            return read_shape(of, where="here")
        except DataError:
            return "refused"

    assert said(kept) == said(config)
