"""Emulated engines as a controller uses them: over real sockets, registered in the store, several in one process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from blob_stores import StoreProcess, key_of
from emulated_hosts import EOS, hosting, make_vocabulary

from controllers.changes import ChangeSignal
from controllers.inference.continuation import FEWEST
from controllers.inference.pool import EnginePool
from gcore.engines.emulated.law import TimingModel
from gcore.errors import EngineError, EngineUnreachable
from gcore.media.pictures import inspect_picture
from gcore.rollout.api import DenoisingParams
from gcore.rollout.client import EngineClient, ProgressCallback, SamplingParams
from gcore.store import keys
from gcore.store.types import Delete
from gcore.testing.pipelines import write_pipeline
from gcore.testing.vision_models import IMAGE, VISION_END, VISION_START, make_picture, make_tiny_vision_model
from gcore.types import DenoisingTrajectory, Sample, Version

FAST = TimingModel(speedup=200.0)
SLOW = TimingModel(speedup=1.0, decode_s=60.0, load_s=0.0, publish_s=0.01)
"""A response of which nothing comes while the test looks."""
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without a model."""
    return make_vocabulary(tmp_path_factory.mktemp("model"))


async def until(client: EngineClient, *, running: int, waiting: int = 0) -> None:
    async with asyncio.timeout(20):
        while ((info := await client.info()).running, info.waiting) != (running, waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_each_engine_is_registered_as_a_worker_and_all_go_with_the_process(model: Path) -> None:
    async with hosting(model, FAST, engines=3) as scene:
        records = scene.records()
        assert [(r.slot, r.role, r.state, r.node) for _, r in sorted(records.items())] == [
            (f"emulated:{i}", "rollout", "serving", "node-0") for i in range(3)
        ]
        assert len({record.address for record in records.values()}) == 3
        assert [(await client.info()).version for client in scene.clients] == [Version(0, 0)] * 3
    assert scene.records() == {}


async def test_samples_are_functions_of_their_seeds_on_whichever_engine(model: Path) -> None:
    async with hosting(model, FAST, engines=2) as scene:
        one, other = scene.clients

        async def asked(client: EngineClient, seeds: tuple[int, ...], rid: str) -> tuple[Sample, ...]:
            return await client.generate((3, 4), PARAMS, seeds=seeds, rid=rid)

        first = await asked(one, (1, 2), "a")
        assert first == await asked(other, (1, 2), "b")
        assert first[0] != first[1]
        assert await asked(one, (2,), "c") == first[1:]
        for sample in first:
            assert 1 <= len(sample.token_ids) <= 16
            assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == EOS)
            assert sample.text == "".join(str(t - 2) for t in sample.token_ids if t != EOS)
            assert all(value <= 0 for value in sample.logprobs)
            assert [(s.version, s.start, s.end) for s in sample.spans] == [(Version(0, 0), 0, len(sample.token_ids))]


async def test_responses_come_with_blobs_of_random_bytes_in_the_store_of_the_node(model: Path, tmp_path: Path) -> None:
    store = StoreProcess("node-0", tmp_path / "blobs")
    access = {"blob_store": store.address, "blob_key": key_of("job")}
    law, params = FAST.model_copy(update={"response_blob_bytes": 5000}), replace(PARAMS, max_new_tokens=64)
    found = []
    try:
        async with hosting(model, law, **access) as scene:
            for growing in (None, ProgressCallback(1, lambda place, sample: None)):
                samples = await scene.clients[0].generate_each(
                    [(3, 4), (3, 4)], params, seeds=(1, 2), rid=str(growing is None), growing=growing
                )
                found.append([medium for sample in samples for medium in sample.media])
        async with hosting(model, FAST, **access) as scene:
            (plain,) = await scene.clients[0].generate((3, 4), PARAMS, seeds=(1,), rid="a")
            assert plain.media == ()
        first, second = found[0]
        assert found[1] == found[0], "the same request has the same blob"
        assert (first.kind, first.size, first.shape, first.dtype) == ("trajectory", 5000, (5000,), "uint8")
        assert first.sha256 != second.sha256
        data = store.path(first.sha256).read_bytes()
        assert hashlib.sha256(data).hexdigest() == first.sha256
        assert len(set(data)) == 256
        store.kill()
        async with hosting(model, law, **access) as scene:
            for growing in (None, ProgressCallback(1, lambda place, sample: None)):
                with pytest.raises(EngineError, match="the blob of a response cannot be stored"):
                    await scene.clients[0].generate_each([(3, 4)], PARAMS, seeds=(1,), rid="b", growing=growing)
    finally:
        store.kill()


