"""Classification of questions with pictures, on the engine that serves it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import picture_requests
import pytest
import torch
from engine_contract import post
from engine_processes import engine_process
from picture_requests import short, store_picture, text_of
from tiny_classifiers import make_tiny_classifier, make_tiny_seeing_classifier
from transformers import AutoModelForSequenceClassification

from gcore.errors import EngineError
from gcore.models.vision import PictureProcessor, picture_arguments
from gcore.rollout.api import RequestPictures
from gcore.rollout.client import EngineClient
from gcore.testing.vision_models import IMAGE, make_picture
from gcore.types import Version

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Seeing:
    """An engine that serves a classifier. `blobs`: the folder of a job's pictures on its node."""

    kind: str
    url: str
    model: Path
    other: Path
    blobs: Path


@pytest.fixture(scope="module", params=["gemma3", "qwen3_5"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    root = tmp_path_factory.mktemp("seeing")
    folder, other = (make_tiny_seeing_classifier(root / str(n), request.param, seed=n) for n in range(2))
    blobs = tmp_path_factory.mktemp("blobs")
    with engine_process(folder, task="classify", batch_slots=4, blobs=str(blobs)) as url:
        yield Seeing(request.param, url, folder, other, blobs)


ONE = pytest.mark.parametrize("seeing", ["gemma3"], indirect=True)
"""For what does not depend on the model."""


@pytest.fixture
async def http(seeing: Seeing) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=seeing.url, timeout=120, trust_env=False) as http:
        yield http


@pytest.fixture
async def client(seeing: Seeing) -> AsyncIterator[EngineClient]:
    client = EngineClient(seeing.url, timeout_s=120)
    yield client
    await client.close()


def placeholders(seeing: Seeing, height: int, width: int) -> int:
    return 4 if seeing.kind == "gemma3" else height * width // 256


def expanded(seeing: Seeing, ids: list[int], sizes: list[tuple[int, int]]) -> list[int]:
    return picture_requests.expanded(ids, [placeholders(seeing, *size) for size in sizes])


@cache
def loaded(folder: Path) -> tuple[Any, PictureProcessor]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return model, PictureProcessor(folder)


def plain(folder: Path, ids: list[int], pictures: list[bytes]) -> float:
    """The score of the plain model, which gets the pixels of one question."""
    model, processor = loaded(folder)
    tokens = torch.tensor([ids])
    read = [processor.read(hashlib.sha256(one).hexdigest(), one) for one in pictures]
    kinds = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    more: dict[str, Any] = {kinds: (tokens == IMAGE).int()}
    if read:
        more |= picture_arguments(read, torch.device("cpu"))
    with torch.inference_mode():
        return float(model(tokens, **more).logits[0, 0])


async def test_the_engine_says_that_it_sees(http: httpx.AsyncClient) -> None:
    told = (await http.get("/model_info")).json()
    assert (told["has_image_understanding"], told["is_generation"]) == (True, False)


async def test_scores_with_pictures_are_those_of_the_plain_model_for_any_batch(
    seeing: Seeing, http: httpx.AsyncClient
) -> None:
    sizes = [(32, 32), (64, 48), (32, 32)]
    a, b, c = (make_picture(*size, seed=seed) for seed, size in enumerate(sizes))
    cases: list[tuple[list[int], list[bytes], list[tuple[int, int]]]] = [
        ([4, 9, 7], [], []),
        (short([4], [7]), [a], sizes[:1]),
        (short([5, 3, 8], [7]), [a], sizes[:1]),
        (short([4], [7]), [c], sizes[2:]),
        (short([5, 3], [7, 8], [9]), [a, b], sizes[:2]),
        (short([5], [], [9]), [b, b], [sizes[1]] * 2),
    ]
    answers = await post(
        http,
        "/classify",
        input_ids=[ids for ids, _, _ in cases],
        image_data=[[text_of(one) for one in given] for _, given, _ in cases],
        return_prompt_token_ids=True,
    )
    for (ids, given, own), answer in zip(cases, answers, strict=True):
        whole = expanded(seeing, ids, own)
        assert answer["prompt_token_ids"] == whole
        assert answer["meta_info"]["prompt_tokens"] == len(whole)
        assert answer["embedding"] == [pytest.approx(plain(seeing.model, whole, given), abs=TOLERANCE)]
    assert answers[1]["embedding"] != pytest.approx(answers[3]["embedding"], abs=1e-3)


async def test_one_question_is_answered_with_an_object(seeing: Seeing, http: httpx.AsyncClient) -> None:
    picture = make_picture(32, 32)
    answer = await post(http, "/classify", input_ids=short([4], [7]), image_data=text_of(picture))
    whole = expanded(seeing, short([4], [7]), [(32, 32)])
    assert answer["embedding"] == [pytest.approx(plain(seeing.model, whole, [picture]), abs=TOLERANCE)]
    assert "prompt_token_ids" not in answer


async def test_the_client_sends_paths_and_checks_the_tokens_that_the_engine_reports(
    seeing: Seeing, client: EngineClient
) -> None:
    picture, ids = make_picture(32, 32, seed=8), short([4, 9], [7])
    whole = expanded(seeing, ids, [(32, 32)])

    async def provide(node: str) -> str:
        assert node == "n"
        return str(seeing.blobs)

    given = RequestPictures((store_picture(seeing.blobs, picture),), len(ids), tuple(whole), provide)
    scores = await client.classify([[4, 5], ids], rid="a", pictures=[None, await given.at_node("n")])
    assert scores == tuple(
        pytest.approx(plain(seeing.model, tokens, shown), abs=TOLERANCE)
        for tokens, shown in (([4, 5], []), (whole, [picture]))
    )
    wrong = await replace(given, token_ids=(*whole[:-1], 9)).at_node("n")
    with pytest.raises(EngineError, match="is 7 instead of 9: it expands pictures differently"):
        await client.classify([ids], rid="b", pictures=[wrong])


@ONE
@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param([], "has 1 placeholders of pictures .* and 0 pictures", id="no picture"),
        pytest.param([text_of(make_picture(32, 32))] * 2, "has 1 placeholders .* and 2 pictures", id="two pictures"),
        pytest.param([text_of(b"no picture")], "the picture cannot be read", id="no picture file"),
        pytest.param([text_of(make_picture(32, 32)[:60])], "the picture cannot be read", id="a broken file"),
        pytest.param([{"blob": "sha256:" + "0" * 64}], "the picture cannot be read", id="a missing blob"),
        pytest.param([{"blob": "../../etc/passwd"}], "sha256:HEX", id="a name that is no digest"),
        pytest.param(["/etc/passwd"], "not in this engine's folder of blobs", id="a foreign file"),
        pytest.param(["https://example.org/a.png"], "opens no URLs", id="a URL"),
        pytest.param(["not base64!"], "not base64", id="no base64"),
    ],
)
async def test_an_invalid_picture_is_refused_in_one_sentence_and_the_engine_lives(
    seeing: Seeing, http: httpx.AsyncClient, client: EngineClient, given: Any, why: str
) -> None:
    response = await http.post("/classify", json={"input_ids": short([4, 9], [7]), "image_data": given})
    assert response.status_code == 400
    assert re.search(why, response.text)
    assert len(await client.classify([[4, 5]], rid="next")) == 1


