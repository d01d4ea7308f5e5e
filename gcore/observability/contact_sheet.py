"""Contact sheets: pictures that a policy generated side by side in one PNG file, with their prompts and rewards.

A sheet has sections of cards. A card is a prompt with some pictures, each with a label and a border: green if it is right,
red if it is wrong, grey if that is unknown. `held_out_section` puts the pictures of several evaluations of the same
held-out prompt beside one another.

A sheet has at most `MOST_PICTURES` pictures and `WIDTH` pixels in width, and pictures are scaled to `SIDE`, so its size is
bounded. A tiny picture is enlarged by a whole number without smoothing, so that its pixels stay visible. Drawing decodes
files and takes up to some seconds: call it off the event loop. Pillow is imported on first use.
"""

from __future__ import annotations

import io
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.ledger.records.job import EvalSample, Evaluation, KeptPicture
from gcore.media.pictures import PictureError, normalize_picture, without_pillow
from gcore.observability.samples import find_evaluation_picture

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

SHEET_FILE = "contact_sheet.png"
"""File in the run folder: held-out pictures before and after training."""

SIDE = 160
"""Longest side of a picture on a sheet, in pixels."""

WIDTH = 1600
"""Maximum width of a sheet in pixels."""

MOST_PICTURES = 256
"""Maximum number of pictures on a sheet."""

MOST_OF_CARD = 8
"""Maximum number of pictures on a card."""

MOST_PIXELS = 64 << 20
"""Maximum width x height of a picture that is decoded."""

_BACK, _TEXT, _QUIET = (255, 255, 255), (28, 33, 39), (102, 112, 128)
_BORDERS = {True: (26, 127, 79), False: (194, 53, 44), None: (190, 196, 204)}
_BORDER, _GAP, _LINE = 3, 14, 17
_CELL = SIDE + 2 * _BORDER
_FONTS = ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf")
"""Fonts for characters that Pillow's own font lacks, if the machine has them."""

_STAMP = "gcore"
"""Key of the stamp in the PNG file."""


@dataclass(frozen=True, slots=True)
class SheetPicture:
    """A picture on a card. `file`: None or a missing file: an empty cell is drawn. `right`: None: unknown."""

    file: Path | None
    label: str
    right: bool | None = None


@dataclass(frozen=True, slots=True)
class SheetCard:
    """A prompt with pictures."""

    caption: str
    pictures: tuple[SheetPicture, ...]


@dataclass(frozen=True, slots=True)
class SheetSection:
    """Cards under a heading."""

    title: str
    cards: tuple[SheetCard, ...]


@dataclass(frozen=True, slots=True)
class HeldOutPicture:
    """A picture of an evaluation. `unscored`: whether its reward could not score it."""

    source: str
    prompt: str
    file: Path | None
    reward: float
    right: bool
    unscored: bool = False


@dataclass(frozen=True, slots=True)
class HeldOutStep:
    """The pictures of the evaluation after `step`. `accuracy`: over all its prompts, 0 to 1."""

    step: int
    accuracy: float
    pictures: tuple[HeldOutPicture, ...]


def sheet_step(evaluation: Evaluation, run_dir: Path) -> HeldOutStep:
    """The pictures of an evaluation, with their files in the run folder."""

    def show(sample: EvalSample, picture: KeptPicture) -> HeldOutPicture:
        file = find_evaluation_picture(run_dir, evaluation.version, picture.sha256)
        right, unscored = bool(sample.correct), bool(sample.unscored)
        return HeldOutPicture(sample.source, sample.prompt, file, sample.reward, right, unscored)

    shown = tuple(show(one, one.picture) for one in evaluation.samples if one.picture is not None)
    return HeldOutStep(evaluation.version.step, evaluation.accuracy, shown)


def held_out_section(steps: Sequence[HeldOutStep]) -> SheetSection:
    """Put the pictures of the same held-out prompt of several evaluations on one card. Prompts with equal texts are
    distinguished by their order."""
    by_step = [dict(zip(_names(one.pictures), one.pictures, strict=True)) for one in steps]
    cards = []
    for name in dict.fromkeys(name for found in by_step for name in found):
        pictures = [_held_out_picture(one.step, found.get(name)) for one, found in zip(steps, by_step, strict=True)]
        cards.append(SheetCard(name[1], tuple(pictures)))
    told = ", ".join(f"{one.accuracy:.1%} after step {one.step}" for one in steps)
    return SheetSection(f"Held-out pictures. Accuracy: {told}", tuple(cards))


