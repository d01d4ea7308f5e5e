"""What every engine does on SGLang's routes, as the client sees it. Run against each engine present.

Here that is the torch engine, as a process, with few rows, so that its cache has to move all the time.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from gcore.errors import EngineError, EngineUnreachable
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.testing.engine_process import engine_process
from gcore.testing.tiny_model import EOS, VOCABULARY, make_tiny_model
from gcore.types import Sample, Version, VersionSpan

CONTEXT = 40_000
SLOTS = 5
FIRST = Version(0, 0)
ENDLESS = SamplingParams(temperature=1.0, max_new_tokens=30_000)
"""Half a minute of work: nothing waits for its end."""


@dataclass(frozen=True)
class Serving:
    """An engine, and the folders with the weights it may serve."""

    url: str
    weights: tuple[Path, Path]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return (
        make_tiny_model(root / "first", seed=0, context=CONTEXT, ends=False),
        make_tiny_model(root / "second", seed=1, context=CONTEXT, ends=False),
    )


@pytest.fixture(scope="module", params=["torch"])
def serving(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Serving]:
    with engine_process(folders[0], batch_slots=SLOTS) as url:
        yield Serving(url, folders)


@pytest.fixture
async def client(serving: Serving) -> AsyncIterator[EngineClient]:
    client = EngineClient(serving.url, timeout_s=120)
    yield client
    await client.abort_all()
    await client.resume()
    await client.close()


@pytest.fixture
async def http(serving: Serving, client: EngineClient) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=serving.url, timeout=120, trust_env=False) as http:
        yield http


@pytest.fixture
async def fresh(folders: tuple[Path, Path]) -> AsyncIterator[EngineClient]:
    """An engine of its own, for tests that change its weights."""
    with engine_process(folders[0], batch_slots=SLOTS) as url:
        client = EngineClient(url, timeout_s=120)
        yield client
        await client.close()


def params(max_new_tokens: int = 20, temperature: float = 1.0, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, **more)


def prompt(number: int, length: int) -> list[int]:
    return [(number * 31 + i * 7) % (VOCABULARY - 3) + 3 for i in range(length)]


@cache
def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """[token, vocabulary] from one forward pass of the plain model."""
    with torch.inference_mode():
        logits: torch.Tensor = plain_model(folder)(torch.tensor([ids])).logits[0]
    return logits


def plain(folder: Path, prompt_ids: list[int], sample: Sample, temperature: float) -> torch.Tensor:
    """What the sample's log-probabilities should be."""
    ids = torch.tensor([prompt_ids + list(sample.token_ids)])
    logits = plain_logits(folder, ids[0].tolist())[len(prompt_ids) - 1 : -1] / (temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


def worst(folder: Path, prompt_ids: list[int], sample: Sample, temperature: float, span: VersionSpan) -> float:
    error = plain(folder, prompt_ids, sample, temperature) - torch.tensor(sample.logprobs)
    return float(error[span.start : span.end].abs().max()) if span.end > span.start else 0.0


def whole(sample: Sample) -> VersionSpan:
    return VersionSpan(FIRST, 0, len(sample.token_ids))


async def generate_raw(http: httpx.AsyncClient, **body: Any) -> Any:
    response = await http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(http: httpx.AsyncClient, path: str = "/generate", **body: Any) -> str:
    response = await http.post(path, json=body)
    assert response.status_code == 400
    message: str = response.json()["error"]["message"]
    return message


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_log_probabilities_are_those_of_a_full_forward_pass(
    client: EngineClient, serving: Serving, temperature: float
) -> None:
    prompts = [prompt(n, length) for n, length in enumerate([1, 40, 3, 90, 7, 2, 200, 11, 1, 64, 5, 130])]
    limits = [150, 3, 70, 20, 300, 1, 100, 64, 40, 2, 200, 90]
    groups = await asyncio.gather(
        *(
            client.generate(ids, params(limit, temperature), seeds=(n, n + 100), rid=f"full-{n}")
            for n, (ids, limit) in enumerate(zip(prompts, limits, strict=True))
        )
    )
    for ids, limit, group in zip(prompts, limits, groups, strict=True):
        for sample in group:
            assert len(sample.token_ids) == limit
            assert worst(serving.weights[0], ids, sample, temperature, whole(sample)) < 1e-5


async def test_a_greedy_sample_takes_the_likeliest_tokens(client: EngineClient, serving: Serving) -> None:
    (sample,) = await client.generate(prompt(1, 9), params(30, temperature=0.0), seeds=(5,), rid="greedy")
    logits = plain_logits(serving.weights[0], prompt(1, 9) + list(sample.token_ids))[8:-1]
    assert logits.argmax(-1).tolist() == list(sample.token_ids)


async def test_the_same_seed_gives_the_same_sample_whatever_else_is_in_the_batch(client: EngineClient) -> None:
    ids = prompt(3, 12)
    (alone,) = await client.generate(ids, params(60), seeds=(77,), rid="alone")
    others = [
        client.generate(prompt(n, 3 + 9 * n), params(20 + 17 * n), seeds=(n, n + 1, n + 2), rid=f"other-{n}")
        for n in range(6)
    ]
    crowd, *_ = await asyncio.gather(client.generate(ids, params(60), seeds=(76, 77, 78), rid="crowd"), *others)
    assert crowd[1].token_ids == alone.token_ids
    assert len({sample.token_ids for sample in crowd}) == 3


async def test_many_samples_are_distributed_as_the_model_says(client: EngineClient, serving: Serving) -> None:
    ids, count = prompt(2, 4), 2000
    group = await client.generate(ids, params(1), seeds=tuple(range(count)), rid="many")
    expected = torch.softmax(plain_logits(serving.weights[0], ids)[-1], -1)
    drawn = torch.bincount(torch.tensor([sample.token_ids[0] for sample in group]), minlength=VOCABULARY) / count
    # Five standard errors; the seeds are fixed, so it either holds or does not.
    assert ((drawn - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-3).all()


async def test_a_request_that_arrives_while_others_decode_has_its_first_token_before_they_end(
    client: EngineClient, http: httpx.AsyncClient
) -> None:
    order: list[str] = []

    async def stream(name: str, sampling: dict[str, Any], begun: asyncio.Event) -> None:
        body = {"input_ids": [5, 6], "sampling_params": sampling, "stream": True}
        async with http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {") and not begun.is_set():
                    order.append(f"{name} begins")
                    begun.set()
        order.append(f"{name} ends")

    long_begun = asyncio.Event()
    long = asyncio.create_task(stream("long", {"max_new_tokens": 1000}, long_begun))
    await long_begun.wait()
    await stream("short", {"max_new_tokens": 2}, asyncio.Event())
    await long
    assert order == ["long begins", "short begins", "short ends", "long ends"]


async def test_a_stream_grows_token_by_token_and_ends_with_the_whole(http: httpx.AsyncClient) -> None:
    body = {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 4},
        "stream": True,
        "return_logprob": True,
    }
    async with http.stream("POST", "/generate", json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    parts = [json.loads(line) for line in lines[:-1]]
    assert [len(part["output_ids"]) for part in parts] == [1, 2, 3, 4, 5, 6]
    assert [part["meta_info"]["finish_reason"] is None for part in parts] == [True] * 5 + [False]
    del body["stream"]
    answer = await generate_raw(http, **body)
    assert answer["output_ids"] == parts[-1]["output_ids"]
    assert answer["text"] == parts[-1]["text"]


async def test_an_aborted_request_returns_its_tokens_so_far(client: EngineClient, http: httpx.AsyncClient) -> None:
    running = asyncio.create_task(client.generate(prompt(1, 5), ENDLESS, seeds=range(40), rid="gone"))
    await until(client, running=SLOTS)
    await client.abort("gone", 40)
    samples = await running
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert all(len(s.token_ids) == len(s.logprobs) < ENDLESS.max_new_tokens for s in samples)
    # What never got a row has no tokens, and still tells a version.
    assert SLOTS <= sum(bool(sample.token_ids) for sample in samples) < 40
    assert all(sample.oldest == FIRST for sample in samples)


async def test_an_abort_ends_only_what_it_names(client: EngineClient) -> None:
    tasks = [asyncio.create_task(client.generate(prompt(n, 5), ENDLESS, seeds=(n,), rid=f"one-{n}")) for n in (1, 2)]
    await until(client, running=2)
    await client.abort("one-1", 1)
    (first,) = await tasks[0]
    assert first.finish_reason == "abort"
    assert (await client.info()).running == 1
    assert not tasks[1].done()
    await client.abort_all()
    assert (await tasks[1])[0].finish_reason == "abort"


async def test_a_client_that_goes_away_leaves_nothing_running(client: EngineClient) -> None:
    task = asyncio.create_task(client.generate(prompt(1, 5), ENDLESS, seeds=range(20), rid="left"))
    await until(client, running=SLOTS)
    task.cancel()
    await until(client, running=0, waiting=0)


async def until(client: EngineClient, **expected: int) -> None:
    while True:
        info = await client.info()
        if all(getattr(info, name) == value for name, value in expected.items()):
            return
        await asyncio.sleep(0.002)


async def test_a_stop_token_ends_the_sample_and_is_its_last_token(http: httpx.AsyncClient) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 40, "sampling_seed": 1, "ignore_eos": True}}
    free = await generate_raw(http, **body)
    stop = free["output_ids"][10]
    where = free["output_ids"].index(stop)
    body["sampling_params"] = {"max_new_tokens": 40, "sampling_seed": 1, "stop_token_ids": [stop]}
    answer = await generate_raw(http, **body)
    assert answer["output_ids"] == free["output_ids"][: where + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == free["text"][:where]


async def test_a_stop_string_ends_the_sample_and_is_not_in_its_text(http: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 60, "sampling_seed": 2, "ignore_eos": True, "skip_special_tokens": False}
    free = await generate_raw(http, input_ids=[5, 6], sampling_params=sampling)
    decoded = free["text"]
    stop = decoded[20:22]
    sampling["stop"] = ["never comes up", stop]
    answer = await generate_raw(http, input_ids=[5, 6], sampling_params=sampling)
    assert answer["text"] == decoded[: decoded.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(answer["output_ids"]) < 60
    assert answer["output_ids"] == free["output_ids"][: len(answer["output_ids"])]


async def test_the_end_token_ends_a_sample_unless_it_is_ignored_or_too_early(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 60}
    seeds = range(40)

    async def made(http: httpx.AsyncClient, **more: Any) -> list[Any]:
        rows = [{**sampling, "sampling_seed": seed, **more} for seed in seeds]
        return list(await generate_raw(http, input_ids=[[5, 6]] * len(rows), sampling_params=rows))

    with engine_process(make_tiny_model(tmp_path)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            plainly, ignored = await made(http), await made(http, ignore_eos=True)
            late = await made(http, min_new_tokens=10)
    ended = [a for a in plainly if a["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}]
    assert any(len(a["output_ids"]) < 10 for a in ended)
    assert all(a["output_ids"].index(EOS) == len(a["output_ids"]) - 1 for a in ended)
    assert all(EOS not in a["output_ids"] for a in plainly if a not in ended)
    assert all(len(a["output_ids"]) == 60 for a in ignored)
    assert any(EOS in a["output_ids"] for a in ignored)
    assert all(len(a["output_ids"]) > 10 for a in late)
    assert any(EOS in a["output_ids"] for a in late)


async def test_truncated_sampling_still_reports_untruncated_log_probabilities(
    client: EngineClient, serving: Serving
) -> None:
    ids = prompt(4, 6)
    for more in ({"top_k": 2}, {"top_p": 0.4}):
        (sample,) = await client.generate(ids, params(25, **more), seeds=(9,), rid="cut")
        assert worst(serving.weights[0], ids, sample, 1.0, whole(sample)) < 1e-5


async def test_a_single_request_has_one_answer_and_a_batch_or_n_a_list(http: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 3, "ignore_eos": True, "sampling_seed": 3}
    single = await generate_raw(http, text="1+2=", sampling_params=sampling, rid="a")
    assert single["meta_info"]["id"] == "a"
    assert single["meta_info"]["prompt_tokens"] == 4
    assert single["meta_info"]["completion_tokens"] == 3
    assert single["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert "output_token_logprobs" not in single["meta_info"]
    batch = await generate_raw(http, text=["1+2=", "3"], sampling_params=sampling, rid=["b", "c"], return_logprob=True)
    assert [a["meta_info"]["id"] for a in batch] == ["b", "c"]
    assert batch[0]["output_ids"] == single["output_ids"]
    assert [t[1] for t in batch[1]["meta_info"]["output_token_logprobs"]] == batch[1]["output_ids"]
    several = await generate_raw(http, text="1+2=", sampling_params={**sampling, "n": 3})
    assert several[0]["output_ids"] == single["output_ids"]
    assert len({tuple(a["output_ids"]) for a in several}) == 3


@pytest.mark.parametrize(
    ("body", "names"),
    [
        pytest.param({"text": "1", "nonsense": 1}, "nonsense", id="an unknown field"),
        pytest.param({"text": "1", "sampling_params": {"top_q": 1}}, "top_q", id="an unknown sampling parameter"),
        pytest.param({"text": "1", "sampling_params": [{"n": "1"}]}, "0.n", id="an ill-typed one in a list"),
        pytest.param({"text": "1", "sampling_params": {"temperature": "1"}}, "temperature", id="a text for a number"),
        pytest.param({"text": "1", "sampling_params": {"temperature": -1}}, "temperature", id="a negative temperature"),
        pytest.param({"text": "1", "sampling_params": {"top_k": 0}}, "top_k", id="top_k of nothing"),
        pytest.param({}, "text and input_ids", id="no prompt"),
        pytest.param({"text": "1", "input_ids": [1]}, "text and input_ids", id="two prompts"),
        pytest.param({"input_ids": []}, "input_ids", id="an empty prompt"),
        pytest.param({"input_ids": [1, 10**6]}, "1000000", id="a token that is none"),
        pytest.param({"input_ids": [[1], [2]], "rid": ["a"]}, "rid", id="too few rids"),
        pytest.param(
            {"input_ids": [1] * 400, "sampling_params": {"max_new_tokens": 39_800}}, "40000", id="more than the context"
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], names: str
) -> None:
    assert names in await refused(http, **body)


async def test_a_body_that_is_no_json_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.post("/generate", content=b"{")
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


async def test_a_refusal_reaches_the_caller_as_the_engines_own_sentence(client: EngineClient) -> None:
    with pytest.raises(EngineError, match="context of 40000") as caught:
        await client.generate([1] * 500, params(39_600), seeds=(1,), rid="long")
    assert not isinstance(caught.value, EngineUnreachable)


async def test_a_thousand_waiting_requests_are_all_answered(client: EngineClient) -> None:
    groups = await asyncio.gather(
        *(client.generate(prompt(n, 1 + n % 9), params(4), seeds=range(8), rid=f"k-{n}") for n in range(125))
    )
    samples = [sample for group in groups for sample in group]
    assert len(samples) == 1000
    assert all(len(sample.token_ids) == 4 for sample in samples)


async def test_an_answer_too_big_for_the_event_loop_is_whole(client: EngineClient, serving: Serving) -> None:
    samples = await client.generate(prompt(3, 5), params(4000), seeds=range(SLOTS), rid="big")
    assert [len(sample.token_ids) for sample in samples] == [4000] * SLOTS
    assert worst(serving.weights[0], prompt(3, 5), samples[-1], 1.0, whole(samples[-1])) < 1e-5


async def test_a_pause_in_place_stops_tokens_and_resume_goes_on_as_if_nothing_was(
    client: EngineClient, http: httpx.AsyncClient
) -> None:
    ids = prompt(6, 8)
    (expected,) = await client.generate(ids, params(1500), seeds=(3,), rid="calm")
    for mode in ("in_place", "retract"):
        running = asyncio.create_task(client.generate(ids, params(1500), seeds=(3,), rid=f"held-{mode}"))
        await until(client, running=1)
        await client.pause(mode)  # type: ignore[arg-type]
        made = await generated_tokens(http)
        assert not running.done()
        assert await generated_tokens(http) == made
        assert (await client.info()).running == (1 if mode == "in_place" else 0)
        await client.resume()
        assert (await running)[0].token_ids == expected.token_ids


async def generated_tokens(http: httpx.AsyncClient) -> str:
    text = (await http.get("/metrics")).text
    return next(line for line in text.splitlines() if line.startswith("sglang:generation_tokens_total"))


async def test_a_pause_with_abort_ends_what_runs_and_new_requests_wait(client: EngineClient) -> None:
    running = asyncio.create_task(client.generate(prompt(1, 3), ENDLESS, seeds=(1,), rid="ended"))
    await until(client, running=1)
    await client.pause("abort")
    assert (await running)[0].finish_reason == "abort"
    later = asyncio.create_task(client.generate(prompt(1, 3), params(2), seeds=(1,), rid="later"))
    await until(client, waiting=1)
    await client.resume()
    assert (await later)[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("flush", [True, False], ids=["recomputing the cache", "keeping the cache"])
async def test_a_weight_change_under_load_is_told_in_spans(
    fresh: EngineClient, folders: tuple[Path, Path], flush: bool
) -> None:
    ids, second = prompt(8, 10), Version(0, 1)
    running = [
        asyncio.create_task(fresh.generate(ids[: 3 + n], params(400), seeds=range(6), rid=f"load-{n}"))
        for n in range(2)
    ]
    async with httpx.AsyncClient(base_url=fresh.base_url, timeout=60, trust_env=False) as http:
        while int((await generated_tokens(http)).split()[1]) < 300:
            pass
        if flush:
            await fresh.update_weights(str(folders[1]), second)
        else:
            body = {"model_path": str(folders[1]), "weight_version": str(second), "flush_cache": False}
            assert (await http.post("/update_weights_from_disk", json=body)).json()["success"] is True
    assert (await fresh.info()).version == second
    samples = [(n, sample) for n, group in enumerate(await asyncio.gather(*running)) for sample in group]
    shared = [(n, sample) for n, sample in samples if len(sample.spans) == 2]
    assert shared
    assert {sample.spans[-1].version for _, sample in samples} == {second}
    for n, sample in samples:
        assert [span.start for span in sample.spans] == [0, *(span.end for span in sample.spans[:-1])]
        assert sample.spans[-1].end == len(sample.token_ids)
        for span in sample.spans:
            if flush or span.version == FIRST or len(sample.spans) == 1:
                folder = folders[span.version.step]
                assert worst(folder, ids[: 3 + n], sample, 1.0, span) < 1e-5


async def test_an_older_version_is_refused_and_changes_nothing(fresh: EngineClient, folders: tuple[Path, Path]) -> None:
    await fresh.update_weights(str(folders[1]), Version(1, 4))
    with pytest.raises(EngineError, match=r"0\.9 is older than 1\.4"):
        await fresh.update_weights(str(folders[0]), Version(0, 9))
    assert (await fresh.info()).version == Version(1, 4)
    (sample,) = await fresh.generate(prompt(1, 4), params(10), seeds=(1,), rid="after")
    assert sample.spans[0].version == Version(1, 4)
    assert worst(folders[1], prompt(1, 4), sample, 1.0, whole(sample)) < 1e-5


async def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    fresh: EngineClient, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", hidden=16)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"no weights")
    for folder in (tmp_path / "nothing", broken, other):
        with pytest.raises(EngineError):
            await fresh.update_weights(str(folder), Version(0, 1))
    assert (await fresh.info()).version == FIRST
    (sample,) = await fresh.generate(prompt(1, 4), params(10), seeds=(1,), rid="after")
    assert worst(folders[0], prompt(1, 4), sample, 1.0, whole(sample)) < 1e-5


async def test_weights_can_be_called_otherwise(fresh: EngineClient) -> None:
    async with httpx.AsyncClient(base_url=fresh.base_url, trust_env=False) as http:
        assert (await http.post("/update_weight_version", json={"new_version": "0.7"})).json()["success"] is True
        assert (await http.post("/update_weight_version", json={"new_version": "0.6"})).status_code == 400
    assert (await fresh.info()).version == Version(0, 7)


async def test_a_sleeping_engine_keeps_requests_until_it_wakes(client: EngineClient, http: httpx.AsyncClient) -> None:
    assert (await http.post("/release_memory_occupation", json={})).status_code == 200
    waiting = asyncio.create_task(client.generate(prompt(1, 4), params(3), seeds=(1,), rid="asleep"))
    await until(client, waiting=1)
    assert (await http.post("/resume_memory_occupation", json={"tags": ["weights"]})).status_code == 200
    assert (await client.info()).waiting == 1
    assert (await http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})).status_code == 200
    assert len(await waiting) == 1


async def test_the_cache_is_not_taken_from_what_runs(client: EngineClient, http: httpx.AsyncClient) -> None:
    assert (await http.post("/flush_cache")).status_code == 200
    running = asyncio.create_task(client.generate(prompt(1, 3), ENDLESS, seeds=(1,), rid="holds"))
    await until(client, running=1)
    assert "1 requests are running" in await refused(http, "/flush_cache")
    assert "1 requests are running" in await refused(http, "/release_memory_occupation")
    await client.abort_all()
    await running


async def test_it_tells_how_it_is(client: EngineClient, http: httpx.AsyncClient, serving: Serving) -> None:
    assert await client.health()
    for path in ("/health", "/health_generate", "/ready"):
        assert (await http.get(path)).status_code == 200
    info = (await http.get("/model_info")).json()
    assert info["model_path"] == str(serving.weights[0])
    assert info["weight_version"] == "0.0"
    state = (await http.get("/server_info")).json()
    assert state["weight_version"] == "0.0"
