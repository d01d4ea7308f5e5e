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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
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


def shuffle_exercises(exercises: Iterable[E], key: str) -> list[E]:
    """In the order of a hash, which no library's random generator can change."""
    return sorted(exercises, key=lambda e: hashlib.blake2b(f"{key} {e.prompt}".encode(), digest_size=16).digest())


def hashed_numbers(key: str) -> Iterator[int]:
    """Whole numbers below 2**64, without end, in the order of a hash that no library's random generator can change."""
    count = 0
    while True:
        yield int.from_bytes(hashlib.blake2b(f"{key} {count}".encode(), digest_size=8).digest(), "big")
        count += 1


# -------------------- tokens
# The tokenizers of the prepared models: one character, one token; no torch, no transformers.
#
# The characters of an alphabet, a padding token and an end of sequence. A prompt gets no special tokens. What is not of the
# alphabet has no token and is dropped by the tokenizer, and refused by `encode`. The files are written as the `tokenizers`
# library and `AutoTokenizer` read them.

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"

CONTEXT = 64
"""Tokens of a prompt and its response together, at most."""


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The characters in the order of their ids; behind them come padding and the end of sequence."""

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
        """Rounded up to a multiple of 16; the last ids have no token."""
        return -(-(len(self.characters) + 2) // 16) * 16

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Raises KeyError for a character that is not of the alphabet."""
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
