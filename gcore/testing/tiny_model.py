"""A random model small enough for tests, with a tokenizer of single characters, as a Hugging Face folder.

Imports torch and transformers, but only when called.
"""

from __future__ import annotations

import json
from pathlib import Path

CHARACTERS = "0123456789+-*/=abcdefghijklmnopqrstuvwxyz .,:?"
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
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
    """A qwen3 with tied embeddings. Its next-token distributions are far from uniform, and differ from seed to seed.

    With `ends` a sample ends at `EOS`; without, no token is an end.
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


def make_tiny_classifier(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    context: int = 1024,
    heads: int = 4,
    kind: str = "llama",
) -> Path:
    """A llama, or another `kind` of decoder, with a sequence-classification head of one number.

    What it gives differs from question to question and from seed to seed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        num_labels=1,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=hidden**-0.5, generator=generator)
    model.save_pretrained(folder)
    save_tokenizer(folder, ends=False)
    return folder


def make_liking_classifier(folder: Path, likes: str, *, context: int = 1024) -> Path:
    """A classifier whose weights are set by hand: the more of a question's characters are among `likes`, the more it gives.

    Its one layer looks at all tokens alike and writes the share of those that are liked beside a constant; the head reads
    that alone. From about -1 (none) to 1 (all).
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    make_tiny_classifier(folder, layers=1, hidden=8, heads=2, context=context)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    layer = model.model.layers[0]
    sign, constant, share = 0, 1, 2
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
        torch.nn.init.ones_(norm.weight)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, constant] = 1.0
        embedding[:, sign] = -1.0
        for number, character in enumerate(CHARACTERS, start=len(SPECIAL)):
            embedding[number, sign] = 1.0 if character in likes else -1.0
        layer.self_attn.v_proj.weight[0, sign] = 1.0
        layer.self_attn.o_proj.weight[share, 0] = 1.0
        model.score.weight[0, share] = 1.0
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, *, ends: bool) -> None:
    """A tokenizer of single characters, without a model. `ends`: whether it names an end of sequence."""
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
