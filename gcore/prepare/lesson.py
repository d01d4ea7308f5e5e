"""What a small model is taught: demonstrations by a careless hand, and prompts that are held out.

A *demonstration* is a prompt with two answers: the right one and the careless one, which are equal where carelessness does
no harm. A model that imitates a careless hand says the right thing sometimes and the wrong thing by preference, which is
what reinforcement learning can mend: nobody shows it the answers again, it is only told right or wrong.

Values and their sizes in characters, which are tokens here (`gcore.prepare.tokens`). Does not know any task
(`gcore.prepare.sums`, `gcore.prepare.starter_tasks`) and trains nothing (`gcore.prepare.teaching`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Exercise(Protocol):
    """A prompt with its right answer and what a careless hand makes of it."""

    @property
    def prompt(self) -> str:
        """What the model is shown."""
        ...

    @property
    def answer(self) -> str:
        """The right answer."""
        ...

    @property
    def careless_answer(self) -> str:
        """What the careless hand writes; the right answer where carelessness does no harm."""
        ...


E = TypeVar("E", bound=Exercise)


@dataclass(frozen=True, slots=True)
class Lesson:
    """`rows`: how many of each source are in a batch. `band`: the share of held-out prompts, greedy, at which to stop."""

    characters: str
    """Each is a token; what the prompts and answers are made of."""
    sources: tuple[tuple[Exercise, ...], ...]
    rows: tuple[int, ...]
    held_out: tuple[Exercise, ...]
    careless_share: float
    band: tuple[float, float]

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest answer of its source and the end of sequence."""
        return max(
            max(len(e.prompt) for e in source)
            + max(max(len(e.answer), len(e.careless_answer)) for e in source)
            + 1  # the end of sequence
            for source in self.sources
        )

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest right answer to a held-out prompt, with the end of sequence."""
        return max(len(e.answer) for e in self.held_out) + 1


def to_jsonl(exercises: Iterable[Exercise]) -> str:
    """One JSON object a line, with `prompt` and `answer`, both strings."""
    return "".join(json.dumps({"prompt": e.prompt, "answer": e.answer}) + "\n" for e in exercises)


def shuffled(exercises: Iterable[E], key: str) -> list[E]:
    """In the order of a hash, which no library's random generator can change."""
    return sorted(exercises, key=lambda e: hashlib.blake2b(f"{key} {e.prompt}".encode(), digest_size=16).digest())


def hashed_numbers(key: str) -> Iterator[int]:
    """Whole numbers below 2**64, without end, in the order of a hash that no library's random generator can change."""
    count = 0
    while True:
        yield int.from_bytes(hashlib.blake2b(f"{key} {count}".encode(), digest_size=8).digest(), "big")
        count += 1
