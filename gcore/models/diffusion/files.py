"""What the files of a pipeline say, without torch and diffusers: its parts, and the states of its pictures.

Controllers, plans and checks read only these; engines and train ranks load the parts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore.config.diffusion import DenoisingSpec
from gcore.config.spec import JobSpec
from gcore.errors import DataError, SpecError
from gcore.models.checks import check_whole, read_config, weight_files
from gcore.models.diffusion.settings import (
    DDIM,
    FLOW,
    MODEL_INDEX,
    SCHEDULERS,
    WHOLE_PIPELINE,
    DecoderSettings,
    TextSettings,
    TransformerSettings,
    UnetSettings,
    VideoDecoderSettings,
    check_scheduler_steps,
    check_settings,
    read_index,
    read_settings,
)
from gcore.models.hubs import NETWORK_FILE
from gcore.models.tensors import check_weight_file

NETWORK_FOLDERS: Mapping[str, str] = {
    "StableDiffusion3Pipeline": "transformer",
    "FluxPipeline": "transformer",
    "QwenImagePipeline": "transformer",
    "StableDiffusionPipeline": "unet",
}
"""The classes of pipelines that gcore trains, and the folder of the network that denoises."""

PACKED = ("FluxPipeline", "QwenImagePipeline")
"""Pipelines whose network gets squares of 2 x 2 latents as tokens."""

PACKED_SIDE = 128
"""Side of the latents of these pipelines, if a user names no size."""

DIFFUSION = ("StableDiffusionPipeline",)
"""Pipelines of a UNet with a DDIM scheduler; all others match flows with a transformer."""

TEXT_WIDTHS: Mapping[str, int] = {"StableDiffusion3Pipeline": 256, "FluxPipeline": 512, "QwenImagePipeline": 1024}
"""Number of tokens to which the longest text encoder of a pipeline pads or cuts prompts, as in diffusers; Qwen-Image's only
cuts."""

TEXT_PARTS: Mapping[str, tuple[str, ...]] = {
    "StableDiffusion3Pipeline": ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
    "FluxPipeline": ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
    "QwenImagePipeline": ("tokenizer", "text_encoder", "vae"),
    "StableDiffusionPipeline": ("tokenizer", "text_encoder"),
}
"""Parts besides network and scheduler without which a pipeline generates nothing, by its class."""

VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model", "vocab.txt")
"""Files with the words of a tokenizer; each has at least one of them."""

PIXEL_CHANNELS = 3
"""Channels of the states of a pipeline that has no VAE and generates pixels."""

SCHEDULER_FILE = Path("scheduler") / "scheduler_config.json"
"""The file with the settings of the scheduler, in a pipeline's folder."""

UNFIT_SCHEDULER: Mapping[str, str] = {
    "stochastic_sampling": "its steps are random",
    "invert_sigmas": "its levels rise",
    "use_karras_sigmas": "its levels are spread by another rule",
    "use_exponential_sigmas": "its levels are spread by another rule",
    "use_beta_sigmas": "its levels are spread by another rule",
    "thresholding": "it cuts off predictions",
    "clip_sample": "it cuts off predictions",
    "rescale_betas_zero_snr": "its first level has no signal",
}
"""Settings of a scheduler that a replayed step would not follow, and why."""


def read_scheduler(folder: Path) -> dict[str, Any]:
    """The settings of a pipeline's scheduler. Raises DataError for one that gcore cannot replay."""
    file = folder / SCHEDULER_FILE
    settings = read_settings(file)
    name = settings["_class_name"]
    if name not in SCHEDULERS:
        raise DataError(
            f"the scheduler {name} is not supported", where=str(file), fix=f"Save the pipeline with {FLOW} or {DDIM}"
        )
    for setting, why in UNFIT_SCHEDULER.items():
        if settings.get(setting):
            raise DataError(
                f"the scheduler has {setting}: {why}, which training cannot replay",
                where=str(file),
                fix=f"Set {setting} to false",
            )
    if name == DDIM and settings.get("prediction_type", "epsilon") not in ("epsilon", "v_prediction"):
        raise DataError(
            f"the scheduler's prediction_type is {settings['prediction_type']}",
            where=str(file),
            fix="Use a model that predicts epsilon or v_prediction",
        )
    check_settings(settings, SCHEDULERS[name], file)
    return settings


