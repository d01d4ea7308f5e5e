"""The judge of generated pictures: what it is taught, what it sees, and the folder that is prepared."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from gcore.errors import DataError
from gcore.media.pictures import encode_png
from gcore.media.placeholders import PictureRule
from gcore.models.vision import PictureProcessor
from gcore.quickstart.counting_model import patches
from gcore.quickstart.pictures import prepare_pictures
from gcore.quickstart.pictures_judge import (
    PATCH,
    TOKENS,
    lesson_rows,
    new_judge,
    prepare_pictures_judge,
    question_ids,
    save_judge,
    verdicts_on,
    word_ids,
)
from gcore.quickstart.pictures_model import draw_pictures, picture_bytes
from gcore.quickstart.pictures_task import COLOURS, PLACES, PROMPTS, SIDE, picture_parts


def drawn() -> torch.Tensor:
    """A right picture of each prompt, [n, SIDE, SIDE, 3] uint8."""
    colours = torch.arange(len(COLOURS)).repeat_interleave(len(PLACES))
    return picture_bytes(draw_pictures(colours, torch.arange(len(PLACES)).repeat(len(COLOURS))))


def test_a_verdict_names_what_the_picture_shows_and_agrees_with_the_rule() -> None:
    pictures = drawn().numpy()
    assert verdicts_on(pictures, PROMPTS) == [f"{one.prompt} y" for one in PROMPTS]
    turned = [*PROMPTS[1:], PROMPTS[0]]
    assert verdicts_on(pictures, turned) == [f"{one.prompt} n" for one in PROMPTS]
    grey = np.full((1, SIDE, SIDE, 3), 127, np.uint8)
    assert verdicts_on(grey, PROMPTS[:1]) == ["none none n"]


def test_a_lesson_has_right_and_wrong_pictures_with_the_verdicts_of_the_rule() -> None:
    draw = np.random.default_rng(0)
    pictures, prompts = lesson_rows(drawn().numpy(), draw, 1000)
    assert (pictures.shape, pictures.dtype) == ((1000, SIDE, SIDE, 3), np.uint8)
    colour, place = picture_parts(pictures, prompts)
    verdicts = verdicts_on(pictures, prompts)
    assert [one.endswith(" y") for one in verdicts] == (colour & place).tolist()
    kinds = Counter(zip(colour.tolist(), place.tolist(), strict=True))
    assert min(kinds[kind] for kind in ((True, True), (True, False), (False, True), (False, False))) > 50
    assert sum(one.startswith("none") for one in verdicts) > 50
    assert {len(one.split()) for one in verdicts} == {3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    save_judge(new_judge(), folder)
    return folder


def test_the_judge_gets_a_generated_picture_as_it_is_with_a_token_for_each_quadrant(saved: Path) -> None:
    rule = PictureRule.load(saved)
    assert rule.target_size(SIDE, SIDE) == (SIDE, SIDE)
    assert rule.token_count(SIDE, SIDE) == TOKENS
    pictures = drawn()
    processor = PictureProcessor(saved)
    read = [processor.read(str(i), encode_png(one.numpy())).arguments["pixel_values"] for i, one in enumerate(pictures)]
    assert torch.allclose(patches(pictures, PATCH), torch.cat(read), atol=1e-6)
    assert len(PLACES) == TOKENS


def test_the_lesson_has_the_tokens_of_the_saved_tokenizer(saved: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved, local_files_only=True)
    shown = "<|vision_start|>" + "<|image_pad|>" * TOKENS + "<|vision_end|>"
    for prompt in PROMPTS:
        assert tokenizer(shown + prompt.prompt)["input_ids"] == question_ids(prompt)
    for verdict in ("blue northwest n", "none none n", "red southeast y"):
        assert tokenizer.decode(word_ids(verdict)) == verdict


def test_a_judge_needs_the_prepared_example_and_says_how_often_it_is_right(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the example is not prepared") as raised:
        prepare_pictures_judge(tmp_path / "judge", progress=False, updates=2)
    assert raised.value.fix == f"gcore prepare pictures --to {tmp_path / 'pictures'}"
    prepare_pictures(tmp_path / "pictures", progress=False, warm_updates=2, must_fit=False)
    made = prepare_pictures_judge(tmp_path / "judge", progress=False, updates=2, must_fit=False)
    assert json.loads((made.model / "preprocessor_config.json").read_text())["patch_size"] == PATCH
    assert 0 <= made.manifest.judge_false_yes <= 1
    assert prepare_pictures_judge(tmp_path / "judge", progress=False, updates=2, must_fit=False).cached
    with pytest.raises(DataError, match=r"of the judge's verdicts are right"):
        prepare_pictures_judge(tmp_path / "other", pictures=tmp_path / "pictures", progress=False, updates=2)
    assert not (tmp_path / "other").exists()
