"""Pictures that an engine of another node generated, at rewards and judges: real blob stores, and a server of an external judge."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from blob_stores import Start, TwoStores
from engine_processes import TORCH, engine_process
from fake_openai import FakeOpenAI
from tiny_classifiers import make_tiny_clip
from tokenizers import Tokenizer
from transformers import CLIPModel

from controllers.changes import ChangeSignal
from controllers.flow.job_data import SourcePipeline
from controllers.inference.judge_engines import pictures_in_use
from controllers.inference.judges import ExternalJudges, JudgeMetricsObserver, judge_encoder, open_judges
from controllers.workers.job_media import JobMedia
from gcore.config import parse_spec
from gcore.config.reward import JudgeSpec
from gcore.media.client import BlobHttp
from gcore.media.pictures import encode_png
from gcore.models.vision import PictureProcessor
from gcore.observability.metrics import Metrics
from gcore.reward.api import OpenReward, Response, RewardResult, Scored
from gcore.reward.judges.template import Question
from gcore.reward.scorer import Scorer
from gcore.rollout.api import PicturesUnavailable
from gcore.rollout.client import EngineClient
from gcore.store.keys import JobKeys
from gcore.system.clock import SystemClock
from gcore.testing import MemoryCluster, MemoryStore
from gcore.types import DenoisingTrajectory, Medium, Prompt, PromptRef, Sample, Version, VersionSpan

JOB, REF = "job", PromptRef(0, 0, 0)
PROMPT = Prompt(REF, "red", (1,), {})
RED = """
from PIL import Image

def red(response):
    with Image.open(response.picture) as picture:
        return picture.getpixel((0, 0))[0] / 255
"""


class InThisProcess:
    """Scores with the function in a file, in this process."""

    def __init__(self) -> None:
        self.rewards: dict[str, OpenReward] = {}

    async def warm(self) -> None: ...

    async def score(self, spec: Any, fields: Mapping[str, Any], responses: Sequence[Any]) -> tuple[Scored, ...]:
        reward = self.rewards.setdefault(spec.name, OpenReward.of(spec))
        return tuple(reward.score_group(responses, fields))


def job(folder: Path, url: str) -> Any:
    (folder / "red.py").write_text(RED)
    external = {"url": url, "model": "m"}
    template = "Is it {{ prompt }}? {{ response }} Write a number."
    parts = [{"name": f"{folder}/red.py:red", "label": "red"}, {"judge": "eye"}]
    return parse_spec(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 1},
            "rollout": {"engine": "diffusers", "diffusion": {}},
            "train": {"clip_low": 1e-4, "clip_high": 1e-4},
            "judges": [{"name": "eye", "images": True, "template": template, "external": external, "tries": 1}],
            "reward": {"parts": parts},
        }
    )


def picture(red: int) -> bytes:
    return encode_png(np.full((16, 24, 3), (red, 0, 0), np.uint8))


def sample(*media: Medium) -> Sample:
    output = DenoisingTrajectory((0,), (1.0, 0.5), (-1.0,), (VersionSpan(Version(0, 0), 0, 1),), 7, media)
    return Sample(output=output, finish_reason="stop")


def read_picture(asked: Mapping[str, Any]) -> str:
    """The judge: the red of the picture, in the blob's own bytes."""
    kinds = [part["type"] for part in asked["messages"][0]["content"]]
    assert kinds == ["text", "image_url", "text"]
    url = asked["messages"][0]["content"][1]["image_url"]["url"]
    content = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    return "1.0" if content == picture(255) else "0.5"


