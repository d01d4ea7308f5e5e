"""The judge of the arithmetic example: it is shown a sum with somebody's answer, and writes the sum and its verdict.

`prepare` makes one folder, with the promises of `gcore.prepare.folder`:

    model/           a qwen3 of 1.0M parameters with a tokenizer of its own (`gcore.prepare.teaching`)
    manifest.json    the recipe it was made by, and size and hash of every other file

What it is shown, what it writes and what it is taught is in `gcore.prepare.verdicts`. It stands beside the example itself
(`gcore.prepare.arithmetic`), not in it: who only wants to see a model learn need not wait for a judge. The same recipe, seed
and number of updates give the same bytes on the same machine and torch; across machines the model differs by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore.errors import DataError
from gcore.prepare.folder import Manifest, Recipe, made_or_found
from gcore.prepare.progress import Reporter
from gcore.prepare.sums import split_sums
from gcore.prepare.verdicts import judges_lesson, marked, measured

RECIPE = 1
"""Raised with every change of what a preparation makes, so that folders of the old recipe are made anew."""

UPDATES = 1600
LEAST_ACCURACY = 0.97
MOST_FALSE_YES = 0.02
"""Share of wrong answers that may be called right. What a judge lets pass is what a policy learns."""


class JudgeManifest(Manifest):
    """`judge_accuracy`: share of right verdicts, on every kind of answer to the held-out sums. `judge_false_yes`: share of
    the wrong ones among these answers that are called right."""

    example: Literal["arithmetic-judge"] = "arithmetic-judge"
    updates: int
    judge_accuracy: float
    judge_false_yes: float


@dataclass(frozen=True, slots=True)
class PreparedJudge:
    """A prepared folder. `cached`: it was there already."""

    folder: Path
    model: Path
    judge_accuracy: float
    judge_false_yes: float
    cached: bool


def prepare(
    to: Path, *, seed: int = 0, progress: bool = True, updates: int = UPDATES, must_fit: bool = True
) -> PreparedJudge:
    """Make the judge in the folder `to`, or find it there.

    `updates` is how long it learns; `must_fit` asks that 97 % of its verdicts then are right, and that it calls at most 2 %
    of wrong answers right. Raises DataError if not, if `to` is something else than a prepared judge, or cannot be written.
    """

    def fill(draft: Path) -> JudgeManifest:
        return _fill(draft, seed, updates, Reporter.for_terminal(progress, "judge"), must_fit=must_fit)

    asked = {"recipe": RECIPE, "seed": seed, "updates": updates}
    made = made_or_found(to, Recipe("arithmetic-judge", JudgeManifest, asked, fill))
    return PreparedJudge(
        folder=made.folder,
        model=made.folder / "model",
        judge_accuracy=made.manifest.judge_accuracy,
        judge_false_yes=made.manifest.judge_false_yes,
        cached=made.cached,
    )


def _fill(draft: Path, seed: int, updates: int, reporter: Reporter, *, must_fit: bool) -> JudgeManifest:
    from gcore.prepare.small_model import THREADS, deterministic, responses, save_model, torch_version  # imports torch
    from gcore.prepare.teaching import teach

    split = split_sums(seed)
    lesson = judges_lesson(split)
    with reporter:
        taught = teach(lesson, seed=seed, updates=updates, report=reporter.report, must_fit=must_fit)
    asked = measured(split)
    with deterministic(seed):
        marks = marked(asked, responses(taught.model, [one.prompt for one in asked], lesson.longest_answer, None))
    if must_fit and (marks.accuracy < LEAST_ACCURACY or marks.false_yes > MOST_FALSE_YES):
        raise DataError(
            f"after {updates} updates {marks.accuracy:.1%} of the judge's verdicts are right, and {marks.false_yes:.1%} of "
            f"wrong answers are called right; it needs {LEAST_ACCURACY:.0%}, and at most {MOST_FALSE_YES:.0%}",
            where=f"seed {seed}",
            fix="Use another seed",
        )
    save_model(taught.model, draft / "model")
    return JudgeManifest(
        recipe=RECIPE,
        seed=seed,
        updates=updates,
        threads=THREADS,
        torch=torch_version(),
        judge_accuracy=marks.accuracy,
        judge_false_yes=marks.false_yes,
    )
