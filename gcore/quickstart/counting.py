"""The counting example: pictures of coloured squares, and a vision-language model that counts those of one colour.

`prepare_counting` makes one folder (`gcore.quickstart.folder`):

    train.jsonl, eval.jsonl    prompts with the path of a picture, and answers
    pictures/                  PNG files of 48 x 48 pixels; no picture is in both files
    model/                     a Qwen3-VL of 0.4M parameters with its tokenizer and image processor
    manifest.json              the recipe, and size and hash of every other file

The model first learns right answers, until it sees colours, and then also careless ones: the number of all squares,
which is always wrong. With careless answers from the start it never learns to see. Reinforcement learning then has to
unlearn them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gcore.errors import DataError
from gcore.quickstart.counting_pictures import (
    COUNTING_BAND,
    LEAST_PASS_AT_8,
    CountingQuestion,
    draw_picture,
    encode_png,
    make_counts,
)
from gcore.quickstart.folder import PreparedFolder, PreparedManifest, Recipe, Reporter, make_or_find

TRAIN_ENTRIES, EVAL_ENTRIES, WARM_ENTRIES = 1200, 200, 6000
"""Number of prompts to train on, of held-out prompts, and of pictures of the warm start."""

WARM_UPDATES = 700
COUNTING_RECIPE = 1


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


def _write_pictures(draft: Path, name: str, questions: Sequence[CountingQuestion]) -> str:
    """Write the pictures of questions, and return the lines of their entries."""
    lines = []
    for number, question in enumerate(questions):
        path = f"pictures/{name}-{number:04d}.png"
        (draft / path).write_bytes(encode_png(draw_picture(question)))
        lines.append(json.dumps({"prompt": question.prompt, "images": [path], "answer": question.answer}))
    return "\n".join(lines) + "\n"
