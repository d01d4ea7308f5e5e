"""The judge of the example of generated pictures: a Qwen3-VL of 0.4M parameters that sees a picture and its prompt.

`prepare_pictures_judge` makes a folder (`gcore.quickstart.folder`):

    model/                     the judge, with its tokenizer of words and its image processor
    manifest.json              the recipe, and size and hash of every other file

Its input is a picture and the prompt "red northwest". It writes the colour and the place that it sees, and its verdict:
"blue northwest n". If it sees no single bright quadrant, it writes "none" for both. The labels of its lesson come from
the rule of the task. The pictures are those of the prepared pipeline, drawn ones, and mixtures of two with noise.

The judge gets pictures in their own 8 x 8 pixels, and each of its four image tokens is a quadrant: with patches of 2 x 2
pixels, its image processor resizes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from gcore.errors import DataError
from gcore.quickstart.counting import NEEDED
from gcore.quickstart.counting_pictures import EOS, IMAGE, MERGE, SPECIAL, VISION_END, VISION_START
from gcore.quickstart.folder import (
    MANIFEST,
    JudgeManifest,
    PreparedFolder,
    Recipe,
    Reporter,
    TeachingProgress,
    make_or_find,
)
from gcore.quickstart.lessons import VerdictAccuracy
from gcore.quickstart.pictures_task import COLOURS, PLACES, PROMPTS, SIDE, PicturePrompt, picture_contents

JUDGE_UPDATES = 1000
PICTURES_JUDGE_RECIPE = 1

PATCH = 2
"""Width of a patch in pixels."""

TOKENS = (SIDE // PATCH // MERGE) ** 2
"""Placeholders of a picture."""

NONE, YES, NO = "none", "y", "n"
WORDS = (*COLOURS, *PLACES, NONE, YES, NO)

PAINTED, HELD_OUT = 192, 64
"""Pictures of the policy for each prompt: of the lesson, and held-out ones by which the judge is measured."""

MEASURED_EVERY = 100
"""Updates between two measurements."""


class PicturesJudgeManifest(JudgeManifest):
    """Manifest of the judge, measured on held-out pictures of the policy before RL."""

    example: Literal["pictures-judge"] = "pictures-judge"


def prepare_pictures_judge(
    to: Path,
    *,
    pictures: Path | None = None,
    seed: int = 0,
    progress: bool = True,
    updates: int = JUDGE_UPDATES,
    must_fit: bool = True,
) -> PreparedFolder[PicturesJudgeManifest]:
    """Prepare the judge in the folder `to`, or reuse it if it is there.

    `pictures`: folder of the prepared example, whose pipeline generates pictures of the lesson; by default `pictures` beside
    `to`. `updates`: optimizer updates of the training. `must_fit`: require `NEEDED`. Raises DataError if the judge does not
    reach it, if the example is not prepared, if `to` is something other than a prepared judge, or if it cannot be written.
    """
    example = pictures or to.absolute().parent / "pictures"

    def fill(draft: Path) -> PicturesJudgeManifest:
        if not (example / MANIFEST).is_file():
            raise DataError(
                "the judge learns from pictures of the example's model, and the example is not prepared",
                where=str(example),
                fix=f"gcore prepare pictures --to {example}",
            )
        return _fill(draft, example, seed, updates, Reporter.for_terminal(progress, "judge"), must_fit=must_fit)

    asked = {"recipe": PICTURES_JUDGE_RECIPE, "seed": seed, "updates": updates}
    return make_or_find(to, Recipe("pictures-judge", PicturesJudgeManifest, asked, fill))


def _fill(
    draft: Path, example: Path, seed: int, updates: int, reporter: Reporter, *, must_fit: bool
) -> PicturesJudgeManifest:
    from gcore.quickstart.pretraining import THREADS, torch_version

    with reporter:
        network, marks = _teach_judge(example / "model", updates, seed, reporter)
    if must_fit:
        marks.require(NEEDED, "pictures", updates, seed)
    save_judge(network, draft / "model")
    return PicturesJudgeManifest(
        recipe=PICTURES_JUDGE_RECIPE,
        seed=seed,
        threads=THREADS,
        torch=torch_version(),
        updates=updates,
        judge_accuracy=marks.accuracy,
        judge_false_yes=marks.false_yes,
    )


def new_judge() -> Any:
    """Return an untrained judge, initialized from torch's random state."""
    from gcore.quickstart.counting_model import new_counter

    return new_counter(len(SPECIAL) + len(WORDS), PATCH, SIDE // PATCH)


def save_judge(network: Any, folder: Path) -> None:
    """Save the judge with its tokenizer and its image processor. Raises OSError."""
    from tokenizers import pre_tokenizers

    from gcore.quickstart.counting_model import new_tokenizer, save_seeing

    tokenizer = new_tokenizer(WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_seeing(network, tokenizer, folder, SIDE)


def word_ids(text: str) -> list[int]:
    """Return the tokens of a text without special tokens."""
    return [len(SPECIAL) + WORDS.index(word) for word in text.split()]


def question_ids(prompt: PicturePrompt) -> list[int]:
    """Return the tokens of a picture and the prompt after it."""
    return [VISION_START, *[IMAGE] * TOKENS, VISION_END, *word_ids(prompt.prompt)]


def verdicts_on(pictures: Any, prompts: Sequence[PicturePrompt]) -> list[str]:
    """Return what the judge shall write about each picture of `pictures` [n, SIDE, SIDE, 3], uint8: the colour and the place
    that it shows, and y or n."""
    written = []
    for colour, place, prompt in zip(*picture_contents(pictures), prompts, strict=True):
        seen = [NONE if colour < 0 else list(COLOURS)[colour], NONE if place < 0 else PLACES[place]]
        written.append(" ".join([*seen, YES if seen == [prompt.colour, prompt.place] else NO]))
    return written


def lesson_rows(painted: Any, draw: Any, count: int) -> tuple[Any, list[PicturePrompt]]:
    """Draw pictures of a lesson [count, SIDE, SIDE, 3], uint8, and a prompt for each.

    Half of the pictures are from `painted`, pictures of the policy; the others are drawn. A third of all get noise, and a
    third are mixed with another. The prompt is mostly the one that the picture shows, or differs in one part. `draw`: numpy's
    random generator.
    """
    import numpy as np
    import torch

    from gcore.quickstart.pictures_model import draw_pictures, picture_bytes

    colours, places = (torch.from_numpy(draw.integers(len(names), size=count)) for names in (COLOURS, PLACES))
    drawn = picture_bytes(draw_pictures(colours, places)).numpy()
    shown = np.where(_chosen(draw, 0.5, count), painted[draw.integers(len(painted), size=count)], drawn).astype(float)
    kept = np.where(_chosen(draw, 1 / 3, count), draw.uniform(0, 1, (count, 1, 1, 1)), 1.0)
    shown = kept * shown + (1 - kept) * shown[draw.permutation(count)]
    spread = np.where(_chosen(draw, 1 / 3, count), draw.uniform(0, 60, (count, 1, 1, 1)), 0.0)
    pictures = (shown + spread * draw.normal(size=shown.shape)).clip(0, 255).round().astype(np.uint8)
    asked = []
    for colour, place in zip(*picture_contents(pictures), strict=True):
        other = PROMPTS[draw.integers(len(PROMPTS))]
        kind = draw.integers(6)  # 0 to 2: the shown one; 3: another colour; 4: another place; 5: any
        asked.append(
            PicturePrompt(
                other.colour if colour < 0 or kind in (3, 5) else list(COLOURS)[colour],
                other.place if place < 0 or kind in (4, 5) else PLACES[place],
            )
        )
    return pictures, asked


def _chosen(draw: Any, share: float, count: int) -> Any:
    """Choose pictures with this chance: [count, 1, 1, 1] of bool."""
    return draw.random((count, 1, 1, 1)) < share


def _teach_judge(policy: Path, updates: int, seed: int, reporter: Reporter) -> tuple[Any, VerdictAccuracy]:
    """Train a judge on pictures of the pipeline in `policy` and others; return the network and the accuracy of its verdicts."""
    import numpy as np
    import torch

    from gcore.quickstart.counting_model import BATCH, labelled_rows, new_optimizer, train_rows
    from gcore.quickstart.pictures_model import generate_pictures, load_painter
    from gcore.quickstart.pretraining import deterministic_torch

    with deterministic_torch(seed):
        painter = load_painter(policy)
        painted, held_out = (
            generate_pictures(painter, PROMPTS * each, torch.Generator().manual_seed(2 * seed + number))
            for number, each in enumerate((PAINTED, HELD_OUT))
        )
        network = new_judge().train()
        optimizer, draw = new_optimizer(network), np.random.default_rng(seed)
        marks = VerdictAccuracy(0.0, 1.0)
        for update in range(1, updates + 1):
            pictures, prompts = lesson_rows(painted.numpy(), draw, BATCH)
            questions, verdicts = [question_ids(one) for one in prompts], verdicts_on(pictures, prompts)
            tokens, labels = labelled_rows(
                [[*asked, *word_ids(verdict)] for asked, verdict in zip(questions, verdicts, strict=True)],
                [[(len(asked), len(word_ids(verdicts[0])) + 1)] for asked in questions],
            )
            train_rows(network, optimizer, tokens, labels, torch.from_numpy(pictures), update / updates, update)
            if update % MEASURED_EVERY == 0 or update == updates:
                marks = measure_judge(network, held_out, PROMPTS * HELD_OUT)
            reporter.report(TeachingProgress(update, updates, marks.accuracy))
    return network, marks


def measure_judge(network: Any, pictures: Any, prompts: Sequence[PicturePrompt]) -> VerdictAccuracy:
    """Measure the verdicts on `pictures` [n, SIDE, SIDE, 3], uint8."""
    import torch

    from gcore.quickstart.counting_model import write_greedily

    verdicts = verdicts_on(pictures.numpy(), prompts)
    count = len(word_ids(verdicts[0]))
    tokens = torch.tensor([[*question_ids(one), *[EOS] * count] for one in prompts])  # room for what the judge writes
    starts = torch.full((len(tokens),), tokens.shape[1] - count)
    said = write_greedily(network, tokens, starts, count, pictures)[:, -1]
    true = torch.tensor([verdict.endswith(YES) for verdict in verdicts])
    yes, no = (said == word_ids(one)[0] for one in (YES, NO))
    return VerdictAccuracy(float(torch.where(true, yes, no).float().mean()), float(yes[~true].float().mean()))
