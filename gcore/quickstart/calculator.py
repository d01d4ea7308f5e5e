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
from gcore.quickstart.folder import PreparedManifest, Recipe, Reporter, make_or_find
from gcore.quickstart.lessons import Lesson, hashed_numbers

# -------------------- products
# The products of the calculator example: which there are, which are held out, and how two hands answer them.
#
# A product is a three-digit and a two-digit number: "347*86=". There are 81,000, far more than a small model can learn by heart, and too
# hard for it to work out. One hand answers at once ("29842"); the other writes what it wants worked out, between two texts, and is told
# ("<<347*86>>29842", of which it writes no more than "<<347*86>>"). The warm start sees both, mostly the first, so that the model asks
# now and then and mostly guesses.
#
# Products are drawn by a keyed hash, so that they are the same on every machine and for ever. Those of training, those that are held out
# and those of the warm start are apart. Pure.

CHARACTERS = "0123456789*=<>"
OPEN, CLOSE = "<<", ">>"

GUESS_SHARE = 0.7
"""How often a demonstration answers at once."""

TRAINED, HELD_OUT, WARM = 2048, 256, 8192
"""How many of each."""

ANY = (0.0, 1.0)
"""What the warm-started model is right on without a tool says nothing of how well it asks."""


@dataclass(frozen=True, slots=True)
class Product:
    """`left * right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the model is shown: seven characters."""
        return f"{self.call}="

    @property
    def call(self) -> str:
        """What the tool is asked."""
        return f"{self.left}*{self.right}"

    @property
    def result(self) -> str:
        """What it comes to."""
        return str(self.left * self.right)

    @property
    def answer(self) -> str:
        """The answer of the hand that asks, with what it is told."""
        return f"{OPEN}{self.call}{CLOSE}{self.result}"

    @property
    def careless_answer(self) -> str:
        """The answer of the hand that does not."""
        return self.result


@dataclass(frozen=True, slots=True)
class ProductSplit:
    """Products to learn from, those held out, and those of the warm start; none is in two of them."""

    train: tuple[Product, ...]
    held_out: tuple[Product, ...]
    warm: tuple[Product, ...]

    @property
    def lesson(self) -> Lesson:
        """What the warm start is given."""
        return Lesson(CHARACTERS, (self.warm,), (64,), self.held_out, GUESS_SHARE, ANY)


def split_products(seed: int) -> ProductSplit:
    """`seed` decides which are drawn, and the order of the lists."""
    found: dict[tuple[int, int], Product] = {}
    numbers = hashed_numbers(f"products {seed}")
    while len(found) < TRAINED + HELD_OUT + WARM:
        number = next(numbers)
        product = Product(100 + number % 900, 10 + number // 900 % 90)
        found.setdefault((product.left, product.right), product)
    every = tuple(found.values())
    return ProductSplit(every[:TRAINED], every[TRAINED : TRAINED + HELD_OUT], every[TRAINED + HELD_OUT :])


def product_entry(product: Product) -> dict[str, str]:
    """As a line of the data: the right answer is the number."""
    return {"prompt": product.prompt, "answer": product.result}


RECIPE = 1
"""Raised with every change of what a preparation makes, so that folders of the old recipe are made anew."""

WARM_UPDATES = 400

CALLS = (0.1, 0.6)
"""Share of sampled responses that ask for the right product. Fewer, and there is nothing to learn from; more, and nothing to learn."""


class CalculatorManifest(PreparedManifest):
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


def prepare_calculator(
    to: Path, *, seed: int = 0, progress: bool = True, warm_updates: int = WARM_UPDATES, must_fit: bool = True
) -> PreparedCalculator:
    """Make the example in the folder `to`, or find it there.

    `warm_updates` is how long the warm start trains; `must_fit` asks that the model then asks as it should in 10 % to 60 % of what is
    sampled. Raises DataError if it does not, if `to` is something else than a prepared example, or cannot be written.
    """

    def fill(draft: Path) -> CalculatorManifest:
        return _fill(draft, seed, warm_updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit)

    asked = {"recipe": RECIPE, "seed": seed, "warm_updates": warm_updates}
    made = make_or_find(to, Recipe("calculator", CalculatorManifest, asked, fill))
    return PreparedCalculator(made.folder, made.manifest.calls, made.manifest.greedy_accuracy, made.cached)


def _fill(draft: Path, seed: int, warm_updates: int, reporter: Reporter, *, must_fit: bool) -> CalculatorManifest:
    import torch

    from gcore.quickstart.pretraining import (
        THREADS,
        deterministic_torch,
        generate_responses,
        save_model,
        teach_model,
        torch_version,
    )

    split = split_products(seed)
    for name, products in (("train", split.train), ("eval", split.held_out)):
        lines = "".join(json.dumps(product_entry(product)) + "\n" for product in products)
        (draft / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    lesson, prompts = split.lesson, [product.prompt for product in split.held_out]
    with reporter:
        taught = teach_model(lesson, seed=seed, updates=warm_updates, report=reporter.report, must_fit=must_fit)
    with deterministic_torch(seed):
        generator = torch.Generator().manual_seed(seed)
        sampled = generate_responses(taught.model, prompts, lesson.longest_answer, generator)
        greedy = generate_responses(taught.model, prompts, lesson.longest_answer, None)
    calls = tool_call_share(split.held_out, sampled)
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


def tool_call_share(products: tuple[Product, ...], said: list[str]) -> float:
    """The share of responses that begin with the call of their product."""
    return _share(text.startswith(f"{OPEN}{one.call}{CLOSE}") for one, text in zip(products, said, strict=True))


def _share(flags: Iterable[bool]) -> float:
    found = list(flags)
    return sum(found) / len(found)