def _names(pictures: Iterable[HeldOutPicture]) -> Iterator[tuple[str, str, int]]:
    seen = Counter[tuple[str, str]]()
    for one in pictures:
        yield one.source, one.prompt, seen[one.source, one.prompt]
        seen[one.source, one.prompt] += 1


def _held_out_picture(step: int, one: HeldOutPicture | None) -> SheetPicture:
    if one is None:
        return SheetPicture(None, f"step {step}: not shown")
    if one.unscored:
        return SheetPicture(one.file, f"step {step}: not scored")
    return SheetPicture(one.file, f"step {step}: {verdict(one.reward, right=one.right)}", one.right)


def verdict(reward: float, *, right: bool) -> str:
    """What a reward says about a response: `right`, `wrong`, or `right, reward 0.87`."""
    word = "right" if right else "wrong"
    return word if reward == float(right) else f"{word}, reward {reward:.3g}"


def draw_sheet(title: str, sections: Sequence[SheetSection], stamp: str = "") -> bytes:
    """Draw a sheet and return its PNG file. `stamp`: a text that `read_stamp` finds again.

    Pictures beyond the limits are left out, and the sheet says how many. Raises DataError if Pillow is missing.
    """
    try:
        from PIL import Image, ImageDraw
        from PIL.PngImagePlugin import PngInfo
    except ImportError as error:
        raise without_pillow(error) from error

    pen = _Pen(ImageDraw.Draw(Image.new("RGB", (1, 1))))
    pieces = list(_layout(title, sections, pen))
    height = max((piece.bottom for piece in pieces), default=0) + _GAP
    width = max((piece.right for piece in pieces), default=0) + _GAP
    sheet = Image.new("RGB", (min(width, WIDTH), height), _BACK)
    pen = _Pen(ImageDraw.Draw(sheet))
    for piece in pieces:
        if isinstance(piece, _Words):
            pen.write(piece)
        else:
            _draw_picture(sheet, pen, piece)
    info = PngInfo()
    info.add_text(_STAMP, stamp)
    out = io.BytesIO()
    sheet.save(out, "PNG", pnginfo=info, compress_level=6)
    return out.getvalue()


def read_stamp(file: Path) -> str:
    """Return the stamp of a sheet; empty if there is no readable sheet with a stamp."""
    try:
        from PIL import Image

        with Image.open(file) as sheet:
            return str(sheet.info.get(_STAMP, ""))
    except (ImportError, OSError, ValueError, SyntaxError):
        return ""


@dataclass(frozen=True, slots=True)
class _Words:
    """Text at a place of the sheet."""

    x: int
    y: int
    text: str
    size: int
    colour: tuple[int, int, int]
    width: int

    @property
    def right(self) -> int:
        return self.x + self.width

    @property
    def bottom(self) -> int:
        return self.y + _LINE


@dataclass(frozen=True, slots=True)
class _Cell:
    """A picture at a place of the sheet."""

    x: int
    y: int
    picture: SheetPicture

    @property
    def right(self) -> int:
        return self.x + _CELL

    @property
    def bottom(self) -> int:
        return self.y + _CELL


