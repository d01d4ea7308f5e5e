"""Classification on SGLang's routes, against each available engine.

The real SGLang (marker `sglang`, on the CPU) gets no sampling requests, no empty token lists and no tokens outside its vocabulary:
version 0.5.23 with --is-embedding crashes on each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_contract import Serving, post, prompt
from engine_processes import SglangProcess, engine_process
from tiny_classifiers import make_tiny_classifier
from transformers import AutoModelForSequenceClassification

from gcore.errors import EngineError, EngineGaveUp, EngineUnreachable
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.testing.models import VOCABULARY
from gcore.types import Version

CONTEXT = 2000
SLOTS = 5
TIMEOUT_S = 120
TOLERANCE = 1e-4
FIRST = Version(0, 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("classifiers")
    return (
        make_tiny_classifier(root / "first", seed=0, context=CONTEXT),
        make_tiny_classifier(root / "second", seed=1, context=CONTEXT),
    )


@pytest.fixture(scope="module", params=["torch", pytest.param("sglang", marks=pytest.mark.sglang)])
def serving(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Serving]:
    if request.param == "torch":
        with engine_process(folders[0], task="classify", batch_slots=SLOTS) as url:
            yield Serving("torch", url, folders)
    else:
        with SglangProcess(folders[0], task="classify", batch_slots=SLOTS) as process:
            yield Serving("sglang", process.base_url, folders)


@pytest.fixture
async def client(serving: Serving) -> AsyncIterator[EngineClient]:
    client = EngineClient(serving.url, timeout_s=TIMEOUT_S)
    yield client
    await client.resume()
    await client.close()


@pytest.fixture
async def http(serving: Serving) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=serving.url, timeout=TIMEOUT_S, trust_env=False) as http:
        yield http


@cache
def plain_model(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


def plain(folder: Path, question: list[int]) -> float:
    """What a plain forward pass over the question alone gives."""
    with torch.inference_mode():
        return float(plain_model(folder)(torch.tensor([question])).logits[0, 0])


def check(folder: Path, questions: list[list[int]], scores: tuple[float, ...]) -> None:
    assert scores == tuple(pytest.approx(plain(folder, one), abs=TOLERANCE) for one in questions)


async def until_waiting(client: EngineClient, count: int) -> None:
    while (await client.info()).waiting != count:  # noqa: ASYNC110  # in another process
        await asyncio.sleep(0.01)


async def test_scores_are_those_of_a_plain_pass_whatever_else_is_in_the_batch(
    client: EngineClient, serving: Serving
) -> None:
    lengths = [1, 40, 3, 700, 7, 2, 200, 11, 1, 64, CONTEXT - 1, 130, 513, 512]
    questions = [prompt(number, length) for number, length in enumerate(lengths)]
    check(serving.weights[0], questions, await client.classify(questions, rid="uneven"))
    for question in questions[:4]:
        check(serving.weights[0], [question], await client.classify([question], rid="alone"))


async def test_many_at_once_have_each_their_own_answer(client: EngineClient, serving: Serving) -> None:
    requests = [[prompt(31 * n + m, 5 + (n * m) % 40) for m in range(1 + 8 * n)] for n in range(8)]
    found = await asyncio.gather(*(client.classify(one, rid=f"many-{n}") for n, one in enumerate(requests)))
    for questions, scores in zip(requests, found, strict=True):
        check(serving.weights[0], questions, scores)


async def test_nothing_asked_is_nothing_answered(client: EngineClient) -> None:
    assert await client.classify([], rid="none") == ()


async def test_one_question_is_answered_with_an_object_and_its_name(http: httpx.AsyncClient, serving: Serving) -> None:
    answer = await post(http, "/classify", input_ids=prompt(1, 9), rid="mine")
    assert answer["embedding"] == [pytest.approx(plain(serving.weights[0], prompt(1, 9)), abs=TOLERANCE)]
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["weight_version"]) == ("mine", 9, "0.0")
    (listed,) = await post(http, "/classify", input_ids=[prompt(1, 9)])
    assert listed["embedding"] == pytest.approx(answer["embedding"], abs=TOLERANCE)


async def test_a_text_is_scored_as_its_tokens(http: httpx.AsyncClient, serving: Serving) -> None:
    answer = await post(http, "/classify", text="ab")
    assert answer["embedding"] == [pytest.approx(plain(serving.weights[0], [18, 19]), abs=TOLERANCE)]


async def test_a_question_that_fills_the_context_is_refused_and_the_engine_goes_on(
    client: EngineClient, serving: Serving
) -> None:
    with pytest.raises(EngineError, match=f"{CONTEXT} tokens") as raised:
        await client.classify([prompt(1, CONTEXT)], rid="long")
    assert not isinstance(raised.value, EngineUnreachable)
    check(serving.weights[0], [prompt(1, 3)], await client.classify([prompt(1, 3)], rid="short"))


async def test_it_says_what_it_serves_and_how_it_is(client: EngineClient, http: httpx.AsyncClient) -> None:
    assert await client.served() == FIRST
    assert await client.health()
    assert (await http.get("/model_info")).json()["is_generation"] is False
    assert (await client.scheduler_state())["model_path"]
    info = await client.info()
    assert (info.version, info.running, info.waiting) == (FIRST, 0, 0)


async def test_it_is_given_other_weights_as_an_engine_is(client: EngineClient, serving: Serving) -> None:
    questions = [prompt(3, 8), prompt(4, 80)]
    for folder, version in ((serving.weights[1], Version(0, 1)), (serving.weights[0], Version(0, 2))):
        await client.update_weights(str(folder), version)
        assert await client.served() == version
        check(folder, questions, await client.classify(questions, rid=f"with-{version}"))
    await client.call_weights(Version(1, 0))
    body = {"model_path": str(serving.weights[0]), "weight_version": "restored"}
    async with httpx.AsyncClient(base_url=serving.url, timeout=TIMEOUT_S, trust_env=False) as http:
        await post(http, "/update_weights_from_disk", **body)
        await post(http, "/update_weight_version", new_version=str(FIRST))


async def test_questions_wait_while_it_is_paused(client: EngineClient, serving: Serving) -> None:
    await client.pause("in_place")
    asked = asyncio.create_task(client.classify([prompt(5, 6)], rid="waits"))
    await asyncio.sleep(0.5)
    assert not asked.done()
    await client.resume()
    check(serving.weights[0], [prompt(5, 6)], await asked)


@pytest.mark.sglang
async def test_sglang_adds_no_bias_to_the_scores_of_a_qwen_classifier(tmp_path: Path) -> None:
    """Its head has a bias that the model's weights have not, and that it would leave as chance made it."""
    folder = make_tiny_classifier(tmp_path, kind="qwen3")
    with SglangProcess(folder, task="classify", batch_slots=SLOTS) as process:
        client = EngineClient(process.base_url, timeout_s=TIMEOUT_S)
        questions = [prompt(n, 3 + 50 * n) for n in range(4)]
        check(folder, questions, await client.classify(questions, rid="qwen"))
        await client.update_weights(str(folder), Version(0, 1))
        check(folder, questions, await client.classify(questions, rid="again"))
        await client.close()


