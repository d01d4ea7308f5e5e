"""Aborts, pauses, weight updates from a folder, memory release and status reports, against each available engine.

Requests that must be running during an operation are streams whose first token has arrived.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_contract import (
    ENDLESS,
    FIRST,
    FRONT_END,
    HELD,
    OF_VLLM,
    SLEEPERS,
    SLOTS,
    Serving,
    begin,
    error_of,
    generate,
    mixed_error,
    post,
    prompt,
    reason,
    span_error,
    spans,
    until_generating,
)
from engine_processes import engine_process

from gcore.errors import EngineError
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.testing.models import make_tiny_model
from gcore.types import Version

SECOND = "0.1"


def is_partial(answer: dict[str, Any]) -> bool:
    """Aborted, with the tokens it had, each with its log-probability and version."""
    count, meta = len(answer["output_ids"]), answer["meta_info"]
    assert reason(answer)["message"]
    assert meta["completion_tokens"] == len(meta.get("output_token_logprobs", answer["output_ids"])) == count
    assert spans(answer)[-1][2] == count
    return reason(answer)["type"] == "abort" and 0 < count < ENDLESS["max_new_tokens"]


async def test_an_abort_by_name_ends_only_what_it_names_with_its_tokens_so_far(http: httpx.AsyncClient) -> None:
    first = await begin(http, input_ids=[5, 6], rid="first", sampling_params=ENDLESS, return_logprob=True)
    second = await begin(http, input_ids=[5, 6], rid="second", sampling_params=ENDLESS, return_logprob=True)
    await post(http, "/abort_request", rid="nobody")
    await post(http, "/abort_request", rid="")
    await post(http, "/abort_request", rid="first")
    assert is_partial(await first.last())
    had = len(second.parts[-1]["output_ids"])
    await second.until(had + 20)
    assert not second.task.done()
    await post(http, "/abort_request", abort_all=True)
    assert is_partial(await second.last())


async def test_the_samples_of_a_batch_are_aborted_by_their_own_names(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    running = asyncio.create_task(
        generate(http, input_ids=[[5], [6]], rid="b", sampling_params=ENDLESS, return_logprob=True)
    )
    beside = await begin(http, input_ids=[5], sampling_params=ENDLESS)
    await until_generating(client, beside, running=3)
    await post(http, "/abort_request", rid="b_0")
    await until_generating(client, beside, running=2)
    assert not running.done()
    await post(http, "/abort_request", rid="b_1")
    assert all(is_partial(answer) for answer in await running)
    assert not beside.task.done()


@FRONT_END  # SGLang aborts nothing by a batch's name, and by "a" also what is called "ab"
async def test_a_batch_is_aborted_by_its_name_and_nothing_by_the_beginning_of_its_own(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    longer = await begin(http, input_ids=[5], rid="nam", sampling_params=ENDLESS)
    running = asyncio.create_task(generate(http, input_ids=[[5], [6]], rid="name", sampling_params=ENDLESS))
    several = asyncio.create_task(generate(http, input_ids=[5], rid="n", sampling_params={**ENDLESS, "n": 2}))
    await until_generating(client, longer, running=5)
    for name in ("na", "name", "n"):
        await post(http, "/abort_request", rid=name)
    for answer in [*await running, *await several]:
        assert reason(answer)["type"] == "abort"
    assert not longer.task.done()


@FRONT_END
async def test_abort_ends_waiting_samples_too_and_reports_their_version(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=10_000)
    beside = await begin(http, input_ids=[5], sampling_params=ENDLESS)
    running = asyncio.create_task(client.generate(prompt(1, 5), sampling, seeds=range(40), rid="gone"))
    await until_generating(client, beside, running=SLOTS)
    await client.abort("gone", 40)
    samples = await running
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert all(len(s.token_ids) == len(s.logprobs) < 10_000 for s in samples)
    assert SLOTS - 1 <= sum(bool(sample.token_ids) for sample in samples) < 40
    assert all(sample.oldest == Version(0, 0) for sample in samples)


async def test_a_client_that_goes_away_leaves_nothing_running(serving: Serving, http: httpx.AsyncClient) -> None:
    timeout = httpx.Timeout(60, read=1.0)
    async with httpx.AsyncClient(base_url=serving.url, timeout=timeout, trust_env=False) as leaving:
        with pytest.raises(httpx.ReadTimeout):
            await generate(leaving, input_ids=[[5, 6]] * 20, sampling_params=ENDLESS)
    # What would run for minutes is gone: an idle engine's cache can be flushed.
    assert (await http.post("/flush_cache?timeout=60")).status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_stops_tokens_and_continuing_goes_on_as_if_nothing_was(
    http: httpx.AsyncClient, serving: Serving, mode: str
) -> None:
    ids = prompt(6, 8)
    running = await begin(http, input_ids=ids, sampling_params=ENDLESS, return_logprob=True)
    await post(http, "/pause_generation", mode=mode)
    later = asyncio.create_task(generate(http, input_ids=[5], sampling_params={"max_new_tokens": 2}))
    # In place the cache is still theirs; retracted, they wait without one.
    flushed = await http.post("/flush_cache")
    assert flushed.status_code == (400 if mode == "in_place" else 200)
    had = len(running.parts)
    await asyncio.sleep(0.3)
    assert len(running.parts) <= had + 1
    assert not later.done()
    assert not running.task.done()
    await post(http, "/pause_generation", mode=mode)
    paused_at = len(running.parts[-1]["output_ids"])
    await post(http, "/continue_generation")
    await running.until(paused_at + 100)
    await post(http, "/abort_request", abort_all=True)
    answer = await running.last()
    assert is_partial(answer)
    assert spans(answer) == [(FIRST, 0, len(answer["output_ids"]))]
    assert answer["meta_info"]["num_retractions"] == (0 if mode == "in_place" else 1)
    assert error_of(serving.weights[0], ids, answer) < 1e-4
    await asyncio.gather(later, return_exceptions=True)


async def test_a_pause_with_abort_ends_what_runs_and_new_requests_wait(http: httpx.AsyncClient) -> None:
    running = await begin(http, input_ids=[5, 6], sampling_params=ENDLESS)
    await post(http, "/pause_generation")
    assert is_partial(await running.last())
    later = asyncio.create_task(generate(http, input_ids=[5], sampling_params={"max_new_tokens": 2}))
    await asyncio.sleep(0.3)
    assert not later.done()
    await post(http, "/continue_generation")
    assert reason(await later)["type"] in ("length", "stop")


async def test_requests_aborted_during_a_pause_have_ended_after_it(http: httpx.AsyncClient) -> None:
    for mode in ("in_place", "retract"):
        running = await begin(http, input_ids=[5, 6], rid=mode, sampling_params=ENDLESS)
        await post(http, "/pause_generation", mode=mode)
        await post(http, "/abort_request", rid=mode)
        await post(http, "/continue_generation")
        assert is_partial(await running.last())


async def test_a_change_of_weights_waits_for_what_runs_and_what_comes_meanwhile_has_the_new_ones(
    changing: httpx.AsyncClient, serving: Serving
) -> None:
    http, ids = changing, prompt(8, 6)
    before = await begin(http, input_ids=ids, sampling_params=ENDLESS, return_logprob=True)
    body = {"model_path": str(serving.weights[1]), "weight_version": SECOND}
    change = asyncio.create_task(post(http, "/update_weights_from_disk", **body))
    await before.until(len(before.parts[-1]["output_ids"]) + 100)
    after = asyncio.create_task(
        generate(http, input_ids=ids, rid="after", sampling_params={"max_new_tokens": 20}, return_logprob=True)
    )
    await before.until(len(before.parts[-1]["output_ids"]) + 100)
    assert not change.done()
    await post(http, "/abort_request", abort_all=True)
    old = await before.last()
    assert (await change)["success"] is True
    assert [version for version, _, _ in spans(old)] == [FIRST]
    assert error_of(serving.weights[0], ids, old) < 1e-4
    new = await after
    assert spans(new)[-1] == (SECOND, 0, 20)
    assert error_of(serving.weights[1], ids, new) < serving.tolerance
    info = (await http.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == (SECOND, str(serving.weights[1]))


@pytest.mark.parametrize(
    ("mode", "flush"), [("in_place", False), ("retract", True), ("retract", False)], ids=["in place", "flushed", "kept"]
)
async def test_a_change_of_weights_under_a_pause_is_told_in_spans(
    changing: httpx.AsyncClient, serving: Serving, mode: str, flush: bool
) -> None:
    http = changing
    prompts = [prompt(8, 3 + n) for n in range(4)]
    running = [await begin(http, input_ids=ids, sampling_params=ENDLESS, return_logprob=True) for ids in prompts]
    await running[-1].until(50)
    await post(http, "/pause_generation", mode=mode)
    await post(
        http,
        "/update_weights_from_disk",
        model_path=str(serving.weights[1]),
        weight_version=SECOND,
        flush_cache=flush,
    )
    assert (await http.get("/model_info")).json()["weight_version"] == SECOND
    paused_at = max(len(streaming.parts[-1]["output_ids"]) for streaming in running)
    await post(http, "/continue_generation")
    for streaming in running:
        await streaming.until(paused_at + 100)
    await post(http, "/abort_request", abort_all=True)
    for ids, streaming in zip(prompts, running, strict=True):
        answer = await streaming.last()
        (old, start, middle), (new, again, end) = spans(answer)
        assert (old, start, new, end) == (FIRST, 0, SECOND, len(answer["output_ids"]))
        assert 0 < middle == again < end
        assert answer["meta_info"]["weight_version"] == SECOND
        assert span_error(serving.weights[0], ids, answer, 0, middle) < 1e-4
        if mode == "retract":
            # The keys and values are made anew by the new weights, so the rest is as if they had always been served.
            assert span_error(serving.weights[1], ids, answer, middle, end) < 1e-4
        else:
            assert mixed_error(serving.weights, ids, answer, middle) < 1e-4


async def test_a_cache_that_running_requests_hold_is_not_flushed_by_a_change_of_weights(
    changing: httpx.AsyncClient, serving: Serving
) -> None:
    running = await begin(changing, input_ids=[5, 6], sampling_params=ENDLESS)
    await post(changing, "/pause_generation", mode="in_place")
    body = {"model_path": str(serving.weights[1]), "weight_version": SECOND}
    response = await changing.post("/update_weights_from_disk", json=body)
    assert response.status_code == 400
    assert response.json()["success"] is False
    await post(changing, "/continue_generation")
    await post(changing, "/abort_request", abort_all=True)
    answer = await running.last()
    # SGLang has changed the weights all the same, and says so; the torch engine refuses before anything has changed.
    assert [version for version, _, _ in spans(answer)] == ([FIRST, SECOND] if serving.is_sglang else [FIRST])


@FRONT_END  # SGLang looks whether the aborted ones are gone before they are, and answers 400 with the weights changed
async def test_a_change_of_weights_may_abort_what_runs(changing: httpx.AsyncClient, serving: Serving) -> None:
    running = await begin(changing, input_ids=[5, 6], sampling_params=ENDLESS)
    body = {"model_path": str(serving.weights[1]), "weight_version": SECOND, "abort_all_requests": True}
    assert (await post(changing, "/update_weights_from_disk", **body))["success"] is True
    assert is_partial(await running.last())


async def test_the_clients_update_under_load_is_told_in_spans(
    changing: httpx.AsyncClient, client: EngineClient, serving: Serving
) -> None:
    ids, sampling = prompt(8, 10), SamplingParams(temperature=1.0, max_new_tokens=10_000)
    running = asyncio.create_task(client.generate(ids, sampling, seeds=range(4), rid="load"))
    beside = await begin(changing, input_ids=ids, sampling_params=ENDLESS)
    await until_generating(client, beside, running=5)
    await client.update_weights(str(serving.weights[1]), Version(0, 1))
    assert (await client.info()).version == Version(0, 1)
    await beside.until(len(beside.parts[-1]["output_ids"]) + 100)
    await client.abort_all()
    for sample in await running:
        assert [span.version for span in sample.spans] == [Version(0, 0), Version(0, 1)]
        assert [span.start for span in sample.spans] == [0, sample.spans[0].end]
        assert sample.spans[-1].end == len(sample.token_ids)
    await beside.ended()


async def test_weights_that_are_not_there_are_refused_and_the_old_ones_stay(
    http: httpx.AsyncClient, serving: Serving, tmp_path: Path
) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        body = {"model_path": str(folder), "weight_version": "9.9"}
        response = await http.post("/update_weights_from_disk", json=body)
        assert response.status_code == 400
        assert response.json()["success"] is False
    info = (await http.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == (FIRST, str(serving.weights[0]))
    answer = await generate(http, input_ids=[5, 6], sampling_params={"max_new_tokens": 10}, return_logprob=True)
    assert error_of(serving.weights[0], [5, 6], answer) < serving.tolerance


# SGLang's way back after weights that it could not load reads the same weights again; its scheduler dies of that.
@FRONT_END
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    client: EngineClient, http: httpx.AsyncClient, serving: Serving, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", hidden=16)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"no weights")
    for folder in (broken, other):
        with pytest.raises(EngineError):
            await client.update_weights(str(folder), Version(0, 1))
    assert (await client.info()).version == Version(0, 0)
    answer = await generate(http, input_ids=[5, 6], sampling_params={"max_new_tokens": 10}, return_logprob=True)
    assert error_of(serving.weights[0], [5, 6], answer) < 1e-5


@FRONT_END  # SGLang takes any version
async def test_an_older_version_is_refused_and_changes_nothing(
    changing: httpx.AsyncClient, client: EngineClient, serving: Serving
) -> None:
    await client.update_weights(str(serving.weights[1]), Version(1, 4))
    with pytest.raises(EngineError, match=r"0\.9 is older than the served version 1\.4"):
        await client.update_weights(str(serving.weights[0]), Version(0, 9))
    assert (await changing.post("/update_weight_version", json={"new_version": "0.6"})).status_code == 400
    assert (await client.info()).version == Version(1, 4)
    answer = await generate(changing, input_ids=[5], sampling_params={"max_new_tokens": 10}, return_logprob=True)
    assert spans(answer)[0][0] == "1.4"
    assert error_of(serving.weights[1], [5], answer) < 1e-5


async def test_weights_can_be_called_otherwise_while_requests_run(changing: httpx.AsyncClient) -> None:
    running = await begin(changing, input_ids=[5, 6], sampling_params=ENDLESS)
    await running.until(20)
    told = await post(changing, "/update_weight_version", new_version="0.7", abort_all_requests=False)
    assert told["success"] is True
    assert told["new_version"] == "0.7"
    await running.until(len(running.parts[-1]["output_ids"]) + 100)
    await post(changing, "/abort_request", abort_all=True)
    assert [version for version, _, _ in spans(await running.last())] == [FIRST, "0.7"]
    assert (await changing.get("/model_info")).json()["weight_version"] == "0.7"
    running = await begin(changing, input_ids=[5, 6], sampling_params=ENDLESS)
    await post(changing, "/update_weight_version", new_version="0.8")
    assert is_partial(await running.last())


@SLEEPERS
async def test_memory_is_released_and_resumed(http: httpx.AsyncClient, serving: Serving) -> None:
    assert await post(http, "/release_memory_occupation", tags=["kv_cache", "weights"]) is None
    waiting = asyncio.create_task(
        generate(http, input_ids=[5, 6], sampling_params={"max_new_tokens": 3}, return_logprob=True)
    )
    await asyncio.sleep(0.3)
    # On a CPU SGLang has nothing to release, and goes on; the torch engine's requests wait.
    assert waiting.done() == serving.is_sglang
    assert await post(http, "/resume_memory_occupation", tags=["weights"]) is None
    await asyncio.sleep(0.1)
    assert waiting.done() == serving.is_sglang
    assert await post(http, "/resume_memory_occupation", tags=["kv_cache"]) is None
    assert error_of(serving.weights[0], [5, 6], await waiting) < serving.tolerance


@HELD
async def test_released_weights_are_not_shown_as_if_they_were_empty(http: httpx.AsyncClient) -> None:
    await post(http, "/release_memory_occupation", tags=["weights"])
    response = await http.post("/get_weights_by_name", json={"name": "model.norm.weight"})
    await post(http, "/resume_memory_occupation", tags=["weights"])
    assert response.status_code == 400
    assert "weights are released" in response.json()["error"]["message"]


@FRONT_END  # SGLang's scheduler dies of the first two, and takes the third for granted
async def test_memory_is_not_taken_from_what_runs(http: httpx.AsyncClient) -> None:
    await post(http, "/resume_memory_occupation")
    running = await begin(http, input_ids=[5, 6], sampling_params=ENDLESS)
    for tags in (None, ["nonsense"]):
        assert (await http.post("/release_memory_occupation", json={"tags": tags})).status_code == 400
    await post(http, "/abort_request", abort_all=True)
    assert is_partial(await running.last())


async def test_the_cache_is_flushed_when_nothing_runs_or_after_a_while(http: httpx.AsyncClient) -> None:
    assert (await http.get("/flush_cache")).status_code == 200
    running = await begin(http, input_ids=[5, 6], sampling_params=ENDLESS)
    refused = await http.post("/flush_cache")
    assert refused.status_code == 400
    assert "lush cache failed" in refused.text
    late = await http.post("/flush_cache?timeout=0.2")
    assert late.status_code == 400
    assert late.text.startswith("Timed out waiting for idle state.")
    waiting = asyncio.create_task(http.post("/flush_cache?timeout=60"))
    await running.until(len(running.parts[-1]["output_ids"]) + 20)
    assert not waiting.done()
    await post(http, "/abort_request", abort_all=True)
    assert (await waiting).status_code == 200
    assert is_partial(await running.last())


async def test_it_tells_how_it_is(http: httpx.AsyncClient, client: EngineClient, serving: Serving) -> None:
    assert await client.health()
    for path in ("/health", "/health_generate", "/ready"):
        assert (await http.get(path)).status_code == 200
    for path in ("/model_info", "/get_model_info"):
        info = (await http.get(path)).json()
        assert info["model_path"] == info["served_model_name"] == info["tokenizer_path"] == str(serving.weights[0])
        assert info["weight_version"] == FIRST
        assert (info["is_generation"], info["model_type"]) == (True, "qwen3")
        assert info["architectures"] == ["Qwen3ForCausalLM"]
    for path in ("/server_info", "/get_server_info"):
        state = (await http.get(path)).json()
        assert state["model_path"] == str(serving.weights[0])
        assert len(state["internal_states"]) == 1
    metrics = (await http.get("/metrics")).text
    for name in ("num_running_reqs", "num_queue_reqs", "generation_tokens_total", "prompt_tokens_total"):
        assert f"\nsglang:{name}" in metrics
    info = await client.info()
    assert (info.running, info.waiting) == (0, 0)


@pytest.mark.parametrize("serving", [OF_VLLM], indirect=True)
async def test_vllm_refuses_on_a_cpu_what_it_declares_absent_and_continues_to_serve(http: httpx.AsyncClient) -> None:
    released = await http.post("/release_memory_occupation", json={"tags": ["weights"]})
    shown = await http.post("/get_weights_by_name", json={"name": "model.embed_tokens.weight"})
    assert "vLLM cannot release its memory on a CPU" in released.json()["error"]["message"]
    assert "this engine does not show its weights" in shown.json()["error"]["message"]
    assert (released.status_code, shown.status_code) == (400, 400)
    answer = await generate(http, input_ids=[5], sampling_params={"max_new_tokens": 2})
    assert len(answer["output_ids"]) == 2


@HELD  # SGLang has it for some architectures only, and not for this one
async def test_a_tensor_is_shown_by_name(http: httpx.AsyncClient) -> None:
    body = {"name": "model.embed_tokens.weight", "truncate_size": 2}
    rows = await post(http, "/get_weights_by_name", **body)
    assert [len(row) for row in rows] == [32, 32]
    assert (await http.request("GET", "/get_weights_by_name", json=body)).json() == rows
    assert await post(http, "/get_weights_by_name", name="model.norm.weight", truncate_size=3) == [1.0, 1.0, 1.0]


async def test_keys_are_asked_for_where_they_are_set(engine_folders: tuple[Path, Path]) -> None:
    bodies = {"/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}, "/abort_request": {}}

    async def status(http: httpx.AsyncClient, path: str, key: str | None) -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        response = await http.post(path, json=bodies[path], headers=headers)
        if response.status_code == 401:
            assert response.json() == {"error": "Unauthorized"}
        return response.status_code

    with engine_process(engine_folders[0], batch_slots=2, api_key="k", admin_api_key="a") as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            for key, expected in ((None, [401, 401]), ("k", [200, 401]), ("a", [401, 200])):
                assert [await status(http, path, key) for path in bodies] == expected
            for path in ("/health", "/ready", "/metrics"):
                assert (await http.get(path)).status_code == 200
