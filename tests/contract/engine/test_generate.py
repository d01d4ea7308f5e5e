"""Sampling requests on SGLang's routes, against each available engine.

The torch engine runs as a process with few rows, so that it moves its cache often. The real SGLang server (marker `sglang`, on the
CPU) is the reference.
"""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_contract import (
    FRONT_END,
    OF_SGLANG,
    OF_VLLM,
    Serving,
    begin,
    chosen,
    error_of,
    generate,
    parts_of,
    plain_logits,
    plain_logprobs,
    prompt,
    reason,
    spans,
)
from engine_processes import TORCH, SglangProcess, engine_process, vllm_command

from gcore.engines.torch.frontend import BIG_ANSWER_TOKENS
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.testing.models import EOS, VOCABULARY, make_tiny_model
from gcore.types import Sample, Version

FIRST = Version(0, 0)
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def params(max_new_tokens: int = 20, temperature: float = 1.0, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, **more)


def worst(folder: Path, prompt_ids: list[int], sample: Sample, temperature: float) -> float:
    ids = prompt_ids + list(sample.token_ids)
    plain = chosen(plain_logprobs(folder, ids, temperature), ids)[len(prompt_ids) - 1 :]
    return float((plain - torch.tensor(sample.logprobs)).abs().max())


def varied(answer: dict[str, Any]) -> list[int]:
    """Greedy output of the tiny model soon repeats itself: its tokens up to there, each once."""
    return list(dict.fromkeys(answer["output_ids"]))


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
            assert worst(serving.weights[0], ids, sample, temperature) < serving.tolerance


async def test_a_greedy_sample_takes_the_likeliest_tokens(client: EngineClient, serving: Serving) -> None:
    (sample,) = await client.generate(prompt(1, 9), params(30, temperature=0.0), seeds=(5,), rid="greedy")
    logits = plain_logits(serving.weights[0], prompt(1, 9) + list(sample.token_ids))[8:-1]
    assert logits.argmax(-1).tolist() == list(sample.token_ids)


# SGLang takes a seed and pays no heed to it unless it was started with --enable-deterministic-inference, which it refuses
# together with the only attention that it has on a CPU.
@FRONT_END
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


async def test_samples_without_a_seed_differ(http: httpx.AsyncClient) -> None:
    answers = await generate(http, input_ids=[[5, 6]] * 3, sampling_params={"max_new_tokens": 30})
    assert len({tuple(a["output_ids"]) for a in answers}) == 3


async def test_many_samples_are_distributed_as_the_model_says(client: EngineClient, serving: Serving) -> None:
    ids, count = prompt(2, 4), 2000
    group = await client.generate(ids, params(1), seeds=tuple(range(count)), rid="many")
    expected = torch.softmax(plain_logits(serving.weights[0], ids)[-1], -1)
    drawn = torch.bincount(torch.tensor([sample.token_ids[0] for sample in group]), minlength=VOCABULARY) / count
    # Six standard errors: without seeds SGLang's draws are others in each run, and one of 49 tokens is one in 10 million.
    assert ((drawn - expected).abs() < 6 * (expected * (1 - expected) / count).sqrt() + 2e-3).all()


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        pytest.param({"top_k": 3}, 3, id="top_k"),
        pytest.param({"top_p": 0.3}, None, id="top_p"),
        pytest.param({"min_p": 0.25}, None, id="min_p"),
        pytest.param({"top_k": 6, "top_p": 0.4}, None, id="top_k and top_p, which is of the whole"),
        pytest.param({"top_k": 6, "top_p": 0.6, "min_p": 0.3}, None, id="all three"),
        pytest.param({"top_k": 3, "temperature": 0.5}, 3, id="top_k at a temperature"),
    ],
)
async def test_truncation_restricts_what_is_drawn_and_not_the_log_probabilities(
    http: httpx.AsyncClient, serving: Serving, more: dict[str, Any], kept: int | None
) -> None:
    ids, count = prompt(4, 6), 300
    temperature = more.get("temperature", 1.0)
    answers = await generate(
        http,
        input_ids=[ids] * count,
        sampling_params={"max_new_tokens": 1, "ignore_eos": True, **more},
        return_logprob=True,
    )
    row = plain_logprobs(serving.weights[0], ids, temperature)[-1]
    allowed = support(row.exp(), **{k: v for k, v in more.items() if k != "temperature"})
    assert kept is None or len(allowed) == kept
    drawn = {a["output_ids"][0] for a in answers}
    assert drawn <= allowed
    # What may be drawn is drawn: each of them is likely enough to be missed once in a million runs.
    weights = row.exp()[sorted(allowed)]
    assert float((weights / weights.sum()).min()) > 0.045
    assert drawn == allowed
    assert len(drawn) > 1
    for a in answers:
        ((logprob, token, _),) = a["meta_info"]["output_token_logprobs"]
        assert abs(logprob - float(row[token])) < serving.tolerance


