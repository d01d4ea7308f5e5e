"""Which requests engines refuse, with which status and body, against each available engine.

The shapes are SGLang's. "whole": an object with `object: "error"`, where the body is not what the route takes. "contract":
`{"error": sentence}`, where a field of /generate or a sampling parameter is unknown or of another type. "message":
`{"error": {"message": sentence}}`, every other refusal. "plain": `{"detail": ...}`, an unknown route or method.
"outcome": `{"success": false, "message": ...}`, a weight update.
"""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from engine_contract import ENDLESS, FRONT_END, Serving, begin, generate, post

from gcore.errors import EngineError, EngineUnreachable
from gcore.rollout.client import EngineClient, SamplingParams

JSON = {"content-type": "application/json"}


def shape(response: httpx.Response) -> str:
    answer = response.json()
    if answer.get("object") == "error":
        assert isinstance(answer["message"], str)
        assert answer["code"] == response.status_code
        return "whole"
    if answer.get("success") is False:
        assert answer["message"]
        return "outcome"
    if "detail" in answer:
        return "plain"
    return "message" if isinstance(answer["error"], dict) and answer["error"]["message"] else "contract"


def sampled(**params: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, **params}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(sampled(top_q=1), "contract", id="an unknown sampling parameter"),
        pytest.param(sampled(n="1"), "contract", id="a text for a count"),
        pytest.param(sampled(temperature="1"), "contract", id="a text for a temperature"),
        pytest.param(sampled(stop=5), "contract", id="a number for a stop string"),
        pytest.param(sampled(stop_token_ids=[None]), "contract", id="null for a stop token"),
        pytest.param(sampled(sampling_seed="a"), "contract", id="a text for a seed"),
        pytest.param({"input_ids": [1, True]}, "contract", id="true for a token"),
        pytest.param({**sampled(), "stream": "yes"}, "contract", id="yes for true"),
        pytest.param({"text": "1", "sampling_params": "x"}, "whole", id="a text for the sampling parameters"),
        pytest.param({**sampled(), "rid": 5}, "whole", id="a number for a name"),
        pytest.param({"input_ids": [1, 1.5]}, "whole", id="half a token"),
        pytest.param({"input_ids": [1, 10**30]}, "whole", id="a token beyond 64 bits"),
        pytest.param([1], "whole", id="no object"),
        pytest.param(None, "whole", id="null"),
        pytest.param({}, "message", id="no prompt"),
        pytest.param({"input_ids": []}, "message", id="an empty prompt"),
        pytest.param(sampled(temperature=-1), "message", id="a negative temperature"),
        pytest.param(sampled(top_k=0), "message", id="top_k of nothing"),
        pytest.param(sampled(top_p=0), "message", id="top_p of nothing"),
        pytest.param(sampled(min_p=2), "message", id="min_p of more than one"),
        pytest.param(sampled(max_new_tokens=-1), "message", id="a negative length"),
        pytest.param(sampled(min_new_tokens=3), "message", id="a least length above the greatest"),
        pytest.param(sampled(sampling_seed=2**63), "message", id="a seed beyond 64 bits"),
        pytest.param(sampled(stop=["x"] * 33), "message", id="33 stop strings"),
        pytest.param({"input_ids": [[1], [2]], "rid": ["a"]}, "message", id="too few names"),
        pytest.param({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "message", id="a name twice"),
        pytest.param({"input_ids": [[5], [6]], "sampling_params": [{"n": 1}, {"n": 2}]}, "message", id="n that differs"),
        pytest.param({**sampled(), "return_logprob": True, "logprob_start_len": 3}, "message", id="a start behind the prompt"),
        pytest.param({**sampled(), "return_logprob": True, "token_ids_logprob": [10**6]}, "message", id="a token by name that is none"),
        pytest.param({"input_ids": [5] * 40_000}, "message", id="a prompt as long as the context"),
        pytest.param({"input_ids": [5] * 400, "sampling_params": {"max_new_tokens": 39_800}}, "message", id="more than the context"),
        pytest.param({**sampled(), "lora_path": "x"}, "message", id="an adapter that is not there"),
        pytest.param(sampled(regex="a+"), "message", id="a grammar without a grammar backend"),
    ],
)  # fmt: skip
async def test_a_request_that_cannot_be_served_is_refused(http: httpx.AsyncClient, body: Any, expected: str) -> None:
    response = await http.post("/generate", json=body)
    assert response.status_code == 400
    assert shape(response) == expected


