"""Sources of prompts for tests: a data file, a tokenizer of words, and their section of a spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from gcore.config import parse_spec
from gcore.config.data import ResolvedSource
from gcore.config.spec import training_sources
from gcore.data.dataset import Dataset
from gcore.data.renderer import PromptRenderer
from gcore.data.stream import PromptSource
from gcore.data.tokenizer import ModelTokenizer

WORDS = {word: number for number, word in enumerate(["?", *map(str, range(30)), "+", "="])}


def word_tokenizer() -> ModelTokenizer:
    """One token a word; `?` stands for what it does not know."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return ModelTokenizer(tokenizer, special_tokens={"unk_token": "?"}, settings={}, max_length=64)


def spec_tree(data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A spec with that `data`, as small as it gets."""
    tree: dict[str, Any] = {"name": "j", "model": {"path": "m"}, "data": data}
    return tree | {"flow": {"steps": 1}, "rollout": {"max_new_tokens": 4}} | sections


def source(**fields: Any) -> ResolvedSource:
    """A source as a spec resolves it."""
    given = {"name": "data", "path": "data.jsonl", "prompt": "q"} | fields
    return training_sources(parse_spec(spec_tree({"sources": [given]})))[0]


def open_source(folder: Path, prompts: list[Any], *, limit: int | None = None, **fields: Any) -> PromptSource:
    """A source of those prompts, in a file of its own; entry i has answer i."""
    declared = source(**fields)
    path = folder / f"{declared.name}.jsonl"
    path.write_text("".join(json.dumps({"q": p, "answer": i}) + "\n" for i, p in enumerate(prompts)))
    renderer = PromptRenderer(word_tokenizer(), None, where="model")
    return PromptSource(declared, Dataset.open(path, prompt_field="q"), renderer, limit)
