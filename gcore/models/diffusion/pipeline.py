"""A pipeline of diffusers as an engine uses it: text encoders, network, scheduler and decoder.

Prompts are encoded alone and with one width, so that an embedding does not depend on other prompts. A pipeline without a
VAE generates pixels: its states are pictures with values in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcore.errors import DataError, EngineError, one_line
from gcore.models.diffusion.networks import (
    Condition,
    DenoisingNetwork,
    QwenImageNetwork,
    load_network,
    load_part,
    pipeline_parts,
)
from gcore.models.diffusion.schedule import NoiseSchedule

WIDTHS = {"StableDiffusion3Pipeline": 256, "FluxPipeline": 512, "QwenImagePipeline": 1024}
"""Number of tokens to which each family's longest text encoder pads or cuts prompts, as in diffusers."""


class ImagePipeline:
    """A pipeline in memory. `folder`: from which it was loaded."""

    def __init__(self, folder: Path, network: DenoisingNetwork, schedule: NoiseSchedule, pipeline: Any) -> None:
        self.folder = folder
        self.network = network
        self.schedule = schedule
        self._pipeline = pipeline
        self._kind = type(pipeline).__name__
        self._conditions: dict[str, Condition] = {}

    @staticmethod
    def load(folder: Path, *, guidance: float, dtype: torch.dtype, device: str) -> ImagePipeline:
        """Load a pipeline's folder. Raises DataError if it cannot be served."""
        import diffusers

        parts = pipeline_parts(folder)
        _check_parts(folder, parts)
        schedule = NoiseSchedule.load(folder)
        network = load_network(folder, guidance=guidance, dtype=dtype, device=device)
        if schedule.is_flow != (network.process == "flow"):
            raise DataError(
                f"the scheduler {schedule.settings['_class_name']} does not belong to a {parts['_class_name']}",
                where=str(folder / "scheduler"),
                fix="Save the pipeline with its own scheduler",
            )
        given: dict[str, Any] = {network.folder: network.module, "dtype": dtype, "local_files_only": True}
        if parts["_class_name"] == "StableDiffusionPipeline":
            given |= {"safety_checker": None, "requires_safety_checker": False}
        for name, named in parts.items():
            if name not in given and isinstance(named, list) and (folder / name / "config.json").is_file():
                given[name] = load_part(folder, name, dtype)
        given |= {name: None for name, named in parts.items() if isinstance(named, list) and named[1] is None}
        diffusers.utils.logging.disable_progress_bar()
        try:
            pipeline = getattr(diffusers, parts["_class_name"]).from_pretrained(folder, **given)
        except (OSError, ValueError, KeyError, AttributeError, RuntimeError, TypeError, ImportError) as error:
            raise DataError(
                f"cannot load this pipeline ({one_line(error)})", where=str(folder), fix="Check the folder's files"
            ) from error
        pipeline.set_progress_bar_config(disable=True)
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.to(device).eval().requires_grad_(False)
        return ImagePipeline(folder, network, schedule, pipeline)

    def state_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Channels, height and width of the state of a picture of `height` x `width` pixels. Raises EngineError for a
        size that the pipeline cannot generate."""
        config, scale = self.network.module.config, self._scale
        packed = 4 if self.network.folder == "transformer" and self._kind != "StableDiffusion3Pipeline" else 1
        patch = 2 if packed == 4 else int(config.get("patch_size") or 1)
        step = scale * patch
        if min(height, width) < step or height % step or width % step:
            raise EngineError(
                f"a picture of {width}x{height} pixels cannot be generated: its sides must be multiples of {step} pixels",
                fix="Correct rollout.diffusion.height and width",
            )
        shape = int(config["in_channels"]) // packed, height // scale, width // scale
        largest = config.get("pos_embed_max_size")
        if largest is not None and max(shape[1:]) // patch > largest:
            raise EngineError(
                f"a picture of {width}x{height} pixels is larger than the network's {largest * step} pixels a side",
                fix="Lower rollout.diffusion.height and width",
            )
        return shape

    @property
    def default_side(self) -> int:
        """The side in pixels of the pictures for which the pipeline was made."""
        side = getattr(self._pipeline, "default_sample_size", None) or self.network.module.config["sample_size"]
        return int(side) * self._scale

    @property
    def _scale(self) -> int:
        """Pixels by latent, in each direction."""
        return 1 if self._pipeline.vae is None else int(self._pipeline.vae_scale_factor)

    def levels(self, steps: int, shape: tuple[int, int, int]) -> tuple[float, ...]:
        """The levels of a schedule of `steps` steps for states of `shape`. Raises EngineError."""
        linear = self._kind in ("FluxPipeline", "QwenImagePipeline")
        try:
            return self.schedule.levels(steps, self.network.tokens(shape), linear=linear)
        except ValueError as error:
            raise EngineError(str(error), fix="Lower rollout.diffusion.steps") from error

    def tokens(self, prompt: str) -> tuple[int, ...]:
        """The prompt's tokens, without padding, of the first tokenizer."""
        return tuple(self._pipeline.tokenizer(prompt, truncation=True)["input_ids"])

    @torch.inference_mode()
    def condition(self, prompt: str) -> Condition:
        """What the text encoders make of a prompt; remembered. Tensors are on the network's device."""
        if prompt not in self._conditions:
            if len(self._conditions) >= REMEMBERED:
                self._conditions.pop(next(iter(self._conditions)))
            self._conditions[prompt] = {name: one.clone() for name, one in self._encode(prompt).items()}
        return self._conditions[prompt]

    def _encode(self, prompt: str) -> Mapping[str, Tensor]:
        pipe, width = self._pipeline, WIDTHS.get(self._kind, 0)
        match self._kind:
            case "StableDiffusion3Pipeline":
                if pipe.text_encoder_3 is None:  # whose place diffusers would fill with zeros of this width
                    width = 1
                embeds, _, pooled, _ = pipe.encode_prompt(
                    prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=width
                )
                return {"embeds": embeds, "pooled": pooled}
            case "FluxPipeline":
                embeds, pooled, _ = pipe.encode_prompt(prompt, max_sequence_length=width)
                return {"embeds": embeds, "pooled": pooled}
            case "QwenImagePipeline":
                embeds, mask = pipe.encode_prompt(prompt, max_sequence_length=width)
                return {"embeds": embeds} if mask is None else {"embeds": embeds, "mask": mask}
            case _:
                embeds, _ = pipe.encode_prompt(prompt, self.network.device, 1, do_classifier_free_guidance=False)
                return {"embeds": embeds}

    @torch.inference_mode()
    def decode(self, states: Tensor) -> Tensor:
        """The pictures of finished states [batch, channels, height, width]: uint8 [batch, height, width, 3] on the CPU.

        States that are not finite give black pixels; check them first.
        """
        vae = self._pipeline.vae
        if vae is None:
            pixels = states
        elif isinstance(self.network, QwenImageNetwork):
            mean, std = (
                torch.tensor(vae.config[name], device=states.device).view(1, -1, 1, 1, 1)
                for name in ("latents_mean", "latents_std")
            )
            pixels = vae.decode((states.unsqueeze(2) * std + mean).to(vae.dtype), return_dict=False)[0][:, :, 0]
        else:
            shift = vae.config.get("shift_factor") or 0.0
            pixels = vae.decode((states / vae.config.scaling_factor + shift).to(vae.dtype), return_dict=False)[0]
        unit = ((pixels.float() + 1) / 2).clamp(0, 1).nan_to_num()
        return (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


REMEMBERED = 1024
"""Number of prompts whose embeddings an engine keeps."""

TEXT_PARTS = {
    "StableDiffusion3Pipeline": ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
    "FluxPipeline": ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
    "QwenImagePipeline": ("tokenizer", "text_encoder", "vae"),
    "StableDiffusionPipeline": ("tokenizer", "text_encoder", "vae"),
}
"""Parts besides network and scheduler without which a pipeline generates nothing, by its class."""


def _check_parts(folder: Path, parts: Mapping[str, Any]) -> None:
    """Raise DataError for a part that is missing."""
    for part in TEXT_PARTS[parts["_class_name"]]:
        named = parts.get(part)
        if not named or named[1] is None or not (folder / part).is_dir():
            raise DataError(
                f"the pipeline has no {part}",
                where=str(folder),
                fix="Save the whole pipeline (pipeline.save_pretrained)",
            )
