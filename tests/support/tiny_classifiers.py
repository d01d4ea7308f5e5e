"""Random classifiers small enough for tests, as Hugging Face folders. Imports torch and transformers, but only when called."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gcore.testing.models import CHARACTERS, SPECIAL, VOCABULARY, save_tokenizer
from gcore.testing.vision_models import make_tiny_vision_model


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


SeeingKind = Literal["gemma3", "qwen3_5"]


def make_tiny_seeing_classifier(folder: Path, kind: SeeingKind = "gemma3", *, seed: int = 0) -> Path:
    """A random classifier that sees pictures. Its tokens, and the sizes of pictures, are those of `make_tiny_vision_model`."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if kind == "gemma3":
        config = AutoConfig.from_pretrained(make_tiny_vision_model(folder, "gemma3"))
    else:
        qwen3 = AutoConfig.from_pretrained(make_tiny_vision_model(folder, "qwen3_vl")).to_dict()
        kept = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        text, tower = qwen3["text_config"], qwen3["vision_config"]
        for section in (text, tower):
            del section["model_type"]
        del tower["deepstack_visual_indexes"]
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        heads |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        # One layer of each kind.
        text |= heads | {"layer_types": ["linear_attention", "full_attention"]}
        text["rope_parameters"] |= {"partial_rotary_factor": 1.0}
        own = {name: qwen3[name] for name in kept}
        config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=tower, **own)
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=(parameter.numel() / parameter.shape[0]) ** -0.5)
    model.save_pretrained(folder)
    return folder


CLIP_SIDE = 16
"""Height and width in pixels of the pictures that a tiny CLIP model sees."""

CLIP_WIDTH = 12
"""Width of its embeddings."""

CLIP_SCALE = 4.0
"""Its logit_scale, a logarithm."""


def make_tiny_clip(folder: Path, *, seed: int = 0, context: int = 40, legacy_end: bool = False) -> Path:
    """A random CLIP model with a tokenizer of characters, in transformers' layout.

    `legacy_end`: its configuration names a wrong end token, as those of the first CLIP models do.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    begin, end = VOCABULARY, VOCABULARY + 1
    layer = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"bos_token_id": 0 if legacy_end else begin, "eos_token_id": 2 if legacy_end else end, "pad_token_id": 1}
    text = {**layer, "vocab_size": VOCABULARY + 2, "max_position_embeddings": context, **tokens}
    tower = {**layer, "image_size": CLIP_SIDE, "patch_size": 4}
    config = CLIPConfig(
        text_config=text, vision_config=tower, projection_dim=CLIP_WIDTH, logit_scale_init_value=CLIP_SCALE
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CLIPModel(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=(parameter.numel() / parameter.shape[0]) ** -0.5)
    model.save_pretrained(folder)
    size = {"height": CLIP_SIDE, "width": CLIP_SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": CLIP_SIDE}, crop_size=size).save_pretrained(folder)
    save_tokenizer(folder, ends=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", begin), ("<end>", end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
