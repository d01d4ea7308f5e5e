"""Any causal model of transformers: its lane, and output equal to a full forward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_core import EXPERTS, LLAMA_LIKE, SMALL, Plain, finish, make_core, prompt, save, task

from gcore.engines.torch.model import apply_weights, load_model, stage_weights
from gcore.errors import DataError
from gcore.testing.models import VOCABULARY

NEOX = {**SMALL, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 128}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 128, "vocab_size": VOCABULARY} | {
    "eos_token_id": None,
    "bos_token_id": None,
}
SHARED: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA_LIKE),
    "llama with other rope": lambda: transformers.LlamaConfig(
        **LLAMA_LIKE, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA_LIKE),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA_LIKE, head_dim=8),
    "qwen3 with windows in some layers": lambda: transformers.Qwen3Config(
        **LLAMA_LIKE, head_dim=8, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "mistral with a sliding window": lambda: transformers.MistralConfig(**LLAMA_LIKE, sliding_window=16),
    "gemma2: soft caps and windows": lambda: transformers.Gemma2Config(**LLAMA_LIKE, head_dim=8, sliding_window=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**LLAMA_LIKE, head_dim=8, sliding_window=16),
    "phi": lambda: transformers.PhiConfig(**LLAMA_LIKE),
    "gpt2: no rotary positions, Conv1D": lambda: transformers.GPT2Config(**GPT2),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**NEOX),
    "opt": lambda: transformers.OPTConfig(
        **SMALL, hidden_size=32, ffn_dim=48, num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=32
    ),
    "mixtral": lambda: transformers.MixtralConfig(**LLAMA_LIKE, num_local_experts=4),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**LLAMA_LIKE, **EXPERTS),
    "gpt-oss: attention sinks": lambda: transformers.GptOssConfig(
        **LLAMA_LIKE, head_dim=8, sliding_window=16, num_local_experts=4, num_experts_per_tok=2
    ),
}
PLAIN: dict[str, Callable[[], Any]] = {
    "mamba: a state space": lambda: transformers.MambaConfig(**SMALL, hidden_size=32, state_size=8),
    "bloom: a bias by distance": lambda: transformers.BloomConfig(
        n_layer=2, n_head=4, hidden_size=32, vocab_size=VOCABULARY
    ),
    "gpt-neo: local attention of its own": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=16, max_position_embeddings=128, eos_token_id=None, bos_token_id=None,
    ),
    "qwen3-next: linear attention": lambda: transformers.Qwen3NextConfig(
        **LLAMA_LIKE, **EXPERTS, shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip
EVERY = [pytest.param(make, "shared", id=name) for name, make in SHARED.items()] + [
    pytest.param(make, "plain", id=name) for name, make in PLAIN.items()
]
LENGTHS = (2, 25, 1, 35, 12)


@pytest.mark.parametrize(("make", "lane"), EVERY)
def test_a_model_is_served_as_its_full_forward_pass_says(tmp_path: Path, make: Callable[[], Any], lane: str) -> None:
    folder = save(make(), tmp_path)
    # Few rows and a small budget: rows move, give their place back and are read again; prompts are cut.
    core = make_core(folder, batch_slots=3, prefill_chunk_tokens=16, cache_tokens=230, context_length=80)
    assert core.lane.name == lane
    tasks = [task(n, prompt(n, length), 35 - 3 * n) for n, length in enumerate(LENGTHS)]
    # The second of these shares the first one's prompt.
    tasks += [task(7, prompt(0, 20), 5), task(8, prompt(0, 20), 5)]
    done = finish(core, tasks)
    plain = Plain(folder)
    for one in tasks:
        assert len(done[one.number].tokens) == one.sampling.max_new_tokens
        assert plain.worst(one, done[one.number]) < 3e-5


@pytest.mark.parametrize(
    "name", ["qwen3", "mistral with a sliding window", "mamba: a state space", "bloom: a bias by distance"]
)
def test_prompt_tokens_are_judged_as_the_full_forward_pass_judges_them(tmp_path: Path, name: str) -> None:
    folder = save((SHARED | PLAIN)[name](), tmp_path)
    core = make_core(folder, batch_slots=4, prefill_chunk_tokens=8)
    ids = prompt(5, 40)
    tasks = [
        task(n, ids, 3, prompt_logprobs_from=start, top_logprobs=2, named_tokens=(9, 4))
        for n, start in enumerate((0, 1, 7, 39, 40))
    ]
    # Something decodes meanwhile, so that the prompts are read in pieces.
    done = finish(core, [task(9, prompt(1, 4), 30), *tasks])
    table = Plain(folder).table(ids)
    for one in tasks:
        start = one.sampling.prompt_logprobs_from
        found = done[one.number].prompt_logprobs
        assert start is not None
        assert found is not None
        assert found.start == start
        assert len(found.values) == len(found.tops) == len(found.named) == 40 - start
        for position, value, top, named in zip(range(start, 40), found.values, found.tops, found.named, strict=True):
            if position == 0:
                assert value is top is named is None
                continue
            row = table[position - 1]
            assert value == pytest.approx(float(row[ids[position]]), abs=3e-5)
            assert top is not None
            assert [v for v, _ in top] == pytest.approx(row.topk(2).values.tolist(), abs=3e-5)
            assert named == pytest.approx([float(row[9]), float(row[4])], abs=3e-5)


def test_a_model_whose_positions_depend_on_the_batch_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    folder = save(transformers.LlamaConfig(**LLAMA_LIKE, rope_parameters=rope), tmp_path)
    with pytest.raises(DataError, match=r"cannot serve this model: its positions \(dynamic\).* Serve it with SGLang"):
        make_core(folder)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_weights_are_changed_from_a_folder_as_transformers_saves_it(tmp_path: Path, name: str) -> None:
    first, second = save(SHARED[name](), tmp_path / "first"), save(SHARED[name](), tmp_path / "second", seed=1)
    model = load_model(first, dtype="float32", device="cpu", context=None, text=None)
    apply_weights(model, stage_weights(model, second))
    expected = transformers.AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32).state_dict()
    found = model.module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["llama", "gpt2: no rotary positions, Conv1D"])
def test_half_precision_is_served_near_its_full_forward_pass(tmp_path: Path, name: str) -> None:
    folder = save(SHARED[name](), tmp_path)
    core = make_core(folder, batch_slots=2, dtype="bfloat16")
    one = task(0, (3, 4, 5), 40)
    assert Plain(folder).worst(one, finish(core, [one])[0]) < 0.5
