"""Responses in which a tool returns a picture: real tool processes, blob stores and engines of two nodes."""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from blob_stores import Start, TwoStores
from engine_processes import TORCH, engine_process

from controllers.changes import ChangeSignal
from controllers.flow.episodes import EnvironmentEpisodes, EpisodeRequest
from controllers.flow.job_data import make_response
from controllers.workers.job_media import JobMedia
from gcore.config import parse_spec
from gcore.data.renderer import PromptRenderer
from gcore.media.client import BlobHttp, read_counters
from gcore.media.placeholders import PictureRule
from gcore.models.vision import PictureProcessor, media_token_ids, picture_arguments
from gcore.reward.api import RewardError
from gcore.reward.judges.template import response_pictures
from gcore.rollout.api import PicturesUnavailable, SamplingParams
from gcore.rollout.client import EngineClient
from gcore.rollout.environments.api import PICTURE, Done, Observation, Setting, Turn
from gcore.rollout.environments.pool import ToolPool
from gcore.system.clock import SystemClock
from gcore.testing.vision_models import IMAGE, VISION_END, VISION_START, make_picture, make_tiny_vision_model
from gcore.train.hf_models import load_module
from gcore.types import PictureRef, Prompt, PromptRef, Sample, Version, VersionSpan

JOB, HEAD, REF = "job", Version(0, 3), PromptRef(0, 0, 0)

TOOL = '''
import io
from PIL import Image
from gcore.rollout.environments.api import ToolResult

def crop(argument, pictures):
    """The right half of the newest picture, in twice its height."""
    image = Image.open(pictures[-1])
    half = image.crop((image.width // 2, 0, image.width, image.height)).resize((2 * image.width, 2 * image.height))
    file = io.BytesIO()
    half.save(file, "PNG")
    return ToolResult("8", [MAKE(file.getvalue())])
'''


class TurnsOnNodes:
    """Sends each turn of a response to the engine of the next node."""

    def __init__(self, clients: Sequence[tuple[str, EngineClient]]) -> None:
        self._clients = clients
        self.turns: list[tuple[str, int]] = []

    async def generate(
        self, version: Version, prompts: Any, params: SamplingParams, seeds: Any, rid: str, *_: Any, seat: Any
    ) -> tuple[Sample, ...]:
        node, client = self._clients[len(self.turns) % len(self._clients)]
        self.turns.append((node, len(prompts[0])))
        assert params.pictures is not None
        asked = replace(params, pictures=await params.pictures.at_node(node), max_new_tokens=3, stop=())
        made = await client.generate_each(prompts, asked, seeds=list(seeds), rid=rid)
        return tuple(replace(sample, finish_reason="stop") for sample in made)


class Always:
    """An environment that calls the tool after each of the first two turns."""

    def __init__(self, setting: Setting) -> None:
        self._tools = setting.tools

    async def reset(self) -> Observation:
        return Observation()

    async def step(self, turn: Turn) -> Observation | Done:
        if turn.number > 2:
            return Done(1.0)
        said = await self._tools.call("crop", "")
        return Observation(f"1{PICTURE}{said.text}", pictures=said.pictures)

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model"), seed=3)


def make_prompt(model: Path, folder: Path) -> Prompt:
    file = folder / "picture.png"
    file.write_bytes(make_picture(32, 32))
    picture = PictureRef(str(file), hashlib.sha256(file.read_bytes()).hexdigest(), 32, 32, 32, 32)
    short = (4, VISION_START, IMAGE, VISION_END, 7)
    expanded = PictureRule.load(model).expand(short, [(32, 32)])
    return Prompt(REF, "?", expanded, {}, "data", request_ids=short, pictures=(picture,))


def make_episodes(
    media: JobMedia, engines: Any, folder: Path, make: str, tools: dict[str, Any]
) -> tuple[EnvironmentEpisodes, ToolPool]:
    (folder / "tools.py").write_text(TOOL.replace("MAKE", make))
    spec = parse_spec(
        {
            "name": "job",
            "model": {"path": "m"},
            "data": {"path": "d", "images": "images"},
            "flow": {"steps": 3},
            "rollout": {"max_new_tokens": 40},
            "environment": {
                "name": "tools",
                "max_tokens": 200,
                "tools": {"names": [f"{folder}/tools.py:crop"], "timeout_s": 60.0} | tools,
            },
        }
    )
    assert spec.environment is not None
    pool = ToolPool(spec.environment.tools, SystemClock())
    episodes = EnvironmentEpisodes(spec, engines, pool, SystemClock(), lambda what, trace: None, media)
    episodes._maker = Always
    return episodes, pool


