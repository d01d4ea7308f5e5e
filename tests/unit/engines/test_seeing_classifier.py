"""The torch engine's classifier with pictures, in the test's own process: its scores, its trial, and refused folders."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_classifiers import SeeingKind, make_tiny_classifier, make_tiny_seeing_classifier
from tokenizers import Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as HEADS

from gcore.config.capabilities import PICTURE_CLASSIFIERS
from gcore.engines.serving.http import ApiKeys
from gcore.engines.torch.async_engine import ModelThread
from gcore.engines.torch.classifier import (
    Classifier,
    ClassifierCore,
    ClassifierRequest,
    ClassifierRequestHandler,
    classifier_app,
    load_classifier,
)
from gcore.engines.torch.model import stage_weights
from gcore.errors import DataError, EngineError
from gcore.media.placeholders import FAMILIES, PictureRule
from gcore.models import vision
from gcore.models.checks import check_classifier
from gcore.system.clock import SystemClock
from gcore.testing.vision_models import IMAGE, VISION_END, VISION_START, make_picture, make_tiny_vision_model

KINDS: tuple[SeeingKind, ...] = ("gemma3", "qwen3_5")
SIZES = ((32, 32), (64, 48), (32, 64))
Question = tuple[list[int], list[bytes]]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seeing_classifier(tmp_path_factory.mktemp("seeing"), request.param)


def loaded(folder: Path, **more: Any) -> Classifier:
    return load_classifier(folder, **{"dtype": "float32", "device": "cpu", "context": None, "text": None} | more)


def picture(seed: int) -> bytes:
    return make_picture(*SIZES[seed % len(SIZES)], seed=seed)


def question(number: int, *pictures: bytes) -> Question:
    ids = [4 + number]
    for _ in pictures:
        ids += [VISION_START, IMAGE, VISION_END, 7 + number % 5]
    return ids, list(pictures)


def placed(model: Classifier, given: Question) -> Any:
    ids, pictures = given
    read = model.read_pictures([base64.b64encode(one).decode() for one in pictures]) if pictures else ()
    return model.place_pictures(ids, read)


def plain(folder: Path, given: Question) -> float:
    """What transformers says of one question alone, which gets the pixels."""
    module = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model = loaded(folder)
    ids, its = placed(model, given)
    tokens = torch.tensor([ids])
    name = "token_type_ids" if module.config.model_type == "gemma3" else "mm_token_type_ids"
    more: dict[str, Any] = {name: (tokens == IMAGE).int()}
    if its is not None:
        more |= vision.picture_arguments(its.pictures, torch.device("cpu"))
    with torch.inference_mode():
        return float(module(tokens, **more).logits[0, 0])


def run(core: ClassifierCore, given: list[Question]) -> list[float | None]:
    core.submit([ClassifierRequest(n, f"q-{n}", *placed(core.model, one)) for n, one in enumerate(given)])
    while core.can_work:
        core.cycle()
    told = {one.number: one.score for one in core.outbox}
    core.outbox = []
    return [told[number] for number in range(len(given))]


def core_of(folder: Path, **more: Any) -> ClassifierCore:
    return ClassifierCore(loaded(folder, **more), slots=8, chunk=64, version="0.0")


GIVEN = [
    question(0),
    question(1, picture(1)),
    question(2, picture(0), picture(1)),
    question(1, picture(2)),
    question(3, picture(1)),
    ([5, 6, 7, 8, 9, 4, 5], []),
]


def test_a_question_with_pictures_is_given_what_transformers_gives_it_alone(folder: Path) -> None:
    core = core_of(folder)
    assert core.model.pads
    assert core.takes_pictures
    scores = run(core, GIVEN)
    assert scores == [pytest.approx(plain(folder, one), abs=1e-4) for one in GIVEN]
    assert scores[1] != pytest.approx(scores[3], abs=1e-3), "equal tokens with another picture"


def test_the_tower_runs_once_in_a_pass_and_sees_each_picture_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(folder)
    inner, seen = core.model.module.model, list[int]()
    whole = core.model.vision._compute  # type: ignore[union-attr]

    def counted(**more: Any) -> Any:
        seen.append(len(more["image_grid_thw"]) if "image_grid_thw" in more else len(more["pixel_values"]))
        return whole(**more)

    monkeypatch.setattr(core.model.vision, "_compute", counted)
    monkeypatch.setattr(inner, "get_image_features", lambda *_, **__: pytest.fail("the features are given"))
    same = picture(1)
    run(core, [question(number, same) for number in range(4)] + [question(4, same, picture(0))])
    assert seen == [2]


def test_a_model_that_counts_pictures_otherwise_in_a_padded_pass_is_asked_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Classifier.scores

    def mixes(self: Classifier, questions: Any, pictures: Any = ()) -> list[float]:
        if sum(one is not None for one in pictures) > 1:
            pictures = [pictures[-1] if one is not None and len(one.names) == 1 else one for one in pictures]
        return whole(self, questions, pictures)

    monkeypatch.setattr(Classifier, "scores", mixes)
    core = core_of(folder)
    assert not core.model.pads
    assert run(core, GIVEN) == [pytest.approx(plain(folder, one), abs=1e-4) for one in GIVEN]


def test_a_model_whose_own_pass_gives_another_score_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcore.engines.torch.classifier._own_score", lambda *_: 9.0)
    with pytest.raises(DataError, match=r"a question with pictures scores .*, but 9 in the model's own pass"):
        loaded(folder)


def test_new_weights_reach_the_tower_and_the_head(folder: Path, tmp_path: Path) -> None:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    other = make_tiny_seeing_classifier(tmp_path, kind, seed=1)
    core = core_of(folder)
    before = run(core, GIVEN)
    core.change_weights(stage_weights(core.model, other), "0.3", flush=True, abort=False)
    assert run(core, GIVEN) == [pytest.approx(plain(other, one), abs=1e-4) for one in GIVEN]
    core.change_weights(stage_weights(core.model, folder), "0.4", flush=True, abort=False)
    assert run(core, GIVEN) == before


def test_a_tower_that_the_weights_lack_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(one for one in sorted(tensors) if "vision" in one or "visual" in one)
    tensors["other." + name] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"the model's weights lack model\.vis"):
        loaded(tmp_path)


def test_the_engine_expands_a_question_to_the_tokens_that_the_controller_computes(folder: Path) -> None:
    rule, tokenizer = PictureRule.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = [rule.target_size(40, 30), rule.target_size(64, 64)]
    short = tokenizer.encode(f"3{rule.picture_text}{rule.picture_text}+1").ids
    given = list(rule.request_ids(short, sizes)), [make_picture(*size) for size in sizes]
    assert placed(loaded(folder), given)[0] == rule.expand(short, sizes)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_pictures_than_placeholders_is_refused(folder: Path, count: int) -> None:
    model = loaded(folder)
    with pytest.raises(EngineError, match=f"has 1 placeholders of pictures .* and {count} pictures"):
        placed(model, (question(1, picture(1))[0], [picture(1)] * count))


def test_a_classifier_of_text_takes_no_pictures(tmp_path: Path) -> None:
    model = loaded(make_tiny_classifier(tmp_path, context=64))
    with pytest.raises(EngineError, match="this engine takes no pictures") as caught:
        model.read_pictures(["aaaa"])
    assert caught.value.fix == "Serve a classifier of the type gemma3 or qwen3_5 with its image processor"


def test_a_classifier_without_an_image_processor_reads_text(tmp_path: Path) -> None:
    folder = make_tiny_seeing_classifier(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    core = core_of(folder)
    assert not core.takes_pictures
    assert run(core, GIVEN[:1]) == [pytest.approx(plain(folder, GIVEN[0]), abs=1e-4)]


def test_asleep_it_releases_the_tower_and_awake_it_scores_the_same(folder: Path) -> None:
    core = core_of(folder)
    before = run(core, GIVEN)
    core.release(frozenset({"weights", "kv_cache"}))
    core.wake(frozenset({"weights", "kv_cache"}))
    assert run(core, GIVEN) == before
    assert run(core, GIVEN[:1]) == [pytest.approx(before[0], abs=1e-5)], "text after pictures"


def test_pictures_that_do_not_fit_into_the_context_are_not_tried(folder: Path) -> None:
    assert loaded(folder, context=8).takes_pictures  # the question with two pictures has more tokens


def test_the_types_with_a_head_are_those_of_transformers() -> None:
    assert set(PICTURE_CLASSIFIERS) == FAMILIES.keys() & HEADS.keys()


def test_a_type_without_a_head_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    folder = make_tiny_vision_model(tmp_path, "qwen2_5_vl")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen2_5_VLForSequenceClassification"], "num_labels": 1, "id2label": {"0": "x"}}
    (folder / "config.json").write_text(json.dumps(config))
    said = (
        "a classifier of the type 'qwen2_5_vl' cannot see pictures: of the types that gcore supports, transformers has "
        "sequence-classification heads with pictures for gemma3 and qwen3_5 only"
    )
    with pytest.raises(DataError, match=said):
        loaded(folder)
    with pytest.raises(DataError, match=said):
        check_classifier(config, where="here", pictures=True)
    check_classifier(config, where="here")


async def test_pictures_are_decoded_beside_the_event_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, threads = core_of(folder), list[int]()
    whole = Classifier.read_pictures

    def noted(self: Classifier, given: Any) -> Any:
        threads.append(threading.get_ident())
        return whole(self, given)

    monkeypatch.setattr(Classifier, "read_pictures", noted)
    desk = ClassifierRequestHandler(
        core, None, clock=SystemClock(), description={"model_path": str(folder), "tokenizer_path": str(folder)}
    )
    runner: ModelThread[Any] = ModelThread(
        core, clock=SystemClock(), deliver=desk.deliver, report=None, on_death=lambda error: None
    )
    desk.open(runner)
    runner.start()
    ids, (shown,) = question(1, picture(0))
    body = {"input_ids": [ids, [4]], "image_data": [[base64.b64encode(shown).decode()], []]}
    transport = httpx.ASGITransport(classifier_app(desk, ApiKeys(None, None)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        answers = (await http.post("/classify", json=body)).json()
    assert [len(one["embedding"]) for one in answers] == [1, 1]
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
