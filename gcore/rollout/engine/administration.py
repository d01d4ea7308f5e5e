"""What the routes take that change the engine or what runs on it: SGLang's fields.

Types are read leniently and unknown fields are ignored, as there. Fields about devices and loaders are taken and mean
nothing here, but for `load_format`, where another loader would mean other weights.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

NUMBERED = re.compile(r"(_[0-9]+){0,2}")
"""What stands behind a request's name in the names of its samples: the prompt's number in a batch, the sample's in `n`."""
Tag = Literal["weights", "kv_cache", "cuda_graph"]
LOADED = (None, "auto", "safetensors")
"""Load formats that name what this engine does."""


class Body(BaseModel):
    """Base of them all."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class AbortBody(Body):
    """POST /abort_request. Ends the request `rid`, or the samples that were numbered under it."""

    rid: str | None = None
    abort_all: bool = False

    def names(self, rid: str) -> bool:
        """Whether the sample called `rid` is meant."""
        mine, rest = self.rid or "", rid.removeprefix(self.rid or "")
        return bool(mine) and rid.startswith(mine) and NUMBERED.fullmatch(rest) is not None


class _ChangeBody(Body):
    """What all changes of weights have."""

    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True

    @field_validator("load_format")
    @classmethod
    def _is_loaded(cls, value: str | None) -> str | None:
        if value not in LOADED:
            raise ValueError(f"{value!r} is not a load format of this engine; leave it out")
        return value


class UpdateFromDiskBody(_ChangeBody):
    """POST /update_weights_from_disk."""

    model_path: str


class UpdateDistributedBody(_ChangeBody):
    """POST /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    selector: Literal["target", "draft", "all"] = "all"


class InitGroupBody(Body):
    """POST /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class GroupBody(Body):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class BeginBody(Body):
    """POST /begin_weight_update."""

    selector: Literal["target", "draft", "all"] = "all"


class EmptyBody(Body):
    """POST /end_weight_update, /continue_generation: an object."""


class UpdateVersionBody(Body):
    """POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class WeightsByNameBody(Body):
    """GET or POST /get_weights_by_name."""

    name: str
    truncate_size: int = 100


class PauseBody(Body):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class MemoryBody(Body):
    """POST /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Tag] | None = None

    @property
    def wanted(self) -> frozenset[str]:
        """The tags; both when none is named. There are no CUDA graphs."""
        return frozenset(self.tags or ("weights", "kv_cache")) - {"cuda_graph"}
