"""A pipeline of diffusers as an engine uses it: text encoders, network, scheduler and decoder. `SampledPipeline` is what an
engine needs whose weights are in another process.

Prompts are encoded alone and with one width, so that an embedding does not depend on other prompts. A pipeline without a
VAE generates pixels: its states are pictures with values in [-1, 1].
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcore.errors import DataError, EngineError, one_line
from gcore.models.diffusion.files import PACKED, TEXT_WIDTHS, PipelineFiles, check_parts, pipeline_parts
from gcore.models.diffusion.networks import (
    Condition,
    DenoisingNetwork,
    QwenImageNetwork,
    load_network,
    load_part,
)
from gcore.models.diffusion.schedule import NoiseSchedule


class SampledPipeline:
    """What a pipeline's pictures are sampled with: their states, levels and steps. It has no weights. `guidance`: of the sampler."""

    def __init__(self, files: PipelineFiles, schedule: NoiseSchedule, guidance: float) -> None:
        self.files = files
        self.schedule = schedule
        self.guidance = guidance
        self._tokenizer: Any | None = None

    @staticmethod
    def read(folder: Path, *, guidance: float) -> SampledPipeline:
        """Read the files of a pipeline's folder. Raises DataError for one that cannot be served."""
        check_parts(folder)
        return SampledPipeline(PipelineFiles.read(folder), NoiseSchedule.load(folder), guidance)

    def levels(self, steps: int, shape: tuple[int, int, int]) -> tuple[float, ...]:
        """The levels of a schedule of `steps` steps for states of `shape`. Raises EngineError."""
        linear = self.files.kind in PACKED
        try:
            return self.schedule.levels(steps, self.files.tokens(shape), linear=linear)
        except ValueError as error:
            raise EngineError(str(error), fix="Lower rollout.diffusion.steps") from error

    def tokens(self, prompt: str) -> tuple[int, ...]:
        """The prompt's tokens, without padding, of the first tokenizer. Raises DataError if it cannot be loaded.

        Not for several threads at once. The tokenizer is a copy of its own: a tokenizer remembers the padding of its last call,
        and the thread that encodes prompts calls its own with padding.
        """
        if self._tokenizer is None:
            self._tokenizer = _load_tokenizer(self.files.folder)
        return tuple(self._tokenizer(prompt, truncation=True)["input_ids"])


def _load_tokenizer(folder: Path) -> Any:
    library, name = pipeline_parts(folder)["tokenizer"]
    try:
        return getattr(importlib.import_module(library), name).from_pretrained(
            folder / "tokenizer", local_files_only=True
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise DataError(
            f"cannot load the tokenizer of this pipeline ({one_line(error)})",
            where=str(folder / "tokenizer"),
            fix="Check the folder's files",
        ) from error


class ImagePipeline(SampledPipeline):
    """A pipeline in memory. `files`: of the folder from which it was loaded."""

    def __init__(self, files: PipelineFiles, network: DenoisingNetwork, schedule: NoiseSchedule, pipeline: Any) -> None:
        super().__init__(files, schedule, network.guidance)
        self.network = network
        self._pipeline = pipeline
        self._conditions: dict[str, Condition] = {}

    @staticmethod
    def load(folder: Path, *, guidance: float, dtype: torch.dtype, device: str) -> ImagePipeline:
        """Load a pipeline's folder. Raises DataError if it cannot be served."""
        import diffusers

        check_parts(folder)
        parts = pipeline_parts(folder)
        files, schedule = PipelineFiles.read(folder), NoiseSchedule.load(folder)
        network = load_network(folder, guidance=guidance, dtype=dtype, device=device)
        given: dict[str, Any] = {files.network.name: network.module, "dtype": dtype, "local_files_only": True}
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
        return ImagePipeline(files, network, schedule, pipeline)

    @torch.inference_mode()
    def condition(self, prompt: str) -> Condition:
        """What the text encoders make of a prompt; remembered. Tensors are on the network's device."""
        if prompt not in self._conditions:
            if len(self._conditions) >= REMEMBERED:
                self._conditions.pop(next(iter(self._conditions)))
            self._conditions[prompt] = {name: one.clone() for name, one in self._encode(prompt).items()}
        return self._conditions[prompt]

    def _encode(self, prompt: str) -> Mapping[str, Tensor]:
        pipe, width = self._pipeline, TEXT_WIDTHS.get(self.files.kind, 0)
        match self.files.kind:
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
