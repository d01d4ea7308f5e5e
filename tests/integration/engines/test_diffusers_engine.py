"""The diffusers engine as a process: pictures, their blobs, weights and refusals, through the controller's client."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from blob_stores import StoreProcess, key_of
from engine_processes import engine_process
from PIL import Image
from safetensors.torch import load_file, save_file

from gcore.api.tls import PLAIN
from gcore.errors import EngineError, EngineUnreachable
from gcore.media.client import BlobClient, open_blob_http
from gcore.models.diffusion.networks import load_network, unpack_conditions
from gcore.models.diffusion.schedule import NoiseSchedule
from gcore.rollout.api import DenoisingParams, SamplingParams
from gcore.rollout.client import EngineClient
from gcore.testing.pipelines import write_pipeline
from gcore.types import DenoisingTrajectory, Version

DIFFUSERS = (sys.executable, "-m", "gcore.engines.diffusers")
GUIDANCE = 2.0
BOUND = 64 << 20
SAMPLING = SamplingParams(1.0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline") / "sd3", "sd3")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    process = StoreProcess("n1", tmp_path_factory.mktemp("store"), bound_bytes=BOUND)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def address(folder: Path, store: StoreProcess) -> Iterator[str]:
    options = {"blob_store": store.address, "blob_key": key_of("job"), "job_uid": "job", "guidance": GUIDANCE}
    with engine_process(folder, DIFFUSERS, batch_slots=4, weight_version="0.1", **options) as url:
        yield url


@pytest.fixture
async def client(address: str) -> AsyncIterator[EngineClient]:
    engine = EngineClient(address, timeout_s=60.0)
    yield engine
    await engine.close()


def params(**changed: object) -> SamplingParams:
    given = {"text": "a red square", "steps": 4, "height": 16, "width": 16, "guidance": GUIDANCE} | changed
    return SamplingParams(1.0, 1, denoising=DenoisingParams(**given))  # type: ignore[arg-type]


async def test_pictures_come_as_blobs_and_their_replay_has_the_same_log_probabilities(
    client: EngineClient, store: StoreProcess, folder: Path
) -> None:
    samples = await client.generate_each([(), ()], params(random_steps=(0, 2)), seeds=(5, 6), rid="r")
    network = load_network(folder, guidance=GUIDANCE, dtype=torch.float32, device="cpu")
    schedule = NoiseSchedule.load(folder)
    async with open_blob_http(PLAIN) as http:
        blobs = BlobClient(store.address, "job", key_of("job"), http)
        for sample, seed in zip(samples, (5, 6), strict=True):
            output = sample.output
            assert isinstance(output, DenoisingTrajectory)
            assert (output.steps, output.seed, sample.length, sample.finish_reason) == ((0, 2), seed, 2, "stop")
            assert [(span.version, span.start, span.end) for span in output.spans] == [(Version(0, 1), 0, 2)]
            assert (sample.token_ids, sample.text) == ((), "")
            bytes_of = {
                medium.kind: b"".join([piece async for piece in blobs.read(medium.sha256)]) for medium in output.media
            }
            shape = {medium.kind: medium.shape for medium in output.media}
            assert shape["trajectory"] == (4, 3, 16, 16)
            states = torch.from_numpy(
                np.frombuffer(bytes_of["trajectory"], np.float32).reshape(shape["trajectory"]).copy()
            )
            (path := Path(store.folder) / "picture.png").write_bytes(bytes_of["decoded"])
            assert Image.open(path).size == (16, 16)
            condition, negative = unpack_conditions(bytes_of["embeds"])
            assert negative is not None
            for place, step in enumerate(output.steps):
                before, after = states[2 * place : 2 * place + 1], states[2 * place + 1 : 2 * place + 2]
                level = torch.tensor([output.sigmas[step]])
                velocity = network.predict(before, level, [condition], [negative])
                found = schedule.step("sde", before, velocity, output.sigmas, step, 0.7).log_prob(after)
                assert found.item() == pytest.approx(output.logprobs[place], abs=1e-5)


async def test_arrays_use_up_the_room_that_is_reserved_for_the_request(
    client: EngineClient, store: StoreProcess
) -> None:
    async with open_blob_http(PLAIN) as http:
        blobs = BlobClient(store.address, "job", key_of("job"), http)
        assert await blobs.reserve("me", 1 << 20, 60.0)
        for holder, size, least in (("others", BOUND, 1 << 18), ("more", 1 << 18, 1 << 10)):  # no 1 KiB stays free
            while size and not await blobs.reserve(holder, size, 60.0):
                size -= least
        with pytest.raises(EngineUnreachable, match="no room for"):  # not a refusal: the prompt waits
            await client.generate_each([()], params(), seeds=(40,), rid="nobody")
        (sample,) = await client.generate_each([()], params(blob_holder="me"), seeds=(40,), rid="me")
        assert sample.finish_reason == "stop"
        for holder in ("me", "others", "more"):
            await blobs.reserve(holder, 0, 60.0)


async def test_weights_of_a_folder_are_served_and_named(client: EngineClient, folder: Path, tmp_path: Path) -> None:
    name = "diffusion_pytorch_model.safetensors"
    weights = load_file(folder / "transformer" / name)
    save_file({key: 0.5 * value for key, value in weights.items()}, tmp_path / name)
    (before,) = await client.generate_each([()], params(), seeds=(3,), rid="before")
    await client.update_weights(str(tmp_path), Version(0, 2))
    assert await client.served() == Version(0, 2)
    (after,) = await client.generate_each([()], params(), seeds=(3,), rid="after")
    assert {span.version for span in after.spans} == {Version(0, 2)}
    assert pictures(after) != pictures(before)
    save_file(weights, tmp_path / name)
    await client.update_weights(str(tmp_path), Version(0, 3))
    (again,) = await client.generate_each([()], params(), seeds=(3,), rid="again")
    assert pictures(again) == pictures(before)
    weights.pop("proj_out.weight")
    save_file(weights, tmp_path / name)
    with pytest.raises(EngineError, match=r"proj_out\.weight"):
        await client.update_weights(str(tmp_path), Version(0, 4))
    assert await client.served() == Version(0, 3)


def pictures(sample: object) -> list[str]:
    return [medium.sha256 for medium in sample.media if medium.kind == "decoded"]  # type: ignore[attr-defined]


async def test_an_engine_sleeps_and_generates_the_same_pictures_afterwards(client: EngineClient) -> None:
    (before,) = await client.generate_each([()], params(), seeds=(3,), rid="before")
    version = await client.served()
    assert version is not None
    await client.sleep()
    assert await client.sleeps()
    await client.wake(version)
    (after,) = await client.generate_each([()], params(), seeds=(3,), rid="after")
    assert pictures(after) == pictures(before)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": " "}, "the prompt is empty"),
        ({"guidance": 7.0}, r"guidance_scale is 7.0, but this engine serves with 2.0"),
        ({"height": 18}, "multiples of 4 pixels"),
        ({"random_steps": (3,)}, "step 3 is not one of the steps that can be random, 0 to 2"),
        ({"random_steps": (1, 0)}, "must ascend"),
        ({"kind": "ode", "random_steps": (1,)}, "an ode has no random steps"),
        ({"kind": "cps", "noise_level": 2.5}, r"rollout_noise_level is 2\.5.*Use at most 1"),
        ({"steps": 0}, "num_inference_steps"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused(
    client: EngineClient, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await client.generate_each([()], params(**changed), seeds=(1,), rid="r")


async def test_the_servers_description_has_the_scheduler_and_guidance_with_which_a_trainer_must_agree(
    address: str, folder: Path
) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        info = (await http.get(f"{address}/server_info")).json()
        assert (info["engine"], info["guidance"]) == ("gcore diffusers engine", GUIDANCE)
        assert info["scheduler"] == NoiseSchedule.load(folder).fingerprint
        refused = await http.post(f"{address}/generate", json={"input_ids": [1]})
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert "/generate is not supported" in refused.text
