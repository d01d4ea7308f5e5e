"""Pictures that the policy of a simulated job generates: the ways in which it may, the facts of its pipeline, and what an engine makes.

Which steps are random and trained, seeds and sizes are production's (`gcore.models.diffusion.requests`). Only the denoising is simulated:
each sample has blobs of its own, with the sizes that a real engine's have, in the store of the engine's node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulated_blobs import NodeStore, Stores

from gcore.config import JobSpec
from gcore.media.protocol import StoreFull
from gcore.models.diffusion.files import PipelineFiles
from gcore.models.diffusion.requests import PictureRequests
from gcore.models.diffusion.settings import FLOW
from gcore.models.diffusion.windows import kept_states
from gcore.rollout.api import DenoisingParams
from gcore.types import DenoisingTrajectory, Medium, MediumKind, Sample, Version, VersionSpan

STEPS = 6
"""Denoising steps of a picture."""
CHANNELS, LATENT_SIDE, SCALE = 16, 64, 8
"""Of a state as SD3.5 has it, in 512 x 512 pixels: 256 KiB."""
CONDITION_BYTES = 1 << 20
"""Bytes of a prompt's embeddings, below what is reserved for them."""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "all": {"rollout": {"diffusion": {"steps": STEPS}}},
    "window": {
        "rollout": {
            "diffusion": {"steps": STEPS, "window": {"size": 2, "strategy": "progressive", "stay": 1, "stride": 1}}
        }
    },
    "share": {
        "rollout": {
            "diffusion": {
                "steps": STEPS,
                "trained_share": 0.5,
                "same_noise": True,
                "window": {"size": 4, "strategy": "random"},
            }
        }
    },
    "forward": {
        "rollout": {"diffusion": {"steps": STEPS, "sampler": "ode", "trained_share": 0.5}},
        "train": {"loss": "nft"},
    },
}
"""By name: sections of a spec. all: all steps are trained that can be. window: those of a window that moves. share: half of those of
a window at a random place. forward: training adds noise to finished pictures (DiffusionNFT)."""


def picture_requests(spec: JobSpec) -> PictureRequests | None:
    """Those of a job; None if its policy writes texts."""
    if spec.rollout.diffusion is None:
        return None
    config = {"in_channels": CHANNELS, "sample_size": LATENT_SIDE, "patch_size": 2, "joint_attention_dim": 4096}
    return PictureRequests(spec, PipelineFiles(Path("/simulated"), "StableDiffusion3Pipeline", config, SCALE, FLOW))


def make_pictures(
    params: DenoisingParams, seeds: Sequence[int], made: tuple[Version, ...], node: str, stores: Stores
) -> tuple[Sample, ...]:
    """Make a picture for each seed with the weights `made`, and put its blobs into the store of the engine's node.

    Raises StoreFull, also if that store does not answer.
    """
    if not stores.reaches(node, node):
        raise StoreFull(f"the store of {node} does not answer")
    return tuple(_picture(params, seed, made, stores.of(node)) for seed in seeds)


def _picture(params: DenoisingParams, seed: int, made: tuple[Version, ...], store: NodeStore) -> Sample:
    random_steps = tuple(range(params.steps - 1)) if params.random_steps is None else params.random_steps
    random_steps = () if params.kind == "ode" else random_steps
    steps = random_steps if params.kept_steps is None else params.kept_steps
    states = len(kept_states(steps)) or 1
    shape = CHANNELS, params.height // SCALE, params.width // SCALE
    own = f"{seed} {made}"
    media = (
        _medium("trajectory", own, 4 * states * CHANNELS * shape[1] * shape[2], (states, *shape), "float32"),
        _medium("decoded", own, 3 * params.height * params.width, (params.height, params.width, 3), "uint8"),
        _medium("embeds", params.text, CONDITION_BYTES, (CONDITION_BYTES,), "uint8"),
    )
    for one in media:
        store.take(one.sha256, params.blob_holder, one.size)
    sigmas = tuple(1 - index / params.steps for index in range(params.steps + 1))
    output = DenoisingTrajectory(steps, sigmas, (-1.0,) * len(steps), _spans(made, len(steps)), seed, media)
    return Sample(output=output, finish_reason="stop")


def _medium(kind: MediumKind, what: str, size: int, shape: tuple[int, ...], dtype: str) -> Medium:
    return Medium(kind, hashlib.sha256(f"{kind} {what}".encode()).hexdigest(), size, shape, dtype)


def _spans(made: tuple[Version, ...], steps: int) -> tuple[VersionSpan, ...]:
    """Which version computed which trained steps; one empty span of the last if there are none."""
    if len(made) < 2 or steps < 2:
        return (VersionSpan(made[-1], 0, steps),)
    return VersionSpan(made[0], 0, 1), VersionSpan(made[-1], 1, steps)
