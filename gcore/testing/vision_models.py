"""Random vision-language models small enough for tests, as Hugging Face folders with tokenizer and image processor.

Imports torch and transformers only when called.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from gcore.testing.models import CHARACTERS, EOS, SPECIAL, VOCABULARY

Family = Literal["qwen3_vl", "qwen2_5_vl", "smolvlm", "gemma3", "llava"]
FAMILIES: tuple[Family, ...] = ("qwen3_vl", "qwen2_5_vl", "smolvlm", "gemma3", "llava")

MEDIA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SMOLVLM_TOKENS = ("<fake_token_around_image>", "<global-img>", "<image>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, VIDEO = range(VOCABULARY, VOCABULARY + len(MEDIA_TOKENS))
"""Token IDs of the media tokens, which follow those of text."""

_SIZE, _PATCH, _MERGE = 32, 8, 2
_TOKENS = (_SIZE // _PATCH // _MERGE) ** 2
_FREE = {
    "shortest_edge": _SIZE * _SIZE // 4,
    "longest_edge": 128 * 128,
}  # in pixels, for models with pictures of any size


def make_tiny_vision_model(
    folder: Path, family: Family = "qwen3_vl", *, seed: int = 0, hidden: int = 64, layers: int = 2, heads: int = 2
) -> Path:
    """Write a random vision-language model of this family into `folder`, and return the folder.

    Qwen models take pictures of any size, with one placeholder per 16 x 16 pixels; the others pictures of 32 x 32
    pixels, with 4 placeholders (LLaVA: 16).
    """
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _model(family, hidden, layers, heads)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=(parameter.numel() / parameter.shape[0]) ** -0.5)
    model.save_pretrained(folder)
    _save_tokenizer(folder, _SMOLVLM_TOKENS if family == "smolvlm" else MEDIA_TOKENS)
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor(family)))
    if family in ("gemma3", "smolvlm"):
        count = "image_seq_length" if family == "gemma3" else "image_seq_len"
        (folder / "processor_config.json").write_text(json.dumps({count: _TOKENS}))
    return folder


def make_picture(height: int, width: int, *, seed: int = 0) -> bytes:
    """A PNG picture of random pixels."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _model(family: Family, hidden: int, layers: int, heads: int) -> Any:
    import transformers as hf

    dim = hidden // heads
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY + len(MEDIA_TOKENS),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": dim,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    tower: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "patch_size": _PATCH,
    }
    fixed = tower | {"image_size": _SIZE, "num_hidden_layers": 1}
    tokens: dict[str, Any] = {
        "image_token_id": IMAGE,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    if family in ("qwen3_vl", "qwen2_5_vl"):
        third = dim // 6
        section = [dim // 2 - 2 * third, third, third]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section}
        tower |= {
            "depth": 1,
            "num_heads": heads,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
        }
        tokens |= {"video_token_id": VIDEO, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
        if family == "qwen3_vl":
            text["rope_parameters"]["mrope_interleaved"] = True
            tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "initializer_range": 0.05}
            return hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(text_config=text, vision_config=tower, **tokens))
        tower |= {"window_size": _SIZE, "fullatt_block_indexes": [0]}
        return hf.Qwen2_5_VLForConditionalGeneration(
            hf.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **tokens)
        )
    if family == "smolvlm":
        text["model_type"] = "llama"
        return hf.SmolVLMForConditionalGeneration(
            hf.SmolVLMConfig(text_config=text, vision_config=fixed, scale_factor=_MERGE, **tokens)
        )
    if family == "gemma3":
        text |= {"sliding_window": 512, "query_pre_attn_scalar": dim}
        tokens |= {"boi_token_index": VISION_START, "eoi_token_index": VISION_END, "mm_tokens_per_image": _TOKENS}
        return hf.Gemma3ForConditionalGeneration(
            hf.Gemma3Config(text_config=text, vision_config=fixed | {"vision_use_head": False}, **tokens)
        )
    text["model_type"] = "qwen3"
    clip = fixed | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": hidden}
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=text, vision_config=clip, image_seq_length=(_SIZE // _PATCH) ** 2, **tokens)
    )


def _processor(family: Family) -> dict[str, Any]:
    square = {"height": _SIZE, "width": _SIZE}
    if family in ("qwen3_vl", "qwen2_5_vl"):
        patches = {"patch_size": _PATCH, "merge_size": _MERGE, "temporal_patch_size": 2}
        return dict(image_processor_type="Qwen2VLImageProcessor", size=_FREE, **patches)
    if family == "smolvlm":
        edge = {"longest_edge": _SIZE}
        return {
            "image_processor_type": "SmolVLMImageProcessor",
            "do_image_splitting": False,
            "size": edge,
            "max_image_size": edge,
        }
    if family == "gemma3":
        return {"image_processor_type": "Gemma3ImageProcessor", "size": square}
    return {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": _SIZE}, "crop_size": square}


def _save_tokenizer(folder: Path, media_tokens: Sequence[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    every = [*SPECIAL, *CHARACTERS, *media_tokens]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(every)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, *media_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "<eos>"}))
