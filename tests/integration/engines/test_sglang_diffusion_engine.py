"""SGLang's diffusion server behind gcore's routes, through the controller's client and with a test as its supervisor.

The server is a stand-in that computes rollouts of a tiny pipeline as SGLang does (`fake_sglang_diffusion`). The tests of the
contract also run with the real one (make test-sglang), whose answers are compared with the stand-in's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import fake_sglang_diffusion
import httpx
import msgpack
import pytest
import torch
from blob_stores import StoreProcess, key_of
from engine_processes import require_python
from fake_sglang_diffusion import FakeRollouts
from picture_engine import GUIDANCE, REFUSED, WEIGHTS, check_blobs_and_replay, check_description, drawn, pictures
from safetensors.torch import load, load_file, save_file
from sglang_worker import LONG_S, Worker, check_ended, start_worker

from gcore.engines.environments import SGLANG_DIFFUSION
from gcore.engines.launch import SglangDiffusionLaunch
from gcore.engines.serving.denoising import DenoisingRequest
from gcore.engines.sglang.adapter import SglangServer, make_scratch
from gcore.engines.sglang.command import DiffusionPorts, diffusion_command, server_environment
from gcore.engines.sglang_diffusion.engine import DiffusionServer
from gcore.engines.sglang_diffusion.rollouts import rollout_body
from gcore.errors import EngineError, EngineUnreachable
from gcore.models.diffusion.pipeline import SampledPipeline
from gcore.rollout.client import EngineClient
from gcore.testing.pipelines import Family, write_pipeline
from gcore.types import DenoisingTrajectory, Version

pytestmark = pytest.mark.timeout(900)

PROGRAM = (sys.executable, "-m", "gcore.engines.sglang_diffusion")
SERVERS = ("stand-in", pytest.param("real", marks=pytest.mark.sglang))
Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline") / "qwen_image", "qwen_image")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    process = StoreProcess("n1", tmp_path_factory.mktemp("store"))
    yield process
    process.kill()


@pytest.fixture(scope="module")
def start(folder: Path, store: StoreProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    root = tmp_path_factory.mktemp("engines")
    stand_in = fake_sglang_diffusion.install(root / "env")
    started: list[Worker] = []

    def begin(server: str = "stand-in", **more: Any) -> Worker:
        python = stand_in if server == "stand-in" else require_python(SGLANG_DIFFUSION)
        document = {"kind": "sglang-diffusion", "python": str(python), "model": str(folder), "weight_version": "0.1"}
        document |= {"blob_store": store.address, "blob_key": key_of("job"), "job_uid": "job", "guidance": GUIDANCE}
        started.append(start_worker(document | more, root / f"log{len(started)}", PROGRAM))
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


@pytest.fixture(scope="module")
def addresses(start: Start) -> Callable[[str], str]:
    """The address of an engine with this server."""
    serving: dict[str, str] = {}

    def address(server: str) -> str:
        if server not in serving:
            worker = start(server)
            serving[server] = worker.hear("serving")["address"]
            # A worker blocks when its line is full.
            threading.Thread(target=worker.read_on, daemon=True).start()
        return serving[server]

    return address


@pytest.fixture(params=SERVERS)
async def client(request: pytest.FixtureRequest, addresses: Callable[[str], str]) -> AsyncIterator[EngineClient]:
    engine = EngineClient(f"http://{addresses(request.param)}", timeout_s=LONG_S)
    yield engine
    await engine.close()


@pytest.fixture
async def fake(addresses: Callable[[str], str]) -> AsyncIterator[EngineClient]:
    engine = EngineClient(f"http://{addresses('stand-in')}", timeout_s=LONG_S)
    yield engine
    await engine.close()


async def until_load(client: EngineClient, wanted: tuple[int, int]) -> None:
    """Wait until the engine has so many running and waiting pictures."""
    while await client.load() != wanted:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.01)


async def test_pictures_come_as_blobs_and_their_replay_has_the_same_log_probabilities(
    client: EngineClient, store: StoreProcess, folder: Path
) -> None:
    await check_blobs_and_replay(client, store, folder, (4, 8, 8))


async def test_a_picture_does_not_depend_on_the_pictures_beside_it(client: EngineClient) -> None:
    together = await drawn(client, 5, 6, 7)
    alone = [(await drawn(client, seed, rid=f"alone{seed}"))[0] for seed in (7, 5, 6)]
    assert pictures(*together) == pictures(alone[1], alone[2], alone[0])
    assert len(set(pictures(*together))) == 3


async def test_weights_of_a_folder_are_served_and_named(client: EngineClient, folder: Path, tmp_path: Path) -> None:
    version = await client.served()
    assert version is not None
    following = [Version(version.lineage, version.step + more) for more in range(1, 4)]
    weights = load_file(folder / "transformer" / WEIGHTS)
    save_file({key: 0.5 * value for key, value in weights.items()}, tmp_path / WEIGHTS)
    before = await drawn(client, 3, rid="before")
    await client.update_weights(str(tmp_path), following[0])
    assert await client.served() == following[0]
    after = await drawn(client, 3, rid="after")
    assert {span.version for span in after[0].spans} == {following[0]}
    assert pictures(*after) != pictures(*before)
    save_file(weights, tmp_path / WEIGHTS)
    await client.update_weights(str(tmp_path), following[1])
    assert pictures(*await drawn(client, 3, rid="again")) == pictures(*before)
    for changed, message in (
        ({"proj_out.weight": None}, r"lack proj_out\.weight"),
        ({"more.weight": torch.zeros(2)}, r"have more\.weight, which the network does not have"),
        ({"proj_out.weight": weights["proj_out.weight"][:2].clone()}, r"proj_out\.weight is F32 \[2, "),
    ):
        save_file({key: one for key, one in (weights | changed).items() if one is not None}, tmp_path / WEIGHTS)
        with pytest.raises(EngineError, match=message):
            await client.update_weights(str(tmp_path), following[2])
    assert await client.served() == following[1]
    assert pictures(*await drawn(client, 3, rid="still")) == pictures(*before)


async def test_checksums_are_those_of_the_weights_that_the_server_has(
    client: EngineClient, folder: Path, tmp_path: Path
) -> None:
    async def checksum() -> str:
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(
                f"{client.base_url}/get_weights_checksum", json={"module_names": ["transformer"]}, timeout=LONG_S
            )
            return str(answer.json()["transformer"])

    version = await client.served()
    assert version is not None
    before = await checksum()
    weights = load_file(folder / "transformer" / WEIGHTS)
    found = []
    for factor in (0.5, 1.0):
        save_file({key: factor * value for key, value in weights.items()}, tmp_path / WEIGHTS)
        version = Version(version.lineage, version.step + 1)
        await client.update_weights(str(tmp_path), version)
        found.append(await checksum())
    assert found[0] != before
    assert found[1] == before


async def test_an_engine_sleeps_and_generates_the_same_pictures_afterwards(client: EngineClient) -> None:
    before = await drawn(client, 3, rid="before")
    version = await client.served()
    assert version is not None
    await client.sleep()
    assert await client.sleeps()
    waiting = asyncio.create_task(drawn(client, 4, rid="waiting"))
    await client.wake(version)
    after = await drawn(client, 3, rid="after")
    assert pictures(*after) == pictures(*before)
    assert (await waiting)[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *REFUSED,
        ({"kind": "dance"}, "SGLang has no steps of the kind dance"),
        ({"noise_seeds": (2,)}, "one seed, but noise_seed differs"),
        ({"averaged": True}, "this engine has no average of the weights"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused(
    client: EngineClient, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await drawn(client, 1, **changed)


async def test_pictures_without_random_steps_have_no_log_probabilities(client: EngineClient) -> None:
    (sample,) = await drawn(client, 1, kind="ode")
    assert isinstance(sample.output, DenoisingTrajectory)
    assert (sample.output.logprobs, sample.length) == ((), 0)
    shapes = {medium.kind: medium.shape for medium in sample.media}
    assert shapes["trajectory"] == (1, 4, 8, 8)
    (evaluated,) = await drawn(client, 1, kind="ode", returns_states=False)
    assert [medium.kind for medium in evaluated.media] == ["decoded"]
    assert pictures(evaluated) == pictures(sample)


async def test_the_description_has_the_scheduler_and_guidance_with_which_a_trainer_must_agree(
    client: EngineClient, folder: Path
) -> None:
    await check_description(client, "SGLang's diffusion server behind gcore", folder)
    assert await client.load() == (0, 0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("bf16", "a picture failed: the states were rounded to bfloat16"),
        ("no-trajectory", "a picture failed: the answer has no dit_trajectory"),
        ("nan-states", "a picture failed: dit_trajectory.latents has numbers that are not finite"),
        ("not-msgpack", "a picture failed: the answer is not msgpack"),
        ("refused", r"SGLang refused /rollout/generate \(status 500\).*out of memory"),
    ],
)
async def test_an_answer_that_cannot_be_trained_fails_with_its_reason(
    fake: EngineClient, fault: str, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await drawn(fake, 1, text=f"a red square!{fault}")
    assert (await drawn(fake, 1, rid="next"))[0].finish_reason == "stop"


async def test_an_update_waits_for_pictures_that_are_denoised_and_each_has_the_version_of_its_weights(
    fake: EngineClient, folder: Path, tmp_path: Path
) -> None:
    text, seeds = "a red square!slow", (1, 2, 3, 4, 5)
    old = await fake.served()
    assert old is not None
    new = Version(old.lineage, old.step + 1)
    weights = load_file(folder / "transformer" / WEIGHTS)
    save_file({key: 0.5 * value for key, value in weights.items()}, tmp_path / WEIGHTS)
    expected = {old: pictures(*await drawn(fake, *seeds, rid="old", text=text))}
    running = asyncio.create_task(drawn(fake, *seeds, rid="running", text=text))
    await until_load(fake, (2, 3))
    await fake.update_weights(str(tmp_path), new)
    samples = await running
    expected[new] = pictures(*await drawn(fake, *seeds, rid="new", text=text))
    versions = [sample.spans[0].version for sample in samples]
    assert versions == sorted(versions)
    assert set(versions) == {old, new}
    assert pictures(*samples) == [expected[version][place] for place, version in enumerate(versions)]
    save_file(weights, tmp_path / WEIGHTS)
    await fake.update_weights(str(tmp_path), Version(new.lineage, new.step + 1))


async def test_weights_are_unknown_after_an_update_that_the_server_refuses_until_the_next_one(
    fake: EngineClient, folder: Path, tmp_path: Path
) -> None:
    before = await drawn(fake, 3)
    old = await fake.served()
    assert old is not None
    weights = load_file(folder / "transformer" / WEIGHTS)
    broken, good = tmp_path / "broken", tmp_path / "good"
    for path in (broken, good):
        path.mkdir()
        save_file(weights if path == good else {key: 0.5 * one for key, one in weights.items()}, path / WEIGHTS)
    (broken / "refused").touch()
    new = Version(old.lineage, old.step + 1)
    with pytest.raises(EngineError, match="rolled back"):
        await fake.update_weights(str(broken), new)
    assert await fake.served() is None
    with pytest.raises(EngineError, match="the weights are unknown after an update that failed"):
        await drawn(fake, 3)
    await fake.call_weights(new)  # a name does not tell what they are
    with pytest.raises(EngineError, match="the weights are unknown"):
        await drawn(fake, 3)
    await fake.update_weights(str(good), new)
    assert pictures(*await drawn(fake, 3)) == pictures(*before)


async def test_aborted_pictures_return_at_once_and_the_next_ones_are_drawn(fake: EngineClient) -> None:
    running = asyncio.create_task(drawn(fake, 1, 2, 3, 4, rid="many", text="a red square!slow"))
    await until_load(fake, (2, 2))
    await fake.abort("many", 4)
    samples = await running
    assert [(sample.finish_reason, sample.media) for sample in samples] == [("abort", ())] * 4
    assert (await drawn(fake, 1))[0].finish_reason == "stop"


async def test_pictures_of_a_client_that_has_left_are_not_drawn(fake: EngineClient) -> None:
    leaving = EngineClient(fake.base_url, timeout_s=LONG_S)
    running = asyncio.create_task(drawn(leaving, *range(20), rid="leaving", text="a red square!slow"))
    await until_load(fake, (2, 18))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(5.0):  # 20 pictures take 10 s
        await until_load(fake, (0, 0))
    await leaving.close()


async def test_a_server_that_has_lost_its_scheduler_sends_clients_to_other_engines(fake: EngineClient) -> None:
    with pytest.raises(EngineUnreachable, match="Scheduler worker exited"):
        await drawn(fake, 1, text="a red square!ended")


async def test_a_worker_reports_progress_and_why_its_server_died_and_leaves_nothing_behind(
    start: Start, tmp_path: Path
) -> None:
    worker = start(engine_args=["--fake-pid", str(tmp_path / "pid")])
    worker.hear("progress", phase="loading")
    client = EngineClient(f"http://{worker.hear('serving')['address']}", timeout_s=LONG_S)
    processes = worker.below()
    assert int((tmp_path / "pid").read_text()) in [process.pid for process in processes]
    await drawn(client, 1, text="a red square!slow")
    first = worker.hear("progress", phase="generate")
    assert worker.hear("progress", phase="waiting")["progress"] == first["progress"] + 1
    with pytest.raises(EngineUnreachable):
        await drawn(client, 1, text="a red square!die")
    reason = worker.hear("failed")["reason"]
    assert "SGLang's server ended: ended by itself with exit code 3" in reason
    assert "the scheduler ran out of memory" in reason
    await asyncio.to_thread(worker.process.wait, LONG_S)
    check_ended(processes)
    await client.close()


@pytest.mark.large  # a worker of its own, and the end is that of SGLang's worker for texts
def test_a_worker_that_is_killed_leaves_nothing_behind(start: Start) -> None:
    worker = start()
    worker.hear("serving")
    processes = worker.below()
    os.kill(worker.process.pid, signal.SIGKILL)
    check_ended(processes)


@pytest.mark.large  # a worker of its own, and the end is that of SGLang's worker for texts
def test_a_worker_that_is_stopped_ends_with_its_server(start: Start) -> None:
    worker = start()
    worker.hear("serving")
    processes = worker.below()
    worker.say("stop")
    assert worker.process.wait(LONG_S) == 0
    check_ended(processes)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "bfloat16"}, "SGLang rounds states to the network's type, bfloat16"),
        ({"python": "/nowhere/bin/python"}, "are not installed in /nowhere/bin/python"),
        ({"engine_args": ["--host", "0.0.0.0"]}, "--host is set by gcore"),
    ],
)
def test_an_engine_that_cannot_serve_says_so_before_its_server_starts(
    start: Start, changed: dict[str, Any], message: str
) -> None:
    worker = start(**changed)
    assert message in worker.hear("failed")["reason"]
    assert worker.process.wait(LONG_S) != 0


def decoded(value: Any) -> Any:
    """The tensors of SGLang's answer, at any depth."""
    if isinstance(value, dict):
        if value.get("__tensor__"):
            return load(value["data"])["t"]
        return {name: decoded(one) for name, one in value.items()}
    return [decoded(one) for one in value] if isinstance(value, list) else value


