"""The calculator example: products, held-out products, and a model that sometimes calls a tool for products it cannot compute.

`prepare_calculator` makes one folder (`gcore.quickstart.folder`):

    train.jsonl, eval.jsonl    prompts and answers; no product is in both
    model/                     a qwen3 of 1.0M parameters with its own tokenizer (`gcore.quickstart.pretraining`)
    manifest.json              the recipe, and size and hash of every other file

The same recipe, seed and number of updates give the same bytes on the same machine and torch version. Across machines the data is equal,
and the model differs by rounding. The specs are in examples/calculator.

A product is a three-digit and a two-digit number: "347*86=". There are 81,000, too many to memorize. Some demonstrations answer at once
("29842"); the others call the calculator first ("<<347*86>>29842", of which the model writes "<<347*86>>"). Most demonstrations of the warm
start answer at once, so the model calls the calculator only sometimes. A keyed hash generates products; those of training, evaluation and
the warm start are disjoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore.errors import DataError
from gcore.quickstart.folder import PreparedFolder, PreparedManifest, Recipe, Reporter, make_or_find
from gcore.quickstart.lessons import Lesson, hashed_numbers

CHARACTERS = "0123456789*=<>"
OPEN, CLOSE = "<<", ">>"

GUESS_SHARE = 0.7
"""Share of demonstrations that answer without the tool."""

TRAINED, HELD_OUT, WARM = 2048, 256, 8192
"""Number of products for training, evaluation and the warm start."""

ANY = (0.0, 1.0)
"""Range of the greedy accuracy that the warm-started model shall have: no limits, because the accuracy without the tool
does not show how well the model calls it."""


@dataclass(frozen=True, slots=True)
class Product:
    """The product `left * right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The model's input: seven characters."""
        return f"{self.call}="

    @property
    def call(self) -> str:
        """The text of the tool call."""
        return f"{self.left}*{self.right}"

    @property
    def result(self) -> str:
        """The result of the tool call."""
        return str(self.left * self.right)

    @property
    def answer(self) -> str:
        """The text of a demonstration that calls the tool, including the tool's result."""
        return f"{OPEN}{self.call}{CLOSE}{self.result}"

    @property
    def careless_answer(self) -> str:
        """The text of a demonstration that answers without the tool."""
        return self.result


@dataclass(frozen=True, slots=True)
class ProductSplit:
    """Products for training, evaluation and the warm start, without overlap."""

    train: tuple[Product, ...]
    held_out: tuple[Product, ...]
    warm: tuple[Product, ...]

    @property
    def lesson(self) -> Lesson:
        """The training data of the warm start."""
        return Lesson(CHARACTERS, (self.warm,), (64,), self.held_out, GUESS_SHARE, ANY)


def split_products(seed: int) -> ProductSplit:
    """Generate the products of each part. `seed` decides which they are and their order."""
    found: dict[tuple[int, int], Product] = {}
    numbers = hashed_numbers(f"products {seed}")
    while len(found) < TRAINED + HELD_OUT + WARM:
        number = next(numbers)
        product = Product(100 + number % 900, 10 + number // 900 % 90)
        found.setdefault((product.left, product.right), product)
    every = tuple(found.values())
    return ProductSplit(every[:TRAINED], every[TRAINED : TRAINED + HELD_OUT], every[TRAINED + HELD_OUT :])


def product_entry(product: Product) -> dict[str, str]:
    """Return a product as a data entry. The expected answer is the number."""
    return {"prompt": product.prompt, "answer": product.result}


RECIPE = 1
"""Increase it with every change of the prepared content, so that folders of an older recipe are prepared again."""

WARM_UPDATES = 400

CALLS = (0.1, 0.6)
"""Range of the share of sampled responses that call the tool correctly. Below it RL finds no examples; above it little is left to learn."""


class CalculatorManifest(PreparedManifest):
    """The manifest of the calculator example. `calls`: share of sampled responses to held-out products with a correct
    tool call. `greedy_accuracy`: share of greedy responses that are right without the tool. Both before RL."""

    example: Literal["calculator"] = "calculator"
    warm_updates: int
    calls: float
    greedy_accuracy: float


def prepare_calculator(
    to: Path, *, seed: int = 0, progress: bool = True, warm_updates: int = WARM_UPDATES, must_fit: bool = True
) -> PreparedFolder[CalculatorManifest]:
    """Prepare the example in the folder `to`, or reuse it if it is there.

    `warm_updates`: optimizer updates of the warm start. `must_fit`: require a correct tool call in 10 % to 60 % of
    sampled responses. Raises DataError if the share is outside, if `to` is something other than a prepared example, or
    if it cannot be written.
    """

    def fill(draft: Path) -> CalculatorManifest:
        return _fill(draft, seed, warm_updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit)

    asked = {"recipe": RECIPE, "seed": seed, "warm_updates": warm_updates}
    return make_or_find(to, Recipe("calculator", CalculatorManifest, asked, fill))


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
            f"after {warm_updates} updates, {calls:.1%} of responses call the tool correctly, not {low:.0%} to {high:.0%}",
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
    """Return the share of responses that begin with the correct tool call."""
    return _share(text.startswith(f"{OPEN}{one.call}{CLOSE}") for one, text in zip(products, said, strict=True))


def _share(flags: Iterable[bool]) -> float:
    found = list(flags)
    return sum(found) / len(found)
