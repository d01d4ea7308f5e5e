"""Tiny pipelines of diffusers with random weights, one of each family that gcore serves. They need no download."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import torch

Family = Literal["sd3", "flux", "qwen_image", "sd"]
FAMILIES: tuple[Family, ...] = ("sd3", "flux", "qwen_image", "sd")

REAL_WORDS = 77
"""Number of tokens to which CLIP's text encoders pad prompts."""

WORDS = ("<|startoftext|>", "<|endoftext|>", "<pad>", "a", "red", "green", "blue", "square", "circle")
"""The vocabulary of the text encoders."""


def write_pipeline(
    folder: Path, family: Family = "sd3", *, seed: int = 0, shift: float = 1.0, whole: bool = False
) -> Path:
    """Write a pipeline that generates pictures of 16 x 16 pixels, and return its folder.

    `sd3` has no VAE: it generates pixels. `shift`: of the scheduler's levels. `whole`: with all parts and the lengths of prompts
    that the family's real pipelines have, as SGLang needs them; `sd3` then generates pictures of 32 x 32 pixels.
    """
    import diffusers

    torch.manual_seed(seed)
    words = REAL_WORDS if whole else 8
    flow = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    made: Any
    match family:
        case "sd3":
            made = _sd3(diffusers, flow, words, whole=whole)
        case "flux":
            made = diffusers.FluxPipeline(
                transformer=diffusers.FluxTransformer2DModel(
                    in_channels=16,
                    num_layers=1,
                    num_single_layers=1,
                    attention_head_dim=16,
                    num_attention_heads=2,
                    joint_attention_dim=32,
                    pooled_projection_dim=16,
                    axes_dims_rope=(4, 6, 6),
                    guidance_embeds=True,
                ),
                scheduler=flow,
                vae=_vae(4, shift_factor=0.1),
                text_encoder=_clip(16, words),
                tokenizer=_tokenizer(words),
                text_encoder_2=_t5(32),
                tokenizer_2=_tokenizer(512),
            )
        case "qwen_image":
            made = _qwen_image(diffusers, flow)
        case "sd":
            made = diffusers.StableDiffusionPipeline(
                unet=diffusers.UNet2DConditionModel(
                    sample_size=8,
                    in_channels=4,
                    out_channels=4,
                    block_out_channels=(8, 16),
                    layers_per_block=1,
                    norm_num_groups=4,
                    cross_attention_dim=16,
                    attention_head_dim=4,
                    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                ),
                scheduler=diffusers.DDIMScheduler(
                    beta_start=0.00085,
                    beta_end=0.012,
                    beta_schedule="scaled_linear",
                    clip_sample=False,
                    set_alpha_to_one=False,
                    steps_offset=1,
                ),
                vae=_vae(4),
                text_encoder=_clip(16, words),
                tokenizer=_tokenizer(words),
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_pretrained(folder)
    return folder


def _sd3(diffusers: Any, scheduler: Any, words: int, *, whole: bool) -> Any:
    """Without a VAE and a T5 encoder, unless it is `whole`: then its VAE has the real one's scale of 8."""
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=4 if whole else 16,
            patch_size=2 if whole else 4,
            in_channels=4 if whole else 3,
            out_channels=4 if whole else 3,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=4,
        ),
        scheduler=scheduler,
        vae=_vae(4, shift_factor=0.1, levels=4) if whole else None,
        text_encoder=_clip(16, words, projects=True),
        tokenizer=_tokenizer(words),
        text_encoder_2=_clip(16, words, projects=True),
        tokenizer_2=_tokenizer(words),
        text_encoder_3=_t5(32) if whole else None,
        tokenizer_3=_tokenizer(256) if whole else None,
    )


def _qwen_image(diffusers: Any, scheduler: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(WORDS),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return diffusers.QwenImagePipeline(
        transformer=diffusers.QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=scheduler,
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=_tokenizer(1024),
    )


def _tokenizer(longest: int) -> Any:
    """A tokenizer of words with the special tokens of CLIP."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    begin, end, pad = WORDS[:3]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=pad))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, 0), (end, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=begin,
        eos_token=end,
        pad_token=pad,
        unk_token=pad,
        model_max_length=longest,
    )


def _clip(width: int, words: int, *, projects: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=words,
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)


def _t5(width: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=len(WORDS), d_model=width, d_kv=8, d_ff=width, num_layers=1, num_heads=2)
    return T5EncoderModel(config)


def _vae(channels: int, *, shift_factor: float | None = None, levels: int = 2) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        shift_factor=shift_factor,
    )
