"""Checks of every engine that generates pictures, through the controller's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from blob_stores import StoreProcess, key_of
from PIL import Image

from gcore.api.tls import PLAIN
from gcore.media.client import BlobClient, open_blob_http
from gcore.models.diffusion.networks import load_network, unpack_conditions
from gcore.models.diffusion.schedule import NoiseSchedule
from gcore.rollout.api import DenoisingParams, SamplingParams
from gcore.rollout.client import EngineClient
from gcore.types import DenoisingTrajectory, Sample

GUIDANCE = 2.0
WEIGHTS = "diffusion_pytorch_model.safetensors"
"""The file with a network's weights."""

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"text": " "}, "the prompt is empty"),
    ({"guidance": 7.0}, r"guidance_scale is 7.0, but this engine serves with 2.0"),
    ({"height": 18}, "multiples of 4 pixels"),
    ({"random_steps": (3,)}, "step 3 is not one of the steps that can be random, 0 to 2"),
    ({"random_steps": (1, 0)}, "must ascend"),
    ({"kind": "ode", "random_steps": (1,)}, "an ode has no random steps"),
    ({"kind": "cps", "noise_level": 2.5}, r"rollout_noise_level is 2\.5.*Use at most 1"),
    ({"steps": 0}, "num_inference_steps"),
]
"""Requests that no engine serves, and what each refusal says."""


def denoising(**changed: Any) -> SamplingParams:
    """The parameters of a request for a picture of 16 x 16 pixels."""
    given: dict[str, Any] = {
        "text": "a red square",
        "steps": 4,
        "height": 16,
        "width": 16,
        "guidance": GUIDANCE,
    } | changed
    return SamplingParams(1.0, 1, denoising=DenoisingParams(**given))


async def drawn(client: EngineClient, *seeds: int, rid: str = "r", **changed: Any) -> tuple[Sample, ...]:
    """A picture from each seed."""
    return await client.generate_each([()] * len(seeds), denoising(**changed), seeds=seeds, rid=rid)


def pictures(*samples: Sample) -> list[str]:
    """The hashes of decoded pictures."""
    return [medium.sha256 for sample in samples for medium in sample.media if medium.kind == "decoded"]


async def check_blobs_and_replay(
    client: EngineClient, store: StoreProcess, folder: Path, shape: tuple[int, ...]
) -> None:
    """Pictures come as blobs, and a trainer that replays their random steps finds the log-probabilities that the engine reported.

    `folder`: of the pipeline that the engine serves. `shape`: of one state.
    """
    seeds = (5, 6)
    samples = await drawn(client, *seeds, random_steps=(0, 2))
    version = await client.served()
    network = load_network(folder, guidance=GUIDANCE, dtype=torch.float32, device="cpu")
    schedule = NoiseSchedule.load(folder)
    async with open_blob_http(PLAIN) as http:
        blobs = BlobClient(store.address, "job", key_of("job"), http)
        for sample, seed in zip(samples, seeds, strict=True):
            output = sample.output
            assert isinstance(output, DenoisingTrajectory)
            assert (output.steps, output.seed, sample.length, sample.finish_reason) == ((0, 2), seed, 2, "stop")
            assert [(span.version, span.start, span.end) for span in output.spans] == [(version, 0, 2)]
            assert (sample.token_ids, sample.text) == ((), "")
            bytes_of = {
                medium.kind: b"".join([piece async for piece in blobs.read(medium.sha256)]) for medium in output.media
            }
            (trajectory,) = (medium.shape for medium in output.media if medium.kind == "trajectory")
            assert trajectory == (4, *shape)
            states = torch.from_numpy(np.frombuffer(bytes_of["trajectory"], np.float32).reshape(trajectory).copy())
            (path := Path(store.folder) / "picture.png").write_bytes(bytes_of["decoded"])
            assert Image.open(path).size == (16, 16)
            condition, negative = unpack_conditions(bytes_of["embeds"])
            assert negative is not None
            for place, step in enumerate(output.steps):
                before, after = states[2 * place : 2 * place + 1], states[2 * place + 1 : 2 * place + 2]
                velocity = network.predict(before, torch.tensor([output.sigmas[step]]), [condition], [negative])
                found = schedule.step("sde", before, velocity, output.sigmas, step, 0.7).log_prob(after)
                assert found.item() == pytest.approx(output.logprobs[place], abs=1e-5)


async def check_description(client: EngineClient, engine: str, folder: Path) -> None:
    """The server's description has the scheduler and the guidance with which a trainer must agree; texts are refused."""
    async with httpx.AsyncClient(trust_env=False) as http:
        info = (await http.get(f"{client.base_url}/server_info")).json()
        assert (info["engine"], info["guidance"]) == (engine, GUIDANCE)
        assert info["scheduler"] == NoiseSchedule.load(folder).fingerprint
        refused = await http.post(f"{client.base_url}/generate", json={"input_ids": [1]})
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert "/generate is not supported" in refused.text
