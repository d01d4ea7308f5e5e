"""Scorers of pictures in the torch engine: CLIP scores and heads against plain transformers, texts and heads that are refused."""

from __future__ import annotations

import base64
import io
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_classifiers import CLIP_SIDE, CLIP_WIDTH, make_tiny_clip
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, CLIPModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as HEADS

from gcore.config.capabilities import PICTURE_SCORERS
from gcore.engines.launch import EngineLaunch
from gcore.engines.torch.classifier import (
    ClassifierCore,
    ClassifierRequest,
    PictureScorer,
    load_scorer,
    start_classifier,
)
from gcore.engines.torch.model import stage_weights
from gcore.errors import DataError, EngineError
from gcore.media.placeholders import FAMILIES
from gcore.models.checks import check_classifier
from gcore.models.clip import ClipScores, load_head
from gcore.models.hubs import ModelError
from gcore.testing.vision_models import make_picture

SIZES = ((16, 16), (40, 24), (17, 64), (256, 256))
TEXTS = ("red?", "a blue square, in green.", "", "red?", "7")
Question = tuple[str, bytes]
GIVEN: list[Question] = [(text, make_picture(*SIZES[n % 4], seed=n % 4)) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module", params=[False, True], ids=["end", "legacy end"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_clip(tmp_path_factory.mktemp("clip"), seed=3, legacy_end=request.param)


def loaded(folder: Path, **more: Any) -> PictureScorer:
    return load_scorer(
        folder, **{"dtype": "float32", "device": "cpu", "context": None, "text": None, "blobs": None} | more
    )


def encoded(folder: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def placed(model: PictureScorer, given: Question) -> Any:
    text, content = given
    read = model.read_pictures([base64.b64encode(content).decode()])
    return model.place_pictures(encoded(model.folder, text), read)


def run(core: ClassifierCore, given: Sequence[Question]) -> list[float]:
    model = core.model
    assert isinstance(model, PictureScorer)
    core.submit([ClassifierRequest(n, f"q-{n}", *placed(model, one)) for n, one in enumerate(given)])
    while core.can_work:
        core.cycle()
    told = {one.number: one.score for one in core.outbox}
    core.outbox = []
    return [told[number] or 0.0 for number in range(len(given))]


def core_of(folder: Path, **more: Any) -> ClassifierCore:
    return ClassifierCore(loaded(folder, **more), slots=8, chunk=64, version="0.0")


def inputs(folder: Path, content: bytes) -> torch.Tensor:
    """The pixels that the processor of transformers makes of a picture."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    with Image.open(io.BytesIO(content)) as picture:
        pixels: torch.Tensor = processor(images=[picture.convert("RGB")], return_tensors="pt")["pixel_values"]
    return pixels


def plain(folder: Path, given: Question) -> float:
    """What transformers says of one question: logits_per_image."""
    text, content = given
    module = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = torch.tensor([encoded(folder, text)])
        return float(module(input_ids=ids, pixel_values=inputs(folder, content)).logits_per_image[0, 0])


def by_hand(folder: Path, given: Question) -> float:
    """PickScore as its authors compute it: exp(logit_scale) times the cosine of the normalized embeddings."""
    text, content = given
    module = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        seen = module.get_image_features(pixel_values=inputs(folder, content)).pooler_output
        said = module.get_text_features(input_ids=torch.tensor([encoded(folder, text)])).pooler_output
        seen, said = (one / torch.norm(one, dim=-1, keepdim=True) for one in (seen, said))
        return float(module.logit_scale.exp() * (said @ seen.T)[0, 0])


def test_scores_are_those_of_transformers_alone_and_together(folder: Path) -> None:
    core = core_of(folder)
    assert core.model.pads
    assert core.takes_pictures
    together = run(core, GIVEN)
    for scores in (together, [run(core, [one])[0] for one in GIVEN]):
        assert scores == pytest.approx([plain(folder, one) for one in GIVEN], rel=1e-5, abs=1e-5)
    assert together == pytest.approx([by_hand(folder, one) for one in GIVEN], rel=1e-5, abs=1e-5)
    assert len(set(together)) == len(GIVEN), "the same text with another picture"


def test_equal_texts_and_pictures_of_a_pass_are_embedded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(folder)
    module: Any = core.model.module
    rows: dict[str, list[int]] = {"get_text_features": [], "get_image_features": []}
    for name, seen in rows.items():
        whole = getattr(module, name)

        def counted(whole: Any = whole, seen: list[int] = seen, **given: torch.Tensor) -> Any:
            seen.append(len(next(iter(given.values()))))
            return whole(**given)

        monkeypatch.setattr(module, name, counted)
    run(core, [("red?", GIVEN[n % 2][1]) for n in range(6)])
    assert rows == {"get_text_features": [1], "get_image_features": [2]}


def test_many_pictures_pass_through_the_tower_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcore.models.clip.PICTURES_AT_ONCE", 2)
    expected = [plain(folder, one) for one in GIVEN]
    assert run(core_of(folder), GIVEN) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def linear(*widths: int, start: Sequence[int] | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of linear layers between these widths, named as in nn.Sequential. `start`: their numbers."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for number, (before, after) in zip(start or range(len(widths)), itertools.pairwise(widths), strict=False):
        tensors[f"layers.{number}.weight"] = torch.randn(after, before, generator=draw)
        tensors[f"layers.{number}.bias"] = torch.randn(after, generator=draw)
    return tensors


MLP = linear(CLIP_WIDTH, 8, 6, 1, start=(0, 2, 4))
"""As LAION's improved predictor, whose layers have dropout between them."""


def with_head(folder: Path, target: Path, tensors: Mapping[str, torch.Tensor], name: str) -> Path:
    shutil.copytree(folder, target, dirs_exist_ok=True)
    if name.endswith(".pth"):
        torch.save(dict(tensors), target / name)
    else:
        save_file(dict(tensors), target / name)
    return target


@pytest.mark.parametrize("name", ["score_head.safetensors", "score_head.pth"])
@pytest.mark.parametrize(
    "tensors",
    [MLP, {"weight": torch.ones(1, CLIP_WIDTH), "bias": torch.tensor([0.5])}, {"weight": torch.ones(1, CLIP_WIDTH)}],
    ids=["mlp", "linear", "without bias"],
)
def test_a_head_scores_the_normalized_embedding_of_the_picture_and_ignores_the_text(
    folder: Path, tmp_path: Path, name: str, tensors: dict[str, torch.Tensor]
) -> None:
    core = core_of(with_head(folder, tmp_path, tensors, name))
    module = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for _, content in GIVEN:
        with torch.inference_mode():
            seen = module.get_image_features(pixel_values=inputs(folder, content)).pooler_output
            numbers = seen / torch.norm(seen, dim=-1, keepdim=True)
            for weight in (one for key, one in tensors.items() if key.endswith("weight")):
                bias = next((tensors[key] for key in tensors if tensors[key].shape == weight.shape[:1]), None)
                numbers = torch.nn.functional.linear(numbers, weight, bias)
        expected.append(float(numbers[0, 0]))
    assert run(core, GIVEN) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert run(core, [("", GIVEN[0][1])]) == pytest.approx(expected[:1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (linear(CLIP_WIDTH, 8, 1, start=(0, 3)), "seem to have activations"),
        (linear(CLIP_WIDTH, 8), "it returns 8 numbers"),
        (linear(CLIP_WIDTH + 1, 1), rf"layers\.0\.weight has the shape \[1, 13\], and gets {CLIP_WIDTH} numbers"),
        (linear(CLIP_WIDTH, 8, 1) | {"layers.1.weight": torch.ones(1, 7)}, r"layers\.1\.weight has the shape \[1, 7\]"),
        (linear(CLIP_WIDTH, 1) | {"layers.0.scale": torch.ones(1)}, r"it has a tensor 'layers\.0\.scale'"),
        ({"bias": torch.ones(1)}, "it has a tensor 'bias'"),
    ],
)
def test_a_head_that_is_no_chain_of_linear_layers_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], why: str
) -> None:
    save_file(tensors, tmp_path / "score_head.safetensors")
    with pytest.raises(DataError, match=why):
        load_head(tmp_path, CLIP_WIDTH)