def _layout(title: str, sections: Sequence[SheetSection], pen: _Pen) -> Iterator[_Words | _Cell]:
    """Place everything: cards in rows from left to right, sections below one another."""
    most = WIDTH - 2 * _GAP
    left, y = MOST_PICTURES, _GAP
    omitted = 0
    for line in pen.wrapped(title, most, 16, 2):
        yield _Words(_GAP, y, line, 16, _TEXT, pen.width(line, 16))
        y += 2 * _LINE - 10
    for section in sections:
        for line in pen.wrapped(section.title, most, 14, 3):
            yield _Words(_GAP, y, line, 14, _TEXT, pen.width(line, 14))
            y += _LINE
        y += _LINE // 2
        x, below = _GAP, y
        for card in section.cards:
            shown = card.pictures[: min(MOST_OF_CARD, left)]
            left -= len(shown)
            omitted += len(card.pictures) - len(shown)
            if not shown:
                continue
            wide = len(shown) * (_CELL + _GAP // 2) - _GAP // 2
            if x > _GAP and x + wide > WIDTH - _GAP:
                x, y = _GAP, below + _GAP
            pieces = list(_card(card.caption, shown, x, y, wide, pen))
            yield from pieces
            x, below = x + wide + 2 * _GAP, max(below, *(piece.bottom for piece in pieces))
        y = below + 2 * _GAP
    if omitted:
        more = f"{omitted} more pictures are not on this sheet."
        yield _Words(_GAP, y, more, 13, _QUIET, pen.width(more, 13))


def _card(
    caption: str, shown: Sequence[SheetPicture], x: int, y: int, wide: int, pen: _Pen
) -> Iterator[_Words | _Cell]:
    lines = pen.wrapped(caption, wide, 13, 2)
    for number, line in enumerate(lines):
        yield _Words(x, y + (2 - len(lines) + number) * _LINE, line, 13, _TEXT, pen.width(line, 13))
    top = y + 2 * _LINE + 2
    for number, picture in enumerate(shown):
        at = x + number * (_CELL + _GAP // 2)
        yield _Cell(at, top, picture)
        for line in pen.wrapped(picture.label, _CELL, 12, 1):
            yield _Words(at, top + _CELL + 2, line, 12, _QUIET, pen.width(line, 12))


class _Pen:
    """Measures and draws text."""

    def __init__(self, draw: ImageDraw.ImageDraw) -> None:
        self.draw = draw
        self._fonts: dict[tuple[int, bool], Any] = {}

    def font(self, size: int, text: str) -> Any:
        """The font for `text`: Pillow's own, or one of the machine for characters that it lacks."""
        from PIL import ImageFont

        other = not text.isascii()
        if (size, other) not in self._fonts:
            self._fonts[size, other] = next(iter(_machine_fonts(size)), None) if other else None
            self._fonts[size, other] = self._fonts[size, other] or ImageFont.load_default(size)
        return self._fonts[size, other]

    def width(self, text: str, size: int) -> int:
        """Width of one line of text in pixels."""
        return int(self.draw.textlength(text, font=self.font(size, text))) + 1

    def wrapped(self, text: str, width: int, size: int, most: int) -> list[str]:
        """Wrap text at `width` pixels into at most `most` lines; what does not fit ends with "…"."""
        rest = " ".join("".join(c if unicodedata.category(c)[0] != "C" else " " for c in text[:1000]).split())
        lines: list[str] = []
        while rest and len(lines) < most:
            end = self._fitting(rest, width, size)
            if end < len(rest) and len(lines) == most - 1:
                line = rest[: max(end - 1, 1)] + "…"
            else:
                blank = rest.rfind(" ", 0, end + 1) if end < len(rest) else -1
                line = rest[: blank if blank > 0 else end]
            lines.append(line)
            rest = rest[len(line) :].strip()
        return lines

    def _fitting(self, text: str, width: int, size: int) -> int:
        """How many of the first characters fit into `width` pixels; at least one."""
        low, high = 1, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.width(text[:middle], size) <= width else (low, middle - 1)
        return low

    def write(self, words: _Words) -> None:
        """Draw one line of text."""
        self.draw.text((words.x, words.y), words.text, fill=words.colour, font=self.font(words.size, words.text))


def _machine_fonts(size: int) -> Iterator[Any]:
    from PIL import ImageFont

    for name in _FONTS:
        try:
            yield ImageFont.truetype(name, size)
        except OSError:
            continue


def _draw_picture(sheet: Image.Image, pen: _Pen, cell: _Cell) -> None:
    found = _scaled(cell.picture.file)
    if found is None:
        pen.draw.rectangle((cell.x, cell.y, cell.right - 1, cell.bottom - 1), outline=_BORDERS[None], width=1)
        text = "no picture"
        pen.write(_Words(cell.x + 10, cell.y + SIDE // 2 - 6, text, 12, _QUIET, pen.width(text, 12)))
        return
    x, y = cell.x + (_CELL - found.width) // 2, cell.y + (_CELL - found.height) // 2
    around = (x - _BORDER, y - _BORDER, x + found.width + _BORDER - 1, y + found.height + _BORDER - 1)
    pen.draw.rectangle(around, fill=_BORDERS[cell.picture.right])
    sheet.paste(found, (x, y))


def _scaled(file: Path | None) -> Image.Image | None:
    """A picture in the size in which sheets show it; None if there is no readable file."""
    from PIL import Image

    if file is None:
        return None
    try:
        data, _ = normalize_picture(file, _shrunk, max_decode_pixels=MOST_PIXELS)
    except PictureError:
        return None
    with Image.open(io.BytesIO(data)) as opened:
        picture = opened.convert("RGB")
    times = SIDE // max(picture.size)
    return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)


def _shrunk(height: int, width: int) -> tuple[int, int]:
    """The size of a picture on a sheet, unless it is enlarged."""
    scale = min(1.0, SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))
