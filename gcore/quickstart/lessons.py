"""Training data (lessons) for small models: demonstrations with some careless answers, held-out prompts, and a
character tokenizer.

A *demonstration* is a prompt with the right or the careless answer; for some prompts they are equal. A model that
imitates mostly careless demonstrations is sometimes right and prefers to be wrong, which reinforcement learning can
improve. A judge's lesson has no careless demonstrations; `VerdictAccuracy` has the accuracy of its verdicts.

The tokenizer has one token per character, a padding token and an end of sequence. Prompts get no special tokens. The
tokenizer drops characters outside the alphabet; `encode` raises for them. The files work with the `tokenizers` library
and `AutoTokenizer`. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from gcore.errors import DataError


class Exercise(Protocol):
    """A prompt with its right answer and its careless answer."""

    @property
    def prompt(self) -> str:
        """The model's input."""
        ...

    @property
    def answer(self) -> str:
        """The right answer."""
        ...

    @property
    def careless_answer(self) -> str:
        """The careless answer; equal to the right one for some prompts."""
        ...


E = TypeVar("E", bound=Exercise)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Training data of a small model. `sources`: sets of exercises; `rows`: how many of each set are in a batch.

    `held_out`: exercises on which accuracy is measured. `careless_share`: share of demonstrations with the careless
    answer. `band`: range of the greedy accuracy on held-out prompts that the trained model shall have.
    """

    characters: str
    """The characters of prompts and answers. Each is one token."""
    sources: tuple[tuple[Exercise, ...], ...]
    rows: tuple[int, ...]
    held_out: tuple[Exercise, ...]
    careless_share: float
    band: tuple[float, float]

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row: prompt, answer of the same source, and end of sequence."""
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


@dataclass(frozen=True, slots=True)
class VerdictAccuracy:
    """Accuracy of a judge's verdicts. `accuracy`: share of right verdicts. `false_yes`: share of wrong responses called right;
    a policy learns to exploit these."""

    accuracy: float
    false_yes: float

    def reaches(self, needed: VerdictAccuracy) -> bool:
        """Whether the verdicts are at least as good."""
        return self.accuracy >= needed.accuracy and self.false_yes <= needed.false_yes

    def require(self, needed: VerdictAccuracy, judged: str, updates: int, seed: int) -> None:
        """Raise DataError if the verdicts are not as good. `judged`: what the judge assesses, in the plural. `updates`:
        optimizer updates of its training."""
        if not self.reaches(needed):
            raise DataError(
                f"after {updates} updates, {self.accuracy:.1%} of the judge's verdicts are right and {self.false_yes:.1%} of "
                f"wrong {judged} are called right; it needs at least {needed.accuracy:.0%} and at most {needed.false_yes:.0%}",
                where=f"seed {seed}",
                fix="Use another seed",
            )


def to_jsonl(exercises: Iterable[Exercise]) -> str:
    """Return JSON lines with the strings `prompt` and `answer`."""
    return "".join(json.dumps({"prompt": e.prompt, "answer": e.answer}) + "\n" for e in exercises)


def shuffle_exercises(exercises: Iterable[E], key: str) -> list[E]:
    """Return the exercises in a random order that depends only on `key` and the prompts (a hash, not a library's random
    generator)."""
    return sorted(exercises, key=lambda e: hashlib.blake2b(f"{key} {e.prompt}".encode(), digest_size=16).digest())


def hashed_numbers(key: str) -> Iterator[int]:
    """Yield random integers below 2**64 without end. They depend only on `key` (a hash, not a library's random
    generator)."""
    count = 0
    while True:
        yield int.from_bytes(hashlib.blake2b(f"{key} {count}".encode(), digest_size=8).digest(), "big")
        count += 1


PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"

CONTEXT = 64
"""Maximum tokens of a prompt with its response."""


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The token ids of a character tokenizer: `characters` in the order of their ids, then padding and end of sequence."""

    characters: str

    @property
    def pad(self) -> int:
        """The id of the padding token."""
        return len(self.characters)

    @property
    def eos(self) -> int:
        """The id of the end of sequence."""
        return len(self.characters) + 1

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids of the model, rounded up to a multiple of 16; the last ids have no token."""
        return -(-(len(self.characters) + 2) // 16) * 16

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Raises KeyError for a character outside the alphabet."""
        ids = {character: i for i, character in enumerate(self.characters)}
        return [ids[character] for character in text]


def save_tokenizer(alphabet: Alphabet, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json into `folder`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {character: i for i, character in enumerate(alphabet.characters)}
    tokenizer = Tokenizer(models.WordLevel({**ids, PAD_TOKEN: alphabet.pad, EOS_TOKEN: alphabet.eos}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD_TOKEN, special=True), AddedToken(EOS_TOKEN, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN}
    _write(folder / "special_tokens_map.json", special)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            **special,
        },
    )
    _write(folder / "generation_config.json", {"eos_token_id": alphabet.eos, "pad_token_id": alphabet.pad})


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
