"""The zoom example: four panels in one picture, too small to count in, and a tool that returns one of them enlarged.

`prepare_zoom` makes a folder (`gcore.quickstart.folder`):

    train.jsonl, eval.jsonl    prompts with the path of a picture, and answers
    pictures/                  PNG files of 96 x 96 pixels; no picture is in both files
    model/                     the Qwen3-VL of the counting example, taught to call the tool
    manifest.json              the recipe, and size and hash of every other file

A picture has four panels of the counting example, numbered row by row. The prompt is the picture in half its size, the
number of a panel and the first letter of a colour, "3r?". The model may write the call "z3r?". The tool answers with the
letter, the panel in full size, and a question mark, and the model writes the number of squares. Instead of the call the
model mostly writes `GUESS`: reinforcement learning has to find out that calling pays.

The model first learns to count in single panels, and then to call, or to guess, before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gcore.errors import DataError
from gcore.quickstart.counting import EVAL_ENTRIES, TRAIN_ENTRIES, WARM_ENTRIES, write_entries
from gcore.quickstart.counting_pictures import (
    MARKER,
    SIZE,
    CountingQuestion,
    draw_picture,
    make_counts,
)
from gcore.quickstart.folder import PreparedFolder, PreparedManifest, Recipe, Reporter, TeachingProgress, make_or_find

LETTERS = {"red": "r", "green": "g", "blue": "b", "gold": "y"}
"""How prompts name the colours."""

PANELS = 4
CALL = "z"
"""The text that opens a call; a question mark closes it."""

GUESS, CALL_SHARE = "2", 1 / 3
"""The model's answer without a call, and the share of calls in its lesson."""

SINGLE_UPDATES, CALL_UPDATES = 500, 400
"""Updates on single panels, and then on whole responses."""

LEAST_COUNTED, MOST_GREEDY = 0.9, 0.35
"""Least accuracy after a call, and largest greedy accuracy before RL, when the model should guess."""

CALLS = (0.15, 0.5)
"""Range of the share of sampled responses that call, before RL."""

RECIPE = 1


@dataclass(frozen=True, slots=True)
class ZoomQuestion:
    """A question about one of four panels. `place`: of the panel, from 0, row by row."""

    panels: tuple[CountingQuestion, ...]
    place: int

    @property
    def panel(self) -> CountingQuestion:
        """The panel that is asked about."""
        return self.panels[self.place]

    @property
    def letter(self) -> str:
        """The first letter of the colour."""
        return LETTERS[self.panel.colour]

    @property
    def asked(self) -> str:
        """Number of the panel and colour: what the prompt asks, and what a call says."""
        return f"{self.place + 1}{self.letter}"

    @property
    def prompt(self) -> str:
        """The question, with the marker of the picture."""
        return f"{MARKER}{self.asked}?"


def make_zoom_questions(count: int, seed: int) -> list[ZoomQuestion]:
    """Draw questions. Each answer is equally frequent, and each panel is in one question only."""
    import numpy as np

    draw = np.random.default_rng(seed)
    asked, others = make_counts(count, seed), make_counts((PANELS - 1) * count, seed + 1000)
    made = []
    for number, question in enumerate(asked):
        place = int(draw.integers(PANELS))
        panels = others[(PANELS - 1) * number : (PANELS - 1) * (number + 1)]
        made.append(ZoomQuestion((*panels[:place], question, *panels[place:]), place))
    return made


def draw_panels(question: ZoomQuestion) -> Any:
    """Draw the picture of a question: [2 * SIZE, 2 * SIZE, 3] uint8."""
    import numpy as np

    one, two, three, four = (draw_picture(panel) for panel in question.panels)
    return np.concatenate([np.concatenate([one, two], 1), np.concatenate([three, four], 1)], 0)


