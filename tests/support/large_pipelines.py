"""Pipelines of the sizes of published models, without their weights: configurations, and weight files with nothing but headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore.models.tensors import TensorShape, header_bytes

FLOW = ["diffusers", "FlowMatchEulerDiscreteScheduler"]


def write_part(folder: Path, config: Mapping[str, Any], parameters: int) -> None:
    """A part with so many parameters in bfloat16. Its file is sparse, so it takes no room."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    name = "diffusion_pytorch_model" if "_diffusers_version" in config else "model"
    tensors = {"weight": TensorShape("BF16", (parameters,))}
    header = header_bytes(tensors)
    with (folder / f"{name}.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * parameters)


def write_stable_diffusion_3_5_medium(folder: Path, *, weights: bool = True) -> Path:
    """Stable Diffusion 3.5 medium: 2.5 billion parameters, and text encoders of 5.6 billion. `weights`: whether its network has them."""
    diffusers = {"_diffusers_version": "0.42.1"}
    network = {
        "_class_name": "SD3Transformer2DModel",
        "attention_head_dim": 64,
        "in_channels": 16,
        "joint_attention_dim": 4096,
        "num_attention_heads": 24,
        "num_layers": 24,
        "patch_size": 2,
        "pos_embed_max_size": 384,
        "sample_size": 128,
    }
    vae = {"_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2}
    write_part(folder / "transformer", network | diffusers, 2_243_171_520)
    if not weights:
        (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    write_part(folder / "vae", vae | diffusers, 83_819_683)
    clip = {"model_type": "clip_text_model", "max_position_embeddings": 77}
    for part, parameters in (("text_encoder", 123_650_304), ("text_encoder_2", 694_659_840)):
        write_part(folder / part, clip, parameters)
    write_part(folder / "text_encoder_3", {"model_type": "t5"}, 4_762_310_656)
    for part in ("tokenizer", "tokenizer_2", "tokenizer_3", "scheduler"):
        (folder / part).mkdir()
    settings = {"_class_name": FLOW[1], "shift": 3.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
    index = {
        "_class_name": "StableDiffusion3Pipeline",
        "scheduler": FLOW,
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_3": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "tokenizer_3": ["transformers", "T5TokenizerFast"],
        "image_encoder": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
