"""The files of a new project, as `gcore init` writes them, and which names a project may have.

`files` is pure: a request and what is known of the model give texts by path. Where they go, and that they get there all at
once, is the verb's business (`controllers.cli.init_verb`); data and model are `gcore.prepare.starter`'s.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import files as resources
from importlib.util import find_spec

from jinja2 import Environment, FunctionLoader, StrictUndefined

from gcore.errors import UsageError
from gcore.prepare.starter_tasks import StarterTask, split_task

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
class OwnModel:
    """A model that the user brought: a folder or a hub's name. `chat`: its prompts go through a chat template."""

    path: str
    chat: bool


@dataclass(frozen=True, slots=True)
class StarterModel:
    """The model that was warmed up for the task. `accuracy`: share of held-out prompts right, greedily."""

    accuracy: float


def package_of(name: str) -> str:
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


def files(name: str, task: StarterTask, model: OwnModel | StarterModel, *, seed: int) -> dict[str, str]:
    """Every text file of the project but its data, by its path. Raises UsageError for a name that cannot be."""
    package = package_of(name)
    split = split_task(task, seed)
    shown = next(item for item in split.train if item.careless_answer != item.answer)
    own = isinstance(model, OwnModel)
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
        "model": model.path if isinstance(model, OwnModel) else "",
        "chat": model.chat if isinstance(model, OwnModel) else False,
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
    return (resources("gcore.templates") / "project" / file).read_text(encoding="utf-8")