def check_pipeline(diffusion: DenoisingSpec, folder: Path, *, weights: bool = True) -> PipelineFiles:
    """Check that a job can generate pictures with the pipeline in `folder` as its spec says. `weights`: whether they must be
    there. Raises DataError, SpecError."""
    check_parts(folder, weights=weights)
    files = PipelineFiles.read(folder)
    where = "rollout.diffusion"
    if files.scheduler == DDIM and diffusion.sampler not in ("sde", "ode"):
        raise SpecError(
            f"sampler {diffusion.sampler} is for flow matching, and the pipeline has a {DDIM}",
            where=where,
            fix="Set sampler: sde",
        )
    if files.scheduler == DDIM and diffusion.noise_level > 1:
        raise SpecError(
            f"noise_level is {diffusion.noise_level:g}, but DDIM's steps replace at most all of their noise",
            where=where,
            fix="Use at most 1",
        )
    for steps in (diffusion.steps, diffusion.eval_steps or diffusion.steps):
        check_scheduler_steps(read_scheduler(folder), steps, folder / SCHEDULER_FILE)
    trainable, window = files.trainable_steps(diffusion.steps), diffusion.window
    if not trainable or (window is not None and window.start + window.size > len(trainable)):
        asked = "all" if window is None else f"{window.size} from step {window.start}"
        raise SpecError(
            f"of {diffusion.steps} steps, {len(trainable)} can be trained (the last one of a flow cannot), and the spec asks for {asked}",
            where=where,
            fix="Raise steps, or lower window.size or window.start",
        )
    files.state_shape(*files.size(diffusion.height, diffusion.width))
    return files


def check_kind(spec: JobSpec, folder: Path, *, weights: bool = True) -> None:
    """Check that the engine of a job fits the kind of its model: a pipeline of diffusers, or a language model. `folder`: of the
    model. `weights`: whether they must be there. Raises DataError, SpecError."""
    if spec.rollout.diffusion is not None:
        files = check_pipeline(spec.rollout.diffusion, folder, weights=weights)
        if files.scheduler == DDIM and spec.train.loss in ("nft", "grpo_guard"):
            raise SpecError(
                f"loss {spec.train.loss} is for flow matching, and the pipeline has a {DDIM}",
                where="train.loss",
                fix="Use the flow ddpo or weighted_sft",
            )
    elif is_pipeline(folder):
        raise SpecError(
            f"the model generates pictures, which the engine {spec.rollout.engine} cannot",
            where="rollout.engine",
            fix="Set it to diffusers, or use a flow for pictures, such as flow_grpo",
        )


def network_folder(folder: Path) -> Path:
    """The folder of the network that denoises, in a pipeline's folder. Raises DataError."""
    return folder / NETWORK_FOLDERS[pipeline_parts(folder)["_class_name"]]


