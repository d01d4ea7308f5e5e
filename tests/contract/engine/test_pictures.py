"""Pictures in prompts of a vision-language model."""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_contract import FIRST, OF_SGLANG, TOLERANCE, generate, post, spans
from engine_processes import HF, TORCH, SglangProcess, engine_process
from picture_requests import expanded, short, store_picture, text_of
from PIL import Image
from safetensors.torch import load_file, save_file
from trainer_process import Trainer, joined, updated
from transformers import AutoModelForImageTextToText

from gcore.errors import EngineError
from gcore.media.protocol import blob_path
from gcore.models.vision import PictureProcessor, PositionCounter, media_token_ids, picture_arguments
from gcore.rollout.api import ProgressCallback, RequestPictures, SamplingParams
from gcore.rollout.client import EngineClient
from gcore.system.network import free_ports
from gcore.testing.vision_models import (
    IMAGE,
    VISION_END,
    VISION_START,
    make_picture,
    make_tiny_vision_model,
)
from gcore.types import Sample

pytestmark = pytest.mark.timeout(900)  # SGLang imports all of its models when it starts

LONG = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 5}


@dataclass(frozen=True)
class Seeing:
    """An engine that serves a vision-language model. `blobs`: the folder of a job's pictures on its node."""

    kind: str
    url: str
    model: Path
    blobs: Path


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision"), seed=3)


@pytest.fixture(scope="module", params=["torch", "hf", OF_SGLANG])
def seeing(
    request: pytest.FixtureRequest, vision_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seeing]:
    blobs = tmp_path_factory.mktemp("blobs")
    if request.param != "sglang":
        command = TORCH if request.param == "torch" else HF
        with engine_process(vision_model, command, batch_slots=8, blobs=str(blobs)) as url:
            yield Seeing(request.param, url, vision_model, blobs)
    else:
        with SglangProcess(vision_model, batch_slots=8) as process:
            yield Seeing("sglang", process.base_url, vision_model, blobs)


@pytest.fixture
async def http(seeing: Seeing) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=seeing.url, timeout=120, trust_env=False) as http:
        yield http


FRONT_END = pytest.mark.parametrize("seeing", ["torch", "hf"], indirect=True)
"""The engines behind gcore's own HTTP front end."""


@cache
def loaded(folder: Path) -> tuple[Any, PictureProcessor]:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32), PictureProcessor(folder)


def plain_logprobs(folder: Path, ids: list[int], pictures: list[bytes], *, masked: bool = True) -> torch.Tensor:
    """[token, vocabulary] from one forward pass of the plain model. `masked`: without media tokens."""
    model, processor = loaded(folder)
    tokens = torch.tensor([ids])
    read = [processor.read(hashlib.sha256(one).hexdigest(), one) for one in pictures]
    more: dict[str, Any] = {}
    if read:
        more = picture_arguments(read, torch.device("cpu")) | {"mm_token_type_ids": (tokens == IMAGE).int()}
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False, **more).logits[0]
        if masked:
            logits[:, list(media_token_ids(model.config))] = -torch.inf
        return torch.log_softmax(logits, -1)


def check(seeing: Seeing, answer: dict[str, Any], prompt: list[int], pictures: list[bytes]) -> None:
    """The answer's log-probabilities are those of a forward pass of the plain model."""
    told = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in told] == answer["output_ids"]
    assert answer["meta_info"]["prompt_tokens"] == len(prompt)
    table = plain_logprobs(seeing.model, prompt + answer["output_ids"], pictures)
    for index, (logprob, token, _) in enumerate(told, len(prompt) - 1):
        assert abs(float(table[index, token]) - logprob) <= TOLERANCE[seeing.kind]


async def answered(seeing: Seeing, http: httpx.AsyncClient, ids: Any, pictures: Any, **params: Any) -> Any:
    return await generate(
        http,
        input_ids=ids,
        image_data=pictures,
        sampling_params=LONG | params,
        return_logprob=True,
        return_prompt_token_ids=True,
    )


@FRONT_END
async def test_a_model_that_sees_says_so(seeing: Seeing, http: httpx.AsyncClient) -> None:
    assert (await http.get("/model_info")).json()["has_image_understanding"] is True


