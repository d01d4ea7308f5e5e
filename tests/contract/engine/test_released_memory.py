"""Engines with released memory, as the scheduler relies on them: the torch engine and the emulated engine.

A test knows that a request runs from the engine's gauges or from the request's first tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from emulated_hosts import hosting
from engine_contract import CONTEXT, SLOTS, begin, generate, post, prompt, reason, spans
from engine_processes import engine_process

from gcore.engines.emulated.law import TimingModel
from gcore.rollout.client import EngineClient
from gcore.testing.models import make_tiny_model

ALL = ["kv_cache", "weights"]
LONG = {"max_new_tokens": 3000, "ignore_eos": True}
LAW = TimingModel(speedup=20.0, decode_s=0.1, load_s=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sleepers")
    made = [make_tiny_model(root / name, seed=i, context=CONTEXT, ends=False) for i, name in enumerate(("one", "two"))]
    return made[0], made[1]


@pytest.fixture(scope="module")
def torch_engine(folders: tuple[Path, Path]) -> Iterator[str]:
    with engine_process(folders[0], batch_slots=SLOTS) as url:
        yield url


@pytest.fixture(params=["torch", "emulated"])
async def http(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncExitStack() as stack:
        if request.param == "torch":
            url = request.getfixturevalue("torch_engine")
        else:
            url = (await stack.enter_async_context(hosting(folders[0], LAW))).clients[0].base_url
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120, trust_env=False))
        yield http
        await post(http, "/abort_request", abort_all=True)
        if asleep := await released(http):
            await post(http, "/resume_memory_occupation", tags=asleep)
        for name in ("restored", "0.0"):  # versions only ever rise, but for names that are none
            await post(http, "/update_weights_from_disk", model_path=str(folders[0]), weight_version=name)


async def until(http: httpx.AsyncClient, *, running: int, waiting: int = 0) -> None:
    """Until the gauges say so."""
    client = EngineClient(str(http.base_url), timeout_s=60)
    try:
        async with asyncio.timeout(60):
            while ((info := await client.info()).running, info.waiting) != (running, waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await client.close()


async def released(http: httpx.AsyncClient) -> list[str]:
    (state,) = (await http.get("/server_info")).json()["internal_states"]
    return sorted(state["released"])


async def test_requests_to_a_sleeping_engine_wait_until_all_of_it_is_awake(http: httpx.AsyncClient) -> None:
    assert await post(http, "/release_memory_occupation", tags=ALL) is None
    assert await released(http) == ALL
    waiting = asyncio.create_task(generate(http, input_ids=[5, 6], sampling_params={"max_new_tokens": 3}))
    await asyncio.sleep(0.3)
    assert await post(http, "/resume_memory_occupation", tags=["weights"]) is None
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert await post(http, "/resume_memory_occupation", tags=["kv_cache"]) is None
    assert len((await waiting)["output_ids"]) == 3
    assert await released(http) == []


async def test_memory_is_not_taken_from_what_runs_and_is_once_that_was_aborted_with_its_tokens(
    http: httpx.AsyncClient,
) -> None:
    running = await begin(http, input_ids=prompt(1, 8), sampling_params=LONG)
    assert (await http.post("/release_memory_occupation", json={"tags": ALL})).status_code == 400
    assert await released(http) == []
    await post(http, "/pause_generation", mode="abort")
    partial = await running.last()
    assert reason(partial)["type"] == "abort"
    assert 0 < len(partial["output_ids"]) < LONG["max_new_tokens"]
    await post(http, "/release_memory_occupation", tags=ALL)
    # What goes on behind its tokens may wait there; it is made when the engine is awake and goes on.
    rest = asyncio.create_task(
        generate(http, input_ids=prompt(1, 8) + partial["output_ids"], sampling_params={"max_new_tokens": 4})
    )
    await post(http, "/resume_memory_occupation", tags=ALL)
    await asyncio.sleep(0.2)
    assert not rest.done()
    await post(http, "/continue_generation")
    assert len((await rest)["output_ids"]) == 4


async def test_an_engine_serves_what_it_served_before_it_slept_until_it_is_brought_something_newer(
    http: httpx.AsyncClient, folders: tuple[Path, Path]
) -> None:
    newer = {"model_path": str(folders[1]), "weight_version": "0.4"}
    await post(http, "/release_memory_occupation", tags=ALL)
    refused = await http.post("/update_weights_from_disk", json=newer)
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert "released" in refused.json()["message"]
    await post(http, "/resume_memory_occupation", tags=ALL)
    asked = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    assert spans(await generate(http, **asked)) == [("0.0", 0, 2)]
    assert (await post(http, "/update_weights_from_disk", **newer))["success"] is True
    assert spans(await generate(http, **asked)) == [("0.4", 0, 2)]


async def test_requests_aborted_for_a_release_keep_their_streamed_tokens(http: httpx.AsyncClient) -> None:
    growing = await begin(http, interval=20, input_ids=prompt(2, 8), sampling_params=LONG)
    await growing.until(60)
    await post(http, "/pause_generation", mode="abort")
    await post(http, "/release_memory_occupation", tags=ALL)
    last = await growing.last()
    assert reason(last)["type"] == "abort"
    assert len(last["output_ids"]) >= 60
    await post(http, "/continue_generation")


async def test_requests_waiting_at_a_sleeping_engine_can_be_aborted(http: httpx.AsyncClient) -> None:
    await post(http, "/release_memory_occupation", tags=ALL)
    waiting = asyncio.create_task(generate(http, input_ids=[5, 6], rid="gone", sampling_params=LONG))
    await until(http, running=0, waiting=1)
    await post(http, "/abort_request", rid="gone")
    answer = await waiting
    assert (reason(answer)["type"], answer["output_ids"]) == ("abort", [])
    assert await released(http) == ALL