# What the real SGLang does here is found in the module's first words.
@pytest.mark.parametrize("serving", ["torch"], indirect=True)
async def test_aborting_a_waiting_classification_leaves_others_running(client: EngineClient) -> None:
    await client.pause("in_place")
    asked = asyncio.create_task(client.classify([prompt(5, 6), prompt(6, 7)], rid="mine"))
    other = asyncio.create_task(client.classify([prompt(5, 6)], rid="other"))
    await until_waiting(client, 3)
    await client.abort("mine", 2)
    with pytest.raises(EngineGaveUp, match="aborted"):
        await asked
    await client.resume()
    assert len(await other) == 1


@pytest.mark.parametrize("serving", ["torch"], indirect=True)
async def test_a_client_that_goes_away_takes_its_questions_along(client: EngineClient) -> None:
    await client.pause("in_place")
    asked = asyncio.create_task(client.classify([prompt(5, 6)], rid="gone"))
    await until_waiting(client, 1)
    asked.cancel()
    await until_waiting(client, 0)
    await client.resume()


@pytest.mark.parametrize("serving", ["torch"], indirect=True)
async def test_classifier_refuses_to_generate_text(client: EngineClient) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=1)
    with pytest.raises(EngineError, match="does not generate text"):
        await client.generate([3], params, seeds=(1,), rid="words")


@pytest.mark.parametrize("serving", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param({}, "exactly one of text and input_ids", id="nothing"),
        pytest.param({"text": "a", "input_ids": [3]}, "exactly one of text and input_ids", id="both"),
        pytest.param({"input_ids": []}, "input_ids cannot be empty", id="no tokens"),
        pytest.param({"input_ids": [[3], []]}, "a question has no tokens", id="one without tokens"),
        pytest.param(
            {"input_ids": [VOCABULARY]}, f"token id {VOCABULARY} is not in the vocabulary", id="no such token"
        ),
        pytest.param({"input_ids": [-1]}, "token id -1 is not in the vocabulary", id="a negative token"),
        pytest.param({"input_ids": ["3"]}, "input_ids", id="tokens that are texts"),
        pytest.param({"input_ids": [[3], [4]], "rid": ["a"]}, "rid has 1 entries for 2 questions", id="too few names"),
        pytest.param(
            {"input_ids": [[3], [4]], "rid": ["a", "a"]}, "rid has the same name for two questions", id="names alike"
        ),
        pytest.param({"input_ids": [3], "lora_path": "x"}, "lora_path is not supported by this engine", id="adapters"),
    ],
)
async def test_nonsense_is_refused_in_one_sentence(http: httpx.AsyncClient, body: dict[str, Any], said: str) -> None:
    response = await http.post("/classify", json=body)
    assert response.status_code == 400
    assert said in response.text


@pytest.mark.parametrize("serving", ["torch"], indirect=True)
async def test_two_requests_of_one_name_are_not_under_way_together(client: EngineClient) -> None:
    await client.pause("in_place")
    asked = asyncio.create_task(client.classify([prompt(5, 6)], rid="same"))
    await until_waiting(client, 1)
    with pytest.raises(EngineError, match="a request with rid 'same-0' is already running"):
        await client.classify([prompt(5, 6)], rid="same")
    await client.resume()
    assert len(await asked) == 1