async def test_a_response_to_a_picture_has_the_probabilities_of_the_plain_model(
    seeing: Seeing, http: httpx.AsyncClient
) -> None:
    picture, ids = make_picture(32, 32, seed=1), short([4, 9], [7])
    answer = await answered(seeing, http, ids, [text_of(picture)])
    assert answer["prompt_token_ids"] == expanded(ids, [4])
    check(seeing, answer, expanded(ids, [4]), [picture])


async def test_two_pictures_of_unequal_size(seeing: Seeing, http: httpx.AsyncClient) -> None:
    pictures = [make_picture(64, 48, seed=2), make_picture(32, 32, seed=1)]
    ids = short([4, 9], [7], [8])
    answer = await answered(seeing, http, ids, [text_of(one) for one in pictures])
    assert answer["prompt_token_ids"] == expanded(ids, [12, 4])
    check(seeing, answer, expanded(ids, [12, 4]), pictures)


async def test_equal_tokens_with_other_pictures_share_no_prefix(seeing: Seeing, http: httpx.AsyncClient) -> None:
    ids = short([4, 9, 5, 6, 7, 8], [7])
    for seed in (1, 2, 1):
        picture = make_picture(32, 32, seed=seed)
        answer = await answered(seeing, http, ids, [text_of(picture)])
        check(seeing, answer, expanded(ids, [4]), [picture])


async def test_a_batch_of_prompts_with_and_without_pictures(seeing: Seeing, http: httpx.AsyncClient) -> None:
    same, other = make_picture(32, 32, seed=1), make_picture(64, 32, seed=4)
    cases = [([4, 9, 7], [], []), (short([4], [7]), [same], [4]), (short([5, 3], [7]), [same], [4])]
    cases.append((short([5, 3], [7, 8]), [other], [8]))
    answers = await answered(
        seeing, http, [ids for ids, _, _ in cases], [[text_of(one) for one in given] for _, given, _ in cases]
    )
    for (ids, given, counts), answer in zip(cases, answers, strict=True):
        check(seeing, answer, expanded(ids, counts), given)


async def test_several_samples_of_one_prompt(seeing: Seeing, http: httpx.AsyncClient) -> None:
    picture, ids = make_picture(32, 32, seed=1), short([4, 9], [7])
    answers = await answered(seeing, http, ids, [text_of(picture)], n=3)
    assert len(answers) == 3
    for answer in answers:
        check(seeing, answer, expanded(ids, [4]), [picture])


@pytest.mark.parametrize("pictures", [0, 2])
async def test_another_number_of_pictures_than_placeholders_is_refused_or_seen_in_the_prompt_tokens(
    seeing: Seeing, http: httpx.AsyncClient, pictures: int
) -> None:
    ids, picture = short([4, 9], [7]), text_of(make_picture(32, 32))
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}, "return_prompt_token_ids": True}
    response = await http.post("/generate", json=body | {"image_data": [picture] * pictures})
    if seeing.kind != "sglang":
        assert response.status_code == 400
    else:  # SGLang ignores surplus pictures, and takes a placeholder without a picture for text
        assert response.json()["prompt_token_ids"].count(IMAGE) != 4 * pictures
    answer = await answered(seeing, http, ids, [picture])
    assert answer["output_ids"]


async def test_media_tokens_are_never_sampled(seeing: Seeing, http: httpx.AsyncClient) -> None:
    params = {"temperature": 50.0, "max_new_tokens": 400, "ignore_eos": True}
    picture = text_of(make_picture(32, 32))
    answer = await answered(seeing, http, short([4, 9], [7]), [picture], **params)
    assert not {VISION_START, IMAGE} & set(answer["output_ids"])