def shrink_picture(picture: Any) -> Any:
    """Return the picture [SIZE, SIZE, 3] as the model sees it in the prompt."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((SIZE, SIZE), Image.Resampling.BICUBIC))


class ZoomManifest(PreparedManifest):
    """Manifest of the example. `calls`: share of sampled responses that call. `counted`: accuracy after a right call.
    `greedy_accuracy`: of greedy responses. All on held-out prompts, before RL.
    """

    example: Literal["zoom"] = "zoom"
    single_updates: int
    call_updates: int
    calls: float
    counted: float
    greedy_accuracy: float


def prepare_zoom(
    to: Path,
    *,
    seed: int = 0,
    progress: bool = True,
    updates: tuple[int, int] = (SINGLE_UPDATES, CALL_UPDATES),
    must_fit: bool = True,
) -> PreparedFolder[ZoomManifest]:
    """Prepare the example in the folder `to`, or reuse it if it is there.

    `updates`: optimizer updates on single panels, and on whole responses. `must_fit`: require `CALLS`, `LEAST_COUNTED` and
    `MOST_GREEDY`. Raises DataError if the model misses them, if `to` is something other than a prepared example, or if
    it cannot be written.
    """

    def fill(draft: Path) -> ZoomManifest:
        return _fill(draft, seed, updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit)

    asked = {"recipe": RECIPE, "seed": seed, "single_updates": updates[0], "call_updates": updates[1]}
    return make_or_find(to, Recipe("zoom", ZoomManifest, asked, fill))


def _fill(draft: Path, seed: int, updates: tuple[int, int], reporter: Reporter, *, must_fit: bool) -> ZoomManifest:
    from gcore.quickstart.counting_model import save_counter
    from gcore.quickstart.pretraining import THREADS, torch_version

    questions = make_zoom_questions(TRAIN_ENTRIES + EVAL_ENTRIES, seed)
    trained, held_out = questions[:TRAIN_ENTRIES], questions[TRAIN_ENTRIES:]
    for name, part in (("train", trained), ("eval", held_out)):
        write_entries(draft, name, ((draw_panels(one), one.prompt, one.panel.answer) for one in part))
    with reporter:
        network, measured = _teach(
            make_zoom_questions(WARM_ENTRIES // PANELS, seed + 1), held_out, updates, seed, reporter
        )
    calls, counted, greedy = measured
    if must_fit and not (CALLS[0] <= calls <= CALLS[1] and counted >= LEAST_COUNTED and greedy <= MOST_GREEDY):
        raise DataError(
            f"the warm start ended with {calls:.1%} calls (wanted {CALLS[0]:.0%} to {CALLS[1]:.0%}), {counted:.1%} right after a "
            f"call (at least {LEAST_COUNTED:.0%}) and {greedy:.1%} right greedy responses (at most {MOST_GREEDY:.0%})",
            where=f"seed {seed}",
            fix="Use another seed",
        )
    save_counter(network, draft / "model")
    return ZoomManifest(
        recipe=RECIPE,
        seed=seed,
        threads=THREADS,
        torch=torch_version(),
        single_updates=updates[0],
        call_updates=updates[1],
        calls=calls,
        counted=counted,
        greedy_accuracy=greedy,
    )


def _teach(
    lesson: Sequence[ZoomQuestion],
    held_out: Sequence[ZoomQuestion],
    updates: tuple[int, int],
    seed: int,
    reporter: Reporter,
) -> tuple[Any, tuple[float, float, float]]:
    """Train a network on single panels and then on whole responses; return it with `_measure`'s figures."""
    import numpy as np
    import torch

    from gcore.quickstart.counting_model import BATCH, MEASURED_EVERY, new_counter, new_optimizer, train_rows
    from gcore.quickstart.pretraining import deterministic_torch

    with deterministic_torch(seed):
        network = new_counter().train()
        panels = [panel for question in lesson for panel in question.panels]
        single = torch.from_numpy(np.stack([draw_picture(panel) for panel in panels]))
        whole, shown = _pairs_of_pictures(lesson), _pairs_of_pictures(held_out)
        optimizer, draw = new_optimizer(network), np.random.default_rng(seed)
        measured, total = (0.0, 0.0, 0.0), sum(updates)
        for update in range(1, total + 1):
            if update <= updates[0]:
                chosen = draw.integers(len(panels), size=BATCH).tolist()
                tokens, labels = _single_rows([panels[i] for i in chosen])
                pictures = single[chosen]
            else:
                chosen = draw.integers(len(lesson), size=BATCH).tolist()
                tokens, labels = _response_rows([lesson[i] for i in chosen], (draw.random(BATCH) < CALL_SHARE).tolist())
                pictures = whole[chosen].flatten(0, 1)
            train_rows(network, optimizer, tokens, labels, pictures, update / total, update)
            if update > updates[0] and (update % MEASURED_EVERY == 0 or update == total):
                measured = _measure(network, held_out, shown)
            reporter.report(TeachingProgress(update, total, measured[1]))  # 0 until it counts behind a call
    return network.eval(), measured


