"""The straight step: the same bits as the model's own modules, for the supported architectures only."""

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gcore.engines.torch.attention import NAME, DecodePass, EngineAttention
from gcore.engines.torch.fast_path import FastDecodeStep, _Past, fast_decode_step, patch_norms

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
COMMON = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama with wide heads": (LlamaConfig, LlamaForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "qwen2, whose projections have biases": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3, which norms queries and keys": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
}
OTHERS = {
    "gpt2": (GPT2Config, GPT2LMHeadModel, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gemma2, which norms more": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8}),
    "granite, which multiplies": (
        GraniteConfig,
        GraniteForCausalLM,
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "cohere, whose parts stand side by side": (CohereConfig, CohereForCausalLM, {}),
}


def made(config: Any, build: Any, more: dict[str, Any]) -> tuple[Any, EngineAttention]:
    torch.manual_seed(5)
    sizes = SIZES if build is not GPT2LMHeadModel else {"vocab_size": 40}
    module = build(config(**sizes | more)).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    patch_norms(module)
    attention = EngineAttention()
    attention.register()
    module.set_attn_implementation(NAME)
    return module, attention


def both(module: Any, attention: EngineAttention, step: FastDecodeStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits by the modules and straight, at other positions than those of the trial."""
    ids, positions = torch.tensor([[3], [39], [7]]), torch.tensor([[5], [60], [21]])
    attention.kind = DecodePass(None)
    with torch.inference_mode():
        own = module(input_ids=ids, position_ids=positions, past_key_values=_Past(), use_cache=True).logits[:, -1]
        return own, step.logits(ids, positions, _Past())


@pytest.mark.parametrize("kind", COMMON)
def test_it_makes_the_same_bits_as_the_models_own_modules(kind: str) -> None:
    module, attention = made(*COMMON[kind])
    step = fast_decode_step(module, attention, 40)
    assert step is not None
    own, found = both(module, attention, step)
    assert torch.equal(own, found)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_of_another_kind_goes_through_its_own_modules(kind: str) -> None:
    module, attention = made(*OTHERS[kind])
    assert fast_decode_step(module, attention, 40) is None
    assert module(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, 40), "and still works"


def test_a_window_is_told_to_the_attention_as_the_model_tells_it() -> None:
    module, attention = made(*COMMON["mistral"])
    step = fast_decode_step(module, attention, 40)
    assert step is not None
    assert {layer.attention_options["sliding_window"] for layer in step._layers} == {8}
    attention.windows.clear()
    both(module, attention, step)
    assert attention.windows == {8}


def test_weights_are_looked_at_as_they_are_at_each_step() -> None:
    module, attention = made(*COMMON["qwen3, which norms queries and keys"])
    step = fast_decode_step(module, attention, 40)
    assert step is not None
    before = both(module, attention, step)[1].clone()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    own, found = both(module, attention, step)
    assert torch.equal(own, found)
    assert not torch.equal(found, before)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone() * 0.5  # as when they come back from sleep
    own, found = both(module, attention, step)
    assert torch.equal(own, found)


def test_parts_of_the_right_names_that_work_otherwise_are_found_out() -> None:
    module, attention = made(*COMMON["llama"])
    plain = module.model.layers[1].mlp.forward
    module.model.layers[1].mlp.forward = lambda x: plain(x) * 1.0001
    assert fast_decode_step(module, attention, 40) is None


def test_a_weight_beside_the_parts_that_does_nothing_yet_is_found_out() -> None:
    module, attention = made(*COMMON["llama"])
    layer = module.model.layers[0]
    layer.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    plain = layer.mlp.forward
    layer.mlp.forward = lambda x: plain(x) * layer.scale
    assert fast_decode_step(module, attention, 40) is None