async def test_pictures_come_with_arrays_of_the_sizes_of_real_ones(tmp_path: Path) -> None:
    store = StoreProcess("node-0", tmp_path / "blobs")
    pipeline = write_pipeline(tmp_path / "sd3")
    access = {"blob_store": store.address, "blob_key": key_of("job"), "guidance": 2.0, "height": 16, "width": 16}
    asked = DenoisingParams("a red square", 5, 16, 16, guidance=2.0, random_steps=(1, 2, 3), kept_steps=(1, 3))
    params = SamplingParams(1.0, 1, denoising=asked)
    try:
        async with hosting(pipeline, FAST, engines=2, **access) as scene:
            one, other = scene.clients
            first, second = await one.generate_each([(), ()], params, seeds=(1, 2), rid="a")
            assert (first, second) == await other.generate_each([(), ()], params, seeds=(1, 2), rid="a")
            output = first.output
            assert isinstance(output, DenoisingTrajectory)
            assert (output.steps, output.sigmas[0], output.sigmas[-1]) == ((1, 3), 1.0, 0.0)
            assert [(span.version, span.start, span.end) for span in output.spans] == [(Version(0, 0), 0, 2)]
            media = {medium.kind: medium for medium in output.media}
            assert media["trajectory"].shape == (4, 3, 16, 16)
            assert media["trajectory"].size == 4 * 4 * 3 * 16 * 16
            assert media["decoded"].shape == (16, 16, 3)
            facts = inspect_picture(store.path(media["decoded"].sha256))
            assert (facts.height, facts.width) == (16, 16)
            other_media = {medium.kind: medium for medium in second.media}
            assert media["embeds"] == other_media["embeds"], "pictures of one prompt share its embeddings"
            assert media["trajectory"].sha256 != other_media["trajectory"].sha256
            ode = replace(params, denoising=replace(asked, kind="ode", random_steps=None, kept_steps=None))
            (finished,) = await one.generate_each([()], ode, seeds=(3,), rid="b")
            assert (finished.output.steps, finished.media[0].shape) == ((), (1, 3, 16, 16))  # type: ignore[union-attr]
            with pytest.raises(EngineError, match="generates pictures"):
                await one.generate((3, 4), PARAMS, seeds=(1,), rid="c")
            wrong = replace(params, denoising=replace(asked, guidance=1.0))
            with pytest.raises(EngineError, match=r"guidance_scale is 1.0"):
                await one.generate_each([()], wrong, seeds=(4,), rid="d")
    finally:
        store.kill()


async def test_pictures_take_the_time_of_their_denoising_steps_and_begin_again_after_a_pause(tmp_path: Path) -> None:
    law = SLOW.model_copy(
        update={"denoise_s": 0.05, "denoise_per_token_s": 0.001, "picture_s": 0.2, "event_noise": 0.0}
    )
    law = law.model_copy(update={"replica_noise": 0.0})
    asked = DenoisingParams("a red square", 10, 16, 16)
    params = SamplingParams(1.0, 1, denoising=asked)
    async with hosting(write_pipeline(tmp_path / "sd3"), law) as scene:
        (client,) = scene.clients
        began = time.monotonic()
        with pytest.raises(EngineError, match="sha256"):  # without a store, arrays are in the answer
            await client.generate_each([(), ()], params, seeds=(1, 2), rid="a")
        # 10 steps of two pictures of 16 image tokens, and decoding of both.
        assert 1.1 <= time.monotonic() - began - 10 * 2 * 0.016 + 0.3 < 2.5
        running = asyncio.create_task(client.generate_each([()], params, seeds=(3,), rid="b"))
        await until(client, running=1)
        await client.pause("retract")
        await until(client, running=0, waiting=1)
        await client.resume()
        with pytest.raises(EngineError, match="sha256"):
            await running


SHORT = (VISION_START, IMAGE, VISION_END, 7)