def policy_config(folder: Path) -> dict[str, Any]:
    """The configuration of a policy in `folder`: of a language model, or of the network of a pipeline; empty if it cannot be
    read. Raises DataError for a pipeline that gcore does not know."""
    if is_pipeline(folder):
        return read_config(network_folder(folder))
    return read_config(folder)


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is a pipeline of diffusers."""
    return (folder / MODEL_INDEX).is_file()


def pipeline_parts(folder: Path) -> Mapping[str, Any]:
    """The parts of a pipeline's folder, as `model_index.json` names them: library and class by part, and `_class_name`.

    Raises DataError for a folder that is not one, or is of a class that gcore does not know.
    """
    parts = read_index(folder)
    name = parts["_class_name"]
    if name not in NETWORK_FOLDERS:
        raise DataError(
            f"pipelines of the class {name} are not supported",
            where=str(folder),
            fix=f"Use one of: {', '.join(sorted(NETWORK_FOLDERS))}. Editing of pictures and video are not supported",
        )
    return parts


def has_part(parts: Mapping[str, Any], part: str) -> bool:
    """Whether a pipeline with these parts has this one."""
    named = parts.get(part)
    return isinstance(named, list) and named[1] is not None


def check_parts(folder: Path, *, weights: bool = True) -> None:
    """Raise DataError for a part that is missing, and ModelError for weights that are incomplete. `weights`: whether they and
    the words of tokenizers must be there."""
    parts = pipeline_parts(folder)
    network = NETWORK_FOLDERS[parts["_class_name"]]
    for part in (*TEXT_PARTS[parts["_class_name"]], network, "scheduler"):
        if not has_part(parts, part) or not (folder / part).is_dir():
            raise DataError(f"the pipeline has no {part}", where=str(folder), fix=WHOLE_PIPELINE)
    for part in parts:
        if part.startswith("text_encoder") and has_part(parts, part):
            file = folder / part / "config.json"
            check_settings(read_settings(file, named=False), TextSettings, file)
    if not weights:
        return
    for part in parts:
        if part.startswith("tokenizer") and has_part(parts, part):
            _check_tokenizer(folder / part)
    check_whole(folder / network, weights=NETWORK_FILE)
    for part in parts:
        if part.startswith(("text_encoder", "vae")) and has_part(parts, part):
            # Weights in torch's own format are read by their library alone.
            for file in () if any((folder / part).glob("*.bin")) else weight_files(folder / part):
                check_weight_file(file)


def _check_tokenizer(folder: Path) -> None:
    """Raise DataError for a tokenizer without a file that has its words, and for one whose file is cut off."""
    files = [folder / name for name in VOCABULARIES if (folder / name).is_file()]
    if not files:
        what = f"the tokenizer has none of the files {', '.join(VOCABULARIES)}"
        raise DataError(what, where=str(folder), fix=WHOLE_PIPELINE)
    for file in files:
        if file.suffix == ".json":
            read_settings(file, named=False)


def _scale(file: Path, *, video: bool) -> int:
    """Pixels by latent of a VAE whose settings are in `file`. `video`: it is one for video."""
    settings = read_settings(file)
    check_settings(settings, VideoDecoderSettings if video else DecoderSettings, file)
    halvings = len(settings["temperal_downsample"]) if video else len(settings["block_out_channels"]) - 1
    return int(2**halvings)


@dataclass(frozen=True, slots=True)
class PipelineFiles:
    """What a pipeline's files say of its pictures. `kind`: its class. `config`: of the network. `scale`: pixels by latent, in
    each direction. `scheduler`: its class."""

    folder: Path
    kind: str
    config: Mapping[str, Any]
    scale: int
    scheduler: str

    @staticmethod
    def read(folder: Path) -> PipelineFiles:
        """Read the files of a pipeline's folder. Raises DataError."""
        parts = pipeline_parts(folder)
        kind = parts["_class_name"]
        own = folder / NETWORK_FOLDERS[kind] / "config.json"
        config = read_settings(own)
        check_settings(config, UnetSettings if kind in DIFFUSION else TransformerSettings, own)
        if config["_class_name"] != parts[NETWORK_FOLDERS[kind]][1]:
            raise DataError(
                f"the network is a {config['_class_name']}, and {MODEL_INDEX} names a {parts[NETWORK_FOLDERS[kind]][1]}",
                where=str(own),
                fix=WHOLE_PIPELINE,
            )
        scheduler = read_scheduler(folder)["_class_name"]
        if (scheduler == DDIM) != (kind in DIFFUSION):
            raise DataError(
                f"the scheduler {scheduler} does not belong to a {kind}",
                where=str(folder / SCHEDULER_FILE),
                fix="Save the pipeline with its own scheduler",
            )
        scale = 1
        if has_part(parts, "vae"):
            scale = _scale(folder / "vae" / "config.json", video=kind == "QwenImagePipeline")
        elif (channels := int(config["in_channels"]) // (4 if kind in PACKED else 1)) != PIXEL_CHANNELS:
            raise DataError(
                f"the pipeline has no vae, and its network generates {channels} channels instead of the {PIXEL_CHANNELS} of pixels",
                where=str(folder),
                fix=WHOLE_PIPELINE,
            )
        return PipelineFiles(folder, kind, config, scale, scheduler)

    @property
    def network(self) -> Path:
        """The folder of the network that denoises."""
        return self.folder / NETWORK_FOLDERS[self.kind]

    @property
    def side(self) -> int:
        """The side in pixels of the pictures for which the pipeline was made. Raises DataError if no file says it."""
        side = PACKED_SIDE if self.kind in PACKED else self.config.get("sample_size")
        if side is None:
            raise DataError(
                "sample_size is missing, so the pipeline's size of pictures is not known",
                where=str(self.network / "config.json"),
                fix="Set rollout.diffusion.height and width",
            )
        return int(side) * self.scale

    @property
    def patch(self) -> int:
        """The side in latents of an image token's square."""
        return 2 if self.kind in PACKED else int(self.config.get("patch_size") or 1)

    @property
    def condition_width(self) -> int:
        """Numbers of each token of a prompt's embeddings; 0 if the configuration does not say."""
        return int(self.config.get("joint_attention_dim") or self.config.get("cross_attention_dim") or 0)

    @property
    def is_distilled(self) -> bool:
        """Whether the network gets the guidance as an input."""
        return bool(self.config.get("guidance_embeds", False))

    def size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width in pixels of the pictures of a job that asks for these; None: the pipeline's."""
        return height or self.side, width or self.side

    def state_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Channels, height and width of the state of a picture of `height` x `width` pixels. Raises DataError for a size that
        the pipeline cannot generate."""
        step = self.scale * self.patch
        where = "rollout.diffusion"
        if min(height, width) < step or height % step or width % step:
            raise DataError(
                f"a picture of {width}x{height} pixels cannot be generated: its sides must be multiples of {step} pixels",
                where=where,
                fix="Correct height and width",
            )
        channels = int(self.config["in_channels"]) // (4 if self.kind in PACKED else 1)
        shape = channels, height // self.scale, width // self.scale
        largest = self.config.get("pos_embed_max_size")
        if largest is not None and max(shape[1:]) // self.patch > largest:
            raise DataError(
                f"a picture of {width}x{height} pixels is larger than the network's {largest * step} pixels a side",
                where=where,
                fix="Lower height and width",
            )
        return shape

    def tokens(self, shape: Sequence[int]) -> int:
        """Number of image tokens of a state of `shape` (channels, height, width), by which cost and memory grow."""
        return (shape[-2] // self.patch) * (shape[-1] // self.patch)

    def guides(self, guidance: float) -> bool:
        """Whether each step needs a second pass, for the negative prompt."""
        return guidance > 1 and not self.is_distilled

    def passes(self, guidance: float) -> int:
        """Passes of the network for a step."""
        return 2 if self.guides(guidance) else 1

    def trainable_steps(self, steps: int) -> range:
        """The steps of a schedule of `steps` steps that can be random and trained. The last one of a flow cannot: its standard
        deviation is close to 0, so that log-probabilities are beyond -1,000 where other steps have -1."""
        return range(steps - 1 if self.scheduler == FLOW else steps)
