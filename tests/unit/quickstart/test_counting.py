"""The counting and zoom examples: balanced questions, right answers, the patches of the image processor, and the tool."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gcore.errors import DataError
from gcore.media.placeholders import PictureRule
from gcore.models.vision import PictureProcessor
from gcore.plugins import PluginFile, load_plugin_file
from gcore.quickstart import counting_model
from gcore.quickstart.counting import (
    RESPONSES,
    prepare_counting,
    prepare_counting_judge,
    responses_to,
    verdict_on,
)
from gcore.quickstart.counting_model import new_counter, patches, save_counter, text_ids, write_greedily
from gcore.quickstart.counting_pictures import (
    CELL,
    CELLS,
    COLOURS,
    EOS,
    IMAGE,
    MOST,
    PAD,
    SIZE,
    TOKENS,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCABULARY,
    draw_picture,
    encode_png,
    make_counts,
)
from gcore.quickstart.zoom import CALL, draw_panels, make_zoom_questions, prepare_zoom
from gcore.rollout.environments.api import BadArgument
from gcore.rollout.environments.tools import TagCallFormat

ROOT = Path(__file__).parents[3]


def test_each_answer_is_equally_frequent_and_the_careless_one_is_wrong() -> None:
    counts = make_counts(500, 3)
    frequent = Counter(one.answer for one in counts)
    assert frequent == {str(number): 100 for number in range(MOST + 1)}
    assert all(one.careless != one.answer for one in counts)
    assert counts == make_counts(500, 3) != make_counts(500, 4)


def test_a_picture_has_the_squares_of_its_question() -> None:
    for question in make_counts(20, 5):
        picture = draw_picture(question).astype(int)
        for number, name in enumerate(question.cells):
            row, column = divmod(number, CELLS)
            middle = picture[row * CELL + CELL // 2, column * CELL + CELL // 2]
            distance = {one: np.abs(middle - value).sum() for one, value in COLOURS.items()}
            assert (min(distance, key=lambda one: distance[one]) == name) if name else middle.min() > 215


def test_the_patches_of_the_warm_start_are_those_of_the_image_processor(tmp_path: Path) -> None:
    save_counter(new_counter(), tmp_path)
    pictures = np.stack([draw_picture(one) for one in make_counts(2, 7)])
    processor = PictureProcessor(tmp_path)
    read = [processor.read(str(i), encode_png(one)).arguments["pixel_values"] for i, one in enumerate(pictures)]
    assert torch.allclose(patches(torch.from_numpy(pictures)), torch.cat(read), atol=1e-6)


def test_a_measured_judge_never_writes_tokens_of_media(monkeypatch: pytest.MonkeyPatch) -> None:
    (three,) = text_ids("3")

    def likes_media(network: None, tokens: torch.Tensor, pictures: None) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        logits[..., [VISION_START, VISION_END, IMAGE, VIDEO]] = 2.0
        logits[..., three] = 1.0
        return logits

    monkeypatch.setattr(counting_model, "row_logits", likes_media)
    rows = torch.tensor([[1, 2, EOS, EOS], [1, EOS, EOS, PAD]])
    written = write_greedily(None, rows, torch.tensor([2, 1]), 2, None)
    assert written.tolist() == [[1, 2, three, three], [1, three, three, PAD]]


def test_a_prepared_folder_has_entries_with_pictures(tmp_path: Path) -> None:
    made = prepare_counting(tmp_path / "counting", progress=False, warm_updates=2, must_fit=False)
    entries = [json.loads(line) for line in (made.folder / "eval.jsonl").read_text().splitlines()]
    assert len(entries) == 200
    assert all((made.folder / name).is_file() for entry in entries for name in entry["images"])
    assert entries[0]["prompt"].startswith("<image>")
    assert made.manifest.best_constant < 0.3


def test_a_judge_learns_from_right_and_wrong_responses_with_their_verdicts() -> None:
    draw = np.random.default_rng(0)
    for question in make_counts(200, 3):
        given = responses_to(question, draw)
        assert (len(given), given[:2]) == (RESPONSES, (question.answer, question.careless))
        assert [one == question.answer for one in given] == [True, False, False, False]
        assert [verdict_on(question, one)[-1] for one in given] == ["y", "n", "n", "n"]
        assert all(verdict_on(question, one).startswith(f"{question.answer}?") for one in given)


def test_a_prepared_judge_has_a_model_and_says_how_often_it_is_right(tmp_path: Path) -> None:
    made = prepare_counting_judge(tmp_path / "judge", progress=False, updates=2, must_fit=False)
    assert (made.model / "preprocessor_config.json").is_file()
    assert 0 <= made.manifest.judge_accuracy <= 1
    assert prepare_counting_judge(tmp_path / "judge", progress=False, updates=2, must_fit=False).cached
    with pytest.raises(DataError, match=r"of the judge's verdicts are right"):
        prepare_counting_judge(tmp_path / "other", progress=False, updates=2)


def test_a_zoom_question_is_about_one_of_four_panels() -> None:
    questions = make_zoom_questions(100, 3)
    assert Counter(one.panel.answer for one in questions) == {str(number): 20 for number in range(MOST + 1)}
    assert {one.place for one in questions} == {0, 1, 2, 3}
    assert len({panel for one in questions for panel in one.panels}) == 400
    assert questions[0].prompt == f"<image>{questions[0].place + 1}{questions[0].letter}?"


def test_the_tool_returns_the_panel_that_a_call_names(tmp_path: Path) -> None:
    zoom = load_plugin_file(PluginFile(ROOT / "examples" / "counting" / "zoom.py", "zoom"), "tools")
    call_format = TagCallFormat("zoom", CALL, "?")
    for question in make_zoom_questions(8, 5):
        path = tmp_path / "picture.png"
        path.write_bytes(encode_png(draw_panels(question)))
        call = call_format.call(f"{CALL}{question.asked}?")
        assert call is not None
        result = zoom(call.argument, (str(path),))
        assert result.text == question.letter
        panel = np.asarray(Image.open(io.BytesIO(result.pictures[0])))
        assert np.array_equal(panel, draw_picture(question.panel))
    for wrong in ("5r", "3", "", "33", "3x"):
        with pytest.raises(BadArgument, match="names a panel from 1 to 4"):
            zoom(wrong, (str(path),))


def test_prepared_zoom_questions_have_pictures_that_are_shrunk_in_the_prompt(tmp_path: Path) -> None:
    made = prepare_zoom(tmp_path / "zoom", progress=False, updates=(1, 2), must_fit=False)
    entries = [json.loads(line) for line in (made.folder / "eval.jsonl").read_text().splitlines()]
    assert len(entries) == 200
    assert {Image.open(made.folder / name).size for entry in entries for name in entry["images"]} == {
        (2 * SIZE, 2 * SIZE)
    }
    assert PictureRule.load(made.model, max_pixels=SIZE * SIZE).token_count(2 * SIZE, 2 * SIZE) == TOKENS
    assert 0 < made.manifest.calls < 1
    assert prepare_zoom(tmp_path / "zoom", progress=False, updates=(1, 2), must_fit=False).cached
    with pytest.raises(DataError, match="right after a call"):
        prepare_zoom(tmp_path / "other", progress=False, updates=(1, 2))
