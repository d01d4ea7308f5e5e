"""The calculator example: products to learn from, products held out, and a model that sometimes asks for what it cannot work out.

`prepare` makes one folder, with the promises of `gcore.prepare.folder`:

    train.jsonl, eval.jsonl    prompts and answers (`gcore.prepare.products`); no product is in both
    model/                     a qwen3 of 1.0M parameters with a tokenizer of its own (`gcore.prepare.teaching`)
    manifest.json              the recipe it was made by, and size and hash of every other file

The same recipe, seed and number of updates give the same bytes on the same machine and torch; across machines the data is the same,
and the model differs by rounding. The specs that use the folder are in examples/calculator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore.errors import DataError
from gcore.prepare.folder import Manifest, Recipe, made_or_found
from gcore.prepare.products import CLOSE, OPEN, Product, entry, split_products
from gcore.prepare.progress import Reporter

RECIPE = 1
"""Raised with every change of what a preparation makes, so that folders of the old recipe are made anew."""

WARM_UPDATES = 400
CALLS = (0.1, 0.6)
"""Share of sampled responses that ask for the right product. Fewer, and there is nothing to learn from; more, and nothing to learn."""


class CalculatorManifest(Manifest):
    """`calls`: share of responses to held-out products that ask for it as they should; `greedy_accuracy`: share right without a
    tool. Both before any RL."""

    example: Literal["calculator"] = "calculator"
    warm_updates: int
    calls: float
    greedy_accuracy: float


@dataclass(frozen=True, slots=True)
class PreparedCalculator:
    """A prepared folder. `cached`: it was there already."""

    folder: Path
    calls: float
    greedy_accuracy: float
    cached: bool


def prepare(
    to: Path, *, seed: int = 0, progress: bool = True, warm_updates: int = WARM_UPDATES, must_fit: bool = True
) -> PreparedCalculator:
    """Make the example in the folder `to`, or find it there.

    `warm_updates` is how long the warm start trains; `must_fit` asks that the model then asks as it should in 10 % to 60 % of what is
    sampled. Raises DataError if it does not, if `to` is something else than a prepared example, or cannot be written.
    """

    def fill(draft: Path) -> CalculatorManifest:
        return _fill(draft, seed, warm_updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit)

    asked = {"recipe": RECIPE, "seed": seed, "warm_updates": warm_updates}
    made = made_or_found(to, Recipe("calculator", CalculatorManifest, asked, fill))
    return PreparedCalculator(made.folder, made.manifest.calls, made.manifest.greedy_accuracy, made.cached)


def _fill(draft: Path, seed: int, warm_updates: int, reporter: Reporter, *, must_fit: bool) -> CalculatorManifest:
    import torch

    from gcore.prepare.small_model import THREADS, deterministic, responses, save_model, torch_version
    from gcore.prepare.teaching import teach

    split = split_products(seed)
    for name, products in (("train", split.train), ("eval", split.held_out)):
        lines = "".join(json.dumps(entry(product)) + "\n" for product in products)
        (draft / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    lesson, prompts = split.lesson, [product.prompt for product in split.held_out]
    with reporter:
        taught = teach(lesson, seed=seed, updates=warm_updates, report=reporter.report, must_fit=must_fit)
    with deterministic(seed):
        generator = torch.Generator().manual_seed(seed)
        sampled = responses(taught.model, prompts, lesson.longest_answer, generator)
        greedy = responses(taught.model, prompts, lesson.longest_answer, None)
    calls = share_that_ask(split.held_out, sampled)
    low, high = CALLS
    if must_fit and not low <= calls <= high:
        raise DataError(
            f"after {warm_updates} updates {calls:.1%} of responses ask as they should, not {low:.0%} to {high:.0%}",
            where=f"seed {seed}",
            fix="Use another seed",
        )
    save_model(taught.model, draft / "model")
    return CalculatorManifest(
        recipe=RECIPE,
        seed=seed,
        warm_updates=warm_updates,
        threads=THREADS,
        torch=torch_version(),
        calls=calls,
        greedy_accuracy=_share(said == one.result for said, one in zip(greedy, split.held_out, strict=True)),
    )


def share_that_ask(products: tuple[Product, ...], said: list[str]) -> float:
    """The share of responses that begin with the call of their product."""
    return _share(text.startswith(f"{OPEN}{one.call}{CLOSE}") for one, text in zip(products, said, strict=True))


def _share(flags: Iterable[bool]) -> float:
    found = list(flags)
    return sum(found) / len(found)
