"""The data of a starter task, and a model of 1.0M parameters that is right on a part of it: what `gcore init` puts there.

Writes into a folder that the caller has made and will give its name at the end; so nothing here is atomic, locked or
cached. Whoever brings a model of their own gets the data alone, with the task spelt out in every prompt, because their
model was not warmed up for it. The same task, seed and number of updates give the same bytes on the same machine and torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from gcore.prepare.lesson import to_jsonl
from gcore.prepare.progress import TeachingProgress
from gcore.prepare.starter_tasks import Item, StarterTask, split_task

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
    from gcore.prepare.small_model import save_model  # imports torch
    from gcore.prepare.teaching import teach

    lesson = split_task(task, seed).lesson
    taught = teach(lesson, seed=seed, updates=updates, report=report, must_fit=must_fit)
    save_model(taught.model, folder)
    return taught.greedy_accuracy


def _spelt_out(task: StarterTask, items: Iterable[Item]) -> str:
    given = ({"prompt": f"{task.instruction}\n\n{item.given}", "answer": item.answer} for item in items)
    return "".join(json.dumps(entry) + "\n" for entry in given)
