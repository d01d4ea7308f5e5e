"""The content of a project that `gcore init` creates: its files, the data of a starter task, and a warm-started model
of 1.0M parameters.

The tasks:

    sort      The answer to "sort 52713:" is "12357". The careless answer, "25137", comes from one pass through the digits that swaps
              neighbours in the wrong order.
    reverse   The answer to "reverse plum:" is "mulp". The careless answer, "mlup", swaps the first and the last letter.

A keyed hash generates the prompts, all different; training uses no held-out prompt. The warm start has many more
prompts than the job's data, because so small a model memorizes instead of generalizing. The same task, seed and number
of updates give the same bytes on the same machine and torch version. A user's own model gets the data only, with the
task's instruction in every prompt.

The caller creates the folder and moves it into place (`controllers.cli.commands.specs`), so nothing here is atomic or
locked.
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
"""The starter model's tokens. More than its tasks need, so that users can try other data."""

TRAIN_PROMPTS = 2000
HELD_OUT_PROMPTS = 200
WARM_PROMPTS = 8000
CARELESS_SHARE = 0.7
BAND = (0.2, 0.6)
"""Range of the starter model's greedy accuracy on held-out prompts before RL."""


@dataclass(frozen=True, slots=True)
class Item:
    """One exercise of a starter task, with its right and its careless answer."""

    prompt: str
    answer: str
    careless_answer: str

    @property
    def given(self) -> str:
        """The digits or letters of the exercise, without the word before them."""
        return self.prompt.removesuffix(":").partition(" ")[2]


@dataclass(frozen=True, slots=True)
class StarterTask:
    """A task that the model of a new project learns. `draw`: makes an exercise from a random integer below 2**64."""

    name: str
    instruction: str
    """The task in words, for users and for language models."""
    careless_words: str
    """What the careless demonstrations do wrong, as the end of a sentence for users."""
    longest_answer: int
    """Length of the longest answer, in characters."""
    draw: Callable[[int], Item]


@dataclass(frozen=True, slots=True)
class StarterSplit:
    """The exercises of a task. No prompt is in two of the three parts."""

    train: tuple[Item, ...]
    held_out: tuple[Item, ...]
    warm: tuple[Item, ...]

    @property
    def lesson(self) -> Lesson:
        """The training data of the warm start."""
        return Lesson(CHARACTERS, (self.warm + self.train,), (64,), self.held_out, CARELESS_SHARE, BAND)


SORTED_DIGITS = 5


def _sort(number: int) -> Item:
    digits = f"{number % 10**SORTED_DIGITS:0{SORTED_DIGITS}}"
    return Item(f"sort {digits}:", "".join(sorted(digits)), bubble_pass(digits))


def bubble_pass(digits: str) -> str:
    """Return `digits` after one pass that swaps neighbours in the wrong order."""
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
            careless_words="which swap neighbouring digits in one pass and stop too early.",
            longest_answer=SORTED_DIGITS,
            draw=_sort,
        ),
        StarterTask(
            name="reverse",
            instruction="Write this word backwards; answer with its letters alone.",
            careless_words="which only swap the first and the last letter.",
            longest_answer=LONGEST_WORD,
            draw=_reverse,
        ),
    )
}


@functools.cache
def split_task(task: StarterTask, seed: int) -> StarterSplit:
    """Generate the exercises of a task for evaluation, training and the warm start. `seed` decides which prompts there
    are."""
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
"""Updates of the warm start. Accuracy stops improving after about half of them."""


def write_data(task: StarterTask, folder: Path, *, seed: int, spelt_out: bool) -> None:
    """Write train.jsonl and eval.jsonl into `folder`. `spelt_out`: put the task's instruction into every prompt, for a
    model that was not warm-started."""
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
    """Train the starter model, save it in `folder`, and return its greedy accuracy on held-out prompts.

    `report`: called after each update. Raises DataError if `must_fit` and the accuracy is outside `BAND`.
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
    """A model that the user named: a folder, or a name on a hub. `chat`: prompts use a chat template. `gpu`: it is trained on GPUs."""

    path: str
    chat: bool
    gpu: bool


@dataclass(frozen=True, slots=True)
class StarterModel:
    """The model that the warm start trained. `accuracy`: its greedy accuracy on held-out prompts."""

    accuracy: float


def package_name(name: str) -> str:
    """Return the Python package name of a project. Raises UsageError if the project name is not usable."""
    fix = "Use at most 40 lower-case letters, digits, '-' and '_', beginning with a letter"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid project name", where="init", fix=fix)
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or keyword.issoftkeyword(package) or package in sys.stdlib_module_names:
        raise UsageError(f"Python already has a keyword or module {package!r}", where="init", fix="Choose another name")
    found = find_spec(package)
    if found is not None and found.origin is not None:  # a folder without __init__.py has no origin
        earlier = any(
            p.name == name and p.dist is not None and p.dist.name == name for p in entry_points(group=REWARDS)
        )
        raise UsageError(
            f"a package {package!r} is already installed ({found.origin})",
            where="init",
            fix="Choose another name" + (f", or `pip uninstall {name}` first" if earlier else ""),
        )
    provider = next((p.dist for p in entry_points(group=REWARDS) if p.name == name), None)
    if provider is not None and provider.name != name:
        raise UsageError(f"{provider.name} already provides a reward {name!r}", where="init", fix="Choose another name")
    return package


def project_files(name: str, task: StarterTask, model: UserModel | StarterModel, *, seed: int) -> dict[str, str]:
    """Return the text of each file of the project except its data, by path relative to its folder.

    Raises UsageError for a name that is not usable.
    """
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
    # Python, YAML and TOML: all values are checked above or written as JSON, so nothing needs escaping.
    environment = Environment(
        loader=FunctionLoader(_template), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return {
        path.format(package=package): environment.get_template(template).render(facts)
        for path, template in _TEMPLATES.items()
    }


def _template(file: str) -> str:
    return (resources("gcore.quickstart.templates") / "project" / file).read_text(encoding="utf-8")
