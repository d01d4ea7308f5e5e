"""What `gcore init` writes: the files of a new project, a starter task's data, and a model of 1.0M parameters.

    sort      "sort 52713:" is answered "12357". The careless hand goes through the digits once, swapping neighbours that
              are in the wrong order: "25137".
    reverse   "reverse plum:" is answered "mulp". The careless hand swaps the first and the last letter: "mlup".

A keyed hash draws the prompts, all different; held-out prompts are in no training. The warm start has many more prompts than the job's
data, because what so small a model learns by heart does not generalise. The same task, seed and number of updates give the same bytes
on the same machine and torch. A user's own model gets the data alone, with the task spelt out in every prompt.

The caller makes the folder and names it at the end (`controllers.cli.commands.specs`), so nothing here is atomic or locked.
"""

from __future__ import annotations

import functools
import json
import keyword
import re
import string
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import files as resources
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined

from gcore.errors import UsageError
from gcore.quickstart.folder import TeachingProgress
from gcore.quickstart.lessons import Lesson, hashed_numbers, to_jsonl

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
    return Item(f"sort {digits}:", "".join(sorted(digits)), bubble_pass(digits))


def bubble_pass(digits: str) -> str:
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


WARM_UPDATES = 250
"""Updates of the warm start; the curve is flat from about half of them."""


def write_data(task: StarterTask, folder: Path, *, seed: int, spelt_out: bool) -> None:
    """Write train.jsonl and eval.jsonl into `folder`. `spelt_out`: with the task in words in every prompt."""
    split = split_task(task, seed)
    for name, items in (("train", split.train), ("eval", split.held_out)):
        text = _spelt_out(task, items) if spelt_out else to_jsonl(items)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_model(
    task: StarterTask,
    folder: Path,
    *,
    seed: int,
    report: Callable[[TeachingProgress], None],
    updates: int = WARM_UPDATES,
    must_fit: bool = True,
) -> float:
    """Train the model and save it as `folder`; the share of held-out prompts it is right on, greedily.

    Raises DataError if `must_fit` and that share is not what reinforcement learning wants to begin with.
    """
    from gcore.quickstart.pretraining import (
        save_model,  # imports torch
        teach_model,
    )

    lesson = split_task(task, seed).lesson
    taught = teach_model(lesson, seed=seed, updates=updates, report=report, must_fit=must_fit)
    save_model(taught.model, folder)
    return taught.greedy_accuracy


def _spelt_out(task: StarterTask, items: Iterable[Item]) -> str:
    given = ({"prompt": f"{task.instruction}\n\n{item.given}", "answer": item.answer} for item in items)
    return "".join(json.dumps(entry) + "\n" for entry in given)


REWARDS = "gcore.rewards"
_NAME = re.compile(r"[a-z]([a-z0-9_-]{0,38}[a-z0-9])?")

_TEMPLATES = {
    "pyproject.toml": "pyproject.toml.j2",
    "grpo.yaml": "grpo.yaml.j2",
    "README.md": "README.md.j2",
    ".gitignore": "gitignore.j2",
    "src/{package}/__init__.py": "init.py.j2",
    "src/{package}/reward.py": "reward.py.j2",
    "tests/test_reward.py": "test_reward.py.j2",
}


@dataclass(frozen=True, slots=True)
class UserModel:
    """A model that the user brought: a folder or a hub's name. `chat`: its prompts go through a chat template; `gpu`: it is trained on GPUs."""

    path: str
    chat: bool
    gpu: bool


@dataclass(frozen=True, slots=True)
class StarterModel:
    """The model that was warmed up for the task. `accuracy`: share of held-out prompts right, greedily."""

    accuracy: float


def package_name(name: str) -> str:
    """The Python package of a project. Raises UsageError if the project cannot be called so."""
    fix = "Use lower-case letters, digits, '-' and '_', beginning with a letter, at most 40 of them"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a project", where="init", fix=fix)
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or keyword.issoftkeyword(package) or package in sys.stdlib_module_names:
        raise UsageError(f"Python has something called {package!r} already", where="init", fix="Choose another name")
    found = find_spec(package)
    if found is not None and found.origin is not None:  # a mere folder in the way of imports has no origin
        earlier = any(
            p.name == name and p.dist is not None and p.dist.name == name for p in entry_points(group=REWARDS)
        )
        raise UsageError(
            f"a package called {package!r} is installed already ({found.origin})",
            where="init",
            fix="Choose another name" + (f", or `pip uninstall {name}` first" if earlier else ""),
        )
    provider = next((p.dist for p in entry_points(group=REWARDS) if p.name == name), None)
    if provider is not None and provider.name != name:
        raise UsageError(
            f"{provider.name} has a reward called {name!r} already", where="init", fix="Choose another name"
        )
    return package


def project_files(name: str, task: StarterTask, model: UserModel | StarterModel, *, seed: int) -> dict[str, str]:
    """Every text file of the project but its data, by its path. Raises UsageError for a name that cannot be."""
    package = package_name(name)
    split = split_task(task, seed)
    shown = next(item for item in split.train if item.careless_answer != item.answer)
    own = isinstance(model, UserModel)
    prompt = f"{task.instruction}\n\n{shown.given}" if own else shown.prompt
    facts = {
        "name": name,
        "package": package,
        "instruction": task.instruction,
        "careless_words": task.careless_words,
        "longest_answer": task.longest_answer,
        "answer": shown.answer,
        "careless": shown.careless_answer,
        "entry": json.dumps({"prompt": prompt, "answer": shown.answer}),
        "own_model": own,
        "model": model.path if isinstance(model, UserModel) else "",
        "chat": model.chat if isinstance(model, UserModel) else False,
        "gpu": model.gpu if isinstance(model, UserModel) else False,
        "accuracy": model.accuracy if isinstance(model, StarterModel) else 0.0,
    }
    # Files for Python, YAML and TOML: what goes in is checked above or written as JSON, so nothing is to be escaped.
    environment = Environment(
        loader=FunctionLoader(_template), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return {
        path.format(package=package): environment.get_template(template).render(facts)
        for path, template in _TEMPLATES.items()
    }


def _template(file: str) -> str:
    return (resources("gcore.quickstart.templates") / "project" / file).read_text(encoding="utf-8")
