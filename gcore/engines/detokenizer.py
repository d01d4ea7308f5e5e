"""Tokenizer of an engine: text to tokens, tokens to text, and where a stop string ends a sample.

Uses the fast tokenizer's file alone (`tokenizer.json`): no torch, no transformers.
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
    """A model folder's tokenizer.

    Whether a stop string has come up is asked only when a token could have completed one, that is, when its text
    holds the last character of one; for each set of stop strings that is one table over the vocabulary, made once.
    Byte-level tokens that are no whole character on their own are always suspects.

    Uses the fast tokenizer's file alone (`tokenizer.json`): no torch, no transformers.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Detokenizer | None:
        """The folder's tokenizer; None when it has none (then the engine takes and gives token ids only)."""
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
        """Tokens of a prompt, with the special tokens that the tokenizer adds by itself."""
        # `encode` holds on to the interpreter while it works; a batch, even of one, lets it go.
        return tuple(self._tokenizer.encode_batch_fast([text])[0].ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a response."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @property
    def highest_token(self) -> int:
        """The largest token id; -1 when there is none."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def token(self, number: int) -> str | None:
        """The name of a token."""
        name: str | None = self._tokenizer.id_to_token(number)
        return name

    def suspects(self, stop: tuple[str, ...], vocabulary: int) -> npt.NDArray[np.bool_]:
        """Over all token ids: whether a sequence may meet one of `stop` with this token."""
        last = {s[-1] for s in stop}
        known = [i for i in range(vocabulary) if self._tokenizer.id_to_token(i) is not None]
        alone = self._tokenizer.decode_batch([[i] for i in known], skip_special_tokens=False)
        # Some tokenizers drop a leading space: what a token adds shows only behind another one.
        anchor = known[0] if known else 0
        before = self.decode([anchor], skip_special_tokens=False)
        behind = self._tokenizer.decode_batch([[anchor, i] for i in known], skip_special_tokens=False)
        table = np.zeros(vocabulary, dtype=np.bool_)
        for token, own, both in zip(known, alone, behind, strict=True):
            table[token] = REPLACEMENT in own + both or any(c in own or both.count(c) > before.count(c) for c in last)
        return table

    def met(self, stop: tuple[str, ...], tail: Sequence[int]) -> str | None:
        """The stop string that stands first in the text of `tail`, if any."""
        text = self.decode(tail, skip_special_tokens=False)
        found = [(text.find(s), s) for s in stop if s in text]
        return min(found)[1] if found else None


def tail_length(stop: tuple[str, ...]) -> int:
    """Tokens at the end of a sample that surely hold a stop string that its last token completed.

    A character may take four tokens, and a few tokens have no text at all.
    """
    return 4 * max(len(s) for s in stop) + 8


def cut_before(text: str, stop: str) -> str:
    """The text before the stop string."""
    return text.partition(stop)[0]


def stable_text(text: str, stop: Sequence[str]) -> str:
    """The part of a growing text that stays, whatever comes.

    A character that is not whole yet stands there as a replacement, and the beginning of a stop string may become one.

    What of a growing text may be told.
    """
    text = text.rstrip("\ufffd")
    longest = 0
    for one in stop:
        for length in range(min(len(one) - 1, len(text)), longest, -1):
            if text.endswith(one[:length]):
                longest = length
                break
    return text[: len(text) - longest]