def make_request(model: Path, prompt: Prompt, *, trained: bool = True) -> EpisodeRequest:
    opened: Any = SimpleNamespace(renderer=PromptRenderer.load(model, chat=False), rule=PictureRule.load(model))
    return EpisodeRequest(HEAD, prompt, opened, SamplingParams(1.0, 40), trained=trained)


def plain_logprobs(model: Path, ids: Sequence[int], pictures: Sequence[Path]) -> torch.Tensor:
    """[token, vocabulary] of one forward pass over a whole response, without media tokens."""
    module: Any = load_module(model, torch.float32)
    processor = PictureProcessor(model)
    tokens = torch.tensor([list(ids)])
    arguments = picture_arguments([processor.read(one.name, one) for one in pictures], torch.device("cpu"))
    with torch.no_grad():
        logits = module(
            input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).long(), use_cache=False, **arguments
        ).logits[0]
    logits[:, list(media_token_ids(module.config))] = -torch.inf
    return torch.log_softmax(logits, -1)


async def test_a_response_with_pictures_of_a_tool_continues_at_the_engine_of_another_node(
    start: Start, http: BlobHttp, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    own, other = start("n1"), start("n2")
    other.set_nodes(own)
    prompt = make_prompt(model, tmp_path)
    stores: Any = TwoStores(own, other, http)
    media = JobMedia(stores, JOB, "n1.1", lambda: {REF}, frozenset, ChangeSignal(), str, SystemClock())
    assert await media.reserve(prompt, 10**7)
    with (
        engine_process(model, TORCH, batch_slots=2, blobs=str(own.folder / JOB)) as here,
        engine_process(model, TORCH, batch_slots=2, blobs=str(other.folder / JOB)) as away,
    ):
        clients = [(node, EngineClient(url, timeout_s=120)) for node, url in (("n1", here), ("n2", away))]
        engines = TurnsOnNodes(clients)
        episodes, pool = make_episodes(media, engines, tmp_path, "", {"max_pictures": 2})
        (sample,) = await episodes.side_by_side(make_request(model, prompt), [5], "a")
        (folder,) = (tmp_path / "temporary").iterdir()
        assert list(folder.iterdir()) == [], "the files of pictures that are stored are deleted"
        await pool.close()
        assert not folder.exists()
        for _, client in clients:
            await client.close()
    assert [node for node, _ in engines.turns] == ["n1", "n2", "n1"]
    counts = [16, 64]  # of 64 x 64 and 128 x 128 pixels
    assert [medium.shape for medium in sample.media] == [(64, 64, 3), (128, 128, 3)]
    assert [sample.token_ids[start:end].count(IMAGE) for start, end in sample.observed] == counts
    assert sample.own_tokens == 9
    assert dict(sample.reward_parts) == {"environment": 1.0}
    shown = [own.path(prompt_medium.sha256) for prompt_medium in (*await media.of(prompt), *sample.media)]
    for picture in shown:
        assert hashlib.sha256(picture.read_bytes()).hexdigest() == picture.name
    assert all(other.path(picture.name).exists() for picture in shown[:2]), "the other engine had what it needed"
    whole = [*prompt.token_ids, *sample.token_ids]
    table = plain_logprobs(model, whole, shown)
    seen = np.zeros(len(sample.token_ids), bool)
    for first, last in sample.observed:
        seen[first:last] = True
    for place, (token, told) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        expected = 0.0 if seen[place] else float(table[len(prompt.token_ids) + place - 1, token])
        assert told == pytest.approx(expected, abs=1e-5)
    counters = await read_counters(own.client(http, JOB).address, http)
    assert counters["reserved"] == 10**7 - sum(medium.size for medium in sample.media)
    await media.end_sampling(REF)
    counters = await read_counters(own.client(http, JOB).address, http)
    assert counters["reserved"] == 0
    assert counters["pinned"] == sum(picture.stat().st_size for picture in shown)
    await media.close(ended=False)


class Speaker:
    """Stands for engines: says one token in each turn."""

    async def generate(self, version: Version, *_: Any, seat: Any) -> tuple[Sample, ...]:
        return (Sample((5,), (-1.0,), "", "stop", (VersionSpan(version, 0, 1),)),)


async def test_pictures_of_tools_that_this_nodes_store_has_lost_are_scored_from_another_store(
    start: Start, http: BlobHttp, tmp_path: Path, model: Path
) -> None:
    own, other = start("n1"), start("n2")
    own.set_nodes(other)
    other.set_nodes(own)
    stores: Any = TwoStores(own, other, http)
    media = JobMedia(stores, JOB, "n1.1", lambda: {REF}, frozenset, ChangeSignal(), str, SystemClock())
    episodes, pool = make_episodes(media, Speaker(), tmp_path, "", {"max_pictures": 2})
    try:
        (sample,) = await episodes.side_by_side(make_request(model, make_prompt(model, tmp_path)), [5], "a")
        (small, large) = sample.media
        await media.name_pictures((), sample.media, 1, (1,)).at_node("n2")
        for medium in sample.media:
            own.path(medium.sha256).unlink()
        async with media.stored(sample.media):
            response = make_response(sample, (), media.picture_files(sample.media))
            assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in response.tool_pictures] == [
                small.sha256,
                large.sha256,
            ]
            (seen,) = [one for one in response_pictures(response) if one.sha256 == small.sha256]
            async with media.in_use((seen, seen._replace(target_height=32, target_width=32))) as shown:
                assert shown[0] == small
                assert shown[1].shape == (32, 32, 3), "a judge may see it in another size"
        for store in (own, other):
            store.path(small.sha256).unlink()
        with pytest.raises(PicturesUnavailable, match=f"picture {small.sha256} of a response was lost"):
            async with media.stored(sample.media):
                raise AssertionError("no store has it")
    finally:
        await pool.close()
        await media.close(ended=False)


