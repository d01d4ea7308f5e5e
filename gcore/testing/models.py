"""A random model small enough for tests, with a character tokenizer, as a Hugging Face folder.

Imports torch and transformers only when called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore.train.rank.launch import RankLaunch

CHARACTERS = "0123456789+-*/=abcdefghijklmnopqrstuvwxyz .,:?"
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
"""Number of token ids: special tokens first, then one per character."""

EOS = 1


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    context: int = 1024,
    heads: int = 4,
    kv_heads: int = 2,
    ends: bool = True,
) -> Path:
    """Write a random qwen3 model with tied embeddings and its tokenizer into `folder`, and return the folder.

    Its next-token distributions are far from uniform and depend on `seed`. `hidden`: hidden size. `context`: most positions. `ends`: whether `EOS`
    ends a sample; otherwise no token does.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=EOS if ends else None,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=hidden**-0.5, generator=generator)
    model.save_pretrained(folder)
    save_tokenizer(folder, ends=ends)
    return folder


def save_tokenizer(folder: Path, *, ends: bool) -> None:
    """Save a character tokenizer, without a model. `ends`: whether it has an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": "<pad>"} | ({"eos_token": "<eos>"} if ends else {}))
    )


def rank_launch(
    spec: Mapping[str, Any],
    run_dir: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    start: Mapping[str, Any] | None = None,
) -> RankLaunch:
    """Return the launch document of the train rank `rank` of `world_size` ranks, for tests and benchmarks without a cluster. Starts nothing.

    `spec`: a job spec as a tree. `start`: the launch document's field `start`; None: training begins with the initial model (step 0).
    """
    return RankLaunch.model_validate(
        {
            "kind": "rank",
            "job_uid": "j",
            "world": "w",
            "lineage": 0,
            "rank": rank,
            "world_size": world_size,
            "spec": spec,
            "run_dir": str(run_dir),
            "start": start or {"step": 0},
        }
    )
