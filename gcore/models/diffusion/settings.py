"""What gcore reads of the configuration files of a pipeline, with the types that it needs. Needs no torch and no diffusers.

Files say more than that, and what they do not say has diffusers' default. A file with a wrong type is refused by the name of its
field, before engines and ranks start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from gcore.errors import DataError
from gcore.system.files import read_json_file

MODEL_INDEX = "model_index.json"
"""The file that makes a folder a pipeline of diffusers."""

FLOW, DDIM = "FlowMatchEulerDiscreteScheduler", "DDIMScheduler"
"""The schedulers that gcore can replay."""

WHOLE_PIPELINE = "Save the whole pipeline (pipeline.save_pretrained)"
"""Advice for files that are missing or wrong."""

LIBRARIES = ("diffusers", "transformers")
"""The libraries whose classes a pipeline may name: a folder must not choose what is imported."""

NOT_LOADED = ("safety_checker",)
"""Parts of a pipeline that gcore does not load."""

Sizes = Annotated[list[PositiveInt], Field(min_length=1)]


class Settings(BaseModel):
    """Settings of a part."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class TransformerSettings(Settings):
    """Of a network that denoises as a transformer."""

    in_channels: PositiveInt
    num_attention_heads: PositiveInt
    attention_head_dim: PositiveInt
    num_layers: PositiveInt
    num_single_layers: int = Field(0, ge=0)
    patch_size: PositiveInt | None = None
    sample_size: PositiveInt | None = None
    pos_embed_max_size: PositiveInt | None = None
    joint_attention_dim: PositiveInt | None = None
    guidance_embeds: bool = False


class UnetSettings(Settings):
    """Of a network that denoises as a UNet."""

    in_channels: PositiveInt
    block_out_channels: Sizes
    down_block_types: list[str]
    layers_per_block: PositiveInt = 2
    sample_size: PositiveInt | None = None
    cross_attention_dim: PositiveInt | None = None


class DecoderSettings(Settings):
    """Of a VAE for pictures."""

    block_out_channels: Sizes
    layers_per_block: PositiveInt = 1


class VideoDecoderSettings(Settings):
    """Of a VAE for video, whose decoder is used for one frame (Qwen-Image)."""

    temperal_downsample: Annotated[list[bool], Field(min_length=1)]
    dim_mult: Sizes
    base_dim: PositiveInt = 96
    num_res_blocks: PositiveInt = 2


class TextSettings(Settings):
    """Of a text encoder."""

    max_position_embeddings: PositiveInt | None = None


class FlowSettings(Settings):
    """Of the scheduler of a flow."""

    num_train_timesteps: PositiveInt = 1000
    shift: PositiveFloat = 1.0
    base_shift: float | None = 0.5
    max_shift: float | None = 1.15
    base_image_seq_len: PositiveInt | None = 256
    max_image_seq_len: PositiveInt | None = 4096
    shift_terminal: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _check_line(self) -> Self:
        if self.base_image_seq_len == self.max_image_seq_len:
            raise ValueError("base_image_seq_len and max_image_seq_len are equal, so no line goes through both")
        return self


class DdimSettings(Settings):
    """Of a DDIM scheduler."""

    num_train_timesteps: PositiveInt = 1000
    beta_start: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    beta_end: Annotated[float, Field(gt=0, lt=1)] = 0.02
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "linear"
    trained_betas: list[Annotated[float, Field(gt=0, lt=1)]] | None = None
    steps_offset: int = Field(0, ge=0)
    timestep_spacing: Literal["leading", "trailing", "linspace"] = "leading"

    @model_validator(mode="after")
    def _check_betas(self) -> Self:
        if self.trained_betas is not None and len(self.trained_betas) != self.num_train_timesteps:
            raise ValueError(
                f"trained_betas has {len(self.trained_betas)} values for {self.num_train_timesteps} timesteps"
            )
        return self


SCHEDULERS: Mapping[str, type[Settings]] = {FLOW: FlowSettings, DDIM: DdimSettings}


def read_settings(file: Path, *, named: bool = True) -> dict[str, Any]:
    """The settings in a file of a pipeline. `named`: they name their class as `_class_name`. Raises DataError."""
    try:
        settings = read_json_file(file)
    except OSError as error:
        raise DataError(
            f"cannot read a file of the pipeline ({error.strerror or error})", where=str(file), fix=WHOLE_PIPELINE
        ) from error
    except ValueError as error:
        raise DataError(f"a file of the pipeline is not JSON ({error})", where=str(file), fix=WHOLE_PIPELINE) from error
    if not isinstance(settings, dict) or (named and not isinstance(settings.get("_class_name"), str)):
        raise DataError("a file of the pipeline does not name its class", where=str(file), fix=WHOLE_PIPELINE)
    return settings


def check_settings(settings: Mapping[str, Any], kind: type[Settings], file: Path) -> None:
    """Raise DataError unless the settings of `file` have the types of `kind`."""
    try:
        kind.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        value = "" if not field or first["type"] == "missing" else f" is {str(first['input'])[:40]!r}"
        why = first["msg"].removeprefix("Value error, ")
        raise DataError(f"{field}{value}: {why}".removeprefix(": "), where=str(file), fix=WHOLE_PIPELINE) from error


def read_index(folder: Path) -> dict[str, Any]:
    """What `model_index.json` says: `_class_name`, and by part its library and class, which are None for a part that is left
    out. Raises DataError, also for a class of another library than diffusers and transformers."""
    if not folder.is_dir():
        raise DataError("there is no such folder", where=str(folder), fix="Correct the path of the model")
    file = folder / MODEL_INDEX
    parts = read_settings(file)
    for part, named in parts.items():
        if part.startswith("_") or part in NOT_LOADED or not isinstance(named, list | str | dict):
            continue
        texts = isinstance(named, list) and len(named) == 2 and all(isinstance(one, str) for one in named)
        if named != [None, None] and (not texts or named[0] not in LIBRARIES):
            raise DataError(
                f"{part} is {str(named)[:60]} instead of a class of {' or '.join(LIBRARIES)}",
                where=str(file),
                fix=WHOLE_PIPELINE,
            )
    return parts


def check_scheduler_steps(settings: Mapping[str, Any], steps: int, file: Path) -> None:
    """Raise DataError if a DDIM scheduler has no level after each of `steps` steps. `settings`: of `file`."""
    if settings["_class_name"] != DDIM:
        return
    timesteps = settings.get("num_train_timesteps", 1000)
    if steps > timesteps:
        raise DataError(
            f"{steps} steps are more than the scheduler's {timesteps} timesteps",
            where=str(file),
            fix="Lower steps and eval_steps of rollout.diffusion",
        )
    if settings.get("timestep_spacing", "leading") == "leading" and not settings.get("steps_offset", 0):
        raise DataError(
            "the last timestep is 0, so no step follows it",
            where=str(file),
            fix="Save the pipeline with steps_offset: 1",
        )
