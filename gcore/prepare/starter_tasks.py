"""The tasks that `gcore init` begins with: what is asked, what is right, and how a careless hand answers.

    sort      "sort 52713:" is answered "12357". The careless hand goes through the digits once, swapping neighbours that
              stand wrong, and thinks it is done: "25137".
    reverse   "reverse plum:" is answered "mulp". The careless hand swaps the first and the last letter: "mlup".

Prompts are drawn by a keyed hash, all of them different, so that they are the same on every machine and for ever; those
that are held out are in no training of any kind. The warm start sees many more prompts than the job's data have, because
what a model of this size learned by heart does not carry over to prompts it never saw. Pure; nothing is trained here
(`gcore.prepare.starter`).
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable
from dataclasses import dataclass

from gcore.prepare.lesson import Lesson, hashed_numbers

CHARACTERS = string.digits + string.ascii_lowercase + string.punctuation + " "
"""The starter model's tokens: more than its tasks need, so that another task's data can be tried on it."""

TRAIN_PROMPTS = 2000
HELD_OUT_PROMPTS = 200
WARM_PROMPTS = 8000
CARELESS_SHARE = 0.7
BAND = (0.2, 0.6)


@dataclass(frozen=True, slots=True)
class Item:
    """One exercise of a task."""

    prompt: str
    answer: str
    careless_answer: str

    @property
    def given(self) -> str:
        """The digits or letters that are asked about, without the word before them."""
        return self.prompt.removesuffix(":").partition(" ")[2]


@dataclass(frozen=True, slots=True)
class StarterTask:
    """`draw` makes an exercise of a whole number below 2**64, and of most of them another one."""

    name: str
    instruction: str
    """The task in words, for people and for models that read."""
    careless_words: str
    """What the careless hand does, as the end of a sentence."""
    longest_answer: int
    """Characters."""
    draw: Callable[[int], Item]


@dataclass(frozen=True, slots=True)
class StarterSplit:
    """Exercises of a task; no prompt is in two of the three."""

    train: tuple[Item, ...]
    held_out: tuple[Item, ...]
    warm: tuple[Item, ...]

    @property
    def lesson(self) -> Lesson:
        """What the warm start is given."""
        return Lesson(CHARACTERS, (self.warm + self.train,), (64,), self.held_out, CARELESS_SHARE, BAND)


SORTED_DIGITS = 5


def _sort(number: int) -> Item:
    digits = f"{number % 10**SORTED_DIGITS:0{SORTED_DIGITS}}"
    return Item(f"sort {digits}:", "".join(sorted(digits)), one_pass(digits))


def one_pass(digits: str) -> str:
    """`digits` after going through them once, swapping neighbours that stand in the wrong order."""
    row = list(digits)
    for place in range(len(row) - 1):
        if row[place] > row[place + 1]:
            row[place], row[place + 1] = row[place + 1], row[place]
    return "".join(row)


SHORTEST_WORD, LONGEST_WORD = 3, 5


def _reverse(number: int) -> Item:
    number, extra = divmod(number, LONGEST_WORD - SHORTEST_WORD + 1)
    letters = []
    for _ in range(SHORTEST_WORD + extra):
        number, letter = divmod(number, 26)
        letters.append(string.ascii_lowercase[letter])
    word = "".join(letters)
    return Item(f"reverse {word}:", word[::-1], word[-1] + word[1:-1] + word[0])


TASKS = {
    task.name: task
    for task in (
        StarterTask(
            name="sort",
            instruction="Put these digits in ascending order; answer with the digits alone.",
            careless_words="which goes through the digits once, swaps neighbours that stand wrong, and thinks it is done.",
            longest_answer=SORTED_DIGITS,
            draw=_sort,
        ),
        StarterTask(
            name="reverse",
            instruction="Write this word backwards; answer with its letters alone.",
            careless_words="which swaps the first and the last letter, and thinks it is done.",
            longest_answer=LONGEST_WORD,
            draw=_reverse,
        ),
    )
}


@functools.cache
def split_task(task: StarterTask, seed: int) -> StarterSplit:
    """The exercises of a task, dealt out. `seed` decides which prompts there are."""
    drawn: dict[str, Item] = {}
    for number in hashed_numbers(f"{task.name} {seed}"):
        item = task.draw(number)
        drawn.setdefault(item.prompt, item)
        if len(drawn) == TRAIN_PROMPTS + HELD_OUT_PROMPTS + WARM_PROMPTS:
            break
    items = tuple(drawn.values())
    return StarterSplit(
        held_out=items[:HELD_OUT_PROMPTS],
        train=items[HELD_OUT_PROMPTS : HELD_OUT_PROMPTS + TRAIN_PROMPTS],
        warm=items[HELD_OUT_PROMPTS + TRAIN_PROMPTS :],
    )