# SGLang's scheduler dies of the first seven, and takes the server with it; it is silent about the others: half of what was
# asked for is not done. So the torch engine refuses them, and gcore's own client never sends them.
@FRONT_END
@pytest.mark.parametrize(
    ("body", "names"),
    [
        pytest.param({"input_ids": [1, 10**6]}, "1000000", id="a token beyond the vocabulary"),
        pytest.param({"input_ids": [1, -3]}, "-3", id="a negative token"),
        pytest.param({"input_ids": [[]]}, "no tokens", id="an empty prompt of a batch"),
        pytest.param({"input_ids": [[1], []]}, "no tokens", id="an empty prompt beside another"),
        pytest.param({"text": ""}, "no tokens", id="an empty text"),
        pytest.param(
            {**sampled(), "return_logprob": True, "logprob_start_len": -2}, "-2", id="a start before the prompt"
        ),
        pytest.param({**sampled(), "return_logprob": True, "top_logprobs_num": 50}, "50", id="more than all tokens"),
        pytest.param({"text": "1", "input_ids": [1]}, "exactly one", id="two prompts in one"),
        pytest.param(sampled(n=0), "n must be at least 1", id="no samples"),
        pytest.param(sampled(stop=""), "empty string", id="an empty stop string"),
        pytest.param({"input_ids": [[1], [2]], "sampling_params": [{}]}, "list of 1", id="too few sampling parameters"),
        pytest.param({"input_ids": [[1]], "sampling_params": [{}, {}]}, "list of 2", id="too many sampling parameters"),
        pytest.param({"input_ids": [1], "sampling_params": [{}]}, "single prompt", id="a list of them for one prompt"),
        pytest.param({"input_ids": [1], "rid": ["a"]}, "single prompt", id="a list of names for one prompt"),
        pytest.param(sampled(frequency_penalty=0.5), "frequency_penalty", id="a penalty, which it has not"),
        pytest.param(
            {**sampled(), "return_hidden_states": True}, "return_hidden_states", id="states, which it has not"
        ),
        pytest.param(sampled(n=10**6), "1000000 samples", id="a million samples"),
    ],
)
async def test_invalid_or_ignored_parameters_are_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], names: str
) -> None:
    response = await http.post("/generate", json=body)
    assert response.status_code == 400
    assert shape(response) == "message"
    assert names in response.json()["error"]["message"]


async def test_an_unknown_field_beside_the_sampling_parameters_is_passed_over(http: httpx.AsyncClient) -> None:
    assert (await generate(http, **sampled(), nonsense=1))["output_ids"]
    neutral = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "regex": None}
    assert (await generate(http, **sampled(**neutral), lora_path=None))["output_ids"]


async def test_a_name_that_is_under_way_is_refused_and_afterwards_taken(http: httpx.AsyncClient) -> None:
    running = await begin(http, input_ids=[5], rid="same", sampling_params=ENDLESS)
    response = await http.post("/generate", json={**sampled(), "rid": "same"})
    assert (response.status_code, shape(response)) == (400, "message")
    await post(http, "/abort_request", rid="same")
    await running.ended()
    assert (await generate(http, **sampled(), rid="same"))["meta_info"]["id"] == "same"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{", id="half an object"),
        pytest.param(b"", id="nothing"),
        pytest.param(b'\xff\xfe{"a"', id="no text"),
        pytest.param(b'{"input_ids":[5],"sampling_params":{"temperature":NaN}}', id="not a number"),
        pytest.param(b"[" * 100_000, id="a deep nest"),
    ],
)
async def test_a_body_that_is_no_json_is_refused(http: httpx.AsyncClient, content: bytes) -> None:
    response = await http.post("/generate", content=content, headers=JSON)
    assert (response.status_code, shape(response)) == (400, "whole")


# What SGLang does with half a character nobody has looked at.
@FRONT_END
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/update_weight_version"])
async def test_half_a_surrogate_pair_is_no_json(http: httpx.AsyncClient, path: str) -> None:
    for half in (rb"\ud83d", b"\xed\xa0\xbd"):
        content = b'{"text":"%b","prompt":"%b","new_version":"%b"}' % (half, half, half)
        response = await http.post(path, content=content, headers=JSON)
        assert (response.status_code, shape(response)) == (400, "whole")
    both = rb'{"text":"\ud83d\ude00","sampling_params":{"max_new_tokens":1}}'
    assert (await http.post("/generate", content=both, headers=JSON)).status_code == 200


@FRONT_END
async def test_of_two_requests_of_one_name_that_come_at_once_one_is_refused(http: httpx.AsyncClient) -> None:
    both = (http.post("/generate", json={**sampled(), "rid": "twin"}) for _ in range(2))
    await post(http, "/pause_generation", mode="in_place")
    tasks = [asyncio.create_task(one) for one in both]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [one.result().status_code for one in done] == [400]
    await post(http, "/continue_generation")
    assert sorted([(await one).status_code for one in tasks]) == [200, 400]


