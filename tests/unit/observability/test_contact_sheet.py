"""Contact sheets: what is drawn where, borders, limits, and files that cannot be read."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore.errors import DataError
from gcore.ledger.records.job import EvalSample, Evaluation, KeptPicture
from gcore.observability.contact_sheet import (
    MOST_PICTURES,
    SIDE,
    WIDTH,
    HeldOutPicture,
    HeldOutStep,
    SheetCard,
    SheetPicture,
    SheetSection,
    draw_sheet,
    held_out_section,
    read_stamp,
    sheet_step,
    verdict,
)
from gcore.observability.samples import evaluation_folder
from gcore.types import Version

GREEN, RED, GREY = (26, 127, 79), (194, 53, 44), (190, 196, 204)
INK = (10, 20, 240)
"""The colour of the pictures, which nothing else on a sheet has."""


def picture(file: Path, width: int = 8, height: int = 8, colour: tuple[int, int, int] = INK) -> Path:
    from PIL import Image

    Image.new("RGB", (width, height), colour).save(file)
    return file


def pixels(sheet: bytes) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(sheet)).convert("RGB"))


def places(sheet: bytes, colour: tuple[int, int, int]) -> Any:
    """Rows and columns of all pixels of a colour."""
    return np.argwhere((pixels(sheet) == colour).all(axis=2))


def card(*pictures: SheetPicture, caption: str = "red northwest") -> SheetSection:
    return SheetSection("step 3", (SheetCard(caption, pictures),))


def test_a_tiny_picture_is_enlarged_without_smoothing_to_a_whole_multiple(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.array([[INK, (0, 0, 0)], [(0, 0, 0), INK]], np.uint8)).save(tmp_path / "a.png")
    sheet = draw_sheet("job", [card(SheetPicture(tmp_path / "a.png", "step 0", True))])
    found = places(sheet, INK)
    assert len(found) == 2 * (SIDE // 2) ** 2, "two of four pixels, each enlarged, no colour between"


@pytest.mark.parametrize(
    ("width", "height", "shown"), [(100, 50, (100, 50)), (1000, 500, (SIDE, SIDE // 2)), (3000, 30, (SIDE, 2))]
)
def test_a_large_picture_is_shrunk_to_the_same_shape(
    tmp_path: Path, width: int, height: int, shown: tuple[int, int]
) -> None:
    sheet = draw_sheet("job", [card(SheetPicture(picture(tmp_path / "a.png", width, height), "", True))])
    found = places(sheet, INK)
    rows, columns = found.max(axis=0) - found.min(axis=0) + 1
    assert (columns, rows) == shown


@pytest.mark.parametrize(("right", "colour"), [(True, GREEN), (False, RED), (None, GREY)])
def test_the_border_says_whether_a_picture_is_right(tmp_path: Path, right: bool | None, colour: Any) -> None:
    sheet = draw_sheet("job", [card(SheetPicture(picture(tmp_path / "a.png"), "", right))])
    inside, border = places(sheet, INK), places(sheet, colour)
    assert len(border) == (SIDE + 6) ** 2 - SIDE**2
    assert (border.min(axis=0) == inside.min(axis=0) - 3).all()


@pytest.mark.parametrize("broken", ["missing", "damaged", "none"])
def test_a_picture_that_cannot_be_read_leaves_an_empty_cell(tmp_path: Path, broken: str) -> None:
    (tmp_path / "damaged").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    file = None if broken == "none" else tmp_path / broken
    whole = SheetPicture(picture(tmp_path / "a.png"), "", True)
    sheet = draw_sheet("job", [card(SheetPicture(file, "step 0", True), whole)])
    assert len(places(sheet, INK)) == SIDE**2
    assert len(places(sheet, GREY)) > 0


def test_a_sheet_has_a_bounded_number_of_pictures_and_a_bounded_width(tmp_path: Path) -> None:
    file = picture(tmp_path / "a.png", 1, 2)
    long = SheetCard("word " * 500, tuple(SheetPicture(file, "label " * 50) for _ in range(40)))
    sections = [SheetSection("title " * 500, (long,) * 20) for _ in range(5)]
    sheet = draw_sheet("job " * 500, sections)
    assert pixels(sheet).shape[1] <= WIDTH
    assert len(places(sheet, INK)) == MOST_PICTURES * SIDE * (SIDE // 2)


@pytest.mark.parametrize("text", ["", "a\x1b[2Jb\nc", "绿色的猫", "\ud800", "x" * 5000, "\u202e"])
def test_any_prompt_can_be_drawn(tmp_path: Path, text: str) -> None:
    shown = SheetSection(text, (SheetCard(text, (SheetPicture(picture(tmp_path / "a.png"), text, True),)),))
    assert len(places(draw_sheet(text, [shown]), INK)) == SIDE**2


def held_out(prompt: str, file: Path, reward: float, *, source: str = "s", unscored: bool = False) -> HeldOutPicture:
    return HeldOutPicture(source, prompt, file, reward, reward >= 1, unscored)


def test_pictures_of_the_same_prompt_are_side_by_side_and_equal_prompts_stay_apart() -> None:
    files = [Path(str(number)) for number in range(7)]
    before = HeldOutStep(
        0, 0.25, (held_out("red", files[0], 0), held_out("red", files[1], 1), held_out("x", files[2], 0))
    )
    after = HeldOutStep(
        9, 1.0, (held_out("red", files[3], 1), held_out("red", files[4], 0.5), held_out("red", files[5], 1, source="o"))
    )
    section = held_out_section([before, after])
    assert section.title == "Held-out pictures. Accuracy: 25.0% after step 0, 100.0% after step 9"
    assert [(one.caption, [(shown.file, shown.label) for shown in one.pictures]) for one in section.cards] == [
        ("red", [(files[0], "step 0: wrong"), (files[3], "step 9: right")]),
        ("red", [(files[1], "step 0: right"), (files[4], "step 9: wrong, reward 0.5")]),
        ("x", [(files[2], "step 0: wrong"), (None, "step 9: not shown")]),
        ("red", [(None, "step 0: not shown"), (files[5], "step 9: right")]),
    ]


def test_a_picture_without_a_score_is_neither_right_nor_wrong() -> None:
    (one,) = held_out_section([HeldOutStep(0, 0, (held_out("red", Path("a"), 0, unscored=True),))]).cards
    assert one.pictures == (SheetPicture(Path("a"), "step 0: not scored", None),)


@pytest.mark.parametrize(
    ("reward", "right", "words"),
    [
        (1.0, True, "right"),
        (0.0, False, "wrong"),
        (0.8765, True, "right, reward 0.876"),
        (-1, False, "wrong, reward -1"),
    ],
)
def test_a_verdict_has_the_reward_if_it_is_not_0_or_1(reward: float, right: bool, words: str) -> None:
    assert verdict(reward, right=right) == words


def test_an_evaluation_gives_its_pictures_with_their_files(tmp_path: Path) -> None:
    version = Version(1, 4)
    folder = evaluation_folder(tmp_path, version)
    folder.mkdir(parents=True)
    file = picture(folder / f"{'ab' * 32}.png")
    there, gone = (KeptPicture(sha256=name * 32, size=9, height=8, width=8) for name in ("ab", "cd"))
    samples = [
        EvalSample(prompt=name, response="", answer="", reward=1.0, source="s", correct=True, picture=shown)
        for name, shown in (("a", there), ("b", gone), ("text", None))
    ]
    evaluation = Evaluation(version=version, accuracy=0.5, count=3, samples=tuple(samples))
    found = sheet_step(evaluation, tmp_path)
    assert (found.step, found.accuracy) == (4, 0.5)
    assert [(one.prompt, one.file) for one in found.pictures] == [("a", file), ("b", None)]


def test_the_stamp_of_a_sheet_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "sheet.png"
    assert read_stamp(file) == ""
    file.write_bytes(b"no picture")
    assert read_stamp(file) == ""
    picture(file)
    assert read_stamp(file) == ""
    file.write_bytes(draw_sheet("job", [], stamp="0.0 1.30"))
    assert read_stamp(file) == "0.0 1.30"


def test_a_missing_pillow_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="pip install 'gcore\\[vision\\]'"):
        draw_sheet("job", [])
