"""Random classifiers small enough for tests, as Hugging Face folders. Imports torch and transformers, but only when called."""

from __future__ import annotations

from pathlib import Path

from gcore.testing.models import CHARACTERS, SPECIAL, VOCABULARY, save_tokenizer


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
