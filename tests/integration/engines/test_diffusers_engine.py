"""The diffusers engine as a process: pictures, their blobs, weights and refusals, through the controller's client."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blob_stores import StoreProcess, key_of
from engine_processes import engine_process
from picture_engine import GUIDANCE, REFUSED, WEIGHTS, check_blobs_and_replay, check_description, drawn, pictures
from safetensors.torch import load_file, save_file

from gcore.api.tls import PLAIN
from gcore.errors import EngineError, EngineUnreachable
from gcore.media.client import BlobClient, open_blob_http
from gcore.rollout.client import EngineClient
from gcore.testing.pipelines import write_pipeline
from gcore.types import Version

DIFFUSERS = (sys.executable, "-m", "gcore.engines.diffusers")
BOUND = 64 << 20


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


async def test_pictures_come_as_blobs_and_their_replay_has_the_same_log_probabilities(
    client: EngineClient, store: StoreProcess, folder: Path
) -> None:
    assert await client.served() == Version(0, 1)
    await check_blobs_and_replay(client, store, folder, (3, 16, 16))


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
            await drawn(client, 40, rid="unreserved")
        (sample,) = await drawn(client, 40, rid="me", blob_holder="me")
        assert sample.finish_reason == "stop"
        for holder in ("me", "others", "more"):
            await blobs.reserve(holder, 0, 60.0)


async def test_weights_of_a_folder_are_served_and_named(client: EngineClient, folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "transformer" / WEIGHTS)
    save_file({key: 0.5 * value for key, value in weights.items()}, tmp_path / WEIGHTS)
    (before,) = await drawn(client, 3, rid="before")
    await client.update_weights(str(tmp_path), Version(0, 2))
    assert await client.served() == Version(0, 2)
    (after,) = await drawn(client, 3, rid="after")
    assert {span.version for span in after.spans} == {Version(0, 2)}
    assert pictures(after) != pictures(before)
    save_file(weights, tmp_path / WEIGHTS)
    await client.update_weights(str(tmp_path), Version(0, 3))
    (again,) = await drawn(client, 3, rid="again")
    assert pictures(again) == pictures(before)
    weights.pop("proj_out.weight")
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(EngineError, match=r"proj_out\.weight"):
        await client.update_weights(str(tmp_path), Version(0, 4))
    assert await client.served() == Version(0, 3)


async def test_an_engine_sleeps_and_generates_the_same_pictures_afterwards(client: EngineClient) -> None:
    (before,) = await drawn(client, 3, rid="before")
    version = await client.served()
    assert version is not None
    await client.sleep()
    assert await client.sleeps()
    await client.wake(version)
    (after,) = await drawn(client, 3, rid="after")
    assert pictures(after) == pictures(before)


@pytest.mark.parametrize(("changed", "message"), REFUSED)
async def test_requests_that_cannot_be_served_are_refused(
    client: EngineClient, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await drawn(client, 1, **changed)


async def test_the_description_has_the_scheduler_and_guidance_with_which_a_trainer_must_agree(
    client: EngineClient, folder: Path
) -> None:
    await check_description(client, "gcore diffusers engine", folder)
