"""The files of a model folder that describe how the model reads pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gcore.errors import DataError


class ModelFiles:
    """The files of a model folder that describe its pictures. Raises DataError for a file that cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_object(path / "config.json")
        self.family = str(self.config.get("model_type"))
        self.vision: Mapping[str, Any] = self.config.get("vision_config") or {}
        self.processor = _read_object(path / "processor_config.json", optional=True)
        nested = self.processor.get("image_processor")  # as transformers 5 saves it
        self.images: Mapping[str, Any] = (
            nested if isinstance(nested, dict) else _read_object(path / "preprocessor_config.json", optional=True)
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer, of the `tokenizers` library."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                "the model folder has no tokenizer.json", where=str(self.path), fix="Save the model with its tokenizer"
            )
        return Tokenizer.from_file(str(file))

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a text without adding special tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def token(self, token_id: int) -> str:
        """Return the text of a token; empty if the tokenizer does not have it."""
        return self.tokenizer.id_to_token(token_id) or ""

    def spell(self, token_id: int) -> str:
        """Return the characters of a token; not those by which the tokenizer names it."""
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))

    def known(self, *token_ids: int | None) -> frozenset[int]:
        """Return those of the tokens that are in the model's vocabulary."""
        inner = self.config.get("text_config")
        sizes = [part.get("vocab_size") for part in (self.config, inner) if isinstance(part, Mapping)]
        size = next((size for size in sizes if isinstance(size, int)), None)
        return frozenset(token for token in token_ids if token is not None and (size is None or token < size))

    def number(self, settings: Mapping[str, Any], name: str, default: int) -> int:
        """Return a positive whole number of `settings`. Raises DataError."""
        value = settings.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{name} is {value!r}, not a positive whole number")
        return value

    def mapping(self, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return an object of `settings`; empty if there is none."""
        value = settings.get(name)
        return value if isinstance(value, Mapping) else {}

    def token_id(self, names: Sequence[str], default: int) -> int:
        """Return the first of these tokens that the configuration names."""
        found = next((self.config[name] for name in names if isinstance(self.config.get(name), int)), default)
        return int(found)

    def error(self, what: str) -> DataError:
        """Return the error about a processor that cannot be used."""
        return DataError(
            f"the model's image processor cannot be used: {what}",
            where=str(self.path),
            fix="Save the model's processor there (processor.save_pretrained), or use another model",
        )


def _read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object; empty if it is optional and missing. Raises DataError."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read the file ({error})", where=str(path), fix="Save the model again") from error
    if not isinstance(value, dict):
        raise DataError("the file does not contain a JSON object", where=str(path), fix="Save the model again")
    return value
