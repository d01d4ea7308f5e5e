"""The sizes of a pipeline by which its memory and times are planned: parameters of its parts, from the headers of their weight files,
and the sizes of its layers, from their configurations. Needs no torch and reads no tensors.

`placement.mapping.pictures` computes with them. A job's record keeps them, as `gcore.ledger.records.cluster.ModelConfigs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore.config.diffusion import DenoisingSpec
from gcore.errors import DataError
from gcore.ledger.records.cluster import ConfigValue
from gcore.models.checks import read_config, weight_files
from gcore.models.diffusion.files import TEXT_WIDTHS, PipelineFiles, has_part, pipeline_parts
from gcore.models.tensors import check_weight_file

PIPELINE = "pipeline"
"""The `model_type` of these sizes."""

UNPADDED_TEXT = 128
"""Assumed tokens of a prompt whose embeddings are not padded (Qwen-Image)."""

CLIP_TEXT = 77
"""Tokens of a CLIP encoder whose configuration has none."""


def pipeline_sizes(files: PipelineFiles, diffusion: DenoisingSpec) -> dict[str, ConfigValue]:
    """The sizes of a pipeline for pictures as the spec wants them. A part whose weights are not on this machine has no
    `parameters`, because its size is not known. Raises DataError."""
    height, width = files.size(diffusion.height, diffusion.width)
    state = files.state_shape(height, width)
    parts = pipeline_parts(files.folder)
    found: dict[str, ConfigValue] = {
        "model_type": PIPELINE,
        "kind": files.kind,
        "height": height,
        "width": width,
        "state": math.prod(state),
        "tokens": files.tokens(state),
        "passes": files.passes(diffusion.guidance),
        "text_tokens": text_tokens(files),
    }
    found |= {f"network.{name}": value for name, value in _network(files.config).items()}
    counts = {"network": _parameters(files.network), "text": 0, "vae": 0}
    for part in parts:
        if not has_part(parts, part):
            continue
        kind = "text" if part.startswith("text_encoder") else part
        if kind in ("text", "vae") and counts[kind] is not None:
            more = _parameters(files.folder / part)
            counts[kind] = None if more is None else (counts[kind] or 0) + more
    found |= {f"{name}.parameters": count for name, count in counts.items() if count is not None}
    if counts["vae"] != 0:
        found |= {f"vae.{name}": value for name, value in _decoder(read_config(files.folder / "vae")).items()}
    return found


def _network(config: Mapping[str, Any]) -> dict[str, ConfigValue]:
    """Sizes of the layers of a network: of a transformer, or of a UNet."""
    if "block_out_channels" in config:
        attends = [str(int("CrossAttn" in name)) for name in config.get("down_block_types", ())]
        return {
            "channels": _joined(config["block_out_channels"]),
            "attends": ",".join(attends),
            "layers_per_block": int(config.get("layers_per_block", 2)),
        }
    heads, size = int(config["num_attention_heads"]), int(config["attention_head_dim"])
    layers = int(config.get("num_layers", 0)) + int(config.get("num_single_layers", 0))
    return {"layers": layers, "width": heads * size}


def _decoder(config: Mapping[str, Any]) -> dict[str, ConfigValue]:
    """Sizes of the decoder of a VAE: channels by level, the widest picture first; layers; values of a convolution's kernel."""
    if "dim_mult" in config:  # of video, and used for one frame
        base = int(config.get("base_dim", 96))
        channels = [base * int(times) for times in config["dim_mult"]]
        return {"channels": _joined(channels), "layers": int(config.get("num_res_blocks", 2)) + 1, "taps": 27}
    channels = config.get("block_out_channels", (64,))
    return {"channels": _joined(channels), "layers": int(config.get("layers_per_block", 1)) + 1, "taps": 9}


def _joined(numbers: Sequence[Any]) -> str:
    return ",".join(str(int(one)) for one in numbers)


def text_tokens(files: PipelineFiles) -> int:
    """Tokens of a prompt's embeddings, which the network computes beside the image tokens. Raises DataError."""
    clip = int(read_config(files.folder / "text_encoder").get("max_position_embeddings") or CLIP_TEXT)
    match files.kind:
        case "StableDiffusion3Pipeline":
            return clip + (TEXT_WIDTHS[files.kind] if has_part(pipeline_parts(files.folder), "text_encoder_3") else 1)
        case "FluxPipeline":
            return TEXT_WIDTHS[files.kind]
        case "QwenImagePipeline":
            return UNPADDED_TEXT
        case _:
            return clip


def step_tokens(tokens: int, passes: int) -> int:
    """Image tokens of a trained step of a picture of `tokens`, by passes with a gradient. A pass for the negative prompt has
    none and costs a third."""
    return tokens if passes == 1 else -(-4 * tokens // 3)


def _parameters(folder: Path) -> int | None:
    """Number of parameters of a part; None if its weights are not there."""
    try:
        return sum(math.prod(one.shape) for file in weight_files(folder) for one in check_weight_file(file).values())
    except DataError:
        return None