async def test_a_prompt_gets_all_tokens_of_its_pictures_also_beyond_the_bounds_of_the_processor(
    tmp_path: Path,
) -> None:
    model = make_tiny_vision_model(tmp_path / "model")
    path = tmp_path / "picture"
    path.write_bytes(make_picture(32, 16 * 65, seed=1))  # the processor's own bounds would make it smaller
    body = {
        "input_ids": [SHORT],
        "image_data": [[str(path)]],
        "sampling_params": [{"max_new_tokens": 2}],
        "return_prompt_token_ids": True,
    }
    async with hosting(model, FAST) as scene, httpx.AsyncClient(base_url=scene.clients[0].base_url) as http:
        (answer,) = (await http.post("/generate", json=body)).json()
        assert answer["prompt_token_ids"] == [VISION_START, *[IMAGE] * 130, VISION_END, 7]
        for given, words in (
            ([], "1 placeholder"),
            ([str(path), str(path)], "2 pictures"),
            ([str(tmp_path / "none")], "none"),
            (["http://127.0.0.1/picture"], "only from paths"),
        ):
            refused = await http.post("/generate", json=body | {"image_data": [given]})
            assert refused.status_code == 400
            assert words in refused.text


async def test_an_engine_of_a_model_without_vision_takes_no_pictures(model: Path) -> None:
    body = {"input_ids": [3], "image_data": ["/picture"], "sampling_params": {"max_new_tokens": 2}}
    async with hosting(model, FAST) as scene, httpx.AsyncClient(base_url=scene.clients[0].base_url) as http:
        refused = await http.post("/generate", json=body)
        assert refused.status_code == 400
        assert "takes no pictures" in refused.text


async def test_the_clients_update_serves_the_new_version_and_an_older_one_is_refused(model: Path) -> None:
    async with hosting(model, FAST) as scene:
        (client,) = scene.clients
        await client.update_weights(str(model), Version(0, 3))
        assert (await client.info()).version == Version(0, 3)
        (sample,) = await client.generate((3,), PARAMS, seeds=(1,), rid="a")
        assert {span.version for span in sample.spans} == {Version(0, 3)}
        with pytest.raises(EngineError, match="older"):
            await client.update_weights(str(model), Version(0, 2))
        with pytest.raises(EngineError, match="not a model"):
            await client.update_weights(str(model / "nothing"), Version(0, 4))
        assert (await client.info()).version == Version(0, 3)
        await client.generate((3,), PARAMS, seeds=(1,), rid="b")  # it goes on after a refusal


async def test_running_requests_continue_under_new_weights_and_aborted_ones_return(model: Path) -> None:
    async with hosting(model, SLOW) as scene:
        (client,) = scene.clients
        asking = asyncio.create_task(client.generate((3,), PARAMS, seeds=tuple(range(6)), rid="slow"))
        await until(client, running=4, waiting=2)  # there are four rows
        await client.update_weights(str(model), Version(0, 1))
        assert (await client.info()).running == 4
        await client.abort("slow", 6)
        samples = await asking
        assert {sample.finish_reason for sample in samples} == {"abort"}


async def test_a_response_is_told_as_it_grows_and_its_whole_is_what_it_is_without_a_stream(model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=200, min_new_tokens=150)
    law = TimingModel(speedup=50.0, decode_s=0.1)
    async with hosting(model, law) as scene:
        (client,) = scene.clients
        told: list[tuple[int, Sample]] = []
        growing = ProgressCallback(30, lambda place, sample: told.append((place, sample)))
        prompts = [(3, 4), (5, 6)]
        made = await client.generate_each(prompts, params, seeds=(1, 2), rid="a", growing=growing)
        whole = await client.generate_each(prompts, params, seeds=(1, 2), rid="b")
        assert made == whole
        for place, sample in told:
            assert sample.token_ids == made[place].token_ids[: len(sample.token_ids)]
        assert [sum(place == one for place, _ in told) >= 4 for one in (0, 1)] == [True, True]


async def test_a_response_that_is_finished_is_told_before_the_others_of_its_request(model: Path) -> None:
    short, long = (SamplingParams(temperature=1.0, max_new_tokens=n, min_new_tokens=n) for n in (2, 100))
    async with hosting(model, TimingModel(speedup=50.0, decode_s=0.5)) as scene:
        (client,) = scene.clients
        first: list[int] = []
        growing = ProgressCallback(1000, lambda place, sample: first.append(place))
        await client.generate_each([(3,), (4,)], (long, short), seeds=(1, 2), rid="a", growing=growing)
        assert first == [1, 0]


