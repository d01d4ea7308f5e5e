"""The fast path of a model: the same bits, the same saved state, and no outdated part."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gcore.engines.torch.fast_path import patch_norms

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
}


def model(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    config, build = KINDS[kind]
    torch.manual_seed(3)
    made = build(config(**SIZES)).eval().requires_grad_(False).to(dtype)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_not_a_bit_of_the_logits_changes(kind: str, dtype: torch.dtype) -> None:
    plain, quick = model(kind, dtype), model(kind, dtype)
    patch_norms(quick)
    for shape in ((1, 1), (5, 1), (3, 7)):
        ids = torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(sum(shape)))
        with torch.inference_mode():
            assert torch.equal(plain(ids).logits, quick(ids).logits)


def test_patched_model_has_the_same_modules_and_saved_state(tmp_path: Path) -> None:
    plain, quick = model("qwen3"), model("qwen3")
    patch_norms(quick)
    assert [name for name, _ in quick.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(quick.state_dict()) == list(plain.state_dict())
    quick.save_pretrained(tmp_path)
    again = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.parameters(), strict=True))


def test_a_part_that_is_assigned_anew_is_the_one_that_is_used() -> None:
    quick = model("llama")
    patch_norms(quick)
    ids = torch.tensor([[1, 2, 3]])
    other = model("llama")
    with torch.inference_mode():
        before = quick(ids).logits.clone()
        layer = quick.model.layers[0].mlp
        layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight * 2, requires_grad=False)
        layer.down_proj = torch.nn.Linear(48, 32, bias=False)
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
        other.model.layers[0].mlp.down_proj.weight.copy_(layer.down_proj.weight)
        assert torch.equal(quick(ids).logits, other(ids).logits)
        assert not torch.equal(quick(ids).logits, before)


def test_a_norm_that_only_looks_like_one_keeps_its_own_form() -> None:
    class TwistedRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8), requires_grad=False)
            self.variance_epsilon = 1e-6

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return (
                hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)
            )

    layer = TwistedRMSNorm()
    hidden = torch.arange(8.0)
    before = layer(hidden)
    patch_norms(torch.nn.Sequential(layer))
    assert "forward" not in vars(layer)
    assert torch.equal(layer(hidden), before)
