"""The arithmetic example: sums to learn from, sums held out, and a model that is right less than half of the time.

`prepare` makes one folder, with the promises of `gcore.prepare.folder`:

    train.jsonl, eval.jsonl    prompts and answers (`gcore.prepare.sums`); no pair of operands is in both
    model/                     a qwen3 of 1.0M parameters with a tokenizer of its own (`gcore.prepare.teaching`)
    manifest.json              the recipe it was made by, and size and hash of every other file

The same recipe, seed and number of updates give the same bytes on the same machine and torch; across machines the data is
the same, and the model differs by rounding. It knows nothing of jobs: the spec that uses the folder is
examples/arithmetic/grpo.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore.prepare.folder import Manifest, Recipe, made_or_found
from gcore.prepare.lesson import to_jsonl
from gcore.prepare.progress import Reporter
from gcore.prepare.sums import split_sums

RECIPE = 1
"""Raised with every change of what a preparation makes, so that folders of the old recipe are made anew."""

WARM_UPDATES = 500
"""Updates of the warm start."""


class ArithmeticManifest(Manifest):
    """`greedy_accuracy`: share of held-out sums right, greedily, before any RL."""

    example: Literal["arithmetic"] = "arithmetic"
    warm_updates: int
    greedy_accuracy: float
    pass_at_8: float


@dataclass(frozen=True, slots=True)
class PreparedExample:
    """A prepared folder. `cached`: it was there already."""

    folder: Path
    model: Path
    train: Path
    eval: Path
    greedy_accuracy: float
    pass_at_8: float
    cached: bool


def prepare(
    to: Path, *, seed: int = 0, progress: bool = True, warm_updates: int = WARM_UPDATES, must_fit: bool = True
) -> PreparedExample:
    """Make the example in the folder `to`, or find it there.

    `warm_updates` is how long the warm start trains; `must_fit` asks that the model then is right on 38 % to 48 % of the
    held-out sums. Raises DataError if it is not, if `to` is something else than a prepared example, or cannot be written.
    """

    def fill(draft: Path) -> ArithmeticManifest:
        return _fill(draft, seed, warm_updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit)

    asked = {"recipe": RECIPE, "seed": seed, "warm_updates": warm_updates}
    made = made_or_found(to, Recipe("arithmetic", ArithmeticManifest, asked, fill))
    return PreparedExample(
        folder=made.folder,
        model=made.folder / "model",
        train=made.folder / "train.jsonl",
        eval=made.folder / "eval.jsonl",
        greedy_accuracy=made.manifest.greedy_accuracy,
        pass_at_8=made.manifest.pass_at_8,
        cached=made.cached,
    )


def _fill(draft: Path, seed: int, warm_updates: int, reporter: Reporter, *, must_fit: bool) -> ArithmeticManifest:
    from gcore.prepare.small_model import THREADS, save_model, torch_version  # imports torch
    from gcore.prepare.teaching import right_once, teach

    split = split_sums(seed)
    (draft / "train.jsonl").write_text(to_jsonl(split.train), encoding="utf-8")
    (draft / "eval.jsonl").write_text(to_jsonl(split.held_out), encoding="utf-8")
    with reporter:
        taught = teach(split.lesson, seed=seed, updates=warm_updates, report=reporter.report, must_fit=must_fit)
    save_model(taught.model, draft / "model")
    return ArithmeticManifest(
        recipe=RECIPE,
        seed=seed,
        warm_updates=warm_updates,
        threads=THREADS,
        torch=torch_version(),
        greedy_accuracy=taught.greedy_accuracy,
        pass_at_8=right_once(taught.model, split.lesson, seed=seed, samples=8),
    )