async def test_a_body_that_does_not_call_itself_json_is_refused(http: httpx.AsyncClient) -> None:
    body = b'{"input_ids":[5,6],"sampling_params":{"max_new_tokens":1}}'
    for headers in ({}, {"content-type": "text/plain"}):
        response = await http.post("/generate", content=body, headers=headers)
        assert (response.status_code, shape(response)) == (400, "whole")
    assert (await http.put("/generate", content=body, headers=JSON)).status_code == 200


@FRONT_END  # SGLang sets no limit
async def test_a_huge_body_is_refused_before_it_is_read(serving: Serving) -> None:
    host, port = serving.url.removeprefix("http://").split(":")
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as line:
        line.sendall(head + b"content-length: 1000000000000\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/generate", 405),
        ("DELETE", "/generate", 405),
        ("OPTIONS", "/generate", 405),
        ("GET", "/abort_request", 405),
        ("GET", "/update_weights_from_disk", 405),
        ("POST", "/health", 405),
        ("GET", "/nothing", 404),
        ("POST", "/nothing", 404),
    ],
)
async def test_other_methods_and_paths_are_not_there(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await http.request(method, path)
    assert (response.status_code, shape(response)) == (status, "plain")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        pytest.param("/abort_request", None, "whole", id="an abort of nothing"),
        pytest.param("/abort_request", {"rid": 5}, "whole", id="an abort by number"),
        pytest.param("/abort_request", {"abort_all": "maybe"}, "whole", id="an abort of perhaps all"),
        pytest.param("/pause_generation", None, "whole", id="a pause without a body"),
        pytest.param("/pause_generation", {"mode": "x"}, "whole", id="an unknown pause"),
        pytest.param("/continue_generation", None, "whole", id="a continuation without a body"),
        pytest.param("/flush_cache?timeout=-1", {}, "whole", id="a negative time-out"),
        pytest.param("/flush_cache?timeout=x", {}, "whole", id="a time-out that is no number"),
        pytest.param("/release_memory_occupation", None, "whole", id="a release without a body"),
        pytest.param("/update_weights_from_disk", {}, "whole", id="weights from nowhere"),
        pytest.param("/update_weights_from_disk", {"model_path": 5}, "whole", id="weights from a number"),
        pytest.param("/update_weights_from_disk", {"model_path": "/nothing/there"}, "outcome", id="weights that are not there"),
        pytest.param("/update_weight_version", {}, "whole", id="a version without a name"),
        pytest.param("/get_weights_by_name", {}, "whole", id="a tensor without a name"),
        pytest.param("/get_weights_by_name", {"name": "nothing"}, "message", id="a tensor that is not there"),
        pytest.param("/begin_weight_update", {"selector": "x"}, "whole", id="an update of unknown models"),
        pytest.param("/end_weight_update", None, "whole", id="an end without a body"),
        pytest.param("/end_weight_update", {}, "outcome", id="an end before a beginning"),
        pytest.param("/init_weights_update_group", {"master_address": "127.0.0.1"}, "whole", id="half a group"),
        pytest.param("/destroy_weights_update_group", {}, "outcome", id="the end of no group"),
        pytest.param("/update_weights_from_distributed", {"names": ["a"]}, "whole", id="tensors without shapes"),
        pytest.param("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}, "outcome", id="tensors outside an update"),
    ],
)  # fmt: skip
async def test_an_administrative_request_that_makes_no_sense_is_refused(
    http: httpx.AsyncClient, path: str, body: Any, expected: str
) -> None:
    response = await (http.post(path) if body is None else http.post(path, json=body))
    assert response.status_code == 400
    assert shape(response) == expected


async def test_administrative_routes_pass_unknown_fields_over_and_take_texts_for_truth(http: httpx.AsyncClient) -> None:
    for path, body in (
        ("/abort_request", {"rid": "nobody", "nonsense": 1}),
        ("/abort_request", {"rid": None, "abort_all": "false"}),
        ("/abort_request", {}),
        ("/continue_generation", {"nonsense": 1}),
        ("/flush_cache", {}),
    ):
        assert (await http.post(path, json=body)).status_code == 200


@FRONT_END
async def test_routes_of_sglang_that_it_has_not_are_refused_in_words(http: httpx.AsyncClient) -> None:
    for path in ("/update_weights_from_tensor", "/encode", "/load_lora_adapter"):
        response = await http.post(path, json={})
        assert response.status_code == 400
        assert path in response.json()["error"]["message"]
    response = await http.post("/update_weights_from_disk", json={"model_path": "/x", "load_format": "dummy"})
    assert (response.status_code, shape(response)) == (400, "whole")


async def test_a_refusal_reaches_the_caller_as_the_engines_own_sentence(client: EngineClient) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=39_600)
    with pytest.raises(EngineError, match=r"context .*40000 tokens") as caught:
        await client.generate([1] * 500, sampling, seeds=(1,), rid="long")
    assert not isinstance(caught.value, EngineUnreachable)