@ONE
async def test_a_batch_has_a_list_of_pictures_for_each_question(http: httpx.AsyncClient) -> None:
    body = {"input_ids": [short([4], [7])] * 2, "image_data": [[text_of(make_picture(32, 32))]]}
    response = await http.post("/classify", json=body)
    assert response.status_code == 400
    assert "image_data of a batch is not a list with one list for each question" in response.text


@ONE
async def test_the_context_counts_all_tokens_of_pictures(http: httpx.AsyncClient) -> None:
    picture, ids = text_of(make_picture(32, 32)), short([4] * 1017, [7])  # 1021 tokens, and 1024 with the picture
    response = await http.post("/classify", json={"input_ids": ids, "image_data": [picture]})
    assert response.status_code == 400
    assert "a question of 1024 tokens does not fit into the context of 1024 tokens" in response.text


async def test_new_weights_reach_tower_and_head(seeing: Seeing, client: EngineClient, http: httpx.AsyncClient) -> None:
    picture, ids = make_picture(32, 32, seed=3), short([4, 9], [7])
    whole = expanded(seeing, ids, [(32, 32)])
    for folder, version in ((seeing.other, Version(0, 1)), (seeing.model, Version(0, 2))):
        await client.update_weights(str(folder), version)
        answer = await post(http, "/classify", input_ids=ids, image_data=[text_of(picture)])
        assert answer["embedding"] == [pytest.approx(plain(folder, whole, [picture]), abs=TOLERANCE)]


async def test_a_classifier_of_text_refuses_pictures_by_name(tmp_path: Path) -> None:
    with engine_process(make_tiny_classifier(tmp_path), task="classify") as url:
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            response = await http.post(
                "/classify", json={"input_ids": [4], "image_data": [text_of(make_picture(32, 32))]}
            )
            assert response.status_code == 400
            assert "this engine takes no pictures" in response.text
            assert len((await post(http, "/classify", input_ids=[4], image_data=[]))["embedding"]) == 1