def support(probabilities: torch.Tensor, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The tokens that may be drawn: by top_k, then the fewest that reach top_p, then those near the likeliest."""
    ordered, index = probabilities.sort(descending=True)
    kept, before = set(), 0.0
    for rank, (p, token) in enumerate(zip(ordered.tolist(), index.tolist(), strict=True)):
        if (top_k > 0 and rank >= top_k) or (top_p < 1 and before >= top_p) or p < min_p * float(ordered[0]):
            break
        kept.add(token)
        before += p
    return kept


async def test_log_probabilities_of_the_prompt_are_those_of_a_full_forward_pass(
    http: httpx.AsyncClient, serving: Serving
) -> None:
    ids = prompt(5, 30)
    table = plain_logprobs(serving.weights[0], ids)
    for start in (0, 1, 17, 29, 30, -1):
        answer = await generate(
            http,
            input_ids=ids,
            sampling_params={"max_new_tokens": 2},
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=3,
        )
        meta = answer["meta_info"]
        begins = len(ids) if start == -1 else start
        told, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
        assert [token for _, token, _ in told] == ids[begins:]
        assert len(tops) == len(told)
        if told:
            # The first has no number, even where one could be known.
            assert told[0][0] is None
            assert tops[0] is None
        for position, ((logprob, token, text), top) in enumerate(zip(told[1:], tops[1:], strict=True), begins):
            assert abs(logprob - float(table[position, token])) < serving.tolerance
            assert text is None
            check_top(top, table[position], 3, serving.tolerance)
        assert error_of(serving.weights[0], ids, answer) < serving.tolerance


async def test_a_long_prompts_log_probabilities_are_whole(http: httpx.AsyncClient, serving: Serving) -> None:
    ids = prompt(6, 1500)
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    told = (await generate(http, **body))["meta_info"]["input_token_logprobs"]
    plain = chosen(plain_logprobs(serving.weights[0], ids), ids)
    assert told[0] == [None, ids[0], None]
    assert (torch.tensor([logprob for logprob, _, _ in told[1:]]) - plain).abs().max() < 1e-4


async def test_prompt_log_probabilities_are_not_tempered(http: httpx.AsyncClient, serving: Serving) -> None:
    ids = prompt(5, 8)
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
    answer = await generate(http, **body, sampling_params={"max_new_tokens": 3, "temperature": 0.5})
    plain = chosen(plain_logprobs(serving.weights[0], ids), ids)
    told = [logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]
    assert (torch.tensor(told) - plain).abs().max() < serving.tolerance
    assert error_of(serving.weights[0], ids, answer, 0.5) < serving.tolerance


def check_top(top: list[list[Any]], row: torch.Tensor, count: int, tolerance: float) -> None:
    best = row.topk(count)
    assert [token for _, token, _ in top] == best.indices.tolist()
    assert (torch.tensor([logprob for logprob, _, _ in top]) - best.values).abs().max() < tolerance


async def test_the_likeliest_tokens_are_told_at_each_position(http: httpx.AsyncClient, serving: Serving) -> None:
    ids = prompt(7, 5)
    for temperature in (1.0, 0.7):
        answer = await generate(
            http,
            input_ids=ids,
            sampling_params={"max_new_tokens": 12, "temperature": temperature},
            return_logprob=True,
            top_logprobs_num=4,
            return_text_in_logprobs=True,
        )
        table = plain_logprobs(serving.weights[0], ids + answer["output_ids"], temperature)[len(ids) - 1 :]
        tops = answer["meta_info"]["output_top_logprobs"]
        assert len(tops) == 12
        for top, row in zip(tops, table, strict=False):
            check_top(top, row, 4, serving.tolerance)
        texts = [text for _, _, text in answer["meta_info"]["output_token_logprobs"]]
        assert all(isinstance(text, str) and text for text in texts)


async def test_log_probabilities_of_tokens_by_name_are_told_at_each_position(
    http: httpx.AsyncClient, serving: Serving
) -> None:
    ids, wanted = prompt(8, 6), [9, 3, 40]
    answer = await generate(
        http,
        input_ids=ids,
        sampling_params={"max_new_tokens": 5},
        return_logprob=True,
        logprob_start_len=2,
        token_ids_logprob=wanted,
    )
    table = plain_logprobs(serving.weights[0], ids + answer["output_ids"])
    of_input, of_output = (answer["meta_info"][f"{side}_token_ids_logprobs"] for side in ("input", "output"))
    assert of_input[0] is None
    for entries, row in zip(of_input[1:] + of_output, table[2:], strict=False):
        assert [token for _, token, _ in entries] == wanted
        assert (torch.tensor([e[0] for e in entries]) - row[wanted]).abs().max() < serving.tolerance
    assert len(of_output) == 5
    assert len(of_input) == len(ids) - 2


async def test_without_return_logprob_there_are_none(http: httpx.AsyncClient) -> None:
    answer = await generate(
        http, input_ids=[5, 6], sampling_params={"max_new_tokens": 2}, logprob_start_len=0, top_logprobs_num=2
    )
    assert not [name for name in answer["meta_info"] if "logprob" in name]


async def test_a_request_that_arrives_while_others_decode_has_its_first_token_before_they_end(
    http: httpx.AsyncClient,
) -> None:
    long = await begin(http, input_ids=[5, 6], sampling_params={"max_new_tokens": 800, "ignore_eos": True})
    short = await begin(http, input_ids=[5, 6], sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    await short.ended()
    assert not long.task.done()
    assert reason(await long.last())["type"] == "length"


async def test_a_stream_grows_and_ends_with_the_whole(http: httpx.AsyncClient) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 60, **GREEDY}, "return_logprob": True}
    parts = await parts_of(http, **body)
    whole = await generate(http, **body)
    assert len(parts) > 1
    lengths = [len(part["output_ids"]) for part in parts]
    assert lengths == sorted(set(lengths))
    # Each part holds all that came before: text, tokens and log-probabilities.
    for part, length in zip(parts, lengths, strict=True):
        assert part["output_ids"] == whole["output_ids"][:length]
        assert whole["text"].startswith(part["text"])
        assert len(part["meta_info"]["output_token_logprobs"]) == length
        assert part["meta_info"]["completion_tokens"] == length
        assert part["meta_info"]["weight_version"] == "0.0"
        assert "index" not in part
    assert spans(parts[-1]) == [("0.0", 0, 60)]
    assert [reason(part) is None for part in parts] == [True] * (len(parts) - 1) + [False]
    assert parts[-1]["text"] == whole["text"]


async def test_a_stream_of_several_tells_them_apart_by_index(http: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    parts = await parts_of(http, input_ids=[[5, 6], [7]], rid="many", sampling_params=sampling)
    last = {part["index"]: part for part in parts}
    assert [last[i]["meta_info"]["id"] for i in (0, 1)] == ["many_0", "many_1"]
    assert [last[i]["meta_info"]["prompt_tokens"] for i in (0, 1)] == [2, 1]
    parts = await parts_of(http, input_ids=[5, 6], sampling_params={**sampling, "n": 3})
    assert {part["index"] for part in parts} == {0, 1, 2}
    assert sum(reason(part) is not None for part in parts) == 3


async def test_a_stream_may_tell_only_every_so_many_tokens(http: httpx.AsyncClient) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 100, **GREEDY}}
    parts = await (await begin(http, interval=30, **body)).ended()
    lengths = [len(part["output_ids"]) for part in parts]
    assert lengths[-1] == 100
    assert len(lengths) <= 5
    assert all(later - earlier >= 30 for earlier, later in pairwise(lengths[:-1]))


async def test_stream_reports_an_unservable_request_as_an_error_event(http: httpx.AsyncClient) -> None:
    body = {"input_ids": [5] * 40_001, "stream": True}
    response = await http.post("/generate", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    told, last = [line for line in response.text.splitlines() if line]
    error = json.loads(told.removeprefix("data: "))["error"]
    assert error["code"] == 400
    assert "40001 tokens" in error["message"]
    assert last == "data: [DONE]"


async def test_a_stop_token_ends_the_sample_and_is_its_last_token_but_not_in_its_text(http: httpx.AsyncClient) -> None:
    async def made(**sampling: Any) -> dict[str, Any]:
        found: dict[str, Any] = await generate(
            http, input_ids=prompt(9, 7), sampling_params={"max_new_tokens": 40, "temperature": 0.0, **sampling}
        )
        return found

    free = await made(ignore_eos=True)
    stop = varied(free)[-1]
    where = free["output_ids"].index(stop)
    stops = [stop, -5, 10**6]
    answer = await made(stop_token_ids=stops)
    assert answer["output_ids"] == free["output_ids"][: where + 1]
    assert reason(answer) == {"type": "stop", "matched": stop}
    assert answer["text"] == (await made(ignore_eos=True, max_new_tokens=where))["text"]
    kept = await made(stop_token_ids=stops, no_stop_trim=True)
    assert kept["text"] == (await made(ignore_eos=True, max_new_tokens=where + 1))["text"]
    # Ignoring the end ignores every token that would be one.
    assert (await made(stop_token_ids=stops, ignore_eos=True))["output_ids"] == free["output_ids"]


async def test_a_stop_string_ends_the_sample_and_is_not_in_its_text(http: httpx.AsyncClient) -> None:
    ids, sampling = prompt(9, 7), {"max_new_tokens": 40, **GREEDY, "skip_special_tokens": False}
    free = await generate(http, input_ids=ids, sampling_params=sampling)
    stop = free["text"][2:4]
    where = free["text"].index(stop)
    for more in ({}, {"min_new_tokens": 30}):
        # A least length holds end tokens back, and no strings.
        answer = await generate(
            http, input_ids=ids, sampling_params={**sampling, **more, "stop": ["never comes up", stop]}
        )
        assert reason(answer) == {"type": "stop", "matched": stop}
        if not more:
            assert answer["text"] == free["text"][:where]
            assert answer["output_ids"] == free["output_ids"][: where + 2]
    kept = await generate(http, input_ids=ids, sampling_params={**sampling, "stop": stop, "no_stop_trim": True})
    assert kept["text"] == free["text"][: where + 2]


async def test_a_stream_tells_no_beginning_of_a_stop_string(http: httpx.AsyncClient) -> None:
    ids, sampling = prompt(9, 7), {"max_new_tokens": 40, **GREEDY, "skip_special_tokens": False}
    free = await generate(http, input_ids=ids, sampling_params=sampling)
    stop = free["text"][3:6]
    parts = await parts_of(http, input_ids=ids, sampling_params={**sampling, "stop": [stop]})
    assert parts[-1]["text"] == free["text"][: free["text"].index(stop)]
    assert all(parts[-1]["text"].startswith(part["text"]) for part in parts)


@pytest.mark.parametrize("engine", ["torch", OF_SGLANG, OF_VLLM])
async def test_the_end_token_ends_a_sample_unless_it_is_ignored_or_too_early(tmp_path: Path, engine: str) -> None:
    async def made(http: httpx.AsyncClient, **more: Any) -> list[Any]:
        rows = [{"max_new_tokens": 60, "sampling_seed": seed, **more} for seed in range(40)]
        return list(await generate(http, input_ids=[[5, 6]] * len(rows), sampling_params=rows))

    folder = make_tiny_model(tmp_path, hidden=64, heads=2, kv_heads=1)
    if engine != "sglang":
        with engine_process(folder, TORCH if engine == "torch" else vllm_command()) as url:
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
                plainly, ignored = await made(http), await made(http, ignore_eos=True)
                late = await made(http, min_new_tokens=10)
    else:
        with SglangProcess(folder) as process:
            async with httpx.AsyncClient(base_url=process.base_url, timeout=60, trust_env=False) as http:
                plainly, ignored = await made(http), await made(http, ignore_eos=True)
                late = await made(http, min_new_tokens=10)
    ended = [a for a in plainly if reason(a) == {"type": "stop", "matched": EOS}]
    assert any(len(a["output_ids"]) < 10 for a in ended)
    assert all(a["output_ids"].index(EOS) == len(a["output_ids"]) - 1 for a in ended)
    assert all(EOS not in a["output_ids"] for a in plainly if a not in ended)
    assert all(len(a["output_ids"]) == 60 for a in ignored)
    assert any(EOS in a["output_ids"] for a in ignored)
    assert all(len(a["output_ids"]) > 10 for a in late)
    assert any(EOS in a["output_ids"] for a in late)


async def test_no_tokens_at_all_can_be_asked_for(http: httpx.AsyncClient, serving: Serving) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 0}}
    answer = await generate(http, **body, return_logprob=True, logprob_start_len=0)
    assert answer["output_ids"] == []
    assert answer["text"] == ""
    assert reason(answer) == {"type": "length", "length": 0}
    assert answer["meta_info"]["completion_tokens"] == 0
    assert answer["meta_info"]["output_token_logprobs"] == []
    (_, first, _), (logprob, second, _) = answer["meta_info"]["input_token_logprobs"]
    assert [first, second] == [5, 6]
    assert abs(logprob - float(plain_logprobs(serving.weights[0], [5, 6])[0, 6])) < serving.tolerance


async def test_null_is_the_default_and_no_limit_for_the_length(http: httpx.AsyncClient) -> None:
    stops = list(range(1, VOCABULARY))
    sampling = {"max_new_tokens": None, "stop_token_ids": stops, "temperature": None, "top_p": None, "stop": None}
    answer = await generate(http, input_ids=[5, 6], sampling_params=sampling, rid=None)
    assert reason(answer)["type"] == "stop"


async def test_a_single_request_has_one_answer_and_a_batch_or_n_a_list(http: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 3, **GREEDY}
    single = await generate(http, text="1+2=", sampling_params=sampling, rid="a")
    meta = single["meta_info"]
    assert meta["id"] == "a"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (4, 3, 0)
    assert reason(single) == {"type": "length", "length": 3}
    assert meta["weight_version"] == "0.0"
    assert spans(single) == [("0.0", 0, 3)]
    assert meta["e2e_latency"] > 0
    batch = await generate(http, text=["1+2=", "3"], sampling_params=sampling, rid=["b", "c"], return_logprob=True)
    assert [a["meta_info"]["id"] for a in batch] == ["b", "c"]
    assert batch[0]["output_ids"] == single["output_ids"]
    assert [t[1] for t in batch[1]["meta_info"]["output_token_logprobs"]] == batch[1]["output_ids"]
    assert len(await generate(http, text=["1+2="], sampling_params=sampling)) == 1
    assert await generate(http, text=[]) == []
    ids = await generate(http, input_ids=[[5, 6], [7]], rid="x", sampling_params=sampling)
    assert [a["meta_info"]["id"] for a in ids] == ["x_0", "x_1"]


async def test_n_gives_so_many_samples_prompt_by_prompt(http: httpx.AsyncClient) -> None:
    several = await generate(http, text="1+2=", sampling_params={"max_new_tokens": 30, "ignore_eos": True, "n": 3})
    assert len({tuple(a["output_ids"]) for a in several}) == 3
    assert len({a["meta_info"]["id"] for a in several}) == 3
    batch = await generate(http, input_ids=[[5, 6], [7]], sampling_params={"max_new_tokens": 2, "n": 2})
    assert [a["meta_info"]["prompt_tokens"] for a in batch] == [2, 2, 1, 1]


@FRONT_END  # SGLang gives the samples of `n` names of its own
async def test_the_samples_of_n_have_seeds_and_names_of_their_own(http: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 3}
    single = await generate(http, text="1+2=", sampling_params=sampling)
    several = await generate(http, text="1+2=", sampling_params={**sampling, "n": 3}, rid="s")
    assert several[0]["output_ids"] == single["output_ids"]
    assert len({tuple(a["output_ids"]) for a in several}) == 3
    assert [a["meta_info"]["id"] for a in several] == ["s_0", "s_1", "s_2"]


async def test_a_thousand_waiting_requests_are_all_answered(client: EngineClient) -> None:
    groups = await asyncio.gather(
        *(client.generate(prompt(n, 1 + n % 9), params(4), seeds=range(8), rid=f"k-{n}") for n in range(125))
    )
    samples = [sample for group in groups for sample in group]
    assert len(samples) == 1000
    assert all(len(sample.token_ids) == 4 for sample in samples)


@FRONT_END  # about how the torch engine writes big answers
async def test_an_answer_too_big_for_the_event_loop_is_whole(client: EngineClient, serving: Serving) -> None:
    count = -(-BIG_ANSWER_TOKENS // 400)
    samples = await client.generate(prompt(3, 5), params(400), seeds=range(count), rid="big")
    assert [len(sample.token_ids) for sample in samples] == [400] * count
    assert worst(serving.weights[0], prompt(3, 5), samples[-1], 1.0) < 1e-5