async def test_streamed_tokens_survive_a_dead_engine_and_another_completes_the_sample(
    model: Path,
) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=8 * FEWEST)
    law = TimingModel(speedup=50.0, decode_s=0.4, response_tokens=300, response_spread=0.2)
    async with hosting(model, law, engines=2, longest=params.max_new_tokens) as scene:
        book = EnginePool(ChangeSignal(), timeout_s=20.0)
        await book.aim(scene.records())
        for name in ("e0", "e1"):
            await book.publish(name, Version(0, 0), model)
        (whole,) = await scene.clients[0].generate((3, 4), params, seeds=(1,), rid="whole")
        asking = asyncio.create_task(
            book.generate(Version(0, 0), [(3, 4)], params, (1,), "a", decode=lambda tokens: "x" * len(tokens))
        )
        await asyncio.sleep(1.0)
        busy = [name for name, client in zip(("e0", "e1"), scene.clients, strict=True) if (await client.info()).running]
        os.kill(scene.records()[busy[0]].pid, signal.SIGKILL)
        (sample,) = await asking
        assert len(sample.token_ids) == len(whole.token_ids)
        same = [a == b for a, b in zip(sample.token_ids, whole.token_ids, strict=True)]
        assert all(same[:FEWEST])
        assert not all(same)
        await book.close()


async def test_a_client_that_goes_away_leaves_nothing_running(model: Path) -> None:
    async with hosting(model, SLOW) as scene:
        (client,) = scene.clients
        asking = asyncio.create_task(client.generate((3,), PARAMS, seeds=(1,), rid="slow"))
        await until(client, running=1)
        asking.cancel()
        await until(client, running=0)


async def test_an_engine_sleeps_only_when_nothing_runs_and_requests_wait_until_it_wakes(model: Path) -> None:
    async with hosting(model, FAST) as scene, httpx.AsyncClient(base_url=scene.clients[0].base_url) as http:
        (client,) = scene.clients
        assert (await http.post("/release_memory_occupation", json={})).status_code == 200
        asking = asyncio.create_task(client.generate((3,), PARAMS, seeds=(1,), rid="a"))
        await until(client, running=0, waiting=1)
        assert not asking.done()
        assert (await http.post("/resume_memory_occupation", json={})).status_code == 200
        await asking
        assert (await http.post("/resume_memory_occupation", json={})).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", {"input_ids": [3], "sampling_params": {"stop": ["x"]}}, "stop string"),
        ("/generate", {"input_ids": [3], "return_logprob": True, "top_logprobs_num": 2}, "anything but the response"),
        ("/generate", {"input_ids": [99]}, "not in the vocabulary"),
        ("/generate", {"input_ids": [3], "sampling_params": {"no_such": 1}}, "no_such"),
        ("/generate", {}, "exactly one of"),
        ("/begin_weight_update", {}, "not supported by an emulated engine"),
        ("/v1/completions", {"prompt": "3"}, "not supported by an emulated engine"),
    ],
)
async def test_unsupported_requests_are_refused_with_a_reason(
    model: Path, path: str, body: dict[str, Any], words: str
) -> None:
    async with hosting(model, FAST) as scene, httpx.AsyncClient(base_url=scene.clients[0].base_url) as http:
        response = await http.post(path, json=body)
        assert response.status_code == 400
        assert words in response.text


async def test_it_says_that_it_is_emulated(model: Path) -> None:
    async with hosting(model, FAST) as scene:
        told = await scene.clients[0].scheduler_state()
        assert "computes nothing" in told["engine"]
        assert told["internal_states"][0]["num_running_reqs"] == 0


async def test_it_ends_when_its_node_has_no_controller_for_the_grace_period(model: Path) -> None:
    async with hosting(model, FAST, orphan_grace_s=0.0) as scene:
        scene.cluster.transact((), (Delete(keys.node("node-0")),))
        async with asyncio.timeout(20):
            await asyncio.shield(scene.running)
        with pytest.raises(EngineUnreachable):
            await scene.clients[0].info()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_one_engine_is_ended_or_killed_alone_with_what_it_had_under_way(
    model: Path, number: signal.Signals
) -> None:
    async with hosting(model, SLOW, engines=2) as scene:
        one, other = scene.clients
        asking = asyncio.create_task(one.generate((3,), PARAMS, seeds=(1,), rid="slow"))
        await until(one, running=1)
        os.kill(scene.records()["e0"].pid, number)
        with pytest.raises(EngineUnreachable):
            await asking
        assert (await scene.until(1)).keys() == {"e1"}
        assert await other.health()
        assert not await one.health()