async def test_media_tokens_have_no_probability_for_weights_that_favour_them(
    seeing: Seeing, changing: httpx.AsyncClient, tmp_path: Path
) -> None:
    model, _ = loaded(seeing.model)
    favouring = tmp_path / "favouring"
    shutil.copytree(seeing.model, favouring)
    tensors = load_file(favouring / "model.safetensors")
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.language_model.embed_tokens.weight"
    assert tensors[head].shape == model.lm_head.weight.shape
    for token in (VISION_START, IMAGE):
        tensors[head][token] *= 100
    save_file(tensors, favouring / "model.safetensors", metadata={"format": "pt"})
    await post(changing, "/update_weights_from_disk", model_path=str(favouring), weight_version="0.1")
    picture, ids = make_picture(32, 32), short([4, 9], [7])
    answer = await answered(seeing, changing, ids, [text_of(picture)], max_new_tokens=40, ignore_eos=True)
    whole = expanded(ids, [4]) + answer["output_ids"]
    assert not {VISION_START, IMAGE} & set(answer["output_ids"])
    check(replace(seeing, model=favouring), answer, expanded(ids, [4]), [picture])
    table = plain_logprobs(favouring, whole, [picture], masked=False)
    assert float(table[len(whole) - 40 :, [VISION_START, IMAGE]].exp().sum(-1).max()) > 0.9  # without the mask


async def test_a_picture_may_be_a_path_or_a_data_url(seeing: Seeing, http: httpx.AsyncClient) -> None:
    picture, ids = make_picture(32, 32, seed=6), short([4, 9], [7])
    path = seeing.blobs / blob_path(store_picture(seeing.blobs, picture).sha256)
    for given in (str(path), f"file://{path}", f"data:image/png;base64,{text_of(picture)}"):
        check(seeing, await answered(seeing, http, ids, [given]), expanded(ids, [4]), [picture])


@FRONT_END
async def test_a_picture_may_be_a_blob(seeing: Seeing, http: httpx.AsyncClient) -> None:
    picture, ids = make_picture(32, 32, seed=7), short([4, 9], [7])
    answer = await answered(seeing, http, ids, [{"blob": f"sha256:{store_picture(seeing.blobs, picture).sha256}"}])
    check(seeing, answer, expanded(ids, [4]), [picture])


@pytest.fixture
async def client(seeing: Seeing) -> AsyncIterator[EngineClient]:
    client = EngineClient(seeing.url, timeout_s=120)
    yield client
    await client.close()


async def test_the_client_sends_paths_and_checks_the_prompt_that_the_engine_reports(
    seeing: Seeing, client: EngineClient
) -> None:
    pictures = [make_picture(32, 32, seed=8), make_picture(64, 32, seed=9)]
    ids = short([4, 9], [7], [8])

    async def provide(node: str) -> str:
        assert node == "n"
        return str(seeing.blobs)

    given = RequestPictures(
        tuple(store_picture(seeing.blobs, one) for one in pictures), len(ids), tuple(expanded(ids, [4, 8])), provide
    )
    made: list[tuple[int, Sample]] = []
    growing = ProgressCallback(4, lambda place, sample: made.append((place, sample)))
    params = SamplingParams(1.0, 12, stop_token_ids=(), pictures=await given.at_node("n"))
    prompts = [ids, [*ids, 5, 6]]  # the second goes on after tokens of another engine
    samples = await client.generate_each(prompts, params, seeds=[1, 2], rid="a", growing=growing)
    assert {place for place, _ in made} == {0, 1}
    for prompt, sample in zip(prompts, samples, strict=True):
        whole = expanded(prompt, [4, 8])
        table = plain_logprobs(seeing.model, [*whole, *sample.token_ids], pictures)
        told = torch.tensor(sample.logprobs)
        rows = torch.arange(len(whole) - 1, len(whole) - 1 + len(sample.token_ids))
        assert float((table[rows, list(sample.token_ids)] - told).abs().max()) < TOLERANCE[seeing.kind]
    wrong = replace(given, token_ids=(*given.token_ids[:-1], 9))
    params = replace(params, pictures=await wrong.at_node("n"))
    with pytest.raises(EngineError, match="is 8 instead of 9: it expands pictures differently"):
        await client.generate_each([ids], params, seeds=[1], rid="b")


