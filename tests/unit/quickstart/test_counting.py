"""The counting example: balanced questions, right answers, and patches as the image processor makes them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from gcore.errors import DataError
from gcore.models.vision import PictureProcessor
from gcore.quickstart.counting import (
    RESPONSES,
    prepare_counting,
    prepare_counting_judge,
    responses_to,
    verdict_on,
)
from gcore.quickstart.counting_model import new_counter, patches, save_counter
from gcore.quickstart.counting_pictures import CELL, CELLS, COLOURS, MOST, draw_picture, encode_png, make_counts


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
