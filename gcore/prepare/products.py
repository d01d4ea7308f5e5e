"""The products of the calculator example: which there are, which are held out, and how two hands answer them.

A product is a three-digit and a two-digit number: "347*86=". There are 81,000, far more than a small model can learn by heart, and too
hard for it to work out. One hand answers at once ("29842"); the other writes what it wants worked out, between two texts, and is told
("<<347*86>>29842", of which it writes no more than "<<347*86>>"). The warm start sees both, mostly the first, so that the model asks
now and then and mostly guesses.

Products are drawn by a keyed hash, so that they are the same on every machine and for ever. Those of training, those that are held out
and those of the warm start are apart. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcore.prepare.lesson import Lesson, hashed_numbers

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


def entry(product: Product) -> dict[str, str]:
    """As a line of the data: the right answer is the number."""
    return {"prompt": product.prompt, "answer": product.result}
