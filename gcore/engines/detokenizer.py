"""Tokenizer of an engine: converts text to tokens and tokens to text, and finds stop strings in generated tokens.

Reads only the file of the fast tokenizer (`tokenizer.json`). Does not import torch or transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from gcore.errors import DataError

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The tokenizer of a model folder.

    A stop string is searched only after a token that could have completed one (`suspects`): its text contains the last
    character of a stop string, or it is a byte-level token that is no complete character on its own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Detokenizer | None:
        """Load the tokenizer of a model folder. Returns None if the folder has none; the engine then accepts and
        returns only token IDs. Raises DataError.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise DataError(
                f"cannot read the tokenizer ({error})", where=str(file), fix="Save the model's tokenizer again"
            ) from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, including the special tokens that the tokenizer adds by itself."""
        # `encode` holds the GIL while it works; a batch, even of one, releases it.
        return tuple(self._tokenizer.encode_batch_fast([text])[0].ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `tokens`."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Return the ID of the token that the vocabulary lists as `token`; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @property
    def highest_token(self) -> int:
        """The largest token ID; -1 for an empty vocabulary."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def token(self, number: int) -> str | None:
        """Return the vocabulary entry of a token ID; None for an unknown ID."""
        name: str | None = self._tokenizer.id_to_token(number)
        return name

    def suspects(self, stop: tuple[str, ...], vocabulary: int) -> npt.NDArray[np.bool_]:
        """Return for each token ID below `vocabulary` whether this token may complete one of the strings `stop`.

        Shape (vocabulary,). Costs two decodes per token: compute it once per set of stop strings.
        """
        last = {s[-1] for s in stop}
        known = [i for i in range(vocabulary) if self._tokenizer.id_to_token(i) is not None]
        alone = self._tokenizer.decode_batch([[i] for i in known], skip_special_tokens=False)
        # Some tokenizers drop a leading space: the text added by a token is visible only after another token.
        anchor = known[0] if known else 0
        before = self.decode([anchor], skip_special_tokens=False)
        behind = self._tokenizer.decode_batch([[anchor, i] for i in known], skip_special_tokens=False)
        table = np.zeros(vocabulary, dtype=np.bool_)
        for token, own, both in zip(known, alone, behind, strict=True):
            table[token] = REPLACEMENT in own + both or any(c in own or both.count(c) > before.count(c) for c in last)
        return table

    def met(self, stop: tuple[str, ...], tail: Sequence[int]) -> str | None:
        """Return the stop string that occurs first in the text of the tokens `tail`; None if there is none."""
        text = self.decode(tail, skip_special_tokens=False)
        found = [(text.find(s), s) for s in stop if s in text]
        return min(found)[1] if found else None


def tail_length(stop: tuple[str, ...]) -> int:
    """Return how many tokens at the end of a sample must be decoded to find a stop string completed by the last one.

    An upper bound: a character may take four tokens, and a few tokens have no text at all.
    """
    return 4 * max(len(s) for s in stop) + 8


def cut_before(text: str, stop: str) -> str:
    """Return the part of `text` before the first occurrence of `stop`; all of `text` if it does not occur."""
    return text.partition(stop)[0]


def stable_text(text: str, stop: Sequence[str]) -> str:
    """Return the part of a growing text that later tokens cannot change; only this part may be streamed.

    Removes from the end an incomplete character (decoded as U+FFFD), and the beginning of a stop string, which later
    tokens may complete.
    """
    text = text.rstrip("\ufffd")
    longest = 0
    for one in stop:
        for length in range(min(len(one) - 1, len(text)), longest, -1):
            if text.endswith(one[:length]):
                longest = length
                break
    return text[: len(text) - longest]
