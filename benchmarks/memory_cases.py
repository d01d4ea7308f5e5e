"""What `memory.py` measures: models made from configurations, and what is done with each. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from gcore.testing.tiny_model import save_tokenizer

CONTEXT = 1024


@dataclass(frozen=True)
class Size:
    """A qwen3 with tied embeddings; half as many heads of keys as of queries."""

    width: int
    layers: int
    inner: int
    heads: int
    vocabulary: int

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.width // self.heads,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "dtype": "float32",
        }


SIZES = {
    "tiny": Size(64, 1, 64, 2, 256),
    "1M": Size(128, 4, 512, 4, 512),
    "8M": Size(256, 8, 704, 4, 8192),
    "30M": Size(512, 8, 1408, 8, 8192),
    "100M": Size(768, 12, 2048, 12, 16384),
}
BASE = "tiny"
"""What a process takes that has next to no model is taken off the others of its kind, stage and world."""


@dataclass(frozen=True)
class Case:
    """One process of each kind. `samples` of `prompt` and `response` tokens in a step, or so many requests at once."""

    what: Literal["rank", "engine"]
    model: str
    size: int = 1
    samples: int = 8
    prompt: int = 5
    response: int = 8
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def alike(self) -> tuple[str, int, int]:
        """What it has in common with the case that is taken off it."""
        return self.what, self.size, self.train.get("zero_stage", 1)

    def told(self, models: Path, run: Path) -> dict[str, Any]:
        """As `memory_sides.py` wants it."""
        launch = {"batch_slots": self.samples, "cache_tokens": 1 << 20}
        more = {"model": str(models / self.model), "run": str(run), "requests": self.samples, "launch": launch}
        return asdict(self) | more


def _ranks(model: str, size: int) -> list[Case]:
    return [Case("rank", model, size, train={"zero_stage": stage}) for stage in (1, 2, 3)]


CASES = [
    *_ranks(BASE, 1),
    *_ranks(BASE, 2),
    *_ranks("30M", 1),
    *_ranks("30M", 2),
    Case("rank", "8M", response=120),
    Case("rank", "8M", response=120, train={"activation_checkpointing": True}),
    Case("rank", "30M", train={"dtype": "bf16"}),
    Case("rank", "30M", train={"kl_coef": 0.1}),
    Case("rank", "30M", train={"advantage": "gae", "critic": {}}),
    Case("engine", BASE),
    Case("engine", "30M"),
    Case("engine", "8M", samples=32, response=120),
    *_ranks("1M", 2),
    *_ranks("100M", 2),
    Case("engine", "100M"),
    Case("rank", "100M"),
]


def make_models(folder: Path, names: Iterable[str] = SIZES) -> None:
    """Weights drawn at random, in folders that transformers loads."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(SIZES[name].config))
        save_file(_weights(SIZES[name]), folder / name / "model.safetensors", {"format": "pt"})
        save_tokenizer(folder / name, ends=False)


def _weights(size: Size) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    width, dim = size.width, size.width // size.heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocabulary, width),
        "model.norm.weight": (width,),
    }
    for layer in range(size.layers):
        of = {
            "self_attn.q_proj": (size.heads * dim, width),
            "self_attn.k_proj": (size.heads // 2 * dim, width),
            "self_attn.v_proj": (size.heads // 2 * dim, width),
            "self_attn.o_proj": (width, size.heads * dim),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (size.inner, width),
            "mlp.up_proj": (size.inner, width),
            "mlp.down_proj": (width, size.inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of.items()}
    return {
        name: rng.standard_normal(shape, np.float32) * 0.02 if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in shapes.items()
    }