async def test_a_response_continues_after_a_picture_that_a_tool_returned(
    seeing: Seeing, http: httpx.AsyncClient
) -> None:
    first, tool = make_picture(32, 32, seed=1), make_picture(48, 64, seed=2)
    prompt = short([4, 9], [7])
    (turn,) = await answered(seeing, http, [prompt], [[text_of(first)]], max_new_tokens=4)
    said = turn["output_ids"]
    longer = [*prompt, *said, VISION_START, IMAGE, VISION_END, 8]
    whole = expanded(longer, [4, 12])
    (following,) = await answered(seeing, http, [longer], [[text_of(one) for one in (first, tool)]])
    assert following["prompt_token_ids"] == whole
    check(seeing, following, whole, [first, tool])
    part = following["output_ids"][:5]  # another engine has seen neither turn
    pictures = [[text_of(one) for one in (first, tool)]]
    (rest,) = await answered(seeing, http, [[*longer, *part]], pictures, sampling_seed=6)
    check(seeing, rest, [*whole, *part], [first, tool])


def _gif() -> str:
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "GIF")
    return text_of(file.getvalue())


INVALID = pytest.mark.parametrize(
    ("given", "why"),
    [
        ("https://example.org/a.png", "opens no URLs"),
        ("/etc/passwd", "not in this engine's folder"),
        ({"blob": "sha256:" + "0" * 64}, "cannot be read"),
        ({"blob": "../../etc/passwd"}, "sha256:HEX"),
        ({"path": "/etc/passwd"}, "sha256:HEX"),
        ("not base64!", "not base64"),
        (text_of(b"no picture"), "cannot be read"),
        (text_of(make_picture(32, 32)[:60]), "cannot be read"),
    ],
)


@INVALID
async def test_an_invalid_picture_is_refused(seeing: Seeing, http: httpx.AsyncClient, given: Any, why: str) -> None:
    body = {"input_ids": short([4, 9], [7]), "image_data": [given], "sampling_params": {"max_new_tokens": 2}}
    response = await http.post("/generate", json=body, headers={"Connection": "close"})
    if seeing.kind != "sglang":
        assert response.status_code == 400
        assert why in response.text
    else:
        assert response.status_code in (400, 500)
        assert (await answered(seeing, http, short([4, 9], [7]), [text_of(make_picture(32, 32))]))["output_ids"]


def test_positions_continue_after_the_largest_of_a_picture(vision_model: Path) -> None:
    model, processor = loaded(vision_model)
    picture = processor.read("a", make_picture(64, 48))
    assert picture.grid is not None
    positions, shift = PositionCounter(model).count(expanded(short([4, 9], [7]), [12]), [picture.grid])
    assert positions[:, -1].tolist() == [2 + 1 + 4 + 1] * 3  # text, start, the larger side, end
    assert shift == 4 - 12


@pytest.fixture
async def changing(seeing: Seeing, http: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    """Afterwards the first weights are served again."""
    yield http
    await http.post("/continue_generation", json={})
    for name in ("restored", FIRST):  # versions only rise; a name that is no version comes between
        await post(http, "/update_weights_from_disk", model_path=str(seeing.model), weight_version=name)


@pytest.mark.parametrize("way", ["folder", "broadcast"])
async def test_new_weights_reach_the_tower_and_the_language_model(
    seeing: Seeing, changing: httpx.AsyncClient, tmp_path: Path, way: str
) -> None:
    second = make_tiny_vision_model(tmp_path, seed=4)
    picture, ids = make_picture(32, 32, seed=1), short([4, 9], [7])
    given = [text_of(picture)]
    before = await answered(seeing, changing, ids, given)
    check(seeing, before, expanded(ids, [4]), [picture])
    if way == "folder":
        await post(changing, "/update_weights_from_disk", model_path=str(second), weight_version="0.1")
    else:
        trainer = Trainer(second, free_ports(1)[0], "weights")
        try:
            async with joined(changing, trainer):
                await post(changing, "/begin_weight_update")
                assert (await updated(changing, trainer, weight_version="0.1")).status_code == 200
                await post(changing, "/end_weight_update")
        finally:
            trainer.process.kill()
            trainer.process.communicate()
    answer = await answered(seeing, changing, ids, given)  # the same picture: its old features are of no use
    assert [version for version, _, _ in spans(answer)] == ["0.1"]
    check(replace(seeing, model=second), answer, expanded(ids, [4]), [picture])
