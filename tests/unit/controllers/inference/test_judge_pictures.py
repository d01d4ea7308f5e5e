"""Questions with pictures to the engines of a judge of either kind: tokens, sizes, blobs, and what the engine says it ran on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from picture_models import picture_tokenizer, token_ids, write_picture_model
from safetensors.numpy import save_file
from tiny_classifiers import make_tiny_clip
from tokenizers import Tokenizer

from controllers.api.submission.checks import CheckedJudge, check_judges
from controllers.changes import ChangeSignal
from controllers.inference.judge_engines import JudgePool
from controllers.inference.judges import JudgeMetricsObserver, judge_encoder, open_judges
from gcore.config import JobSpec, parse_spec
from gcore.errors import DataError, EngineUnreachable, SpecError
from gcore.media.pictures import PictureError
from gcore.media.placeholders import PictureRule
from gcore.models.hubs import ModelError
from gcore.models.resolve import ResolvedModel
from gcore.observability.metrics import Metrics
from gcore.reward.api import Response
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
        self.poison = -1
        """A classifier refuses requests with this token."""
        media: Any = self.media
        self.pool = JudgePool(
            spec, spec.judges[0], "u", "a.1", ChangeSignal(), self.clock, self.metrics, self.connect, media
        )

    def connect(self, url: str, *, timeout_s: float, instance: str) -> EngineClient:
        return EngineClient(url, timeout_s=timeout_s, transport=httpx.MockTransport(self.answer))

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path not in ("/generate", "/classify"):
            return httpx.Response(200, json={"weight_version": "0.0", "success": True})
        body = json.loads(request.content)
        self.asked.append(body)
        if any(self.poison in ids for ids in body["input_ids"]):
            return httpx.Response(400, json={"error": {"message": "the picture cannot be read"}})
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0.0", "completion_tokens": 1}
        if request.url.path == "/classify":
            one: dict[str, Any] = {"embedding": [1.0], "meta_info": meta}
        else:
            one = {"text": "1", "output_ids": [49], "meta_info": meta | {"output_token_logprobs": [[0.0, 49, None]]}}
        return httpx.Response(
            200, json=[one | {"prompt_token_ids": self.ran_on or expanded(ids)} for ids in body["input_ids"]]
        )

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
        return (await self.clock.run((await self.judge()).value(PROMPT, response))).value


PROMPT = Prompt(PromptRef(0, 0, 0), f"{WRITTEN}red?", (1,), {}, pictures=(PICTURE,))


def expanded(ids: list[int]) -> list[int]:
    return [one for token in ids for one in ([token] * 6 if token == PAD else [token])]


CLASSIFIER: dict[str, Any] = {"kind": "classifier", "max_new_tokens": 256}


def drawing_spec(folder: Path, **judge: Any) -> JobSpec:
    """A job whose policy generates pictures, so that its folder has no vision-language model."""
    told = {"name": "eye", "model": {"path": str(folder / "judge")}, "images": True, "max_new_tokens": 2, "tries": 1}
    write_picture_model(folder / "judge", "qwen3_5" if judge.get("kind") == "classifier" else "qwen3_vl")
    tree: dict[str, Any] = {"name": "t", "model": {"path": str(folder / "policy")}, "flow": {"steps": 1}}
    tree |= {"data": {"path": "d"}, "rollout": {"engine": "diffusers", "diffusion": {}}, "reward": {"judge": "eye"}}
    tree["train"] = {"clip_low": 1e-4, "clip_high": 1e-4}
    return parse_spec(tree | {"judges": [told | {"template": "{{ prompt }}{{ response }}"} | judge]})


DRAWN = Response("", picture_file=("/blobs/ab", "ab" * 32, 48, 32))


@pytest.mark.parametrize("more", [{}, CLASSIFIER], ids=["generative", "classifier"])
async def test_a_judge_sees_the_picture_that_the_policy_generated(tmp_path: Path, more: dict[str, Any]) -> None:
    court = Court(drawing_spec(tmp_path, **more))
    judge = await court.judge()
    prompt = Prompt(PromptRef(0, 0, 0), "red?", (1,), {})
    assert (await court.clock.run(judge.value(prompt, DRAWN))).value == 1.0
    (body,) = court.asked
    assert body["image_data"] == [[f"/far/u/cd/{BLOB}"]]
    assert body["input_ids"][0][-3:] == [START, PAD, END]
    assert court.media.used == [(PictureRef("/blobs/ab", "ab" * 32, 48, 32, 48, 32),)]
    await court.pool.close()


def test_submission_counts_the_tokens_of_a_generated_picture_for_the_judges_context(tmp_path: Path) -> None:
    prompt = Prompt(PromptRef(0, 0, 0), "red?", (1,), {})
    for template, tokens in (("{{ prompt }}{{ response }}", 12), ("{{ first }}{{ second }}", 16)):
        mode = "pairwise" if "first" in template else "pointwise"
        for longest, fits in ((tokens + 3, True), (tokens + 2, False)):
            model = {"path": str(tmp_path / "judge"), "max_length": longest}
            spec = drawing_spec(tmp_path, template=template, mode=mode, model=model)
            encoder = judge_encoder(0, spec.judges[0], tmp_path / "judge")
            question = Question.compile(spec.judges[0], "judges.0", generates=True)
            checked = CheckedJudge(0, spec.judges[0], question, encoder=encoder)
            said = f"has {tokens} tokens, which with max_new"
            with contextlib.nullcontext() if fits else pytest.raises(SpecError, match=said):
                checked.check_question(prompt, "data", (48, 32))


def scorer_spec(folder: Path, **judge: Any) -> JobSpec:
    """A job that generates pictures, with a CLIP model as its judge."""
    spec = drawing_spec(folder, kind="classifier", max_new_tokens=256, **judge)
    shutil.rmtree(folder / "judge")
    make_tiny_clip(folder / "judge", context=12)
    return spec


async def test_a_scorer_gets_the_text_and_the_picture_in_its_own_size_apart(tmp_path: Path) -> None:
    court = Court(scorer_spec(tmp_path))
    judge = await court.judge()
    prompt = Prompt(PromptRef(0, 0, 0), "red?", (1,), {})
    assert (await court.clock.run(judge.value(prompt, DRAWN))).value == 1.0
    (body,) = court.asked
    tokenizer = Tokenizer.from_file(str(tmp_path / "judge" / "tokenizer.json"))
    assert body["input_ids"] == [tokenizer.encode("red?").ids]
    assert body["image_data"] == [[f"/far/u/cd/{BLOB}"]]
    assert court.media.used == [(PictureRef("/blobs/ab", "ab" * 32, 48, 32, 48, 32),)]
    too_long = Prompt(PromptRef(0, 0, 1), "red green blue", (1,), {})
    with pytest.raises(JudgeError, match="has 16 tokens, which do not fit into the judge's context of 12"):
        await court.clock.run(judge.value(too_long, DRAWN))
    await court.pool.close()


def test_a_scorer_sees_one_picture(tmp_path: Path) -> None:
    encoder = judge_encoder(0, scorer_spec(tmp_path).judges[0], tmp_path / "judge")
    assert encoder.max_length == 12
    assert encoder.targets((PICTURE,)) == (PICTURE,)
    with pytest.raises(DataError, match=r"it shows 2 pictures, and a model of the type 'clip' scores one"):
        encoder.encode(f"{IMAGE_MARK}{IMAGE_MARK}red", (PICTURE, PICTURE), None)


def test_submission_checks_the_folder_and_the_texts_of_a_scorer(tmp_path: Path) -> None:
    spec = scorer_spec(tmp_path)
    checked = check_judges(spec)["eye"]
    for text, fits in (("ninechars", True), ("ten chars.", False)):
        prompt = Prompt(PromptRef(0, 0, 0), text, (1,), {})
        with (
            contextlib.nullcontext() if fits else pytest.raises(SpecError, match="has 12 tokens, which leaves no room")
        ):
            checked.check_question(prompt, "data", (48, 32))
    (tmp_path / "judge" / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match="has no image processor") as caught:
        check_judges(spec)
    assert str(caught.value.where).startswith("judges.0 ('eye')")


def spec_with(folder: Path, **judge: Any) -> JobSpec:
    write_picture_model(folder / "policy", patch=4)
    write_picture_model(folder / "judge", "qwen3_5" if judge.get("kind") == "classifier" else "qwen3_vl")
    told = {"name": "eye", "model": {"path": str(folder / "judge")}, "images": True, "max_new_tokens": 2, "tries": 1}
    tree: dict[str, Any] = {"name": "t", "model": {"path": str(folder / "policy")}, "flow": {"steps": 1}}
    tree |= {"data": {"path": "d", "images": "images"}, "rollout": {"max_new_tokens": 4}, "reward": {"judge": "eye"}}
    return parse_spec(tree | {"judges": [told | {"template": "{{ prompt }}{{ response }}"} | judge]})


@pytest.fixture(params=[{}, CLASSIFIER], ids=["generative", "classifier"])
async def court(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Court]:
    made = Court(spec_with(tmp_path, **request.param))
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


async def test_questions_of_a_classifier_share_a_request_and_fetch_equal_pictures_once(tmp_path: Path) -> None:
    court = Court(spec_with(tmp_path, **CLASSIFIER))
    judge = await court.judge()
    await court.clock.run(judge.values(PROMPT, ["1", "2", "3"]))
    (body,) = court.asked
    assert body["image_data"] == [[f"/far/u/cd/{BLOB}"]] * 3
    assert court.media.copied == ["far"]
    assert court.media.open == 0
    await court.pool.close()


async def test_a_refused_picture_costs_only_its_own_question(tmp_path: Path) -> None:
    court = Court(spec_with(tmp_path, **CLASSIFIER))
    judge = await court.judge()
    (court.poison,) = picture_tokenizer().encode("x").ids
    found = await court.clock.run(judge.values(PROMPT, ["1", "x", "3"]))
    assert [getattr(one, "value", None) for one in found] == [1.0, None, 1.0]
    assert isinstance(found[1], JudgeError)
    assert "the picture cannot be read" in found[1].what
    assert [len(body["input_ids"]) for body in court.asked] == [3, 1, 1, 1]
    await court.pool.close()


async def test_a_question_without_pictures_names_none(tmp_path: Path) -> None:
    court = Court(spec_with(tmp_path, template="{{ images }}{{ response }}", **CLASSIFIER))
    await court.clock.run((await court.judge()).value(Prompt(PromptRef(0, 0, 0), "red?", (1,), {}), "3"))
    assert "image_data" not in court.asked[0]
    await court.pool.close()


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


@pytest.mark.parametrize(
    ("more", "longest", "why"),
    [({}, 14, r"13 tokens, and with max_new_tokens .2. more than the 14"), (CLASSIFIER, 13, "has 13 tokens, which")],
)
async def test_the_whole_of_a_picture_counts_for_the_judges_context(
    tmp_path: Path, more: dict[str, Any], longest: int, why: str
) -> None:
    court = Court(spec_with(tmp_path, model={"path": str(tmp_path / "judge"), "max_length": longest}, **more))
    with pytest.raises(JudgeError, match=why):
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


@pytest.mark.parametrize("images", [True, False])
def test_submission_refuses_a_seeing_classifier_of_a_type_without_a_head(tmp_path: Path, images: bool) -> None:
    spec = spec_with(tmp_path, images=images, **CLASSIFIER)
    config = json.loads((tmp_path / "judge" / "config.json").read_text())
    head = {"architectures": ["Qwen3VLForSequenceClassification"], "id2label": {"0": "good"}}
    (tmp_path / "judge" / "config.json").write_text(json.dumps(config | head | {"model_type": "qwen3_vl"}))
    save_file({"score.weight": np.zeros((1, 4), np.float32)}, tmp_path / "judge" / "model.safetensors")
    said = r"judges\.0 \('eye'\).*a classifier of the type 'qwen3_vl' cannot see pictures.* for gemma3 and qwen3_5 only"
    with pytest.raises(ModelError, match=said) if images else contextlib.nullcontext():
        check_judges(spec)


def test_a_judge_without_vision_is_refused_by_its_own_fields(tmp_path: Path) -> None:
    spec = spec_with(tmp_path)
    config = tmp_path / "judge" / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(DataError, match="no vision part") as caught:
        judge_encoder(0, spec.judges[0], tmp_path / "judge")
    assert str(caught.value.where).startswith("judges.0 ('eye')")
    assert caught.value.fix == "Use a vision-language model, or remove judges.0.images"


def test_a_judge_whose_processor_cuts_pictures_into_several_is_refused(tmp_path: Path) -> None:
    spec = spec_with(tmp_path)
    write_picture_model(tmp_path / "tiles", "smolvlm")
    file = tmp_path / "tiles" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_image_splitting": True}))
    with pytest.raises(DataError, match="do_image_splitting") as caught:
        judge_encoder(0, spec.judges[0], tmp_path / "tiles")
    assert str(caught.value.where).startswith("judges.0 ('eye')")
