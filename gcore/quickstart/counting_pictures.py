"""Pictures of coloured squares, and questions about them, for the counting example.

A picture has nine cells with at most one square each, in one of four colours. The question is a colour, "red?"; the
answer is the number of squares of that colour, one digit. Each number from 0 to `MOST` is equally frequent, so the best
constant answer is right in one of `MOST` + 1 cases.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "gold": (225, 190, 30)}
"""Names and RGB values of the colours."""

CELLS, CELL = 3, 16
"""Cells in a row of a picture, and their size in pixels."""

SIZE = CELLS * CELL
"""Width and height of a picture in pixels."""

MOST = 4
"""The largest number of squares of the asked colour."""

GROUND, SPREAD = 235, 12
"""Grey value of the ground, and the largest difference of a colour value from its nominal one."""

COUNTING_BAND = (0.25, 0.45)
"""Range of the model's greedy accuracy on held-out prompts before RL."""

LEAST_PASS_AT_8 = 0.85
"""Lowest share of held-out prompts for which one of eight samples is right, before RL."""

MARKER = "<image>"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz?"
SPECIAL = ("<pad>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PAD, EOS, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
PATCH, MERGE = 8, 2
TOKENS = (SIZE // PATCH // MERGE) ** 2
"""Placeholders of a picture."""


@dataclass(frozen=True, slots=True)
class CountingQuestion:
    """A question about a picture. `cells`: the colour of each cell's square, row by row; empty: none."""

    cells: tuple[str, ...]
    colour: str
    seed: int
    """Determines the places, sizes and exact colours of the squares."""

    @property
    def prompt(self) -> str:
        """The question, with the marker of the picture."""
        return f"{MARKER}{self.colour}?"

    @property
    def answer(self) -> str:
        """The number of squares of the asked colour."""
        return str(self.cells.count(self.colour))

    @property
    def careless(self) -> str:
        """The number of all squares, which is always another number."""
        return str(sum(map(bool, self.cells)))


def make_counts(count: int, seed: int) -> list[CountingQuestion]:
    """Draw questions: the number of squares of the asked colour is uniform, and at least one square has another."""
    import numpy as np

    draw, colours = np.random.default_rng(seed), sorted(COLOURS)
    made = []
    for number in range(count):
        colour = colours[draw.integers(len(colours))]
        asked = number % (MOST + 1)
        others = [name for name in colours if name != colour]
        more = int(draw.integers(1, CELLS * CELLS - asked))
        cells = [colour] * asked + [others[draw.integers(len(others))] for _ in range(more)]
        cells += [""] * (CELLS * CELLS - len(cells))
        shuffled = tuple(cells[place] for place in draw.permutation(len(cells)))
        made.append(CountingQuestion(shuffled, colour, int(draw.integers(1 << 48))))
    return [made[place] for place in draw.permutation(len(made))]


def draw_picture(question: CountingQuestion) -> Any:
    """Draw the picture of a question: [height, width, 3] uint8."""
    import numpy as np

    draw = np.random.default_rng(question.seed)

    def shade(value: Sequence[int]) -> Any:
        return np.clip(np.array(value) + draw.integers(-SPREAD, SPREAD + 1, 3), 0, 255)

    picture = np.empty((SIZE, SIZE, 3), np.uint8)
    picture[:] = shade((GROUND,) * 3)
    for number, name in enumerate(question.cells):
        side = int(draw.integers(10, 14))
        top, left = (int(draw.integers(0, CELL - side + 1)) for _ in range(2))
        if name:
            row, column = divmod(number, CELLS)
            y, x = row * CELL + top, column * CELL + left
            picture[y : y + side, x : x + side] = shade(COLOURS[name])
    return picture


def encode_png(picture: Any) -> bytes:
    """Encode a picture [height, width, 3] uint8 as PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", optimize=False)
    return file.getvalue()
