"""The examples of generated pictures: a model that draws a square of one colour in one corner of a picture.

`prepare_pictures` makes a folder (`gcore.quickstart.folder`):

    train.jsonl, eval.jsonl    prompts such as "red northwest", with colour and place as fields
    model/                     a pipeline of diffusers
    manifest.json              the recipe, and size and hash of every other file

The pipeline of the example `pictures` is like Stable Diffusion 3: flow matching, with a transformer of 0.29M parameters. That
of `pictures-ddim` is like Stable Diffusion 1: a DDIM scheduler, with a UNet of 0.25M parameters.

There are 16 prompts, all in both files; held-out pictures differ from those of training by their noise. A picture has
8 x 8 pixels: one quadrant in the colour, the others grey.

The model first learns right pictures, until it follows its prompts, and then also careless ones, whose colour or place is
drawn at random. Reinforcement learning then has to unlearn them. With careless pictures from the start, the transformer never
learns places: all tokens of a picture share what the prompt changes in them, so a place needs attention to the prompt's words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from gcore.errors import DataError
from gcore.quickstart.folder import PreparedFolder, PreparedManifest, Recipe, Reporter, make_or_find
from gcore.quickstart.pictures_task import LEAST_PART, RIGHT_BAND, PicturePrompt, make_entries

TRAIN_ENTRIES, EVAL_ENTRIES = 512, 128

PicturesExample = Literal["pictures", "pictures-ddim"]

WARM_UPDATES: Mapping[PicturesExample, int] = {"pictures": 2400, "pictures-ddim": 700}
"""Optimizer updates of the warm start."""

PICTURES_RECIPE = 1


class PicturesManifest(PreparedManifest):
    """Manifest of the example. `right_share`: share of right pictures; `colour_share`, `place_share`: of those with the right
    colour and place. All without noise in the steps, before RL.
    """

    example: PicturesExample
    warm_updates: int
    right_share: float
    colour_share: float
    place_share: float


def prepare_pictures(
    to: Path,
    example: PicturesExample = "pictures",
    *,
    seed: int = 0,
    progress: bool = True,
    warm_updates: int | None = None,
    must_fit: bool = True,
) -> PreparedFolder[PicturesManifest]:
    """Prepare an example in the folder `to`, or reuse it if it is there.

    `warm_updates`: optimizer updates of the warm start (None: `WARM_UPDATES`). `must_fit`: require a share of right pictures
    in `RIGHT_BAND`, and `LEAST_PART`. Raises DataError if the model misses them, if `to` is something other than this
    prepared example, or if it cannot be written.
    """
    updates = WARM_UPDATES[example] if warm_updates is None else warm_updates

    def fill(draft: Path) -> PicturesManifest:
        return _fill(draft, example, seed, updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit)

    asked = {"recipe": PICTURES_RECIPE, "seed": seed, "warm_updates": updates}
    return make_or_find(to, Recipe(example, PicturesManifest, asked, fill))


def _fill(
    draft: Path, example: PicturesExample, seed: int, warm_updates: int, reporter: Reporter, *, must_fit: bool
) -> PicturesManifest:
    from gcore.quickstart.pictures_model import save_painter, teach_painting
    from gcore.quickstart.pretraining import THREADS, torch_version

    for number, (name, count) in enumerate((("train", TRAIN_ENTRIES), ("eval", EVAL_ENTRIES))):
        _write_entries(draft / f"{name}.jsonl", make_entries(count, seed + number))
    with reporter:
        taught = teach_painting("ddim" if example == "pictures-ddim" else "flow", warm_updates, seed, reporter)
    shares = taught.shares
    if must_fit and not shares.fit:
        raise DataError(
            f"the warm start ended with {shares.right:.1%} of pictures right (wanted {RIGHT_BAND[0]:.0%} to "
            f"{RIGHT_BAND[1]:.0%}), {shares.colour:.1%} with the right colour and {shares.place:.1%} with the right place (at "
            f"least {LEAST_PART:.0%})",
            where=f"seed {seed}",
            fix="Use another seed",
        )
    save_painter(taught.painter, draft / "model")
    return PicturesManifest(
        example=example,
        recipe=PICTURES_RECIPE,
        seed=seed,
        threads=THREADS,
        torch=torch_version(),
        warm_updates=warm_updates,
        right_share=shares.right,
        colour_share=shares.colour,
        place_share=shares.place,
    )


def _write_entries(file: Path, entries: Sequence[PicturePrompt]) -> None:
    rows = ({"prompt": one.prompt, "colour": one.colour, "place": one.place} for one in entries)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
