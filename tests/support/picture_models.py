"""Folders of small vision-language models, without weights: configuration, processor, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PICTURE_TOKENS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
NEWLINES = tuple("Ċ" * count for count in range(2, 9))

QWEN_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{ message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in part %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def picture_tokenizer() -> Tokenizer:
    """Bytes, runs of newlines as Gemma has them, and the special tokens of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate((*alphabet, *NEWLINES))}
    merges = [(shorter, "Ċ") for shorter in ("Ċ", *NEWLINES[:-1])]
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in PICTURE_TOKENS])
    return tokenizer


def token_ids() -> dict[str, int]:
    """The IDs of the special tokens."""
    tokenizer = picture_tokenizer()
    return {text: tokenizer.token_to_id(text) or 0 for text in PICTURE_TOKENS}


def model_config(family: str, *, patch: int = 8, merge: int = 2) -> dict[str, Any]:
    """The configuration of a small model of this family."""
    ids = token_ids()
    vision: dict[str, Any] = {"patch_size": patch}
    config: dict[str, Any] = {"model_type": family, "vision_config": vision, "text_config": {"vocab_size": 512}}
    if family.startswith("qwen"):
        vision["spatial_merge_size"] = merge
        return config | {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
    if family == "gemma3":
        own = {"boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"]}
        return config | own | {"image_token_index": ids["<image_soft_token>"], "mm_tokens_per_image": 4}
    if family == "llava":
        return config | {"image_token_index": ids["<image>"], "image_seq_length": 9}
    vision["image_size"] = 32
    return config | {"image_token_id": ids["<image>"], "scale_factor": 2}


def processor_settings(family: str, *, patch: int = 8, merge: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the image processor, and those of the processor, of a small model of this family."""
    if family.startswith("qwen"):
        bounds = {"shortest_edge": 16 * 16, "longest_edge": 96 * 96}
        return {"patch_size": patch, "merge_size": merge, "size": bounds}, {}
    if family == "gemma3":
        return {"size": {"height": 32, "width": 32}}, {"image_seq_length": 4}
    if family == "llava":
        cut = {"height": 24, "width": 24}
        own = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return {"size": {"shortest_edge": 24}, "crop_size": cut}, own
    images = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": False}
    return images, {"image_seq_len": 4}


def write_picture_model(
    folder: Path, family: str = "qwen3_vl", *, patch: int = 8, merge: int = 2, nested: bool = False
) -> Path:
    """Write the folder of a small model without weights. `nested`: with one file for all settings of the processor."""
    folder.mkdir(parents=True, exist_ok=True)
    images, processor = processor_settings(family, patch=patch, merge=merge)
    files: dict[str, Any] = {"config.json": model_config(family, patch=patch, merge=merge)}
    if nested:
        files["processor_config.json"] = processor | {"image_processor": images}
    else:
        files |= {"preprocessor_config.json": images, "processor_config.json": processor}
    files["tokenizer_config.json"] = {"eos_token": "<|im_end|>", "chat_template": QWEN_TEMPLATE}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    picture_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
