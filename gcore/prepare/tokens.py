"""The tokenizers of the prepared models: one character, one token; no torch, no transformers.

The characters of an alphabet, a padding token and an end of sequence. A prompt gets no special tokens. What is not of the
alphabet has no token and is dropped by the tokenizer, and refused by `encode`. The files are written as the `tokenizers`
library and `AutoTokenizer` read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
