"""OpenAI's routes, as judges and other programs use them, against each available engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from engine_contract import (
    CONTEXT,
    ENDLESS,
    FRONT_END,
    Serving,
    begin,
    chosen,
    generate,
    plain_logprobs,
    post,
    until_generating,
)

from gcore.engines.detokenizer import Detokenizer
from gcore.rollout.client import EngineClient

GREEDY = {"temperature": 0.0, "ignore_eos": True}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
QUESTION = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2="}]
SHOWN = "system:add/user:1+2=/assistant:"


async def chunks(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_completion_is_what_generate_makes(http: httpx.AsyncClient, serving: Serving) -> None:
    made = await generate(http, text="1+2=", sampling_params={"max_new_tokens": 12, **GREEDY}, return_logprob=True)
    body = {"model": "any", "prompt": "1+2=", "max_tokens": 12, "logprobs": 2, **GREEDY}
    told = await post(http, TEXT, **body)
    (choice,) = told["choices"]
    assert (told["object"], told["model"]) == ("text_completion", "any")
    assert choice["text"] == made["text"]
    assert (choice["index"], choice["finish_reason"], choice["matched_stop"]) == (0, "length", None)
    assert told["usage"]["prompt_tokens"] == 4
    assert told["usage"]["completion_tokens"] == 12
    assert told["usage"]["total_tokens"] == 16
    assert told["metadata"]["weight_version"] == "0.0"
    logprobs = [logprob for logprob, _, _ in made["meta_info"]["output_token_logprobs"]]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 12
    ids = list(Detokenizer.load(serving.weights[0]).encode("1+2="))  # type: ignore[union-attr]
    assert (await post(http, TEXT, **body | {"prompt": ids}))["choices"] == told["choices"]


async def test_a_chat_is_shown_through_the_models_template(http: httpx.AsyncClient, serving: Serving) -> None:
    made = await generate(http, text=SHOWN, sampling_params={"max_new_tokens": 10, **GREEDY}, return_logprob=True)
    told = await post(http, CHAT, model="m", messages=QUESTION, max_tokens=10, logprobs=True, top_logprobs=3, **GREEDY)
    (choice,) = told["choices"]
    assert told["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == made["text"]
    assert choice["finish_reason"] == "length"
    assert told["usage"]["prompt_tokens"] == made["meta_info"]["prompt_tokens"]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in QUESTION]
    of_parts = await post(http, CHAT, model="m", messages=parts, max_tokens=10, **GREEDY)
    assert of_parts["choices"][0]["message"] == choice["message"]
    ids = list(Detokenizer.load(serving.weights[0]).encode(SHOWN))  # type: ignore[union-attr]
    plain = chosen(plain_logprobs(serving.weights[0], ids + made["output_ids"]), ids + made["output_ids"])
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(plain[len(ids) - 1 :].tolist(), abs=1e-4)
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode())
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 3


async def test_several_prompts_and_samples_are_choices_in_order(http: httpx.AsyncClient) -> None:
    told = await post(http, TEXT, prompt=["1+2=", "3"], max_tokens=3, n=2, ignore_eos=True)
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    assert told["usage"]["prompt_tokens"] == 5
    assert told["usage"]["completion_tokens"] == 12
    told = await post(http, CHAT, messages=QUESTION, max_tokens=30, n=2, ignore_eos=True)
    first, second = (choice["message"]["content"] for choice in told["choices"])
    assert first != second


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_stream_tells_the_same_piece_by_piece(http: httpx.AsyncClient, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, **GREEDY}
    asked |= {"prompt": SHOWN} if path == TEXT else {"messages": QUESTION}
    whole = (await post(http, path, **asked))["choices"][0]
    parts = await chunks(http, path, **asked, stream_options={"include_usage": True})
    *pieces, usage = parts
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 30
    assert len({part["id"] for part in parts}) == 1
    choices = [part["choices"][0] for part in pieces]
    if path == TEXT:
        assert "".join(choice["text"] for choice in choices) == whole["text"]
    else:
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == whole["message"]["content"]
        assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert len(choices) > 2


async def test_a_stop_string_is_not_told_not_even_its_beginning(http: httpx.AsyncClient) -> None:
    free = (await post(http, TEXT, prompt="1+2=", max_tokens=30, **GREEDY))["choices"][0]["text"]
    stop = free[3:5]
    asked = {"prompt": "1+2=", "max_tokens": 30, "stop": [stop], **GREEDY}
    (choice,) = (await post(http, TEXT, **asked))["choices"]
    assert choice["text"] == free[: free.index(stop)]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    pieces = [part["choices"][0] for part in await chunks(http, TEXT, **asked)]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert pieces[-1]["matched_stop"] == stop


async def test_an_aborted_chat_ends_with_what_it_has(http: httpx.AsyncClient, client: EngineClient) -> None:
    marker = await begin(http, input_ids=[5], sampling_params=ENDLESS)
    asked = {"messages": QUESTION, "max_tokens": 10_000, "ignore_eos": True, "stream": True}
    running = asyncio.create_task(http.post(CHAT, json=asked))
    await until_generating(client, marker, running=2)
    await post(http, "/abort_request", abort_all=True)
    lines = [line.removeprefix("data: ") for line in (await running).text.splitlines() if line]
    assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "abort"


async def test_the_model_is_listed(http: httpx.AsyncClient, serving: Serving) -> None:
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (str(serving.weights[0]), "model", CONTEXT)
    missing = await http.get("/v1/models/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(TEXT, {}, id="no prompt"),
        pytest.param(TEXT, {"prompt": "1", "temperature": "a"}, id="a text for a temperature"),
        pytest.param(TEXT, {"prompt": "1", "temperature": -1}, id="a negative temperature"),
        pytest.param(TEXT, {"prompt": [5] * 40_001}, id="a prompt beyond the context"),
        pytest.param(CHAT, {}, id="no messages"),
        pytest.param(CHAT, {"messages": []}, id="no message"),
        pytest.param(CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, id="an unknown role"),
    ],
)
async def test_unservable_requests_are_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["object"] == "error"
    assert response.json()["message"]


@FRONT_END  # SGLang passes over what it does not know, and serves what the torch engine has not
@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        pytest.param(TEXT, {"prompt": "1", "nonsense": 1}, "nonsense", id="an unknown field"),
        pytest.param(TEXT, {"prompt": "1", "echo": True}, "echo", id="an echo"),
        pytest.param(TEXT, {"prompt": ""}, "no tokens", id="an empty prompt"),
        pytest.param(TEXT, {"prompt": [[]]}, "prompt", id="no tokens"),
        pytest.param(CHAT, {"messages": QUESTION, "presence_penalty": 0.5}, "presence_penalty", id="a penalty"),
        pytest.param(CHAT, {"messages": QUESTION, "tools": [{"type": "function"}]}, "tools", id="tools"),
        pytest.param(CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "content", id="parts of content"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], names: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert names in response.json()["message"]


@FRONT_END
async def test_openai_fields_that_say_the_default_are_taken(http: httpx.AsyncClient) -> None:
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "tools": [], "user": "u", "seed": 1}
    assert (await post(http, CHAT, messages=QUESTION, max_tokens=2, **neutral))["choices"]