async def test_a_reward_and_an_external_judge_see_the_bytes_that_an_engine_of_another_node_stored(
    start: Start, http: BlobHttp, tmp_path: Path
) -> None:
    own, other = start("n1"), start("n2")
    own.set_nodes(other)
    stores: Any = TwoStores(own, other, http)
    clock = SystemClock()
    media = JobMedia(stores, JOB, "n1.1", lambda: {REF}, frozenset, ChangeSignal(), str, clock)
    samples, engine = [], other.client(http, JOB)
    for red in (255, 51):
        content = picture(red)
        blob = await engine.put_bytes(content)
        drawn = Medium("decoded", blob.sha256, blob.size, (16, 24, 3), "uint8")
        samples.append(sample(Medium("trajectory", "ab" * 32, 4, (2, 4, 2, 3), "float32"), drawn))
    async with FakeOpenAI(read_picture) as fake:
        spec = job(tmp_path, fake.url)
        counts = JudgeMetricsObserver(Metrics(), lambda topic, said: None)
        mirror: Any = SimpleNamespace(members={"n1.1": None}, spent={}, revision=0, troubles={})
        external = ExternalJudges(
            spec,
            MemoryStore(MemoryCluster(clock)),
            JobKeys("u"),
            "n1",
            "n1.1",
            clock,
            counts,
            lambda: mirror,
            lambda: ["n1"],
            lambda topic, said: None,
            {},
            media,
        )
        judges = open_judges(spec, {}, counts, clock, external)
        source: Any = SimpleNamespace(reward=spec.reward)
        params: Any = None
        pipeline = SourcePipeline(source, params, Scorer(InThisProcess(), judges), media)
        await pipeline.judge_early(PROMPT, samples[0])
        results = await pipeline.scored(PROMPT, samples)
        assert results == (
            RewardResult(2.0, (("red", 1.0), ("eye", 1.0))),
            RewardResult(0.7, (("red", 0.2), ("eye", 0.5))),
        )
        assert len(fake.asked) == 2, "the verdict of the first picture was cached"
        drawn = samples[1].media[1]
        assert hashlib.sha256(own.path(drawn.sha256).read_bytes()).hexdigest() == drawn.sha256
        for store in (own, other):
            store.path(drawn.sha256).unlink()
        with pytest.raises(PicturesUnavailable, match=f"picture {drawn.sha256} of a response was lost"):
            await pipeline.scored(PROMPT, samples)
        await external.close()
    await media.close(ended=False)


def clip_score(folder: Path, text: str, content: bytes) -> float:
    """What transformers says of a picture alone."""
    module = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids])
    with torch.inference_mode():
        pixels = PictureProcessor(folder).read(hashlib.sha256(content).hexdigest(), content).arguments["pixel_values"]
        return float(module(input_ids=ids, pixel_values=pixels).logits_per_image[0, 0])


async def test_the_score_of_a_clip_model_on_another_node_is_that_of_transformers(
    start: Start, http: BlobHttp, tmp_path: Path
) -> None:
    own, other = start("n1"), start("n2")
    other.set_nodes(own)
    stores: Any = TwoStores(own, other, http)
    folder = make_tiny_clip(tmp_path / "clip", seed=5)
    media = JobMedia(stores, JOB, "n1.1", lambda: {REF}, frozenset, ChangeSignal(), str, SystemClock())
    tree = {"name": "eye", "kind": "classifier", "model": {"path": str(folder)}, "images": True}
    judge = JudgeSpec.model_validate(tree | {"template": "{{ prompt }}{{ response }}"})
    encoder, question = judge_encoder(0, judge, folder), Question.compile(judge, "judges.0", generates=True)
    contents, asked = [picture(red) for red in (255, 0, 51)], []
    for content in contents:
        blob = await own.client(http, JOB).put_bytes(content)
        drawn = Medium("decoded", blob.sha256, blob.size, (16, 24, 3), "uint8")
        response = Response("", picture_file=media.generated_picture([drawn]))
        text, pictures = question.about(PROMPT, response)
        short, tokens = encoder.encode(text, pictures, None)
        async with pictures_in_use(media, pictures, encoder.targets) as (targets, made):
            assert [one.sha256 for one in made] == [blob.sha256], "no other blob is made of it"
            named = await media.name_pictures(targets, made, len(short), tokens).at_node("n2")
            asked.append((short, named))
    with engine_process(folder, TORCH, task="classify", blobs=str(other.folder / JOB)) as url:
        client = EngineClient(url, timeout_s=120)
        scores = await client.classify([ids for ids, _ in asked], rid="a", pictures=[its for _, its in asked])
        await client.close()
    assert scores == pytest.approx([clip_score(folder, PROMPT.text, content) for content in contents], rel=1e-5)
    assert len(set(scores)) == len(scores)
    await media.close(ended=False)
