"""The counting example: pictures of coloured squares, and a vision-language model that counts those of one colour.

`prepare_counting` makes one folder (`gcore.quickstart.folder`):

    train.jsonl, eval.jsonl    prompts with the path of a picture, and answers
    pictures/                  PNG files of 48 x 48 pixels; no picture is in both files
    model/                     a Qwen3-VL of 0.4M parameters with its tokenizer and image processor
    manifest.json              the recipe, and size and hash of every other file

A picture has nine cells with at most one square each, in one of four colours. The question is a colour, "red?"; the
answer is the number of squares of that colour, one digit. Each number from 0 to `MOST` is equally frequent, so the best
constant answer is right in one of `MOST` + 1 cases.

The model first learns right answers, until it sees colours, and then also careless ones: the number of all squares,
which is always wrong. With careless answers from the start it never learns to see. Reinforcement learning then has to
unlearn them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gcore.errors import DataError
from gcore.quickstart.folder import PreparedFolder, PreparedManifest, Recipe, Reporter, make_or_find

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

MARKER = "<image>"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz?"
SPECIAL = ("<pad>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PAD, EOS, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
PATCH, MERGE = 8, 2
TOKENS = (SIZE // PATCH // MERGE) ** 2
"""Placeholders of a picture."""


@dataclass(frozen=True, slots=True)
class Count:
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


def make_counts(count: int, seed: int) -> list[Count]:
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
        made.append(Count(shuffled, colour, int(draw.integers(1 << 48))))
    return [made[place] for place in draw.permutation(len(made))]


def draw_picture(question: Count) -> Any:
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


TRAIN_ENTRIES, EVAL_ENTRIES, WARM_ENTRIES = 1200, 200, 6000
"""Number of prompts to train on, of held-out prompts, and of pictures of the warm start."""

WARM_UPDATES = 700
COUNTING_RECIPE = 1
COUNTING_BAND = (0.25, 0.45)
"""Range of the model's greedy accuracy on held-out prompts before RL."""

LEAST_PASS_AT_8 = 0.7
"""Lowest share of held-out prompts for which one of eight samples is right, before RL."""


class CountingManifest(PreparedManifest):
    """Manifest of the example. `greedy_accuracy`, `pass_at_8`: of the model on held-out prompts, before RL.
    `best_constant`: accuracy of the best constant answer there.
    """

    example: Literal["counting"] = "counting"
    warm_updates: int
    greedy_accuracy: float
    pass_at_8: float
    best_constant: float


def prepare_counting(
    to: Path, *, seed: int = 0, progress: bool = True, warm_updates: int = WARM_UPDATES, must_fit: bool = True
) -> PreparedFolder[CountingManifest]:
    """Prepare the example in the folder `to`, or reuse it if it is there.

    `warm_updates`: optimizer updates of the warm start. `must_fit`: require an accuracy of the model in
    `COUNTING_BAND`. Raises DataError if it is outside, if `to` is something other than a prepared example, or if it
    cannot be written.
    """

    def fill(draft: Path) -> CountingManifest:
        return _fill(draft, seed, warm_updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit)

    asked = {"recipe": COUNTING_RECIPE, "seed": seed, "warm_updates": warm_updates}
    return make_or_find(to, Recipe("counting", CountingManifest, asked, fill))


def _fill(draft: Path, seed: int, warm_updates: int, reporter: Reporter, *, must_fit: bool) -> CountingManifest:
    from gcore.quickstart.counting_model import is_fit, save_counter, teach_counting
    from gcore.quickstart.pretraining import THREADS, torch_version

    counts = make_counts(TRAIN_ENTRIES + EVAL_ENTRIES, seed)
    trained, held_out = counts[:TRAIN_ENTRIES], counts[TRAIN_ENTRIES:]
    (draft / "pictures").mkdir()
    for name, questions in (("train", trained), ("eval", held_out)):
        (draft / f"{name}.jsonl").write_text(_write_pictures(draft, name, questions))
    with reporter:
        taught = teach_counting(make_counts(WARM_ENTRIES, seed + 1), held_out, warm_updates, seed, reporter)
    if must_fit and not is_fit(taught):
        raise DataError(
            f"the warm start ended with {taught.greedy:.1%} of held-out pictures counted right and pass@8 of "
            f"{taught.pass_at_8:.1%}, outside of {COUNTING_BAND[0]:.0%} to {COUNTING_BAND[1]:.0%} or below "
            f"{LEAST_PASS_AT_8:.0%}",
            where=f"seed {seed}",
            fix="Use another seed",
        )
    save_counter(taught.network, draft / "model")
    answers = [question.answer for question in held_out]
    return CountingManifest(
        recipe=COUNTING_RECIPE,
        seed=seed,
        threads=THREADS,
        torch=torch_version(),
        warm_updates=warm_updates,
        greedy_accuracy=taught.greedy,
        pass_at_8=taught.pass_at_8,
        best_constant=max(map(answers.count, set(answers))) / len(answers),
    )


def _write_pictures(draft: Path, name: str, questions: Sequence[Count]) -> str:
    """Write the pictures of questions, and return the lines of their entries."""
    lines = []
    for number, question in enumerate(questions):
        path = f"pictures/{name}-{number:04d}.png"
        (draft / path).write_bytes(encode_png(draw_picture(question)))
        lines.append(json.dumps({"prompt": question.prompt, "images": [path], "answer": question.answer}))
    return "\n".join(lines) + "\n"
