"""The tokenizer of the arithmetic example: one character, one token; no torch, no transformers.

Ten digits, "+", "=", a padding token and an end of sequence. A prompt gets no special tokens. What is not one of the twelve
characters has no token and is dropped by the tokenizer, and refused by `encode`. The files are written as the
`tokenizers` library and `AutoTokenizer` read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

CHARACTERS = "0123456789+="
PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
PAD, EOS = len(CHARACTERS), len(CHARACTERS) + 1
VOCABULARY_SIZE = 16
"""Rounded up; the last two ids have no token."""

LONGEST_PROMPT = 6
LONGEST_RESPONSE = 5
"""In tokens, of a wide sum: "999+9=", and "1008" with the end of sequence. Others are one token shorter, each."""

_IDS = {character: i for i, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """The ids of `text`. Raises KeyError for another character."""
    return [_IDS[character] for character in text]


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json into `folder`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({**_IDS, PAD_TOKEN: PAD, EOS_TOKEN: EOS}, unk_token=None))
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
            "model_max_length": 64,
            "clean_up_tokenization_spaces": False,
            **special,
        },
    )
    _write(folder / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
