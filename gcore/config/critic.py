"""The section `train.critic` of a job spec: the model of values that PPO's advantages are taken against."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, field_validator

from gcore.config.base import Section

HUBS = ("hf://", "ms://")


class CriticSpec(Section):
    """The critic's model and optimizer. ZeRO stage, dtype, betas, schedule, mini-batches and packing are the policy's."""

    path: str | None = Field(
        None,
        description="Folder of the model it starts from, relative to the spec's folder: a language model, which gets a "
        "head of zeros, or one whose weights hold `score`, a head of one number (a reward model; the folder `critic` of "
        "a checkpoint); default: the policy's model",
    )
    learning_rate: Annotated[float, Field(ge=0)] = Field(
        1e-5, description="Peak learning rate; its head begins at nothing, so it bears more than the policy"
    )
    warmup_updates: Annotated[int, Field(ge=0)] = Field(0, description="Updates over which the rate rises linearly")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight decay of its optimizer")
    max_grad_norm: PositiveFloat = Field(1.0, description="Its gradients are clipped to this global norm")
    clip: PositiveFloat | None = Field(
        0.2, description="A value moves no further than this from what it was at the step's start; null: as it likes"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="First steps of the job in which the critic alone is trained and the policy stays as it is"
    )

    @field_validator("path")
    @classmethod
    def _is_a_folder(cls, path: str | None) -> str | None:
        if path is not None and path.startswith(HUBS):
            raise ValueError("the critic's model is a folder that every node sees; download it and name the folder")
        return path
