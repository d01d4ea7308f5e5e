"""Questions with pictures to the engines of a judge: tokens, sizes, blobs, and what the engine says it ran on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from picture_models import token_ids, write_picture_model

from controllers.api.submission.checks import CheckedJudge
from controllers.changes import ChangeSignal
from controllers.inference.judge_engines import JudgePool
from controllers.inference.judges import JudgeMetricsObserver, judge_encoder, open_judges
from gcore.config import JobSpec, parse_spec
from gcore.errors import DataError, EngineUnreachable, SpecError
from gcore.media.pictures import PictureError
from gcore.media.placeholders import PictureRule
from gcore.models.resolve import ResolvedModel
from gcore.observability.metrics import Metrics
from gcore.reward.judges.judge import Judge
from gcore.reward.judges.template import Question
from gcore.reward.judges.types import IMAGE_MARK, JudgeAway, JudgeError, Unjudgeable
from gcore.rollout.api import PicturesUnavailable, RequestPictures
from gcore.rollout.client import EngineClient
from gcore.testing import FakeClock
from gcore.types import Medium, PictureRef, Prompt, PromptRef
from gcore.worker.records import WorkerRecord

PAD, START, END = (token_ids()[one] for one in ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"))
PICTURE = PictureRef("/data/a.png", "ab" * 32, 48, 32, 48, 32)
BLOB = "cd" * 32
WRITTEN = "<|vision_start|><|image_pad|><|vision_end|>"


class Media:
    """Stands for the media of the job on this controller."""

    def __init__(self) -> None:
        self.used: list[tuple[PictureRef, ...]] = []
        self.copied: list[str] = []
        self.open = 0
        self.error: Exception | None = None
        self.lost = False

    @contextlib.asynccontextmanager
    async def in_use(self, pictures: tuple[PictureRef, ...]) -> AsyncIterator[tuple[Medium, ...]]:
        if self.error is not None:
            raise self.error
        self.used.append(pictures)
        self.open += 1
        try:
            yield tuple(Medium("picture", BLOB, 9, (48, 32, 3), "uint8") for _ in pictures)
        finally:
            self.open -= 1

    def name_pictures(
        self, pictures: tuple[PictureRef, ...], media: tuple[Medium, ...], short: int, token_ids: tuple[int, ...]
    ) -> RequestPictures:
        async def provide(node: str) -> str:
            assert self.open
            if self.lost:
                raise PicturesUnavailable(f"{node} could not fetch it")
            self.copied.append(node)
            return f"/{node}/u"

        return RequestPictures(media, short, token_ids, provide)


class Court:
    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.clock, self.media, self.metrics = FakeClock(), Media(), Metrics()
        self.asked: list[Any] = []
        self.ran_on: list[int] | None = None
        media: Any = self.media
        self.pool = JudgePool(
            spec, spec.judges[0], "u", "a.1", ChangeSignal(), self.clock, self.metrics, self.connect, media
        )

    def connect(self, url: str, *, timeout_s: float, instance: str) -> EngineClient:
        return EngineClient(url, timeout_s=timeout_s, transport=httpx.MockTransport(self.answer))

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return httpx.Response(200, json={"weight_version": "0.0", "success": True})
        body = json.loads(request.content)
        self.asked.append(body)
        short, pad = body["input_ids"][0], PAD
        expanded = [one for token in short for one in ([token] * 6 if token == pad else [token])]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0.0", "completion_tokens": 1}
        one = {"text": "1", "output_ids": [49], "meta_info": meta | {"output_token_logprobs": [[0.0, 49, None]]}}
        one["prompt_token_ids"] = self.ran_on or expanded
        return httpx.Response(200, json=[one] * len(body["input_ids"]))

    async def judge(self) -> Judge:
        told: dict[str, Any] = {"node": "far", "role": "reward", "judge": "eye", "job_uid": "u", "slot": "cpu:0"}
        told |= {"instance": "e", "state": "serving", "pid": 1, "pid_started": 1, "address": "e:1"}
        await self.pool.aim({"e": WorkerRecord.model_validate(told)})
        self.pool.look_after(1)
        for _ in range(20):
            await asyncio.sleep(0)
        counts = JudgeMetricsObserver(self.metrics, lambda topic, said: None)
        return open_judges(self.spec, {"eye": self.pool}, counts, self.clock)["eye"]

    async def value(self, response: str) -> float:
        prompt = Prompt(PromptRef(0, 0, 0), f"{WRITTEN}red?", (1,), {}, pictures=(PICTURE,))
        return (await self.clock.run((await self.judge()).value(prompt, response))).value


def spec_with(folder: Path, **judge: Any) -> JobSpec:
    write_picture_model(folder / "policy", patch=4)
    write_picture_model(folder / "judge")
    told = {"name": "eye", "model": {"path": str(folder / "judge")}, "images": True, "max_new_tokens": 2, "tries": 1}
    tree: dict[str, Any] = {"name": "t", "model": {"path": str(folder / "policy")}, "flow": {"steps": 1}}
    tree |= {"data": {"path": "d", "images": "images"}, "rollout": {"max_new_tokens": 4}, "reward": {"judge": "eye"}}
    return parse_spec(tree | {"judges": [told | {"template": "{{ prompt }}{{ response }}"} | judge]})


@pytest.fixture
async def court(tmp_path: Path) -> AsyncIterator[Court]:
    made = Court(spec_with(tmp_path))
    yield made
    await made.pool.close()


async def test_a_question_names_the_blobs_of_its_pictures(court: Court) -> None:
    assert await court.value("3") == 1.0
    (body,) = court.asked
    assert body["image_data"] == [[f"/far/u/cd/{BLOB}"]]
    assert body["input_ids"][0][:3] == [START, PAD, END]
    assert body["return_prompt_token_ids"]
    assert (
        court.metrics.registry.get_sample_value("gcore_judge_tokens_total", {"judge": "eye", "part": "question"}) == 13
    )
    assert court.media.copied == ["far"]
    assert court.media.open == 0


async def test_pictures_have_the_size_of_the_judges_own_processor(tmp_path: Path) -> None:
    settings = tmp_path / "judge" / "preprocessor_config.json"
    spec = spec_with(tmp_path)
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"size": {"shortest_edge": 256, "longest_edge": 256}})
    )
    encoder = judge_encoder(0, spec.judges[0], tmp_path / "judge")
    (target,) = encoder.targets((PICTURE,))
    assert (target.target_height, target.target_width) == (16, 16)
    assert target.sha256 == PICTURE.sha256
    short, tokens = encoder.encode(f"{IMAGE_MARK}?", (PICTURE,), None)
    assert (short.count(PAD), tokens.count(PAD)) == (1, 1)


async def test_an_engine_that_ran_on_other_tokens_gives_no_verdict(court: Court) -> None:
    court.ran_on = [START, *[PAD] * 5, END]
    with pytest.raises(
        JudgeError, match="the engine ran on 7 prompt tokens instead of 13: it expands pictures differently"
    ):
        await court.value("3")


async def test_a_response_that_spells_a_picture_is_not_judged(court: Court) -> None:
    with pytest.raises(JudgeError, match="2 placeholders, but 1 picture"):
        await court.value("<|image_pad|>")
    with pytest.raises(JudgeError, match=r"contains '<\|video_pad\|>', which is not a picture"):
        await court.value("<|video_pad|>")
    assert not court.asked


async def test_a_chat_template_writes_the_pictures(tmp_path: Path) -> None:
    court = Court(spec_with(tmp_path, chat=True, template="{{ images }}{{ response }}"))
    assert await court.value("3") == 1.0
    encoder = judge_encoder(0, court.spec.judges[0], tmp_path / "judge")
    asked = encoder.renderer.tokenizer.spell(court.asked[0]["input_ids"][0])
    assert asked == f"<|im_start|>user\n{WRITTEN}3<|im_end|>\n<|im_start|>assistant\n"
    await court.pool.close()


async def test_the_whole_of_a_picture_counts_for_the_judges_context(tmp_path: Path) -> None:
    court = Court(spec_with(tmp_path, model={"path": str(tmp_path / "judge"), "max_length": 14}))
    with pytest.raises(JudgeError, match=r"13 tokens, and with max_new_tokens .2. more than the 14"):
        await court.value("3")
    await court.pool.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(PictureError("the picture changed"), Unjudgeable), (EngineUnreachable("the store is gone"), JudgeAway)],
)
async def test_blobs_that_cannot_be_made_say_whether_the_question_is_repeated(
    court: Court, error: Exception, kind: type[JudgeError]
) -> None:
    court.media.error = error
    with pytest.raises(kind):
        await court.value("3")


async def test_a_store_that_does_not_get_the_blobs_is_as_an_engine_that_is_away(court: Court) -> None:
    court.media.lost = True
    with pytest.raises(JudgeAway, match="far could not fetch it"):
        await court.value("3")
    assert not court.asked
    assert court.media.open == 0


def test_submission_counts_the_tokens_of_pictures_for_the_judges_context(tmp_path: Path) -> None:
    prompt = Prompt(PromptRef(0, 0, 0), f"{WRITTEN}red?", (1,), {}, pictures=(PICTURE,))
    for longest, fits in ((15, True), (14, False)):
        spec = spec_with(tmp_path, model={"path": str(tmp_path / "judge"), "max_length": longest})
        rule, encoder = PictureRule.load(tmp_path / "policy"), judge_encoder(0, spec.judges[0], tmp_path / "judge")
        question = Question.compile(spec.judges[0], "judges.0", rule.picture_text)
        checked = CheckedJudge(0, spec.judges[0], question, encoder=encoder)
        with contextlib.nullcontext() if fits else pytest.raises(SpecError, match="has 12 tokens, which with max_new"):
            checked.check_question(prompt, "data")


@pytest.mark.parametrize(
    ("vision", "template", "refused"),
    [(True, "{{ prompt }}", True), (True, "red?", False), (False, "{{ prompt }}", False)],
)
def test_submission_refuses_tokens_of_pictures_without_pictures(
    tmp_path: Path, vision: bool, template: str, refused: bool
) -> None:
    prompt = Prompt(PromptRef(0, 0, 0), f"{WRITTEN}red?", (1,), {}, pictures=(PICTURE,))
    spec = spec_with(tmp_path, images=False, template=template + "{{ response }}")
    if not vision:
        (tmp_path / "judge" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    question = Question.compile(spec.judges[0], "judges.0")
    encoder = judge_encoder(0, spec.judges[0], tmp_path / "judge")
    checked = CheckedJudge(0, spec.judges[0], question, ResolvedModel(tmp_path / "judge"), encoder)
    with pytest.raises(SpecError, match=r"Set judges.0.images: true") if refused else contextlib.nullcontext():
        checked.check_question(prompt, "data")


def test_a_judge_without_vision_is_refused_by_its_own_fields(tmp_path: Path) -> None:
    spec = spec_with(tmp_path)
    config = tmp_path / "judge" / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(DataError, match="no vision part") as caught:
        judge_encoder(0, spec.judges[0], tmp_path / "judge")
    assert str(caught.value.where).startswith("judges.0 ('eye')")
    assert caught.value.fix == "Use a vision-language model, or remove judges.0.images"