class Opens:
    """Would open a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


def test_a_pickle_with_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    torch.save({"weight": Opens(tmp_path / "opened")}, tmp_path / "score_head.pth")
    with pytest.raises(DataError, match="the head cannot be used"):
        load_head(tmp_path, CLIP_WIDTH)
    assert not (tmp_path / "opened").exists()
    (tmp_path / "score_head.pth").write_bytes(b"no weights")
    with pytest.raises(DataError, match="the head cannot be used"):
        load_head(tmp_path, CLIP_WIDTH)


def test_two_heads_in_a_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("score_head.safetensors", "score_head.pth"):
        with_head(folder, tmp_path, MLP, name)
    with pytest.raises(DataError, match="the folder has two heads"):
        loaded(tmp_path)


def test_a_question_has_one_picture_and_a_text_with_an_end(folder: Path) -> None:
    model = loaded(folder)
    ids, read = encoded(folder, "red?"), model.read_pictures([base64.b64encode(GIVEN[0][1]).decode()])
    for count in (0, 2):
        with pytest.raises(EngineError, match=f"has one picture, not {count}"):
            model.place_pictures(ids, read * count)
    for wrong in (ids[:-1], []):
        with pytest.raises(EngineError, match="does not end with the model's end token"):
            model.place_pictures(wrong, read)


def test_a_launched_engine_serves_a_scorer_and_its_reader_takes_blobs(folder: Path, tmp_path: Path) -> None:
    launch = EngineLaunch.model_validate(
        {"model": str(folder), "task": "classify", "blobs": str(tmp_path), "device": "cpu"}
    )
    core = start_classifier(launch, None)
    assert isinstance(core.model, PictureScorer)
    assert core.model.context == 40


def test_weights_are_synced_and_released_as_those_of_any_classifier(folder: Path, tmp_path: Path) -> None:
    kind = json.loads((folder / "config.json").read_text())["text_config"].get("eos_token_id") == 2
    other = make_tiny_clip(tmp_path / "other", seed=4, legacy_end=kind)
    core = core_of(folder)
    before = run(core, GIVEN)
    core.change_weights(stage_weights(core.model, other), "0.3", flush=True, abort=False)
    assert run(core, GIVEN) == pytest.approx([plain(other, one) for one in GIVEN], rel=1e-5, abs=1e-5)
    core.change_weights(stage_weights(core.model, folder), "0.4", flush=True, abort=False)
    core.release(frozenset({"weights", "kv_cache"}))
    core.wake(frozenset({"weights", "kv_cache"}))
    assert run(core, GIVEN) == before


def test_a_folder_with_a_head_gives_its_weights_to_a_weight_sync(folder: Path, tmp_path: Path) -> None:
    core = core_of(with_head(folder, tmp_path, MLP, "score_head.safetensors"))
    before = run(core, GIVEN)
    core.change_weights(stage_weights(core.model, tmp_path), "0.4", flush=True, abort=False)
    assert run(core, GIVEN) == before


def test_a_tower_that_the_weights_lack_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["other"] = tensors.pop("visual_projection.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"the model's weights lack visual_projection\.weight"):
        loaded(tmp_path)


def test_a_model_whose_own_pass_gives_another_score_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClipScores, "own_score", lambda *_: 9.0)
    with pytest.raises(DataError, match=r"a picture scores .*, but 9 in the model's own pass"):
        loaded(folder)


def test_a_processor_that_makes_pictures_of_another_size_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"crop_size": {"height": 8, "width": 8}}))
    with pytest.raises(DataError, match=f"makes pictures of 8x8, and it takes {CLIP_SIDE}x{CLIP_SIDE}"):
        loaded(tmp_path)


def test_submission_accepts_whole_clip_models_of_judges_that_see() -> None:
    config = {"model_type": "clip", "architectures": ["CLIPModel"]}
    check_classifier(config, where="here", pictures=True)
    with pytest.raises(ModelError, match="scores pictures, and the judge sees none"):
        check_classifier(config, where="here")
    with pytest.raises(ModelError, match="needs both parts of CLIP"):
        check_classifier(config | {"architectures": ["CLIPVisionModelWithProjection"]}, where="here", pictures=True)


def test_scorers_are_no_policies_and_no_sequence_classifiers() -> None:
    assert not set(PICTURE_SCORERS) & (FAMILIES.keys() | HEADS.keys())