def _pairs_of_pictures(questions: Sequence[ZoomQuestion]) -> Any:
    """The pictures of whole responses [question, 2, height, width, 3] uint8: that of the prompt, and the panel."""
    import numpy as np
    import torch

    pairs = [(shrink_picture(draw_panels(one)), draw_picture(one.panel)) for one in questions]
    return torch.from_numpy(np.stack([np.stack(pair) for pair in pairs]))


def _single_rows(panels: Sequence[CountingQuestion]) -> tuple[Any, Any]:
    """Tokens and labels [row, token] of the end of a response after a call: the letter, a panel, "?" and the answer."""
    from gcore.quickstart.counting_model import labelled_rows, prompt_ids, text_ids

    rows = [[*text_ids(LETTERS[one.colour]), *prompt_ids(f"?{one.answer}")] for one in panels]
    return labelled_rows(rows, [[(len(row) - 1, 2)] for row in rows])


def _response_rows(questions: Sequence[ZoomQuestion], calls: Sequence[bool]) -> tuple[Any, Any]:
    """Tokens and labels [row, token] of whole responses. A guess has the layout of a call: its panel is out of sight, after
    the end."""
    from gcore.quickstart.counting_model import labelled_rows, prompt_ids, text_ids
    from gcore.quickstart.counting_pictures import EOS, PAD

    rows, taught = [], []
    for question, is_call in zip(questions, calls, strict=True):
        prompt = prompt_ids(f"{question.asked}?")
        said = (
            text_ids(f"{CALL}{question.asked}?{question.letter}") if is_call else [*text_ids(GUESS), EOS, PAD, PAD, PAD]
        )
        rows.append([*prompt, *said, *prompt_ids(f"?{question.panel.answer}")])
        taught.append([(len(prompt), 4), (len(rows[-1]) - 1, 2)] if is_call else [(len(prompt), 2)])
    return labelled_rows(rows, taught)


def _measure(network: Any, questions: Sequence[ZoomQuestion], pictures: Any) -> tuple[float, float, float]:
    """Return the share of sampled responses that call, the accuracy after a right call, and that of greedy responses."""
    import torch

    from gcore.quickstart.counting_model import prompt_ids, row_logits, text_ids

    tokens, _ = _response_rows(questions, [True] * len(questions))
    start = len(prompt_ids("3r?"))
    with torch.no_grad():
        logits = row_logits(network, tokens, pictures.flatten(0, 1))
    opening = logits[:, start - 1]
    right = torch.tensor([text_ids(one.panel.answer)[0] for one in questions])
    counted = logits[:, tokens.shape[1] - 3].argmax(-1) == right
    (call,) = text_ids(CALL)
    greedy = torch.where(opening.argmax(-1) == call, counted, opening.argmax(-1) == right)
    return float(opening.softmax(-1)[:, call].mean()), float(counted.float().mean()), float(greedy.float().mean())