@pytest.mark.parametrize(
    ("make", "tools", "words"),
    [
        ("(lambda data: data[:60])", {"max_pictures": 2}, "returned a picture that cannot be used: .*cut off"),
        ("(lambda data: b'GIF89a')", {"max_pictures": 2}, "not a PNG, JPEG or WebP"),
        ("(lambda data: '/nowhere.png')", {"max_pictures": 2}, "the picture does not exist"),
        (
            "",
            {"max_pictures": 2, "max_pixels": 64 * 64 - 1},
            "would see 64x64 = 4096 pixels; at most 4095 are allowed. Raise it",
        ),
        ("", {"max_pictures": 0}, "environment.tools.max_pictures is 0"),
        (
            "(lambda data: data[:300] + bytes(400) + data[700:])",
            {"max_pictures": 2},
            "picture 1 of a tool cannot be used",
        ),
    ],
)
async def test_a_picture_that_cannot_be_used_fails_the_response_with_the_reason(
    start: Start, http: BlobHttp, tmp_path: Path, model: Path, make: str, tools: dict[str, Any], words: str
) -> None:
    own = start("n1")
    stores: Any = TwoStores(own, own, http)
    media = JobMedia(stores, JOB, "n1.1", lambda: {REF}, frozenset, ChangeSignal(), str, SystemClock())
    episodes, pool = make_episodes(media, Speaker(), tmp_path, make, tools)
    try:
        with pytest.raises(RewardError, match=words) as caught:
            await episodes.side_by_side(make_request(model, make_prompt(model, tmp_path)), [5], "a")
        assert "the entry" not in str(caught.value), "that is what to do about pictures of the data"
    finally:
        await pool.close()
        await media.close(ended=False)


async def test_a_response_with_more_pictures_than_allowed_is_cut_off_before_the_next_one(
    start: Start, http: BlobHttp, tmp_path: Path, model: Path
) -> None:
    own = start("n1")
    stores: Any = TwoStores(own, own, http)
    media = JobMedia(stores, JOB, "n1.1", lambda: {REF}, frozenset, ChangeSignal(), str, SystemClock())
    episodes, pool = make_episodes(media, Speaker(), tmp_path, "", {"max_pictures": 1})
    try:
        (sample,) = await episodes.side_by_side(make_request(model, make_prompt(model, tmp_path)), [5], "a")
    finally:
        await pool.close()
        await media.close(ended=False)
    assert (sample.finish_reason, len(sample.media)) == ("length", 1)
    assert sample.token_ids.count(IMAGE) == 16
    assert sample.token_ids[-1] == 5, "the second picture is not in the response"


class Spells(Always):
    """An environment whose observation has the text of a placeholder."""

    async def step(self, turn: Turn) -> Observation | Done:
        return Observation("1<|image_pad|>")


async def test_an_observation_that_spells_a_placeholder_fails_the_response(
    start: Start, http: BlobHttp, tmp_path: Path, model: Path
) -> None:
    """Also in a source without pictures: a train rank takes each placeholder for a picture, and would fail."""
    own = start("n1")
    stores: Any = TwoStores(own, own, http)
    media = JobMedia(stores, JOB, "n1.1", lambda: {REF}, frozenset, ChangeSignal(), str, SystemClock())
    episodes, pool = make_episodes(media, Speaker(), tmp_path, "", {})
    episodes._maker = Spells
    try:
        with pytest.raises(RewardError, match="the prompt has 1 placeholder, but 0 pictures"):
            await episodes.side_by_side(make_request(model, Prompt(REF, "?", (4, 7), {}, "data")), [5], "a")
    finally:
        await pool.close()
        await media.close(ended=False)
