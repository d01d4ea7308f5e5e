"""The counting example: pictures of coloured squares, a vision-language model that counts those of one colour, and a judge
of its answers.

`prepare_counting` and `prepare_counting_judge` make one folder each (`gcore.quickstart.folder`):

    train.jsonl, eval.jsonl    prompts with the path of a picture, and answers (not in the judge's folder)
    pictures/                  PNG files of 48 x 48 pixels; no picture is in both files (not in the judge's folder)
    model/                     a Qwen3-VL of 0.4M parameters with its tokenizer and image processor
    manifest.json              the recipe, and size and hash of every other file

The model first learns right answers, until it sees colours, and then also careless ones: the number of all squares,
which is always wrong. With careless answers from the start it never learns to see. Reinforcement learning then has to
unlearn them.

The judge's input is a prompt with a response and a question mark: the picture and "red?3?". It writes the right number
and its verdict, "2?n": a small model judges well if it counts first. Right and careless responses are the most frequent
in its lesson, but not alone, or it would learn to copy the response.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from gcore.errors import DataError
from gcore.quickstart.counting_pictures import (
    CHARACTERS,
    COUNTING_BAND,
    LEAST_PASS_AT_8,
    CountingQuestion,
    draw_picture,
    encode_png,
    make_counts,
)
from gcore.quickstart.folder import (
    JudgeManifest,
    PreparedFolder,
    PreparedManifest,
    Recipe,
    Reporter,
    TeachingProgress,
    make_or_find,
)
from gcore.quickstart.lessons import VerdictAccuracy

TRAIN_ENTRIES, EVAL_ENTRIES, WARM_ENTRIES = 1200, 200, 6000
"""Number of prompts to train on, of held-out prompts, and of pictures of the warm start."""

WARM_UPDATES = 700
COUNTING_RECIPE = 2


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
    for name, questions in (("train", trained), ("eval", held_out)):
        write_entries(draft, name, ((draw_picture(one), one.prompt, one.answer) for one in questions))
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


def write_entries(draft: Path, name: str, entries: Iterable[tuple[Any, str, str]]) -> None:
    """Write entries of the data into `name`.jsonl, and their pictures. Each: picture [height, width, 3] uint8, prompt, answer."""
    (draft / "pictures").mkdir(exist_ok=True)
    lines = []
    for number, (picture, prompt, answer) in enumerate(entries):
        path = f"pictures/{name}-{number:04d}.png"
        (draft / path).write_bytes(encode_png(picture))
        lines.append(json.dumps({"prompt": prompt, "images": [path], "answer": answer}) + "\n")
    (draft / f"{name}.jsonl").write_text("".join(lines))


JUDGE_UPDATES = 800
COUNTING_JUDGE_RECIPE = 1

RESPONSES = 4
"""Responses to each held-out prompt by which the judge is measured: one of each kind."""

NEEDED = VerdictAccuracy(accuracy=0.95, false_yes=0.05)
"""What a judge needs on responses to held-out prompts."""

LONGEST_VERDICT = 4
"""Tokens of a number, a question mark, a verdict, and the end of sequence."""


class CountingJudgeManifest(JudgeManifest):
    """Manifest of the judge, measured on responses to held-out prompts."""

    example: Literal["counting-judge"] = "counting-judge"


def responses_to(question: CountingQuestion, draw: Any) -> tuple[str, ...]:
    """Return responses to a question: the right one, the careless one, a near or random number, a malformed one.

    `draw`: numpy's random generator.
    """
    right = int(question.answer)
    numbers = [right - 1, right + 1] if draw.random() < 0.5 else list(range(10))
    wrong = [str(one) for one in numbers if one >= 0 and one != right]
    letters = "".join(CHARACTERS[draw.integers(len(CHARACTERS))] for _ in range(2))
    malformed = ("", letters[:1], letters, f"{question.answer}{letters[0]}")[draw.integers(4)]
    return question.answer, question.careless, wrong[draw.integers(len(wrong))], malformed


def verdict_on(question: CountingQuestion, response: str) -> str:
    """Return what the judge shall write about a response: the right number, and y or n."""
    return f"{question.answer}?{'y' if response == question.answer else 'n'}"


def prepare_counting_judge(
    to: Path, *, seed: int = 0, progress: bool = True, updates: int = JUDGE_UPDATES, must_fit: bool = True
) -> PreparedFolder[CountingJudgeManifest]:
    """Prepare the judge in the folder `to`, or reuse it if it is there.

    `updates`: optimizer updates of its training. `must_fit`: require `NEEDED`. Raises DataError if the judge
    does not reach it, if `to` is something other than a prepared judge, or if it cannot be written.
    """

    def fill(draft: Path) -> CountingJudgeManifest:
        return _fill_judge(draft, seed, updates, Reporter.for_terminal(progress, "judge"), must_fit=must_fit)

    asked = {"recipe": COUNTING_JUDGE_RECIPE, "seed": seed, "updates": updates}
    return make_or_find(to, Recipe("counting-judge", CountingJudgeManifest, asked, fill))


def _fill_judge(draft: Path, seed: int, updates: int, reporter: Reporter, *, must_fit: bool) -> CountingJudgeManifest:
    from gcore.quickstart.counting_model import save_counter
    from gcore.quickstart.pretraining import THREADS, torch_version

    held_out = make_counts(TRAIN_ENTRIES + EVAL_ENTRIES, seed)[TRAIN_ENTRIES:]
    with reporter:
        network, marks = _teach_judge(make_counts(WARM_ENTRIES, seed + 1), held_out, updates, seed, reporter)
    if must_fit:
        marks.require(NEEDED, "responses", updates, seed)
    save_counter(network, draft / "model")
    return CountingJudgeManifest(
        recipe=COUNTING_JUDGE_RECIPE,
        seed=seed,
        threads=THREADS,
        torch=torch_version(),
        updates=updates,
        judge_accuracy=marks.accuracy,
        judge_false_yes=marks.false_yes,
    )


def _teach_judge(
    lesson: Sequence[CountingQuestion],
    held_out: Sequence[CountingQuestion],
    updates: int,
    seed: int,
    reporter: Reporter,
) -> tuple[Any, VerdictAccuracy]:
    """Train a judge on the questions of `lesson`; return the network and the accuracy of its verdicts."""
    import numpy as np

    from gcore.quickstart.counting_model import (
        BATCH,
        MEASURED_EVERY,
        answer_rows,
        draw_pictures,
        new_counter,
        new_optimizer,
        prompt_ids,
        train_rows,
    )
    from gcore.quickstart.pretraining import deterministic_torch

    with deterministic_torch(seed):
        network = new_counter().train()
        pictures, shown = draw_pictures(lesson), draw_pictures(held_out)
        optimizer, draw = new_optimizer(network), np.random.default_rng(seed)
        fixed = np.random.default_rng(seed + 1)
        asked = [(place, one) for place, q in enumerate(held_out) for one in responses_to(q, fixed)]
        marks = VerdictAccuracy(0.0, 1.0)
        for update in range(1, updates + 1):
            chosen = draw.integers(len(lesson), size=BATCH).tolist()
            kinds = draw.choice(RESPONSES, size=BATCH, p=(0.4, 0.2, 0.3, 0.1)).tolist()
            given = [responses_to(lesson[i], draw)[kind] for i, kind in zip(chosen, kinds, strict=True)]
            tokens, labels = answer_rows(
                [prompt_ids(f"{lesson[i].colour}?{one}?") for i, one in zip(chosen, given, strict=True)],
                [verdict_on(lesson[i], one) for i, one in zip(chosen, given, strict=True)],
            )
            train_rows(network, optimizer, tokens, labels, pictures[chosen], update / updates, update)
            if update % (5 * MEASURED_EVERY) == 0 or update == updates:
                marks = _measure_judge(network, held_out, asked, shown)
            reporter.report(TeachingProgress(update, updates, marks.accuracy))
    return network, marks


def _measure_judge(
    network: Any, held_out: Sequence[CountingQuestion], asked: Sequence[tuple[int, str]], pictures: Any
) -> VerdictAccuracy:
    """Measure the verdicts of a judge. `asked`: places of questions in `held_out` and of their `pictures`, with a response
    each."""
    import torch

    from gcore.quickstart.counting_model import answer_rows, prompt_ids, text_ids, write_greedily

    prompts = [prompt_ids(f"{held_out[place].colour}?{response}?") for place, response in asked]
    tokens, _ = answer_rows(prompts, ["y" * (LONGEST_VERDICT - 1)] * len(prompts))  # room for what the judge writes
    starts, count = torch.tensor([len(prompt) for prompt in prompts]), LONGEST_VERDICT - 1
    written = write_greedily(network, tokens, starts, count, pictures[[place for place, _ in asked]])
    said = written[torch.arange(len(prompts)), starts + count - 1]
    true = torch.tensor([response == held_out[place].answer for place, response in asked])
    yes, no = (said == text_ids(one)[0] for one in "yn")
    return VerdictAccuracy(float(torch.where(true, yes, no).float().mean()), float(yes[~true].float().mean()))