def with_flow_shifts(folder: Path) -> Path:
    """Give a pipeline the scheduler's settings of the real Qwen-Image, which shift levels by the size of pictures."""
    file = folder / "scheduler" / "scheduler_config.json"
    own = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256}
    own |= {"max_image_seq_len": 8192, "shift_terminal": 0.02, "time_shift_type": "exponential"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    return folder


@pytest.mark.sglang
@pytest.mark.parametrize(("family", "side"), [("qwen_image", 16), ("sd3", 32), ("flux", 16)])
async def test_the_real_server_answers_as_the_stand_in_does(family: Family, side: int, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / family, family, whole=True)
    if family == "qwen_image":
        with_flow_shifts(folder)
    pipeline = SampledPipeline.read(folder, guidance=GUIDANCE)
    launch = SglangDiffusionLaunch(model=str(folder), python=str(require_python(SGLANG_DIFFUSION)), guidance=GUIDANCE)
    ports, scratch, stand_in = DiffusionPorts.free(), make_scratch(), FakeRollouts(folder, GUIDANCE)
    command = diffusion_command(launch, pipeline.files.kind, ports)
    server = SglangServer(command, server_environment(launch, os.environ, scratch), scratch, sys.stderr.buffer)
    routes = DiffusionServer(f"http://127.0.0.1:{ports.http}")
    try:
        while not await routes.healthy():
            assert not await asyncio.to_thread(server.wait, 0.2), server.death()
        server.check_port(ports.http)
        shape = pipeline.files.state_shape(side, side)
        levels = pipeline.levels(4, shape)
        for kind, steps, constants in (("sde", (0, 2), True), ("cps", (1,), False), ("ode", (), True)):
            request = DenoisingRequest(
                number=0,
                rid="r",
                prompt=(),
                text="a red square",
                negative="a blue circle",
                shape=shape,
                levels=levels,
                kind=kind,  # type: ignore[arg-type]
                noise_level=0.7,
                steps=steps,
                noise_seed=5,
                seed=5,
                constants=constants,
            )
            body = rollout_body(request, pipeline, "cpu")
            (found,), (expected,) = decoded(msgpack.unpackb(await routes.rollout(body))), stand_in.answer(body)
            compare(found, expected, "")
    finally:
        await routes.close()
        await asyncio.to_thread(server.stop)


def compare(found: Any, expected: Any, place: str) -> None:
    """The real answer has each part of the stand-in's: types, shapes and numbers. It may have more parts."""
    if isinstance(expected, dict):
        for name, one in expected.items():
            if name not in ("request_id", "inference_time_s", "freqs_complex"):
                compare(found[name], one, f"{place}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, one in enumerate(expected):
            compare(found[number], one, f"{place}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        tolerance = 1.01 / 255 if place.endswith("generated_output") else 2e-5
        assert torch.allclose(found, expected, rtol=1e-5, atol=tolerance), place
    else:
        assert found == expected, place
